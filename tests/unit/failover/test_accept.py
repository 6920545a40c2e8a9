"""The accept rule, explored: every order of arrival of short sequences, against invariants that know no implementation.

`Reader` feeds an `Accept` and checks after every frame what must hold whatever came: what is delivered goes up by one,
except where exactly the hole was told; nothing twice; each block continues the one before; what is told as missed was
proven; and nothing is held that could be delivered or was proven to be late.
"""

import random
from collections.abc import Iterator
from functools import cache
from itertools import permutations, product

import pytest

from esp_pubsub.failover.accept import DIVERGED_KEPT, Dropped
from esp_pubsub.notices import InputDiffers, Joined
from esp_pubsub.wire.frame import Frame
from tests.unit.failover.accept_reader import START, SUFFIX, Reader, b, beat, block

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
    for missing in range(1, n):  # of the last one the next block says that it is missing
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
            reader.feed(block(n + 1, n))  # the next one says what is missing at the end
            assert reader.cursor == n + 1
            holes = sum(last - first + 1 for first, last in reader.missed)
            assert len(reader.ids) + holes == n + 1 - reader.ids[0] + 1
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
