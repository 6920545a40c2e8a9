"""The control topic of a group: what members say there, written and read.

It reads from a little before the end, so that a newcomer hears the last beats at once, and goes on through any trouble.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress

from ..backoff import Backoff
from ..bus import Break, Bus, Pipe, Place, Start
from ..errors import BusUnavailable
from ..follower import Follower, before_end
from ..wire.frame import frames
from .words import Beat, Challenge, StandBy, Word, read_word

_BACK = 256  # messages before the end with which a newcomer begins
_PAUSE = 0.05
_POSITION_EVERY = 1.0
_STANDS_BY_EVERY = 2.0
_WRITE_DEADLINE = 10.0  # the driver has a shorter one of its own


class Control:
    """One member's end of the control topic."""

    def __init__(
        self, bus: Bus, topic: str, source: int, run: int, *, trouble: Callable[[BusUnavailable], None]
    ) -> None:
        """`run_number`: the group's run, see PROTOCOL 1. `trouble` is called when a word could not be written."""
        self.topic = topic
        self.run_number = run
        self.from_start = True
        self._spoke_in, self._spoke_at = -1, -math.inf
        self._bus = bus
        self._replay = bus.capabilities.replay
        self._source = source
        self._trouble = trouble
        self._listeners: list[Callable[[Word], None]] = []
        self._pipe: Pipe | None = None
        self._line = asyncio.Lock()
        self._place: Place | None = None  # after what was read
        self._end = 0
        self.reading = asyncio.Event()

    def listen(self, hear: Callable[[Word], None]) -> None:
        """Call this with every word on the topic, in its order, our own included. What it raises ends `run`."""
        self._listeners.append(hear)

    async def run(self) -> None:
        """Read until cancelled. `reading` is set once what was there has been read, and cleared in trouble."""
        follower = Follower(
            self._bus, self.topic, self._begin, Backoff(_PAUSE, _PAUSE), opened=self._look_for_end, trouble=self._lost
        )
        try:
            while True:
                for message in await follower.read(_BACK, 1 << 20):
                    if isinstance(message, Break):  # what was there is no more
                        self._end = 0
                    else:
                        self._hear(message.data)
                if self._replay:
                    self._place = follower.place
                self._look_for_end()
        finally:
            await follower.aclose()
            await self._drop_pipe()

    async def _begin(self) -> Start:
        if not self._replay:
            self.from_start = False
            return "latest"
        if self._place is None:
            self._place, self._end = await before_end(self._bus, self.topic, _BACK)
            self.from_start = self._place.position == 0
        return self._place

    def _look_for_end(self) -> None:
        if self._place is None or self._place.position >= self._end:
            self.reading.set()

    def _lost(self, _: BusUnavailable) -> None:
        self.reading.clear()

    async def is_current(self) -> bool:
        """Whether all that stands on the topic has been read. The bus is asked: one that does not answer says no."""
        if self._place is None:
            return False
        try:
            bounds = await self._bus.bounds(self.topic)
            return self._place.incarnation == bounds.incarnation and self._place.position >= bounds.end
        except BusUnavailable:
            return False

    def _hear(self, data: bytes) -> None:
        if (word := read_word(data)) is not None:
            for hear in self._listeners:
                hear(word)

    async def write(self, word: Word) -> None:
        """Say something to the group. BusUnavailable if the bus does not take and confirm it in time."""
        try:
            await self._write(frames([word.sealed(self._source)], 0, time.time_ns() // 1000, word.term))
        except BusUnavailable as error:
            self._trouble(error)
            raise
        if isinstance(word, Challenge):
            return  # it says no position
        self._spoke_in, self._spoke_at = word.term, asyncio.get_running_loop().time()

    async def repeat(self, beat: Callable[[int], Beat]) -> None:
        """Write `beat(number)` whenever this member has said nothing for a second, or nothing yet in its term, until
        cancelled: on every bus, with every election, a newcomer learns from the active member how far the sequence is.
        """
        loop, number = asyncio.get_running_loop(), 1
        while True:
            said = beat(number)
            if said.term != self._spoke_in or loop.time() >= self._spoke_at + _POSITION_EVERY:
                number += 1
                try:
                    await self.write(said)
                except BusUnavailable:
                    self._spoke_in, self._spoke_at = said.term, loop.time()
            await asyncio.sleep(max(0.0, self._spoke_at + _POSITION_EVERY - loop.time()))

    async def mention(self, standing_by: Callable[[], StandBy]) -> None:
        """Write this every few seconds, first after as long, until cancelled. Trouble with it is nobody's."""
        while True:
            await asyncio.sleep(_STANDS_BY_EVERY)
            said = standing_by()
            with suppress(BusUnavailable):
                await self._write(frames([said.sealed(self._source)], 0, time.time_ns() // 1000, said.term))

    async def _write(self, message: list[bytes]) -> None:
        """Through a pipe that is dropped after any trouble, a cancelled write included."""
        async with self._line:
            try:
                async with asyncio.timeout(_WRITE_DEADLINE):
                    if self._pipe is None:
                        self._pipe, self._written = await self._bus.pipe(self.topic), 0
                    await self._pipe.write(message)
                    self._written = await self._pipe.confirmed(self._written)
            except TimeoutError:
                await self._drop_pipe()
                raise BusUnavailable(f"{self.topic} took no message within {_WRITE_DEADLINE:g} s") from None
            except BaseException:
                await self._drop_pipe()
                raise

    async def _drop_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            await pipe.aclose()
