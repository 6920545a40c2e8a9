"""Reading a rows body: nothing forged is believed, and msgspec says what msgpack says."""

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgpack import packb

from esp_pubsub.schema import Field, FieldType, Schema
from esp_pubsub.wire.rows import codec
from tests.support.rows import BLOCKS, EVERY, I32, I64, named, of
from tests.support.rows_by_msgpack import read


def body_of(*rows: Any, opcodes: Any = 1, flags: Any = 0) -> bytes:
    data: bytes = packb([opcodes, flags, list(rows)])
    return data


LONG = b"\xdc\x10\x01" + b"\x92\x01\x02" * 4_097  # many rows
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


UNTYPED: list[tuple[str, Any, str]] = [  # what an unchecked reader would hand out
    ("int32", "x", "row 1, field 'v' (int32): Expected `int | null`, got `str`"),
    ("int32", True, "got `bool`"),
    ("int32", 1.0, "got `float`"),
    ("int32", I32, "row 1, field 'v' (int32): Expected `int` <= 2147483647"),
    ("int32", -I32 - 1, "Expected `int` >= -2147483648"),
    ("int64", (1 << 64) - 1, "row 1, field 'v' (int64)"),
    ("int64", I64, "row 1, field 'v' (int64)"),
    ("int64", [1], "got `array`"),
    ("double", "1.5", "got `str`"),
    ("double", True, "got `bool`"),
    ("string", b"bytes", "got `bytes`"),
    ("string", 1, "got `int`"),
    ("rstring", ["s"], "got `array`"),
    ("blob", "YWJj", "got `str`"),
    ("date", 1.5, "got `float`"),
    ("stamp", "now", "row 1, field 'v' (stamp): Expected `int | null`, got `str`"),
    ("stamp", I64, "row 1, field 'v' (stamp)"),
    ("money", 5, "got `int`"),
    ("money", "1E+1000000", "at most 96 digits"),
    ("money", "1" * 97, "at most 96 digits"),
    ("array(i32)", 5, "got `int`"),
    ("array(i32)", [1, None], "row 1, field 'v' (array(i32)): Expected `int`, got `None`"),
    ("array(i32)", [I32], "Expected `int` <= 2147483647"),
    ("array(i64)", [[1]], "got `array`"),
    ("array(dbl)", ["1.0"], "got `str`"),
    ("array(i32)", [0] * ((1 << 16) + 1), "length <= 65536"),
]


@pytest.mark.parametrize(("kind", "value", "words"), UNTYPED, ids=named)
def test_a_value_of_another_type_or_out_of_range_is_refused_by_row_and_field(kind: str, value: Any, words: str) -> None:
    body = body_of([1, None], [2, value])
    with pytest.raises(ValueError, match=r"not a rows body|digits") as e:
        of(kind).decode(body, 2)
    assert words in str(e.value)
    with pytest.raises(ValueError, match=r"."):
        read(of(kind).schema, body, 2)


OTHER_FORMS: list[tuple[str, bytes, Any]] = [
    ("int32", b"\xcd\0\1", 1),
    ("int64", b"\xd3" + bytes(7) + b"\1", 1),
    ("int64", b"\xcf" + bytes(7) + b"\1", 1),
    ("double", b"\1", 1.0),
    ("double", b"\xca\x3f\x80\0\0", 1.0),
    ("double", b"\xcf" + b"\xff" * 8, float(1 << 64)),
    ("string", b"\xdb\0\0\0\1s", "s"),
    ("blob", b"\xc6\0\0\0\1s", b"s"),
    ("money", b"\xa412.0", Decimal("12.0")),
    ("array(i32)", b"\xdd\0\0\0\1\1", (1,)),
    ("array(dbl)", b"\x91\1", (1.0,)),
]


@pytest.mark.parametrize(("kind", "packed", "value"), OTHER_FORMS, ids=named)
def test_a_value_in_another_form_than_the_canonical_one_is_read_as_what_it_is(
    kind: str, packed: bytes, value: Any
) -> None:
    body = b"\x93\x01\x00\xdd\x00\x00\x00\x01\x92\x01" + packed
    found = of(kind).decode(body, 1)
    assert found == read(of(kind).schema, body, 1) == (1, 0, [(1, value)])
    assert type(found[2][0][1]) is type(value)


MARKS: list[tuple[Any, Any, int, str]] = [
    (0, 0, 1, "opcodes: Expected `int` >= 1"),
    (7, 0, 1, "opcodes: Expected `int` <= 6"),
    (300, 0, 1, "opcodes"),
    (-1, 0, 1, "opcodes"),
    ((1 << 64) - 1, 0, 1, "opcodes"),
    (b"\1\0", 0, 2, "row 1: 0 is no opcode"),
    (b"\1\7", 0, 2, "row 1: 7 is no opcode"),
    (6, 0, 1, "row 0: an update block is two rows"),
    (6, 0, 3, "row 2: an update block is two rows"),
    (b"\6\1\6", 0, 3, "row 0: an update block is two rows"),
    (b"\1\6\6\6", 0, 4, "row 3: an update block is two rows"),
    (1, -1, 1, "flags: Expected `int` >= 0"),
    (1, 256, 1, "flags: Expected `int` <= 255"),
    (1, b"\0", 2, "1 opcodes or flags for 2 rows"),
    (b"\1\1\1", 0, 2, "3 opcodes or flags for 2 rows"),
]


@pytest.mark.parametrize(("opcodes", "flags", "count", "words"), MARKS, ids=named)
def test_opcodes_and_flags_that_nobody_may_publish_are_refused(
    opcodes: Any, flags: Any, count: int, words: str
) -> None:
    body = body_of(*[[1, 2]] * count, opcodes=opcodes, flags=flags)
    with pytest.raises(ValueError, match=r".") as e:
        of("int32").decode(body, count)
    assert words in str(e.value)
    with pytest.raises(ValueError, match=r"."):
        read(of("int32").schema, body, count)


@pytest.mark.parametrize("opcodes", [6, b"\6\6\6\6", b"\6\6\1\2"])
@pytest.mark.parametrize("flags", [0, 255, b"\0\1\2\xff"])
def test_updateBLOCKS_in_pairs_and_any_byte_of_flags_are_read(opcodes: Any, flags: Any) -> None:
    body = body_of(*[[1, 2]] * 4, opcodes=opcodes, flags=flags)
    assert of("int32").decode(body, 4) == read(of("int32").schema, body, 4) == (opcodes, flags, [(1, 2)] * 4)


def verdict(read: Callable[[], Any]) -> Any:
    """What was read, in letters that tell types and NaN apart; or that it was refused."""
    try:
        return repr(read())
    except ValueError:
        return ValueError


_packed = st.recursive(
    st.none() | st.booleans() | st.integers(-I64, 2 * I64 - 1) | st.floats()
    | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=400)
@given(BLOCKS, st.data())
def test_msgspec_and_msgpack_read_the_same_or_refuse_alike(
    block: tuple[list[FieldType], list[tuple[Any, ...]]], data: st.DataObject
) -> None:
    types, rows = block
    codec_ = codec(Schema([Field(f"f{i}", t, i == 0) for i, t in enumerate(types)]))
    body = bytearray(codec_.encode(rows))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(body) - 1))
        if data.draw(st.booleans()):
            body[at] = data.draw(st.integers(0, 255))
        else:
            body[at : at + data.draw(st.integers(0, 2))] = packb(data.draw(_packed))
    same = verdict(lambda: read(codec_.schema, bytes(body), len(rows)))
    assert verdict(lambda: codec_.decode(bytes(body), len(rows))) == same
    assert verdict(lambda: codec_.decode(memoryview(body), len(rows))) == same


@pytest.mark.parametrize(("body", "count"), [f[1:] for f in FORGED], ids=[f[0] for f in FORGED])
def test_what_is_forged_msgpack_refuses_as_well(body: bytes, count: int) -> None:
    with pytest.raises(ValueError, match=r".?"):
        read(Schema("k*:int64,v:int64"), body, count)


@given(st.binary(max_size=80), st.integers(0, 6))
def test_any_bytes_are_rows_or_a_value_error(body: bytes, count: int) -> None:
    for kind in ("int64", "money", "array(i32)"):
        try:
            rows = of(kind).decode(b"\x93\x01\x00" + body, count)[2]
        except ValueError:
            continue
        assert [len(row) for row in rows] == [2] * count
