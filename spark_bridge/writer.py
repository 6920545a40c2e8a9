"""The way out of Spark by `format("esp")`: at least once.

Each task is a publisher of its own, so a task that Spark runs again publishes its rows again, as new blocks. Whoever
needs each row once takes `publish_batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from esp_pubsub.client import Client
from esp_pubsub.errors import ConfigError, SchemaError
from esp_pubsub.publisher import Publisher, PublisherOptions

from .connection import connected
from .options import Options, read_options

BLOCK_ROWS = 256


def writing(found: Mapping[str, str], overwrite: bool) -> tuple[Options]:
    """What a writer is made with. ConfigError for what only a reader may have."""
    options = read_options(found, "in")
    if overwrite:
        raise ConfigError("a topic is a log: blocks are appended to it, mode append")
    if len(options.topics) > 1:
        raise ConfigError("a writer publishes to one window", key="url")
    return (options,)


def pieces(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows, so many a batch."""
    for batch in batches:
        for at in range(0, batch.num_rows, rows):
            yield batch.slice(at, rows)


async def _opened(client: Client, options: Options) -> Publisher:
    topic = options.topics[0]
    schema = await client.topic_schema(topic, options.schema)
    if schema is None:
        raise SchemaError(f"nobody has published to {topic}, so its schema is not known: set the option schema")
    chosen = PublisherOptions(body="arrow", ack_timeout=options.timeout, close_timeout=options.timeout / 2)
    return await client.publisher(options.urls[0], schema, side=options.side, options=chosen)


def _write(options: Options, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    with connected(options) as connection:
        publisher = connection.ask(options.timeout, _opened, connection.client, options)

        async def inject(batch: pa.RecordBatch) -> None:
            for piece in pieces([batch], BLOCK_ROWS):
                await publisher.inject(piece)

        try:
            for batch in batches:
                connection.ask(options.timeout, inject, batch)
            connection.ask(options.timeout, publisher.flush)
        finally:
            connection.ask(options.timeout, publisher.aclose)
    return WriterCommitMessage()


class EspWriter(DataSourceArrowWriter):
    """One publisher a task; a row is on the bus when its task has ended."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """See `DataSourceArrowWriter.write`."""
        return _write(self._options, iterator)


class EspStreamWriter(DataSourceStreamArrowWriter):
    """The same, batch after batch."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """See `DataSourceStreamArrowWriter.write`."""
        return _write(self._options, iterator)

    def commit(self, messages: Any, batchId: int) -> None:  # Spark's names
        """Everything is on the bus already."""

    def abort(self, messages: Any, batchId: int) -> None:
        """What is on the bus stays there."""
