"""A double of a Solace broker, and of the session with it that the driver asks for (`transports/solace/link.py`).

No Solace broker can be had on a test machine. This one is written from the vendor's public documentation, and is as
right as our reading of it; it knows nothing of the vendor's protocol. What is said there and done here:

    direct       messages go to whoever subscribes now, in the order of their session; a slow reader's are dropped, and
                 the next one that comes is marked. Of those that share a subscription each message goes to one.
    guaranteed   messages are spooled to all queues that want their topic, or, if one of these refuses, to none; the
                 publisher is told of each. Direct messages are promoted where a queue wants them, guaranteed ones are
                 demoted for direct subscribers.
    exclusive    queues hand their messages to the consumer that bound first, and tell it that it is active; who ceases
                 to be that is told too, and the others nothing. Turns and messages come by two lines. What was handed
                 out and not settled comes to the next one first, in order.
    temporary    queues go with the flow that made them, last-value queues keep the last message.
    browsers     see what is in a queue and what comes to it, and may take single messages out.
    replay       a bind may ask for the messages of the log that match the queue's topics, in place of what it held; not
                 one that stands behind another. It fails by itself: the queue is there, and has its topic.
    ACL          topics may be kept from publishers, whose guaranteed messages are refused and direct ones dropped, and
                 from subscribers. A queue that was to get such a topic has been made by then.
    keep-alive   a client that is not heard for three intervals is gone, and so is a broker for its client.

`async with Solace() as broker:` serves in the loop at hand, on a loopback port. Its clients, in any process, are the
driver by `open_bus` here; where this module is entered as a bus, `init("solace-double", host=...)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import msgpack

from esp_pubsub.errors import BusError, BusRefused, BusUnavailable
from esp_pubsub.transports.solace.bus import SolaceBus
from esp_pubsub.transports.solace.link import Ended, Hear, Inbound, NotFirst, NotSubscribed, Taken, UnknownQueue
from esp_pubsub.transports.solace.options import SolaceOptions

from .server import HOST

MISSED = 3  # signs of life
WINDOW = 10_000  # messages handed out and not settled
EGRESS = 8 << 20  # bytes that wait for one client before direct messages are dropped
_KINDS: dict[str, type[BusError]] = {
    "refused": BusRefused, "unknown": UnknownQueue, "unsubscribed": NotSubscribed, "not first": NotFirst,
    "unavailable": BusUnavailable,
}  # fmt: skip


def _packet(message: Sequence[Any]) -> bytes:
    packed = msgpack.packb(message)
    return struct.pack(">I", len(packed)) + packed


async def _packets(reader: asyncio.StreamReader) -> Any:
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    return msgpack.unpackb(await reader.readexactly(length))


# the broker


class Refusal(Exception):
    """What a client is told."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(eq=False)
class Consumer:
    """A flow of a client's."""

    client: Client
    flow: int
    given: int = 0
    """The number of the last message handed out."""
    unsettled: int = 0


@dataclass(eq=False)
class Queue:
    """An exclusive queue. Messages are kept by number, in order."""

    name: str
    topics: set[str] = field(default_factory=set)
    last_value: bool = False
    largest: int = 10_000_000
    temporary: bool = False
    messages: dict[int, bytes] = field(default_factory=dict)
    consumers: list[Consumer] = field(default_factory=list)
    browsers: list[Consumer] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def put(self, data: bytes) -> None:
        if self.last_value:
            self.messages.clear()
        self.messages[next(self.numbers)] = data
        self.move()

    def move(self) -> None:
        """Hand out what can be."""
        for browser in self.browsers:
            self._hand_out(browser, len(self.messages))
        if self.consumers:
            self._hand_out(self.consumers[0], WINDOW - self.consumers[0].unsettled)

    def _hand_out(self, to: Consumer, room: int) -> None:
        if room <= 0 or not self.messages or next(reversed(self.messages)) <= to.given:
            return
        new = deque[int]()
        for number in reversed(self.messages):
            if number <= to.given:
                break
            new.appendleft(number)
        for number in itertools.islice(new, room):
            to.given = number
            to.unsettled += 1
            to.client.tell(["m", to.flow, number, self.messages[number], False])

    def settle(self, by: Consumer, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self.messages.pop(number, None) is not None and by.unsettled:
                by.unsettled -= 1
        self.move()

    def pass_on(self) -> None:
        """The active consumer is no longer that, as when one of a higher priority has come, and stands last."""
        first = self.consumers.pop(0)
        first.client.tell(["a", first.flow, False])
        first.given = first.unsettled = 0
        self.consumers.append(first)
        self.consumers[0].client.tell(["a", self.consumers[0].flow, True])
        self.move()

    def end_flows(self) -> None:
        """All that consume are unbound, as when the queue's egress is shut down; their sessions live."""
        for consumer in list(self.consumers):
            consumer.client.unbind(consumer.flow)
            consumer.client.tell(["e", consumer.flow, "Queue Shutdown"])

    def leave(self, consumer: Consumer) -> None:
        if consumer in self.browsers:
            self.browsers.remove(consumer)
        if consumer in self.consumers:
            first = self.consumers[0] is consumer
            self.consumers.remove(consumer)
            if first and self.consumers:
                self.consumers[0].client.tell(["a", self.consumers[0].flow, True])
                self.move()


class Client:
    """A session."""

    def __init__(self, broker: Solace, writer: asyncio.StreamWriter) -> None:
        self.broker = broker
        self.writer = writer
        self.heard = time.monotonic()
        self.keepalive = 1.0
        self.subscriptions: dict[int, tuple[str, str | None]] = {}
        self.consumers: dict[int, tuple[Queue, Consumer]] = {}
        self.sent: dict[int, int] = {}
        self.dropped: set[int] = set()

    def tell(self, message: list[Any]) -> None:
        if not self.writer.is_closing():
            self.writer.write(_packet(message))

    def deliver(self, flow: int, data: bytes) -> None:
        """A direct message."""
        if self.writer.transport.get_write_buffer_size() > EGRESS:
            self.dropped.add(flow)
            return
        self.tell(["m", flow, None, data, flow in self.dropped])
        self.dropped.discard(flow)

    def close(self) -> None:
        for flow in list(self.consumers):
            self.unbind(flow)
        self.writer.transport.abort()

    # what clients ask for

    def alive(self, keepalive: float) -> None:
        self.keepalive = keepalive
        self.tell(["p"])

    def send(self, publisher: int, guaranteed: bool, messages: list[tuple[str, bytes]]) -> None:
        for topic, data in messages:
            self.sent[publisher] = number = self.sent.get(publisher, 0) + 1
            why: list[str | None] = [None, None]
            try:
                if topic in self.broker.kept_from_publishers:
                    raise Refusal("refused", "Publish ACL Denied")
                self.broker.publish(topic, data, guaranteed=guaranteed)
            except Refusal as refused:
                why = [refused.kind, str(refused)]
            if guaranteed:
                self.tell(["t", publisher, number, *why])

    def subscribe(self, flow: int, topic: str, share: str | None) -> None:
        self.broker.let_subscribe(topic)
        self.subscriptions[flow] = (topic, share)

    def bind(self, flow: int, name: str | None, topic: str | None, make: bool, replay: float | None) -> None:
        queue = self.broker.find(name, make=make)
        if topic is not None:
            self.broker.let_subscribe(topic)
            queue.topics.add(topic)
        if replay is not None:
            self._replay(queue, replay)
        consumer = Consumer(self, flow)
        queue.consumers.append(consumer)
        self.consumers[flow] = queue, consumer
        if queue.consumers[0] is consumer:
            self.tell(["a", flow, True])
        queue.move()

    def _replay(self, queue: Queue, since: float) -> None:
        if not self.broker.replays:
            raise Refusal("unavailable", "Out Of Replay Resources")
        if queue.consumers:
            raise Refusal("not first", "Client Initiated Replay Inactive Flow Not Allowed")
        queue.messages.clear()
        for at, about, data in self.broker.log:
            if at >= since and about in queue.topics:
                queue.messages[next(queue.numbers)] = data

    def browse(self, flow: int, name: str) -> None:
        queue = self.broker.find(name, make=False)
        browser = Consumer(self, flow)
        queue.browsers.append(browser)
        self.consumers[flow] = queue, browser
        queue.move()

    def settle(self, flow: int, numbers: list[int]) -> None:
        if flow in self.consumers:
            queue, consumer = self.consumers[flow]
            queue.settle(consumer, numbers)

    def unbind(self, flow: int) -> None:
        self.subscriptions.pop(flow, None)
        if flow in self.consumers:
            queue, consumer = self.consumers.pop(flow)
            queue.leave(consumer)
            if queue.temporary and not queue.consumers:
                self.broker.queues.pop(queue.name, None)


class Solace:
    """The broker. What it holds is in memory, and ends with it."""

    def __init__(self) -> None:
        self.port = 0
        self.queues: dict[str, Queue] = {}
        self.log: deque[tuple[float, str, bytes]] = deque(maxlen=100_000)
        self.may_make = True
        """Whether clients may have queues made."""
        self.replays = True
        """Whether it has what a replay takes."""
        self.kept_from_subscribers: set[str] = set()
        self.kept_from_publishers: set[str] = set()
        """Topics that the ACL profile denies."""
        self.clients: set[Client] = set()
        self._turns = itertools.count()
        self._names = itertools.count()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self._keeper: asyncio.Task[None]

    def find(self, name: str | None, *, make: bool) -> Queue:
        if name in self.queues:
            return self.queues[name]
        if name is not None and not make:
            raise Refusal("unknown", f"Unknown Queue {name}")
        if not self.may_make:
            raise Refusal("refused", "Permission Not Allowed")
        made = Queue(name or f"#P2P/QTMP/{next(self._names)}", temporary=name is None)
        self.queues[made.name] = made
        return made

    def let_subscribe(self, topic: str) -> None:
        if topic in self.kept_from_subscribers:
            raise Refusal("unsubscribed", "Subscription ACL Denied")

    def add_queue(self, name: str, topic: str, *, last_value: bool = False, largest: int = 10_000_000) -> Queue:
        """What an administrator makes."""
        self.queues[name] = Queue(name, {topic}, last_value, largest)
        return self.queues[name]

    def publish(self, topic: str, data: bytes, *, guaranteed: bool) -> None:
        """Refusal where a queue has no room for it."""
        queues = [queue for queue in self.queues.values() if topic in queue.topics]
        if guaranteed and any(len(data) > queue.largest for queue in queues):
            raise Refusal("unavailable", "Spool Over Quota")
        if guaranteed or queues:
            self.log.append((time.time(), topic, data))
        for queue in queues:
            if len(data) <= queue.largest:
                queue.put(data)
        shared: dict[str, list[tuple[Client, int]]] = {}
        for client in list(self.clients):
            for flow, (about, share) in list(client.subscriptions.items()):
                if about == topic and share is None:
                    client.deliver(flow, data)
                elif about == topic and share is not None:
                    shared.setdefault(share, []).append((client, flow))
        for sharers in shared.values():
            client, flow = sharers[next(self._turns) % len(sharers)]
            client.deliver(flow, data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        client = Client(self, writer)
        self.clients.add(client)
        try:
            while True:
                number, what, *arguments = await _packets(reader)
                client.heard = time.monotonic()
                answer: list[Any] = ["r", number, None, None]
                try:
                    getattr(client, what)(*arguments)
                except Refusal as refused:
                    answer = ["r", number, refused.kind, str(refused)]
                if number:
                    client.tell(answer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self.clients.discard(client)
            client.close()
            self._serving.discard(serving)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            for client in list(self.clients):
                if time.monotonic() - client.heard > MISSED * client.keepalive:
                    client.writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeper.cancel()
        self._server.close()
        for serving in self._serving:
            serving.cancel()
        await asyncio.wait([self._keeper, *self._serving])
        await self._server.wait_closed()


# the session


class DoublePublisher:
    def __init__(self, link: DoubleLink, number: int, guaranteed: bool) -> None:
        self._link = link
        self._number = number
        self._guaranteed = guaranteed

    async def send(self, messages: Sequence[tuple[str, bytes]]) -> None:
        self._link.say(0, "send", self._number, self._guaranteed, list(messages))
        await self._link.drain()

    async def aclose(self) -> None:
        self._link.publishers.pop(self._number, None)


class DoubleFlow:
    def __init__(self, link: DoubleLink, number: int) -> None:
        self._link = link
        self._number = number

    async def settle(self, receipts: Sequence[Any]) -> None:
        self._link.say(0, "settle", self._number, list(receipts))

    async def aclose(self) -> None:
        self._link.flows.pop(self._number, None)
        with contextlib.suppress(BusError):
            await self._link.ask("unbind", self._number)


class DoubleLink:
    """A `Link`."""

    def __init__(self, options: SolaceOptions) -> None:
        self.lost: BusError | None = None
        self.on_lost: set[Ended] = set()
        self.publishers: dict[int, Taken] = {}
        self.flows: dict[int, tuple[Hear, Callable[[bool], None] | None, Ended | None]] = {}
        self._options = options
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._heard = 0.0
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> None:
        host, _, port = self._options.host.rpartition(":")
        try:
            async with asyncio.timeout(self._options.timeout):
                self._reader, self._writer = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError) as error:
            raise BusUnavailable(f"Solace at {self._options.host}: {error}") from error
        self._heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._live())]
        try:
            await self.ask("alive", self._options.keepalive)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self.aclose()))
            raise

    async def _listen(self) -> None:
        try:
            while True:
                kind, *what = await _packets(self._reader)
                self._heard = time.monotonic()
                getattr(self, f"_on_{kind}")(*what)
        except (OSError, EOFError) as error:
            self.lose(BusUnavailable(f"the link to Solace was lost: {error}"))

    def _on_m(self, flow: int, number: int | None, data: bytes, discarded: bool) -> None:
        """The client has threads for messages and others for turns: a turn may overtake what came in front of it."""
        asyncio.get_running_loop().call_soon(self._hear, flow, Inbound(data, number, discarded))

    def _hear(self, flow: int, message: Inbound) -> None:
        if flow in self.flows:
            self.flows[flow][0](message)

    def _on_a(self, flow: int, active: bool) -> None:
        told = self.flows[flow][1] if flow in self.flows else None
        if told is not None:
            told(active)

    def _on_e(self, flow: int, why: str) -> None:
        ended = self.flows[flow][2] if flow in self.flows else None
        if ended is not None:
            ended(BusUnavailable(why))

    def _on_t(self, publisher: int, number: int, kind: str | None, why: str | None) -> None:
        if publisher in self.publishers:
            self.publishers[publisher](number, None if kind is None else _KINDS[kind](why))

    def _on_r(self, number: int, kind: str | None, text: str | None) -> None:
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            if kind is None:
                answer.set_result(None)
            else:
                answer.set_exception(_KINDS[kind](str(text)))

    def _on_p(self) -> None:
        """That it was heard is all."""

    async def _live(self) -> None:
        while self.lost is None:
            if time.monotonic() - self._heard > MISSED * self._options.keepalive:
                self.lose(BusUnavailable("Solace does not answer"))
                return
            self.say(0, "alive", self._options.keepalive)
            await asyncio.sleep(self._options.keepalive)

    def lose(self, error: BusError) -> None:
        """The link is gone."""
        if self.lost is not None:
            return
        self.lost = error
        self._writer.transport.abort()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        for told in list(self.on_lost):
            told(error)

    def say(self, number: int, what: str, *arguments: Any) -> None:
        if self.lost is not None:
            raise self.lost
        self._writer.write(_packet([number, what, *arguments]))

    async def drain(self) -> None:
        try:
            async with asyncio.timeout(self._options.timeout):
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            raise BusUnavailable(f"the link to Solace does not take messages: {error}") from error

    async def ask(self, what: str, *arguments: Any) -> None:
        number = next(self._numbers)
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self.say(number, what, *arguments)
            async with asyncio.timeout(self._options.timeout):
                await answer
        except TimeoutError:
            raise BusUnavailable(f"Solace did not answer for {self._options.timeout:g} s") from None
        finally:
            del self._asked[number]

    async def publisher(self, taken: Taken, *, guaranteed: bool) -> DoublePublisher:
        if self.lost is not None:
            raise self.lost
        number = next(self._numbers)
        self.publishers[number] = taken
        return DoublePublisher(self, number, guaranteed)

    async def _flow(
        self,
        hear: Hear,
        what: str,
        *arguments: Any,
        active: Callable[[bool], None] | None = None,
        ended: Ended | None = None,
    ) -> DoubleFlow:
        number = next(self._numbers)
        self.flows[number] = hear, active, ended
        try:
            await self.ask(what, number, *arguments)
        except BaseException:
            self.flows.pop(number, None)
            if self.lost is None:
                self.say(0, "unbind", number)
            raise
        return DoubleFlow(self, number)

    async def subscribe(self, topic: str, hear: Hear, share: str | None = None) -> DoubleFlow:
        return await self._flow(hear, "subscribe", topic, share)

    async def bind(
        self,
        queue: str | None,
        hear: Hear,
        ended: Ended,
        *,
        topic: str | None = None,
        make: bool = False,
        active: Callable[[bool], None] | None = None,
        replay: Literal["earliest"] | datetime | None = None,
    ) -> DoubleFlow:
        since = replay.timestamp() if isinstance(replay, datetime) else 0.0 if replay else None
        return await self._flow(hear, "bind", queue, topic, make, since, active=active, ended=ended)

    async def browse(self, queue: str, hear: Hear) -> DoubleFlow:
        return await self._flow(hear, "browse", queue)

    async def aclose(self) -> None:
        self.lose(BusUnavailable("this session was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


Options = SolaceOptions


async def open_bus(options: SolaceOptions) -> SolaceBus:
    """The driver, over the double."""

    async def connect() -> DoubleLink:
        link = DoubleLink(options)
        await link.connect()
        return link

    bus = SolaceBus(connect, options)
    await bus.open()
    return bus


# a real one


def plain_place(host: str) -> tuple[str, int] | None:
    """Where a broker is that can be reached by a proxy; None: there are several, or a certificate that names it."""
    place = urlsplit(host if "//" in host else f"tcp://{host}")
    return (
        (place.hostname, place.port or 55555) if place.scheme == "tcp" and "," not in host and place.hostname else None
    )
