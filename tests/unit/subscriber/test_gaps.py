"""Subscriber: what is not ours on the topic, what went before it was read, and whose schema counts."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub import notices
from esp_pubsub.bus import Break, Message
from esp_pubsub.wire.frame import BEAT, CLAIM, parse
from esp_pubsub.wire.rows import codec
from tests.unit.workbench import SYMBOLS as SCHEMA
from tests.unit.workbench import TOPIC, URL, Bench, block, numbers, outcome, ticks, until

# what is not ours on the topic


async def test_messages_that_are_none_of_ours_are_told_and_passed(bench: Bench) -> None:
    good = block(1)
    bad = {
        b"": "no frame",
        b"hello": "no frame",
        b"\xe5PB\x09" + good[4:]: "version 09",
        good[:40]: "truncated",
        good[:-1]: "chain",
        good + b"!": "chain",
        good[:82] + bytes([good[82] ^ 1]) + good[83:]: "chain",
        good[:8] + b"\x05" + good[9:]: "settled differ",
        block(1, count=1 << 30): "events",
        block(1, count=1_000): "events",
        block(1, kind=CLAIM): "kind 3",
        block(1, kind=99): "kind 99",
    }
    await bench.raw(*bad, good)
    async with await bench.subscriber(schema=SCHEMA, start="earliest") as sub:
        assert await numbers(sub, 1) == [1]
    told = bench.of(notices.BadMessage)
    assert [each.position for each in told] == list(range(len(bad)))
    for each, expected in zip(told, bad.values(), strict=True):
        assert expected in each.reason
    assert (sub.stats.bad, sub.stats.missed, sub.stats.blocks) == (len(bad), 0, 1)


async def test_an_oversized_message_is_told_and_passed(bench: Bench) -> None:
    large = block(1, body=bytes(5_000))
    await bench.raw(large, block(1))
    options = esp.SubscriberOptions(limits=esp.Limits(frame_bytes=1_000))
    async with await bench.subscriber(schema=SCHEMA, start="earliest", options=options) as sub:
        assert await numbers(sub, 1) == [1]
    [told] = bench.of(notices.BadMessage)
    assert "limit is 1000" in told.reason


async def test_garbage_on_a_topic_without_a_schema_does_not_end_a_subscription(bench: Bench) -> None:
    async with await bench.subscriber(start="earliest") as sub:
        waiting = asyncio.ensure_future(outcome(numbers(sub, 1)))
        await ticks()
        await bench.raw(b"garbage")
        await until(lambda: sub.stats.bad == 1 or waiting.done())
        await bench.publish(1)
        assert await waiting == [1]


async def test_a_beat_is_counted_and_not_delivered(bench: Bench) -> None:
    await bench.raw(block(1), block(0, kind=BEAT, settled=1, body=b"", count=0))
    await bench.publish(5)
    async with await bench.subscriber(schema=SCHEMA, start="earliest") as sub:
        assert await numbers(sub, 2) == [1, 5]
        assert sub.stats.beats == 1


async def test_a_body_that_cannot_be_read_is_told_where_it_is_read(bench: Bench) -> None:
    bodies = [b"", b"\xc1", b"\x93\x01\x00\x91\x91\x01", b"\xff" * 30, codec(SCHEMA).encode([(1, "x"), (2, "y")])]
    await bench.raw(*(block(1, source=n, body=body, count=min(1, len(body))) for n, body in enumerate(bodies)))
    await bench.raw(block(1, source=99))
    async with await bench.subscriber(schema=SCHEMA, start="earliest") as sub, asyncio.timeout(60):
        for position in range(len(bodies)):
            got = await anext(sub)
            for read in (got.rows, got.mappings, got.events, got.table):
                with pytest.raises(esp.BadBody) as caught:
                    read()
                assert (caught.value.id, caught.value.position) == (1, position)
        assert (await anext(sub)).rows() == [(1, "x")]


async def test_a_block_of_another_schema_raises_where_it_is_read(bench: Bench) -> None:
    await bench.publish(1)
    await bench.raw(block(1, schema=esp.Schema("id*:int32")))
    async with await bench.subscriber(start="earliest") as sub, asyncio.timeout(60):
        assert (await anext(sub)).rows() == [(1, "1")]
        other = await anext(sub)
        with pytest.raises(esp.BadBody, match="schema"):
            other.rows()


async def test_another_input_under_the_same_name_is_told_and_not_delivered(bench: Bench) -> None:
    await bench.raw(block(1), block(2, link=1234))
    await bench.publish(5)
    async with await bench.subscriber(schema=SCHEMA, start="earliest") as sub:
        assert await numbers(sub, 2) == [1, 5]
        assert sub.stats.diverged == 1
    [told] = bench.of(notices.InputDiffers)
    assert (told.source, told.id, told.theirs) == (7, 2, 1234)


async def test_an_older_run_is_stale_and_a_newer_one_is_told(bench: Bench) -> None:
    await bench.raw(block(1, run=2), block(1, run=1), block(1, run=3))
    async with await bench.subscriber(schema=SCHEMA, start="earliest") as sub, asyncio.timeout(60):
        assert [(await anext(sub)).run for _ in range(2)] == [2, 3]
        assert sub.stats.stale == 1
    assert bench.of(notices.NewRun) == [notices.NewRun(7, 2, 3)]


async def test_more_sources_than_can_be_remembered_are_told(bench: Bench) -> None:
    await bench.raw(*(block(1, source=number) for number in (1, 2, 3)))
    async with await bench.subscriber(
        schema=SCHEMA, start="earliest", options=esp.SubscriberOptions(max_sources=2)
    ) as sub:
        assert await numbers(sub, 3) == [1, 1, 1]
    assert bench.of(notices.Forgotten) == [notices.Forgotten(1, 0, 1)]


async def test_a_block_that_claims_no_events_can_be_confirmed_like_any_other(bench: Bench) -> None:
    await bench.raw(block(1, source=1, count=0), block(1, source=2), block(1, source=3))
    async with await bench.subscriber(schema=SCHEMA, group="g") as sub:
        async with asyncio.timeout(60):
            first, _, _ = [await anext(sub) for _ in range(3)]
        await sub.confirm(first)
        assert sub.stats.unconfirmed == 2


# gaps


async def test_what_the_ring_took_before_it_was_read_is_told(bus_directory: Path) -> None:
    told: list[Any] = []
    async with (
        esp.init(dir=bus_directory, ring_records=5, on_notice=told.append) as client,
        client.publisher(URL, SCHEMA) as pub,
    ):
        sub = await client.subscriber(URL, side="in", start="earliest")
        late = await client.subscriber(URL, side="in", start="earliest", group="g")
        for number in range(1, 21):
            await (await pub.inject([(number, "x")]))
        for reader in (sub, late):
            assert await numbers(reader, 5) == [16, 17, 18, 19, 20]
            assert (reader.stats.skipped, reader.stats.missed) == (15, 15)
            skipped, missed = told
            assert skipped == notices.Skipped(15, skipped.reason)
            assert missed == notices.Missed(pub.source, 0, 1, 15)
            told.clear()
        await late.confirm()
        await late.aclose()
        for number in range(21, 31):
            await (await pub.inject([(number, "x")]))
        async with client.subscriber(URL, side="in", group="g") as late:
            assert await numbers(late, 5) == [26, 27, 28, 29, 30]
        assert [type(each) for each in told] == [notices.Skipped, notices.Missed]
        assert told[1] == notices.Missed(pub.source, 0, 21, 25)


@pytest.mark.parametrize("group", [None, "g"])
async def test_a_purge_under_a_reader_is_told_and_reading_goes_on(bench: Bench, group: str | None) -> None:
    await bench.publish(1, 2)
    async with await bench.subscriber(start="earliest", group=group) as sub:
        async with asyncio.timeout(60):
            old = [await anext(sub) for _ in range(2)]
        await bench.client.catalog().purge(TOPIC)
        await bench.publish(3, 4)
        assert await numbers(sub, 2) == [3, 4]
        [skipped] = bench.of(notices.Skipped)
        assert skipped.messages is None
        assert bench.of(notices.Missed) == []
        if group:
            await sub.confirm(old[1])  # stood on a topic that is no more
            await sub.confirm()
    if group:
        await bench.publish(5)
        async with await bench.subscriber(group=group) as sub:
            assert await numbers(sub, 1) == [5]


async def test_a_group_that_was_away_while_the_topic_was_purged_begins_anew(bench: Bench) -> None:
    await bench.publish(1, 2)
    async with await bench.subscriber(group="g") as sub:
        await numbers(sub, 2)
        await sub.confirm()
    await bench.client.catalog().purge(TOPIC)
    await bench.publish(3)
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 1) == [3]
        await sub.confirm()
    await bench.publish(4)
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 1) == [4]


async def test_what_stands_where_a_topic_lost_its_end_is_read_and_duplicates_are_dropped(bench: Bench) -> None:
    sub = await bench.subscriber(schema=SCHEMA, start="earliest", group="g")
    written, link = [], 0
    for id in (1, 2, 3, 4):
        written.append(block(id, link=link))
        link = parse(written[-1]).chain
    sub._inbox.take([Message(at, data) for at, data in enumerate(written[:3])])
    assert await numbers(sub, 3) == [1, 2, 3]
    sub._inbox.take([Break("cut", None, cut=1), Message(1, written[2]), Message(2, written[3])])
    assert await numbers(sub, 1) == [4]
    assert (sub.stats.doubles, sub.stats.missed) == (1, 0)
    assert bench.of(notices.Skipped) == [notices.Skipped(None, "cut")]


async def test_what_was_read_together_with_a_purge_has_a_schema(bench: Bench) -> None:
    """By the seam a Break may stand in front of messages of the same read."""
    await bench.publish(1)
    sub = await bench.subscriber(start="earliest")
    await numbers(sub, 1)
    sub._inbox.take([Break("the topic was emptied", None, incarnation=True), Message(50, block(1))])
    assert await numbers(sub, 1) == [1]


# the schema


async def test_the_schema_is_found(bench: Bench) -> None:
    await bench.publish(1)
    sub = await bench.subscriber(start="earliest")
    assert sub.schema == SCHEMA
    early = await bench.client.subscriber("dfESP://test:5555/project/query/later", side="in", start="earliest")
    assert early.schema is None
    async with bench.client.publisher("dfESP://test:5555/project/query/later", "id*:int32") as pub:
        await pub.inject([(9,)])
    async with asyncio.timeout(60):
        assert (await anext(early)).rows() == [(9,)]
    assert early.schema == esp.Schema("id*:int32")


async def test_the_schema_may_be_given(bench: Bench) -> None:
    await bench.publish(1)
    assert await numbers(await bench.subscriber(schema=SCHEMA, start="earliest"), 1) == [1]
    assert await numbers(await bench.subscriber(schema="id * : int64, symbol: string", start="earliest"), 1) == [1]


async def test_a_schema_that_differs_is_refused_with_both_shown(bench: Bench) -> None:
    await bench.publish(1)
    with pytest.raises(esp.SchemaDiffers, match=r"id\*:int32.*symbol:string") as caught:
        await bench.subscriber(schema="id*:int32")
    assert (caught.value.given, caught.value.retained) == ("id*:int32", SCHEMA.text)
    with pytest.raises(esp.SchemaDiffers):
        await bench.client.publisher(URL, "id*:int32")
    with pytest.raises(esp.SchemaError):
        await bench.subscriber(schema="id:int23")
    await bench.client.publisher(URL, SCHEMA)


async def test_a_schema_on_the_other_side_only_names_the_side(bench: Bench) -> None:
    await bench.publish(1)
    with pytest.raises(esp.SchemaError, match="side='in'"):
        await bench.client.subscriber(URL)
    assert (await bench.client.subscriber(URL + "?side=in")).topic == TOPIC


async def test_blocks_without_a_schema_are_refused_and_come_when_there_is_one(bench: Bench) -> None:
    await bench.raw(block(1), block(2, link=123))
    sub = await bench.subscriber(start="earliest")
    with pytest.raises(esp.SchemaError, match="schema="):
        await anext(sub)
    await bench.inner.retain(TOPIC, "schema", SCHEMA.text.encode())
    await bench.publish(5)
    assert await numbers(sub, 2) == [1, 5]


async def test_collapse_makes_one_update_of_a_pair(bench: Bench) -> None:
    events = [esp.Event({"id": 1, "symbol": s}, op) for s, op in (("new", 6), ("old", 6), ("x", 2))]
    async with bench.client.publisher(URL, SCHEMA) as pub:
        await pub.inject(events)
    found = {}
    for option in ("", "?collapse=true"):
        sub = await bench.subscriber(URL + option, start="earliest")
        async with asyncio.timeout(60):
            found[option] = [(e.values["symbol"], e.opcode) for e in (await anext(sub)).events()]
    assert found[""] == [("new", 6), ("old", 6), ("x", 2)]
    assert found["?collapse=true"] == [("new", 2), ("x", 2)]


async def test_rmretdel_leaves_out_what_a_retention_policy_deleted(bench: Bench) -> None:
    async with bench.client.publisher(URL, SCHEMA) as pub:
        await pub.inject([(1, "a"), (2, "b"), (3, "c")], opcode=[3, 3, 1], flags=[2, 0, 2])
        await pub.inject([(4, "d")], opcode=3, flags=2)
    sub = await bench.subscriber(URL + "?rmretdel=true&collapse=true", start="earliest")
    async with asyncio.timeout(60):
        assert (await anext(sub)).rows() == [(2, "b"), (3, "c")]
        emptied = await anext(sub)
    assert (emptied.rows(), emptied.mappings(), emptied.events(), emptied.table().num_rows) == ([], [], [], 0)


# what is held


async def test_a_block_that_is_awaited_for_long_is_told_once_and_delivered_when_it_comes(bench: Bench) -> None:
    bench.faults.capabilities = dataclasses.replace(bench.inner.capabilities, suffix_only=False)
    frames: list[bytes] = []
    for id in range(1, 5):
        frames.append(block(id, link=parse(frames[-1]).chain if frames else 0))
    options = esp.SubscriberOptions(gap_timeout=0.02)
    async with await bench.subscriber(schema=SCHEMA, start="earliest", options=options) as sub:
        await bench.raw(frames[0], frames[3])
        assert await numbers(sub, 1) == [1]
        waiting = asyncio.create_task(anext(sub))
        await until(lambda: bench.of(notices.Held) != [])
        await bench.raw(frames[2])
        await until(lambda: len(bench.of(notices.Held)) == 1)
        await bench.raw(frames[1])
        assert (await waiting).id == 2
        assert await numbers(sub, 2) == [3, 4]
    assert bench.of(notices.Held) == [notices.Held(7, 0, 2, 3)]
    assert bench.of(notices.Missed) == []
