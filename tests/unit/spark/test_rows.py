from __future__ import annotations

import gc
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from esp_pubsub.errors import BadBody
from esp_pubsub.events import View
from esp_pubsub.schema import FieldType, Schema
from esp_pubsub.spark_bridge import rows as making
from esp_pubsub.spark_bridge.options import EXTRA
from esp_pubsub.spark_bridge.rows import batches, spark_schema, target_schema

from .topic import frame_of

EVERY = Schema(
    "k*:int64,i:int32,d:double,s:string,r:rstring,at:date,t:stamp,m:money,b:blob,"
    "ai:array(i32),al:array(i64),ad:array(dbl)"
)
FULL = (
    -1, 2, 1.5, "ü", "r", 1_700_000_000, 1_700_000_000_000_001, Decimal("-1.25"), b"\x00\xff",
    (1, -2), (1 << 40,), (0.5,),
)  # fmt: skip
NULLS = (2, *[None] * 11)
AT = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
SHOWN = [
    -1, 2, 1.5, "ü", "r", AT, AT.replace(microsecond=1), Decimal("-1.25").quantize(Decimal(10) ** -18), b"\x00\xff",
    [1, -2], [1 << 40], [0.5],
]  # fmt: skip
SMALL = Schema("id*:int64")


def read(frames: Sequence[Any], schema: Schema, *columns: Any, view: View = View()) -> list[pa.RecordBatch]:  # noqa: B008
    found = list(batches(frames, schema, columns, view))
    assert all(batch.schema.equals(target_schema(schema, columns)) for batch in found)
    return found


@pytest.mark.parametrize("kind", ["rows", "arrow"])
def test_every_type_and_null_comes_as_the_table_says(kind: str) -> None:
    [batch] = read([frame_of(EVERY, [FULL, NULLS], kind)], EVERY)
    full, nulls = (list(row.values()) for row in batch.to_pylist())
    assert full == SHOWN
    assert nulls == [2, *[None] * 11]


def test_both_kinds_of_body_become_the_same_batch() -> None:
    frames = [frame_of(EVERY, [FULL, NULLS], kind) for kind in ("rows", "arrow")]
    assert read(frames[:1], EVERY)[0].equals(read(frames[1:], EVERY)[0])


def test_every_type_has_a_name_in_spark() -> None:
    named = spark_schema(EVERY, EXTRA)
    assert {f.type for f in EVERY.fields} == set(FieldType)
    assert named.startswith("`_opcode` smallint, `_flags` smallint, `_id` bigint, `_source` string, `_run` bigint")
    assert "`at` timestamp, `t` timestamp, `m` decimal(38,18)" in named


@pytest.mark.parametrize("kind", ["rows", "arrow"])
def test_columns_of_options_come_first(kind: str) -> None:
    marked = frame_of(SMALL, [(1,), (2,)], kind, id=4, opcode=[4, 3], flags=[0, 2])
    [batch] = read([marked, frame_of(SMALL, [(3,)], kind, id=5)], SMALL, *EXTRA)
    sent = datetime.fromtimestamp(1_700_000_000, UTC).replace(microsecond=1)
    more = ("0000000000000007", 3, sent)
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        (4, 0, 4, *more, 1), (3, 2, 4, *more, 2), (1, 0, 5, *more, 3)
    ]  # fmt: skip


def test_bodies_of_both_kinds_keep_their_order_and_go_into_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "ROWS_OF_TABLES", 10)
    monkeypatch.setattr(making, "ROWS_OF_TUPLES", 3)
    frames = [frame_of(SMALL, [(id,), (id,)], "arrow" if id % 3 == 0 else "rows", id=id) for id in range(1, 14)]
    found = read(frames, SMALL)
    assert [batch.num_rows for batch in found] == [10, 10, 6]
    assert [row["id"] for batch in found for row in batch.to_pylist()] == [id for id in range(1, 14) for _ in "ab"]


def test_a_batch_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "BYTES", 200)
    assert len(read([frame_of(SMALL, [(1,)]) for _ in range(6)], SMALL)) == 2


def test_a_view_applies_and_may_leave_nothing() -> None:
    pair = frame_of(SMALL, [(1,), (2,)], opcode=[6, 6])
    gone = frame_of(SMALL, [(3,)], opcode=[3], flags=[2])
    plain = frame_of(SMALL, [(4,)], "arrow")
    view = View(collapse=True, rmretdel=True)
    [batch] = read([pair, gone, plain], SMALL, "opcode", view=view)
    assert [tuple(row.values()) for row in batch.to_pylist()] == [(2, 1), (1, 4)]
    [empty] = read([gone], SMALL, view=view)
    assert empty.num_rows == 0


@pytest.mark.parametrize("kind", ["rows", "arrow"])
@pytest.mark.parametrize(
    ("field", "value"), [("m:money", Decimal("1e30")), ("m:money", Decimal("1e-19")), ("at:date", 1 << 60)]
)
def test_a_value_that_spark_has_no_place_for_is_named_by_its_block(kind: str, field: str, value: Any) -> None:
    schema = Schema(f"id*:int64,{field}")
    with pytest.raises(BadBody, match=r"block 9 at position 9.*no place in Spark's type"):
        read([frame_of(schema, [(1, value)], kind, id=9)], schema)


def test_a_block_of_another_schema_is_refused() -> None:
    with pytest.raises(BadBody, match="schema is another one"):
        read([frame_of(Schema("other*:int64"), [(1,)])], SMALL)


def test_python_looks_for_cycles_again_behind_a_body_that_cannot_be_read() -> None:
    with pytest.raises(BadBody):
        read([frame_of(Schema("other*:int64"), [(1,)])], SMALL)
    assert gc.isenabled()


def test_no_frames_are_no_batches() -> None:
    assert read([], SMALL) == []
