"""Whether an engine's leader goes on in its inputs: what a standby sees, and what the leader sees itself."""

from __future__ import annotations

from esp_pubsub.failover.course import Course, Reach

PATIENCE = 5.0


def reach(read: int, taken: int) -> Reach:
    return Reach((read, 0), (taken, 0))


def challenges(course: Course, read: int, until: float, since: float = 0.0) -> list[float]:
    """When it challenges, asked every half second."""
    moments = [since + 0.5 * at for at in range(int(2 * (until - since)) + 1)]
    return [now for now in moments if course.challenges(reach(read, 0), now)]


def test_a_leader_that_stays_behind_what_a_standby_has_read_is_challenged_again_and_again() -> None:
    course = Course(PATIENCE)
    course.heard(3, (10, 0), 0.0)
    assert challenges(course, 11, 12.0) == [5.0, 10.0]
    assert course.term == 3


def test_who_has_read_no_more_than_the_leader_has_taken_challenges_nobody() -> None:
    course = Course(PATIENCE)
    course.heard(3, (10, 0), 0.0)
    assert challenges(course, 10, 20.0) == []
    assert challenges(course, 11, 24.9, since=20.5) == []  # what comes now the leader may just take


def test_nobody_is_challenged_of_whom_nothing_was_heard() -> None:
    assert challenges(Course(PATIENCE), 10, 20.0) == []


def test_a_leader_that_goes_on_in_anything_is_not_challenged() -> None:
    course = Course(PATIENCE)
    for now in range(20):
        course.heard(3, (10, now), float(now))
        assert not course.challenges(reach(1_000, 0), now + 0.9)


def test_a_late_beat_of_an_earlier_term_says_nothing() -> None:
    course = Course(PATIENCE)
    course.heard(3, (10, 0), 0.0)
    course.heard(2, (4, 0), 4.0)
    assert challenges(course, 11, 6.0) == [5.0]


def test_a_leader_yields_to_who_has_read_more_if_it_has_not_moved() -> None:
    course = Course(PATIENCE)
    assert not course.yields((11, 0), 0.0)
    for now in (0.0, 1.0, 2.0):
        course.moves((10, 0), now)
    assert not course.yields((10, 0), 9.0)
    assert not course.yields((11, 0), 2.4)
    assert course.yields((11, 0), 2.5)
    course.moves((10, 1), 9.0)  # a step
    assert not course.yields((11, 1), 9.0)


def test_a_leader_that_leads_again_has_its_time() -> None:
    course = Course(PATIENCE)
    course.moves((10, 0), 0.0)
    course.begins()
    course.moves((10, 0), 100.0)
    assert not course.yields((11, 0), 102.0)
    assert course.yields((11, 0), 102.5)
