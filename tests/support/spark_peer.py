"""What somebody writes who reads our blocks by Spark's own Kafka source: functions for `mapInArrow`, without SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import msgpack
import pyarrow as pa

HEADER = 80
ROWS_OF_TABLES, ROWS_OF_TUPLES = 65_536, 8_192  # measured to be good

Decode = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def arrow_decoder(schema: pa.Schema) -> Decode:
    """Of blocks with Arrow bodies."""

    def decode(messages: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting: list[pa.RecordBatch] = []
        rows = 0
        for batch in messages:
            for value in batch.column("value"):
                waiting.append(pa.ipc.read_record_batch(value.as_buffer()[HEADER:], schema))
                rows += waiting[-1].num_rows
                if rows >= ROWS_OF_TABLES:
                    yield pa.concat_batches(waiting)
                    waiting, rows = [], 0
        if waiting:
            yield pa.concat_batches(waiting)

    return decode


def rows_decoder(schema: pa.Schema) -> Decode:
    """Of blocks with rows."""

    def made(waiting: list[list[list[object]]]) -> pa.RecordBatch:
        columns = zip(*chain.from_iterable(waiting), strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def decode(messages: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting: list[list[list[object]]] = []
        rows = 0
        for batch in messages:
            for value in batch.column("value"):
                _, _, found = msgpack.unpackb(memoryview(value.as_buffer())[HEADER:])
                waiting.append(found)
                rows += len(found)
                if rows >= ROWS_OF_TUPLES:
                    yield made(waiting)
                    waiting, rows = [], 0
        if waiting:
            yield made(waiting)

    return decode
