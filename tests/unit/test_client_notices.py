"""Client: who is told what, and what becomes of a handler that fails."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub import notices
from tests.unit.workbench import TOPIC, URL


async def lose(client: esp.Client, **how: Any) -> None:
    """Something to tell: garbage on the topic."""
    pipe = await client.bus.pipe(TOPIC)
    await pipe.write([b"garbage"])
    await pipe.aclose()
    async with client.publisher(URL, "id*:int64") as pub:
        await pub.inject([(1,)])
    async with client.subscriber(URL, side="in", start="earliest", **how) as sub, asyncio.timeout(60):
        assert (await anext(sub)).rows() == [(1,)]


async def test_notices_go_to_the_client_unless_there_is_a_handler_of_ones_own(bus_directory: Path) -> None:
    client_told: list[Any] = []
    own_told: list[Any] = []
    async with esp.init(dir=bus_directory, on_notice=client_told.append) as client:
        await lose(client, on_notice=own_told.append)
        assert [type(each) for each in own_told] == [notices.BadMessage]
        assert client_told == []
        await lose(client)
        assert notices.BadMessage in [type(each) for each in client_told]


async def test_without_a_handler_they_are_logged(bus_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "esp_pubsub"):
        async with esp.init(dir=bus_directory) as client:
            await lose(client)
    [record] = [record for record in caplog.records if "BadMessage" in record.getMessage()]
    given = {name: value for name, value in vars(record).items() if name.startswith("esp_")}
    assert given == {
        "esp_notice": "BadMessage", "esp_topic": TOPIC, "esp_position": 0, "esp_reason": given["esp_reason"]
    }  # fmt: skip
    assert record.levelno == logging.WARNING


async def test_a_handler_that_raises_changes_nothing(bus_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any) -> None:
        raise ZeroDivisionError

    async with esp.init(dir=bus_directory, on_notice=broken) as client:
        await lose(client)
    assert "on_notice failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
