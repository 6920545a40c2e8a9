"""A check of elections is judged again if what they rest on stood still. On a virtual clock: nothing here is slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from esp_pubsub.bus import Bus
from esp_pubsub.testing import election_conformance as elections
from esp_pubsub.testing.faults import Faults
from esp_pubsub.testing.virtual import Init, run_virtual
from tests.conformance.test_broken_elections import BROKEN, FAULTS, Desk, NewestFirst, Waiter, contest
from tests.support.contests import Round, Service, judge, rounds_of_a_bus

STALL = 0.03
CHECK = "newcomers_disturb_no_leader"


class Trials:
    """What became of a check that was judged: how often it was tried, the error, and the seconds it took."""

    def __init__(self, *pairs: tuple[type[Desk], type[Waiter]]) -> None:
        """An election for each time, the last one for all that follow."""
        self.pairs = pairs
        self.count = 0
        self.failed: elections.Failed | None = None
        self.seconds = 0.0

    async def open_contest(self) -> elections.Contest:
        self.count += 1
        return contest(*self.pairs[min(self.count, len(self.pairs)) - 1], *FAULTS)

    async def judged(self, name: str, service: Service, **settings: float) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        settings = {"quiet": 0.06, "stall": STALL, "limit": 5.0, **settings}
        try:
            await judge(name, self.open_contest, service, **settings)
        except elections.Failed as failed:
            self.failed = failed
        self.seconds = loop.time() - begun


def answering(*seconds: float) -> Service:
    """A service whose answers take so long, the last for all that follow."""

    @contextlib.asynccontextmanager
    async def service() -> AsyncIterator[Round]:
        asked = iter(seconds)
        yield lambda: asyncio.sleep(next(asked, seconds[-1]))

    return service


CASES = [
    pytest.param(name, pair, id=f"{name}-{pair[0].__name__}-{pair[1].__name__}")
    for name in BROKEN
    if name != "two_groups_do_not_disturb_each_other"  # opens two contests at each time
    for pair in BROKEN[name]
]


@pytest.mark.parametrize(("name", "pair"), CASES)
def test_a_broken_election_fails_the_first_time_where_the_service_answers(name: str, pair: Any) -> None:
    trials = Trials(pair)
    run_virtual(lambda _: trials.judged(name, answering(0.001)))
    assert (trials.count, trials.failed is not None) == (1, True)


def test_a_check_that_failed_while_the_service_stood_still_is_repeated() -> None:
    trials = Trials((Desk, NewestFirst), (Desk, Waiter))
    run_virtual(lambda _: trials.judged(CHECK, answering(0.001, 0.001, STALL, 0.001)))
    assert (trials.count, trials.failed) == (2, None)


def test_a_check_that_failed_while_the_service_still_owes_an_answer_is_repeated() -> None:
    trials = Trials((Desk, NewestFirst), (Desk, Waiter))
    run_virtual(lambda _: trials.judged(CHECK, answering(0.001, 100.0)))
    assert (trials.count, trials.failed) == (2, None)


def test_what_stood_still_the_first_time_excuses_nothing_the_second_time() -> None:
    trials = Trials((Desk, NewestFirst))
    run_virtual(lambda _: trials.judged(CHECK, answering(0.001, 0.001, STALL, 0.001)))
    assert (trials.count, trials.failed is not None) == (2, True)


def test_a_check_that_passed_while_the_service_stood_still_has_passed() -> None:
    trials = Trials((Desk, Waiter))
    run_virtual(lambda _: trials.judged(CHECK, answering(0.001, STALL)))
    assert (trials.count, trials.failed) == (1, None)


def test_a_broken_election_fails_in_bounded_time_where_the_service_always_stands_still() -> None:
    trials = Trials((Desk, NewestFirst))
    run_virtual(lambda _: trials.judged(CHECK, answering(STALL), altogether=20.0))
    assert trials.failed is not None and "the service took 0.0" in trials.failed.__notes__[0]
    assert trials.count > 1 and trials.seconds < 20.0


@pytest.mark.parametrize("harm", ["no confirmation", "nothing to read", "no link"])
def test_a_bus_stands_still_while_it_does_not_confirm_or_is_not_there(harm: str) -> None:
    async def scene(init: Init) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        async with init() as client:
            faults = Faults(client.bus)

            async def open_bus() -> Bus:
                return faults

            async with rounds_of_a_bus(open_bus)() as ask:
                begun = loop.time()
                await ask()
                quick = loop.time() - begun
                if harm == "no link":
                    faults.lose_link()
                else:
                    faults.hang("confirmed" if harm == "no confirmation" else "read")
                loop.call_later(1.0, faults.heal)
                loop.call_later(1.0, faults.restore)
                begun = loop.time()
                await ask()
                return quick, loop.time() - begun

    quick, late = run_virtual(scene)
    assert quick < 0.1 and late >= 1.0
