"""The definition of an election: whoever passes these checks keeps the contract of `esp_pubsub.bus.Election`.

    import asyncio
    from esp_pubsub.testing import election_conformance
    import my_election

    async def open_contest():                         # a group of which nobody is a member yet, on the same service
        group = my_election.TestGroup()
        hooks = {"die": group.kill, "lose": group.cut, "heal": group.mend}
        return election_conformance.Contest(member=group.member, patience=2.0, **hooks)

    report = asyncio.run(election_conformance.run(open_contest))
    print(report)
    raise SystemExit(not report.ok)

Under pytest, parametrise over `CHECKS`: each is an async callable that takes a `Context` and raises `Failed` (an
AssertionError) or `NotClaimed` (skip it). A check that needs a fault the contest cannot produce does not apply.

No safety rests on an election, so two leaders at once are no failure as such. Every check counts these duels and how
long they were; one that is longer than `patience` is a failure, and so is a term that does not grow, and whatever is
raised, in whichever check it happens.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from . import conformance
from ._election_trial import CHECKS, Check, Contest, Context, Trial, check
from ._trial import Failed, NotClaimed, require

__all__ = ["CHECKS", "Check", "Contest", "Context", "Failed", "NotClaimed", "Report", "Result", "run"]


# in quiet times


@check()
async def of_many_campaigns_only_one_returns(t: Trial) -> None:
    """Of five members that campaign one leads, and goes on leading while nothing happens."""
    await t.keen(5)
    await t.stays(await t.one_leads())


@check()
async def newcomers_disturb_no_leader(t: Trial) -> None:
    """Whoever comes later and campaigns waits, as long as the leader lives."""
    one = await t.seat(keen=False)
    await t.leads(one)
    await t.stays(one)
    await t.keen(2)
    await t.stays(one)


@check()
async def two_groups_do_not_disturb_each_other(t: Trial) -> None:
    """Two groups of one service have a leader each, and what happens in one does not matter in the other."""
    u = await t.another()
    (one, other), (first, second) = await t.led(), await u.led()
    await one.resign()
    await t.leads(other)
    await u.stays(first)
    await first.resign()
    await u.leads(second)
    await t.stays(other)


# resigning


@check()
async def a_leader_that_resigns_is_followed(t: Trial) -> None:
    """When a leader resigns, who campaigns leads within patience, however often."""
    one, other = await t.led()
    for _ in range(4):
        await one.resign()
        await t.leads(other)
        one.campaign()
        one, other = other, one


@check()
async def terms_grow_and_none_comes_twice(t: Trial) -> None:
    """Each leader of a group has a higher term than all before it, whether it led before, or comes new."""
    one = await t.seat(keen=False)
    for _ in range(5):
        await t.leads(one)
        other = await t.seat(keen=False)
        await one.resign()
        one, last = other, one
        await t.leads(one)
        last.campaign()
        await one.resign()
        one = last
    await t.leads(one)
    terms = [reign.term for reign in sorted((*t.reigns, one.reigns[-1]), key=lambda reign: reign.term)]
    require(len(set(terms)) == 11, f"eleven leaders in a row had the terms {terms}")


@check()
async def who_resigns_lets_another_one_go_first(t: Trial) -> None:
    """A leader that resigns and campaigns at once does not lead before a member that campaigns already."""
    one, other = await t.led()
    for _ in range(4):
        await t.stays(one)  # so that the other one's campaign has begun everywhere
        reigns = len(one.reigns)
        await one.resign()
        one.campaign()
        await t.one_leads()
        require(other.leads and len(one.reigns) == reigns, f"{one} resigned, and led again before {other}")
        one, other = other, one


@check()
async def who_resigns_alone_leads_again(t: Trial) -> None:
    """With nobody else there, who resigned and campaigns leads again within patience."""
    one = await t.seat(keen=False)
    for _ in range(3):
        await t.leads(one)
        await one.resign()
        one.campaign()
    await t.leads(one)


@check()
async def resigning_without_leading_does_nothing(t: Trial) -> None:
    """A member that does not lead may resign: the leader goes on, and the next leader is who campaigns."""
    one, other = await t.led()
    await other.resign()
    await other.resign()
    await t.stays(one)
    other.campaign()
    await one.resign()
    await t.leads(other)


# cancellation


@check()
async def a_cancelled_campaign_never_leads(t: Trial) -> None:
    """A campaign that is cancelled while another member leads is over: it gets nothing, and is in nobody's way."""
    one, other = await t.led()
    third = await t.seat(keen=False)
    await other.stop()
    await one.resign()
    await t.leads(third)
    await t.stays(third)
    other.campaign()
    await third.resign()
    await t.leads(other)


@check()
async def a_campaign_cancelled_at_any_moment_blocks_nobody(t: Trial) -> None:
    """Also one that was about to lead: whoever campaigns next leads within patience."""
    one, *others = [await t.seat() for _ in range(3)]
    delays = (0.0, 0.0, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.02)
    for delay, other in zip(delays, itertools.cycle(others), strict=False):
        reigns = len(one.reigns)
        one.campaign()
        await asyncio.sleep(delay)
        await one.stop()
        if len(one.reigns) > reigns:
            await one.resign()
        other.campaign()
        await t.leads(other)
        await other.resign()


@check()
async def when_run_ends_leadership_ends(t: Trial) -> None:
    """A leader whose `run` is cancelled is told so by watch, and another one leads within patience."""
    one, other = await t.led()
    await one.leave(stop=False)
    await t.until(f"watch of {one} should return, its run has ended,", lambda: not one.leads)
    await t.leads(other)
    await t.stays(other)


# deaths


@check("die")
async def a_dead_leader_is_replaced(t: Trial) -> None:
    """When a leader is gone without a word, another one leads within patience."""
    one, other = await t.led()
    await one.die()
    await t.leads(other)
    await t.stays(other)


@check("die")
async def a_dead_standby_blocks_nobody(t: Trial) -> None:
    """A member that dies while it campaigns never leads, nor is it waited for."""
    one, other = await t.led()
    third = await t.seat(keen=False)
    await other.die()
    await t.stays(one)
    await one.resign()
    await t.leads(third)
    await t.stays(third)


@check("die")
async def one_of_five_leads_after_twenty_leaders(t: Trial) -> None:
    """Of twenty leaders in a row every other dies, with a newcomer in its place, and the rest resign."""
    await t.keen(5)
    leader = await t.one_leads()
    for number in range(20):
        if number % 2:
            await leader.die()
            await t.seat(keen=True)
        else:
            await leader.resign()
            leader.campaign(keen=True)
        leader = await t.one_leads(but=leader)
    await t.settles()


# links


@check("lose", "heal")
async def a_leader_without_link_is_told(t: Trial) -> None:
    """Its watch returns within patience, another one leads, and after healing it leads only by a new campaign."""
    one, other = await t.led()
    await one.lose()
    await t.until(f"watch of {one} should return, its link is cut,", lambda: not one.leads)
    await t.leads(other)
    await one.watch()
    await one.heal()
    await one.watch()
    await t.stays(other)
    one.campaign()
    await t.stays(other)
    await other.resign()
    await t.leads(one)


@check("lose", "heal")
async def a_standby_without_link_disturbs_nobody(t: Trial) -> None:
    """Neither when its link is cut nor when it is back; then it can lead."""
    one, other = await t.led()
    await other.lose()
    await t.stays(one)
    await other.heal()
    await t.stays(one)
    await one.resign()
    await t.leads(other)


@check("lose", "heal")
async def when_all_links_heal_one_leads(t: Trial) -> None:
    """With all links cut nobody leads after patience; when they are back, one of those that campaign does."""
    seats = await t.keen(3)
    await t.one_leads()
    for seat in seats:
        await seat.lose()
    await t.until("nobody should lead, all links are cut,", lambda: not t.leaders)
    for seat in seats:
        await seat.heal()
    await t.settles()


@check("lose", "heal")
async def a_campaign_after_a_loss_can_be_won(t: Trial) -> None:
    """Lost, campaigned again, healed: round after round, also with no link when the campaign begins."""
    one = await t.seat(keen=False)
    for number in range(5):
        await t.leads(one)
        await one.lose()
        await t.until(f"watch of {one} should return, its link is cut,", lambda: not one.leads)
        if number % 2:
            await one.heal()
            one.campaign()
        else:
            one.campaign()
            await asyncio.sleep(0.01)
            await one.heal()
    await t.leads(one)


@check("lose", "heal")
async def resigning_without_link_is_bounded(t: Trial) -> None:
    """A leader that resigns when its link is cut has done so within patience, and another one leads."""
    one, other = await t.led()
    await one.lose()
    await one.resign()
    await t.leads(other)
    await one.resign()
    await one.heal()
    await t.stays(other)


@check("lose", "heal")
async def trouble_is_never_raised(t: Trial) -> None:
    """Links come and go in the middle of campaign, watch, resign and run, which raise nothing; then one leads."""
    seats = await t.keen(3)
    for number, seat in zip(range(18), itertools.cycle(seats), strict=False):
        await seat.lose()
        await asyncio.sleep(0.002 * (number % 5))
        if number % 4 == 1:
            await seat.resign()
            seat.campaign(keen=True)
        await asyncio.sleep(0.002 * (number % 3))
        await seat.heal()
        await asyncio.sleep(0.002 * (number % 7))
    t.look()
    await t.settles()


# standing still


@check("freeze", "thaw")
async def a_leader_that_thaws_steps_down(t: Trial) -> None:
    """Another one leads when a leader stands still; when that goes on, its watch returns and it disturbs nobody."""
    one, other = await t.led()
    await one.freeze()
    await t.leads(other)
    await one.thaw()
    await t.until(f"watch of {one} should return, another one leads,", lambda: not one.leads)
    await t.stays(other)


@check("freeze", "thaw")
async def a_standby_that_thaws_deposes_nobody(t: Trial) -> None:
    """A member that stood still has heard nothing of the leader, which is no reason to take its place."""
    one, other = await t.led()
    await other.freeze()
    await t.stays(one)
    await other.thaw()
    await t.stays(one)
    await one.resign()
    await t.leads(other)


# reporting


@dataclass(frozen=True, slots=True)
class Result(conformance.Result):
    """What became of one check, with the seconds that each duel lasted."""

    duels: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Report(conformance.Report):
    """What became of all of them. Its text is a table, and what there was of duels."""

    results: tuple[Result, ...]

    @property
    def duels(self) -> list[float]:
        """How long each duel was, in seconds; the longest comes last."""
        return sorted(length for result in self.results for length in result.duels)

    def __str__(self) -> str:
        found = self.duels
        longest = f", the longest {found[-1]:.3f} s" if found else ""
        return f"{conformance.Report.__str__(self)}; {len(found)} duels{longest}"


async def run(
    open_contest: Callable[[], Awaitable[Contest]], *, only: Iterable[str] | None = None, **settings: Any
) -> Report:
    """Carry out all checks, or `only` those named, one by one. `settings` are the other fields of `Context`."""
    context = Context(open_contest=open_contest, **settings)
    chosen = CHECKS.values() if only is None else [CHECKS[name] for name in only]
    return Report(tuple([await _result(each, context) for each in chosen]))


async def _result(check: Check, context: Context) -> Result:
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    reason, duels = "", list[float]()
    began = time.monotonic()
    try:
        duels = await check(context)
    except NotClaimed as why:
        outcome, reason = "skipped", str(why)
    except Failed as why:
        outcome, reason = "failed", str(why)
    except Exception as error:  # noqa: BLE001  # whatever a maker raises is for the report
        outcome, reason = "failed", f"{type(error).__name__}: {error}"
    return Result(check.name, outcome, reason, time.monotonic() - began, tuple(duels))
