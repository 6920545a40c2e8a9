"""Reading a rows body by msgpack and plain loops, as section 2 of the protocol has it.

`wire/rows.py`, which reads by msgspec, is compared with it.
"""

from decimal import Decimal, InvalidOperation
from itertools import groupby
from typing import Any

from msgpack import UnpackException, unpackb

from esp_pubsub.schema import FieldType, Schema

Rows = tuple[int | bytes, int | bytes, list[tuple[Any, ...]]]
INT32, INT64, ANY_INT = range(-(1 << 31), 1 << 31), range(-(1 << 63), 1 << 63), range(-(1 << 63), 1 << 64)


def integer(value: Any, among: range) -> int:
    if type(value) is not int or value not in among:
        raise ValueError(f"{value!r} is no integer of {among}")
    return value


def double(value: Any) -> float:
    return value if type(value) is float else float(integer(value, ANY_INT))


def exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind}")
    return value


def money(value: Any) -> Decimal:
    amount = Decimal(exactly(str, value))
    _, digits, exponent = amount.as_tuple()
    long = "e" in value.lower() or len(value) > 40
    if not isinstance(exponent, int) or (long and len(digits) + abs(exponent) > 96):
        raise ValueError(f"{value!r} is no amount")
    return amount


def array_of(convert: Any, value: Any) -> tuple[Any, ...]:
    if len(exactly(tuple, value)) > 1 << 16:
        raise ValueError("a long array")
    return tuple(map(convert, value))


def int32(value: Any) -> int:
    return integer(value, INT32)


def int64(value: Any) -> int:
    return integer(value, INT64)


CONVERT = {
    FieldType.INT32: int32, FieldType.INT64: int64, FieldType.DATE: int64, FieldType.STAMP: int64,
    FieldType.DOUBLE: double,
    FieldType.STRING: lambda value: exactly(str, value), FieldType.RSTRING: lambda value: exactly(str, value),
    FieldType.BLOB: lambda value: exactly(bytes, value), FieldType.MONEY: money,
    FieldType.ARRAY_INT32: lambda value: array_of(int32, value),
    FieldType.ARRAY_INT64: lambda value: array_of(int64, value),
    FieldType.ARRAY_DOUBLE: lambda value: array_of(double, value),
}  # fmt: skip


def marks(value: Any, among: range, count: int) -> int | bytes:
    if type(value) is bytes and len(value) == count and all(each in among for each in value):
        return value
    return integer(value, among)


def foreign(*_: Any) -> Any:
    raise ValueError("a map or an ext type")


def read(schema: Schema, body: bytes | memoryview, count: int) -> Rows:
    """Opcodes, flags and rows; ValueError for anything else."""
    try:
        found = unpackb(
            body, use_list=False, strict_map_key=False, max_map_len=0, max_ext_len=0, object_hook=foreign,
            ext_hook=foreign,
        )  # fmt: skip
        opcodes, flags, rows = exactly(tuple, found)
        if len(exactly(tuple, rows)) != count:
            raise ValueError("another number of rows")
        opcodes, flags = marks(opcodes, range(1, 7), count), marks(flags, range(256), count)
        for opcode, run in groupby(opcodes if isinstance(opcodes, bytes) else [opcodes] * count):
            if opcode == 6 and len(list(run)) % 2:
                raise ValueError("half an update block")
        converts = [CONVERT[field.type] for field in schema.fields]
        return opcodes, flags, [
            tuple(None if value is None else c(value) for c, value in zip(converts, exactly(tuple, row), strict=True))
            for row in rows
        ]  # fmt: skip
    except (UnpackException, ValueError, TypeError, InvalidOperation) as e:
        raise ValueError(str(e)) from e
