"""A client of a bus directory of its own, for publishers and subscribers."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import esp_pubsub as esp
from tests.unit.workbench import Bench


@pytest.fixture
async def bench(bus_directory: Path) -> AsyncIterator[Bench]:
    client = await esp.init(dir=bus_directory)
    yield Bench(client, bus_directory)
    await client.aclose()
