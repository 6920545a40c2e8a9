"""A world of the model check whose members have two lines, each on a topic of its own. See worlds.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from . import judges
from . import line_judges as lines
from .explorer import Broken, Moves, Workshop
from .judges import Code, Reader, ReaderView
from .line_judges import LINES, Member, MemberView, Script
from .scene import Pipe

FAULTS = ("restarts", "dies", "its input stops", "a line is cut", "hand-over", "loses it", "trouble")
ALL = range(len(LINES))
NO_PIPES: tuple[Pipe | None, ...] = (None,) * len(LINES)
NOTHING: tuple[tuple[Code, ...], ...] = ((),) * len(LINES)


class Seat(NamedTuple):
    """A member: its object, the blocks that its input lacks, its pipes, and what of each log it has not read.

    `cut` is a line that it cannot write any more. Whoever `resigned` for that leads no more: it could do
    so again and again. One that `hears` no more knows that there is more input, and that it cannot read it.
    """

    core: int
    lacks: int = 0
    pipes: tuple[Pipe | None, ...] = NO_PIPES
    unread: tuple[tuple[Code, ...], ...] = NOTHING
    cut: int | None = None
    resigned: bool = False
    hears: bool = True


class State(NamedTuple):
    """Everything. `readers` and `tails` (the last message of a log) are of each line."""

    seats: tuple[Seat, ...]
    readers: tuple[int, ...]
    tails: tuple[tuple[Code, ...], ...]
    lives: int


@dataclass(eq=False)
class LineScene:
    """One named world of two members. `script` says to which lines each block of the input gives one, `room` how many
    blocks each line may have waiting, `short` how many blocks the first member's input lacks. `faults` cost a
    life each.

    On a log standbys read what they follow in their own time; with queues all comes at once, and only `settled` says
    how far the others have it. An election has one winner at a time, who leads on unless a fault ends that, or the
    member itself finds that something is due. So whether it finds that is a question of progress.
    """

    name: str
    about: str
    script: Script = ((0,), (0, 1))
    room: int = 1
    short: int = 0
    queues: bool = False
    all_lead: bool = False
    lives: int = 1
    faults: tuple[str, ...] = ()
    quick: bool = False
    works: Workshop = field(default_factory=Workshop, repr=False)

    # the parts of a state

    def member(self, at: int) -> int:
        """A member that starts."""
        return self.works.keep(Member("AB"[at], self.script, suffix_only=not self.queues, room=self.room))

    def start(self) -> State:
        """Nothing has been sent."""
        reader = self.works.keep(Reader(suffix_only=not self.queues, from_start=True, window=512))
        return State(
            (Seat(self.member(0), self.short), Seat(self.member(1))), (reader,) * len(LINES), NOTHING, self.lives
        )

    def view(self, seat: Seat) -> MemberView:
        """What can be seen of a member."""
        return self.works.look(seat.core, lines.view)

    def seen(self, reader: int) -> ReaderView:
        """What can be seen of a subscriber."""
        return self.works.look(reader, judges.reader_view)

    def on_bus(self, state: State, at: int) -> int:
        """How far a line has come to its subscriber."""
        return (self.seen(state.readers[at]).next or 1) - 1

    # what can happen

    def moves(self, state: State) -> Moves:
        """See `World.moves`."""
        for at, seat in enumerate(state.seats):
            now = self.view(seat)
            if now.role == "left":
                continue
            for label, make in self._member_moves(state, at, seat, now):
                yield f"{label} ({'AB'[at]})", make
            if state.lives:
                for label, make in self._faults(state._replace(lives=state.lives - 1), at, seat, now):
                    yield f"{label} ({'AB'[at]})", make

    def _member_moves(self, state: State, at: int, seat: Seat, now: MemberView) -> Moves:
        if now.takes and not self.stopped(seat, now):
            yield "takes a block of its input", partial(self.change, state, at, lines.take)
        yield from self._heard(state, at, now)
        if now.asked is not None and now.handed_over:
            yield "its hand-over has ended", partial(self.handed_over, state, at, now, None)
        if now.role == "active":
            yield from self._active_moves(state, at, seat, now)
            return
        for line in ALL:
            if seat.unread[line]:
                yield f"reads {seat.unread[line][0]}", partial(self.read, state, at, line)
        if now.due == "eligible" and not seat.resigned and (self.all_lead or not self._somebody_leads(state)):
            yield "leads", partial(self.lead, state, at)

    def _somebody_leads(self, state: State) -> bool:
        return any(self.view(seat).role == "active" for seat in state.seats)

    def _heard(self, state: State, at: int, now: MemberView) -> Moves:
        for other, seat in enumerate(state.seats):
            their = self.view(seat)
            if other != at and their.role == "active" and any(self._newer(now, their)):
                yield (
                    "hears a beat",
                    partial(self.change, state, at, lines.hear, self.works.look(seat.core, lines.said)),
                )

    def _newer(self, now: MemberView, their: MemberView) -> Iterator[bool]:
        return (theirs.m > ours.m for ours, theirs in zip(now.lines, their.lines, strict=True))

    def _active_moves(self, state: State, at: int, seat: Seat, now: MemberView) -> Moves:
        if now.due == "handed over":
            yield "has handed over", partial(self.handed_over, state, at, now, "handed over")
        elif self._is_in_a_bad_way(seat, now) and now.due_later is not None:
            yield f"finds that it is {now.due_later}", partial(self.resign, state, at, now.due_later)
        if (
            self.stopped(seat, now) and now.eligible and seat.hears
        ):  # it leads rightly, and nobody but its owner can see that it is of no use
            yield "is ended by its owner", partial(self.stop, state, at, "leave")
        for line in ALL:
            if seat.cut != line:
                yield from self._pipe_moves(state, at, line, now)

    def _is_in_a_bad_way(self, seat: Seat, now: MemberView) -> bool:
        """It is not merely slow: its input has stopped, or something waits for a line that it cannot write."""
        waits = seat.cut is not None and now.lines[seat.cut].last > now.lines[seat.cut].m
        return waits or (self.stopped(seat, now) and not (now.eligible and seat.hears))

    def stopped(self, seat: Seat, now: MemberView) -> bool:
        """Its input gives it no more, and lacks something."""
        return seat.lacks > 0 and now.taken + seat.lacks == len(self.script)

    def _pipe_moves(self, state: State, at: int, line: int, now: MemberView) -> Moves:
        pipe, window = state.seats[at].pipes[line], LINES[line]
        if pipe is None:
            yield f"opens a pipe for {window}", partial(self.open, state, at, line)
            return
        code = self.following(pipe, line, now)
        if code is not None:
            yield f"writes {code}", partial(self.write, state, at, line, code)
        if pipe.written:
            yield f"{pipe.written[0][0]} is acknowledged", partial(self.acknowledge, state, at, line)

    def following(self, pipe: Pipe, line: int, now: MemberView) -> Code | None:
        """What its discipline lets a sender write next."""
        ours = now.lines[line]
        id, settled = max(pipe.next, ours.first, ours.m + 1), ours.m if self.queues else 0
        if id <= ours.last:
            return Code(LINES[line], 0, id, settled)
        if self.queues and not pipe.written and pipe.carried < ours.m:  # rule 5
            return Code(LINES[line], 0, 0, settled)
        return None

    def _faults(self, after: State, at: int, seat: Seat, now: MemberView) -> Moves:
        faults = self.faults
        if "restarts" in faults:
            yield "restarts", partial(self.restart, after, at)
        if "dies" in faults:
            yield "dies", partial(self.stop, after, at, "leave")
        if "its input stops" in faults and not seat.lacks and now.taken < len(self.script):
            yield "its input stops", partial(_seat, after, at, seat._replace(lacks=len(self.script) - now.taken))
        if "hears no more" in faults and not seat.lacks and now.taken < len(self.script):
            yield "hears its input no more", partial(self.deafen, after, at, len(self.script) - now.taken)
        if "a line is cut" in faults and seat.cut is None:
            for line in ALL:
                yield f"cannot write {LINES[line]} any more", partial(self.cut, after, at, line)
        if now.role == "active":
            yield from self._faults_of_a_leader(after, at, seat, now)

    def _faults_of_a_leader(self, after: State, at: int, seat: Seat, now: MemberView) -> Moves:
        if "hand-over" in self.faults and now.asked is None:
            yield "is asked to hand over", partial(self.change, after, at, lines.ask_hand_over)
        if "loses it" in self.faults:
            yield "leads no more", partial(self.stop, after, at, "lost")
        if "trouble" in self.faults:
            for line in ALL:
                if seat.pipes[line] is not None:
                    yield f"has trouble with {LINES[line]}", partial(self.drop, after, at, line)

    # what a member does

    def change(self, state: State, at: int, call: object, *arguments: object) -> State:
        """Something is told to a member. What it then says to be on the bus must be there."""
        seat = state.seats[at]
        seat = seat._replace(core=self.works.change(seat.core, call, *arguments))  # type: ignore[arg-type]
        for line, now in enumerate(self.view(seat).lines):
            if max(now.m, now.delivered) > self.on_bus(state, line):
                raise Broken(f"the bus has {self.on_bus(state, line)} blocks of {LINES[line]}, and not {now.m}")
        return _seat(state, at, seat)

    def read(self, state: State, at: int, line: int) -> State:
        """A standby reads one of its logs."""
        code, *rest = state.seats[at].unread[line]
        seat = state.seats[at]
        state = _seat(state, at, seat._replace(unread=_with(seat.unread, line, tuple(rest))))
        return self.change(state, at, lines.follow, line, code)

    def lead(self, state: State, at: int) -> State:
        """A standby campaigned and won; it follows no topic any more."""
        return self.change(_seat(state, at, state.seats[at]._replace(unread=NOTHING)), at, lines.lead)

    def stop(self, state: State, at: int, event: str) -> State:
        """It leads no more, or is gone. A log is followed anew from its last message on, a queue from now on."""
        state = self.change(state, at, lines.step, event)
        seat = state.seats[at]._replace(pipes=NO_PIPES)
        return _seat(state, at, seat._replace(unread=state.tails if event != "leave" else NOTHING))

    def resign(self, state: State, at: int, event: str) -> State:
        """It found out itself that another member should lead."""
        state = self.stop(state, at, event)
        return _seat(state, at, state.seats[at]._replace(resigned=True))

    def handed_over(self, state: State, at: int, now: MemberView, event: str | None) -> State:
        """A hand-over is done, by the member itself or by another one: all that had an id is on the bus."""
        for line, asked in enumerate(now.asked or ()):
            if asked > self.on_bus(state, line):
                raise Broken(f"it has handed over, and block {asked} of {LINES[line]} is not on the bus")
        return self.change(state, at, lines.end_hand_over) if event is None else self.stop(state, at, event)

    def restart(self, state: State, at: int) -> State:
        """A process died and another one takes its place."""
        return _seat(state, at, Seat(self.member(at), state.seats[at].lacks, unread=state.tails))

    def deafen(self, state: State, at: int, lacks: int) -> State:
        """It cannot read its input any more."""
        state = self.change(state, at, lines.deafen)
        return _seat(state, at, state.seats[at]._replace(lacks=lacks, hears=False))

    def cut(self, state: State, at: int, line: int) -> State:
        """Nothing that it writes to this topic comes there any more."""
        state = self.drop(state, at, line)
        return _seat(state, at, state.seats[at]._replace(cut=line))

    def drop(self, state: State, at: int, line: int) -> State:
        """Rule 3."""
        return _piped(state, at, line, None)

    def open(self, state: State, at: int, line: int) -> State:
        """Rule 1."""
        return _piped(state, at, line, Pipe(self.view(state.seats[at]).lines[line].m + 1))

    def write(self, state: State, at: int, line: int, code: Code) -> State:
        """A frame is handed to the bus, and comes to its topic."""
        pipe = state.seats[at].pipes[line]
        assert pipe is not None
        next_id, carried = code.id + 1 if code.id else pipe.next, max(pipe.carried, code.settled)
        state = _piped(state, at, line, Pipe(next_id, carried, (*pipe.written, (code, 0))))
        reader = self.works.change(state.readers[line], judges.receive, code)
        state = state._replace(readers=_with(state.readers, line, reader))
        for other, seat in enumerate(state.seats):
            if self.view(seat).role in ("active", "left"):
                continue
            if self.queues:
                state = self.change(state, other, lines.follow, line, code)
            else:
                unread = _with(seat.unread, line, (*seat.unread[line], code))
                state = _seat(state, other, seat._replace(unread=unread))
        return state if self.queues else state._replace(tails=_with(state.tails, line, (code,)))

    def acknowledge(self, state: State, at: int, line: int) -> State:
        """Rule 2."""
        pipe = state.seats[at].pipes[line]
        assert pipe is not None
        (code, _), *rest = pipe.written
        state = _piped(state, at, line, pipe._replace(written=tuple(rest)))
        return self.change(state, at, lines.acknowledge, line, code.id) if code.id else state

    # what is asked

    def done(self, state: State) -> bool:
        """See `World.done`."""
        blocks = [sum(line in to for to in self.script) for line in ALL]
        return all(self.on_bus(state, line) == blocks[line] for line in ALL)

    def hopes(self, state: State) -> bool:
        """See `World.hopes`: somebody is there who has its whole input and can write every line."""
        return any(self.view(seat).role != "left" and not seat.lacks and seat.cut is None for seat in state.seats)

    def show(self, state: State) -> str:
        """See `World.show`."""
        seats = []
        for at, seat in enumerate(state.seats):
            now = self.view(seat)
            m, n = [line.m for line in now.lines], [line.last for line in now.lines]
            seats.append(f"{'AB'[at]} {now.role} m={m} n={n}{' stopped' if self.stopped(seat, now) else ''}")
        return "; ".join([*seats, *(f"{LINES[line]} up to {self.on_bus(state, line)}" for line in ALL)])


def _with(all_of_them: tuple, at: int, one: object) -> tuple:  # type: ignore[type-arg]
    return (*all_of_them[:at], one, *all_of_them[at + 1 :])


def _seat(state: State, at: int, seat: Seat) -> State:
    return state._replace(seats=_with(state.seats, at, seat))


def _piped(state: State, at: int, line: int, pipe: Pipe | None) -> State:
    return _seat(state, at, state.seats[at]._replace(pipes=_with(state.seats[at].pipes, line, pipe)))
