"""Frames as senders write them, and a reader that checks the accept rule after every one."""

from collections.abc import Iterable
from functools import cache

import pytest

from esp_pubsub.failover.accept import Accept, Dropped, Outcome
from esp_pubsub.notices import InputDiffers, Joined, Missed, NewRun
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
            return min(frame.settled, max((w.id for w in self.waiting), default=self.cursor))
        return frame.id - 1 if self.suffix_only else min(frame.settled, frame.id - 1)

    def feed(self, frame: Frame) -> tuple[Outcome, ...]:
        if frame.kind == BEAT and frame.run > self.run:
            assert self.accept.receive(frame) == (Dropped(frame, "beat"),), "blocks begin a sequence, beats do not"
            return self.accept.receive(frame)
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
            self.proof = max(self.proof, self.proves(frame))
            self.waiting.append(frame)
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
                assert (
                    o.frame.id <= max(self.cursor, self.proof)
                    or o.frame.chain in self.diverged
                    or any(w.id == o.frame.id for w in self.waiting)
                )
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
