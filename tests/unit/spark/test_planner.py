"""Where queries begin and how far they plan, on a bus that is slow, away, or in motion."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from esp_pubsub.bus import Bounds, Break, Feed, Message
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.spark_bridge import planner as planning
from esp_pubsub.spark_bridge.options import read_options
from esp_pubsub.spark_bridge.planner import Planner

from .bus import URL, close, publish

LONG_AGO, LATER = "2020-01-01T00:00:00+00:00", "2100-01-01T00:00:00+00:00"
Read = Callable[[], Awaitable[Sequence[Message | Break]]]


class Odd:
    """A bus of which a test decides how it answers; what it does not decide is the bus's."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus
        self.capabilities = bus.capabilities
        self.opens: Callable[[Any], None] = lambda start: None
        self.most = 1_000
        self.reads: Callable[[Any, Read], Awaitable[Sequence[Message | Break]]] = lambda start, read: read()
        self.beyond = 0

    async def feed(self, topic: str, start: Any, group: str | None) -> OddFeed:
        self.opens(start)
        return OddFeed(self, await self._bus.feed(topic, start, group), start)

    async def bounds(self, topic: str) -> Bounds:
        self.opens("bounds")
        found: Bounds = await self._bus.bounds(topic)
        return replace(found, end=found.end + self.beyond)

    async def retained(self, topic: str, key: str) -> bytes | None:
        self.opens(key)
        found: bytes | None = await self._bus.retained(topic, key)
        return found


class OddFeed:
    def __init__(self, bus: Odd, feed: Feed, start: Any) -> None:
        self._bus = bus
        self._feed = feed
        self._start = start

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        return await self._bus.reads(self._start, lambda: self._feed.read(min(max_messages, self._bus.most), max_bytes))

    async def aclose(self) -> None:
        await self._feed.aclose()


Make = Callable[..., tuple[Planner, Odd]]


@pytest.fixture
def made(bus_directory: Path) -> Iterator[Make]:
    """A planner with these options, on an odd bus."""
    planners: list[Planner] = []

    def make(**more: str) -> tuple[Planner, Odd]:
        planners.append(Planner(read_options({"url": URL, "bus.dir": str(bus_directory), **more}, "out")))
        planners[-1]._bus = odd = Odd(planners[-1]._bus)  # type: ignore[assignment]
        return planners[-1], odd

    yield make
    for planner in planners:
        planner.close()
    close()


def ends(planner: Planner, most_rows: int | None = None) -> list[int]:
    """The positions behind the batches of a query that reads what is there."""
    found = [planner.first()]
    while (mark := planner.next(found[-1], most_rows)) != found[-1]:
        found.append(mark)
    return [mark.position for offset in found for mark in offset.values()]


def test_a_time_is_found_however_slow_the_first_read_is(
    made: Make, bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_LOOK", 0.01)
    publish(bus_directory, range(5))
    planner, odd = made(start=LONG_AGO)
    asked, answered = asyncio.Event(), asyncio.Event()

    async def slow(start: Any, read: Read) -> Sequence[Message | Break]:
        if not isinstance(start, datetime):
            asked.set()
            await answered.wait()
            return await read()
        await asked.wait()
        answered.set()
        return await read()

    odd.reads = slow
    assert ends_at_first(planner) == 0


def ends_at_first(planner: Planner) -> int:
    [mark] = planner.first().values()
    return mark.position


def test_where_nothing_is_that_late_a_query_begins_at_the_end(
    made: Make, bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_LOOK", 0.01)
    publish(bus_directory, range(5))
    assert ends_at_first(made(start=LATER)[0]) == 5


def test_a_bus_that_answers_nothing_is_not_taken_for_one_where_nothing_is_that_late(
    made: Make, bus_directory: Path
) -> None:
    publish(bus_directory, range(5))
    planner, odd = made(start=LONG_AGO, timeout="2")

    async def never(start: Any, read: Read) -> Sequence[Message | Break]:
        await asyncio.Event().wait()
        return await read()

    odd.reads = never
    with pytest.raises(BusUnavailable, match="no answer"):
        planner.first()


def test_a_time_before_what_retention_took_is_the_first_that_is_kept(made: Make, bus_directory: Path) -> None:
    publish(bus_directory, range(5))
    planner, odd = made(start=LONG_AGO)
    first: list[Message | Break] = [Break("ring", 3)]

    async def broken(start: Any, read: Read) -> Sequence[Message | Break]:
        return [first.pop()] if first else await read()

    odd.reads = broken
    assert ends_at_first(planner) == 0


def test_start_and_end_are_times(made: Make, bus_directory: Path) -> None:
    publish(bus_directory, range(3))
    between = datetime.now(UTC).isoformat()
    publish(bus_directory, range(2))
    planner, _ = made(start=between)
    planner.freeze()
    assert ends(planner) == [3, 5]
    planner, _ = made(end=between)
    planner.freeze()
    assert ends(planner) == [0, 3]


def test_batches_up_to_a_target_have_one_size_however_slowly_it_comes(
    made: Make, bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_LOOK", 0.0)
    publish(bus_directory, range(7))
    planner, odd = made()
    odd.most = 1

    async def slow(start: Any, read: Read) -> Sequence[Message | Break]:
        for _ in range(10):
            await asyncio.sleep(0)
        return await read()

    odd.reads = slow
    planner.freeze()
    assert ends(planner, 3) == [0, 3, 6, 7]


def test_what_is_published_behind_a_target_is_not_read(made: Make, bus_directory: Path) -> None:
    publish(bus_directory, range(3))
    planner, _ = made()
    planner.freeze()
    publish(bus_directory, range(4))
    assert ends(planner) == [0, 3]


def test_a_bus_that_is_away_longer_than_an_answer_may_take_is_waited_for(
    made: Make, bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_PAUSE_MOST", 0.8)
    publish(bus_directory, range(3))
    planner, odd = made(start="1", timeout="2")
    planner.freeze()
    start, away = planner.first(), iter(range(4))

    def opens(start: Any) -> None:
        if next(away, None) is not None:  # with the pauses in between more than the two seconds that an answer may take
            raise BusUnavailable("away")

    odd.opens = opens
    [mark] = planner.next(start, None).values()
    assert mark.position == 3


def test_a_target_in_front_of_which_nothing_can_be_read_is_taken_as_reached(
    made: Make, bus_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(bus_directory, range(3))
    planner, odd = made(timeout="2")
    read = planner.first()
    while [mark.position for mark in read.values()] != [3]:
        read = planner.next(read, None)
    odd.beyond = 1  # the log ends in what no reader gets
    planner.freeze()
    assert planner.next(read, None) == read
    assert "nothing came from position 3 on" in caplog.text


def test_a_query_begins_on_a_log_that_is_in_motion(made: Make, bus_directory: Path) -> None:
    publish(bus_directory, range(10), ring_records=10)
    planner, _ = made(**{"bus.ring_records": "10"})
    start = planner.first()
    publish(bus_directory, range(10, 13), ring_records=10)
    planner.freeze()
    [mark] = planner.next(start, None).values()
    assert (mark.begun, mark.position, mark.counts["missed"]) == (3, 13, 3)
