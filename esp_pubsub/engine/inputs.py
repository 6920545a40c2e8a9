"""The inputs of an engine, read: a log by every member, a queue by the member that writes the order.

A log is read a little ahead of the order, so that what an entry names is there when the entry comes. Of a queue all
that counts travels in entries: it is read as a group, and messages are confirmed once an entry that contains them was
read back. They are never returned to the broker: when the role is lost the feed is closed, and what was not confirmed
is delivered again to the next member that writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from .._news import News
from .._tasks import run_all
from ..backoff import Backoff
from ..bus import Break, Bus, Feed, Message, Place, Start, parts
from ..errors import BusUnavailable, InputLost
from ..follower import Follower
from ..notices import Failure, Notice, Reconnected

_log = logging.getLogger("esp_pubsub.engine")
_READ_BLOCKS, _READ_BYTES = 1_000, 4 << 20
_AHEAD_BLOCKS, _AHEAD_BYTES = 10_000, 64 << 20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0
_SILENT = 30.0  # seconds after which an input that has never had anything is reported
NEW_RUN = (
    "begin a new run on all members (run=..., --run); with repeat=True, or --repeat, it begins with the last snapshot, "
    "and what came after that is emitted again"
)


def earliest(*since: float | None) -> float | None:
    """The first of these times; None if there is none."""
    return min((each for each in since if each is not None), default=None)


class LogReader:
    """A log, from a place on, forever. What it cannot read any more raises InputLost."""

    def __init__(self, bus: Bus, topic: str, place: Place, notify: Callable[[Notice], None]) -> None:
        self.topic = topic
        self.place = place
        """After what was read."""
        self.lost_since: float | None = None
        """Since when the bus cannot be read, by the loop's clock; None while it can."""
        self._bus = bus
        self._notify = notify
        self._follower = Follower(
            bus, topic, self._where, Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), opened=self._opened, trouble=self._lost
        )

    async def read(self) -> Sequence[Message]:
        """The next messages. Waits; trouble with the bus is waited out."""
        found: Sequence[Message] = ()
        for broken, messages in parts(await self._follower.read(_READ_BLOCKS, _READ_BYTES)):
            if broken is not None:
                raise self._gone(broken)
            found = messages
        self.place = self._follower.place or self.place
        return found

    async def end(self) -> int:
        """Where the topic ends now. Raises BusError."""
        return (await self._bus.bounds(self.topic)).end

    async def say_if_silent(self, window: str) -> None:
        """Log it if nothing has come for a while, and nothing stands there: the engine may look at the wrong place."""
        await asyncio.sleep(_SILENT)
        with suppress(BusUnavailable):  # that is reported elsewhere
            bounds = await self._bus.bounds(self.topic)
            if bounds.first == bounds.end:
                _log.warning(
                    "nothing has come to input window %s, which is read at %s: if it is published elsewhere, or to the "
                    "other side of that window, say where (windows=, --window %s=URL?side=...)",
                    window, self.topic, window,
                )  # fmt: skip

    async def aclose(self) -> None:
        """Stop reading."""
        await self._follower.aclose()

    async def _where(self) -> Start:
        return self.place

    def _opened(self) -> None:
        if self.lost_since is not None:
            self.lost_since = None
            self._notify(Reconnected(self.topic, f"reading goes on from {self.place.position}"))

    def _lost(self, error: BusUnavailable) -> None:
        if self.lost_since is None:
            self.lost_since = asyncio.get_running_loop().time()
            self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_READFAILED", error))

    def _gone(self, broken: Break) -> InputLost:
        position = self.place.position
        way_out = NEW_RUN
        if not broken.incarnation and broken.cut is None:
            way_out = f"keep more of the topic than a member may have to read again, and {way_out}"
        return InputLost(
            f"the engine cannot read {self.topic} on from position {position} ({broken.reason}): {way_out}",
            topic=self.topic,
            position=position,
        )


class LogInput:
    """A log, read ahead of the order within a bound. `taken`: the position up to which entries took it."""

    def __init__(self, window: str, reader: LogReader, changed: News) -> None:
        self._window = window
        self.taken = reader.place.position
        self._reader = reader
        self._changed = changed
        self._ahead: deque[Message] = deque()
        self._bytes = 0
        self._wanted = 0  # an entry names this position: no bound may keep us from it
        self._room = News()

    @property
    def end(self) -> int:
        """After what was read."""
        return self._reader.place.position

    async def bus_end(self) -> int:
        """Where the topic ends now. Raises BusError."""
        return await self._reader.end()

    @property
    def incarnation(self) -> int | None:
        """Of the topic that is read."""
        return self._reader.place.incarnation

    @property
    def lost_since(self) -> float | None:
        """See `LogReader.lost_since`."""
        return self._reader.lost_since

    async def run(self) -> None:
        """Read until cancelled. Raises InputLost."""
        await run_all(self._read(), self._reader.say_if_silent(self._window))

    async def _read(self) -> None:
        try:
            while True:
                while self._is_full and self.end >= self._wanted:
                    await self._room.wait()
                messages = await self._reader.read()
                self._ahead.extend(messages)
                self._bytes += sum([len(message.data) for message in messages])
                self._changed.tell()
        finally:
            await self._reader.aclose()

    @property
    def _is_full(self) -> bool:
        return len(self._ahead) >= _AHEAD_BLOCKS or self._bytes >= _AHEAD_BYTES

    async def take(self, to: int) -> Sequence[Message]:
        """All messages before this position that no entry has taken yet. Waits until they are read."""
        self._wanted = to
        self._room.tell()
        while self.end < to:
            await self._changed.wait()
        taken = []
        while self._ahead and self._ahead[0].position < to:
            message = self._ahead.popleft()
            self._bytes -= len(message.data)
            taken.append(message)
        self.taken = max(self.taken, to)
        self._room.tell()
        return taken


class Offer(NamedTuple):
    """Messages of a queue that an entry is to contain, and the feed that they came from."""

    feed: Feed
    messages: Sequence[Message]


class QueueInput:
    """A queue, read by the member that writes the order, as long as it does."""

    def __init__(self, bus: Bus, topic: str, group: str, changed: News, notify: Callable[[Notice], None]) -> None:
        self.topic = topic
        self.lost_since: float | None = None
        """See `LogReader.lost_since`; None also while it is not read."""
        self._bus = bus
        self._group = group
        self._changed = changed
        self._notify = notify
        self._feed: Feed | None = None
        self._ahead: deque[Message] = deque()
        self._bytes = 0
        self._counted: Message | None = None  # the last message that counts and is not confirmed
        self._news = News()

    @property
    def is_empty(self) -> bool:
        """It is read, and all that came of it is in entries."""
        return self._feed is not None and not self._ahead

    async def run(self) -> None:
        """Read and confirm until cancelled. Trouble is waited out: what was not confirmed comes again."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        try:
            while True:
                try:
                    await self._read_and_confirm(backoff)
                except BusUnavailable as error:
                    if self.lost_since is None:
                        self.lost_since = asyncio.get_running_loop().time()
                        self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_READFAILED", error))
                await asyncio.sleep(backoff.next())
        finally:
            self.lost_since = None

    async def _read_and_confirm(self, backoff: Backoff) -> None:
        self._feed = feed = await self._bus.feed(self.topic, "earliest", self._group)
        if self.lost_since is not None:
            self.lost_since = None
            self._notify(Reconnected(self.topic, "reading goes on with what was not confirmed"))
        try:
            await run_all(self._read(feed, backoff), self._confirm(feed))
        finally:
            self._feed, self._counted, self._bytes = None, None, 0
            self._ahead.clear()
            await feed.aclose()

    async def _read(self, feed: Feed, backoff: Backoff) -> None:
        while True:
            while len(self._ahead) >= _AHEAD_BLOCKS or self._bytes >= _AHEAD_BYTES:
                await self._news.wait()
            for item in await feed.read(_READ_BLOCKS, _READ_BYTES):
                if isinstance(item, Message):
                    self._ahead.append(item)
                    self._bytes += len(item.data)
            backoff.reset()
            self._changed.tell()

    async def _confirm(self, feed: Feed) -> None:
        while True:
            while (counted := self._counted) is None:
                await self._news.wait()
            self._counted = None
            await feed.confirm(counted.position, b"")

    def offer(self, max_bytes: int) -> Offer | None:
        """What no entry contains yet, within this bound, but at least one message if there is one."""
        if self._feed is None or not self._ahead:
            return None
        size, messages = 0, list[Message]()
        for message in self._ahead:
            size += len(message.data)
            if messages and size > max_bytes:
                break
            messages.append(message)
        return Offer(self._feed, messages)

    def counts(self, offer: Offer) -> None:
        """An entry that contains these was read back: they are confirmed, unless they are to come again anyway."""
        if offer.feed is not self._feed:
            return
        for message in offer.messages:
            self._ahead.popleft()
            self._bytes -= len(message.data)
        self._counted = offer.messages[-1]
        self._news.tell()
