"""Which version of a model runs follows from the entries of the order alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_pubsub.engine.order import Entry, Order, Poisoned, Span, Taken, Version
from esp_pubsub.errors import Switched
from esp_pubsub.wire.frame import frames

WORK = Entry(0, (Taken(0, 1, ()),))
PASSES = Entry(0, (), (Poisoned(1, 0, 1),))


def to(version: str) -> Entry:
    return Entry(0, (), (), version)


def say(order: Order, entry: Entry) -> None:
    order.read(frames(order.propose(entry, 1 << 20).frames, 0, 0)[0])


def after(*entries: Entry, first: int = 2) -> Version:
    """What runs after these entries, of one frame each."""
    runs = Version("1")
    for last, entry in enumerate(entries, first):
        runs = runs.after(entry, last)
    return runs


def test_a_version_runs_from_the_entry_that_says_so() -> None:
    runs = after(WORK, to("2"), WORK)
    assert (runs.name, runs.since, runs.place) == ("2", 3, 3)
    assert runs.before is not None
    assert runs.before.name == "1"


def test_a_switch_to_the_version_that_runs_changes_nothing() -> None:
    assert after(WORK, to("1")) == after(WORK)


def test_a_version_that_did_nothing_is_as_good_as_never_named() -> None:
    other = after(WORK, to("2"), to("3"))
    assert (other.name, other.since, other.place) == ("3", 4, 3)
    back = after(WORK, to("2"), to("1"))
    assert (back.name, back.since, back.place, back.before) == ("1", 4, 1, None)


@pytest.mark.parametrize("between", [WORK, PASSES, Entry(0, ())])
def test_a_switch_back_after_an_entry_begins_where_it_stands(between: Entry) -> None:
    back = after(WORK, to("2"), between, to("1"))
    assert (back.name, back.since, back.place) == ("1", 5, 5)
    assert back.takes("2", 5)
    assert not back.takes("1", 2)  # what it had when it ran before is over
    assert back.takes("1", 6)


def test_who_is_needed_is_the_version_that_runs_and_the_one_before() -> None:
    runs = after(WORK, to("2"), WORK, to("3"), WORK)
    parts = [runs.part(each) for each in "123"]
    assert [None if part is None else part.place for part in parts] == [None, 3, 5]
    assert parts[1] is not None
    assert parts[1].takes("1", 3)  # it may have to begin where it took over itself


def test_an_engine_that_switches_every_day_keeps_no_more_than_two_versions() -> None:
    runs = after(*[entry for at in range(1_000) for entry in (WORK, to(str(at)))])
    assert runs.before is not None
    assert runs.before.before is not None
    assert runs.before.before.before is None


ENTRIES = st.lists(st.sampled_from([WORK, to("1"), to("2"), to("3")]), max_size=12)


@given(ENTRIES)
def test_all_work_since_its_place_is_that_of_the_version_that_runs(entries: list[Entry]) -> None:
    runs = after(*entries)
    work = [(last, after(*entries[: last - 2]).name) for last, entry in enumerate(entries, 2) if entry is WORK]
    assert {name for last, name in work if last > runs.place} <= {runs.name}
    if runs.before is not None:
        assert [name for last, name in work if last < runs.place][-1:] in ([], [runs.before.name])


@given(ENTRIES)
def test_a_member_of_it_passes_what_it_knew_and_leaves_at_the_next_switch(entries: list[Entry]) -> None:
    runs, order = after(*entries), Order(7, 0, 1, 0, Version("1"))
    span = Span(runs.name, runs.since, judged=1 + len(entries))
    for entry in [*entries, WORK]:
        say(order, entry)
        span.check(order)
    say(order, to(runs.name + "!"))
    with pytest.raises(Switched):
        span.check(order)


def test_a_member_of_the_version_before_ends_at_the_switch() -> None:
    order = Order(7, 0, 1, 0, Version("1"))
    span = Span("1", 1, judged=9, end=3)
    for entry in (WORK, to("2")):
        span.check(order)
        say(order, entry)
    with pytest.raises(Switched, match="version '2' of the model from entry 3") as caught:
        span.check(order)
    assert (caught.value.version, caught.value.place) == ("2", 3)


def test_what_a_version_left_that_did_nothing_is_no_snapshot_of_an_earlier_one_of_its_name() -> None:
    runs = after(WORK, to("2"), WORK, to("1"), to("2"))  # version 1 took over at entry 5, and again not at 6
    assert (runs.name, runs.place) == ("2", 3)
    span = Span("1", 1, judged=6, end=runs.place)
    assert span.includes(3)
    assert not span.includes(6)


def test_a_version_that_did_nothing_leaves_no_snapshot_in_the_place_of_the_one_that_is_needed() -> None:
    order, needed = Order(7, 0, 1, 0, Version("1")), []
    for entry, ours in ((WORK, "1"), (to("2"), "1"), (to("1"), "2")):
        say(order, entry)
        try:
            Span(ours).check(order)
        except Switched as switched:
            needed.append(switched.needed)
    assert needed == [True, False]
