"""A member reads the topic of one of its lines, while it does not send: it learns how far the bus holds the line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .._news import News
from ..backoff import Backoff
from ..bus import Break, Bus, Place, Start, parts
from ..errors import BusUnavailable
from ..follower import Follower, before_end
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
        self._replay = bus.capabilities.replay
        self._line = line
        self._changed = changed
        self._news = News()
        self._place: Place | None = None  # after what was read; None where nothing can be read again
        self._end = 0

    async def run(self) -> None:
        """Follow until cancelled. Trouble is waited out: m stays too low, which is safe. Raises what `Line.follow`
        does.
        """
        follower = Follower(
            self._bus, self._topic, self._begin_at, Backoff(_PAUSE, _PAUSE), opened=self._begins, trouble=self._pauses
        )
        try:
            while True:
                for broken, messages in parts(await follower.read(10_000, 4 << 20)):
                    if broken is not None:
                        self._begin_anew(broken)
                    self._line.follow_all(messages)
                if self._replay:
                    self._place = follower.place
                self._look_for_end()
                self._changed()
                self._news.tell()
                await asyncio.sleep(_LOOK_EVERY if self._replay else 0)
        finally:
            self.reads = False
            await follower.aclose()

    def _begins(self) -> None:
        self._line.rejoin()
        self.reads = True
        self._look_for_end()

    def _pauses(self, _: BusUnavailable) -> None:
        self.reads = False

    def _look_for_end(self) -> None:
        if self._place is None or self._place.position >= self._end:
            self._line.reached_end()

    def _begin_anew(self, broken: Break) -> None:
        """Continuity ended: what was followed so far says nothing of what comes next."""
        self._line.rejoin()
        if broken.incarnation or broken.cut is not None:
            self._end = 0

    async def _begin_at(self) -> Start:
        """A little before the end, so that the group's last block is found after a restart of all its members."""
        if not self._replay:
            return "latest"
        place, self._end = await before_end(self._bus, self._topic, _BACK)
        if self._place is not None:
            place = Place(max(place.position, self._place.position), self._place.incarnation)
        self._place = place
        return place

    async def catch_up(self) -> None:
        """Wait until the topic is followed to the end that it has now; less is sent twice then.

        Waits as long as that takes; at trouble it gives up, because m too low is safe.
        """
        if not self._replay:
            return
        try:
            now = await self._bus.bounds(self._topic)
        except BusUnavailable:
            return
        while self._place is None or (self._place.incarnation == now.incarnation and self._place.position < now.end):
            await self._news.wait()
