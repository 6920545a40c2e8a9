"""What the checks of the election suite stand on: a contest, its members and what they do, and bounded waits.

Every wait ends after `patience`. Where nothing must change, it is watched for `quiet`: a short bound, which can miss a
fault but never invents one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeVar

from esp_pubsub._news import News
from esp_pubsub.bus import Election

from ._trial import Failed, NotClaimed, require, short

T = TypeVar("T")
Fault = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A group that holds elections, and the faults that its maker can produce for the member of a name."""

    member: Callable[[str], AbstractAsyncContextManager[Election]]
    """A new member, as if in a process of its own. Its `run` is a task while the context is open and ends with it."""
    patience: float
    """The longest, in seconds, that the election may take to notice that somebody is gone without a word."""
    die: Fault | None = None
    """The member is gone without a goodbye. Its calls may wait forever then, or raise; its context is still left."""
    lose: Fault | None = None
    """Its link to the election's service is cut,"""
    heal: Fault | None = None
    """and comes back."""
    freeze: Fault | None = None
    """It stands still: neither sends nor hears,"""
    thaw: Fault | None = None
    """and goes on."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The election under test."""

    open_contest: Callable[[], Awaitable[Contest]]
    """A new group, independent of the others, on the same service. Names of members are used once in a group."""
    quiet: float | None = None
    """How long the suite watches that nothing changes, by default half of the contest's patience."""
    limit: float = 60.0
    """How long one check may take altogether."""


@dataclass(slots=True, eq=False)
class Reign:
    """From the moment a campaign returned until the member no longer leads, in its own eyes."""

    name: str
    term: int
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end. Who stands still does not lead, so there may be several."""

    def overlap(self, other: Reign) -> float:
        """How long both led."""
        pairs = itertools.product(self.spans, other.spans)
        return sum(max(0.0, min(one[1], two[1]) - max(one[0], two[0])) for one, two in pairs)


class Seat:
    """A member, what it does, and how it led. Its election is called by one task at a time."""

    def __init__(self, trial: Trial, name: str) -> None:
        self.name = name
        self.reigns: list[Reign] = []
        self.trouble: str | None = None
        self._trial = trial
        self._election: Election
        self._since: float | None = None
        self._reigns_now = False
        self._still = False
        self._dead = False
        self._working: asyncio.Task[None] | None = None
        self._sitting: asyncio.Task[None]
        self._leave = asyncio.Event()

    def __repr__(self) -> str:
        return self.name

    async def sit_down(self) -> None:
        """Enter the member's context, in a task of its own so that contexts may be left in any order."""
        seated = asyncio.Event()

        async def sit() -> None:
            try:
                async with self._trial.contest.member(self.name) as self._election:
                    seated.set()
                    await self._leave.wait()
            except Exception as error:  # noqa: BLE001  # whatever it is, it is for the report
                self._raised("run", error)
            finally:
                seated.set()

        self._sitting = self._trial.tasks.create_task(sit())
        await self._trial.within(f"opening {self.name}", seated.wait())
        self._trial.look()

    def _raised(self, call: str, error: Exception) -> None:
        error = _first(error)
        self._complain(f"{call} of {self.name} raised {type(error).__name__}: {short(str(error))}")

    def _complain(self, text: str) -> None:
        if not self._dead:
            self.trouble = self.trouble or text
            self._trial.news.tell()

    # how it leads

    @property
    def leads(self) -> bool:
        """Whether it leads, in its own eyes, and is awake."""
        return self._since is not None

    def _begin(self, term: int) -> None:
        if type(term) is not int:
            self._complain(f"campaign of {self.name} returned {term!r}, which is no term")
        self.reigns.append(Reign(self.name, term))
        self._reigns_now = True
        self._go_on()

    def _go_on(self) -> None:
        if self._reigns_now and not self._still and not self._dead:
            self._since = asyncio.get_running_loop().time()
        self._trial.news.tell()

    def _pause(self) -> None:
        if self._since is not None:
            self.reigns[-1].spans.append((self._since, asyncio.get_running_loop().time()))
        self._since = None
        self._trial.news.tell()

    def _end(self) -> None:
        self._reigns_now = False
        self._pause()

    # what it does

    def campaign(self, *, keen: bool = False) -> None:
        """Campaign and then watch; who is keen campaigns again whenever it leads no more."""
        self._working = self._trial.tasks.create_task(self._work(keen))

    async def _work(self, keen: bool) -> None:
        while True:
            call = "campaign"
            try:
                self._begin(await self._election.campaign())
                call = "watch"
                verdict = await self._election.watch()
                if verdict not in ("suspended", "lost"):
                    self._complain(f"watch of {self.name} returned {verdict!r}, neither suspended nor lost")
            except Exception as error:  # noqa: BLE001  # as above
                self._raised(call, error)
                return
            finally:
                self._end()
            if not keen:
                return
            await asyncio.sleep(0)  # an election that never waits must not stop the world

    async def watch(self) -> str:
        """Watch without a campaign."""
        return await self._trial.within(f"watch of {self.name}", self._election.watch())

    async def stop(self) -> None:
        """Cancel what it does. A leader goes on leading for the others, until it resigns."""
        task, self._working = self._working, None
        if task is not None:
            task.cancel()
            _, waiting = await asyncio.wait([task], timeout=self._trial.contest.patience)
            require(not waiting or self._dead, f"a campaign or watch of {self.name} did not end when cancelled")

    async def resign(self) -> None:
        """Stop, and resign."""
        await self.stop()
        try:
            await self._trial.within(f"resign of {self.name}", self._election.resign())
        except Failed:
            raise
        except Exception as error:  # noqa: BLE001  # as above
            self._raised("resign", error)
        self._trial.look()

    async def leave(self, *, stop: bool = True) -> None:
        """Leave the member's context; `run` is cancelled, here before any other call unless `stop`."""
        try:
            if stop:
                await self.stop()
        finally:
            self._leave.set()
            await self._trial.within(f"leaving the context of {self.name}", asyncio.wait([self._sitting]), 5.0)

    # what happens to it

    async def _fault(self, kind: str) -> None:
        await self._trial.within(kind, getattr(self._trial.contest, kind)(self.name), 5.0)

    async def die(self) -> None:
        """Be gone without a goodbye."""
        self._dead = True
        await self._fault("die")
        self._end()
        await self.stop()

    async def lose(self) -> None:
        """Lose the link."""
        await self._fault("lose")

    async def heal(self) -> None:
        """Have it again."""
        await self._fault("heal")

    async def freeze(self) -> None:
        """Stand still. It does not count as a leader meanwhile."""
        self._still = True
        await self._fault("freeze")
        self._pause()

    async def thaw(self) -> None:
        """Go on, as a leader if it was one and has not been told otherwise."""
        self._still = False
        self._go_on()
        await self._fault("thaw")


class Trial:
    """One run of one check, with one group or several. Every wait ends after `patience`."""

    def __init__(self, context: Context, contest: Contest, tasks: asyncio.TaskGroup) -> None:
        self.contest = contest
        self.quiet = contest.patience / 2 if context.quiet is None else context.quiet
        self.news = News()
        self.seats: list[Seat] = []
        self.others: list[Trial] = []
        self._context = context
        self.tasks = tasks

    async def another(self) -> Trial:
        """The same with another group on the same service."""
        contest = await self.within("open_contest", self._context.open_contest())
        self.others.append(Trial(self._context, contest, self.tasks))
        return self.others[-1]

    async def seat(self, *, keen: bool | None = None) -> Seat:
        """One more member; it campaigns at once if told to be `keen` or not."""
        seat = Seat(self, f"member-{len(self.seats) + 1}")
        self.seats.append(seat)
        await seat.sit_down()
        if keen is not None:
            seat.campaign(keen=keen)
        return seat

    async def keen(self, count: int) -> list[Seat]:
        """So many members that campaign whenever they do not lead."""
        return [await self.seat(keen=True) for _ in range(count)]

    async def led(self) -> tuple[Seat, Seat]:
        """A leader and a standby that campaigns. Neither of the two is keen: it campaigns when it is told to."""
        one = await self.seat(keen=False)
        await self.leads(one)
        return one, await self.seat(keen=False)

    async def close(self) -> None:
        """Everybody leaves, also if one of them does so with trouble."""
        async with contextlib.AsyncExitStack() as stack:
            for trial in self.others:
                stack.push_async_callback(trial.close)
            for seat in self.seats:
                stack.push_async_callback(seat.leave)

    # what must happen, and what must not

    async def within(self, what: str, call: Awaitable[T], least: float = 0.0) -> T:
        """The result of a call that must end within `patience`, or `least` seconds if that is more."""
        seconds = max(least, self.contest.patience)
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                return await call
        except TimeoutError:
            if not scope.expired():
                raise
            raise Failed(f"{what} had not ended after {seconds:g} s") from None

    def look(self) -> None:
        """Fail if an election raised anything."""
        for seat in self.seats:
            require(seat.trouble is None, str(seat.trouble))

    @property
    def leaders(self) -> list[Seat]:
        """Who leads now, in their own eyes."""
        return [seat for seat in self.seats if seat.leads]

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """This must come to hold within `patience`."""
        scope = asyncio.timeout(self.contest.patience)
        try:
            async with scope:
                while not holds():
                    self.look()
                    await self.news.wait()
        except TimeoutError:
            if not scope.expired():
                raise
            raise Failed(f"{what} within {self.contest.patience:g} s; leading: {self.leaders or 'nobody'}") from None
        self.look()

    async def leads(self, seat: Seat) -> None:
        """This one must lead alone."""
        await self.until(f"{seat} should lead alone", lambda: self.leaders == [seat])

    async def one_leads(self, but: Seat | None = None) -> Seat:
        """One must lead, and that another one than `but`; returns who does."""
        who = f"somebody else than {but}" if but else "somebody"
        await self.until(f"{who} should lead alone", lambda: len(self.leaders) == 1 and self.leaders != [but])
        return self.leaders[0]

    async def stays(self, seat: Seat) -> None:
        """This one leads alone, and goes on leading in the same term while nothing happens."""
        reigns = len(seat.reigns)
        scope = asyncio.timeout(self.quiet)
        with contextlib.suppress(TimeoutError):
            async with scope:
                while self.leaders == [seat] and len(seat.reigns) == reigns:
                    self.look()
                    await self.news.wait()
                raise Failed(f"{seat} led, and with nothing happening {self.leaders or 'nobody'} did")
        self.look()

    async def settles(self) -> None:
        """Within patience one leads and goes on leading: after trouble, news on its way may still change who does."""
        await self.within("settling down to one leader", self._settle(), self.contest.patience + self.quiet)

    async def _settle(self) -> None:
        while True:
            leader = await self.one_leads()
            with contextlib.suppress(Failed):
                await self.stays(leader)
                return

    # the balance

    @property
    def reigns(self) -> list[Reign]:
        """All of this group."""
        return [reign for seat in self.seats for reign in seat.reigns if reign.spans]

    def duels(self) -> list[float]:
        """How long each two leaders of a group led at the same time."""
        found = [one.overlap(other) for one, other in itertools.combinations(self.reigns, 2)]
        return [length for length in found if length > 0.0] + [d for trial in self.others for d in trial.duels()]

    def audit(self) -> None:
        """Terms grow, and no duel was longer than `patience`."""
        for trial in self.others:
            trial.audit()
        self.look()
        longest = self.contest.patience
        for one, other in itertools.permutations(self.reigns, 2):
            both = f"{one.name} in term {one.term!r} and {other.name} in term {other.term!r}"
            if one.spans[-1][1] <= other.spans[0][0]:
                require(one.term < other.term, f"terms do not grow: first {both}")
            require(one.term != other.term, f"two leaders of one term: {both}")
            length = one.overlap(other)
            require(length <= longest, f"a duel of {length:.3g} s, longer than {longest:g} s: {both}")


Body = Callable[[Trial], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: an async callable that takes a `Context`; raises Failed, NotClaimed, or what a maker's hook raised."""

    name: str
    claim: str
    needs: tuple[str, ...]
    body: Body

    async def __call__(self, context: Context) -> list[float]:
        """Carry it out once. Returns the lengths of the duels, in seconds."""
        scope = asyncio.timeout(context.limit)
        try:
            async with scope:
                return await self._carry_out(context)
        except TimeoutError:
            if not scope.expired():
                raise
            raise Failed(f"the check had not ended after {context.limit:g} s") from None
        except ExceptionGroup as group:
            raise _first(group) from group

    async def _carry_out(self, context: Context) -> list[float]:
        contest = await context.open_contest()
        for need in self.needs:
            if getattr(contest, need) is None:
                raise NotClaimed(f"the maker of the contest cannot {need} a member")
        async with asyncio.TaskGroup() as tasks:
            trial = Trial(context, contest, tasks)
            try:
                await self.body(trial)
            except BaseException:
                with contextlib.suppress(Failed):  # what made the check fail says more
                    await trial.close()
                raise
            await trial.close()
        trial.audit()
        return trial.duels()


def _first(error: Exception) -> Exception:
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


CHECKS: dict[str, Check] = {}
"""All checks by name."""


def check(*needs: str) -> Callable[[Body], Body]:
    """Enter a function as a check. `needs` are faults without which it is skipped."""

    def enter(body: Body) -> Body:
        name = body.__name__
        CHECKS[name] = Check(name, (body.__doc__ or "").strip(), needs, body)
        return body

    return enter
