"""The accept rule: which frames of a topic are delivered, in which order, and what is told besides (PROTOCOL 4).

The theory. Senders write 1, 2, 3, ... and go back after trouble, so a reader sees every block at least once, perhaps
many times, from one or several senders. Per source it keeps the last block delivered and its chain:

    id <= last       a double: drop
    id == last + 1   deliver, if its link is our chain; else it belongs to another input: drop and tell
    id >  last + 1   hold, until the blocks between have come, or a frame *proves* that they will not

A frame proves that everything up to some id stood on the topic in front of it. On a bus that can only lose the end of
what one sender wrote (`suffix_only`) a block proves its predecessor; on any other bus only `settled` counts, what its
sender knew to be confirmed. What is proven and has not come will not be delivered and is told as Missed. No clock, no
term, no lease: several senders at once are nothing but doubles. Subscribers, standbys, Spark's planner and the history
checker all run this code.

What a diverged frame says is not believed: it proves nothing, and neither does what continues from its chain.

A reader that starts again, from what was stored, gets the blocks behind that once more. Where one of them was delivered
because another frame proved that nothing comes before it, that frame has to come again with it: a `Dropped` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..bus import Run
from ..errors import BadFrame
from ..notices import BadMessage, Forgotten, InputDiffers, Joined, Missed, NewRun
from ..wire.frame import BEAT, BLOCK, LIMITS, WINDOW_FRAMES, Frame, Limits, continuing, parse, source_of

DIVERGED_KEPT = 1_024
_lines: WeakKeyDictionary[Run, dict[tuple[Any, ...], list[Frame]]] = WeakKeyDictionary()
"""Of messages that several readers share, the lines of blocks that one of them has found there (decision 11)."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A frame that is not delivered: why is `double`, `stale`, `diverged`, `beat` or `beyond`.

    `admits` is the last block of its source that was delivered because another frame proved that nothing comes before
    it, if this frame proves that too; else 0.
    """

    frame: Frame
    why: str
    admits: int = 0


Outcome = Frame | Dropped | Missed | Joined | NewRun | InputDiffers | Forgotten | BadMessage


class Source:
    """What a reader knows of one sequence: run, last id delivered and its chain (None: unknown), frames held.

    `admitted` is the last block delivered that needed another frame's proof; 0 if none did.
    """

    __slots__ = ("admitted", "chain", "diverged", "hold", "joining", "last", "number", "run")

    def __init__(self, number: int, run: int, last: int = 0, chain: int | None = 0, *, joining: bool = False) -> None:
        self.number = number
        self.run = run
        self.last = last
        self.chain = chain
        self.joining = joining
        self.admitted = 0
        self.hold: dict[int, Frame] = {}
        self.diverged: dict[int, int] = {}


class Accept:
    """The rule for one reader of one topic. Feed it frames in the order of the bus."""

    def __init__(
        self, *, suffix_only: bool, from_start: bool, window: int = WINDOW_FRAMES, max_sources: int = 10_000
    ) -> None:
        """`from_start`: nothing of the topic lies in front of the first frame, so the first block must be block 1."""
        self.suffix_only = suffix_only
        self.from_start = from_start
        self.window = window
        self.max_sources = max_sources
        self.joined_at_run: dict[int, int] = {}
        self._delivered: dict[int, tuple[int, int]] = {}  # in earlier incarnations, by source: its run, and up to where
        self.sources: dict[int, Source] = {}

    def receive_all(self, messages: Sequence[tuple[Any, bytes]], limits: Limits = LIMITS) -> list[Outcome]:
        """What follows from messages, each with its position: for each what `receive` says, or what is wrong with it.

        Most of what a topic holds are the next blocks of a source in order: whole lines of those are taken in one loop.
        """
        outcomes: list[Outcome] = []
        at = 0
        while at < len(messages):
            line = self._continue(messages, at, limits)
            if line:
                outcomes += line
                at += len(line)
                continue
            position, data = messages[at]
            at += 1
            try:
                outcomes += self.receive(parse(data, position, limits))
            except BadFrame as e:
                outcomes.append(BadMessage(position, e.reason))
        return outcomes

    def _continue(self, messages: Sequence[tuple[Any, bytes]], at: int, limits: Limits) -> list[Frame]:
        """The blocks from there on that come next in a source of which nothing is held and nothing is odd."""
        number = source_of(messages[at][1])
        source = self.sources.get(number)
        if source is None or source.chain is None or source.hold or source.joining or source.diverged:
            return []
        wanted = number, source.run, source.last, source.chain, 0 if self.suffix_only else self.window, limits
        lines = _lines.setdefault(messages, {}) if isinstance(messages, Run) else {}
        line = lines.get((at, *wanted))
        if line is None:
            line = lines[at, *wanted] = continuing(messages[at:] if at else messages, *wanted)
        if line:
            source.last, source.chain = line[-1].id, line[-1].chain
            self.sources[number] = self.sources.pop(number)  # the order in which they were last seen
        return line

    def receive(self, frame: Frame) -> tuple[Outcome, ...]:
        """What follows from one frame: frames to deliver (as they are), Dropped ones, and notices, in order."""
        if frame.kind not in (BLOCK, BEAT):
            return (BadMessage(frame.position, f"a frame of kind {frame.kind} has no place on a topic of blocks"),)
        return tuple(self._receive(frame, self.sources.get(frame.source)))

    def _receive(self, frame: Frame, source: Source | None) -> Iterator[Outcome]:
        if self._is_beyond(frame, source):
            yield Dropped(frame, "beyond")
            return
        if frame.kind == BEAT:
            yield from self._beat(frame, source)
            return
        if source is None:
            yield from self._make_room()
            source = self._begin(frame)
        elif frame.run < source.run:
            yield Dropped(frame, "stale")
            return
        elif frame.run > source.run:
            yield from (self._drop(source, held, "stale") for held in source.hold.values())
            yield NewRun(frame.source, source.run, frame.run)
            source = self._begin(frame)
        self.sources[frame.source] = self.sources.pop(frame.source)  # the order in which they were last seen
        yield from self._block(frame, source)

    def _beat(self, frame: Frame, source: Source | None) -> Iterator[Outcome]:
        """A beat proves that what is held may be delivered, and nothing of blocks that did not come: those are told
        when the next one comes. So it cannot begin a sequence, nor end one.
        """
        if source is None or frame.run != source.run:
            yield Dropped(frame, "stale" if source is not None and frame.run < source.run else "beat")
            return
        yield from self._prove(source, min(frame.settled, max(source.hold, default=source.last)))
        yield self._drop(source, frame, "beat")

    def _block(self, frame: Frame, source: Source) -> Iterator[Outcome]:
        known_diverged = source.diverged.get(frame.link) == frame.id - 1 or source.diverged.get(frame.chain) == frame.id
        if known_diverged:
            self._distrust(source, frame)
            yield Dropped(frame, "diverged")
        elif frame.id <= source.last:
            if frame.id == source.last and source.chain is not None and frame.chain != source.chain:
                yield from self._diverge(source, frame, source.chain, frame.chain)
            else:
                yield self._drop(source, frame, "double")
        elif frame.id in source.hold:
            if frame.chain != source.hold[frame.id].chain:
                yield Dropped(frame, "double")
                return
            yield from self._prove(source, self.proven(frame))  # the same block, whose sender may know more by now
            yield self._drop(source, frame, "double")
        else:
            source.hold[frame.id] = frame
            yield from self._prove(source, self.proven(frame))

    def _is_beyond(self, frame: Frame, source: Source | None) -> bool:
        """A block without an id, or further ahead of its own `settled` than any sender may be: it must move nothing."""
        if frame.kind != BLOCK or (frame.id and (self.suffix_only or frame.id <= frame.settled + self.window)):
            return False
        return source is None or frame.run > source.run or (frame.run == source.run and frame.id > source.last)

    def proven(self, frame: Frame) -> int:
        """How far a frame proves that all before it stood on the topic in front of it."""
        if frame.kind != BLOCK:
            return frame.settled
        return frame.id - 1 if self.suffix_only else min(frame.settled, frame.id - 1)

    def _drop(self, source: Source, frame: Frame, why: str) -> Dropped:
        """Drop a frame of the source's run, and say what was delivered that needs it, or another one that proves it."""
        return Dropped(frame, why, source.admitted if self.proven(frame) >= source.admitted - 1 else 0)

    def _begin(self, frame: Frame) -> Source:
        """A source never seen, or its next run: from 0, or from where this frame proves that we joined."""
        number, last = frame.source, 0
        delivered_run, delivered = self._delivered.pop(number, (-1, 0))
        joins = not self.from_start
        if number in self.sources:
            joins = joins and frame.run <= self.joined_at_run.get(number, -1)
        if joins:
            last = self.proven(frame)
        elif delivered_run == frame.run:
            last = min(delivered, self.proven(frame))
        source = self.sources[number] = Source(number, frame.run, last, None if last else 0, joining=joins)
        return source

    def _prove(self, source: Source, proven: int) -> Iterator[Outcome]:
        """Deliver what stands in order, and pass over what is proven to have stood in front and did not come."""
        yield from self._deliver_held(source)
        while source.last < proven:
            following = min((id for id in source.hold if id <= proven), default=proven + 1)
            first, source.last, source.chain = source.last + 1, following - 1, None
            if not source.joining:
                yield Missed(source.number, source.run, first, source.last)
            yield from self._deliver_held(source)

    def _deliver_held(self, source: Source) -> Iterator[Outcome]:
        while source.hold:
            frame = source.hold.pop(source.last + 1, None)
            if frame is None:
                return
            if source.chain is not None and frame.link != source.chain:
                yield from self._diverge(source, frame, source.chain, frame.link)
                return
            if source.chain is None and self.proven(frame) < source.last:
                source.admitted = frame.id
            source.last = frame.id
            source.chain = frame.chain
            if source.joining:
                source.joining = False
                yield Joined(source.number, source.run, frame.id)
            yield frame

    def _diverge(self, source: Source, frame: Frame, ours: int, theirs: int) -> Iterator[Outcome]:
        """Drop a frame of another input, and what was held and continues from it. Told once for the whole line."""
        yield InputDiffers(frame.source, frame.run, frame.id, ours, theirs)
        self._distrust(source, frame)
        yield Dropped(frame, "diverged")
        while (held := source.hold.get(frame.id + 1)) is not None and held.link == frame.chain:
            frame = source.hold.pop(held.id)
            self._distrust(source, frame)
            yield Dropped(frame, "diverged")

    def _distrust(self, source: Source, frame: Frame) -> None:
        source.diverged[frame.chain] = frame.id
        if len(source.diverged) > DIVERGED_KEPT:
            del source.diverged[next(iter(source.diverged))]

    def _make_room(self) -> Iterator[Outcome]:
        """Forget the source not seen for longest. From then on an unknown source may be one that was forgotten."""
        if len(self.sources) >= self.max_sources:
            number = next(iter(self.sources))
            source = self.sources.pop(number)
            self.from_start = False
            yield from (self._drop(source, held, "stale") for held in source.hold.values())
            yield Forgotten(number, source.run, source.last)

    def redelivery(self) -> None:
        """A queue's feed died: what is held comes again, in its old place."""
        for source in self.sources.values():
            source.hold.clear()

    def restart(self, *, from_start: bool) -> list[Frame]:
        """Another incarnation of the topic: every source is unknown again, and may begin again in its run. But where it
        goes on, what was delivered before is not missed. Returns what was held.
        """
        held = [frame for source in self.sources.values() for frame in source.hold.values()]
        self._delivered |= {source.number: (source.run, source.last) for source in self.sources.values()}
        while len(self._delivered) > self.max_sources:
            del self._delivered[next(iter(self._delivered))]
        self.sources.clear()
        self.joined_at_run.clear()
        self.from_start = from_start
        return held

    def resume(self, positions: Mapping[int, tuple[int, int, int | None]]) -> list[Outcome]:
        """Go on from stored `source -> (run, last, chain)`, where that is further than what was delivered here.

        A source that still joins has delivered nothing; it goes on joining if nothing of it is stored. Returns what
        follows for frames that are held, as `receive` does.
        """
        outcomes: list[Outcome] = []
        for number, (run, last, chain) in positions.items():
            before = self.sources.get(number)
            if before is not None and (run, last) <= (before.run, -1 if before.joining else before.last):
                continue
            source = self.sources[number] = Source(number, run, last, chain)
            if before is None:
                continue
            if run == before.run:
                source.diverged = before.diverged
                source.hold = {id: frame for id, frame in before.hold.items() if id > last}
            why = "double" if run == before.run else "stale"
            outcomes += [Dropped(frame, why) for id, frame in before.hold.items() if id not in source.hold]
            outcomes += self._deliver_held(source)
        return outcomes
