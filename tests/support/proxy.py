"""A TCP proxy that breaks on demand, before any broker.

    async with Proxy("127.0.0.1", 9092) as proxy:  # clients connect to 127.0.0.1, port proxy.port
        proxy.delay(0.3, "down")  # what the broker says comes late
        proxy.cut()  # all connections are reset
        proxy.heal()

"up" is the way from the client to the broker, "down" the way back; a fault without a way is one of both. Faults hold
for the connections that are there and for those to come, until `heal()`; only `half_open` is different in both. Nothing
here waits: a fault has happened when the event loop has had a turn. A connection whose broker cannot be reached is
accepted and reset.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

from .server import free_ports

Way = Literal["up", "down"]

CHUNK = 16_384
ROOM = 64  # chunks that a connection holds back in each direction
BEAT = 0.02  # seconds' worth of bytes that go at once where they are throttled
REACH = 5.0  # seconds to reach the broker
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close says RST and forgets what is unsent


@dataclass
class _Flaw:
    """What is wrong with one way."""

    delay: float = 0.0
    rate: float = 0.0  # bytes per second; 0: as fast as it goes
    swallow: bool = False
    left: int | None = None  # bytes that still pass; the next one after them cuts its connection


class _Pipe:
    """One way of one connection."""

    def __init__(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        self.way: Way = way
        self.source = source
        self.sink = sink
        self.torn = False  # bytes were lost
        self.deserted = False  # nothing passes any more, and nobody is told
        self.ended = False  # the sink was told that nothing more comes
        self.held: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue(ROOM)

    def end(self) -> None:
        """Say to the sink that nothing more comes; what comes all the same is dropped."""
        if not self.ended:
            self.ended = True
            with suppress(OSError):  # it is not connected yet, or not any more
                self.sink.shutdown(socket.SHUT_WR)


class Proxy:
    """Takes connections on `port`, or on the one that `listen` asks for, and carries them to a broker."""

    def __init__(self, host: str, port: int, *, listen: int = 0) -> None:
        self.port = listen or free_ports(1)[0]
        self._target = (host, port)
        self._flaws: dict[Way, _Flaw] = {"up": _Flaw(), "down": _Flaw()}
        self._links: dict[asyncio.Task[None], list[_Pipe]] = {}
        self._listening = asyncio.Event()
        self._changed = asyncio.Event()
        self._listener: socket.socket
        self._keeper: asyncio.Task[None]

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._links)

    def refuse(self) -> None:
        """Refuse new connections; those that are there stay, and so does the port."""
        if self._listening.is_set():
            self._listening.clear()
            self._listener.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Reset all connections."""
        for task in self._links:
            task.cancel()

    def cut_after(self, count: int, way: Way) -> None:
        """Let so many more bytes pass; the next one does not, and its connection is reset. This happens once."""
        self._flaws[way].left = count

    def swallow(self, way: Way | None = None) -> None:
        """Lose all bytes, and all ends; connections stay open and new ones are taken. Those that lost any are reset by
        `heal`, as TCP never loses bytes from the middle.
        """
        for flaw in self._of(way):
            flaw.swallow = True

    def half_open(self) -> None:
        """Lose all bytes, and all ends, on the connections that are there, for good: they stay open without an answer,
        also after `heal`. New ones are as they were. So it is where a router has forgotten a connection.
        """
        for pipes in self._links.values():
            for pipe in pipes:
                pipe.deserted = True

    def delay(self, seconds: float, way: Way | None = None) -> None:
        """Let all bytes pass so much later, in order. ROOM * CHUNK of them wait here, more of them at the sender."""
        for flaw in self._of(way):
            flaw.delay = seconds
        self._wake()

    def throttle(self, rate: float, way: Way | None = None) -> None:
        """Let so many bytes pass per second, on each connection."""
        for flaw in self._of(way):
            flaw.rate = rate
        self._wake()

    def half_close(self, way: Way) -> None:
        """End this way of the connections that are there; their other way goes on."""
        for pipes in self._links.values():
            for pipe in pipes:
                if pipe.way == way:
                    pipe.end()

    def heal(self) -> None:
        """Be without faults. What was delayed passes now."""
        self._flaws = {"up": _Flaw(), "down": _Flaw()}
        for task, pipes in self._links.items():
            if any(pipe.torn for pipe in pipes):
                task.cancel()
        if not self._listening.is_set():
            self._listener.listen()
            self._listening.set()
        self._wake()

    def _of(self, way: Way | None) -> Iterable[_Flaw]:
        return self._flaws.values() if way is None else [self._flaws[way]]

    def _wake(self) -> None:
        """Let those who wait see what has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listener.setblocking(False)
        self._listening.set()
        self._keeper = asyncio.create_task(self._accept(), name=f"proxy {self.port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        self._listener.close()
        if not self._keeper.cancelled():
            self._keeper.result()

    async def _accept(self) -> None:
        """The owner of all other tasks, and a task of its own: fixtures enter and leave a proxy in different ones."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while await self._listening.wait():
                with suppress(OSError):  # it does not listen any more
                    client, _ = await loop.sock_accept(self._listener)
                    tasks.create_task(self._carry(client))

    async def _carry(self, client: socket.socket) -> None:
        """One connection: until both ways have ended, or it is reset on both sides."""
        me = asyncio.current_task()
        assert me is not None
        with client, socket.socket() as broker:
            whole = False
            pipes = [_Pipe("up", client, broker), _Pipe("down", broker, client)]
            self._links[me] = pipes
            try:
                await self._reach(broker)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.TaskGroup() as tasks:
                    for pipe in pipes:
                        tasks.create_task(self._take(pipe))
                        tasks.create_task(self._give(pipe))
                whole = True
            except* OSError:
                pass
            finally:
                del self._links[me]
                if not whole:
                    for side in (client, broker):
                        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    async def _reach(self, broker: socket.socket) -> None:
        broker.setblocking(False)
        broker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(REACH):
            await asyncio.get_running_loop().sock_connect(broker, self._target)

    async def _take(self, pipe: _Pipe) -> None:
        """Read what comes, ahead of what is given on."""
        loop = asyncio.get_running_loop()
        data: bytes | OSError = b"-"
        while data and not isinstance(data, OSError):
            try:
                data = await loop.sock_recv(pipe.source, CHUNK)
            except OSError as error:  # a reset takes its turn behind the bytes
                data = error
            await pipe.held.put((loop.time(), data))

    async def _give(self, pipe: _Pipe) -> None:
        """Give on what was read, as well as this way allows."""
        while True:
            since, data = await pipe.held.get()
            await self._until(lambda: since + self._flaws[pipe.way].delay)  # noqa: B023  # awaited here
            last = not data or isinstance(data, OSError)
            if pipe.deserted:
                pass
            elif self._flaws[pipe.way].swallow:
                pipe.torn = True
            elif isinstance(data, OSError):
                raise data
            elif not data:
                pipe.end()
            elif not pipe.ended:
                await self._send(pipe, data)
            if last:
                return

    async def _send(self, pipe: _Pipe, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        while data:
            flaw = self._flaws[pipe.way]
            size = max(1, int(flaw.rate * BEAT)) if flaw.rate else len(data)
            part, data = data[:size], data[size:]
            if flaw.left is not None:
                passing, part = part, part[: flaw.left]
                flaw.left -= len(part)
                if len(part) < len(passing):
                    await loop.sock_sendall(pipe.sink, part)
                    flaw.left = None
                    raise ConnectionAbortedError("cut")
            begun, sent = loop.time(), len(part)
            await loop.sock_sendall(pipe.sink, part)
            await self._until(lambda: begun + sent / (self._flaws[pipe.way].rate or float("inf")))  # noqa: B023

    async def _until(self, due: Callable[[], float]) -> None:
        """Wait for a moment that may change meanwhile."""
        loop = asyncio.get_running_loop()
        while (left := due() - loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
