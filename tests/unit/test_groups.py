"""How far a topic's groups are, and who reads for them."""

import asyncio
import logging
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import esp_pubsub as esp
from tests.unit.workbench import SYMBOLS, TOPIC, URL, Bench, ticks, until

IN = f"{URL}?side=in"


async def test_a_group_says_how_far_it_is_and_who_reads_for_it(bench: Bench) -> None:
    await bench.publish(1, 2, 3, 4)
    async with bench.client.subscriber(IN, group="billing") as sub:
        for _ in range(3):
            block = await anext(sub)
        await sub.confirm(block)
        [lag] = await bench.client.groups(IN)
    assert (lag.name, lag.topic, lag.position, lag.behind) == ("billing", TOPIC, 3, 1)
    assert lag.reader == f"process {os.getpid()}" and lag.since is not None
    now = datetime.now(UTC)
    assert timedelta(0) <= now - lag.since < timedelta(minutes=5) and 0 <= lag.seconds < 300
    [lag] = await bench.client.groups(IN)
    assert (lag.behind, lag.reader, lag.since) == (1, "", None)


async def test_groups_are_told_apart_by_topic_and_name(bench: Bench) -> None:
    await bench.publish(1, 2)
    for name, count in (("b", 2), ("a", 1)):
        async with bench.client.subscriber(IN, group=name) as sub:
            for _ in range(count):
                await anext(sub)
            await sub.confirm()
    other = "dfESP://test:5555/project/query/other?side=in"
    async with bench.client.publisher(other, SYMBOLS) as pub:
        await pub.inject([(1, "a")])
    assert [(lag.name, lag.behind, lag.seconds > 0) for lag in await bench.client.groups(IN)] == [
        ("a", 1, True), ("b", 0, False),
    ]  # fmt: skip
    assert await bench.client.groups(other) == []


async def test_a_group_that_has_confirmed_nothing_is_behind_everything(bench: Bench) -> None:
    await bench.publish(1, 2)
    async with bench.client.subscriber(IN, group="g") as sub:
        await anext(sub)
    [lag] = await bench.client.groups(IN)
    assert (lag.position, lag.behind) == (0, 2)


async def test_the_second_reader_of_a_group_logs_once_that_it_waits_and_for_whom(
    bench: Bench, bus_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.publish(1)
    with caplog.at_level(logging.INFO, "esp_pubsub"):
        async with (
            bench.client.subscriber(IN, group="g") as first,
            esp.init(dir=bus_directory) as other,
            other.subscriber(IN, group="g") as second,
        ):
            await anext(first)
            waiting = asyncio.ensure_future(anext(second))
            await until(lambda: "waits" in caplog.text)
            await ticks(50)
            waiting.cancel()
            await asyncio.wait([waiting])
    said = [record for record in caplog.records if "waits" in record.getMessage()]
    assert [record.getMessage() for record in said] == [
        f"a reader of group g on {TOPIC} waits: process {os.getpid()} reads for it"
    ]
    assert vars(said[0])["esp_group"] == "g"


async def test_a_bus_that_cannot_say_which_groups_there_are_says_so(bench: Bench) -> None:
    bench.client.bus.capabilities = replace(bench.client.bus.capabilities, shows_groups=False)
    with pytest.raises(esp.NotOffered, match="cannot say which groups there are"):
        await bench.client.groups(IN)
