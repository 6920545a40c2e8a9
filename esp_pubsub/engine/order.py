"""The written order of an engine: which entries of the order topic count, and what an entry says. Pure.

    An entry counts if its id is the next one and its link is the chain so far.
    Everything else on the topic is void, and nothing is ever passed over.

The theory. The order topic is a log with one order for all readers. So all members find the same first entry that
continues the chain, whoever wrote it, and however many write at once: a frozen leader that thaws writes entries that
continue a chain which others have continued before, and these are void for everybody. None of this rests on a clock, a
lease or an election. A member steps only on entries that it has read back, its own included.

This is stricter than the accept rule, and has to be: a block that comes twice is dropped, but an entry that a reader
passed over would be an order of its own.

An entry that is larger than a message of the bus takes several frames, and is taken with the last one. A new first
frame abandons an entry that is not finished: its writer died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import replace

from ..errors import BadFrame, Switched
from ..failover.belief import TIME_MAX
from ..failover.chains import Chains
from ..wire.frame import BODY_AT, ENTRY, MAP, Frame, Sealed, parse, seal

FIRST, LAST = 1, 2  # flags of a frame of an entry
Position = Annotated[int, msgspec.Meta(ge=0)]
_KEPT = 1_000  # chains of the last frames, for a writer that wants to know what became of its own


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """What an entry takes from one input: a log's messages up to a position, or a queue's messages themselves."""

    input: int
    to: Position | None
    """The position after the last one; None for a queue."""
    messages: tuple[bytes, ...]
    """A queue's; none for a log."""


class Poisoned(msgspec.Struct, frozen=True, array_like=True):
    """A step on which the model raises: a block of an input, named by its sequence and its id, or a timer."""

    source: int
    run: int
    id: int
    timer: str | None = None
    """Its key; `id` is the time at which it fired then, `source` and `run` are 0."""

    def __str__(self) -> str:
        if self.timer is not None:
            return f"timer:{self.id}:{self.timer}"
        return f"{self.source:016x}:{self.run}:{self.id}"

    @staticmethod
    def parse(text: str) -> Poisoned:
        """What `str` made of one. ValueError for any other text."""
        first, second, third = text.split(":", 2)
        third.encode()  # the key of a timer may have no half of a pair
        if first == "timer":
            return Poisoned(0, 0, int(second), third)
        return Poisoned(int(first, 16), int(second), int(third))


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What comes next: the timers that are due at `now`, then the inputs as they stand here."""

    now: Annotated[int, msgspec.Meta(ge=0, le=TIME_MAX)]
    """Microseconds since the epoch, by the engine's clock; it never decreases."""
    takes: tuple[Taken, ...]
    passes: tuple[Poisoned, ...] = ()
    """Steps on which the model raises, and which are to be passed over."""
    switch: str | None = None
    """From here on this version of the model runs. No step is taken, and no timer fires, on such an entry."""


class Version(msgspec.Struct, frozen=True, array_like=True):
    """Which version of the model runs, as the order says it up to some entry."""

    name: str
    since: int = 1
    """The last frame of the entry that says so; 1 is the beginning."""
    place: int = 1
    """From where on it steps, with the state that the version before had there; 1: it began with the engine."""
    before: Version | None = None
    idle: bool = True
    """No entry has come since but switches."""

    def after(self, entry: Entry, last: int) -> Version:
        """What runs after one more entry, whose last frame is this one.

        A version that has done nothing when the next switch comes is as good as never named: so a switch to a version
        that nobody has can be taken back, and what ran before goes on as if nothing had happened.
        """
        to, before = entry.switch, self.before
        if to == self.name or (to is None and not self.idle):
            return self
        if to is None:
            return replace(self, idle=False)
        if not self.idle or before is None:
            kept = None if before is None else replace(before, before=None)
            return Version(to, last, last, replace(self, before=kept))
        return replace(before if before.name == to else self, name=to, since=last)

    def part(self, ours: str) -> Version | None:
        """The version, this one or the one before, that a member of `ours` is of; None: it waits for a switch to it."""
        return next((each for each in (self, self.before) if each is not None and each.name == ours), None)

    def takes(self, version: str, place: int) -> bool:
        """Whether members of this version may begin with a snapshot of a version at a place."""
        if version == self.name and place >= self.place:
            return True
        return self.before is not None and (version, place) == (self.before.name, self.place)


class Span(NamedTuple):
    """Up to where a member of some version steps."""

    version: str
    since: int = 1
    """See `Version.since`; of this version, even where another one took over."""
    judged: int = 0
    """The order was read up to this entry before the member began: what it says up to there is no news."""
    end: int | None = None
    """Where another version took over, if that is known already."""

    def includes(self, place: int) -> bool:
        """Whether a snapshot of this place may be of this version, and of no later one of its name that did nothing."""
        return self.end is None or place <= self.end

    def check(self, order: Order) -> None:
        """Raise Switched if the version ends with what the order read last."""
        if order.last == self.end or (order.last > self.judged and order.runs.name != self.version):
            raise self.over(order.runs.name, order.last, needed=order.runs.place == order.last)

    def over(self, version: str, place: int, *, needed: bool = False) -> Switched:
        """The error for a member whose version is over, for this one goes on from this entry on. `needed`: with the
        state there; else this member's version has done nothing, and the snapshot with which it began is good.
        """
        return Switched(
            f"the engine runs version {version!r} of the model from entry {place} of its order on, and this member has "
            f"version {self.version!r}",
            version=version,
            place=place,
            needed=needed,
        )


def next_entry(now: int, before: int | None, due: int | None, takes: Sequence[Taken]) -> Entry | None:
    """What the writer proposes: all that there is to take, if there is something, or if a timer is due.

    `now` is by its clock, `before` of the entry before, `due` when the first timer is. Time never goes back.
    """
    now = max(now, before or 0)
    return Entry(now, tuple(takes)) if takes or (due is not None and due <= now) else None


@dataclass(frozen=True, slots=True)
class Proposal:
    """An entry that somebody wants to be the next one."""

    frames: tuple[Sealed, ...]

    @property
    def first(self) -> int:
        """The id of its first frame."""
        return self.frames[0].id

    @property
    def last(self) -> int:
        """The id of its last frame."""
        return self.frames[-1].id


class Order:
    """The entries that count, in the order of the topic. `last` and `chain`: the last frame that counts."""

    def __init__(self, source: int, run: int, last: int, chain: int, runs: Version = Version("")) -> None:  # noqa: B008
        """From after a frame that counts: the beginning, or the place of a snapshot. `runs`: the version there."""
        self.source = source
        self.run = run
        self.last = last
        self.chain = chain
        self.passed: set[Poisoned] = set()
        """What some entry so far passes over."""
        self.runs = runs
        self._chains = Chains(_KEPT)
        self._parts: list[bytes] = []  # of an entry that is not finished
        self._void = 0

    @property
    def void(self) -> int:
        """How many entries, or parts of them, did not count."""
        return self._void

    def read(self, data: bytes) -> Entry | None:
        """A message of the topic: the entry that it completes, if there is one. Foreign bytes say nothing."""
        try:
            frame = parse(data)
        except BadFrame:
            return None
        if (frame.kind, frame.source, frame.run) != (ENTRY, self.source, self.run):
            return None
        if frame.id != self.last + 1 or frame.link != self.chain:
            self._void += frame.id > 1  # a late beginning is nobody's fault
            return None
        self.last, self.chain = frame.id, frame.chain
        self._chains.add(frame.id, frame.chain)
        return self._part(frame)

    def _part(self, frame: Frame) -> Entry | None:
        if frame.flags & FIRST:
            self._parts.clear()
        elif not self._parts:
            return None  # its first frame is abandoned, or there never was one
        self._parts.append(frame.body)
        if not frame.flags & LAST:
            return None
        body = b"".join(self._parts)
        self._parts.clear()
        try:
            entry = _decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None  # it counts, for everybody, and says nothing
        self.passed.update(entry.passes)
        self.runs = self.runs.after(entry, frame.id)
        return entry

    def copy(self) -> Order:
        """One that stands at the same frame, to read ahead with."""
        return Order(self.source, self.run, self.last, self.chain, self.runs)

    def is_last(self, data: bytes) -> bool:
        """Whether a message is the last frame that counts."""
        try:
            frame = parse(data)
        except BadFrame:
            return False
        here = (ENTRY, self.source, self.run, self.last, self.chain)
        return (frame.kind, frame.source, frame.run, frame.id, frame.chain) == here

    def propose(self, entry: Entry, largest: int) -> Proposal:
        """The entry as the next one, in frames that are messages of at most `largest` bytes."""
        body, most = _encode(entry), largest - BODY_AT
        parts = [body[at : at + most] for at in range(0, len(body), most)]
        frames: list[Sealed] = []
        link = self.chain
        for at, part in enumerate(parts):
            flags = (FIRST if at == 0 else 0) | (LAST if at == len(parts) - 1 else 0)
            frame = seal(
                ENTRY, MAP, flags, source=self.source, run=self.run, id=self.last + 1 + at, link=link, body=part
            )
            frames.append(frame)
            link = frame.chain
        return Proposal(tuple(frames))

    def is_decided(self, proposal: Proposal) -> bool:
        """Whether all of it counts, or another entry counts in its place."""
        if self.last < proposal.first:
            return False
        newest = proposal.frames[min(self.last, proposal.last) - proposal.first]
        return newest.id == proposal.last or self._chains.get(newest.id) != newest.chain

    def counts(self, proposal: Proposal) -> bool:
        """Whether all of it counts: a chain says all that is before it."""
        return self._chains.get(proposal.last) == proposal.frames[-1].chain


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode
