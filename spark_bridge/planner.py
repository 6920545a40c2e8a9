"""The planner: reads topics ahead of the batches, and says what the next one is. It lives in the process that Spark
keeps for a query, on the loop of that process's connection; Spark's thread asks, with a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import Any, TypeVar

import msgpack

from esp_pubsub._news import News
from esp_pubsub.backoff import Backoff
from esp_pubsub.bus import Bus, Feed, Message, Place, Start
from esp_pubsub.errors import BusError, BusUnavailable
from esp_pubsub.follower import Follower
from esp_pubsub.retained import retained_runs

from .connection import connected, require_replay
from .offsets import Mark, Offset, OffsetRefused, to_json
from .options import Options
from .scan import Scan

T = TypeVar("T")
_READ = 1_000, 4 << 20
_PAUSE, _PAUSE_MOST = 0.1, 5.0
_LOOK = 2.0  # seconds in which what is there has usually come
_log = logging.getLogger("esp_pubsub.spark")


class Planner:
    """For one query: the topics of its options. Its methods are Spark's, so they block, but never forever."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._scans: dict[str, Scan] = {}
        self._work: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._news: News
        self._first = 0
        self._target: dict[str, int] | None = None
        self._given: Offset = {}
        self._followers: dict[str, Follower] = {}
        with ExitStack() as stack:
            self._connection = stack.enter_context(connected(options))
            self._bus: Bus = self._connection.bus
            require_replay(self._connection, options.bus)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Stop reading."""
        try:
            self._ask(self._stop)
        finally:
            self._stack.close()

    def _ask(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        return self._connection.ask(self._options.timeout, function, *arguments)

    # where it begins

    def first(self) -> dict[str, Mark]:
        """Where a query without a checkpoint begins."""
        found = self._ask(self._marks, self._options.start)
        self._given = found
        return found

    def freeze(self) -> None:
        """From now on nothing counts that stands behind the option `end`: what is published later, usually."""
        found = self._ask(self._marks, self._options.end)
        self._target = {topic: mark.position for topic, mark in found.items()}

    async def _marks(self, start: Start) -> dict[str, Mark]:
        return {topic: await self._mark(topic, start) for topic in self._options.topics}

    async def _mark(self, topic: str, start: Start) -> Mark:
        bounds = await self._bus.bounds(topic)
        position = bounds.first if start == "earliest" else bounds.end
        if isinstance(start, int):
            if not bounds.first <= start <= bounds.end:
                raise OffsetRefused(f"{topic} holds positions {bounds.first} to {bounds.end}, and not {start}")
            position = start
        elif isinstance(start, datetime) and bounds.end > bounds.first:
            position = await self._since(topic, start, bounds.end)
        return Mark(position, bounds.incarnation, from_start=start in ("earliest", 0))

    async def _since(self, topic: str, start: datetime, end: int) -> int:
        """Where a feed that is opened by time begins. It waits where nothing is that late, and it may be slow: it is
        believed to wait when another one, asked later, has shown the topic's last message.
        """
        feed, witness = await self._bus.feed(topic, start, None), None
        asked = [asyncio.create_task(_first(feed))]
        try:
            await asyncio.wait(asked, timeout=self._look)
            if not asked[0].done():
                witness = await self._bus.feed(topic, end - 1, None)
                asked.append(asyncio.create_task(_first(witness)))
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            if asked[0].done():
                return asked[0].result()
            asked[1].result()
            return end
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
            for opened in (feed, witness):
                if opened is not None:
                    await opened.aclose()

    @property
    def _look(self) -> float:
        return min(_LOOK, self._options.timeout / 2)

    # what comes next

    def next(self, start: Offset, most_rows: int | None) -> dict[str, Mark]:
        """The offset behind the next batch; `start` if there is nothing for one. Answers from memory, but for a query's
        first call, and where there is a target: then it waits until the batch is as large as it may be, or the target
        is reached, however long the bus is away.
        """
        while (found := self._ask(self._next, start, most_rows)) is None:
            pass
        return found

    async def _next(self, start: Offset, most_rows: int | None) -> dict[str, Mark] | None:
        if {topic: scan.mark.position for topic, scan in self._scans.items()} != {
            topic: mark.position for topic, mark in start.items()
        }:
            await self._begin(start)
        if self._target is not None and not await self._gathered(self._target, most_rows):
            return None
        if self._failure is not None:
            raise self._failure
        return self._cut(most_rows)

    async def _gathered(self, target: dict[str, int], most_rows: int | None) -> bool:
        """Wait for what the next batch is to hold; False if it is not there when half of our time is over."""

        def lacking() -> list[str]:
            return [
                topic
                for topic, scan in self._scans.items()
                if not (scan.head >= target[topic] or scan.full or (most_rows and scan.rows_ahead >= most_rows))
            ]

        before = {topic: (scan.head, self._feed(topic)) for topic, scan in self._scans.items()}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.timeout / 2):
                while self._failure is None and lacking():
                    await self._news.wait()
                return True
        for topic in lacking():
            head, feed = before[topic]
            if feed is not None and (self._scans[topic].head, self._feed(topic)) == (head, feed):
                await self._give_up(topic, target)
        return False

    def _feed(self, topic: str) -> Feed | None:
        follower = self._followers.get(topic)
        return None if follower is None else follower.feed

    async def _give_up(self, topic: str, target: dict[str, int]) -> None:
        """The bus is there and nothing came: what stands in front of the target is not for readers, as the marks that
        transactions of others leave on Kafka.
        """
        with suppress(TimeoutError, BusUnavailable):  # the bus is not there
            async with asyncio.timeout(self._options.timeout / 4):
                await self._bus.bounds(topic)
            head, seconds = self._scans[topic].head, self._options.timeout / 2
            said = "%s: nothing came from position %s on for %g s, so what was to be read up to %s is taken as read"
            _log.warning(said, topic, head, seconds, target[topic])
            target[topic] = head

    def _cut(self, most_rows: int | None) -> dict[str, Mark]:
        topics = list(self._scans)
        self._first = (self._first + 1) % len(topics)  # each is first in its turn
        left, before = most_rows, {topic: scan.mark for topic, scan in self._scans.items()}
        for topic in topics[self._first :] + topics[: self._first]:
            scan = self._scans[topic]
            if left is None or left == most_rows or scan.next_rows <= left:
                scan.advance(left, (self._target or {}).get(topic))
            if left is not None:
                left = max(0, left - (scan.mark.counts["rows"] - before[topic].counts["rows"]))
        if any(scan.mark is not before[topic] for topic, scan in self._scans.items()):
            for topic, scan in self._scans.items():
                if scan.mark is before[topic]:
                    scan.mark = scan.mark.still()
        self._news.tell()
        return {topic: scan.mark for topic, scan in self._scans.items()}

    def _reached(self, ends: Mapping[str, int]) -> bool:
        return all(scan.head >= ends[topic] for topic, scan in self._scans.items())

    def latest(self) -> dict[str, Mark] | None:
        """How far the topics were looked at, and what was counted, for people to see how far the query is behind."""
        if not self._scans:
            return None
        return {topic: Mark(scan.head, scan.mark.incarnation, counts=scan.seen) for topic, scan in self._scans.items()}

    # reading ahead

    async def _begin(self, start: Offset) -> None:
        """Read from this offset on. Without a target it returns when what was there was looked at, as far as that goes
        quickly.
        """
        await self._stop()
        self._news = News()
        self._failure = None
        anywhere = self._options.start == "earliest" or isinstance(self._options.start, datetime)
        self._scans = {
            topic: Scan(topic, mark, len(start), fresh=anywhere and mark == self._given.get(topic))
            for topic, mark in start.items()
        }
        self._work = asyncio.create_task(self._read_all(), name="esp spark planner")
        if self._target is not None:
            return
        with suppress(TimeoutError, BusUnavailable):
            async with asyncio.timeout(self._look):
                ends = {topic: mark.position for topic, mark in (await self._marks("latest")).items()}
                while not (self._failure or self._reached(ends) or any(scan.full for scan in self._scans.values())):
                    await self._news.wait()

    async def _stop(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            await asyncio.wait([work])

    async def _read_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for scan in self._scans.values():
                    tasks.create_task(self._read(scan), name=f"esp scan {scan.topic}")
        except ExceptionGroup as failures:  # whatever it is, Spark must hear of it
            self._failure = failures.exceptions[0]
            self._news.tell()

    async def _read(self, scan: Scan) -> None:
        joins = not scan.mark.from_start

        async def begin() -> Place:
            nonlocal joins
            if joins:
                scan.accept.joined_at_run = await retained_runs(self._bus, scan.topic)
                joins = False
            return await still_there(self._bus, scan.topic, scan.mark.incarnation, scan.head)

        def trouble(error: BusUnavailable) -> None:
            _log.warning("%s: %s; trying again", scan.topic, error)

        follower = Follower(self._bus, scan.topic, begin, Backoff(_PAUSE, _PAUSE_MOST), trouble=trouble)
        self._followers[scan.topic] = follower
        try:
            while True:
                while scan.full:
                    await self._news.wait()
                scan.take(await follower.read(*_READ))
                self._news.tell()
        finally:
            await follower.aclose()

    def confirm(self, name: str, end: Offset) -> None:
        """Let others see how far this query is: a retained value of each topic. The query does not depend on it."""
        try:
            self._ask(self._confirm, name, end)
        except BusError as error:
            _log.warning("the position of %s was not told: %s", name, error)

    async def _confirm(self, name: str, end: Offset) -> None:
        for topic, mark in end.items():
            value: bytes = msgpack.packb(to_json({topic: mark}))
            await self._bus.retain(topic, f"spark/{name}", value)


async def _first(feed: Feed) -> int:
    """The position of the first message that a feed reads, behind what may be missing in front of it."""
    while True:
        for each in await feed.read(1, 1):
            if isinstance(each, Message):
                return int(each.position)


async def still_there(bus: Bus, topic: str, incarnation: int | None, position: int) -> Place:
    """This position. OffsetRefused where the log is another one; what was removed is for the feed to report."""
    bounds = await bus.bounds(topic)
    if bounds.incarnation != incarnation or bounds.end < position:
        raise OffsetRefused(
            f"{topic} was purged, or deleted and made anew, since position {position} was read; begin with a new "
            "checkpoint"
        )
    return Place(position, incarnation)
