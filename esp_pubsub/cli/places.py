"""Where text comes from and goes to: a file, `-`, `:port` (wait for a peer) or `host:port` (call it).

A peer's port is open to this machine only; `*:port` opens it to all. Nothing here keeps a signal waiting: what may
block for long is waited for by the loop, and only regular files are read and written in a thread.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from pathlib import Path

from ..errors import ConfigError, EspError
from ..text import MAX_LINE, BadText
from ..text.binary import LENGTH, SIZES
from .running import say

CHUNK = 1 << 18
_SOCKET = re.compile(r"(?P<host>\*?|[\w.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_GROWTH = 0.1  # seconds between two looks at a file that grows
_CALL = 10.0
_SAFE = 4_096  # bytes that a pipe that takes any takes at once
_LINE = 1 << 20  # of a line without end, the reader judges
_PORTS = 65_535


def is_file(place: str) -> bool:
    """Whether it is read to its end, unless it grows."""
    return place != "-" and _peer(place) is None


def _peer(place: str) -> tuple[str, int] | None:
    """Host and port, if it is a socket."""
    match = _SOCKET.fullmatch(place)
    if match is None:
        return None
    if int(match["port"]) > _PORTS:
        raise ConfigError(f"{place}: a port is 0 to {_PORTS}")
    return match["host"], int(match["port"])


async def inputs(place: str, *, lines: bool, follow: bool, repeat: int) -> AsyncGenerator[AsyncIterator[bytes], None]:
    """One input after the other: the same file again, or the next peer. `lines`: a peer sends whole ones."""
    if found := _peer(place):
        if repeat:
            raise ConfigError(f"what {place} sends cannot be repeated")
        name = f"the peer at {place}"
        async with aclosing(_peers(*found, follow)) as peers:
            async for peer in peers:
                yield whole_lines(_received(peer, name), name) if lines else _received(peer, name)
        return
    for again in range(repeat + 1):
        descriptor = os.dup(0) if place == "-" else os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise EspError(f"{place}: it is a directory")
            comes = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
            if comes and repeat:
                raise ConfigError(f"what comes through {place} cannot be repeated")
            if not comes:
                if again and place == "-":
                    os.lseek(descriptor, 0, os.SEEK_SET)
                yield _read(descriptor, place, follow)
            else:
                yield _arriving(descriptor)
        finally:
            os.close(descriptor)


async def _read(descriptor: int, place: str, follow: bool) -> AsyncIterator[bytes]:
    at = 0
    while True:
        chunk = await asyncio.to_thread(os.read, descriptor, CHUNK)
        at += len(chunk)
        if chunk:
            yield chunk
        elif not follow:
            return
        elif os.fstat(descriptor).st_size < at:
            raise EspError(f"{place} became shorter while it was read; what was in it before byte {at} was published")
        else:
            await asyncio.sleep(_GROWTH)


async def _arriving(descriptor: int) -> AsyncIterator[bytes]:
    while True:
        await _ready(descriptor, writing=False)
        with suppress(BlockingIOError):
            if not (chunk := os.read(descriptor, CHUNK)):
                return
            yield chunk


async def _received(peer: socket.socket, name: str) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    try:
        while chunk := await loop.sock_recv(peer, CHUNK):
            yield chunk
    except ConnectionError as e:
        raise _cut_off(f"{name} broke the connection: {e.strerror}", None) from None


async def _ready(descriptor: int, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)


async def whole_lines(chunks: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    """The same up to the last end of a line. BadText if there is more: half a line may look like a whole one. A BadText
    of `chunks` goes through.
    """
    rest = b""
    async for chunk in chunks:
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if end or len(rest) > _LINE:
            end = end or len(chunk)
            yield rest + chunk[:end]
            rest = chunk[end:]
        else:
            rest += chunk
    if rest:
        text = rest[:60].decode(errors="replace")
        raise _cut_off(f"{name} left in the middle of a line: {text!r}", text)


def _cut_off(why: str, value: str | None) -> BadText:
    return BadText(why, line=None, column=None, field=None, type=None, value=value)


async def _peers(host: str, port: int, follow: bool) -> AsyncGenerator[socket.socket, None]:
    loop = asyncio.get_running_loop()
    if host not in ("", "*"):
        with await _call(host, port) as peer:
            yield peer
        return
    try:
        server = socket.create_server(("" if host else "127.0.0.1", port))
    except OSError as e:
        raise EspError(f"port {port} cannot be listened on: {e.strerror}") from e
    with server:
        server.setblocking(False)
        say(f"listening on port {server.getsockname()[1]}")
        while True:
            peer, _ = await loop.sock_accept(server)
            with peer:
                yield peer
            if not follow:
                return


async def _call(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    why: OSError | UnicodeError = OSError("it has no address")
    try:
        async with asyncio.timeout(_CALL):
            found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in found:
                peer = socket.socket(family, kind, protocol)
                try:
                    peer.setblocking(False)
                    await loop.sock_connect(peer, address)
                    return peer
                except BaseException as e:
                    peer.close()
                    if not isinstance(e, OSError):
                        raise
                    why = e
    except (OSError, UnicodeError) as e:  # the latter from names that cannot be
        why = e
    reason = "no answer" if isinstance(why, TimeoutError) else getattr(why, "strerror", None) or str(why)
    raise EspError(f"{host}:{port} cannot be reached: {reason}") from why


class Target:
    """Where text goes. What `write` returned from is in the hands of the system; what it failed with is not there.

    BrokenPipeError: who reads it has left.
    """

    empty = True
    """What comes next begins it."""

    def turn_due(self, more: int) -> bool:
        """Whether the next one should be begun before so many bytes are added."""
        return False

    def waiting(self) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """To wait for text in: TimeoutError when the next one should be begun, BrokenPipeError as above."""
        return asyncio.timeout(None)

    async def turn(self) -> None:
        """Begin the next one."""

    async def write(self, data: bytes) -> None:
        """All of it, as soon as it can be."""
        raise NotImplementedError

    def check(self) -> None:
        """BrokenPipeError if it is known by now that who reads has left."""


class Stream(Target):
    """Standard output."""

    _LEFT = 0
    """What the system is asked for; errors and hang-ups it tells unasked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, self._LEFT)

    async def write(self, data: bytes) -> None:
        """See Target."""
        self.check()
        view = memoryview(data)
        while view:
            while not select.select([], [self._descriptor], [], 0)[1]:
                await _ready(self._descriptor, writing=True)
            with suppress(BlockingIOError):
                view = view[self._write(view[:_SAFE]) :]

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except ConnectionError:
            raise BrokenPipeError from None

    def check(self) -> None:
        """See Target."""
        if self._poll.poll(0):
            raise BrokenPipeError


class Peer(Stream):
    """A socket. Its peer has left when it ends its own side: there is no other sign of it before the first block that
    it does not get, and the system takes that one all the same.
    """

    _LEFT = getattr(select, "POLLRDHUP", 0)  # macOS has none: there it is seen while we wait

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[asyncio.Timeout, None]:
        """See Target."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as scope:
                loop.add_reader(self._descriptor, self._look, scope)
                try:
                    yield scope
                finally:
                    loop.remove_reader(self._descriptor)
        except TimeoutError:
            if not scope.expired():
                raise
            raise BrokenPipeError from None

    def _look(self, scope: asyncio.Timeout) -> None:
        """What a peer says is not listened to. Left unread, it would cut off what the peer is sent as we close."""
        with suppress(ConnectionError, BlockingIOError):
            if os.read(self._descriptor, CHUNK):
                return
        asyncio.get_running_loop().remove_reader(self._descriptor)
        scope.reschedule(asyncio.get_running_loop().time())


class File(Target):
    """A file; with `period` or `size`, one after the other. The one at work has the name given, the nth one before it
    has n in front of the suffix.
    """

    def __init__(self, path: Path, *, period: float, size: int, format: str) -> None:
        self._path = path
        self._period = period
        self._most = size
        self._format = format
        self._number = 0
        self._descriptor = -1
        self._writing = False

    async def open(self, *, append: bool) -> None:
        """Before all else."""
        await asyncio.to_thread(self._open, append=append)
        self._due = asyncio.get_running_loop().time() + self._period

    def _open(self, *, append: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if append else os.O_TRUNC)
        try:
            self._descriptor = os.open(self._path, flags, 0o644)
        except OSError:
            if not self._path.exists():
                raise
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)  # a device or a pipe
        self._regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        self._size = self._behind_last_row() if append and self._regular else 0
        self.empty = not self._size

    def _behind_last_row(self) -> int:
        """Who was killed while writing leaves half a row. It was not confirmed, so it comes again."""
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        binary = self._format == "binary"
        size = self._last_block(end) if binary else self._last_line(end)
        if end - size > (SIZES.stop if binary else MAX_LINE):
            raise EspError(f"{self._path} ends in a row of {end - size} bytes that has no end; move the file away")
        if size < end:
            os.ftruncate(self._descriptor, size)
        return os.lseek(self._descriptor, size, os.SEEK_SET)

    def _last_block(self, end: int) -> int:
        at = 0
        while at + LENGTH.size <= end:
            (size,) = LENGTH.unpack(os.pread(self._descriptor, LENGTH.size, at))
            if size not in SIZES:
                raise EspError(f"{self._path} is no file of blocks in binary; move it away")
            if at + LENGTH.size + size > end:
                break
            at += LENGTH.size + size
        return at

    def _last_line(self, end: int) -> int:
        """Behind the last end of a line that no quotes are open at: in CSV they may hold one."""
        found, quotes, quoted = 0, 0, self._format == "csv"
        for start in range(0, end, CHUNK):
            chunk = os.pread(self._descriptor, CHUNK, start)
            quotes += chunk.count(b'"') if quoted else 0
            open, to = quotes % 2, len(chunk)
            while to >= 0:
                quote = chunk.rfind(b'"', 0, to) if quoted else -1
                line = -1 if open else chunk.rfind(b"\n", quote + 1, to)
                if line >= 0:
                    found = start + line + 1
                    break
                open, to = 1 - open, quote
        return found

    def turn_due(self, more: int) -> bool:
        """See Target."""
        late = self._turn_at is not None and asyncio.get_running_loop().time() >= self._due
        return late or (self._regular and 0 < self._most < self._size + more)

    def waiting(self) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """See Target."""
        return asyncio.timeout_at(self._turn_at)

    @property
    def _turn_at(self) -> float | None:
        return self._due if self._period and self._regular and self._size else None

    async def turn(self) -> None:
        """See Target."""
        await asyncio.to_thread(self._turn)

    def _turn(self) -> None:
        if self._size:
            path = self._path
            while (older := path.with_name(f"{path.stem}.{(number := self._number + 1)}{path.suffix}")).exists():
                self._number = number
            path.rename(older)
        full = self._descriptor
        self._open(append=False)  # should this fail, the full one is what is open
        os.close(full)

    async def write(self, data: bytes) -> None:
        """See Target."""
        if self.empty:
            self._due = asyncio.get_running_loop().time() + self._period
        await asyncio.to_thread(self._write, data)
        self._size += len(data)
        self.empty = False

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        self._writing = True
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as e:
            if self._regular:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            raise EspError(f"{self._path} cannot be written: {e.strerror}; what is not in it is not confirmed") from e
        finally:
            self._writing = False

    def close(self) -> None:
        """Let go of the file, unless a write that nobody waits for any more still has it."""
        if self._descriptor >= 0 and not self._writing:
            os.close(self._descriptor)


async def target(place: str, *, append: bool, period: float, size: int, format: str) -> AsyncGenerator[Target, None]:
    """The one target, closed behind it."""
    if found := _peer(place):
        async with aclosing(_peers(*found, False)) as peers:
            async for peer in peers:
                yield Peer(peer.fileno())
    elif place == "-":
        yield Stream(1)
    else:
        file = File(Path(place), period=period, size=size, format=format)
        try:
            await file.open(append=append)
            yield file
        finally:
            file.close()
