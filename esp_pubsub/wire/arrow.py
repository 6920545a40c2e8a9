"""The Arrow body, and tables from rows: the only place that knows pyarrow (extra `arrow`).

The body is one Arrow IPC record-batch message; its Arrow schema follows from ours by the table below, so it does not
travel. Opcodes and flags ride as two leading uint8 columns, left out when every event is a plain insert; the frame's
flag MARKED says which, since a record batch read against the wrong schema is not an error but other data.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from ..errors import NotInstalled, ValueRefused
from ..schema import FieldType, Schema
from .frame import Buffer
from .rows import check_marks, codec, money_text, money_values

try:
    import pyarrow as pa
except ImportError as e:
    raise NotInstalled("Arrow bodies and tables need pyarrow: pip install 'esp-pubsub[arrow]'", extra="arrow") from e

_TYPES = {
    FieldType.INT32: pa.int32(),
    FieldType.INT64: pa.int64(),
    FieldType.DOUBLE: pa.float64(),
    FieldType.STRING: pa.utf8(),
    FieldType.RSTRING: pa.utf8(),
    FieldType.DATE: pa.timestamp("s", tz="UTC"),
    FieldType.STAMP: pa.timestamp("us", tz="UTC"),
    FieldType.MONEY: pa.utf8(),  # canonical decimal text: no scale fits all, and none is lost
    FieldType.BLOB: pa.binary(),
    FieldType.ARRAY_INT32: pa.list_(pa.int32()),
    FieldType.ARRAY_INT64: pa.list_(pa.int64()),
    FieldType.ARRAY_DOUBLE: pa.list_(pa.float64()),
}
_OPCODE, _FLAGS = "_opcode", "_flags"
_TABLES = (pa.Table, pa.RecordBatch)
_BEGINNING = struct.Struct("<4s4x32s8x16s")  # of a message, without its lengths
_OURS = (
    b"\xff\xff\xff\xff",
    bytes.fromhex("14000000 00000000 0c001600 06000500 08000c00 0c000000 00030400 18000000"),  # the table Message
    bytes.fromhex("00000a00 18000c00 04000800 0a000000"),  # the vtable of RecordBatch
)
_START = struct.Struct("<III")
_MESSAGE_AT, _HEADER, _COMPRESSION = 8, 4 + 2 * 2, 4 + 2 * 3  # the last two: where a table says where its field stands
_UP = struct.Struct("<I")
_BACK = struct.Struct("<i")
_ENTRY = struct.Struct("<H")
_MARKS = [pa.field(_OPCODE, pa.uint8(), nullable=False), pa.field(_FLAGS, pa.uint8(), nullable=False)]


@lru_cache(maxsize=1_024)
def arrow_schema(schema: Schema, *, marked: bool = False) -> pa.Schema:
    """The Arrow schema that follows from ours; `marked`: with the opcode and flag columns in front."""
    fields = [pa.field(f.name, _TYPES[f.type]) for f in schema.fields]
    if marked and {_OPCODE, _FLAGS} & set(schema.names):
        raise ValueError(f"the fields {_OPCODE} and {_FLAGS} are Arrow's own here; send rows")
    return pa.schema([*_MARKS, *fields] if marked else fields)


def table(schema: Schema, rows: Sequence[Sequence[Any]], opcodes: int | bytes = 1, flags: int | bytes = 0) -> pa.Table:
    """Rows as a table; the values must be those that `Block.rows()` gives."""
    columns = list(zip(*rows, strict=True)) or [()] * len(schema.fields)
    arrays = []
    for f, column in zip(schema.fields, columns, strict=True):
        values: Any = column
        if f.type is FieldType.MONEY:
            values = [None if v is None else money_text(v) for v in column]
        arrays.append(pa.array(values, type=_TYPES[f.type]))
    marked = opcodes != 1 or flags != 0
    if marked:
        arrays[:0] = [
            pa.array([m] * len(rows) if isinstance(m, int) else list(m), pa.uint8()) for m in (opcodes, flags)
        ]
    return pa.Table.from_arrays(arrays, schema=arrow_schema(schema, marked=marked))


def from_frame(data: Any) -> pa.Table | pa.RecordBatch:
    """A table or batch as it is; a pandas frame, or whatever speaks Arrow's C interface, as a table."""
    if isinstance(data, _TABLES):
        return data
    if hasattr(data, "__arrow_c_stream__"):
        return pa.table(data)
    if hasattr(data, "__arrow_c_array__"):
        return pa.record_batch(data)
    return pa.Table.from_pandas(data, preserve_index=False)


def as_they_are(schema: Schema) -> tuple[type | None, pa.Schema]:
    """The type and the Arrow schema of what is serialized without a closer look; no type, where money must be made
    canonical or arrays looked into.
    """
    looked_at = any(field.type is FieldType.MONEY or "array" in field.type for field in schema.fields)
    return None if looked_at else pa.RecordBatch, arrow_schema(schema)


def encode(schema: Schema, data: pa.Table | pa.RecordBatch) -> tuple[Buffer, int, bool]:
    """A table or batch as body, event count and whether it is marked. Columns are found by name and cast where that
    loses nothing. The body is a buffer of pyarrow's, not copied.

    Raises ValueRefused for a column that does not fit, ValueError for all else.
    """
    try:
        return _encode(schema, data)
    except (KeyError, TypeError, ArithmeticError, NotImplementedError) as e:
        raise ValueError(str(e)) from e


def _encode(schema: Schema, data: pa.Table | pa.RecordBatch) -> tuple[Buffer, int, bool]:
    marked = _OPCODE in data.schema.names and _OPCODE not in schema.names
    target = arrow_schema(schema, marked=marked)
    missing = [name for name in target.names if name not in data.schema.names]
    unknown = [name for name in data.schema.names if name not in target.names]
    if missing or unknown:
        raise ValueError(f"the table lacks {missing or 'nothing'} and has the unknown {unknown or 'nothing'}")
    data = data.select(target.names)
    for field in schema.fields:
        if field.type is FieldType.MONEY:
            data = _with_money(data, field.name)
    if data.schema != target:
        data = _cast(data, target)
    for field in schema.fields:
        if "array" in field.type and any(chunk.flatten().null_count for chunk in _chunks(data.column(field.name))):
            raise ValueRefused(f"column {field.name!r} has a null inside an array", row=0, field=field.name, value=None)
    if isinstance(data, pa.Table):
        batches = data.combine_chunks().to_batches()
        data = batches[0] if len(batches) == 1 else pa.RecordBatch.from_pylist([], schema=target)
    return data.serialize(), data.num_rows, marked


def marks(data: pa.Table | pa.RecordBatch) -> tuple[list[Any], list[Any]]:
    """The opcodes and flags of a table that brings its own."""
    return data.column(_OPCODE).to_pylist(), data.column(_FLAGS).to_pylist()


def _cast(data: Any, target: pa.Schema) -> Any:
    """All columns cast; the first that does not fit is named."""
    try:
        return data.cast(target)
    except (ValueError, TypeError, NotImplementedError):
        for field in target:
            try:
                data.column(field.name).cast(field.type)
            except (ValueError, TypeError, NotImplementedError) as e:
                raise ValueRefused(f"column {field.name!r}: {e}", row=0, field=field.name, value=None) from e
        raise


def _chunks(column: Any) -> list[Any]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def _with_money(data: Any, name: str) -> Any:
    column = data.column(name)
    if pa.types.is_floating(column.type):
        raise ValueError(f"the money column {name!r} holds floats, which would lose digits; use decimals or text")
    try:
        values = [v if v is None or isinstance(v, Decimal) else Decimal(v) for v in column.to_pylist()]
        texts = [None if v is None else money_text(v) for v in values]
    except (ValueError, TypeError, ArithmeticError) as e:
        raise ValueRefused(f"column {name!r} holds no amounts of money: {e}", row=0, field=name, value=None) from e
    return data.set_column(data.schema.get_field_index(name), name, pa.array(texts, pa.utf8()))


def batch(schema: Schema, body: bytes | memoryview, count: int, *, marked: bool) -> pa.RecordBatch:
    """The record batch in a body. Raises ValueError, whatever the bytes."""
    try:
        _refuse_compression(body)
        found = pa.ipc.read_record_batch(body, arrow_schema(schema, marked=marked))
        found.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, struct.error) as e:
        raise ValueError(f"not an Arrow record batch of the schema {schema}: {e}") from None
    if found.num_rows != count:
        raise ValueError(f"the record batch has {found.num_rows} rows, the header says {count}")
    if marked:
        check_marks(*_marks(found), count)
    return found


def _marks(found: pa.RecordBatch) -> tuple[bytes, bytes]:
    if found.column(0).null_count or found.column(1).null_count:
        raise ValueError("an opcode or flag is null")
    return bytes(found.column(0).to_pylist()), bytes(found.column(1).to_pylist())


def _refuse_compression(body: bytes | memoryview) -> None:
    """A few kilobytes can inflate to gigabytes, and pyarrow has no bound on it; what we write is never compressed.

    Whether it is stands in the flatbuffer behind the message's two leading words: in Message the field 2 is a
    RecordBatch, whose field 3 is `compression`. Everything that decides it stands at the same place in all that pyarrow
    writes uncompressed, and is the same there.
    """
    if _BEGINNING.unpack_from(body) == _OURS:
        return
    mark, _, root = _START.unpack_from(body)
    if mark != 0xFFFFFFFF:
        raise ValueError("no Arrow message: it does not begin with FF FF FF FF")
    message = _MESSAGE_AT + root
    header = _field(body, message, _HEADER)
    if header and _field(body, message + header + _UP.unpack_from(body, message + header)[0], _COMPRESSION):
        raise ValueError("the record batch is compressed, which is not allowed here")


def _field(body: bytes | memoryview, table: int, entry: int) -> int:
    """How far behind the beginning of a flatbuffer's table a field stands; 0 if it is left out."""
    vtable = table - _BACK.unpack_from(body, table)[0]
    return _ENTRY.unpack_from(body, vtable + entry)[0] if _ENTRY.unpack_from(body, vtable)[0] > entry else 0


def as_table(found: pa.RecordBatch) -> pa.Table:
    """A batch as a table, without copying its columns."""
    return pa.Table.from_batches([found])


def rows(
    schema: Schema, body: bytes | memoryview, count: int, *, marked: bool
) -> tuple[int | bytes, int | bytes, list[tuple[Any, ...]]]:
    """A body as opcodes, flags and the tuples that a rows body would give."""
    found = batch(schema, body, count, marked=marked)
    opcodes: int | bytes = 1
    flags: int | bytes = 0
    if marked:
        opcodes, flags = _marks(found)
        found = found.select(found.schema.names[2:])
    columns = []
    for f, column in zip(schema.fields, found.columns, strict=True):
        if f.type in (FieldType.DATE, FieldType.STAMP):
            column = column.cast(pa.int64())
        values = column.to_pylist()
        if f.type is FieldType.MONEY:
            values = money_values(values)
        columns.append([tuple(v) if isinstance(v, list) else v for v in values] if "array" in f.type else values)
    return opcodes, flags, list(zip(*columns, strict=True))


def encode_rows(
    schema: Schema, data: Sequence[Sequence[Any]], opcodes: int | bytes, flags: int | bytes
) -> tuple[Buffer, int, bool]:
    """Rows as an Arrow body: checked and made canonical as a rows body first, so that both refuse the same values."""
    body = codec(schema).encode(data, opcodes, flags)
    opcodes, flags, canonical = codec(schema).decode(body, len(data))
    return encode(schema, table(schema, canonical, opcodes, flags))
