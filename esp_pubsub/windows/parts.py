"""What an aggregate keeps of a group, so that a row can be added and removed without a look at the others. Pure.

A group is a tuple: a list of numbers `n`, the first of which counts its rows, and lists and dicts. Each part has its
places in that. It says in Python what becomes of them when a row is added or removed, and what a result is; `loops.py`
makes one loop of all parts of a window, because calls for each part and row would take most of the time. `v3` is the
row's fourth value.

Floats are added and removed in the order of the rows, and never computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .ordered import MOST

Lines = Sequence[str]


class Part:
    """Of all rows of a group: how many there are. It is the first part of each group."""

    numbers: Sequence[int | float] = (0,)
    """How its numbers begin."""
    ats: Sequence[int] = ()
    """The places of the fields that it looks at."""
    valid = ""
    """What is so of a row that counts; nothing if all do."""
    number = 0
    """Where its numbers begin."""
    extra = 0
    """Where its lists and dicts begin."""

    @property
    def extras(self) -> Sequence[Any]:
        """The types of its lists and dicts."""
        return ()

    def add(self) -> Lines:
        """A row that counts is added."""
        return ("n[0] += 1",)

    def remove(self) -> Lines:
        """A row that counts is removed."""
        return ("n[0] -= 1",)

    def other(self, sign: str) -> Lines:
        """A row that does not count is added, `+`, or removed, `-`."""
        return ()


def valid(at: int, kind: Any) -> str:
    """A value of this Python type counts if it is not null and, as a number, finite."""
    return f"v{at} is not None" + (f" and low < v{at} < high" if kind is float else "")


class Total(Part):
    """The sum of a field, and how many rows have none. Integers have a carry: a state holds no more than 64 bits."""

    def __init__(self, at: int, kind: Any) -> None:
        """`kind`: the Python type of the values."""
        self._integer = kind is int
        self.numbers = (0, 0, 0) if self._integer else (0, 0.0)
        self.ats = (at,)
        self.valid = valid(at, kind)

    def add(self) -> Lines:
        """See `Part`."""
        return (f"n[{self.number + 1}] += v{self.ats[0]}",)

    def remove(self) -> Lines:
        """See `Part`. The last value takes with it what rounding has left."""
        at = self.number
        lines = (f"n[{at + 1}] -= v{self.ats[0]}",)
        return lines if self._integer else (*lines, f"if n[0] == n[{at}]:", f"    n[{at + 1}] = 0.0")

    def other(self, sign: str) -> Lines:
        """See `Part`."""
        return (f"n[{self.number}] {sign}= 1",)

    def sum(self) -> str:
        """The sum, or None if there are no values."""
        return f"({self._total()} if n[0] != n[{self.number}] else None)"

    def average(self) -> str:
        """The average, or None if there are no values."""
        at = self.number
        return f"({self._total()} / (n[0] - n[{at}]) if n[0] != n[{at}] else None)"

    def _total(self) -> str:
        at = self.number + 1
        return f"whole(n, {at})" if self._integer else f"n[{at}]"


class Weighted(Part):
    """The sum of the products of two fields, that of the second, and how many rows have no product."""

    numbers = (0, 0.0, 0.0)

    def __init__(self, at: int, weight_at: int) -> None:
        self.ats = (at, weight_at)
        self.valid = (
            f"v{at} is not None and v{weight_at} is not None and low < (product := v{at} * v{weight_at}) < high"
        )

    def add(self) -> Lines:
        """See `Part`."""
        return f"n[{self.number + 1}] += product", f"n[{self.number + 2}] += v{self.ats[1]}"

    def remove(self) -> Lines:
        """See `Part`. The last value takes with it what rounding has left."""
        at = self.number
        return (
            f"n[{at + 1}] -= product",
            f"n[{at + 2}] -= v{self.ats[1]}",
            f"if n[0] == n[{at}]:",
            f"    n[{at + 1}] = n[{at + 2}] = 0.0",
        )

    def other(self, sign: str) -> Lines:
        """See `Part`."""
        return (f"n[{self.number}] {sign}= 1",)

    def average(self) -> str:
        """The average, or None if there are no values or they weigh nothing."""
        at = self.number
        return f"(n[{at + 1}] / n[{at + 2}] if n[{at + 2}] else None)"


class Moments(Part):
    """How many values there are, their mean, and the sum of the squares of the distances from it (Welford's)."""

    numbers = (0, 0.0, 0.0)

    def __init__(self, at: int, kind: Any) -> None:
        """`kind`: the Python type of the values."""
        self.ats = (at,)
        self.valid = valid(at, kind)

    def add(self) -> Lines:
        """See `Part`."""
        at, value = self.number, f"v{self.ats[0]}"
        return (
            f"n[{at}] = count = n[{at}] + 1",
            f"distance = {value} - n[{at + 1}]",
            f"n[{at + 1}] = mean = n[{at + 1}] + distance / count",
            f"n[{at + 2}] += distance * ({value} - mean)",
        )

    def remove(self) -> Lines:
        """See `Part`. The last values take with them what rounding has left."""
        at, value = self.number, f"v{self.ats[0]}"
        return (
            f"n[{at}] = count = n[{at}] - 1",
            "if count:",
            f"    distance = {value} - n[{at + 1}]",
            f"    n[{at + 1}] = mean = n[{at + 1}] - distance / count",
            f"    n[{at + 2}] = n[{at + 2}] - distance * ({value} - mean) if count > 1 else 0.0",
            "else:",
            f"    n[{at + 1}] = n[{at + 2}] = 0.0",
        )

    def deviation(self) -> str:
        """Of the values as a whole population; None if there are none."""
        at = self.number
        return f"(sqrt(n[{at + 2}] / n[{at}]) if n[{at + 2}] > 0.0 else 0.0 if n[{at}] else None)"


class Extremes(Part):
    """The values of a field in order (`ordered.py`)."""

    numbers = ()

    def __init__(self, at: int, kind: Any) -> None:
        """`kind`: the Python type of the values."""
        self.ats = (at,)
        self.valid = valid(at, kind)
        self._kind = kind

    @property
    def extras(self) -> Sequence[Any]:
        """See `Part`."""
        return list[self._kind], list[list[self._kind]]  # type: ignore[name-defined]

    def add(self) -> Lines:
        """See `Part`."""
        value = f"v{self.ats[0]}"
        return (
            f"few = g[{self.extra}]",
            f"if 0 < len(few) < {MOST}:",
            f"    insort(few, {value})",
            "else:",
            f"    insert(few, g[{self.extra + 1}], {value})",
        )

    def remove(self) -> Lines:
        """See `Part`."""
        value = f"v{self.ats[0]}"
        return (
            f"few = g[{self.extra}]",
            "if few:",
            f"    del few[bisect_left(few, {value})]",
            "else:",
            f"    remove(few, g[{self.extra + 1}], {value})",
        )

    def least(self) -> str:
        """None if there are no values."""
        return f"(g[{self.extra}] or least(g[{self.extra + 1}]))[0]"

    def greatest(self) -> str:
        """None if there are no values."""
        return f"(g[{self.extra}] or greatest(g[{self.extra + 1}]))[-1]"


class ExtremesOfInserts(Extremes):
    """The least and the greatest value alone: no row is ever removed."""

    def add(self) -> Lines:
        """See `Part`."""
        value = f"v{self.ats[0]}"
        return (
            f"if not (few := g[{self.extra}]):",
            f"    few += ({value}, {value})",
            f"elif {value} < few[0]:",
            f"    few[0] = {value}",
            f"elif {value} > few[1]:",
            f"    few[1] = {value}",
        )


class Arrivals(Part):
    """Some fields of the rows, in the order in which they came. A row that is updated comes anew."""

    numbers = (0, 0)  # where the first may be, and one after where the last may be

    def __init__(self, key: Any) -> None:
        """`key`: the Python type of the key of a row."""
        self._key = key
        self._types: list[Any] = []
        self.ats: list[int] = []

    def keep(self, at: int, kind: Any) -> int:
        """Keep this field too, which is of this type; gives its place in what is kept of a row."""
        if at not in self.ats:
            self.ats.append(at)
            self._types.append(kind | None)
        return self.ats.index(at)

    @property
    def extras(self) -> Sequence[Any]:
        """The number of each row by its key, and what is kept by that number."""
        return dict[self._key, int], dict[int, tuple[tuple(self._types)]]  # type: ignore[misc,name-defined]

    def add(self) -> Lines:
        """See `Part`."""
        following = self.number + 1
        return (
            f"at = g[{self.extra}][key_of(row)] = n[{following}]",
            f"n[{following}] = at + 1",
            f"g[{self.extra + 1}][at] = {self._of_row()}",
        )

    def remove(self) -> Lines:
        """See `Part`."""
        return (f"del g[{self.extra + 1}][g[{self.extra}].pop(key_of(row))]",)

    def _of_row(self) -> str:
        return f"({', '.join(f'v{at}' for at in self.ats)},)"

    def first(self, place: int) -> str:
        """What is kept at this place, of the first row."""
        return f"first(n, {self.number}, g[{self.extra + 1}])[{place}]"

    def last(self, place: int) -> str:
        """What is kept at this place, of the last row."""
        return f"last(n, {self.number + 1}, g[{self.extra + 1}])[{place}]"


class ArrivalsOfInserts(Arrivals):
    """Of the first and the last row alone: no row is ever removed."""

    def add(self) -> Lines:
        """See `Part`."""
        following = self.number + 1
        return (
            f"g[{self.extra + 1}][1 if n[{following}] else 0] = {self._of_row()}",
            f"n[{following}] = 2 if n[{following}] else 1",
        )
