"""Subscriber: what arrives, and from where."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub import notices
from esp_pubsub.retained import retain_runs
from esp_pubsub.wire.frame import parse
from tests.unit.workbench import SYMBOLS as SCHEMA
from tests.unit.workbench import TOPIC, URL, Bench, block, nothing_more, numbers, outcome, ticks

# reading


async def test_blocks_arrive_in_order_with_all_they_carry(bench: Bench) -> None:
    sub = await bench.subscriber()
    async with bench.client.publisher(URL, SCHEMA) as pub:
        before = datetime.now(UTC)
        await pub.inject([(1, "a"), (2, None)])
        await pub.inject([(3, "c")], transactional=True)
    got = []
    async for found in sub:
        got.append(found)
        if len(got) == 2:
            break
    first, second = got
    assert (first.id, first.run, first.source, first.schema, len(first)) == (1, 0, pub.source, SCHEMA, 2)
    assert first.rows() == [(1, "a"), (2, None)]
    assert second.mappings() == [{"id": 3, "symbol": "c"}]
    assert (first.transactional, second.transactional) == (False, True)
    assert first.position < second.position
    assert timedelta() <= first.sent_at - before + timedelta(milliseconds=1) < timedelta(seconds=10)
    stats = sub.stats
    assert (stats.blocks, stats.events, stats.missed, stats.doubles, stats.bad) == (2, 3, 0, 0, 0)


async def test_batches_give_what_has_come(bench: Bench) -> None:
    await bench.publish(*range(10))
    sub = await bench.subscriber(start="earliest")
    sizes = []
    async for batch in sub.batches(4):
        sizes.append(len(batch))
        if sum(sizes) == 10:
            break
    assert max(sizes) <= 4
    assert sub.stats.blocks == 10


async def test_batches_and_single_blocks_may_be_mixed(bench: Bench) -> None:
    await bench.publish(*range(6))
    sub = await bench.subscriber(start="earliest", options=esp.SubscriberOptions(read_blocks=3))
    assert await numbers(sub, 1) == [0]
    batches = sub.batches()
    assert [b.rows()[0][0] for b in await anext(batches)] == [1, 2]
    assert await numbers(sub, 1) == [3]
    await batches.aclose()


async def test_reads_stay_within_their_bounds(bench: Bench) -> None:
    await bench.publish(*range(20))
    for options in (esp.SubscriberOptions(read_blocks=3), esp.SubscriberOptions(read_bytes=1)):
        sub = await bench.subscriber(start="earliest", options=options)
        for number in range(20):
            assert await numbers(sub, 1) == [number]
            assert len(sub._ready) < 3
        await sub.aclose()


async def test_a_backlog_leaves_others_of_the_loop_their_turns(bench: Bench) -> None:
    await bench.publish(*range(20))
    sub = await bench.subscriber(start="earliest", options=esp.SubscriberOptions(read_blocks=1))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    await ticks(1)
    assert await numbers(sub, 20) == [*range(20)]
    task.cancel()
    assert turns >= 19


async def test_two_publishers_are_two_sequences(bench: Bench) -> None:
    sub = await bench.subscriber()
    async with bench.client.publisher(URL, SCHEMA) as one, bench.client.publisher(URL, SCHEMA) as two:
        for number in range(10):
            await one.inject([(number, "one")])
            await two.inject([(number, "two")])
        await one.flush()
        await two.flush()
        found: dict[int, list[int]] = {one.source: [], two.source: []}
        async with asyncio.timeout(60):
            for _ in range(20):
                each = await anext(sub)
                found[each.source].append(each.id)
    assert list(found.values()) == [list(range(1, 11))] * 2


@pytest.mark.parametrize("name", ["read_blocks", "read_bytes", "unconfirmed", "max_sources"])
def test_options_that_cannot_work_are_refused(name: str) -> None:
    with pytest.raises(esp.ConfigError, match=name):
        esp.SubscriberOptions(**{name: 0})


# where it begins


async def test_without_a_start_and_a_group_it_begins_with_what_comes(bench: Bench) -> None:
    await bench.publish(1, 2)
    sub = await bench.subscriber()
    await bench.publish(3)
    assert await numbers(sub, 1) == [3]
    assert await nothing_more(sub)


@pytest.mark.parametrize(("start", "expected"), [("earliest", [1, 2, 3]), (0, [1, 2, 3]), (2, [3]), (3, [4]), (4, [5])])
async def test_it_begins_where_it_is_told(bench: Bench, start: Any, expected: list[int]) -> None:
    await bench.publish(1, 2, 3)
    sub = await bench.subscriber(start=start)
    await bench.publish(4, 5)
    assert (await numbers(sub, len(expected)))[: len(expected)] == expected
    assert bench.of(notices.Missed) == []


async def test_it_begins_at_a_time(bench: Bench) -> None:
    await bench.publish(1)
    middle = datetime.now(UTC) + timedelta(microseconds=1)  # what was published before is older
    await bench.publish(2)
    assert await numbers(await bench.subscriber(start=middle), 1) == [2]
    assert await numbers(await bench.subscriber(start=middle - timedelta(days=1)), 2) == [1, 2]


@pytest.mark.parametrize("start", ["first", "", -1, True, 1.5, datetime(2026, 1, 1), b"earliest"], ids=repr)  # noqa: DTZ001, RUF100
async def test_a_start_that_is_none_is_refused(bench: Bench, start: Any) -> None:
    with pytest.raises(esp.ConfigError, match="earliest"):
        await bench.subscriber(start=start)
    sub = await bench.subscriber(start="earliest")
    with pytest.raises(esp.ConfigError, match="earliest"):
        await sub.seek(start)
    await bench.publish(1)
    assert await numbers(sub, 1) == [1]


async def test_who_joins_late_is_told_where(bench: Bench) -> None:
    async with bench.client.publisher(URL, SCHEMA) as pub:
        for number in range(1, 4):
            await (await pub.inject([(number, "x")]))
        sub = await bench.subscriber()
        await pub.inject([(4, "x")])
        await pub.inject([(5, "x")])
        assert await numbers(sub, 2) == [4, 5]
    assert bench.told == [notices.Joined(pub.source, 0, 4)]


# seek


async def test_seek_reads_again_from_another_place(bench: Bench) -> None:
    await bench.publish(1, 2, 3, 4)
    sub = await bench.subscriber(start="earliest")
    async with asyncio.timeout(60):
        second = [await anext(sub) for _ in range(3)][1]
    await sub.seek(second.position)
    assert await numbers(sub, 3) == [2, 3, 4]
    await sub.seek("earliest")
    assert await numbers(sub, 4) == [1, 2, 3, 4]
    await sub.seek("latest")
    await bench.publish(5)
    assert await numbers(sub, 1) == [5]


async def test_seek_joins_as_a_subscriber_that_is_opened_there(bench: Bench) -> None:
    """A late block of an old run stands in front of one in the middle of the new run."""
    await retain_runs(bench.inner, TOPIC, {7: 1})
    new = block(1, run=1)
    await bench.raw(block(1), new, block(1), block(2, run=1, link=parse(new).chain))
    told = []
    for sought in (False, True):
        sub = await bench.subscriber(schema=SCHEMA, start="earliest" if sought else 2)
        if sought:
            await sub.seek(2)
        async with asyncio.timeout(60):
            assert [(await anext(sub)).run for _ in range(2)] == [0, 1]
        told.append(bench.told.copy())
        bench.told.clear()
    assert told[0] == told[1] == [notices.Joined(7, 0, 1), notices.NewRun(7, 0, 1), notices.Joined(7, 1, 2)]


async def test_seek_is_not_for_groups_nor_after_the_close(bench: Bench) -> None:
    sub = await bench.subscriber(group="g")
    with pytest.raises(esp.WrongOrder, match="without a group"):
        await sub.seek("earliest")
    sub = await bench.subscriber()
    await sub.aclose()
    with pytest.raises(esp.Closed):
        await sub.seek("earliest")


async def test_seek_under_a_task_that_waits_gives_it_the_new_place_or_says_no(bench: Bench) -> None:
    await bench.publish(1, 2)
    sub = await bench.subscriber(start="latest")
    waiting = asyncio.ensure_future(outcome(anext(sub)))
    await ticks()
    refused = await outcome(sub.seek("earliest"))
    if isinstance(refused, esp.WrongOrder):
        await bench.publish(3)
        assert (await waiting).rows() == [(3, "3")]
    else:
        assert (await waiting).rows() == [(1, "1")]
        assert await numbers(sub, 1) == [2]
    assert bench.of(notices.Failure) == []
