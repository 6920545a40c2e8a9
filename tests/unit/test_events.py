"""Blocks out of frames: rows, mappings, events, tables, views; and bodies that are not what they say."""

import pickle
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from msgpack import packb

from esp_pubsub.errors import BadBody
from esp_pubsub.events import PLAIN, Block, Event, EventFlag, Opcode, View
from esp_pubsub.records import moment
from esp_pubsub.schema import Schema
from esp_pubsub.wire import arrow
from esp_pubsub.wire.frame import ARROW, BLOCK, MAP, MARKED, NO_BODY, ROWS, TRANSACTIONAL, frames, parse, seal
from esp_pubsub.wire.rows import codec

TRADE = Schema("id*:int64,symbol:string,price:money,at:stamp,day:date")
KEY = Schema("k*:int64")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
N, U, D, P, S, B = Opcode.INSERT, Opcode.UPDATE, Opcode.DELETE, Opcode.UPSERT, Opcode.SAFEDELETE, Opcode.UPDATEBLOCK
READERS: list[Callable[[Block], Any]] = [Block.rows, Block.changes, Block.mappings, Block.events, Block.table]
NOT_ROWS = READERS[2:]  # these look into the values


def forged(
    schema: Schema, body: bytes, count: int, *, view: View = PLAIN, kind: int = ROWS, flags: int = 0,
    fingerprint: int | None = None, sent_at: int = 0,
) -> Block:  # fmt: skip
    """A block with any body; its frame is whole and its chain is right."""
    told = schema.fingerprint if fingerprint is None else fingerprint
    one = seal(BLOCK, kind, flags, count, source=7, run=3, id=12, schema=told, link=99, body=body)
    return Block(parse(frames([one], 11, sent_at)[0], "p5"), schema, view)


def block(
    schema: Schema, rows: list[Any], opcodes: int | bytes = 1, flags: int | bytes = 0, *, view: View = PLAIN,
    arrow_body: bool = False, transactional: bool = False, sent_at: int = 0,
) -> Block:  # fmt: skip
    """An honest block."""
    mark = TRANSACTIONAL if transactional else 0
    if arrow_body:
        body, count, marked = arrow.encode_rows(schema, rows, opcodes, flags)
        return forged(schema, body, count, view=view, kind=ARROW, flags=mark | (MARKED if marked else 0))
    body = codec(schema).encode(rows, opcodes, flags)
    return forged(schema, body, len(rows), view=view, flags=mark, sent_at=sent_at)


BODIES = pytest.mark.parametrize("arrow_body", [False, True], ids=["rows", "arrow"])


def test_a_block_says_what_its_frame_says() -> None:
    it = block(TRADE, [(1, "a", "1", 0, 0)], transactional=True, sent_at=1_765_432_100_123_457)
    assert (it.id, it.run, it.source, it.position, len(it), it.transactional) == (12, 3, 7, "p5", 1, True)
    assert it.sent_at == datetime.fromtimestamp(1_765_432_100, UTC) + timedelta(microseconds=123_457)
    assert repr(it) == "<Block id=12 run=3 source=0000000000000007 events=1>"
    assert not block(TRADE, [(1, "a", "1", 0, 0)]).transactional


@BODIES
def test_rows_are_tuples_with_integers_for_moments_and_decimals_for_money(arrow_body: bool) -> None:
    rows = [(1, "a", Decimal("12.50"), -1, 86_400), (2, None, None, None, None)]
    it = block(TRADE, rows, arrow_body=arrow_body)
    assert it.rows() == rows
    assert [tuple(map(type, row)) for row in it.rows()] == [tuple(map(type, row)) for row in rows]
    assert it.rows() is not it.rows()


MOMENTS = [
    (0, EPOCH),
    (1, datetime(1970, 1, 1, microsecond=1, tzinfo=UTC)),
    (-1, datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
    (1_765_432_100_123_457, datetime(2025, 12, 11, 5, 48, 20, 123_457, tzinfo=UTC)),
    (9_007_199_254_740_993, EPOCH + timedelta(microseconds=9_007_199_254_740_993)),  # 2**53 + 1: no float holds it
    (-62_135_596_800_000_000, datetime(1, 1, 1, tzinfo=UTC)),
    (253_402_300_799_999_999, datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
]


@BODIES
@pytest.mark.parametrize(("micros", "wanted"), MOMENTS)
def test_mappings_have_aware_datetimes_exact_to_the_microsecond(
    micros: int, wanted: datetime, arrow_body: bool
) -> None:
    seconds = micros // 1_000_000
    (mapping,) = block(TRADE, [(1, "a", "1", micros, seconds)], arrow_body=arrow_body).mappings()
    assert list(mapping) == list(TRADE.names)
    assert mapping["at"] == wanted
    assert mapping["day"] == wanted.replace(microsecond=0)
    assert mapping["at"].tzinfo is mapping["day"].tzinfo is UTC
    assert mapping["price"] == Decimal(1)


@pytest.mark.parametrize(("micros", "wanted"), MOMENTS)
def test_a_datetime_comes_back_as_the_same_datetime(micros: int, wanted: datetime) -> None:
    (mapping,) = block(TRADE, [(1, "a", "1", wanted, date(1969, 7, 20))]).mappings()
    assert (mapping["at"], mapping["day"]) == (wanted, datetime(1969, 7, 20, tzinfo=UTC))
    assert moment(0, micros) == wanted == moment(micros // 1_000_000, micros % 1_000_000)


def test_nulls_stay_null_in_mappings() -> None:
    nothing = dict.fromkeys(TRADE.names)
    assert block(TRADE, [(None,) * 5]).mappings() == [nothing]
    assert block(TRADE, [(None,) * 5]).events() == [Event(nothing)]


@BODIES
def test_events_carry_opcode_and_flags_of_each_row(arrow_body: bool) -> None:
    opcodes, flags = bytes([N, U, D, P, S, B, B]), bytes([0, 1, 2, 3, 0, 0, 0])
    it = block(KEY, [(i,) for i in range(7)], opcodes, flags, arrow_body=arrow_body)
    assert it.events() == [
        Event({"k": i}, Opcode(o), EventFlag(f)) for i, (o, f) in enumerate(zip(opcodes, flags, strict=True))
    ]
    assert EventFlag.PARTIAL in it.events()[1].flags
    assert it.events()[3].flags == EventFlag.PARTIAL | EventFlag.RETENTION


@BODIES
def test_changes_are_opcode_and_row_of_each_event_in_order(arrow_body: bool) -> None:
    rows = [(1, "a", Decimal("12.50"), -1, 86_400), (1, None, None, None, None), (2, "b", None, 0, 0)]
    it = block(TRADE, rows, bytes([P, D, N]), bytes([0, 2, 0]), arrow_body=arrow_body)
    assert it.changes() == [(P, rows[0]), (D, rows[1]), (N, rows[2])]
    assert all(type(opcode) is Opcode and type(row) is tuple for opcode, row in it.changes())
    assert it.changes() is not it.changes()


@pytest.mark.parametrize("opcode", Opcode)
@BODIES
def test_one_opcode_and_one_flag_stand_for_all_events(opcode: Opcode, arrow_body: bool) -> None:
    events = block(KEY, [(1,), (2,)], int(opcode), 1, arrow_body=arrow_body).events()
    assert events == [Event({"k": k}, opcode, EventFlag.PARTIAL) for k in (1, 2)]


def test_the_numbers_of_opcodes_and_flags_are_those_of_the_protocol() -> None:
    assert [(o.name, o.value) for o in Opcode] == [
        ("INSERT", 1), ("UPDATE", 2), ("DELETE", 3), ("UPSERT", 4), ("SAFEDELETE", 5), ("UPDATEBLOCK", 6)
    ]  # fmt: skip
    assert (EventFlag.NORMAL, EventFlag.PARTIAL, EventFlag.RETENTION) == (0, 1, 2)


def test_an_event_is_an_insert_without_flags_unless_told() -> None:
    assert Event({"k": 1}) == Event({"k": 1}, Opcode.INSERT, EventFlag.NORMAL)
    with pytest.raises(AttributeError):
        Event({}).opcode = Opcode.DELETE  # type: ignore[misc]


# opcodes and flags of the events k = 0, 1, 2, ...; the view; opcode and k of what is seen
SEEN: list[tuple[list[int], list[int], View, list[tuple[int, int]]]] = [
    ([B, B], [0, 0], PLAIN, [(B, 0), (B, 1)]),
    ([B, B], [0, 0], View(collapse=True), [(U, 0)]),
    ([B, B, B, B], [0, 0, 0, 0], View(collapse=True), [(U, 0), (U, 2)]),
    ([N, B, B, D], [0, 0, 0, 0], View(collapse=True), [(N, 0), (U, 1), (D, 3)]),
    ([N, B, B, D], [0, 0, 0, 0], View(rmretdel=True), [(N, 0), (B, 1), (B, 2), (D, 3)]),
    ([D, D, D], [0, 2, 0], View(rmretdel=True), [(D, 0), (D, 2)]),
    ([D, D, D], [0, 2, 0], View(collapse=True), [(D, 0), (D, 1), (D, 2)]),
    ([D, D], [2, 3], View(rmretdel=True), []),
    ([D, D], [1, 0], View(rmretdel=True), [(D, 0), (D, 1)]),
    ([S, N, U, P], [2, 2, 2, 2], View(rmretdel=True), [(S, 0), (N, 1), (U, 2), (P, 3)]),
    ([B, B, D, D], [0, 0, 2, 0], View(True, True), [(U, 0), (D, 3)]),
    ([N, N], [0, 0], View(True, True), [(N, 0), (N, 1)]),
    ([N, N], [2, 2], View(True, True), [(N, 0), (N, 1)]),
    ([U, U], [1, 0], View(True, True), [(U, 0), (U, 1)]),
]


@pytest.mark.parametrize(("opcodes", "flags", "view", "seen"), SEEN)
@BODIES
@pytest.mark.parametrize("short", [False, True])
def test_a_view_shows_pairs_and_retention_deletes_as_it_is_told(
    opcodes: list[int], flags: list[int], view: View, seen: list[tuple[int, int]], arrow_body: bool, short: bool
) -> None:
    rows = [(k,) for k in range(len(opcodes))]
    marks: list[int | bytes] = [
        values[0] if short and len(set(values)) == 1 else bytes(values) for values in (opcodes, flags)
    ]
    it = block(KEY, rows, *marks, view=view, arrow_body=arrow_body)
    assert [(e.opcode, e.values["k"]) for e in it.events()] == seen
    assert [e.flags for e in it.events()] == [flags[k] for _, k in seen]
    assert it.rows() == [(k,) for _, k in seen]
    assert it.changes() == [(o, (k,)) for o, k in seen]
    assert it.mappings() == [{"k": k} for _, k in seen]
    assert len(it) == len(opcodes)  # what it was sent with
    table = it.table()
    assert table["k"].to_pylist() == [k for _, k in seen]
    if "_opcode" in table.column_names:
        assert table["_opcode"].to_pylist() == [o for o, _ in seen]
    else:
        assert all(o == N for o, _ in seen)


def test_a_view_that_changes_nothing_is_false() -> None:
    assert [bool(v) for v in (PLAIN, View(True), View(False, True), View(True, True))] == [False, True, True, True]


@BODIES
def test_a_table_has_one_column_a_field_and_marks_only_where_needed(arrow_body: bool) -> None:
    rows = [(1, "a", Decimal("12.5"), -1, 86_400), (2, None, None, None, None)]
    table = block(TRADE, rows, arrow_body=arrow_body).table()
    assert isinstance(table, pa.Table)
    assert table.column_names == list(TRADE.names)
    assert table.to_pylist() == [
        {"id": 1, "symbol": "a", "price": "12.5", "at": EPOCH - timedelta(microseconds=1), "day": EPOCH + timedelta(1)},
        {"id": 2, "symbol": None, "price": None, "at": None, "day": None},
    ]
    marked = block(TRADE, rows, bytes([N, D]), b"\0\2", arrow_body=arrow_body).table()
    assert marked.column_names == ["_opcode", "_flags", *TRADE.names]
    assert marked.select(["_opcode", "_flags"]).to_pylist() == [
        {"_opcode": 1, "_flags": 0},
        {"_opcode": 3, "_flags": 2},
    ]


ONE_ROW = packb([1, 0, [[5]]])
ARROW_ROW = arrow.encode_rows(KEY, [(5,)], 1, 0)[0]


def arrow_block(opcode: int) -> Block:
    """One row with any opcode."""
    return forged(KEY, arrow.encode(KEY, arrow.table(KEY, [(5,)], opcode))[0], 1, kind=ARROW, flags=MARKED)


BAD: list[tuple[str, Block, list[Callable[[Block], Any]]]] = [
    ("another schema", forged(KEY, ONE_ROW, 1, fingerprint=TRADE.fingerprint), READERS),
    ("another schema, arrow", forged(KEY, ARROW_ROW, 1, kind=ARROW, fingerprint=TRADE.fingerprint), READERS),
    ("no body", forged(KEY, b"", 0, kind=NO_BODY), READERS),
    ("a map for a body", forged(KEY, ONE_ROW, 1, kind=MAP), READERS),
    ("a kind of body that does not exist", forged(KEY, ONE_ROW, 1, kind=77), READERS),
    ("garbage", forged(KEY, b"garbage", 1), READERS),
    ("garbage for arrow", forged(KEY, b"garbage", 1, kind=ARROW), READERS),
    ("nothing for arrow", forged(KEY, b"", 0, kind=ARROW), READERS),
    ("the end of an arrow stream", forged(KEY, b"\xff\xff\xff\xff\0\0\0\0", 1, kind=ARROW), READERS),
    ("rows for arrow", forged(KEY, ONE_ROW, 1, kind=ARROW), READERS),
    ("arrow for rows", forged(KEY, ARROW_ROW, 1), READERS),
    ("another count", forged(KEY, ONE_ROW, 2), READERS),
    ("another count, arrow", forged(KEY, ARROW_ROW, 2, kind=ARROW), READERS),
    ("unmarked and yet marked", forged(KEY, arrow.encode_rows(KEY, [(5,)], 2, 0)[0], 2, kind=ARROW), READERS),
    ("opcode 0", forged(KEY, packb([0, 0, [[5]]]), 1), READERS),
    ("opcode 7", forged(KEY, packb([b"\1\7", 0, [[5], [5]]]), 2), READERS),
    ("opcode 300", forged(KEY, packb([300, 0, [[5]]]), 1), READERS),
    ("opcode 300 in a view", forged(KEY, packb([300, 0, [[5]]]), 1, view=View(True)), READERS),
    ("opcode -1 in a view", forged(KEY, packb([-1, 0, [[5]]]), 1, view=View(True)), READERS),
    ("flags -1 in a view", forged(KEY, packb([2, -1, [[5]]]), 1, view=View(True)), READERS),
    ("flags 300", forged(KEY, packb([1, 300, [[5]]]), 1), READERS),
    ("opcode 2**64 - 1", forged(KEY, packb([2**64 - 1, 0, [[5]]]), 1), READERS),
    ("opcode 7 in arrow", arrow_block(7), READERS),
    ("half an update block", forged(KEY, packb([6, 0, [[5]]]), 1), READERS),
    ("half an update block in arrow", arrow_block(6), READERS),
    ("no rows at all", forged(Schema("m*:money"), packb([1, 0, []]), 0, kind=77), READERS),
    ("money that is none", forged(Schema("m*:money"), packb([1, 0, [["x"]]]), 1), READERS),
    ("money that is not finite", forged(Schema("m*:money"), packb([1, 0, [["Infinity"]]]), 1), READERS),
    ("text for an integer", forged(KEY, packb([1, 0, [["x"]]]), 1), READERS),
    ("an array for an integer", forged(KEY, packb([1, 0, [[[1]]]]), 1), READERS),
    ("a number too great for int64", forged(KEY, packb([1, 0, [[1 << 63]]]), 1), READERS),
    ("text for a stamp", forged(Schema("u*:stamp"), packb([1, 0, [["x"]]]), 1), READERS),
    ("an array for a stamp", forged(Schema("u*:stamp"), packb([1, 0, [[[]]]]), 1), READERS),
    ("bytes for a string", forged(Schema("s*:string"), packb([1, 0, [[b"\xff"]]]), 1), READERS),
]  # fmt: skip
OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("stamp", 1 << 62), ("stamp", -(1 << 62)), ("stamp", 253_402_300_800_000_000), ("stamp", -62_135_596_800_000_001),
    ("stamp", (1 << 64) - 1), ("stamp", float("nan")), ("date", 253_402_300_800), ("date", -62_135_596_801),
    ("date", (1 << 63) - 1), ("date", -(1 << 63)), ("date", float("inf")), ("date", 1e300),
]  # fmt: skip
for unit, value in OUT_OF_RANGE:
    it = forged(Schema(f"t*:{unit}"), packb([1, 0, [[value]]]), 1)
    BAD.append((f"{value!r} for a {unit}", it, [Block.mappings, Block.events]))


@pytest.mark.parametrize(
    ("it", "read"),
    [pytest.param(it, read, id=f"{name}: {read.__name__}") for name, it, reads in BAD for read in reads],
)
def test_a_body_that_cannot_be_read_is_told_with_id_and_position(it: Block, read: Callable[[Block], Any]) -> None:
    with pytest.raises(BadBody) as e:
        read(it)
    assert (e.value.id, e.value.position) == (12, "p5")
    assert str(e.value).startswith("block 12 at position p5 arrived whole, but its body cannot be read: ")


@pytest.mark.parametrize("schema", ["m*:money", "k*:int64,u:stamp"])
def test_a_block_without_events_is_nothing_or_a_bad_body(schema: str) -> None:
    it = forged(Schema(schema), packb([1, 0, []]), 0)
    for read in READERS:
        try:
            assert len(read(it)) == 0
        except BadBody:
            continue


def test_a_moment_that_python_cannot_show_is_still_readable_as_rows() -> None:
    it = forged(Schema("t*:stamp"), packb([1, 0, [[1 << 62]]]), 1)
    assert it.rows() == [(1 << 62,)]
    for seconds in (253_402_300_800, -62_135_596_801, 1 << 70):
        with pytest.raises(OverflowError):
            moment(seconds)


def test_a_block_is_read_again_after_it_was_pickled() -> None:
    it = pickle.loads(pickle.dumps(block(TRADE, [(1, "a", "1", 0, 0)], view=View(True))))
    assert it.rows() == [(1, "a", Decimal(1), 0, 0)]
    assert it.view == View(True)


def test_a_forged_time_of_sending_is_still_a_time() -> None:
    assert block(TRADE, [(1, "a", "1", 0, 0)], sent_at=(1 << 64) - 1).sent_at.year == 9999
