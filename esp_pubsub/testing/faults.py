"""Faults on demand: a Bus around any Bus that loses its link, delays, refuses, or never answers.

    bus = Faults(await open_bus(options))  # or, for a client that is open: bus = Faults.into(client)
    bus.refuse(3, hole=True)               # the third message written from now on is missing; its pipe says so
    bus.hang("confirmed")                  # no confirmation comes until heal()
    bus.lose_link()                        # every pipe and feed is dead; new ones cannot be had until restore()

Whatever it does, it keeps the contract of the seam: a pipe or feed that had trouble is dead, nothing is confirmed that
is not on the bus, and a cancelled read loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from esp_pubsub.bus import (
    Bounds,
    Break,
    Bus,
    Catalog,
    Deaths,
    Election,
    Elections,
    Feed,
    Groups,
    GroupState,
    Message,
    Pipe,
    Place,
    Position,
    Requests,
    Start,
)
from esp_pubsub.connecting import between
from esp_pubsub.errors import BusError, BusUnavailable

if TYPE_CHECKING:
    from esp_pubsub.client import Client

T = TypeVar("T")

Call = Literal["pipe", "feed", "bounds", "write", "confirmed", "read", "confirm", "retain", "retained", "request"]
"""The calls that can be delayed or hung."""


class _Link:
    """What is lost at one moment for all that was opened over it."""

    def __init__(self) -> None:
        self.lost = False
        self._scopes: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}

    async def carry(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call, or BusUnavailable when the link is lost first."""
        if self.lost:
            raise _lost()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes[scope] = asyncio.get_running_loop()
                return await call()
        except TimeoutError:
            if not scope.expired():
                raise
            raise _lost() from None
        finally:
            self._scopes.pop(scope, None)

    def lose(self) -> None:
        """End what is being carried, and all that comes."""
        self.lost = True
        for scope, loop in list(self._scopes.items()):
            _on(loop, partial(_expire, scope))


def _lost() -> BusUnavailable:
    return BusUnavailable("the link is lost (injected)")


def _on(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call it on this loop, which may be that of another thread: there an app runs that is tested."""
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        function()
    elif not loop.is_closed():
        loop.call_soon_threadsafe(function)


def _expire(scope: asyncio.Timeout) -> None:
    """Let a timeout end now; one that has ended already is left alone."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True)
class _Refusal:
    """The message that is refused, counted from the next one written, and how."""

    index: int
    hole: bool
    error: BusError


class Trouble:
    """What is to go wrong, for one client or for many."""

    def __init__(self) -> None:
        self._link = _Link()
        self._delays: dict[str, float] = {}
        self._hung: set[str] = set()
        self._refusals: list[_Refusal] = []
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def lose_link(self) -> None:
        """Every pipe and feed dies with BusUnavailable now, also where it waits; new ones cannot be had."""
        self._link.lose()

    def restore(self) -> None:
        """New pipes and feeds can be had again; those that died stay dead."""
        if self._link.lost:
            self._link = _Link()

    def delay(self, seconds: float, *calls: Call) -> None:
        """From now on these calls begin so much later. `delay(0.5, "confirmed")` is a bus that confirms late."""
        self._delays.update(dict.fromkeys(calls, seconds))

    def hang(self, *calls: Call) -> None:
        """From now on these calls are not answered, until `heal` or the loss of the link.

        A hung write does not reach the bus. With "confirmed" hung, what was written does, and nobody is told.
        """
        self._hung.update(calls)

    def refuse(self, message: int = 1, *, hole: bool = False, error: BusError | None = None) -> None:
        """The nth message written from now on, over whichever pipe, does not reach the bus, and that pipe is dead.

        With `hole` the messages behind it in the same write do reach the bus: what a bus may do that does not claim
        `suffix_only`. The pipe raises `error`, by default BusUnavailable.
        """
        error = error or BusUnavailable("the message was refused (injected)")
        self._refusals.append(_Refusal(message - 1, hole, error))

    def heal(self) -> None:
        """No delay, no hang, no refusal from now on; what hangs goes on. A lost link stays lost."""
        self._delays.clear()
        self._hung.clear()
        self._refusals.clear()
        for healed, loop in list(self._waiting.items()):
            _on(loop, healed.set)

    @property
    def link(self) -> _Link:
        """Over which things are opened now."""
        return self._link

    async def carry(self, link: _Link, name: Call, call: Callable[[], Awaitable[T]]) -> T:
        """A call over a link, held up as planned before it begins."""

        async def held_up() -> T:
            if name in self._delays:
                await asyncio.sleep(self._delays[name])
            while name in self._hung:
                healed = asyncio.Event()
                self._waiting[healed] = asyncio.get_running_loop()
                try:
                    await healed.wait()
                finally:
                    del self._waiting[healed]
            return await call()

        return await link.carry(held_up)

    def next_refusal(self, count: int) -> _Refusal | None:
        """The refusal that hits the first of the next `count` messages that any does; the others come nearer."""
        hit = min((r for r in self._refusals if r.index < count), key=lambda r: r.index, default=None)
        if hit is not None:
            self._refusals.remove(hit)
        for refusal in self._refusals:
            refusal.index = max(0, refusal.index - count)
        return hit


class Faults(Trouble):
    """A Bus around a Bus, and what is to go wrong with it. Also a `Requests` and a `Catalog` where that one is."""

    def __init__(self, inner: Bus, trouble: Trouble | None = None) -> None:
        """`trouble`: what goes wrong is what goes wrong there; else each has its own."""
        super().__init__()
        self.inner = inner
        self.capabilities = inner.capabilities
        self.process = cast(Deaths, inner).process if inner.capabilities.deaths else ""
        self._trouble = trouble or self

    @classmethod
    def into(cls, client: Client) -> Faults:
        """Between a client and its bus, for the publishers and subscribers that it opens from now on."""
        faults = client.bus = cls(client.bus)
        return faults

    @classmethod
    @contextmanager
    def everywhere(cls) -> Iterator[Trouble]:
        """Between every client that this process opens within the `with` block and its bus: also those that an app
        opens in a lifespan of its own, in whatever thread.
        """
        trouble = Trouble()
        with between(lambda bus: cls(bus, trouble)):
            yield trouble

    async def pipe(self, topic: str) -> Pipe:
        """See `Bus.pipe`."""
        link = self._trouble.link
        return _FaultyPipe(self._trouble, link, await self._trouble.carry(link, "pipe", lambda: self.inner.pipe(topic)))

    async def feed(self, topic: str, start: Start, group: str | None) -> Feed:
        """See `Bus.feed`."""
        link = self._trouble.link
        feed = await self._trouble.carry(link, "feed", lambda: self.inner.feed(topic, start, group))
        return _FaultyFeed(self._trouble, link, feed)

    async def bounds(self, topic: str) -> Bounds:
        """See `Bus.bounds`."""
        return await self._trouble.carry(self._trouble.link, "bounds", lambda: self.inner.bounds(topic))

    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        """See `Bus.retain`."""
        await self._trouble.carry(self._trouble.link, "retain", lambda: self.inner.retain(topic, key, value))

    async def retained(self, topic: str, key: str) -> bytes | None:
        """See `Bus.retained`."""
        return await self._trouble.carry(self._trouble.link, "retained", lambda: self.inner.retained(topic, key))

    async def request(self, topic: str, data: bytes, timeout: float) -> bytes:
        """See `Requests.request`. A delay comes on top of its timeout."""
        inner = cast(Requests, self.inner)
        return await self._trouble.carry(self._trouble.link, "request", lambda: inner.request(topic, data, timeout))

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """See `Requests.serve`."""
        await self._trouble.link.carry(lambda: cast(Requests, self.inner).serve(topic, answer))

    def election(self, kind: str, line: str, member: str) -> Election:
        """See `Elections.election`; the faults do not reach it."""
        return cast(Elections, self.inner).election(kind, line, member)

    async def gone(self, process: str) -> None:
        """See `Deaths.gone`; no fault reaches it."""
        await cast(Deaths, self.inner).gone(process)

    async def end(self, process: str) -> bool:
        """See `Deaths.end`."""
        return await cast(Deaths, self.inner).end(process)

    async def group_states(self, topic: str) -> Sequence[GroupState]:
        """See `Groups.group_states`."""
        return await self._trouble.link.carry(lambda: cast(Groups, self.inner).group_states(topic))

    async def topics(self) -> Sequence[str]:
        """See `Catalog.topics`."""
        return await self._trouble.link.carry(lambda: cast(Catalog, self.inner).topics())

    async def purge(self, topic: str) -> None:
        """See `Catalog.purge`."""
        await self._trouble.link.carry(lambda: cast(Catalog, self.inner).purge(topic))

    async def aclose(self) -> None:
        """See `Bus.aclose`. No fault holds it up."""
        await self.inner.aclose()


class _FaultyPipe:
    def __init__(self, trouble: Trouble, link: _Link, inner: Pipe) -> None:
        self._trouble, self._link, self._inner = trouble, link, inner
        self._written = 0
        self._good = 0  # with an error: how many messages stand on the bus before the one refused
        self._error: BusError | None = None
        self._waiting: asyncio.Timeout | None = None  # of `confirmed`

    async def write(self, frames: Sequence[bytes]) -> None:
        await self._trouble.carry(self._link, "write", lambda: self._write(frames))

    async def _write(self, frames: Sequence[bytes]) -> None:
        if self._error is not None:
            raise self._error
        refusal = self._trouble.next_refusal(len(frames))
        if refusal is None:
            self._written += len(frames)
            await self._inner.write(frames)
            return
        at = refusal.index
        passed = [*frames[:at], *(frames[at + 1 :] if refusal.hole else ())]
        self._good, self._error = self._written + at, refusal.error
        try:
            await self._inner.write(passed)
        finally:
            if self._waiting is not None:
                _expire(self._waiting)
        raise refusal.error

    async def confirmed(self, past: int) -> int:
        return await self._trouble.carry(self._link, "confirmed", lambda: self._confirmed(past))

    async def _confirmed(self, past: int) -> int:
        while self._error is None or past < self._good:
            self._waiting = asyncio.timeout(None)
            try:
                async with self._waiting:
                    count = await self._inner.confirmed(past)
                return count if self._error is None else min(count, self._good)
            except TimeoutError:
                if self._waiting is not None and not self._waiting.expired():
                    raise
            finally:
                self._waiting = None
        raise self._error

    async def aclose(self) -> None:
        await self._inner.aclose()


class _FaultyFeed:
    def __init__(self, trouble: Trouble, link: _Link, inner: Feed) -> None:
        self._trouble, self._link, self._inner = trouble, link, inner
        self.state: bytes | None = None
        self.place: Place | None = None
        self.unconfirmed: int | None = None

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        self._inner.unconfirmed = self.unconfirmed
        found = await self._trouble.carry(self._link, "read", lambda: self._inner.read(max_messages, max_bytes))
        self.state, self.place = self._inner.state, self._inner.place
        return found

    async def release(self, positions: Sequence[Position]) -> None:
        await self._link.carry(lambda: self._inner.release(positions))

    async def confirm(self, position: Position | None, state: bytes) -> None:
        await self._trouble.carry(self._link, "confirm", lambda: self._inner.confirm(position, state))

    async def aclose(self) -> None:
        await self._inner.aclose()
