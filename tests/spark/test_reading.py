from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import esp_pubsub as esp

from .conftest import Window


def test_a_window_is_read_as_typed_columns(window: Window) -> None:
    window.publish(1, 2, rows=2)
    frame = window.read()
    assert frame.dtypes == [("id", "bigint"), ("name", "string")]
    assert [tuple(row) for row in frame.collect()] == [(100, "n1"), (101, "n1"), (200, "n2"), (201, "n2")]
    assert [row.id for row in window.read(start="1").collect()] == [200, 201]
    assert [row.id for row in window.read(end="1").collect()] == [100, 101]
    assert window.read(start="latest").collect() == []


def test_available_now_reads_what_is_there_in_batches_of_whole_blocks(window: Window) -> None:
    window.publish(1, 2, 3, 4, 5, rows=3)
    window.finish(window.stream(maxRowsPerTrigger="7"))
    assert [len(rows) for _, rows in window.batches] == [6, 6, 3]
    window.finish(window.stream(maxRowsPerTrigger="7"))
    assert len(window.batches) == 3  # nothing new, no batch


def test_available_now_does_not_read_what_is_published_while_it_runs(window: Window) -> None:
    window.publish(1, 2, 3)

    def publishes(batch: Any, batch_id: int) -> None:
        window.gather(batch, batch_id)
        window.publish(10 + batch_id)

    window.finish(window.stream(maxRowsPerTrigger="1"), publishes)
    assert window.ids == [100, 200, 300]
    window.finish(window.stream())
    assert window.ids == [100, 200, 300, 1000, 1100, 1200]


def test_a_running_query_sees_what_is_published_later(window: Window) -> None:
    query = window.start(window.stream(schema=window.schema))  # nobody has published yet
    window.publish(1, 2)
    window.until(lambda: window.ids == [100, 200], query)
    window.publish(3)
    window.until(lambda: window.ids == [100, 200, 300], query)
    [source] = query.lastProgress["sources"]
    assert source["description"]


def test_every_type_and_every_column_arrives(window: Window) -> None:
    schema = (
        "k*:int64,i:int32,d:double,s:string,r:rstring,at:date,t:stamp,m:money,b:blob,"
        "ai:array(i32),al:array(i64),ad:array(dbl)"
    )
    full = (
        -1, 2, 1.5, "ü", "r", 1_700_000_000, 1_700_000_000_000_001, Decimal("-1.25"), b"\x00\xff",
        (1, -2), (5,), (0.5,),
    )  # fmt: skip
    nulls = (2, *[None] * 11)

    async def published(client: esp.Client) -> None:
        for body in ("rows", "arrow"):
            options = esp.PublisherOptions(body=body)  # type: ignore[arg-type]
            async with client.publisher(window.url, schema, side="out", options=options) as publisher:
                await publisher.inject([full, nulls], opcode=[1, 4], flags=[0, 1])

    window.run(published)
    window.finish(window.stream(columns="opcode flags id source run sent_at"))
    [(_, rows)] = window.batches
    at = datetime(2023, 11, 14, 22, 13, 20)
    shown = (
        -1, 2, 1.5, "ü", "r", at, at.replace(microsecond=1), Decimal("-1.25"), b"\x00\xff", [1, -2], [5], [0.5]
    )  # fmt: skip
    assert [row[6:] for row in rows] == [shown, nulls] * 2
    assert [row[:3] for row in rows] == [(1, 0, 1), (4, 1, 1)] * 2
    assert rows[0][3] == rows[1][3] != rows[2][3] == rows[3][3]
    assert {row[4] for row in rows} == {0}
    assert all(isinstance(row[5], datetime) for row in rows)


def test_several_windows_are_read_by_one_query_and_share_the_limit(window: Window) -> None:
    other = "dfESP://spark:5555/p/q/v"
    window.publish(1, 2, 3, rows=2)
    window.publish(4, 5, 6, rows=2, url=other)
    window.finish(window.stream(url=f"{window.url} {other}", maxRowsPerTrigger="4"))
    assert [len(rows) for _, rows in window.batches] == [4, 4, 4]
    assert sorted(window.ids) == [id * 100 + i for id in range(1, 7) for i in (0, 1)]


def test_doubles_of_a_failover_and_foreign_messages_are_not_seen(window: Window) -> None:
    group = esp.Failover("feed")
    window.publish(1, 2, 3, failover=group)
    window.write(b"foreign", b"")

    async def again(client: esp.Client) -> list[bytes]:
        feed = await client.bus.feed("spark:5555/p/q/w/O", "earliest", None)
        try:
            return [each.data for each in await feed.read(3, 1 << 20)]  # type: ignore[union-attr]
        finally:
            await feed.aclose()

    window.write(*window.run(again)[1:])  # what a member sends that takes over from itself
    elected = esp.PublisherOptions(close_timeout=60.0)  # it sends when the one before is known to be gone
    window.publish(1, 2, 3, 4, failover=group, options=elected)  # another member, with the same input from its start
    window.finish(window.stream(columns="id"))
    assert window.ids == [1, 2, 3, 4]
    assert [row.id for row in window.read().collect()] == [100, 200, 300, 400]


def test_confirm_as_tells_others_how_far_a_query_is(window: Window) -> None:
    window.publish(1, 2, 3)
    window.finish(window.stream(confirmAs="job", maxRowsPerTrigger="1"))

    async def told(client: esp.Client) -> bytes | None:
        return await client.bus.retained("spark:5555/p/q/w/O", "spark/job")

    assert b"position" in (window.run(told) or b"")
