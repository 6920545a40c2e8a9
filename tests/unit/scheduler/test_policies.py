"""What becomes of times that come late, at once, or all at the same moment."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from esp_pubsub.scheduler.cron import Cron
from esp_pubsub.scheduler.policies import COUNTED, due, jitter, overlaps

SECOND, MINUTE = 1_000_000, 60_000_000
NOON = 1_800_014_400 * SECOND  # a whole hour
MINUTELY = Cron("0 * * * * ?")


def after_an_outage(misfire: str, window: int = 5 * MINUTE, most: int = 3, late: int = 10 * SECOND) -> Any:
    """Ten minutes in which nothing ran, up to some seconds after noon: in minutes to noon, and how many missed."""
    fire, missed = due(MINUTELY, NOON - 9 * MINUTE, NOON + late, misfire, window, most)  # type: ignore[arg-type]
    return [(at - NOON) // MINUTE for at in fire], missed


def test_skip_fires_none_of_what_was_missed() -> None:
    assert after_an_outage("skip") == ([], 10)


def test_latest_fires_the_last_one_that_was_missed() -> None:
    assert after_an_outage("latest") == ([0], 9)


def test_all_fires_what_is_in_the_window_and_at_most_so_many() -> None:
    assert after_an_outage("all") == ([-2, -1, 0], 7)
    assert after_an_outage("all", most=100) == ([-4, -3, -2, -1, 0], 5)
    assert after_an_outage("all", window=0) == ([], 10)


@pytest.mark.parametrize("misfire", ["skip", "latest", "all"])
def test_what_is_on_time_fires_whatever_the_policy(misfire: str) -> None:
    assert after_an_outage(misfire, late=SECOND // 2, window=0)[0] == [0]


@pytest.mark.parametrize("misfire", ["skip", "latest", "all"])
def test_a_year_of_missed_seconds_is_decided_without_looking_at_each(misfire: str) -> None:
    each_second = Cron("* * * * * ?")
    fire, missed = due(each_second, NOON - 365 * 1440 * MINUTE, NOON, misfire, 30 * SECOND, 5)  # type: ignore[arg-type]
    assert missed == COUNTED
    assert fire[-1] == NOON
    assert len(fire) == (5 if misfire == "all" else 2)  # this second and the one before are on time


def test_overlap_leaves_out_or_keeps_one_or_takes_all() -> None:
    idle, busy, queued = (0, 0), (1, 0), (1, 1)
    assert [overlaps("skip", *state) for state in (idle, busy, queued)] == ["fire", "skip", "skip"]
    assert [overlaps("one", *state) for state in (idle, busy, queued)] == ["fire", "wait", "skip"]
    assert [overlaps("all", *state) for state in (idle, busy, queued)] == ["fire", "fire", "fire"]


def test_jitter_is_never_negative_is_the_same_again_and_is_spread() -> None:
    found = [jitter(f"tenant/{n}", 10 * SECOND) for n in range(10_000)]
    assert found == [jitter(f"tenant/{n}", 10 * SECOND) for n in range(10_000)]
    assert min(found) >= 0
    assert max(found) < 10 * SECOND
    assert all(800 < count < 1_200 for count in Counter(late // SECOND for late in found).values())
    assert jitter("tenant/1", 0) == 0
