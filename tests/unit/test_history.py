"""The history checker finds every kind of fault that is put into a good history, and none in a good one."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_pubsub.notices import Joined, Missed, NewRun, Reconnected
from esp_pubsub.testing.history import (
    Confirmed,
    Delivered,
    Ended,
    Opened,
    Present,
    Published,
    Record,
    check,
    digest,
    line,
    read,
    told,
)

SOURCE, END = 7, 40


def published(
    id: int, *, run: int = 0, member: str = "a", outcome: str = "acked", at: float | None = None
) -> Published:
    return Published(member, SOURCE, run, id, digest((run, id)), outcome, id / 100 if at is None else at)


def delivered(id: int, *, run: int = 0, name: str = "s", at: float | None = None) -> Delivered:
    return Delivered(name, SOURCE, run, id, digest((run, id)), id / 100 + 0.001 if at is None else at)


def good(end: int = END) -> list[Record]:
    """Two members, one reader without a group, one of a group that was restarted and got two blocks again."""
    records: list[Record] = [Opened("s", 0.0), Opened("g", 0.0)]
    records += [published(id, member=member, outcome=how) for id in range(1, end + 1)
                for member, how in (("a", "unknown"), ("a", "acked"), ("b", "unknown"), ("b", "covered"))]  # fmt: skip
    records += [delivered(id) for id in range(1, end + 1)]
    half = end // 2
    records += [delivered(id, name="g") for id in range(1, half + 1)]
    records += [Confirmed("g", SOURCE, 0, half - 2, half / 100 + 0.001), Opened("g", half / 100 + 0.001)]
    records += [delivered(id, name="g", at=id / 100 + 0.002) for id in range(half - 1, end + 1)]
    return records


def kinds(records: list[Record], **how: object) -> set[str]:
    return {fault.kind for fault in check(records, **how).faults}


def at(records: list[Record], id: int, name: str = "s") -> int:
    return next(i for i, r in enumerate(records) if isinstance(r, Delivered) and (r.subscriber, r.id) == (name, id))


def test_a_good_history_passes() -> None:
    verdict = check(good(), progress=0.5, ends={(SOURCE, 0): END})
    assert verdict.ok, verdict
    assert (verdict.published, verdict.acked, verdict.delivered, verdict.missed) == (END, END, 2 * END + 2, 0)
    assert "faults: none" in str(verdict)


def test_records_survive_the_way_through_a_file() -> None:
    records = [*good(), told("s", Missed(SOURCE, 0, 3, 5), 1.0), Present("a", 0.0, 9.0)]
    assert list(read(line(record) for record in records)) == records
    lines = [line(record) for record in records]
    assert list(read([*lines, lines[0][:20]])) == records, "the last words of a process that was killed are passed over"
    for wrong in ("{}\n", "[]\n", "no\n", json.dumps({"record": "Opened", "what": 1}) + "\n"):
        with pytest.raises(ValueError, match="no record of a history"):
            list(read([wrong]))


def test_notices_become_records() -> None:
    assert told("s", Missed(1, 2, 3, 5), 9.0).__reduce__ is not None
    assert (told("s", Missed(1, 2, 3, 5), 9.0).first, told("s", Missed(1, 2, 3, 5), 9.0).last) == (3, 5)
    assert (told("s", Joined(1, 2, 3), 9.0).first, told("s", NewRun(1, 2, 3), 9.0).run) == (3, 3)
    assert told("s", Reconnected("t", "x"), 9.0).notice == "Reconnected"


def test_a_lost_block_is_found_in_the_middle_and_at_the_end() -> None:
    records = good()
    del records[at(records, END)]
    assert kinds(records) == {"lost"}
    assert kinds(records, ends={(SOURCE, 0): END}) == {"lost", "unfinished"}
    records = good()
    del records[at(records, 17)]
    found = check(records)
    assert [(f.kind, f.first, f.last, f.subscriber) for f in found.faults] == [
        ("lost", 17, 17, "s"), ("gap", 17, 17, "s"),
    ]  # fmt: skip
    assert found.count("lost") == 1 and "lost: s" in str(found)


def test_a_gap_of_blocks_that_nobody_acknowledged_is_no_loss_but_a_gap() -> None:
    records = [r for r in good() if not (isinstance(r, Published) and r.id == 17 and r.outcome != "unknown")]
    records = [r for r in records if not (isinstance(r, Delivered) and r.id == 17)]
    assert kinds(records) == {"gap"}


def test_what_is_told_as_missed_is_counted_and_no_fault() -> None:
    records = [r for r in good() if not (isinstance(r, Delivered) and r.subscriber == "s" and 5 <= r.id <= 9)]
    records.insert(2, told("s", Missed(SOURCE, 0, 5, 9), 0.0))
    verdict = check(records)
    assert verdict.ok, verdict
    assert verdict.missed == 5
    records.append(delivered(7, at=1.0))
    assert kinds(records) == {"doubled"}, "missed means that it does not come"


def test_doubles_are_found() -> None:
    records = good()
    records.insert(at(records, 20) + 1, delivered(20))
    records.insert(at(records, 30) + 1, delivered(3))
    verdict = check(records)
    assert [(f.kind, f.first) for f in verdict.faults] == [("doubled", 3), ("doubled", 20)]


def test_a_confirmed_block_that_comes_again_is_a_double() -> None:
    records = good()
    again = at(records, END // 2 - 1, "g")
    second = next(i for i in range(again + 1, len(records)) if records[i] == replace(records[again], at=records[i].at))
    records.insert(second, delivered(END // 2 - 2, name="g", at=records[second].at))
    assert kinds(records) == {"doubled"}


def test_a_restarted_reader_may_not_leave_out_what_it_had_not_been_given() -> None:
    records = good()
    second = max(i for i, r in enumerate(records) if isinstance(r, Opened)) + 1
    del records[second : second + 3]
    assert kinds(records) == {"gap", "lost"}


def test_disorder_is_found() -> None:
    records = good()
    first, second = at(records, 12), at(records, 13)
    records[first], records[second] = records[second], records[first]
    assert "reordered" in kinds(records)


def test_invented_content_is_found_wherever_it_comes_from() -> None:
    records = good()
    records[at(records, 12)] = replace(delivered(12), digest="00")
    assert kinds(records) == {"invented"}
    assert kinds([*good(), delivered(END + 1)]) == {"invented"}


def runs(zombie: bool) -> list[Record]:
    records = [*good()]
    records += [published(id, run=1, member="c", at=1 + id / 100) for id in range(1, 11)]
    for name in "sg":
        records += [delivered(id, run=1, name=name, at=1.001 + id / 100) for id in range(1, 11)]
    if zombie:
        records += [published(END + 1, at=2.0)]
    return records


def test_a_new_run_replaces_the_old_one_and_a_zombies_blocks_are_not_owed() -> None:
    verdict = check(runs(zombie=True), progress=5.0, ends={(SOURCE, 1): 10})
    assert verdict.ok, verdict
    assert kinds([*runs(zombie=True), delivered(END + 1, at=2.1)]) == {"stale"}
    records = [r for r in runs(zombie=False) if not (isinstance(r, Delivered) and (r.run, r.id) == (0, END))]
    assert kinds(records) == {"lost"}, "what the old run had acknowledged before is owed"


def test_a_reader_that_joins_late_is_owed_what_comes_from_there() -> None:
    records: list[Record] = [*good(), Opened("late", 0.2), told("late", Joined(SOURCE, 0, 21), 0.2)]
    records += [delivered(id, name="late") for id in range(21, END + 1)]
    assert check(records, progress=0.5).ok
    assert kinds([r for r in records if not (isinstance(r, Delivered) and (r.subscriber, r.id) == ("late", 21))]) == {
        "gap", "lost",
    }  # fmt: skip


def test_a_long_pause_counts_only_while_everybody_needed_is_there() -> None:
    records = [replace(r, at=r.at + 3) if isinstance(r, Delivered) and r.id > 20 else r for r in good()]
    assert kinds(records, progress=2.0) == {"stuck"}
    assert kinds(records, progress=4.0) == set()
    away: list[Record] = [Present(name, 0.0, 0.21) for name in "ab"] + [Present(name, 3.0, 9.0) for name in "ab"]
    assert kinds([*records, *away], progress=2.0) == set(), "no member was there"
    assert kinds([*records, *away, Present("b", 0.5, 2.9)], progress=2.0) == {"stuck"}
    slept: list[Record] = [Present(n, 0.0, 0.2) for n in "sg"] + [Present(n, 3.0, 9.0) for n in "sg"]
    assert kinds([*records, *slept], progress=2.0) == set(), "the reader was not there"


def test_a_reader_that_never_gets_anything_is_stuck() -> None:
    records = [*good(), Opened("new", 0.0), Present("new", 0.0, 4.0)]
    assert kinds(records, progress=2.0, ends={(SOURCE, 0): END}) == {"lost", "stuck", "unfinished"}


FAULTS = {
    "lost": lambda records, i, dice: records.pop(i),
    "doubled": lambda records, i, dice: records.insert(dice.randint(i + 1, len(records)), records[i]),
    "invented": lambda records, i, dice: records.__setitem__(i, replace(records[i], digest="f" * 16)),
    "stale": lambda records, i, dice: records.append(replace(records[i], run=-1)),
}


@settings(max_examples=60, deadline=None)
@given(st.integers(6, 60), st.integers(0), st.sampled_from(sorted(FAULTS)))
def test_any_single_corruption_is_found(end: int, seed: int, fault: str) -> None:
    dice = random.Random(seed)
    records = good(end)
    assert check(records).ok
    which = [i for i, r in enumerate(records) if isinstance(r, Delivered) and r.subscriber == "s"]
    FAULTS[fault](records, dice.choice(which), dice)
    assert fault in kinds(records)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), max_size=12))
def test_any_number_of_restarts_passes_and_a_lost_confirm_is_not_held_against_it(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Each life delivers some blocks and confirms some; the record of the confirm may be lost in the kill."""
    records: list[Record] = [published(id) for id in range(1, 200)]
    stored = 0
    for count, confirmed, noted in steps:
        records.append(Opened("g", 0.0))
        records += [delivered(id, name="g") for id in range(stored + 1, stored + count + 1)]
        if confirmed:
            stored += min(count, confirmed)
            if noted:
                records.append(Confirmed("g", SOURCE, 0, stored, 0.0))
    assert not kinds(records) - {"lost"}


def test_a_reader_that_was_ended_is_owed_nothing_more_but_order() -> None:
    records = [r for r in good() if not (isinstance(r, Delivered) and r.subscriber == "s" and r.id > 10)]
    ends = {(SOURCE, 0): END}
    assert kinds(records, ends=ends, progress=0.1) == {"lost", "unfinished", "stuck"}
    assert kinds([*records, Ended("s", 0.11)], ends=ends, progress=0.1) == set()
    del records[at(records, 5)]
    assert kinds([*records, Ended("s", 0.11)], ends=ends) == {"lost", "gap"}
    assert kinds([*records, Ended("s", 0.11), Opened("s", 0.2)], ends=ends) == {"lost", "gap", "unfinished"}
