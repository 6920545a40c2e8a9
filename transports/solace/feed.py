"""Feeds without a group: a subscription to direct messages, or, of guaranteed ones, a queue that goes with the link.
Where the broker lets clients have no queues, guaranteed messages come like direct ones.

The broker hands over direct messages as they come. So they are bounded here, and the oldest is dropped first; the
broker drops too, where the link is slow, and marks what follows. Either is told as a Break. Of guaranteed messages the
broker hands over so many and waits until they are let go, which they are with the read after the one they came by.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from esp_pubsub.bus import Break, Message
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .link import Flow, Inbound, Link

if TYPE_CHECKING:
    from .bus import SolaceBus

_FEEDS = count(1)


class SolaceFeed:
    """A `Feed`."""

    state: bytes | None = None
    unconfirmed: int | None = None
    place = None
    _missed: str | None = "the link was lost, and with it the place of this reader"

    def __init__(self, bus: SolaceBus, link: Link, topic: str, missed: str | None) -> None:
        """`missed`: why something may be missing in front of what comes."""
        self.topic = topic
        self._bus = bus
        self._link = link
        self._ahead: deque[Inbound | Break] = deque()
        self._size = 0
        if missed is not None:
            self._ahead.append(Break(missed, None))
        self._base = next(_FEEDS) << 48  # positions are this and a number: no two feeds have the same
        self._taken = 0
        self._unsettled: dict[int, Any] = {}  # what was handed out, in order
        self._news = asyncio.Event()
        self._error: BusError | None = None
        self._flow: Flow | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take the place: what is written from now on is read."""
        self._link.on_lost.add(self.end)
        try:
            await self._place()
        except BaseException:
            self._link.on_lost.discard(self.end)
            raise
        if self._link.lost is not None:
            self.end(self._link.lost)

    async def _place(self) -> None:
        if self._bus.options.buspersistence:
            with contextlib.suppress(BusRefused):  # it lets us have no queues
                self._flow = await self._link.bind(None, self._hear, self.end, topic=self.topic)
                return
        self._flow = await self._link.subscribe(self.topic, self._hear_direct)

    def _hear(self, message: Inbound) -> None:
        if message.discarded:
            self._ahead.append(Break("the broker dropped messages, this reader was too slow", None))
        self._ahead.append(message)
        self._news.set()

    def _hear_direct(self, message: Inbound) -> None:
        self._size += len(message.data)
        while self._size > self._bus.options.queuesize and self._ahead:
            self._drop_oldest()
        self._hear(message)

    def _drop_oldest(self) -> None:
        oldest = self._ahead.popleft()
        dropped = 1
        if isinstance(oldest, Break):
            dropped = 0 if oldest.messages is None else oldest.messages + 1
            if not self._ahead:
                return
            oldest = self._ahead.popleft()
        if isinstance(oldest, Inbound):
            self._size -= len(oldest.data)
        self._ahead.appendleft(Break("more than queuesize waited for this reader", dropped or None))

    def end(self, error: BusError) -> None:
        """Nothing more comes."""
        if self._error is None:
            self._error = error
            if self._missed is not None and self._closing is None:
                self._bus.missed[self.topic] = self._missed
        self._news.set()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    @property
    def fresh(self) -> bool:
        """Nothing has come yet."""
        return not self._taken and not self._ahead and self._error is None

    def give(self, data: bytes) -> None:
        """A message from elsewhere."""
        self._hear(Inbound(data, None))

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        await self._settle_all()
        while not self._ahead or self._closing is not None:
            self._check()
            self._news.clear()
            await self._news.wait()
        return self._take(max_messages, max_bytes)

    async def _settle_all(self) -> None:
        """Let go of what was handed out before."""
        if self._unsettled and self._flow is not None and self._error is None:
            receipts = list(self._unsettled.values())
            self._unsettled.clear()
            await self._flow.settle(receipts)

    def _take(self, max_messages: int, max_bytes: int) -> list[Message | Break]:
        """From what has come: a Break alone, or messages, one at least, then within both bounds."""
        taken: list[Message | Break] = []
        size = 0
        while self._ahead and len(taken) < max_messages:
            first = self._ahead[0]
            if isinstance(first, Break):
                return taken or [self._ahead.popleft()]  # type: ignore[list-item]
            size += len(first.data)
            if taken and size > max_bytes:
                break
            self._ahead.popleft()
            self._size -= len(first.data)
            self._taken += 1
            if first.receipt is not None:
                self._unsettled[self._taken] = first.receipt
            taken.append(Message(self._base + self._taken, first.data))
        return taken

    async def release(self, positions: Sequence[int]) -> None:
        """See `Feed.release`: what was handed out is let go anyway."""

    async def confirm(self, position: int | None, state: bytes) -> None:
        """See `Feed.confirm`."""
        raise BusRefused("a feed without a group stores no position")

    @property
    def closed(self) -> bool:
        """Nothing of it is left."""
        return self._closing is not None and self._closing.done()

    async def aclose(self) -> None:
        """See `Feed.aclose`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            self._news.set()
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.end(BusUnavailable(f"this feed of {self.topic} was closed"))
        self._link.on_lost.discard(self.end)
        if self._flow is not None:
            await self._flow.aclose()
