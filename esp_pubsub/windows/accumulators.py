"""What an aggregate keeps of a group, so that a row can be added and removed without a look at the others. Pure.

A group is a list of numbers, the first of which counts its rows, and what else its accumulators need. Each accumulator
has its places in that. It adds, and removes, the rows of a whole block at once: `pairs` are groups and rows.

Floats are added and removed in the order of the rows, and never computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, sqrt
from typing import Any

from .changes import Row
from .ordered import insert, remove

Group = tuple[Any, ...]
Pairs = Sequence[tuple[Group, Row]]

_CARRY = 64
_LOW, _HIGH = -(1 << 63), (1 << 63) - 1


class Rows:
    """How many rows there are. It has the first number."""

    numbers: tuple[int | float, ...] = (0,)
    extras: tuple[Any, ...] = ()

    def place(self, number: int, extra: int) -> None:
        """It always has the first."""

    def add(self, pairs: Pairs) -> None:
        """Add rows."""
        for group, _ in pairs:
            group[0][0] += 1

    def remove(self, pairs: Pairs) -> None:
        """Remove rows."""
        for group, _ in pairs:
            group[0][0] -= 1

    def count(self, group: Group) -> int:
        """How many there are."""
        found: int = group[0][0]
        return found


class Total:
    """The sum of a field, and of how many values. Integers have a carry, since a state holds no more than 64 bits."""

    extras: tuple[Any, ...] = ()

    def __init__(self, at: int, integer: bool) -> None:
        self.numbers = (0, 0, 0) if integer else (0, 0.0)
        self._at = at
        self._integer = integer

    def place(self, number: int, extra: int) -> None:
        """Its numbers begin here."""
        self._number = number

    def add(self, pairs: Pairs) -> None:
        """Add rows."""
        at, count = self._at, self._number
        total = count + 1
        for group, row in pairs:
            value = row[at]
            if value is not None and -inf < value < inf:
                numbers = group[0]
                numbers[count] += 1
                numbers[total] += value

    def remove(self, pairs: Pairs) -> None:
        """Remove rows."""
        at, count = self._at, self._number
        total = count + 1
        for group, row in pairs:
            value = row[at]
            if value is not None and -inf < value < inf:
                numbers = group[0]
                numbers[count] -= 1
                numbers[total] -= value

    def sum(self, group: Group) -> Any:
        """None if there are no values."""
        numbers, at = group[0], self._number
        if not numbers[at]:
            numbers[at + 1 : at + len(self.numbers)] = self.numbers[1:]  # without what rounding has left
            return None
        total = numbers[at + 1]
        if not self._integer:
            return total
        if not _LOW <= total <= _HIGH:
            carry = (total - _LOW) >> _CARRY
            numbers[at + 2] += carry
            numbers[at + 1] = total = total - (carry << _CARRY)
        return total + (numbers[at + 2] << _CARRY)

    def average(self, group: Group) -> float | None:
        """None if there are no values."""
        total = self.sum(group)
        return None if total is None else total / group[0][self._number]


class Weighted:
    """The sum of the products of two fields, and of the second."""

    numbers: tuple[int | float, ...] = (0, 0.0, 0.0)
    extras: tuple[Any, ...] = ()

    def __init__(self, at: int, weight_at: int) -> None:
        self._at = at
        self._weight_at = weight_at

    def place(self, number: int, extra: int) -> None:
        """Its numbers begin here."""
        self._number = number

    def add(self, pairs: Pairs) -> None:
        """Add rows."""
        at, weight_at, count = self._at, self._weight_at, self._number
        total, weights = count + 1, count + 2
        for group, row in pairs:
            value, weight = row[at], row[weight_at]
            if value is not None and weight is not None and -inf < value * weight < inf:
                numbers = group[0]
                numbers[count] += 1
                numbers[total] += value * weight
                numbers[weights] += weight

    def remove(self, pairs: Pairs) -> None:
        """Remove rows."""
        at, weight_at, count = self._at, self._weight_at, self._number
        total, weights = count + 1, count + 2
        for group, row in pairs:
            value, weight = row[at], row[weight_at]
            if value is not None and weight is not None and -inf < value * weight < inf:
                numbers = group[0]
                numbers[count] -= 1
                numbers[total] -= value * weight
                numbers[weights] -= weight

    def average(self, group: Group) -> float | None:
        """None if there are no values, or no weight."""
        numbers, at = group[0], self._number
        if not numbers[at]:
            numbers[at + 1 : at + 3] = self.numbers[1:]
        weights = numbers[at + 2]
        return numbers[at + 1] / weights if weights else None


class Moments:
    """The mean of a field, and the sum of the squares of the distances from it (Welford's)."""

    numbers: tuple[int | float, ...] = (0, 0.0, 0.0)
    extras: tuple[Any, ...] = ()

    def __init__(self, at: int) -> None:
        self._at = at

    def place(self, number: int, extra: int) -> None:
        """Its numbers begin here."""
        self._number = number

    def add(self, pairs: Pairs) -> None:
        """Add rows."""
        at, first = self._at, self._number
        second, third = first + 1, first + 2
        for group, row in pairs:
            value = row[at]
            if value is not None and -inf < value < inf:
                numbers = group[0]
                numbers[first] = count = numbers[first] + 1
                mean = numbers[second]
                distance = value - mean
                numbers[second] = mean = mean + distance / count
                numbers[third] += distance * (value - mean)

    def remove(self, pairs: Pairs) -> None:
        """Remove rows."""
        at, first = self._at, self._number
        second, third = first + 1, first + 2
        for group, row in pairs:
            value = row[at]
            if value is not None and -inf < value < inf:
                numbers = group[0]
                numbers[first] = count = numbers[first] - 1
                if not count:
                    numbers[second] = numbers[third] = 0.0
                    continue
                mean = numbers[second]
                distance = value - mean
                numbers[second] = mean = mean - distance / count
                numbers[third] -= distance * (value - mean)

    def deviation(self, group: Group) -> float | None:
        """Of the values as a whole population; None if there are none."""
        numbers, at = group[0], self._number
        count, squares = numbers[at], numbers[at + 2]
        if count < 2 or squares < 0.0:
            numbers[at + 2] = squares = 0.0
        return sqrt(squares / count) if count else None


class Extremes:
    """The values of a field in order."""

    numbers: tuple[int | float, ...] = ()

    def __init__(self, at: int, kind: Any) -> None:
        """`kind`: the Python type of the values."""
        self.extras = (list[list[kind]],)
        self._at = at

    def place(self, number: int, extra: int) -> None:
        """Its list has this place."""
        self._extra = extra

    def add(self, pairs: Pairs) -> None:
        """Add rows."""
        at, extra = self._at, self._extra
        for group, row in pairs:
            value = row[at]
            if value is not None and value == value:
                insert(group[extra], value)

    def remove(self, pairs: Pairs) -> None:
        """Remove rows."""
        at, extra = self._at, self._extra
        for group, row in pairs:
            value = row[at]
            if value is not None and value == value:
                remove(group[extra], value)

    def least(self, group: Group) -> Any:
        """None if there are no values."""
        chunks = group[self._extra]
        return chunks[0][0] if chunks else None

    def greatest(self, group: Group) -> Any:
        """None if there are no values."""
        chunks = group[self._extra]
        return chunks[-1][-1] if chunks else None


class ExtremesOfInserts(Extremes):
    """The least and the greatest value alone: no row is ever removed."""

    def add(self, pairs: Pairs) -> None:
        """Add rows."""
        at, extra = self._at, self._extra
        for group, row in pairs:
            value = row[at]
            if value is None or value != value:
                continue
            if not (chunks := group[extra]):
                chunks.append([value, value])
            elif value < (both := chunks[0])[0]:
                both[0] = value
            elif value > both[1]:
                both[1] = value


class Arrivals:
    """Some fields of the rows, in the order in which they came. A row that is updated comes anew."""

    numbers: tuple[int | float, ...] = (0, 0)  # where the first may be, and one after where the last may be

    def __init__(self, key_of: Callable[[Row], Any], key: Any) -> None:
        """`key_of` gives the key of a row, and `key` is its type."""
        self._ats: list[int] = []
        self._types: list[Any] = []
        self._key_of = key_of
        self._key = key

    def take(self, at: int, kind: Any) -> int:
        """Take this field too, of this type; gives its place in `first` and `last`."""
        if at not in self._ats:
            self._ats.append(at)
            self._types.append(kind | None)
        return self._ats.index(at)

    @property
    def extras(self) -> tuple[Any, ...]:
        """The number of each row by its key, and the fields by that number."""
        return dict[self._key, int], dict[int, tuple[tuple(self._types)]]  # type: ignore[misc,name-defined]

    def place(self, number: int, extra: int) -> None:
        """Its numbers and its dicts begin here."""
        self._number, self._extra = number, extra

    def of(self, row: Row) -> Row:
        """The fields of a row."""
        return tuple([row[at] for at in self._ats])

    def add(self, pairs: Pairs) -> None:
        """Add rows."""
        following, extra = self._number + 1, self._extra
        for group, row in pairs:
            at = group[0][following]
            group[0][following] = at + 1
            group[extra][self._key_of(row)] = at
            group[extra + 1][at] = self.of(row)

    def remove(self, pairs: Pairs) -> None:
        """Remove rows."""
        extra = self._extra
        for group, row in pairs:
            del group[extra + 1][group[extra].pop(self._key_of(row))]

    def first(self, group: Group) -> Row:
        """The fields of the first row."""
        numbers, number, rows = group[0], self._number, group[self._extra + 1]
        while numbers[number] not in rows:
            numbers[number] += 1
        found: Row = rows[numbers[number]]
        return found

    def last(self, group: Group) -> Row:
        """The fields of the last row."""
        numbers, following, rows = group[0], self._number + 1, group[self._extra + 1]
        while numbers[following] - 1 not in rows:
            numbers[following] -= 1
        found: Row = rows[numbers[following] - 1]
        return found


class ArrivalsOfInserts(Arrivals):
    """Of the first and the last row alone: no row is ever removed."""

    def add(self, pairs: Pairs) -> None:
        """Add rows."""
        following, extra = self._number + 1, self._extra + 1
        for group, row in pairs:
            group[extra][min(group[0][following], 1)] = self.of(row)
            group[0][following] = min(group[0][following] + 1, 2)


Accumulator = Rows | Total | Weighted | Moments | Extremes | Arrivals
