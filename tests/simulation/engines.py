"""Engines in the simulation: their members, and the processes that publish what they read. See run.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from esp_pubsub.client import Client
from esp_pubsub.engine.engine import Engine
from esp_pubsub.engine.options import EngineOptions, LineStats
from esp_pubsub.engine.snapshot import NotASnapshot, Snapshot, read
from esp_pubsub.errors import EspError, InputLost, Switched
from esp_pubsub.publisher import Publisher, PublisherOptions
from esp_pubsub.sender import Sender

from .computation import INPUT, INPUTS, OUTPUTS, Step, make_model
from .processes import LATEST, STALL, AlwaysLeads, MemberProcess, PacedProcess, Window
from .programs import OUTPUT

if TYPE_CHECKING:
    from .run import Run

URL = "dfESP://sim:5555/project/query"
INPUT_WINDOWS = tuple(Window(at, f"{URL}/{name}", "in") for at, name in enumerate(INPUTS))
OUTPUT_WINDOWS = tuple(Window(at, f"{URL}/{name}", "out", OUTPUT) for at, name in enumerate(OUTPUTS))
ORDER = "sim:5555/M/F/engine/project/query/order"
LONG_STEP = 2.0
_WAITS = 3.0  # seconds after which a user begins to think that the other version of the model runs


class EngineProcess(MemberProcess):
    """A member of an engine."""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__(run, name, 0.0)
        self.engine: Engine | None = None
        self.takes_long = False
        self.version = "1"
        self.claimed = [0] * len(run.windows)

    async def work(self, client: Client) -> None:
        """See `Process.work`."""
        reads, ended = client, False
        if self.run.input_broker is not self.run.broker:
            reads = await self.connected(self.run.input_broker)
        while not ended:
            self.sent_most = [self.sent(at) for at in range(len(self.run.windows))]
            self.engine, self.takes_long, self.claimed = None, False, [0] * len(self.run.windows)
            try:
                engine = self.engine = await self.opened(lambda: self._open(reads, client))
                if self.run.plan.all_lead:
                    vars(vars(engine)["_group"]).update(_election=AlwaysLeads())
                await engine.wait()
                ended = True
            except Switched as switched:  # its user has the other version, too
                self.version = switched.version
            except InputLost as lost:
                if not self.run.has_trimmed:
                    raise
                self.run.tell(f"{self.process} was too far behind what is kept: {lost}")
                if self.run.order.steps:  # its user asks what runs: retention may have taken the entry that switched
                    self.version = self.run.order.steps[-1].version
                self.run.kill(self, 0.3)
                ended = True

    async def _open(self, reads: Client, client: Client) -> Engine:
        plan, inputs = self.run.plan, [window.name for window in self.run.inputs]
        options = EngineOptions(
            buffer=plan.buffer, stall=STALL, close_timeout=0.5, order="written" if plan.written else None,
            snapshot_every=plan.snapshots or 60.0,
        )  # fmt: skip
        while True:
            model = make_model(self._takes, inputs, self.run.program, timers=plan.timers, version=self.version)
            try:
                waits = _WAITS if plan.snapshots and plan.has_written_order else None
                async with asyncio.timeout(waits), self.in_a_hurry(0.05) as hurry:
                    return await reads.engine(model, URL, output=client, snapshots=self.run.snapshots, options=options)
            except TimeoutError:
                if not hurry.expired():  # it waits for a switch: perhaps the other version runs
                    self.version = "21"["12".index(self.version)]

    def _takes(self, at: int, step: Step) -> None:
        if self.takes_long:
            self.takes_long = False
            self.run.freeze(self, LONG_STEP)
        if self.engine is not None and self.engine.stats.steps != at:
            self.run.wrong(f"{self.process} counts {self.engine.stats.steps} steps, and its model {at}")
        self.run.order.take(self.process, at, step)
        self._check_claims()

    def _check_claims(self) -> None:
        """What it believes to be on the bus is there."""
        for at, (window, line) in enumerate(zip(self.run.windows, self.lines, strict=False)):
            if line.on_bus > self.claimed[at]:
                self.claimed[at] = line.on_bus
                because = f"{self.process} says that block {line.on_bus} of {window.topic} is on the bus"
                self.run.must_stand(window.topic, line.on_bus, because)

    @property
    def lines(self) -> tuple[LineStats, ...]:
        """Where its lines are."""
        return self.engine.stats.lines if self.engine is not None else ()

    @property
    def leads(self) -> bool:
        """See `MemberProcess.leads`."""
        return self.alive and self.engine is not None and self.engine.stats.role == "active"

    @property
    def is_through(self) -> bool:
        """See `Process.is_through`."""
        self._check_claims()
        order = self.run.order
        if self.engine is None or not order.is_complete or self.engine.stats.steps != len(order.steps):
            return False
        return [line.on_bus for line in self.lines] == [len(order.emitted[name]) for name in OUTPUTS]

    def sent(self, at: int) -> int:
        """See `MemberProcess.sent`."""
        if self.engine is None:
            return self.sent_most[at]
        sender: Sender = vars(vars(self.engine)["_group"])["_senders"][at]
        return max(sender.sent, self.lines[at].on_bus, self.sent_most[at])

    @property
    def is_eligible(self) -> bool:
        """See `MemberProcess.is_eligible`."""
        return self.engine is not None and all(line.given >= line.on_bus for line in self.lines)

    @property
    def where(self) -> str:
        """See `MemberProcess.where`."""
        return str(self.engine.stats) if self.engine is not None else "the door"

    def hand_over(self) -> None:
        """See `MemberProcess.hand_over`."""
        if self.engine is not None and self.alive:
            self.run.tell(f"{self.process} is asked to hand over")
            self.run.loop.spawn(self.process, self._hand_over_all(self.process, self.engine))

    async def _hand_over_all(self, process: str, engine: Engine) -> None:
        led, lines = engine.stats.role == "active", engine.stats.lines
        with contextlib.suppress(EspError, TimeoutError):
            async with self.in_a_hurry(0.5):
                await engine.hand_over()
                for window, line in zip(self.run.windows, lines, strict=True) if led else ():
                    self.run.must_stand(window.topic, line.given, f"{process} has handed over after block {line.given}")

    def close(self, seconds: float) -> None:
        """Leave politely, and come back after a while."""
        if self.alive and self.engine is not None:
            self.run.tell(f"{self.process} is asked to close")
            self.run.loop.spawn(self.process, self._close(self.engine, seconds))

    async def _close(self, engine: Engine, seconds: float) -> None:
        try:
            await engine.aclose()
        except EspError as error:
            self.run.wrong(f"{self.process} closed with {error!r}")
        self.run.kill(self, seconds)


class FeedProcess(PacedProcess):
    """A publisher of an input window."""

    def __init__(self, run: Run, window: Window, pace: float) -> None:
        super().__init__(run, "IJ"[window.at], pace)
        self.window = window
        self.broker = run.input_broker
        self.publisher: Publisher | None = None

    async def work(self, client: Client) -> None:
        """See `Process.work`."""
        publisher = self.publisher = await self.opened(
            lambda: client.publisher(
                self.window.url,
                INPUT,
                options=PublisherOptions(stall=STALL, ack_timeout=LATEST, close_timeout=0.1),
            )
        )
        for row in self.run.scripts[self.window.name]:
            await self.wait_for_its_input()
            await publisher.inject([row])
        await publisher.flush()
        self.run.tell(f"{self.process} has all its blocks on the bus")

    @property
    def is_through(self) -> bool:
        """See `Process.is_through`."""
        return self.publisher is not None and self.publisher.stats.acked == self.run.plan.blocks


def harm_snapshots(run: Run, what: str, who: int) -> None:
    """One is torn, at any byte; or inputs and order lose what the oldest one needs no more."""
    found = [] if run.snapshots is None else sorted(run.snapshots.iterdir())
    if not found or (what == "retention") != run.plan.retention:
        return
    if what == "retention":
        kept = [snapshot for file in found if (snapshot := _counts(file)) is not None]
        if kept:
            _trim(run, kept[0])
        return
    torn = found[who % len(found)]
    size = run.loop.rng.randrange(torn.stat().st_size + 1)
    run.tell(f"{torn.name} has {size} bytes left")
    os.truncate(torn, size)


def _counts(file: Path) -> Snapshot | None:
    """A snapshot that counts; None for any other file."""
    with contextlib.suppress(NotASnapshot):
        return read(file.read_bytes())[0] if file.suffix == ".snapshot" else None
    return None


def _trim(run: Run, oldest: Snapshot) -> None:
    run.has_trimmed = True
    firsts = [(each.topic, its.position) for each, its in zip(run.inputs, oldest.inputs, strict=True)]
    for name, first in [*firsts, (ORDER, oldest.position or 1)]:
        if first is not None:
            topic = (run.broker if name == ORDER else run.input_broker).topic(name)
            topic.first = max(topic.first, first)
            run.tell(f"{name} begins at {topic.first}")
