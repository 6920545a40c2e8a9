"""What workers read, without a JVM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import esp_pubsub as esp
from esp_pubsub.spark_bridge import source
from esp_pubsub.spark_bridge.connection import Connection, close_all, connected
from esp_pubsub.spark_bridge.offsets import OffsetRefused
from esp_pubsub.spark_bridge.options import Options, read_options
from esp_pubsub.spark_bridge.source import EspPartition, _frames

URL, TOPIC = "dfESP://h:1/p/q/w", "h:1/p/q/w/O"
BLOCKS = 60


@pytest.fixture
def options(bus_directory: Path) -> Options:
    async def publish() -> None:
        async with esp.init(dir=bus_directory) as client, client.publisher(URL, "id*:int64", side="out") as publisher:
            for id in range(BLOCKS):
                await publisher.inject([(id,)])
            await publisher.flush()

    asyncio.run(publish())
    return read_options({"url": URL, "bus.dir": str(bus_directory)}, "out")


@pytest.fixture
def connection(options: Options) -> Iterator[Connection]:
    with connected(options) as found:
        yield found
    close_all()


@pytest.fixture
def incarnation(connection: Connection) -> int | None:
    feed = connection.ask(5, connection.bus.feed, TOPIC, 0, None)
    return connection.ask(5, feed.bounds).incarnation


def ids(connection: Connection, options: Options, incarnation: int | None, *ranges: tuple[int, int]) -> list[int]:
    return [frame.id - 1 for frame in _frames(connection, EspPartition(TOPIC, incarnation, ranges), options)]


def test_a_task_reads_its_ranges_however_small_the_reads(
    connection: Connection, options: Options, incarnation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for messages in (1, 7, 1_000):
        monkeypatch.setattr(source, "_READ", (messages, 1 << 20))
        assert ids(connection, options, incarnation, (3, 5), (9, 30)) == [3, 4, *range(9, 30)]


def test_a_small_task_leaves_its_feed_to_the_one_that_goes_on_there(
    connection: Connection, options: Options, incarnation: int | None
) -> None:
    assert ids(connection, options, incarnation, (0, 2)) == [0, 1]
    left = connection.feeds[TOPIC][-1]
    assert ids(connection, options, incarnation, (2, 5)) == [2, 3, 4]
    assert connection.feeds[TOPIC][-1] is left
    assert ids(connection, options, incarnation, (7, 8)) == [7]
    assert connection.feeds[TOPIC][-1] is not left


def test_a_large_task_or_one_that_is_given_up_leaves_none(
    connection: Connection, options: Options, incarnation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = _frames(connection, EspPartition(TOPIC, incarnation, ((0, 2),)), options)
    next(given_up)
    given_up.close()  # type: ignore[attr-defined]
    assert not connection.feeds
    monkeypatch.setattr(source, "_FEW", 1)
    assert ids(connection, options, incarnation, (0, 2)) == [0, 1]
    assert not connection.feeds


def test_a_topic_that_was_purged_is_refused_on_a_feed_that_was_left(
    connection: Connection, options: Options, incarnation: int | None
) -> None:
    ids(connection, options, incarnation, (0, 2))
    connection.ask(5, connection.bus.purge, TOPIC)  # type: ignore[attr-defined]
    with pytest.raises(OffsetRefused, match="purged"):
        ids(connection, options, incarnation, (2, 5))
