"""Steps, one after another, on the loop: each begins when every output window has room, and the loop has its turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from .._news import News
from ..bus import Message
from ..errors import BadBody, BusError, StepFailed
from ..failover.accept import Dropped, Outcome
from ..failover.group import Group
from ..notices import BadMessage, Notice
from ..wire.frame import Frame
from .order import Poisoned
from .steps import Steps

_log = logging.getLogger("esp_pubsub.engine")
_TURN = 0.005  # seconds of steps after which the loop gets a turn
_LONG_STEP = 0.1  # seconds from which on a step is reported: meanwhile this member reads, sends and beats nothing


class Stepping:
    """Takes steps and hands what they emit to the group. One task at a time calls it."""

    def __init__(self, steps: Steps, group: Group, changed: News, notify: Callable[[Notice], None]) -> None:
        """`changed` is told whenever there may be room."""
        self.steps = steps
        self.between = asyncio.Lock()
        """Free between entries, and between reads."""
        self.is_passed_over: Callable[[Poisoned], Awaitable[bool]] = _never
        """Whether the order says to go on after a step that failed."""
        self.is_torn = False
        """What belongs together was stepped on in part: a step failed, or this member stops."""
        self._group = group
        self._lines = group.membership.lines
        self._changed = changed
        self._notify = notify
        self._loop = asyncio.get_running_loop()
        self._turn_ends = 0.0

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[None]:
        """Step on what belongs together: an entry, or what one read brought."""
        async with self.between:
            self.is_torn = True
            self._turn_ends = self._loop.time() + _TURN  # reading has given the others theirs
            yield
            self.is_torn = False

    async def take(self, input: int, messages: Sequence[Message]) -> None:
        """Step on what these messages of an input bring. Raises what `Steps.take` does; cancelled, some are taken."""
        for outcome in self.steps.receive(input, messages):
            if outcome.__class__ is not Frame:
                self._tell(outcome)
                continue
            if not self._has_room() or self._loop.time() > self._turn_ends:
                await self._wait_for_room()
            began = self._loop.time()
            try:
                self._given(self.steps.take(input, outcome))
            except StepFailed as failed:
                if isinstance(failed.__cause__, BadBody):  # no member can read it, whatever its model does
                    self._notify(BadMessage(outcome.position, str(failed.__cause__)))
                elif not await self._is_passed_over(Poisoned(outcome.source, outcome.run, outcome.id)):
                    raise
                why, where = failed.__cause__, self.steps.inputs[input].window
                _log.warning("block %d of %s is passed over: %r", outcome.id, where, why)
                self.steps.pass_over(input, outcome)
            if (took := self._loop.time() - began) > _LONG_STEP:
                _log.warning(
                    "the step on block %d of source %016x at position %s took %.2f s; nothing was read or sent "
                    "meanwhile", outcome.id, outcome.source, outcome.position, took,
                )  # fmt: skip

    async def _is_passed_over(self, step: Poisoned) -> bool:
        try:
            return await self.is_passed_over(step)
        except BusError as trouble:
            _log.warning("whether %s is to be passed over cannot be seen: %s", step, trouble)
            return False

    async def tick(self, now: int) -> None:
        """It is this time for the engine now: step on the timers that are due."""
        self.steps.now = now
        for key in self.steps.timers.due(now):
            if not self._has_room() or self._loop.time() > self._turn_ends:
                await self._wait_for_room()
            if not self.steps.timers.take(key):
                continue
            began = self._loop.time()
            try:
                self._given(self.steps.fire(key))
            except StepFailed as failed:
                if not await self._is_passed_over(self.steps.timer(key)):
                    raise
                _log.warning("timer %r is passed over, as the order says: %r", key, failed.__cause__)
                self.steps.pass_timer_over(key)
            if (took := self._loop.time() - began) > _LONG_STEP:
                _log.warning("the step on timer %r took %.2f s; nothing was read or sent meanwhile", key, took)

    def _given(self, places: Sequence[int]) -> None:
        for at in places:
            self._group.given(at)

    def _has_room(self) -> bool:
        """Whether a step may begin: what it emits will fit then."""
        room = self._group.membership.room
        for line in self._lines:  # noqa: SIM110  # twice as fast as all()
            if not room(line, 0):
                return False
        return True

    async def _wait_for_room(self) -> None:
        """Give the others of this loop a turn, and wait until a step may begin."""
        await asyncio.sleep(0)
        while not self._has_room():
            await self._changed.wait()
        self._turn_ends = self._loop.time() + _TURN

    def _tell(self, outcome: Outcome) -> None:
        match outcome:
            case Dropped(frame, "beyond"):
                self._notify(
                    BadMessage(frame.position, f"block {frame.id} is beyond the window of its settled {frame.settled}")
                )
            case Dropped() | Frame():
                return
            case _:
                self._notify(outcome)


async def _never(_: Poisoned) -> bool:
    return False
