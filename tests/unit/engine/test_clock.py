"""The engine's time."""

from __future__ import annotations

import random

from esp_pubsub.engine.clock import Clock
from esp_pubsub.failover.belief import TIME_MAX

WALL = 1_800_000_000_000_000
SECOND = 1_000_000


def test_it_counts_on_with_the_monotonic_clock() -> None:
    clock = Clock(WALL, 100.0)
    assert clock.read(101.0, WALL + SECOND) == WALL + SECOND
    assert clock.read(103.5, WALL + 3_500_000) == WALL + 3_500_000


def test_it_is_drawn_towards_the_wall_clock_by_a_thousandth() -> None:
    hour = 3_600 * SECOND
    for wrong in (hour, -hour):
        clock = Clock(WALL, 0.0)
        found = clock.read(60.0, WALL + 60 * SECOND + wrong) - WALL
        assert abs(found - 60 * SECOND) == 60_000
        assert (found > 60 * SECOND) == (wrong > 0)


def test_once_it_agrees_with_the_wall_clock_it_stays_there() -> None:
    clock = Clock(WALL, 0.0)
    assert clock.read(60.0, WALL + 60 * SECOND + 500) == WALL + 60 * SECOND + 500
    assert clock.read(61.0, WALL + 61 * SECOND + 500) == WALL + 61 * SECOND + 500


def test_it_never_goes_back_whatever_the_clocks_do() -> None:
    dice = random.Random(7)
    clock, before = Clock(WALL, 50.0), 0
    for _ in range(1_000):
        found = clock.read(50.0 + dice.uniform(-5, 500), WALL + dice.randint(-(10**12), 10**12))
        assert found >= before
        before = found


def test_what_a_living_leader_says_counts_if_it_is_later() -> None:
    clock = Clock(WALL, 0.0)
    clock.heard(WALL + 5 * SECOND, 1.0, WALL + SECOND)
    assert clock.read(1.0, WALL + SECOND) == WALL + 5 * SECOND
    clock.heard(WALL, 2.0, WALL + 2 * SECOND)
    assert clock.read(2.0, WALL + 2 * SECOND) == WALL + 6 * SECOND - 1_000


def test_who_heard_nobody_jumps_to_the_wall_clock_and_never_back() -> None:
    clock = Clock(WALL, 0.0)
    assert clock.jump(0.0, WALL + 60 * SECOND) == 60 * SECOND
    assert clock.read(0.0, WALL + 60 * SECOND) == WALL + 60 * SECOND
    assert clock.jump(0.0, WALL) == 0
    assert clock.read(0.0, WALL) == WALL + 60 * SECOND


def test_it_stands_still_where_nobody_gets_but_by_a_forged_entry() -> None:
    clock = Clock(TIME_MAX, 0.0)
    assert clock.read(60.0, WALL) == TIME_MAX
