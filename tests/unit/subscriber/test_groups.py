"""Subscribers of a group: what is confirmed, and who goes on behind it."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub import notices
from esp_pubsub.bus import Message
from esp_pubsub.client import Client
from esp_pubsub.testing._sim_bus import Broker, Queue, SimBus
from esp_pubsub.testing._virtual import VirtualLoop
from esp_pubsub.wire.frame import BEAT, BLOCK, ROWS, parse, seal
from esp_pubsub.wire.rows import codec
from tests.unit.workbench import SYMBOLS as SCHEMA
from tests.unit.workbench import TOPIC, URL, Bench, block, numbers, outcome, ticks, until


async def test_a_group_goes_on_behind_what_it_confirmed(bench: Bench) -> None:
    await bench.publish(1, 2, 3, 4)
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 2) == [1, 2]
        await sub.confirm()
        assert await numbers(sub, 1) == [3]  # read, not confirmed
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 2) == [3, 4]
        await sub.confirm()
    async with await bench.subscriber(group="g") as sub:
        await bench.publish(5)
        assert await numbers(sub, 1) == [5]
    assert bench.of(notices.Missed) == bench.of(notices.Joined) == []


async def test_two_groups_do_not_know_each_other(bench: Bench) -> None:
    await bench.publish(1, 2)
    async with await bench.subscriber(group="a") as a, await bench.subscriber(group="b") as b:
        assert await numbers(a, 2) == await numbers(b, 2) == [1, 2]
        await a.confirm()
    async with await bench.subscriber(group="b") as b:
        assert await numbers(b, 1) == [1]


async def test_an_earlier_block_may_be_confirmed_and_then_what_follows_comes_again(bench: Bench) -> None:
    await bench.publish(1, 2, 3)
    async with await bench.subscriber(group="g") as sub:
        async with asyncio.timeout(60):
            blocks = [await anext(sub) for _ in range(3)]
        await sub.confirm(blocks[1])
        assert sub.stats.unconfirmed == 1
        await sub.confirm(blocks[0])  # changes nothing
        await sub.confirm(blocks[1])
        assert sub.stats.unconfirmed == 1
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 1) == [3]


async def test_confirm_takes_what_was_given_not_what_was_read_ahead(bench: Bench) -> None:
    await bench.publish(1, 2, 3)
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 1) == [1]
        await sub.confirm()
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 1) == [2]
        [batch] = [batch async for batch in _first(sub.batches())]
        assert [each.rows()[0][0] for each in batch] == [3]
        await sub.confirm()
        assert sub.stats.unconfirmed == 0


async def _first(source: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for each in source:
        yield each
        return


async def test_a_confirm_that_failed_is_made_up_for_when_only_doubles_come(bench: Bench) -> None:
    await bench.publish(1, 2)
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 2) == [1, 2]
        bench.faults.lose_link()
        with pytest.raises(esp.BusUnavailable):
            await sub.confirm()
        bench.faults.restore()
        await bench.raw(*[frame.data for frame in await bench.frames()])
        waiting = asyncio.create_task(anext(sub))
        await until(lambda: not sub._unstored and not sub._storing.locked())
        waiting.cancel()
        await asyncio.wait([waiting])
    async with await bench.subscriber(group="g") as sub:
        await bench.publish(3)
        assert await numbers(sub, 1) == [3]


async def test_two_confirms_at_once_store_what_the_later_one_knows(bench: Bench) -> None:
    await bench.publish(1, 2, 3)
    async with await bench.subscriber(group="g") as sub:
        first, second, _ = [await anext(sub) for _ in range(3)]
        await asyncio.gather(sub.confirm(first), sub.confirm(second))
    await bench.raw(*[frame.data for frame in await bench.frames()])  # as a new leader would that knows of nothing
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 1) == [3]
    assert bench.of(notices.Missed) == []


async def test_a_confirm_returns_when_it_is_stored_whoever_stores_it(bench: Bench) -> None:
    await bench.publish(1)
    async with await bench.subscriber(group="g") as sub:
        assert await numbers(sub, 1) == [1]
        bench.faults.hang("confirm")
        both = [asyncio.create_task(sub.confirm()) for _ in range(2)]
        await ticks()
        assert not any(task.done() for task in both)
        bench.faults.heal()
        await asyncio.gather(*both)


async def test_what_a_group_keeps_of_sources_is_bounded(bench: Bench) -> None:
    options = esp.SubscriberOptions(max_sources=3)
    async with await bench.subscriber(group="g", options=options) as sub:
        for number in range(10):  # a source each
            await bench.publish(number)
            assert await numbers(sub, 1) == [number]
            await sub.confirm()
        assert sub._ledger is not None and len(sub._ledger.known) == 3
    fewer = esp.SubscriberOptions(max_sources=2)
    async with await bench.subscriber(group="g", options=fewer) as sub:
        await bench.publish(10)
        assert await numbers(sub, 1) == [10]
        assert len(sub._inbox.accept.sources) == 2


async def test_confirm_before_anything_was_read_does_nothing(bench: Bench) -> None:
    await bench.publish(1)
    async with await bench.subscriber(group="g") as sub:
        await sub.confirm()
        assert await numbers(sub, 1) == [1]


async def test_state_is_kept_so_that_doubles_are_known_after_a_restart(bench: Bench) -> None:
    await bench.raw(block(1, link=0))
    chain = seal(BLOCK, ROWS, 0, 1, 7, 0, 1, SCHEMA.fingerprint, 0, codec(SCHEMA).encode([(1, "x")])).chain
    async with await bench.subscriber(schema=SCHEMA, group="g") as sub:
        assert await numbers(sub, 1) == [1]
        await sub.confirm()
    await bench.raw(block(1), block(2, link=chain), block(1))
    async with await bench.subscriber(schema=SCHEMA, group="g") as sub:
        assert await numbers(sub, 1) == [2]
        assert sub.stats.doubles == 1 + len(sub._ready) or sub.stats.doubles == 2
    assert bench.of(notices.Missed) == bench.of(notices.InputDiffers) == []


async def test_without_a_group_there_is_nothing_to_confirm(bench: Bench) -> None:
    await bench.publish(1)
    sub = await bench.subscriber(start="earliest")
    async with asyncio.timeout(60):
        got = await anext(sub)
    with pytest.raises(esp.NoGroup, match="group="):
        await sub.confirm(got)


async def test_a_block_of_another_subscriber_cannot_be_confirmed(bench: Bench) -> None:
    await bench.publish(1, 2, 3)
    async with await bench.subscriber(start="earliest") as plain, await bench.subscriber(group="a") as a:
        async with asyncio.timeout(60):
            foreign = [[await anext(sub) for _ in range(3)][-1] for sub in (plain, a)]
        async with await bench.subscriber(group="b") as b:
            assert await numbers(b, 1) == [1]
            for each in foreign:
                with pytest.raises(esp.EspError):
                    await b.confirm(each)
    async with await bench.subscriber(group="b") as b:
        assert await numbers(b, 1) == [1]  # blocks 2 and 3 were never handed out there


async def test_who_reads_without_confirming_is_stopped_and_may_go_on_after_it(bench: Bench) -> None:
    await bench.publish(*range(10))
    options = esp.SubscriberOptions(read_blocks=1, unconfirmed=3)
    async with await bench.subscriber(group="g", options=options) as sub:
        await numbers(sub, 3)
        with pytest.raises(esp.Unconfirmed) as caught:
            await numbers(sub, 2)
        assert caught.value.limit == 3
        await sub.confirm()
        await numbers(sub, 3)


async def test_what_is_no_block_does_not_count_as_unconfirmed(bench: Bench) -> None:
    await bench.raw(*[b"garbage"] * 10)
    await bench.publish(1)
    options = esp.SubscriberOptions(read_blocks=2, unconfirmed=3)
    async with await bench.subscriber(group="g", options=options) as sub:
        assert await numbers(sub, 1) == [1]
        await sub.confirm()
        assert sub.stats.unconfirmed == 0
        await bench.raw(*[b"garbage"] * 10)
        await bench.publish(2)
        assert await numbers(sub, 1) == [2]
        assert sub.stats.unconfirmed <= 1


async def test_a_group_that_was_forgotten_by_its_user_is_let_go_with_the_client(bench: Bench) -> None:
    await bench.publish(1)
    client = await esp.init(dir=bench.directory)
    assert await numbers(await client.subscriber(URL, side="in", group="g"), 1) == [1]
    await client.aclose()
    async with await bench.subscriber(group="g") as sub, asyncio.timeout(60):  # the lease is ten seconds
        assert (await anext(sub)).id == 1


async def test_a_second_reader_of_a_group_waits_for_the_first(bench: Bench) -> None:
    await bench.publish(1, 2)
    async with await bench.subscriber(group="g") as second:
        first = await bench.subscriber(group="g")
        assert await numbers(first, 1) == [1]
        waiting = asyncio.ensure_future(outcome(anext(second)))
        await first.confirm()
        await ticks(50)
        assert not waiting.done()
        await first.aclose()
        assert (await waiting).rows() == [(2, "2")]


async def test_a_group_may_begin_late(bench: Bench) -> None:
    await bench.publish(1)
    async with await bench.subscriber(group="g", start="latest") as sub:
        await bench.publish(2)
        assert await numbers(sub, 1) == [2]
        await sub.confirm()
    await bench.publish(3)
    async with await bench.subscriber(group="g", start="latest") as sub:  # where it left off, whatever start says
        assert await numbers(sub, 1) == [3]


async def test_a_stored_state_that_cannot_be_read_is_a_named_error(bench: Bench) -> None:
    await bench.publish(1)
    feed = await bench.inner.feed(TOPIC, "earliest", "g")
    [first] = [each for each in await feed.read(1, 1) if isinstance(each, Message)]
    await feed.confirm(first.position, b"from another world")
    await feed.aclose()
    await bench.publish(2)
    async with await bench.subscriber(group="g") as sub:
        found = await outcome(anext(sub))
        assert isinstance(found, esp.EspError), found


async def test_a_group_that_starts_at_what_is_stored_and_has_stored_nothing_is_an_error(bench: Bench) -> None:
    await bench.publish(1, 2)
    async with await bench.subscriber(group="g", start="none") as sub:
        for _ in range(2):
            with pytest.raises(esp.NothingStored, match="'g' has confirmed nothing"):
                await anext(sub)
    async with await bench.subscriber(group="g", start="earliest") as sub:
        assert await numbers(sub, 1) == [1]
        await sub.confirm()
    async with await bench.subscriber(group="g", start="none") as sub:
        assert await numbers(sub, 1) == [2]
    with pytest.raises(esp.ConfigError, match="in a group, 'none'"):
        await bench.subscriber(start="none")


def as_a_queue(bench: Bench, *, replay: bool) -> None:
    """A bus that may lose single messages, and that hands out again, or not, what a feed that died was given."""
    bench.faults.capabilities = dataclasses.replace(bench.inner.capabilities, suffix_only=False, replay=replay)


@pytest.mark.parametrize("replay", [True, False], ids=["log", "queue"])
async def test_a_group_whose_feed_dies_while_it_joins_is_not_told_what_went_before_it_came(
    bench: Bench, replay: bool
) -> None:
    as_a_queue(bench, replay=replay)
    sub = await bench.subscriber(schema=SCHEMA, start="latest", group="g")
    await bench.raw(block(1, source=8))
    assert await numbers(sub, 1) == [1]
    await sub.confirm()
    waiting = asyncio.ensure_future(numbers(sub, 1))
    await bench.raw(block(5, settled=2, link=4))  # 3 and 4 are confirmed, and that has not come
    await until(lambda: 7 in sub._inbox.accept.sources)
    bench.faults.lose_link()
    bench.faults.restore()
    await bench.raw(block(1, kind=BEAT, body=b"", count=0, settled=5))
    assert await waiting == [5]
    assert bench.of(notices.Missed) == []
    await sub.confirm()
    assert sub.stats.unconfirmed == 0


@pytest.mark.parametrize("replay", [True, False], ids=["log", "queue"])
async def test_what_a_group_holds_when_its_feed_dies_is_delivered_and_confirmed(bench: Bench, replay: bool) -> None:
    as_a_queue(bench, replay=replay)
    line = [block(1)]
    for id in range(2, 5):
        line.append(block(id, link=parse(line[-1]).chain))
    sub = await bench.subscriber(schema=SCHEMA, start="earliest", group="g")
    await bench.raw(line[0], line[2])
    assert await numbers(sub, 1) == [1]
    await sub.confirm()
    bench.faults.lose_link()
    bench.faults.restore()
    await bench.raw(line[1])
    assert await numbers(sub, 2) == [2, 3]
    assert bench.of(notices.Missed) == []
    await sub.confirm()
    await sub.aclose()
    sub = await bench.subscriber(schema=SCHEMA, start="earliest", group="g")
    await bench.raw(line[3])
    assert await numbers(sub, 1) == [4]
    assert sub.stats.doubles == 0


BEATS = [block(1, kind=BEAT, body=b"", count=0, settled=settled) for settled in range(9)]


class QueueBench:
    """A client of a bus of queues, which gives again what was neither confirmed nor let go, and ways past it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.client = Client(SimBus(broker, "reader"), lambda notice: None)

    async def subscriber(self) -> esp.Subscriber:
        return await self.client.subscriber(URL, schema=SCHEMA, side="in", start="latest", group="g")

    @property
    def queue(self) -> Queue:
        """The group's."""
        return self._broker.topic(TOPIC).queues["g"]

    async def raw(self, *messages: bytes) -> None:
        """Messages as they are, once they are there."""
        pipe = await SimBus(self._broker, "sender").pipe(TOPIC)
        await pipe.write(messages)
        await pipe.confirmed(len(messages) - 1)

    def cut(self, seconds: float) -> None:
        """The client loses its link for a while."""
        self._broker.cut("reader", seconds)

    @property
    def kept(self) -> list[bytes]:
        """What would come again."""
        return [*self.queue.taken.values(), *self.queue.unread]


def on_queues(scene: Callable[[QueueBench], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop(random.Random(0))  # type: ignore[abstract]  # it has what the SDK calls

    async def begun() -> None:
        bench = QueueBench(Broker(loop, "queues", deaths=False))
        await bench.client.start()
        try:
            await scene(bench)
        finally:
            await bench.client.aclose()

    try:
        loop.run(begun(), 600.0)
    finally:
        loop.end()
    assert loop.problems == []


BEYOND = block(5, settled=2, link=4)  # 3 and 4 were sent before the group came, and are not yet settled


@pytest.mark.parametrize("proof", [BEATS[5], block(5, settled=4, link=4)], ids=["beat", "second copy"])
def test_what_let_a_held_block_through_comes_again_with_it(proof: bytes) -> None:
    async def scene(bench: QueueBench) -> None:
        sub = await bench.subscriber()
        await bench.raw(BEYOND, proof)
        assert await numbers(sub, 1) == [5]
        for _ in range(2):  # readers that end before they have confirmed it
            await sub.aclose()
            sub = await bench.subscriber()
            assert await numbers(sub, 1) == [5]
        await sub.confirm()
        assert bench.kept == []

    on_queues(scene)


def test_what_let_a_held_block_through_comes_again_until_it_is_stored_that_the_block_is_confirmed() -> None:
    async def scene(bench: QueueBench) -> None:
        sub = await bench.subscriber()
        await bench.raw(BEYOND, BEATS[5])
        assert await numbers(sub, 1) == [5]
        bench.cut(1.0)
        with pytest.raises(esp.BusUnavailable):
            await sub.confirm()
        await bench.raw(block(6, settled=2, link=parse(BEYOND).chain))
        assert await numbers(sub, 1) == [6]  # read with what came again, and what is confirmed is not stored yet
        await sub.aclose()
        sub = await bench.subscriber()
        assert await numbers(sub, 2) == [5, 6]
        await sub.confirm()
        assert bench.kept == []

    on_queues(scene)


def test_one_beat_waits_for_a_block_that_is_not_confirmed_and_the_others_are_let_go() -> None:
    async def scene(bench: QueueBench) -> None:
        sub = await bench.subscriber()
        await bench.raw(BEYOND, *BEATS[4:9], *BEATS[4:9], BEYOND)
        assert await numbers(sub, 1) == [5]
        waiting = asyncio.create_task(numbers(sub, 1))
        await asyncio.sleep(30)
        assert bench.kept == [BEYOND, BEATS[4]]
        await sub.confirm()
        assert bench.kept == []
        waiting.cancel()
        await asyncio.wait([waiting])

    on_queues(scene)


def test_beats_are_let_go_at_once_where_the_blocks_before_them_came_in_order() -> None:
    async def scene(bench: QueueBench) -> None:
        sub = await bench.subscriber()
        first = block(5, settled=4, link=4)
        await bench.raw(first, BEATS[5], block(6, settled=5, link=parse(first).chain), BEATS[6])
        assert await numbers(sub, 2) == [5, 6]
        waiting = asyncio.create_task(numbers(sub, 1))
        await asyncio.sleep(30)
        assert [parse(data).kind for data in bench.kept] == [BLOCK, BLOCK]
        waiting.cancel()
        await asyncio.wait([waiting])

    on_queues(scene)
