"""What Meteor, a brokerless stream, shows of itself by its tests, as behaviours of ours on the embedded bus.

Each starred test of Meteor, in the order of its page (`seed-systems.md`, 1c), is a test below or stands in this table.
Tests of the embedded bus are `tests/conformance/test_drivers.py::test_embedded[...]`, here `embedded[...]`; paths
begin in `tests/`.

PublisherTest
    testPublishToBoundedBuffer      below
    testPublishToStoredBuffer       below; there is no store behind the ring: how much a topic keeps is the ring's size
    testPublishDirect               unit/publisher/test_deliveries.py::test_ids_count_from_one_without_a_hole, and
                                    ...::test_a_delivery_tells_when_the_bus_has_the_block
SubscriberUngroupedTest
    testIllegalDeactivate           no meaning: nobody is deactivated; a reader leaves by its close, of a group or not
    testIllegalReactivate           no meaning: what was closed stays closed and says "open a new one",
                                    unit/subscriber/test_lifetime.py::test_after_the_close_every_call_says_so
    testIllegalConfirm              unit/subscriber/test_groups.py::test_without_a_group_there_is_nothing_to_confirm
    testConsumeEmpty                unit/subscriber/test_lifetime.py::test_no_task_is_left_over_many_reads_and_timeouts
    testConsumeOne                  unit/subscriber/test_reading.py::
                                    test_without_a_start_and_a_group_it_begins_with_what_comes
    testConsumeTwo                  below
    testSeek                        unit/subscriber/test_reading.py::test_seek_reads_again_from_another_place
    testSeekIllegalArgumentTooLow   unit/subscriber/test_reading.py::test_a_start_that_is_none_is_refused[-1]
    testSeekIllegalArgumentBeyondLastOffset
                                    below, the other way round: a place that is not there yet is waited for
    testStaleRead                   unit/subscriber/test_gaps.py::
                                    test_what_the_ring_took_before_it_was_read_is_told: told, where Meteor only logs
    testInitialOffsetEarliest       unit/subscriber/test_reading.py::test_it_begins_where_it_is_told[earliest-...]
    testInitialOffsetLatest         unit/subscriber/test_reading.py::
                                    test_without_a_start_and_a_group_it_begins_with_what_comes
    testInitialOffsetNone           no meaning: every subscriber has a start; what is none is refused at once,
                                    unit/subscriber/test_reading.py::test_a_start_that_is_none_is_refused
    testReceiverConsume             no receiver but the loop of a task, which a close ends:
                                    unit/subscriber/test_lifetime.py::test_a_close_ends_the_loop_of_a_task_that_waits
    testReceiverDuplicateAttach     unit/subscriber/test_lifetime.py::test_two_tasks_cannot_read_from_one_subscriber
SubscriberGroupedTest
    testIllegalSeek                 unit/subscriber/test_reading.py::test_seek_is_not_for_groups_nor_after_the_close
    testConsumeEmpty                below
    testNotAssignedFollowedByAssignment
                                    unit/subscriber/test_groups.py::test_a_second_reader_of_a_group_waits_for_the_first
    testConsumeExtendLeaseAndConfirm
                                    taking over and confirming: unit/subscriber/test_groups.py::
                                    test_a_group_that_another_reader_took_over_moves_nothing; extending: below
    testConfirmFailureOffsetTooLow  no meaning: a block is confirmed, not a number, and no block stands before the first
    testConfirmFailureOffsetTooHigh unit/subscriber/test_groups.py::
                                    test_a_block_of_another_subscriber_cannot_be_confirmed
    testConfirmLastReadWithoutReading
                                    unit/subscriber/test_groups.py::test_confirm_before_anything_was_read_does_nothing
    testInitialOffsetEarliest       unit/subscriber/test_groups.py::test_a_group_goes_on_behind_what_it_confirmed
    testInitialOffsetLatest         unit/subscriber/test_groups.py::test_a_group_may_begin_late
    testInitialOffsetNone           no meaning: a group with nothing stored begins at `start`, there is no way without
    testTwoSubscribersWithActivation
                                    below; the other one is activated by the close of the first
    testTwoSubscribersTwoGroups     unit/subscriber/test_groups.py::test_two_groups_do_not_know_each_other
    testTwoSubscribersTwoStreams    embedded[two_groups]
PubSubTest, PubSubOneWayTest, PubSubRoundTripTest
    all five                        below
ElectionTest; the log election of a failover group is the only one there is
    testSingleNodeEmptyWithNoCandidates
                                    unit/failover/test_ballot.py::test_at_the_start_of_a_log_nobody_leads
    testSingleNodeElectFromVacantAndTouchYield
                                    integration/test_failover.py::
                                    test_hand_over_of_a_standby_is_nothing_and_alone_one_leads_again; that nobody leads
                                    once all have left: integration/test_failover_members.py::
                                    test_a_group_name_may_be_used_elsewhere_once_the_other_group_has_ended
    testTwoNodesOneCandidateElectFromVacant
                                    unit/failover/test_ballot.py::
                                    test_readers_from_the_start_that_have_read_the_same_think_the_same
    testTwoNodesTwoCandidatesElectFromVacant
                                    below
    testSingleNodeElectFromOtherAndExtend
                                    integration/test_kills.py and chaos/test_chaos.py, by the death of the other
    testSingleNodeTouchNotTenantVacant, testSingleNodeTouchNotTenantOther
                                    nobody calls to extend a leadership; the beat of one who does not lead counts for
                                    nothing: unit/failover/test_ballot.py::
                                    test_a_beat_of_a_lower_term_or_of_another_member_is_not_the_leaders; the reader of
                                    a group that lost it is told: embedded[deposed_reader_reads_no_more]
    testSingleNodeYieldNotTenantVacant
                                    unit/failover/test_ballot.py::test_only_the_leader_can_resign
RecordBatchTest
    testEmpty, testEmptyFirst, testEmptyLast
                                    no meaning: there is no empty batch, reading waits for the first block; nor is there
                                    an empty block: unit/publisher/test_shapes.py::
                                    test_a_block_without_events_is_refused
"""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.notices import Missed, Notice, Skipped

URL = "dfESP://meteor:5555/project/query/stream"
REPLIES = "dfESP://meteor:5555/project/query/replies"
SCHEMA = "number*:int64,text:string"


@pytest.fixture
async def client(bus_directory: Path) -> AsyncIterator[esp.Client]:
    async with esp.init(dir=bus_directory) as client:
        yield client


async def publish(publisher: esp.Publisher, numbers: Sequence[int]) -> list[str]:
    """A block a number, each on the bus before the next is given; what their deliveries said."""
    return [await (await publisher.inject([(number, "x")])) for number in numbers]


async def read(subscriber: esp.Subscriber, count: int) -> list[int]:
    """The numbers of the next blocks."""
    async with asyncio.timeout(60):
        return [(await anext(subscriber)).rows()[0][0] for _ in range(count)]


async def poll(subscriber: esp.Subscriber, seconds: float = 0.05) -> list[int]:
    """The number of what comes within a time, if anything does."""
    try:
        async with asyncio.timeout(seconds):
            return [(await anext(subscriber)).rows()[0][0]]
    except TimeoutError:
        return []


def subscriber(client: esp.Client, **how: Any) -> Any:
    return client.subscriber(URL, SCHEMA, **{"side": "in"} | how)


# the publisher


async def test_a_ring_of_ten_takes_five_and_twenty_blocks_and_keeps_the_last_ten(bus_directory: Path) -> None:
    told: list[Notice] = []
    async with (
        esp.init(dir=bus_directory, ring_records=10, on_notice=told.append) as client,
        client.publisher(URL, SCHEMA) as pub,
        subscriber(client, start="earliest") as early,
    ):
        assert await publish(pub, range(5)) == ["acked"] * 5
        async with asyncio.timeout(60):
            assert [(await anext(early)).position for _ in range(5)] == [0, 1, 2, 3, 4]
        assert await publish(pub, range(5, 25)) == ["acked"] * 20
        async with subscriber(client, start=0) as scan:
            assert await read(scan, 10) == list(range(15, 25))
            assert await poll(scan) == []
    assert [notice.messages for notice in told if isinstance(notice, Skipped)] == [15]
    assert [(notice.first, notice.last) for notice in told if isinstance(notice, Missed)] == [(1, 15)]


async def test_a_ring_with_room_keeps_every_block_for_who_comes_when_everybody_has_left(bus_directory: Path) -> None:
    for numbers in (range(5), range(5, 25)):
        async with esp.init(dir=bus_directory) as client, client.publisher(URL, SCHEMA) as pub:
            assert await publish(pub, numbers) == ["acked"] * len(numbers)
    async with esp.init(dir=bus_directory) as client, subscriber(client, start=0) as scan:
        assert await read(scan, 25) == list(range(25))
        assert await poll(scan) == []


# a subscriber without a group


async def test_two_blocks_that_are_there_come_in_one_batch_in_their_order_and_then_nothing(client: esp.Client) -> None:
    async with client.publisher(URL, SCHEMA) as pub, subscriber(client) as sub:
        await publish(pub, [1, 2])
        batches = sub.batches()
        async with asyncio.timeout(60):
            assert [block.rows()[0][0] for block in await anext(batches)] == [1, 2]
        await batches.aclose()
        assert await poll(sub) == []


async def test_a_seek_beyond_the_end_is_no_error_but_waits_for_what_will_stand_there(client: esp.Client) -> None:
    async with client.publisher(URL, SCHEMA) as pub, subscriber(client, start="earliest") as sub:
        await sub.seek(1)
        assert await poll(sub) == []
        await publish(pub, [1])
        assert await poll(sub) == []
        await publish(pub, [2])
        assert await read(sub, 1) == [2]


# subscribers of a group


async def test_a_group_on_an_empty_topic_gets_nothing_and_a_confirm_then_stores_nothing(client: esp.Client) -> None:
    async with subscriber(client, group="g") as first:
        async with subscriber(client, group="g") as second:
            for sub in (first, second, first, second):
                assert await poll(sub) == []
            await first.confirm()
            await second.confirm()
        assert await poll(first) == []
        await first.confirm()
    async with client.publisher(URL, SCHEMA) as pub:
        await publish(pub, [1])
        async with subscriber(client, group="g", start="latest") as third:  # counts, as nothing is stored
            await publish(pub, [2])
            assert await read(third, 1) == [2]


async def test_every_poll_of_its_reader_keeps_a_group_beyond_the_lease(bus_directory: Path) -> None:
    lease = 1.0
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(esp.init(dir=bus_directory, lease=lease)) for _ in range(2)]
        pub = await one.publisher(URL, SCHEMA)
        keeper = await subscriber(one, group="g")
        await publish(pub, [1])
        assert await read(keeper, 1) == [1]
        waiting = asyncio.create_task(read(await subscriber(other, group="g"), 1))
        end = asyncio.get_running_loop().time() + 1.5 * lease
        while asyncio.get_running_loop().time() < end:
            assert await poll(keeper, lease / 10) == []
        assert not waiting.done()
        await keeper.confirm()  # it is the group's reader to this day
        await publish(pub, [2])
        await keeper.aclose()
        assert await waiting == [2]


async def test_a_group_goes_from_one_reader_to_the_other_and_back_behind_what_each_confirmed(
    client: esp.Client,
) -> None:
    async with client.publisher(URL, SCHEMA) as pub, subscriber(client, group="g") as other:
        async with subscriber(client, group="g") as one:
            await publish(pub, [1, 2])
            assert await read(one, 1) == [1]
            waiting = asyncio.create_task(read(other, 1))
            await one.confirm()
            assert await read(one, 1) == [2]
            assert await poll(one) == []
            assert not waiting.done()
        assert await waiting == [2]  # was read by the first one too, but not confirmed
        await publish(pub, [3])
        async with subscriber(client, group="g") as back:
            await other.confirm()
            assert await read(other, 1) == [3]
            waiting = asyncio.create_task(read(back, 1))
            assert await poll(other) == []
            assert not waiting.done()
            await other.aclose()
            assert await waiting == [3]
            assert await poll(back) == []


# publishers and subscribers, in two processes

READERS = """
    import asyncio, json, sys
    import esp_pubsub as esp

    url, schema, directory, group, names = json.loads(sys.argv[1])

    async def read(name, subscriber):
        async for block in subscriber:
            print(json.dumps([name, block.rows()[0][0]]), flush=True)

    async def main():
        async with esp.init(dir=directory) as client, asyncio.TaskGroup() as tasks:
            for name in names:
                subscriber = await client.subscriber(url, schema, side="in", start="latest", group=group)
                tasks.create_task(read(name, subscriber))
            print(json.dumps("ready"), flush=True)

    asyncio.run(main())
"""


class Everybody:
    """Three readers: one in this process, two in another. What they get, in the order in which they say so."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def here(self, subscriber: esp.Subscriber) -> None:
        async for block in subscriber:
            self.said.put_nowait(("here", block.rows()[0][0]))

    async def there(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            self.said.put_nowait(tuple(json.loads(line)))

    async def next(self, count: int) -> list[tuple[str, int]]:
        async with asyncio.timeout(60):
            return [await self.said.get() for _ in range(count)]

    async def nothing_more(self, seconds: float = 0.2) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.said.get()
        except TimeoutError:
            return True
        return False


@asynccontextmanager
async def three_readers(client: esp.Client, directory: Path, group: str | None) -> AsyncIterator[Everybody]:
    everybody = Everybody()
    settings = json.dumps([URL, SCHEMA, str(directory), group, ["there 1", "there 2"]])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(READERS), settings, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert json.loads(await process.stdout.readline()) == "ready"
        async with asyncio.TaskGroup() as tasks, subscriber(client, start="latest", group=group) as sub:
            tasks.create_task(everybody.here(sub))
            listening = tasks.create_task(everybody.there(process.stdout))
            yield everybody
            process.kill()
            await listening
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_three_readers_in_two_processes_each_get_all_five_in_order(
    client: esp.Client, bus_directory: Path
) -> None:
    async with three_readers(client, bus_directory, None) as everybody, client.publisher(URL, SCHEMA) as pub:
        await publish(pub, range(1, 6))
        got: dict[str, list[int]] = {}
        for name, number in await everybody.next(15):
            got.setdefault(name, []).append(number)
        assert got == {name: [1, 2, 3, 4, 5] for name in ("here", "there 1", "there 2")}
        assert await everybody.nothing_more()


async def test_of_three_readers_of_a_group_in_two_processes_exactly_one_gets_all_five_in_order(
    client: esp.Client, bus_directory: Path
) -> None:
    async with three_readers(client, bus_directory, "g") as everybody, client.publisher(URL, SCHEMA) as pub:
        await publish(pub, range(1, 6))
        found = await everybody.next(5)
        assert [number for _, number in found] == [1, 2, 3, 4, 5]
        assert len({name for name, _ in found}) == 1
        assert await everybody.nothing_more()


async def test_two_publishers_lose_nothing_of_ten_thousand_records_each_to_four_subscribers(
    client: esp.Client,
) -> None:
    records = [f"{number:010d}" for number in range(10_000)]  # ten bytes

    async def send(publisher: esp.Publisher) -> None:
        for record in records:
            await publisher.inject([(record,)])
        await publisher.flush()

    async def take(subscriber: esp.Subscriber) -> None:
        for _ in range(2 * len(records)):
            block = await anext(subscriber)
            got[subscriber][block.source] += [record for (record,) in block.rows()]

    async with AsyncExitStack() as stack, asyncio.timeout(60):
        publishers = [await stack.enter_async_context(client.publisher(URL, "record*:string")) for _ in range(2)]
        subscribers = [await stack.enter_async_context(client.subscriber(URL, side="in")) for _ in range(4)]
        got: dict[esp.Subscriber, dict[int, list[str]]] = {
            sub: {pub.source: [] for pub in publishers} for sub in subscribers
        }
        async with asyncio.TaskGroup() as tasks:
            for pub in publishers:
                tasks.create_task(send(pub))
            for sub in subscribers:
                tasks.create_task(take(sub))
        for found in got.values():
            assert list(found.values()) == [records, records]


@asynccontextmanager
async def echo(directory: Path) -> AsyncIterator[None]:
    """Another client, which answers each block by one with its number and `echo`."""

    async def answer(requests: esp.Subscriber, replies: esp.Publisher) -> None:
        async for block in requests:
            await replies.inject([(number, "echo") for number, _ in block.rows()])

    async with (
        esp.init(dir=directory) as client,
        client.publisher(REPLIES, SCHEMA) as replies,
        asyncio.TaskGroup() as tasks,
        subscriber(client) as requests,
    ):
        tasks.create_task(answer(requests, replies))
        yield


async def test_a_hundred_requests_on_their_way_at_once_get_their_hundred_replies_in_order(
    client: esp.Client, bus_directory: Path
) -> None:
    async with (
        echo(bus_directory),
        client.publisher(URL, SCHEMA) as requests,
        client.subscriber(REPLIES, side="in") as replies,
        asyncio.timeout(60),
    ):
        deliveries = [await requests.inject([(number, "ask")]) for number in range(100)]
        assert [(await anext(replies)).rows() for _ in range(100)] == [[(number, "echo")] for number in range(100)]
        assert [await delivery for delivery in deliveries] == ["acked"] * 100


async def test_a_hundred_requests_one_by_one_each_get_their_reply_before_the_next(
    client: esp.Client, bus_directory: Path
) -> None:
    async with (
        echo(bus_directory),
        client.publisher(URL, SCHEMA) as requests,
        client.subscriber(REPLIES, side="in") as replies,
        asyncio.timeout(60),
    ):
        for number in range(100):
            assert await (await requests.inject([(number, "ask")])) == "acked"
            assert (await anext(replies)).rows() == [(number, "echo")]
        assert replies.stats.blocks == 100


# the election


async def test_of_two_candidates_at_once_exactly_one_leads_and_the_other_knows_it(bus_directory: Path) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(esp.init(dir=bus_directory)) for _ in range(2)]

        async def member(client: esp.Client) -> esp.Publisher:
            return await client.publisher(URL, SCHEMA, failover=esp.Failover("feed"))

        members = await asyncio.gather(*map(member, clients))
        for begin in (1, 11, 21):
            async with asyncio.timeout(60):
                outcomes = await asyncio.gather(*(publish(each, range(begin, begin + 10)) for each in members))
            leader, other = sorted(members, key=lambda each: each.stats.role != "active")
            assert sorted(outcomes) == [["acked"] * 10, ["covered"] * 10]
            assert (leader.stats.sent, other.stats.sent) == (begin + 9, 0)
            assert (leader.stats.role, other.stats.role == "active") == ("active", False)
        term = leader.stats.term
        await leader.hand_over()
        async with asyncio.timeout(60):
            await (await other.inject([(31, "x")]))
        assert (other.stats.role, other.stats.term) == ("active", term + 1)
        await publish(leader, [31])
