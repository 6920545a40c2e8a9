"""The suite can fail: a right election passes it, and one that is broken on purpose fails the check that is named. On a
virtual clock, so that no machine is too slow for it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from esp_pubsub._news import News
from esp_pubsub.bus import Election
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.testing import election_conformance as elections
from esp_pubsub.testing._election_trial import Reign, Trial
from esp_pubsub.testing.virtual import run_virtual

NOTICE = 0.03
PATIENCE = 0.3
FAULTS = ("die", "lose", "heal", "freeze", "thaw")


class Desk:
    """The service: whoever is first in the line leads. Who does not answer leaves the line after a while."""

    def __init__(self, member: type["Waiter"]) -> None:
        self.kind = member
        self.line: list[Waiter] = []
        self.leader: Waiter | None = None
        self.term = 0
        self.news = News()
        self.members: dict[str, Waiter] = {}

    def enter(self, member: "Waiter", at: int | None = None) -> None:
        if member not in self.line:
            self.line.insert(len(self.line) if at is None else at, member)
            self.settle()

    def leave(self, member: "Waiter") -> None:
        if member in self.line:
            self.line.remove(member)
            self.settle()

    def settle(self) -> None:
        first = self.line[0] if self.line else None
        if first is not self.leader:
            self.leader = first
            self.term += first is not None
        self.news.tell()

    def expire(self, member: "Waiter") -> None:
        if not member.answers:
            self.leave(member)

    # the contest

    @contextlib.asynccontextmanager
    async def member(self, name: str) -> AsyncIterator[Election]:
        member = self.members[name] = self.kind(self)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(member.run())
            await asyncio.sleep(0)
            yield member
            running.cancel()

    async def change(self, name: str, **now: bool) -> "Waiter":
        member = self.members[name]
        vars(member).update(now)
        if not member.answers:
            asyncio.get_running_loop().call_later(NOTICE, self.expire, member)
        self.news.tell()
        return member

    async def die(self, name: str) -> None:
        await self.change(name, linked=False, dead=True)

    async def lose(self, name: str) -> None:
        await self.change(name, linked=False, cut=True)

    async def heal(self, name: str) -> None:
        self.leave(await self.change(name, linked=True))  # a new session

    async def freeze(self, name: str) -> None:
        await self.change(name, still=True)

    async def thaw(self, name: str) -> None:
        await self.change(name, still=False)


class Waiter:
    """A member that stands in the line."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.linked, self.still, self.dead, self.running = True, False, False, True
        self.resigned, self.lost, self.cut = False, False, False

    @property
    def answers(self) -> bool:
        return self.linked and not self.still

    @property
    def leads(self) -> bool:
        return self.running and self.linked and (self.still or self.desk.leader is self)

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.running = False
            self.desk.leave(self)
            self.desk.news.tell()

    async def campaign(self) -> int:
        try:
            while True:
                if self.answers:
                    self.enter()
                    term = await self.won() if self.desk.leader is self else None
                    if term is not None and self.desk.leader is self:
                        return term
                await self.desk.news.wait()
        except asyncio.CancelledError:
            self.cancelled()
            raise

    def enter(self) -> None:
        self.desk.enter(self)

    async def won(self) -> int:
        term = self.desk.term
        await asyncio.sleep(0.001)
        return term

    def cancelled(self) -> None:
        if self.linked:
            self.desk.leave(self)

    async def watch(self) -> Any:
        while self.leads:
            await self.desk.news.wait()
        self.lost = True
        return "lost" if self.linked else "suspended"

    async def resign(self) -> None:
        self.resigned = True
        if self.linked and self.desk.leader is self:
            self.desk.leave(self)


# broken ones


class EverybodyLeads(Waiter):
    async def campaign(self) -> int:
        self.desk.term += 1
        return self.desk.term

    async def watch(self) -> Any:
        await asyncio.Event().wait()


class Flaps(Waiter):
    async def won(self) -> int:
        asyncio.get_running_loop().call_later(0.02, self.desk.leave, self)
        return await super().won()


class NewestFirst(Waiter):
    def enter(self) -> None:
        self.desk.enter(self, 0)


class OneForAll(Desk):
    """All groups share a line."""

    line: Any = []  # noqa: RUF012

    def __init__(self, member: type[Waiter]) -> None:
        super().__init__(member)
        del self.line

    def settle(self) -> None:
        for desk in {member.desk for member in self.line} | {self}:
            Desk.settle(desk)


class KeepsThePlace(Waiter):
    async def resign(self) -> None:
        pass


class OneTerm(Waiter):
    async def won(self) -> int:
        return 7


class OwnTerms(Waiter):
    """Each member counts for itself."""

    count = 0

    async def won(self) -> int:
        self.count += 1
        return self.count


class NoTerms(Waiter):
    async def won(self) -> Any:
        return "first"


class FirstAgain(Waiter):
    def enter(self) -> None:
        self.desk.enter(self, 0 if self.resigned else None)

    async def resign(self) -> None:
        await super().resign()
        self.desk.enter(self, 0)


class WaitsForOthers(Waiter):
    def enter(self) -> None:
        if not self.resigned or self.desk.line:
            super().enter()


class ResignsForOthers(Waiter):
    async def resign(self) -> None:
        if self.desk.leader is not None:
            self.desk.leave(self.desk.leader)


class StaysInLine(Waiter):
    def cancelled(self) -> None:
        pass


class StaysIfFirst(Waiter):
    """Cancelled when it had won already, and not when it stood behind others."""

    def cancelled(self) -> None:
        if self.desk.leader is not self:
            super().cancelled()


class CannotBeCancelled(Waiter):
    async def campaign(self) -> int:
        while True:
            try:
                return await super().campaign()
            except asyncio.CancelledError:
                if self.dead or not self.running:
                    raise


class OutlivesRun(Waiter):
    async def run(self) -> None:
        await asyncio.Event().wait()


class Immortal(Desk):
    def expire(self, member: Waiter) -> None:
        if not member.dead:
            super().expire(member)


class ImmortalStandbys(Desk):
    def expire(self, member: Waiter) -> None:
        if not member.dead or self.leader is member:
            super().expire(member)


class Tires(Desk):
    def settle(self) -> None:
        super().settle()
        if self.term > 12:
            self.leader = None


class NeverTold(Waiter):
    @property
    def leads(self) -> bool:
        return self.running and not self.lost

    async def watch(self) -> Any:
        while self.leads:
            await self.desk.news.wait()


class ComesBackFirst(Desk):
    async def heal(self, name: str) -> None:
        await super().heal(name)
        self.enter(self.members[name], 0)


class OneSession(Desk):
    """Whose link was lost once is never let in again."""

    def enter(self, member: Waiter, at: int | None = None) -> None:
        if not member.cut:
            super().enter(member, at)


class WaitsForTheLink(Waiter):
    async def resign(self) -> None:
        while not self.linked:
            await self.desk.news.wait()


class CampaignRaises(Waiter):
    async def campaign(self) -> int:
        if not self.linked:
            raise BusUnavailable("no link")
        return await super().campaign()


class WatchRaises(Waiter):
    async def watch(self) -> Any:
        found = await super().watch()
        if found == "suspended":
            raise BusUnavailable("no link")
        return found


class ResignRaises(Waiter):
    async def resign(self) -> None:
        if not self.linked:
            raise BusUnavailable("no link")


class RunRaises(Waiter):
    async def run(self) -> None:
        while self.linked:
            await self.desk.news.wait()
        raise BusUnavailable("no link")


class OtherWords(Waiter):
    async def watch(self) -> Any:
        await super().watch()


class WakesAsLeader(Waiter):
    asleep = False

    @property
    def leads(self) -> bool:
        self.asleep = self.asleep or self.still
        return self.running and (self.asleep or super().leads)


class WakesFirst(Desk):
    async def thaw(self, name: str) -> None:
        await super().thaw(name)
        self.leave(self.members[name])
        self.enter(self.members[name], 0)


class TellsLate(Waiter):
    async def watch(self) -> Any:
        found = await super().watch()
        await asyncio.sleep(PATIENCE * 0.9)
        return found


BROKEN: dict[str, list[tuple[type[Desk], type[Waiter]]]] = {
    "of_many_campaigns_only_one_returns": [(Desk, EverybodyLeads), (Desk, Flaps)],
    "newcomers_disturb_no_leader": [(Desk, NewestFirst)],
    "two_groups_do_not_disturb_each_other": [(OneForAll, Waiter)],
    "a_leader_that_resigns_is_followed": [(Desk, KeepsThePlace)],
    "terms_grow_and_none_comes_twice": [(Desk, OneTerm), (Desk, OwnTerms), (Desk, NoTerms)],
    "who_resigns_lets_another_one_go_first": [(Desk, FirstAgain)],
    "who_resigns_alone_leads_again": [(Desk, WaitsForOthers)],
    "resigning_without_leading_does_nothing": [(Desk, ResignsForOthers)],
    "a_cancelled_campaign_never_leads": [(Desk, StaysInLine), (Desk, CannotBeCancelled)],
    "a_campaign_cancelled_at_any_moment_blocks_nobody": [(Desk, StaysIfFirst)],
    "when_run_ends_leadership_ends": [(Desk, OutlivesRun)],
    "a_dead_leader_is_replaced": [(Immortal, Waiter)],
    "a_dead_standby_blocks_nobody": [(ImmortalStandbys, Waiter)],
    "one_of_five_leads_after_twenty_leaders": [(Tires, Waiter)],
    "a_leader_without_link_is_told": [(Desk, NeverTold), (ComesBackFirst, Waiter), (Desk, OtherWords)],
    "a_standby_without_link_disturbs_nobody": [(ComesBackFirst, Waiter)],
    "when_all_links_heal_one_leads": [(OneSession, Waiter)],
    "a_campaign_after_a_loss_can_be_won": [(OneSession, Waiter)],
    "resigning_without_link_is_bounded": [(Desk, WaitsForTheLink)],
    "trouble_is_never_raised": [(Desk, CampaignRaises), (Desk, WatchRaises), (Desk, ResignRaises), (Desk, RunRaises)],
    "a_leader_that_thaws_steps_down": [(Desk, WakesAsLeader)],
    "a_standby_that_thaws_deposes_nobody": [(WakesFirst, Waiter)],
}


def contest(desk: type[Desk], member: type[Waiter], *faults: str) -> elections.Contest:
    made = desk(member)
    hooks: Any = {fault: getattr(made, fault) for fault in faults}
    return elections.Contest(member=made.member, patience=PATIENCE, **hooks)


def report(name: str, desk: type[Desk], member: type[Waiter], *faults: str) -> elections.Report:
    async def open_contest() -> elections.Contest:
        return contest(desk, member, *faults)

    return run_virtual(lambda _: elections.run(open_contest, only=[name], quiet=0.06, limit=5.0))


@pytest.mark.parametrize("name", elections.CHECKS)
def test_a_right_election_passes(name: str) -> None:
    found = report(name, Desk, Waiter, *FAULTS)
    assert found.ok, str(found)


@pytest.mark.parametrize(
    ("name", "desk", "member"),
    [
        pytest.param(name, *pair, id=f"{name}-{pair[0].__name__}-{pair[1].__name__}")
        for name in BROKEN
        for pair in BROKEN[name]
    ],
)
def test_a_broken_one_fails(name: str, desk: type[Desk], member: type[Waiter]) -> None:
    found = report(name, desk, member, *FAULTS)
    assert list(found.failed) == [name], str(found)


def test_every_check_can_fail() -> None:
    assert list(BROKEN) == list(elections.CHECKS)


def test_what_a_maker_cannot_do_is_not_checked() -> None:
    found = report("a_leader_that_thaws_steps_down", Desk, Waiter, "freeze")
    assert [(result.outcome, result.reason) for result in found.results] == [
        ("skipped", "the maker of the contest cannot thaw a member")
    ]


def test_duels_are_counted_and_told() -> None:
    found = report("a_leader_that_thaws_steps_down", Desk, TellsLate, *FAULTS)
    assert found.ok, str(found)
    assert len(found.duels) == 1
    assert PATIENCE / 2 < found.duels[0] < PATIENCE
    assert f"1 passed, 0 failed, 0 skipped; 1 duels, the longest {found.duels[0]:.3f} s" in str(found)


async def test_a_duel_longer_than_patience_fails_whatever_the_check_was() -> None:
    made = Desk(Waiter)
    contest = elections.Contest(member=made.member, patience=1.0)
    async with asyncio.TaskGroup() as tasks:
        trial = Trial(elections.Context(open_contest=asyncio.Event().wait), contest, tasks)
        one, other = await trial.seat(), await trial.seat()
        one.reigns.append(Reign("one", 1, [(0.0, 3.0)]))
        other.reigns.append(Reign("other", 2, [(2.0, 4.0)]))
        trial.audit()
        one.reigns[0].spans.append((3.5, 3.75))
        with pytest.raises(
            elections.Failed, match=r"a duel of 1.25 s, longer than 1 s: one in term 1 and other in term 2"
        ):
            trial.audit()
        assert trial.duels() == [1.25]
        await trial.close()


def test_who_stands_still_fights_no_duel() -> None:
    one, other = Reign("one", 1, [(0.0, 2.0), (6.0, 7.0)]), Reign("other", 2, [(1.5, 6.25)])
    assert one.overlap(other) == other.overlap(one) == 0.75
