"""Reading one topic forever: open, read, and after trouble open again, a little later each time.

It is pulled: there is no task behind it (decision 2), and it reads nothing until it is asked. What it returned is the
user's, who says each time where the next feed begins: after what was *taken*, which is less than what was read where
something failed in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from .backoff import Backoff
from .bus import Break, Bus, Feed, Message, Place, Start
from .errors import BusUnavailable, Closed

_READ_MESSAGES, _READ_BYTES = 1_000, 4 << 20


async def before_end(bus: Bus, topic: str, messages: int) -> tuple[Place, int]:
    """Where a reader begins that wants the last messages of a topic, or all that are kept if these are less; and where
    the topic ends now.
    """
    bounds = await bus.bounds(topic)
    return Place(max(bounds.first, bounds.end - messages), bounds.incarnation), bounds.end


async def read_to_end(bus: Bus, topic: str, start: Place | None = None) -> AsyncGenerator[Sequence[Message]]:
    """All messages of a log from a place on, or from its first one, up to the end that it has now, as they are read.

    Whoever may stop early closes it (`contextlib.aclosing`), so that its feed is closed at once.
    """
    bounds = await bus.bounds(topic)
    place = start or Place(bounds.first, bounds.incarnation)
    if place.position >= bounds.end:
        return
    feed = await bus.feed(topic, place, None)
    try:
        while feed.place is None or feed.place.position < bounds.end:
            yield [each for each in await feed.read(_READ_MESSAGES, _READ_BYTES) if isinstance(each, Message)]
    finally:
        await feed.aclose()


class Follower:
    """One feed of a topic after another. Used by one task, but for `lose` and `aclose`."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        begin: Callable[[], Awaitable[Start]],
        backoff: Backoff,
        *,
        group: str | None = None,
        opened: Callable[[], None] | None = None,
        trouble: Callable[[BusUnavailable], None] | None = None,
    ) -> None:
        """`begin` says where a feed begins, each time one is opened; its own BusUnavailable is trouble like any other.

        `opened` is called after `read` has opened a feed, `trouble` at each trouble, before it is waited out. What
        either raises comes out of `read`; without `trouble` that is the trouble itself.
        """
        self.feed: Feed | None = None
        self._bus = bus
        self._topic = topic
        self._begin = begin
        self._backoff = backoff
        self._group = group
        self._opened = opened
        self._trouble = trouble
        self._not_before = 0.0
        self._closed = False

    @property
    def place(self) -> Place | None:
        """After what was read last; None on a queue, and while there is no feed."""
        return None if self.feed is None else self.feed.place

    async def open(self, start: Start) -> None:
        """Take the first place. What fails here is raised."""
        await self._open(start)

    async def _open(self, start: Start) -> Feed:
        feed = await self._bus.feed(self._topic, start, self._group)
        if self._closed:  # while it was opened
            await feed.aclose()
            self._check()
        self.feed = feed
        return feed

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"the reader of {self._topic} is closed")

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`. Trouble is waited out; cancelled, nothing is lost. Closed once that was called."""
        while True:
            await asyncio.sleep(0)  # where there is always more, others of the loop have their turn here (decision 11)
            feed = self.feed
            try:
                if feed is None:
                    feed = await self._reopen()
                found = await feed.read(max_messages, max_bytes)
            except BusUnavailable as error:
                await self.lose(feed, error)
                continue
            self._backoff.reset()
            return found

    async def _reopen(self) -> Feed:
        self._check()
        await asyncio.sleep(max(0.0, self._not_before - asyncio.get_running_loop().time()))
        self._check()
        feed = await self._open(await self._begin())
        if self._opened is not None:
            self._opened()
        return feed

    async def lose(self, feed: Feed | None, error: BusUnavailable) -> None:
        """This feed failed, or none could be opened: the next `read` opens another one. One that another task has lost
        before changes nothing.
        """
        self._check()
        if feed is not self.feed:
            return
        self.feed = None
        self._not_before = asyncio.get_running_loop().time() + self._backoff.next()
        try:
            if self._trouble is None:
                raise error
            self._trouble(error)
        finally:
            if feed is not None:
                await feed.aclose()

    async def aclose(self) -> None:
        """Stop reading; a group's next reader may go on at once. Bounded; twice is harmless."""
        self._closed = True
        feed, self.feed = self.feed, None
        if feed is not None:
            await feed.aclose()
