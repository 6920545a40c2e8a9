"""For tests that use the vendor's client of Solace: what it leaves behind for good is none of theirs. And what a
real broker keeps of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from esp_pubsub.errors import BusUnavailable
from esp_pubsub.transports.solace import Options, session

from .server import HOST


@pytest.fixture(scope="session")
def solace_client() -> None:
    """The client has one thread for the whole process, which begins with the first session."""
    with contextlib.suppress(BusUnavailable):
        asyncio.run(session.connect(Options(host=f"tcp://{HOST}:1", username="us")))


@pytest.fixture(scope="session")
def what_is_left_is_told(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clients cannot delete durable queues that others may use: whose broker it was has to."""
    yield
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line(
            "\nThe broker keeps the durable queues that were made: delete those whose names have conformance:0/ in "
            "them or begin with flow@group- or group-."
        )
