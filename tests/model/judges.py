"""What takes part in the model check: the real objects, each beside somebody who judges what it does.

A `Core` is a member of a group with the input it reads. A `Reader` is a subscriber's accept rule and a user who knows
what must come: 1, 2, 3, ... of the highest run, one continuing the other, nothing missed that was not lost. A `Grouped`
is a reader with a ledger, whose user goes on, after a crash, behind what was confirmed and stored.

Frames are known by codes (line, run, id, settled): which input built it, and what its sender knew. Id 0 is a beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from esp_pubsub.bus import Message
from esp_pubsub.errors import InputDiffers, Stale
from esp_pubsub.failover.accept import Accept, Dropped, Outcome
from esp_pubsub.failover.ledger import Ledger, furthest, not_read, parse_state
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.membership import Event, Membership, Role
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.failover.words import Identity, Setup
from esp_pubsub.notices import InputDiffers as InputDiffersNotice
from esp_pubsub.notices import Missed, NewRun
from esp_pubsub.wire.frame import BEAT, BLOCK, ROWS, Frame, Sealed, frames, parse, seal

from .explorer import Broken

SOURCE = 7
FORK = 2  # lines are the same below this id


class Code(NamedTuple):
    """A frame."""

    line: str
    run: int
    id: int
    settled: int

    def __str__(self) -> str:
        what = f"{self.id}{self.line if self.line != 'A' else ''}" if self.id else "beat"
        return what + (f"/{self.settled}" if self.settled else "") + (f" run {self.run}" if self.run else "")


@cache
def sealed(line: str, run: int, id: int) -> Sealed:
    """A block of an input."""
    link = sealed(line, run, id - 1).chain if id > 1 else 0
    body = f"{line if id >= FORK else 'A'}{id}".encode()
    return seal(BLOCK, ROWS, count=1, source=SOURCE, run=run, id=id, link=link, body=body)


@cache
def frame(code: Code) -> Frame:
    """The frame as a reader parses it."""
    one = sealed(code.line, code.run, code.id) if code.id else seal(BEAT, source=SOURCE, run=code.run)
    return parse(frames([one], code.settled, 0)[0])


class Core:
    """A member and its input, by the input's name. `forks`: others of its group have another input, so that it may
    have to leave.
    """

    def __init__(self, input: str, run: int, *, suffix_only: bool, forks: bool = False) -> None:
        self.input = input
        self.forks = forks
        self.line = Line(SOURCE, run, Outbox(10, 1 << 20), suffix_only=suffix_only, buffer=10)
        self.line.reached_end()  # it takes a beat for what it is, also before it has read a block
        setup, identity = Setup(("topic",), ("schema",), "rows", "log"), Identity(input, 1, "", "", 1)
        self.member = Membership([self.line], setup, identity, run, patience=1.0)

    def tell(self, what: str, *arguments: object) -> None:
        """Call a method of the line; the member leaves if it does not agree."""
        try:
            getattr(self.line, what)(*arguments)
        except InputDiffers as differs:
            if not self.forks:
                raise Broken(f"it leaves for block {differs.id}, and there is but one input") from None
            step(self, "leave")
        except Stale:
            step(self, "leave")


class CoreView(NamedTuple):
    """What the others and the world may know of a member."""

    role: Role
    line: str
    run: int
    m: int
    first: int
    last: int
    eligible: bool
    chain: int | None


def view(core: Core) -> CoreView:
    """What can be seen of a member."""
    line = core.line
    return CoreView(
        core.member.role, core.input, line.run, line.m, line.outbox.first, line.outbox.last, core.member.eligible,
        line.chain_at(line.m),
    )  # fmt: skip


def give(core: Core) -> None:
    """Its input has one more block."""
    core.tell("give", sealed(core.input, core.line.run, core.line.outbox.last + 1))


def give_all(core: Core, blocks: int) -> None:
    """Its input comes."""
    while core.member.role != "left" and core.line.outbox.last < blocks:
        give(core)


def follow(core: Core, code: Code) -> None:
    """It reads a frame of the topic."""
    follow_all(core, (code,))


def follow_all(core: Core, codes: tuple[Code, ...]) -> None:
    """It reads some at once."""
    core.tell("follow_all", [(None, frame(code).data) for code in codes])


def hear(core: Core, run: int, settled: int, chain: int | None) -> None:
    """It reads a beat on the control topic."""
    core.tell("heard", run, settled, chain)


def acknowledge(core: Core, id: int) -> None:
    """The bus confirmed what it sent."""
    core.line.acked(id)


def rejoin(core: Core) -> None:
    """It follows the topic anew."""
    core.line.rejoin()
    core.line.reached_end()


def step(core: Core, *events: Event) -> None:
    """It takes other roles."""
    for event in events:
        core.member.step(event, 0.0, 0.0)


class Reader:
    """A subscriber and its judge. `next` is the id that must come, None while it joins. One that came late may miss
    what was sent before it came, blocks below `bound`, but nothing else. `gone` is what it may miss.
    """

    def __init__(
        self, *, suffix_only: bool, from_start: bool, window: int, bound: int = 0, forks: bool = False
    ) -> None:
        self.accept = Accept(suffix_only=suffix_only, from_start=from_start, window=window)
        self.run = 0
        self.next: int | None = 1 if from_start else None
        self.chain: int | None = 0 if from_start else None
        self.bound = bound
        self.forks = forks
        self.gone = frozenset((0, id) for id in range(1, bound))

    def judge(self, outcome: Outcome) -> None:
        """What its user thinks of it."""
        if isinstance(outcome, Frame):
            self._delivered(outcome)
        elif isinstance(outcome, Missed):
            self._missed(outcome)
        elif isinstance(outcome, NewRun):
            if outcome.new <= self.run:
                raise Broken(f"run {outcome.new} replaced run {self.run}")
            self.run, self.next, self.chain = outcome.new, 1, 0
        elif isinstance(outcome, InputDiffersNotice) and not self.forks:
            raise Broken(f"block {outcome.id} is said to differ, and there is but one input")
        elif isinstance(outcome, Dropped) and outcome.why == "beyond":
            raise Broken(f"block {outcome.frame.id} is beyond the window")

    def _delivered(self, frame: Frame) -> None:
        if frame.run != self.run and self.next != 1:
            raise Broken(f"block {frame.id} of run {frame.run} was delivered in run {self.run}")
        self.run = frame.run
        if self.next is None and frame.id > self.bound:
            raise Broken(f"it joined at block {frame.id}, but {self.bound} was sent after it had come")
        if self.next is not None and frame.id != self.next:
            kind = "delivered twice" if frame.id < self.next else f"delivered where {self.next} must come"
            raise Broken(f"block {frame.id} was {kind}")
        if self.chain is not None and frame.link != self.chain:
            raise Broken(f"block {frame.id} of another input was delivered behind this one, and nothing said")
        self.next, self.chain = frame.id + 1, frame.chain

    def _missed(self, missed: Missed) -> None:
        if self.next is None or missed.first != self.next:
            raise Broken(f"{missed.first} to {missed.last} were told as missed where {self.next} must come")
        lost = [id for id in range(missed.first, missed.last + 1) if (missed.run, id) not in self.gone]
        if lost and not self.forks:
            raise Broken(f"block {lost[0]} was told as missed, and nothing took it")
        self.next, self.chain = missed.last + 1, None


class ReaderView(NamedTuple):
    """What the world may know of a reader."""

    run: int
    next: int | None
    holds: tuple[int, ...]
    gone: frozenset[tuple[int, int]]
    bound: int
    unconfirmed: tuple[int, ...] = ()


def reader_view(reader: Reader) -> ReaderView:
    """What can be seen of a reader."""
    source = reader.accept.sources.get(SOURCE)
    unconfirmed = tuple(id for _, id in reader.serials) if isinstance(reader, Grouped) else ()
    holds = tuple(source.hold) if source else ()
    return ReaderView(reader.run, reader.next, holds, reader.gone, reader.bound, unconfirmed)


def receive(reader: Reader, code: Code) -> None:
    """It reads a frame."""
    for outcome in reader.accept.receive(frame(code)):
        reader.judge(outcome)


def lose(reader: Reader, code: Code) -> None:
    """Retention took a frame that it had not read."""
    reader.gone |= {(code.run, code.id)}


class Standing:
    """How far the whole sequence stands in what a log holds, or a queue was given."""

    def __init__(self, *, suffix_only: bool) -> None:
        self._accept = Accept(suffix_only=suffix_only, from_start=True)
        self._read = 0
        self._last = 0

    def read(self, all_of_it: Sequence[bytes]) -> int:
        """Read on to the end, and say up to which block nothing is missing. Raises Broken if something never comes."""
        for outcome in self._accept.receive_all([(None, data) for data in all_of_it[self._read :]]):
            if isinstance(outcome, Frame):
                self._last = outcome.id
            elif isinstance(outcome, Missed):
                raise Broken(f"{outcome.first} to {outcome.last} are missing forever")
        self._read = len(all_of_it)
        return self._last


class Grouped(Reader):
    """A reader of a group. `serials` and ids are of blocks that its user has and has not confirmed, `confirmed` is the
    last one that was, `unstored` says that there is something to store; `released` is what a queue lets go of.
    """

    def __init__(self, *, suffix_only: bool, from_start: bool, window: int, bound: int, replay: bool) -> None:
        super().__init__(suffix_only=suffix_only, from_start=from_start, window=window, bound=bound)
        self.replay = replay
        self.read_to: int | None = None
        self.ledger = Ledger()
        for name in vars(self.ledger).keys() & {"_first", "_serial", "confirmed"}:
            setattr(self.ledger, name, int(name == "_first"))  # equal ledgers must look equal, whoever made them
        self.serials: list[tuple[int, int]] = []
        self.confirmed = 0
        self.unstored = False
        self.released: tuple[int, ...] = ()


def take(reader: Grouped, code: Code, position: int) -> None:
    """It reads the message at a position."""
    reader.released = ()
    if reader.replay:
        if not not_read([Message(position, frame(code).data)], reader.read_to):
            return
        reader.read_to = position
    reader.ledger.arrived(position)
    _follow(reader, reader.accept.receive(frame(code)._replace(position=position)))


def _follow(reader: Grouped, outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        reader.judge(outcome)
        if isinstance(outcome, Frame):
            reader.serials.append((reader.ledger.delivered(outcome), outcome.id))
        elif isinstance(outcome, Dropped):
            dropped = outcome.frame
            if reader.ledger.dropped(dropped.position, dropped, outcome.admits):
                reader.released += (dropped.position,)


@cache
def other_state() -> bytes:
    """What a group has stored that confirmed a block of another source, and that did not begin at the start."""
    ledger = Ledger()
    ledger.known[SOURCE + 1] = (0, 1, None)
    return ledger.state(from_start=False)


def released(reader: Grouped) -> tuple[int, ...]:
    """What its last read lets go of."""
    return reader.released


def confirm(reader: Grouped) -> None:
    """Its user confirms the oldest block that is not confirmed."""
    serial, id = reader.serials.pop(0)
    reader.unstored = reader.ledger.confirm(serial) or reader.unstored
    reader.confirmed = max(reader.confirmed, id)


class ToStore(NamedTuple):
    """Whether there is any need to store; position and state that may be, how far that goes, and what was confirmed."""

    needed: bool
    position: int | None
    state: bytes
    known: int
    confirmed: int


def to_store(reader: Grouped) -> ToStore:
    """What may be stored now."""
    ledger = reader.ledger
    known = ledger.known[SOURCE][1] if SOURCE in ledger.known else 0
    return ToStore(
        reader.unstored, ledger.done, ledger.state(from_start=reader.accept.from_start), known, reader.confirmed
    )


def stored(reader: Grouped) -> None:
    """What was to be stored is."""
    reader.unstored = False
    reader.ledger.stored(reader.ledger.confirmed)


def resume(reader: Grouped, state: bytes | None, committed: int, redelivered: bool) -> None:
    """Its feed died and another one was opened, as Subscriber does it. `committed`: confirmed and stored by anybody."""
    if redelivered:
        reader.accept.redelivery()
        reader.ledger.redelivery()
    outcomes: list[Outcome] = []
    if state is not None:
        reader.accept.from_start, known = parse_state(state)
        reader.ledger.known = furthest(reader.ledger.known, known)
        outcomes = reader.accept.resume(known)
    if committed and (reader.next is None or committed + 1 > reader.next):
        reader.next, reader.chain = committed + 1, None
    reader.confirmed = max(reader.confirmed, committed)
    _follow(reader, outcomes)
