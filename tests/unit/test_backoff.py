"""The pauses between attempts."""

import pytest

from esp_pubsub.backoff import Backoff


@pytest.mark.parametrize(("drawn", "part"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_each_pause_is_twice_the_last_one_up_to_the_longest_and_partly_drawn(drawn: float, part: float) -> None:
    backoff = Backoff(0.1, 0.5, lambda: drawn)
    assert [backoff.next() for _ in range(5)] == pytest.approx([part * pause for pause in (0.1, 0.2, 0.4, 0.5, 0.5)])


def test_after_a_success_it_begins_with_the_first_pause_again() -> None:
    backoff = Backoff(0.1, 2.0, lambda: 1.0)
    backoff.next()
    backoff.next()
    backoff.reset()
    assert backoff.next() == 0.1


def test_two_who_lost_the_same_bus_do_not_come_back_together() -> None:
    one, other = Backoff(1, 1), Backoff(1, 1)
    assert [one.next() for _ in range(9)] != [other.next() for _ in range(9)]
