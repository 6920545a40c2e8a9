"""The simulation: the real client, publisher, sender, group, election and subscriber, on a simulated bus, by a seed.

The theory. One seed draws everything: the kind of bus, how many members and subscribers there are, how fast their
inputs are, whether these feed one line or two, which accidents happen when, every delay, and who of the processes has
the next turn of the one loop. So a run is a history that can be had again, and a thousand runs are a thousand histories
that no clock was needed for.

What is checked. All along: each subscriber's user gets 1, 2, 3, ... with the rows of its id; nothing is told as missed,
different or bad; one that restarts goes on behind what it, or another reader of its group, confirmed, or was confirming
when it died; in the moment in which a delivery says acked or covered, or a flush or a hand-over returns, the block and
all before it stand on the log, or in every subscriber's queue; what is cancelled has done nothing by half. At the end,
when the faults have stopped: within `PATIENCE` virtual seconds every subscriber has every block, every member that
lives has every block acknowledged or covered, and one member leads, the same one for a while.

    python -m tests.simulation --seeds 10000      as many runs; the first failure is told with its seed
    python -m tests.simulation --seed 4711        one run with its history
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from esp_pubsub.testing._sim_bus import Broker
from esp_pubsub.testing._virtual import PROCESS, Stuck, VirtualLoop
from tests.model.explorer import Broken
from tests.model.judges import Standing

from .lines import LinesProcess
from .processes import LATEST, WINDOWS, LateProcess, MemberProcess, Process, Readership, SubscriberProcess

PATIENCE = 40.0
_QUIET = 1.0

Kind = Literal["log", "holes", "queues"]


class Wrong(AssertionError):
    """What a run found that must not be."""


@dataclass(frozen=True, slots=True)
class Accident:
    """Something that goes wrong at a moment; `seconds` says how long, where that means anything."""

    at: float
    what: str
    who: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed stands for."""

    seed: int
    kind: Kind
    subscribers: int
    grouped: bool
    blocks: int
    deaths: bool
    all_lead: bool
    faults: float
    buffer: int
    pace: tuple[float, ...]
    calm_after: float
    accidents: tuple[Accident, ...]
    late: float | None
    """When one more subscriber comes, who sees what is sent from then on."""
    readers: int
    """How many there are of each group; one of them reads at a time."""
    haste: float
    """How many of a user's calls are cancelled after a moment, as a share."""
    restless: bool
    """Whether readers of groups lose them to each other, and die, all the time."""
    lines: int
    """How many the members have; one input feeds them all."""

    def __str__(self) -> str:
        lines = [f"{name} = {getattr(self, name)}" for name in self.__slots__ if name != "accidents"]
        return "\n".join([*lines, *map(str, self.accidents)])


_MEMBERS = ("freeze", "kill", "cut", "hand over", "pause the input", "kill all", "the input stops")
_SUBSCRIBERS = ("freeze a subscriber", "kill a subscriber", "cut a subscriber")
_BUS = ("stall", "slow")


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    kind: Kind = rng.choice(("log", "log", "holes", "queues"))
    members, subscribers = rng.choice((2, 2, 3)), rng.choice((1, 1, 2))
    calm_after = rng.uniform(0.5, 2.5)
    grouped = kind == "queues" or rng.random() < 0.7
    what = [*_MEMBERS, *_MEMBERS, *_BUS, *(_SUBSCRIBERS if grouped else _SUBSCRIBERS[:1])]
    accidents = [
        Accident(rng.uniform(0.05, calm_after), rng.choice(what), rng.randrange(6), rng.choice((0.05, 0.3, 0.7, 1.2)))
        for _ in range(rng.randrange(8))
    ]
    return Plan(
        seed=seed,
        kind=kind,
        subscribers=subscribers,
        grouped=grouped,
        blocks=rng.choice((5, 20, 40)),
        deaths=rng.random() < 0.5,
        all_lead=rng.random() < 0.15,
        faults=rng.choice((0.0, 0.02, 0.1)),
        buffer=rng.choice((3, 10, 100)),
        pace=tuple(rng.choice((0.001, 0.01, 0.05)) for _ in range(members)),
        calm_after=calm_after,
        accidents=_in_order(accidents),
        late=rng.uniform(0.02, 1.0) if rng.random() < 0.3 else None,
        readers=rng.choice((1, 2)) if grouped else 1,
        haste=rng.choice((0.0, 0.3)),
        restless=grouped and rng.random() < 0.2,
        lines=rng.choices((1, 2), (7, 3))[0],
    )


def _restless(plan: Plan) -> Iterator[Accident]:
    rng = random.Random(plan.seed + 3)
    for _ in range(int(16 * plan.calm_after)):
        what = rng.choice(("cut a subscriber", "cut a subscriber", "kill a subscriber"))
        yield Accident(rng.uniform(0.05, plan.calm_after), what, rng.randrange(6), 0.02)


def _line_cuts(plan: Plan) -> Iterator[Accident]:
    rng = random.Random(plan.seed + 4)
    for _ in range(rng.randrange(3)):
        yield Accident(rng.uniform(0.05, plan.calm_after), "cut a line", rng.randrange(6), rng.choice((0.3, 0.7, 1.2)))


def _script(plan: Plan) -> list[tuple[int, ...]]:
    """For each block of the input, the lines to which it gives one: now this one for a while, now that one, or both."""
    if plan.lines == 1:
        return [(0,)] * plan.blocks
    rng, script = random.Random(plan.seed + 5), list[tuple[int, ...]]()
    while len(script) < plan.blocks:
        script += [rng.choice(((0,), (1,), (0, 1)))] * rng.choice((1, 2, 5))
    return script[: plan.blocks]


def _in_order(accidents: Iterable[Accident]) -> tuple[Accident, ...]:
    return tuple(sorted(accidents, key=lambda accident: accident.at))


@dataclass
class Run:
    """One history."""

    plan: Plan
    loop: VirtualLoop = field(init=False)
    broker: Broker = field(init=False)
    errors: list[str] = field(default_factory=list)
    dying: int = 0

    def __post_init__(self) -> None:
        self.loop = VirtualLoop(random.Random(self.plan.seed + 1))  # type: ignore[abstract]  # it has what the SDK calls
        self.broker = Broker(self.loop, self.plan.kind, deaths=self.plan.deaths)
        self.windows = WINDOWS[: self.plan.lines]
        self.script = _script(self.plan)
        self.blocks = [sum(at in to for to in self.script) for at in range(self.plan.lines)]
        kind = MemberProcess if self.plan.lines == 1 else LinesProcess
        self.members = [kind(self, "ABC"[at], pace) for at, pace in enumerate(self.plan.pace)]
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
            finally:
                self.broker.ended = True
                self.loop.end()
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
            yield
        finally:
            random.setstate(before)
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = True

    async def _all(self) -> None:
        for subscriber in self.subscribers:
            subscriber.start()
        if self.plan.kind == "queues":  # a queue sees what comes after it
            while len(self.broker.open) < len(self.subscribers):
                await self.broker.news()
        for member in self.members:
            member.start()
        self.broker.faults = self.plan.faults
        if self.plan.late is not None:
            for late in self.late:
                self.broker.never_away.add(f"{late.name}1")
                self.loop.in_bus(self.plan.late, late.start)
        restless = _restless(self.plan) if self.plan.restless else ()
        line_cuts = _line_cuts(self.plan) if self.plan.lines > 1 else ()
        for accident in _in_order([*self.plan.accidents, *restless, *line_cuts]):
            await asyncio.sleep(max(0.0, accident.at - self.loop.time()))
            self._happens(accident)
        await asyncio.sleep(max(0.0, self.plan.calm_after - self.loop.time()))
        self.broker.faults = 0.0
        self.tell("no more faults")
        await self._everything_comes()

    def _happens(self, accident: Accident) -> None:
        self.tell(f"{accident.what} {accident.who} for {accident.seconds} s")
        member = self.members[accident.who % len(self.members)]
        subscriber = self.subscribers[accident.who % len(self.subscribers)]
        seconds, what = accident.seconds, accident.what
        process: Process = subscriber if "subscriber" in what else member
        if what == "stall":
            self.broker.stalled_until = self.loop.time() + seconds
        elif what == "slow":
            self.broker.slow_until = self.loop.time() + seconds
        elif what == "hand over":
            member.hand_over()
        elif what == "pause the input":
            member.pause = seconds
        elif what == "the input stops":
            member.stopped = member.stopped or sum(not other.stopped for other in self.members) > 1
        elif what == "cut a line":
            self.broker.cut_topic(member.process, self.windows[accident.who // 2 % len(self.windows)].topic, seconds)
        elif what.startswith("freeze"):
            self._freeze(process, seconds)
        elif what.startswith("cut"):
            self.broker.cut(process.process, seconds)
        else:
            for victim in self.members if what == "kill all" else [process]:
                self._kill(victim, seconds)

    def _freeze(self, process: Process, seconds: float) -> None:
        if process.alive:
            name = process.process
            self.loop.frozen.add(name)
            self.loop.in_bus(seconds, self._thaw, name)

    def _thaw(self, name: str) -> None:
        if name not in self.broker.dead:
            self.tell(f"{name} goes on")
            self.loop.frozen.discard(name)

    def _kill(self, process: Process, seconds: float) -> None:
        if process.alive:
            process.kill()
            self.dying += 1
            self.loop.in_bus(seconds, self._restart, process)

    def _restart(self, process: Process) -> None:
        self.dying -= 1
        process.start()

    async def _everything_comes(self) -> None:
        """Progress. In the end one member leads, and goes on leading."""
        until = self.loop.time() + PATIENCE
        everybody: list[Process] = [*self.subscribers, *self.members]
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
