"""The rows body: one msgpack array `[opcodes, flags, rows]`, canonical: equal events give equal bytes everywhere.

msgspec checks and packs rows that are canonical as they are, with types that are compiled once for each schema
(decision 13). Columns that are not go value by value through their type's `convert`, which returns the canonical value
or says what is wrong with it: numpy's scalars, NaN and datetimes, for example, and all money and arrays. Decoding
checks types, ranges, shape and opcodes in one call; money alone is turned back into Decimal.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import lru_cache, partial
from itertools import starmap
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, defstruct
from msgspec.msgpack import Decoder, Encoder

from ..errors import EspError, TooLarge, ValueRefused
from ..schema import FieldType, Schema
from .frame import LIMITS, Limits

Row = Sequence[Any]

_INT32 = (-(1 << 31), (1 << 31) - 1)
_INT64 = (-(1 << 63), (1 << 63) - 1)
_NAN = math.nan
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
_MICROSECOND = timedelta(microseconds=1)
_MONEY_DIGITS = 96
_MONEY_SHORT = 40  # characters of a text without an exponent that cannot be over that
_ARRAY_ITEMS = 1 << 16
_FEW = 6  # rows below which columns are not worth their making
_NO_ROWS = (str, bytes, bytearray, dict, set, frozenset)  # these iterate, but not over values in schema order
_OPCODES = bytes(range(1, 7))
_PAIRS = re.compile(b"\x06+")
_AT = re.compile(r" - at `\$\[(\d)\](?:\[(\d+)\])?(?:\[(\d+)\])?.*")


def _int(low: int, high: int) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) is not int:
            if value is None:
                return None
            value = _index(value)
        if low <= value <= high:
            return value
        raise ValueError(f"an integer from {low} to {high}")

    return convert


def _index(value: Any) -> int:
    """An exact int from what Python itself takes for one (numpy integers), never from a bool, a float or a string."""
    if isinstance(value, bool):
        raise TypeError("an integer: write int(...) where a truth value is meant")
    try:
        return int(value.__index__())
    except AttributeError:
        raise TypeError("an integer") from None


def _double(value: Any) -> Any:
    if value is None:
        return None
    if type(value) is float:
        return value if value == value else _NAN
    if not isinstance(value, float):
        kind = getattr(getattr(value, "dtype", None), "kind", "i" if hasattr(value, "__index__") else "")
        if isinstance(value, bool | str | bytes) or kind not in ("i", "u", "f"):
            raise TypeError("a float or an integer")
        try:
            value = float(value)
        except OverflowError:
            raise ValueError("a number that a double can hold") from None
    return float(value) if value == value else _NAN


def _string(value: Any) -> Any:
    if type(value) is str or value is None:
        return value  # a lone surrogate is found when the body is packed
    if not isinstance(value, str):
        raise TypeError("a str")
    return str.__str__(value)  # a subclass may print as something else


def _blob(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes")
    return bytes(value)


def _moment(unit: timedelta, words: str) -> Callable[[Any], Any]:
    integer = _int(*_INT64)

    def convert(value: Any) -> Any:
        if type(value) is int or value is None:
            return integer(value)
        if isinstance(value, datetime):
            if value.tzinfo is None:
                raise ValueError("a datetime with a time zone (this one has none)")
            return (value - _EPOCH) // unit
        if isinstance(value, date):
            return (datetime(value.year, value.month, value.day, tzinfo=UTC) - _EPOCH) // unit
        try:
            return integer(value)
        except TypeError:
            raise TypeError(f"integer {words} since 1970, or an aware datetime") from None

    return convert


def money_text(value: Decimal) -> str:
    """The one text of a decimal value: plain digits, no exponent, no trailing zeros, no negative zero."""
    text = Decimal.__str__(value)
    if len(text) > _MONEY_SHORT or "E" in text or "e" in text or not value.is_finite():  # which one, the context says
        _, digits, exponent = value.as_tuple()
        if not isinstance(exponent, int) or len(digits) + abs(exponent) > _MONEY_DIGITS:
            raise ValueError(f"a finite decimal of at most {_MONEY_DIGITS} digits")
        text = format(value, "f")
    if text[-1] == "0" and "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _money(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, Decimal):
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise TypeError("a Decimal, an int or decimal text (a float would lose digits)")
        try:
            value = Decimal(value)
        except InvalidOperation:
            raise ValueError("decimal text such as '12.50'") from None
    return money_text(value)


def _array(convert: Callable[[Any], Any], words: str) -> Callable[[Any], Any]:
    def convert_all(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, str | bytes | dict | set) or not hasattr(value, "__iter__"):
            raise TypeError(f"a sequence of {words}")
        items = [convert(item) for item in value]
        if len(items) > _ARRAY_ITEMS or None in items:
            raise ValueError(f"at most {_ARRAY_ITEMS} {words}, none of them null")
        return items

    return convert_all


def _leaves_a_trace() -> bool:
    """Whether a Decimal that is made a float brings the decimal context into an empty Context, as CPython's does.

    msgspec takes a Decimal for a double, which would lose digits without a word. It asks `float()`, and looking for the
    trace of that costs nothing, where looking at the type of each value would cost a sixth of the speed.
    """
    trace = Context()
    trace.run(float, Decimal(1))
    return len(trace) > 0


class _Type(NamedTuple):
    """How a value of a type becomes canonical; for msgspec, what is canonical as it is, and what may be read."""

    convert: Callable[[Any], Any]
    canonical: Any
    read: Any


def _array_of(item: Any) -> Any:
    return Annotated[tuple[item, ...], Meta(max_length=_ARRAY_ITEMS)]


_CONVERTED = type(None)  # only null is canonical as it is
_ANY_INT32 = Annotated[int, Meta(ge=_INT32[0], le=_INT32[1])]
_ANY_INT64 = Annotated[int, Meta(ge=_INT64[0], le=_INT64[1])]
_HIGH_INT64 = Annotated[int, Meta(le=_INT64[1])]  # packing finds what is too low
_NUMBER = Annotated[float, Meta(ge=-sys.float_info.max)] if _leaves_a_trace() else _CONVERTED  # no NaN, no -inf
_TYPES = {
    FieldType.INT32: _Type(_int(*_INT32), _ANY_INT32, _ANY_INT32),
    FieldType.INT64: _Type(_int(*_INT64), _HIGH_INT64, _ANY_INT64),
    FieldType.DOUBLE: _Type(_double, _NUMBER, float),
    FieldType.STRING: _Type(_string, str, str),
    FieldType.RSTRING: _Type(_string, str, str),
    FieldType.DATE: _Type(_moment(_SECOND, "seconds"), _HIGH_INT64, _ANY_INT64),
    FieldType.STAMP: _Type(_moment(_MICROSECOND, "microseconds"), _HIGH_INT64, _ANY_INT64),
    FieldType.MONEY: _Type(_money, _CONVERTED, str),
    FieldType.BLOB: _Type(_blob, bytes, bytes),
    FieldType.ARRAY_INT32: _Type(_array(_int(*_INT32), "int32 values"), _CONVERTED, _array_of(_ANY_INT32)),
    FieldType.ARRAY_INT64: _Type(_array(_int(*_INT64), "int64 values"), _CONVERTED, _array_of(_ANY_INT64)),
    FieldType.ARRAY_DOUBLE: _Type(_array(_double, "numbers"), _CONVERTED, _array_of(float)),
}


_COLUMNS = {
    kind: defstruct("Column", [("values", list[each.canonical | None])], array_like=True)  # type: ignore[name-defined]
    for kind, each in _TYPES.items()
}


def _row(types: Iterable[Any]) -> Any:
    return tuple[tuple(kind | None for kind in types)]  # type: ignore[misc]


def _body(row: Any) -> Any:
    """The class of a body with rows of this type. Only inside a class is a type compiled once for all calls."""
    opcodes, flags = Annotated[int, Meta(ge=1, le=6)] | bytes, Annotated[int, Meta(ge=0, le=255)] | bytes
    fields = [("opcodes", opcodes), ("flags", flags), ("rows", list[row])]
    return defstruct("Body", fields, array_like=True, forbid_unknown_fields=True)


_NOT_CANONICAL = (TypeError, ValueError, OverflowError)
_ONE_INSERT = b"\x93\x01\x00\x91"  # what a body of one row with opcode 1 and flags 0 begins with
_pack = Encoder().encode


class RowCodec:
    """Rows of one schema to bodies and back. Stateless; calls never suspend."""

    __slots__ = (
        "_canonical",
        "_canonical_one",
        "_check",
        "_converts",
        "_kinds",
        "_money",
        "_unpack",
        "_unpack_row",
        "_width",
        "schema",
    )

    def __init__(self, schema: Schema) -> None:
        self._kinds = [field.type for field in schema.fields]
        types = [_TYPES[kind] for kind in self._kinds]
        self.schema = schema
        self._width = len(types)
        self._converts = [t.convert for t in types]
        self._money = [i for i, kind in enumerate(self._kinds) if kind is FieldType.MONEY]
        canonical, read = _row(t.canonical for t in types), _row(t.read for t in types)
        self._canonical = _body(canonical)
        self._canonical_one = defstruct("One", [("row", canonical)], array_like=True)
        self._unpack, self._unpack_row = Decoder(_body(read)).decode, Decoder(read).decode
        blobs = FieldType.BLOB in self._kinds
        self._check = partial(msgspec.convert, builtin_types=(bytes,)) if blobs else msgspec.convert  # no base64

    def encode(
        self, rows: Sequence[Row], opcodes: int | bytes = 1, flags: int | bytes = 0, limits: Limits = LIMITS
    ) -> bytes:
        """The body of a block. Raises ValueRefused, naming row and field, or TooLarge; then nothing has happened."""
        count = len(rows)
        if not 1 <= count <= limits.events:
            raise TooLarge(f"a block has 1 to {limits.events} events, not {count}", size=count, limit=limits.events)
        trace = Context()
        try:
            if count == 1:
                checked = opcodes, flags, trace.run(self._check, rows, self._canonical_one)
            else:
                checked = trace.run(self._check, (opcodes, flags, rows), self._canonical)
            body = self._converted(rows, opcodes, flags) if trace else _pack(checked)
        except _NOT_CANONICAL:
            body = self._converted(rows, opcodes, flags)
        if len(body) > limits.frame_bytes:
            raise TooLarge(
                f"a block of {len(body)} bytes is over the limit of {limits.frame_bytes}; send fewer rows in one block",
                size=len(body),
                limit=limits.frame_bytes,
            )
        return body

    def _converted(self, rows: Sequence[Row], opcodes: int | bytes, flags: int | bytes) -> bytes:
        """The body of rows that are not all canonical as they are."""
        if len(rows) >= _FEW:
            with suppress(*_NOT_CANONICAL):  # which row is wrong shows value by value
                return _pack((opcodes, flags, self._by_column(rows)))
        canonical = self._by_value(rows)
        try:
            return _pack((opcodes, flags, canonical))
        except UnicodeEncodeError as e:
            raise self._refused_text(canonical) from e

    def _by_column(self, rows: Sequence[Row]) -> list[Row]:
        if not {*map(type, rows)} <= {tuple, list}:
            raise TypeError("rows that are no tuples or lists")
        columns = zip(*rows, strict=True)
        return list(zip(*starmap(self._column, zip(columns, self._kinds, strict=True)), strict=True))

    def _column(self, values: tuple[Any, ...], kind: FieldType) -> Sequence[Any]:
        """As it is if msgspec finds it canonical, else converted value by value."""
        trace = Context()
        with suppress(TypeError, ValueError):
            checked = trace.run(self._check, (values,), _COLUMNS[kind])
            if not trace:
                return checked.values  # type: ignore[no-any-return]
        convert = _TYPES[kind].convert
        return [convert(value) for value in values]

    def _by_value(self, rows: Sequence[Row]) -> list[list[Any]]:
        canonical: list[list[Any]] = []
        converts = self._converts
        try:
            for row in rows:
                if type(row) is not tuple and isinstance(row, _NO_ROWS):
                    raise TypeError
                canonical.append([convert(value) for convert, value in zip(converts, row, strict=True)])
        except (TypeError, ValueError):
            raise self._refused(len(canonical), rows[len(canonical)]) from None
        return canonical

    def _refused(self, number: int, row: Any) -> EspError:
        """The first thing that is wrong with a row, by name."""
        if isinstance(row, _NO_ROWS) or not hasattr(row, "__iter__"):
            text = f"row {number} is {_shown(row)}; a row is a tuple or list of {self._width} values"
            return ValueRefused(text, row=number, field="", value=row)
        values = list(row)
        if len(values) != self._width:
            text = f"row {number} has {len(values)} values, the schema has {self._width} fields ({self.schema})"
            return ValueRefused(text, row=number, field="", value=row)
        for field, convert, value in zip(self.schema.fields, self._converts, values, strict=True):
            try:
                convert(value)
            except (TypeError, ValueError) as e:
                text = f"row {number}, field {field.name!r} ({field.type}): {_shown(value)} is not {e}"
                return ValueRefused(text, row=number, field=field.name, value=value)
        return ValueRefused(f"row {number} cannot be read twice; pass tuples or lists", row=number, field="", value=row)

    def _refused_text(self, rows: Sequence[Row]) -> EspError:
        """The first text that UTF-8 cannot carry, by name."""
        for number, row in enumerate(rows):
            for field, value in zip(self.schema.fields, row, strict=True):
                if isinstance(value, str) and value != value.encode(errors="replace").decode():
                    text = f"row {number}, field {field.name!r} ({field.type}): {_shown(value)} has a lone surrogate"
                    return ValueRefused(text, row=number, field=field.name, value=value)
        return ValueRefused("a text with a lone surrogate", row=0, field="", value=None)

    def decode(self, body: bytes | memoryview, count: int) -> tuple[int | bytes, int | bytes, list[tuple[Any, ...]]]:
        """Opcodes, flags and rows as tuples. Raises ValueError, whatever the bytes; memory stays in proportion."""
        try:
            if count == 1 and body[:4] == _ONE_INSERT and not self._money:
                return 1, 0, [self._unpack_row(body[4:])]
            found = self._unpack(body)
        except ValueError:
            raise ValueError(f"not a rows body: {self._why(body)}") from None
        opcodes, flags, rows = found.opcodes, found.flags, found.rows
        if len(rows) != count:
            raise ValueError(f"not a rows body: {len(rows)} rows, the header says {count}")
        if opcodes != 1 or type(flags) is not int:
            check_marks(opcodes, flags, count)
        return opcodes, flags, self._with_money(rows) if self._money else rows

    def _why(self, body: bytes | memoryview) -> str:
        """What msgspec says is wrong with it, with words in the place of its path."""
        try:
            self._unpack(body)
        except ValueError as e:
            text = str(e)
        if (at := _AT.search(text)) is None:
            return text
        part, row, column = at.groups()
        where = ("opcodes", "flags", "rows")[int(part)] if row is None else f"row {row}"
        if column is not None:
            field = self.schema.fields[int(column)]
            where += f", field {field.name!r} ({field.type})"
        return f"{where}: {text[: at.start()]}"

    def _with_money(self, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        columns: list[Any] = list(zip(*rows, strict=True))
        for i in self._money if rows else ():
            columns[i] = money_values(columns[i])
        return list(zip(*columns, strict=True))


def wrong_opcode(opcodes: bytes) -> tuple[int, str] | None:
    """The first row whose opcode cannot be, and why: it is unknown, or half of an update block."""
    if unknown := opcodes.translate(None, _OPCODES):
        return opcodes.index(unknown[:1]), f"{unknown[0]} is no opcode"
    for pairs in _PAIRS.finditer(opcodes):
        if len(pairs.group()) % 2:
            return pairs.end() - 1, "an update block is two rows, the new one and then the old one"
    return None


def check_marks(opcodes: int | bytes, flags: int | bytes, count: int) -> None:
    """ValueError where opcodes or flags that were read are not those of so many events."""
    for marks in (opcodes, flags):
        if not isinstance(marks, int) and len(marks) != count:
            raise ValueError(f"{len(marks)} opcodes or flags for {count} rows")
    if wrong := wrong_opcode(opcodes if isinstance(opcodes, bytes) else bytes([opcodes]) * count):
        raise ValueError(f"row {wrong[0]}: {wrong[1]}")


def money_values(texts: Iterable[Any]) -> list[Decimal | None]:
    """Texts from the wire as decimals. ValueError for one that is none, or that no publisher could have sent."""
    try:
        return [None if text is None else _amount(text) for text in texts]
    except (InvalidOperation, TypeError):
        raise ValueError("a money field holds something else than decimal text") from None


def _amount(text: str) -> Decimal:
    value = Decimal(text)
    if len(text) > _MONEY_SHORT or "E" in text or "e" in text or not value.is_finite():
        money_text(value)
    return value


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        text = "too long to print"  # an int of thousands of digits
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


@lru_cache(maxsize=1_024)
def codec(schema: Schema) -> RowCodec:
    """The one codec of a schema."""
    return RowCodec(schema)
