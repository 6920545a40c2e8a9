"""The RabbitMQ bus against what is written on aio-pika and rstream by hand: `make bench NAME=rabbitmq` (about ten
minutes).

One real broker, each contestant a process of its own. The raw clients get bytes that are ready, and numbers, checks and
outcomes of single messages are not asked of them. Queues are durable and read by nobody while they are written to; each
is written by one contestant and then read by the same. We confirm to the group every WINDOW blocks, raw readers
acknowledge each message. Readers of streams read the same stream. Then a failover group of two publishes 1,000 blocks a
second and its active member is killed, or asked to end, TIMES times: the gap is the longest pause between two blocks
that a subscriber saw around that.

`ONLY=singles,failover` measures these parts alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel
from rstream import Consumer, ConsumerOffsetSpecification, OffsetType, Producer

import esp_pubsub as esp
from esp_pubsub.wire.frame import BODY_AT
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST

from .codec import to_frames
from .embedded import blocks_of
from .failover import p99
from .kafka import RATE, TIMES, switches, told, url
from .report import LIMIT, SCHEMA, Crew, Report, fail_on_notice, in_turn, main
from .work import compete, note_times

SINGLES = {"persistent": 10_000, "stream": 100_000}
BLOCKS = 2_000
WINDOW = 500
BATCH = 100  # messages in a call of raw rstream
CREDIT = 100  # chunks that raw rstream may have ahead
GROUP = "bench"
EXCHANGE = "esp-pubsub"
USER = {"username": "guest", "password": "guest"}

_numbers = itertools.count(1)


def in_rabbitmq(topic: str) -> str:
    """What the topic of `url` is called there."""
    return f"bench:5555/project/query/{topic}/I"


def client(settings: dict[str, Any]) -> AbstractAsyncContextManager[esp.Client]:
    return esp.init("rabbitmq", on_notice=fail_on_notice, **settings)


@asynccontextmanager
async def by_hand(port: int) -> AsyncIterator[AbstractChannel]:
    connection = await aio_pika.connect(f"amqp://guest:guest@{HOST}:{port}/")
    async with connection:
        yield await connection.channel()


def ready(shape: str) -> list[bytes]:
    """What raw clients send: single events without our header, and whole frames of many."""
    frames = to_frames(blocks_of(shape))
    return frames if shape == "large" else [data[BODY_AT:] for data in frames]


# What a member does. Every one says that it is ready, and then how many messages a second went through.


async def publish(directory: str, settings: dict[str, Any], topic: str, shape: str, count: int) -> None:
    """Rows to acknowledged blocks. The first one, before the clock runs, opens the pipe."""
    blocks = blocks_of(shape)
    async with client(settings) as opened, opened.publisher(url(topic), SCHEMA) as publisher:
        await publisher.inject(blocks[0])
        await publisher.flush()

        async def work() -> None:
            for number in range(count):
                await publisher.inject(blocks[number % len(blocks)])
            await publisher.flush(LIMIT)

        await told(count, work)


async def receive(directory: str, settings: dict[str, Any], topic: str, count: int, group: str | None) -> None:
    """Blocks, bodies as they are."""
    async with (
        client(settings) as opened,
        opened.subscriber(url(topic), side="in", start="earliest", group=group) as subscriber,
    ):

        async def work() -> None:
            async for block in subscriber:
                if group is not None and (block.id % WINDOW == 0 or block.id == count):
                    await subscriber.confirm(block)
                if block.id == count:
                    return

        await told(count, work)


async def send(directory: str, settings: dict[str, Any], topic: str, shape: str, count: int, window: int) -> None:
    """Bodies by aio-pika, so many of them unconfirmed; with 1, each confirmation is awaited."""
    bodies = ready(shape)
    async with by_hand(settings["port"]) as channel:
        exchange = await channel.get_exchange(EXCHANGE)
        room = asyncio.Semaphore(window)

        async def one(body: bytes) -> None:
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await exchange.publish(message, in_rabbitmq(topic))
            room.release()

        async def windowed() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number in range(count):
                    await room.acquire()
                    tasks.create_task(one(bodies[number % len(bodies)]))

        async def each() -> None:
            for number in range(count):
                await one(bodies[number % len(bodies)])

        await told(count, windowed if window > 1 else each)


async def iterate(directory: str, settings: dict[str, Any], topic: str, count: int) -> None:
    """By aio-pika's iterator, each message acknowledged."""
    async with by_hand(settings["port"]) as channel:
        await channel.set_qos(prefetch_count=5_000)
        queue = await channel.get_queue(f"{GROUP}@{in_rabbitmq(topic)}", ensure=False)

        async def work() -> None:
            received = 0
            async with queue.iterator() as messages:
                async for message in messages:
                    await message.ack()
                    received += 1
                    if received == count:
                        return

        await told(count, work)


async def send_batches(directory: str, settings: dict[str, Any], topic: str, count: int) -> None:
    """Bodies by rstream."""
    bodies, stream = ready("small"), in_rabbitmq(topic)
    batches = [[bodies[(first + n) % len(bodies)] for n in range(BATCH)] for first in range(0, len(bodies), BATCH)]
    async with Producer(host=HOST, port=settings["streamport"], **USER) as producer:
        await producer.create_stream(stream)
        under_way, fewer = 0, asyncio.Event()

        def outcome(status: Any) -> None:
            nonlocal under_way
            if not status.is_confirmed:
                raise RuntimeError("a message was not confirmed")
            under_way -= 1
            fewer.set()

        async def until_at_most(limit: int) -> None:
            while under_way > limit:
                fewer.clear()
                await fewer.wait()

        async def work() -> None:
            nonlocal under_way
            for number in range(count // BATCH):
                await until_at_most(WINDOW - BATCH)
                under_way += BATCH
                await producer.send_batch(stream, batches[number % len(batches)], on_publish_confirm=outcome)
            await until_at_most(0)

        await told(count, work)


async def consume(directory: str, settings: dict[str, Any], topic: str, count: int) -> None:
    """Raw bytes by rstream; it is connected when the clock begins, and subscribes then."""
    consumer = Consumer(host=HOST, port=settings["streamport"], **USER)
    await consumer.start()
    ended, received = asyncio.Event(), 0

    def take(message: Any, context: Any) -> None:
        nonlocal received
        received += 1
        if received == count:
            ended.set()

    async def work() -> None:
        await consumer.subscribe(
            in_rabbitmq(topic), take, initial_credit=CREDIT,
            offset_specification=ConsumerOffsetSpecification(OffsetType.FIRST),
        )  # fmt: skip
        await ended.wait()

    await told(count, work)
    await consumer.close()


async def member(directory: str, settings: dict[str, Any], topic: str, election: str, begun: float) -> None:
    logging.getLogger("esp_pubsub").setLevel(logging.ERROR)  # it tells of its role in its own words
    failover = esp.Failover(topic, election=election)  # by its name: to others of one group it would be a stranger
    async with (
        esp.init("rabbitmq", **settings) as opened,
        opened.publisher(url(topic), "id*:int64,text:string", failover=failover) as publisher,
    ):
        await compete(publisher, begun, RATE)


async def watch(directory: str, settings: dict[str, Any], topic: str) -> None:
    async with (
        esp.init("rabbitmq", **settings) as opened,
        opened.subscriber(url(topic), side="in") as subscriber,
    ):
        await note_times(subscriber, Path(directory, "times.json"))


_ALL = publish, receive, send, iterate, send_batches, consume, member, watch
ROLES = {role.__name__: role for role in _ALL}


# What the parent measures.


class Broker:
    """The broker that all share."""

    def __init__(self, broker: RabbitMQ) -> None:
        self.port = broker.nodes[0].port
        self.streamport = broker.stream_port

    def settings(self, mode: str) -> dict[str, Any]:
        return {"host": HOST, "port": self.port, "streamport": self.streamport, "mode": mode}

    async def rate(self, mode: str, role: str, count: int, topic: str, **more: Any) -> float:
        """Messages a second of one process."""
        async with Crew("rabbitmq") as crew:
            member = await crew.start(role, settings=self.settings(mode), topic=topic, count=count, **more)
            member.tell()
            found: float = (await member.told())["rate"]
            return found

    @asynccontextmanager
    async def queue(self) -> AsyncIterator[str]:
        """A topic whose group has a queue, both gone afterwards."""
        topic = f"w{next(_numbers)}"
        async with (
            client(self.settings("persistent")) as opened,
            opened.subscriber(url(topic), SCHEMA, side="in", group=GROUP),
        ):
            pass
        try:
            yield topic
        finally:
            async with by_hand(self.port) as channel:
                await channel.queue_delete(f"{GROUP}@{in_rabbitmq(topic)}")

    async def gaps(self, how: signal.Signals, mode: str, election: str) -> list[float]:
        """The longest pause around each of so many switches, in ms."""
        common: dict[str, Any] = {"settings": self.settings(mode), "topic": f"w{next(_numbers)}"}
        async with Crew("rabbitmq") as crew:
            return await switches(crew, how, election, common)


async def measure_queues(report: Report, broker: Broker, shape: str, count: int) -> None:
    """Written and read, by us and by hand."""
    what = "single events" if shape == "small" else "256-event blocks"
    read: dict[str, list[float]] = {"ours": [], "raw": []}

    async def ours() -> float:
        async with broker.queue() as topic:
            rate = await broker.rate("persistent", "publish", count - 1, topic, shape=shape)
            read["ours"].append(await broker.rate("persistent", "receive", count, topic, group=GROUP))
            return rate

    async def raw() -> float:
        async with broker.queue() as topic:
            rate = await broker.rate("persistent", "send", count, topic, shape=shape, window=WINDOW)
            read["raw"].append(await broker.rate("persistent", "iterate", count, topic))
            return rate

    async def raw_each() -> float:
        async with broker.queue() as topic:
            return await broker.rate("persistent", "send", count, topic, shape=shape, window=1)

    written = f"{what}, acked", f"{what}, aio-pika, {WINDOW} under way", f"{what}, aio-pika, one after another"
    contestants: dict[str, Callable[[], Awaitable[float]]] = {written[0]: ours, written[1]: raw}
    if shape == "small":
        contestants[written[2]] = raw_each
    samples = await in_turn(contestants)
    report.figures(samples, "blocks/s")
    report.ratio(samples, written[0], written[1], 0.95)
    if shape == "small":
        report.ratio(samples, written[0], written[2], 2)
    names = f"{what} read and confirmed", f"{what} by aio-pika's iterator, acknowledged"
    samples = {names[0]: read["ours"], names[1]: read["raw"]}
    report.figures(samples, "blocks/s")
    report.ratio(samples, *names, target=0.95)


async def measure_singles(report: Report, broker: Broker) -> None:
    await measure_queues(report, broker, "small", SINGLES["persistent"])


async def measure_blocks(report: Report, broker: Broker) -> None:
    await measure_queues(report, broker, "large", BLOCKS)


async def measure_streams(report: Report, broker: Broker) -> None:
    count = SINGLES["stream"]
    topics = [f"w{next(_numbers)}" for _ in range(10)]
    unused = iter(topics)
    ours, raw = "single events to a stream, acked", f"raw rstream send_batch of {BATCH}, {WINDOW} under way"
    samples = await in_turn(
        {
            ours: lambda: broker.rate("stream", "publish", count - 1, next(unused), shape="small"),
            raw: lambda: broker.rate("stream", "send_batches", count, next(unused)),
        }
    )
    report.figures(samples, "blocks/s")
    report.ratio(samples, ours, raw, 0.4)
    ours, raw = "single events from a stream", "raw rstream Consumer"
    samples = await in_turn(
        {
            ours: lambda: broker.rate("stream", "receive", count, topics[0], group=None),
            raw: lambda: broker.rate("stream", "consume", count, topics[0]),
        }
    )
    report.figures(samples, "blocks/s")
    report.ratio(samples, ours, raw, 0.4)


async def measure_failover(report: Report, broker: Broker) -> None:
    silence = 3 * 2_000 + 200  # three heartbeats, and what a takeover takes
    for mode, election, killed, stopped in (
        ("persistent", "token", 300, silence), ("persistent", "log", 900, 900), ("stream", "log", 900, 900),
    ):  # fmt: skip
        for name, how, target in (
            ("SIGKILL", signal.SIGKILL, killed),
            ("SIGSTOP", signal.SIGSTOP, stopped),
            ("SIGTERM", signal.SIGTERM, 150),
            ("hand-over", signal.SIGUSR1, 150),
        ):
            found, what = await broker.gaps(how, mode, election), f"gap: {mode}, {election} election, {name}"
            report.result(f"{what}, p50", median(found), "ms", better="lower")
            report.result(f"{what}, p99 of {TIMES}", p99(found), "ms", target, "lower")


PARTS = {
    "singles": measure_singles,
    "blocks": measure_blocks,
    "streams": measure_streams,
    "failover": measure_failover,
}


async def measure(report: Report) -> None:
    async with RabbitMQ() as rabbitmq:
        broker = Broker(rabbitmq)
        for part in os.environ.get("ONLY", ",".join(PARTS)).split(","):
            await PARTS[part](report, broker)


if __name__ == "__main__":
    main("rabbitmq", measure, ROLES)
