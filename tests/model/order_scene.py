"""A world of the model check whose members are of an engine with a written order. See worlds.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

from esp_pubsub.wire.frame import parse

from . import judges
from . import order_judges as engine
from .explorer import Broken, Moves, Workshop
from .judges import Reader
from .order_judges import LINES, LOG, QUEUE, Kept, Member, MemberView, Plan

FAULTS = ("gives up", "restarts", "dies", "all restart")
RESTARTS = ("restarts", "all restart", "a snapshot is torn")
HOLES = (*FAULTS, "loses a frame")
MUCH = 1_000

Sent = tuple[tuple[int, ...], ...]
"""What is sent to an input: the ids of each copy, as members of a failover group send them, each in its own time."""


class Seat(NamedTuple):
    """A member, None once it is dead; how far it has read the order, and what of its pipe has not come there yet. It
    has `taken` a snapshot that does not count yet, and was itself restored `from` one.
    """

    core: int | None
    read: int = 0
    pipe: tuple[bytes, ...] = ()
    taken: int | None = None
    restored: int | None = None


class State(NamedTuple):
    """Everything. `truth` is a reader of the order that is always at its end, and has room for everything: what counts
    for it is the order. `log` is a topic, `queue` what nobody confirmed, `holder` who reads it.
    """

    seats: tuple[Seat, ...]
    truth: int
    readers: tuple[int, ...]
    sent: tuple[int, ...]
    lives: int
    log: tuple[bytes, ...] = ()
    queue: tuple[bytes, ...] = ()
    holder: int | None = None
    strays: tuple[tuple[bytes, ...], ...] = ()
    disk: tuple[tuple[int, int], ...] = ()
    """The snapshots that count, the newest last, each with who took it."""


@dataclass(eq=False)
class OrderScene:
    """One named world. Each member believes to lead whenever it likes: it proposes what comes next, one entry at a
    time, takes as much of its inputs as it may have read by then, at one of these `times` by its clock, and sends each
    line as it likes, if it is `eligible`. `largest` is what a frame of an entry holds, so that one takes several.
    With `room` 0 lines have room for all, and nothing is sent.

    Two things are left out, for they change nothing. A step is taken as soon as the lines have room: to be later is to
    read later. And what is void for one reader of the order is void for all of them, since they read the same: a frame
    that does not count is not kept, and one that cannot any more comes at once.

    `faults` cost a life each. Where a frame was lost, its writer gives up in the end.

    With `snapshots` members take them, one at a time, and are restarted from the newest that counts; two are kept. The
    model of the second member may have a `flaw`: it never leads, and leaves once it is found to differ. With `quiet` a
    snapshot counts without a later block too. Then a flaw may be in one that counts until its member has left, so
    faults come only after that.
    """

    name: str
    about: str
    plan: Plan = ()
    log: Sent = ()
    queue: Sent = ()
    members: int = 2
    times: tuple[int, ...] = (1,)
    largest: int = MUCH
    room: int = 0
    lives: int = 1
    faults: tuple[str, ...] = FAULTS
    snapshots: bool = False
    flaw: str = ""
    quiet: bool = True
    quick: bool = False
    works: Workshop = field(default_factory=Workshop, repr=False)
    basis: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """How many blocks a step may emit to one line."""
        each = [[on for what, on, _ in acts if what == "emit"] for _, acts in self.plan]
        self._most = max((lines.count(line) for lines in each for line in lines), default=0)

    # the parts of a state

    def member(self, at: int) -> int:
        """A member that starts."""
        flaw = self.flaw if at == 1 else ""
        return self.works.keep(Member("ABC"[at], self.plan, room=self.room or MUCH, flaw=flaw))

    def start(self) -> State:
        """Nothing has been sent."""
        reader = self.works.keep(Reader(suffix_only=True, from_start=True, window=512))
        truth = self.works.keep(Member("T", self.plan, room=MUCH))
        seats = tuple(Seat(self.member(at)) for at in range(self.members))
        return State(seats, truth, (reader,) * len(LINES), (0,) * (len(self.log) + len(self.queue)), self.lives)

    def view(self, core: int) -> MemberView:
        """What can be seen of a member."""
        return self.works.look(core, engine.view)

    def core(self, state: State, at: int) -> int:
        """A member that lives."""
        core = state.seats[at].core
        assert core is not None
        return core

    def on_bus(self, state: State, line: int) -> int:
        """How far a line has come to its subscriber."""
        return (self.works.look(state.readers[line], judges.reader_view).next or 1) - 1

    def _alive(self, state: State) -> Iterator[tuple[int, Seat, int]]:
        for at, seat in enumerate(state.seats):
            if seat.core is not None:
                yield at, seat, seat.core

    # what can happen

    def moves(self, state: State) -> Moves:
        """See `World.moves`."""
        yield from self._input_moves(state)
        for number, stray in enumerate(state.strays):
            if stray not in state.strays[:number]:
                yield "a frame of a dropped pipe comes late", partial(self.stray, state, number)
        for at, seat, core in self._alive(state):
            for label, make in self._member_moves(state, at, seat, core):
                yield f"{label} ({'ABC'[at]})", make
        if state.lives and not (self.flaw and self.quiet and state.seats[1].core is not None):
            yield from self._faults(state, state._replace(lives=state.lives - 1))

    def _is_at_end(self, state: State, seat: Seat) -> bool:
        return seat.read == len(self.view(state.truth).counted)

    def _input_moves(self, state: State) -> Moves:
        for copy, (sent, ids) in enumerate(zip(state.sent, (*self.log, *self.queue), strict=True)):
            if sent < len(ids):
                input = LOG if copy < len(self.log) else QUEUE
                label = f"{engine.WINDOWS[input]} is sent block {ids[sent]} by {copy}"
                yield label, partial(self.send_input, state, input, ids[sent], copy)

    def _member_moves(self, state: State, at: int, seat: Seat, core: int) -> Moves:
        now = self.view(core)
        if seat.pipe:
            yield "a frame comes to the order", partial(self.comes, state, at)
        if not now.pending and not self._is_at_end(state, seat):
            yield "reads the order", partial(self.read, state, at)
        waits = now.proposes and not seat.pipe and not now.pending and self._is_at_end(state, seat)
        if waits and "loses a frame" in self.faults:
            yield "hears nothing of its entry", partial(self.give_up, state, at)
        if now.confirms:
            yield "confirms the queue", partial(self.confirm, state, at, now)
        if not now.pending and not now.proposes and not seat.pipe and not (self.flaw and at == 1):
            yield from self._proposals(state, at, now)
        if self.room:
            yield from self._line_moves(state, at, now)
        if self.snapshots:
            yield from self._snapshot_moves(state, at, seat, now)

    def _snapshot_moves(self, state: State, at: int, seat: Seat, now: MemberView) -> Moves:
        newest = self._place(state.disk[-1][1]) if state.disk else 0
        if seat.taken is not None:
            if self.works.look(self.core(state, at), _counts(self.kept(seat.taken).lasts, self.quiet)):
                yield "its snapshot counts", partial(self.mark, state, at, seat.taken)
        elif not now.pending and len(now.counted) > newest:
            yield "takes a snapshot", partial(self.take, state, at)

    def _proposals(self, state: State, at: int, now: MemberView) -> Moves:
        reads = state.queue[now.confirms :] if state.holder in (None, at) else ()
        for clock in self.times:
            due = now.due is not None and now.due <= clock
            for end in range(now.taken, len(state.log) + 1):
                for many in range(len(reads) + 1):
                    if due or end > now.taken or many:
                        label = f"proposes log to {end}, {many} of the queue, at {clock}"
                        yield label, partial(self.propose, state, at, clock, end, reads[:many])

    def _line_moves(self, state: State, at: int, now: MemberView) -> Moves:
        for line, ours in enumerate(now.lines):
            if now.eligible and ours.first <= ours.m + 1 <= ours.last and not (self.flaw and at == 1):
                yield f"sends {LINES[line]} {ours.m + 1}", partial(self.send, state, at, line)
            for _, _, other in self._alive(state):
                theirs = self.view(other).lines[line]
                if theirs.m > ours.m:
                    label = f"hears that {LINES[line]} is at {theirs.m}"
                    for chain in {theirs.chain, None} if self.flaw else {theirs.chain}:  # not every beat has one
                        yield label, partial(self.change, state, at, engine.hear, line, theirs.m, chain)

    def _faults(self, state: State, after: State) -> Moves:
        for at, seat, core in self._alive(state):
            who = "ABC"[at]
            if "gives up" in self.faults and (seat.pipe or state.holder == at or self.view(core).proposes):
                yield f"gives up ({who})", partial(self.give_up, after, at)
            if "loses a frame" in self.faults and seat.pipe:
                yield f"a frame is lost ({who})", partial(_seat, after, at, seat._replace(pipe=seat.pipe[1:]))
            if "restarts" in self.faults:
                yield f"restarts ({who})", partial(self.restart, after, at)
            if "dies" in self.faults and any(other != at for other, _, _ in self._alive(state)):
                yield f"dies ({who})", partial(self.die, after, at)
        if "all restart" in self.faults:
            yield "all restart", partial(self.restart_all, after)
        if "a snapshot is torn" in self.faults and state.disk:
            yield "the newest snapshot is torn", partial(State._replace, after, disk=state.disk[:-1])

    # what a member does

    def change(self, state: State, at: int, call: Callable[..., None], *arguments: Hashable) -> State:
        """Something happens to a member. What it has stepped on must be what the order says."""
        log = state.log[: self.view(state.truth).taken]
        core = self.works.change(self.core(state, at), call, *arguments, log)
        now, truth = self.view(core), self.view(state.truth)
        if now.left:
            return self.withdraw(self.die(state, at), at, state.seats[at])
        is_at_end = self._is_at_end(state, state.seats[at]) and not now.pending
        if now.trace != (truth.trace if is_at_end else truth.trace[: len(now.trace)]):
            raise Broken(f"its steps are {now.trace}, those of the order {truth.trace}")
        for line, ours in enumerate(now.lines):  # decision 15: a member that is behind in a line needs no cap
            if self.room and ours.last - self.on_bus(state, line) > self.room - 1 + self._most:
                raise Broken(f"it computed {ours.last} blocks of {LINES[line]}, more than the buffer beyond the bus")
        return _seat(state, at, state.seats[at]._replace(core=core))

    def read(self, state: State, at: int) -> State:
        """It reads the next message of the order."""
        seat = state.seats[at]
        state = _seat(state, at, seat._replace(read=seat.read + 1))
        return self.change(state, at, engine.read, self.view(state.truth).counted[seat.read])

    def propose(self, state: State, at: int, clock: int, end: int, queue: tuple[bytes, ...]) -> State:
        """It writes an entry."""
        before = self.view(self.core(state, at)).counted
        state = self.change(state, at, engine.propose, clock, end, queue, self.largest)
        frames = self.works.look(self.core(state, at), engine.written)
        for number, frame in enumerate(frames):
            self.basis[frame] = (*before, *frames[:number])
        return _seat(state, at, state.seats[at]._replace(pipe=frames))._replace(holder=at if queue else state.holder)

    def comes(self, state: State, at: int) -> State:
        """The next frame of its pipe comes to the topic."""
        frame, *rest = state.seats[at].pipe
        return self.put(_seat(state, at, state.seats[at]._replace(pipe=tuple(rest))), frame)

    def stray(self, state: State, number: int) -> State:
        """The next frame of a dropped pipe does."""
        frame, *rest = state.strays[number]
        return self.put(
            state._replace(strays=(*state.strays[:number], tuple(rest), *state.strays[number + 1 :])), frame
        )

    def put(self, state: State, frame: bytes) -> State:
        """A frame stands on the topic, and with it what can not count any more."""
        truth = self.counts(state.truth, frame, state.log)
        seats = tuple(seat._replace(pipe=self.rest(truth, seat.pipe, state.log)) for seat in state.seats)
        strays = (self.rest(truth, stray, state.log) for stray in state.strays)
        return state._replace(truth=truth, seats=seats, strays=tuple(sorted(stray for stray in strays if stray)))

    def rest(self, truth: int, pipe: tuple[bytes, ...], log: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """What of a pipe may still count. The others do not, though they come."""
        counted = self.view(truth).counted
        for number, frame in enumerate(pipe):
            if self.basis[frame][: len(counted)] == counted:
                return pipe[number:]
            self.counts(truth, frame, log)
        return ()

    def counts(self, truth: int, frame: bytes, log: tuple[bytes, ...]) -> int:
        """The order with a frame. It counts only if its writer had read what counted before it, and all of it."""
        after = self.works.change(truth, engine.read, frame, log)
        before = self.view(truth).counted
        if before in (self.view(after).counted, self.basis[frame]):
            return after
        raise Broken(f"frame {parse(frame).id} counts, and its writer knew of another order before it")

    def confirm(self, state: State, at: int, now: MemberView) -> State:
        """It confirms messages of the queue, which is then without them."""
        carried = self.view(state.truth).carried
        for data in state.queue[: now.confirms]:
            if data not in carried:
                raise Broken(f"block {parse(data).id} of the queue is confirmed, and no entry that counts has it")
        state = self.change(state, at, engine.confirmed)
        return state._replace(queue=state.queue[now.confirms :])

    def give_up(self, state: State, at: int) -> State:
        """It leads no more, or had trouble: its pipe is dropped, and its feed of the queue closed."""
        return self.change(self._drop(state, at), at, engine.give_up)

    def _drop(self, state: State, at: int) -> State:
        seat, holder = state.seats[at], None if state.holder == at else state.holder
        strays = tuple(sorted((*state.strays, seat.pipe))) if seat.pipe else state.strays
        return _seat(state, at, seat._replace(pipe=()))._replace(strays=strays, holder=holder)

    def restart(self, state: State, at: int) -> State:
        """A process died and another one takes its place: from the newest snapshot on, or from the beginning."""
        state, core = self._drop(state, at), self.member(at)
        if not state.disk:
            return _seat(state, at, Seat(core))
        number = state.disk[-1][1]
        kept = self.kept(number)
        for line, last in enumerate(kept.lasts):
            if self.on_bus(state, line) < last:
                raise Broken(f"it is restored after block {last} of {LINES[line]}, and the bus does not hold it")
        core = self.works.change(core, engine.restored, kept)
        return _seat(state, at, Seat(core, len(kept.counted), restored=number))

    def kept(self, number: int) -> Kept:
        """A snapshot."""
        return self.works.look(number, engine.kept_view)

    def _place(self, number: int) -> int:
        return len(self.kept(number).counted)

    def take(self, state: State, at: int) -> State:
        """It takes a snapshot."""
        taken = self.works.keep(self.works.look(self.core(state, at), engine.keep))
        return _seat(state, at, state.seats[at]._replace(taken=taken))

    def mark(self, state: State, at: int, kept: int) -> State:
        """It counts, durably."""
        disk = sorted([*state.disk, (at, kept)], key=lambda owned: self._place(owned[1]))
        return _seat(state, at, state.seats[at]._replace(taken=None))._replace(disk=tuple(disk[-2:]))

    def withdraw(self, state: State, at: int, seat: Seat) -> State:
        """A member that differs leaves: what it took, and what it was restored from, counts no more."""
        return state._replace(disk=tuple(owned for owned in state.disk if owned[0] != at and owned[1] != seat.restored))

    def restart_all(self, state: State) -> State:
        """All of them."""
        for at, _, _ in self._alive(state):
            state = self.restart(state, at)
        return state

    def die(self, state: State, at: int) -> State:
        """For good."""
        return _seat(self._drop(state, at), at, Seat(None))

    def send(self, state: State, at: int, line: int) -> State:
        """A block comes to the subscriber of a line, and the bus confirms it."""
        core = self.core(state, at)
        data, id = self.works.look(core, engine.unsent)[line][0], self.view(core).lines[line].m + 1
        if data not in self.works.look(state.truth, engine.unsent)[line][id - 1 : id]:
            raise Broken(f"block {id} of {LINES[line]} is not what the order yields")
        reader = self.works.change(state.readers[line], engine.receive, data)
        state = state._replace(readers=(*state.readers[:line], reader, *state.readers[line + 1 :]))
        return self.change(state, at, engine.acknowledge, line, id)

    def send_input(self, state: State, input: int, id: int, copy: int) -> State:
        """A block comes to an input."""
        sent = (*state.sent[:copy], state.sent[copy] + 1, *state.sent[copy + 1 :])
        if input == QUEUE:
            return state._replace(sent=sent, queue=(*state.queue, engine.message(input, id, copy)))
        sent = (*sorted(sent[: len(self.log)]), *sent[len(self.log) :])  # its copies are all alike
        return state._replace(sent=sent, log=(*state.log, engine.message(input, id, 0)))

    # what is asked

    def done(self, state: State) -> bool:
        """See `World.done`."""
        truth = self.view(state.truth)
        blocks = [max(max(ids) for ids in copies) if copies else 0 for copies in (self.log, self.queue)]
        if list(truth.next) != [last + 1 for last in blocks] or truth.timers or state.queue:
            return False
        if sum(state.sent[len(self.log) :]) < sum(map(len, self.queue)):
            return False
        return not self.room or all(self.on_bus(state, at) == line.last for at, line in enumerate(truth.lines))

    def hopes(self, state: State) -> bool:
        """See `World.hopes`."""
        return any(self._alive(state))

    def show(self, state: State) -> str:
        """See `World.show`."""
        seats = []
        for at, seat, core in self._alive(state):
            now = self.view(core)
            lines = " ".join(f"m={line.m} n={line.last}" for line in now.lines) if self.room else ""
            seats.append(f"{'ABC'[at]} order {seat.read} steps {len(now.trace)} pipe {len(seat.pipe)} {lines}")
        order = " ".join(str(parse(frame).id) for frame in self.view(state.truth).counted)
        steps = ", ".join(name for name, _ in self.view(state.truth).trace)
        return "; ".join([*seats, f"order [{order}] {steps}", f"queue {len(state.queue)} of {state.holder}"])


@cache
def _counts(lasts: tuple[int, ...], quiet: bool) -> Callable[[Member], bool]:
    return partial(engine.counts, lasts=lasts, quiet=quiet)


def _seat(state: State, at: int, seat: Seat) -> State:
    return state._replace(seats=(*state.seats[:at], seat, *state.seats[at + 1 :]))
