"""What a user does on a real RabbitMQ broker, what strangers put on it, and what happens to it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest

import esp_pubsub as esp
from esp_pubsub.bus import Break, Message
from esp_pubsub.config import load_options
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable, ConfigError, NoAnswer, NotOffered
from esp_pubsub.notices import BadMessage, Missed, Notice, Skipped
from esp_pubsub.registry import driver
from esp_pubsub.transports.rabbitmq.pipe import Confirms
from tests.integration.members import SCHEMA, Reader, inject, rows, until
from tests.support.install import debian, run
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ

EXCHANGE = "integration"
PERSISTENT: dict[str, Any] = {"buspersistence": True}
MODES = pytest.mark.parametrize("mode", [{}, PERSISTENT], ids=["direct", "persistent"])


@pytest.fixture
def url() -> str:
    return f"dfESP://host:5555/{secrets.token_hex(4)}/q/w"


def topic_of(url: str) -> str:
    return f"{url.removeprefix('dfESP://')}/I"


def settings(rabbitmq: RabbitMQ, **more: Any) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": rabbitmq.nodes[0].port, "exchange": EXCHANGE, "timeout": 2.0} | more


@contextlib.asynccontextmanager
async def opened(rabbitmq: RabbitMQ, **more: Any) -> AsyncIterator[Any]:
    """The bus itself."""
    found, before = driver("rabbitmq"), asyncio.all_tasks()
    bus = await found.open_bus(found.Options(**settings(rabbitmq, **more)))
    ours = asyncio.all_tasks() - before
    try:
        yield bus
    finally:
        await bus.aclose()
    assert not {task for task in ours if not task.done()}, "a task is left"


@contextlib.asynccontextmanager
async def publishing(rabbitmq: RabbitMQ, url: str, **more: Any) -> AsyncIterator[esp.Publisher]:
    async with (
        esp.init("rabbitmq", on_notice=lambda _: None, **settings(rabbitmq, **more)) as client,
        client.publisher(url, SCHEMA) as publisher,
    ):
        yield publisher


@contextlib.asynccontextmanager
async def reading(
    rabbitmq: RabbitMQ, url: str, notices: list[Notice], group: str | None = None, **more: Any
) -> AsyncIterator[Reader]:
    async with (
        esp.init("rabbitmq", on_notice=notices.append, **settings(rabbitmq, **more)) as client,
        client.subscriber(url, SCHEMA, side="in", group=group) as subscriber,
    ):
        yield Reader(subscriber)


@contextlib.asynccontextmanager
async def stranger(rabbitmq: RabbitMQ) -> AsyncIterator[Any]:
    """A channel of somebody who does what he likes."""
    connection = await aio_pika.connect(rabbitmq.url)
    async with connection:
        yield await connection.channel()


# the first ten minutes

SUBSCRIBE = """
import asyncio, sys
import esp_pubsub as esp

async def main():
    async with esp.init("rabbitmq", config=sys.argv[1]) as client:
        async with client.subscriber(sys.argv[2], "id*:int64,a:string", side="in") as sub:
            print("ready", flush=True)
            async for block in sub:
                print(block.id, block.rows(), flush=True)
                await sub.confirm(block)
                if block.id == 3:
                    return

asyncio.run(main())
"""


async def test_two_processes_meet_on_the_broker_by_a_cfg_file_in_sas_form(
    rabbitmq: RabbitMQ, url: str, tmp_path: Path
) -> None:
    config = tmp_path / "rabbitmq.cfg"
    config.write_text(
        f'rabbitmq\n{{\n  host = "127.0.0.1"\n  port = "{rabbitmq.nodes[0].port}"\n  exchange = "{EXCHANGE}"\n'
        '  userid = "guest"\n  password = "guest"\n  buspersistence = true\n  queuename = "subpersist"\n}\nsas\n{\n}\n'
    )
    with subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", SUBSCRIBE, str(config), url], stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert await asyncio.to_thread(reader.stdout.readline) == "ready\n"
        async with stranger(rabbitmq) as channel:  # named as in the vendor's walk-through: prefix and topic
            await channel.get_queue(f"subpersist@{topic_of(url)}")
        async with (
            esp.init("rabbitmq", config=config) as client,
            client.publisher(url, SCHEMA) as publisher,
        ):
            await inject(publisher, 1, 3)
        lines = (await asyncio.to_thread(reader.stdout.read)).splitlines()
    assert lines == [f"{id} {rows(id)}" for id in (1, 2, 3)]
    assert reader.returncode == 0


async def test_a_group_goes_on_behind_what_it_confirmed(rabbitmq: RabbitMQ, url: str) -> None:
    async with reading(rabbitmq, url, [], "g", **PERSISTENT):
        pass
    async with publishing(rabbitmq, url, **PERSISTENT) as publisher:
        await inject(publisher, 1, 20)
    async with reading(rabbitmq, url, [], "g", **PERSISTENT) as reader:
        await reader.to(12, confirm_every=5)
    async with reading(rabbitmq, url, [], "g", **PERSISTENT) as reader:
        reader.following = 11
        await reader.to(20, confirm_every=1)
        await reader.nothing_more()


async def test_direct_has_no_groups_and_says_so(rabbitmq: RabbitMQ, url: str) -> None:
    with pytest.raises(NotOffered, match="groups"):
        async with reading(rabbitmq, url, [], "g"):
            pass


async def test_what_nobody_reads_is_counted_and_is_no_error(rabbitmq: RabbitMQ, url: str) -> None:
    async with opened(rabbitmq) as bus:
        pipe = await bus.pipe(topic_of(url))
        await pipe.write([b"a", b"b"])
        assert await confirmed(pipe, 2) == 2
        assert bus.unroutable == 2
        await pipe.aclose()
        await bus.feed(topic_of(url), "latest", None)
        pipe = await bus.pipe(topic_of(url))
        await pipe.write([b"c"])
        assert await confirmed(pipe, 1) == 1
        assert bus.unroutable == 2


async def confirmed(pipe: Any, count: int) -> int:
    found = 0
    async with asyncio.timeout(10):
        while found < count:
            found = await pipe.confirmed(found)
    return found


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (["1", "2", "3"], [1, 2, 3]),
        (["3", "1", "2"], [0, 1, 3]),
        (["2", "4", "3*", "5"], [0, 0, 4, 5]),
        (["3*", "2", "1*"], [3, 3, 3]),
        (["2", "-1", "3", "9*"], [0, 0, 0, 0]),
        (["1", "-3*", "4", "2"], [1, 1, 1, 1]),
    ],
)
def test_confirmations_count_in_order_whatever_order_they_come_in(said: list[str], counts: list[int]) -> None:
    """n: message n is taken; with a star, all up to it; with a minus, refused."""
    confirms, found = Confirms(), []
    for word in said:
        confirms.take(abs(int(word.strip("*"))), word.endswith("*"), not word.startswith("-"))
        found.append(confirms.count)
    assert found == counts


async def test_a_group_with_an_ack_window_stores_late_and_at_close(rabbitmq: RabbitMQ, url: str) -> None:
    late = PERSISTENT | {"ackwindow": 3600.0}
    topic = topic_of(url)
    async with opened(rabbitmq, **late) as bus:
        feed = await bus.feed(topic, "latest", "g")
        pipe = await bus.pipe(topic)
        await pipe.write([b"a", b"b"])
        found = await feed.read(1, 100)
        await feed.confirm(found[0].position, b"state")
        assert await bus.retained(topic, "state of g") is None
        await feed.aclose()
        assert await bus.retained(topic, "state of g") == b"state"
        following = await bus.feed(topic, "latest", "g")
        assert (await following.read(1, 100))[0].data == b"b"


# what cannot be


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"password": "nix-da"}, BusRefused, "check userid and password"),
        ({"vhost": "nix"}, BusRefused, "virtual host 'nix'.*check vhost"),
        ({"port": 1}, BusUnavailable, "127.0.0.1:1"),
        ({"ssl": True}, BusRefused, "check port, ssl"),
        ({"exchange": "amq.nix"}, BusRefused, "reserved prefix"),
        ({"exchange": "amq.fanout"}, BusRefused, "'amq.fanout' is no topic exchange.*name another"),
    ],
)
async def test_settings_that_cannot_work_are_refused_with_the_way_out(
    rabbitmq: RabbitMQ, wrong: dict[str, Any], error: type[BusError], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        async with opened(rabbitmq, **wrong):
            pass
    assert "nix-da" not in str(raised.value)


async def test_a_user_a_password_and_a_virtual_host_may_have_any_characters(rabbitmq: RabbitMQ, url: str) -> None:
    user, password, vhost = f"ü:@/{secrets.token_hex(2)}", "p%20w @:/?#ß", f"a/b %2F {secrets.token_hex(2)}"
    for words in (
        ("add_user", user, password),
        ("add_vhost", vhost),
        ("set_permissions", "-p", vhost, user, ".*", ".*", ".*"),
    ):
        await asyncio.to_thread(rabbitmq.ctl, *words)
    ours = {"userid": user, "password": password, "vhost": vhost, "headers": "from=a test", "contenttype": "esp/x"}
    async with reading(rabbitmq, url, [], **ours) as reader, publishing(rabbitmq, url, **ours) as publisher:
        await inject(publisher, 1, 3)
        await reader.to(3)


async def test_a_transient_exchange_is_used_by_direct_and_refused_by_persistent(rabbitmq: RabbitMQ, url: str) -> None:
    async with stranger(rabbitmq) as channel:
        name = f"transient-{secrets.token_hex(4)}"
        exchange = await channel.declare_exchange(name, "topic", durable=False)
        notices: list[Notice] = []
        async with (
            reading(rabbitmq, url, notices, exchange=name) as reader,
            publishing(rabbitmq, url, exchange=name) as publisher,
        ):
            await inject(publisher, 1, 3)
            await reader.to(3)
        with pytest.raises(BusRefused, match=r"'durable'.*name another one, or delete it"):
            async with opened(rabbitmq, exchange=name, **PERSISTENT):
                pass
        await exchange.delete()


async def test_a_queue_of_other_arguments_is_refused_and_they_are_named(rabbitmq: RabbitMQ, url: str) -> None:
    topic = topic_of(url)
    async with opened(rabbitmq, **PERSISTENT) as classic, opened(rabbitmq, quorum=True, **PERSISTENT) as quorum:
        await classic.feed(topic, "latest", "g")
        with pytest.raises(BusRefused, match=r"'x-queue-type'.*set quorum as it was"):
            await quorum.feed(topic, "latest", "g")
        with pytest.raises(BusRefused, match="255"):
            await classic.pipe("x" * 256)
        with pytest.raises(BusRefused, match="start is latest"):
            await classic.feed(topic, 5, None)


async def test_a_message_over_the_brokers_own_limit_is_refused(rabbitmq: RabbitMQ, url: str) -> None:
    limit = "application:set_env(rabbit, max_message_size, {}), persistent_term:put(max_message_size, {})."
    await asyncio.to_thread(rabbitmq.ctl, "eval", limit.format(1_000, 1_000))
    try:
        async with opened(rabbitmq) as bus:
            pipe = await bus.pipe(topic_of(url))
            with pytest.raises(BusRefused, match=r"max size|maxmessage"):
                await pipe.write([b"small", bytes(5_000)])
                await confirmed(pipe, 2)
            await pipe.aclose()
    finally:
        await asyncio.to_thread(rabbitmq.ctl, "eval", limit.format(134_217_728, 134_217_728))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mode": "queue"}, "mode is"),
        ({"host": "a:b:c"}, "host is"),
        ({"prefetch": 0}, "prefetch"),
        ({"heartbeat": 0.5}, "heartbeat"),
        ({"quorum": True}, "buspersistence"),
        ({"sslcacert": "ca.pem"}, "ssl is not true"),
        ({"headers": "nix"}, "name=value"),
        ({"exchange": "ä"}, "exchange"),
    ],
)
def test_options_that_contradict_themselves_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_options(driver("rabbitmq").Options, section="rabbitmq", keywords=wrong, environ={})


def test_a_password_is_never_shown() -> None:
    cls = driver("rabbitmq").Options
    given = load_options(cls, section="rabbitmq", keywords={"password": "geheim"}, environ={})
    assert "geheim" not in repr(given)
    assert "geheim" not in repr(cls(password="geheim"))
    assert given.addresses == [("localhost", 5672)]
    assert cls(host="a,[::1]:9,b:7", ssl=True).addresses == [("a", 5671), ("::1", 9), ("b", 7)]


# strangers


async def test_foreign_messages_are_told_and_passed(rabbitmq: RabbitMQ, url: str) -> None:
    notices: list[Notice] = []
    async with (
        reading(rabbitmq, url, notices, "g", **PERSISTENT) as reader,
        publishing(rabbitmq, url, **PERSISTENT) as publisher,
        stranger(rabbitmq) as channel,
    ):
        await (await inject(publisher, 1, 2))
        exchange = await channel.get_exchange(EXCHANGE)
        for body in (b"", b"not ours", bytes(100)):
            await exchange.publish(aio_pika.Message(body, headers={"x-delivery-count": "no number"}), topic_of(url))
        await inject(publisher, 3, 4)
        await reader.to(4, confirm_every=1)
    assert len([notice for notice in notices if isinstance(notice, BadMessage)]) == 3


async def test_what_a_slow_reader_without_a_group_loses_it_is_told(rabbitmq: RabbitMQ, url: str) -> None:
    notices: list[Notice] = []
    async with (
        reading(rabbitmq, url, notices, prefetch=10, queuesize=5_000) as reader,
        publishing(rabbitmq, url) as publisher,
    ):
        await (await inject(publisher, 1, 300))
        await publisher.flush()
        await reader.to(1)
        seen = [1]
        async with asyncio.timeout(10):
            while seen[-1] != 300:
                seen.append((await anext(reader.subscriber)).id)
        missed = [id for notice in notices if isinstance(notice, Missed) for id in range(notice.first, notice.last + 1)]
        assert missed and sorted(seen + missed) == list(range(1, 301))


async def test_a_full_queue_that_refuses_is_trouble_and_nothing_is_lost_once_it_is_read(
    rabbitmq: RabbitMQ, url: str
) -> None:
    """Some are refused and later ones taken: the sender goes back to the first one that is missing."""
    notices: list[Notice] = []
    async with (
        stranger(rabbitmq) as channel,
        reading(rabbitmq, url, notices) as reader,
        publishing(rabbitmq, url) as publisher,
    ):
        limited = {"x-max-length": 50, "x-overflow": "reject-publish"}
        queue = await channel.declare_queue(exclusive=True, arguments=limited)
        await queue.bind(EXCHANGE, topic_of(url))
        delivery = await inject(publisher, 1, 400)
        await until(lambda: publisher.stats.troubles > 1)
        assert publisher.stats.acked < 400
        await queue.unbind(EXCHANGE, topic_of(url))
        async with asyncio.timeout(20):
            await delivery
        await reader.to(400)


async def test_a_message_that_no_reader_confirms_is_reported_and_given_up_in_the_end(
    rabbitmq: RabbitMQ, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a count of our own on a classic queue; a quorum queue counts for all its readers."""
    monkeypatch.setattr(sys.modules[driver("rabbitmq").open_bus.__module__.replace("bus", "group")], "POISONED", 12)
    for quorum in (False, True):
        topic = f"{topic_of(url)}{quorum}"
        async with opened(rabbitmq, quorum=quorum, **PERSISTENT) as bus:
            feed = await bus.feed(topic, "latest", "g")
            pipe = await bus.pipe(topic)
            await pipe.write([b"poison", b"next"])
            caplog.clear()
            for _ in range(11):
                assert (await feed.read(10, 1_000))[0].data == b"poison"
                await feed.aclose()
                feed = await bus.feed(topic, "latest", "g")
            assert "its first message was read 10 times and never confirmed" in caplog.text
            with pytest.raises(BusRefused, match="12 times and never confirmed"):
                await feed.read(10, 1_000)


async def test_a_reader_that_confirms_nothing_is_told_why_nothing_more_comes(
    rabbitmq: RabbitMQ, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(rabbitmq, prefetch=10, **PERSISTENT) as bus:
        feed = await bus.feed(topic_of(url), "latest", "g")
        pipe = await bus.pipe(topic_of(url))
        await pipe.write([b"%d" % n for n in range(15)])
        found: list[Any] = []
        while len(found) < 10:
            found += await feed.read(100, 1_000)
        async with asyncio.TaskGroup() as tasks:
            rest = tasks.create_task(feed.read(100, 1_000))
            await until(lambda: "confirm more often" in caplog.text)
            assert not rest.done()
            await feed.confirm(found[-1].position, b"")
        assert rest.result()[0].data == b"10"


# what happens to brokers


@MODES
async def test_a_killed_broker_comes_back_and_readers_and_publishers_go_on(
    rabbitmq: RabbitMQ, url: str, mode: dict[str, Any]
) -> None:
    """A group misses nothing. A direct reader is told that it was away, and misses at most what came meanwhile."""
    notices: list[Notice] = []
    group = "g" if mode else None
    async with (
        reading(rabbitmq, url, notices, group, **mode) as reader,
        publishing(rabbitmq, url, **mode) as publisher,
    ):
        await inject(publisher, 1, 50)
        await reader.to(50, confirm_every=7 if group else 0)
        await until(lambda: _knows_its_streams(rabbitmq))
        rabbitmq.kill()
        delivery = await inject(publisher, 51, 90)
        await asyncio.to_thread(rabbitmq.mend)
        async with asyncio.timeout(30):
            await delivery
        if group:
            await reader.to(90, seconds=30)
            await _confirm(reader)
            return
        seen: list[int] = []
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(_collect(reader, seen))
            await until(lambda: any(isinstance(notice, Skipped) for notice in notices), 20)
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
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
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
            tasks.create_task(reader.to(200, seconds=40))
            tasks.create_task(inject(leader, 1, 200, pause=0.005))
            tasks.create_task(inject(standby, 1, 200, pause=0.006))
            await until(lambda: leader.stats.acked > 60)
            proxy.refuse()
            proxy.cut()
            await until(lambda: standby.stats.role == "active", 15)


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
        async with asyncio.timeout(20):
            await publisher.flush()
        await reader.to(last, confirm_every=100)
        await reader.nothing_more()
        assert publisher.stats.troubles >= 12


async def test_a_frozen_broker_is_trouble_within_the_deadline_and_cancels_nobody(rabbitmq: RabbitMQ, url: str) -> None:
    async with opened(rabbitmq, heartbeat=1.0, timeout=1.0, **PERSISTENT) as bus:
        pipe, feed = await bus.pipe(topic_of(url)), await bus.feed(topic_of(url), "latest", None)
        grouped = await bus.feed(topic_of(url), "latest", "g")
        reads = [asyncio.ensure_future(each.read(10, 1_000)) for each in (feed, grouped)]
        await pipe.write([b"a"])
        assert await confirmed(pipe, 1) == 1
        found = (await reads[1])[0]
        await reads[0]
        stuffed = await bus.pipe(topic_of(url))
        rabbitmq.freeze()
        began = time.monotonic()
        await pipe.write([b"b"])
        with pytest.raises(BusUnavailable, match="nothing was confirmed"):
            await pipe.confirmed(1)
        with pytest.raises(BusUnavailable, match="nothing could be sent"):
            await stuffed.write([bytes(100_000)] * 500)
        assert time.monotonic() - began < 4
        with pytest.raises(BusUnavailable):
            await grouped.confirm(found.position, b"")
        with pytest.raises(BusUnavailable):
            await bus.pipe(topic_of(url))
        with pytest.raises(BusUnavailable):
            async with asyncio.timeout(12):
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
                async with asyncio.timeout(15):
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


async def _is_blocked(pipe: Any) -> None:
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


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an authority, and what it signed for a server and a client."""
    folder = tmp_path_factory.mktemp("tls")
    openssl = debian("openssl", "openssl")
    new = [openssl, "req", "-newkey", "rsa:2048", "-nodes", "-subj"]
    hint = "openssl makes no certificate"
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    run([*new, "/CN=ca", "-x509", "-days", "2", "-keyout", folder / "ca.key", "-out", folder / "ca.pem"], hint=hint)
    for name in ("server", "client"):
        run([*new, f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr"], hint=hint)
        sign = [openssl, "x509", "-req", "-days", "2", "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key"]
        files = ["-extfile", folder / "names", "-in", folder / f"{name}.csr", "-out", folder / f"{name}.pem"]
        run([*sign, "-CAcreateserial", *files], hint=hint)
    return folder


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[RabbitMQ]:
    """A broker that also speaks TLS, with those whose certificate it knows."""
    from tests.support.server import free_ports

    port = free_ports(1)[0]
    config = "\n".join([
        f"listeners.ssl.default = 127.0.0.1:{port}",
        f"ssl_options.cacertfile = {certificates / 'ca.pem'}",
        f"ssl_options.certfile = {certificates / 'server.pem'}",
        f"ssl_options.keyfile = {certificates / 'server.key'}",
        "ssl_options.verify = verify_peer",
        "ssl_options.fail_if_no_peer_cert = true",
    ])  # fmt: skip
    with RabbitMQ(config=config) as broker:
        broker.tls_port = port  # type: ignore[attr-defined]
        yield broker


@pytest.mark.timeout(120)
async def test_tls_with_certificates_on_both_sides(secure: Any, certificates: Path, url: str) -> None:
    ours: dict[str, Any] = {
        "port": secure.tls_port,
        "ssl": True,
        "sslcacert": certificates / "ca.pem",
        "sslcert": certificates / "client.pem",
        "sslkey": certificates / "client.key",
    }
    notices: list[Notice] = []
    async with reading(secure, url, notices, **ours) as reader, publishing(secure, url, **ours) as publisher:
        await inject(publisher, 1, 3)
        await reader.to(3)
    for wrong, says in (
        ({"sslcacert": certificates / "client.pem"}, "check sslcacert"),
        ({"sslcert": None, "sslkey": None}, "set sslcert and sslkey"),
        ({"ssl": False, "sslcacert": None, "sslcert": None, "sslkey": None}, "set ssl = true"),
    ):
        with pytest.raises(BusError, match=says):
            async with opened(secure, **ours | wrong):
                pass
    with pytest.raises(ConfigError, match="TLS file"):
        async with opened(secure, **ours | {"sslcacert": certificates / "nix.pem"}):
            pass


logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # it tells of the trouble that is meant here
