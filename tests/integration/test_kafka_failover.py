"""Failover groups on Kafka, elected by the log and by ZooKeeper: members are killed, hand over, have neighbours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.errors import DeliveryUnknown
from esp_pubsub.notices import Missed, Notice, Skipped
from tests.integration.members import SCHEMA, Reader, inject, until
from tests.support.kafka import Kafka

ROOT = Path(__file__).parents[2]
NEIGHBOURS = int(
    os.environ.get("ESP_KAFKA_NEIGHBOURS", "100_000")
)  # blocks of the other group; a million takes a minute
NOBODY = "zookeeper://127.0.0.1:1/esp?session=1200ms"
TAKEOVER = 20.0  # what a loaded machine may take; it is about half a second
MEMBER = """
import asyncio, sys
import esp_pubsub as esp
from tests.integration.members import SCHEMA, rows

async def main(hostport, url, election, blocks, pause):
    failover = esp.Failover("feed", election=election)
    async with esp.init("kafka", hostport=hostport, on_notice=lambda notice: None) as client:
        async with client.publisher(url, SCHEMA, failover=failover) as publisher:
            async def tell():
                async for change in publisher.roles():
                    print(change.role, flush=True)
            telling = asyncio.create_task(tell())
            for id in range(1, int(blocks) + 1):
                await publisher.inject(rows(id))
                await asyncio.sleep(float(pause))
            print("all", flush=True)
            await publisher.flush(30)
            await telling  # until somebody kills it

asyncio.run(main(*sys.argv[1:]))
"""

pytestmark = pytest.mark.timeout(300 + NEIGHBOURS / 5_000)


@pytest.fixture
def url() -> str:
    return f"dfESP://host:5555/{secrets.token_hex(4)}/q/w"


@pytest.fixture(params=["log", "zookeeper"])
def election(request: pytest.FixtureRequest) -> str:
    """What `Failover` takes; the server is there only where it is needed."""
    if request.param == "log":
        return "log"
    return f"zookeeper://{request.getfixturevalue('zookeeper').hosts}/esp-{secrets.token_hex(4)}?session=1200ms"


class Process:
    """A member in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, word: str, seconds: float = 60.0) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(seconds):
            while (line := (await self.process.stdout.readline()).decode().strip()) != word:
                assert line, f"it ended before it said {word}"


@contextlib.asynccontextmanager
async def process(*arguments: Any) -> AsyncIterator[Process]:
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MEMBER, *map(str, arguments), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        yield Process(made)
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.kill()
        await made.communicate()


@contextlib.asynccontextmanager
async def reading(kafka: Kafka, url: str) -> AsyncIterator[Reader]:
    """It sees the whole sequence, or this fails."""
    notices: list[Notice] = []
    async with (
        esp.init("kafka", hostport=kafka.bootstrap, on_notice=notices.append) as client,
        client.subscriber(url, SCHEMA, side="in", start="earliest") as subscriber,
    ):
        yield Reader(subscriber)
    assert not [notice for notice in notices if isinstance(notice, Missed | Skipped)]


@contextlib.asynccontextmanager
async def member(kafka: Kafka, url: str, group: str = "feed", **failover: Any) -> AsyncIterator[esp.Publisher]:
    async with esp.init("kafka", hostport=kafka.bootstrap, on_notice=lambda notice: None) as client:
        publisher = await client.publisher(url, SCHEMA, failover=esp.Failover(group, **failover))
        try:
            yield publisher
        finally:
            with contextlib.suppress(esp.EspError):
                await publisher.aclose()


async def test_an_active_process_is_killed_and_the_subscriber_sees_the_whole_sequence(
    kafka: Kafka, url: str, election: str
) -> None:
    job = (kafka.bootstrap, url, election, 6_000)
    async with reading(kafka, url) as reader, process(*job, 0.003) as first:
        await first.says("active")
        async with process(*job, 0) as second:
            await second.says("candidate")  # it is there, and has caught up
            await reader.to(300)
            first.process.kill()
            await second.says("active", TAKEOVER)
            await reader.to(6_000)
        await reader.nothing_more()


async def test_members_hand_over_to_each_other_and_the_subscriber_cannot_tell(
    kafka: Kafka, url: str, election: str
) -> None:
    election = election.replace("1200ms", "30s")  # nobody dies here: who stands still for a second stays who it is
    async with (
        reading(kafka, url) as reader,
        member(kafka, url, election=election) as a,
        member(kafka, url, election=election) as b,
    ):
        await until(lambda: "active" in (a.stats.role, b.stats.role))
        leader, other = (a, b) if a.stats.role == "active" else (b, a)
        last = 0
        for _ in range(4):
            await asyncio.gather(*(inject(each, last + 1, last + 200) for each in (leader, other)))
            while other.stats.role != "active":  # who hands over while the other one is not in line leads again
                await leader.hand_over()
                await until(lambda: "active" in (a.stats.role, b.stats.role))
            leader, other = other, leader
            last += 200
        await asyncio.gather(a.flush(60), b.flush(60))
        await reader.to(last)
        await reader.nothing_more()
        assert a.stats.sent + b.stats.sent >= last


async def test_the_blocks_of_another_group_in_between_do_not_hinder_a_takeover(kafka: Kafka, url: str) -> None:
    """The group's own last block lies far behind: what a newcomer looks through is full of the others'."""
    async with process(kafka.bootstrap, url, "log", 1_000, 0.001) as active:
        await active.says("active")
        async with member(kafka, url) as standby:
            await inject(standby, 1, 1_000)
            await standby.flush(20)
            async with member(kafka, url, "neighbours") as neighbour:
                for id in range(1, NEIGHBOURS + 1):
                    await neighbour.inject([(id, "n")])
                await neighbour.flush(30)
                async with member(kafka, url) as newcomer:
                    await inject(newcomer, 1, 1_000)
                    begun = time.monotonic()
                    active.process.kill()
                    await until(lambda: "active" in (standby.stats.role, newcomer.stats.role), TAKEOVER)
                    for each in (standby, newcomer):
                        await inject(each, 1_001, 1_100)
                    await asyncio.gather(standby.flush(10), newcomer.flush(10))
                    assert time.monotonic() - begun < 2 * TAKEOVER
                    assert max(standby.stats.sent, newcomer.stats.sent) == 1_100
        ours, theirs = standby.source, neighbour.source
    following = {ours: 1, theirs: 1}
    notices: list[Notice] = []
    async with (
        esp.init("kafka", hostport=kafka.bootstrap, on_notice=notices.append) as client,
        client.subscriber(url, side="in", start="earliest") as subscriber,
        asyncio.timeout(60 + NEIGHBOURS / 10_000),
    ):
        while following != {ours: 1_101, theirs: NEIGHBOURS + 1}:
            block = await anext(subscriber)
            assert block.id == following[block.source]
            following[block.source] += 1
    assert notices == []


async def test_a_group_whose_zookeeper_is_not_there_waits_and_says_so(
    kafka: Kafka, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = esp.PublisherOptions(ack_timeout=0.5, close_timeout=0.5)
    async with esp.init("kafka", hostport=kafka.bootstrap, on_notice=lambda notice: None) as client:
        with caplog.at_level(logging.WARNING, "esp_pubsub"):
            begun = time.monotonic()
            publisher = await client.publisher(
                url, SCHEMA, failover=esp.Failover("feed", election=NOBODY), options=options
            )
            delivery = await inject(publisher, 1, 100)
            with pytest.raises(DeliveryUnknown):
                await delivery
            assert publisher.stats.role in ("standby", "candidate")
            await until(lambda: any("127.0.0.1:1" in record.getMessage() for record in caplog.records))
            with pytest.raises(DeliveryUnknown):
                await publisher.aclose()
            assert time.monotonic() - begun < 15
