"""Blocks as Arrow batches of Spark's types, by one table. Pure.

int32           int               date          timestamp (whole seconds)
int64           bigint            stamp         timestamp (microseconds)
double          double            money         decimal(38,18)
string, rstring string            blob          binary
array(...)      array<...>        columns of options: opcode, flags smallint, id, run bigint,
                                  source string (16 hexadecimal digits), sent_at timestamp
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa

from esp_pubsub.errors import BadBody
from esp_pubsub.events import PLAIN, Block, View
from esp_pubsub.schema import FieldType, Schema
from esp_pubsub.wire.arrow import arrow_schema
from esp_pubsub.wire.frame import ARROW, MARKED, Frame

from .options import Extra

ROWS_OF_TUPLES, ROWS_OF_TABLES = 8_192, 65_536  # a batch's size; measured: tuples cost more when they are many
BYTES = 32 << 20
_MONEY, _WIDE = pa.decimal128(38, 18), pa.decimal256(76, 18)
_TIME, _SECONDS = pa.timestamp("us", tz="UTC"), pa.timestamp("s", tz="UTC")
_Decoded = tuple[Frame, int | bytes, int | bytes, list[tuple[Any, ...]]]
_SPARK = {
    FieldType.INT32: "int",
    FieldType.INT64: "bigint",
    FieldType.DOUBLE: "double",
    FieldType.STRING: "string",
    FieldType.RSTRING: "string",
    FieldType.DATE: "timestamp",
    FieldType.STAMP: "timestamp",
    FieldType.MONEY: "decimal(38,18)",
    FieldType.BLOB: "binary",
    FieldType.ARRAY_INT32: "array<int>",
    FieldType.ARRAY_INT64: "array<bigint>",
    FieldType.ARRAY_DOUBLE: "array<double>",
}
_EXTRA: dict[Extra, tuple[str, pa.DataType]] = {
    "opcode": ("smallint", pa.int16()),
    "flags": ("smallint", pa.int16()),
    "id": ("bigint", pa.int64()),
    "source": ("string", pa.string()),
    "run": ("bigint", pa.int64()),
    "sent_at": ("timestamp", _TIME),
}


def spark_schema(schema: Schema, columns: Sequence[Extra]) -> str:
    """The schema in Spark's words; the columns of options come first, with an underscore in front."""
    fields = [(f"_{name}", _EXTRA[name][0]) for name in columns]
    fields += [(field.name, _SPARK[field.type]) for field in schema.fields]
    return ", ".join(f"`{name}` {kind}" for name, kind in fields)


def _target(field: pa.Field, kind: FieldType) -> pa.DataType:
    if kind is FieldType.DATE:
        return _TIME
    if kind is FieldType.MONEY:
        return _MONEY
    if pa.types.is_list(field.type):
        return pa.list_(pa.field("element", field.type.value_type))
    return field.type


@lru_cache(maxsize=64)
def target_schema(schema: Schema, columns: tuple[Extra, ...]) -> pa.Schema:
    """What batches for Spark look like: the same for every batch, or Spark refuses it."""
    fields = [pa.field(f"_{name}", _EXTRA[name][1]) for name in columns]
    plain = arrow_schema(schema)
    fields += [pa.field(f.name, _target(plain.field(f.name), f.type)) for f in schema.fields]
    return pa.schema(fields)


def batches(
    frames: Iterable[Frame], schema: Schema, columns: tuple[Extra, ...], view: View = PLAIN
) -> Iterator[pa.RecordBatch]:
    """Record batches of many rows from blocks of few. Raises BadBody for one that cannot be read."""
    done: list[pa.RecordBatch] = []
    waiting: list[Frame] = []  # to become tuples
    rows = tuples = size = 0
    for frame in frames:
        plain = (  # inserts, which no view changes
            frame.body_kind == ARROW and not frame.flags & MARKED and frame.schema == schema.fingerprint
        )
        rows += frame.count
        size += len(frame.data)
        if not plain:
            waiting.append(frame)
            tuples += frame.count
        full = rows >= ROWS_OF_TABLES or size >= BYTES
        if waiting and (plain or full or tuples >= ROWS_OF_TUPLES):
            done.append(_from_tuples(waiting, schema, columns, view))
            waiting, tuples = [], 0
        if plain and frame.count:
            done.append(_from_table(frame, schema, columns))
        if full:
            yield pa.concat_batches(done)
            done, rows, size = [], 0, 0
    if waiting:
        done.append(_from_tuples(waiting, schema, columns, view))
    if done:
        yield pa.concat_batches(done)


def _from_table(frame: Frame, schema: Schema, columns: tuple[Extra, ...]) -> pa.RecordBatch:
    found = Block(frame, schema, PLAIN).record_batch()
    target = target_schema(schema, columns)
    if found.schema == target:
        return found
    arrays = [_extra(name, target.field(at).type, frame, 1, 0, frame.count) for at, name in enumerate(columns)]
    arrays += [_typed(array, target.field(at).type, frame) for at, array in enumerate(found.columns, len(columns))]
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _from_tuples(frames: Sequence[Frame], schema: Schema, columns: tuple[Extra, ...], view: View) -> pa.RecordBatch:
    """Python looks for cycles among every few hundred tuples that are made, and there are none; not looking makes
    this more than twice as fast.
    """
    looks = gc.isenabled()
    gc.disable()
    try:
        return _columns([(frame, *Block(frame, schema, view).decoded()) for frame in frames], schema, columns)
    finally:
        if looks:
            gc.enable()


def _columns(waiting: Sequence[_Decoded], schema: Schema, columns: tuple[Extra, ...]) -> pa.RecordBatch:
    target = target_schema(schema, columns)
    arrays = [
        pa.concat_arrays([_extra(name, target.field(at).type, f, o, g, len(rows)) for f, o, g, rows in waiting])
        for at, name in enumerate(columns)
    ]
    last = waiting[-1][0]
    values = list(zip(*(row for _, _, _, rows in waiting for row in rows), strict=True)) or [()] * len(schema.fields)
    for at, (field, column) in enumerate(zip(schema.fields, values, strict=True), len(columns)):
        kind = target.field(at).type
        arrays.append(_typed(column, _SECONDS if field.type is FieldType.DATE else kind, last))
        if field.type is FieldType.DATE:
            arrays[-1] = _typed(arrays[-1], kind, last)
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _typed(values: Any, kind: pa.DataType, frame: Frame) -> pa.Array:
    """An array cast, or tuples made one."""
    try:
        if not isinstance(values, pa.Array):
            return pa.array(values, kind)
        if values.type == kind:
            return values
        return (values.cast(_WIDE) if kind == _MONEY else values).cast(kind)  # at once, pyarrow lets it overflow
    except (pa.ArrowException, ValueError, OverflowError) as e:
        raise BadBody(
            f"a value in block {frame.id} at position {frame.position}, or shortly before, has no place in Spark's "
            f"type: {e}",
            id=frame.id,
            position=frame.position,
        ) from None


def _extra(name: Extra, kind: pa.DataType, frame: Frame, opcodes: Any, flags: Any, count: int) -> pa.Array:
    value: Any
    match name:
        case "opcode" | "flags":
            value = opcodes if name == "opcode" else flags
            return pa.array([value] * count if isinstance(value, int) else list(value), kind)
        case "id":
            value = frame.id
        case "run":
            value = frame.run
        case "source":
            value = f"{frame.source:016x}"
        case "sent_at":
            value = frame.sent_at
    return pa.repeat(pa.scalar(value, kind), count)
