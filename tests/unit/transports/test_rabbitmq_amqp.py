"""What a broker does that a real one cannot be brought to do at will: a double, which answers what it is asked."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiormq.exceptions import ChannelPreconditionFailed
from pamqp import body, commands, frame, header

from esp_pubsub.bus import Break
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable
from esp_pubsub.transports.rabbitmq import Options, open_bus, pipe
from esp_pubsub.transports.rabbitmq.refusals import trouble
from esp_pubsub.transports.rabbitmq.stream_group import StreamGroupFeed
from tests.unit.workbench import until

TOPIC = "host:5555/p/q/w/I"
SHORT = 0.5  # a timeout, for as long as it is to be over
_ANSWERS: dict[str, Callable[[Any], Any]] = {
    "Connection.StartOk": lambda _: commands.Connection.Tune(2047, 131072, 60),
    "Connection.Open": lambda _: commands.Connection.OpenOk(),
    "Connection.Close": lambda _: commands.Connection.CloseOk(),
    "Channel.Open": lambda _: commands.Channel.OpenOk(),
    "Channel.Close": lambda _: commands.Channel.CloseOk(),
    "Confirm.Select": lambda _: commands.Confirm.SelectOk(),
    "Exchange.Declare": lambda _: commands.Exchange.DeclareOk(),
    "Queue.Declare": lambda asked: commands.Queue.DeclareOk(asked.queue or "amq.gen-x", 0, 0),
    "Queue.Bind": lambda _: commands.Queue.BindOk(),
    "Basic.Qos": lambda _: commands.Basic.QosOk(),
    "Basic.Consume": lambda asked: commands.Basic.ConsumeOk(asked.consumer_tag),
}

logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # it tells of the trouble that is meant here


class Double:
    """A broker. `on` names what it does in place of answering, `then` what it does behind an answer: both get the
    connection, the number of the channel and what was asked.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.on: dict[str, Callable[[asyncio.StreamWriter, int, Any], None]] = {}
        self.then: dict[str, Callable[[asyncio.StreamWriter, int, Any], None]] = {}
        self.refuses = False
        self.blocked = False
        self.version = "3.10.8"
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            if not self.refuses:
                await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.remove(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        can = {"publisher_confirms": True, "basic.nack": True}
        tell(writer, 0, commands.Connection.Start(server_properties={"version": self.version, "capabilities": can}))
        while True:
            head = await reader.readexactly(7)
            kind, channel, size = struct.unpack(">BHI", head)
            said = frame.unmarshal(head + await reader.readexactly(size + 1))[2]
            name = getattr(said, "name", "")
            if kind != 1 or (self.blocked and channel):
                continue
            self.asked.append(name)
            if name in self.on:
                self.on[name](writer, channel, said)
            elif name in _ANSWERS:
                tell(writer, channel, _ANSWERS[name](said))
            if name in self.then:
                self.then[name](writer, channel, said)

    def blocks(self, writer: asyncio.StreamWriter, _: int, __: Any) -> None:
        """It is short of memory from now on, and tells who writes."""
        self.blocked = True
        tell(writer, 0, commands.Connection.Blocked("memory"))

    def unblocks(self) -> None:
        self.blocked = False
        self.all(commands.Connection.Unblocked())

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def all(self, said: Any, channel: int = 0) -> None:
        for writer in self._writers:
            tell(writer, channel, said)


def tell(writer: asyncio.StreamWriter, channel: int, *said: Any) -> None:
    writer.write(b"".join(frame.marshal(each, channel) for each in said))


def message(tag: str, number: int, data: bytes) -> tuple[Any, ...]:
    """A delivery."""
    properties = header.ContentHeader(body_size=len(data), properties=commands.Basic.Properties())
    return commands.Basic.Deliver(tag, number, False, "x", TOPIC), properties, body.ContentBody(data)


@asynccontextmanager
async def opened(**more: Any) -> AsyncIterator[tuple[Double, Any]]:
    double = Double()
    server = await asyncio.start_server(double.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        bus = await open_bus(
            Options(**{"host": "127.0.0.1", "port": port, "timeout": 10.0, "buspersistence": False} | more)
        )
        try:
            yield double, bus
        finally:
            await bus.aclose()
            double.cut()


# what a reader is told


async def ended(*feeds: Any) -> None:
    for feed in feeds:
        with pytest.raises(BusUnavailable):
            await feed.read(1, 1)
        await feed.aclose()


async def test_a_reader_is_told_that_it_was_away_also_if_the_broker_lets_it_in_at_the_second_time_only() -> None:
    async with opened() as (double, bus):
        feed = await bus.feed(TOPIC, "latest", None)
        double.refuses = True
        double.cut()
        await ended(feed)
        for _ in range(2):
            with pytest.raises(BusUnavailable):
                await bus.feed(TOPIC, "latest", None)
        double.refuses = False
        (told,) = await (await bus.feed(TOPIC, "latest", None)).read(1, 1)
        assert isinstance(told, Break)


async def test_each_of_two_readers_of_a_topic_is_told_that_it_was_away() -> None:
    async with opened() as (double, bus):
        feeds = [await bus.feed(TOPIC, "latest", None) for _ in range(2)]
        double.cut()
        await ended(*feeds)
        for _ in feeds:
            (told,) = await (await bus.feed(TOPIC, "latest", None)).read(1, 1)
            assert isinstance(told, Break)
        assert bus.missed == {(TOPIC, None): []}


async def test_a_reader_that_never_took_its_place_has_missed_nothing() -> None:
    async with opened() as (double, bus):
        double.on["Queue.Bind"] = lambda *_: double.cut()
        with pytest.raises(BusUnavailable):
            await bus.feed(TOPIC, "latest", None)
        assert not bus.missed


async def test_a_value_that_comes_late_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esp_pubsub.transports.rabbitmq.values._COMES", 0.05)
    async with opened() as (double, bus):
        consumers: list[str] = []
        double.then["Basic.Consume"] = lambda _, __, asked: consumers.append(asked.consumer_tag)

        def late(writer: asyncio.StreamWriter, channel: int, _: Any) -> None:
            """With the second one it asks whether anything is still to come."""
            if consumers:
                tell(writer, channel, *message(consumers[0], 1, b"value"))
            tell(writer, channel, commands.Basic.QosOk())

        double.on["Basic.Qos"] = late
        assert await bus.retained(TOPIC, "key") == b"value"


async def test_values_are_retained_though_the_broker_stumbles_while_many_are_written() -> None:
    """It ends the connection, and one of those who write may see that before the others have heard why."""
    async with opened() as (double, bus):
        double.then["Basic.Publish"] = lambda writer, channel, _: tell(writer, channel, commands.Basic.Ack(1, False))
        all_asked = asyncio.Event()
        double.on["Queue.Declare"] = lambda *_: double.asked.count("Queue.Declare") < 10 or all_asked.set()
        retaining = [asyncio.create_task(bus.retain(TOPIC, f"{n}", b"value")) for n in range(10)]
        await all_asked.wait()
        link = bus.link._connections["writing"][0]
        link._reader_task.add_done_callback(
            lambda _: retaining.append(asyncio.create_task(bus.retain(TOPIC, "late", b"value")))
        )
        del double.on["Queue.Declare"]
        double.all(commands.Connection.Close(541, "INTERNAL_ERROR - stream", 0, 0))
        async with asyncio.timeout(60):
            await asyncio.wait([link._reader_task])  # then somebody finds the connection lost
            await asyncio.gather(*retaining)
        assert len(retaining) == double.asked.count("Basic.Publish") == 11


async def test_a_broker_that_stands_still_does_not_say_that_there_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esp_pubsub.transports.rabbitmq.values._COMES", 0.05)
    async with opened() as (double, bus):

        def stands_still(*_: Any) -> None:
            double.on["Basic.Qos"] = lambda *_: None
            bus.link.timeout = SHORT

        double.then["Basic.Consume"] = stands_still
        with pytest.raises(BusUnavailable):
            await bus.retained(TOPIC, "key")


async def test_a_server_of_requests_ends_when_its_queue_is_deleted() -> None:
    async def answer(data: bytes) -> bytes:
        return data

    async with opened() as (double, bus):
        double.then["Basic.Consume"] = lambda writer, channel, asked: tell(
            writer, channel, commands.Basic.Cancel(asked.consumer_tag, True)
        )
        with pytest.raises(BusUnavailable, match="deleted"):
            async with asyncio.timeout(60):
                await bus.serve("host:5555/M", answer)


async def test_a_turn_that_is_over_as_soon_as_it_begins_is_noticed() -> None:
    async with opened() as (double, bus):
        double.then["Basic.Consume"] = lambda writer, channel, asked: tell(
            writer, channel, commands.Basic.Cancel(asked.consumer_tag, True)
        )
        feed = StreamGroupFeed(bus, None, TOPIC, 0, "g")  # type: ignore[arg-type]  # it comes to no stream
        channel = await feed._wait_for_turn()
        with pytest.raises(BusUnavailable, match="deleted"):
            async with asyncio.timeout(60):
                while True:
                    feed._check()
                    await asyncio.sleep(0)
        await bus.link.drop(channel)


async def test_a_quorum_queue_that_an_older_broker_made_is_read_with_the_limit_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened(buspersistence=True, quorum=True) as (double, bus):
        declared: list[dict[str, Any]] = []

        def declares(writer: asyncio.StreamWriter, channel: int, asked: Any) -> None:
            declared.append(asked.arguments)
            if "x-delivery-limit" in asked.arguments:
                tell(writer, channel, commands.Channel.Close(406, "inequivalent arg 'x-delivery-limit'", 50, 10))
            else:
                tell(writer, channel, commands.Queue.DeclareOk(asked.queue, 0, 0))

        double.version = "4.0.5"
        double.on["Queue.Declare"] = declares
        await bus.feed(TOPIC, "latest", "g")
        assert [arguments.get("x-delivery-limit") for arguments in declared[:2]] == [-1, None]
        assert "policy with delivery-limit" in caplog.text


async def test_a_channel_is_closed_once_however_long_the_answer_takes() -> None:
    """For a second time the broker may end the connection, and with it all that is open on it."""
    async with opened(heartbeat=1.0) as (double, bus):
        writing, other = await bus.pipe(TOPIC), await bus.pipe(TOPIC)
        before = double.asked.count("Channel.Close")
        closing: list[tuple[asyncio.StreamWriter, int]] = []
        double.on["Channel.Close"] = lambda writer, channel, _: closing.append((writer, channel))
        bus.link.timeout = 2.0  # more than what aiormq waits: a heartbeat
        await writing.aclose()
        await until(lambda: writing.closed)
        assert double.asked.count("Channel.Close") == before + 1
        ((writer, channel),) = closing
        tell(writer, channel, commands.Channel.CloseOk())
        async with asyncio.timeout(60):
            await asyncio.wait([writing._channel.closing])
        assert list(other._channel.connection.channels) == [other._channel.number]
        del double.on["Channel.Close"]


# a broker that is short of memory or disk


async def is_blocked(writing: Any) -> None:
    async with asyncio.timeout(60):
        while not await writing._channel.is_blocked():  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0)


async def test_a_channel_that_cannot_be_opened_is_not_closed_either() -> None:
    """The broker would close the connection for that, and all that is open on it."""
    async with opened() as (double, bus):
        first = await bus.pipe(TOPIC)
        double.then["Basic.Publish"] = double.blocks
        await first.write([b"a"])
        await is_blocked(first)
        before = double.asked.count("Channel.Close")
        bus.link.timeout = SHORT
        for _ in range(2):
            with pytest.raises(BusUnavailable, match="short of memory or disk"):
                await bus.pipe(TOPIC)
        bus.link.timeout = 10.0
        double.unblocks()
        second = await bus.pipe(TOPIC)
        assert double.asked.count("Channel.Close") == before
        assert list(first._channel.connection.channels) == [first._channel.number, second._channel.number]


async def test_a_value_that_the_broker_does_not_take_is_trouble_within_the_timeout() -> None:
    async with opened() as (double, bus):
        double.then["Basic.Publish"] = double.blocks
        double.then["Queue.Declare"] = lambda *_: setattr(bus.link, "timeout", SHORT)
        with pytest.raises(BusUnavailable, match="no answer"):
            async with asyncio.timeout(60):
                await bus.retain(TOPIC, "key", b"value")


async def test_the_time_in_which_the_broker_takes_nothing_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "_MOMENT", 0.001)
    now, looks = [0.0], [0]

    def clock(_: Any) -> float:
        looks[0] += 1
        return now[0]

    async def looked() -> None:
        before = looks[0]
        while looks[0] < before + 5:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0)

    monkeypatch.setattr(pipe.RabbitPipe, "_now", clock)
    async with opened() as (double, bus), asyncio.timeout(60):
        writing = await bus.pipe(TOPIC)
        double.then["Basic.Publish"] = double.blocks
        await writing.write([b"a"])
        await is_blocked(writing)
        confirming = asyncio.ensure_future(writing.confirmed(0))
        for now[0] in (9.0, 100.0):
            await looked()
        double.unblocks()
        await writing.until_unblocked()
        now[0] = 109.0
        await looked()
        assert not confirming.done()
        now[0] = 111.0
        with pytest.raises(BusUnavailable, match="nothing was confirmed"):
            await confirming


def hands_over(writer: asyncio.StreamWriter, channel: int, asked: Any) -> None:
    if asked.queue.startswith("g@"):
        found = message(asked.consumer_tag, 1, b"a") + message(asked.consumer_tag, 2, b"b")
        tell(writer, channel, commands.Basic.ConsumeOk(asked.consumer_tag), *found)
    else:  # there is no such value
        tell(writer, channel, commands.Channel.Close(404, "NOT_FOUND - no queue", 60, 20))


async def held_back(double: Double, bus: Any) -> tuple[Any, asyncio.Task[None]]:
    """A group's feed, and what confirms a message of it while the broker is short of memory."""
    double.on["Basic.Consume"] = hands_over
    double.then["Basic.Publish"] = lambda writer, channel, _: tell(writer, channel, commands.Basic.Ack(1, False))
    feed = await bus.feed(TOPIC, "latest", "g")
    found = [await feed.read(1, 100) for _ in range(2)]
    await feed.confirm(found[0][0].position, b"state")
    double.then["Basic.Publish"] = double.blocks
    bus.link.timeout = SHORT
    confirming = asyncio.ensure_future(feed.confirm(found[1][0].position, b"state"))
    done, _ = await asyncio.wait([confirming], timeout=3 * SHORT)
    assert not done
    return feed, confirming


async def test_confirming_waits_as_long_as_the_broker_is_short_of_memory() -> None:
    async with opened(buspersistence=True) as (double, bus):
        feed, confirming = await held_back(double, bus)
        bus.link.timeout = 10.0
        double.unblocks()
        double.all(commands.Basic.Ack(2, False), feed._channel.number)
        await confirming


async def test_closing_a_feed_ends_a_confirm_that_waits_for_the_broker() -> None:
    async with opened(buspersistence=True) as (double, bus):
        feed, confirming = await held_back(double, bus)
        async with asyncio.timeout(60):
            await feed.aclose()
            with pytest.raises(BusUnavailable, match="closed"):
                await confirming


async def test_letting_go_of_a_pipe_waits_for_no_answer() -> None:
    """On a busy broker it comes late, and a takeover waits for this."""
    async with opened() as (double, bus):
        pipe = await bus.pipe(TOPIC)
        closing: asyncio.Future[Callable[[], None]] = asyncio.get_running_loop().create_future()
        double.on["Channel.Close"] = lambda writer, number, _: closing.set_result(
            lambda: tell(writer, number, commands.Channel.CloseOk())
        )
        async with asyncio.timeout(5):
            await pipe.aclose()
            (await closing)()
            double.on.clear()


# what it says no with


PASSING = (
    "NOT_ALLOWED - access to vhost '/' refused for user 'guest': connection limit (0) is reached",
    "NOT_ALLOWED - connection refused for user 'guest': user connection limit (3) is reached",
    "INTERNAL_ERROR - access to vhost '/' refused for user 'guest': vhost '/' is down",
    "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'",
)
LASTING = (
    "NOT_ALLOWED - vhost nix not found",
    "NOT_ALLOWED - access to vhost '/' refused for user 'guest'",
)


@pytest.mark.parametrize(
    ("says", "error"), [*((says, BusUnavailable) for says in PASSING), *((says, BusRefused) for says in LASTING)]
)
async def test_a_no_that_passes_is_trouble_and_one_that_lasts_is_a_refusal_both_in_the_broker_s_words(
    says: str, error: type[BusError]
) -> None:
    async with opened() as (double, bus):
        double.on["Connection.Open"] = lambda writer, number, _: tell(
            writer, number, commands.Connection.Close(530, says, 10, 40)
        )
        double.cut()
        await asyncio.sleep(0.05)
        with pytest.raises(BusError) as caught:
            await bus.retained(TOPIC, "schema")
    assert type(caught.value) is error
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("PRECONDITION_FAILED - cannot declare queue 'x': queue limit in vhost '/' (0) is reached", BusUnavailable),
        ("PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'x'", BusRefused),
        ("NOT_ALLOWED - number of channels opened for user 'guest' has reached the maximum allowed user limit of (0)",
         BusUnavailable),
        ("PRECONDITION_FAILED - cannot publish: rate limit of user 'guest' exceeded", BusUnavailable),
        ("PRECONDITION_FAILED - inequivalent arg 'x-delivery-limit' for queue 'x'", BusRefused),
    ],
)  # fmt: skip
def test_a_limit_passes_and_what_is_made_otherwise_does_not(says: str, error: type[BusError]) -> None:
    assert type(trouble("making x", ChannelPreconditionFailed(says))) is error
