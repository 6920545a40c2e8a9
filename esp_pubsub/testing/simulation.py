"""The simulation: the real client, publisher, sender, group, election and subscriber, on a simulated bus, by a seed.

The theory. One seed draws everything: the kind of bus, how many members and subscribers there are, how fast their
inputs are, which accidents happen when, every delay, and who of the processes has the next turn of the one loop. So a
run is a history that can be had again, and a thousand runs are a thousand histories that no clock was needed for.

What is checked. All along: each subscriber's user gets 1, 2, 3, ... with the rows of its id; nothing is told as missed,
different or bad; one that restarts goes on behind what it confirmed, or what it was confirming when it died. At the
end, when the faults have stopped: within `PATIENCE` virtual seconds every subscriber has every block, every member that
lives has every block acknowledged or covered, and one member leads, the same one for a while.

    python -m esp_pubsub.testing.simulation --seeds 10000      as many runs; the first failure is told with its seed
    python -m esp_pubsub.testing.simulation --seed 4711        one run with its history
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..client import Client
from ..errors import BusUnavailable, EspError
from ..events import Block
from ..failover.group import Failover
from ..notices import BadMessage, InputDiffers, Missed, Notice
from ..publisher import Publisher, PublisherOptions
from ._sim_bus import Broker, SimBus
from ._virtual import PROCESS, Stuck, VirtualLoop

URL = "dfESP://sim:5555/project/query/window"
SCHEMA = "id*:int64,text:string"
PATIENCE = 40.0
_QUIET = 1.0
_LATEST = 1_000.0

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
        accidents=tuple(sorted(accidents, key=lambda accident: accident.at)),
        late=rng.uniform(0.02, 1.0) if rng.random() < 0.3 else None,
    )


class Process:
    """A process of the simulation: a name, and what runs in it."""

    def __init__(self, run: Run, name: str) -> None:
        self.run = run
        self.name = name
        self.starts = 0
        self.alive = False
        self.process = ""
        self.client: Client | None = None

    def start(self) -> None:
        """Begin, or begin again."""
        self.starts += 1
        self.process = f"{self.name}{self.starts}"
        self.alive = True
        self.run.tell(f"{self.process} starts")
        self.run.loop.spawn(self.process, self._work(self.process))

    async def _work(self, process: str) -> None:
        try:
            bus: Any = SimBus(self.run.broker, process)
            self.client = Client(bus, self.notice)
            await self.client.start()
            await self.work(self.client)
        except Exception as error:  # noqa: BLE001  # whatever ends a process is what the run is about
            self.run.wrong(f"{process} ended by {error!r}")

    async def work(self, client: Client) -> None:
        """What it does."""
        raise NotImplementedError

    @property
    def is_through(self) -> bool:
        """Whether all has come to it, or is on the bus as far as it knows."""
        raise NotImplementedError

    def notice(self, notice: Notice) -> None:
        """What it is told."""
        self.run.tell(f"{self.process} is told {notice}")
        if isinstance(notice, Missed | InputDiffers | BadMessage):
            self.run.wrong(f"{self.process} was told {notice}")

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False
        self.run.tell(f"{self.process} is killed")
        self.run.broker.kill(self.process)

    async def opened(self, opening: Callable[[], Any]) -> Any:
        """What a client opens, tried until the bus answers."""
        while True:
            try:
                return await opening()
            except BusUnavailable:
                await asyncio.sleep(0.05)


class MemberProcess(Process):
    """A publisher of the group, with an input of its own pace."""

    def __init__(self, run: Run, name: str, pace: float) -> None:
        super().__init__(run, name)
        self.pace = pace
        self.pause = 0.0
        self.stopped = False
        self.sent_most = 0
        self.publisher: Publisher | None = None

    async def work(self, client: Client) -> None:
        """See `Process.work`."""
        plan, self.sent_most = self.run.plan, self.sent
        self.publisher, self.pause = None, 0.0
        publisher = self.publisher = await self.opened(
            lambda: client.publisher(
                URL,
                SCHEMA,
                failover=Failover("g", buffer=plan.buffer),
                options=PublisherOptions(stall=0.5, ack_timeout=_LATEST, close_timeout=0.1),
            )
        )
        if plan.all_lead:
            vars(vars(publisher)["_group"]).update(_election=AlwaysLeads(), _log_election=None)
        for number in range(1, plan.blocks + 1):
            await asyncio.sleep(self.pause + self.run.loop.rng.random() * 2 * self.pace)
            self.pause = 0.0
            while self.stopped:
                await asyncio.sleep(PATIENCE)
            await publisher.inject([(number, f"row {number}")])
        await publisher.flush()
        self.run.tell(f"{self.process} has all its blocks on the bus")

    @property
    def leads(self) -> bool:
        """Whether it believes that it leads."""
        return self.alive and self.publisher is not None and self.publisher.stats.role == "active"

    @property
    def is_through(self) -> bool:
        """See `Process.is_through`."""
        return self.stopped or (self.publisher is not None and self.publisher.stats.acked == self.run.plan.blocks)

    @property
    def sent(self) -> int:
        """The highest block that it has sent, or knows to be on the bus."""
        stats = self.publisher.stats if self.publisher is not None else None
        return max(stats.sent, stats.on_bus, self.sent_most) if stats is not None else self.sent_most

    @property
    def waits_for_its_input(self) -> bool:
        """Whether it leads rightly, and has nothing more to send for ever. Nobody can see that but its owner."""
        return self.leads and self.stopped and self.publisher is not None and _is_eligible(self.publisher)

    def hand_over(self) -> None:
        """Politely."""
        if self.publisher is not None and self.alive:
            self.run.tell(f"{self.process} is asked to hand over")
            self.run.loop.spawn(self.process, self._hand_over(self.publisher))

    async def _hand_over(self, publisher: Publisher) -> None:
        with contextlib.suppress(EspError, asyncio.CancelledError):
            await publisher.hand_over()


def _is_eligible(publisher: Publisher) -> bool:
    return publisher.stats.given >= publisher.stats.on_bus


class AlwaysLeads:
    """An election that everybody wins, at any time."""

    async def run(self) -> None:
        """See `Election.run`."""
        await asyncio.sleep(_LATEST)

    async def campaign(self) -> int:
        """See `Election.campaign`."""
        return 1

    async def watch(self) -> str:
        """See `Election.watch`."""
        await asyncio.sleep(_LATEST)
        return "lost"

    async def resign(self) -> None:
        """See `Election.resign`."""


class SubscriberProcess(Process):
    """A subscriber and its user, who checks what comes. `confirmed` survives a restart, `tried` may have."""

    def __init__(self, run: Run, name: str, group: str | None) -> None:
        super().__init__(run, name)
        self.group = group
        self.last = 0
        self.confirmed = 0
        self.tried = 0

    async def work(self, client: Client) -> None:
        """See `Process.work`."""
        first = True
        sub = await self.opened(
            lambda: client.subscriber(URL, side="in", start="earliest", group=self.group, schema=SCHEMA)
        )
        async for block in sub:
            self._check(block, first)
            first, self.last = False, block.id
            self.run.tell(f"{self.process} gets {block.id}")
            if self.group is not None and (self.run.loop.rng.random() < 0.3 or block.id == self.run.plan.blocks):
                await self._confirm(sub, block.id)

    def _check(self, block: Block, first: bool) -> None:
        """It is the one that must come, with its rows."""
        lowest, highest = (self.confirmed, self.tried) if first and self.starts > 1 else (self.last, self.last)
        if not lowest + 1 <= block.id <= highest + 1:
            self.run.wrong(f"{self.process} got block {block.id}, and {lowest + 1} must come")
        if block.rows() != [(block.id, f"row {block.id}")]:
            self.run.wrong(f"{self.process} got {block.rows()} for block {block.id}")

    async def _confirm(self, sub: Any, id: int) -> None:
        self.tried = id
        try:
            await sub.confirm()
            self.confirmed = id
        except BusUnavailable as error:
            self.run.tell(f"{self.process} could not confirm {id}: {error}")

    @property
    def is_through(self) -> bool:
        """See `Process.is_through`."""
        return self.last == self.run.plan.blocks


class LateProcess(SubscriberProcess):
    """A subscriber that comes later, and may miss what was sent before, but nothing of what is sent from then on."""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__(run, name, None)
        self.sent_before = 0
        self.missed: set[int] = set()

    async def work(self, client: Client) -> None:
        """See `Process.work`."""
        sub = await self.opened(lambda: client.subscriber(URL, side="in", start="latest", schema=SCHEMA))
        self.sent_before = max(member.sent for member in self.run.members)
        self.run.tell(f"{self.process} is there, {self.sent_before} sent before")
        async for block in sub:
            self._check(block, not self.last)
            self.last = block.id

    def _check(self, block: Block, first: bool) -> None:
        while self.last + 1 in self.missed:
            self.last += 1
        if not (first and block.id <= self.sent_before + 1):
            super()._check(block, first)

    def notice(self, notice: Notice) -> None:
        """See `Process.notice`."""
        if isinstance(notice, Missed) and notice.last <= self.sent_before:
            self.missed.update(range(notice.first, notice.last + 1))  # told before its user has the blocks in front
            return
        super().notice(notice)

    @property
    def is_through(self) -> bool:
        """See `Process.is_through`."""
        return super().is_through or self.sent_before == self.run.plan.blocks


@dataclass
class Run:
    """One history."""

    plan: Plan
    loop: VirtualLoop = field(init=False)
    broker: Broker = field(init=False)
    errors: list[str] = field(default_factory=list)
    dying: int = 0

    def __post_init__(self) -> None:
        self.loop = VirtualLoop(random.Random(self.plan.seed + 1))
        self.broker = Broker(self.loop, self.plan.kind, deaths=self.plan.deaths)
        group = "readers" if self.plan.grouped else None
        self.members = [MemberProcess(self, "ABC"[at], pace) for at, pace in enumerate(self.plan.pace)]
        self.subscribers = [
            SubscriberProcess(self, f"S{at}-", f"{group}{at}" if group else None) for at in range(self.plan.subscribers)
        ]

        self.late = LateProcess(self, "L")

    def tell(self, text: str) -> None:
        """Write the history."""
        self.loop.tell(text)

    def wrong(self, text: str) -> None:
        """Something must not be; once the world has ended, nothing is wrong any more."""
        if self.broker.ended:
            return
        self.tell(f"WRONG: {text}")
        self.errors.append(text)

    def go(self) -> None:
        """Run it. Raises Wrong."""
        with self._seeded():
            try:
                self.loop.run(self._all(), _LATEST)
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
            self.broker.never_away.add("L1")
            self.loop.in_bus(self.plan.late, self.late.start)
        for accident in self.plan.accidents:
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
            everybody.append(self.late)
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
        publisher = process.publisher if isinstance(process, MemberProcess) else None
        return str(publisher.stats) if publisher is not None else "the door"


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
            print(f"{wrong}\n  python -m esp_pubsub.testing.simulation --seed {seed}", flush=True)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
