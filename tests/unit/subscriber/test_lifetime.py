"""Subscriber: one task, one loop, the end, and feeds that die before it."""

import asyncio
import itertools
import struct
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub import notices
from tests.unit.workbench import SYMBOLS as SCHEMA
from tests.unit.workbench import TOPIC, URL, Bench, numbers, outcome, ticks, until

# one task, one loop, and the end


async def test_two_tasks_cannot_read_from_one_subscriber(bench: Bench) -> None:
    sub = await bench.subscriber()
    first = asyncio.ensure_future(numbers(sub, 1))
    await ticks()
    with pytest.raises(esp.WrongOrder, match="each its own"):
        await anext(sub)
    await bench.publish(1)
    assert await first == [1]


@pytest.mark.parametrize("how", ["anext", "batches"])
async def test_a_close_ends_the_loop_of_a_task_that_waits(bench: Bench, how: str) -> None:
    sub = await bench.subscriber()

    async def read() -> int:
        count = 0
        async for _ in sub if how == "anext" else sub.batches():
            count += 1
        return count

    waiting = asyncio.ensure_future(outcome(read()))
    await bench.publish(1)
    await until(lambda: sub.stats.blocks == 1)
    await sub.aclose()
    assert await waiting == 1
    assert bench.of(notices.Failure) == []


async def test_a_close_ends_the_loop_of_a_task_that_waits_for_a_bus_that_is_away(bench: Bench) -> None:
    sub = await bench.subscriber()
    waiting = asyncio.ensure_future(outcome(anext(sub)))
    await ticks()
    bench.faults.lose_link()
    await until(lambda: bool(bench.of(notices.Failure)))
    await sub.aclose()
    bench.faults.restore()
    await bench.publish(1)
    found = await waiting
    assert isinstance(found, StopAsyncIteration | esp.Closed), found
    assert sub._follower.feed is None


async def test_after_the_close_every_call_says_so(bench: Bench) -> None:
    await bench.publish(1, 2)
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 1) == [1]
    await sub.aclose()  # twice is harmless
    for call in (lambda: anext(sub), sub.confirm, lambda: anext(sub.batches())):
        with pytest.raises(esp.Closed):
            await call()
    assert sub.stats.blocks == 2


async def test_another_loop_is_told(bench: Bench) -> None:
    await bench.publish(1, 2)
    sub = await bench.subscriber(group="g")
    assert await numbers(sub, 2) == [1, 2]

    def elsewhere() -> list[Any]:
        async def all_of_them() -> list[Any]:
            return [await outcome(call()) for call in (lambda: anext(sub), sub.confirm, sub.aclose)]

        return asyncio.run(all_of_them())

    found = await asyncio.to_thread(elsewhere)
    assert [type(error) for error in found] == [esp.WrongOrder] * 3
    await sub.confirm()  # and here it goes on


async def test_a_subscriber_that_nobody_reads_does_nothing(bench: Bench) -> None:
    before = asyncio.all_tasks()
    await bench.subscriber()
    assert asyncio.all_tasks() == before


# reconnecting


@pytest.mark.parametrize("group", [None, "g"])
async def test_a_feed_that_dies_is_replaced_without_loss_or_double(bench: Bench, group: str | None) -> None:
    options = esp.SubscriberOptions(read_blocks=3)
    sub = await bench.subscriber(start="earliest", group=group, options=options)
    got: list[int] = []
    for begin in range(0, 50, 5):
        await bench.publish(*range(begin, begin + 5))
        bench.faults.lose_link()
        got += await _read(bench, sub, 3)
        if group and begin % 2:
            await outcome(sub.confirm())
        got += await _read(bench, sub, 2)
    assert got == list(range(50))
    assert sub.stats.reconnects >= 10
    assert (sub.stats.missed, sub.stats.skipped) == (0, 0)
    assert len(bench.of(notices.Failure)) == len(bench.of(notices.Reconnected)) == sub.stats.reconnects
    failure = bench.of(notices.Failure)[0]
    assert (failure.failure, failure.code) == ("pubsubFail_SERVERDISCONNECT", "pubsubCode_READFAILED")
    await sub.aclose()
    if group:
        async with await bench.subscriber(group=group) as again:
            rest = await numbers(again, 1)
            assert rest[0] <= 49 and rest[0] % 5 in (0, 3)


async def _read(bench: Bench, sub: esp.Subscriber, count: int) -> list[int]:
    reading = asyncio.ensure_future(numbers(sub, count))
    await ticks(20)
    bench.faults.restore()
    return await reading


async def test_what_came_while_a_reader_of_the_latest_was_cut_off_is_not_lost(bench: Bench) -> None:
    await bench.publish(1)
    sub = await bench.subscriber()  # in place: what is published from now on it sees
    waiting = asyncio.ensure_future(outcome(numbers(sub, 2)))
    await ticks()
    bench.faults.lose_link()
    await until(lambda: bool(bench.of(notices.Failure)))
    await bench.publish(2, 3)
    bench.faults.restore()
    assert await waiting == [2, 3]


async def test_the_same_after_a_seek_to_the_latest(bench: Bench) -> None:
    await bench.publish(1)
    sub = await bench.subscriber(start="earliest")
    await numbers(sub, 1)
    await sub.seek("latest")
    bench.faults.lose_link()
    waiting = asyncio.ensure_future(outcome(numbers(sub, 1)))
    await until(lambda: bool(bench.of(notices.Failure)))
    await bench.publish(2)
    bench.faults.restore()
    assert await waiting == [2]


async def test_a_confirm_over_a_dead_link_is_told_and_may_be_repeated(bench: Bench) -> None:
    await bench.publish(1, 2, 3)
    sub = await bench.subscriber(group="g", options=esp.SubscriberOptions(read_blocks=1))
    assert await numbers(sub, 2) == [1, 2]
    bench.faults.lose_link()
    for _ in range(2):
        with pytest.raises(esp.BusUnavailable):
            await sub.confirm()
    bench.faults.restore()
    assert await numbers(sub, 1) == [3]
    await sub.confirm()
    await sub.aclose()
    await bench.publish(4)
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 1) == [4]


async def test_a_group_that_another_reader_took_over_moves_nothing(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory, lease=0.1) as one, esp.init(dir=bus_directory, lease=0.1) as two:
        async with one.publisher(URL, SCHEMA) as pub:
            for number in range(1, 5):
                await pub.inject([(number, "x")])
        slow = await one.subscriber(URL, side="in", group="g", on_notice=lambda _: None)
        assert await numbers(slow, 2) == [1, 2]
        other = await two.subscriber(URL, side="in", group="g")
        assert await numbers(other, 4) == [1, 2, 3, 4]  # once the lease is over
        await other.confirm()
        with pytest.raises(esp.BusUnavailable, match="taken over"):
            await slow.confirm()
        await other.aclose()
        async with one.publisher(URL, SCHEMA) as pub:
            await pub.inject([(5, "x")])
        rest = await numbers(slow, 3)
        assert rest == [3, 4, 5]  # 3 and 4 were read before; 1 and 2 do not come again
        await slow.confirm()
        await slow.aclose()
        async with one.publisher(URL, SCHEMA) as pub:
            await pub.inject([(6, "x")])
        async with one.subscriber(URL, side="in", group="g") as last:
            assert await numbers(last, 1) == [6]


async def test_a_bus_that_refuses_is_not_tried_again(bench: Bench) -> None:
    sub = await bench.subscriber()
    store = await bench.inner.topic(TOPIC)  # type: ignore[attr-defined]
    await store.write(lambda log: log.put(b"\0", struct.pack("<IQQQQ", 99, 0, 0, 0, 0)), 5)  # as another version might
    with pytest.raises(esp.BusRefused, match="another version"):
        await anext(sub)
    assert sub.stats.reconnects == 0


async def test_no_task_is_left_over_many_reads_and_timeouts(bench: Bench) -> None:
    sub = await bench.subscriber()
    before = asyncio.all_tasks()
    for _, seconds in zip(range(10), itertools.cycle((0, 0.001)), strict=False):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await anext(sub)
    assert asyncio.all_tasks() == before
    await bench.publish(1)
    assert await numbers(sub, 1) == [1]


async def test_a_feed_that_opens_and_never_reads_is_not_opened_without_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = 0

    class Dead:
        state = place = None

        async def read(self, max_messages: int, max_bytes: int) -> Any:
            raise esp.BusUnavailable("nobody is there")

        async def aclose(self) -> None:
            return

    async def feed(topic: str, start: Any, group: str | None) -> Any:
        nonlocal opened
        opened += 1
        return Dead()

    subscriber = await bench.subscriber(schema=SCHEMA, start="earliest")
    monkeypatch.setattr(bench.client.bus, "feed", feed)
    bench.faults.lose_link()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await anext(subscriber)
    assert 2 <= opened < 10
