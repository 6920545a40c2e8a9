"""A Kafka broker that is frozen, killed or cut off under a publisher and a subscriber."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.bus import Bus, Message, Pipe
from esp_pubsub.errors import BusUnavailable, DeliveryUnknown
from esp_pubsub.notices import Failure, Missed, Notice, Reconnected, Skipped
from esp_pubsub.registry import driver
from tests.integration.members import SCHEMA, Reader, inject, rows, until
from tests.support.kafka import Kafka

TIMEOUT = 2.5  # what the clients here give the broker
SLACK = 10.0  # what a loaded machine adds
STOP = 3 * TIMEOUT + 1  # what stopping a client may take


@pytest.fixture(scope="module")
def running() -> Iterator[Kafka]:
    with Kafka() as kafka:
        yield kafka


@pytest.fixture
def broker(running: Kafka) -> Iterator[Kafka]:
    yield running
    running.mend()


@pytest.fixture
def url() -> str:
    return f"dfESP://host:5555/{secrets.token_hex(4)}/q/w"


class Client:
    """A client and what it was told."""

    def __init__(self, client: esp.Client, notices: list[Notice]) -> None:
        self.client = client
        self.notices = notices

    def told(self, *kinds: type) -> list[Notice]:
        return [notice for notice in self.notices if isinstance(notice, kinds)]


@contextlib.asynccontextmanager
async def client(hostport: str, **settings: Any) -> AsyncIterator[Client]:
    notices: list[Notice] = []
    settings = {"timeout": TIMEOUT} | settings
    async with esp.init("kafka", hostport=hostport, on_notice=notices.append, **settings) as opened:
        yield Client(opened, notices)


async def ends(work: Coroutine[Any, Any, Any], within: float, *errors: type[Exception]) -> None:
    """It ends by one of these errors, and neither too late nor by somebody else's clock."""
    begun = time.monotonic()
    with pytest.raises(errors):
        async with asyncio.timeout(within + 10):
            await work
    assert time.monotonic() - begun < within + SLACK


async def test_every_wait_on_a_frozen_broker_ends_in_time_and_once_it_thaws_the_sequence_is_whole(
    broker: Kafka, url: str
) -> None:
    options = esp.PublisherOptions(buffer_blocks=1_000, ack_timeout=0.5)
    async with client(broker.bootstrap) as ours, client(broker.bootstrap) as theirs:
        publisher = await ours.client.publisher(url, SCHEMA, options=options)
        reader = Reader(await theirs.client.subscriber(url, side="in", group="g"))
        await (await inject(publisher, 1, 500))
        await reader.to(500)
        await inject(publisher, 501, 600)
        broker.freeze()
        delivery = await inject(publisher, 601, 1_500)

        async def one_more() -> None:
            async with asyncio.timeout(0.3):
                await publisher.inject(rows(1_501))

        async def read() -> None:
            async with asyncio.timeout(0.3):
                while True:
                    block = await anext(reader.subscriber)
                    assert block.id == reader.following
                    reader.following += 1

        async def wait() -> None:
            await delivery

        await asyncio.gather(
            ends(one_more(), 0.3, TimeoutError),
            ends(wait(), 0.5, DeliveryUnknown),
            ends(publisher.flush(0.5), 0.5, DeliveryUnknown),
            ends(read(), 0.3, TimeoutError),
        )
        await ends(reader.subscriber.confirm(), TIMEOUT + STOP, BusUnavailable)
        await until(lambda: bool(ours.told(Failure)))
        broker.thaw()
        await inject(publisher, 1_501, 2_000)
        await reader.to(2_000, confirm_every=100)
        await publisher.flush(10)
        assert ours.told(Reconnected)
        assert theirs.told(Reconnected)
        assert not theirs.told(Missed, Skipped)
        await reader.nothing_more()
        await publisher.aclose()


async def test_who_waits_for_a_block_of_a_frozen_broker_is_told_and_gets_it_once_that_thaws(
    broker: Kafka, url: str
) -> None:
    async with (
        client(broker.bootstrap) as ours,
        client(broker.bootstrap) as theirs,
        ours.client.publisher(url, SCHEMA) as publisher,
    ):
        reader = Reader(await theirs.client.subscriber(url, side="in", start="earliest"))
        await (await inject(publisher, 1, 1))
        await reader.to(1)
        waiting = asyncio.create_task(reader.to(2))
        await asyncio.sleep(0)
        broker.freeze()
        await until(lambda: bool(theirs.told(Failure)), STOP + SLACK)
        broker.thaw()
        await inject(publisher, 2, 2)
        await waiting


async def test_everything_closes_in_time_while_the_broker_is_frozen(broker: Kafka, url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        ours, theirs = [await stack.enter_async_context(client(broker.bootstrap)) for _ in range(2)]
        publisher = await ours.client.publisher(url, SCHEMA, options=esp.PublisherOptions(close_timeout=0.5))
        subscriber = await theirs.client.subscriber(url, side="in", group="g")
        await (await inject(publisher, 1, 500))
        await Reader(subscriber).to(500)
        await inject(publisher, 501, 1_000)
        broker.freeze()
        await inject(publisher, 1_001, 1_500)
        begun = time.monotonic()
        await asyncio.gather(
            ends(publisher.aclose(), 0.5 + STOP, DeliveryUnknown),
            asyncio.wait_for(subscriber.aclose(), STOP + SLACK),
        )
        await asyncio.gather(
            asyncio.wait_for(ours.client.aclose(), 2 * STOP + SLACK),
            asyncio.wait_for(theirs.client.aclose(), 2 * STOP + SLACK),
        )
        assert time.monotonic() - begun < 2 * STOP + SLACK


async def test_a_broker_frozen_for_less_than_the_timeout_is_waited_for(broker: Kafka, url: str) -> None:
    async with client(broker.bootstrap, timeout=10.0) as ours:
        async with ours.client.publisher(url, SCHEMA) as publisher:
            reader = Reader(await ours.client.subscriber(url, side="in", start="earliest"))
            await (await inject(publisher, 1, 100))
            broker.freeze()
            delivery = await inject(publisher, 101, 1_000)
            with pytest.raises(DeliveryUnknown):
                await publisher.delivered(1_000, 1.0)
            broker.thaw()
            assert await delivery == "acked"
            await reader.to(1_000)
        assert ours.notices == []


async def test_a_broker_that_is_killed_and_comes_back_costs_a_notice_and_no_block(broker: Kafka, url: str) -> None:
    async with client(broker.bootstrap) as ours, client(broker.bootstrap) as theirs:
        async with ours.client.publisher(url, SCHEMA) as publisher:
            alone = Reader(await theirs.client.subscriber(url, side="in", start="earliest"))
            grouped = Reader(await theirs.client.subscriber(url, side="in", group="g"))
            await (await inject(publisher, 1, 300))
            await asyncio.gather(alone.to(300), grouped.to(300, confirm_every=10))
            await inject(publisher, 301, 600)
            broker.kill()
            await inject(publisher, 601, 900)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(alone.to(1_200))
                tasks.create_task(grouped.to(1_200))
                await until(lambda: bool(ours.told(Failure)))  # one that is back before that is not missed
                tasks.create_task(asyncio.to_thread(broker.restart))
                delivery = await inject(publisher, 901, 1_200)
            assert await delivery == "acked"
        assert ours.told(Reconnected)
        assert len(theirs.told(Reconnected)) >= 2
        assert not theirs.told(Missed, Skipped)
        for reader in (alone, grouped):
            await reader.nothing_more()


async def test_a_broker_that_ends_in_good_order_and_comes_back_costs_no_block(broker: Kafka, url: str) -> None:
    async with client(broker.bootstrap) as ours, client(broker.bootstrap) as theirs:
        async with ours.client.publisher(url, SCHEMA) as publisher:
            reader = Reader(await theirs.client.subscriber(url, side="in", group="g"))

            async def read() -> None:
                for last in range(50, 2_001, 50):
                    await reader.to(last)
                    with contextlib.suppress(BusUnavailable):  # the broker is away: the next confirm says it too
                        await reader.subscriber.confirm()

            restarting = asyncio.create_task(asyncio.to_thread(broker.restart))
            reading = asyncio.create_task(read())
            for first in range(1, 2_000, 100):
                await inject(publisher, first, first + 99)
                with contextlib.suppress(DeliveryUnknown):
                    await publisher.flush(0.2)
            await asyncio.gather(restarting, reading)
        assert not theirs.told(Missed, Skipped)


async def test_links_that_are_reset_swallowed_and_cut_in_the_middle_of_a_batch_cost_no_block(
    broker: Kafka, url: str
) -> None:
    async with (
        broker.proxy() as proxy,
        client(f"127.0.0.1:{proxy.port}") as ours,
        ours.client.publisher(url, SCHEMA) as publisher,
    ):
        reader = Reader(await ours.client.subscriber(url, side="in", start="earliest"))
        await (await inject(publisher, 1, 50))
        ids = itertools.count(51, 500)

        async def harm(fault: Callable[[], None], healed: Callable[[], bool]) -> None:
            first = next(ids)
            await inject(publisher, first, first + 249)
            fault()
            delivery = await inject(publisher, first + 250, first + 499)
            await until(healed)
            proxy.heal()
            await delivery
            await reader.to(first + 499)

        await harm(proxy.cut, lambda: True)
        await harm(lambda: proxy.cut_after(10_000, "up"), lambda: True)
        await harm(lambda: proxy.cut_after(10, "down"), lambda: True)
        for way in ("up", "down"):
            before = publisher.stats.troubles
            await harm(lambda: proxy.swallow(way), lambda: publisher.stats.troubles > before)  # noqa: B023
        assert not ours.told(Missed, Skipped)


async def test_connections_that_stay_open_without_an_answer_are_given_up_for_new_ones(broker: Kafka, url: str) -> None:
    """Nobody is told by TCP, for whom nothing is wrong with them."""
    async with (
        broker.proxy() as proxy,
        client(f"127.0.0.1:{proxy.port}") as ours,
        client(f"127.0.0.1:{proxy.port}") as theirs,
        ours.client.publisher(url, SCHEMA) as publisher,
    ):
        alone = Reader(await theirs.client.subscriber(url, side="in", start="earliest"))
        grouped = Reader(await theirs.client.subscriber(url, side="in", group="g"))
        await (await inject(publisher, 1, 100))
        await asyncio.gather(alone.to(100), grouped.to(100, confirm_every=10))
        proxy.half_open()
        delivery = await inject(publisher, 101, 200)
        await asyncio.gather(alone.to(200), grouped.to(200))
        assert await delivery == "acked"
        await grouped.subscriber.confirm()
        assert not theirs.told(Missed, Skipped)


# what is left behind


def sockets() -> int:
    """How many this process has open."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(entry).startswith("socket:")
    return found


def held() -> dict[str, int]:
    """Threads of the loop's own pool do not count: it grows to its size whatever we do."""
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return {"tasks": len(asyncio.all_tasks()), "threads": len(threads), "sockets": sockets()}


async def no_more_than(before: dict[str, int]) -> None:
    """What is cancelled is gone some turns of the loop later."""
    with contextlib.suppress(TimeoutError):
        await until(lambda: all(held()[kind] <= count for kind, count in before.items()), STOP + SLACK)
    now = held()
    assert all(now[kind] <= count for kind, count in before.items()), (before, now, asyncio.all_tasks())


async def open_bus(hostport: str, timeout: float) -> Bus:
    found = driver("kafka")
    return await found.open_bus(found.Options(hostport=hostport, timeout=timeout))


async def working_pipe(bus: Bus, name: str) -> Pipe:
    """One that works, as soon as the broker, just thawed, answers within the time of this bus."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(BusUnavailable):
                pipe = await bus.pipe(name)
                try:
                    await pipe.write([b"first"])
                    assert await pipe.confirmed(0) == 1
                except BaseException:
                    await pipe.aclose()
                    raise
                return pipe


@pytest.mark.parametrize("how", ["timed out", "abandoned"])
async def test_a_pipe_that_ended_badly_thirty_times_leaves_no_task_thread_or_connection(
    broker: Kafka, url: str, how: str
) -> None:
    bus = await open_bus(broker.bootstrap, 0.25)
    name = f"{url.removeprefix('dfESP://')}/I"
    numbers = itertools.count()

    async def once() -> None:
        pipe = await working_pipe(bus, name)
        broker.freeze()
        try:
            await pipe.write(batch_of(next(numbers)))
            if how == "timed out":
                with pytest.raises(BusUnavailable):
                    await pipe.confirmed(1)
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await pipe.confirmed(1)
        finally:
            closing = asyncio.create_task(pipe.aclose())
            if how == "timed out":
                await closing
            broker.thaw()
        await closing

    await once()
    await (await working_pipe(bus, name)).aclose()
    before = held()
    for _ in range(30):
        await once()
    await no_more_than(before)
    await bus.aclose()
    written = [message for message in await log_of(broker, name) if message != b"first"]
    for number in range(next(numbers)):
        whole = batch_of(number)
        found = [message for message in written if message.startswith(whole[0][:8])]
        assert list(dict.fromkeys(found)) == whole[: len(set(found))]  # some twice, and what is missing is the end


async def test_a_client_that_does_not_stop_in_its_time_is_cut_off(broker: Kafka, url: str) -> None:
    name = f"{url.removeprefix('dfESP://')}/I"
    bus = await open_bus(broker.bootstrap, TIMEOUT)
    await (await working_pipe(bus, name)).aclose()
    feed = await bus.feed(name, "earliest", "g")
    await feed.read(1, 1_000)
    await feed.aclose()
    before = held()
    pipe, feed = await bus.pipe(name), await bus.feed(name, "earliest", "g")
    await feed.read(1, 1_000)
    await pipe.write([b"second"])
    broker.freeze()
    await pipe.write([b"third"])
    bus.link.timeout = 0.0  # type: ignore[attr-defined]  # then it has one second
    begun = time.monotonic()
    await asyncio.gather(pipe.aclose(), feed.aclose())
    assert time.monotonic() - begun < SLACK
    bus.link.timeout = TIMEOUT  # type: ignore[attr-defined]
    broker.thaw()
    await no_more_than(before)
    await bus.aclose()


def batch_of(number: int) -> list[bytes]:
    """More than one batch of the client's."""
    return [b"%08d %04d" % (number, each) + bytes(1_000) for each in range(1_000)]


async def log_of(broker: Kafka, name: str) -> list[bytes]:
    """All that stands on a topic."""
    bus = await open_bus(broker.bootstrap, 10.0)
    feed = await bus.feed(name, "earliest", None)
    try:
        end, found = (await bus.bounds(name)).end, []
        async with asyncio.timeout(60):
            while not found or found[-1].position < end - 1:
                found += [each for each in await feed.read(1_000, 1 << 20) if isinstance(each, Message)]
    finally:
        await bus.aclose()
    return [message.data for message in found]


async def test_what_is_written_behind_a_batch_that_nobody_confirmed_stands_behind_all_of_it_or_not_at_all(
    broker: Kafka, url: str
) -> None:
    """The broker gets the batch, and its word does not come back."""
    name = f"{url.removeprefix('dfESP://')}/I"
    async with broker.proxy() as proxy:
        bus = await open_bus(f"127.0.0.1:{proxy.port}", 0.5)
        try:
            pipe = await bus.pipe(name)
            sent = [b"%d" % number for number in range(100)]
            await pipe.write(sent[:50])
            while await pipe.confirmed(49) < 50:
                pass
            proxy.swallow("down")
            await pipe.write(sent[50:70])
            with pytest.raises(BusUnavailable):
                await pipe.confirmed(50)
            with pytest.raises(BusUnavailable):
                await pipe.write(sent[70:])
            proxy.heal()
            await pipe.aclose()
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(BusUnavailable):
                        again = await bus.pipe(name)
                        await again.write(sent[50:])
                        assert await again.confirmed(49) == 50
                        break
        finally:
            await bus.aclose()
    found = await log_of(broker, name)
    assert list(dict.fromkeys(found)) == sent
    assert found[-50:] == sent[50:]


async def test_a_client_that_finds_nobody_thirty_times_leaves_no_task_thread_or_connection(url: str) -> None:
    async def once() -> None:
        with pytest.raises(BusUnavailable):
            await esp.init("kafka", hostport="127.0.0.1:1", timeout=0.3)

    await once()
    before = held()
    for _ in range(30):
        await once()
    await no_more_than(before)


async def test_a_client_that_finds_a_frozen_broker_leaves_no_task_thread_or_connection(broker: Kafka) -> None:
    before = held()
    broker.freeze()
    for _ in range(3):
        await ends(open_bus(broker.bootstrap, 0.3), 3.0, BusUnavailable)
    await no_more_than(before)


async def test_publishers_and_subscribers_cancelled_on_a_frozen_broker_leave_nothing(broker: Kafka, url: str) -> None:
    async with client(broker.bootstrap, timeout=0.5) as ours:
        async with ours.client.publisher(url, SCHEMA) as publisher:
            await (await inject(publisher, 1, 1))
        before = held()
        broker.freeze()
        for opening in (ours.client.publisher(url, SCHEMA), ours.client.subscriber(url, side="in", group="g")):
            with pytest.raises((TimeoutError, BusUnavailable)):
                async with asyncio.timeout(0.2):
                    await opening
        broker.thaw()
        async with ours.client.publisher(url, SCHEMA) as publisher:
            await (await inject(publisher, 1, 1))
        await no_more_than(before)
