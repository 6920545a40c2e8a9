"""The rows body: one msgpack array `[opcodes, flags, rows]`, canonical: equal events give equal bytes everywhere.

Encoding checks and converts by column where a block has many rows, because C loops over a column are ten times cheaper
than Python loops over values, and by value where it has few. A column that is already canonical passes as it is; any
other goes value by value through its type's `convert`, which returns the canonical value or says what is wrong with it.
Decoding builds rows in one call and checks their shape; money alone is turned back into Decimal.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import islice
from operator import countOf
from typing import Any, NamedTuple

from msgpack import Packer, Unpacker, UnpackException, unpackb

from ..errors import EspError, TooLarge, ValueRefused
from ..schema import FieldType, Schema
from .frame import LIMITS, Limits

Row = Sequence[Any]
Column = Collection[Any]

_FEW = 6  # rows below which a loop over values is cheaper than building columns
_MANY = 4_096  # rows above which a body is unpacked row by row
_INT32 = (-(1 << 31), (1 << 31) - 1)
_INT64 = (-(1 << 63), (1 << 63) - 1)
_NAN = math.nan
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
_MICROSECOND = timedelta(microseconds=1)
_MONEY_DIGITS = 96
_MONEY_SHORT = 40  # characters of a text without an exponent that cannot be over that
_ARRAY_ITEMS = 1 << 16
_NO_ROWS = (str, bytes, bytearray, dict, set, frozenset)  # these iterate, but not over values in schema order


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
    """An exact int from what Python itself takes for one (bool, numpy integers), never from a float or a string."""
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


def _exact_int32(column: Column) -> bool:
    try:
        struct.pack(f"{len(column)}i", *column)
    except struct.error:
        return False
    return countOf(map(type, column), int) == len(column)


def _exact_int64(column: Column) -> bool:
    return countOf(map(type, column), int) == len(column) and max(column) <= _INT64[1]  # packing finds what is too low


def _exact_doubles(column: Column) -> bool:
    total = sum(column) if countOf(map(type, column), float) == len(column) else _NAN
    return bool(total == total)  # a NaN anywhere shows in the sum; so does inf - inf, and then we look closer


def _exact_strings(column: Column) -> bool:
    try:
        "".join(column)
    except TypeError:
        return False
    return True


def _exact_blobs(column: Column) -> bool:
    return countOf(map(type, column), bytes) == len(column)


def _never(_column: Column) -> bool:
    return False


class _Type(NamedTuple):
    exact: Callable[[Column], bool]
    convert: Callable[[Any], Any]


_TYPES = {
    FieldType.INT32: _Type(_exact_int32, _int(*_INT32)),
    FieldType.INT64: _Type(_exact_int64, _int(*_INT64)),
    FieldType.DOUBLE: _Type(_exact_doubles, _double),
    FieldType.STRING: _Type(_exact_strings, _string),
    FieldType.RSTRING: _Type(_exact_strings, _string),
    FieldType.DATE: _Type(_exact_int64, _moment(_SECOND, "seconds")),
    FieldType.STAMP: _Type(_exact_int64, _moment(_MICROSECOND, "microseconds")),
    FieldType.MONEY: _Type(_never, _money),
    FieldType.BLOB: _Type(_exact_blobs, _blob),
    FieldType.ARRAY_INT32: _Type(_never, _array(_int(*_INT32), "int32 values")),
    FieldType.ARRAY_INT64: _Type(_never, _array(_int(*_INT64), "int64 values")),
    FieldType.ARRAY_DOUBLE: _Type(_never, _array(_double, "numbers")),
}
_INT64_TEST = f"type({{0}}) is int and {{0}} <= {_INT64[1]}"  # packing finds what is too low
_STRING_TEST = "type({0}) is str"
_EXACT = {
    FieldType.INT32: f"type({{0}}) is int and {_INT32[0]} <= {{0}} <= {_INT32[1]}",
    FieldType.INT64: _INT64_TEST,
    FieldType.DATE: _INT64_TEST,
    FieldType.STAMP: _INT64_TEST,
    FieldType.DOUBLE: "type({0}) is float and {0} == {0}",
    FieldType.STRING: _STRING_TEST,
    FieldType.RSTRING: _STRING_TEST,
    FieldType.BLOB: "type({0}) is bytes",
}
_ARRAYS = {FieldType.ARRAY_INT32, FieldType.ARRAY_INT64, FieldType.ARRAY_DOUBLE}


def _foreign(*_: Any) -> Any:
    raise ValueError("maps and ext types have no place in rows")


def _exact_rows(schema: Schema) -> Callable[[Sequence[Row]], bool]:
    """A test of a few rows: are they canonical as they are? It may say no where the answer is yes.

    It is written out for the types of a schema, which takes a third of the time of loops over types and values.
    """
    if any(field.type not in _EXACT for field in schema.fields):
        return lambda _rows: False
    names = [f"v{i}" for i in range(len(schema.fields))]
    tests = [_EXACT[field.type].format(name) for field, name in zip(schema.fields, names, strict=True)]
    made: dict[str, Any] = {}
    exec(  # of numbers and the texts above
        f"""
def exact(rows):
    for row in rows:
        if type(row) is not tuple or len(row) != {len(names)}:
            return False
        {", ".join(names)}, = row
        if not ({" and ".join(tests)}):
            return False
    return True
""",
        made,
    )
    exact: Callable[[Sequence[Row]], bool] = made["exact"]
    return exact


class RowCodec:
    """Rows of one schema to bodies and back. Stateless but for a packing buffer; calls never suspend."""

    __slots__ = ("_converts", "_exact", "_exacts", "_few", "_longest", "_money", "_pack", "_single", "_width", "schema")

    def __init__(self, schema: Schema) -> None:
        types = [_TYPES[field.type] for field in schema.fields]
        self.schema = schema
        self._width = len(types)
        self._exacts = [t.exact for t in types]
        self._converts = [t.convert for t in types]
        self._money = [i for i, field in enumerate(schema.fields) if field.type is FieldType.MONEY]
        self._longest = _ARRAY_ITEMS if _ARRAYS & {field.type for field in schema.fields} else _MANY
        self._few = 0 if self._longest == _ARRAY_ITEMS else max(self._width, 3)
        self._single = 0 if self._money else self._few
        self._exact = _exact_rows(schema)
        self._pack = Packer(autoreset=True).pack

    def encode(
        self, rows: Sequence[Row], opcodes: int | bytes = 1, flags: int | bytes = 0, limits: Limits = LIMITS
    ) -> bytes:
        """The body of a block. Raises ValueRefused, naming row and field, or TooLarge; then nothing has happened."""
        count = len(rows)
        if not 1 <= count <= limits.events:
            raise TooLarge(f"a block has 1 to {limits.events} events, not {count}", size=count, limit=limits.events)
        try:
            if count >= _FEW:
                rows = self._by_column(rows)
            elif not self._exact(rows):
                rows = self._by_value(rows)
            body: bytes = self._pack((opcodes, flags, rows))
        except OverflowError:
            self._by_value(rows)  # raises, and names the row
            raise
        except UnicodeEncodeError as e:
            raise self._refused_text(rows) from e
        if len(body) > limits.frame_bytes:
            raise TooLarge(
                f"a block of {len(body)} bytes is over the limit of {limits.frame_bytes}; send fewer rows in one block",
                size=len(body),
                limit=limits.frame_bytes,
            )
        return body

    def _by_column(self, rows: Sequence[Row]) -> Sequence[Row]:
        if countOf(map(type, rows), type(rows[0])) != len(rows) or type(rows[0]) not in (tuple, list):
            return self._by_value(rows)
        try:
            columns: list[Column] = list(zip(*rows, strict=True))
        except ValueError:
            return self._by_value(rows)
        if len(columns) != self._width:
            return self._by_value(rows)
        inexact = [i for i, exact in enumerate(self._exacts) if not exact(columns[i])]
        if not inexact:
            return rows
        for i in inexact:
            convert = self._converts[i]
            try:
                columns[i] = [convert(value) for value in columns[i]]
            except (TypeError, ValueError):
                return self._by_value(rows)
        return list(zip(*columns, strict=True))

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
        """Opcodes, flags and rows as tuples. Raises ValueError, whatever the bytes; memory stays in proportion.

        The number of rows and their widths are checked, the types of values are not: who made the chain made them.
        """
        try:
            if count == 1 and self._single:
                opcodes, flags, (row,) = unpackb(
                    body, use_list=False, max_array_len=self._single, max_map_len=0,
                    max_ext_len=0, object_hook=_foreign, ext_hook=_foreign,
                )  # fmt: skip
                if type(row) is tuple and len(row) == self._width and type(opcodes) is int and type(flags) is int:
                    return opcodes, flags, [row]
            if count > _MANY:
                opcodes, flags, rows = self._unpack_many(body, count)
            else:
                longest = self._few if self._few and count < 4 else min(self._longest, len(body))
                opcodes, flags, rows = unpackb(
                    body, use_list=False, max_array_len=longest, max_map_len=0,
                    max_ext_len=0, object_hook=_foreign, ext_hook=_foreign,
                )  # fmt: skip
            if len(rows) != count or type(rows[0]) is not tuple or type(rows) is not tuple:
                raise ValueError(f"it does not hold {count} rows")
            if len(rows[0]) != self._width or (count > 1 and not self._all_wide(rows)):
                raise ValueError(f"not all of its rows have {self._width} fields")
        except (UnpackException, ValueError, TypeError, IndexError) as e:
            raise ValueError(f"not a rows body: {e or type(e).__name__}") from None
        if type(opcodes) is not int or type(flags) is not int:
            _check_marks(opcodes, flags, count)
        return opcodes, flags, self._with_money(rows) if self._money else list(rows)

    def _all_wide(self, rows: tuple[Any, ...]) -> bool:
        """Whether each is a tuple of as many values as there are fields."""
        count = len(rows)
        return countOf(map(type, rows), tuple) == count and countOf(map(len, rows), self._width) == count

    def _unpack_many(self, body: bytes | memoryview, count: int) -> tuple[Any, Any, tuple[Any, ...]]:
        """Row by row: a forged length inside one row cannot claim memory for a million."""
        if len(body) < count * (self._width + 1):
            raise ValueError(f"{len(body)} bytes cannot hold {count} rows of {self._width} fields")
        longest = self._width if self._longest == _MANY else self._longest
        unpacker = Unpacker(
            use_list=False, max_buffer_size=len(body), max_array_len=min(longest, len(body)), max_map_len=0,
            max_ext_len=0, object_hook=_foreign, ext_hook=_foreign,
        )  # fmt: skip
        unpacker.feed(body)
        if unpacker.read_array_header() != 3:
            raise ValueError("no array of three")
        opcodes, flags = unpacker.unpack(), unpacker.unpack()
        if unpacker.read_array_header() != count:
            raise ValueError("another number of rows than the header says")
        rows = tuple(islice(unpacker, count))
        if unpacker.tell() != len(body):
            raise ValueError("bytes behind the last row")
        return opcodes, flags, rows

    def _with_money(self, rows: tuple[tuple[Any, ...], ...]) -> list[tuple[Any, ...]]:
        columns: list[Any] = list(zip(*rows, strict=True))
        for i in self._money if rows else ():
            columns[i] = money_values(columns[i])
        return list(zip(*columns, strict=True))


def _check_marks(opcodes: Any, flags: Any, count: int) -> None:
    for marks in (opcodes, flags):
        if type(marks) is not int and (type(marks) is not bytes or len(marks) != count):
            raise ValueError("not a rows body: opcodes and flags are each one integer or one byte an event")


def money_values(texts: Iterable[Any]) -> list[Decimal | None]:
    """Texts from the wire as decimals. ValueError for one that is no finite decimal."""
    try:
        values = [None if text is None else Decimal(text) for text in texts]
    except (InvalidOperation, TypeError):
        raise ValueError("a money field holds something else than decimal text") from None
    if not all(value is None or value.is_finite() for value in values):
        raise ValueError("a money field holds a value that is not finite")
    return values


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
