"""Retained values: for each topic and key a durable queue, whose last message is the value.

A browser is not told that it has come to the end. So who reads puts a mark into the queue first, and what stands last
in front of it is the value; the mark and what lies further back it takes out. The queue is made by who writes first:
one that is not there holds nothing. (A last-value queue would keep the mark alone: do not make one of them for values.)
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from esp_pubsub.errors import BusRefused, BusUnavailable

from .link import Inbound, Link, UnknownQueue
from .names import probe, value_queue, value_topic
from .pipe import SolacePipe

if TYPE_CHECKING:
    from .bus import SolaceBus

_MARK, _VALUE, _FORGOTTEN = b"\0", b"\1", b"\2"
_OLD = 60.0  # seconds after which nobody waits for a mark any more
_TRIM = 64  # values that may stand in front of the one that counts


class Cell:
    """One value, of one session."""

    def __init__(self, bus: SolaceBus, link: Link, topic: str, key: str) -> None:
        self._bus = bus
        self._link = link
        self._queue = value_queue(topic, key)
        self._topic = value_topic(topic, key)
        self._pipe: SolacePipe | None = None
        self._written = 0

    async def put(self, value: bytes | None) -> None:
        """It is there for everybody when this returns."""
        if self._queue not in self._bus.made:
            await self._bus.make(self._link, self._queue, self._topic)
        await self._write(_FORGOTTEN if value is None else _VALUE + value)
        if self._written % _TRIM == 0:
            await self.get()

    async def _write(self, message: bytes) -> None:
        if self._pipe is None:
            pipe = self._bus.guaranteed(self._link, self._topic)
            await pipe.open()
            self._pipe = pipe
        await self._pipe.write([message])
        self._written += 1
        while await self._pipe.confirmed(self._written - 1) < self._written:
            pass

    async def get(self) -> bytes | None:
        """The value that was put last."""
        if self._queue not in self._bus.made and not await self._exists():
            return None
        mark = _MARK + int(time.time()).to_bytes(8, "big") + secrets.token_bytes(8)
        await self._write(mark)
        seen: list[Inbound] = []
        complete = asyncio.Event()

        def hear(message: Inbound) -> None:
            if not complete.is_set():
                seen.append(message)
                if message.data == mark:
                    complete.set()

        flow = await self._link.browse(self._queue, hear)
        try:
            async with asyncio.timeout(self._bus.options.timeout):
                await complete.wait()
            values = [each for each in seen if each.data[:1] != _MARK]
            await flow.settle([each.receipt for each in (*values[:-1], *filter(_is_old, seen), seen[-1])])
        except TimeoutError:
            raise BusUnavailable(f"the queue {self._queue} did not show its messages") from None
        finally:
            await asyncio.shield(asyncio.ensure_future(flow.aclose()))
        return values[-1].data[1:] if values and values[-1].data[:1] == _VALUE else None

    async def _exists(self) -> bool:
        try:
            flow = await self._link.browse(self._queue, lambda _: None)
        except UnknownQueue:
            return False
        await asyncio.shield(asyncio.ensure_future(flow.aclose()))
        return True

    async def aclose(self) -> None:
        """Bounded."""
        if self._pipe is not None:
            await self._pipe.aclose()


def _is_old(message: Inbound) -> bool:
    return message.data[:1] == _MARK and int.from_bytes(message.data[1:9], "big") < time.time() - _OLD


async def may_make(bus: SolaceBus, link: Link) -> bool:
    """Whether the broker lets us have queues; without them there are no values."""
    try:
        await bus.make(link, *probe())
    except BusRefused:
        return False
    return True
