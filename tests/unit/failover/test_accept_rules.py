"""The accept rule by examples: runs, each rule of PROTOCOL 4, resume, restart, the bound on sources."""

import random
from itertools import product

import pytest

from esp_pubsub.failover.accept import Accept, Dropped, Outcome
from esp_pubsub.notices import Forgotten, InputDiffers, Joined, Missed, NewRun
from esp_pubsub.wire.frame import BLOCK, ROWS, Frame, frames, parse, seal
from tests.unit.failover.accept_reader import START, SUFFIX, Reader, b, beat, block

# Runs.


@SUFFIX
@START
def test_any_arrival_of_two_runs_never_goes_back(suffix_only: bool, from_start: bool) -> None:
    alphabet = [block(i, run=r) for r in (0, 1) for i in (1, 2)] + [beat(1, run=1), block(3, 2, run=1)]
    for log in product(alphabet, repeat=5):
        reader = Reader(suffix_only=suffix_only, from_start=from_start).feed_all(log)
        runs = [o.run for o in reader.told if isinstance(o, Frame)]
        assert runs == sorted(runs)
        assert sum(isinstance(o, NewRun) for o in reader.told) <= 1


def test_a_higher_run_is_told_and_begins_at_block_1() -> None:
    reader = Reader(suffix_only=True).feed_all([block(1), block(2)])
    assert reader.feed(block(1, run=5)) == (NewRun(7, 0, 5), block(1, run=5))
    assert reader.feed(block(3)) == (Dropped(block(3), "stale"),)
    assert reader.feed(beat(3)) == (Dropped(beat(3), "stale"),)
    assert reader.feed(block(2, run=5)) == (block(2, run=5),)


@pytest.mark.parametrize(("run", "source"), [(1, 7), (0, 8)])
def test_a_link_that_fits_does_not_make_another_run_or_source_the_next_block(run: int, source: int) -> None:
    """Links are 32 bits that anybody can write."""
    one = seal(BLOCK, ROWS, count=1, source=source, run=run, id=3, link=block(2).chain, body=b"x")
    other = parse(frames([one], 0, 0)[0])
    accept = Accept(suffix_only=True, from_start=True)
    for frame in (block(1), block(2)):
        accept.receive(frame)
    assert accept.receive(other)[-2:] == (Missed(source, run, 1, 2), other)
    assert accept.sources[source].last == 3
    if source != 7:
        assert accept.receive(block(3)) == (block(3),)


def test_what_was_held_of_the_lower_run_is_released() -> None:
    reader = Reader(suffix_only=False).feed_all([block(1), block(3)])
    assert reader.feed(block(1, run=1)) == (Dropped(block(3), "stale"), NewRun(7, 0, 1), block(1, run=1))


def test_the_first_blocks_of_a_new_run_that_did_not_come_are_missed() -> None:
    reader = Reader(suffix_only=True).feed_all([block(1)])
    assert reader.feed(block(3, run=1)) == (NewRun(7, 0, 1), Missed(7, 1, 1, 2), block(3, run=1))
    joiner = Reader(suffix_only=True, from_start=False).feed_all([block(5)])
    assert joiner.feed(block(3, run=1)) == (NewRun(7, 0, 1), Missed(7, 1, 1, 2), block(3, run=1))


def test_a_run_that_was_there_when_the_reader_joined_is_joined_and_not_missed() -> None:
    accept = Accept(suffix_only=True, from_start=False)
    accept.joined_at_run[7] = 1
    assert accept.receive(block(9)) == (Joined(7, 0, 9), block(9))
    assert accept.receive(block(4, run=1)) == (NewRun(7, 0, 1), Joined(7, 1, 4), block(4, run=1))
    assert accept.receive(block(3, run=2)) == (NewRun(7, 1, 2), Missed(7, 2, 1, 2), block(3, run=2))


# What was delivered on another frame's proof: a frame that is dropped and proves it too says so.


def admitted(*log: Frame, from_start: bool = True) -> list[int]:
    """What each frame that is dropped says."""
    accept = Accept(suffix_only=False, from_start=from_start)
    return [o.admits for frame in log for o in accept.receive(frame) if isinstance(o, Dropped)]


def test_a_frame_admits_the_block_that_needed_its_proof_and_one_that_proves_less_does_not() -> None:
    assert admitted(block(1), block(4), beat(2), beat(3), beat(2), beat(9)) == [0, 4, 0, 4]
    assert admitted(block(3, 1), beat(2), from_start=False) == [3]
    assert admitted(block(1), block(3), block(3, 2), block(3, 2), block(3)) == [3, 3, 0]


def test_a_frame_admits_nothing_where_blocks_came_in_order_or_proved_themselves() -> None:
    assert admitted(block(1), block(3), block(2), beat(3), block(2, 1)) == [0, 0]
    assert admitted(block(1), block(4, 3), beat(4)) == [0]
    assert admitted(block(5, 4), beat(5), from_start=False) == [0]
    assert admitted(block(2), block(1), beat(2), from_start=False) == [0]
    assert admitted(block(1), block(3), block(3, 2, "B"), from_start=True) == [0]  # another input: it proves nothing


def test_a_held_block_that_admits_says_so_when_a_new_run_ends_it() -> None:
    held = block(6, 3)
    assert admitted(block(1), block(4), held, block(1, run=1), beat(5, run=1)) == [4, 0]


# Each rule of PROTOCOL 4 by an example.

A = block
EXAMPLES: list[tuple[str, bool, bool, list[Frame], list[Outcome]]] = [
    ("in order", True, True, [A(1), A(2)], [A(1), A(2)]),
    ("a double", True, True, [A(1), A(1)], [A(1), Dropped(A(1), "double")]),
    ("a gap on a suffix-only bus is told at once", True, True, [A(1), A(4)], [A(1), Missed(7, 0, 2, 3), A(4)]),
    ("a start that did not come is told at once", True, True, [A(3)], [Missed(7, 0, 1, 2), A(3)]),
    ("a gap on any bus is held", False, True, [A(1), A(3)], [A(1)]),
    ("and filled", False, True, [A(1), A(3), A(2)], [A(1), A(2), A(3)]),
    ("a held one twice", False, True, [A(2), A(2), A(1)], [Dropped(A(2), "double"), A(1), A(2)]),
    ("what settled proves is missed", False, True, [A(1), A(4, 3)], [A(1), Missed(7, 0, 2, 3), A(4, 3)]),
    ("settled proves no more than its own predecessor", False, True, [A(2, 9), A(1)],
     [Missed(7, 0, 1, 1), A(2, 9), Dropped(A(1), "double")]),
    ("settled proves in part", False, True, [A(1), A(5, 2)], [A(1), Missed(7, 0, 2, 2)]),
    ("held ones between the missed", False, True, [A(1), A(3), A(5), A(7, 6)],
     [A(1), Missed(7, 0, 2, 2), A(3), Missed(7, 0, 4, 4), A(5), Missed(7, 0, 6, 6), A(7, 6)]),
    ("a beat proves", False, True, [A(1), A(3), beat(2)],
     [A(1), Missed(7, 0, 2, 2), A(3), Dropped(beat(2), "beat", 3)]),
    ("a beat proves nothing of what nobody sees", False, True, [A(1), beat(3), A(4, 3)],
     [A(1), Dropped(beat(3), "beat"), Missed(7, 0, 2, 3), A(4, 3)]),
    ("a beat that is forged is not believed", False, True, [A(1), A(3), beat(1 << 63), A(4, 3)],
     [A(1), Missed(7, 0, 2, 2), A(3), Dropped(beat(1 << 63), "beat", 3), A(4, 3)]),
    ("a beat of a higher run begins none", False, True, [A(1), beat(1 << 63, run=9), A(2)],
     [A(1), Dropped(beat(1 << 63, run=9), "beat"), A(2)]),
    ("a beat of what was delivered says nothing", False, True, [A(1), beat(1)], [A(1), Dropped(beat(1), "beat")]),
    ("a beat proves nothing on a suffix-only bus", True, True, [A(1), beat(1 << 63), A(2)],
     [A(1), Dropped(beat(1 << 63), "beat"), A(2)]),
    ("a later copy of what is held proves more", False, True, [A(1), A(3), A(3, 2)],
     [A(1), Missed(7, 0, 2, 2), A(3), Dropped(A(3, 2), "double", 3)]),
    ("what comes after it was missed is a double", True, True, [A(2), A(1)],
     [Missed(7, 0, 1, 1), A(2), Dropped(A(1), "double")]),
    ("a joiner begins with what it sees", True, False, [A(5), A(6)], [Joined(7, 0, 5), A(5), A(6)]),
    ("a joiner from block 1 on", True, False, [A(1)], [Joined(7, 0, 1), A(1)]),
    ("a joiner drops what is older than its beginning", True, False, [A(5), A(4)],
     [Joined(7, 0, 5), A(5), Dropped(A(4), "double")]),
    ("a joiner is told of holes behind its beginning", True, False, [A(5), A(7)],
     [Joined(7, 0, 5), A(5), Missed(7, 0, 6, 6), A(7)]),
    ("a joiner on any bus waits for what may still come", False, False, [A(5, 2), A(3, 2), A(4, 2)],
     [Joined(7, 0, 3), A(3, 2), A(4, 2), A(5, 2)]),
    ("a joiner on any bus misses nothing from before", False, False, [A(5, 2), A(6, 4)],
     [Joined(7, 0, 5), A(5, 2), A(6, 4)]),
    ("a joiner of a settled beginning", False, False, [A(5, 4)], [Joined(7, 0, 5), A(5, 4)]),
    ("a joiner where nothing is settled waits from block 1", False, False, [A(2), A(1)], [Joined(7, 0, 1), A(1), A(2)]),
    ("a joiner that sees a beat first", False, False, [beat(5), A(6, 5)],
     [Dropped(beat(5), "beat"), Joined(7, 0, 6), A(6, 5)]),
    ("a joiner that sees two beats first", False, False, [beat(5), beat(8), A(9, 8)],
     [Dropped(beat(5), "beat"), Dropped(beat(8), "beat"), Joined(7, 0, 9), A(9, 8)]),
    ("two senders are nothing but doubles", True, True, [A(1), A(1), A(2), A(1), A(2), A(3)],
     [A(1), Dropped(A(1), "double"), A(2), Dropped(A(1), "double"), Dropped(A(2), "double"), A(3)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("suffix_only", "from_start", "log", "wanted"), [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES]
)
def test_each_rule_says_what_its_example_shows(
    suffix_only: bool, from_start: bool, log: list[Frame], wanted: list[Outcome]
) -> None:
    accept = Accept(suffix_only=suffix_only, from_start=from_start)
    told = [o for frame in log for o in accept.receive(frame)]
    drops = [o for o in told if isinstance(o, Dropped)]
    wanted_drops = [o for o in wanted if isinstance(o, Dropped)]
    assert [o for o in told if not isinstance(o, Dropped)] == [o for o in wanted if not isinstance(o, Dropped)]
    assert drops == wanted_drops


def test_frames_are_delivered_as_they_are() -> None:
    for suffix_only in (True, False):
        accept = Accept(suffix_only=suffix_only, from_start=True)
        log = [A(1), A(3), A(2), A(4)]
        out = [o for f in log for o in accept.receive(f) if isinstance(o, Frame)]
        assert all(any(o is f for f in log) for o in out)


def test_a_block_beyond_the_window_is_refused_and_moves_nothing() -> None:
    reader = Reader(suffix_only=False, window=4).feed_all([A(1), A(2)])
    assert reader.feed(A(7, 2)) == (Dropped(A(7, 2), "beyond"),)
    assert reader.feed(A(6, 2)) == ()
    assert reader.feed(A(9, 5))[0] == Missed(7, 0, 3, 5)
    assert reader.ids == [1, 2, 6]


def test_a_block_beyond_the_window_is_refused_too_where_it_is_the_next() -> None:
    reader = Reader(suffix_only=False, window=4).feed_all([A(i, max(0, i - 1)) for i in range(1, 6)])
    assert reader.feed(A(6, 1)) == (Dropped(A(6, 1), "beyond"),)


def test_a_block_beyond_the_window_begins_no_source() -> None:
    accept = Accept(suffix_only=False, from_start=False, window=4)
    assert accept.receive(A(20, 5)) == (Dropped(A(20, 5), "beyond"),)
    assert accept.receive(A(3, 2)) == (Joined(7, 0, 3), A(3, 2))


def test_a_block_beyond_the_window_begins_no_run() -> None:
    accept = Accept(suffix_only=False, from_start=True, window=4)
    accept.receive(A(1))
    assert accept.receive(A(20, 5, run=9)) == (Dropped(A(20, 5, run=9), "beyond"),)
    assert accept.receive(A(2)) == (A(2),)


@SUFFIX
@START
def test_a_block_without_an_id_is_never_delivered_and_moves_nothing(suffix_only: bool, from_start: bool) -> None:
    """Ids begin at 1: a forged 0 is neither a block nor another input."""
    forged = parse(frames([seal(BLOCK, ROWS, count=1, source=7, body=b"0")], 0, 0)[0])
    accept = Accept(suffix_only=suffix_only, from_start=from_start)
    for _ in range(2):
        assert [o for o in accept.receive(forged) if not isinstance(o, Dropped)] == []
    assert [o for o in accept.receive(A(1)) if not isinstance(o, Joined)] == [A(1)]
    assert [o for o in accept.receive(forged) if not isinstance(o, Dropped)] == []
    assert accept.receive(A(2, 1)) == (A(2, 1),)


def test_the_greatest_numbers_are_told_as_ranges_and_take_no_time() -> None:
    top = (1 << 64) - 1
    last = parse(frames([seal(BLOCK, ROWS, count=1, source=7, id=top, body=b"x")], top, 0)[0])
    for suffix_only in (True, False):
        accept = Accept(suffix_only=suffix_only, from_start=True)
        assert accept.receive(A(1)) == (A(1),)
        assert accept.receive(last) == (Missed(7, 0, 2, top - 1), last)
        assert accept.receive(beat(top)) == (Dropped(beat(top), "beat"),)


# Resume, restart, and the bound on sources.


@SUFFIX
def test_a_resumed_source_goes_on_behind_the_stored_block(suffix_only: bool) -> None:
    for chain in (A(3).chain, None):
        accept = Accept(suffix_only=suffix_only, from_start=False)
        accept.resume({7: (0, 3, chain)})
        assert accept.receive(A(2, 1)) == (Dropped(A(2, 1), "double"),)
        assert accept.receive(A(3, 2)) == (Dropped(A(3, 2), "double"),)
        assert accept.receive(A(4, 3)) == (A(4, 3),)
        assert accept.receive(A(5, 4)) == (A(5, 4),)


def test_a_resumed_source_is_told_what_went_in_the_meantime() -> None:
    accept = Accept(suffix_only=True, from_start=False)
    accept.resume({7: (0, 3, A(3).chain)})
    assert accept.receive(A(9)) == (Missed(7, 0, 4, 8), A(9))


def test_a_resumed_source_sees_another_input() -> None:
    accept = Accept(suffix_only=True, from_start=False)
    accept.resume({7: (0, 3, A(3).chain)})
    assert accept.receive(b(4)) == (InputDiffers(7, 0, 4, A(3).chain, b(4).link), Dropped(b(4), "diverged"))
    assert accept.receive(A(4)) == (A(4),)


def test_a_resumed_run_is_the_current_one() -> None:
    accept = Accept(suffix_only=True, from_start=True)
    accept.resume({7: (2, 1, A(1, run=2).chain)})
    assert accept.receive(A(1)) == (Dropped(A(1), "stale"),)
    assert accept.receive(A(2, run=2)) == (A(2, run=2),)
    assert accept.receive(A(1, run=3)) == (NewRun(7, 2, 3), A(1, run=3))


def test_resumed_in_the_middle_the_stored_position_counts() -> None:
    accept = Accept(suffix_only=True, from_start=True)
    assert accept.receive(A(1)) == (A(1),)
    accept.resume({7: (0, 3, A(3).chain)})
    assert accept.receive(A(2)) == (Dropped(A(2), "double"),)
    assert accept.receive(A(4)) == (A(4),)


def test_who_is_still_joining_when_it_resumes_is_not_told_what_went_before_it_came() -> None:
    nothing: list[dict[int, tuple[int, int, int | None]]] = [{}, {8: (0, 9, None)}]
    for stored in nothing:
        accept = Accept(suffix_only=False, from_start=False)
        assert accept.receive(A(5, 2)) == ()  # 3 and 4 are confirmed, and that has not come
        accept.redelivery()
        assert accept.resume(stored) == []
        assert accept.receive(A(5, 2)) == ()
        assert accept.receive(beat(5)) == (Joined(7, 0, 5), A(5, 2), Dropped(beat(5), "beat", 5))


def test_who_is_still_joining_goes_on_from_what_its_group_has_confirmed_since() -> None:
    for last in (1, 2, 3):
        accept = Accept(suffix_only=False, from_start=False)
        accept.receive(A(5, 2))
        accept.redelivery()
        accept.resume({7: (0, last, A(last).chain)})
        assert accept.receive(A(5, 4)) == (Missed(7, 0, last + 1, 4), A(5, 4))


def test_what_is_held_is_held_on_when_what_is_stored_is_not_further() -> None:
    for stored in ((0, 0, 0), (0, 1, A(1).chain)):
        accept = Accept(suffix_only=False, from_start=True)
        for frame in (A(1), A(3), A(4)):
            accept.receive(frame)
        assert accept.resume({7: stored}) == []
        assert accept.receive(A(2, 1)) == (A(2, 1), A(3), A(4))


def test_what_is_held_is_delivered_or_let_go_when_what_is_stored_is_further() -> None:
    accept = Accept(suffix_only=False, from_start=True)
    for frame in (A(1), A(3), A(4), A(6)):
        accept.receive(frame)
    assert accept.resume({7: (0, 3, A(3).chain)}) == [Dropped(A(3), "double"), A(4)]
    assert accept.receive(A(5, 4)) == (A(5, 4), A(6))
    accept.receive(A(8))
    assert accept.resume({7: (1, 2, None)}) == [Dropped(A(8), "stale")]
    assert accept.receive(A(3, run=1)) == (A(3, run=1),)


def test_what_differed_before_a_resume_differs_after_it() -> None:
    accept = Accept(suffix_only=False, from_start=True)
    for frame in (A(1), A(2)):
        accept.receive(frame)
    assert accept.receive(b(3)) == (InputDiffers(7, 0, 3, A(2).chain, b(3).link), Dropped(b(3), "diverged"))
    accept.resume({7: (0, 3, None)})
    assert accept.receive(b(4)) == (Dropped(b(4), "diverged"),)


def test_after_a_restart_every_source_is_unknown_and_what_was_held_is_handed_back() -> None:
    accept = Accept(suffix_only=False, from_start=True)
    accept.joined_at_run[7] = 4
    for frame in (A(1), A(3), A(4), A(2, source=8)):
        accept.receive(frame)
    assert accept.restart(from_start=True) == [A(3), A(4), A(2, source=8)]
    assert accept.receive(A(2)) == ()
    assert accept.receive(A(1)) == (A(1), A(2))
    assert accept.restart(from_start=False) == []
    assert accept.receive(A(9, 8)) == (Joined(7, 0, 9), A(9, 8))
    assert accept.restart(from_start=True) == []
    assert accept.joined_at_run == {}
    assert accept.receive(A(10, 9, source=8)) == (Missed(8, 0, 1, 9), A(10, 9, source=8))


def test_after_a_restart_no_block_that_was_delivered_before_is_missed() -> None:
    def restarted() -> Accept:
        accept = Accept(suffix_only=True, from_start=True)
        for id in (1, 2, 3):
            assert accept.receive(A(id)) == (A(id),)
        for _ in range(2):
            accept.restart(from_start=True)
        return accept

    assert restarted().receive(A(4)) == (A(4),)
    assert restarted().receive(A(6)) == (Missed(7, 0, 4, 5), A(6))
    accept = restarted()
    assert accept.receive(A(2)) == (A(2),)
    assert accept.receive(A(5)) == (Missed(7, 0, 3, 4), A(5)), "the sequence that is read now lacks them"


def test_after_a_restart_a_sequence_that_begins_again_is_delivered_and_its_holes_are_missed() -> None:
    accept = Accept(suffix_only=True, from_start=True)
    for id in (1, 2, 3):
        accept.receive(A(id))
    accept.restart(from_start=True)
    assert accept.receive(b(1)) == (b(1),)
    assert accept.receive(b(3)) == (Missed(7, 0, 2, 2), b(3))
    accept.restart(from_start=True)
    higher = A(3, run=1)
    assert accept.receive(higher) == (Missed(7, 1, 1, 2), higher)


def test_what_is_remembered_of_earlier_incarnations_is_bounded() -> None:
    accept = Accept(suffix_only=True, from_start=True, max_sources=2)
    for source in range(10):
        accept.receive(A(1, source=source))
        accept.restart(from_start=True)
    assert len(accept._delivered) == 2


def test_the_source_not_seen_for_longest_is_forgotten_and_told() -> None:
    accept = Accept(suffix_only=False, from_start=True, max_sources=2)
    accept.receive(A(1, source=1))
    accept.receive(A(1, source=2))
    accept.receive(A(3, source=2))
    accept.receive(A(2, 1, source=1))
    told = accept.receive(A(1, source=3))
    assert told[:-1] == (Dropped(A(3, source=2), "stale"), Forgotten(2, 0, 1), Joined(3, 0, 1))
    assert told[-1] == A(1, source=3)
    assert set(accept.sources) == {1, 3}
    # from now on an unknown source may be one that was forgotten
    assert accept.receive(A(9, 8, source=2))[-2:] == (Joined(2, 0, 9), A(9, 8, source=2))
    assert len(accept.sources) == 2


def test_a_source_that_sends_all_the_time_is_not_forgotten() -> None:
    accept = Accept(suffix_only=True, from_start=True, max_sources=3)
    for i in range(1, 60):
        accept.receive(A(i, source=1))
        accept.receive(A(i + 1, source=1))
        told = accept.receive(A(1, source=100 + i))
        assert all(o.source != 1 for o in told if isinstance(o, Forgotten))
    assert 1 in accept.sources


@SUFFIX
@START
def test_sources_do_not_touch_each_other(suffix_only: bool, from_start: bool) -> None:
    rng = random.Random(3)
    for _ in range(100):
        logs = {
            s: [A(rng.randrange(1, 6), rng.randrange(3), source=s) for _ in range(8)] + [beat(5, source=s)]
            for s in (1, 2, 3)
        }
        alone = {}
        for s, log in logs.items():
            accept = Accept(suffix_only=suffix_only, from_start=from_start)
            alone[s] = [o for f in log for o in accept.receive(f)]
        order = [s for s in logs for _ in range(9)]
        rng.shuffle(order)
        accept, rest = Accept(suffix_only=suffix_only, from_start=from_start), {s: iter(log) for s, log in logs.items()}
        mixed: dict[int, list[Outcome]] = {s: [] for s in logs}
        for s in order:
            mixed[s] += accept.receive(next(rest[s]))
        assert mixed == alone
