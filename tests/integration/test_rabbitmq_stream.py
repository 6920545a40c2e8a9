"""Streams of a real RabbitMQ: the conformance suite, and what it cannot provoke."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import os
import secrets
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import aio_pika
import pytest
from rstream import AMQPMessage, CompressionType, ConsumerOffsetSpecification, OffsetType, Producer, amqp_decoder
from rstream import Consumer as StreamConsumer

from esp_pubsub.address import order_topic
from esp_pubsub.bus import Bounds, Break, Bus, Capabilities, Feed, Message, Start
from esp_pubsub.errors import BusRefused, BusUnavailable, ConfigError
from esp_pubsub.testing import conformance
from esp_pubsub.transports.rabbitmq.stream import StreamFeed, StreamPipe, Streams, retention
from esp_pubsub.transports.rabbitmq.stream_link import Address, Key
from esp_pubsub.transports.rabbitmq.stream_messages import publication
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ

HOST = "127.0.0.1"
TIMEOUT = 10.0  # longer than any machine takes; a broker that is frozen on purpose is given SHORT
SHORT = 1.0
SLACK = 5.0  # what a loaded machine may add
SMALL = {"max-length-bytes": "4000", "stream-max-segment-size-bytes": "1000"}


def streams_at(
    port: int, arguments: Mapping[str, str] = MappingProxyType({}), timeout: float = TIMEOUT, **who: str
) -> Streams:
    found = Address(
        ((HOST, port),), **{"user": "guest", "password": "guest", "vhost": "/"} | who, context=None, timeout=timeout
    )
    return Streams(found, arguments)


@asynccontextmanager
async def opened(rabbitmq: RabbitMQ, port: int = 0, **settings: Any) -> AsyncIterator[Streams]:
    streams = streams_at(port or rabbitmq.stream_port, **settings)
    await streams.begin()
    try:
        yield streams
    finally:
        await streams.aclose()


@pytest.fixture
def name() -> str:
    return f"host:5555/{secrets.token_hex(4)}/q/w/I"


async def confirm_all(pipe: StreamPipe, total: int) -> None:
    done = 0
    while done < total:
        done = await pipe.confirmed(done)


async def put(streams: Streams, name: str, sent: Sequence[bytes]) -> None:
    pipe = await streams.pipe(name)
    await pipe.write(sent)
    await confirm_all(pipe, len(sent))
    await pipe.aclose()


async def read(feed: Feed, count: int) -> list[Message]:
    found: list[Message] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            items = await feed.read(10_000, 1 << 20)
            assert not any(isinstance(item, Break) for item in items), items
            found += items  # type: ignore[arg-type]
    return found


async def all_of(streams: Streams, name: str) -> list[bytes]:
    """Everything that a stream holds now."""
    bounds = await streams.bounds(name)
    feed = await streams.feed(name, "earliest")
    found: list[Message] = []
    while not found or found[-1].position + 1 < bounds.end:
        if bounds.first == bounds.end:
            break
        found += await read(feed, 1)
    await feed.aclose()
    return [message.data for message in found]


async def bounds_if_served(streams: Streams, name: str) -> Bounds | None:
    try:
        return await streams.bounds(name)
    except BusUnavailable:
        return None


def sockets() -> int:
    gc.collect()
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


class StreamBus:
    """What of a `Bus` streams are."""

    names: ClassVar[set[str]] = set()

    def __init__(self, streams: Streams, proxy: Proxy | None) -> None:
        self.streams = streams
        self.proxy = proxy
        self.capabilities = Capabilities(
            suffix_only=True, replay=True, retained=False, groups=False, incarnation=True, requests=False, catalog=True,
            max_message_bytes=streams.max_message_bytes,
        )  # fmt: skip

    async def bounds(self, topic: str) -> Bounds:
        self.names.add(topic)
        return await self.streams.bounds(topic, make=True)

    async def pipe(self, topic: str) -> StreamPipe:
        self.names.add(topic)
        return await self.streams.pipe(topic)

    async def feed(self, topic: str, start: Start, group: str | None) -> StreamFeed:
        return await self.streams.feed(topic, start)

    async def topics(self) -> Sequence[str]:
        return sorted(self.names)

    async def purge(self, topic: str) -> None:
        await self.streams.purge(topic)

    async def aclose(self) -> None:
        await self.streams.aclose()


@pytest.mark.parametrize("check", conformance.CHECKS)
async def test_streams_keep_the_contract(check: str, rabbitmq: RabbitMQ) -> None:
    async with AsyncExitStack() as proxies:

        async def open_bus() -> Bus:
            proxy, port = None, rabbitmq.stream_port
            if "link" in check:
                proxy = await asyncio.to_thread(Proxy, HOST, port)  # finding a port reads a file
                port = (await proxies.enter_async_context(proxy)).port
            streams = streams_at(port, SMALL if "retention" in check or "expired" in check else {})
            await streams.begin()
            return StreamBus(streams, proxy)  # type: ignore[return-value]

        async def cut(bus: Any) -> None:
            bus.proxy.refuse()
            bus.proxy.cut()

        @asynccontextmanager
        async def fail_in_the_middle(bus: Bus, topic: str) -> AsyncIterator[bytes]:
            yield bytes(bus.capabilities.max_message_bytes + 1)

        async def trim(topic: str) -> None:
            await take_oldest(rabbitmq, topic)

        context = conformance.Context(
            open_bus=open_bus, cut=cut, trim=trim, fail_in_the_middle=fail_in_the_middle, quiet=0.1, patience=10.0
        )
        try:
            await conformance.CHECKS[check](context)
        except conformance.NotClaimed as why:
            pytest.skip(str(why))


async def take_oldest(rabbitmq: RabbitMQ, name: str) -> None:
    """Fill a stream until its retention has taken ten messages or more."""
    async with opened(rabbitmq) as streams:
        before = (await streams.bounds(name)).first
        pipe = await streams.pipe(name)
        n = 0
        while (await streams.bounds(name)).first < before + 10:
            for _ in range(20):
                await pipe.write([b"filler"])
                n = await pipe.confirmed(n)


async def test_what_stands_after_a_cut_is_a_prefix_without_a_gap(rabbitmq: RabbitMQ, name: str) -> None:
    """Fifty times the link is cut in mid-flight, after a number of bytes that differs each time, on either way."""
    kept: Counter[str] = Counter()
    async with opened(rabbitmq) as streams, Proxy(HOST, rabbitmq.stream_port) as proxy:
        for attempt in range(50):
            topic = f"{name}{attempt}"
            proxy.heal()
            async with opened(rabbitmq, proxy.port) as cut:
                pipe = await cut.pipe(topic)
                sent = [b"%06d" % n + b"." * (n % 700) for n in range(2_000)]
                counted = [0]
                if attempt % 2:
                    proxy.cut_after(attempt * 14_001, "up")
                else:
                    proxy.cut_after(attempt * 8, "down")  # a confirmation has 21
                with pytest.raises(BusUnavailable):
                    await write_and_count(pipe, sent, counted)
                with pytest.raises(BusUnavailable):
                    await pipe.write([b"ghost"])
                await pipe.aclose()
            found = await all_of(streams, topic)
            assert found == sent[: len(found)], f"attempt {attempt}: a gap or another order"
            assert counted[-1] <= len(found), f"attempt {attempt}: {counted[-1]} confirmed, {len(found)} there"
            kept["none" if not found else "all" if len(found) == len(sent) else "some"] += 1
    assert kept["some"] >= 20, kept


async def write_and_count(pipe: StreamPipe, sent: Sequence[bytes], counted: list[int]) -> None:
    """Write, with up to 100 messages unconfirmed, until there is trouble."""
    for at in range(0, len(sent), 20):
        while at + 20 > counted[-1] + 100:
            counted.append(await pipe.confirmed(counted[-1]))
        await pipe.write(sent[at : at + 20])
    while True:
        counted.append(await pipe.confirmed(counted[-1]))


@pytest.mark.parametrize("idle", [False, True])
async def test_a_frozen_broker_ends_what_is_open_within_the_timeout(rabbitmq: RabbitMQ, name: str, idle: bool) -> None:
    before = sockets()
    async with opened(rabbitmq) as streams:
        pipe, feed = await streams.pipe(name), await streams.feed(name, "latest")
        streams.address = replace(streams.address, timeout=SHORT)
        for link in (pipe._link, feed._link):
            assert link is not None
            link.timeout = SHORT
        tasks = len(asyncio.all_tasks())
        await asyncio.to_thread(rabbitmq.freeze)
        began = time.monotonic()
        with pytest.raises(BusUnavailable):
            if idle:
                await feed.read(10, 1 << 20)
            else:
                await pipe.write([b"x" * 1000] * 5_000)
                await pipe.confirmed(0)
        assert time.monotonic() - began < 2 * SHORT + SLACK
        with pytest.raises(BusUnavailable):
            await streams.pipe(name)
        await pipe.aclose()
        await feed.aclose()
        assert time.monotonic() - began < 5 * SHORT + SLACK
        assert len(asyncio.all_tasks()) == tasks
    assert sockets() == before
    rabbitmq.thaw()
    async with opened(rabbitmq) as streams:
        await put(streams, name, [b"after"])
        assert (await all_of(streams, name))[-1] == b"after"


async def test_a_broker_that_was_killed_has_what_it_confirmed_at_the_same_positions(
    own_rabbitmq: RabbitMQ, name: str
) -> None:
    sent = [b"%d" % n for n in range(100)]
    async with opened(own_rabbitmq) as streams:
        await put(streams, f"{name}0", [b"the first stream of a node is lost if that is killed before it has noted it"])
    await asyncio.to_thread(own_rabbitmq.restart)
    async with opened(own_rabbitmq) as streams:
        feed = await streams.feed(name, "earliest")
        await put(streams, name, sent)
        known = await read(feed, 100)
        bounds = await streams.bounds(name)
        await asyncio.to_thread(own_rabbitmq.kill)
        with pytest.raises(BusUnavailable):
            await feed.read(10, 1 << 20)
        await asyncio.to_thread(own_rabbitmq.mend)
    async with opened(own_rabbitmq) as streams:
        async with asyncio.timeout(60):
            while await bounds_if_served(streams, name) != bounds:
                pass
        assert await read(await streams.feed(name, known[40].position), 60) == known[40:]


async def test_positions_outlive_what_retention_took(rabbitmq: RabbitMQ, name: str) -> None:
    async with opened(rabbitmq, arguments=SMALL) as streams:
        await put(streams, name, [b"0"])
        base = (await streams.bounds(name)).incarnation
        for _ in range(3):
            await take_oldest(rabbitmq, name)
        bounds = await streams.bounds(name)
        assert bounds.incarnation == base
        assert bounds.first > base + 30


async def test_a_stored_position_of_a_stream_that_was_deleted_behind_our_back_begins_with_a_break(
    rabbitmq: RabbitMQ, name: str
) -> None:
    async with opened(rabbitmq) as streams:
        feed = await streams.feed(name, "earliest")
        await put(streams, name, [b"%d" % n for n in range(10)])
        old = (await read(feed, 10))[3].position
        await asyncio.to_thread(rabbitmq.ctl, "delete_queue", name)
        await put(streams, name, [b"new"])
        ahead = old + (1 << 40)  # by a clock that was ahead
        for reader in (feed, await streams.feed(name, old), await streams.feed(name, ahead)):
            (told, *rest) = await reader.read(10, 1 << 20)
            assert isinstance(told, Break)
            assert told.incarnation
            rest = rest or await read(reader, 1)
            assert [item.data for item in rest] == [b"new"]
            assert rest[0].position > old


async def test_others_read_what_we_write(rabbitmq: RabbitMQ, name: str) -> None:
    """A client of streams and one of AMQP 0-9-1, single messages and those that were written together."""
    sent = [b"one", b"", b"two", b"x" * 300, bytes(range(256))]
    async with opened(rabbitmq) as streams:
        await put(streams, name, sent[:1])
        await put(streams, name, sent[1:])
    assert await by_rstream(rabbitmq, name, len(sent)) == sent
    assert await by_amqp(rabbitmq, name, len(sent)) == sent


async def by_rstream(rabbitmq: RabbitMQ, name: str, count: int) -> list[bytes]:
    found: asyncio.Queue[bytes] = asyncio.Queue()
    consumer = StreamConsumer(host=HOST, port=rabbitmq.stream_port, username="guest", password="guest")
    await consumer.start()
    try:
        await consumer.subscribe(
            name, lambda message, _: found.put_nowait(bytes(message.body)), decoder=amqp_decoder,
            offset_specification=ConsumerOffsetSpecification(OffsetType.FIRST),
        )  # fmt: skip
        async with asyncio.timeout(60):
            return [await found.get() for _ in range(count)]
    finally:
        await consumer.close()


async def by_amqp(rabbitmq: RabbitMQ, name: str, count: int) -> list[bytes]:
    found = []
    async with await aio_pika.connect(rabbitmq.url) as connection, asyncio.timeout(60):
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        queue = await channel.get_queue(name, ensure=False)
        async with queue.iterator(arguments={"x-stream-offset": "first"}) as messages:
            async for message in messages:
                found.append(message.body)
                await message.ack()
                if len(found) == count:
                    break
    return found


async def test_we_read_what_others_write(rabbitmq: RabbitMQ, name: str) -> None:
    async with opened(rabbitmq) as streams:
        feed = await streams.feed(name, "earliest")
        async with await aio_pika.connect(rabbitmq.url) as connection:
            channel = await connection.channel()
            told = aio_pika.Message(b"by AMQP", headers={"a": 1, "b": "c"}, message_id="7", content_type="text/plain")
            await channel.default_exchange.publish(told, name)
        producer = Producer(host=HOST, port=rabbitmq.stream_port, username="guest", password="guest")
        await producer.start()
        try:
            await producer.send_wait(name, AMQPMessage(body=b"by rstream", application_properties={b"k": b"v"}))
            await producer.send_wait(name, b"no AMQP message at all")
            for way in (CompressionType.No, CompressionType.Gzip):
                sub_batch = [AMQPMessage(body=b"%s %d" % (way.name.encode(), n)) for n in range(3)]
                await producer.send_sub_entry(name, sub_batch, way)
            found = await read(feed, 9)
        finally:
            await producer.close()
    assert [message.data for message in found] == [
        b"by AMQP", b"by rstream", b"no AMQP message at all",
        b"No 0", b"No 1", b"No 2", b"Gzip 0", b"Gzip 1", b"Gzip 2",
    ]  # fmt: skip
    assert [message.position - found[0].position for message in found] == list(range(9))


async def test_a_stream_that_others_made_is_used_as_it_is(rabbitmq: RabbitMQ, name: str) -> None:
    async with await aio_pika.connect(rabbitmq.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "stream", "x-max-age": "5h"})
        await channel.default_exchange.publish(aio_pika.Message(b"0"), name)
    async with opened(rabbitmq) as streams:
        await put(streams, name, [b"1"])
        assert await all_of(streams, name) == [b"0", b"1"]


async def test_what_the_broker_refuses_is_refused(rabbitmq: RabbitMQ, name: str) -> None:
    async with await aio_pika.connect(rabbitmq.url) as connection:
        await (await connection.channel()).declare_queue(name, auto_delete=True)
        async with opened(rabbitmq) as streams:
            with pytest.raises(BusRefused, match="is a queue, and no stream"):
                await streams.pipe(name)
    with pytest.raises(BusRefused, match="wrong user or password"):
        await streams_at(rabbitmq.stream_port, password="x").begin()
    with pytest.raises(BusUnavailable, match="no access to the virtual host"):  # by a limit, perhaps: it does not say
        await streams_at(rabbitmq.stream_port, vhost="x").begin()
    with pytest.raises(BusUnavailable):
        await streams_at(1).begin()


async def test_a_reader_that_is_not_read_takes_few_chunks_in_advance(rabbitmq: RabbitMQ, name: str) -> None:
    async with opened(rabbitmq) as streams:
        feed = await streams.feed(name, "earliest")
        await put(streams, name, [b"x" * 100_000] * 200)
        found = await read(feed, 1)
        assert feed._link is not None
        await streams.bounds_by(feed._link, name)  # an answer behind whatever was asked for
        ahead = sum(map(len, feed._chunks)) + sum(len(item.data) for item in feed._ahead if isinstance(item, Message))
        assert ahead < 6_000_000
        assert len(found) + len(await read(feed, 200 - len(found))) == 200


async def test_a_read_unpacks_no_more_than_it_may_return(rabbitmq: RabbitMQ, name: str) -> None:
    """What others have packed into one publish of a megabyte may be a gigabyte."""
    count, size = 20, 4 << 20
    message = b"".join(publication(1, [bytes(size)]))[13:]
    packed = gzip.compress(message)
    entries = [struct.pack(">QBHII", n, 0x90, 1, len(message), len(packed)) + packed for n in range(count)]
    async with opened(rabbitmq) as streams:
        feed, pipe = await streams.feed(name, "earliest"), await streams.pipe(name)
        pipe._link.send(Key.PUBLISH, struct.pack(">BI", 0, count), *entries)
        tracemalloc.start()
        try:
            for _ in range(count):
                (found,) = await feed.read(1_000, size)
                assert isinstance(found, Message) and len(found.data) == size
            assert tracemalloc.get_traced_memory()[1] < 8 * size
        finally:
            tracemalloc.stop()


def test_a_segment_is_a_part_of_what_is_kept() -> None:
    assert retention(400_000_000, 90.5) == {
        "max-length-bytes": "400000000", "stream-max-segment-size-bytes": "100000000", "max-age": "91s"
    }  # fmt: skip
    assert retention(0, 0) == {}
    with pytest.raises(ConfigError):
        retention(1_000_000, 0)


async def test_the_words_of_a_group_are_kept_for_an_hour_and_the_order_of_an_engine_like_blocks(
    rabbitmq: RabbitMQ, name: str
) -> None:
    control = f"host:5555/M/F/engine/{name}/q"
    async with opened(rabbitmq) as streams, await aio_pika.connect(rabbitmq.url) as connection:
        kept = {}
        for topic in (control, order_topic(control, 0)):
            await (await streams.pipe(topic)).aclose()
            for age in ({"x-max-age": "3600s", "x-stream-max-segment-size-bytes": 4_000_000}, {}):
                channel = await connection.channel()
                with contextlib.suppress(aio_pika.exceptions.ChannelPreconditionFailed):
                    await channel.declare_queue(topic, durable=True, arguments={"x-queue-type": "stream", **age})
                    kept[topic] = age.get("x-max-age")
    assert kept == {control: "3600s", order_topic(control, 0): None}


async def test_a_reader_that_retention_overtook_goes_on_behind_a_break(rabbitmq: RabbitMQ, name: str) -> None:
    async with opened(rabbitmq, arguments=SMALL) as streams:
        feed = await streams.feed(name, "earliest")
        pipe = await streams.pipe(name)
        for n in range(300):
            await pipe.write([b"%d" % n + b"." * 200])
            await pipe.confirmed(n)
        items: list[Message | Break] = []
        async with asyncio.timeout(60):
            while not items or not isinstance(items[-1], Message) or not items[-1].data.startswith(b"299."):
                items += await feed.read(10, 1 << 20)
        breaks = [at for at, item in enumerate(items) if isinstance(item, Break)]
        assert breaks  # as often as a part of the stream went while it read
        for at in breaks:
            before, told, after = items[at - 1 : at + 2]
            assert isinstance(before, Message)
            assert isinstance(told, Break)
            assert isinstance(after, Message)
            assert not told.incarnation
            assert told.messages == after.position - before.position - 1
