"""One reader forever: what it reads, and what it does when its feed dies."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from esp_pubsub.backoff import Backoff
from esp_pubsub.bus import Break, Bus, Message, Start
from esp_pubsub.errors import BusUnavailable, Closed
from esp_pubsub.follower import Follower
from esp_pubsub.testing import Faults, run_virtual

TOPIC = "t:1/p/q/w/I"


class Reader:
    """A follower of a topic from its first message on, and what it told."""

    def __init__(self, bus: Bus, *, patient: bool = True) -> None:
        self.start: Start = 0
        self.found: list[bytes] = []
        self.opened: list[Start] = []
        self.troubles: list[float] = []
        self.follower = Follower(
            bus, TOPIC, self._begin, Backoff(0.1, 1.0, lambda: 1.0),
            opened=lambda: self.opened.append(self.start), trouble=self._trouble if patient else None,
        )  # fmt: skip

    async def _begin(self) -> Start:
        return self.start

    def _trouble(self, _: BusUnavailable) -> None:
        self.troubles.append(asyncio.get_running_loop().time())

    async def read(self, count: int) -> list[bytes]:
        while len(self.found) < count:
            for message in await self.follower.read(3, 1 << 20):
                assert isinstance(message, Message)
                self.found.append(message.data)
            self.start = self.follower.place or self.start
        return self.found


async def put(bus: Bus, *messages: bytes) -> None:
    pipe = await bus.pipe(TOPIC)
    await pipe.write(messages)
    await pipe.confirmed(len(messages) - 1)
    await pipe.aclose()


def in_a_world(scene: Callable[[Faults], Coroutine[Any, Any, None]]) -> None:
    """A virtual clock, and a bus whose link can be lost."""

    async def run(init: Any) -> None:
        async with init() as client:
            await scene(Faults.into(client))

    run_virtual(run)


def sent(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_after_a_lost_link_it_goes_on_where_its_user_says() -> None:
    async def scene(bus: Faults) -> None:
        reader = Reader(bus)
        await put(bus.inner, *sent(10))
        assert await reader.read(10) == sent(10)
        bus.lose_link()
        bus.restore()
        await put(bus.inner, b"more")
        assert await reader.read(11) == [*sent(10), b"more"]
        assert [getattr(start, "position", start) for start in reader.opened] == [0, 10]
        assert len(reader.troubles) == 1

    in_a_world(scene)


def test_each_attempt_is_made_twice_as_late_as_the_one_before() -> None:
    async def scene(bus: Faults) -> None:
        reader = Reader(bus)
        await put(bus.inner, b"0")
        await reader.read(1)
        bus.lose_link()
        loop = asyncio.get_running_loop()
        reading = asyncio.ensure_future(reader.read(2))
        await asyncio.sleep(2.7)
        pauses = [later - at for at, later in zip(reader.troubles, reader.troubles[1:], strict=False)]
        assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])
        bus.restore()
        await put(bus.inner, b"1")
        began = loop.time()
        assert await reading == [b"0", b"1"]
        assert loop.time() - began < 1.1
        assert len(reader.opened) == 2

    in_a_world(scene)


def test_after_it_has_read_again_the_pauses_begin_anew() -> None:
    async def scene(bus: Faults) -> None:
        reader = Reader(bus)
        loop = asyncio.get_running_loop()
        for number in range(1, 9):
            await put(bus.inner, b"x")
            began = loop.time()
            await reader.read(number)
            assert loop.time() - began < 0.2
            bus.lose_link()
            bus.restore()
        assert len(reader.troubles) == 7
        assert len(reader.opened) == 8

    in_a_world(scene)


def test_one_that_is_given_little_time_each_time_still_comes_back() -> None:
    """A pause that began anew with every call would never end."""

    async def scene(bus: Faults) -> None:
        reader = Reader(bus)
        bus.lose_link()
        await put(bus.inner, b"0")
        for _ in range(100):
            if not reader.found:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await reader.read(1)
            if len(reader.troubles) == 4:
                bus.restore()
                break
        for _ in range(40):
            try:
                async with asyncio.timeout(0.05):
                    assert await reader.read(1) == [b"0"]
                return
            except TimeoutError:
                pass
        raise AssertionError("it did not come back")

    in_a_world(scene)


def test_a_cancelled_read_loses_nothing() -> None:
    async def scene(bus: Faults) -> None:
        reader = Reader(bus)
        writing = asyncio.ensure_future(put(bus.inner, *sent(50)))
        cancelled = 0
        while len(reader.found) < 50:
            try:
                async with asyncio.timeout(0.003):
                    await reader.read(len(reader.found) + 1)
            except TimeoutError:
                cancelled += 1
        await writing
        assert reader.found == sent(50)
        assert cancelled
        assert reader.troubles == []

    in_a_world(scene)


def test_without_anybody_to_tell_the_trouble_is_raised_and_the_next_read_opens_again() -> None:
    async def scene(bus: Faults) -> None:
        reader = Reader(bus, patient=False)
        await put(bus.inner, *sent(2))
        await reader.read(2)
        bus.lose_link()
        with pytest.raises(BusUnavailable):
            await reader.read(3)
        assert reader.follower.feed is None
        bus.restore()
        await put(bus.inner, b"2")
        assert await reader.read(3) == sent(3)

    in_a_world(scene)


def test_a_feed_that_another_task_found_dead_is_reported_once() -> None:
    async def scene(bus: Faults) -> None:
        reader = Reader(bus)
        await put(bus.inner, b"0")
        await reader.read(1)
        reading = asyncio.ensure_future(reader.read(2))
        await asyncio.sleep(0.1)
        dead, trouble = reader.follower.feed, BusUnavailable("it did not take a position")
        await reader.follower.lose(dead, trouble)
        await asyncio.sleep(1)
        successor = reader.follower.feed
        await reader.follower.lose(dead, trouble)  # by a task that comes late
        assert successor is not None
        assert reader.follower.feed is successor
        await put(bus.inner, b"1")
        assert await reading == [b"0", b"1"]
        assert len(reader.troubles) == 1

    in_a_world(scene)


@pytest.mark.parametrize("away", [False, True])
def test_closed_while_it_waits_it_reads_no_more(away: bool) -> None:
    async def scene(bus: Faults) -> None:
        reader = Reader(bus)
        if away:
            bus.lose_link()
        reading = asyncio.ensure_future(reader.read(1))
        await asyncio.sleep(0.5)
        await reader.follower.aclose()
        await reader.follower.aclose()
        with pytest.raises(Closed):
            await reading
        assert reader.follower.feed is None

    in_a_world(scene)


def test_what_always_finds_more_gives_others_their_turn() -> None:
    class Endless:
        place = None

        async def read(self, *_: int) -> list[Message | Break]:
            return [Message(0, b"")]

        async def feed(self, *_: object) -> "Endless":
            return self

    async def scene(_: Any) -> None:
        follower = Reader(Endless()).follower  # type: ignore[arg-type]
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.ensure_future(other())
        for _ in range(100):
            await follower.read(1, 1)
        beside.cancel()
        assert turns >= 99

    run_virtual(scene)
