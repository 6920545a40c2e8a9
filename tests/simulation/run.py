"""The simulation: the real client, publisher, engine, sender, group, election and subscriber, on a simulated bus, by a
seed.

The theory. One seed draws everything: the kind of bus, whether the members publish what comes to them or are an engine
that reads it, perhaps from another bus, and how many there are, how fast inputs are, which accidents happen when, every
delay, and who of the processes has the next turn of the one loop. So a run is a history that can be had again, and a
thousand runs are a thousand histories that no clock was needed for.

What is checked. All along: each subscriber's user gets 1, 2, 3, ... with the rows of its id; nothing is told as missed,
different or bad; one that restarts goes on behind what it, or another reader of its group, confirmed, or was confirming
when it died; in the moment in which a delivery says acked or covered, or a flush or a hand-over returns, the block and
all before it stand on the log, or in every subscriber's queue; what is cancelled has done nothing by half. Members of
an engine take prefixes of one order, in which each block of each input stands once and in its place, timers stand where
they are due, and time does not go back; what subscribers get is what that order yields (computation.py). All of that
holds too where members, or all of them at once, are restarted from snapshots, of which some are torn, or the only way
back because retention took what was before. At the end, when the faults have stopped: within `PATIENCE` virtual seconds
every subscriber has every block, every member that lives has every block acknowledged or covered, and one member leads,
the same one for a while.

    python -m tests.simulation --seeds 10000      as many runs; the first failure is told with its seed
    python -m tests.simulation --seed 4711        one run with its history
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from esp_pubsub.engine import inputs, snapshots, written
from esp_pubsub.engine.opening import log_of
from esp_pubsub.engine.order_topic import switch
from esp_pubsub.engine.restoring import newest_place
from esp_pubsub.errors import EspError
from esp_pubsub.failover import join
from esp_pubsub.publisher import source_number
from esp_pubsub.testing._sim_bus import Broker, SimBus, SimFeed, SimPipe
from esp_pubsub.testing._virtual import PROCESS, Stuck, VirtualLoop
from tests.model.explorer import Broken
from tests.model.judges import Standing

from .computation import OneOrder, script
from .engines import INPUT_WINDOWS, ORDER, OUTPUT_WINDOWS, EngineProcess, FeedProcess, harm_snapshots
from .forger import FORGED, Forger
from .plan import OF_MEMBERS, Accident, Plan, all_accidents, draw
from .processes import (
    LATEST,
    WINDOW,
    Content,
    LateProcess,
    MemberProcess,
    Process,
    Readership,
    SubscriberProcess,
    Window,
    row,
)
from .programs import Program
from .programs import draw as draw_program

PATIENCE = 40.0
CONTROL = "sim:5555/M/F/g"
_QUIET = 1.0
_EPOCH = 1_700_000_000_000_000
_MEMORY = Path("/dev/shm")  # no disk has to be waited for


class Wrong(AssertionError):
    """What a run found that must not be."""


@dataclass
class Run:
    """One history."""

    plan: Plan
    loop: VirtualLoop = field(init=False)
    broker: Broker = field(init=False)
    errors: list[str] = field(default_factory=list)
    dying: int = 0
    snapshots: Path | None = None
    """Where the members' snapshots are, if they take any."""
    has_trimmed: bool = False
    """Whether retention took something."""

    def __post_init__(self) -> None:
        self.loop = VirtualLoop(random.Random(self.plan.seed + 1))  # type: ignore[abstract]  # it has what the SDK calls
        self.broker = Broker(self.loop, self.plan.kind, deaths=self.plan.deaths)
        self.broker.log_bytes = self.plan.entry_bytes
        self.input_broker, self.brokers = self.broker, [self.broker]
        if self.plan.engine and self.plan.input_kind is not None:
            self.input_broker = Broker(self.loop, self.plan.input_kind, deaths=self.plan.deaths)
            self.brokers.append(self.input_broker)
        self.windows = OUTPUT_WINDOWS if self.plan.engine else (WINDOW,)
        self.inputs = INPUT_WINDOWS[: self.plan.inputs] if self.plan.engine else ()
        self.scripts = {each.name: script(self.plan.seed + 5 + each.at, self.plan.blocks) for each in self.inputs}
        dice = random.Random(self.plan.seed + 6)
        self.program = draw_program(dice, timers=self.plan.timers) if self.plan.random_model else Program()
        self.order = OneOrder(self, self.scripts, self.program, timers=self.plan.timers)
        self.clocks = dict(zip("ABC", self.plan.clocks, strict=False))
        self.offsets = set(self.plan.clocks)
        self.feeders = [FeedProcess(self, each, self.plan.pace[each.at]) for each in self.inputs]
        self.members = [
            EngineProcess(self, "ABC"[at]) if self.plan.engine else MemberProcess(self, "ABC"[at], pace)
            for at, pace in enumerate(self.plan.pace)
        ]
        self.subscribers = [
            SubscriberProcess(self, f"{'ST'[window.at]}{at}{'ab'[reader]}-", readership, window)
            for window in self.windows
            for at in range(self.plan.subscribers)
            for readership in [Readership(f"readers{at}" if self.plan.grouped else None)]
            for reader in range(self.plan.readers)
        ]
        self.standing: defaultdict[tuple[str, str], Standing] = defaultdict(
            lambda: Standing(suffix_only=self.broker.capabilities.suffix_only)
        )
        self.forger = Forger(
            self.broker,
            ORDER.removesuffix("/order") if self.plan.engine else CONTROL,
            [each.topic for each in self.windows],
            ORDER if self.plan.engine else None,
            self.plan.seed + 9,
        )
        self.late = [LateProcess(self, "LK"[window.at], window) for window in self.windows]

    def tell(self, text: str) -> None:
        """Write the history."""
        self.loop.tell(text)

    def wrong(self, text: str) -> None:
        """Something must not be; once the world has ended, nothing is wrong any more."""
        if self.broker.ended:
            return
        self.tell(f"WRONG: {text}")
        self.errors.append(text)

    def clock(self) -> int:
        """What time it is for the process at hand: microseconds since the epoch, by its own clock."""
        return _EPOCH + int(1e6 * (self.loop.time() + self.clocks[PROCESS.get()[0]]))

    @property
    def clocks_say(self) -> tuple[int, int]:
        """What time it is at least and at most, by any clock that there was."""
        at = _EPOCH + int(1e6 * self.loop.time())
        return at + int(1e6 * min(self.offsets)), at + int(1e6 * max(self.offsets))

    def content(self, window: Window, id: int) -> Content | None:
        """What a block says; None for one that nobody can have built."""
        if not self.plan.engine:
            return [(1, 0, row(id))]
        emitted = self.order.emitted[window.name]
        return emitted[id - 1] if id <= len(emitted) else None

    def last(self, window: Window) -> int | None:
        """The last block of a window, once that is known."""
        if not self.plan.engine:
            return self.plan.blocks
        return len(self.order.emitted[window.name]) if self.order.is_complete else None

    def must_stand(self, topic: str, id: int, because: str) -> None:
        """This block and all before it are on the log, or in the queue of every subscriber that came first, now."""
        if self.broker.ended:
            return
        found = self.broker.topic(topic)
        queues = {name: queue.came for name, queue in found.queues.items() if name.startswith("readers")}
        for where, came in queues.items() if self.plan.kind == "queues" else [("the log", found.log)]:
            try:
                last = self.standing[topic, where].read(came)
            except Broken as broken:
                self.wrong(f"{because}; in {where} {broken}")
                return
            if last < id:
                self.wrong(f"{because}; {where} has only the blocks up to {last}")

    def go(self) -> None:
        """Run it. Raises Wrong."""
        with self._seeded():
            try:
                self.loop.run(self._all(), LATEST)
            except Stuck as stuck:
                self.wrong(str(stuck))
            for broker in self.brokers:
                broker.ended = True
            try:
                self.loop.end()
            except Stuck as stuck:
                self.errors.append(f"when its world ended: {stuck}")
        self.errors += self.loop.problems
        if self.errors:
            raise Wrong(f"seed {self.plan.seed}: {self.errors[0]}")

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """The code under test draws from `random`, and what it logs belongs to the history."""
        before, log = random.getstate(), logging.getLogger("esp_pubsub")
        level, log.propagate = log.level, False
        handler = _ToHistory(self)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        random.seed(self.plan.seed + 2)
        try:
            with contextlib.ExitStack() as stack:
                self._set_up(stack)
                yield
        finally:
            random.setstate(before)
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = True

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        """Clocks, numbers and files are those of this world, as long as it runs."""
        drawn = SimpleNamespace(randbits=random.getrandbits)
        for module, name, value in (
            (written, "wall_clock", self.clock),
            (inputs, "_AHEAD_BLOCKS", self.plan.ahead),
            (join, "secrets", drawn),
            (snapshots, "secrets", drawn),
            (snapshots, "time", SimpleNamespace(time=self.loop.time)),
            (snapshots, "_create", self._stamped(snapshots._create)),
            (snapshots, "_append", self._stamped(snapshots._append)),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        if self.plan.engine and self.plan.snapshots:
            place = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
            self.snapshots = Path(stack.enter_context(place))

    def _stamped(self, write: Callable[..., None]) -> Callable[..., None]:
        """A file is as old as this world's clock says."""

        def stamped(file: Path, *what: Any) -> None:
            write(file, *what)
            os.utime(file, (self.loop.time(), self.loop.time()))

        return stamped

    async def _all(self) -> None:
        for subscriber in self.subscribers:
            subscriber.start()
        if self.plan.kind == "queues":  # a queue sees what comes after it
            while len(self.broker.open) < len(self.subscribers):
                await self.broker.news()
        if self.plan.prefilled and self.input_broker.kind != "queues":
            await self._fill()
        for member in self.members:
            member.start()
        self._set_faults(self.plan.faults)
        self.loop.spawn("bus", self._feed())
        if self.plan.late is not None:
            for late in self.late:
                self.broker.never_away.add(f"{late.name}1")
                self.loop.in_bus(self.plan.late, late.start)
        for accident in all_accidents(self.plan):
            await asyncio.sleep(max(0.0, accident.at - self.loop.time()))
            if accident.what in FORGED:
                self.tell(f"somebody forges: {accident.what}")
                self.forger.forge(accident.what)
            else:
                self._happens(accident)
        await asyncio.sleep(max(0.0, self.plan.calm_after - self.loop.time()))
        self._set_faults(0.0)
        self.tell("no more faults")
        await self._everything_comes()

    def _set_faults(self, share: float) -> None:
        for broker in self.brokers:
            broker.faults = share

    async def _fill(self) -> None:
        for feeder in self.feeders:
            feeder.pace = 0.0
            feeder.start()
        while not all(feeder.is_through for feeder in self.feeders):  # noqa: ASYNC110  # what it looks at tells nobody
            await asyncio.sleep(0.01)

    async def _feed(self) -> None:
        """Publish the input; to a queue, once it is there, for it sees only what comes after it."""
        for feeder in self.feeders:
            while self.input_broker.kind == "queues" and not self.input_broker.topic(feeder.window.topic).queues:
                await self.input_broker.news()
            if not feeder.starts:
                feeder.start()

    def _happens(self, accident: Accident) -> None:
        self.tell(f"{accident.what} {accident.who} for {accident.seconds} s")
        member = self.members[accident.who % len(self.members)]
        seconds, what = accident.seconds, accident.what
        process = self._whose(accident)
        broker = self.brokers[accident.who // 2 % len(self.brokers)]
        if what == "stall":
            broker.stalled_until = self.loop.time() + seconds
        elif what == "slow":
            broker.slow_until = self.loop.time() + seconds
        elif what == "hand over":
            member.hand_over()
        elif what == "switch":
            self.loop.spawn("operator", self._switch("12"[accident.who % 2]))
        elif "the input" in what:
            self._interrupt(accident)
        elif what in OF_MEMBERS and isinstance(member, EngineProcess):
            self._happens_to_engine(member, accident)
        elif what.startswith("freeze"):
            self.freeze(process, seconds)
        elif what.startswith("cut"):
            (broker if process is member else process.broker).cut(process.process, seconds)  # of two, one
        else:
            for victim in self.members if what.startswith("kill all") else [process]:
                self.kill(victim, seconds)

    def _whose(self, accident: Accident) -> Process:
        kinds: dict[str, Sequence[Process]] = {"subscriber": self.subscribers, "feeder": self.feeders}
        among = next((some for kind, some in kinds.items() if kind in accident.what), self.members)
        return among[accident.who % len(among)]

    def _interrupt(self, accident: Accident) -> None:
        """The input of a publisher, or of all members of an engine, comes later, or stops for good, or for a while."""
        if self.plan.engine:
            feeder = self.feeders[accident.who % len(self.feeders)]
            if accident.what == "pause the input":
                feeder.pause = accident.seconds
            else:
                self.freeze(feeder, accident.seconds)
            return
        member = self.members[accident.who % len(self.members)]
        if accident.what == "pause the input":
            member.pause = accident.seconds
        else:
            member.stopped = member.stopped or sum(not other.stopped for other in self.members) > 1

    async def _switch(self, to: str) -> None:
        """Have another version of the model run, or the same one."""
        assert self.snapshots is not None
        with contextlib.suppress(EspError):
            orders, engine = await log_of(SimBus(self.broker, "operator")), source_number(ORDER.removesuffix("/order"))
            start = await newest_place(orders, ORDER, engine, 0, self.snapshots)
            await switch(orders, ORDER, 0, to, start)

    def _happens_to_engine(self, member: EngineProcess, accident: Accident) -> None:
        one, seconds = accident.who // 2, accident.seconds
        match accident.what:
            case "close":
                member.close(seconds)
            case "a long step":
                member.takes_long = True
            case "tear a snapshot" | "retention":
                self.loop.run_in_executor(None, harm_snapshots, self, accident.what, accident.who)  # files block
            case "set the clock":
                self.clocks[member.name] = (-3_600.0, -1.0, 1.0, 3_600.0)[accident.who % 4]
                self.offsets.add(self.clocks[member.name])
            case "cut a line":
                self.broker.cut_topic(member.process, self.windows[one % len(self.windows)].topic, seconds)
            case "hang an input":
                self.broker.hang_topic(member.process, self.inputs[one % len(self.inputs)].topic, 3 * seconds)
            case "cut an input":
                topic = self.inputs[one % len(self.inputs)].topic
                self.input_broker.cut_topic(member.process, topic, seconds, SimFeed)
            case _:
                what = SimFeed if "reader" in accident.what else SimPipe
                self.broker.cut_topic(member.process, ORDER, seconds, what)

    def freeze(self, process: Process, seconds: float) -> None:
        """It stands still for a while."""
        if process.alive:
            name = process.process
            self.loop.frozen.add(name)
            self.loop.in_bus(seconds, self._thaw, name)

    def _thaw(self, name: str) -> None:
        if name not in self.broker.dead:
            self.tell(f"{name} goes on")
            self.loop.frozen.discard(name)

    def kill(self, process: Process, seconds: float) -> None:
        """End a process, and start it again after a while."""
        if process.alive and not self.broker.ended:
            process.kill()
            self.dying += 1
            self.loop.in_bus(seconds, self._restart, process)

    def _restart(self, process: Process) -> None:
        self.dying -= 1
        process.start()

    async def _everything_comes(self) -> None:
        """Progress. In the end one member leads, and goes on leading."""
        until = self.loop.time() + PATIENCE
        everybody: list[Process] = [*self.subscribers, *self.members, *self.feeders]
        if self.plan.late is not None:
            everybody += self.late
        quiet_since, leader = self.loop.time(), ""
        while True:
            await asyncio.sleep(0.05)
            now, leading = self.loop.time(), " ".join(m.process for m in self.members if m.leads)
            if leading != leader or " " in leading or not leading:
                quiet_since, leader = now, leading
            through = not self.dying and all(one.is_through for one in everybody)
            quiet = now - quiet_since >= _QUIET or self.plan.all_lead
            if through and quiet:
                self.order.check_whole()
            if self.errors or (through and quiet):
                return
            for member in self.members:
                if member.waits_for_its_input:
                    member.kill()
            if now > until:
                late = [f"{one.process} at {self._where(one)}" for one in everybody if not one.is_through]
                self.wrong(f"after {PATIENCE:g} s: {', '.join(late) or 'all is there'}; leading: {leading or 'nobody'}")
                return

    def _where(self, process: Process) -> str:
        if isinstance(process, SubscriberProcess):
            return str(process.last)
        return process.where if isinstance(process, MemberProcess) else ""


class _ToHistory(logging.Handler):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def emit(self, record: logging.LogRecord) -> None:
        self.run.tell(f"{PROCESS.get()} logs {record.getMessage()}")


def run(seed: int, **changes: Any) -> Run:
    """One history, checked; `changes` are to the plan of the seed. Raises Wrong."""
    one = Run(replace(draw(seed), **changes))
    one.go()
    return one


def replay(seed: int) -> int:
    """Print the history of a seed."""
    one = Run(draw(seed))
    failed = ""
    try:
        one.go()
    except Wrong as wrong:
        failed = str(wrong)
    print(one.plan)
    print("\n".join(one.loop.told))
    print(failed or f"seed {seed} is as it should be")
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description="Run the simulation.")
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--all", action="store_true", help="do not stop at the first failure")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        return replay(given.seed)
    began, failed, virtual, turns, blocks = time.perf_counter(), 0, 0.0, 0, 0
    for seed in range(given.first, given.first + given.seeds):
        try:
            one = run(seed)
        except Wrong as wrong:
            failed += 1
            print(f"{wrong}\n  python -m tests.simulation --seed {seed}", flush=True)
            if not given.all:
                return 1
            continue
        virtual, turns, blocks = virtual + one.loop.time(), turns + one.loop.turns, blocks + one.plan.blocks
    seconds = time.perf_counter() - began
    print(
        f"{given.seeds:,} seeds, {failed} failed, {given.seeds / seconds:.0f} seeds/s, {virtual:,.0f} virtual seconds, "
        f"{turns:,} turns, {blocks:,} blocks"
    )
    return 1 if failed else 0
