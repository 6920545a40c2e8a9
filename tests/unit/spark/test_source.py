"""What workers read, without a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from esp_pubsub.spark_bridge import source
from esp_pubsub.spark_bridge.connection import Connection, connected
from esp_pubsub.spark_bridge.offsets import Mark, OffsetRefused
from esp_pubsub.spark_bridge.options import Options, read_options
from esp_pubsub.spark_bridge.scan import Scan
from esp_pubsub.spark_bridge.source import EspPartition, EspStreamReader, _frames, partitions

from .bus import SCHEMA, TOPIC, URL, close, publish
from .topic import Topic, line

BLOCKS = 60


def read_options_of(bus_directory: Path, **more: str) -> Options:
    return read_options({"url": URL, "bus.dir": str(bus_directory), **more}, "out")


@pytest.fixture
def options(bus_directory: Path) -> Options:
    publish(bus_directory, range(BLOCKS))
    return read_options_of(bus_directory)


@pytest.fixture
def connection(options: Options) -> Iterator[Connection]:
    with connected(options) as found:
        yield found
    close()


@pytest.fixture
def incarnation(connection: Connection) -> int | None:
    return connection.ask(30, connection.bus.bounds, TOPIC).incarnation


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
    connection.ask(30, connection.bus.purge, TOPIC)  # type: ignore[attr-defined]
    with pytest.raises(OffsetRefused, match="purged"):
        ids(connection, options, incarnation, (2, 5))


RING = {"ring_records": 10}


def test_a_first_batch_that_comes_again_has_the_same_rows_though_retention_has_moved(bus_directory: Path) -> None:
    publish(bus_directory, range(10), **RING)
    options = read_options_of(bus_directory, **{"bus.ring_records": "10"})
    query, again = EspStreamReader(options, SCHEMA), EspStreamReader(options, SCHEMA)
    try:
        start = query.initialOffset()
        end = query.latestOffset(start, query.getDefaultReadLimit())
        [planned] = query.partitions(start, end)
        publish(bus_directory, range(10, 13), **RING)
        moved = again.initialOffset()  # Spark keeps no start of the first batch
        assert moved != start
        assert again.partitions(moved, end) == [planned]
        with pytest.raises(OffsetRefused, match="were removed before they were read"):
            list(again.read(planned))
    finally:
        query.stop()
        again.stop()
        close()


def test_a_topic_that_has_nothing_in_a_batch_is_not_read_again(bus_directory: Path) -> None:
    options = read_options_of(bus_directory, url=f"{URL} {URL}2")
    publish(bus_directory, range(3))
    publish(bus_directory, range(2), url=f"{URL}2")
    query = EspStreamReader(options, SCHEMA)
    try:
        start = query.initialOffset()
        first = query.latestOffset(start, query.getDefaultReadLimit())
        publish(bus_directory, range(3, 4))
        query.prepareForTriggerAvailableNow()
        second = query.latestOffset(first, query.getDefaultReadLimit())
        assert [each.ranges for each in query.partitions(start, first)] == [((0, 3),), ((0, 2),)]
        assert [each.ranges for each in query.partitions(first, second)] == [((3, 4),)]
        assert query.latestOffset(second, query.getDefaultReadLimit()) is second  # asked again and again, for nothing
    finally:
        query.stop()
        close()


def test_offsets_that_are_lost_between_two_are_told() -> None:
    topic, scan = Topic(), Scan(TOPIC, Mark(0, 1))
    topic.put(*line(1, 3))
    scan.take(topic.messages)
    marks = [{TOPIC: scan.advance(1)} for _ in topic.messages]
    assert len(partitions(marks[1], marks[2])) == 1
    with pytest.raises(OffsetRefused, match=r"began at position 2, .* offset before it is 1: offsets in between"):
        partitions(marks[0], marks[2])
