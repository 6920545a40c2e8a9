"""Blocks from a batch, on a bus, without a JVM."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import esp_pubsub as esp
from esp_pubsub.bus import Message
from esp_pubsub.errors import ConfigError
from esp_pubsub.spark_bridge import effects, publish_batch
from esp_pubsub.spark_bridge.ledger import Ledger
from esp_pubsub.wire.frame import parse

from .bus import URL, close


class Killed(Exception):
    """Stands for the end of the driver."""


class Batch:
    """As much of a DataFrame as there is need for: rows in order."""

    columns = ("id",)

    def __init__(self, *ids: int) -> None:
        self._ids = ids
        self.sparkSession = self.sparkContext = self

    def getLocalProperty(self, name: str) -> str:  # Spark's name
        return "the-query"

    def orderBy(self, *names: str) -> Batch:  # Spark's name
        return self

    def select(self, *names: str) -> Batch:
        return self

    def toArrow(self) -> pa.Table:  # Spark's name
        return pa.table({"id": pa.array(self._ids, pa.int64())})


@pytest.fixture
def publishing(bus_directory: Path, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """`publish_batch` with everything said that a test does not say."""

    def published(batch_id: int, *ids: int, bus: str = "bus", schema: str = "id*:int64", **more: Any) -> None:
        publish_batch(
            Batch(*ids), URL, batch_id, order_by=["id"], schema=schema, block_size=1,  # type: ignore[arg-type]
            ledger=lambda: Ledger(sqlite3.connect(tmp_path / "ledger.db")), **{"bus.dir": str(bus_directory / bus)},
            **more,
        )  # fmt: skip

    yield published
    effects._published.clear()
    close()


def blocks(place: Path) -> list[int]:
    """The ids of all blocks that stand on the bus, in order."""

    async def read() -> list[int]:
        async with esp.init(dir=place) as client:
            bounds = await client.bus.bounds("h:1/p/q/w/I")
            if bounds.first == bounds.end:
                return []
            feed = await client.bus.feed("h:1/p/q/w/I", "earliest", None)
            try:
                found = await feed.read(1_000, 1 << 20)
                return [parse(each.data).id for each in found if isinstance(each, Message)]
            finally:
                await feed.aclose()

    return asyncio.run(read())


def test_the_same_window_on_two_buses_needs_a_name_for_each(
    publishing: Callable[..., None], bus_directory: Path
) -> None:
    publishing(0, 1, 2)
    with pytest.raises(ConfigError, match="give each call of publish_batch a name="):
        publishing(0, 1, 2, bus="other")
    publishing(0, 1, 2, bus="other", name="other")
    publishing(0, 1, 2)  # again, after a failure
    publishing(0, 1, 2, bus="other", name="other")
    publishing(1, 3)
    assert (blocks(bus_directory / "bus"), blocks(bus_directory / "other")) == ([1, 2, 3], [1, 2])


def test_another_schema_while_blocks_are_kept_is_refused_with_the_way_out(
    publishing: Callable[..., None], bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as dying:
        dying.setattr(effects, "_publish", dies)
        with pytest.raises(Killed):
            publishing(0, 1, 2)
    with pytest.raises(ConfigError, match="run the query with the schema it had until this batch is done"):
        publishing(0, 1, 2, schema="id*:int64,more:string")
    publishing(0, 1, 2)
    assert blocks(bus_directory / "bus") == [1, 2]


def test_what_is_published_of_a_batch_is_noted_so_that_each_try_gets_further(
    publishing: Callable[..., None], bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "_PIECE", 2)
    publish, noted, left = effects._publish, list[int](), [3]
    forget = Ledger.published

    async def dies(*arguments: Any) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        await publish(*arguments)

    def notes(book: Ledger, stream: str, last: int) -> None:
        noted.append(last)
        forget(book, stream, last)

    monkeypatch.setattr(effects, "_publish", dies)
    monkeypatch.setattr(Ledger, "published", notes)
    with pytest.raises(Killed):
        publishing(0, *range(10))
    left[0] = 10
    publishing(0, *range(10))
    assert noted == [2, 4, 6, 8, 10]
    assert blocks(bus_directory / "bus") == list(range(1, 11))
