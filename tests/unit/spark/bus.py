"""An embedded bus, as those see it who publish and who stop using it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import esp_pubsub as esp
from esp_pubsub.spark_bridge.connection import close_all

from .topic import SCHEMA

URL, TOPIC = "dfESP://h:1/p/q/w", "h:1/p/q/w/O"

__all__ = ["SCHEMA", "TOPIC", "URL", "close", "publish"]


def publish(bus_directory: Path, ids: Iterable[int], url: str = URL, **settings: int) -> None:
    """A block each, from a new publisher, and each in a transaction of the bus of its own."""

    async def published() -> None:
        async with (
            esp.init(dir=bus_directory, **settings) as client,
            client.publisher(url, SCHEMA, side="out") as publisher,
        ):
            for id in ids:
                await publisher.inject([(id,)])
                await publisher.flush()

    asyncio.run(published())


def close() -> None:
    """Close what the bridge keeps. A portal gives up waiting for its thread before a loaded machine has ended it."""
    close_all()
    for thread in threading.enumerate():
        if thread.name.startswith("esp spark"):
            thread.join(10)
