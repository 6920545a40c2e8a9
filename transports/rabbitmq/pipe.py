"""A pipe: a channel of its own in confirm mode.

The broker confirms each message alone, in any order, and may refuse one and take the next. So messages count as
confirmed up to the first one that is not, and one that was refused ends the pipe: what stands behind it is a hole's far
side, which the sender writes again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .channel import Channel, Envelope
from .link import Link

_log = logging.getLogger("esp_pubsub.rabbitmq")
_AT_ONCE = 1 << 20
_MOMENT = 0.25


class Confirms:
    """How many messages are confirmed in order, from what the broker says of each."""

    def __init__(self) -> None:
        self.count = 0
        self.refused: int | None = None
        """The first message that was refused, counted from 1."""
        self._ahead: set[int] = set()

    def take(self, tag: int, multiple: bool, ok: bool) -> None:
        """`multiple`: all up to this one that it has not spoken of yet. Nothing counts behind a refusal."""
        if self.refused is not None:
            return
        if not ok:
            self.refused = self.count + 1 if multiple else tag
        elif multiple:
            self.count = max(self.count, tag)
            self._ahead = {each for each in self._ahead if each > self.count}
        else:
            self._ahead.add(tag)
        while self.count + 1 in self._ahead:
            self.count += 1
            self._ahead.discard(self.count)


class RabbitPipe:
    """A `Pipe`."""

    unroutable = 0
    """Messages for which there was no queue, so nobody."""

    def __init__(self, link: Link, channel: Channel, exchange: str, key: str, properties: Mapping[str, Any]) -> None:
        """To the routing key of an exchange. The channel is in confirm mode, and nothing was published on it yet."""
        self._link = link
        self._channel = channel
        self._key = key
        self._envelope = Envelope(channel, exchange, key, properties)
        self._confirms = Confirms()
        self._written = 0
        self._waits_since = 0.0  # not counting what the broker was short of memory or disk
        self._moment = min(_MOMENT, link.timeout)
        self._error: BusError | None = None
        self._news = asyncio.Event()
        self._putting: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        channel.on_confirm = self._confirm
        channel.on_return = self._return
        channel.on_end.append(self.end)

    def _confirm(self, tag: int, multiple: bool, ok: bool) -> None:
        self._confirms.take(tag, multiple, ok)
        self._waits_since = self._now()
        if self._confirms.refused is not None:
            self.end(
                BusUnavailable(
                    f"{self._key}: message {self._confirms.refused} of this pipe was refused; a queue bound to it is "
                    "full (x-overflow=reject-publish) or out of order: read it, or raise its limit"
                )
            )
        self._news.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _return(self) -> None:
        if not self.unroutable:
            _log.info("%s: no queue is bound to it, so what is published now reaches nobody", self._key)
        self.unroutable += 1

    def end(self, error: BusError) -> None:
        """Nothing more comes of it."""
        self._error = self._error or error
        if self._putting is not None:
            self._putting.cancel()
        self._news.set()

    async def write(self, frames: Sequence[bytes]) -> None:
        """See `Pipe.write`."""
        largest = self._link.options.maxmessage
        if frames and (size := max(map(len, frames))) > largest:
            self.end(BusRefused(f"a message of {size} bytes; maxmessage, and so the most we send, is {largest}"))
        await self.until_unblocked()
        parts: list[bytes] = []
        count = size = 0
        for frame in frames:
            self._envelope.add(parts, frame)
            count, size = count + 1, size + len(frame)
            if size >= _AT_ONCE:
                await self._put(parts, count)
                parts, count, size = [], 0, 0
        if parts:
            await self._put(parts, count)

    async def _put(self, parts: list[bytes], count: int) -> None:
        self._check()
        if self._written == self._confirms.count:
            self._waits_since = self._now()
        self._written += count
        self._news.set()
        self._putting = putting = asyncio.ensure_future(self._channel.put(b"".join(parts)))
        since = self._now()
        try:
            while not putting.done():
                await asyncio.wait([putting], timeout=self._moment)
                self._check()
                if putting.done():
                    break
                if await self._channel.is_blocked():
                    since = self._now()
                elif self._now() > since + self._link.timeout:
                    self.end(BusUnavailable(f"{self._key}: nothing could be sent for {self._link.timeout:g} s"))
        finally:
            self._putting = None
            putting.cancel()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def until_unblocked(self) -> None:
        """Wait as long as the broker, short of memory or disk, reads nothing from this connection."""
        told = False
        while True:
            self._check()
            try:
                async with asyncio.timeout(_MOMENT):
                    await self._channel.until_unblocked()
            except TimeoutError:
                if not told:
                    _log.warning("%s: the broker is short of memory or disk and takes no messages: waiting", self._key)
                told = True
                continue
            if told:
                _log.warning("%s: the broker takes messages again", self._key)
            return

    async def confirmed(self, past: int) -> int:
        """See `Pipe.confirmed`."""
        while self._confirms.count <= past:
            self._check()
            self._news.clear()
            waits = self._written > self._confirms.count
            try:
                async with asyncio.timeout(self._moment if waits else None):
                    await self._news.wait()
            except TimeoutError:
                if await self._channel.is_blocked():
                    self._waits_since = self._now()
                elif self._now() > self._waits_since + self._link.timeout:
                    self.end(BusUnavailable(f"{self._key}: nothing was confirmed for {self._link.timeout:g} s"))
        return self._confirms.count

    @property
    def closed(self) -> bool:
        """Nothing of it is left."""
        return self._closing is not None and self._closing.done()

    async def aclose(self) -> None:
        """See `Pipe.aclose`. The broker's answer is not awaited, because whoever is to lead next waits for this."""
        self.end(BusUnavailable(f"this pipe to {self._key} was closed"))
        if self._closing is None:
            self._closing = self._link.drop(self._channel)
