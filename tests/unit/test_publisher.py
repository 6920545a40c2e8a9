"""Publisher: ids, deliveries, back-pressure, what inject takes, closing, trouble."""

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import esp_pubsub as esp
from esp_pubsub import notices
from esp_pubsub.bus import Message
from esp_pubsub.testing.faults import Faults
from esp_pubsub.wire.frame import Frame, parse

URL = "dfESP://test:5555/project/query/window"
TOPIC = "test:5555/project/query/window/I"
SCHEMA = esp.Schema("id*:int64,symbol:string,price:double")
ROW = (1, "IBM", 101.5)


class Bench:
    """A client whose bus can be made to fail, and what it was told."""

    def __init__(self, client: esp.Client) -> None:
        self.client = client
        self.told: list[Any] = []
        self.inner = client.bus
        self.faults = Faults(client.bus)
        client.bus = self.faults

    async def publisher(self, schema: esp.Schema | str = SCHEMA, url: str = URL, **options: Any) -> esp.Publisher:
        options = {"ack_timeout": 5.0, "close_timeout": 5.0} | options
        return await self.client.publisher(
            url, schema, options=esp.PublisherOptions(**options), on_notice=self.told.append
        )

    async def frames(self, topic: str = TOPIC) -> list[Frame]:
        """What stands on the bus now."""
        feed = await self.inner.feed(topic, "earliest", None)
        try:
            end = (await feed.bounds()).end
            found: list[Frame] = []
            while len(found) < end:
                found += [parse(m.data, m.position) for m in await feed.read(100, 1 << 20) if isinstance(m, Message)]
            return found
        finally:
            await feed.aclose()

    async def blocks(self, count: int) -> list[esp.Block]:
        """The first blocks as a subscriber has them."""
        async with asyncio.timeout(5), self.client.subscriber(URL, side="in", start="earliest") as sub:
            return [await anext(sub) for _ in range(count)]


@pytest.fixture
async def bench(bus_directory: Path) -> AsyncIterator[Bench]:
    client = await esp.init(dir=bus_directory)
    yield Bench(client)
    await client.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def ticks(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def outcome(awaited: Awaitable[Any]) -> Any:
    """What came back, or the error; five seconds and no more."""
    try:
        async with asyncio.timeout(5):
            return await awaited
    except Exception as error:  # noqa: BLE001
        return error


# ids and deliveries


async def test_ids_count_from_one_without_a_hole(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        assert [(await pub.inject([ROW])).id for _ in range(200)] == list(range(1, 201))
        await pub.flush()
        assert [frame.id for frame in await bench.frames()] == list(range(1, 201))


async def test_every_publisher_is_a_source_of_its_own(bench: Bench) -> None:
    async with await bench.publisher() as one, await bench.publisher() as two:
        assert one.source != two.source
        assert (await one.inject([ROW])).id == (await two.inject([ROW])).id == 1
        await one.flush()
        await two.flush()
        assert {frame.source for frame in await bench.frames()} == {one.source, two.source}


async def test_a_delivery_tells_when_the_bus_has_the_block(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        delivery = await pub.inject([ROW])
        assert await delivery == "acked"
        assert await delivery == "acked"  # and again, at once
        assert "id=1" in repr(delivery)
        assert [frame.id for frame in await bench.frames()] == [1]


async def test_a_delivery_that_takes_too_long_is_unknown_and_may_be_awaited_again(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(ack_timeout=0.02) as pub:
        delivery = await pub.inject([ROW])
        for _ in range(2):
            with pytest.raises(esp.DeliveryUnknown, match="await the delivery again") as caught:
                await delivery
            assert caught.value.id == 1
        bench.faults.heal()
        assert await pub.delivered(1, timeout=5) == "acked"
        assert await delivery == "acked"


async def test_a_later_delivery_may_be_awaited_before_an_earlier_one(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher() as pub:
        deliveries = [await pub.inject([ROW]) for _ in range(3)]
        waiting = [asyncio.ensure_future(outcome(deliveries[i])) for i in (2, 0, 1, 2)]
        await ticks()
        bench.faults.heal()
        assert await asyncio.gather(*waiting) == ["acked"] * 4


async def test_a_delivery_that_was_given_up_leaves_nothing_behind(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(ack_timeout=0.001) as pub:
        delivery = await pub.inject([ROW])
        for _ in range(20):
            with pytest.raises(esp.DeliveryUnknown):
                await delivery
        assert len(pub._for_ack) <= 1
        bench.faults.heal()


async def test_an_id_that_was_not_given_yet_cannot_be_awaited(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        with pytest.raises((ValueError, esp.EspError), match="last one given is 0"):
            await pub.delivered(1)


# flush and close


async def test_flush_with_nothing_to_do_returns_at_once(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        await pub.flush(timeout=0)


async def test_flush_waits_for_every_block(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher() as pub:
        for _ in range(5):
            await pub.inject([ROW])
        flushing = asyncio.ensure_future(pub.flush())
        await ticks()
        assert not flushing.done()
        bench.faults.heal()
        await flushing
        assert pub.stats.acked == 5


async def test_flush_names_what_is_late(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        await (await pub.inject([ROW]))
        bench.faults.hang("confirmed")
        for _ in range(3):
            await pub.inject([ROW])
        with pytest.raises(esp.DeliveryUnknown, match="blocks 2 to 4") as caught:
            await pub.flush(timeout=0.02)
        assert (caught.value.id, caught.value.last) == (2, 4)
        bench.faults.heal()


async def test_closing_flushes(bench: Bench) -> None:
    pub = await bench.publisher()
    for _ in range(20):
        await pub.inject([ROW])
    await pub.aclose()
    assert pub.stats.acked == 20
    await pub.aclose()  # twice is harmless
    assert [frame.id for frame in await bench.frames()] == list(range(1, 21))


async def test_closing_names_what_is_not_acknowledged(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0.02)
    await pub.inject([ROW])
    await pub.inject([ROW])
    with pytest.raises(esp.DeliveryUnknown, match="1 to 2") as caught:
        await pub.aclose()
    assert (caught.value.id, caught.value.last) == (1, 2)
    assert pub._task is not None and pub._task.done()


async def test_a_delivery_that_waits_while_its_publisher_closes_hears_of_it(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0.02)
    delivery = await pub.inject([ROW])
    waiting = asyncio.ensure_future(outcome(delivery))
    await ticks()
    with pytest.raises(esp.DeliveryUnknown):
        await pub.aclose()
    assert isinstance(await waiting, esp.Closed)


async def test_a_delivery_awaited_after_the_close_does_not_wait_for_what_cannot_come(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0.02, ack_timeout=1.0)
    delivery = await pub.inject([ROW])
    with pytest.raises(esp.DeliveryUnknown):
        await pub.aclose()
    with pytest.raises(esp.Closed):  # not DeliveryUnknown, which says that it is still being tried
        await delivery
    with pytest.raises(esp.EspError):
        await pub.flush()


async def test_an_error_in_the_body_is_not_hidden_by_what_could_not_be_flushed(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    with pytest.raises(ZeroDivisionError):
        async with await bench.publisher(close_timeout=0.02) as pub:
            await pub.inject([ROW])
            raise ZeroDivisionError
    with pytest.raises(esp.DeliveryUnknown):
        async with await bench.publisher(close_timeout=0.02) as pub:
            await pub.inject([ROW])


async def test_after_the_close_every_call_says_so(bench: Bench) -> None:
    pub = await bench.publisher()
    delivery = await pub.inject([ROW])
    await pub.aclose()
    with pytest.raises(esp.Closed, match="open a new one"):
        await pub.inject([ROW])
    assert await delivery == "acked"
    await pub.flush()  # nothing is left to flush, and that is no error


async def test_a_close_wakes_whoever_waits_for_room(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(buffer_blocks=1, close_timeout=0.02)
    await pub.inject([ROW])
    waiting = [asyncio.ensure_future(outcome(pub.inject([ROW]))) for _ in range(3)]
    await ticks()
    with pytest.raises(esp.DeliveryUnknown):
        await pub.aclose()
    assert [type(found) for found in await asyncio.gather(*waiting)] == [esp.Closed] * 3
    assert pub.stats.given == 1


async def test_who_waits_in_line_when_the_close_begins_gets_no_id(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(buffer_blocks=1)
    await pub.inject([ROW])
    waiting = [asyncio.ensure_future(outcome(pub.inject([ROW]))) for _ in range(3)]
    await ticks()
    closing = asyncio.ensure_future(outcome(pub.aclose()))
    await ticks()
    bench.faults.heal()  # now there is room, and the close goes through
    found = await asyncio.gather(*waiting)
    await closing
    assert pub.stats.given == pub.stats.acked  # an id is a promise
    assert [type(each) for each in found] == [esp.Closed] * 3


async def test_a_close_that_was_cancelled_goes_on_sending_and_may_be_repeated(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(buffer_blocks=1)
    delivery = await pub.inject([ROW])
    waiting = [asyncio.ensure_future(outcome(pub.inject([ROW]))), asyncio.ensure_future(outcome(delivery))]
    await ticks()
    closing = asyncio.ensure_future(pub.aclose())
    await ticks()
    closing.cancel()  # while it flushes
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(5):
        assert type(await waiting[0]) is esp.Closed
        assert not waiting[1].done()
        bench.faults.heal()
        await pub.aclose()
        assert await waiting[1] == "acked"


async def test_the_client_closes_its_publishers(bench: Bench) -> None:
    pub = await bench.publisher()
    await pub.inject([ROW])
    await bench.client.aclose()
    assert pub.stats.acked == 1
    with pytest.raises(esp.Closed):
        await pub.inject([ROW])


# back-pressure


async def test_inject_waits_while_the_buffer_is_full_of_blocks(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=3) as pub:
        for _ in range(3):
            await pub.inject([ROW])
        waiting = asyncio.ensure_future(pub.inject([ROW]))
        await ticks()
        assert not waiting.done()
        assert (pub.stats.given, pub.stats.waiting_blocks) == (3, 3)
        bench.faults.heal()
        assert (await waiting).id == 4
        await pub.flush()
        assert (pub.stats.waiting_blocks, pub.stats.waiting_bytes) == (0, 0)


async def test_inject_waits_while_the_buffer_is_full_of_bytes(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_bytes=10_000) as pub:
        await pub.inject([(1, "x" * 6_000, 0.0)])
        waiting = asyncio.ensure_future(pub.inject([(2, "x" * 6_000, 0.0)]))
        await ticks()
        assert not waiting.done()
        assert pub.stats.waiting_bytes <= 10_000
        bench.faults.heal()
        assert (await waiting).id == 2


async def test_one_block_larger_than_the_buffer_passes_when_it_is_empty(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_bytes=1_000) as pub:
        assert (await pub.inject([(1, "x" * 50_000, 0.0)])).id == 1
        large = asyncio.ensure_future(pub.inject([(2, "x" * 50_000, 0.0)]))
        small = asyncio.ensure_future(pub.inject([ROW]))
        await ticks()
        assert not large.done() and not small.done()
        bench.faults.heal()
        assert ((await large).id, (await small).id) == (2, 3)
        await pub.flush()


async def test_who_came_first_is_served_first(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=1) as pub:
        await pub.inject([ROW])
        ids: list[tuple[str, int]] = []

        async def inject(name: str) -> None:
            ids.append((name, (await pub.inject([ROW])).id))

        waiting = []
        for name in "abcde":
            waiting.append(asyncio.ensure_future(inject(name)))
            await ticks(2)
        bench.faults.heal()
        await asyncio.gather(*waiting)
        assert ids == list(zip("abcde", range(2, 7), strict=True))


async def test_who_comes_back_stands_at_the_end_of_the_line(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=4) as pub:
        for _ in range(4):
            await pub.inject([ROW])
        order: list[str] = []

        async def twice(name: str) -> None:
            for _ in range(2):
                await pub.inject([ROW])
                order.append(name)

        waiting = []
        for name in "ab":
            waiting.append(asyncio.ensure_future(twice(name)))
            await ticks(2)
        bench.faults.heal()  # room for all four at once
        await asyncio.gather(*waiting)
        assert order == ["a", "b", "a", "b"]


async def test_a_cancelled_inject_published_nothing(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=1) as pub:
        await pub.inject([(1, "one", 1.0)])
        cancelled = [asyncio.ensure_future(pub.inject([(2, "two", 2.0)])) for _ in range(2)]
        last = asyncio.ensure_future(pub.inject([(3, "three", 3.0)]))
        await ticks()
        for task in cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        bench.faults.heal()
        assert (await last).id == 2
        await pub.flush()
    assert [block.rows()[0][1] for block in await bench.blocks(2)] == ["one", "three"]


async def test_an_inject_cancelled_as_room_comes_leaves_the_line_to_the_next(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=1) as pub:
        await pub.inject([ROW])
        first, second = (asyncio.ensure_future(outcome(pub.inject([ROW]))) for _ in range(2))
        await ticks()
        acked = pub._sender._acked

        def cancel_too(id: int) -> None:
            acked(id)
            first.cancel()

        pub._sender._acked = cancel_too
        bench.faults.heal()
        found = await second
        assert first.cancelled()
        assert found.id == 2


async def test_other_tasks_get_their_turn_while_one_injects_without_waiting(bench: Bench) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with await bench.publisher() as pub:
        task = asyncio.ensure_future(other())
        for _ in range(1_000):
            await pub.inject([ROW])
        task.cancel()
    assert turns >= 10


# what inject takes, and what it refuses


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
    (pa.table({"id": ["x"], "symbol": ["a"], "price": [1.0]}), {}, 0, ""),
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


@pytest.mark.parametrize("wrong", [{"buffer_blocks": 0}, {"buffer_bytes": 0}, {"body": "json"}], ids=str)
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(esp.ConfigError):
        esp.PublisherOptions(**wrong)


# statistics, notices and trouble


async def test_the_statistics_count_what_was_given_sent_and_acknowledged(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher() as pub:
        assert (pub.stats.given, pub.stats.sent, pub.stats.acked, pub.stats.events, pub.stats.bytes) == (0, 0, 0, 0, 0)
        await pub.inject([ROW, ROW])
        await pub.inject([ROW])
        await until(lambda: pub.stats.sent == 2)
        stats = pub.stats
        assert (stats.given, stats.acked, stats.events, stats.waiting_blocks, stats.troubles) == (2, 0, 3, 2, 0)
        assert stats.bytes == stats.waiting_bytes == sum(len(frame.data) for frame in await bench.frames())
        bench.faults.heal()
        await pub.flush()
        assert (pub.stats.acked, pub.stats.waiting_blocks, pub.stats.waiting_bytes) == (2, 0, 0)


async def test_trouble_is_told_in_the_words_of_sas_and_so_is_its_end(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        await (await pub.inject([ROW]))
        bench.faults.lose_link()
        delivery = await pub.inject([ROW])  # an idle publisher has nothing to lose
        await until(lambda: bool(bench.told))
        failure = bench.told[0]
        assert isinstance(failure, notices.Failure)
        assert (failure.failure, failure.code) == ("pubsubFail_SERVERDISCONNECT", "pubsubCode_WRITEFAILED")
        assert isinstance(failure.error, esp.BusUnavailable)
        bench.faults.restore()
        assert await delivery == "acked"
        assert isinstance(bench.told[-1], notices.Reconnected)
        assert bench.told[-1].topic == TOPIC
        assert pub.stats.troubles == len(bench.told) - 1


async def test_the_end_of_trouble_is_told_if_the_bus_was_away_from_the_start(bench: Bench) -> None:
    bench.faults.hang("pipe")
    async with await bench.publisher() as pub:
        delivery = await pub.inject([ROW])
        await ticks()
        bench.faults.lose_link()
        bench.faults.heal()
        await until(lambda: bool(bench.told))
        bench.faults.restore()
        assert await delivery == "acked"
        assert isinstance(bench.told[-1], notices.Reconnected)


async def test_the_order_is_kept_over_many_troubles(bench: Bench) -> None:
    stop = asyncio.Event()

    async def trouble(pub: esp.Publisher) -> None:
        for number in range(12):
            acked, troubles = pub.stats.acked, pub.stats.troubles
            if number % 3:
                bench.faults.refuse(number)
            else:
                bench.faults.lose_link()
                await ticks(number)
                bench.faults.restore()
            await until(lambda: pub.stats.troubles > troubles and pub.stats.acked > acked and told_over(pub))  # noqa: B023
        stop.set()

    def told_over(pub: esp.Publisher) -> bool:
        return sum(isinstance(told, notices.Reconnected) for told in bench.told) == pub.stats.troubles

    async with await bench.publisher(buffer_blocks=50) as pub:
        await (await pub.inject([(1, "x", 0.0)]))
        troubling = asyncio.ensure_future(outcome(trouble(pub)))
        while not stop.is_set() and not troubling.done():
            await pub.inject([(pub.stats.given + 1, "x", 0.0)])
        assert await troubling is None
        await pub.flush()
        given = pub.stats.given
    blocks = await bench.blocks(given)
    assert [block.id for block in blocks] == list(range(1, given + 1))
    assert [block.rows()[0][0] for block in blocks] == list(range(1, given + 1))
    assert sum(isinstance(told, notices.Failure) for told in bench.told) == pub.stats.troubles
    assert isinstance(bench.told[-1], notices.Reconnected)


async def test_a_bus_that_refuses_for_good_ends_it_and_everybody_hears_of_it(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(buffer_blocks=2)
    delivery = await pub.inject([ROW])
    bench.faults.refuse(1, error=esp.BusRefused("no such queue"))
    await pub.inject([ROW])
    waiting = [asyncio.ensure_future(outcome(awaited)) for awaited in (delivery, pub.inject([ROW]), pub.flush())]
    found = await asyncio.gather(*waiting)
    assert [type(each) for each in found] == [esp.BusRefused] * 3
    with pytest.raises(esp.BusRefused, match="no such queue"):
        await pub.inject([ROW])
    [failure] = [told for told in bench.told if isinstance(told, notices.Failure)]
    assert (failure.failure, failure.code) == ("pubsubFail_APIFAIL", "pubsubCode_WRITEEVENTS")
    with pytest.raises(esp.EspError):
        await pub.aclose()


async def test_what_a_refusing_bus_did_not_take_is_named_at_the_close(bench: Bench) -> None:
    bench.faults.refuse(1, error=esp.BusRefused("no such queue"))
    with pytest.raises(esp.EspError):  # not in silence: block 1 is on no bus
        async with await bench.publisher() as pub:
            await pub.inject([ROW])
            await until(lambda: bool(bench.told))


@pytest.mark.parametrize("when", range(8))
async def test_a_close_at_the_moment_of_trouble_ends(bench: Bench, when: int) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher()
    await pub.inject([ROW])
    await until(lambda: pub.stats.sent == 1)

    async def flush(_: float | None = None) -> None:
        bench.faults.lose_link()
        await ticks(when)

    pub.flush = flush  # type: ignore[method-assign]
    assert pub._task is not None
    closing = asyncio.ensure_future(pub.aclose())
    done, _ = await asyncio.wait([closing], timeout=2)
    if not done:
        pub._task.cancel()
    await asyncio.wait([closing])
    assert done, "the close waits for ever"


# the wrong place


async def test_another_loop_is_told(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0.01)
    delivery = await pub.inject([ROW])

    def elsewhere() -> list[Any]:
        async def all_of_them() -> list[Any]:
            calls: list[Callable[[], Awaitable[Any]]] = [
                lambda: pub.inject([ROW]), pub.flush, lambda: delivery, lambda: pub.delivered(1), pub.aclose,
            ]  # fmt: skip
            found = []
            for call in calls:
                try:
                    async with asyncio.timeout(0.5):
                        found.append(await call())
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                    found.append(error)
            return found

        return asyncio.run(all_of_them())

    found = await asyncio.to_thread(elsewhere)
    bench.faults.heal()
    assert [type(error) for error in found] == [esp.WrongOrder] * 5
    assert all("another event loop" in str(error) for error in found)
    assert await delivery == "acked"
    await pub.aclose()


FORK = """
import asyncio, os, sys, traceback
import esp_pubsub as esp

URL = "dfESP://test:5555/project/query/window"

async def refused(awaited):
    try:
        async with asyncio.timeout(5):
            await awaited
    except esp.WrongOrder as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("no WrongOrder")

async def child(client, pub, sub, delivery):
    await refused(pub.inject([(1,)]))
    await refused(pub.flush())
    await refused(delivery)
    await refused(anext(sub))
    await refused(pub.aclose())
    await refused(client.aclose())
    try:
        client.publisher(URL, "id*:int64")
    except esp.WrongOrder:
        pass
    await refused(open_again())
    async with esp.init(dir=sys.argv[2]) as own, own.publisher(URL, "id*:int64") as mine:
        await (await mine.inject([(2,)]))

async def open_again():
    await esp.init(dir=sys.argv[1])

async def main():
    async with esp.init(dir=sys.argv[1]) as client, client.publisher(URL, "id*:int64") as pub:
        async with client.subscriber(URL, side="in", start="earliest") as sub:
            delivery = await pub.inject([(1,)])
            pid = os.fork()
            if pid == 0:
                try:
                    asyncio.run(child(client, pub, sub, delivery))
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert status[1] == 0, status
            async with asyncio.timeout(5):
                print((await anext(sub)).rows())
            await (await pub.inject([(3,)]))
            print((await anext(sub)).rows())

asyncio.run(main())
"""


def test_a_forked_child_is_told_and_harms_nobody(bus_directory: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, bus_directory / "parent", bus_directory / "child"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    assert (done.stdout, done.returncode) == ("[(1,)]\n[(3,)]\n", 0), done.stderr


async def test_a_publisher_that_was_not_awaited_says_so(bench: Bench) -> None:
    opening = bench.client.publisher(URL, SCHEMA)
    pub = await opening
    with pytest.raises(esp.WrongOrder, match="opened already"):
        await opening
    await pub.aclose()


async def test_a_publisher_cannot_be_had_from_a_closed_client(bus_directory: Path) -> None:
    client = await esp.init(dir=bus_directory)
    opening = client.publisher(URL, SCHEMA)
    await client.aclose()
    with pytest.raises(esp.Closed):
        client.publisher(URL, SCHEMA)
    with pytest.raises(esp.Closed):
        await opening
