"""The writer's end of a topic: what is written, what is under way, and what spoils it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import lmdb

from esp_pubsub._news import News
from esp_pubsub.errors import BusRefused, BusUnavailable

from . import log
from .options import EmbeddedOptions
from .store import Store, Write

LARGEST = 65 << 20  # bytes of a message
LAST_WORDS = 0.5  # seconds that a close gives to what is to be written still
_AHEAD = 8 << 10  # bytes that may be under way when a write returns


class _UnderWay(NamedTuple):
    write: Write[None]
    messages: int
    size: int
    since: float


class EmbeddedPipe:
    """A `Pipe`: each write is one commit, possibly together with others'.

    A little may be under way when `write` returns: what comes right behind it is then in the thread's hands without a
    turn of the loop in between. For more it waits, and meanwhile the next becomes more too. What goes wrong with one
    write spoils all behind it: nothing may ever stand behind what is missing.
    """

    def __init__(self, store: Store, options: EmbeddedOptions) -> None:
        self._store = store
        self._deadline = options.deadline
        self._ring = log.Ring(options.ring_records, options.ring_size)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._under_way: deque[_UnderWay] = deque()
        self._size = 0  # of what is under way
        self._confirmed = 0
        self._news = News()
        self._error: Exception | None = None
        self._spoilt = False
        self._closed = False

    async def write(self, frames: Sequence[bytes]) -> None:
        """See `Pipe.write`."""
        self._check()
        if not frames:
            return
        taken = False
        try:
            too_large = max(map(len, frames))
            if too_large > LARGEST:
                raise BusRefused(f"a message of {too_large} bytes; the limit is {LARGEST}")
            self._submit(log.pack(frames, time.time_ns() // 1000), len(frames))
            while self._size > _AHEAD:
                await self._news.wait()
                self._check()
            taken = True
        finally:
            if not taken:
                self._spoil()

    def _submit(self, value: bytes, count: int) -> None:
        write = self._store.submit(partial(self._append, value, count), self._done)
        self._under_way.append(_UnderWay(write, count, len(value), self._loop.time()))
        self._size += len(value)
        if self._timer is None:
            self._timer = self._loop.call_later(self._deadline, self._look_for_late)

    def _append(self, value: bytes, count: int, transaction: lmdb.Transaction) -> None:
        """In the store's thread."""
        if self._spoilt:
            raise BusUnavailable("what stands in front of this was not written")
        try:
            log.append(transaction, value, count, self._ring)
        except (BusUnavailable, BusRefused):  # the transaction goes on without it
            self._spoilt = True
            raise

    def _done(self, _: None, error: Exception | None) -> None:
        """In the store's thread, before it looks at the next write."""
        if error is not None:
            self._spoilt = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(self._told, error)

    def _told(self, error: Exception | None) -> None:
        """The oldest write is through, or nothing more will be."""
        if error is not None:
            self._error = self._error or error
            self._spoil()
        elif self._under_way:  # else it was withdrawn, too late
            _, messages, size, _ = self._under_way.popleft()
            self._confirmed += messages
            self._size -= size
            self._news.tell()

    def _look_for_late(self) -> None:
        """What is under way for longer than the deadline is trouble. One timer at a time, not one for each write."""
        self._timer = None
        if not self._under_way:
            return
        late = self._under_way[0].since + self._deadline
        if late <= self._loop.time():
            self._told(self._store.locked(self._deadline))
        else:
            self._timer = self._loop.call_at(late, self._look_for_late)

    async def confirmed(self, past: int) -> int:
        """See `Pipe.confirmed`."""
        while self._confirmed <= past:
            self._check()
            await self._news.wait()
        return self._confirmed

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise BusUnavailable("this pipe was closed")

    def _spoil(self) -> None:
        """Write nothing more, nor what the thread has not begun."""
        self._spoilt = self._closed = True
        for each in self._under_way:
            each.write.withdraw()
        self._under_way.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._news.tell()

    async def aclose(self) -> None:
        """See `Pipe.aclose`. What is under way has a moment to get through."""
        self._closed = True
        self._news.tell()
        try:
            async with asyncio.timeout(LAST_WORDS):
                while self._under_way:
                    await self._news.wait()
        except TimeoutError:
            pass
        finally:
            self._spoil()
