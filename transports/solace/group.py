"""Groups: a durable exclusive queue for each, named as SAS names a subscriber's: prefix and topic.

The broker hands messages to the consumer that stands first in line, and what that one did not settle comes first to the
next, in its old order. What is stored with the position is a retained value, written before messages are settled, by
the same session: one that the broker has given up writes nothing more. Where there are no values, only the position is
kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from esp_pubsub.bus import Break, Message
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .feed import SolaceFeed
from .link import Link, NotFirst
from .names import group_queue
from .values import Cell

if TYPE_CHECKING:
    from .bus import SolaceBus


class GroupFeed(SolaceFeed):
    """A `Feed` with a group."""

    _missed = None  # the queue keeps it

    def __init__(
        self, bus: SolaceBus, link: Link, topic: str, group: str, replay: Literal["earliest"] | datetime | None
    ) -> None:
        """`replay`: what a group that is new here gets of the past."""
        super().__init__(bus, link, topic, None)
        self._queue = group_queue(topic, group)
        self._replay = replay
        self._state = Cell(bus, link, topic, f"state of {group}") if bus.capabilities.retained else None
        self._active = False
        self._ours = False  # it is our turn, and the state was read
        self._beginning: asyncio.Task[None] | None = None
        self._line = asyncio.Lock()
        self._storing: set[asyncio.Task[None]] = set()

    async def _place(self) -> None:
        """See that the queue is there. Not in line for it before the first read: who does not read must not keep others
        from it; but for who has it filled with the past.
        """
        if self._replay is not None and await self._is_new():
            with contextlib.suppress(NotFirst):  # who reads has had it filled
                await self._bind(self._replay)
                return
        await self._bus.make(self._link, self._queue, self.topic)

    async def _is_new(self) -> bool:
        """Nothing was confirmed. That the queue is there says nothing: it is made before it is filled."""
        if self._state is None:
            raise BusRefused(
                f"{self._queue}: nothing says whether this group is new, where no values are retained: start is latest"
            )
        return await self._state.get() is None

    async def _bind(self, replay: Literal["earliest"] | datetime | None = None) -> None:
        self._flow = await self._link.bind(
            self._queue, self._hear, self.end, topic=self.topic if replay else None, make=replay is not None,
            active=self._turn, replay=replay,
        )  # fmt: skip

    def _turn(self, active: bool) -> None:
        """Turns come by another line than messages: what was given before may still come, and is not ours any more."""
        if self._active and not active:
            self.end(BusUnavailable(f"{self._queue}: the broker has given it to another reader"))
        self._active = active

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        self._check()
        if self._flow is None:
            if self._beginning is None:
                self._beginning = asyncio.create_task(self._bind())
                self._beginning.add_done_callback(self._begun)
            await asyncio.wait([self._beginning])
        while not self._ahead or not self._ours:
            self._check()
            if self._ahead:
                state = await self._state.get() if self._state is not None else None
                self.state, self._ours = state, True
                continue
            self._news.clear()
            await self._news.wait()
        self._check()
        return self._take(max_messages, max_bytes)

    def _begun(self, beginning: asyncio.Task[None]) -> None:
        error = None if beginning.cancelled() else beginning.exception()
        if isinstance(error, BusError):
            self.end(error)

    async def release(self, positions: Sequence[int]) -> None:
        """See `Feed.release`."""
        given = [position - self._base for position in positions]
        receipts = [self._unsettled.pop(each) for each in given if each in self._unsettled]
        if receipts and self._flow is not None and self._error is None:
            await self._flow.settle(receipts)

    async def confirm(self, position: int | None, state: bytes) -> None:
        """See `Feed.confirm`. Cancelled: it is carried out all the same."""
        self._check()
        number = 0 if position is None else position - self._base
        if not self._ours or not 0 <= number <= self._taken:
            raise BusUnavailable(f"{self._queue}: this is not the reader that was given the message")
        storing = asyncio.create_task(self._store(number, state))
        self._storing.add(storing)
        storing.add_done_callback(self._stored)
        await asyncio.shield(storing)

    def _stored(self, storing: asyncio.Task[None]) -> None:
        self._storing.discard(storing)
        error = None if storing.cancelled() else storing.exception()
        if isinstance(error, BusError):
            self.end(error)

    async def _store(self, number: int, state: bytes) -> None:
        async with self._line:
            if self._state is not None:
                await self._state.put(state)
            done = list(takewhile(lambda each: each <= number, self._unsettled))
            if done and self._flow is not None:
                await self._flow.settle([self._unsettled[each] for each in done])
                for each in done:
                    self._unsettled.pop(each, None)

    async def _close(self) -> None:
        waits = [*self._storing, *([self._beginning] if self._beginning is not None else [])]
        if waits:  # each ends by its own deadline
            await asyncio.wait(waits)
        await super()._close()
        if self._state is not None:
            await self._state.aclose()
