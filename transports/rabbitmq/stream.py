"""RabbitMQ streams: a log on the broker, with one order for all, kept until retention takes it.

Positions
    are `base + offset`. The base is a number that whoever makes a stream stores in it, as the "offset" of a reader that
    does not exist: the broker keeps such values as long as the stream, whatever retention takes, because this one is
    larger than any offset. It is made of the time, so that a stream made anew under the same name has a higher one: no
    position is used twice, and one below the base is of a stream that is no more. Purging is deleting and making anew.
    The broker keeps notes of its own in the log, which take offsets too: positions grow, but not always by one.

Why what is missing of a pipe is always its end (`suffix_only`)
    A pipe has a connection of its own, and one entry under way: several messages are one sub-batch, which the broker
    writes into its log whole or not at all. The next entry is sent when the one before is confirmed, so that none can
    overtake it, or stand in the log without it, whoever leads the stream meanwhile. After any trouble (an error, no
    confirmation in time, the stream deleted or led by another, the connection lost) the pipe sends nothing more. The
    entry that was under way then is in the log or is not, or will be; it is the last one. The publisher has no name,
    because the broker confirms what it takes for the double of a name without keeping it.

Where a log begins and ends
    is not told by the protocol. But a broker carries out the commands of a connection one by one, and delivers what a
    subscription finds at once before it looks at the next command. So what has not come when the next one is answered
    was not there.

There are no tasks: what arrives is handled as it arrives, what comes too late by a timer.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime

from esp_pubsub.address import is_control
from esp_pubsub.bus import Bounds, Break, Message, Place, Start
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable, ConfigError

from .refusals import stream_trouble
from .stream_link import (
    ABSENT,
    EXISTS,
    NO_OFFSET,
    NOT_AVAILABLE,
    OK,
    PRECONDITION_FAILED,
    Address,
    Chunk,
    Key,
    Link,
    chunk,
    connect,
    pairs,
    text,
)
from .stream_messages import ENVELOPE, FRAME, MOST, messages_of, publication

LARGEST_BATCH = 1 << 18  # of several messages
READ_AHEAD = 1 << 20  # bytes of chunks that are asked for in advance, if chunks are that small
_CREDITS = 16
_BASE = "esp-pubsub base"
_LAST_BASE = 1 << 63
_MILLISECOND = 1 << 21  # positions: more than are written in that time
_ORPHANED = 1.0  # seconds after which a stream without a base is taken for one that others made
_FIRST, _LAST, _OFFSET, _TIMESTAMP = 1, 2, 4, 5


_LOOK_EVERY = 5.0  # seconds without a message after which a reader asks whether its place is still there
_CONTROL = {"max-age": "3600s", "stream-max-segment-size-bytes": "4000000"}  # beats are of use for seconds
LEAST = 64 << 20  # bytes that a stream keeps, if it is to lose old messages and never the newest


def retention(max_bytes: int, max_age: float) -> dict[str, str]:
    """The arguments of streams that keep so many bytes, so many seconds; 0 is without a bound.

    The broker drops whole segments, and all but the one it writes to, which may have been begun just now: so a segment
    is a fraction of what is kept, and what is written at once an even smaller one.
    """
    if 0 < max_bytes < LEAST:
        raise ConfigError(f"a stream keeps {LEAST} bytes at least, not {max_bytes}")
    found = {}
    if max_bytes:
        found["max-length-bytes"] = str(max_bytes)
        found["stream-max-segment-size-bytes"] = str(min(max_bytes // 4, 500_000_000))
    if max_age:
        found["max-age"] = f"{math.ceil(max_age)}s"
    return found


class Streams:
    """The streams of one broker or cluster."""

    def __init__(self, address: Address, arguments: Mapping[str, str]) -> None:
        """`arguments` are those of a stream that is made here, see `retention`."""
        self.address = address
        self.max_message_bytes = 0
        """The largest message; known after `begin`."""
        self.unreadable: set[tuple[str, int]] = set()
        """Chunks that could not be read: they are asked for once more, then passed."""
        self._arguments = arguments
        self._open: set[StreamPipe | StreamFeed] = set()
        self._closed = False

    async def begin(self) -> None:
        """See that there is a broker that lets us in, and what it takes."""
        async with self.connected() as link:
            self.max_message_bytes = link.largest_frame - FRAME

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Link]:
        """A connection for a few questions."""
        link = await self.connect()
        try:
            yield link
        finally:
            await link.aclose()

    async def connect(self) -> Link:
        """A connection to keep."""
        if self._closed:
            raise BusUnavailable("this bus was closed")
        link = await connect(self.address)
        if self._closed:
            await link.aclose()
            raise BusUnavailable("this bus was closed")
        return link

    async def base(self, link: Link, stream: str, *, make: bool = True, above: int = 0) -> int:
        """The base of a stream; unless told otherwise the stream is made if it is not there."""
        loop = asyncio.get_running_loop()
        began, made = loop.time(), False
        while True:
            code, rest = await link.ask(Key.QUERY_OFFSET, text(_BASE) + text(stream))
            if code == OK and (found := int.from_bytes(rest[:8], "big")) <= _LAST_BASE:
                return found
            if code == OK:  # another program wrote it: positions behind it would be no numbers of 64 bits
                code, made = NO_OFFSET, True
            waited = loop.time() - began
            if waited > self.address.timeout:
                raise stream_trouble(f"looking for the stream {stream}", code)
            if code == ABSENT and make:
                made = await self._make(link, stream) or made
                continue
            if code == NO_OFFSET and (made or waited > _ORPHANED):
                base = max(time.time_ns() // 1_000_000 * _MILLISECOND, above + 1)
                link.send(Key.STORE_OFFSET, text(_BASE), text(stream), base.to_bytes(8, "big"))
                await asyncio.sleep(0 if made else 0.1)  # if others do the same now, the last one is right
                made = False
                continue
            if code not in (ABSENT, NO_OFFSET, NOT_AVAILABLE):
                raise stream_trouble(f"looking for the stream {stream}", code)
            await asyncio.sleep(0.02)

    async def _make(self, link: Link, stream: str) -> bool:
        """Whether it was us who made it."""
        arguments = _CONTROL if is_control(stream) else self._arguments
        code, _ = await link.ask(Key.CREATE, text(stream) + pairs(arguments))
        if code == PRECONDITION_FAILED:  # it exists and is otherwise; or it is another kind of queue
            if (await link.ask(Key.QUERY_OFFSET, text(_BASE) + text(stream)))[0] == ABSENT:
                raise BusRefused(f"{stream} is a queue, and no stream")
        elif code not in (OK, EXISTS):
            raise stream_trouble(f"making the stream {stream}", code)
        return code == OK

    async def bounds(self, stream: str, *, make: bool = False) -> Bounds:
        """What a stream holds now, asked by the connection of a reader of it, if there is one: a new one takes time."""
        links = [link for feed in self._open if isinstance(feed, StreamFeed) and (link := feed.link_to(stream))]
        if links:
            return await self.bounds_by(links[0], stream)
        async with self.connected() as link:
            return await self.bounds_by(link, stream, make=make)

    async def bounds_by(self, link: Link, stream: str, *, make: bool = False) -> Bounds:
        """The same by a connection that is there."""
        base = await self.base(link, stream, make=make)
        first, last = await link.peek(stream, *(struct.pack(">H", where) for where in (_FIRST, _LAST)))
        if first is None or last is None:
            return Bounds(base, base, base)
        return Bounds(base + first.first, base + last.first + last.records, base)

    async def pipe(self, stream: str) -> StreamPipe:
        """See `Bus.pipe`."""
        link = await self.connect()
        try:
            await self.base(link, stream)
            code, _ = await link.ask(Key.DECLARE_PUBLISHER, b"\0" + text("") + text(stream))
            if code == PRECONDITION_FAILED:
                raise BusUnavailable("the broker is short of memory or disk space, and takes nothing")
            if code != OK:
                raise stream_trouble(f"publishing to the stream {stream}", code)
        except BaseException:
            await link.aclose()
            raise
        pipe = StreamPipe(link, stream)
        await self._keep(pipe)
        return pipe

    async def feed(self, stream: str, start: Start) -> StreamFeed:
        """See `Bus.feed`."""
        feed = StreamFeed(self, stream)
        try:
            await feed.open(start)
        except BaseException:
            await feed.aclose()
            raise
        await self._keep(feed)
        return feed

    async def _keep(self, opened: StreamPipe | StreamFeed) -> None:
        self._open = {other for other in self._open if other.error is None} | {opened}
        if self._closed:
            await opened.aclose()
            raise BusUnavailable("this bus was closed")

    async def purge(self, stream: str) -> None:
        """See `Catalog.purge`."""
        async with self.connected() as link:
            base = await self.base(link, stream)
            await link.demand(f"deleting the stream {stream}", Key.DELETE, text(stream))
        async with self.connected() as link:  # another one: a connection remembers who led the stream
            await self.base(link, stream, above=base)

    async def aclose(self) -> None:
        """See `Bus.aclose`."""
        self._closed = True
        await asyncio.gather(*(opened.aclose() for opened in self._open))


class StreamPipe:
    """A `Pipe`."""

    def __init__(self, link: Link, stream: str) -> None:
        self.error: BusError | None = None
        self._link = link
        self._stream = stream
        self._largest = link.largest_frame - FRAME
        self._most = min(LARGEST_BATCH, self._largest)
        self._waiting: deque[bytes] = deque()
        self._size = 0  # of what waits
        self._number = 0  # of the entry that was sent last
        self._under_way = 0  # messages in it, while it is not confirmed
        self._confirmed = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._acked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        link.listen(self._hear, self._end)

    async def write(self, frames: Sequence[bytes]) -> None:
        """See `Pipe.write`."""
        if self.error is None and frames and (size := max(map(len, frames))) > self._largest:
            self._link.end(BusRefused(f"a message of {size} bytes; the broker takes {self._largest}"))
        for frame in frames:
            while self._size >= self._most and self.error is None:
                self._room.clear()
                self._send()
                await self._room.wait()
            if self.error is not None:
                raise self.error
            self._waiting.append(frame)
            self._size += len(frame) + ENVELOPE
        if self.error is not None:
            raise self.error
        self._send()

    def _send(self) -> None:
        """Send an entry, unless one is under way."""
        waiting = self._waiting
        if self._under_way or not waiting or self.error is not None:
            return
        taken = [waiting.popleft()]
        size = len(taken[0]) + ENVELOPE
        while waiting and size + len(waiting[0]) + ENVELOPE <= self._most and len(taken) < MOST:
            size += len(waiting[0]) + ENVELOPE
            taken.append(waiting.popleft())
        self._size -= size
        self._number += 1
        self._under_way = len(taken)
        self._link.send(Key.PUBLISH, *publication(self._number, taken))
        self._deadline = self._loop.call_later(self._link.timeout, self._late)
        self._room.set()

    def _late(self) -> None:
        self._link.end(BusUnavailable(f"the broker confirmed nothing on {self._stream} within {self._link.timeout} s"))

    def _hear(self, key: int, content: memoryview) -> None:
        if key == Key.CONFIRMED:
            (number,) = struct.unpack_from(">Q", content, 5)
            if number == self._number and self._under_way and self._deadline is not None:
                self._deadline.cancel()
                self._confirmed += self._under_way
                self._under_way = 0
                self._acked.set()
                self._send()
        elif key == Key.PUBLISH_ERROR:
            (code,) = struct.unpack_from(">H", content, 13)
            self._link.end(stream_trouble(f"publishing to the stream {self._stream}", code))
        elif key == Key.METADATA_UPDATE:
            self._link.end(BusUnavailable(f"the stream {self._stream} was deleted, or has another leader"))

    def _end(self, error: BusError) -> None:
        self.error = error
        self._waiting.clear()
        if self._deadline is not None:
            self._deadline.cancel()
        self._room.set()
        self._acked.set()

    async def confirmed(self, past: int) -> int:
        """See `Pipe.confirmed`."""
        while self._confirmed <= past:
            if self.error is not None:
                raise self.error
            self._acked.clear()
            await self._acked.wait()
        return self._confirmed

    async def aclose(self) -> None:
        """See `Pipe.aclose`."""
        await self._link.aclose()


def _size(item: Message | Break) -> int:
    return len(item.data) if isinstance(item, Message) else 0


class StreamFeed:
    """A `Feed` without groups: `confirm` is refused."""

    state: bytes | None = None
    unconfirmed: int | None = None
    place: Place | None = None

    def __init__(self, streams: Streams, stream: str) -> None:
        self.error: BusError | None = None
        self._streams = streams
        self._stream = stream
        self._link: Link | None = None
        self._base = 0
        self._where = b""  # where to subscribe again, while nothing was read
        self._since = 0  # milliseconds: nothing older
        self._next: int | None = None  # the position that is to come
        self._chunks: deque[memoryview] = deque()
        self._unpacking: tuple[Chunk, Iterator[list[Message]]] | None = None
        self._largest_chunk = READ_AHEAD // 2
        self._credits = 0  # chunks that may come
        self._looked_at = 0.0
        self._gone = False
        self._subscription = 0
        self._ahead: deque[Message | Break] = deque()
        self._after: deque[Place] = deque()  # each of those breaks
        self._ahead_bytes = 0
        self._news = asyncio.Event()

    async def open(self, start: Start) -> None:
        """Take the place: what is written from now on is read."""
        link = self._link = await self._streams.connect()
        if isinstance(start, datetime):
            self._since = math.ceil(start.timestamp() * 1000)
            self._where = struct.pack(">Hq", _TIMESTAMP, self._since)
        else:
            self._where = struct.pack(">H", _FIRST)
        if isinstance(start, int | Place) or start == "latest":
            bounds = await self._streams.bounds_by(link, self._stream, make=True)
            self._base = bounds.incarnation or 0
            position, base = start if isinstance(start, Place) else (start, self._base)
            if not isinstance(position, int):
                self._next = bounds.end if bounds.end > bounds.first else None
            elif base in (None, self._base) and self._base <= position < bounds.end + _MILLISECOND:
                self._next = position
            else:  # of one before, or one that a clock ahead of ours has made
                self.tell_anew("the stream was made anew since")
        else:
            self._base = await self._streams.base(link, self._stream)
        self.place = Place(self._base if self._next is None else self._next, self._base)
        await self._subscribe(link)

    def tell_anew(self, reason: str) -> None:
        """What is read from now on is of another stream than before."""
        self._ahead.append(Break(reason, None, incarnation=True))
        self._after.append(Place(self._base if self._next is None else self._next, self._base))

    async def _subscribe(self, link: Link) -> None:
        where = self._where if self._next is None else struct.pack(">HQ", _OFFSET, self._next - self._base)
        self._chunks.clear()
        self._unpacking = None
        self._credits = 2
        self._gone = False
        self._looked_at = time.monotonic()
        link.listen(self._hear, self.end)
        try:
            self._subscription = await link.subscribe(self._stream, where, self._credits, self._arrive)
        except BaseException:
            self._gone = True
            raise

    def _arrive(self, content: memoryview) -> None:
        self._credits -= 1
        self._largest_chunk = max(self._largest_chunk * 7 // 8, len(content), 1)
        self._chunks.append(content)
        self._news.set()

    def _hear(self, key: int, _: memoryview) -> None:
        if key == Key.METADATA_UPDATE:
            self._gone = True
            self._news.set()

    def end(self, error: BusError) -> None:
        """Nothing more comes of it."""
        self.error = error
        self._chunks.clear()
        self._unpacking = None
        self._news.set()

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        while True:
            while len(self._ahead) < max_messages and self._ahead_bytes < max_bytes:
                try:
                    if self._unpacking is not None:
                        self._unpack(*self._unpacking)
                    elif self._chunks:
                        await self._begin_chunk()
                    else:
                        break
                except BusError:
                    if not self._ahead:
                        raise
                    break  # what came in front of it is handed out first
            if self._ahead:
                return self._take(max_messages, max_bytes)
            if self.error is not None:
                raise self.error
            if self._gone:
                await self._renew()
            else:
                await self._wait()

    def _take(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """From what was unpacked: one at least, then within both bounds."""
        taken: list[Message | Break] = []
        ahead, size = self._ahead, 0
        while ahead and len(taken) < max_messages:
            item = ahead[0]
            size += _size(item)
            anew = isinstance(item, Break) and item.incarnation
            if taken and (size > max_bytes or anew):
                break
            taken.append(ahead.popleft())
            self._ahead_bytes -= _size(item)
            if isinstance(item, Break):
                self.place = self._after.popleft()
            if anew:
                break
        if isinstance(last := taken[-1], Message) and self.place is not None:
            self.place = Place(last.position + 1, self.place.incarnation)
        return taken

    async def _wait(self) -> None:
        """For something to come; when nothing does, ask whether the broker is still there, and now and then whether
        our place is: to a reader whose place retention took as it read, a broker may send nothing any more.
        """
        assert self._link is not None
        self._news.clear()
        try:
            async with asyncio.timeout(self._link.timeout / 2):
                await self._news.wait()
        except TimeoutError:
            if self._news.is_set():
                return
            if time.monotonic() < self._looked_at + _LOOK_EVERY:
                await self._link.ask(Key.QUERY_OFFSET, text(_BASE) + text(self._stream))
                return
            first = (await self._streams.bounds_by(self._link, self._stream)).first
            self._looked_at = time.monotonic()
            if self._next is not None and first > self._next + 1 and not self._news.is_set():
                self._gone = True

    async def _begin_chunk(self) -> None:
        """Begin to unpack the next chunk, and let others come."""
        content = self._chunks[0]
        header = chunk(content)
        first = self._base + header.first
        passed = 0 if self._next is None else first - self._next
        if passed > 1:  # one is a note of the broker's, of which every segment has one in front; others end up anywhere
            assert self._link is not None
            kept = (await self._streams.bounds_by(self._link, self._stream)).first
            if self.error is not None:
                raise self.error
            passed = passed if kept > (self._next or 0) + 1 else 0
        # nothing is awaited from here on
        self._chunks.popleft()
        if passed > 1:
            self._ahead.append(Break("retention passed the reader", passed))
            self._after.append(Place(first, self._base))
        if header.millis >= self._since:
            self._next = max(self._next or 0, first)
            self._unpacking = header, messages_of(header, content, self._base) if header.kind == 0 else iter(())
        self._grant()

    def _unpack(self, header: Chunk, pieces: Iterator[list[Message]]) -> None:
        """One piece of a chunk."""
        first, wanted = self._base + header.first, self._next or 0
        past = first + header.records
        try:
            found = next(pieces, None)
        except ValueError as e:
            if (self._stream, first) not in self._streams.unreadable:  # perhaps only on its way
                self._streams.unreadable.add((self._stream, first))
                raise self._broken(f"{self._stream} at {first}: {e}") from e
            found = None
            if past > wanted:
                self._ahead.append(Break("what stands here is larger than 64 MiB, or damaged", past - wanted))
                self._after.append(Place(past, self._base))
        if found is None:
            self._unpacking = None
            self._next = max(wanted, past)
            return
        if found and found[0].position < wanted:
            found = [message for message in found if message.position >= wanted]
        if found:
            self._ahead.extend(found)
            self._ahead_bytes += sum(map(_size, found))
            self._next = found[-1].position + 1

    def _broken(self, what: str) -> BusUnavailable:
        error = BusUnavailable(what)
        assert self._link is not None
        self._link.end(error)
        return error

    def _grant(self) -> None:
        """Ask for as many chunks as there is room for, but two at least: the next one should be on its way."""
        room = max(2, min(_CREDITS, READ_AHEAD // self._largest_chunk)) - self._credits - len(self._chunks)
        if room > 0 and (self._credits < 2 or room >= _CREDITS // 2) and self._link is not None:
            self._credits += room
            self._link.send(Key.CREDIT, struct.pack(">BH", self._subscription, room))

    def link_to(self, stream: str) -> Link | None:
        """Our connection, if we read this stream by it."""
        return self._link if self._stream == stream and self.error is None and not self._gone else None

    async def _renew(self) -> None:
        """The stream is not where it was: go on where it is now, or with the one that was made in its place."""
        link = await self._streams.connect()
        try:
            base = await self._streams.base(link, self._stream, make=False)
            if self.error is not None:
                raise self.error
        except BaseException:
            link.end(BusUnavailable("this connection was not needed"))
            raise
        old, self._link = self._link, link
        if base != self._base:
            self._base, self._next = base, None
            self._where, self._since = struct.pack(">H", _FIRST), 0
            self.tell_anew("the stream was deleted and made anew")
        if old is not None:
            old.listen(lambda *_: None, lambda _: None)
            await old.aclose()
        await self._subscribe(link)

    async def release(self, positions: Sequence[int]) -> None:
        """See `Feed.release`: a log lets go by itself."""

    async def confirm(self, position: int | None, state: bytes) -> None:
        """See `Feed.confirm`."""
        raise BusRefused("a feed without a group stores no position")

    async def aclose(self) -> None:
        """See `Feed.aclose`."""
        error = BusUnavailable(f"this feed of {self._stream} was closed")
        self.end(self.error or error)
        if self._link is not None:
            await self._link.aclose()
