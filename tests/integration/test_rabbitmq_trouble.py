"""What happens to a real RabbitMQ broker, its links and its clients while they work."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aio_pika
import pytest

import esp_pubsub as esp
from esp_pubsub.bus import Break, Message
from esp_pubsub.errors import BusUnavailable, NoAnswer
from esp_pubsub.notices import Failure, Joined, Missed, Notice, Reconnected, Skipped
from esp_pubsub.wire.frame import BLOCK, frames, parse, seal
from tests.chaos import cuts
from tests.integration.members import SCHEMA, Reader, inject, until
from tests.integration.rabbit import (
    EXCHANGE,
    MODES,
    PERSISTENT,
    confirmed,
    new_url,
    opened,
    publishing,
    reading,
    settings,
    stranger,
    topic_of,
)
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ


@pytest.fixture
def url() -> str:
    return new_url()


@MODES
async def test_a_killed_broker_comes_back_and_readers_and_publishers_go_on(
    own_rabbitmq: RabbitMQ, url: str, mode: dict[str, Any]
) -> None:
    """A group misses nothing. A direct reader is told that it was away, and misses at most what came meanwhile."""
    notices: list[Notice] = []
    group = "g" if mode else None
    async with (
        reading(own_rabbitmq, url, notices, group, **mode) as reader,
        publishing(own_rabbitmq, url, **mode) as publisher,
    ):
        await inject(publisher, 1, 50)
        await reader.to(50, confirm_every=7 if group else 0)
        await until(lambda: _knows_its_streams(own_rabbitmq))
        seen: list[int] = []
        async with asyncio.TaskGroup() as tasks:
            if not group:  # it reads on while nobody is there
                collecting = tasks.create_task(_collect(reader, seen))
            own_rabbitmq.kill()
            delivery = await inject(publisher, 51, 90)
            await asyncio.to_thread(own_rabbitmq.mend)
            async with asyncio.timeout(60):
                await delivery
            if group:
                await reader.to(90)
                await _confirm(reader)
                return
            await until(lambda: any(isinstance(notice, Skipped) for notice in notices))
            await inject(publisher, 91, 95)
            await until(lambda: seen[-1:] == [95])
            collecting.cancel()
        assert seen == list(range(seen[0], 96))


def _knows_its_streams(rabbitmq: RabbitMQ) -> bool:
    """A broker writes down who keeps its streams a second after the first one was made; killed before, it never finds
    any of them again.
    """
    files = rabbitmq.directory.rglob("coordination/*/names.dets")
    return any(b"rabbit_stream_coordinator" in file.read_bytes() for file in files)


async def _collect(reader: Reader, seen: list[int]) -> None:
    async for block in reader.subscriber:
        seen += [block.id]


async def _confirm(reader: Reader) -> None:
    """What holds the state may be there a little later than the queue is."""
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        rest = tasks.create_task(_collect(reader, []))  # a feed that is lost by this is opened again by who reads
        while True:
            try:
                await reader.subscriber.confirm()
                break
            except BusUnavailable:
                await asyncio.sleep(0.05)
        rest.cancel()


@MODES
async def test_a_standby_takes_over_when_the_leader_loses_its_link(
    rabbitmq: RabbitMQ, url: str, mode: dict[str, Any]
) -> None:
    """It follows the topic by a bounded queue of its own; the subscriber gets every block once."""
    async with (
        reading(rabbitmq, url, [], "g" if mode else None, **mode) as reader,
        Proxy("127.0.0.1", rabbitmq.nodes[0].port) as proxy,
        _member(rabbitmq, url, port=proxy.port, **mode) as leader,
    ):
        await until(lambda: leader.stats.role == "active")
        async with _member(rabbitmq, url, **mode) as standby, asyncio.TaskGroup() as tasks:
            tasks.create_task(reader.to(200))
            tasks.create_task(inject(leader, 1, 200, pause=0.005))
            tasks.create_task(inject(standby, 1, 200, pause=0.006))
            await until(lambda: leader.stats.acked > 60)
            proxy.refuse()
            proxy.cut()
            await until(lambda: standby.stats.role == "active")


@contextlib.asynccontextmanager
async def _member(rabbitmq: RabbitMQ, url: str, **more: Any) -> AsyncIterator[esp.Publisher]:
    async with esp.init("rabbitmq", on_notice=lambda _: None, **settings(rabbitmq, **more)) as client:
        publisher = await client.publisher(
            url, SCHEMA, failover=esp.Failover("feed"), options=esp.PublisherOptions(close_timeout=0.3)
        )
        try:
            yield publisher
        finally:
            with contextlib.suppress(esp.EspError):
                await publisher.aclose()


async def test_an_asker_that_went_away_and_nodes_that_are_down_trouble_nobody(rabbitmq: RabbitMQ, url: str) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(data: bytes) -> bytes:
        begun.set()
        await go_on.wait()
        return data[::-1]

    both = f"127.0.0.1:1,127.0.0.1:{rabbitmq.nodes[0].port}"
    async with (
        opened(rabbitmq) as server,
        opened(rabbitmq, host=both) as asker,
        opened(rabbitmq) as first,
        asyncio.TaskGroup() as tasks,
    ):
        serving = tasks.create_task(server.serve(topic_of(url), answer))
        while not begun.is_set():  # a request is lost if the server is not there yet
            with contextlib.suppress(NoAnswer):
                await first.request(topic_of(url), b"abc", 0.1)
        await first.aclose()
        go_on.set()
        assert await asker.request(topic_of(url), b"abc", 5.0) == b"cba"
        serving.cancel()


async def test_links_that_break_in_the_middle_of_a_write_lose_and_double_nothing(rabbitmq: RabbitMQ, url: str) -> None:
    dice = random.Random(5)
    async with (
        Proxy("127.0.0.1", rabbitmq.nodes[0].port) as proxy,
        reading(rabbitmq, url, [], "g", **PERSISTENT) as reader,
        publishing(rabbitmq, url, **PERSISTENT, port=proxy.port) as publisher,
    ):
        last = 0
        for round in range(12):
            before, acked = publisher.stats.troubles, publisher.stats.acked + dice.randrange(200)
            if round % 2:
                proxy.cut_after(dice.randrange(20_000), "up")
            await inject(publisher, last + 1, last + 300)
            last += 300
            if not round % 2:
                await until(lambda acked=acked: publisher.stats.acked > acked)
                proxy.cut()
                last += 1
                await inject(publisher, last, last)  # one that is idle notices when there is something to send
            await until(lambda before=before: publisher.stats.troubles > before)
            proxy.heal()
        async with asyncio.timeout(60):
            await publisher.flush()
        await reader.to(last, confirm_every=100)
        await reader.nothing_more()
        assert publisher.stats.troubles >= 12


async def test_a_frozen_broker_is_trouble_within_the_deadline_and_cancels_nobody(rabbitmq: RabbitMQ, url: str) -> None:
    async with opened(rabbitmq, heartbeat=1.0, **PERSISTENT) as bus:
        pipe, feed = await bus.pipe(topic_of(url)), await bus.feed(topic_of(url), "latest", None)
        grouped = await bus.feed(topic_of(url), "latest", "g")
        reads = [asyncio.ensure_future(each.read(10, 1_000)) for each in (feed, grouped)]
        await pipe.write([b"a"])
        assert await confirmed(pipe, 1) == 1
        found = (await reads[1])[0]
        await reads[0]
        stuffed = await bus.pipe(topic_of(url))
        bus.link.timeout = 1.0
        rabbitmq.freeze()
        await pipe.write([b"b"])
        with pytest.raises(BusUnavailable, match="nothing was confirmed"):  # the deadline says so, not the heartbeat
            await pipe.confirmed(1)
        with pytest.raises(BusUnavailable, match="nothing could be sent"):
            await stuffed.write([bytes(100_000)] * 500)
        with pytest.raises(BusUnavailable):
            await grouped.confirm(found.position, b"")
        with pytest.raises(BusUnavailable):
            await bus.pipe(topic_of(url))
        with pytest.raises(BusUnavailable):
            async with asyncio.timeout(60):
                await feed.read(10, 1_000)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        began = time.monotonic()
        await bus.aclose()
        assert time.monotonic() - began < 10
        rabbitmq.thaw()


FROZEN = """
import asyncio, sys
from esp_pubsub.registry import driver
from esp_pubsub.errors import BusUnavailable

async def main():
    found = driver("rabbitmq")
    bus = await found.open_bus(found.Options(host="127.0.0.1", port=int(sys.argv[1]), exchange="integration",
                                             buspersistence=True, heartbeat=1.0))
    feed = await bus.feed(sys.argv[2], "latest", "g")
    print("ready", flush=True)
    position = (await feed.read(1, 100))[0].position
    print("read", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    try:
        await feed.confirm(position, b"stolen")
        print("confirmed", flush=True)
    except BusUnavailable:
        print("unavailable", flush=True)
    await bus.aclose()

asyncio.run(main())
"""


async def test_a_reader_that_was_frozen_for_long_has_lost_its_group_and_moves_nothing(
    rabbitmq: RabbitMQ, url: str
) -> None:
    command = [sys.executable, "-c", FROZEN, str(rabbitmq.nodes[0].port), topic_of(url)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as frozen:
        assert frozen.stdin is not None and frozen.stdout is not None
        assert await asyncio.to_thread(frozen.stdout.readline) == "ready\n"
        async with opened(rabbitmq, **PERSISTENT) as bus:
            pipe = await bus.pipe(topic_of(url))
            await pipe.write([b"a", b"b", b"c"])
            assert await asyncio.to_thread(frozen.stdout.readline) == "read\n"
            frozen.send_signal(signal.SIGSTOP)
            try:
                feed = await bus.feed(topic_of(url), "latest", "g")
                async with asyncio.timeout(60):
                    found = await feed.read(10, 100)
                assert [message.data for message in found][:1] == [b"a"]
                await feed.confirm(found[0].position, b"mine")
            finally:
                frozen.send_signal(signal.SIGCONT)
            frozen.stdin.write("go on\n")
            frozen.stdin.flush()
            assert await asyncio.to_thread(frozen.stdout.readline) == "unavailable\n"
            await feed.aclose()
            following = await bus.feed(topic_of(url), "latest", "g")
            assert (await following.read(1, 100))[0].data == b"b"
            assert following.state == b"mine"


async def test_a_broker_short_of_memory_holds_the_writer_back_and_says_so(
    rabbitmq: RabbitMQ, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(rabbitmq) as bus:
        feed = await bus.feed(topic_of(url), "latest", None)
        pipe = await bus.pipe(topic_of(url))
        await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1MB")
        try:
            await pipe.write([b"a"])  # the broker blocks those who write, when they write
            async with asyncio.TaskGroup() as tasks:
                connection = pipe._channel.connection
                blocked = tasks.create_task(_is_blocked(pipe))
                await blocked
                writing = tasks.create_task(pipe.write([b"b"]))
                await until(lambda: "takes no messages: waiting" in caplog.text)
                assert not writing.done() and connection.is_opened
                await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1GB")
            assert await confirmed(pipe, 2) == 2
            found = [message.data for _ in range(2) for message in await feed.read(1, 100)]
            assert found == [b"a", b"b"]
        finally:
            await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1GB")


async def test_an_alarm_that_outlasts_every_timeout_ends_no_link_and_loses_nothing(
    rabbitmq: RabbitMQ, url: str
) -> None:
    """It is told as trouble of the publisher; a group's confirm waits for its end."""
    async with (
        esp.init("rabbitmq", on_notice=lambda _: None, **settings(rabbitmq, **PERSISTENT)) as ours,
        esp.init("rabbitmq", on_notice=lambda _: None, **settings(rabbitmq, **PERSISTENT)) as theirs,
        ours.publisher(url, SCHEMA, options=esp.PublisherOptions(stall=1.0)) as publisher,
        theirs.subscriber(url, SCHEMA, side="in", group="g") as subscriber,
    ):
        reader = Reader(subscriber)
        await (await inject(publisher, 1, 10))
        await reader.to(10, confirm_every=5)
        await (await inject(publisher, 11, 15))
        await reader.to(15)
        links = ours.bus.link, theirs.bus.link
        before = [link._connections[kind][0] for link, kind in zip(links, ("writing", "groups"), strict=True)]
        async with asyncio.TaskGroup() as tasks:
            await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1MB")
            try:
                for link in links:
                    link.timeout = 1.0
                confirming = tasks.create_task(subscriber.confirm())
                await inject(publisher, 16, 30)
                await until(lambda: publisher.stats.troubles > 2)
                assert not confirming.done()
            finally:
                await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1GB")
                for link in links:
                    link.timeout = 5.0
        await reader.to(30, confirm_every=1)
        after = [link._connections[kind][0] for link, kind in zip(links, ("writing", "groups"), strict=True)]
        assert after == before and all(connection.is_opened for connection in after)


async def _is_blocked(pipe: Any) -> None:
    async with asyncio.timeout(60):
        while not await pipe._channel.is_blocked():  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.01)


@MODES
async def test_a_reader_whose_queue_was_deleted_takes_it_up_again_and_is_told(
    rabbitmq: RabbitMQ, url: str, mode: dict[str, Any]
) -> None:
    async with opened(rabbitmq, **mode) as bus, stranger(rabbitmq) as channel:
        topic, group = topic_of(url), "g" if mode else None
        feed = await bus.feed(topic, "latest", group)
        pipe = await bus.pipe(topic)
        await pipe.write([b"a"])
        await feed.read(1, 100)
        reading = asyncio.ensure_future(feed.read(1, 100))
        names = await asyncio.to_thread(rabbitmq.ctl, "list_bindings", "destination_name", "routing_key")
        (name,) = [
            line.split("\t")[0] for line in names.splitlines() if line.endswith(topic) and "amq.gen" in line
        ] or [f"g@{topic}"]
        if group:
            await channel.queue_delete(name)
        else:
            await asyncio.to_thread(rabbitmq.ctl, "delete_queue", name)
        with pytest.raises(BusUnavailable, match="deleted"):
            await reading
        await feed.aclose()
        again = await bus.feed(topic, "latest", group)
        await pipe.write([b"b"])
        (told,) = await again.read(10, 100)
        assert isinstance(told, Break) and "deleted" in told.reason
        assert [item.data for item in await again.read(10, 100) if isinstance(item, Message)] == [b"b"]


@pytest.mark.parametrize("gone", ["exchange", "persistent exchange", "persistent binding"])
async def test_a_reader_whose_exchange_or_binding_was_deleted_is_bound_again_and_is_told_of_the_gap(
    rabbitmq: RabbitMQ, url: str, gone: str
) -> None:
    """Blocks are acked meanwhile that nobody gets: the broker confirms what goes to no queue."""
    notices: list[Notice] = []
    more = {"exchange": f"deleted-{topic_of(url)[5:]}".replace("/", "-"), **(PERSISTENT if " " in gone else {})}
    async with (
        stranger(rabbitmq) as channel,
        reading(rabbitmq, url, notices, "g" if " " in gone else None, **more) as reader,
        publishing(rabbitmq, url, **more) as publisher,
    ):
        await (await inject(publisher, 1, 10))
        await reader.to(10)
        if "exchange" in gone:
            await channel.exchange_delete(more["exchange"])
        else:
            queue = await channel.get_queue(f"g@{topic_of(url)}", ensure=False)
            await queue.unbind(more["exchange"], topic_of(url))
        await (await inject(publisher, 11, 20))
        seen: list[int] = []
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(_collect(reader, seen))
            last = 20
            while not seen or seen[-1] <= 20:
                last += 1
                await (await inject(publisher, last, last))
            collecting.cancel()
    missed = [id for told in notices if isinstance(told, Missed) for id in range(told.first, told.last + 1)]
    assert sorted(seen + missed) == list(range(11, seen[-1] + 1))


@pytest.mark.parametrize("quorum", [False, True])
async def test_held_blocks_never_keep_away_the_one_that_they_wait_for(
    rabbitmq: RabbitMQ, url: str, quorum: bool
) -> None:
    """Block 1 stands behind many others, as after a refusal, and more of these than `prefetch`."""
    settings, notices = {"prefetch": 10, "quorum": quorum, **PERSISTENT}, list[Notice]()
    async with publishing(rabbitmq, url, **settings) as publisher, stranger(rabbitmq) as channel:
        copies = await channel.declare_queue(exclusive=True)
        await copies.bind(EXCHANGE, topic_of(url))
        for id in range(1, 61):
            await (await inject(publisher, id, id))
        first, *others = await _as_not_settled(copies, 60)
        async with reading(rabbitmq, url, notices, "g", **settings) as reader:
            exchange = await channel.get_exchange(EXCHANGE)
            for body in (*others, first):
                await exchange.publish(aio_pika.Message(body), topic_of(url))
            await reader.to(60, confirm_every=1)
    assert all(isinstance(told, Joined | Failure | Reconnected) for told in notices)


async def _as_not_settled(queue: Any, count: int) -> list[bytes]:
    """The blocks of a queue, from a sender that knows of none whether it is on the bus."""
    sealed = []
    while len(sealed) < count:
        if message := await queue.get(no_ack=True, fail=False):
            found = parse(message.body)
            if found.kind == BLOCK:
                ours = found.body_kind, found.flags, found.count, found.source, found.run, found.id, found.schema
                sealed.append(seal(BLOCK, *ours, found.link, found.body))
    return frames(sealed, 0, 0)


async def test_a_tag_of_a_lost_channel_is_not_acknowledged_on_another(rabbitmq: RabbitMQ, url: str) -> None:
    topic = topic_of(url)
    async with opened(rabbitmq, **PERSISTENT) as bus:
        feed = await bus.feed(topic, "latest", "g")
        pipe = await bus.pipe(topic)
        await pipe.write([b"a", b"b"])
        old = await feed.read(1, 100)
        await feed.aclose()
        again = await bus.feed(topic, "latest", "g")
        found = await again.read(1, 100)
        assert found[0].data == b"a" and found[0].position != old[0].position
        with pytest.raises(BusUnavailable, match="not the reader"):
            await again.confirm(old[0].position, b"stolen")
        await again.release([old[0].position])
        await again.aclose()
        third = await bus.feed(topic, "latest", "g")
        assert (await third.read(1, 100))[0].data == b"a"


@pytest.mark.parametrize("mode", ["persistent", "stream"])
async def test_nothing_is_left_behind_by_cuts_of_all_links(rabbitmq: RabbitMQ, mode: str) -> None:
    """`python -m tests.chaos.cuts` cuts 300 times, and counts objects too: here are those of all tests before."""
    said: list[str] = []
    assert {*await cuts.play(rabbitmq, mode, 10, 4, said.append)} <= {"objects"}, "\n".join(said)


LIMITS = pytest.mark.parametrize("mode", ["persistent", "stream"])


@LIMITS
async def test_a_limit_that_passes_is_waited_out_and_reported_in_the_broker_s_words(
    own_rabbitmq: RabbitMQ, url: str, mode: str
) -> None:
    notices: list[Notice] = []
    async with (
        reading(own_rabbitmq, url, notices, "g", mode=mode) as reader,
        publishing(own_rabbitmq, url, mode=mode) as publisher,
    ):
        await inject(publisher, 1, 20)
        await reader.to(20, confirm_every=7)
        await asyncio.to_thread(own_rabbitmq.ctl, "set_vhost_limits", '{"max-connections":0}')
        with pytest.raises(BusUnavailable, match=r"connection limit \(0\) is reached"):
            async with opened(own_rabbitmq, mode=mode):
                pass
        await asyncio.to_thread(own_rabbitmq.ctl, "close_all_connections", "limit")
        delivery = await inject(publisher, 21, 40)
        await asyncio.to_thread(own_rabbitmq.ctl, "clear_vhost_limits")
        async with asyncio.timeout(60):
            await delivery
        await reader.to(40)
        await _confirm(reader)


@pytest.mark.parametrize(
    ("limit", "lifted", "says"),
    [
        (("set_vhost_limits", '{"max-queues":0}'), ("clear_vhost_limits",), "queue limit in vhost .* is reached"),
        (("set_user_limits", "guest", '{"max-channels":0}'), ("clear_user_limits", "guest", "max-channels"),
         "reached the maximum allowed user limit"),
        (("set_user_limits", "guest", '{"max-connections":0}'), ("clear_user_limits", "guest", "max-connections"),
         "user connection limit .* is reached"),
    ],
    ids=["queues", "channels", "connections"],
)  # fmt: skip
async def test_a_limit_of_any_kind_is_trouble_in_the_broker_s_words(
    own_rabbitmq: RabbitMQ, url: str, limit: list[str], lifted: list[str], says: str
) -> None:
    async with opened(own_rabbitmq, mode="persistent") as bus:
        await asyncio.to_thread(own_rabbitmq.ctl, *limit)
        try:
            with pytest.raises(BusUnavailable, match=says):
                await bus.retain(topic_of(url), "schema", b"x")
        finally:
            await asyncio.to_thread(own_rabbitmq.ctl, *lifted)
        await _retained(bus, topic_of(url))


async def _retained(bus: Any, topic: str) -> None:
    """A limit that was lifted is gone in a moment."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(BusUnavailable):
                return await bus.retain(topic, "schema", b"x")
            await asyncio.sleep(0.05)
