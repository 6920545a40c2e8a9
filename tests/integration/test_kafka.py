"""What a user does on a real Kafka broker, and what strangers put on his topics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

import esp_pubsub as esp
from esp_pubsub.address import kafka_topic
from esp_pubsub.errors import BusRefused, ConfigError, TooLarge
from esp_pubsub.notices import BadMessage, Failure, Notice
from tests.integration.members import SCHEMA, Reader, inject, rows
from tests.support.kafka import Kafka

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url() -> str:
    return f"dfESP://host:5555/{secrets.token_hex(4)}/q/w"


def topic(url: str) -> str:
    """Kafka's name of the topic that these tests use."""
    return kafka_topic(f"{url.removeprefix('dfESP://')}/I")


@contextlib.asynccontextmanager
async def publishing(kafka: Kafka, url: str, **settings: Any) -> AsyncIterator[esp.Publisher]:
    async with (
        esp.init("kafka", hostport=kafka.bootstrap, **settings) as client,
        client.publisher(url, SCHEMA) as publisher,
    ):
        yield publisher


@contextlib.asynccontextmanager
async def reading(kafka: Kafka, url: str, notices: list[Notice], **more: Any) -> AsyncIterator[Reader]:
    async with (
        esp.init("kafka", hostport=kafka.bootstrap, on_notice=notices.append) as client,
        client.subscriber(url, SCHEMA, side="in", **{"start": "earliest"} | more) as subscriber,
    ):
        yield Reader(subscriber)


@contextlib.asynccontextmanager
async def stranger(kafka: Kafka, **settings: Any) -> AsyncIterator[AIOKafkaProducer]:
    """Somebody who writes what he likes."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all", **settings) as producer:
        yield producer


async def make_topic(kafka: Kafka, name: str, partitions: int = 1, **configs: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        answer = await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=configs)])
        assert answer.topic_errors[0][1] == 0, answer
    finally:
        await admin.close()


# the first ten minutes


def run(folder: Path, name: str, code: str) -> subprocess.Popen[str]:
    (folder / name).write_text(code)
    return subprocess.Popen(
        [sys.executable, "-W", "error", name], cwd=folder, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def test_groups_say_how_far_they_are_and_who_reads(kafka: Kafka, url: str) -> None:
    async with publishing(kafka, url) as publisher:
        await inject(publisher, 1, 5)
        await publisher.flush(30)
    async with esp.init("kafka", hostport=kafka.bootstrap) as client:
        assert await client.groups(url, side="in") == []
        async with client.subscriber(url, SCHEMA, side="in", group="billing") as sub:
            for _ in range(3):
                block = await anext(sub)
            await sub.confirm(block)
            [lag] = await client.groups(url, side="in")
            assert (lag.name, lag.position, lag.behind, lag.reader) == ("billing", 3, 2, "127.0.0.1")
            assert 0 < lag.seconds < 300 and lag.since is None
        [lag] = await client.groups(url, side="in")
        assert (lag.behind, lag.reader) == (2, "")


async def test_the_ten_lines_of_the_readme_work_with_one_line_more_and_a_cfg_file(kafka: Kafka, tmp_path: Path) -> None:
    project = secrets.token_hex(4)
    (tmp_path / "kafka.cfg").write_text(f'kafka\n{{\n    hostport = "{kafka.bootstrap}"\n    partition = 0\n}}\n')
    switch = 'import esp_pubsub as esp\nesp.set_pubsub_lib("kafka", config="kafka.cfg")\n'
    codes = {
        found[1]: code.replace("import esp_pubsub as esp\n", switch).replace("/market/", f"/{project}/")
        for code in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
        if (found := re.match(r"# (publish|subscribe)\.py\n", code))
    }
    with run(tmp_path, "subscribe.py", codes["subscribe"]) as subscriber:
        try:
            publisher = run(tmp_path, "publish.py", codes["publish"])
            assert await asyncio.to_thread(publisher.communicate, timeout=20) == ("", "")
            assert publisher.returncode == 0
            async with asyncio.timeout(60):
                line = await asyncio.to_thread(subscriber.stdout.readline)  # type: ignore[union-attr]
            assert line == "1 [(1, 'IBM', 101.5), (2, 'SAS', 99.0)]\n"
        finally:
            subscriber.kill()


@pytest.mark.parametrize(
    ("initialoffset", "first"), [("smallest", 1), ("2", 3), ("largest", 4)], ids=["smallest", "number", "largest"]
)
async def test_initialoffset_of_the_cfg_file_is_where_a_subscriber_begins_that_says_nothing_else(
    kafka: Kafka, url: str, tmp_path: Path, initialoffset: str, first: int
) -> None:
    config = tmp_path / "kafka.cfg"
    config.write_text(f'kafka\n{{\nhostport = "{kafka.bootstrap}"\ninitialoffset = "{initialoffset}"\n}}\n')
    async with publishing(kafka, url) as publisher:
        await (await inject(publisher, 1, 3))
        async with (
            esp.init("kafka", config=config, on_notice=lambda notice: None) as client,
            client.subscriber(url, side="in") as subscriber,
        ):
            await inject(publisher, 4, 4)
            await Reader(subscriber, first).to(4)


async def test_groupid_of_the_cfg_file_is_the_group_of_a_subscriber_that_names_none(
    kafka: Kafka, url: str, tmp_path: Path
) -> None:
    config = tmp_path / "kafka.cfg"
    config.write_text(f'kafka\n{{\nhostport = "{kafka.bootstrap}"\ngroupid = "mine"\n}}\n')
    async with publishing(kafka, url) as publisher:
        await (await inject(publisher, 1, 4))
    for first, last in ((1, 2), (3, 4)):
        async with (
            esp.init("kafka", config=config) as client,
            client.subscriber(url, side="in") as subscriber,
        ):
            assert subscriber.group == "mine"
            await Reader(subscriber, first).to(last, confirm_every=1)


async def test_two_clients_in_one_process_and_two_loops_one_after_the_other_do_not_disturb_each_other(
    kafka: Kafka, url: str
) -> None:
    async def once(first: int) -> None:
        async with publishing(kafka, url) as ours, publishing(kafka, f"{url}2") as theirs:
            await asyncio.gather(inject(ours, 1, 50), inject(theirs, 1, 50))
            notices: list[Notice] = []
            async with reading(kafka, url, notices) as reader, reading(kafka, f"{url}2", notices) as other:
                for each in (reader, other):
                    for _ in range(first - 1):  # what the loop before left
                        await anext(each.subscriber)
                    await each.to(50)
            assert not [notice for notice in notices if isinstance(notice, Failure)]

    def twice() -> None:
        asyncio.run(once(1))
        asyncio.run(once(51))

    await asyncio.to_thread(twice)


async def test_a_forked_child_is_told_to_make_a_client_of_its_own(kafka: Kafka, url: str) -> None:
    code = f"""
import asyncio, os
import esp_pubsub as esp

async def main():
    async with esp.init("kafka", hostport={kafka.bootstrap!r}) as client:
        async with client.publisher({url!r}, {SCHEMA!r}) as publisher:
            await (await publisher.inject([(1, "a")]))
            child = os.fork()
            if child == 0:
                try:
                    await publisher.inject([(2, "b")])
                except esp.WrongOrder as error:
                    print(error, flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            await (await publisher.inject([(3, "c")]))

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        said, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert b"before a fork" in said
    async with reading(kafka, url, []) as reader:
        assert [(await anext(reader.subscriber)).rows() for _ in range(2)] == [[(1, "a")], [(3, "c")]]


# sizes and partitions


async def test_a_block_larger_than_the_broker_takes_is_refused_before_it_has_an_id(kafka: Kafka, url: str) -> None:
    async with publishing(kafka, url) as publisher:
        await inject(publisher, 1, 1)
        with pytest.raises(TooLarge) as caught:
            await publisher.inject([(2, "x" * 1_100_000)])
        assert caught.value.size > 1_100_000
        assert 1_000_000 < caught.value.limit < 1_048_588
        assert f"{caught.value.size}" in str(caught.value)
        assert f"{caught.value.limit}" in str(caught.value)
        await (await inject(publisher, 2, 3))
    async with reading(kafka, url, []) as reader:
        await reader.to(3)


async def test_the_largest_block_that_is_not_refused_arrives(kafka: Kafka, url: str) -> None:
    async with publishing(kafka, url) as publisher:
        with pytest.raises(TooLarge) as caught:
            await publisher.inject([(1, "x" * 1_100_000)])
        largest = [(1, "x" * (1_100_000 - caught.value.size + caught.value.limit))]
        await (await publisher.inject(largest))
        async with reading(kafka, url, []) as reader:
            assert (await anext(reader.subscriber)).rows() == largest


async def test_a_topic_that_takes_less_than_the_broker_is_refused_with_both_sizes_and_the_way_out(
    kafka: Kafka, url: str
) -> None:
    await make_topic(kafka, topic(url), **{"max.message.bytes": "50000"})
    failures: list[Notice] = []
    async with esp.init("kafka", hostport=kafka.bootstrap, on_notice=failures.append) as client:
        publisher = await client.publisher(url, SCHEMA)
        with pytest.raises(BusRefused, match=r"takes 50000 bytes at once, the broker 1048588.*message.max.bytes=50000"):
            async with asyncio.timeout(60):
                await (await publisher.inject(rows(1)))
        with pytest.raises(BusRefused):
            await publisher.aclose()
        assert any(isinstance(failure, Failure) for failure in failures)
    async with publishing(kafka, url, globalconfig="message.max.bytes=50000") as publisher:
        with pytest.raises(TooLarge) as caught:
            await publisher.inject([(1, "x" * 60_000)])
        assert caught.value.limit < 50_000
        await (await inject(publisher, 1, 3))
    async with reading(kafka, url, []) as reader:
        await reader.to(3)


async def test_a_partition_that_is_not_there_is_refused_with_those_that_are(kafka: Kafka, url: str) -> None:
    await make_topic(kafka, topic(url))
    refusal = r"partitions \[0\], and not 3"
    async with esp.init("kafka", hostport=kafka.bootstrap, partition=3, on_notice=lambda notice: None) as client:
        publisher = await client.publisher(url, SCHEMA)
        with pytest.raises(BusRefused, match=refusal):
            async with asyncio.timeout(60):
                await (await publisher.inject(rows(1)))
        with pytest.raises(BusRefused):
            await publisher.aclose()
        with pytest.raises(BusRefused, match=refusal):
            async with asyncio.timeout(60):
                await client.subscriber(url, side="in")


async def test_the_partition_that_is_configured_carries_the_blocks(kafka: Kafka, url: str) -> None:
    await make_topic(kafka, topic(url), 4)
    async with (
        esp.init("kafka", hostport=kafka.bootstrap, partition=3) as client,
        client.publisher(url, SCHEMA) as publisher,
        client.subscriber(url, side="in", start="earliest") as subscriber,
    ):
        await inject(publisher, 1, 5)
        await Reader(subscriber).to(5)
        assert (await client.bus.bounds(f"{url.removeprefix('dfESP://')}/I")).end == 5


async def test_no_partition_in_particular_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"partition is from 0 on, not -1: blocks have one order") as caught:
        await esp.init("kafka", hostport="127.0.0.1:1", partition=-1)
    assert caught.value.key == "partition"  # type: ignore[attr-defined]


# strangers


FOREIGN: dict[str, dict[str, Any]] = {
    "garbage": {"value": secrets.token_bytes(300)},
    "a key and headers": {"value": b'{"a": 1}', "key": b"k", "headers": [("h", b"v"), ("h", b"")]},
    "nothing": {"value": b""},
    "a tombstone": {"value": None, "key": b"gone"},
    "a torn header": {"value": b"\xe5PB\x01"},
    "a version to come": {"value": b"\xe5PB\x02" + bytes(100)},
}


async def test_blocks_around_foreign_messages_arrive_and_each_of_those_is_told_once(kafka: Kafka, url: str) -> None:
    notices: list[Notice] = []
    async with (
        publishing(kafka, url) as publisher,
        stranger(kafka) as producer,
        reading(kafka, url, notices) as reader,
        reading(kafka, url, [], group="g") as in_group,
    ):
        positions = []
        for id, message in enumerate(FOREIGN.values(), 1):
            await (await inject(publisher, id, id))
            positions.append((await producer.send_and_wait(topic(url), partition=0, **message)).offset)
        last = len(FOREIGN) + 1
        await (await inject(publisher, last, last))
        await reader.to(last)
        await in_group.to(last, confirm_every=1)
        assert reader.subscriber.stats.bad == len(FOREIGN)
        assert reader.subscriber.stats.missed == 0
        await (await inject(publisher, last + 1, last + 1))
    bad = [notice for notice in notices if isinstance(notice, BadMessage)]
    assert [notice.position for notice in bad] == positions
    assert all(notice.reason for notice in bad)
    assert notices == bad
    async with reading(kafka, url, [], group="g") as reader:
        reader.following = last + 1
        await reader.to(last + 1)


@pytest.mark.parametrize("compression", [None, "gzip"])
async def test_blocks_in_one_batch_with_foreign_messages_arrive(
    kafka: Kafka, url: str, compression: str | None
) -> None:
    async with publishing(kafka, url) as publisher:
        await (await inject(publisher, 1, 3))
        async with stranger(kafka, compression_type=compression) as producer:
            batch = producer.create_batch()
            for n in range(20):
                assert batch.append(key=None, value=b"%d" % n, timestamp=None)
            await (await producer.send_batch(batch, topic(url), partition=0))
        await (await inject(publisher, 4, 5))
    notices: list[Notice] = []
    async with reading(kafka, url, notices) as reader:
        await reader.to(5)
    assert [notice.position for notice in notices if isinstance(notice, BadMessage)] == list(range(3, 23))


async def test_the_commit_of_a_transaction_of_somebody_else_is_passed_over(kafka: Kafka, url: str) -> None:
    """It takes an offset and is no message."""
    notices: list[Notice] = []
    async with publishing(kafka, url) as publisher, reading(kafka, url, notices, group="g") as reader:
        await (await inject(publisher, 1, 1))
        async with stranger(kafka, transactional_id=secrets.token_hex(4)) as producer, producer.transaction():
            await producer.send_and_wait(topic(url), b"theirs", partition=0)
        await (await inject(publisher, 2, 3))
        await reader.to(3, confirm_every=1)
    assert [notice.position for notice in notices if isinstance(notice, BadMessage)] == [1]


async def test_a_topic_that_is_made_has_as_many_copies_as_are_configured(kafka: Kafka, url: str) -> None:
    async with publishing(kafka, url, replication=1) as publisher:
        await (await inject(publisher, 1, 1))
    async with esp.init("kafka", hostport=kafka.bootstrap, replication=3, on_notice=lambda notice: None) as client:
        publisher = await client.publisher(f"{url}3", SCHEMA)
        with pytest.raises(BusRefused, match=r"(?i)replication"):
            async with asyncio.timeout(60):
                await (await publisher.inject(rows(1)))
        with pytest.raises(BusRefused):
            await publisher.aclose()
