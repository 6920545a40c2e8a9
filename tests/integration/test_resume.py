"""A sequence that its user keeps count of, over the lives of publishers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import esp_pubsub as esp

URL, SCHEMA = "dfESP://resume:5555/p/q/w", "id*:int64"


async def publish(directory: Path, resume: esp.Resume, *blocks: int) -> list[str]:
    async with (
        esp.init(dir=directory) as client,
        client.publisher(URL, SCHEMA, side="out", resume=resume) as publisher,
    ):
        return [await (await publisher.inject([(id,)])) for id in blocks]


async def test_a_publisher_goes_on_where_another_one_ended_and_doubles_are_not_seen(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client, client.subscriber(URL, SCHEMA) as subscriber:
        got: list[esp.Block] = []

        async def read(last: int) -> None:
            async for block in subscriber:
                got.append(block)
                if block.id == last:
                    return

        async with asyncio.timeout(60):
            assert await publish(bus_directory, esp.Resume("count"), 1, 2, 3) == ["acked"] * 3
            await read(3)
            behind_two = esp.Resume("count", 2, got[1].frame.chain)
            assert await publish(bus_directory, behind_two, 3, 4) == ["acked"] * 2  # it does not know that 3 is there
            await read(4)
        assert [block.rows()[0][0] for block in got] == [block.id for block in got] == [1, 2, 3, 4]
        assert subscriber.stats.doubles == 1


async def test_a_group_and_a_count_of_its_own_do_not_go_together(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client:
        with pytest.raises(esp.ConfigError, match="failover or resume"):
            client.publisher(URL, SCHEMA, failover=esp.Failover("g"), resume=esp.Resume("count"))
