"""The election that needs nothing but a control topic with one order for all. What is decided is decided in ballot.py.

The leader beats every `beat` seconds. A member that has heard nothing of it for a while claims the next term, and so
does, at once, one that hears that the leader resigned or, where the bus gives death notices, that its process is gone.
Its own claim, read back from the log and found good, makes a member leader; another member's good claim makes it step
down.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Literal, cast

from .._news import News
from ..bus import Bus, Deaths
from ..errors import BusUnavailable
from .ballot import UNHEARD_BEATS, Contender
from .control import Control
from .words import Beat, Identity, Word

BEAT_EVERY = 0.1


class LogElection:
    """An `Election` over a group's control topic. `term` is the one that this member leads, None if it does not."""

    def __init__(
        self,
        bus: Bus,
        control: Control,
        identity: Identity,
        beat: Callable[[int, int, bool], Beat],
        *,
        every: float = BEAT_EVERY,
    ) -> None:
        """`beat(term, number, resigns)` is what a beat of this member says; `every`: seconds between two beats."""
        self._control = control
        self._identity = identity
        self._say = beat
        self._every = every
        self._contender = Contender(identity, control.run_number, beat=every, draw=random.random)
        self._deaths = cast(Deaths, bus) if bus.capabilities.deaths else None
        self._news = News()
        self._heard_by_others_at = 0.0
        self._tasks: asyncio.TaskGroup | None = None
        self._death_watch: asyncio.Task[None] | None = None
        control.listen(self._hear)

    def _hear(self, said: Word) -> None:
        if said.run != self._control.run_number:
            return
        before = self._contender.leader
        now = asyncio.get_running_loop().time()
        if self._contender.hear(said, now, from_start=self._control.from_start):
            if self._contender.leader != before:
                self._watch_for_death(said.identity)
            self._news.tell()

    def _watch_for_death(self, leader: Identity) -> None:
        """Listen for the end of this leader's process, and of nobody else's."""
        if self._death_watch is not None:
            self._death_watch.cancel()
            self._death_watch = None
        if self._deaths is not None and self._tasks is not None and leader.nonce != self._identity.nonce:
            self._death_watch = self._tasks.create_task(self._wait_for_death(self._deaths, leader))

    async def _wait_for_death(self, deaths: Deaths, leader: Identity) -> None:
        await deaths.gone(leader.process)
        self._contender.died(leader.nonce)
        self._news.tell()

    async def run(self) -> None:
        """See `Election.run`."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                await self._beat()
            finally:
                self._tasks = self._contender.term = None
                self._news.tell()

    async def _beat(self) -> None:
        """Beat while this member leads, and resign what it leads and does not want."""
        contender = self._contender
        while True:
            unwanted = contender.unwanted
            term = contender.term if unwanted is None else unwanted
            if term is None:
                await self._news.wait()
                continue
            try:
                await self._control.write(self._say(term, contender.number(), unwanted is not None))
                contender.unwanted = None
                self._heard_by_others_at = asyncio.get_running_loop().time()
            except BusUnavailable:
                contender.term = None
                self._news.tell()
            await asyncio.sleep(self._every)

    async def campaign(self) -> int:
        """See `Election.campaign`."""
        contender = self._contender
        contender.campaign()
        try:
            while contender.term is None:
                await self._control.reading.wait()
                if await self._is_time_to_claim():
                    await self._claim()
        except BaseException:
            contender.withdraw()
            raise
        return cast(int, contender.end_campaign())

    async def _is_time_to_claim(self) -> bool:
        """Wait until it is, or until there is news; True for the former."""
        loop = asyncio.get_running_loop()
        at = self._contender.claim_at(loop.time())
        if at <= loop.time():
            return self._contender.term is None
        heard = self._contender.heard_at
        try:
            async with asyncio.timeout_at(at):
                await self._news.wait()
        except TimeoutError:
            return self._contender.term is None and self._contender.heard_at == heard  # else it came just now
        return False

    async def _claim(self) -> None:
        """Claim the next term, and wait until the claim is read back, or another one that came before it.

        Only a member that has heard everything knows that there was silence; it may be itself that was away, or the
        bus.
        """
        heard = self._contender.heard_at
        if not await self._has_heard_everything():
            await asyncio.sleep(self._every / 2)
            return
        if self._contender.heard_at != heard:
            return  # while it asked; so it was this member that was away
        claim = self._contender.claim()
        try:
            await self._control.write(claim)
            async with asyncio.timeout(self._contender.silence()):
                while not self._contender.is_judged(claim.term):
                    await self._news.wait()
        except BusUnavailable:
            await asyncio.sleep(self._every)
        except TimeoutError:
            return

    async def _has_heard_everything(self) -> bool:
        try:
            async with asyncio.timeout(self._contender.silence()):
                return await self._control.is_current()
        except TimeoutError:
            return False

    async def watch(self) -> Literal["suspended", "lost"]:
        """See `Election.watch`."""
        loop, contender = asyncio.get_running_loop(), self._contender
        self._heard_by_others_at = loop.time()
        while contender.term is not None:
            unheard = loop.time() - self._heard_by_others_at > UNHEARD_BEATS * self._every
            if unheard or not self._control.reading.is_set():
                contender.term = None
                return "suspended"
            try:
                async with asyncio.timeout(self._every):
                    await self._news.wait()
            except TimeoutError:
                continue
        return "lost"

    async def resign(self) -> None:
        """See `Election.resign`."""
        term = self._contender.resign()
        if term is None:
            return
        try:
            await self._control.write(self._say(term, self._contender.number(), True))
        except BusUnavailable:
            return
