"""Every call is cancelled at every point at which it waits; then its user goes on. Nothing is lost, doubled or leaked.

The harness steps through a call. Where it would wait for the nth time, the task is cancelled in one of two ways:
`early`, before what it waits for has happened, or `late`, when it has happened and the task has not yet been told.
"""

import asyncio
import itertools
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

import esp_pubsub as esp
from esp_pubsub import requests
from esp_pubsub.testing.faults import Faults

T = TypeVar("T")
When = Literal["early", "late"]
SCHEMA = esp.Schema("id*:int64")
BLOCKS = 6
both = pytest.mark.parametrize("when", ["early", "late"])


class Knife:
    """Cancels once, at the nth wait of all the calls that it is put to."""

    def __init__(self, nth: int, when: When) -> None:
        self.cut = False
        self._left = nth
        self._when = when

    @types.coroutine
    def step(self, call: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        resume: Callable[[], Any] = lambda: call.send(None)  # noqa: E731
        while True:
            try:
                waits_for = resume()
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            if self._left == 0:
                self._cancel(waits_for)
            self._left -= 1
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001
                resume = lambda error=error: call.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                resume = lambda sent=sent: call.send(sent)  # type: ignore[misc]  # noqa: E731

    def _cancel(self, waits_for: Any) -> None:
        self.cut = True
        task = asyncio.current_task()
        assert task is not None
        if self._when == "early" or waits_for is None:
            task.cancel()  # takes effect as soon as the task waits
        else:
            waits_for.add_done_callback(lambda _: task.cancel())  # before the task's own wake-up

    async def put_to(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call; if it is cancelled here, the call is made again, as a user would."""
        for _ in range(2):
            task = asyncio.ensure_future(self.step(_coroutine(call())))
            try:
                async with asyncio.timeout(60):
                    return await asyncio.shield(task)
            except asyncio.CancelledError:
                if not task.cancelled():
                    raise
            except TimeoutError:
                task.cancel()
                await asyncio.wait([task])
                raise AssertionError(f"hangs: {call}") from None
        raise AssertionError("cancelled twice")


async def _coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def at_every_wait(scenario: Callable[[Knife, str], Awaitable[None]], when: When) -> int:
    """Run a scenario anew for n = 0, 1, 2, ... until nothing was left to cancel; returns how often it was."""
    for nth in itertools.count():
        knife = Knife(nth, when)
        before = asyncio.all_tasks()
        try:
            await scenario(knife, f"dfESP://test:5555/project/query/window{nth}")
            await no_task_but(before)
        except BaseException as error:
            error.add_note(f"cancelled {when} at wait {nth}")
            raise
        if not knife.cut:
            return nth
    raise AssertionError


async def no_task_but(before: set[asyncio.Task[Any]]) -> None:
    """Tasks that end by themselves in a moment are no leak."""
    try:
        async with asyncio.timeout(60):
            while asyncio.all_tasks() - before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"leaked: {asyncio.all_tasks() - before}") from None


async def read_all(client: esp.Client, url: str, count: int = BLOCKS) -> None:
    """Exactly `count` blocks are on the topic, once each and in order."""
    async with client.subscriber(url, SCHEMA, side="in", start="earliest") as sub:
        async with asyncio.timeout(60):
            found = [await anext(sub) for _ in range(count)]
        end = (await client.bus.bounds(sub.topic)).end
        assert [block.rows()[0][0] for block in found] == list(range(1, count + 1))
        assert end == count, "more on the topic than was published"


@pytest.fixture
async def client(bus_directory: Path) -> AsyncIterator[esp.Client]:
    async with esp.init(dir=bus_directory) as client:
        yield client


async def publish(client: esp.Client, url: str) -> None:
    async with client.publisher(url, SCHEMA) as pub:
        for number in range(1, BLOCKS + 1):
            await (await pub.inject([(number,)]))


@both
async def test_inject_may_be_cancelled_at_every_wait(bus_directory: Path, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        async with client.publisher(url, SCHEMA, options=esp.PublisherOptions(buffer_blocks=1)) as pub:
            for number in range(1, BLOCKS + 1):
                await knife.put_to(lambda: pub.inject([(number,)]))  # noqa: B023
            assert pub.stats.given == BLOCKS
        await read_all(client, url)

    async with esp.init(dir=bus_directory, durability="disk") as client:  # slow enough that there is something to await
        assert await at_every_wait(scenario, when) >= 3


@both
async def test_inject_of_several_tasks_at_once_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        async with client.publisher(url, SCHEMA, options=esp.PublisherOptions(buffer_blocks=1)) as pub:

            async def one(number: int) -> None:
                await knife.put_to(lambda: pub.inject([(number,)]))

            async with asyncio.timeout(60):
                await asyncio.gather(*(one(number) for number in range(1, BLOCKS + 1)))
            assert pub.stats.given == BLOCKS
        async with client.subscriber(url, side="in", start="earliest") as sub, asyncio.timeout(60):
            found = [(await anext(sub)).rows()[0][0] for _ in range(BLOCKS)]
        assert sorted(found) == list(range(1, BLOCKS + 1))

    assert await at_every_wait(scenario, when) >= 3


@both
async def test_flush_and_delivery_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        async with client.publisher(url, SCHEMA) as pub:
            for number in range(1, BLOCKS + 1):
                delivery = await pub.inject([(number,)])
                if number % 2:
                    await knife.put_to(pub.flush)
                assert await knife.put_to(lambda: delivery) == "acked"  # noqa: B023
        await read_all(client, url)

    assert await at_every_wait(scenario, when) >= 3


@both
async def test_closing_a_publisher_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        pub = await client.publisher(url, SCHEMA)
        deliveries = [await pub.inject([(number,)]) for number in range(1, BLOCKS + 1)]
        await knife.put_to(pub.aclose)  # cancelled, and called again: then it returns without an error, so ...
        assert pub._task is not None and pub._task.done()
        for delivery in deliveries:
            async with asyncio.timeout(1):
                assert await delivery == "acked"
        await read_all(client, url)

    assert await at_every_wait(scenario, when) >= 2


@both
async def test_closing_a_publisher_while_others_wait_for_it_may_be_cancelled_at_every_wait(
    client: esp.Client, when: When
) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        good = client.bus
        client.bus = faults = Faults(good)
        faults.hang("confirmed")
        pub = await client.publisher(url, SCHEMA, options=esp.PublisherOptions(buffer_blocks=1, close_timeout=0.02))
        client.bus = good
        delivery = await pub.inject([(1,)])
        waiting = [asyncio.ensure_future(pub.inject([(2,)])), asyncio.ensure_future(_coroutine(delivery))]
        await asyncio.sleep(0)
        await asyncio.gather(knife.put_to(pub.aclose), return_exceptions=True)
        done, pending = await asyncio.wait(waiting, timeout=1)
        for task in pending:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not pending, "waits for a publisher that is closed"
        assert all(isinstance(task.exception(), esp.EspError) for task in done)

    assert await at_every_wait(scenario, when) >= 2


@both
async def test_reading_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        async with client.publisher(url, SCHEMA) as pub:
            options = esp.SubscriberOptions(read_blocks=2)
            sub = await client.subscriber(url, side="in", start="earliest", options=options)
            for number in range(1, BLOCKS + 1):
                soon = asyncio.ensure_future(_later(lambda: pub.inject([(number,)])))  # noqa: B023
                assert (await knife.put_to(lambda: anext(sub))).rows() == [(number,)]
                await soon
            assert (sub.stats.blocks, sub.stats.doubles, sub.stats.missed) == (BLOCKS, 0, 0)
            await sub.aclose()
        await read_all(client, url)

    assert await at_every_wait(scenario, when) >= BLOCKS - 1


async def _later(call: Callable[[], Awaitable[Any]]) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    await call()


@both
async def test_reading_where_the_schema_is_found_late_over_a_slow_bus_may_be_cancelled_at_every_wait(
    client: esp.Client, when: When
) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        good = client.bus
        client.bus = faults = Faults(good)
        sub = await client.subscriber(url, side="in", start="earliest")
        client.bus = good
        faults.delay(0, "retained", "read")  # each waits a turn
        await publish(client, url)
        for number in range(1, BLOCKS + 1):
            assert (await knife.put_to(lambda: anext(sub))).rows() == [(number,)]
        await sub.aclose()

    assert await at_every_wait(scenario, when) >= 2


@both
async def test_reading_over_links_that_die_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        await publish(client, url)
        good = client.bus
        client.bus = faults = Faults(good)
        options = esp.SubscriberOptions(read_blocks=2)
        sub = await client.subscriber(
            url, side="in", start="earliest", group="g", options=options, on_notice=lambda _: None
        )
        client.bus = good
        for number in range(1, BLOCKS + 1):
            if number % 2:
                faults.lose_link()
                restoring = asyncio.ensure_future(_later(_nothing(faults.restore)))
            assert (await knife.put_to(lambda: anext(sub))).rows() == [(number,)]
            await restoring
            await sub.confirm()
        await sub.aclose()
        assert await _rest(client, url, "g") == []

    assert await at_every_wait(scenario, when) >= 3


def _nothing(call: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def called() -> None:
        call()

    return called


async def _rest(client: esp.Client, url: str, group: str) -> list[int]:
    """What the group would still be given."""
    found = []
    async with client.publisher(url, SCHEMA) as pub, client.subscriber(url, side="in", group=group) as sub:
        await pub.inject([(-1,)])
        async with asyncio.timeout(60):
            while (number := (await anext(sub)).rows()[0][0]) != -1:
                found.append(number)
    return found


@both
async def test_confirming_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        await publish(client, url)
        options = esp.SubscriberOptions(read_blocks=2)
        async with client.subscriber(url, side="in", group="g", options=options) as sub:
            for number in range(1, BLOCKS):
                async with asyncio.timeout(60):
                    block = await anext(sub)
                assert block.rows() == [(number,)]
                await knife.put_to(lambda: sub.confirm(block))  # noqa: B023
        assert await _rest(client, url, "g") == [BLOCKS]

    assert await at_every_wait(scenario, when) >= BLOCKS - 1


@both
async def test_reading_and_confirming_in_one_group_after_another_reader_may_be_cancelled_at_every_wait(
    client: esp.Client, when: When
) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        await publish(client, url)
        found: list[int] = []
        for _ in range(3):
            sub = await client.subscriber(url, side="in", group="g")
            for _ in range(2):
                block = await knife.put_to(lambda: anext(sub))  # noqa: B023
                found.append(block.rows()[0][0])
            await knife.put_to(lambda: sub.confirm(block))  # noqa: B023
            await knife.put_to(sub.aclose)
        assert found == list(range(1, BLOCKS + 1))
        assert await _rest(client, url, "g") == []

    assert await at_every_wait(scenario, when) >= 6


@both
async def test_closing_a_subscriber_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        await publish(client, url)
        sub = await client.subscriber(url, side="in", group="g")
        async with asyncio.timeout(60):
            assert (await anext(sub)).rows() == [(1,)]
        await sub.confirm()
        await knife.put_to(sub.aclose)
        assert await _rest(client, url, "g") == list(range(2, BLOCKS + 1))  # at once, not after the lease

    assert await at_every_wait(scenario, when) >= 1


@both
async def test_opening_a_publisher_or_subscriber_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        pub = await knife.put_to(lambda: client.publisher(url, SCHEMA))
        sub = await knife.put_to(lambda: client.subscriber(url, side="in", group="g"))
        for number in range(1, BLOCKS + 1):
            await pub.inject([(number,)])
            async with asyncio.timeout(60):
                assert (await anext(sub)).rows() == [(number,)]
        await pub.aclose()
        await sub.aclose()
        await read_all(client, url)

    assert await at_every_wait(scenario, when) >= 2


@both
async def test_seeking_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        await publish(client, url)
        good = client.bus
        client.bus = faults = Faults(good)
        faults.delay(0, "feed")
        sub = await client.subscriber(url, side="in")
        client.bus = good
        await knife.put_to(lambda: sub.seek("earliest"))
        async with asyncio.timeout(60):
            assert [(await anext(sub)).rows()[0][0] for _ in range(BLOCKS)] == list(range(1, BLOCKS + 1))
        await sub.aclose()

    assert await at_every_wait(scenario, when) >= 1


@both
async def test_opening_a_client_may_be_cancelled_at_every_wait(bus_directory: Path, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        client = await knife.put_to(lambda: esp.init(dir=bus_directory))
        await publish(client, url)
        await read_all(client, url)
        await client.aclose()

    assert await at_every_wait(scenario, when) >= 3


@both
async def test_closing_a_client_may_be_cancelled_at_every_wait(bus_directory: Path, when: When) -> None:
    async def scenario(knife: Knife, url: str) -> None:
        client = await esp.init(dir=bus_directory)
        pub = await client.publisher(url, SCHEMA)
        sub = await client.subscriber(url, side="in", group="g")
        deliveries = [await pub.inject([(number,)]) for number in range(1, BLOCKS + 1)]
        async with asyncio.timeout(60):
            await anext(sub)
        await knife.put_to(client.aclose)
        for delivery in deliveries:
            async with asyncio.timeout(1):
                assert await delivery == "acked"
        assert client.bus._closed  # type: ignore[attr-defined]
        async with esp.init(dir=bus_directory) as again:
            await read_all(again, url)
            assert await _rest(again, url, "g") == list(range(1, BLOCKS + 1))

    assert await at_every_wait(scenario, when) >= 1  # what it waits for goes on without it


@both
async def test_asking_and_being_asked_may_be_cancelled_at_every_wait(client: esp.Client, when: When) -> None:
    asked: list[int] = []

    async def handler(question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question["n"])
        return question

    async def scenario(knife: Knife, url: str) -> None:
        asked.clear()
        server = asyncio.ensure_future(requests.serve(client.requests(), "test:5555/M", handler))
        for n in range(3):
            assert await knife.put_to(lambda: requests.ask(client.requests(), "test:5555/M", {"n": n}, 3)) == {"n": n}  # noqa: B023
        server.cancel()
        await asyncio.wait([server])
        assert len(asked) <= 4  # the one that was cancelled may have been answered, to nobody

    assert await at_every_wait(scenario, when) >= 3
