"""A topic that is purged while its reader's feed is dead: told once, nothing lost, nothing delivered twice."""

import asyncio
import random
from contextlib import suppress

import pytest

import esp_pubsub as esp
from esp_pubsub import notices
from esp_pubsub.wire.frame import parse
from tests.unit.workbench import SYMBOLS as SCHEMA
from tests.unit.workbench import TOPIC, Bench, block, numbers, ticks

LINE = [block(1)]  # one sequence, which begins anew after every purge: the same source, run, ids and chains
for id_ in range(2, 100):
    LINE.append(block(id_, link=parse(LINE[-1]).chain))


async def purge(bench: Bench) -> None:
    await bench.client.catalog().purge(TOPIC)


def cut(bench: Bench) -> None:
    """The feed is dead; another one can be had."""
    bench.faults.lose_link()
    bench.faults.restore()


async def reader(bench: Bench, group: str | None) -> esp.Subscriber:
    return await bench.subscriber(schema=SCHEMA, start="earliest", group=group)


async def looked(sub: esp.Subscriber) -> list[int]:
    """What a reader has that waits for a moment only."""
    waiting = asyncio.ensure_future(anext(sub.batches()))
    await ticks()
    waiting.cancel()
    await asyncio.wait([waiting])
    return [] if waiting.cancelled() else [block.id for block in waiting.result()]


@pytest.mark.parametrize("group", [None, "g"])
async def test_a_purge_while_the_feed_is_dead_is_told_and_the_same_sequence_is_read_anew(
    bench: Bench, group: str | None
) -> None:
    await bench.raw(*LINE[:2])
    sub = await reader(bench, group)
    assert await numbers(sub, 2) == [1, 2]
    cut(bench)
    await purge(bench)
    await bench.raw(*LINE[:3])
    assert await numbers(sub, 3) == [1, 2, 3]
    assert len(bench.of(notices.Skipped)) == 1
    assert sub.stats.doubles == 0


@pytest.mark.parametrize("group", [None, "g"])
async def test_a_purge_is_told_once_when_the_feed_dies_before_the_first_new_block(
    bench: Bench, group: str | None
) -> None:
    await bench.raw(LINE[0])
    sub = await reader(bench, group)
    assert await numbers(sub, 1) == [1]
    await purge(bench)
    assert await looked(sub) == []
    assert len(bench.of(notices.Skipped)) == 1
    cut(bench)
    await bench.raw(*LINE[:2])
    assert await numbers(sub, 2) == [1, 2]
    assert len(bench.of(notices.Skipped)) == 1
    assert sub.stats.reconnects == 1


async def test_a_second_purge_while_the_feed_is_dead_is_told_too(bench: Bench) -> None:
    await bench.raw(LINE[0])
    sub = await reader(bench, None)
    assert await numbers(sub, 1) == [1]
    await purge(bench)
    assert await looked(sub) == []
    cut(bench)
    await bench.raw(LINE[0])
    await purge(bench)
    await bench.raw(LINE[0])
    assert await numbers(sub, 1) == [1]
    assert len(bench.of(notices.Skipped)) == 2


async def test_a_group_that_confirmed_before_a_purge_and_not_since_is_told_of_it_once(bench: Bench) -> None:
    await bench.raw(LINE[0])
    sub = await reader(bench, "g")
    assert await numbers(sub, 1) == [1]
    await sub.confirm()
    await purge(bench)
    await bench.raw(LINE[0])
    assert await numbers(sub, 1) == [1]
    cut(bench)
    await bench.raw(LINE[1])
    assert await numbers(sub, 1) == [2]  # and not 1 once more
    assert len(bench.of(notices.Skipped)) == 1
    await sub.confirm()
    await sub.aclose()
    sub = await reader(bench, "g")
    await bench.raw(LINE[2])
    assert await numbers(sub, 1) == [3]


async def test_a_group_that_another_reader_took_past_a_purge_goes_on_where_that_one_confirmed(bench: Bench) -> None:
    await bench.raw(*LINE[:2])
    sub = await reader(bench, "g")
    assert await numbers(sub, 2) == [1, 2]
    assert sub._follower.feed is not None
    await sub._follower.feed.aclose()  # as if its lease were lost
    await purge(bench)
    await bench.raw(*LINE[:2])
    other = await reader(bench, "g")
    assert await numbers(other, 1) == [1]
    await other.confirm()
    await other.aclose()
    bench.told.clear()
    assert await numbers(sub, 1) == [2]
    assert len(bench.of(notices.Skipped)) == 1


async def test_a_group_that_begins_where_it_stored_goes_on_past_a_purge_though_it_stored_nothing_since(
    bench: Bench,
) -> None:
    await bench.raw(LINE[0])
    sub = await reader(bench, "g")
    assert await numbers(sub, 1) == [1]
    await sub.confirm()
    await sub.aclose()
    await purge(bench)
    sub = await bench.subscriber(schema=SCHEMA, start="none", group="g")
    await bench.raw(LINE[0])
    assert await numbers(sub, 1) == [1]
    cut(bench)
    await bench.raw(LINE[1])
    assert await numbers(sub, 1) == [2]


class Walk:
    """Steps in any order, beside what a reader must have been given."""

    def __init__(self, bench: Bench, group: str | None, seed: int) -> None:
        self.bench, self.group, self.random = bench, group, random.Random(seed)
        self.written = self.had = self.stored = self.owed = 0  # of the topic as it is now

    async def play(self, steps: int) -> None:
        self.sub = await reader(self.bench, self.group)
        kinds = [self.write, self.write, self.purge, self.cut, self.look, self.look, self.take]
        kinds += [self.confirm, self.lose] if self.group else []
        for _ in range(steps):
            await self.random.choice(kinds)()
        await self.write()
        await self.take()
        await self.sub.aclose()

    async def write(self) -> None:
        await self.bench.raw(LINE[self.written])
        self.written += 1

    async def purge(self) -> None:
        await purge(self.bench)
        self.written = self.had = self.stored = self.owed = 0

    async def cut(self) -> None:
        cut(self.bench)

    async def look(self) -> None:
        await self.given(await looked(self.sub))

    async def take(self) -> None:
        await self.given(await numbers(self.sub, self.written - self.had))

    async def given(self, found: list[int]) -> None:
        assert found == [*range(self.had + 1, self.had + len(found) + 1)]
        self.had += len(found)

    async def confirm(self) -> None:
        self.owed = self.had  # if it fails, it is made up for whenever the bus is there again
        with suppress(esp.BusUnavailable):
            await self.sub.confirm()
            self.stored = self.had

    async def lose(self) -> None:
        """The lease is lost for a moment, in which another reader reads what is not confirmed, and confirms some."""
        if self.sub._follower.feed is not None:
            await self.sub._follower.feed.aclose()
        await self.write()
        other = await reader(self.bench, self.group)
        async with asyncio.timeout(60):
            blocks = [await anext(other)]
            while blocks[-1].id < self.written:
                blocks.append(await anext(other))
        first = blocks[0].id
        assert self.stored < first <= max(self.stored, self.owed) + 1
        assert [block.id for block in blocks] == [*range(first, self.written + 1)]
        self.stored = first - 1
        for each in blocks[: self.random.randrange(len(blocks) + 1)][-1:]:
            await other.confirm(each)
            self.stored = each.id
            self.had = max(self.had, self.stored)
        await other.aclose()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("group", [None, "g"])
async def test_whatever_the_order_of_purges_deaths_and_confirms_each_sequence_is_read_once(
    bench: Bench, group: str | None, seed: int
) -> None:
    await Walk(bench, group, seed).play(60)
