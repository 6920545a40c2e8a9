"""A member of an engine: an order of steps, and a group that sends what they emit.

Who leads, and from where it sends, is decided by the group (failover/group.py): one election over all output windows.
What is stepped on, and in which order, is said by derived.py or written.py; every member steps, whatever its role is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .._news import News
from .._tasks import first_error, run_until_one_ends
from ..address import Address
from ..bus import Bus
from ..errors import (
    BusError,
    BusUnavailable,
    Closed,
    EspError,
    InputDiffers,
    InputLost,
    ModelError,
    StepFailed,
    StepsDiffer,
    Switched,
    WrongOrder,
)
from ..failover.course import Reach
from ..failover.group import Group
from ..failover.join import Elect, join
from ..failover.line import Line
from ..failover.membership import Role, RoleChange
from ..failover.words import Beat, Pulse, Setup, StandBy, Word, differences
from ..notices import Failure, Notice, Reconnected
from ..sender import Sender
from .options import EngineOptions, EngineStats, LineStats
from .questions import Questions, Quiet, Stopping
from .snapshots import Snapshots, Standing
from .stepping import Stepping
from .steps import Mark, Steps

if TYPE_CHECKING:
    from ..client import Home

_log = logging.getLogger("esp_pubsub.engine")
_MEMBERS = 100  # of which it is known that they were there
_SILENT = 6.0  # seconds after its last word for which a member counts as alive
_LOOK_EVERY = 0.05  # seconds, where nothing else happens
_ANSWER_LEAVES = 0.2  # seconds in which the answer to whoever stopped the engine gets out


class Ordered(Protocol):
    """What says which step comes next: derived.py or written.py."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Up to where each input was taken."""

    @property
    def read(self) -> tuple[int, ...]:
        """Up to where each input was read; 0 for a queue."""

    @property
    def standing(self) -> Standing:
        """Where the member is; to be asked while nothing is stepped on."""

    @property
    def hindered_since(self) -> float | None:
        """Since when this member cannot take what others may be able to take; None while it can."""

    async def ends(self) -> Sequence[int | None]:
        """Where each input ends now; None for a queue. Raises BusError."""

    def has_taken(self, ends: Sequence[int | None]) -> bool:
        """Whether all before these positions was taken, and all that came of the queues; to be asked while nothing is
        stepped on, on the member that leads.
        """

    def now(self) -> int:
        """The engine's time; 0 where it has none."""

    def heard(self, now: int) -> None:
        """A living leader says what time it is."""

    async def run(self) -> None:
        """Take steps until cancelled. Raises what ends this member."""


class MemberSeen(NamedTuple):
    """A member by its last word."""

    name: str
    role: Role
    at: float


class Stopped(EspError):
    """All members of the engine are to stop."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one member is to do: take these steps in an order, and be a member of this group with these lines."""

    address: Address
    topics: Sequence[str]
    """Of all windows."""
    steps: Steps
    order: Callable[[Stepping, Group, News], Ordered]
    lines: Sequence[Line]
    setup: Setup
    control_topic: str
    elect: Elect | None
    snapshots: Snapshots | None


class Engine:
    """One member of an engine. Made by `Client.engine`; used on that client's loop."""

    def __init__(
        self, home: Home, writes: Bus, plan: Plan, options: EngineOptions, notify: Callable[[Notice], None]
    ) -> None:
        """`writes`: the bus of the output windows."""
        self.address = plan.address
        self.options = options
        self._home = home
        self._notify = notify
        self._lines = plan.lines
        self._topics = plan.setup.topics
        self._changed = News()
        senders = [
            Sender(
                writes, topic, line.outbox, source=line.source, run=line.run, stall=options.stall,
                acked=partial(self._acked, line), trouble=partial(self._trouble, topic),
            )
            for topic, line in zip(plan.setup.topics, plan.lines, strict=True)
        ]  # fmt: skip
        name = f"engine.{plan.address.project}.{plan.address.contquery}"
        self._group = join(
            writes, options.failover(name), plan.control_topic, plan.setup,
            list(zip(plan.lines, senders, strict=True)), elect=plan.elect, stall=options.stall,
            changed=self._changed.tell,
        )  # fmt: skip
        self._steps = plan.steps
        self._group.membership.pulse = self._pulse
        self._group.listen(self._hear)
        stepping = Stepping(plan.steps, self._group, self._changed, notify)
        self._order = order = plan.order(stepping, self._group, self._changed)
        self._group.membership.hindered_since = lambda: order.hindered_since
        self._group.membership.reach = self._reach
        self._stepping = stepping
        self._snapshots = plan.snapshots
        self._stopping = Stopping()
        self._members: dict[int, MemberSeen] = {}
        self._questions = Questions(
            writes, plan.address, plan.topics, order, stepping, plan.lines, plan.snapshots, self._stopping,
            lambda: self.stats,
        )  # fmt: skip
        self._task: asyncio.Task[None] | None = None
        self._stepper: asyncio.Task[None] | None = None
        self._closed = False
        self._speaker: int | None = None  # whose beat was read last
        self._failure: Exception | None = None
        self._raised = False

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to step. The client calls this."""
        self._task = tasks.create_task(self._work(), name=f"esp engine {self.address}")
        self._task.add_done_callback(lambda _: self._end())

    def _end(self) -> None:
        """Nobody waits for this member any more, though it was cancelled before it began."""
        self._group.leave()
        if self._snapshots is not None:
            self._snapshots.end()

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._group.run())
                self._stepper = tasks.create_task(self._step())
                tasks.create_task(self._questions.run(self._leads, self._changed))
                if self._snapshots is not None:
                    order = self._order
                    tasks.create_task(self._snapshots.run(self._stepping, lambda: order.standing, self._leads))
        except ExceptionGroup as errors:
            error = first_error(errors)
            if isinstance(error, Stopped):
                _log.warning("%s ends: %s", self._group.membership.identity.name, error)
                return
            self._fail(error)
            if self._snapshots is not None and isinstance(error, InputDiffers | StepsDiffer):
                await self._snapshots.withdraw()

    def _leads(self) -> bool:
        return self._group.membership.state == "active"

    async def _step(self) -> None:
        """Step until cancelled. What this member computed before a step that failed is brought to the bus first: it may
        be the last member that can.
        """
        try:
            await run_until_one_ends(self._order.run(), self._until_stopped())
            await self._stop()
        except (StepFailed, InputLost) as error:
            _log.error("%s takes no further step: %s", self._group.membership.identity.name, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.options.close_timeout):
                    await self._all_on_bus()
                    await self._group.hand_over()
            raise
        except Switched as switched:
            _log.warning("%s takes no further step: %s", self._group.membership.identity.name, switched)
            await self._all_on_bus()
            ends = await self._leave_state(switched)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.options.close_timeout):
                    await self._group.hand_over()
            raise ends from None

    async def _until_stopped(self) -> None:
        """Wait until all members are to stop, and for the end of the entry at hand."""
        await self._stopping.is_asked.wait()
        await self._stepping.between.acquire()

    async def _stop(self) -> None:
        """Leave a snapshot of all that the bus has, and tell the other members to stop. Raises Stopped."""
        self._stepping.between.release()
        await self._all_on_bus()
        kept, why = False, "it has no snapshots"
        if self._snapshots is not None:
            try:
                await self._snapshots.take_last()
                kept = True
            except EspError as error:
                why = str(error)
        self._stopping.is_said = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.options.close_timeout):
                await self._stopping.is_heard.wait()
        self._stopping.outcome.set_result({"snapshot": kept, "why": "" if kept else why})
        await asyncio.sleep(_ANSWER_LEAVES)
        raise Stopped(f"the engine at {self.address} was stopped" + ("" if kept else f", without a snapshot: {why}"))

    async def _all_on_bus(self) -> None:
        while any(line.m < line.outbox.last for line in self._lines):
            await self._changed.wait()

    async def _leave_state(self, switched: Switched) -> Switched:
        """Leave what the members of the other version begin with; returns what is to be said of it."""
        if not switched.needed:
            return switched
        why = "pass snapshots= with a directory"
        if self._snapshots is not None:
            try:
                await self._snapshots.take_last()
            except EspError as error:
                why = str(error)
            else:
                return switched
        return Switched(
            f"{switched}. It could leave no snapshot there ({why}). If no other member has left one, start a member of "
            "its version again: it steps up to there, leaves a snapshot, and ends",
            version=switched.version,
            place=switched.place,
            needed=True,
        )

    # the group

    def _pulse(self) -> Pulse:
        """What this member says of itself, most of all while it leads."""
        step, chain = self._steps.mark
        snapshot = 0 if self._snapshots is None else round((self._snapshots.last or 0) * 1e6)
        return Pulse(
            self._order.now(), step, chain, self._steps.taken, snapshot, self._stopping.is_said, self._order.positions
        )

    def _reach(self) -> Reach:
        steps = self._steps.taken
        return Reach((*self._order.read, steps), (*self._order.positions, steps))

    def _hear(self, said: Word) -> None:
        """Another member leads: what it says of time and steps. Raises StepsDiffer, and Stopped if all are to stop."""
        membership = self._group.membership
        if said.run != membership.run:
            return
        if isinstance(said, Beat | StandBy):
            self._see(said)
        if not isinstance(said, Beat) or differences(membership.setup, said.setup) is not None:
            return
        before, self._speaker = self._speaker, said.identity.nonce
        if said.pulse is not None and before == self._speaker:  # a single beat may be anybody's
            self._hear_pulse(said.pulse, ours=before == membership.identity.nonce)

    def _hear_pulse(self, pulse: Pulse, *, ours: bool) -> None:
        if ours:
            if pulse.stops:
                self._stopping.is_heard.set()
            return
        if self._group.others_lead():  # it does now; else it did, when it wrote what is read here
            self._order.heard(pulse.now)
            if pulse.stops:
                raise Stopped(f"the engine at {self.address} was stopped")
        if pulse.step and not self._leads():
            self._steps.compare(Mark(pulse.step, pulse.chain))

    def _see(self, said: Beat | StandBy) -> None:
        """A member is there. One leads at a time: who led before it does not."""
        role: Role = "standby" if isinstance(said, StandBy) or said.resigns else "active"
        if role == "active":
            self._members = {nonce: seen._replace(role="standby") for nonce, seen in self._members.items()}
        if len(self._members) >= _MEMBERS:
            del self._members[next(iter(self._members))]
        self._members[said.identity.nonce] = MemberSeen(said.identity.name, role, asyncio.get_running_loop().time())

    def _acked(self, line: Line, id: int) -> None:
        self._group.acked(line, id)
        self._changed.tell()

    def _trouble(self, topic: str, error: BusError | None) -> None:
        if error is None:
            self._notify(Reconnected(topic, "publishing goes on"))
            return
        if isinstance(error, BusUnavailable):
            self._group.trouble(error)
        self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_WRITEFAILED", error))

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._notify(Failure("pubsubFail_APIFAIL", _code(error), error))

    # for the user

    async def wait(self) -> None:
        """Wait until this member has ended: it returns after `aclose`, or when the whole engine was stopped, and raises
        what else ended it.

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

    async def persist(self) -> None:
        """Take a snapshot now, and wait until it counts: until the bus has what this member has computed, and later
        output, or a pause as long as `snapshot_every`, has proven it. StateRefused or EspError if none can be taken.
        """
        self._home.check()
        if self._snapshots is None:
            raise WrongOrder("this engine has no snapshots: pass snapshots= with a directory")
        await self._snapshots.persist()

    async def quiesce(self) -> None:
        """Wait until all that the inputs hold now is stepped on, and what came of it is on the bus. Of a queue, that
        nothing is left of what this member was given. On the member that leads; WrongOrder on another one.
        """
        self._home.check()
        left: Quiet | None = await self._questions.quiet()
        while left is not None:
            if not self._leads():
                raise WrongOrder("this member does not lead: ask the engine, client.quiesce(url)")
            if (left := await self._questions.left_of(left)) is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY):
                        await self._changed.wait()

    async def roles(self) -> AsyncIterator[RoleChange]:
        """The role changes of this member from now on, as they happen; ends after the last, `left`."""
        async for change in self._group.roles.changes():
            yield change

    @property
    def members(self) -> list[tuple[str, Role]]:
        """The members of the engine that were heard in the last seconds, this one first: their names and roles."""
        membership, now = self._group.membership, asyncio.get_running_loop().time()
        self._members = {nonce: seen for nonce, seen in self._members.items() if now - seen.at < _SILENT}
        others = [(seen.name, seen.role) for nonce, seen in self._members.items() if nonce != membership.identity.nonce]
        return [(membership.identity.name, membership.role), *others]

    @property
    def model(self) -> Any:
        """The model as this member has it now, to be looked at and not to be changed. It is another object after a
        snapshot, and it is not the one that the engine was opened with once it was restored.
        """
        step = self._steps.calls.step
        return getattr(step, "__self__", step)

    @property
    def failure(self) -> Exception | None:
        """What ended this member for good; None while it is at work."""
        return self._failure

    @property
    def stats(self) -> EngineStats:
        """How far this member is, and what it is in its group."""
        membership = self._group.membership
        lines = tuple(
            LineStats(topic, line.outbox.last, line.m, len(line.outbox), line.outbox.bytes)
            for topic, line in zip(self._topics, self._lines, strict=True)
        )
        return EngineStats(
            role=membership.role, term=membership.term, steps=self._steps.taken, positions=self._order.positions,
            hindered=self._order.hindered_since is not None,
            lines=lines, last_switch=self._group.roles.last,
            last_snapshot=None if self._snapshots is None else self._snapshots.last,
        )  # fmt: skip

    async def aclose(self) -> None:
        """Take no more steps, let another member lead, and end. Bounded by `close_timeout`; twice is harmless.

        Nothing is lost by it: what this member has computed and not sent, the others compute too, and so does it when
        it is started again. Raises what ended the member before, unless `wait` has.
        """
        self._home.check()
        try:
            if not self._closed and self._stepper is not None and self._failure is None:
                self._stepper.cancel()
                with suppress(TimeoutError, Closed):
                    async with asyncio.timeout(self.options.close_timeout):
                        await self._group.hand_over()
        finally:  # cancelled, it must not lead on: it steps no more
            self._closed = True
            if self._task is not None and self._failure is None:  # else it ends by itself, once it has withdrawn
                self._task.cancel()
        if self._task is not None:
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


def _code(error: Exception) -> str:
    """What ended a member, in the words of the SAS callbacks, and in words like these where they have none."""
    match error:
        case ModelError():
            return "pubsubCode_STEP"
        case Switched():
            return "pubsubCode_SWITCHED"
        case InputLost():
            return "pubsubCode_READEVENTS"
        case _:
            return "pubsubCode_WRITEEVENTS"
