"""The stream protocol of RabbitMQ: one connection, its frames, and what its answers mean.

Why not rstream: decision 6. What is spoken here is version 1 of the commands that pipes and feeds need, as every broker
since 3.9 has it. There is no task: frames are handled where they arrive, and what nobody asked for goes to `heard`.

A frame is its size, key, version and content; a request has a number that its answer repeats, then a code. Frames are
received into buffers that are never written again, so that a chunk can be kept without being copied.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .refusals import stream_trouble

LARGEST_FRAME = 64 << 20
_ROOM = 1 << 16  # bytes received at once, where no larger frame is on its way
_MANNERS = 1.0  # seconds that a broker has to take a farewell
_ANSWER = 0x8000
_head = struct.Struct(">IHH")
_chunk = struct.Struct(">BBBHIqQQIIII")
CHUNK = _chunk.size


class Key(IntEnum):
    """Commands."""

    DECLARE_PUBLISHER = 1
    PUBLISH = 2
    CONFIRMED = 3
    PUBLISH_ERROR = 4
    SUBSCRIBE = 7
    DELIVER = 8
    CREDIT = 9
    STORE_OFFSET = 10
    QUERY_OFFSET = 11
    UNSUBSCRIBE = 12
    CREATE = 13
    DELETE = 14
    METADATA_UPDATE = 16
    PEER_PROPERTIES = 17
    SASL_HANDSHAKE = 18
    SASL_AUTHENTICATE = 19
    TUNE = 20
    OPEN = 21
    CLOSE = 22
    HEARTBEAT = 23


_DELIVER = Key.DELIVER.to_bytes(2, "big")
_TOLD = frozenset({Key.CONFIRMED, Key.PUBLISH_ERROR, Key.METADATA_UPDATE})

OK, ABSENT, EXISTS, NOT_AVAILABLE, PRECONDITION_FAILED, NO_OFFSET = 1, 2, 5, 6, 17, 19


def text(value: str) -> bytes:
    """A string as it travels."""
    data = value.encode()
    return len(data).to_bytes(2, "big") + data


def pairs(values: Mapping[str, str]) -> bytes:
    """A map of strings as it travels."""
    return len(values).to_bytes(4, "big") + b"".join(text(key) + text(value) for key, value in values.items())


class Chunk(NamedTuple):
    """What the broker delivers at once; `data` are its entries."""

    subscription: int
    magic: int
    kind: int
    entries: int
    records: int
    millis: int
    epoch: int
    first: int
    crc: int
    length: int
    trailer: int
    reserved: int


def chunk(content: memoryview) -> Chunk:
    """The header of what DELIVER carries."""
    return Chunk._make(_chunk.unpack_from(content))


Deliver = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a broker is, and who asks to come in."""

    hosts: tuple[tuple[str, int], ...]
    user: str
    password: str = field(repr=False)
    vhost: str
    context: ssl.SSLContext | None
    timeout: float


class Link(asyncio.BufferedProtocol):
    """One connection. Dead after the first trouble, which `error` then is."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.largest_frame = LARGEST_FRAME
        self.error: BusError | None = None
        self._heard: Callable[[int, memoryview], None] = _nobody
        self._lost: Callable[[BusError], None] = _nobody
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._over = asyncio.Event()
        self._buffer = bytearray(_ROOM)
        self._filled = 0
        self._skip = 0  # bytes of a frame that is too large
        self._asked = 0
        self._answers: dict[int, asyncio.Future[memoryview]] = {}
        self._readers: dict[int, Callable[[memoryview], None]] = {}
        self._subscribed = 0
        self._beat: asyncio.TimerHandle | None = None
        self._tuned: asyncio.Future[tuple[int, int]] = self._loop.create_future()

    def listen(self, heard: Callable[[int, memoryview], None], lost: Callable[[BusError], None]) -> None:
        """`heard` gets the key and content of what else comes unasked; `lost` is called once, when all is over."""
        self._heard, self._lost = heard, lost
        if self.error is not None:
            lost(self.error)

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BufferedProtocol`, as below."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over, whoever ended it."""
        self.end(BusUnavailable(f"the connection to the broker was lost: {exc or 'it closed'}"))
        self._buffer = bytearray()  # whoever keeps the error keeps all this
        self._over.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: behind the frame that is not yet whole."""
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on the frames that are whole; go on in a new buffer. Of a chunk that is too large, its header is handed
        on alone.
        """
        self._filled += nbytes
        view, at, need = memoryview(self._buffer), self._skipped(0), _ROOM
        while self._filled - at >= 4:
            whole = size = 4 + int.from_bytes(view[at : at + 4], "big")
            if whole > LARGEST_FRAME:
                size = _head.size + CHUNK
            if self._filled - at < size:
                need = max(size, _ROOM)
                break
            try:
                if whole > size and view[at + 4 : at + 6] != _DELIVER:
                    return self.end(BusUnavailable(f"the broker announces a frame of {whole} bytes"))
                self._take(view[at + 4 : at + size])
            except (IndexError, struct.error) as e:
                return self.end(BusUnavailable(f"this is not the stream protocol: {e}"))
            self._skip = whole - size
            at = self._skipped(at + size)
        if at or need > len(view):
            rest = view[at : self._filled]
            self._buffer, self._filled = bytearray(need), len(rest)
            self._buffer[: len(rest)] = rest

    def _skipped(self, at: int) -> int:
        """Where to go on, behind what is to be skipped."""
        skipped = min(self._skip, self._filled - at)
        self._skip -= skipped
        return at + skipped

    # frames

    def _take(self, frame: memoryview) -> None:
        key = int.from_bytes(frame[:2], "big")
        if key == Key.DELIVER:
            deliver = self._readers.get(frame[4])
            if deliver is not None:
                deliver(frame[4:])
        elif key in _TOLD:
            self._heard(key, frame[4:])
        elif key == Key.TUNE and not self._tuned.done():
            most, seconds = struct.unpack_from(">II", frame, 4)
            self._tuned.set_result((most, seconds))
        elif key == Key.CLOSE:
            (code,) = struct.unpack_from(">H", frame, 8)
            reason = bytes(frame[12:]).decode(errors="replace")
            self.end(BusUnavailable(f"the broker closed the connection: {reason} ({code})"))
        elif key & _ANSWER and len(frame) >= 8:  # one to a credit says less, and nothing that would matter
            answer = self._answers.pop(int.from_bytes(frame[4:8], "big"), None)
            if answer is not None and not answer.done():
                answer.set_result(frame[8:])

    def send(self, key: int, *content: bytes) -> None:
        """Send a command that has no answer."""
        if self.error is not None or self._transport is None:
            return
        self._transport.write(b"".join((_head.pack(sum(map(len, content)) + 4, key, 1), *content)))

    async def ask(self, key: int, content: bytes) -> tuple[int, memoryview]:
        """Send a command; the code of the answer, and what comes behind it."""
        return (await self._ask_all((key, content)))[0]

    async def _ask_all(self, *commands: tuple[int, bytes]) -> list[tuple[int, memoryview]]:
        """Send commands without a pause; of each what `ask` returns. The broker carries them out one by one."""
        if self.error is not None:
            raise self.error
        answers: dict[int, asyncio.Future[memoryview]] = {}
        for key, content in commands:
            self._asked += 1
            answers[self._asked] = self._answers[self._asked] = self._loop.create_future()
            self.send(key, self._asked.to_bytes(4, "big"), content)
        try:
            async with asyncio.timeout(self.timeout):
                found = [await answer for answer in answers.values()]
        except TimeoutError:
            raise self._silence() from None
        finally:
            for number in answers:
                self._answers.pop(number, None)
        return [(int.from_bytes(each[:2], "big"), each[2:]) for each in found]

    def _silence(self) -> BusUnavailable:
        error = BusUnavailable(f"the broker did not answer within {self.timeout} s")
        self.end(error)
        return error

    async def demand(self, what: str, key: int, content: bytes) -> memoryview:
        """Send a command whose answer has to be OK."""
        code, rest = await self.ask(key, content)
        if code != OK:
            raise stream_trouble(what, code)
        return rest

    async def subscribe(self, stream: str, where: bytes, credit: int, deliver: Deliver) -> int:
        """Read a stream from somewhere; the number of the subscription. `deliver` gets each chunk."""
        number, content = self._reader(stream, where, credit, deliver)
        try:
            await self.demand(f"reading the stream {stream}", Key.SUBSCRIBE, content)
        except BaseException:
            self.send(Key.UNSUBSCRIBE, bytes(4), bytes([number]))
            del self._readers[number]
            raise
        return number

    async def peek(self, stream: str, *places: bytes) -> list[Chunk | None]:
        """The header of the chunk at each of these places of a stream, None where there is none, in one round trip."""
        found: dict[int, Chunk] = {}
        readers = [
            self._reader(stream, where, 1, lambda data: found.update({data[0]: chunk(data)})) for where in places
        ]
        commands = [((Key.SUBSCRIBE, content), (Key.UNSUBSCRIBE, bytes([number]))) for number, content in readers]
        try:
            answers = await self._ask_all(*chain.from_iterable(commands))
        finally:
            for number, _ in readers:
                del self._readers[number]
        for code, _ in answers[::2]:
            if code != OK:
                raise stream_trouble(f"reading the stream {stream}", code)
        return [found.get(number) for number, _ in readers]

    def _reader(self, stream: str, where: bytes, credit: int, deliver: Deliver) -> tuple[int, bytes]:
        """The number of a new subscription, and what asks for it."""
        while True:  # not one that was used a moment ago: what was sent for that may be on its way
            self._subscribed = number = (self._subscribed + 1) % 256
            if number not in self._readers:
                break
        self._readers[number] = deliver
        return number, bytes([number]) + text(stream) + where + credit.to_bytes(2, "big") + pairs({})

    # beginning and end

    async def log_in(self, address: Address) -> None:
        """Be let in."""
        await self.demand("the broker's properties", Key.PEER_PROPERTIES, pairs({"product": "esp-pubsub"}))
        mechanisms = bytes(await self.demand("ways to authenticate", Key.SASL_HANDSHAKE, b""))
        if text("PLAIN") not in mechanisms:
            raise BusRefused("the broker takes no passwords (PLAIN)")
        secret = f"\0{address.user}\0{address.password}".encode()
        await self.demand(
            f"authenticating {address.user}",
            Key.SASL_AUTHENTICATE,
            text("PLAIN") + len(secret).to_bytes(4, "big") + secret,
        )
        try:
            async with asyncio.timeout(self.timeout):
                most, seconds = await self._tuned
        except TimeoutError:
            raise self._silence() from None
        self.largest_frame = min(most or LARGEST_FRAME, LARGEST_FRAME)
        self.send(Key.TUNE, struct.pack(">II", self.largest_frame, seconds))
        await self.demand(f"opening virtual host {address.vhost}", Key.OPEN, text(address.vhost))
        if seconds:
            self._keep_beating(seconds / 2)

    def _keep_beating(self, every: float) -> None:
        self.send(Key.HEARTBEAT)
        self._beat = self._loop.call_later(every, self._keep_beating, every)

    def end(self, error: BusError) -> None:
        """Be dead, at once."""
        if self.error is not None:
            return
        self.error = error
        if self._beat is not None:
            self._beat.cancel()
        answers: list[asyncio.Future[Any]] = [*self._answers.values(), self._tuned]
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # whoever waits gets it; if nobody does, that is no news
        if self._transport is not None:
            self._transport.abort()
        self._lost(error)

    async def aclose(self) -> None:
        """Say farewell and hang up when that is sent, within a bound; cancelled, it is over all the same. No answer is
        awaited, because whoever is to lead next waits for this.
        """
        if self._transport is None:
            return
        if self.error is None:
            self.send(Key.CLOSE, struct.pack(">IH", 0, OK), text("done"))
            self._transport.close()
        try:
            async with asyncio.timeout(_MANNERS):
                await self._over.wait()
        except TimeoutError:
            pass
        finally:
            self.end(BusUnavailable("this connection was closed"))
        await self._over.wait()  # a turn of the loop: the transport is aborted


def _nobody(*_: object) -> None:
    """Nothing comes unasked before somebody publishes or subscribes."""


def _itself(link: Link) -> Link:
    return link


def _way_out(address: Address, error: OSError) -> str:
    if address.context is None or not isinstance(error, ssl.SSLError | ConnectionResetError):
        return ""
    return "; that port may speak no TLS, or not know us: check streamport, ssl, sslcacert, sslcert"


async def connect(address: Address) -> Link:
    """A connection to the first of the hosts that lets us in."""
    loop = asyncio.get_running_loop()
    error: BusError = BusUnavailable("there is no host to connect to")
    for host, port in address.hosts:
        link = Link(address.timeout)
        try:
            async with asyncio.timeout(address.timeout):
                await loop.create_connection(partial(_itself, link), host, port, ssl=address.context)
            await link.log_in(address)
            return link
        except BusRefused:
            await link.aclose()
            raise
        except BusUnavailable as e:
            error = e
        except OSError as e:
            kind = BusRefused if isinstance(e, ssl.SSLError) else BusUnavailable
            error = kind(f"RabbitMQ streams at {host}:{port}: {type(e).__name__} {e}".rstrip() + _way_out(address, e))
        except BaseException:
            link.end(BusUnavailable("connecting was cancelled"))
            raise
        await link.aclose()
    raise error
