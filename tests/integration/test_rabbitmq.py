"""What a user does on a real RabbitMQ broker, and what strangers put on it."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import aio_pika
import pytest

import esp_pubsub as esp
from esp_pubsub.config import load_options
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable, ConfigError, NotOffered
from esp_pubsub.notices import BadMessage, Missed, Notice
from esp_pubsub.registry import driver
from esp_pubsub.transports.rabbitmq.pipe import Confirms
from tests.integration.members import SCHEMA, inject, rows, until
from tests.integration.rabbit import (
    EXCHANGE,
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
from tests.support.rabbitmq import RabbitMQ


@pytest.fixture
def url() -> str:
    return new_url()


def modes(rabbitmq: RabbitMQ, mode: str) -> dict[str, Any]:
    return {key: value for key, value in settings(rabbitmq, mode=mode).items() if key != "buspersistence"}


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


@pytest.mark.parametrize("mode", ["persistent", "stream"])
async def test_groups_say_how_far_they_are_and_whether_somebody_reads(rabbitmq: RabbitMQ, url: str, mode: str) -> None:
    async with esp.init("rabbitmq", on_notice=lambda _: None, **modes(rabbitmq, mode)) as client:
        assert await client.groups(url, side="in") == []
        start: Any = {"start": "earliest"} if mode == "stream" else {}
        async with (
            client.subscriber(url, SCHEMA, side="in", group="billing", **start) as subscriber,
            client.publisher(url, SCHEMA) as publisher,
        ):
            await (await inject(publisher, 1, 5))
            for _ in range(2):
                block = await anext(subscriber)
            await subscriber.confirm(block)
            [lag] = await client.groups(url, side="in")
            assert (lag.name, lag.topic, lag.reader) == ("billing", topic_of(url), "1 reader")
        [lag] = await client.groups(url, side="in")
        assert (lag.name, lag.behind, lag.reader, lag.since) == ("billing", 3, "", None)
        if mode == "stream":
            bounds = await client.bus.bounds(topic_of(url))
            assert lag.position == bounds.first + 2 and lag.seconds is not None and 0 < lag.seconds < 300
        else:
            assert (lag.position, lag.seconds) == (None, None)
        async with (
            esp.init("rabbitmq", **modes(rabbitmq, mode)) as other,
            other.subscriber(url, SCHEMA, side="in", group="audit", **start) as subscriber,
        ):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    async for _ in subscriber:
                        pass
        assert [lag.name for lag in await client.groups(url, side="in")] == ["audit", "billing"]
    async with stranger(rabbitmq) as channel:
        await channel.queue_delete(f"billing@{topic_of(url)}")
    async with esp.init("rabbitmq", **modes(rabbitmq, mode)) as client:
        assert [lag.name for lag in await client.groups(url, side="in")] == ["audit"]


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


async def test_what_was_confirmed_within_an_ack_window_outlives_the_link(rabbitmq: RabbitMQ, url: str) -> None:
    """Its messages come again and are let go as doubles: the state has to be stored before that."""
    late = PERSISTENT | {"ackwindow": 3600.0}
    topic = topic_of(url)
    async with opened(rabbitmq, **late) as bus:
        await lose_link_after_confirming(bus, topic, b"state")
        again = await bus.feed(topic, "latest", "g")
        assert [message.data for message in await again.read(1, 100)] == [b"a"]
        assert again.state == b"state" == await bus.retained(topic, "state of g")
        await lose_link_after_confirming(bus, topic, b"older")
        async with opened(rabbitmq, **PERSISTENT) as other:
            theirs = await other.feed(topic, "latest", "g")
            await theirs.confirm((await theirs.read(1, 100))[0].position, b"newer")
        again = await bus.feed(topic, "latest", "g")
        await again.read(1, 100)
        assert again.state == b"newer" == await bus.retained(topic, "state of g")


async def lose_link_after_confirming(bus: Any, topic: str, state: bytes) -> None:
    for feed in [each for each in bus._open if not each.closed]:
        await feed.aclose()
    feed = await bus.feed(topic, "latest", "g")
    pipe = await bus.pipe(topic)
    await pipe.write([b"a", b"b"])
    await feed.confirm((await feed.read(1, 100))[0].position, state)
    bus.link._connections["groups"][1].abort()
    with pytest.raises(BusUnavailable):
        while True:
            await feed.read(10, 100)
    await feed.aclose()


async def test_a_groups_state_that_is_too_large_to_be_kept_is_refused(rabbitmq: RabbitMQ, url: str) -> None:
    """Retention would take it some day, and with it what the group has read."""
    for mode in ({"mode": "persistent"}, {"mode": "stream"}):
        async with opened(rabbitmq, **mode) as bus:
            topic = f"{topic_of(url)}{mode['mode']}"
            feed = await bus.feed(topic, "latest", "g")
            pipe = await bus.pipe(topic)
            await pipe.write([b"a"])
            position = (await feed.read(1, 100))[0].position
            with pytest.raises(BusRefused, match="at most 512000 bytes"):
                await feed.confirm(position, bytes(600_000))


async def test_a_value_of_others_that_is_too_large_is_refused_until_there_is_another_one(
    rabbitmq: RabbitMQ, url: str
) -> None:
    async with opened(rabbitmq, **PERSISTENT) as bus, stranger(rabbitmq) as channel:
        await bus.retain(topic_of(url), "schema", b"ours")
        await channel.default_exchange.publish(aio_pika.Message(bytes(600_000)), f"{topic_of(url)}#schema")
        with pytest.raises(BusRefused, match=r"600000 bytes.*delete that queue"):
            await bus.retained(topic_of(url), "schema")
        await bus.retain(topic_of(url), "schema", b"newer")
        assert await bus.retained(topic_of(url), "schema") == b"newer"


# what cannot be


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"password": "nix-da"}, BusRefused, "check userid and password"),
        ({"vhost": "nix"}, BusRefused, "vhost nix not found.*check vhost"),
        ({"password": "nix-da", "mode": "stream"}, BusRefused, "check userid and password"),
        ({"vhost": "nix", "mode": "stream"}, BusRefused, "vhost nix not found.*check vhost"),
        ({"port": 1}, BusUnavailable, "127.0.0.1:1"),
        ({"streamport": 1, "mode": "stream"}, BusUnavailable, "streams at 127.0.0.1:1"),
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
    ours = {"userid": user, "password": password, "vhost": vhost}
    async with reading(rabbitmq, url, [], **ours) as reader, publishing(rabbitmq, url, **ours) as publisher:
        await inject(publisher, 1, 3)
        await reader.to(3)


@pytest.mark.parametrize("mode", ["direct", "persistent"])
async def test_messages_carry_the_content_type_and_the_headers_that_are_set(
    rabbitmq: RabbitMQ, url: str, mode: str
) -> None:
    async with (
        stranger(rabbitmq) as channel,
        opened(rabbitmq, mode=mode, headers="from=a test;site=b", contenttype="esp/x") as bus,
    ):
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(EXCHANGE, topic_of(url))
        pipe = await bus.pipe(topic_of(url))
        await pipe.write([b"a"])
        await confirmed(pipe, 1)
        found = await queue.get(no_ack=True)
        assert (found.body, found.content_type, found.headers) == (b"a", "esp/x", {"from": "a test", "site": "b"})


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
        ({}, "say the mode: stream keeps blocks for every reader, persistent keeps them for groups"),
        ({"mode": "stream", "host": "a:b:c"}, "host is"),
        ({"mode": "stream", "prefetch": 0}, "prefetch"),
        ({"mode": "stream", "heartbeat": 0.5}, "heartbeat"),
        ({"quorum": True, "mode": "direct"}, "buspersistence"),
        ({"mode": "stream", "sslcacert": "ca.pem"}, "ssl is not true"),
        ({"mode": "stream", "headers": "nix"}, "name=value"),
        ({"mode": "stream", "exchange": "ä"}, "exchange"),
    ],
)
def test_options_that_contradict_themselves_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_options(driver("rabbitmq").Options, section="rabbitmq", keywords=wrong, environ={})


def test_a_password_is_never_shown() -> None:
    cls = driver("rabbitmq").Options
    given = load_options(cls, section="rabbitmq", keywords={"password": "geheim", "mode": "stream"}, environ={})
    assert "geheim" not in repr(given)
    assert "geheim" not in repr(cls(password="geheim", mode="stream"))
    assert given.addresses == [("localhost", 5672)]
    assert cls(host="a,[::1]:9,b:7", ssl=True, mode="stream").addresses == [("a", 5671), ("::1", 9), ("b", 7)]


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
        async with asyncio.timeout(60):
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
        async with asyncio.timeout(60):
            await delivery
        await reader.to(400)


async def test_a_message_that_no_reader_confirms_is_reported_and_given_up_in_the_end(
    rabbitmq: RabbitMQ, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it ends each time another process: on a classic queue the broker keeps our count, a quorum queue has one
    of its own.
    """
    monkeypatch.setattr(sys.modules[driver("rabbitmq").open_bus.__module__.replace("bus", "group")], "POISONED", 12)
    for quorum in (False, True):
        topic = f"{topic_of(url)}{quorum}"
        async with opened(rabbitmq, quorum=quorum, **PERSISTENT) as bus:
            await bus.feed(topic, "latest", "g")
            pipe = await bus.pipe(topic)
            await pipe.write([b"poison", b"next"])
            await confirmed(pipe, 2)
        caplog.clear()
        for _ in range(11):
            async with opened(rabbitmq, quorum=quorum, **PERSISTENT) as bus:
                feed = await bus.feed(topic, "latest", "g")
                assert (await feed.read(10, 1_000))[0].data == b"poison"
        assert "its first message was read 10 times and never confirmed" in caplog.text
        async with opened(rabbitmq, quorum=quorum, **PERSISTENT) as bus:
            feed = await bus.feed(topic, "latest", "g")
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
