"""What a subscriber is told when the log is not what it was: retention, purges, topics made anew, odd batches."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import secrets
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import cramjam
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.codec import lz4_encode
from aiokafka.record.util import calc_crc32c

import esp_pubsub as esp
from esp_pubsub.address import kafka_topic, order_topic
from esp_pubsub.notices import BadMessage, Failure, Missed, Notice, Reconnected, Skipped
from esp_pubsub.transports.kafka import unpacking
from tests.integration.members import SCHEMA, Reader, inject, until
from tests.support.kafka import Kafka

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url() -> str:
    return f"dfESP://host:5555/{secrets.token_hex(4)}/q/w"


def topic(url: str) -> str:
    """Kafka's name of the topic that these tests use."""
    return kafka_topic(f"{url.removeprefix('dfESP://')}/I")


@contextlib.asynccontextmanager
async def administrator(kafka: Kafka) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def delete_records(kafka: Kafka, url: str, before: int = -1) -> None:
    """To the end, unless told otherwise."""
    async with administrator(kafka) as admin:
        await admin.delete_records({TopicPartition(topic(url), 0): RecordsToDelete(before)})


async def make_anew(kafka: Kafka, url: str) -> None:
    async with administrator(kafka) as admin:
        await admin.delete_topics([topic(url)])
        async with asyncio.timeout(60):
            while (await admin.create_topics([NewTopic(topic(url), 1, 1)])).topic_errors[0][1] != 0:  # noqa: ASYNC110  # until the old one is gone
                await asyncio.sleep(0.02)


def cut_in_half(kafka: Kafka, url: str) -> None:
    """Of the broker, which is dead: it loses the second half of the topic."""
    [log] = (kafka.nodes[0].directory / "data" / f"{topic(url)}-0").glob("*.log")
    for index in log.parent.glob("*index"):
        index.unlink()
    os.truncate(log, log.stat().st_size // 2)


class Told(list[Notice]):
    """What one client was told."""

    def of(self, *kinds: type) -> list[Any]:
        return [notice for notice in self if isinstance(notice, kinds)]


@contextlib.asynccontextmanager
async def client(kafka: Kafka, **settings: Any) -> AsyncIterator[tuple[esp.Client, Told]]:
    told = Told()
    async with esp.init("kafka", hostport=kafka.bootstrap, on_notice=told.append, **settings) as opened:
        yield opened, told


async def test_a_running_subscriber_whose_unread_blocks_were_deleted_is_told_which(kafka: Kafka, url: str) -> None:
    async with client(kafka, fetch_size=1) as (ours, told), ours.publisher(url, SCHEMA) as publisher:
        subscriber = await ours.subscriber(url, side="in", start="earliest")
        for id in range(1, 21):
            await (await publisher.inject([(id, "x" * 100_000)]))
        read = [(await anext(subscriber)).id]
        await delete_records(kafka, url)
        await (await publisher.inject([(21, "x")]))
        async with asyncio.timeout(60):
            while read[-1] != 21:
                read.append((await anext(subscriber)).id)
        [missed], [skipped] = told.of(Missed), told.of(Skipped)
        assert read == [*range(1, missed.first), 21]  # what was fetched ahead still comes
        assert missed.first < 10
        assert (missed.last, skipped.messages) == (20, 21 - missed.first)
        assert subscriber.stats.missed == skipped.messages


async def test_a_stopped_subscriber_whose_unread_blocks_were_deleted_is_told_which(kafka: Kafka, url: str) -> None:
    async with client(kafka) as (ours, told), ours.publisher(url, SCHEMA) as publisher:
        await (await inject(publisher, 1, 10))
        async with ours.subscriber(url, side="in", group="g") as subscriber:
            await Reader(subscriber).to(4, confirm_every=1)
        await delete_records(kafka, url)
        assert told == []
        async with ours.subscriber(url, side="in", group="g") as subscriber:
            await (await inject(publisher, 11, 12))
            await Reader(subscriber, 11).to(12, confirm_every=1)
        assert [notice for notice in told if not isinstance(notice, Failure | Reconnected)] == [
            Skipped(6, "retention took messages before they were read"),
            Missed(publisher.source, 0, 5, 10),
        ]


async def test_segments_that_retention_takes_under_a_stopped_subscriber_are_told(url: str) -> None:
    config = "log.retention.check.interval.ms=100\nlog.segment.delete.delay.ms=0\nlog.initial.task.delay.ms=100"
    async with Kafka(config=config) as kafka, client(kafka) as (ours, told):
        async with ours.publisher(url, SCHEMA) as publisher:
            await (await inject(publisher, 1, 10))
            async with ours.subscriber(url, side="in", group="g") as subscriber:
                await Reader(subscriber).to(4, confirm_every=1)
            async with administrator(kafka) as admin:
                place = ConfigResource(ConfigResourceType.TOPIC, topic(url), {"retention.ms": "2000"})
                await admin.alter_configs([place])
            name = f"{url.removeprefix('dfESP://')}/I"
            async with asyncio.timeout(60):
                while (await ours.bus.bounds(name)).first < 10:  # noqa: ASYNC110  # nobody tells
                    await asyncio.sleep(0.05)
            async with administrator(kafka) as admin:  # it holds long before what comes now is two seconds old
                place = ConfigResource(ConfigResourceType.TOPIC, topic(url), {"retention.ms": "600000"})
                await admin.alter_configs([place])
            async with ours.subscriber(url, side="in", group="g") as subscriber:
                await (await inject(publisher, 11, 12))
                await Reader(subscriber, 11).to(12)
        assert told.of(Skipped, Missed) == [
            Skipped(6, "retention took messages before they were read"),
            Missed(publisher.source, 0, 5, 10),
        ]


async def test_a_purge_is_told_to_a_running_subscriber_and_to_a_stopped_one(kafka: Kafka, url: str) -> None:
    async with client(kafka) as (ours, told), client(kafka) as (theirs, theirs_told):
        async with ours.publisher(url, SCHEMA) as publisher:
            running = Reader(await ours.subscriber(url, side="in", start="earliest"))
            await (await inject(publisher, 1, 10))
            await running.to(10)
            async with theirs.subscriber(url, side="in", group="g") as subscriber:
                await Reader(subscriber).to(4, confirm_every=1)
            await ours.catalog().purge(f"{url.removeprefix('dfESP://')}/I")
        async with ours.publisher(url, SCHEMA) as publisher:
            await (await inject(publisher, 1, 3))
            running.following = 1
            await running.to(3)
            async with theirs.subscriber(url, side="in", group="g") as subscriber:
                await Reader(subscriber).to(3)
    for notices in (told, theirs_told):
        [skipped] = notices.of(Skipped)
        assert "purged" in skipped.reason


async def test_a_topic_deleted_and_made_anew_is_told_and_publishing_and_reading_go_on(kafka: Kafka, url: str) -> None:
    async with client(kafka) as (ours, _), client(kafka) as (theirs, theirs_told):
        publisher = await ours.publisher(url, SCHEMA)
        alone = Reader(await theirs.subscriber(url, side="in", start="earliest"))
        grouped = Reader(await theirs.subscriber(url, side="in", group="g"))
        await (await inject(publisher, 1, 10))
        await alone.to(10)
        await grouped.to(10, confirm_every=1)
        await make_anew(kafka, url)
        await (await inject(publisher, 11, 30))
        await alone.to(30)  # and not from its old position, which is one of the new log too
        await grouped.to(30)
        await publisher.aclose()
        assert len(theirs_told.of(Skipped)) == 2
        assert not theirs_told.of(Missed)


async def test_a_topic_made_anew_that_ends_in_front_of_its_reader_is_told_once_and_nothing_comes_twice(
    kafka: Kafka, url: str
) -> None:
    async with client(kafka) as (ours, _), client(kafka) as (theirs, told):
        publisher = await ours.publisher(url, SCHEMA)
        reader = Reader(await theirs.subscriber(url, side="in", start="earliest"))
        for count in range(1, 4):
            await (await inject(publisher, reader.following, 400 * count))
            await reader.to(400 * count)
            await make_anew(kafka, url)
            for _ in range(10):
                await (await inject(publisher, reader.following, reader.following + 9))
                await reader.to(reader.following + 9)
            assert len(told.of(Skipped)) == count
        await publisher.aclose()
        assert not told.of(Missed)


async def test_a_topic_that_somebody_deleted_is_made_again_and_publishing_and_reading_go_on(
    kafka: Kafka, url: str
) -> None:
    async with client(kafka, timeout=1.0) as (ours, _), client(kafka, timeout=1.0) as (theirs, told):
        publisher = await ours.publisher(url, SCHEMA)
        reader = Reader(await theirs.subscriber(url, side="in", start="earliest"))
        await (await inject(publisher, 1, 10))
        await reader.to(10)
        async with administrator(kafka) as admin:
            await admin.delete_topics([topic(url)])
        delivery = await inject(publisher, 11, 30)
        reader.following = 11
        await reader.to(30)
        await delivery
        await publisher.aclose()
        assert told.of(Skipped)


async def test_a_topic_made_anew_is_read_from_its_beginning_where_the_old_position_is_one_of_the_new_log_too(
    kafka: Kafka, url: str
) -> None:
    async with client(kafka) as (ours, told):
        async with ours.publisher(url, SCHEMA) as publisher:
            await (await inject(publisher, 1, 1))
        async with ours.subscriber(url, side="in", start="earliest") as subscriber:
            assert (await anext(subscriber)).id == 1
            await make_anew(kafka, url)
            async with ours.publisher(url, SCHEMA) as publisher:
                await (await inject(publisher, 1, 30))
            await Reader(subscriber).to(30)
        [skipped] = told.of(Skipped)
        assert skipped.reason == "the topic was deleted and made anew"


async def test_a_group_that_was_away_while_its_topic_was_made_anew_is_told_what_it_missed(
    kafka: Kafka, url: str
) -> None:
    """The broker forgets the position together with the topic, so that the sequence itself must tell."""
    async with client(kafka) as (ours, told):
        async with ours.publisher(url, SCHEMA) as publisher:
            await (await inject(publisher, 1, 10))
            async with ours.subscriber(url, side="in", group="g") as subscriber:
                await Reader(subscriber).to(8, confirm_every=1)
            await make_anew(kafka, url)
            await (await inject(publisher, 11, 30))
        async with ours.subscriber(url, side="in", group="g") as subscriber:
            await Reader(subscriber, 11).to(30, confirm_every=1)
        assert told.of(Missed) == [Missed(publisher.source, 0, 1, 10)]


@pytest.mark.parametrize("grown", [False, True], ids=["", "and has grown again when they look"])
async def test_a_log_that_lost_its_end_is_read_on_from_there_without_a_block_left_out(
    kafka: Kafka, url: str, grown: bool
) -> None:
    """The broker has confirmed them, and has them no more."""
    async with client(kafka) as (ours, _), client(kafka) as (theirs, told):
        publisher = await ours.publisher(url, SCHEMA)
        for id in range(1, 41):
            await (await inject(publisher, id, id))
        alone = Reader(await theirs.subscriber(url, side="in", start="earliest"))
        async with theirs.subscriber(url, side="in", group="g") as subscriber:
            grouped = Reader(subscriber)
            await asyncio.gather(alone.to(40), grouped.to(40, confirm_every=30))
            kafka.kill()
            cut_in_half(kafka, url)
            await asyncio.to_thread(kafka.restart)
            if grown:
                for id in range(41, 91):
                    await (await inject(publisher, id, id))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(alone.to(100))
                tasks.create_task(grouped.to(100, confirm_every=10))
                await until(lambda: len(told.of(Skipped)) == 2)
                await inject(publisher, 91 if grown else 41, 100)
        await (await inject(publisher, 101, 101))
        async with theirs.subscriber(url, side="in", group="g") as subscriber:
            await Reader(subscriber, 101).to(101)
        await publisher.aclose()
        assert not told.of(Missed)


# batches that the client would not make


def varint(number: int) -> bytes:
    """As the records of a batch have it."""
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def record(number: int, value: bytes) -> bytes:
    body = b"\0" + varint(0) + varint(number) + varint(-1) + varint(len(value)) + value + varint(0)
    return varint(len(body)) + body


def batch(codec: int, packed: bytes, count: int) -> bytes:
    """`packed`: the records, compressed as `codec` says."""
    now = time.time_ns() // 1_000_000
    sealed = struct.pack(">hiqqqhii", codec, count - 1, now, now, -1, -1, -1, count) + packed
    return struct.pack(">qiibI", 0, len(sealed) + 9, -1, 2, calc_crc32c(sealed)) + sealed


PACKERS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "gzip": (1, gzip.compress),
    "snappy": (2, lambda data: bytes(cramjam.snappy.compress_raw(data))),
    "snappy of Java": (2, lambda data: _xerial(data)),
    "lz4": (3, lz4_encode),
    "zstd": (4, lambda data: bytes(cramjam.zstd.compress(data))),
}


def _xerial(data: bytes) -> bytes:
    """Java's frames: blocks of 32 KB, each with its length."""
    packed = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    for at in range(0, len(data), 32 << 10):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + (32 << 10)]))
        packed += struct.pack(">i", len(block)) + block
    return packed


async def send_raw(kafka: Kafka, url: str, raw: bytes) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all") as producer:
        builder = producer.create_batch()
        builder.append(key=None, value=b"", timestamp=None)
        builder.close()
        builder._buffer = bytearray(raw)
        await (await producer.send_batch(builder, topic(url), partition=0))


@pytest.mark.parametrize("packer", PACKERS)
async def test_a_batch_that_unpacks_to_too_much_is_told_and_passed(
    kafka: Kafka, url: str, packer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "LIMIT", 1 << 20)
    codec, pack = PACKERS[packer]
    packed = pack(record(0, bytes(2 << 20)))
    async with client(kafka) as (ours, told), ours.publisher(url, SCHEMA) as publisher:
        await (await inject(publisher, 1, 5))
        await send_raw(kafka, url, batch(codec, packed, 1))
        await (await inject(publisher, 6, 10))
        async with ours.subscriber(url, side="in", start="earliest") as subscriber:
            await Reader(subscriber).to(10)
        assert [notice.position for notice in told.of(BadMessage)] == [5]


READER = """
import asyncio, re, sys
import esp_pubsub as esp

def peak():  # the kernel's figure for this process alone: getrusage begins with what its parent once had
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1])

async def main(hostport, url):
    told = []
    async with esp.init("kafka", hostport=hostport, on_notice=told.append) as client:
        subscriber = await client.subscriber(url, side="in", start="earliest")
        before = peak()
        ids = [(await anext(subscriber)).id for _ in range(10)]
        print(peak() - before, ",".join(map(str, ids)), ",".join(str(notice.position) for notice in told))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(("batches", "size"), [(1, 200 << 20), (20, 30 << 20)])
async def test_bombs_take_no_more_memory_than_the_limit_of_one(kafka: Kafka, url: str, batches: int, size: int) -> None:
    """A batch of 200 KB would unpack to 200 MB; the limit is 64 MiB, and copies of that much are made. What is within
    the limit is unpacked, but no more of it at once than a read is to have.
    """
    async with client(kafka) as (ours, _), ours.publisher(url, SCHEMA) as publisher:
        await (await inject(publisher, 1, 5))
        packed = batch(1, gzip.compress(record(0, bytes(size)), 1), 1)
        for _ in range(batches):
            await send_raw(kafka, url, packed)
        await (await inject(publisher, 6, 10))
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, kafka.bootstrap, url, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    async with asyncio.timeout(60):
        said, _ = await reader.communicate()
    more, ids, bad = said.decode().split()
    assert (ids, bad) == ("1,2,3,4,5,6,7,8,9,10", ",".join(str(5 + number) for number in range(batches)))
    assert int(more) < 180 << 10


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_blocks_that_a_publisher_compresses_arrive(kafka: Kafka, url: str, codec: str) -> None:
    async with client(kafka, globalconfig=f"compression.codec={codec}") as (ours, told):
        async with ours.publisher(url, SCHEMA) as publisher:
            delivery = await inject(publisher, 1, 1_000)
            await delivery
        async with ours.subscriber(url, side="in", start="earliest") as subscriber:
            await Reader(subscriber).to(1_000)
        assert told == []


async def test_the_words_of_a_group_are_kept_for_an_hour_and_the_order_of_an_engine_like_blocks(
    kafka: Kafka, url: str
) -> None:
    control = esp.Address.parse(url).engine_control
    names = [kafka_topic(name) for name in (control, order_topic(control, 0), order_topic(control, 7))]
    async with client(kafka) as (ours, _), administrator(kafka) as admin:
        for name in (control, order_topic(control, 0), order_topic(control, 7)):
            await (await ours.bus.pipe(name)).aclose()
        asked = [ConfigResource(ConfigResourceType.TOPIC, name, {"retention.ms": None}) for name in names]
        answers = await admin.describe_configs(asked)
    kept = {name: config[0][1] for answer in answers for _, _, _, name, config in answer.resources}
    assert [kept[name] for name in names] == ["3600000", "604800000", "604800000"]
