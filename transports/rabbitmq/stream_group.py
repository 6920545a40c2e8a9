"""Groups on streams: a reader of the stream, and a queue that says whose turn it is.

A stream has no single reader. So a group has an empty queue beside it, of which one consumer may be the only one: the
broker refuses all others, and lets the next one in as soon as that one's channel is gone. Position and state are one
retained value, written on this very channel: who has lost the turn has lost the channel, and writes nothing more.
A broker short of memory or disk reads nothing from who writes: then confirming waits, as in group.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgpack

from esp_pubsub.bus import Bounds, Break, Message, Place, Start
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .channel import LONGEST_NAME, Channel, quoted, unused
from .group import PERSISTENT
from .pipe import RabbitPipe
from .stream import StreamFeed, Streams
from .values import check_size, declare, queue_of

if TYPE_CHECKING:
    from .bus import RabbitBus

_ASK_AGAIN = 0.2


class StreamGroupFeed:
    """A `Feed` with a group."""

    state: bytes | None = None
    unconfirmed: int | None = None

    def __init__(self, bus: RabbitBus, streams: Streams, topic: str, start: Start, group: str) -> None:
        self._bus = bus
        self._link = bus.link
        self._streams = streams
        self._topic = topic
        self._start = start
        self._queue = quoted(f"{group}@{topic}")
        if len(self._queue) > LONGEST_NAME:
            raise BusRefused(
                f"a queue's name has at most {LONGEST_NAME} characters, {self._queue} has more: use shorter names"
            )
        self._value = queue_of(topic, f"position of {group}")
        self._key = f"position of {group}"
        self._stored: int | None = None  # the position to go on with
        self._base: int | None = None  # of the stream that we read
        self._turn: Channel | None = None
        self._feed: StreamFeed | None = None
        self._values: RabbitPipe | None = None
        self._written = 0
        self._line = asyncio.Lock()
        self._error: BusError | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Where a group that has nothing stored begins is settled now."""
        if self._start == "latest":
            self._start = (await self._streams.bounds(self._topic, make=True)).end

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self, error: BusError) -> None:
        self._error = self._error or error
        if self._feed is not None:
            self._feed.end(self._error)

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        self._check()
        if self._turn is None:
            self._turn = await self._wait_for_turn()
        if self._feed is None:
            await self._begin()
            self._check()
        assert self._feed is not None
        found = await self._feed.read(max_messages, max_bytes)
        self._check()
        if self._feed.place is not None and self._feed.place.incarnation != self._base:
            self._base = self._feed.place.incarnation
            self._stored = self.state = None
        return found

    @property
    def place(self) -> Place | None:
        """See `Feed.place`."""
        return None if self._feed is None else self._feed.place

    async def _wait_for_turn(self) -> Channel:
        while True:
            self._check()
            what = f"reading {self._queue}"
            channel = await self._link.channel("groups", what, confirms=True)
            channel.on_cancel = lambda: self._end(BusUnavailable(f"{self._queue} was deleted"))
            try:
                await self._link.ask(what, channel.queue_declare(self._queue, durable=True))
                await self._link.ask(what, channel.basic_consume(self._queue, unused, exclusive=True))
            except BusRefused as error:
                self._link.drop(channel)
                if "exclusive" not in str(error):
                    raise
            except BaseException:
                self._link.drop(channel)
                raise
            else:
                channel.on_end.append(self._end)
                if channel.is_closed:
                    self._end(BusUnavailable(f"{what}: the link was lost"))
                return channel
            await asyncio.sleep(_ASK_AGAIN)

    async def _begin(self) -> None:
        """Stand where the group stands, or where we stood if it has stored nothing of the stream that is there now."""
        packed, start = await self._bus.retained(self._topic, self._key), self._start
        now = await self._streams.bounds(self._topic, make=True)
        self._base = now.incarnation
        ours = start.incarnation if isinstance(start, Place) else None
        if packed is None:
            self._feed = await self._streams.feed(self._topic, start)
            return
        stored, state, base = self._unpacked(packed, now)
        if base == self._base:
            self._stored, self.state = stored, state
            if stored is not None:
                start = Place(stored, base)
        else:
            start = Place(now.first, self._base) if ours == self._base else Place(0, base)
        self._feed = await self._streams.feed(self._topic, start)
        if base == self._base and stored is not None and ours not in (None, base):
            self._feed.tell_anew("the stream was made anew since, and another reader of the group went on with it")

    def _unpacked(self, packed: bytes, now: Bounds) -> tuple[int | None, bytes, int | None]:
        """Position and state, and of which stream: the first ones who stored something did not say that."""
        try:
            stored, state, *base = msgpack.unpackb(packed)
            if not base:
                base = [now.incarnation if (stored or now.end) >= (now.incarnation or 0) else 0]
            return stored, state, base[0]
        except (ValueError, TypeError):
            raise BusRefused(f"what {self._value} holds was stored by another program: delete that queue") from None

    async def release(self, positions: Sequence[int]) -> None:
        """See `Feed.release`: a log lets go by itself."""

    async def confirm(self, position: int | None, state: bytes) -> None:
        """See `Feed.confirm`."""
        self._check()
        if self._turn is None or self._feed is None:
            raise BusUnavailable(f"this is not the reader of {self._queue}")
        what = f"storing the position of {self._queue}"
        await self._link.see_through(what, self._store(what, self._turn, position, state))

    async def _store(self, what: str, turn: Channel, position: int | None, state: bytes) -> None:
        async with self._line:
            self._check()
            if position is not None:
                self._stored = max(self._stored or 0, position + 1)
            packed = msgpack.packb((self._stored, state, self._base))
            check_size(self._value, packed)
            if self._values is None:
                self._values = RabbitPipe(self._link, turn, "", self._value, PERSISTENT)
                await self._values.until_unblocked()
                await self._link.ask(what, declare(turn, self._value))
            await self._values.write([packed])
            self._written = await self._values.confirmed(self._written)
            if self._values.unroutable:
                raise BusUnavailable(f"{self._value} was deleted: the position was not stored")

    @property
    def closed(self) -> bool:
        """Nothing of it is left."""
        return self._closing is not None and self._closing.done()

    async def aclose(self) -> None:
        """See `Feed.aclose`."""
        self._end(BusUnavailable(f"this feed of {self._topic} was closed"))
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._values is not None and self._error is not None:
            self._values.end(self._error)
        if self._turn is not None:
            await self._link.drop(self._turn)
        if self._feed is not None:
            await self._feed.aclose()
