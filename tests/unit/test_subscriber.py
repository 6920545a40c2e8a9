"""Subscriber: what arrives, from where, once; groups; what is told; what is refused."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import esp_pubsub as esp
from esp_pubsub import notices
from esp_pubsub.bus import Break, Message
from esp_pubsub.testing.faults import Faults
from esp_pubsub.wire.frame import BEAT, BLOCK, CLAIM, ROWS, frames, seal
from esp_pubsub.wire.rows import codec

URL = "dfESP://test:5555/project/query/window"
TOPIC = "test:5555/project/query/window/I"
SCHEMA = esp.Schema("id*:int64,symbol:string")
pa.array(["x"])  # the first array imports pandas, which reads files: not in a test, under a loop


class Bench:
    """A client whose bus can be made to fail, a raw way to the topic, and what was told."""

    def __init__(self, client: esp.Client, directory: Path) -> None:
        self.client = client
        self.directory = directory
        self.told: list[Any] = []
        self.inner = client.bus
        self.faults = Faults(client.bus)
        client.bus = self.faults

    async def subscriber(self, url: str = URL, **options: Any) -> esp.Subscriber:
        return await self.client.subscriber(url, **{"side": "in", "on_notice": self.told.append} | options)

    async def publish(self, *numbers: int) -> None:
        """A block a number, over the good bus, from a publisher of its own."""
        good, self.client.bus = self.client.bus, self.inner
        async with self.client.publisher(URL, SCHEMA) as pub:
            for number in numbers:
                await pub.inject([(number, str(number))])
        self.client.bus = good

    async def raw(self, *messages: bytes) -> None:
        """Messages as they are, past everything."""
        pipe = await self.inner.pipe(TOPIC)
        await pipe.write(messages)
        await pipe.aclose()

    def of(self, kind: type) -> list[Any]:
        return [told for told in self.told if isinstance(told, kind)]


def block(
    id: int, *, source: int = 7, run: int = 0, link: int = 0, schema: esp.Schema = SCHEMA, body: bytes | None = None,
    count: int = 1, kind: int = BLOCK, settled: int = 0,
) -> bytes:  # fmt: skip
    """A whole frame, as somebody else might write it."""
    body = codec(schema).encode([(id, "x")] if len(schema.fields) == 2 else [(id,)]) if body is None else body
    sealed = seal(kind, ROWS, 0, count, source, run, id, schema.fingerprint, link, body)
    return frames([sealed], settled, 0)[0]


async def numbers(sub: esp.Subscriber, count: int) -> list[int]:
    """The first value of the next blocks."""
    async with asyncio.timeout(5):
        return [(await anext(sub)).rows()[0][0] for _ in range(count)]


async def nothing_more(sub: esp.Subscriber) -> bool:
    """Whether everything was read. A marker from another topic's time is not needed: the log's end is known."""
    feed = sub._feed
    assert feed is not None
    end = (await feed.bounds()).end
    return not sub._ready and (sub._read_to is None or sub._read_to == end - 1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def ticks(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def outcome(awaited: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(5):
            return await awaited
    except (Exception, StopAsyncIteration) as error:  # noqa: BLE001
        return error


@pytest.fixture
async def bench(bus_directory: Path) -> AsyncIterator[Bench]:
    client = await esp.init(dir=bus_directory)
    yield Bench(client, bus_directory)
    await client.aclose()


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


async def test_two_publishers_are_two_sequences(bench: Bench) -> None:
    sub = await bench.subscriber()
    async with bench.client.publisher(URL, SCHEMA) as one, bench.client.publisher(URL, SCHEMA) as two:
        for number in range(10):
            await one.inject([(number, "one")])
            await two.inject([(number, "two")])
        await one.flush()
        await two.flush()
        found: dict[int, list[int]] = {one.source: [], two.source: []}
        async with asyncio.timeout(5):
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
    await asyncio.sleep(0.002)
    middle = datetime.now(UTC)
    await asyncio.sleep(0.002)
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
    async with asyncio.timeout(5):
        second = [await anext(sub) for _ in range(3)][1]
    await sub.seek(second.position)
    assert await numbers(sub, 3) == [2, 3, 4]
    await sub.seek("earliest")
    assert await numbers(sub, 4) == [1, 2, 3, 4]
    await sub.seek("latest")
    await bench.publish(5)
    assert await numbers(sub, 1) == [5]


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


# groups


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
        async with asyncio.timeout(5):
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
    async with asyncio.timeout(5):
        got = await anext(sub)
    with pytest.raises(esp.NoGroup, match="group="):
        await sub.confirm(got)


async def test_a_block_of_another_subscriber_cannot_be_confirmed(bench: Bench) -> None:
    await bench.publish(1, 2, 3)
    async with await bench.subscriber(start="earliest") as plain, await bench.subscriber(group="a") as a:
        async with asyncio.timeout(5):
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
    async with await bench.subscriber(group="g") as sub, asyncio.timeout(2):  # the lease is ten seconds
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
    assert sub._feed is None


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
    assert await numbers(sub, 1) == [1]  # and 2 is ready

    def elsewhere() -> list[Any]:
        async def all_of_them() -> list[Any]:
            return [await outcome(call()) for call in (lambda: anext(sub), sub.confirm, sub.aclose)]

        return asyncio.run(all_of_them())

    found = await asyncio.to_thread(elsewhere)
    assert [type(error) for error in found] == [esp.WrongOrder] * 3
    assert await numbers(sub, 1) == [2]


async def test_a_subscriber_that_nobody_reads_does_nothing(bench: Bench) -> None:
    before = asyncio.all_tasks()
    await bench.subscriber()
    assert asyncio.all_tasks() == before


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
    async with await bench.subscriber(schema=SCHEMA, start="earliest") as sub, asyncio.timeout(5):
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
    async with await bench.subscriber(start="earliest") as sub, asyncio.timeout(5):
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
    async with await bench.subscriber(schema=SCHEMA, start="earliest") as sub, asyncio.timeout(5):
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
        async with asyncio.timeout(5):
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
        async with asyncio.timeout(5):
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


async def test_what_was_read_together_with_a_purge_has_a_schema(bench: Bench) -> None:
    """By the seam a Break may stand in front of messages of the same read."""
    await bench.publish(1)
    sub = await bench.subscriber(start="earliest")
    await numbers(sub, 1)
    sub._take([Break("the topic was emptied", None, incarnation=True), Message(50, block(1))])
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
    async with asyncio.timeout(5):
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
        async with asyncio.timeout(5):
            found[option] = [(e.values["symbol"], e.opcode) for e in (await anext(sub)).events()]
    assert found[""] == [("new", 6), ("old", 6), ("x", 2)]
    assert found["?collapse=true"] == [("new", 2), ("x", 2)]


async def test_rmretdel_leaves_out_what_a_retention_policy_deleted(bench: Bench) -> None:
    async with bench.client.publisher(URL, SCHEMA) as pub:
        await pub.inject([(1, "a"), (2, "b"), (3, "c")], opcode=[3, 3, 1], flags=[2, 0, 2])
        await pub.inject([(4, "d")], opcode=3, flags=2)
    sub = await bench.subscriber(URL + "?rmretdel=true&collapse=true", start="earliest")
    async with asyncio.timeout(5):
        assert (await anext(sub)).rows() == [(2, "b"), (3, "c")]
        emptied = await anext(sub)
    assert (emptied.rows(), emptied.mappings(), emptied.events(), emptied.table().num_rows) == ([], [], [], 0)


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
    assert sub._feed is not None

    async def refuse(*_: Any) -> None:
        raise esp.BusRefused("no such queue")

    sub._feed.read = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(esp.BusRefused):
        await anext(sub)


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
