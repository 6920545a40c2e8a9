"""The election that needs nothing but a control topic with one order for all. Who leads is judged in ballot.py.

The leader beats every `beat` seconds. Whoever has heard nothing of it for a while claims the next term, and so does at
once who hears that it resigned or, where the bus gives death notices, that its process is gone. Its own claim, read
back from the log and found good, makes a member leader; somebody else's good claim makes it step down.

On a bus without replay nobody can read what was said while he was away, so a campaign begins by listening for one
silence: a leader that lives is heard in it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Literal, cast

from .._news import News
from ..bus import Bus, Deaths
from ..errors import BusUnavailable
from .ballot import Ballot
from .control import Beat, Claim, Control, Identity

BEAT_EVERY = 0.1
SILENT_BEATS = 4
UNHEARD_BEATS = 12  # a leader that could not make itself heard for so long knows that somebody else may lead


class LogElection:
    """An `Election` over a group's control topic. The group hands it what is heard there."""

    def __init__(
        self,
        bus: Bus,
        control: Control,
        identity: Identity,
        run: int,
        word: Callable[[int, int, bool], Beat],
        *,
        trouble: Callable[[BusUnavailable], None],
        beat: float = BEAT_EVERY,
    ) -> None:
        """`word(term, number, resigns)` makes the beat to write; `trouble` is told when one could not be written."""
        self._control = control
        self._identity = identity
        self._run = run
        self._word = word
        self._trouble = trouble
        self._beat = beat
        self._deaths = cast(Deaths, bus) if bus.capabilities.deaths else None
        self._replay = bus.capabilities.replay
        self._news = News()
        self._ballot: Ballot | None = None  # None: nobody has spoken yet
        self._heard_at = 0.0
        self._spoke_at = 0.0
        self._saw = (0, 0)
        self._number = 0
        self._nobody_leads = True
        self._dead: int | None = None
        self._read_back = 0
        self._let_others = False
        self._term: int | None = None  # the term we lead
        self._unwanted: int | None = None  # a term we lead and do not want
        self._campaigning = False
        self._tasks: asyncio.TaskGroup | None = None
        self._mourner: asyncio.Task[None] | None = None

    def hear(self, said: Beat | Claim) -> None:
        """Something on the control topic, in its order."""
        if self._ballot is None:
            self._ballot = Ballot(from_start=self._control.from_start)
        ballot, before = self._ballot, self._ballot.leader
        nonce = said.identity.nonce
        if isinstance(said, Beat):
            if not ballot.beat(said.term, nonce, said.number, resigns=said.resigns):
                return
            self._saw = (nonce, said.number)
            if nonce != self._identity.nonce:
                self._term = None
        else:
            ours = nonce == self._identity.nonce
            if ours:
                self._read_back = said.term
            if not ballot.claim(said.term, nonce, said.saw_nonce, said.saw_number):
                if ours:
                    self._news.tell()
                return
            self._term = said.term if ours else None
            self._number, self._saw = 0, (0, 0)  # nothing yet of this term
            self._give_up_unwanted()
        self._heard_at = asyncio.get_running_loop().time()
        self._nobody_leads = ballot.leader in (None, self._dead)
        if ballot.leader not in (None, self._identity.nonce):
            self._let_others = False  # they had their turn
        if ballot.leader != before:
            self._mourn(said.identity)
        self._news.tell()

    def _give_up_unwanted(self) -> None:
        """A claim may come true when its campaign is over; a leader that does not work would be the worst of all."""
        if self._term is not None and not self._campaigning:
            self._unwanted, self._term = self._term, None

    def _mourn(self, leader: Identity) -> None:
        """Listen for the end of this leader's process, and of nobody else's."""
        if self._mourner is not None:
            self._mourner.cancel()
            self._mourner = None
        if self._deaths is not None and self._tasks is not None and leader.nonce != self._identity.nonce:
            self._mourner = self._tasks.create_task(self._wait_for_death(leader))

    async def _wait_for_death(self, leader: Identity) -> None:
        if self._deaths is not None:
            await self._deaths.gone(leader.process)
            self._dead = leader.nonce  # what it wrote before may still be read after this
            if self._ballot is not None and self._ballot.leader == leader.nonce:
                self._nobody_leads = True
                self._news.tell()

    async def run(self) -> None:
        """See `Election.run`."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                await self._beat_while_we_lead()
            finally:
                self._tasks = self._term = None
                self._news.tell()

    async def _beat_while_we_lead(self) -> None:
        while True:
            term = self._term if self._unwanted is None else self._unwanted
            if term is None:
                await self._news.wait()
                continue
            self._number += 1
            try:
                await self._control.beat(self._word(term, self._number, self._unwanted is not None))
                self._unwanted = None
                self._spoke_at = asyncio.get_running_loop().time()
            except BusUnavailable as error:
                self._trouble(error)
                self._term = None
                self._news.tell()
            await asyncio.sleep(self._beat)

    async def campaign(self) -> int:
        """See `Election.campaign`."""
        self._campaigning, won = True, None
        was_away = True
        try:
            while self._term is None:
                was_away = was_away or not self._control.reading.is_set()
                await self._control.reading.wait()
                if was_away and not self._replay:
                    self._heard_at, self._nobody_leads = asyncio.get_running_loop().time(), False
                was_away = False
                if await self._has_reason():
                    await self._claim()
            self._let_others = False
            won = self._term
            return won
        finally:
            self._campaigning = won is not None
            self._give_up_unwanted()
            self._campaigning = False

    def _silence(self) -> float:
        return self._beat * (SILENT_BEATS + random.uniform(0.0, 2.0))

    async def _has_reason(self) -> bool:
        """Wait for a reason to claim, or for any news; True for the former."""
        if self._term is not None:
            return False
        if self._nobody_leads and not (self._let_others and self._ballot is not None):
            return True
        since = self._heard_at
        try:
            async with asyncio.timeout_at(since + self._silence() * (2 if self._let_others else 1)):
                await self._news.wait()
        except TimeoutError:
            return self._term is None and self._heard_at == since  # else it was broken at the last moment
        return False

    async def _claim(self) -> None:
        """Claim the next term, and wait until the claim is read back, or another one that came before it.

        Only who has heard everything knows that there was silence; it may be we who were away, or the bus.
        """
        if not await self._has_heard_everything():
            await asyncio.sleep(self._beat / 2)
            return
        term = self._ballot.term if self._ballot is not None else 0
        try:
            await self._control.claim(Claim(self._identity, self._run, term + 1, *self._saw))
            async with asyncio.timeout(self._silence()):
                while self._read_back != term + 1 and (self._ballot is None or self._ballot.term <= term):
                    await self._news.wait()
        except BusUnavailable as error:
            self._trouble(error)
            await asyncio.sleep(self._beat)
        except TimeoutError:
            return

    async def _has_heard_everything(self) -> bool:
        try:
            async with asyncio.timeout(self._silence()):
                return await self._control.is_current()
        except TimeoutError:
            return False

    async def watch(self) -> Literal["suspended", "lost"]:
        """See `Election.watch`."""
        self._spoke_at = asyncio.get_running_loop().time()
        while self._term is not None:
            unheard = asyncio.get_running_loop().time() - self._spoke_at > UNHEARD_BEATS * self._beat
            if unheard or not self._control.reading.is_set():
                self._term = None
                return "suspended"
            try:
                async with asyncio.timeout(self._beat):
                    await self._news.wait()
            except TimeoutError:
                continue
        return "lost"

    async def resign(self) -> None:
        """See `Election.resign`."""
        term, self._term = self._term, None
        self._let_others = True
        if term is None:
            return
        self._number += 1
        try:
            await self._control.beat(self._word(term, self._number, True))
        except BusUnavailable:
            return
