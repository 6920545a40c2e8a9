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
from esp_pubsub.bus import Bus, Feed, Message, Start
from esp_pubsub.errors import BusError, BusUnavailable
from esp_pubsub.subscriber import RUNS_KEY

from .connection import connected, require_replay
from .offsets import Mark, Offset, OffsetRefused, to_json
from .options import Options
from .scan import Scan

T = TypeVar("T")
_READ = 1_000, 4 << 20
_PAUSE, _PAUSE_MOST = 0.1, 5.0
_LOOK = 2.0  # seconds that a query's first call looks at what was there before
_log = logging.getLogger("esp_pubsub.spark")


class Planner:
    """For one query: the topics of its options. Its methods are Spark's, so they block, but never for ever."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._scans: dict[str, Scan] = {}
        self._work: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._news: News
        self._first = 0
        self._target: dict[str, int] | None = None
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
        return self._ask(self._marks, self._options.start)

    def freeze(self) -> None:
        """From now on nothing counts that stands behind the option `end`: what is published later, usually."""
        found = self._ask(self._marks, self._options.end)
        self._target = {topic: mark.position for topic, mark in found.items()}

    async def _marks(self, start: Start) -> dict[str, Mark]:
        return {topic: await self._mark(topic, start) for topic in self._options.topics}

    async def _mark(self, topic: str, start: Start) -> Mark:
        feed = await self._bus.feed(topic, start, None)
        try:
            bounds = await feed.bounds()
            position = bounds.first if start == "earliest" else bounds.end
            if isinstance(start, int):
                if not bounds.first <= start <= bounds.end:
                    raise OffsetRefused(f"{topic} holds positions {bounds.first} to {bounds.end}, and not {start}")
                position = start
            elif isinstance(start, datetime) and bounds.end > bounds.first:
                with suppress(TimeoutError):  # nothing is that late
                    async with asyncio.timeout(_LOOK):
                        read = await feed.read(1, 1)
                    position = next((each.position for each in read if isinstance(each, Message)), position)
        finally:
            await feed.aclose()
        return Mark(position, bounds.incarnation, from_start=start in ("earliest", 0))

    # what comes next

    def next(self, start: Offset, most_rows: int | None) -> dict[str, Mark]:
        """The offset behind the next batch; `start` if there is nothing for one. Answers from memory, but for a query's
        first call, and where a frozen target is not reached yet.
        """
        return self._ask(self._next, start, most_rows)

    async def _next(self, start: Offset, most_rows: int | None) -> dict[str, Mark]:
        if {topic: scan.mark.position for topic, scan in self._scans.items()} != {
            topic: mark.position for topic, mark in start.items()
        }:
            await self._begin(start)
        while True:
            if self._failure is not None:
                raise self._failure
            found = self._cut(most_rows)
            if found != start or self._target is None or self._reached(self._target):
                return found
            await self._news.wait()

    def _cut(self, most_rows: int | None) -> dict[str, Mark]:
        topics = list(self._scans)
        self._first = (self._first + 1) % len(topics)  # each is first in its turn
        left = most_rows
        for topic in topics[self._first :] + topics[: self._first]:
            scan = self._scans[topic]
            before = scan.mark.counts["rows"]
            if left is None or left == most_rows or scan.next_rows <= left:
                scan.advance(left, (self._target or {}).get(topic))
            if left is not None:
                left = max(0, left - (scan.mark.counts["rows"] - before))
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
        """Read from this offset on. Returns when what was there was looked at, as far as that goes quickly."""
        await self._stop()
        self._news = News()
        self._failure = None
        ends = {topic: mark.position for topic, mark in (await self._marks("latest")).items()}
        self._scans = {topic: Scan(topic, mark, len(start)) for topic, mark in start.items()}
        self._work = asyncio.create_task(self._read_all(), name="esp spark planner")
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_LOOK, self._options.timeout / 2)):
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
        if not scan.mark.from_start and self._bus.capabilities.retained:
            runs = await self._bus.retained(scan.topic, RUNS_KEY)
            scan.accept.joined_at_run = dict(msgpack.unpackb(runs, strict_map_key=False)) if runs else {}
        pause, head = _PAUSE, scan.head
        while True:
            try:
                await self._read_feed(scan)
            except BusUnavailable as error:
                pause = min(_PAUSE_MOST, 2 * pause) if scan.head == head else _PAUSE
                head = scan.head
                _log.warning("%s: %s; trying again in %g s", scan.topic, error, pause)
                await asyncio.sleep(pause)

    async def _read_feed(self, scan: Scan) -> None:
        feed = await open_at(self._bus, scan.topic, scan.mark.incarnation, scan.head)
        try:
            while True:
                while scan.full:
                    await self._news.wait()
                scan.take(await feed.read(*_READ))
                self._news.tell()
        finally:
            await feed.aclose()

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


async def open_at(bus: Bus, topic: str, incarnation: int | None, position: int) -> Feed:
    """A feed at this position. OffsetRefused where the log is another one; what was removed is the feed's to tell."""
    feed = await bus.feed(topic, position, None)
    try:
        bounds = await feed.bounds()
        if bounds.incarnation != incarnation or bounds.end < position:
            raise OffsetRefused(
                f"{topic} was purged, or deleted and made anew, since position {position} was read; begin with a new "
                "checkpoint"
            )
    except BaseException:
        await feed.aclose()
        raise
    return feed
