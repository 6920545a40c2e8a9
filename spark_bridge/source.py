"""The data source `esp` for PySpark: what Spark calls, and in which process.

    driver of a query     EspStreamReader plans: one Planner for the query's life
    workers               EspStreamReader.read: bodies of the ranges that were planned

Spark pickles sources, readers and partitions, so they hold options and numbers only.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from esp_pubsub.backoff import Backoff
from esp_pubsub.bus import Break, Message, Place
from esp_pubsub.errors import BusUnavailable, ConfigError, SchemaError
from esp_pubsub.follower import Follower
from esp_pubsub.schema import Schema
from esp_pubsub.wire.frame import Frame, parse

from .connection import Connection, connected
from .offsets import Mark, Offset, OffsetRefused, from_json, to_json
from .options import Options, read_options
from .planner import Planner, still_there
from .rows import batches, spark_schema
from .scan import refused
from .writer import EspStreamWriter, EspWriter, writing

ROWS_A_TASK, TASKS_MOST = 262_144, 16
_READ = 1_000, 8 << 20
_FEW = 100  # messages of a task, which are then the newest: the next task goes on behind them
_PAUSE = 0.2
_log = logging.getLogger("esp_pubsub.spark")


@dataclass
class EspPartition(InputPartition):
    """Positions of one topic that a worker is to read."""

    topic: str
    incarnation: int | None
    ranges: tuple[tuple[int, int], ...]


class EspSource(DataSource):
    """`spark.readStream.format("esp")`, and `read`, `writeStream` and `write`."""

    @classmethod
    def name(cls) -> str:
        """What `format` takes."""
        return "esp"

    @cached_property
    def _found(self) -> tuple[Options, Schema]:
        """Found where `schema` is called, once; Spark hands the source on with it."""
        options = read_options(self.options, "out")
        return options, _find_schema(options)

    def schema(self) -> str:
        """The window's fields, from the option `schema` or from what its publisher retained."""
        options, schema = self._found
        return spark_schema(schema, options.columns)

    def streamReader(self, schema: Any) -> EspStreamReader:  # Spark's name
        """See `DataSource.streamReader`."""
        if self._found[0].end != "latest":
            raise ConfigError("a stream has no end: the option end is for spark.read", key="end")
        return EspStreamReader(*self._found)

    def reader(self, schema: Any) -> EspReader:
        """See `DataSource.reader`."""
        return EspReader(*self._found)

    def streamWriter(self, schema: Any, overwrite: bool) -> EspStreamWriter:  # Spark's name
        """See `DataSource.streamWriter`."""
        return EspStreamWriter(*writing(self.options, overwrite))

    def writer(self, schema: Any, overwrite: bool) -> EspWriter:
        """See `DataSource.writer`."""
        return EspWriter(*writing(self.options, overwrite))


def _find_schema(options: Options) -> Schema:
    schema = options.schema
    with connected(options) as connection:
        for topic in options.topics:
            found = connection.ask(options.timeout, connection.client.topic_schema, topic, options.schema)
            if found is None:
                raise SchemaError(f"nobody has published to {topic}, so its schema is not known: set the option schema")
            if schema is not None and found != schema:
                raise SchemaError(f"{options.topics[0]} and {topic} have different schemas; read each by its own query")
            schema = found
    return cast(Schema, schema)


def partitions(start: Offset, end: Offset) -> Sequence[EspPartition]:
    """The work of a batch, by the offset at its end; what has many rows is cut into several.

    Where it began stands there too. Of the first batch Spark keeps no start but asks anew, so that one says nothing.
    """
    found = []
    for topic, mark in end.items():
        before = start[topic]
        began = mark.position if mark.begun is None else mark.begun
        if before.counts["blocks"] and before.position != began:
            raise OffsetRefused(
                f"{topic}: the batch began at position {began}, and the checkpoint's offset before it is "
                f"{before.position}: offsets in between are lost (asyncProgressTrackingEnabled?); begin with a new "
                "checkpoint"
            )
        messages = sum(last - first for first, last in mark.ranges())
        pieces = min(TASKS_MOST, -(-(mark.counts["rows"] - before.counts["rows"]) // ROWS_A_TASK))
        if messages and pieces:
            ranges = _cut(list(mark.ranges()), -(-messages // pieces))
            found += [EspPartition(topic, mark.incarnation, each) for each in ranges]
    return found


def _cut(ranges: list[tuple[int, int]], most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    piece: list[tuple[int, int]] = []
    room = most
    for first, end in ranges:
        while first < end:
            taken = min(room, end - first)
            piece.append((first, first + taken))
            first, room = first + taken, room - taken
            if not room:
                yield tuple(piece)
                piece, room = [], most
    if piece:
        yield tuple(piece)


@cache
def _set_imports_apart() -> None:
    """Once a process: Spark lets Python look for cycles behind each task, and among what is imported there are none."""
    gc.freeze()


def read(partition: EspPartition, options: Options, schema: Schema) -> Iterator[pa.RecordBatch]:
    """What a worker does: the bodies of these positions, in their order, as batches of many rows."""
    with connected(options) as connection:
        _set_imports_apart()
        view = options.views[options.topics.index(partition.topic)]
        yield from batches(_frames(connection, partition, options), schema, options.columns, view)


class _Reading:
    """A topic up to the end of a partition. The next read is under way while what came last is decoded."""

    def __init__(self, connection: Connection, partition: EspPartition, patience: float) -> None:
        """`patience`: for how many seconds trouble is waited out."""
        self._connection = connection
        self._topic, self._incarnation = partition.topic, partition.incarnation
        self._position, self._end = partition.ranges[0][0], partition.ranges[-1][1]
        self._patience = patience
        self._in_trouble_since: float | None = None
        self._follower = Follower(
            connection.bus, self._topic, self._begin, Backoff(_PAUSE, _PAUSE), trouble=self._trouble
        )
        self._next: asyncio.Task[Sequence[Message | Break]]

    async def open(self) -> None:
        """Begin to read, with the feed that the task before left, if that stands here."""
        *place, feed = self._connection.feeds.pop(self._topic, (None, None, None))
        if feed is not None and place != [self._incarnation, self._position]:
            await feed.aclose()
            feed = None
        self._follower.feed = feed
        self._read_on()

    async def _begin(self) -> Place:
        return await still_there(self._connection.bus, self._topic, self._incarnation, self._position)

    def _trouble(self, error: BusUnavailable) -> None:
        now = time.monotonic()
        self._in_trouble_since = now if self._in_trouble_since is None else self._in_trouble_since
        if now - self._in_trouble_since >= self._patience:
            raise error
        _log.warning("%s at %s: %s; trying again", self._topic, self._position, error)

    def _read_on(self) -> None:
        most, size = _READ
        self._next = asyncio.create_task(self._follower.read(min(most, self._end - self._position), size))

    async def read(self) -> Sequence[Message | Break]:
        """What comes next. BusUnavailable when there was trouble for too long."""
        found = await self._next
        self._in_trouble_since = None
        last = found[-1]
        if isinstance(last, Message):
            self._position = last.position + 1
            if self._position < self._end:
                self._read_on()
        return found

    def leave(self) -> None:
        """Instead of closing it: for the next task."""
        if (feed := self._follower.feed) is not None:
            self._connection.feeds[self._topic] = self._incarnation, self._end, feed

    async def aclose(self) -> None:
        """Stop reading, also where the next read is under way."""
        self._next.cancel()
        try:
            await asyncio.gather(self._next, return_exceptions=True)
        finally:
            await self._follower.aclose()


def _frames(connection: Connection, partition: EspPartition, options: Options) -> Iterator[Frame]:
    """What stands in the ranges. After trouble it goes on; BusUnavailable when there was nothing for too long."""
    ranges = partition.ranges
    position, end = ranges[0][0], ranges[-1][1]
    few = end - position <= _FEW
    reading = _Reading(connection, partition, options.timeout)
    connection.ask(options.timeout, reading.open)
    try:
        while position < end:
            for each in connection.ask(options.timeout, reading.read):
                if isinstance(each, Break):
                    raise refused(partition.topic, each, position)
                position = each.position + 1
                while ranges and each.position >= ranges[0][1]:
                    ranges = ranges[1:]
                if ranges and each.position >= ranges[0][0]:
                    yield parse(each.data, each.position)
    finally:
        if few and position == end:
            reading.leave()
        else:
            connection.ask(options.timeout, reading.aclose)


class EspStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of one or several windows."""

    def __init__(self, options: Options, schema: Schema) -> None:
        self._options = options
        self._schema = schema
        self._planner: Planner | None = None
        self._read: tuple[Any, dict[str, Mark]] = None, {}
        self._said: tuple[dict[str, Mark], dict[str, Any]] = {}, {}

    def _plan(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._options)
        return self._planner

    def _offset(self, found: Any) -> dict[str, Mark]:
        if self._read[0] != found:  # with many sources an offset is large, and Spark asks every few milliseconds
            self._read = found, from_json(found, self._options.topics)
        return self._read[1]

    def initialOffset(self) -> dict[str, Any]:
        """See `DataSourceStreamReader.initialOffset`."""
        return to_json(self._plan().first())

    def getDefaultReadLimit(self) -> ReadLimit:
        """The option maxRowsPerTrigger."""
        most = self._options.most_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """See `SupportsTriggerAvailableNow`."""
        self._plan().freeze()

    def latestOffset(self, start: Any, limit: ReadLimit) -> dict[str, Any]:
        """Called every few milliseconds."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        found = self._plan().next(self._offset(start), most)
        if self._said[0] != found:
            self._said = found, to_json(found)
        return self._said[1]

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """See `DataSourceStreamReader.reportLatestOffset`."""
        latest = self._plan().latest()
        return None if latest is None else to_json(latest)

    def partitions(self, start: Any, end: Any) -> Sequence[EspPartition]:
        """A function of the two offsets alone."""
        return partitions(self._offset(start), self._offset(end))

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """See `DataSourceStreamReader.read`."""
        return read(partition, self._options, self._schema)

    def commit(self, end: Any) -> None:
        """The checkpoint is the truth; this tells others."""
        if self._options.confirm_as is not None:
            self._plan().confirm(self._options.confirm_as, self._offset(end))

    def stop(self) -> None:
        """See `DataSourceStreamReader.stop`; Spark may end the process without it."""
        if self._planner is not None:
            self._planner.close()


class EspReader(DataSourceReader):
    """What stands on one or several windows now, from `start` on."""

    def __init__(self, options: Options, schema: Schema) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[EspPartition]:
        """Looks at everything from `start` to the present end."""
        planner = Planner(self._options)
        try:
            planner.freeze()
            found: list[EspPartition] = []
            start = planner.first()
            while (end := planner.next(start, None)) != start:
                found += partitions(start, end)
                start = end
            return found or [EspPartition(self._options.topics[0], None, ())]
        finally:
            planner.close()

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """See `DataSourceReader.read`."""
        return read(partition, self._options, self._schema) if partition.ranges else iter(())
