"""The rows body: canonical, refused by name, and never believed when forged."""

import math
import struct
import tracemalloc
from array import array
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgpack import packb, unpackb

from esp_pubsub.errors import TooLarge, ValueRefused
from esp_pubsub.schema import Field, FieldType, Schema
from esp_pubsub.wire.frame import Limits
from esp_pubsub.wire.rows import RowCodec, codec, money_text

EVERY = Schema(
    "i*:int32,l:int64,d:double,s:string,r:rstring,t:date,u:stamp,m:money,b:blob,"
    "ai:array(i32),al:array(i64),ad:array(dbl)"
)
I32, I64 = 1 << 31, 1 << 63
NAN = float("nan")
COUNTS = (1, 5, 6, 300)  # both sides of where the encoder changes its way


class Size(IntEnum):
    BIG = 7


class Color(StrEnum):
    RED = "red"


class OldColor(str, Enum):  # noqa: UP042 - its str() is not its value, and that is the point
    RED = "red"


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "LOUD"


class MyBytes(bytes):
    pass


class MyFloat(float):
    pass


class MyInt(int):
    pass


def of(kind: str) -> RowCodec:
    """The codec of a key and one field `v` of this type."""
    return codec(Schema(f"k*:int32,v:{kind}"))


def one(kind: str, value: Any) -> bytes:
    """The body of one row with this value."""
    return of(kind).encode([(1, value)])


def back(kind: str, value: Any) -> Any:
    """The value as a reader gets it."""
    return of(kind).decode(one(kind, value), 1)[2][0][1]


def named(value: Any) -> str:
    """An id for a case, the same in every process; some values are too long to be shown."""
    if isinstance(value, int) and value > 1 << 200:
        return "a huge integer"
    shown = repr(value).split(" at 0x")[0]
    return f"{type(value).__name__}:{shown:.30}"


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


SAME: list[tuple[str, Any, list[Any]]] = [  # a type, its canonical value, other spellings of it
    ("int32", 1, [True, np.True_.item(), np.int8(1), np.int64(1), np.uint64(1), np.array(1), MyInt(1)]),
    ("int32", 7, [Size.BIG, np.int32(7)]),
    ("int32", -I32, [np.int32(-I32), np.int64(-I32)]),
    ("int64", I64 - 1, [np.int64(I64 - 1), np.uint64(I64 - 1), MyInt(I64 - 1)]),
    ("int64", -I64, [np.int64(-I64)]),
    ("double", 1.0, [1, np.float64(1), np.float32(1), np.float16(1), np.int64(1), MyFloat(1), np.array(1.0)]),
    ("double", 0.5, [np.float32(0.5), MyFloat(0.5), np.longdouble(0.5)]),
    ("double", NAN, [np.float64("nan"), struct.unpack("<d", struct.pack("<Q", 0xFFF8DEADBEEF0001))[0]]),
    ("double", math.inf, [np.float32("inf")]),
    ("string", "red", [Color.RED, OldColor.RED, np.str_("red")]),
    ("rstring", "quiet", [Loud("quiet")]),
    ("date", 86_400, [date(1970, 1, 2), datetime(1970, 1, 2, tzinfo=UTC), np.int64(86_400)]),
    ("date", -1, [datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), pd.Timestamp("1969-12-31T23:59:59Z")]),
    ("date", 0, [datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), False]),
    ("stamp", 1, [datetime(1970, 1, 1, microsecond=1, tzinfo=UTC), pd.Timestamp("1970-01-01T00:00:00.000001Z")]),
    ("stamp", -1, [datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)]),
    ("stamp", 253_402_300_799_999_999, [datetime.max.replace(tzinfo=UTC)]),
    ("stamp", -62_135_596_800_000_000, [datetime.min.replace(tzinfo=UTC), date.min]),
    ("money", "12.5", [Decimal("12.5"), "12.50", "0012.500", "1.25E+1", Decimal("125E-1"), " 12.5 ", "+12.5"]),
    ("money", "100", [100, Decimal(100), Decimal("1E+2"), "1e2", "100.00", MyInt(100)]),
    ("money", "0", [0, Decimal("-0"), Decimal("-0.00"), "0E+5", "0e-9", ".0"]),
    ("money", "-0.001", [Decimal("-0.001"), "-1E-3", "-.0010"]),
    ("money", "7", [Size.BIG]),
    ("blob", b"\0\xff", [bytearray(b"\0\xff"), memoryview(b"\0\xff"), MyBytes(b"\0\xff"), np.bytes_(b"\0\xff")]),
    ("blob", b"ac", [memoryview(b"abcd")[::2]]),
    (
        "array(i32)",
        [1, 2],
        [(1, 2), np.array([1, 2]), range(1, 3), array("i", [1, 2]), [True, np.int8(2)]],
    ),
    ("array(i64)", [], [(), np.array([], np.int64)]),
    ("array(dbl)", [1.0, -0.0], [(1, -0.0), np.array([1.0, -0.0]), [np.float32(1), -0.0]]),
]
SAME_CASES = [(kind, value, other) for kind, value, others in SAME for other in others]


@pytest.mark.parametrize(("kind", "value", "other"), SAME_CASES, ids=named)
@pytest.mark.parametrize("count", COUNTS)
def test_equal_values_give_equal_bytes_however_they_are_spelt(kind: str, value: Any, other: Any, count: int) -> None:
    encode = of(kind).encode
    canonical = encode([(i, value) for i in range(count)])
    assert encode([(i, other) for i in range(count)]) == canonical
    assert encode([(i, value if i else other) for i in range(count)]) == canonical


@pytest.mark.parametrize("count", COUNTS)
def test_rows_may_be_tuples_lists_named_tuples_or_arrays_and_give_equal_bytes(count: int) -> None:
    class_ = namedtuple("class_", "a b")
    encode = codec(Schema("a*:int64,b:int64")).encode
    canonical = encode([(i, -i) for i in range(count)])
    assert encode(tuple((i, -i) for i in range(count))) == canonical
    assert encode([[i, -i] for i in range(count)]) == canonical
    assert encode([(i, -i) if i % 2 else [i, -i] for i in range(count)]) == canonical
    assert encode([class_(i, -i) for i in range(count)]) == canonical
    assert encode(np.array([(i, -i) for i in range(count)])) == canonical  # type: ignore[arg-type]
    assert encode([np.array((i, -i)) for i in range(count)]) == canonical  # type: ignore[list-item]


@pytest.mark.parametrize("count", COUNTS)
def test_the_bytes_are_those_of_the_protocol(count: int) -> None:
    rows = [[i, 1.5, "é", b"\0", None, [1, 2]] for i in range(count)]
    schema = Schema("k*:int64,d:double,s:string,b:blob,n:money,a:array(i32)")
    assert codec(schema).encode(rows) == packb([1, 0, rows])
    marks = bytes([4]) * count
    assert codec(schema).encode(rows, marks, 2) == packb([marks, 2, rows])


def test_a_golden_body_of_every_type() -> None:
    row = (1, -1, -0.0, "s", "r", 2, 3, Decimal("4.50"), b"b", [5], [-6], [7])
    body = codec(EVERY).encode([row], 6, b"\x02")
    assert body.hex() == ("9306c40102919c01ffcb8000000000000000a173a1720203a3342e35c40162910591fa91cb401c000000000000")
    assert codec(EVERY).decode(body, 1) == (
        6, b"\x02", [(1, -1, -0.0, "s", "r", 2, 3, Decimal("4.5"), b"b", (5,), (-6,), (7.0,))]
    )  # fmt: skip


def test_there_is_one_nan_and_minus_zero_stays() -> None:
    strange = struct.unpack("<d", struct.pack("<Q", 0xFFF8DEADBEEF0001))[0]
    for count in COUNTS:
        body = of("double").encode([(1, strange)] * count)
        assert body == of("double").encode([(1, math.nan)] * count)
        assert bits(of("double").decode(body, count)[2][-1][1]) == bytes.fromhex("000000000000f87f")
        mixed = of("double").encode([(1, v) for v in [math.inf, -math.inf, -0.0, strange, 1, None] * count])
        values = [row[1] for row in of("double").decode(mixed, 6 * count)[2]]
        assert values[:2] == [math.inf, -math.inf]
        assert bits(values[2]) == bits(-0.0)
        assert math.isnan(values[3])
        assert [type(v) for v in values[3:5]] == [float, float]
        assert values[5] is None
    assert back("array(dbl)", [strange])[0] != back("array(dbl)", [strange])[0]
    assert one("array(dbl)", [strange]) == one("array(dbl)", [math.nan])


@pytest.mark.parametrize("field", EVERY.fields, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_null_is_a_value_of_every_type(field: Field, count: int) -> None:
    body = of(field.type).encode([(1, None)] * count)
    assert of(field.type).decode(body, count)[2] == [(1, None)] * count
    key = codec(Schema([Field("k", field.type, True)]))
    assert key.decode(key.encode([(None,)] * count), count)[2] == [(None,)] * count


def test_money_comes_back_as_the_same_number() -> None:
    for text in ("0", "-1", "0.1", "12345678901234567890.123456789", "1" * 96, "0." + "0" * 40 + "1"):
        assert str(back("money", text)) == str(Decimal(text)) or back("money", text) == Decimal(text)
        assert money_text(Decimal(text)) == text


REFUSED: list[tuple[str, Any, str]] = [
    ("int32", I32, "an integer from -2147483648 to 2147483647"),
    ("int32", -I32 - 1, "an integer from"),
    ("int32", 1 << 70, "an integer from"),
    ("int64", 10**5_000, "an integer from"),
    ("int32", 1.0, "an integer"),
    ("int32", np.float64(1), "an integer"),
    ("int32", "1", "an integer"),
    ("int32", Decimal(1), "an integer"),
    ("int32", b"1", "an integer"),
    ("int32", [1], "an integer"),
    ("int32", object(), "an integer"),
    ("int64", I64, "an integer from"),
    ("int64", -I64 - 1, "an integer from"),
    ("int64", np.uint64(I64), "an integer from"),
    ("int64", NAN, "an integer"),
    ("double", "1.5", "a float"),
    ("double", True, "a float"),
    ("double", np.True_, "a float"),
    ("double", Decimal("1.5"), "a float"),
    ("double", 1 + 2j, "a float"),
    ("double", np.complex128(1 + 2j), "a float"),  # numpy would drop the imaginary part with a warning
    ("double", np.datetime64("2026-01-01", "ns"), "a float"),  # numpy would make nanoseconds of it
    ("double", 10**400, "a number that a double can hold"),
    ("double", np.array([1.0, 2.0]), "is not"),
    ("string", 1, "a str"),
    ("string", b"bytes", "a str"),
    ("string", ["s"], "a str"),
    ("string", "\ud800", "lone surrogate"),
    ("rstring", "ok\udfff", "lone surrogate"),
    ("rstring", 1.5, "a str"),
    ("date", "2026-01-01", "integer seconds since 1970"),
    ("date", 1.5, "integer seconds since 1970"),
    ("date", datetime(2026, 1, 1), "a time zone"),
    ("date", I64, "an integer from"),
    ("date", timedelta(1), "integer seconds"),
    ("stamp", datetime(2026, 1, 1), "a time zone"),
    ("stamp", pd.NaT, "is not"),
    ("stamp", np.datetime64("2026-01-01"), "integer microseconds since 1970"),
    ("stamp", -I64 - 1, "an integer from"),
    ("stamp", "now", "integer microseconds since 1970"),
    ("money", 1.5, "a float would lose digits"),
    ("money", True, "a Decimal"),
    ("money", "twelve", "decimal text such as '12.50'"),
    ("money", "", "decimal text"),
    ("money", "NaN", "finite"),
    ("money", Decimal("sNaN"), "finite"),
    ("money", Decimal("-Infinity"), "finite"),
    ("money", "1" * 97, "at most 96 digits"),
    ("money", Decimal("1E+1000000"), "at most 96 digits"),
    ("money", "1E-100000000", "at most 96 digits"),
    ("money", 10**5_000, "at most 96 digits"),
    ("money", b"1", "a Decimal"),
    ("blob", "text", "bytes"),
    ("blob", 5, "bytes"),
    ("blob", [1, 2], "bytes"),
    ("array(i32)", 5, "a sequence of int32 values"),
    ("array(i32)", "12", "a sequence of int32 values"),
    ("array(i32)", b"12", "a sequence of int32 values"),
    ("array(i32)", {1: 2}, "a sequence of int32 values"),
    ("array(i32)", {1, 2}, "a sequence of int32 values"),
    ("array(i32)", [1, None], "none of them null"),
    ("array(i32)", [1, I32], "an integer from"),
    ("array(i32)", [1, 2.0], "an integer"),
    ("array(i32)", [[1]], "an integer"),
    ("array(i64)", [I64], "an integer from"),
    ("array(i64)", range((1 << 16) + 1), "at most 65536"),
    ("array(dbl)", ["1.0"], "a float"),
    ("array(dbl)", [None], "none of them null"),
    ("array(dbl)", [10**400], "a number that a double can hold"),
]


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")  # what is told here is told as an error
@pytest.mark.parametrize(("kind", "value", "words"), REFUSED, ids=named)
@pytest.mark.parametrize("count", COUNTS)
def test_a_refused_value_is_named_by_row_and_field_on_every_path(kind: str, value: Any, words: str, count: int) -> None:
    codec_ = of(kind)
    rows: list[tuple[Any, ...]] = [(i, None) for i in range(count)]
    rows[-1] = (count, value)
    with pytest.raises(ValueRefused) as e:
        codec_.encode(rows)
    assert (e.value.row, e.value.field) == (count - 1, "v")
    assert e.value.value is value
    text = str(e.value)
    assert text.startswith(f"row {count - 1}, field 'v' ({codec_.schema.fields[1].type}): ")
    assert words in text
    assert len(text) < 300
    # what failed left nothing behind
    assert codec_.encode([(1, None)]) == packb([1, 0, [[1, None]]])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("wrong", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_of_several_wrong_values_the_first_row_is_named(count: int, wrong: tuple[int, int]) -> None:
    """The later column is wrong in an earlier row: the row decides, then the order of the fields."""
    rows: list[list[Any]] = [[i, "s"] for i in range(count + 1)]
    rows[wrong[0]][1] = 5
    rows[wrong[1]][0] = "five"
    with pytest.raises(ValueRefused) as e:
        codec(Schema("k*:int64,s:string")).encode(rows)
    first = min((wrong[1], 0), (wrong[0], 1))
    assert (e.value.row, e.value.field) == (first[0], ("k", "s")[first[1]])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "row",
    [(1,), (1, "a", "b"), (), [1], 5, None, "ab", b"ab", {"k": "x", "s": "y"}, {"a", "b"}, 1.5, object()],
    ids=lambda r: f"{type(r).__name__}",
)
def test_a_row_of_another_shape_is_refused_as_a_row(row: Any, count: int) -> None:
    for schema in ("k*:string,s:string", "k*:int32,s:int32"):
        good = ("a", "b") if "string" in schema else (1, 2)
        rows: list[Any] = [good] * count
        rows[-1] = row
        with pytest.raises(ValueRefused) as e:
            codec(Schema(schema)).encode(rows)
        assert (e.value.row, e.value.field, e.value.value) == (count - 1, "", row)


@pytest.mark.parametrize("count", [0, 11])
def test_a_block_has_at_least_one_event_and_at_most_the_limit(count: int) -> None:
    with pytest.raises(TooLarge) as e:
        of("int32").encode([(1, 1)] * count, limits=Limits(events=10))
    assert (e.value.size, e.value.limit) == (count, 10)


def test_a_body_over_the_limit_is_refused_with_both_sizes_and_one_at_it_is_not() -> None:
    limit = len(one("blob", bytes(1_000)))
    assert of("blob").encode([(1, bytes(1_000))], limits=Limits(frame_bytes=limit))
    with pytest.raises(TooLarge) as e:
        of("blob").encode([(1, bytes(1_001))], limits=Limits(frame_bytes=limit))
    assert (e.value.size, e.value.limit) == (limit + 1, limit)
    assert of("blob").decode(one("blob", b"after"), 1)[2] == [(1, b"after")]


def test_a_million_and_more_events_are_refused_by_default() -> None:
    with pytest.raises(TooLarge):
        of("int32").encode([(1, 1)] * 1_000_001)


@pytest.mark.parametrize("count", [1, 2, 4_096, 4_097, 10_000])
def test_blocks_of_every_size_come_back(count: int) -> None:
    codec_ = codec(Schema("k*:int64,s:string,m:money,a:array(i32)"))
    rows = [(i, f"s{i}", Decimal(i), (i, -i)) for i in range(count)]
    opcodes = bytes(1 + i % 5 for i in range(count))
    body = codec_.encode(rows, opcodes, 0)
    assert codec_.decode(body, count) == (opcodes, 0, rows)


def test_an_array_of_the_greatest_length_comes_back() -> None:
    assert back("array(i32)", range(1 << 16)) == tuple(range(1 << 16))


def body_of(*rows: Any, opcodes: Any = 1, flags: Any = 0) -> bytes:
    data: bytes = packb([opcodes, flags, list(rows)])
    return data


LONG = b"\xdc\x10\x01" + b"\x92\x01\x02" * 4_097  # rows of a body that is read row by row
FORGED: list[tuple[str, bytes, int]] = [
    ("nothing", b"", 1),
    ("one byte", b"\x93", 1),
    ("an integer", b"\x01\x01\x01\x01", 1),
    ("a string of three", b"\xa3abc", 1),
    ("bytes of three", b"\xc4\x03abc", 1),
    ("nil", b"\xc0\xc0\xc0\xc0\xc0\xc0", 1),
    ("a byte that msgpack never uses", b"\xc1" * 10, 1),
    ("an array of two", packb([1, [[1, 2]]]), 1),
    ("an array of four", packb([1, 0, [[1, 2]], 0]), 1),
    ("rows that are an integer", packb([1, 0, 12345678]), 1),
    ("rows that are bytes", packb([1, 0, b"\x01"]), 1),
    ("rows that are a string", packb([1, 0, "a"]), 1),
    ("a row that is an integer", body_of(12345), 1),
    ("a row that is a string as long as a row", body_of("ab"), 1),
    ("a row that is bytes as long as a row", body_of(b"ab"), 1),
    ("a row too short", body_of([1]), 1),
    ("a row too long", body_of([1, 2, 3]), 1),
    ("one row of many too short", body_of([1, 2], [1]), 2),
    ("a text that is as long as a row is wide", body_of([1, 2], "ab"), 2),
    ("rows whose widths agree only on average", body_of([1], [1, 2, 3]), 2),
    ("an empty row", body_of([]), 1),
    ("no rows", body_of(), 1),
    ("fewer rows than the header says", body_of([1, 2]), 2),
    ("more rows than the header says", body_of([1, 2], [1, 2]), 1),
    ("no rows where the header says so, and yet one", body_of([1, 2]), 0),
    ("trailing bytes", body_of([1, 2]) + b"\0", 1),
    ("a second body", body_of([1, 2]) * 2, 1),
    ("truncated", body_of([1, "abcdef"])[:-1], 1),
    ("opcodes too short", body_of([1, 2], [1, 2], opcodes=b"\x01"), 2),
    ("opcodes too long", body_of([1, 2], opcodes=b"\x01\x01"), 1),
    ("opcodes that are a string", body_of([1, 2], opcodes="\x01"), 1),
    ("opcodes that are an array", body_of([1, 2], opcodes=[1]), 1),
    ("opcodes that are nil", body_of([1, 2], opcodes=None), 1),
    ("opcodes that are true", body_of([1, 2], opcodes=True), 1),
    ("flags that are a float", body_of([1, 2], flags=0.0), 1),
    ("flags too long", body_of([1, 2], flags=b"\0\0"), 1),
    ("a map for a body", packb({1: 2, 3: 4, 5: 6}), 1),
    ("a map for the rows", b"\x93\x01\x00\x81\x01\x92\x01\x02", 1),
    ("a map for a row", body_of({1: 2, 3: 4}), 1),
    ("a map for a value", body_of([1, {1: 2}]), 1),
    ("an empty map for a value", body_of([1, {}]), 1),
    ("an ext type for a value", b"\x93\x01\x00\x91\x92\x01\xd4\x05\x00", 1),
    ("an empty ext type for a value", b"\x93\x01\x00\x91\x92\x01\xc7\x00\x05", 1),
    ("a timestamp ext for a value", b"\x93\x01\x00\x91\x92\x01\xd6\xff\0\0\0\0", 1),
    ("a string that is no utf-8", b"\x93\x01\x00\x91\x92\x01\xa2\xff\xfe", 1),
    ("an array of four thousand million", b"\x93\x01\x00\xdd\xff\xff\xff\xff" + b"\x92\x01\x02" * 2, 2),
    ("a value of four thousand million", b"\x93\x01\x00\x91\x92\x01\xdd\xff\xff\xff\xff" + bytes(9), 1),
    ("a string of four thousand million", b"\x93\x01\x00\x91\x92\x01\xdb\xff\xff\xff\xff" + bytes(9), 1),
    ("a blob of four thousand million", b"\x93\x01\x00\x91\x92\x01\xc6\xff\xff\xff\xff" + bytes(9), 1),
    ("a map of four thousand million", b"\x93\x01\x00\x91\x92\x01\xdf\xff\xff\xff\xff" + bytes(9), 1),
    ("an ext of four thousand million", b"\x93\x01\x00\x91\x92\x01\xc9\xff\xff\xff\xff\x01" + bytes(9), 1),
    ("nothing but the beginnings of arrays", b"\x91" * 100_000, 1),
    ("more events than fit", body_of([1, 2]), 4_000_000_000),
    ("many rows: trailing bytes", b"\x93\x01\x00" + LONG + b"\x01", 4_097),
    ("many rows: a trailing row", b"\x93\x01\x00" + LONG + b"\x92\x01\x02", 4_097),
    ("many rows: the beginning of one more row", b"\x93\x01\x00" + LONG + b"\x92\x01", 4_097),
    ("many rows: the beginning of a string behind", b"\x93\x01\x00" + LONG + b"\xdb\0\0", 4_097),
    ("many rows: truncated", b"\x93\x01\x00" + LONG[:-1], 4_097),
    ("many rows: one less than the header says", b"\x93\x01\x00" + LONG, 4_098),
    ("many rows: an array of four", b"\x94\x01\x00" + LONG + b"\x01", 4_097),
    ("many rows: no array", b"\x01" + LONG, 4_097),
    ("many rows: opcodes too short", b"\x93\xc4\x01\x01\x00" + LONG, 4_097),
    ("many rows: a narrow row", b"\x93\x01\x00" + LONG[:-3] + b"\x91\x01\xc0", 4_097),
    ("many rows: a map", b"\x93\x01\x00" + LONG[:-1] + b"\x80", 4_097),
    ("many rows: an ext", b"\x93\x01\x00" + LONG[:-1] + b"\xd4\x01\x01", 4_097),
]


@pytest.mark.parametrize(("body", "count"), [f[1:] for f in FORGED], ids=[f[0] for f in FORGED])
def test_a_forged_body_is_a_value_error(body: bytes, count: int) -> None:
    for schema in ("k*:int64,v:int64", "k*:string,v:string", "k*:int64,v:array(i32)"):
        with pytest.raises(ValueError, match=r"."):
            codec(Schema(schema)).decode(body, count)


@pytest.mark.parametrize("schema", ["k*:money", "k*:int64"])
def test_a_body_without_rows_for_a_count_of_nothing_is_nothing(schema: str) -> None:
    """No sender makes one; a reader is not to fall over it."""
    with suppress(ValueError):
        assert codec(Schema(schema)).decode(b"\x93\x01\x00\x90", 0) == (1, 0, [])


@pytest.mark.parametrize(
    "text", ["", "twelve", "1,5", b"1", [1, 2], [1], {}, "NaN", "sNaN", "Infinity", "-Infinity"], ids=repr
)
def test_money_that_is_no_decimal_is_a_value_error(text: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        of("money").decode(body_of([1, text]), 1)


def test_whatever_is_nested_in_a_value_the_rows_keep_their_shape() -> None:
    """A reader checks the shape of rows, not the type of every value."""
    for value in ([], [[1]], [[[[]]]], [1, [2]]):
        try:
            rows = of("int32").decode(body_of([1, value]), 1)[2]
        except ValueError:
            continue
        assert len(rows) == 1
        assert len(rows[0]) == 2


def test_a_body_truncated_at_any_byte_is_a_value_error() -> None:
    codec_ = codec(EVERY)
    row = (1, -1, 0.5, "s", "r", 2, 3, Decimal("4.5"), b"b", [5], [-6], [7])
    body = codec_.encode([row, row, [None] * 12], b"\1\2\3", 2)
    for size in range(len(body)):
        with pytest.raises(ValueError, match=r"."):
            codec_.decode(body[:size], 3)


def peak_of(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        with suppress(ValueError):
            call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


NESTED_LONG, NESTED_LONGEST = b"\xdc\x10\x00" * 1_000, b"\xdc\xff\xff" * 1_000
GREEDY: list[tuple[str, str, bytes, int]] = [
    ("forged rows", "k*:int64", b"\x93\x01\x00\xdd\xff\xff\xff\xff" + bytes(100), 50),
    ("forged rows within the limit", "k*:int64", b"\x93\x01\x00\xdd\x00\x00\x0f\xff" + bytes(10_000), 4_095),
    ("forged array", "k*:array(i64)", b"\x93\x01\x00\x91\x91\xdd\xff\xff\xff\xff" + bytes(100), 1),
    ("forged string", "k*:string", b"\x93\x01\x00\x91\x91\xdb\x03\xff\xff\xff" + bytes(100), 1),
    ("forged blob", "k*:blob", b"\x93\x01\x00\x91\x91\xc6\x03\xff\xff\xff" + bytes(100), 1),
    ("forged opcodes", "k*:int64", b"\x93\xc6\x03\xff\xff\xff" + bytes(100), 1),
    ("arrays in arrays, none of which is ever filled", "k*:int64", NESTED_LONG, 1),
    ("longest arrays in arrays, none of which is ever filled", "k*:array(i64)", NESTED_LONGEST, 1),
    ("the same where rows are many", "k*:int64", b"\x93\x01\x00\xdc\x10\x01" + NESTED_LONG + bytes(9_000), 4_097),
    ("many and longest", "k*:array(i64)", b"\x93\x01\x00\xdc\x10\x01" + NESTED_LONGEST + bytes(9_000), 4_097),
    ("forged rows of a long body", "k*:int64", b"\x93\x01\x00\xdd\xff\xff\xff\xff" + bytes(9_000), 4_097),
    ("a million forged rows", "k*:int64", b"\x93\x01\x00\xdd\x00\x0f\x42\x40" + bytes(9_000), 4_100),
    ("nothing but integers", "k*:int64", b"\x93\x01\x00\xdc\x10\x01" + bytes(100_000), 4_097),
]


@pytest.mark.parametrize(("schema", "body", "count"), [g[1:] for g in GREEDY], ids=[g[0] for g in GREEDY])
def test_memory_stays_in_proportion_to_what_came(schema: str, body: bytes, count: int) -> None:
    decode = codec(Schema(schema)).decode
    assert peak_of(lambda: decode(body, count)) < (1 << 20) + 1_300 * len(body)


def test_memory_for_an_honest_block_stays_in_proportion() -> None:
    codec_ = of("string")
    body = codec_.encode([(i, "x" * 50) for i in range(5_000)])
    assert peak_of(lambda: codec_.decode(body, 5_000)) < 8 * len(body) + (1 << 20)


_values: dict[FieldType, st.SearchStrategy[Any]] = {
    FieldType.INT32: st.integers(-I32, I32 - 1),
    FieldType.INT64: st.integers(-I64, I64 - 1),
    FieldType.DOUBLE: st.floats(),
    FieldType.STRING: st.text(max_size=40),
    FieldType.RSTRING: st.text(max_size=10),
    FieldType.DATE: st.integers(-I64, I64 - 1),
    FieldType.STAMP: st.integers(-I64, I64 - 1),
    FieldType.MONEY: st.decimals(
        allow_nan=False, allow_infinity=False, places=4, min_value=-(10**20), max_value=10**20
    ),
    FieldType.BLOB: st.binary(max_size=40),
    FieldType.ARRAY_INT32: st.lists(st.integers(-I32, I32 - 1), max_size=4).map(tuple),
    FieldType.ARRAY_INT64: st.lists(st.integers(-I64, I64 - 1), max_size=4).map(tuple),
    FieldType.ARRAY_DOUBLE: st.lists(st.floats(), max_size=4).map(tuple),
}
_types = st.lists(st.sampled_from(FieldType), min_size=1, max_size=6)
_blocks = _types.flatmap(
    lambda types: st.tuples(
        st.just(types),
        st.lists(st.tuples(*(st.none() | _values[t] for t in types)), min_size=1, max_size=20),
    )
)


@settings(max_examples=150)
@given(_blocks)
def test_rows_of_any_schema_come_back(block: tuple[list[FieldType], list[tuple[Any, ...]]]) -> None:
    types, rows = block
    codec_ = codec(Schema([Field(f"f{i}", t, i == 0) for i, t in enumerate(types)]))
    body = codec_.encode(rows)
    opcodes, flags, again = codec_.decode(body, len(rows))
    assert (opcodes, flags) == (1, 0)
    assert repr(codec_.encode(again)) == repr(body)
    assert [tuple(map(type, row)) for row in again] == [tuple(map(type, row)) for row in rows]
    assert list(map(repr, unpackb(body)[2])) == list(map(repr, unpackb(codec_.encode(again))[2]))
    for row, came in zip(rows, again, strict=True):
        for value, got in zip(row, came, strict=True):
            assert got == value or repr(got) == repr(value)


@settings(max_examples=150)
@given(_blocks, st.integers(0, 19), st.integers(0, 5), st.sampled_from([1.5, "x", b"x", I64, object, [None], True, 3]))
def test_both_paths_agree_on_any_rows(
    block: tuple[list[FieldType], list[tuple[Any, ...]]], row: int, field: int, stranger: Any
) -> None:
    types, rows = block
    codec_ = codec(Schema([Field(f"f{i}", t, i == 0) for i, t in enumerate(types)]))
    changed = [list(r) for r in rows]
    changed[row % len(rows)][field % len(types)] = stranger

    def outcome(encode: Callable[[Any], Any]) -> Any:
        try:
            return packb([1, 0, encode(changed)])
        except UnicodeEncodeError:
            return outcome(codec_._by_value)
        except ValueRefused as e:
            return str(e), e.row, e.field, repr(e.value)

    assert outcome(codec_._by_value) == outcome(codec_._by_column)


@given(st.binary(max_size=80), st.integers(0, 6))
def test_any_bytes_are_rows_or_a_value_error(body: bytes, count: int) -> None:
    for kind in ("int64", "money", "array(i32)"):
        try:
            rows = of(kind).decode(b"\x93\x01\x00" + body, count)[2]
        except ValueError:
            continue
        assert [len(row) for row in rows] == [2] * count


def test_a_schema_has_one_codec() -> None:
    assert codec(Schema("k*:int32")) is codec(Schema(" k * : int32 "))
    assert OrderedDict.fromkeys([codec(Schema("k*:int32")), codec(Schema("k*:int64"))])
