"""A world of the model check whose subscriber is a group, with what a bus keeps for it. See worlds.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from . import judges
from .explorer import Broken, Moves
from .judges import Code, Grouped
from .scene import Scene, State, with_a_life_less, with_place


class Desk(NamedTuple):
    """A group's readers, of whom one reads, and what the bus keeps for the group.

    `kept` are messages not stored as done, each with its position, which a queue gives when it is read. `next` is the
    position that a log's feed reads next. `half` is a position whose state was stored, and which is not stored itself.
    What was sent before the group came are blocks below `bound`.
    """

    readers: tuple[int, ...]
    holder: int = 0
    kept: tuple[tuple[int | None, Code], ...] = ()
    next: int = 0
    positions: int = 0
    state: bytes | None = None
    half: int | None = None
    committed: int = 0
    bound: int = 0


@dataclass(eq=False)
class GroupScene(Scene):
    """A world whose subscriber is a group: its reader dies, loses its feed, or gives way to another reader. One that
    comes late has stored what it confirmed of another source.
    """

    in_group: int = 1
    state_first: ClassVar[bool] = True

    def start(self) -> State:
        """See `World.start`."""
        state = super().start()
        return state if self.late else self.bind(state)

    def bind(self, state: State) -> State:
        """See `Scene.bind`."""
        bound = state.sent + 1 if self.late else 0
        readers = (self.grouped(bound),) * self.in_group
        desk = Desk(readers, state=judges.other_state() if self.late else None, bound=bound)
        return state._replace(places=(desk,))  # type: ignore[arg-type]

    def grouped(self, bound: int) -> int:
        """A reader of the group that starts."""
        return self.works.keep(
            Grouped(
                suffix_only=self.suffix_only,
                from_start=not self.late,
                window=self.window,
                bound=bound,
                replay=not self.queues,
            )
        )

    def reach(self, state: State, number: int, code: Code) -> State:
        """See `Scene.reach`: it stays until it is done."""
        desk: Any = state.places[number]
        position = None if self.queues else desk.positions
        kept = (*desk.kept, (position, code))
        return with_place(state, number, desk._replace(kept=kept, positions=desk.positions + (not self.queues)))

    def reader_moves(self, state: State, number: int, place: Any) -> Moves:
        """What can happen to the group."""
        desk: Desk = place
        if desk.half is None:
            yield from self._reads(state, desk)
        now = self.works.look(desk.readers[desk.holder], judges.to_store)
        if now.needed:
            yield f"reader {desk.holder} stores", partial(self.store, state, desk, now)
        if state.lives:
            yield "the reader restarts", partial(self.reopen, state, desk, desk.holder, new=True)
            yield "the feed is lost", partial(self.reopen, state, desk, desk.holder)
            if self.in_group > 1:
                yield "another reader takes over", partial(self.reopen, state, desk, 1 - desk.holder)

    def _reads(self, state: State, desk: Desk) -> Moves:
        at = self.unread(desk)
        if at is not None:
            yield f"reader {desk.holder} reads {desk.kept[at][1]}", partial(self.take, state, desk, at)
        for who, reader in enumerate(desk.readers):
            if self.works.look(reader, judges.reader_view).unconfirmed:
                yield f"reader {who} confirms", partial(self.confirm, state, desk, who)

    def unread(self, desk: Desk) -> int | None:
        """Which of the messages that are kept is read next."""
        for at, (position, _) in enumerate(desk.kept):
            if position is None or (not self.queues and position >= desk.next):
                return at
        return None

    def take(self, state: State, desk: Desk, at: int) -> State:
        """The reader reads a message."""
        position, code = desk.kept[at]
        if position is None:
            position = desk.positions
            kept = (*desk.kept[:at], (position, code), *desk.kept[at + 1 :])
            desk = desk._replace(kept=kept, positions=position + 1)
        reader = self.works.change(desk.readers[desk.holder], judges.take, code, position)
        desk = _by(desk, desk.holder, reader)._replace(next=0 if self.queues else position + 1)
        if self.queues:
            gone = self.works.look(reader, judges.released)
            desk = desk._replace(kept=tuple(entry for entry in desk.kept if entry[0] not in gone or entry[0] is None))
        return with_place(state, 0, desk)

    def confirm(self, state: State, desk: Desk, who: int) -> State:
        """Its user confirms a block."""
        return with_place(state, 0, _by(desk, who, self.works.change(desk.readers[who], judges.confirm)))

    def store(self, state: State, desk: Desk, now: judges.ToStore) -> State:
        """State and position in one step on a log; the state first, then the position, with queues."""
        done = _by(desk, desk.holder, self.works.change(desk.readers[desk.holder], judges.stored))
        if not self.queues:
            return with_place(state, 0, self.position_stored(self.state_stored(done, now), now.position))
        first, second = (
            (self.state_stored, self.half_stored) if self.state_first else (self.half_stored, self.state_stored)
        )
        if desk.half is None:
            desk = first(desk, now)._replace(half=-1 if now.position is None else now.position)
        else:
            desk = second(done._replace(half=desk.half), now)._replace(half=None)
        return with_place(state, 0, desk)

    def state_stored(self, desk: Desk, now: judges.ToStore) -> Desk:
        """The state is safe, and with it what was confirmed."""
        if now.known < desk.committed:
            raise Broken(f"the state that is stored goes back from block {desk.committed} to block {now.known}")
        return desk._replace(state=now.state, committed=max(desk.committed, now.confirmed))

    def half_stored(self, desk: Desk, now: judges.ToStore) -> Desk:
        """The position that belongs to the state stored before."""
        return self.position_stored(desk, now.position if desk.half is None else desk.half)

    def position_stored(self, desk: Desk, position: int | None) -> Desk:
        """Everything read up to a position is done."""
        kept = tuple(e for e in desk.kept if e[0] is None or position is None or e[0] > position)
        return desk._replace(kept=kept)

    def reopen(self, state: State, desk: Desk, who: int, *, new: bool = False) -> State:
        """A feed died, perhaps with its process; this reader opens the next one."""
        if self.queues:
            desk = desk._replace(kept=tuple((None, code) for _, code in desk.kept))
        else:  # a log's feed begins behind what is stored
            desk = desk._replace(next=next((at for at, _ in desk.kept if at is not None), desk.positions))
        if new:
            desk = _by(desk, who, self.grouped(desk.bound))
        resume = partial(self.works.change, desk.readers[who], judges.resume, desk.state, desk.committed)
        return with_place(
            with_a_life_less(state), 0, _by(desk._replace(holder=who, half=None), who, resume(self.queues))
        )

    def done(self, state: State) -> bool:
        """See `World.done`."""
        if not state.places:
            return False
        desk: Any = state.places[0]
        return bool(max(desk.committed, desk.bound - 1) >= self.blocks and desk.half is None)

    def show_place(self, place: Any) -> str:
        """See `Scene.show_place`."""
        desk: Desk = place
        seen = [self.works.look(reader, judges.reader_view) for reader in desk.readers]
        readers = ", ".join(f"reader {who} next {view.next} holds {list(view.holds)}" for who, view in enumerate(seen))
        kept = " ".join(f"{code}" if position is None else f"{code}@{position}" for position, code in desk.kept)
        return f"{readers}, kept [{kept}], stored {desk.committed}"


def _by(desk: Desk, who: int, reader: int) -> Desk:
    return desk._replace(readers=tuple(reader if at == who else other for at, other in enumerate(desk.readers)))
