"""A sequence that its user keeps count of, over the lives of publishers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from tests.support.kafka import Kafka
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST

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


async def refuses_what_differs(bus: str, **settings: Any) -> None:
    url = f"dfESP://resume:5555/{secrets.token_hex(4)}/q/w"

    def resumed(client: esp.Client, resume: esp.Resume) -> Any:
        return client.publisher(url, SCHEMA, resume=resume, on_notice=lambda notice: None)

    async with esp.init(bus, **settings) as one, esp.init(bus, **settings) as two:
        async with asyncio.timeout(120), resumed(one, esp.Resume("count")) as first:
            late = await resumed(two, esp.Resume("count"))  # while nothing is there
            assert [await (await first.inject([(id,)])) for id in (1, 2, 3)] == ["acked"] * 3
            with pytest.raises(esp.InputDiffers):
                await (await late.inject([(-1,)]))
            with pytest.raises(esp.InputDiffers):
                await late.inject([(1,)])
            with contextlib.suppress(esp.InputDiffers):
                await late.aclose()
            later = await resumed(two, esp.Resume("count"))
            with pytest.raises(esp.InputDiffers):
                await later.inject([(-1,)])
            await later.aclose()
            async with resumed(two, esp.Resume("count")) as same:
                assert [await (await same.inject([(id,)])) for id in (1, 2, 3, 4)] == ["acked"] * 4
        async with asyncio.timeout(120), one.subscriber(url, SCHEMA, side="in", start="earliest") as subscriber:
            assert [(await anext(subscriber)).rows()[0][0] for _ in range(4)] == [1, 2, 3, 4]


async def test_on_kafka_other_blocks_under_a_name_are_refused(kafka: Kafka) -> None:
    await refuses_what_differs("kafka", hostport=kafka.bootstrap)


async def test_on_a_rabbitmq_stream_other_blocks_under_a_name_are_refused(rabbitmq: RabbitMQ) -> None:
    port, streamport = rabbitmq.nodes[0].port, rabbitmq.stream_port
    await refuses_what_differs("rabbitmq", host=HOST, port=port, streamport=streamport, mode="stream")
