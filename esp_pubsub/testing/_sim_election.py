"""The election of a simulated bus of queues: whoever stands first in a line leads, as with RabbitMQ's token.

A process that was killed loses its place at once. A member knows at once that its link is cut; the broker finds out a
little later, and lets the next one lead then. A member that is frozen for long loses its place, and learns of that when
it thaws.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import BusUnavailable

if TYPE_CHECKING:
    from ._sim_bus import Broker

_LOOK_EVERY = 0.1
_FROZEN_LOOKS = 6
_OTHERS_FIRST = 0.5
_PAUSE = 0.1


@dataclass(eq=False, slots=True)
class Place:
    """A place in a line, of a process; `over` is what the process knows."""

    process: str
    over: bool = False
    frozen: int = 0


class Lines:
    """The lines of a broker, and the terms that were led in each."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lines: dict[str, list[Place]] = {}
        self._terms: dict[str, int] = {}

    def stand(self, line: str, process: str) -> Place:
        """Stand at the end of a line."""
        place = Place(process)
        standing = self._lines.setdefault(line, [])
        standing.append(place)
        if len(standing) == 1:
            self._broker.loop.in_bus(_LOOK_EVERY, self._look, line)
        return place

    def is_first(self, line: str, place: Place) -> bool:
        """Whether it is the turn of this place. BusUnavailable if it is over."""
        if place.over:
            raise BusUnavailable("the place in the line is lost")
        return self._lines[line][0] is place

    def next_term(self, line: str) -> int:
        """Count up the term of a line."""
        self._terms[line] = self._terms.get(line, 0) + 1
        return self._terms[line]

    def cut(self, process: str, *, noticed_after: float) -> None:
        """A process has lost its link; the broker finds out after a while."""
        for place in [place for standing in self._lines.values() for place in standing if place.process == process]:
            place.over = True
            self._broker.loop.in_bus(noticed_after, self.leave, place)

    def leave(self, place: Place) -> None:
        """Give a place up."""
        place.over = True
        for standing in self._lines.values():
            if place in standing:
                standing.remove(place)
        self._broker.tell_news()

    def _look(self, line: str) -> None:
        """Every so often: the broker finds out who is frozen, and now and then takes a leader's channel away."""
        broker, standing = self._broker, self._lines[line]
        for place in standing[:1]:
            place.frozen = place.frozen + 1 if place.process in broker.loop.frozen else 0
            if place.frozen >= _FROZEN_LOOKS or broker.draws(0.05):
                self.leave(place)
        if standing:
            broker.loop.in_bus(_LOOK_EVERY, self._look, line)


class SimElection:
    """See `Election`."""

    def __init__(self, broker: Broker, line: str, process: str) -> None:
        self._broker = broker
        self._line = line
        self._process = process
        self._place: Place | None = None
        self._resigned = False

    async def run(self) -> None:
        """See `Election.run`."""
        try:
            await asyncio.Event().wait()
        finally:
            self._leave()

    async def campaign(self) -> int:
        """See `Election.campaign`."""
        self._leave()
        if self._resigned:
            await asyncio.sleep(_OTHERS_FIRST)
            self._resigned = False
        try:
            while True:
                try:
                    return await self._wait_for_turn()
                except BusUnavailable:
                    self._leave()
                await asyncio.sleep(_PAUSE)
        except BaseException:
            self._leave()
            raise

    async def _wait_for_turn(self) -> int:
        lines = self._broker.lines
        await self._broker.ask(self._process)
        self._place = lines.stand(self._line, self._process)
        while not lines.is_first(self._line, self._place):
            await self._broker.news()
        await self._broker.ask(self._process)
        lines.is_first(self._line, self._place)
        return lines.next_term(self._line)

    async def watch(self) -> Literal["suspended", "lost"]:
        """See `Election.watch`."""
        while self._place is not None and not self._place.over:
            await self._broker.news()
        self._leave()
        return "lost"

    async def resign(self) -> None:
        """See `Election.resign`."""
        self._resigned = self._place is not None
        self._leave()

    def _leave(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            self._broker.lines.leave(place)
