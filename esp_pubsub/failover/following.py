"""A member reads the topic of one of its lines, while it does not send: it learns how far the bus holds the line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from .._news import News
from ..bus import Break, Bus, Place, parts
from ..errors import BusUnavailable
from .line import Line

_BACK = 1_000  # messages before the end in which a new member looks for its group's last block; beats tell it too
_PAUSE = 0.05
_LOOK_EVERY = 0.002  # seconds between two looks at a log: to follow much at once costs hardly more than a little


class Following:
    """Follows one topic. `reads` says whether it is being read at the moment."""

    def __init__(self, bus: Bus, topic: str, line: Line, changed: Callable[[], None]) -> None:
        """`changed` is called after each read."""
        self.reads = False
        self._bus = bus
        self._topic = topic
        self._line = line
        self._changed = changed
        self._news = News()
        self._place: Place | None = None  # after what was read; None where nothing can be read again
        self._end = 0

    async def run(self) -> None:
        """Follow until cancelled. Trouble is waited out: m stays too low, which is safe. Raises what `Line.follow`
        does.
        """
        while True:
            try:
                await self._follow()
            except BusUnavailable:
                self.reads = False
                await asyncio.sleep(_PAUSE)

    async def _follow(self) -> None:
        replay = self._bus.capabilities.replay
        feed = await self._bus.feed(self._topic, await self._begin_at(), None)
        self._line.rejoin()
        try:
            self.reads = True
            while True:
                await asyncio.sleep(_LOOK_EVERY if replay else 0)
                if self._place is None or self._place.position >= self._end:
                    self._line.reached_end()
                for broken, messages in parts(await feed.read(10_000, 4 << 20)):
                    if broken is not None:
                        self._begin_anew(broken)
                    self._line.follow_all(messages)
                if replay:
                    self._place = feed.place
                self._changed()
                self._news.tell()
        finally:
            self.reads = False
            await feed.aclose()

    def _begin_anew(self, broken: Break) -> None:
        """Continuity ended: what was followed so far says nothing of what comes next."""
        self._line.rejoin()
        if broken.incarnation:
            self._end = 0

    async def _begin_at(self) -> Place | Literal["latest"]:
        """A little before the end, so that the group's last block is found after a restart of all its members."""
        if not self._bus.capabilities.replay:
            return "latest"
        bounds = await self._bus.bounds(self._topic)
        start, incarnation = max(bounds.first, bounds.end - _BACK), bounds.incarnation
        if self._place is not None:
            start, incarnation = max(start, self._place.position), self._place.incarnation
        self._place, self._end = Place(start, incarnation), bounds.end
        return self._place

    async def catch_up(self) -> None:
        """Wait until the topic is followed to the end that it has now; less is sent twice then.

        Waits as long as that takes; at trouble it gives up, because m too low is safe.
        """
        if not self._bus.capabilities.replay:
            return
        try:
            now = await self._bus.bounds(self._topic)
        except BusUnavailable:
            return
        while self._place is None or (self._place.incarnation == now.incarnation and self._place.position < now.end):
            await self._news.wait()
