"""Writing a rows body: canonical, and refused by name."""

import math
import struct
from array import array
from collections import OrderedDict, namedtuple
from collections.abc import Callable
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
from esp_pubsub.wire import rows as rows_module
from esp_pubsub.wire.frame import Limits
from esp_pubsub.wire.rows import RowCodec, codec, money_text
from tests.support.rows import BLOCKS, EVERY, I32, I64, named, of

NAN = float("nan")
COUNTS = (1, 2, 300)  # alone, among few, among many


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


def one(kind: str, value: Any) -> bytes:
    """The body of one row with this value."""
    return of(kind).encode([(1, value)])


def back(kind: str, value: Any) -> Any:
    """The value as a reader gets it."""
    return of(kind).decode(one(kind, value), 1)[2][0][1]


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


SAME: list[tuple[str, Any, list[Any]]] = [  # a type, its canonical value, other spellings of it
    ("int32", 1, [np.int8(1), np.int64(1), np.uint64(1), np.array(1), MyInt(1)]),
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
    ("date", 0, [datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))]),
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
        [(1, 2), np.array([1, 2]), range(1, 3), array("i", [1, 2]), [1, np.int8(2)]],
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
    body = body.replace(b"\x93\x06", b"\x93\x03")  # an update block is two rows
    assert codec(EVERY).decode(body, 1) == (
        3, b"\x02", [(1, -1, -0.0, "s", "r", 2, 3, Decimal("4.5"), b"b", (5,), (-6,), (7.0,))]
    )  # fmt: skip


def test_there_is_one_nan_and_minus_zero_stays() -> None:
    strange = struct.unpack("<d", struct.pack("<Q", 0xFFF8DEADBEEF0001))[0]
    for count in COUNTS:
        for where in (0, count - 1):
            rows = [(1, strange if i == where else 0.5) for i in range(count)]
            canonical = [[1, math.nan if i == where else 0.5] for i in range(count)]
            assert of("double").encode(rows) == packb([1, 0, canonical])
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
    ("int32", True, "an integer"),
    ("stamp", False, "integer microseconds"),
    ("array(i64)", [True], "an integer"),
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
def testBLOCKS_of_every_size_come_back(count: int) -> None:
    codec_ = codec(Schema("k*:int64,s:string,m:money,a:array(i32)"))
    rows = [(i, f"s{i}", Decimal(i), (i, -i)) for i in range(count)]
    opcodes = bytes(1 + i % 5 for i in range(count))
    body = codec_.encode(rows, opcodes, 0)
    assert codec_.decode(body, count) == (opcodes, 0, rows)


def test_an_array_of_the_greatest_length_comes_back() -> None:
    assert back("array(i32)", range(1 << 16)) == tuple(range(1 << 16))


@settings(max_examples=150)
@given(BLOCKS)
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


STRANGERS = st.sampled_from([
    1.5, "x", b"x", I64, -I64 - 1, I32, object, [None], True, 3, NAN, -math.inf, math.inf, -0.0, Decimal("1.5"),
    Decimal("NaN"), "YWJj", "\ud800", np.float64(2), np.int32(2), Size.BIG, Color.RED, OldColor.RED, Loud("quiet"),
    MyInt(4), MyFloat(4), MyBytes(b"4"), bytearray(b"4"), datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC),
    date(2026, 1, 1), timedelta(1), {1}, frozenset({1}), {}, (), [1], (1, 2.0), range(2), 10**400,
])  # fmt: skip


@settings(max_examples=400)
@given(BLOCKS, st.integers(0, 19), st.integers(0, 5), STRANGERS)
def test_rows_that_msgspec_checks_and_rows_that_go_value_by_value_give_the_same_bytes_and_errors(
    block: tuple[list[FieldType], list[tuple[Any, ...]]], row: int, field: int, stranger: Any
) -> None:
    """The bytes beside those of msgpack for the same canonical values."""
    types, rows = block
    codec_ = codec(Schema([Field(f"f{i}", t, i == 0) for i, t in enumerate(types)]))
    changed = [list(r) for r in rows]
    changed[row % len(rows)][field % len(types)] = stranger
    for given_ in (rows, changed):
        assert encoded(codec_.encode, given_) == encoded(lambda rows: packb([1, 0, codec_._by_value(rows)]), given_)


def encoded(encode: Callable[[Any], Any], rows: Any) -> Any:
    """The bytes, or what is wrong."""
    try:
        return encode(rows)
    except UnicodeEncodeError as e:
        return "ValueRefused", e.object
    except ValueRefused as e:
        if "lone surrogate" in str(e):
            return "ValueRefused", e.value
        return str(e), e.row, e.field, repr(e.value)


def test_where_a_decimal_leaves_no_trace_doubles_go_value_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rows_module._TYPES, FieldType.DOUBLE, rows_module._TYPES[FieldType.DOUBLE]._replace(
        canonical=rows_module._CONVERTED))  # fmt: skip
    unsure = RowCodec(Schema("k*:int32,v:double"))
    assert unsure.encode([(1, 0.5), (2, None)]) == of("double").encode([(1, 0.5), (2, None)])
    with pytest.raises(ValueRefused):
        unsure.encode([(1, Decimal("1.5"))])


def test_a_schema_has_one_codec() -> None:
    assert codec(Schema("k*:int32")) is codec(Schema(" k * : int32 "))
    assert OrderedDict.fromkeys([codec(Schema("k*:int32")), codec(Schema("k*:int64"))])
