"""Election by an exclusive queue, as SAS has it: nothing is published to it, who is first in line for it leads.

The broker says Flow Active to the first consumer of the queue; when that one is gone, by whatever death, it says Flow
Active to the next, and it says Flow Inactive to one from which it takes the turn. The flow stands on the session that
publishes: who is cut off from the queue is cut off from publishing by the same act. The broker finds out that a link is
dead by its own keep-alive.

The broker's word has no number, so the term is a retained value, which the next one counts up; where no values are
retained, it is the time in seconds.

Who leads anew has the last message of the topic shown to the feed that follows it, where a last-value queue keeps it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

from esp_pubsub._news import News
from esp_pubsub.backoff import Backoff
from esp_pubsub.errors import BusError, BusUnavailable

from .link import Flow, Link
from .names import flow_queue

if TYPE_CHECKING:
    from .bus import SolaceBus

_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_TERM = "term"


class FlowElection:
    """An `Election`."""

    def __init__(self, bus: SolaceBus, line: str) -> None:
        self._bus = bus
        self._line = line
        self._queue = flow_queue(line)
        self._link: Link | None = None
        self._flow: Flow | None = None
        self._active = False
        self._stand = 0  # which one it is: of one before, news may still come
        self._over: Literal["suspended", "lost"] | None = "lost"
        self._news = News()

    async def run(self) -> None:
        """See `Election.run`."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._drop()

    async def campaign(self) -> int:
        """See `Election.campaign`."""
        backoff = Backoff(_PAUSE, _LONGEST_PAUSE)
        while True:
            self._drop()
            try:
                await self._stand_in_line()
                await self._bus.give_last_values(self._line)
                term = await self._next_term()
                self._check()
                return term
            except BusUnavailable:
                self._drop()
            except BaseException:
                self._drop()
                raise
            await asyncio.sleep(backoff.next())

    async def _stand_in_line(self) -> None:
        """Returns when it is our turn."""
        link, _ = await self._bus.link()
        self._link, self._active, self._over = link, False, None
        self._stand += 1
        stand = self._stand
        link.on_lost.add(self._lost)
        self._flow = await self._bus.stand_in_line(
            link, self._queue, self._ended, active=lambda active: self._turn(stand, active)
        )
        while not self._active:
            self._check()
            await self._news.wait()

    async def _next_term(self) -> int:
        if not self._bus.capabilities.retained:
            return int(time.time())
        known = await self._bus.retained(self._line, _TERM)
        term = int(known or b"0") + 1
        await self._bus.retain(self._line, _TERM, b"%d" % term)
        return term

    def _check(self) -> None:
        if self._over is not None:
            raise BusUnavailable(f"the queue {self._queue} is out of reach")

    def _turn(self, stand: int, active: bool) -> None:
        if stand != self._stand:
            return
        if self._active and not active:
            self._end("lost")
        self._active = active
        self._news.tell()

    def _lost(self, _: BusError) -> None:
        self._end("suspended")

    def _ended(self, _: BusError) -> None:
        self._end("lost")

    def _end(self, how: Literal["suspended", "lost"]) -> None:
        if self._over is None:
            self._over = how
            self._news.tell()

    async def watch(self) -> Literal["suspended", "lost"]:
        """See `Election.watch`."""
        while self._over is None:
            await self._news.wait()
        over = self._over
        self._drop()
        return over

    async def resign(self) -> None:
        """See `Election.resign`: whoever comes back stands behind the others."""
        dropping = self._drop()
        if dropping is not None:
            await asyncio.shield(dropping)

    def _drop(self) -> asyncio.Task[None] | None:
        link, flow = self._link, self._flow
        self._link = self._flow = None
        self._active = False
        self._stand += 1
        self._over = self._over or "lost"
        if link is not None:
            link.on_lost.discard(self._lost)
        self._news.tell()
        return None if flow is None else self._bus.in_background(flow.aclose())
