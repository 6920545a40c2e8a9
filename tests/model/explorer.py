"""An explorer for the model check: every state that can be reached, breadth first, so that a history is the shortest.

The theory. A state is a tuple, immutable and hashable. The objects in it (accept rule, outbox, member, ledger: the real
ones) are kept as snapshots, each known by a number. A step makes one object anew from its snapshot, calls it, and takes
the next snapshot; what came of it is remembered, so that each object does each thing from each state only once,
however many states of the world it happens in. Nothing else is shared, so no step can touch a state but its own.

Safety is what the objects refuse on the way: they raise `Broken`. Progress is asked when everything is known: from each
state in which there is hope, some way without a further fault must lead to a state in which all is done.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeVar

from esp_pubsub.encode import Encoder
from esp_pubsub.engine.order import Version
from esp_pubsub.schema import Schema
from esp_pubsub.wire.frame import Limits

T = TypeVar("T")
State = Hashable
Moves = Iterable[tuple[str, Callable[[], State]]]

_ATOMS = (
    int,
    float,
    str,
    bytes,
    frozenset,
    type(None),
    FunctionType,
    Schema,
    Encoder,
    Limits,
    Version,
)  # nothing changes
_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))


class Broken(Exception):
    """Something happened that must not."""


class Counterexample(AssertionError):
    """The shortest history that leads to what must not be."""


def freeze(value: Any, seen: dict[int, int] | None = None) -> Hashable:
    """A hashable picture of a value and of all that it holds. What is shared in it is shared in the copy."""
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, tuple) and _is_plain(value):
        return value
    seen = {} if seen is None else seen
    if isinstance(value, dict):
        return "dict", tuple((key, freeze(held, seen)) for key, held in value.items())
    if isinstance(value, deque | list):
        return "deque" if isinstance(value, deque) else "list", tuple(freeze(held, seen) for held in value)
    if isinstance(value, array):
        return "array", value.typecode, tuple(value)
    if isinstance(value, set):
        return "set", frozenset(value)
    if isinstance(value, tuple):
        return "tuple", type(value), tuple(freeze(held, seen) for held in value)
    if isinstance(value, MethodType):
        return "method", freeze(value.__self__, seen), value.__name__
    if id(value) in seen:
        return "same", seen[id(value)]
    seen[id(value)] = len(seen)
    return "object", type(value), tuple((name, freeze(getattr(value, name), seen)) for name in _names(value))


def thaw(picture: Any, made: list[Any] | None = None) -> Any:
    """A new value like the one of which the picture was taken."""
    if not (type(picture) is tuple and picture and picture[0] in _THAW):
        return picture
    return _THAW[picture[0]](picture, [] if made is None else made)


def _is_plain(value: tuple[Any, ...]) -> bool:
    """Whether no tuple in it holds what can change."""
    return _PLAIN.issuperset(map(type, value)) or all(
        _is_plain(held) if isinstance(held, tuple) else isinstance(held, _ATOMS) for held in value
    )


def _names(value: Any) -> Iterable[str]:
    held = getattr(value, "__dict__", None)
    return held if held is not None else sorted(type(value).__slots__)


def _thaw_tuple(picture: Any, made: list[Any]) -> Any:
    held = [thaw(held, made) for held in picture[2]]
    return tuple(held) if picture[1] is tuple else picture[1](*held)


def _thaw_object(picture: Any, made: list[Any]) -> Any:
    value = object.__new__(picture[1])
    made.append(value)
    for name, held in picture[2]:
        object.__setattr__(value, name, thaw(held, made))  # some are frozen
    return value


_THAW: dict[str, Callable[[Any, list[Any]], Any]] = {
    "dict": lambda picture, made: {key: thaw(held, made) for key, held in picture[1]},
    "deque": lambda picture, made: deque(thaw(held, made) for held in picture[1]),
    "list": lambda picture, made: [thaw(held, made) for held in picture[1]],
    "array": lambda picture, _: array(picture[1], picture[2]),
    "set": lambda picture, _: set(picture[1]),
    "tuple": _thaw_tuple,
    "method": lambda picture, made: getattr(thaw(picture[1], made), picture[2]),
    "same": lambda picture, made: made[picture[1]],
    "object": _thaw_object,
}


class Workshop:
    """Snapshots of objects by number, and what came of each call on each of them."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._pictures: list[Hashable] = []
        self._changed: dict[tuple[Any, ...], int | Broken] = {}
        self._seen: dict[tuple[Any, ...], Any] = {}

    def keep(self, value: object) -> int:
        """The number of an object as it is now."""
        picture = freeze(value)
        number = self._numbers.setdefault(picture, len(self._pictures))
        if number == len(self._pictures):
            self._pictures.append(picture)
        return number

    def change(self, number: int, call: Callable[..., None], *arguments: Hashable) -> int:
        """The number of what an object becomes by `call(object, *arguments)`. Raises Broken if that was wrong."""
        key = (number, call, *arguments)
        found = self._changed.get(key)
        if found is None:
            value = thaw(self._pictures[number])
            try:
                call(value, *arguments)
                found = self.keep(value)
            except Broken as broken:
                found = broken
            self._changed[key] = found
        if isinstance(found, Broken):
            raise found
        return found

    def look(self, number: int, call: Callable[[Any], T]) -> T:
        """What `call(object)` says of an object, which it must not change."""
        key = (number, call)
        if key not in self._seen:
            self._seen[key] = call(thaw(self._pictures[number]))
        found: T = self._seen[key]
        return found

    def __len__(self) -> int:
        return len(self._pictures)


class World(Protocol):
    """What can be explored."""

    name: str

    def start(self) -> State:
        """The first state."""

    def moves(self, state: Any) -> Moves:
        """What can happen next: a label, and what gives the state after it or raises Broken."""

    def done(self, state: Any) -> bool:
        """Everything has been delivered."""

    def hopes(self, state: Any) -> bool:
        """Somebody is there who can see to it that everything is."""

    def show(self, state: Any) -> str:
        """The state in one line, for people."""


@dataclass(frozen=True, slots=True)
class Explored:
    """What an exhausted world had in it."""

    states: int
    moves: int
    done: int


class _Graph:
    """States by number, in the order in which they were found; where each was found from, and where each leads."""

    def __init__(self, start: State) -> None:
        self.numbers: dict[State, int] = {start: 0}
        self.states: list[State] = [start]
        self.found_from: list[tuple[int, str]] = [(-1, "start")]
        self.leads_to: list[list[int]] = []

    def add(self, state: State, before: int, label: str) -> int:
        number = self.numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.found_from.append((before, label))
        return number

    def history(self, number: int) -> list[tuple[str, State]]:
        steps = []
        while number >= 0:
            before, label = self.found_from[number]
            steps.append((label, self.states[number]))
            number = before
        return steps[::-1]

    def leading_to(self, goals: Iterable[int]) -> set[int]:
        back: list[list[int]] = [[] for _ in self.states]
        for number, following in enumerate(self.leads_to):
            for other in following:
                back[other].append(number)
        found = set(goals)
        todo = deque(found)
        while todo:
            for number in back[todo.popleft()]:
                if number not in found:
                    found.add(number)
                    todo.append(number)
        return found


def explore(world: World, most: int = 3_000_000) -> Explored:
    """Exhaust a world. Raises Counterexample, or RuntimeError if it has more states than `most`."""
    graph, moves, number = _Graph(world.start()), 0, 0
    done = []
    while number < len(graph.states):
        state = graph.states[number]
        following = []
        if world.done(state):
            done.append(number)
        for label, make in () if world.done(state) else world.moves(state):
            moves += 1
            try:
                after = make()
            except Broken as broken:
                raise Counterexample(_told(world, graph, number, f"{label}: {broken}")) from None
            if after != state:
                found = graph.add(after, number, label)
                if _lives(after) == _lives(state):
                    following.append(found)
        graph.leads_to.append(following)
        number += 1
        if len(graph.states) > most:
            raise RuntimeError(f"{world.name} has more than {most:,} states")
    possible = graph.leading_to(done)
    for number, state in enumerate(graph.states):
        if number not in possible and world.hopes(state):
            raise Counterexample(_told(world, graph, number, "from here the whole sequence can not be delivered"))
    return Explored(len(graph.states), moves, len(done))


def _lives(state: State) -> int:
    """How many faults there may still be: each costs a life. No world counts on one for its progress."""
    return getattr(state, "lives", 0)


def _told(world: World, graph: _Graph, number: int, end: str) -> str:
    return "\n".join([f"{world.name}: after {graph.found_from[number][1]!r}", *_lines(world, graph, number), end])


def _lines(world: World, graph: _Graph, number: int) -> Iterator[str]:
    for at, (label, state) in enumerate(graph.history(number)):
        yield f"  {at:3}  {label:42} {world.show(state)}"
