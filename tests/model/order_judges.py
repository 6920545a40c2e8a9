"""A member of an engine with a written order, for the model check: the real Order, Steps, Timers, lines. See worlds.py.

Beside them stands a judge: the user's model. It knows in which order blocks must come, keeps its own book of timers,
and writes down what it was called for and when, its `trace`. What stepping.py and written.py do between these classes
is here no more than its discipline, each part of it a function that a mutant can replace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from esp_pubsub.bus import Message
from esp_pubsub.encode import Encoder
from esp_pubsub.engine.model import Calls
from esp_pubsub.engine.order import Entry, Order, Proposal, Taken, next_entry
from esp_pubsub.engine.out import Out
from esp_pubsub.engine.snapshot import InputState, LineState, Snapshot, Writer, accept_state, sources_of
from esp_pubsub.engine.snapshot import read as read_file
from esp_pubsub.engine.snapshots import Pending, Snapshots
from esp_pubsub.engine.steps import Reading, Steps
from esp_pubsub.errors import InputDiffers, StepFailed
from esp_pubsub.events import Block
from esp_pubsub.failover.accept import Accept
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.membership import Membership
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.failover.words import Identity, Setup
from esp_pubsub.schema import Schema
from esp_pubsub.wire.frame import BLOCK, BODY_AT, ROWS, Frame, frames, parse, seal
from esp_pubsub.writer import BlockWriter

from .explorer import Broken, freeze, thaw
from .judges import SOURCE, Reader

LINES = "PR"
LOG, QUEUE = 0, 1
WINDOWS = ("Log", "Queue")
BEGUN = 77  # the chain of entry 1
_ORDER = 5
_SCHEMA = Schema("step*:int64,now:int64")
_ENCODER = Encoder(_SCHEMA, rebuild=True)
_SETUP = Setup(tuple(LINES), ("schema",) * len(LINES), "rows", "log")

Act = tuple[str, str, int]
"""What a step does: `emit` to a line, `wake` a timer at a time, `cancel` one."""
Plan = tuple[tuple[str, tuple[Act, ...]], ...]
"""By the name of a step, `Log 1` or a timer's key."""
Logs = tuple[bytes, ...]
"""What stands on the log input."""


@cache
def message(input: int, id: int, copy: int) -> bytes:
    """A block of an input, as one of two members of its group sent it."""
    return frames([_sealed(input, id)], 0, 0, copy)[0]


@cache
def _sealed(input: int, id: int) -> Any:
    link = _sealed(input, id - 1).chain if id > 1 else 0
    return seal(BLOCK, ROWS, 0, 1, SOURCE + input, 0, id, _SCHEMA.fingerprint, link, f"{input} {id}".encode())


class Model:
    """The user's model and its judge. `due` are timers that have to fire before anything else. One with a `flaw` goes
    wrong in the step of that name: its state is another one from then on, and so is what it emits.
    """

    def __init__(self, plan: Plan, flaw: str = "") -> None:
        self.plan = plan
        self.flaw = flaw
        self.is_wrong = False
        self.trace: tuple[tuple[str, int], ...] = ()
        self.next = [1] * len(WINDOWS)
        self.now = 0
        self.timers: dict[str, int] = {}
        self.due: tuple[str, ...] = ()

    def tick(self, now: int) -> None:
        """An entry begins."""
        if now < self.now:
            raise Broken(f"time went back from {self.now} to {now}")
        self.done()
        self.now = now
        due = sorted((at, key) for key, at in self.timers.items() if at <= now)
        self.due = tuple(key for _, key in due)
        for key in self.due:
            del self.timers[key]

    def done(self) -> None:
        """An entry was carried out, or its timers were."""
        if self.due:
            raise Broken(f"timer {self.due[0]} was due and did not fire")

    def step(self, window: str, block: Block, out: Out) -> None:
        """A block."""
        self.done()
        at = WINDOWS.index(window)
        if block.id != self.next[at]:
            raise Broken(f"it stepped on block {block.id} of {window} where {self.next[at]} must come")
        self.next[at] += 1
        self._act(f"{window} {block.id}", out)

    def timer(self, key: str, out: Out) -> None:
        """A timer."""
        if self.due[:1] != (key,):
            raise Broken(f"timer {key} fired where {self.due[:1] or 'none'} is due")
        self.due = self.due[1:]
        self._act(key, out)

    def _act(self, name: str, out: Out) -> None:
        self.trace = (*self.trace, (name, out.now))
        for what, on, at in dict(self.plan).get(name, ()):
            if what == "emit":
                out.emit(on, [(len(self.trace), out.now + 1_000 * self.is_wrong)])
                continue
            self.due = tuple(key for key in self.due if key != on)
            if what == "wake":
                self.timers[on] = at
                out.wake(on, at)
            else:
                self.timers.pop(on, None)
                out.cancel(on)
        self.is_wrong = self.is_wrong or name == self.flaw


class Member:
    """A member. `pending` is what remains of the entry at hand, `carried` are the messages that entries contained,
    `counted` the frames that counted. `taken` is how far entries took the log. It has `left` once it found that it
    differs.
    """

    def __init__(self, name: str, plan: Plan, *, room: int, flaw: str = "") -> None:
        self.model = Model(plan, flaw)
        self.left = False
        outboxes = [Outbox(room, 1 << 20) for _ in LINES]
        lines = [Line(SOURCE, 0, outbox, suffix_only=True, buffer=10) for outbox in outboxes]
        for line in lines:
            line.reached_end()
        writers = [BlockWriter(_SCHEMA, _ENCODER, outbox, SOURCE, 0, 1 << 20) for outbox in outboxes]
        self.steps = Steps(
            Calls(self.model.step, self.model.timer, timed=True),
            [
                Reading(window, _SCHEMA, Accept(suffix_only=at == LOG, from_start=True))
                for at, window in enumerate(WINDOWS)
            ],
            dict(zip(LINES, zip(writers, lines, strict=True), strict=True)),
            step_blocks=10,
            step_bytes=1 << 20,
        )
        self.member = Membership(lines, _SETUP, Identity(name, ord(name), "", "", 1), 0, patience=1.0)
        self.order = Order(_ORDER, 0, 1, BEGUN)
        self.pending: deque[tuple[Any, ...]] = deque()
        self.taken = 0
        self.carried: frozenset[bytes] = frozenset()
        self.counted: tuple[bytes, ...] = ()
        self.proposal: Proposal | None = None
        self.offered = 0
        self.confirms = 0


class LineView(NamedTuple):
    """What can be seen of a line."""

    m: int
    first: int
    last: int
    chain: int | None


class MemberView(NamedTuple):
    """What can be seen of a member. `blocks` are the chains of all that it emitted, if it keeps them all; `confirms`
    how many messages of the queue it may confirm.
    """

    trace: tuple[tuple[str, int], ...]
    counted: tuple[bytes, ...]
    carried: frozenset[bytes]
    taken: int
    pending: int
    proposes: bool
    confirms: int
    due: int | None
    lines: tuple[LineView, ...]
    eligible: bool
    next: tuple[int, ...]
    timers: int
    left: bool


def view(core: Member) -> MemberView:
    """What can be seen of a member."""
    lines = tuple(
        LineView(line.m, line.outbox.first, line.outbox.last, line.chain_at(line.m)) for line in core.member.lines
    )
    return MemberView(
        core.model.trace, core.counted, core.carried, core.taken, len(core.pending), core.proposal is not None,
        core.confirms, core.steps.timers.next, lines, core.member.eligible, tuple(core.model.next),
        len(core.model.timers), core.left,
    )  # fmt: skip


def unsent(core: Member) -> tuple[tuple[bytes, ...], ...]:
    """The blocks of each line after m, as frames."""
    return tuple(
        tuple(frames(line.outbox.after(line.m, 100, 1 << 20), 0, 0)) if line.eligible else ()
        for line in core.member.lines
    )


def receive(reader: Reader, data: bytes) -> None:
    """A subscriber reads a frame."""
    for outcome in reader.accept.receive(parse(data)):
        reader.judge(outcome)


# what every member does


def read(core: Member, data: bytes, log: Logs) -> None:
    """It reads a message of the order, and carries out the entry that is complete with it."""
    before = core.order.last, core.order.chain
    entry = core.order.read(data)
    if (core.order.last, core.order.chain) != before:
        core.counted = (*core.counted, data)
    if entry is not None:
        carry_out(core, entry, log)
    decide(core)


def carry_out(core: Member, entry: Entry, log: Logs) -> None:
    """An entry counts."""
    core.pending.append(("tick", entry.now))
    core.pending.extend(("taken", take.input, take.to, take.messages) for take in entry.takes)
    core.pending.append(("done",))
    go_on(core, log)


def go_on(core: Member, log: Logs) -> None:
    """It goes on with the entry at hand, as far as its lines have room."""
    steps = core.steps
    while core.pending and not core.left:
        what, *of = core.pending[0]
        if what in ("fires", "block") and not has_room(core):
            return
        core.pending.popleft()
        if what == "tick":
            (steps.now,) = of
            core.model.tick(of[0])
            core.pending.extendleft([("fires", key) for key in reversed(steps.timers.due(of[0]))])
        elif what == "taken":
            input, to, messages = of
            found = blocks(core, input, to, messages, log)
            core.pending.extendleft([("block", input, frame) for frame in reversed(found)])
        elif what == "done":
            core.model.done()
        else:
            _step(core, what, *of)


def _step(core: Member, what: str, *of: Any) -> None:
    try:
        if what == "block":
            core.steps.take(*of)
        elif core.steps.timers.take(*of):
            core.steps.fire(*of)
    except StepFailed as failed:
        raise failed.__cause__ if isinstance(failed.__cause__, Broken) else failed from None
    except InputDiffers as differs:
        leave(core, f"it emits another block {differs.id} than the one on the bus")


def has_room(core: Member) -> bool:
    """A step may begin."""
    return all(core.member.room(line, 0) for line in core.member.lines)


def blocks(core: Member, input: int, to: int | None, messages: Sequence[bytes], log: Logs) -> list[Frame]:
    """The blocks to step on in what an entry takes of an input."""
    if input == QUEUE:
        core.carried |= frozenset(messages)
        found = [Message(None, data) for data in messages]
    else:
        assert to is not None
        found = [Message(at, data) for at, data in enumerate(log[:to])][core.taken :]
        core.taken = max(core.taken, to)
    return [outcome for outcome in core.steps.receive(input, found) if isinstance(outcome, Frame)]


# what one that believes to lead does


def propose(core: Member, clock: int, end: int, queue: tuple[bytes, ...], largest: int, _: Logs) -> None:
    """It proposes to take all that it has read."""
    takes = [Taken(LOG, end, ())] if end > core.taken else []
    if queue:
        takes.append(Taken(QUEUE, None, queue))
    entry = next_entry(clock, core.steps.now, core.steps.timers.next, takes)
    assert entry is not None, "it is asked where there is something"
    core.proposal, core.offered = core.order.propose(entry, BODY_AT + largest), len(queue)


def written(core: Member) -> tuple[bytes, ...]:
    """The frames of what it proposes."""
    return () if core.proposal is None else tuple(frames(core.proposal.frames, 0, 0))


def decide(core: Member) -> None:
    """It knows what became of its proposal, and has carried out what counts."""
    if core.proposal is None or core.pending or not core.order.is_decided(core.proposal):
        return
    if core.order.counts(core.proposal):
        core.confirms += core.offered
    core.proposal, core.offered = None, 0


def give_up(core: Member, _: Logs) -> None:
    """It leads no more, or had trouble with the order topic or its queue."""
    core.proposal, core.offered, core.confirms = None, 0, 0


def confirmed(core: Member, _: Logs) -> None:
    """The queue holds no more what it confirmed."""
    core.confirms = 0


# what is known of the bus


def acknowledge(core: Member, at: int, id: int, log: Logs) -> None:
    """The bus confirmed what it sent in a line."""
    core.member.lines[at].acked(id)
    go_on(core, log)
    decide(core)


def hear(core: Member, at: int, m: int, chain: int | None, log: Logs) -> None:
    """It hears how far a line is on the bus; of its own block it has also read there whether it is that one."""
    line = core.member.lines[at]
    try:
        if chain is not None and (ours := line._ours(m)) is not None:
            line._compare(m, ours, chain)
        line.heard(0, m, chain)
    except InputDiffers as differs:
        leave(core, f"it leaves for block {differs.id}")
    go_on(core, log)
    decide(core)


def leave(core: Member, why: str) -> None:
    """It differs from the others: as it has to where its model has a flaw."""
    if not core.model.flaw:
        raise Broken(why)
    core.left = True


# snapshots


@dataclass(eq=False)
class Kept:
    """A snapshot: a file, and what in a real one is the model's state. `counted` are the frames up to its place."""

    file: bytes
    model: Model
    counted: tuple[bytes, ...]
    carried: frozenset[bytes]
    lasts: tuple[int, ...]


def keep(core: Member) -> Kept:
    """Take one, between two entries."""
    steps, lines = core.steps, core.member.lines
    inputs = [
        InputState(each.window, core.taken if at == LOG else None, None, each.accept.from_start,
                   accept_state(each.accept))
        for at, each in enumerate(steps.inputs)
    ]  # fmt: skip
    snapshot = Snapshot(
        order=_ORDER, beginning=BEGUN, version="", place=core.order.last, chain=core.order.chain,
        position=len(core.counted), incarnation=None, inputs=inputs,
        lines=[LineState(topic, line.outbox.last, line.outbox.chain) for topic, line in zip(LINES, lines, strict=True)],
        steps=steps.taken, step_chain=steps.chain, marks=list(steps.marks.items()), now=steps.now,
        timers=steps.timers.items(),
    )  # fmt: skip
    writer = Writer()
    file = writer.head(snapshot) + writer.end()
    lasts = tuple(line.outbox.last for line in lines)
    return Kept(file, core.model, core.counted, core.carried, lasts)


def restored(core: Member, kept: Kept) -> None:
    """A member that has just started stands where the snapshot was taken; see opening.py."""
    snapshot, _ = read_file(kept.file)
    steps = core.steps
    core.model = thaw(freeze(kept.model))
    core.model.flaw = ""  # whatever went wrong there, it goes on from its state
    core.order = Order(_ORDER, 0, snapshot.place, snapshot.chain)
    core.counted, core.carried = kept.counted, kept.carried
    core.taken = snapshot.inputs[LOG].position or 0
    for reading, its in zip(steps.inputs, snapshot.inputs, strict=True):
        reading.accept.from_start, reading.accept.sources = its.from_start, sources_of(its)
    for line, at in zip(core.member.lines, snapshot.lines, strict=True):
        line.begin_after(at.last, at.chain)
    calls = Calls(core.model.step, core.model.timer, timed=True)
    steps.go_on(calls, snapshot.steps, snapshot.step_chain, dict(snapshot.marks))
    steps.now = snapshot.now
    for key, when in snapshot.timers:
        steps.timers.set(key, when)


def counts(core: Member, lasts: tuple[int, ...], *, quiet: bool) -> bool:
    """Whether one counts by now that was taken here. `quiet`: nothing came for so long that this is taken for a
    proof.
    """
    rule: Any = SimpleNamespace(
        _lines=core.member.lines, _every=0.0, _loop=SimpleNamespace(time=lambda: 1.0 if quiet else -1.0)
    )
    return Snapshots._counts(rule, Pending(Path(), lasts, 0, 0.0, last=False))


def kept_view(kept: Kept) -> Kept:
    """A snapshot as it was."""
    return kept
