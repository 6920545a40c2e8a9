"""The Arrow body: both ways, and bytes that are none."""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_pubsub.errors import ValueRefused
from esp_pubsub.schema import FieldType, Schema
from esp_pubsub.wire import arrow
from esp_pubsub.wire.rows import codec

EVERY = Schema(
    "i*:int32,l:int64,d:double,s:string,r:rstring,t:date,u:stamp,m:money,b:blob,"
    "ai:array(i32),al:array(i64),ad:array(dbl)"
)
PAIR = Schema("k*:int64,v:string")
MONEY = Schema("k*:int64,m:money")
FULL = (1, -(1 << 63), -0.5, "s", "é", -1, 1_765_432_100_123_457, Decimal("-12.5"), b"\0\xff", (1, 2), (), (0.5,))
ROWS: list[tuple[Any, ...]] = [FULL, (None,) * 12, FULL]
MARKS = [(1, 0), (2, 0), (1, 1), (b"\3\6\6", 0), (b"\1\1\2", b"\0\2\3")]


def each(marks: int | bytes, count: int) -> list[int]:
    return [marks] * count if isinstance(marks, int) else list(marks)


@pytest.mark.parametrize(("opcodes", "flags"), MARKS)
def test_rows_come_back_from_an_arrow_body_as_from_a_rows_body(opcodes: int | bytes, flags: int | bytes) -> None:
    body, count, marked = arrow.encode_rows(EVERY, ROWS, opcodes, flags)
    assert (count, marked) == (3, (opcodes, flags) != (1, 0))
    came_opcodes, came_flags, rows = arrow.rows(EVERY, body, count, marked=marked)
    plain = codec(EVERY).decode(codec(EVERY).encode(ROWS, opcodes, flags), count)
    assert rows == plain[2] == ROWS
    assert [tuple(map(type, row)) for row in rows] == [tuple(map(type, row)) for row in plain[2]]
    assert (each(came_opcodes, 3), each(came_flags, 3)) == (each(opcodes, 3), each(flags, 3))


@pytest.mark.parametrize("marked", [False, True])
def test_the_arrow_schema_follows_from_ours_by_a_fixed_table(marked: bool) -> None:
    schema = arrow.arrow_schema(EVERY, marked=marked)
    types = ["int32", "int64", "double", "string", "string", "timestamp[s, tz=UTC]", "timestamp[us, tz=UTC]"]
    types += ["string", "binary", "list<item: int32>", "list<item: int64>", "list<item: double>"]
    names = list(EVERY.names)
    if marked:
        types, names = ["uint8", "uint8", *types], ["_opcode", "_flags", *names]
    assert (schema.names, [str(t) for t in schema.types]) == (names, types)


def test_the_body_is_one_record_batch_message() -> None:
    body, _, _ = arrow.encode_rows(PAIR, [(1, "a")], 1, 0)
    assert pa.ipc.read_message(body).type == "record batch"
    assert arrow.batch(PAIR, body, 1, marked=False).to_pylist() == [{"k": 1, "v": "a"}]


def test_a_table_is_what_rows_say() -> None:
    table = arrow.table(EVERY, ROWS, b"\1\2\3", 0)
    assert table.schema == arrow.arrow_schema(EVERY, marked=True)
    assert table["_opcode"].to_pylist() == [1, 2, 3]
    assert table["m"].to_pylist() == ["-12.5", None, "-12.5"]
    assert table["u"][0].as_py() == datetime.fromtimestamp(1_765_432_100, UTC).replace(microsecond=123_457)
    assert arrow.table(EVERY, []).num_rows == 0


TABLES: list[tuple[str, Any]] = [
    ("as it is", pa.table({"k": pa.array([1, 2]), "v": ["a", None]})),
    ("a batch", pa.record_batch({"k": pa.array([1, 2]), "v": ["a", None]})),
    ("columns in another order", pa.table({"v": ["a", None], "k": pa.array([1, 2])})),
    ("narrower integers", pa.table({"k": pa.array([1, 2], pa.int8()), "v": ["a", None]})),
    ("unsigned integers", pa.table({"k": pa.array([1, 2], pa.uint64()), "v": ["a", None]})),
    ("whole floats", pa.table({"k": pa.array([1.0, 2.0]), "v": ["a", None]})),
    ("large strings", pa.table({"k": [1, 2], "v": pa.array(["a", None], pa.large_utf8())})),
    ("a dictionary", pa.table({"k": [1, 2], "v": pa.array(["a", None]).dictionary_encode()})),
    ("many chunks", pa.table({"k": pa.chunked_array([[1], [], [2]]), "v": pa.chunked_array([["a", None]])})),
    ("a slice", pa.table({"k": [9, 1, 2, 9], "v": ["z", "a", None, "z"]}).slice(1, 2)),
    ("a slice of a batch", pa.record_batch({"k": [9, 1, 2, 9], "v": ["z", "a", None, "z"]}).slice(1, 2)),
    ("not nullable", pa.table({"k": [1, 2], "v": ["a", None]}).cast(
        pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("v", pa.utf8())]))),
    ("with metadata", pa.table({"k": [1, 2], "v": ["a", None]}).replace_schema_metadata({"pandas": "{}"})),
]  # fmt: skip


@pytest.mark.parametrize("table", [t[1] for t in TABLES], ids=[t[0] for t in TABLES])
def test_a_table_goes_whatever_its_order_chunks_and_castable_types(table: Any) -> None:
    body, count, marked = arrow.encode(PAIR, table)
    assert (count, marked) == (2, False)
    assert arrow.rows(PAIR, body, count, marked=marked) == (1, 0, [(1, "a"), (2, None)])


def test_a_table_brings_its_own_opcodes_and_flags() -> None:
    table = pa.table({"v": ["a", "b"], "_flags": [0, 2], "k": [1, 2], "_opcode": [1, 3]})
    body, count, marked = arrow.encode(PAIR, table)
    assert (count, marked) == (2, True)
    assert arrow.rows(PAIR, body, count, marked=marked) == (b"\1\3", b"\0\2", [(1, "a"), (2, "b")])


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array([Decimal("12.50"), None, Decimal("-0.001")]), ["12.5", None, "-0.001"]),
        (pa.array([1, None, -20]), ["1", None, "-20"]),
        (pa.array(["12.5", None, "-1"]), ["12.5", None, "-1"]),
        (pa.array(["12.5", None, "-1"], pa.large_utf8()), ["12.5", None, "-1"]),
        (pa.array(["12.50", None, "1E+2"]), ["12.5", None, "100"]),  # one form per value, whoever wrote it
    ],
    ids=["decimals", "integers", "text", "large text", "text in another form"],
)
def test_money_goes_as_its_one_canonical_text(column: pa.Array, texts: list[str | None]) -> None:
    body, count, _ = arrow.encode(MONEY, pa.table({"k": [1, 2, 3], "m": column}))
    assert arrow.batch(MONEY, body, count, marked=False).column(1).to_pylist() == texts
    wanted = [None if t is None else Decimal(t) for t in texts]
    assert [row[1] for row in arrow.rows(MONEY, body, count, marked=False)[2]] == wanted


REFUSED: list[tuple[str, Schema, Any]] = [
    ("a column too few", PAIR, pa.table({"k": [1]})),
    ("a column too many", PAIR, pa.table({"k": [1], "v": ["a"], "w": [1]})),
    ("another name", PAIR, pa.table({"K": [1], "v": ["a"]})),
    ("a column twice", PAIR, pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array(["a"])], ["k", "k", "v"])),
    ("opcodes without flags", PAIR, pa.table({"k": [1], "v": ["a"], "_opcode": [1]})),
    ("flags without opcodes", PAIR, pa.table({"k": [1], "v": ["a"], "_flags": [0]})),
    ("an opcode that is null", PAIR, pa.table({"k": [1], "v": ["a"], "_opcode": pa.nulls(1), "_flags": [0]})),
    ("an opcode over a byte", PAIR, pa.table({"k": [1], "v": ["a"], "_opcode": [256], "_flags": [0]})),
    ("a fraction", PAIR, pa.table({"k": [1.5], "v": ["a"]})),
    ("an integer out of range", PAIR, pa.table({"k": pa.array([1 << 63], pa.uint64()), "v": ["a"]})),
    ("text for an integer", PAIR, pa.table({"k": ["one"], "v": ["a"]})),
    ("a list for an integer", PAIR, pa.table({"k": [[1]], "v": ["a"]})),
    ("a struct for a string", PAIR, pa.table({"k": [1], "v": [{"x": 1}]})),
    ("microseconds for a date", Schema("k*:date"), pa.table({"k": pa.array([1], pa.timestamp("us", tz="UTC"))})),
    ("nanoseconds for a stamp", Schema("k*:stamp"), pa.table({"k": pa.array([1], pa.timestamp("ns", tz="UTC"))})),
    ("text for money", MONEY, pa.table({"k": [1], "m": ["twelve"]})),
    ("large text for money", MONEY, pa.table({"k": [1], "m": pa.array(["twelve"], pa.large_utf8())})),
    ("not a number for money", MONEY, pa.table({"k": [1], "m": ["NaN"]})),
    ("a moment for money", MONEY, pa.table({"k": [1], "m": pa.array([1], pa.timestamp("us"))})),
    ("a list for money", MONEY, pa.table({"k": [1], "m": [["1"]]})),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "table"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_table_that_does_not_fit_is_refused(schema: Schema, table: pa.Table) -> None:
    with pytest.raises((ValueError, ValueRefused), match=r"."):
        arrow.encode(schema, table)


def test_rows_are_refused_as_a_rows_body_refuses_them() -> None:
    with pytest.raises(ValueRefused) as e:
        arrow.encode_rows(PAIR, [(1, "a"), (2, 3)], 1, 0)
    assert (e.value.row, e.value.field) == (1, "v")


def test_a_field_may_have_the_name_of_a_mark() -> None:
    """Or else the schema has to be refused where it is made; a table that cannot go is the worst of both."""
    schema = Schema("_opcode*:int64,_flags:string")
    body, count, marked = arrow.encode_rows(schema, [(70_000, "a")], 1, 0)
    assert arrow.rows(schema, body, count, marked=marked)[2] == [(70_000, "a")]


def message(batch: pa.RecordBatch, compression: str | None = None) -> bytes:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    data: bytes = reader.read_next_message().serialize().to_pybytes()
    return data


def marked_batch(opcode: int | None, flag: int | None) -> bytes:
    marks = [pa.array([opcode], pa.uint8()), pa.array([flag], pa.uint8())]
    return message(pa.record_batch([*marks, pa.array([1]), pa.array(["a"])], ["_opcode", "_flags", "k", "v"]))


GOOD = bytes(arrow.encode_rows(PAIR, [(1, "a"), (2, None)], 1, 0)[0])
OTHER = bytes(arrow.encode_rows(EVERY, ROWS, b"\1\2\3", 0)[0])
FORGED: list[tuple[str, Schema, bytes, int, bool]] = [
    ("nothing", PAIR, b"", 0, False),
    ("zeros", PAIR, bytes(64), 2, False),
    ("ones", PAIR, b"\xff" * 64, 2, False),
    ("text", PAIR, b"x" * 100, 2, False),
    ("the end of a stream", PAIR, b"\xff\xff\xff\xff\0\0\0\0", 2, False),
    ("a schema message", PAIR, arrow.arrow_schema(PAIR).serialize().to_pybytes(), 2, False),
    ("another count", PAIR, GOOD, 3, False),
    ("a count of nothing", PAIR, GOOD, 0, False),
    ("marked and yet unmarked", PAIR, GOOD, 2, True),
    ("fewer columns than the schema", Schema("k*:int64,v:string,w:int32"), GOOD, 2, False),
    ("other columns than the schema", EVERY, GOOD, 2, False),
    ("an opcode that is null", PAIR, marked_batch(None, 0), 1, True),
    ("a flag that is null", PAIR, marked_batch(1, None), 1, True),
    ("text for money", MONEY, message(pa.record_batch({"k": [1], "m": ["twelve"]})), 1, False),
    ("infinite money", MONEY, message(pa.record_batch({"k": [1], "m": ["Infinity"]})), 1, False),
    ("a string that is no utf-8", PAIR, message(pa.record_batch({"k": [1], "v": [b"\xff"]})), 1, False),
]


@pytest.mark.parametrize(("schema", "body", "count", "marked"), [f[1:] for f in FORGED], ids=[f[0] for f in FORGED])
def test_a_forged_body_is_a_value_error(schema: Schema, body: bytes, count: int, marked: bool) -> None:
    with pytest.raises(ValueError, match=r"."):
        arrow.rows(schema, body, count, marked=marked)


@pytest.mark.parametrize("codec_name", ["zstd", "lz4"])
def test_a_compressed_body_is_bounded_by_what_comes_out(codec_name: str) -> None:
    """128 MiB of zeros in a few kilobytes: over any limit that a frame has."""
    if not pa.Codec.is_available(codec_name):
        pytest.skip(f"pyarrow was built without {codec_name}")
    bomb = message(pa.record_batch({"k": [1], "v": [b"\0" * (128 << 20)]}), codec_name)
    assert len(bomb) < 1 << 20
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match=r"."):
        arrow.batch(Schema("k*:int64,v:blob"), bomb, 1, marked=False)
    assert pa.total_allocated_bytes() - before < 64 << 20


@pytest.mark.parametrize("schema", [EVERY, PAIR, MONEY], ids=str)
def test_what_pyarrow_writes_uncompressed_begins_as_we_know_it(schema: Schema) -> None:
    """Else nothing is wrong, but every body takes the long way to be found uncompressed."""
    row: Any = (1,) + (None,) * (len(schema.fields) - 1)
    for count in (1, 1_000):
        body = arrow.encode_rows(schema, [row] * count, 1, 0)[0]
        assert arrow._BEGINNING.unpack_from(body) == arrow._OURS
        compressed = message(arrow.batch(schema, body, count, marked=False), "zstd")
        assert arrow._BEGINNING.unpack_from(compressed) != arrow._OURS


def test_a_body_of_the_format_before_which_may_hide_compression_is_a_value_error() -> None:
    older = GOOD[4:8] + GOOD[8:]
    with pytest.raises(ValueError, match="no Arrow message"):
        arrow.batch(PAIR, older, 2, marked=False)


def right(schema: Schema, body: bytes, count: int, marked: bool) -> bool:
    """The body is a value error (False), or rows of the right shape (True)."""
    try:
        opcodes, flags, rows = arrow.rows(schema, body, count, marked=marked)
    except ValueError:
        return False
    assert len(rows) == count
    assert {len(row) for row in rows} <= {len(schema.fields)}
    for marks in (opcodes, flags):
        assert isinstance(marks, int) or len(marks) == count
    texts = [i for i, f in enumerate(schema.fields) if f.type in (FieldType.STRING, FieldType.RSTRING)]
    assert all(row[i] is None or isinstance(row[i], str) for row in rows for i in texts)
    return True


CASES: list[tuple[Schema, bytes, int, bool]] = [(PAIR, GOOD, 2, False), (EVERY, OTHER, 3, True)]


@pytest.mark.parametrize(("schema", "body", "count", "marked"), CASES, ids=["pair", "every type"])
def test_a_body_truncated_at_any_byte_is_a_value_error_or_rows(
    schema: Schema, body: bytes, count: int, marked: bool
) -> None:
    assert right(schema, body, count, marked)
    assert not any(right(schema, body[:size], count, marked) for size in range(len(body) // 2))
    for size in range(len(body)):
        right(schema, body[:size], count, marked)


@pytest.mark.parametrize(("schema", "body", "count", "marked"), CASES, ids=["pair", "every type"])
@pytest.mark.parametrize("change", [0x00, 0x01, 0x7F, 0x80, 0xFF])
def test_any_byte_may_be_another_and_nothing_worse_than_a_value_error_comes(
    schema: Schema, body: bytes, count: int, marked: bool, change: int
) -> None:
    for at in range(len(body)):
        right(schema, body[:at] + bytes([change]) + body[at + 1 :], count, marked)


def test_mutated_bodies_are_value_errors_or_rows() -> None:
    rng = random.Random(20_261_118)
    changes: list[Callable[[bytearray, int], None]] = [
        lambda b, at: b.__setitem__(at, rng.randrange(256)),
        lambda b, at: b.__setitem__(slice(at, at + 4), rng.choice([b"\xff" * 4, bytes(4), b"\0\0\0\x80"])),
        lambda b, at: b.__setitem__(slice(at, at + 8), rng.choice([b"\xff" * 8, (1 << 40).to_bytes(8, "little")])),
        lambda b, at: b.insert(at, rng.randrange(256)),
        lambda b, at: b.__delitem__(at),
    ]
    for _ in range(3_000):
        schema, body, count, marked = rng.choice(CASES)
        mutant = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            rng.choice(changes)(mutant, rng.randrange(len(mutant) - 8))
        right(schema, bytes(mutant), count, marked)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(-(1 << 31), (1 << 31) - 1),
            st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
            st.none() | st.floats(allow_nan=False),
            st.none() | st.text(max_size=9),
            st.none() | st.text(max_size=9),
            st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
            st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
            st.none() | st.decimals(-(10**12), 10**12, places=3),
            st.none() | st.binary(max_size=9),
            st.none() | st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=3).map(tuple),
            st.none() | st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=3).map(tuple),
            st.none() | st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=9,
    )
)
def test_any_rows_come_back_equal_from_both_bodies(rows: list[tuple[Any, ...]]) -> None:
    body, count, marked = arrow.encode_rows(EVERY, rows, 1, 0)
    plain = codec(EVERY).decode(codec(EVERY).encode(rows), len(rows))
    assert arrow.rows(EVERY, body, count, marked=marked) == plain
