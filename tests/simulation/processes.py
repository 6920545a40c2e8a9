"""The processes of the simulation: members, subscribers, and users who check what they get. See run.py.

A user is in a hurry now and then: it gives up what it waits for, at any moment, and tries again. So every call of the
public API is cancelled at all of its awaits, sooner or later, and nothing may be lost or done by half.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esp_pubsub.address import Address, Side
from esp_pubsub.client import Client
from esp_pubsub.errors import BusUnavailable, EspError
from esp_pubsub.events import Block
from esp_pubsub.failover.options import Failover
from esp_pubsub.notices import BadMessage, InputDiffers, Missed, Notice
from esp_pubsub.publisher import Delivery, Publisher, PublisherOptions
from esp_pubsub.subscriber import Subscriber
from esp_pubsub.testing._sim_bus import Broker, SimBus

if TYPE_CHECKING:
    from .run import Run

SCHEMA = "id*:int64,text:string"
LATEST = 1_000.0
STALL = 0.5

Content = list[tuple[int, int, tuple[Any, ...]]]
"""What a block says: opcode, flags and row of each event."""


def content_of(block: Block) -> Content:
    """What is compared of a block."""
    return [(int(event.opcode), int(event.flags), tuple(event.values.values())) for event in block.events()]


@dataclass(frozen=True, slots=True)
class Window:
    """A window that is published to. `at`: which one it is of its side."""

    at: int
    url: str
    side: Side
    schema: str = SCHEMA

    @property
    def topic(self) -> str:
        """Where it is on the bus."""
        return Address.parse(self.url).topic(self.side)

    @property
    def name(self) -> str:
        """The last part of its URL."""
        return self.url.rpartition("/")[2]


WINDOW = Window(0, "dfESP://sim:5555/project/query/window", "in")


def row(id: int) -> tuple[int, str]:
    """The row of a block of the group of publishers."""
    return id, f"row {id}"


class Process:
    """A process of the simulation: a name, and what runs in it."""

    def __init__(self, run: Run, name: str) -> None:
        self.run = run
        self.name = name
        self.starts = 0
        self.alive = False
        self.process = ""
        self.broker = run.broker
        self._clients: list[Client] = []

    def start(self) -> None:
        """Begin, or begin again."""
        self.starts += 1
        self.process = f"{self.name}{self.starts}"
        self.alive = True
        self.run.tell(f"{self.process} starts")
        self.run.loop.spawn(self.process, self._work(self.process))

    async def _work(self, process: str) -> None:
        clients = self._clients = []  # of this start: one that was killed ends when its world does
        try:
            await self.work(await self.connected(self.broker))
        except Exception as error:  # noqa: BLE001  # whatever ends a process is what the run is about
            self.run.wrong(f"{process} ended by {error!r}")
        finally:  # it was killed, or its world ended: a process that is killed says nothing of what it left open
            for client in clients:
                for left in (client, *vars(client)["_open"]):
                    vars(left)["_left_open"] = False

    async def connected(self, broker: Broker) -> Client:
        """A client of this bus."""
        bus: Any = SimBus(broker, self.process)
        client = Client(bus, self.notice)
        self._clients.append(client)
        await client.start()
        return client

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
        for broker in self.run.brokers:
            broker.kill(self.process)

    def in_a_hurry(self, longest: float) -> asyncio.Timeout:
        """How long its user waits for something: without end, or, now and then, no longer than this."""
        rng = self.run.loop.rng
        return asyncio.timeout(rng.random() * longest if rng.random() < self.run.plan.haste else None)

    async def opened(self, opening: Callable[[], Any]) -> Any:
        """What a client opens, tried until the bus answers."""
        while True:
            try:
                return await opening()
            except BusUnavailable:
                await asyncio.sleep(0.05)


class PacedProcess(Process):
    """A process to which something comes from outside, block by block."""

    def __init__(self, run: Run, name: str, pace: float) -> None:
        super().__init__(run, name)
        self.pace = pace
        self.pause = 0.0
        self.stopped = False

    async def wait_for_its_input(self) -> None:
        """The next block of its input comes, or never."""
        await asyncio.sleep(self.pause + self.run.loop.rng.random() * 2 * self.pace)
        self.pause = 0.0
        if self.stopped:
            await self.run.loop.create_future()  # for good


class MemberProcess(PacedProcess):
    """A publisher of the group, with an input of its own pace."""

    def __init__(self, run: Run, name: str, pace: float) -> None:
        super().__init__(run, name, pace)
        self.sent_most = [0] * len(run.windows)
        self.publisher: Publisher | None = None

    async def work(self, client: Client) -> None:
        """See `Process.work`."""
        plan, [window], self.sent_most = self.run.plan, self.run.windows, [self.sent(0)]
        self.publisher, self.pause = None, 0.0
        publisher = self.publisher = await self.opened(
            lambda: client.publisher(
                window.url,
                SCHEMA,
                failover=Failover("g", buffer=plan.buffer),
                options=PublisherOptions(stall=STALL, ack_timeout=LATEST, close_timeout=0.1),
            )
        )
        if plan.all_lead:
            vars(vars(publisher)["_group"]).update(_election=AlwaysLeads())
        for number in range(1, plan.blocks + 1):
            await self.wait_for_its_input()
            delivery = await self._inject(publisher, number)
            self.run.loop.spawn(self.process, self._await(self.process, publisher, delivery))
        await self._flush(publisher)
        self.run.tell(f"{self.process} has all its blocks on the bus")

    async def _inject(self, publisher: Publisher, number: int) -> Delivery:
        while True:
            try:
                async with self.in_a_hurry(0.05):
                    return await publisher.inject([row(number)])
            except TimeoutError:
                if publisher.stats.given >= number:
                    self.run.wrong(f"{self.process} cancelled the inject of block {number}, and it has an id")

    async def _await(self, process: str, publisher: Publisher, delivery: Delivery) -> None:
        """What is said of a block must be true in the moment in which it is said."""
        while True:
            try:
                async with self.in_a_hurry(0.3):
                    outcome = await delivery
                    break
            except TimeoutError:
                continue
            except EspError as error:
                self.run.wrong(f"{process} waits for block {delivery.id}, and hears {error!r}")
                return
        self.run.must_stand(publisher.topic, delivery.id, f"{process} hears that block {delivery.id} is {outcome}")

    async def _flush(self, publisher: Publisher) -> None:
        last = publisher.stats.given
        while True:
            with contextlib.suppress(TimeoutError):
                async with self.in_a_hurry(0.3):
                    await publisher.flush()
                    break
        self.run.must_stand(publisher.topic, last, f"{self.process} has flushed {last} blocks")

    @property
    def leads(self) -> bool:
        """Whether it believes that it leads."""
        return self.alive and self.publisher is not None and self.publisher.stats.role == "active"

    @property
    def is_through(self) -> bool:
        """See `Process.is_through`."""
        return self.stopped or (self.publisher is not None and self.publisher.stats.acked == self.run.plan.blocks)

    def sent(self, at: int) -> int:
        """The highest block of a line that it has sent, or knows to be on the bus."""
        stats = self.publisher.stats if self.publisher is not None else None
        return max(stats.sent, stats.on_bus, self.sent_most[at]) if stats is not None else self.sent_most[at]

    @property
    def waits_for_its_input(self) -> bool:
        """Whether it leads rightly, and has nothing more to send forever. Nobody can see that but its owner."""
        return self.leads and self.stopped and self.is_eligible

    @property
    def is_eligible(self) -> bool:
        """Whether it could go on where the bus stands."""
        return self.publisher is not None and self.publisher.stats.given >= self.publisher.stats.on_bus

    @property
    def where(self) -> str:
        """How far it is, for people."""
        return str(self.publisher.stats) if self.publisher is not None else "the door"

    def hand_over(self) -> None:
        """Politely."""
        if self.publisher is not None and self.alive:
            self.run.tell(f"{self.process} is asked to hand over")
            self.run.loop.spawn(self.process, self._hand_over(self.process, self.publisher))

    async def _hand_over(self, process: str, publisher: Publisher) -> None:
        """Once it returns, all that had an id is on the bus; to a standby it returns at once and says nothing."""
        led, last = publisher.stats.role == "active", publisher.stats.given
        with contextlib.suppress(EspError, TimeoutError):
            async with self.in_a_hurry(0.5):
                await publisher.hand_over()
                if led:
                    self.run.must_stand(publisher.topic, last, f"{process} has handed over after block {last}")


class AlwaysLeads:
    """An election that everybody wins, at any time."""

    async def run(self) -> None:
        """See `Election.run`."""
        await asyncio.sleep(LATEST)

    async def campaign(self) -> int:
        """See `Election.campaign`."""
        return 1

    async def watch(self) -> str:
        """See `Election.watch`."""
        await asyncio.sleep(LATEST)
        return "lost"

    async def resign(self) -> None:
        """See `Election.resign`."""


class Readership:
    """The readers of one group, or one subscriber without a group, and what they have confirmed between them.

    `confirmed` is stored; `tried` may be, for who confirmed it was not told, or died.
    """

    def __init__(self, group: str | None) -> None:
        self.group = group
        self.confirmed = 0
        self.tried = 0
        self.readers: list[SubscriberProcess] = []


class SubscriberProcess(Process):
    """A subscriber and its user, who checks what comes."""

    def __init__(self, run: Run, name: str, all_of_them: Readership, window: Window) -> None:
        super().__init__(run, name)
        self.window = window
        self.all_of_them = all_of_them
        self.last = 0
        self.began_behind = 0
        self.unconfirmed: list[Block] = []
        all_of_them.readers.append(self)

    async def work(self, client: Client) -> None:
        """See `Process.work`."""
        first, rng = True, self.run.loop.rng
        self.began_behind = self.all_of_them.confirmed
        self.unconfirmed.clear()
        subscriber = await self.open(client)
        while True:
            for block in await self._read(subscriber):
                self.check(block, first)
                first, self.last = False, block.id
                self.run.tell(f"{self.process} gets {block.id}")
                self.unconfirmed.append(block)
            is_last = self.last == self.run.last(self.window)
            if self.all_of_them.group is not None and self.unconfirmed and (is_last or rng.random() < 0.3):
                await self._confirm(subscriber, self.unconfirmed[-1] if is_last else rng.choice(self.unconfirmed))

    async def open(self, client: Client) -> Subscriber:
        """Its subscriber."""
        group = self.all_of_them.group
        opened: Subscriber = await self.opened(
            lambda: client.subscriber(
                self.window.url, side=self.window.side, start="earliest", group=group, schema=self.window.schema
            )
        )
        return opened

    async def _read(self, subscriber: Subscriber) -> Sequence[Block]:
        rng = self.run.loop.rng
        with contextlib.suppress(TimeoutError):
            async with self.in_a_hurry(0.02):
                if rng.random() < 0.5:
                    return [await anext(subscriber)]
                async with contextlib.aclosing(subscriber.batches(rng.choice((None, 1, 3)))) as batches:  # type: ignore[type-var]
                    return await anext(batches)
        return ()

    def check(self, block: Block, first: bool) -> None:
        """It is the one that must come, with its rows."""
        group = self.all_of_them
        lowest = self.began_behind if first else self.last
        if not lowest + 1 <= block.id <= max(lowest, group.tried) + 1:
            self.run.wrong(f"{self.process} got block {block.id}, and {lowest + 1} must come")
        if (content := content_of(block)) != self.run.content(self.window, block.id):
            self.run.wrong(f"{self.process} got {content} for block {block.id}")
        if first and len(group.readers) == 1:
            group.tried = block.id - 1  # nothing further was stored, or it would not have come

    async def _confirm(self, subscriber: Subscriber, block: Block) -> None:
        group = self.all_of_them
        group.tried = max(group.tried, block.id)
        del self.unconfirmed[: self.unconfirmed.index(block) + 1]
        is_done = False
        while not is_done:
            try:
                async with self.in_a_hurry(0.006):
                    await subscriber.confirm(block)
                    group.confirmed, is_done = max(group.confirmed, block.id), True
            except TimeoutError:
                self.run.tell(f"{self.process} gave up to confirm {block.id}")
                is_done = self.run.loop.rng.random() < 0.5
            except BusUnavailable as error:
                self.run.tell(f"{self.process} could not confirm {block.id}: {error}")
                return

    @property
    def is_through(self) -> bool:
        """See `Process.is_through`."""
        return any(reader.alive and reader.last == self.run.last(self.window) for reader in self.all_of_them.readers)


class LateProcess(SubscriberProcess):
    """A subscriber that comes later, and may miss what was sent before, but nothing of what is sent from then on."""

    def __init__(self, run: Run, name: str, window: Window) -> None:
        super().__init__(run, name, Readership(None), window)
        self.sent_before = 0
        self.missed: set[int] = set()

    async def open(self, client: Client) -> Subscriber:
        """See `SubscriberProcess.open`."""
        opened: Subscriber = await self.opened(
            lambda: client.subscriber(self.window.url, side=self.window.side, start="latest", schema=self.window.schema)
        )
        self.sent_before = max(member.sent(self.window.at) for member in self.run.members)
        self.run.tell(f"{self.process} is there, {self.sent_before} sent before")
        return opened

    def check(self, block: Block, first: bool) -> None:
        """See `SubscriberProcess.check`."""
        while self.last + 1 in self.missed:
            self.last += 1
        if not (first and block.id <= self.sent_before + 1):
            super().check(block, first)

    def notice(self, notice: Notice) -> None:
        """See `Process.notice`."""
        if isinstance(notice, Missed) and notice.last <= self.sent_before:
            self.missed.update(range(notice.first, notice.last + 1))  # told before its user has the blocks in front
            return
        super().notice(notice)

    @property
    def is_through(self) -> bool:
        """See `Process.is_through`."""
        return super().is_through or self.sent_before == self.run.last(self.window)
