"""A world of the model check: members, a bus and subscribers, and all that may happen among them. See worlds.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from . import judges
from .explorer import Moves, Workshop
from .judges import Code, Core, CoreView, Reader, ReaderView

LOST = -1  # in place of the queues that a message has not come to: it will never come to all


class Pipe(NamedTuple):
    """What a sender knows of its pipe: the next id, the settled it carried, and what is written and not acknowledged.

    Each of `written` is a frame and the set of queues, as bits, that it has still to come to.
    """

    next: int
    carried: int = 0
    written: tuple[tuple[Code, int], ...] = ()


class Seat(NamedTuple):
    """A member: its object, its pipe, and what of the log it has not read."""

    core: int
    pipe: Pipe | None
    unread: tuple[Code, ...]


class Place(NamedTuple):
    """A subscriber: its object and what of the bus it has not read, or, in a group, not stored as done."""

    reader: int
    unread: tuple[Code, ...] = ()


class State(NamedTuple):
    """Everything. `strays` are frames of dropped pipes that may still come; `sent` the highest id that was sent."""

    seats: tuple[Seat, ...]
    places: tuple[Place, ...]
    strays: tuple[tuple[tuple[Code, int], ...], ...]
    tail: tuple[Code, ...]
    lives: int
    sent: int


@dataclass(eq=False)
class Scene:
    """One named world. Lines and runs say what each member reads; `lives` how many faults there are."""

    name: str
    about: str
    blocks: int = 3
    lines: str = "AA"
    runs: tuple[int, ...] = (0, 0)
    suffix_only: bool = True
    queues: bool = False
    readers: int = 1
    lives: int = 2
    window: int = 512
    late: bool = False
    """The last subscriber comes at any time."""
    slow: bool = False
    """Messages come to queues at different times, or after their pipe was dropped; else all at once."""
    elections: bool = True
    """Members come to lead and lose it; else all lead from the start."""
    given: bool = True
    """All inputs are read at once; else blocks come one by one."""
    retention: str = ""
    """What it may pass before they have read: `subscribers` or `standbys`."""
    refusals: bool = False
    restarts: bool = False
    deaths: bool = False
    troubles: bool = True
    """A pipe may have trouble though the bus refused nothing."""
    all_restart: bool = False
    strays: tuple[tuple[Code, ...], ...] = ()
    progress: bool = True
    quick: bool = False
    works: Workshop = field(default_factory=Workshop, repr=False)

    # the parts of a state

    def member(self, at: int) -> int:
        """A member that starts."""
        core = Core(self.lines[at], self.runs[at], suffix_only=self.suffix_only, forks=self.forks)
        if self.given:
            for _ in range(self.blocks):
                judges.give(core)
        if not self.elections:
            judges.step(core, "eligible", "elected", "won")
        return self.works.keep(core)

    def reader(self, *, from_start: bool = True, bound: int = 0) -> int:
        """A subscriber that starts."""
        return self.works.keep(
            Reader(
                suffix_only=self.suffix_only, from_start=from_start, window=self.window, bound=bound, forks=self.forks
            )
        )

    @property
    def forks(self) -> bool:
        """Members have different inputs."""
        return len(set(self.lines)) > 1

    def start(self) -> State:
        """Nothing has been sent, but for what strays."""
        seats = tuple(Seat(self.member(at), None, ()) for at in range(len(self.lines)))
        places = tuple(Place(self.reader()) for _ in range(self.readers - self.late))
        everywhere = self.bits(State(seats, places, (), (), 0, 0))
        strays = tuple(tuple((code, everywhere) for code in stray) for stray in self.strays)
        sent = max((code.id for stray in self.strays for code in stray), default=0)
        return State(seats, places, strays, (), self.lives, sent)

    def view(self, seat: Seat) -> CoreView:
        """What can be seen of a member."""
        return self.works.look(seat.core, judges.view)

    def seen(self, place: Place) -> ReaderView:
        """What can be seen of a subscriber."""
        return self.works.look(place.reader, judges.reader_view)

    def bits(self, state: State) -> int:
        """The queues that there are: one for all on a log, else one for each subscriber, then one for each standby."""
        if not self.queues:
            return 1
        bits = (1 << len(state.places)) - 1
        for at, seat in enumerate(state.seats):
            if self.view(seat).role == "standby":
                bits |= self.bit(at)
        return bits

    def bit(self, at: int) -> int:
        """The queue of a member."""
        return 1 << (self.readers + at)

    # what can happen

    def moves(self, state: State) -> Moves:
        """See `World.moves`."""
        for at, seat in enumerate(state.seats):
            for label, make, *arguments in self._member_moves(state, at, seat, self.view(seat)):
                yield f"{label} ({'AB'[at]})" if len(state.seats) > 1 else label, partial(make, *arguments)
        for number, stray in enumerate(state.strays):
            for bit in _pending(stray):
                yield f"a stray comes to {self.where(bit)}", partial(self.stray, state, number, bit)
        for number, place in enumerate(state.places):
            yield from self.reader_moves(state, number, place)
        if self.late and len(state.places) < self.readers:
            yield "a late subscriber", partial(self.bind, state)
        if self.all_restart and state.lives:
            yield "all members restart", partial(self.restart_all, state)

    def _member_moves(self, state: State, at: int, seat: Seat, now: CoreView) -> Iterator[tuple[Any, ...]]:
        if now.role == "left":
            return
        yield from self._any_member_moves(state, at, now)
        if now.role == "active":
            yield from self._active_moves(state, at, seat, now)
            return
        if seat.unread:
            yield f"reads {seat.unread[0]}", self.read, state, at
            if self.retention == "standbys" and state.lives:
                yield f"retention takes {seat.unread[0]}", self.passed, state, at
        if self.may_lead(now):
            yield "leads", self.lead, state, at

    def _any_member_moves(self, state: State, at: int, now: CoreView) -> Iterator[tuple[Any, ...]]:
        if now.last < self.blocks:
            yield "its input gives a block", self.change, state, at, judges.give
        for other, their in enumerate(map(self.view, state.seats)):
            if other != at and self._has_news(now, their):
                yield "hears a beat", self.change, state, at, judges.hear, their.run, their.m, their.chain
        if self.restarts and state.lives:
            yield "restarts", self.restart, state, at
        if self.deaths and state.lives:
            yield "dies", self.change, with_a_life_less(state), at, judges.step, "leave"

    def _has_news(self, now: CoreView, their: CoreView) -> bool:
        return their.m > now.m or their.run > now.run or (their.line != now.line and their.m > 0)

    def may_lead(self, now: CoreView) -> bool:
        """Whether a standby may campaign; the election, if there is one, may give it to anybody who does."""
        return now.eligible

    def _active_moves(self, state: State, at: int, seat: Seat, now: CoreView) -> Iterator[tuple[Any, ...]]:
        if self.elections and state.lives:
            yield "leads no more", self.stop, state, at
        pipe = seat.pipe
        if pipe is None:
            yield "opens a pipe", self.open, state, at
            return
        code = self.following(pipe, now)
        if code is not None:
            yield f"writes {code}", self.write, state, at, code
            if self.refusals and state.lives:
                for bit in _each(self.bits(state)):
                    yield f"writes {code}, refused by {self.where(bit)}", self.write, state, at, code, bit
        if pipe.written and pipe.written[0][1] == 0:
            yield f"{pipe.written[0][0]} is acknowledged", self.acknowledge, state, at
        if self.slow:
            for bit in _pending(pipe.written):
                yield f"a message comes to {self.where(bit)}", self.comes, state, at, bit
        if _refused(pipe) or (self.troubles and state.lives):
            yield "trouble", self.trouble, state, at

    def following(self, pipe: Pipe, now: CoreView) -> Code | None:
        """What its discipline lets a sender write next."""
        id = max(pipe.next, now.first)
        settled = 0 if self.suffix_only else now.m
        if id <= now.last and id <= now.m + self.window:
            return Code(now.line, now.run, id, settled)
        if self.beats(pipe, now):
            return Code(now.line, now.run, 0, settled)
        return None

    def beats(self, pipe: Pipe, now: CoreView) -> bool:
        """Rule 5."""
        return not self.suffix_only and not pipe.written and pipe.carried < now.m

    # what a member does

    def change(self, state: State, at: int, call: Callable[..., None], *arguments: Any) -> State:
        """Something is told to a member. Who leaves drops its pipe."""
        seat = state.seats[at]
        seat = seat._replace(core=self.works.change(seat.core, call, *arguments))
        if self.view(seat).role == "left":
            return self._unbind(self._drop(_seat(state, at, seat._replace(unread=())), at), self.bit(at))
        return _seat(state, at, seat)

    def read(self, state: State, at: int) -> State:
        """A standby reads the log."""
        code, *rest = state.seats[at].unread
        state = _seat(state, at, state.seats[at]._replace(unread=tuple(rest)))
        return self.change(state, at, judges.follow, code)

    def passed(self, state: State, at: int) -> State:
        """Retention takes what a standby has not read."""
        seat = state.seats[at]
        return _seat(with_a_life_less(state), at, seat._replace(unread=seat.unread[1:]))

    def lead(self, state: State, at: int) -> State:
        """A standby campaigned and won; it follows the topic no more."""
        state = self.change(state, at, judges.step, "eligible", "elected", "won")
        return self._unbind(_seat(state, at, state.seats[at]._replace(unread=())), self.bit(at))

    def stop(self, state: State, at: int) -> State:
        """A leader lost it, and follows the topic anew: a log from its last message on, a queue from now on."""
        state = self._drop(self.change(with_a_life_less(state), at, judges.step, "lost"), at)
        state = self.change(state, at, judges.rejoin)
        return _seat(state, at, state.seats[at]._replace(unread=state.tail))

    def restart(self, state: State, at: int) -> State:
        """A process died and another one takes its place."""
        state = self._unbind(self._drop(with_a_life_less(state), at), self.bit(at))
        return _seat(state, at, Seat(self.member(at), None, state.tail))

    def restart_all(self, state: State) -> State:
        """All processes of the group died, and others take their places."""
        lives = state.lives - 1
        for at in range(len(state.seats)):
            state = self.restart(state, at)
        return state._replace(lives=lives)

    def open(self, state: State, at: int) -> State:
        """Rule 1."""
        seat = state.seats[at]
        return _seat(state, at, seat._replace(pipe=Pipe(self.view(seat).m + 1)))

    def trouble(self, state: State, at: int) -> State:
        """Rule 3. It costs nothing if the bus had refused something."""
        pipe = state.seats[at].pipe
        return self._drop(state if pipe and _refused(pipe) else with_a_life_less(state), at)

    def _drop(self, state: State, at: int) -> State:
        pipe = state.seats[at].pipe
        if pipe is None:
            return state
        left = tuple((code, bits) for code, bits in pipe.written if bits > 0)
        strays = tuple(sorted((*state.strays, left))) if left and self.slow else state.strays
        return _seat(state, at, state.seats[at]._replace(pipe=None))._replace(strays=strays)

    def write(self, state: State, at: int, code: Code, refused: int = 0) -> State:
        """A frame is handed to the bus."""
        pipe = state.seats[at].pipe
        assert pipe is not None
        bits = self.bits(state)
        waits = LOST if refused else bits if self.slow else 0
        pipe = Pipe(code.id + 1 if code.id else pipe.next, self.carries(pipe, code), (*pipe.written, (code, waits)))
        state = _seat(state, at, state.seats[at]._replace(pipe=pipe))
        state = state._replace(sent=max(state.sent, code.id) if self.late else 0)
        if refused:
            state = with_a_life_less(state)
        if self.slow and not refused:
            return state
        for bit in _each(bits & ~refused):
            state = self.put(state, code, bit)
        return state

    def carries(self, pipe: Pipe, code: Code) -> int:
        """The settled that a pipe has carried once it has carried this."""
        return max(pipe.carried, code.settled)

    def acknowledge(self, state: State, at: int) -> State:
        """Rule 2."""
        seat = state.seats[at]
        assert seat.pipe is not None
        (code, _), *rest = seat.pipe.written
        state = _seat(state, at, seat._replace(pipe=seat.pipe._replace(written=tuple(rest))))
        return self.change(state, at, judges.acknowledge, code.id) if code.id else state

    def comes(self, state: State, at: int, bit: int) -> State:
        """The first message of a pipe that has not come to a queue comes to it."""
        pipe = state.seats[at].pipe
        assert pipe is not None
        code, written = _take(pipe.written, bit)
        return self.put(_seat(state, at, state.seats[at]._replace(pipe=pipe._replace(written=written))), code, bit)

    def stray(self, state: State, number: int, bit: int) -> State:
        """The same of a pipe that was dropped."""
        code, left = _take(state.strays[number], bit)
        left = tuple((other, bits) for other, bits in left if bits)
        rest = (*state.strays[:number], *([left] if left else []), *state.strays[number + 1 :])
        return self.put(state._replace(strays=tuple(sorted(rest))), code, bit)

    # what a bus does

    def put(self, state: State, code: Code, bit: int) -> State:
        """A frame comes to a queue, or onto the log."""
        if self.queues:
            for at in range(len(state.seats)):
                if bit == self.bit(at):
                    return self.change(state, at, judges.follow, code)
            return self.reach(state, bit.bit_length() - 1, code)
        for number in range(len(state.places)):
            state = self.reach(state, number, code)
        for at, seat in enumerate(state.seats):
            if self.elections and self.view(seat).role == "standby":
                state = _seat(state, at, seat._replace(unread=(*seat.unread, code)))
        return state._replace(tail=(code,) if self.restarts or self.elections or self.all_restart else ())

    def reach(self, state: State, number: int, code: Code) -> State:
        """A frame comes to a subscriber, which reads it at once if it makes no difference when."""
        place = state.places[number]
        if self.retention == "subscribers":
            return with_place(state, number, place._replace(unread=(*place.unread, code)))
        return with_place(state, number, place._replace(reader=self.works.change(place.reader, judges.receive, code)))

    def _unbind(self, state: State, bit: int) -> State:
        """A queue is gone; what was on its way to it comes to the others."""
        if not self.queues or not self.slow:
            return state
        strays = tuple(tuple((code, bits & ~bit) for code, bits in stray if bits & ~bit) for stray in state.strays)
        state = state._replace(strays=tuple(sorted(stray for stray in strays if stray)))
        for at, seat in enumerate(state.seats):
            if seat.pipe is not None:
                left = tuple((code, bits if bits == LOST else bits & ~bit) for code, bits in seat.pipe.written)
                state = _seat(state, at, seat._replace(pipe=seat.pipe._replace(written=left)))
        return state

    def bind(self, state: State) -> State:
        """A subscriber comes, and sees what is sent from now on."""
        return state._replace(places=(*state.places, Place(self.reader(from_start=False, bound=state.sent + 1))))

    def reader_moves(self, state: State, number: int, place: Place) -> Moves:
        """What can happen to a subscriber."""
        if place.unread:
            yield f"subscriber {number} reads {place.unread[0]}", partial(self.read_by, state, number, judges.receive)
            if state.lives:
                yield f"retention takes {place.unread[0]}", partial(self.read_by, state, number, judges.lose)

    def read_by(self, state: State, number: int, call: Callable[..., None]) -> State:
        """A subscriber reads a frame, or loses it."""
        place = state.places[number]
        code, *rest = place.unread
        place = Place(self.works.change(place.reader, call, code), tuple(rest))
        return with_place(state if call is judges.receive else with_a_life_less(state), number, place)

    # what is asked

    def done(self, state: State) -> bool:
        """See `World.done`."""
        return len(state.places) == self.readers and all(map(self._has_all, state.places))

    def _has_all(self, place: Place) -> bool:
        seen = self.seen(place)
        if place.unread or seen.holds:
            return False
        if seen.next is None:
            return seen.bound > self.blocks
        missing = {(seen.run, id) for id in range(seen.next, self.blocks + 1)}
        return seen.run == max(self.runs) and missing <= seen.gone

    def hopes(self, state: State) -> bool:
        """See `World.hopes`."""
        views = map(self.view, state.seats)
        return self.progress and any(now.role != "left" and now.run == max(self.runs) for now in views)

    def where(self, bit: int) -> str:
        """A queue, for people."""
        if not self.queues:
            return "the log"
        number = bit.bit_length() - 1
        return f"subscriber {number}" if number < self.readers else "AB"[number - self.readers]

    def show(self, state: State) -> str:
        """See `World.show`."""
        seats = []
        for at, seat in enumerate(state.seats):
            now = self.view(seat)
            written = "" if seat.pipe is None else f" pipe [{' '.join(str(code) for code, _ in seat.pipe.written)}]"
            unread = f" unread [{' '.join(map(str, seat.unread))}]" if seat.unread else ""
            seats.append(f"{'AB'[at]} {now.role} m={now.m} n={now.last}{written}{unread}")
        return "; ".join([*seats, *map(self.show_place, state.places)])

    def show_place(self, place: Place) -> str:
        """A subscriber, for people."""
        seen = self.seen(place)
        holds = f" holds {list(seen.holds)}" if seen.holds else ""
        return f"next {seen.next}{holds}" + (f" unread [{' '.join(map(str, place.unread))}]" if place.unread else "")


def _each(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit
        bits &= ~bit


def _pending(written: tuple[tuple[Code, int], ...]) -> Iterator[int]:
    all_bits = 0
    for _, bits in written:
        all_bits |= max(bits, 0)
    yield from _each(all_bits)


def _take(written: tuple[tuple[Code, int], ...], bit: int) -> tuple[Code, tuple[tuple[Code, int], ...]]:
    at = next(at for at, (_, bits) in enumerate(written) if bits > 0 and bits & bit)
    code, bits = written[at]
    return code, (*written[:at], (code, bits & ~bit), *written[at + 1 :])


def _refused(pipe: Pipe) -> bool:
    return any(bits == LOST for _, bits in pipe.written)


def _seat(state: State, at: int, seat: Seat) -> State:
    return state._replace(seats=(*state.seats[:at], seat, *state.seats[at + 1 :]))


def with_place(state: State, number: int, place: Any) -> State:
    """The same with another subscriber."""
    return state._replace(places=(*state.places[:number], place, *state.places[number + 1 :]))


def with_a_life_less(state: State) -> State:
    """The same after a fault."""
    return state._replace(lives=state.lives - 1)
