"""A member with two lines, of one input and with one role: what an engine's output will be, without the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from esp_pubsub._news import News
from esp_pubsub.address import Address
from esp_pubsub.bus import Bus
from esp_pubsub.client import Client
from esp_pubsub.encode import Encoder
from esp_pubsub.errors import BusError, BusUnavailable, EspError
from esp_pubsub.events import Opcode
from esp_pubsub.failover.join import join
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.options import Failover
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.failover.words import Setup
from esp_pubsub.publisher import source_number
from esp_pubsub.schema import Schema
from esp_pubsub.sender import Sender
from esp_pubsub.wire.frame import BODY_AT
from esp_pubsub.writer import BlockWriter

from .processes import SCHEMA, STALL, AlwaysLeads, MemberProcess, Window

if TYPE_CHECKING:
    from .run import Run

_GROUP = "g"


class Lines:
    """Publishes to several windows, as one member of a failover group. `taken`: the blocks of the input so far."""

    def __init__(self, bus: Bus, windows: Sequence[Window], buffer: int) -> None:
        schema, capabilities = Schema(SCHEMA), bus.capabilities
        self.windows = windows
        self.taken = 0
        self.writers: list[BlockWriter] = []
        self.lines: list[Line] = []
        self.senders: list[Sender] = []
        for at, window in enumerate(windows):
            source, outbox = source_number(f"{window.topic}/{_GROUP}"), Outbox(buffer, 1 << 20)
            encoder = Encoder(schema, "rows", rebuild=True)
            self.writers.append(BlockWriter(schema, encoder, outbox, source, 0, capabilities.max_message_bytes))
            self.lines.append(Line(source, 0, outbox, suffix_only=capabilities.suffix_only, buffer=buffer))
            self.senders.append(
                Sender(
                    bus,
                    window.topic,
                    outbox,
                    source=source,
                    run=0,
                    stall=STALL,
                    acked=partial(self._acked, at),
                    trouble=self._trouble,
                )
            )
        topics = tuple(window.topic for window in windows)
        self.group = join(
            bus,
            Failover(_GROUP, buffer=buffer),
            Address.parse(windows[0].url).control(_GROUP),
            Setup(topics, (schema.text,) * len(topics), "rows", "log"),
            list(zip(self.lines, self.senders, strict=True)),
            elect=None,
            stall=STALL,
            changed=self._changed,
        )
        self._news = News()

    def _acked(self, at: int, id: int) -> None:
        self.group.acked(self.lines[at], id)
        self._changed()

    def _trouble(self, error: BusError | None) -> None:
        if isinstance(error, BusUnavailable):
            self.group.trouble(error)

    def _changed(self) -> None:
        self._news.tell()

    async def take(self, to: Sequence[int]) -> list[tuple[int, int]]:
        """Take a block of the input, which gives one to each of these lines; waits for room in all of them. Returns
        lines and ids. Cancelled: it was not taken.
        """
        rows = [[self.windows[at].row(self.lines[at].outbox.last + 1)] for at in to]
        encoded = [self.writers[at].encode(some, Opcode.INSERT, 0) for at, some in zip(to, rows, strict=True)]
        while not all(self._room(at, BODY_AT + len(one[3])) for at, one in zip(to, encoded, strict=True)):
            await self._news.wait()
        self.taken += 1
        for at, one in zip(to, encoded, strict=True):
            self.lines[at].give(self.writers[at].seal(one))
            self.group.given(at)
        self._changed()
        return [(at, self.lines[at].outbox.last) for at in to]

    def _room(self, at: int, size: int) -> bool:
        return self.group.membership.room(self.lines[at], size)

    async def delivered(self, at: int, id: int) -> None:
        """Wait until this block of a line is on the bus."""
        while self.lines[at].delivered < id:
            await self._news.wait()

    @property
    def given(self) -> list[int]:
        """The last id of each line."""
        return [line.outbox.last for line in self.lines]


class LinesProcess(MemberProcess):
    """A member of the group with two lines, whose blocks come of one input."""

    def __init__(self, run: Run, name: str, pace: float) -> None:
        super().__init__(run, name, pace)
        self.lines: Lines | None = None

    async def work(self, client: Client) -> None:
        """See `Process.work`."""
        self.sent_most = [self.sent(at) for at in range(len(self.run.windows))]
        self.pause = 0.0
        lines = self.lines = Lines(client.bus, self.run.windows, self.run.plan.buffer)
        if self.run.plan.all_lead:
            vars(lines.group).update(_election=AlwaysLeads())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lines.group.run())
            for to in self.run.script:
                await self.wait_for_its_input()
                for at, id in await self._take(lines, to):
                    self.run.loop.spawn(self.process, self._await_one(self.process, lines, at, id))
            for at, id in enumerate(lines.given):
                await self._await_one(self.process, lines, at, id)
            self.run.tell(f"{self.process} has all its blocks on the bus")

    async def _take(self, lines: Lines, to: Sequence[int]) -> list[tuple[int, int]]:
        before = lines.taken, lines.given
        while True:
            try:
                async with self.in_a_hurry(0.05):
                    return await lines.take(to)
            except TimeoutError:
                if (lines.taken, lines.given) != before:
                    self.run.wrong(f"{self.process} cancelled block {before[0] + 1} of its input, and it was taken")

    async def _await_one(self, process: str, lines: Lines, at: int, id: int) -> None:
        await lines.delivered(at, id)
        topic = self.run.windows[at].topic
        self.run.must_stand(topic, id, f"{process} hears that block {id} of {topic} is delivered")

    @property
    def leads(self) -> bool:
        """See `MemberProcess.leads`."""
        return self.alive and self.lines is not None and self.lines.group.role == "active"

    @property
    def is_through(self) -> bool:
        """See `Process.is_through`."""
        return self.stopped or (
            self.lines is not None and [line.delivered for line in self.lines.lines] == self.run.blocks
        )

    def sent(self, at: int) -> int:
        """See `MemberProcess.sent`."""
        if self.lines is None:
            return self.sent_most[at]
        return max(self.lines.senders[at].sent, self.lines.lines[at].m, self.sent_most[at])

    @property
    def is_eligible(self) -> bool:
        """See `MemberProcess.is_eligible`."""
        return self.lines is not None and all(line.outbox.last >= line.m for line in self.lines.lines)

    @property
    def where(self) -> str:
        """See `MemberProcess.where`."""
        return str([line.position for line in self.lines.lines]) if self.lines is not None else "the door"

    def hand_over(self) -> None:
        """See `MemberProcess.hand_over`."""
        if self.lines is not None and self.alive:
            self.run.tell(f"{self.process} is asked to hand over")
            self.run.loop.spawn(self.process, self._hand_over_all(self.process, self.lines))

    async def _hand_over_all(self, process: str, lines: Lines) -> None:
        led, given = lines.group.role == "active", lines.given
        with contextlib.suppress(EspError, TimeoutError):
            async with self.in_a_hurry(0.5):
                await lines.group.hand_over()
                for window, last in zip(self.run.windows, given, strict=True) if led else ():
                    self.run.must_stand(window.topic, last, f"{process} has handed over after block {last}")
