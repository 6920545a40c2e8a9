"""Fixtures for pytest. It finds them by itself where the package is installed.

async def test_a_trade_arrives(esp_client):       # a client on a bus that this test has alone
    async with esp_client.publisher(URL, SCHEMA) as pub: ...

def test_the_service(esp_bus, esp_faults):        # `esp.init()` of the app that is tested opens that bus
    with TestClient(app) as web: ...
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..client import Client
    from .faults import Trouble

try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # then some other plugin runs coroutines, and takes plain fixtures
    async_fixture = pytest.fixture  # type: ignore[assignment]


@pytest.fixture
def esp_bus(monkeypatch: pytest.MonkeyPatch) -> str:
    """A bus in memory for this test alone: its name. Every `esp.init()` that names no bus opens it."""
    name = secrets.token_hex(8)
    monkeypatch.setenv("ESP_PUBSUB_BUS", "memory")
    monkeypatch.setenv("ESP_PUBSUB_NAME", name)
    return name


@async_fixture
async def esp_client(esp_bus: str) -> AsyncIterator[Client]:
    """A client of `esp_bus`."""
    from ..lib import init  # what the plugin imports, every run of pytest waits for

    async with init("memory", name=esp_bus) as client:
        yield client


@pytest.fixture
def esp_faults() -> Iterator[Trouble]:
    """Faults for every client that the test, or the app that it tests, opens from now on."""
    from .faults import Faults

    with Faults.everywhere() as trouble:
        yield trouble
