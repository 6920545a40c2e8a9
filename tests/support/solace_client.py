"""A fixture for tests that use the vendor's client of Solace: what it leaves behind for good is none of theirs."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from esp_pubsub.errors import BusUnavailable
from esp_pubsub.transports.solace import Options, session

from .server import HOST


@pytest.fixture(scope="session")
def solace_client() -> None:
    """The client has one thread for the whole process, which begins with the first session."""
    with contextlib.suppress(BusUnavailable):
        asyncio.run(session.connect(Options(host=f"tcp://{HOST}:1", username="us")))
