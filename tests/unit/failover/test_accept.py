"""The accept rule, explored: every order of arrival of short sequences, against invariants that know no implementation.

`Reader` feeds an `Accept` and checks after every frame what must hold whatever came: what is delivered goes up by one,
except where exactly the hole was told; nothing twice; each block continues the one before; what is told as missed was
proven; and nothing is held that could be delivered or was proven to be late.
"""

import random
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import permutations, product

import pytest

from esp_pubsub.failover.accept import DIVERGED_KEPT, Accept, Dropped, Outcome
from esp_pubsub.notices import Forgotten, InputDiffers, Joined, Missed, NewRun
from esp_pubsub.wire.frame import BEAT, BLOCK, ROWS, WINDOW_FRAMES, Frame, frames, parse, seal

SUFFIX = pytest.mark.parametrize("suffix_only", [True, False], ids=["suffix-only", "any bus"])
START = pytest.mark.parametrize("from_start", [True, False], ids=["from the start", "joining"])


@cache
def chain_of(id_: int, line: str, run: int, source: int, fork: int) -> int:
    """The chain of a block; lines are the same below `fork`."""
    return 0 if id_ == 0 else block(id_, 0, line, run=run, source=source, fork=fork).chain


@cache
def block(id_: int, settled: int = 0, line: str = "A", *, run: int = 0, source: int = 7, fork: int = 1) -> Frame:
    """Block `id_` of the input `line`, as a sender writes it who knows that `settled` is settled."""
    link = chain_of(id_ - 1, line, run, source, fork)
    body = f"{line if id_ >= fork else 'A'}{id_}".encode()
    one = seal(BLOCK, ROWS, count=1, source=source, run=run, id=id_, link=link, body=body)
    return parse(frames([one], settled, 0)[0])


@cache
def beat(settled: int, *, run: int = 0, source: int = 7) -> Frame:
    return parse(frames([seal(BEAT, source=source, run=run)], settled, 0)[0])


def b(id_: int, settled: int = 0) -> Frame:
    """A block of the line B, which is A up to block 1."""
    return block(id_, settled, "B", fork=2)


class Reader:
    """One source of an Accept, checked."""

    def __init__(self, *, suffix_only: bool, from_start: bool = True, window: int = WINDOW_FRAMES) -> None:
        self.accept = Accept(suffix_only=suffix_only, from_start=from_start, window=window)
        self.suffix_only = suffix_only
        self.from_start = from_start
        self.window = window
        self.run = -1
        self.delivered: dict[int, list[Frame]] = {}
        self.missed: list[tuple[int, int]] = []
        self.told: list[Outcome] = []
        self.diverged: set[int] = set()
        self.begin(-1)

    def begin(self, run: int) -> None:
        """A run not seen before."""
        self.run = run
        self.cursor = 0
        self.joining = not self.from_start
        self.before: Frame | None = None  # the block delivered just before the cursor
        self.waiting: list[Frame] = []
        self.proof = 0

    def proves(self, frame: Frame) -> int:
        if frame.kind == BEAT:
            return frame.settled
        return frame.id - 1 if self.suffix_only else min(frame.settled, frame.id - 1)

    def feed(self, frame: Frame) -> tuple[Outcome, ...]:
        stale = frame.run < self.run
        if frame.run > self.run:
            gone, old = self.waiting, self.run
            self.begin(frame.run)
            self.joining = self.joining and old < 0
        else:
            gone, old = [], -1
        proof_before = self.proof
        twins = [w for w in self.waiting if w.id == frame.id and w.kind == frame.kind == BLOCK]
        if not stale:
            self.waiting.append(frame)
            self.proof = max(self.proof, self.proves(frame))
        outcome = self.accept.receive(frame)
        newcomer = self.cursor == 0 and self.joining
        for o in outcome:
            if isinstance(o, NewRun):
                assert (o.old, o.new) == (old, frame.run)
                assert old >= 0
            elif isinstance(o, Dropped) and any(o.frame is g for g in gone):
                assert o.why == "stale"
                gone = [g for g in gone if g is not o.frame]
            elif stale:
                assert o == Dropped(frame, "stale")
            else:
                self.check(o)
        assert gone == []
        refused = Dropped(frame, "diverged") in outcome or Dropped(frame, "beyond") in outcome
        if refused or any(w.chain != frame.chain for w in twins):
            self.proof = proof_before  # it proves nothing from now on
        if not stale:
            self.check_waiting(newcomer)
        self.told += outcome
        return outcome

    def check(self, o: Outcome) -> None:
        if isinstance(o, Frame):
            assert o.kind == BLOCK
            assert o.run == self.run
            if self.joining:
                assert self.cursor < o.id <= max(self.proof, self.cursor) + 1
                assert isinstance(self.last_told, Joined)
            else:
                assert o.id == self.cursor + 1
            if self.before is not None and not self.joining:
                assert o.link == self.before.chain
            assert o.link not in self.diverged
            self.settle(o)
            self.cursor, self.before, self.joining = o.id, o, False
            self.delivered.setdefault(o.run, []).append(o)
        elif isinstance(o, Missed):
            assert not self.joining
            assert o.run == self.run
            assert self.cursor + 1 == o.first <= o.last <= self.proof
            assert not any(o.first <= w.id <= o.last for w in self.waiting if w.kind == BLOCK)
            self.missed.append((o.first, o.last))
            self.cursor, self.before = o.last, None
        elif isinstance(o, Dropped):
            self.settle(o.frame)
            if o.why == "double":
                assert o.frame.id <= max(self.cursor, self.proof) or any(w.id == o.frame.id for w in self.waiting)
            elif o.why == "beat":
                assert o.frame.kind == BEAT
            elif o.why == "beyond":
                assert not self.suffix_only
                assert o.frame.id > o.frame.settled + self.window
            else:
                assert o.why == "diverged"
                self.diverged.add(o.frame.chain)
        elif isinstance(o, Joined):
            assert self.joining
            assert o.run == self.run
        else:
            assert isinstance(o, InputDiffers)
            assert o.ours != o.theirs
        self.last_told = o

    def settle(self, frame: Frame) -> None:
        """This frame is done with; every frame is, once."""
        at = next(i for i, w in enumerate(self.waiting) if w is frame)
        del self.waiting[at]

    def check_waiting(self, newcomer: bool) -> None:
        if self.joining:
            self.cursor = max(self.cursor, self.proof)
        ids = [w.id for w in self.waiting]
        assert len(set(ids)) == len(ids)
        assert all(id_ > self.cursor + 1 for id_ in ids)
        if not self.diverged:
            assert self.cursor >= self.proof
            assert newcomer or all(id_ > self.proof for id_ in ids)
        assert not (self.suffix_only and ids)
        held = self.accept.sources[7].hold if 7 in self.accept.sources else {}
        assert sorted(ids) == sorted(held)
        assert all(id_ <= self.cursor + self.window for id_ in ids)

    def feed_all(self, log: Iterable[Frame]) -> "Reader":
        for frame in log:
            self.feed(frame)
        return self

    @property
    def ids(self) -> list[int]:
        return [f.id for f in self.delivered.get(self.run, [])]


# Every order of arrival, whatever a sender may have done.


@START
def test_on_a_suffix_only_bus_any_arrival_of_up_to_six_frames_keeps_the_invariants(from_start: bool) -> None:
    for log in product([block(i) for i in (1, 2, 3, 4)], repeat=6):
        reader = Reader(suffix_only=True, from_start=from_start).feed_all(log)
        highest = max(f.id for f in log)
        assert reader.cursor == highest  # each block proves all before it
        covered = reader.ids + [i for first, last in reader.missed for i in range(first, last + 1)]
        first = 1 if from_start else log[0].id
        assert sorted(covered) == list(range(first, highest + 1))


@START
def test_on_any_bus_any_arrival_of_blocks_and_beats_keeps_the_invariants(from_start: bool) -> None:
    alphabet = [block(i, s) for i in (1, 2, 3) for s in (0, 1, 2, 3)] + [beat(3)]
    for log in product(alphabet, repeat=4):
        Reader(suffix_only=False, from_start=from_start).feed_all(log)


@SUFFIX
@START
def test_long_random_arrivals_keep_the_invariants(suffix_only: bool, from_start: bool) -> None:
    rng = random.Random(1)
    for _ in range(300):
        at, log = 1, []
        for _ in range(40):
            at = max(1, at + rng.choice([-3, -1, 0, 1, 1, 1, 1, 2, 3]))
            settled = max(0, at - rng.randrange(8))
            log.append(beat(settled) if rng.random() < 0.1 else block(at, settled))
        Reader(suffix_only=suffix_only, from_start=from_start, window=8).feed_all(log)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_every_permutation_is_delivered_in_order_where_nothing_is_proven(n: int) -> None:
    for order in permutations(range(1, n + 1)):
        reader = Reader(suffix_only=False).feed_all(block(i) for i in order)
        assert reader.ids == list(range(1, n + 1))
        assert (reader.missed, reader.waiting) == ([], [])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_permutation_with_doubles_and_one_missing_ends_where_the_beat_proves(n: int) -> None:
    for missing in range(1, n + 1):
        came = [i for i in range(1, n + 1) if i != missing]
        for order in set(permutations(came + came[:1])):
            reader = Reader(suffix_only=False).feed_all([*(block(i) for i in order), beat(n)])
            assert reader.ids == came
            assert reader.missed == [(missing, missing)]
            reader.feed(block(missing))  # a copy that comes later all the same
            assert reader.told[-1] == Dropped(block(missing), "double")


# What senders do who keep PROTOCOL 3: pipes that begin at or before m + 1, lose what they lose, and go back.

Entry = tuple[int, int]  # id and settled; id 0: a beat
Pipe = tuple[int, bool]  # the next id it writes, and whether it is broken


def sent(n: int, suffix_only: bool, pipes: int, writes: int) -> set[tuple[Entry, ...]]:
    """Every log that senders can leave behind, two of them at once, each with the pipes that it may open."""
    logs: set[tuple[Entry, ...]] = set()
    seen: set[object] = set()
    todo: list[tuple[tuple[Entry, ...], int, tuple[Pipe | None, Pipe | None], int, int]] = [
        ((), 0, (None, None), pipes, writes)
    ]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        log, acked, senders, opens, left = state
        # whatever happened, in the end somebody sends everything that is not acked, and says so
        rest = tuple((k, k - 1) for k in range(acked + 1, n + 1))
        logs.add((*log, *rest, (0, n)))
        for who, pipe in enumerate(senders):
            for log2, acked2, after, opened in moves(n, suffix_only, log, acked, pipe):
                if opens >= opened and left > opened:
                    both = (after, senders[1]) if who == 0 else (senders[0], after)
                    todo.append((log2, acked2, both, opens - opened, left - (1 - opened)))
    return logs


def moves(
    n: int, suffix_only: bool, log: tuple[Entry, ...], acked: int, pipe: Pipe | None
) -> Iterator[tuple[tuple[Entry, ...], int, Pipe | None, int]]:
    """What one sender may do next: the log, what is acked, its pipe, and whether it opened one."""
    if pipe is None or pipe[1]:
        known = max((id_ for id_, _ in log), default=0) if suffix_only else acked
        for start in range(1, min(known, n - 1) + 2):
            yield log, acked, (start, False), 1
    if pipe is not None and pipe[0] <= n:
        k, broken = pipe
        yield log, acked, (k + 1, True), 0  # lost on the way
        if not (suffix_only and broken):
            for settled in {0, acked}:
                yield (*log, (k, settled)), acked if broken else max(acked, k), (k + 1, broken), 0
                if not broken:
                    yield (*log, (k, settled)), acked, (k + 1, True), 0  # it came, and nobody was told
    if pipe is not None and not pipe[1] and acked and not suffix_only:
        yield (*log, (0, acked)), acked, pipe, 0


@cache
def logs_of(suffix_only: bool) -> list[list[Frame]]:
    found = sent(4, True, 3, 6) if suffix_only else sent(3, False, 3, 6)
    return [[block(id_, s) if id_ else beat(s) for id_, s in log] for log in sorted(found)]


@SUFFIX
def test_whoever_sends_a_reader_from_the_start_delivers_everything_and_misses_nothing(suffix_only: bool) -> None:
    logs = logs_of(suffix_only)
    assert len(logs) > 1_000
    n = 4 if suffix_only else 3
    for log in logs:
        reader = Reader(suffix_only=suffix_only)
        for frame in log:
            reader.feed(frame)
            assert reader.missed == []
        assert reader.ids == list(range(1, n + 1))
        assert reader.waiting == []


@SUFFIX
def test_whoever_sends_a_late_joiner_begins_anywhere_and_leaves_no_silent_hole(suffix_only: bool) -> None:
    n = 4 if suffix_only else 3
    logs = logs_of(suffix_only)
    for log in random.Random(2).sample(logs, min(150, len(logs))):
        for start in range(1, len(log)):
            reader = Reader(suffix_only=suffix_only, from_start=False).feed_all(log[start:])
            assert reader.waiting == []
            assert reader.cursor == n
            if reader.ids:
                holes = sum(last - first + 1 for first, last in reader.missed)
                assert len(reader.ids) + holes == n - reader.ids[0] + 1
                assert [o.id for o in reader.told if isinstance(o, Joined)] == reader.ids[:1]


# Two inputs under one name.


@START
def test_on_a_suffix_only_bus_two_inputs_never_mix_silently(from_start: bool) -> None:
    alphabet = [block(i) for i in (1, 2, 3, 4)] + [b(i) for i in (2, 3, 4)]
    for log in product(alphabet, repeat=5):
        Reader(suffix_only=True, from_start=from_start).feed_all(log)


def test_on_any_bus_two_inputs_never_mix_silently() -> None:
    alphabet = [block(i, s) for i in (1, 2, 3) for s in (0, i - 1)] + [b(i, s) for i in (2, 3) for s in (0, i - 1)]
    for log in product(alphabet, repeat=4):
        Reader(suffix_only=False).feed_all(log)


@SUFFIX
def test_a_diverged_line_is_told_once_and_moves_nothing_however_it_is_mixed_in(suffix_only: bool) -> None:
    """A whole line and another, each in order: whoever is first at block 2 stays, and the other is told at once."""
    mine, other = [block(i, i - 1) for i in (1, 2, 3, 4)], [b(i, i - 1) for i in (2, 3, 4)]
    for places in {tuple(sorted(p)) for p in permutations(range(7), 3)}:
        rest, others = iter(mine), iter(other)
        log = [next(others) if i in places else next(rest) for i in range(7)]
        if log[0] is not mine[0]:
            continue
        reader = Reader(suffix_only=suffix_only).feed_all(log)
        assert reader.ids == [1, 2, 3, 4]
        assert reader.missed == []
        second = reader.delivered[0][1]
        won = {f.chain for f in (mine if second is mine[1] else other)} | {mine[0].chain}
        assert all(f.chain in won for f in reader.delivered[0])
        assert sum(isinstance(o, InputDiffers) for o in reader.told) <= 1


@SUFFIX
def test_what_continues_from_a_diverged_block_is_dropped_and_proves_nothing(suffix_only: bool) -> None:
    reader = Reader(suffix_only=suffix_only).feed_all([block(1), block(2, 1)])
    assert reader.feed(b(3, 2)) == (
        InputDiffers(7, 0, 3, block(2).chain, b(3).link),
        Dropped(b(3, 2), "diverged"),
    )
    for i in range(4, 20):
        assert reader.feed(b(i, i - 1)) == (Dropped(b(i, i - 1), "diverged"),)
    assert reader.feed(b(3, 2)) == (Dropped(b(3, 2), "diverged"),)  # sent again, and not told again
    assert reader.ids == [1, 2]
    reader.feed_all([block(3, 2), block(4, 3)])
    assert reader.ids == [1, 2, 3, 4]
    assert reader.missed == []


def test_a_last_block_with_another_chain_is_diverged_and_so_is_its_line() -> None:
    reader = Reader(suffix_only=True).feed_all([block(1), block(2)])
    assert reader.feed(b(2)) == (InputDiffers(7, 0, 2, block(2).chain, b(2).chain), Dropped(b(2), "diverged"))
    assert reader.feed(b(3)) == (Dropped(b(3), "diverged"),)
    assert reader.feed(block(3)) == (block(3),)


def test_a_held_line_that_turns_out_to_be_another_is_dropped_with_what_continues_from_it() -> None:
    reader = Reader(suffix_only=False).feed_all([block(1), b(3), b(4), b(5), block(6)])
    assert reader.feed(block(2)) == (
        block(2),
        InputDiffers(7, 0, 3, block(2).chain, b(3).link),
        Dropped(b(3), "diverged"),
        Dropped(b(4), "diverged"),
        Dropped(b(5), "diverged"),
    )
    reader.feed_all([block(3), block(4), block(5)])
    assert reader.ids == [1, 2, 3, 4, 5, 6]


def test_what_is_remembered_of_diverged_lines_is_bounded() -> None:
    reader = Reader(suffix_only=True).feed_all([block(1), block(2)])
    for i in range(3, DIVERGED_KEPT + 50):
        reader.feed(b(i))
    assert len(reader.accept.sources[7].diverged) == DIVERGED_KEPT
    assert sum(isinstance(o, InputDiffers) for o in reader.told) == 1


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
    ("a beat proves", False, True, [A(1), A(3), beat(2)], [A(1), Missed(7, 0, 2, 2), A(3), Dropped(beat(2), "beat")]),
    ("a beat proves what nobody sees", False, True, [A(1), beat(3)],
     [A(1), Missed(7, 0, 2, 3), Dropped(beat(3), "beat")]),
    ("a beat of what was delivered says nothing", False, True, [A(1), beat(1)], [A(1), Dropped(beat(1), "beat")]),
    ("a beat proves on a suffix-only bus too", True, True, [A(1), beat(2)],
     [A(1), Missed(7, 0, 2, 2), Dropped(beat(2), "beat")]),
    ("a later copy of what is held proves more", False, True, [A(1), A(3), A(3, 2)],
     [A(1), Dropped(A(3, 2), "double"), Missed(7, 0, 2, 2), A(3)]),
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
def test_each_rule(suffix_only: bool, from_start: bool, log: list[Frame], wanted: list[Outcome]) -> None:
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
    assert accept.receive(A(10, 9)) == (Missed(7, 0, 1, 9), A(10, 9))


def test_a_restart_forgets_the_common_case_too() -> None:
    accept = Accept(suffix_only=True, from_start=True)
    accept.receive(A(1))
    accept.restart(from_start=True)
    assert accept.receive(A(2)) == (Missed(7, 0, 1, 1), A(2))


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
