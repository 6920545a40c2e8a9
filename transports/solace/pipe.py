"""Pipes: a publisher of its own for each.

Guaranteed messages: the broker says of each, by a receipt, whether it stands in every queue that wants it. It may
refuse one and take the next; so they count up to the first one without a receipt, and a refusal ends the pipe: as
trouble, which a queue over quota is, or as BusRefused, where nobody will ever be let.

Direct messages have no receipts. What is written is followed by an echo, a message to ourselves: the broker handles
what one session sends in its order, so when the echo is back, it has handed on all that was sent before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .inbox import Inbox, letter
from .link import Link, Publisher

_AT_ONCE = 1 << 20


class SolacePipe:
    """A `Pipe`."""

    def __init__(self, link: Link, topic: str, inbox: Inbox | None, largest: int, timeout: float) -> None:
        """With an `inbox` its messages are direct, else guaranteed."""
        self._link = link
        self._topic = topic
        self._inbox = inbox
        self._largest = largest
        self._timeout = timeout
        self._written = 0
        self._count = 0
        self._ahead: set[int] = set()
        self._waits_since = 0.0
        self._error: BusError | None = None
        self._news = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._echo = 0
        self._publisher: Publisher

    async def open(self) -> None:
        """Take the place."""
        self._publisher = await self._link.publisher(self._taken, guaranteed=self._inbox is None)
        if self._inbox is not None:
            self._echo = self._inbox.enter(self._echoed)
        self._link.on_lost.add(self.end)
        if self._link.lost is not None:
            self.end(self._link.lost)

    def _taken(self, number: int, error: BusError | None) -> None:
        if self._error is not None:
            return
        if error is not None:
            which = f"message {number}" if number else "a message"
            kind = BusRefused if isinstance(error, BusRefused) else BusUnavailable
            self.end(kind(f"{self._topic}: {which} of this pipe was refused: {error}"))
            return
        self._ahead.add(number)
        while self._count + 1 in self._ahead:
            self._count += 1
            self._ahead.discard(self._count)
        self._told()

    def _echoed(self, data: bytes) -> None:
        self._count = max(self._count, int.from_bytes(data, "big"))
        self._told()

    def _told(self) -> None:
        self._waits_since = asyncio.get_running_loop().time()
        self._news.set()

    def end(self, error: BusError) -> None:
        """Nothing more comes of it."""
        self._error = self._error or error
        self._news.set()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def write(self, frames: Sequence[bytes]) -> None:
        """See `Pipe.write`."""
        if frames and (size := max(map(len, frames))) > self._largest:
            self.end(BusRefused(f"a message of {size} bytes; maxmessage, and so the most we send, is {self._largest}"))
        self._check()
        at = 0
        try:
            while at < len(frames):
                at = await self._write_some(frames, at)
        except BaseException as error:
            self.end(error if isinstance(error, BusError) else BusUnavailable(f"{self._topic}: a write was cancelled"))
            raise
        self._check()

    async def _write_some(self, frames: Sequence[bytes], at: int) -> int:
        size, end = 0, at
        while end < len(frames) and size < _AT_ONCE:
            size += len(frames[end])
            end += 1
        messages = [(self._topic, frame) for frame in frames[at:end]]
        if self._written == self._count:
            self._waits_since = asyncio.get_running_loop().time()
        self._written += end - at
        self._news.set()
        if self._inbox is not None:
            messages.append((self._inbox.topic, letter(self._echo, self._written.to_bytes(8, "big"))))
        await self._publisher.send(messages)
        self._check()
        return end

    async def confirmed(self, past: int) -> int:
        """See `Pipe.confirmed`."""
        while self._count <= past:
            self._check()
            self._news.clear()
            waits = self._written > self._count
            try:
                async with asyncio.timeout_at(self._waits_since + self._timeout if waits else None):
                    await self._news.wait()
            except TimeoutError:
                self.end(BusUnavailable(f"{self._topic}: nothing was confirmed for {self._timeout:g} s"))
        return self._count

    @property
    def closed(self) -> bool:
        """Nothing of it is left."""
        return self._closing is not None and self._closing.done()

    async def aclose(self) -> None:
        """See `Pipe.aclose`."""
        self.end(BusUnavailable(f"this pipe to {self._topic} was closed"))
        self._link.on_lost.discard(self.end)
        if self._inbox is not None:
            self._inbox.leave(self._echo)
        if self._closing is None:
            self._closing = asyncio.create_task(self._publisher.aclose())
        await asyncio.shield(self._closing)
