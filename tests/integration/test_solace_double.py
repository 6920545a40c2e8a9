"""Solace: what users see over the double of a broker (tests/support/solace.py)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest

import esp_pubsub as esp
from esp_pubsub import registry
from esp_pubsub.address import Address
from esp_pubsub.bus import Break, Message
from esp_pubsub.errors import BusRefused, BusUnavailable
from esp_pubsub.transports.solace import Options
from esp_pubsub.transports.solace import bus as bus_module
from esp_pubsub.transports.solace.administration import endpoints
from esp_pubsub.transports.solace.names import flow_queue, last_value_queue
from esp_pubsub.wire.frame import BLOCK, parse
from tests.support.server import HOST
from tests.support.solace import Solace
from tests.support.solace import open_bus as open_double

LONG = 30.0  # nobody waits for so long: what is tested comes first, however loaded the machine
SCHEMA = "id*:int64,text:string"


@contextlib.asynccontextmanager
async def opened(solace: Solace, **settings: Any) -> AsyncIterator[Any]:
    bus = await open_double(
        Options(host=f"{HOST}:{solace.port}", username="us", timeout=LONG, keepalive=LONG, **settings)
    )
    try:
        yield bus
    finally:
        await bus.aclose()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUSES, "solace-double", "tests.support.solace")


@pytest.fixture
def topic() -> str:
    return f"host:5555/{secrets.token_hex(4)}/q/w/I"


async def data(feed: Any, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += [item.data for item in await feed.read(100, 1 << 20) if isinstance(item, Message)]
    return found


async def put(bus: Any, topic: str, *frames: bytes) -> None:
    pipe = await bus.pipe(topic)
    await pipe.write(frames)
    while await pipe.confirmed(len(frames) - 1) < len(frames):
        pass
    await pipe.aclose()


@pytest.mark.parametrize("persistent", [False, True], ids=["direct", "persistent"])
async def test_the_ten_lines_of_a_user(persistent: bool, double: None, topic: str) -> None:
    async with Solace() as solace:
        settings = {"host": f"{HOST}:{solace.port}", "username": "us", "buspersistence": persistent, "keepalive": LONG}
        url = f"dfESP://{topic.removesuffix('/I')}"
        async with (
            esp.init("solace-double", **settings) as client,
            client.publisher(url, SCHEMA) as publisher,
            client.subscriber(url, side="in") as subscriber,
        ):
            assert await (await publisher.inject([(1, "one")])) == "acked"
            block = await anext(subscriber)
            assert (block.id, block.rows()) == (1, [(1, "one")])


async def test_a_new_group_reads_what_the_replay_log_has_and_an_old_one_goes_on(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True, replaylog=True) as bus:
        await put(bus, topic, b"1", b"2")
        feed = await bus.feed(topic, "earliest", "g")
        found = await feed.read(100, 1 << 20)
        assert [each.data for each in found] == [b"1", b"2"]
        await feed.confirm(found[0].position, b"")
        await feed.aclose()
        await put(bus, topic, b"3")
        assert await data(await bus.feed(topic, "earliest", "g"), 2) == [b"2", b"3"]


async def test_a_new_group_starts_at_a_time_of_the_replay_log(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True, replaylog=True) as bus:
        await put(bus, topic, b"before")
        await asyncio.sleep(0.005)
        since = datetime.now(UTC)
        await put(bus, topic, b"after")
        assert await data(await bus.feed(topic, since, "g"), 1) == [b"after"]


async def test_without_a_replay_log_a_time_is_refused(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True) as bus:
        with pytest.raises(BusRefused, match="a replay log knows times"):
            await bus.feed(topic, datetime.now(UTC), "g")


async def test_a_broker_that_makes_no_queues_has_no_values_and_says_what_to_do(topic: str) -> None:
    async with Solace() as solace:
        solace.may_make = False
        async with opened(solace) as bus:
            assert not bus.capabilities.retained
            feed = await bus.feed(topic, "latest", None)
            await put(bus, topic, b"1")
            assert await data(feed, 1) == [b"1"]
            with pytest.raises(BusRefused, match="no value is retained"):
                await bus.retain(topic, "k", b"")
        async with opened(solace, buspersistence=True) as bus:
            with pytest.raises(BusRefused, match="esp doctor --solace says how"):
                await bus.feed(topic, "earliest", "g")


async def test_with_what_the_doctor_names_all_works_where_clients_make_no_queues(double: None, topic: str) -> None:
    url = f"dfESP://{topic.removesuffix('/I')}"
    async with Solace() as solace:
        solace.may_make = False
        for each in endpoints(Address.parse(url), "g", "feed", persistent=True):
            solace.add_queue(each.name, each.topic or "", last_value=each.last_value)
        made = set(solace.queues)
        settings = {"host": f"{HOST}:{solace.port}", "username": "us", "buspersistence": True, "keepalive": LONG}
        async with esp.init("solace-double", **settings) as client:
            assert client.bus.capabilities.retained
            async with (
                client.publisher(url, SCHEMA, failover=esp.Failover("feed")) as publisher,
                client.subscriber(url, side="in", group="g") as subscriber,
            ):
                await publisher.inject([(1, "one")])
                block = await anext(subscriber)
                await subscriber.confirm(block)
                assert publisher.stats.role == "active"
        assert set(solace.queues) <= made
        assert not solace.queues[f"g@{topic}"].messages.keys() - {2}, "only a beat may be left"


async def test_an_election_on_such_a_broker_needs_its_queue_only(topic: str) -> None:
    async with Solace() as solace:
        solace.may_make = False
        solace.add_queue(flow_queue("line"), "nothing")
        async with opened(solace) as bus:
            assert await bus.election("flow", "line", "me").campaign() > 1_700_000_000


async def test_who_takes_over_is_shown_the_last_message_where_a_queue_keeps_it(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "_LAST_VALUE", LONG)
    async with Solace() as solace, opened(solace, buspersistence=True) as bus:
        solace.add_queue(last_value_queue(topic), topic, last_value=True)
        await put(bus, topic, b"1", b"2")
        feed = await bus.feed(topic, "latest", None)
        other = topic.replace("host:", "another:")
        solace.add_queue(last_value_queue(other), other, last_value=True)
        await put(bus, other, b"of another engine")
        stranger = await bus.feed(other, "latest", None)
        election = bus.election("flow", "host:5555/M/F/feed#feed", "me")
        await election.campaign()
        assert stranger.fresh
        assert await data(feed, 1) == [b"2"]
        await put(bus, topic, b"3")
        assert await data(feed, 1) == [b"3"]
        await election.resign()
        await election.campaign()
        await put(bus, topic, b"4")
        assert await data(feed, 1) == [b"4"]


async def test_a_group_restarted_as_a_whole_sends_nothing_twice_where_a_queue_keeps_the_last_message(
    double: None, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Solace() as solace:
        solace.add_queue(last_value_queue(topic), topic, last_value=True)
        settings = {"host": f"{HOST}:{solace.port}", "username": "us", "buspersistence": True, "keepalive": LONG}
        url = f"dfESP://{topic.removesuffix('/I')}"
        for blocks, patience in ((20, 0.0), (25, LONG)):  # the first time there is nothing to wait for
            monkeypatch.setattr(bus_module, "_LAST_VALUE", patience)
            async with (
                esp.init("solace-double", **settings) as client,
                client.publisher(url, SCHEMA, failover=esp.Failover("feed")) as publisher,
            ):
                for id in range(1, blocks + 1):
                    await publisher.inject([(id, "")])
                await publisher.flush()
        ids = [parse(frame).id for _, about, frame in solace.log if about == topic and parse(frame).kind == BLOCK]
        assert ids == list(range(1, 26))


async def test_a_reader_that_the_broker_makes_inactive_has_lost_its_group_and_the_next_one_goes_on(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True) as bus:
        feed, following = await bus.feed(topic, "earliest", "g"), await bus.feed(topic, "earliest", "g")
        await put(bus, topic, b"1", b"2")
        found = await feed.read(100, 1 << 20)
        waiting = asyncio.create_task(data(following, 2))
        queue = solace.queues[f"g@{topic}"]
        while len(queue.consumers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        queue.pass_on()
        assert await waiting == [b"1", b"2"]
        for call in (feed.confirm(found[1].position, b"stolen"), feed.read(1, 1)):
            with pytest.raises(BusUnavailable, match="the broker has given it to another reader"):
                await call


async def test_a_flow_that_ends_while_its_link_lives_ends_the_reader_and_another_goes_on(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True) as bus:
        feed = await bus.feed(topic, "earliest", "g")
        await put(bus, topic, b"1")
        await feed.read(100, 1 << 20)
        solace.queues[f"g@{topic}"].end_flows()
        with pytest.raises(BusUnavailable, match="Queue Shutdown"):
            await feed.read(1, 1)
        assert await data(await bus.feed(topic, "earliest", "g"), 1) == [b"1"]


async def test_a_leader_whose_flow_ends_while_its_link_lives_leads_no_more(topic: str) -> None:
    async with Solace() as solace, opened(solace) as bus:
        election = bus.election("flow", "line", "me")
        await election.campaign()
        solace.queues[flow_queue("line")].end_flows()
        assert await election.watch() == "lost"
        assert await election.campaign() == 2


async def test_a_leader_that_the_broker_makes_inactive_leads_no_more(topic: str) -> None:
    async with Solace() as solace, opened(solace) as bus, opened(solace) as there:
        one, other = bus.election("flow", "line", "one"), there.election("flow", "line", "other")
        await one.campaign()
        waiting = asyncio.create_task(other.campaign())
        while len(solace.queues[flow_queue("line")].consumers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        solace.queues[flow_queue("line")].pass_on()
        assert await one.watch() == "lost"
        assert await waiting == 2


async def test_a_turn_that_overtakes_the_first_message_ends_the_reader_all_the_same(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True) as bus:
        feed, following = await bus.feed(topic, "earliest", "g"), await bus.feed(topic, "earliest", "g")
        queue = solace.queues[f"g@{topic}"]
        waiting = [asyncio.create_task(feed.read(100, 1 << 20))]
        while not feed._active:  # noqa: ASYNC110
            await asyncio.sleep(0)
        waiting.append(asyncio.create_task(following.read(100, 1 << 20)))
        while len(queue.consumers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        queue.put(b"1")
        queue.pass_on()
        with pytest.raises(BusUnavailable, match="the broker has given it to another reader"):
            await waiting[0]
        (message,) = await waiting[1]
        await following.confirm(message.position, b"ours")
        with pytest.raises(BusUnavailable, match="the broker has given it to another reader"):
            await feed.confirm(None, b"stolen")


async def test_a_group_whose_topic_is_kept_from_it_is_refused(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True) as bus:
        solace.kept_from_subscribers.add(topic)
        for _ in range(2):  # the first one has made the queue
            with pytest.raises(BusRefused, match="Subscription ACL Denied"):
                await bus.feed(topic, "earliest", "g")


async def test_a_group_whose_replay_failed_is_still_new(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True, replaylog=True) as bus:
        await put(bus, topic, b"1", b"2")
        solace.replays = False
        with pytest.raises(BusUnavailable, match="Out Of Replay Resources"):
            await bus.feed(topic, "earliest", "g")
        assert f"g@{topic}" in solace.queues
        solace.replays = True
        await put(bus, topic, b"3")
        feed = await bus.feed(topic, "earliest", "g")
        standby = await bus.feed(topic, "earliest", "g")
        assert await data(feed, 3) == [b"1", b"2", b"3"]
        await feed.aclose()
        assert await data(standby, 3) == [b"1", b"2", b"3"]


async def test_where_nothing_says_whether_a_group_is_new_the_past_is_refused(topic: str) -> None:
    async with Solace() as solace:
        solace.may_make = False
        solace.add_queue(f"g@{topic}", topic)
        async with opened(solace, buspersistence=True, replaylog=True) as bus:
            with pytest.raises(BusRefused, match="start is latest"):
                await bus.feed(topic, "earliest", "g")
            await put(bus, topic, b"1")
            assert await data(await bus.feed(topic, "latest", "g"), 1) == [b"1"]


async def test_a_topic_that_is_kept_from_a_publisher_ends_it(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True) as bus:
        solace.kept_from_publishers.add(topic)
        pipe = await bus.pipe(topic)
        with pytest.raises(BusRefused, match="Publish ACL Denied"):
            await pipe.write([b"1"])
            await pipe.confirmed(0)


async def test_what_is_too_much_for_a_direct_reader_is_dropped_and_told(topic: str) -> None:
    async with Solace() as solace, opened(solace, queuesize=1_000) as bus:
        feed = await bus.feed(topic, "latest", None)
        await put(bus, topic, *[b"%03d" % n + bytes(97) for n in range(30)])
        assert await feed.read(100, 1 << 20) == [Break("more than queuesize waited for this reader", 20)]
        assert [each[:3] for each in await data(feed, 10)] == [b"%03d" % n for n in range(20, 30)]


async def test_what_the_broker_dropped_is_told(topic: str) -> None:
    async with Solace() as solace, opened(solace) as bus:
        feed = await bus.feed(topic, "latest", None)
        for client in solace.clients:
            client.dropped.update(client.subscriptions)
        await put(bus, topic, b"next")
        (told,) = await feed.read(100, 1 << 20)
        assert isinstance(told, Break) and "too slow" in told.reason
        assert await data(feed, 1) == [b"next"]


async def test_a_stranger_s_request_is_passed_over(topic: str) -> None:
    async def answer(asked: bytes) -> bytes:
        return asked[::-1]

    async with Solace() as solace, opened(solace) as bus, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(bus.serve("host:5555/M", answer))
        while not any(about == "host:5555/M" for c in solace.clients for about, _ in c.subscriptions.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        solace.publish("host:5555/M", b"\xc1", guaranteed=False)
        solace.publish("host:5555/M", msgpack.packb(["somewhere", 1, b""]), guaranteed=False)
        assert await bus.request("host:5555/M", b"abc", 2.0) == b"cba"
        serving.cancel()


async def test_values_do_not_pile_up_in_their_queue(topic: str) -> None:
    async with Solace() as solace, opened(solace, buspersistence=True) as bus:
        feed = await bus.feed(topic, "earliest", "g")
        await put(bus, topic, *[b"%d" % n for n in range(70)])
        for message in await feed.read(70, 1 << 20):
            await feed.confirm(message.position, b"state")
        (queue,) = [queue for name, queue in solace.queues.items() if name.endswith("#state of g")]
        assert len(queue.messages) < 10
