"""Publisher: what inject takes, and what it refuses."""

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgpack
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import esp_pubsub as esp
from tests.unit.workbench import ROW, SYMBOLS, Bench
from tests.unit.workbench import TRADES as SCHEMA
from tests.unit.workbench import block as written


@dataclasses.dataclass
class Trade:
    symbol: str
    id: int
    price: float | None = None
    note: str = "not in the schema"


ROWS = [(1, "IBM", 101.5), (2, "SAS", None)]


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        tuple(ROWS),
        [list(row) for row in ROWS],
        (row for row in ROWS),
        [{"id": 1, "symbol": "IBM", "price": 101.5}, {"symbol": "SAS", "id": 2}],
        [Trade("IBM", 1, 101.5), Trade("SAS", 2)],
        [esp.Event({"id": 1, "symbol": "IBM", "price": 101.5}), esp.Event({"id": 2, "symbol": "SAS", "price": None})],
        pa.table({"symbol": ["IBM", "SAS"], "id": [1, 2], "price": [101.5, None]}),
        pa.record_batch({"id": [1, 2], "symbol": ["IBM", "SAS"], "price": [101.5, None]}),
        pd.DataFrame({"id": [1, 2], "symbol": ["IBM", "SAS"], "price": [101.5, None]}),
        [(np.int64(1), "IBM", np.float64(101.5)), (np.int32(2), "SAS", None)],
    ],
    ids=lambda given: type(given).__name__ + (f" of {type(given[0]).__name__}" if isinstance(given, list) else ""),
)
@pytest.mark.parametrize("body", ["rows", "arrow"])
async def test_rows_may_come_in_many_shapes(bench: Bench, given: Any, body: str) -> None:
    if not isinstance(given, Iterator) or body == "rows":  # an iterator is used up by the first of the two
        async with await bench.publisher(body=body) as pub:
            await (await pub.inject(given))
        [block] = await bench.blocks(1)
        assert block.rows() == ROWS
        assert {event.opcode for event in block.events()} == {esp.Opcode.INSERT}
        assert block.frame.body_kind == (2 if body == "arrow" else 1)


async def test_a_table_in_chunks_is_one_block(bench: Bench) -> None:
    table = pa.concat_tables(pa.table({"id": [i], "symbol": [str(i)], "price": [float(i)]}) for i in range(3))
    async with await bench.publisher() as rows, await bench.publisher(body="arrow") as arrow:
        await (await rows.inject(table))
        await (await arrow.inject(table))
    for block in await bench.blocks(2):
        assert block.rows() == [(i, str(i), float(i)) for i in range(3)]


@pytest.mark.parametrize("body", ["rows", "arrow"])
async def test_events_bring_their_own_opcodes_and_flags(bench: Bench, body: str) -> None:
    values = {"id": 1, "symbol": "IBM", "price": 1.0}
    events = [
        esp.Event(values),
        esp.Event(values, esp.Opcode.UPDATEBLOCK),
        esp.Event(values, esp.Opcode.UPDATEBLOCK),
        esp.Event(values, esp.Opcode.UPDATE, esp.EventFlag.PARTIAL),
        esp.Event(values, esp.Opcode.DELETE, esp.EventFlag.RETENTION),
        esp.Event(values, esp.Opcode.UPSERT),
        esp.Event(values, esp.Opcode.SAFEDELETE),
    ]
    async with await bench.publisher(body=body) as pub:
        await (await pub.inject(events))
    assert (await bench.blocks(1))[0].events() == events


@pytest.mark.parametrize("body", ["rows", "arrow"])
async def test_opcodes_and_flags_hold_for_all_events_or_are_given_for_each(bench: Bench, body: str) -> None:
    async with await bench.publisher(body=body) as pub:
        await pub.inject([ROW, ROW], opcode=esp.Opcode.DELETE, flags=esp.EventFlag.RETENTION)
        await pub.inject([ROW, ROW], opcode=[1, esp.Opcode.UPSERT], flags=(0, 1))
        await pub.inject([ROW, ROW], opcode=esp.Opcode.UPDATEBLOCK)
        await pub.inject(pd.DataFrame([ROW], columns=SCHEMA.names), opcode=2, flags=1)
        await pub.flush()
    found = [[(int(e.opcode), int(e.flags)) for e in block.events()] for block in await bench.blocks(4)]
    assert found == [[(3, 2), (3, 2)], [(1, 0), (4, 1)], [(6, 0), (6, 0)], [(2, 1)]]


async def test_moments_money_blobs_and_arrays_arrive_as_they_were_given(bench: Bench) -> None:
    from decimal import Decimal

    now = datetime(2026, 11, 18, 12, 30, 15, 123456, UTC)
    schema = "id*:int32,on:date,at:stamp,cost:money,raw:blob,a:array(i32),b:array(dbl)"
    row = {"id": 1, "on": now.replace(microsecond=0), "at": now, "cost": Decimal("12.50"), "raw": b"\0\xff",
           "a": [1, 2], "b": [0.5]}  # fmt: skip
    async with await bench.publisher(schema) as pub:
        await (await pub.inject([row]))
    [found] = (await bench.blocks(1))[0].mappings()
    assert found == row | {"a": (1, 2), "b": (0.5,)}


@pytest.mark.parametrize("body", ["rows", "arrow"])
async def test_a_block_that_was_received_goes_on_as_it_is(bench: Bench, body: str) -> None:
    out = "dfESP://test:5555/project/query/other"
    async with await bench.publisher(body=body) as first:
        await (await first.inject([ROW, ROW], opcode=[1, 3], transactional=True))
    [block] = await bench.blocks(1)
    async with await bench.publisher(url=out) as second:
        delivery = await second.inject(block)
        assert await delivery == "acked"
        assert delivery.id == 1
    [frame] = await bench.frames("test:5555/project/query/other/I")
    assert (frame.body, frame.count, frame.flags, frame.body_kind) == (
        block.frame.body, block.frame.count, block.frame.flags, block.frame.body_kind,
    )  # fmt: skip
    assert frame.source != block.source


async def test_a_block_of_another_schema_is_refused(bench: Bench) -> None:
    async with await bench.publisher() as first:
        await (await first.inject([ROW]))
    [block] = await bench.blocks(1)
    async with await bench.publisher("id*:int32", "dfESP://test:5555/project/query/other") as second:
        with pytest.raises(esp.ValueRefused, match="id\\*:int32"):
            await second.inject(block)


async def test_transactional_blocks_arrive_as_such(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        await pub.inject([ROW], transactional=True)
        await pub.inject([ROW])
        await pub.flush()
    assert [block.transactional for block in await bench.blocks(2)] == [True, False]


REFUSED: list[tuple[Any, dict[str, Any], int, str]] = [
    ([(1, "a", 1.0), (2, "b", "c")], {}, 1, "price"),
    ([(1 << 63, "a", 1.0)], {}, 0, "id"),
    ([("1", "a", 1.0)], {}, 0, "id"),
    ([(1.0, "a", 1.0)], {}, 0, "id"),
    ([(1, b"a", 1.0)], {}, 0, "symbol"),
    ([(1, "\ud800", 1.0)], {}, 0, "symbol"),
    ([(1, "a", True)], {}, 0, "price"),
    ([(1, "a")], {}, 0, ""),
    ([(1, "a", 1.0), (2, "b", 1.0, 4)], {}, 1, ""),
    ([(1, "a", 1.0), None], {}, 1, ""),
    ([(1, "a", 1.0)] * 9 + [(1, 2, 3)], {}, 9, "symbol"),
    ([{"id": 1, "sybmol": "a"}], {}, 0, "sybmol"),
    ([{"id": 1}, (2, "b", 1.0)], {}, 1, ""),
    ([(1, "a", 1.0), {"id": 1}], {}, 1, ""),
    ([Trade("a", 1), 7], {}, 1, "id"),
    ([esp.Event({"id": 1}), (1, "a", 1.0)], {}, 0, ""),
    (ROW, {}, 0, ""),
    ({"id": 1}, {}, 0, ""),
    ("a row", {}, 0, ""),
    (7, {}, 0, ""),
    (None, {}, 0, ""),
    ([ROW], {"opcode": 9}, 0, "opcodes"),
    ([ROW], {"opcode": 0}, 0, "opcodes"),
    ([ROW], {"opcode": "insert"}, 0, "opcodes"),
    ([ROW], {"opcode": None}, 0, "opcodes"),
    ([ROW], {"opcode": 1.0}, 0, "opcodes"),
    ([ROW], {"opcode": [1, 1]}, 0, "opcodes"),
    ([ROW, ROW], {"opcode": [1, 7]}, 1, "opcodes"),
    ([ROW, ROW, ROW], {"opcode": [6, 6, 6]}, 2, "opcodes"),
    ([ROW, ROW, ROW], {"opcode": [6, 1, 6]}, 0, "opcodes"),
    ([ROW], {"flags": 300}, 0, "flags"),
    ([ROW], {"flags": -1}, 0, "flags"),
    ([ROW], {"flags": [0, 0]}, 0, "flags"),
    ([ROW], {"flags": "x"}, 0, "flags"),
    (pa.table({"id": [1], "symbol": ["a"]}), {}, 0, ""),
    (pa.table({"id": ["x"], "symbol": ["a"], "price": [1.0]}), {}, 0, "id"),
    (pa.table({"_opcode": [9], "_flags": [0], "id": [1], "symbol": ["a"], "price": [1.0]}), {}, 0, "opcodes"),
    (pa.table({"_opcode": [6], "_flags": [0], "id": [1], "symbol": ["a"], "price": [1.0]}), {}, 0, "opcodes"),
    (pa.table({"id": [1], "symbol": ["a"], "price": [1.0], "more": [1]}), {}, 0, ""),
]


@pytest.mark.parametrize(("given", "how", "row", "field"), REFUSED, ids=str)
@pytest.mark.parametrize("body", ["rows", "arrow"])
async def test_what_does_not_fit_is_refused_by_row_and_field_before_an_id_is_given(
    bench: Bench, given: Any, how: dict[str, Any], row: int, field: str, body: str
) -> None:
    async with await bench.publisher(body=body) as pub:
        with pytest.raises(esp.ValueRefused) as caught:
            await pub.inject(given, **how)
        assert (caught.value.row, caught.value.field) == (row, field)
        assert pub.stats.given == 0
        assert (await pub.inject([ROW])).id == 1


@pytest.mark.parametrize("given", [["ab", "cd"], [("a", "b"), {"x": "c", "y": "d"}], [("a", "b"), "cd"]], ids=str)
async def test_the_letters_of_a_string_and_the_keys_of_a_mapping_are_no_row(bench: Bench, given: Any) -> None:
    async with await bench.publisher("x*:string,y:string") as pub:
        with pytest.raises(esp.ValueRefused):
            await pub.inject(given)


@pytest.mark.parametrize("given", [[], pa.table({"id": pa.array([], pa.int64()), "symbol": [], "price": []})], ids=str)
@pytest.mark.parametrize("body", ["rows", "arrow"])
async def test_a_block_without_events_is_refused(bench: Bench, given: Any, body: str) -> None:
    async with await bench.publisher(body=body) as pub:
        with pytest.raises((esp.ValueRefused, esp.TooLarge)):
            await pub.inject(given)
        assert pub.stats.given == 0


@pytest.mark.parametrize("body", ["rows", "arrow"])
async def test_a_block_over_a_limit_is_refused_before_an_id_is_given(bench: Bench, body: str) -> None:
    async with await bench.publisher(body=body, limits=esp.Limits(frame_bytes=2_000, events=10)) as pub:
        for rows in ([ROW] * 11, [(1, "x" * 2_001, 0.0)]):
            with pytest.raises(esp.TooLarge):
                await pub.inject(rows)
        assert (await pub.inject([ROW] * 10)).id == 1


async def test_a_received_block_over_a_limit_is_refused_too(bench: Bench) -> None:
    async with await bench.publisher() as first:
        await (await first.inject([ROW] * 11))
    [block] = await bench.blocks(1)
    url = "dfESP://test:5555/project/query/other"
    async with await bench.publisher(url=url, limits=esp.Limits(frame_bytes=2_000, events=10)) as second:
        with pytest.raises(esp.TooLarge):
            await second.inject(block)


async def test_a_block_that_the_bus_cannot_take_is_refused_before_an_id_is_given(bench: Bench) -> None:
    bench.faults.capabilities = dataclasses.replace(bench.inner.capabilities, max_message_bytes=1_000)
    async with await bench.publisher() as pub:
        with pytest.raises(esp.TooLarge):
            await pub.inject([(1, "x" * 2_000, 0.0)])
        assert pub.stats.given == 0
        assert await (await pub.inject([ROW])) == "acked"


@pytest.mark.parametrize(
    "wrong",
    [
        {"buffer_blocks": 0}, {"buffer_blocks": "x"}, {"buffer_bytes": 0}, {"body": "json"}, {"stall": 0},
        {"stall": "5s"}, {"ack_timeout": -1}, {"close_timeout": None},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(esp.ConfigError):
        esp.PublisherOptions(**wrong)


@pytest.mark.parametrize("wrong", [{"last": -1}, {"last": 1 << 64}, {"chain": 1 << 32}, {"last": "7"}], ids=str)
def test_a_sequence_cannot_go_on_from_where_none_can_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(esp.ConfigError):
        esp.Resume("name", **wrong)


MALFORMED = [
    b"", b"\xc1", msgpack.packb([1, 0, [[1]]]), msgpack.packb([1, 0, [[1, 2]]]), msgpack.packb([255, 0, [[1, "x"]]]),
    msgpack.packb([6, 0, [[1, "x"]]]), msgpack.packb([b"\x09", 0, [[1, "x"]]]), msgpack.packb([1, 0, [["a", "x"]]]),
    msgpack.packb([1, 0, [[1, "x"], [2, "y"]]]), b"\x93\x01\x00\x91\x92\x01\xa1\xff", b"\xdd\xff\xff\xff\xff",
]  # fmt: skip


@pytest.mark.parametrize("body", MALFORMED, ids=repr)
async def test_a_block_that_was_received_and_cannot_be_read_is_not_passed_on(bench: Bench, body: bytes) -> None:
    async with await bench.publisher(SYMBOLS) as pub:
        await bench.raw(written(1, body=body))
        [bad] = await bench.blocks(1)
        with pytest.raises(esp.ValueRefused, match="cannot be read, so it is not passed on"):
            await pub.inject(bad)
        assert (await pub.inject([(1, "x")])).id == 1, "nothing has happened"


class Memory(dict[str, object]):
    """Memory ends while a row is looked at."""

    def get(self, key: object, default: object = None) -> Any:
        raise MemoryError


async def test_a_publisher_that_finds_no_memory_is_whole_and_has_given_no_id(bench: Bench) -> None:
    async with await bench.publisher(SYMBOLS) as pub:
        deliveries = [await pub.inject([(1, "x")])]
        with pytest.raises(MemoryError):
            await pub.inject([Memory(id=2)])
        deliveries += [await pub.inject([(2, "y")])]
        assert [await delivery for delivery in deliveries] == ["acked", "acked"]
    assert [each.id for each in await bench.blocks(2)] == [1, 2]
