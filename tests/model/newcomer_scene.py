"""A world of the model check where a member begins to follow in the middle of a log. See worlds.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from . import judges
from .explorer import Moves
from .judges import Code, Core
from .scene import Scene, State, with_place


class Newcomer(NamedTuple):
    """A member that never leads: what it has not read of the log since it began, or None before that."""

    core: int
    unread: tuple[Code, ...] | None = None


@dataclass(eq=False)
class NewcomerScene(Scene):
    """A world with one more member. It begins to follow at any time, and its reads are cut anywhere; its input comes
    last, and must be what it has read.
    """

    read_at_once: ClassVar[int] = 3

    def start(self) -> State:
        """See `World.start`."""
        state = super().start()
        core = self.works.keep(Core("A", max(self.runs), suffix_only=self.suffix_only))
        return state._replace(places=(*state.places, Newcomer(core)))  # type: ignore[arg-type]

    def reach(self, state: State, number: int, code: Code) -> State:
        """See `Scene.reach`."""
        place: Any = state.places[number]
        if not isinstance(place, Newcomer):
            return super().reach(state, number, code)
        if place.unread is None:
            return state
        place = place._replace(unread=(*place.unread, code))
        if len(place.unread) == self.read_at_once:
            return self.follow(state, number, place)
        return with_place(state, number, place)

    def reader_moves(self, state: State, number: int, place: Any) -> Moves:
        """What can happen to a subscriber, and to the newcomer."""
        if not isinstance(place, Newcomer):
            yield from super().reader_moves(state, number, place)
        elif place.unread is None:
            yield "the newcomer begins to follow", partial(with_place, state, number, place._replace(unread=()))
        elif place.unread:
            yield "the newcomer reads", partial(self.follow, state, number, place)

    def follow(self, state: State, number: int, place: Newcomer) -> State:
        """It reads, and would agree if its input came now."""
        core = self.works.change(place.core, judges.follow_all, place.unread)
        self.works.change(core, judges.give_all, self.blocks)
        return with_place(state, number, Newcomer(core, ()))

    def done(self, state: State) -> bool:
        """See `World.done`."""
        newcomer, *others = state.places[::-1]
        return self._is_through(newcomer) and all(map(self._has_all, others))

    def _is_through(self, newcomer: Any) -> bool:
        return newcomer.unread == () and self.works.look(newcomer.core, judges.view).m == self.blocks

    def show_place(self, place: Any) -> str:
        """See `Scene.show_place`."""
        if not isinstance(place, Newcomer):
            return super().show_place(place)
        unread = "is not there" if place.unread is None else f"has not read [{' '.join(map(str, place.unread))}]"
        return f"the newcomer {unread}"
