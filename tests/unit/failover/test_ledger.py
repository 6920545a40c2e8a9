"""The ledger: which position and which state may be stored, whatever is confirmed, dropped, held or delivered anew."""

import random
from typing import Any

import msgpack
import pytest

from esp_pubsub.failover.accept import Accept, Dropped
from esp_pubsub.failover.ledger import Ledger, furthest, parse_state
from esp_pubsub.wire.frame import BLOCK, ROWS, Frame, frames, parse, seal


def line(count: int, *, run: int = 0, source: int = 7) -> list[Frame]:
    """Blocks 1..count, each at the position of its id."""
    found: list[Frame] = []
    link = 0
    for id_ in range(1, count + 1):
        one = seal(BLOCK, ROWS, count=1, source=source, run=run, id=id_, link=link, body=b"x%d" % id_)
        found.append(parse(frames([one], 0, 0)[0], id_))
        link = one.chain
    return found


BLOCKS = line(9)


class Reader:
    """A ledger that is told what a subscriber would tell it."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.serials: dict[int, int] = {}

    def deliver(self, id_: int, position: Any = None) -> None:
        frame = BLOCKS[id_ - 1]._replace(position=position or id_)
        self.ledger.arrived(frame.position)
        self.serials[id_] = self.ledger.delivered(frame)

    def hold(self, id_: int) -> Frame:
        frame = BLOCKS[id_ - 1]
        self.ledger.arrived(frame.position)
        return frame

    def drop(self, position: Any, id_: int | None = None, admits: int = 0) -> bool:
        self.ledger.arrived(position)
        return self.ledger.dropped(position, BLOCKS[id_ - 1]._replace(position=position) if id_ else None, admits)

    def confirm(self, id_: int) -> bool:
        return self.ledger.confirm(self.serials[id_])

    @property
    def last(self) -> int:
        known = self.ledger.known.get(7)
        return known[1] if known else 0


def test_a_new_ledger_knows_nothing() -> None:
    ledger = Ledger()
    assert (ledger.known, ledger.done, len(ledger)) == ({}, None, 0)


def test_confirming_a_block_moves_state_and_position_to_it() -> None:
    reader = Reader()
    reader.deliver(1)
    reader.deliver(2)
    assert reader.confirm(1)
    assert (reader.last, reader.ledger.done) == (1, 1)
    assert reader.ledger.known == {7: (0, 1, BLOCKS[0].chain)}
    assert len(reader.ledger) == 1


def test_confirming_is_cumulative() -> None:
    reader = Reader()
    for id_ in range(1, 6):
        reader.deliver(id_)
    assert reader.confirm(4)
    assert (reader.last, reader.ledger.done) == (4, 4)


def test_confirming_what_is_confirmed_changes_nothing_and_says_so() -> None:
    reader = Reader()
    reader.deliver(1)
    reader.deliver(2)
    assert reader.confirm(2)
    assert not reader.confirm(2)
    assert not reader.confirm(1)
    assert (reader.last, reader.ledger.done) == (2, 2)


def test_a_held_block_stops_the_position_but_not_the_state() -> None:
    reader = Reader()
    reader.hold(3)
    reader.deliver(1, position=4)
    reader.deliver(2, position=5)
    reader.confirm(2)
    assert (reader.last, reader.ledger.done) == (2, None)


def test_a_held_block_that_was_delivered_and_confirmed_lets_the_position_pass() -> None:
    reader = Reader()
    held = reader.hold(2)
    reader.deliver(1, position=5)
    reader.serials[2] = reader.ledger.delivered(held)
    reader.confirm(1)
    assert (reader.last, reader.ledger.done) == (1, None)
    reader.confirm(2)
    assert (reader.last, reader.ledger.done) == (2, 5)


def test_what_was_dropped_does_not_stop_the_position() -> None:
    reader = Reader()
    assert reader.drop("a")
    reader.deliver(1, position="b")
    assert reader.drop("c")
    reader.deliver(2, position="d")
    reader.confirm(1)
    assert reader.ledger.done == "c"  # the state may be ahead of the position, and the position as far as it can


def test_a_double_of_an_unconfirmed_block_is_let_go_at_once() -> None:
    reader = Reader()
    reader.deliver(1)
    assert reader.drop("again", 1)
    assert reader.ledger.done is None
    reader.confirm(1)
    assert reader.ledger.done == "again"


def test_after_a_redelivery_the_same_blocks_are_let_go_when_they_are_confirmed() -> None:
    reader = Reader()
    reader.deliver(1)
    reader.deliver(2)
    reader.ledger.redelivery()
    assert (reader.ledger.done, len(reader.ledger)) == (None, 2)
    assert not reader.drop("new 1", 1)  # kept: its first delivery is not confirmed
    assert not reader.drop("new 2", 2)
    assert reader.drop("newer 2", 2)  # a second copy is a plain double
    reader.confirm(1)
    assert (reader.last, reader.ledger.done) == (1, "new 1")
    reader.confirm(2)
    assert (reader.last, reader.ledger.done) == (2, "newer 2")


def test_a_block_confirmed_between_feeds_is_kept_when_it_comes_again_until_that_is_stored() -> None:
    reader = Reader()
    reader.deliver(1)
    reader.ledger.redelivery()
    assert reader.confirm(1)
    assert (reader.last, reader.ledger.done) == (1, None)
    assert not reader.drop("new 1", 1)
    reader.ledger.stored(reader.ledger.confirmed)
    assert reader.ledger.done == "new 1"
    assert reader.drop("newer 1", 1)


def test_a_block_confirmed_and_not_stored_is_kept_when_its_feed_dies() -> None:
    reader = Reader()
    reader.deliver(1)
    assert reader.confirm(1)
    reader.ledger.redelivery()
    assert not reader.drop("new 1", 1)
    reader.ledger.redelivery()
    assert not reader.drop("newest 1", 1)
    reader.ledger.stored(reader.ledger.confirmed)
    assert reader.ledger.done == "newest 1"


def test_a_block_confirmed_and_stored_is_let_go_when_it_comes_again() -> None:
    reader = Reader()
    reader.deliver(1)
    assert reader.confirm(1)
    reader.ledger.stored(reader.ledger.confirmed)
    reader.ledger.redelivery()
    assert reader.drop("new 1", 1)


def test_two_feeds_may_die_before_anything_is_confirmed() -> None:
    reader = Reader()
    reader.deliver(1)
    for number in range(3):
        reader.ledger.redelivery()
        assert not reader.drop(f"feed {number}", 1)
    reader.confirm(1)
    assert reader.ledger.done == "feed 2"


def test_what_admits_a_block_is_done_when_the_block_is_confirmed() -> None:
    reader = Reader()
    reader.deliver(1)
    reader.deliver(3)
    assert not reader.drop("proof", 4, admits=3)
    reader.deliver(5)
    assert reader.confirm(1)
    assert reader.ledger.done == 1
    assert reader.confirm(3)
    assert reader.ledger.done == "proof"
    reader.ledger.stored(reader.ledger.confirmed)
    assert reader.drop("later", 4, admits=3)


def test_what_admits_a_block_that_is_confirmed_is_done_when_that_is_stored() -> None:
    reader = Reader()
    reader.deliver(3)
    reader.confirm(3)
    assert not reader.drop("proof", 4, admits=3)
    assert reader.ledger.done == 3
    assert reader.ledger.stored(reader.ledger.confirmed)
    assert reader.ledger.done == "proof"


def test_what_admits_nothing_that_is_unconfirmed_is_let_go_at_once() -> None:
    reader = Reader()
    assert reader.drop("nothing delivered", 4, admits=3)
    reader.deliver(3)
    assert reader.drop("nothing admitted", 4)
    reader.confirm(3)
    reader.ledger.stored(reader.ledger.confirmed)
    assert reader.drop("all stored", 4, admits=3)


def test_one_frame_that_admits_a_block_is_enough() -> None:
    reader = Reader()
    reader.deliver(3)
    assert not reader.drop("proof", 4, admits=3)
    assert all(reader.drop(f"proof {number}", 4, admits=3) for number in range(2, 9))
    reader.deliver(6)
    assert not reader.drop("of the next one", 4, admits=6)
    reader.confirm(3)
    assert reader.ledger.done == "proof 8"
    assert reader.drop("again", 4, admits=6)
    reader.confirm(6)
    assert reader.ledger.done == "again"


def test_what_admits_a_block_is_kept_again_when_it_comes_from_the_next_feed() -> None:
    reader = Reader()
    reader.deliver(3)
    assert not reader.drop("proof", 4, admits=3)
    for feed in range(2):
        reader.ledger.redelivery()
        assert not reader.drop(f"3 of feed {feed}", 3, admits=3)  # the block itself, and not a proof
        assert not reader.drop(f"proof of feed {feed}", 4, admits=3)
    reader.confirm(3)
    assert reader.ledger.done == "proof of feed 1"
    reader.ledger.redelivery()
    assert not reader.drop("3 at last", 3)
    assert not reader.drop("proof at last", 4, admits=3)
    assert reader.ledger.stored(reader.ledger.confirmed)
    assert reader.ledger.done == "proof at last"


def test_what_admits_a_block_that_another_reader_has_confirmed_is_let_go_at_once() -> None:
    reader = Reader()
    reader.deliver(3)
    reader.ledger.known = furthest(reader.ledger.known, {7: (0, 5, BLOCKS[4].chain)})
    assert reader.drop("proof", 4, admits=3)


def test_another_incarnation_of_the_topic_forgets_everything() -> None:
    reader = Reader()
    reader.deliver(1)
    reader.confirm(1)
    reader.deliver(2)
    reader.drop("proof", 3, admits=2)
    reader.ledger.restart()
    assert (reader.ledger.known, reader.ledger.done, len(reader.ledger)) == ({}, None, 0)
    assert not reader.confirm(2)
    assert reader.drop("other 2", 2)


def test_of_a_log_that_lost_its_end_what_stands_there_now_is_done_on_its_own() -> None:
    reader = Reader()
    for id_ in (1, 2, 3, 4):
        reader.deliver(id_)
    reader.confirm(1)
    reader.ledger.cut(3)  # of blocks 1 to 4, 3 and 4 stand there no more
    reader.deliver(5, position=3)
    reader.confirm(4)
    assert reader.ledger.done == 2, "position 3 holds block 5 now"
    reader.confirm(5)
    assert (reader.ledger.done, reader.last) == (3, 5)


def test_of_a_log_that_lost_its_end_nothing_further_on_is_done() -> None:
    reader = Reader()
    for id_ in (1, 2, 3):
        reader.deliver(id_)
    reader.confirm(3)
    reader.ledger.stored(reader.serials[3])
    reader.ledger.cut(2)
    assert reader.ledger.done == 1
    assert reader.drop(2, 2), "it came again, and that it is done is stored"
    assert reader.ledger.done == 2


def test_a_block_that_was_cut_off_and_comes_again_is_done_when_it_is_confirmed() -> None:
    reader = Reader()
    reader.deliver(1)
    reader.deliver(2)
    reader.ledger.cut(1)
    assert not reader.drop(1, 1)
    assert not reader.drop(2, 2)
    reader.confirm(1)
    assert reader.ledger.done == 1
    reader.confirm(2)
    assert reader.ledger.done == 2


def test_the_state_survives_its_bytes() -> None:
    ledger = Ledger()
    ledger.known = {7: (3, 5, 0xFFFFFFFF), 8: (0, 1, None)}
    assert parse_state(ledger.state(from_start=False)) == (False, ledger.known)
    assert parse_state(Ledger().state(from_start=True)) == (True, {})


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\xc1",
        b"\x00",
        msgpack.packb("text"),
        msgpack.packb((2, True, [])),
        msgpack.packb((1, True)),
        msgpack.packb((1, True, 5)),
        msgpack.packb((1, True, [(1, 2, 3)])),
        msgpack.packb((1, True, [])) + b"more",
    ],
    ids=repr,
)
def test_bytes_that_are_no_state_are_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="not a stored accept state"):
        parse_state(stored)


@pytest.mark.parametrize(
    ("ours", "theirs", "merged"),
    [
        ({}, {}, {}),
        ({7: (0, 1, 5)}, {}, {7: (0, 1, 5)}),
        ({}, {7: (0, 1, 5)}, {7: (0, 1, 5)}),
        ({7: (0, 1, 5)}, {8: (0, 2, 6)}, {7: (0, 1, 5), 8: (0, 2, 6)}),
        ({7: (0, 3, 5)}, {7: (0, 2, 6)}, {7: (0, 3, 5)}),
        ({7: (0, 2, 5)}, {7: (0, 3, 6)}, {7: (0, 3, 6)}),
        ({7: (1, 1, 5)}, {7: (0, 9, 6)}, {7: (1, 1, 5)}),
        ({7: (0, 9, 5)}, {7: (1, 1, 6)}, {7: (1, 1, 6)}),
        ({7: (0, 2, None)}, {7: (0, 2, 6)}, {7: (0, 2, 6)}),
    ],
)
def test_of_two_states_the_further_one_counts_source_by_source(ours: Any, theirs: Any, merged: Any) -> None:
    assert furthest(ours, theirs) == merged


def test_a_state_that_was_taken_over_never_goes_back() -> None:
    """Another reader of the group went on to 5 meanwhile; our user confirms what was delivered before."""
    reader = Reader()
    reader.deliver(1)
    reader.deliver(2)
    reader.ledger.known = furthest(reader.ledger.known, {7: (0, 5, BLOCKS[4].chain)})
    reader.confirm(2)
    assert reader.ledger.known == {7: (0, 5, BLOCKS[4].chain)}


@pytest.mark.parametrize("seed", range(200))
def test_whoever_goes_on_from_what_is_stored_gets_every_block_once(seed: int) -> None:
    """A reader that dies again and again, on a log with doubles and disorder, with the real accept rule."""
    rng = random.Random(seed)
    log = [(id_, rng.randrange(id_)) for id_ in range(1, 8) for _ in range(rng.randrange(1, 3))]
    log = [*sorted(log, key=lambda entry: entry[0] + rng.random() * 2.5), (8, 7), (9, 8)]
    for id_ in range(1, 8):  # what is settled stood on the topic before, once at least
        log.insert(0, (id_, 0)) if (id_, 0) not in log and rng.random() < 0.3 else None
    first_at = {id_: min(at for at, (other, _) in enumerate(log) if other == id_) for id_ in range(1, 10)}
    messages = [
        BLOCKS[id_ - 1]._replace(position=at, settled=max((s for s in range(settled + 1)
                                 if all(first_at[j] < at for j in range(1, s + 1))), default=0))
        for at, (id_, settled) in enumerate(log)
    ]  # fmt: skip
    done: list[int] = []
    position, state = -1, None
    for _ in range(20):
        accept, ledger = Accept(suffix_only=False, from_start=True), Ledger()
        if state is not None:
            accept.from_start, known = parse_state(state)
            accept.resume(known)
            ledger.known = known
        ours: list[tuple[int, int]] = []
        for frame in messages[position + 1 : position + 1 + rng.randrange(1, len(messages) + 1)]:
            ledger.arrived(frame.position)
            for outcome in accept.receive(frame):
                if isinstance(outcome, Frame):
                    ours.append((outcome.id, ledger.delivered(outcome)))
                else:
                    assert isinstance(outcome, Dropped), outcome
                    ledger.dropped(outcome.frame.position, outcome.frame, outcome.admits)
        assert [id_ for id_, _ in ours] == list(range(len(done) + 1, len(done) + 1 + len(ours)))
        if ours and rng.random() < 0.8:
            count = rng.randrange(1, len(ours) + 1)
            assert ledger.confirm(ours[count - 1][1])
            done += [id_ for id_, _ in ours[:count]]
            assert ledger.done is None or ledger.done >= position
            position = position if ledger.done is None else ledger.done
            state = ledger.state(from_start=True)
    assert done == list(range(1, len(done) + 1))
