"""Feeds without a group: a queue of its own for each, which the broker forgets with the link.

It is bounded, and drops its oldest message when it is full; readers see by the numbers of the blocks what is missing.
The broker hands over as many messages as `prefetch` says and waits until they are let go, which happens by the quarter,
and before the reader waits: what is kept for long the broker takes back.

Who deletes the exchange or a binding tells nobody. So feeds bind again and again, which does nothing where they are
bound. What was lost meanwhile is missing among the numbers of the blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from esp_pubsub.bus import Break, Message
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .channel import Channel, Delivery, unused

if TYPE_CHECKING:
    from .bus import RabbitBus

_FEEDS = count(1)
BIND_AGAIN = 1.0  # seconds
_message = tuple.__new__


class RabbitFeed:
    """A `Feed`."""

    state: bytes | None = None
    unconfirmed: int | None = None
    place = None
    _purpose = "reading"
    _confirms = False
    _missed: str | None = "the link was lost, and with it the queue of this reader"

    def __init__(self, bus: RabbitBus, topic: str) -> None:
        self._bus = bus
        self._link = bus.link
        self._topic = topic
        self._ahead: deque[Delivery] = deque()
        self._break: Break | None = None
        self._in_place = False
        self._base = next(_FEEDS) << 48  # positions are this and the delivery tag: no two feeds have the same
        self._taken = 0  # the last tag that was handed out
        self._let_go = 0
        self._arrived = asyncio.Event()
        self._error: BusError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._queue = ""
        self._prefetch = bus.link.options.prefetch
        self._binding: asyncio.TimerHandle | None = None
        self._channel: Channel

    async def open(self) -> None:
        """Take the place: what is written from now on is read."""
        what = f"reading {self._topic}"
        self._channel = await self._link.channel(self._purpose, what, confirms=self._confirms)
        self._channel.on_message = self._hear
        self._channel.on_cancel = self._cancelled
        self._channel.on_end.append(self._end)
        try:
            await self._bus.declare_exchange(self._channel)
            await self._link.ask(what, self._place())
            if self._error is not None:
                raise self._error
        except BaseException:
            self._link.drop(self._channel)
            raise
        self._in_place = True
        self._stay_bound()

    def tell(self, missed: str) -> None:
        """Why something may be missing in front of what comes."""
        self._break = Break(missed, None)

    async def _place(self) -> None:
        arguments: dict[str, Any] = {"x-max-length-bytes": self._link.options.queuesize, "x-overflow": "drop-head"}
        declared = await self._channel.queue_declare("", exclusive=True, auto_delete=True, arguments=arguments)
        self._queue = str(declared.queue)
        await self._bind()
        await self._consume()

    async def _bind(self) -> None:
        await self._channel.queue_bind(self._queue, self._link.options.exchange, self._topic)

    def _stay_bound(self) -> None:
        self._binding = asyncio.get_running_loop().call_later(BIND_AGAIN, self._bind_again)

    def _bind_again(self) -> None:
        if self._error is None:
            self._bus.bind_again(self._channel, self._queue, self._topic)
            self._stay_bound()

    async def _consume(self) -> None:
        await self._channel.basic_qos(prefetch_count=self._prefetch)
        await self._channel.basic_consume(self._queue, unused)

    def _hear(self, delivery: Delivery) -> None:
        self._ahead.append(delivery)
        self._arrived.set()

    def _end(self, error: BusError) -> None:
        if self._error is None:
            self._error = error
            if self._missed is not None and self._in_place:
                self._bus.missed.setdefault(self.seat, []).append(self._missed)
        self._arrived.set()

    def _cancelled(self) -> None:
        self._missed = "the queue was deleted"
        self._end(BusUnavailable(f"reading {self._topic}: {self._missed}"))

    def _check(self) -> None:
        if self._closing is not None:
            raise BusUnavailable(f"this feed of {self._topic} was closed")
        if self._error is not None:
            raise self._error

    @property
    def seat(self) -> tuple[str, str | None]:
        """What another feed has to ask for to go on where this one ended."""
        return self._topic, None

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        waits = not self._ahead or self._taken - self._let_go > self._prefetch // 4
        if waits and self._taken > self._let_go and self._error is None:
            self._let_go = self._taken
            if not self._channel.let_go(self._taken):
                await self._link.ask(f"reading {self._topic}", self._channel.basic_ack(self._taken, multiple=True))
        while True:
            if self._closing is not None:
                self._check()
            if self._break is not None:
                told, self._break = self._break, None
                return [told]
            if self._ahead:
                return self._take(max_messages, max_bytes)
            self._check()
            self._arrived.clear()
            await self._arrived.wait()

    def _take(self, max_messages: int, max_bytes: int) -> list[Message | Break]:
        """From what has come: one at least, then within both bounds."""
        taken: list[Message | Break] = []
        ahead, size = self._ahead, 0
        while ahead and len(taken) < max_messages:
            delivery = ahead[0]
            size += len(delivery.data)
            if taken and size > max_bytes:
                break
            ahead.popleft()
            self._taken = delivery.tag
            taken.append(_message(Message, (self._base + delivery.tag, delivery.data)))
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
            self._arrived.set()
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._error = self._error or BusUnavailable(f"this feed of {self._topic} was closed")
        if self._binding is not None:
            self._binding.cancel()
        await self._link.drop(self._channel)
