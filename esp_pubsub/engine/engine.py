"""The runner of an engine's member: it reads the input, steps, and sends what the model emits while it leads.

Who leads, and from where it sends, is decided by the group (failover/group.py): one election over all output windows.
So a member is a reader and a group side by side. The reader steps on each block of the input as soon as every output
window has room, whatever the member's role is; the group sends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .._news import News
from .._tasks import first_error
from ..address import Address
from ..backoff import Backoff
from ..bus import Break, Bus, Message, Place, Start, parts
from ..errors import BusError, BusUnavailable, Closed, EspError, InputLost, StepFailed
from ..failover.accept import Accept, Dropped, Outcome
from ..failover.join import Elect, join
from ..failover.line import Line
from ..failover.membership import RoleChange
from ..failover.words import Setup
from ..follower import Follower
from ..notices import BadMessage, Failure, Notice, Reconnected
from ..sender import Sender
from ..wire.frame import Frame
from .beginning import Input
from .options import EngineOptions, EngineStats, LineStats
from .steps import Steps

if TYPE_CHECKING:
    from ..client import Home

_log = logging.getLogger("esp_pubsub.engine")
_TURN = 0.005  # seconds of steps after which the loop gets a turn
_LONG_STEP = 0.1  # seconds from which on a step is reported: meanwhile this member reads, sends and beats nothing
_READ_BLOCKS, _READ_BYTES = 1_000, 4 << 20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one member is to do: read this input, take these steps, and be a member of this group with these lines."""

    address: Address
    input: Input
    steps: Steps
    lines: Sequence[Line]
    setup: Setup
    control_topic: str
    elect: Elect | None


class Engine:
    """One member of an engine. Made by `Client.engine`; used on that client's loop."""

    def __init__(
        self, home: Home, reads: Bus, writes: Bus, plan: Plan, options: EngineOptions,
        notify: Callable[[Notice], None],
    ) -> None:  # fmt: skip
        self.address = plan.address
        self.options = options
        self._home = home
        self._reads = reads
        self._notify = notify
        self._input = plan.input
        self._steps = plan.steps
        self._lines = plan.lines
        self._windows = plan.setup.topics
        senders = [
            Sender(
                writes, topic, line.outbox, source=line.source, run=line.run, stall=options.stall,
                acked=partial(self._acked, line), trouble=partial(self._trouble, topic),
            )
            for topic, line in zip(plan.setup.topics, plan.lines, strict=True)
        ]  # fmt: skip
        self._group = join(
            writes, options.failover("engine"), plan.control_topic, plan.setup,
            list(zip(plan.lines, senders, strict=True)), elect=plan.elect, stall=options.stall, changed=self._changed,
        )  # fmt: skip
        self._accept = Accept(
            suffix_only=reads.capabilities.suffix_only, from_start=plan.input.from_start,
            max_sources=options.max_sources,
        )  # fmt: skip
        self._accept.joined_at_run = dict(plan.input.runs)
        self._place = Place(plan.input.position, plan.input.incarnation)
        self._connected = True
        self._news = News()
        self._loop = asyncio.get_running_loop()
        self._turn_ends = 0.0
        self._task: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._closed = False
        self._failure: Exception | None = None
        self._raised = False

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to read and to step. The client calls this."""
        self._task = tasks.create_task(self._work(), name=f"esp engine {self.address}")

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._group.run())
                self._reader = tasks.create_task(self._compute())
        except ExceptionGroup as errors:
            self._fail(first_error(errors))

    async def _compute(self) -> None:
        """Step until cancelled. What this member computed before a step that failed is brought to the bus first: it may
        be the last member that can.
        """
        try:
            await self._read()
        except (StepFailed, InputLost) as error:
            _log.error("%s takes no further step: %s", self._group.membership.identity.name, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.options.close_timeout):
                    while any(line.m < line.outbox.last for line in self._lines):
                        await self._news.wait()
                    await self._group.hand_over()
            raise

    # the input

    async def _read(self) -> None:
        follower = Follower(
            self._reads, self._input.topic, self._where, Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), opened=self._opened,
            trouble=self._lost,
        )  # fmt: skip
        try:
            while True:
                for broken, messages in parts(await follower.read(_READ_BLOCKS, _READ_BYTES)):
                    if broken is not None:
                        raise self._input_lost(broken)
                    await self._take(messages)
                self._place = follower.place or self._place
        finally:
            await follower.aclose()

    async def _where(self) -> Start:
        return self._place

    def _opened(self) -> None:
        if not self._connected:
            self._connected = True
            self._notify(Reconnected(self._input.topic, f"reading goes on from {self._place.position}"))

    def _lost(self, error: BusUnavailable) -> None:
        if self._connected:
            self._connected = False
            self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_READFAILED", error))

    def _input_lost(self, broken: Break) -> InputLost:
        topic, position = self._input.topic, self._place.position
        way_out = "begin a new run on all members (run=...)"
        if not broken.incarnation:
            way_out = f"keep more of the input than a member may have to read again, and {way_out}"
        return InputLost(
            f"the engine cannot read {topic} on from position {position} ({broken.reason}): {way_out}",
            topic=topic,
            position=position,
        )

    async def _take(self, messages: Sequence[Message]) -> None:
        for outcome in self._accept.receive_all(messages, self.options.limits):
            if outcome.__class__ is not Frame:
                self._tell(outcome)
                continue
            if not self._has_room() or self._loop.time() > self._turn_ends:
                await self._wait_for_room()
            self._step(outcome)

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

    # steps

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
            await self._news.wait()
        self._turn_ends = self._loop.time() + _TURN

    def _step(self, frame: Frame) -> None:
        began = self._loop.time()
        for at in self._steps.take(self._input.window, frame):
            self._group.given(at)
        if (took := self._loop.time() - began) > _LONG_STEP:
            _log.warning(
                "the step on block %d of source %016x at position %s took %.2f s; nothing was read or sent meanwhile",
                frame.id, frame.source, frame.position, took,
            )  # fmt: skip

    # the group

    def _acked(self, line: Line, id: int) -> None:
        self._group.acked(line, id)
        self._changed()

    def _changed(self) -> None:
        """The group knows more than before, or has another role: there may be room."""
        self._news.tell()

    def _trouble(self, topic: str, error: BusError | None) -> None:
        if error is None:
            self._notify(Reconnected(topic, "publishing goes on"))
            return
        if isinstance(error, BusUnavailable):
            self._group.trouble(error)
        self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_WRITEFAILED", error))

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._notify(Failure("pubsubFail_APIFAIL", "pubsubCode_WRITEEVENTS", error))

    # for the user

    async def wait(self) -> None:
        """Wait until this member has ended: it returns after `aclose`, and raises what else ended it.

        StepFailed: the model raised. InputDiffers: this member computed another block than the others. Stale: a higher
        run began. InputLost: what it has still to read is gone. Others may go on without it.
        """
        self._home.check()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._failure

    async def hand_over(self) -> None:
        """Send what this member has computed, then let another one lead; at once on a standby. See
        `Publisher.hand_over`.
        """
        self._home.check()
        if self._closed:
            raise Closed(f"the engine at {self.address} is closed; open a new one")
        try:
            await self._group.hand_over()
        except Closed:
            self._raise_failure()
            raise

    async def roles(self) -> AsyncIterator[RoleChange]:
        """The role changes of this member from now on, as they happen; ends after the last, `left`."""
        async for change in self._group.roles.changes():
            yield change

    @property
    def stats(self) -> EngineStats:
        """How far this member is, and what it is in its group."""
        membership = self._group.membership
        lines = tuple(
            LineStats(topic, line.outbox.last, line.m, len(line.outbox), line.outbox.bytes)
            for topic, line in zip(self._windows, self._lines, strict=True)
        )
        return EngineStats(
            role=membership.role, term=membership.term, steps=self._steps.taken, position=self._place.position,
            lines=lines, last_switch=self._group.roles.last,
        )  # fmt: skip

    async def aclose(self) -> None:
        """Take no more steps, let another member lead, and end. Bounded by `close_timeout`; twice is harmless.

        Nothing is lost by it: what this member has computed and not sent, the others compute too, and so does it when
        it is started again. Raises what ended the member before, unless `wait` has.
        """
        self._home.check()
        if not self._closed and self._reader is not None and self._failure is None:
            self._reader.cancel()
            with suppress(TimeoutError, Closed):
                async with asyncio.timeout(self.options.close_timeout):
                    await self._group.hand_over()
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if not self._raised:
            self._raise_failure()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self.aclose()
        except EspError as ended:
            if error is None:
                raise
            _log.warning("closing after an error: %s", ended)
