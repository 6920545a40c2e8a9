"""The Kafka bus against what is written on aiokafka by hand: `make bench NAME=kafka` (about ten minutes).

One real broker, acks=all, topics of one partition, each contestant a process of its own. Raw aiokafka gets bytes that
are ready, and numbers, checks and outcomes of single messages are not asked of it; where it packs batches itself
(`send_batch`) they are as large as ours. Readers read the same topic. Then a failover group of two publishes 1,000
blocks a second and its active member is killed, or asked to end, TIMES times: the gap is the longest pause between two
blocks that a subscriber saw around that.

`python -m tests.bench.kafka --peers` also installs confluent-kafka and FastStream, into a directory that goes with it.
`ONLY=singles,failover` measures these parts alone.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

import esp_pubsub as esp
from esp_pubsub.events import PLAIN, Block
from esp_pubsub.transports.kafka.pipe import LARGEST_BATCH
from esp_pubsub.wire.frame import BODY_AT, parse
from tests.support.kafka import Kafka
from tests.support.zookeeper import ZooKeeper

from .codec import to_frames
from .embedded import PACE, SECONDS, WARM, blocks_of, paced
from .failover import p99, until
from .report import (
    LIMIT,
    REPETITIONS,
    SCHEMA,
    SMALL_FROM,
    Crew,
    Report,
    fail_on_notice,
    heard,
    in_turn,
    main,
    say,
    small_row,
)
from .work import compete, note_times, now

SINGLES = 100_000
BLOCKS, EVENTS = 4_000, 256
TRIPS = 500  # requests, one after another
TIMES = int(os.environ.get("TIMES", "20"))
RATE = 1_000
GATHERED = 10_000  # sends that raw aiokafka has under way: as many blocks as our buffer holds
SMALL = [data[BODY_AT:] for data in to_frames(blocks_of("small"))]
PEERS = {"confluent_kafka": "confluent-kafka", "faststream": "faststream[kafka]"}

_numbers = itertools.count(1)


def url(topic: str) -> str:
    return f"dfESP://bench:5555/project/query/{topic}"


def in_kafka(topic: str) -> str:
    """What the topic of `url` is called there."""
    return f"bench_5555.project.query.{topic}.I"


def client(bootstrap: str) -> AbstractAsyncContextManager[esp.Client]:
    return esp.init("kafka", hostport=bootstrap, on_notice=fail_on_notice)


# What a member does. Every one says that it is ready, and then how many messages a second went through.


async def told(count: int, work: Callable[[], Awaitable[object]]) -> None:
    """Do it when the parent says so."""
    await heard()
    began = now()
    await work()
    say(rate=count / (now() - began) * 1e9)


async def publish(directory: str, bootstrap: str, topic: str, shape: str, count: int) -> None:
    """Rows, or blocks as received, to acknowledged blocks. The first one, before the clock runs, makes the topic."""
    blocks: list[Any] = blocks_of(shape)
    if shape == "received":
        blocks = [Block(parse(frame), SCHEMA, PLAIN) for frame in to_frames(blocks)]
    async with client(bootstrap) as opened, opened.publisher(url(topic), SCHEMA) as publisher:
        await publisher.inject(blocks[0])
        await publisher.flush()

        async def work() -> None:
            for number in range(count):
                await publisher.inject(blocks[number % len(blocks)])
            await publisher.flush(LIMIT)

        await told(count, work)


async def send(directory: str, bootstrap: str, topic: str, count: int, large: bool = False) -> None:
    """Bodies of single events, or frames of 256, by raw `send`, its futures gathered."""
    ready = to_frames(blocks_of("large")) if large else SMALL
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        await producer.send_and_wait(topic, ready[0])

        async def work() -> None:
            for first in range(0, count, GATHERED):
                numbers = range(first, min(first + GATHERED, count))
                await asyncio.gather(*[await producer.send(topic, ready[i % len(ready)]) for i in numbers])

        await told(count, work)


async def send_batches(directory: str, bootstrap: str, topic: str, count: int, in_flight: int) -> None:
    """Frames of 256 events by raw `send_batch`."""
    frames = to_frames(blocks_of("large"))
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", max_batch_size=LARGEST_BATCH) as producer:
        await producer.send_and_wait(topic, b"")

        async def work() -> None:
            waiting: list[asyncio.Future[Any]] = []
            batch = producer.create_batch()
            for number in range(count):
                frame = frames[number % len(frames)]
                if batch.append(key=None, value=frame, timestamp=None) is None:
                    waiting.append(await producer.send_batch(batch, topic, partition=0))
                    if len(waiting) == in_flight:
                        await asyncio.gather(*waiting)
                        waiting.clear()
                    batch = producer.create_batch()
                    batch.append(key=None, value=frame, timestamp=None)
            waiting.append(await producer.send_batch(batch, topic, partition=0))
            await asyncio.gather(*waiting)

        await told(count, work)


async def confluent(directory: str, bootstrap: str, topic: str, count: int, site: str) -> None:
    sys.path.append(site)
    producer = importlib.import_module("confluent_kafka").Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    failed: list[Any] = []

    def outcome(error: Any, message: Any) -> None:
        if error is not None:
            failed.append(error)

    async def work() -> None:
        for number in range(count):
            while True:
                try:
                    producer.produce(topic, SMALL[number % len(SMALL)], on_delivery=outcome)
                    break
                except BufferError:
                    producer.poll(0.01)
            producer.poll(0)
        if producer.flush(LIMIT) or failed:
            raise RuntimeError(f"not everything was delivered: {failed[:1]}")

    producer.produce(topic, SMALL[0])
    producer.flush(LIMIT)
    await told(count, work)


async def faststream(directory: str, bootstrap: str, topic: str, count: int, site: str) -> None:
    sys.path.append(site)
    async with importlib.import_module("faststream.kafka").KafkaBroker(bootstrap, acks="all") as broker:
        await broker.publish(SMALL[0], topic)

        async def work() -> None:
            for first in range(0, count, 100):  # of many more at once, aiokafka fails some by a time-out of its own
                those = range(first, first + 100)
                await asyncio.gather(*(broker.publish(SMALL[i % len(SMALL)], topic) for i in those))

        await told(count, work)


async def receive(directory: str, bootstrap: str, topic: str, count: int) -> None:
    """Blocks, bodies as they are."""
    async with client(bootstrap) as opened, opened.subscriber(url(topic), side="in", start="earliest") as subscriber:

        async def work() -> None:
            async for block in subscriber:
                if block.id == count:
                    return

        await told(count, work)


async def receive_raw(directory: str, bootstrap: str, topic: str, count: int, many: bool) -> None:
    """Messages, one by one or as they come."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False)
    partition = TopicPartition(in_kafka(topic), 0)

    async def one_by_one() -> None:
        received = 0
        async for _ in consumer:
            received += 1
            if received == count:
                return

    async def as_they_come() -> None:
        received = 0
        while received < count:
            received += len((await consumer.getmany(timeout_ms=1_000)).get(partition, ()))

    async with consumer:
        consumer.assign([partition])  # from here on it fetches by itself, as ours does
        await told(count, as_they_come if many else one_by_one)


async def publish_paced(directory: str, bootstrap: str, topic: str) -> None:
    """Stamps in the key field."""
    _, *rest = small_row(SMALL_FROM)
    async with client(bootstrap) as opened, opened.publisher(url(topic), SCHEMA) as publisher:

        async def one(stamp: int) -> None:
            await publisher.inject([(stamp, *rest)])

        await heard()
        await paced(one)
        await publisher.flush(LIMIT)
        say(done=True)


async def receive_paced(directory: str, bootstrap: str, topic: str) -> None:
    async with client(bootstrap) as opened, opened.subscriber(url(topic), SCHEMA, side="in", start="earliest") as came:
        say(ready=True)
        took: list[int] = []
        async for block in came:
            took.append(now() - block.rows()[0][0])
            if len(took) == PACE * SECONDS + WARM:
                break
        say(took=took[WARM:])


async def send_paced(directory: str, bootstrap: str, topic: str) -> None:
    """As many bytes as a frame of ours has, beginning with the stamp."""
    filling = bytes(len(to_frames(blocks_of("small"))[0]) - 8)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=0) as producer:
        await producer.partitions_for(topic)
        sent: list[asyncio.Future[Any]] = []

        async def one(stamp: int) -> None:
            sent.append(await producer.send(topic, stamp.to_bytes(8, "little") + filling))

        await heard()
        await paced(one)
        await asyncio.gather(*sent)
        say(done=True)


async def receive_raw_paced(directory: str, bootstrap: str, topic: str) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False)
    async with consumer:
        consumer.assign([TopicPartition(topic, 0)])
        say(ready=True)
        took: list[int] = []
        async for record in consumer:
            took.append(now() - int.from_bytes(record.value[:8], "little"))
            if len(took) == PACE * SECONDS + WARM:
                break
        say(took=took[WARM:])


async def serve(directory: str, bootstrap: str, topic: str) -> None:
    """An echo; it is ready when it has answered itself."""

    async def echo(data: bytes) -> bytes:
        return data

    async with client(bootstrap) as opened, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(opened.requests().serve(topic, echo))
        await opened.requests().request(topic, b"", LIMIT)
        say(ready=True)
        await heard()
        serving.cancel()


async def ask(directory: str, bootstrap: str, topic: str) -> None:
    """One request after another, of as many bytes as a frame of ours has."""
    data = bytes(len(to_frames(blocks_of("small"))[0]))
    async with client(bootstrap) as opened:

        async def one() -> None:
            await opened.requests().request(topic, data, LIMIT)

        await tell_times(one)


async def trip_raw(directory: str, bootstrap: str, topic: str) -> None:
    """A message is written and read back, one after another."""
    data = bytes(len(to_frames(blocks_of("small"))[0]))
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=0) as producer, consumer:
        consumer.assign([TopicPartition(topic, 0)])

        async def one() -> None:
            sent = await producer.send(topic, data)
            await consumer.getone()
            await sent

        await tell_times(one)


async def tell_times(one: Callable[[], Awaitable[None]]) -> None:
    """How long each of many took, without the first ones."""
    await heard()
    took = []
    for _ in range(TRIPS):
        began = now()
        await one()
        took.append(now() - began)
    say(took=took[TRIPS // 10 :])


async def member(directory: str, bootstrap: str, topic: str, election: str, begun: float) -> None:
    logging.getLogger("esp_pubsub").setLevel(logging.ERROR)  # it tells of its role in its own words
    failover = esp.Failover(topic, election=election)  # by its name: to others of one group it would be a stranger
    async with (
        esp.init("kafka", hostport=bootstrap) as opened,
        opened.publisher(url(topic), "id*:int64,text:string", failover=failover) as publisher,
    ):
        await compete(publisher, begun, RATE)


async def watch(directory: str, bootstrap: str, topic: str) -> None:
    async with (
        esp.init("kafka", hostport=bootstrap) as opened,
        opened.subscriber(url(topic), side="in", start="earliest") as subscriber,
    ):
        await note_times(subscriber, Path(directory, "times.json"))


_SENDING = publish, send, send_batches, confluent, faststream, publish_paced, send_paced, member, serve, ask, trip_raw
_READING = receive, receive_raw, receive_paced, receive_raw_paced, watch
ROLES = {role.__name__: role for role in (*_SENDING, *_READING)}


# What the parent measures.


async def switches(crew: Crew, how: signal.Signals, election: str, common: dict[str, Any]) -> list[float]:
    """The longest pause around each of so many switches, in ms. The crew has the roles `watch` and `member`."""
    watcher = await crew.start("watch", **common)
    begun = asyncio.get_running_loop().time()
    common |= {"begun": begun, "election": election}
    active = await crew.start("member", **common)
    await until(active, "role", "active")
    standby = await crew.start("member", **common)
    await until(standby, "stands_by")
    around: list[tuple[float, float]] = []
    for _ in range(TIMES):
        await asyncio.sleep(0.3)
        harmed = asyncio.get_running_loop().time()
        os.kill(active.pid, how)
        taken = await until(standby, "role", "active")
        await asyncio.sleep(0.3)  # what is started next must not slow down what is measured
        around.append((harmed - 0.05, taken["at"] + 0.3))
        if how == signal.SIGUSR1:
            active, standby = standby, active
        else:
            await active.end()
            active, standby = standby, await crew.start("member", **common)
        await until(standby, "stands_by")
    os.kill(watcher.pid, signal.SIGUSR1)
    await until(watcher, "written")
    seen = json.loads(Path(crew.directory, "times.json").read_text())
    return [longest(seen, *each) for each in around]


class Broker:
    """The broker that all share, and where the peers are installed, if they are."""

    def __init__(self, bootstrap: str, site: str | None) -> None:
        self.bootstrap = bootstrap
        self.site = site

    async def new_topic(self) -> str:
        """A topic for those who do not make their own."""
        name = f"raw{next(_numbers)}"
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(name, 1, 1)])
        finally:
            await admin.close()
        return name

    async def rate(self, role: str, count: int, topic: str = "", **settings: Any) -> float:
        """Messages a second of one process."""
        topic = topic or (f"w{next(_numbers)}" if role == "publish" else await self.new_topic())
        async with Crew("kafka") as crew:
            member = await crew.start(role, bootstrap=self.bootstrap, topic=topic, count=count, **settings)
            member.tell()
            found: float = (await member.told())["rate"]
            return found

    async def latencies(self, sender: str, receiver: str) -> tuple[float, float]:
        """p50 and p99 in ms."""
        topic = f"w{next(_numbers)}" if sender == "publish_paced" else await self.new_topic()
        async with Crew("kafka") as crew:
            reader = await crew.start(receiver, bootstrap=self.bootstrap, topic=topic)
            writer = await crew.start(sender, bootstrap=self.bootstrap, topic=topic)
            writer.tell()
            await writer.told()
            took = (await reader.told())["took"]
        return median(took) / 1e6, quantiles(took, n=100)[98] / 1e6

    async def trips(self, role: str) -> float:
        """p50 in ms; with a server, if that is what takes part."""
        topic = f"host:1/{next(_numbers)}/M" if role == "ask" else await self.new_topic()
        async with Crew("kafka") as crew:
            server = await crew.start("serve", bootstrap=self.bootstrap, topic=topic) if role == "ask" else None
            asker = await crew.start(role, bootstrap=self.bootstrap, topic=topic)
            asker.tell()
            took = (await asker.told())["took"]
            if server is not None:
                server.tell()
        return median(took) / 1e6

    async def gaps(self, how: signal.Signals, election: str) -> list[float]:
        """The longest pause around each of so many switches, in ms."""
        common: dict[str, Any] = {"bootstrap": self.bootstrap, "topic": f"w{next(_numbers)}"}
        async with Crew("kafka") as crew:
            return await switches(crew, how, election, common)


def longest(seen: Iterable[float], begin: float, end: float) -> float:
    """The longest pause in ms between two blocks, of those that lie between these times in any part."""
    return max(after - before for before, after in pairwise(seen) if before <= end and after >= begin) * 1000


async def measure_singles(report: Report, broker: Broker) -> None:
    ours, raw = "single events, acked", "raw send, gathered"
    contestants: dict[str, Callable[[], Awaitable[float]]] = {
        ours: lambda: broker.rate("publish", SINGLES, shape="small"),
        raw: lambda: broker.rate("send", SINGLES),
    }
    for role, module, name in (
        ("confluent", "confluent_kafka", "confluent-kafka produce"),
        ("faststream", "faststream", "FastStream publish, gathered"),
    ):
        if broker.site or importlib.util.find_spec(module):
            contestants[name] = lambda role=role: broker.rate(role, SINGLES, site=broker.site or ".")  # type: ignore[misc]
        else:
            print(f"{name}: not installed", flush=True)
    samples = await in_turn(contestants)
    report.figures(samples, "blocks/s")
    report.ratio(samples, ours, raw, 1.5)
    for name in [*contestants][2:]:
        report.ratio(samples, ours, name, None)


async def measure_reading(report: Report, broker: Broker) -> None:
    for shape, count, one_by_one, as_they_come in (("small", SINGLES, 1.3, 0.3), ("large", BLOCKS, None, 0.9)):
        topic = f"w{next(_numbers)}"
        await broker.rate("publish", count, topic, shape=shape)
        what = "single events" if shape == "small" else "256-event blocks"
        ours, by_one, many = f"{what} read", f"{what}, raw async for", f"{what}, raw getmany"
        samples = await in_turn(
            {
                ours: lambda topic=topic, count=count: broker.rate("receive", count, topic),  # type: ignore[misc]
                by_one: lambda topic=topic, count=count: broker.rate("receive_raw", count, topic, many=False),  # type: ignore[misc]
                many: lambda topic=topic, count=count: broker.rate("receive_raw", count, topic, many=True),  # type: ignore[misc]
            }
        )
        report.figures(samples, "blocks/s")
        report.ratio(samples, ours, by_one, one_by_one)
        report.ratio(samples, ours, many, as_they_come)


async def measure_blocks(report: Report, broker: Broker) -> None:
    ours, one, two = "256-event blocks, acked", "raw send_batch, one under way", "raw send_batch, two under way"
    received, raw = "256-event blocks that were received, acked", "raw send of 256-event blocks, gathered"
    samples = await in_turn(
        {
            ours: lambda: broker.rate("publish", BLOCKS, shape="large"),
            received: lambda: broker.rate("publish", BLOCKS, shape="received"),
            raw: lambda: broker.rate("send", BLOCKS, large=True),
            one: lambda: broker.rate("send_batches", BLOCKS, in_flight=1),
            two: lambda: broker.rate("send_batches", BLOCKS, in_flight=2),
        }
    )
    report.figures(samples, "blocks/s")
    report.ratio(samples, ours, raw, 0.9)
    report.ratio(samples, ours, one, None)
    report.ratio(samples, ours, two, 0.9)
    report.ratio(samples, received, two, 0.9)


async def measure_latency(report: Report, broker: Broker) -> None:
    ours: list[tuple[float, float]] = []
    raw: list[tuple[float, float]] = []
    for _ in range(REPETITIONS):
        ours.append(await broker.latencies("publish_paced", "receive_paced"))
        raw.append(await broker.latencies("send_paced", "receive_raw_paced"))
    for at, part in enumerate(("p50", "p99")):
        names = f"one way {part} at {PACE}/s", f"raw, linger 0, {part}"
        samples = {names[0]: [pair[at] for pair in ours], names[1]: [pair[at] for pair in raw]}
        report.figures(samples, "ms", better="lower")
        report.ratio(samples, *names, target=1.5, better="lower")


async def measure_requests(report: Report, broker: Broker) -> None:
    ours, raw = "request and answer, p50", "raw: written and read back, p50"
    samples: dict[str, list[float]] = {ours: [], raw: []}
    for _ in range(REPETITIONS):
        samples[ours].append(await broker.trips("ask"))
        samples[raw].append(await broker.trips("trip_raw"))
    report.figures(samples, "ms", better="lower")
    report.ratio(samples, ours, raw, target=2.5, better="lower")


async def measure_failover(report: Report, broker: Broker) -> None:
    async with ZooKeeper() as zookeeper:
        service = f"zookeeper://{zookeeper.hosts}?session=1200ms"
        for name, how, election, target in (
            ("SIGKILL, log election", signal.SIGKILL, "log", 900),
            ("SIGKILL, ZooKeeper, session 1.2 s", signal.SIGKILL, service, 1600),
            ("SIGTERM, log election", signal.SIGTERM, "log", 150),
            ("SIGTERM, ZooKeeper", signal.SIGTERM, service, 150),
            ("hand-over, log election", signal.SIGUSR1, "log", 150),
        ):
            found = await broker.gaps(how, election)
            report.result(f"gap: {name}, p50", median(found), "ms", better="lower")
            report.result(f"gap: {name}, p99 of {TIMES}", p99(found), "ms", target, "lower")


def install(place: Path) -> str:
    """The peers, in a virtual environment of their own; where a member finds them."""
    venv.create(place, with_pip=True)
    subprocess.run([place / "bin" / "pip", "install", "--quiet", *PEERS.values()], check=True)
    return str(next(place.glob("lib/python*/site-packages")))


PARTS = {
    "singles": measure_singles,
    "reading": measure_reading,
    "blocks": measure_blocks,
    "latency": measure_latency,
    "requests": measure_requests,
    "failover": measure_failover,
}


async def measure(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="esp-peers-") as place:
        site = await asyncio.to_thread(install, Path(place)) if WITH_PEERS else None
        async with Kafka() as kafka:
            broker = Broker(kafka.bootstrap, site)
            for part in os.environ.get("ONLY", ",".join(PARTS)).split(","):
                await PARTS[part](report, broker)


WITH_PEERS = "--peers" in sys.argv[1:]

if __name__ == "__main__":
    if WITH_PEERS:
        sys.argv.remove("--peers")
    main("kafka", measure, ROLES)
