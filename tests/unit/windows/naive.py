"""The windows, computed anew from all rows at each event: slow, and plain enough to be believed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Row = tuple[Any, ...]
Table = dict[Any, Row]


class Source:
    """A keyed source that is fed one event at a time."""

    def __init__(self) -> None:
        self.rows: Table = {}

    def take(self, opcode: int, row: Row) -> tuple[Row | None, Row | None] | None:
        """The old and the new row; None if the event is rejected or changes nothing."""
        key, there = row[0], row[0] in self.rows
        if key is None or (opcode == 1 and there) or (opcode in (2, 3) and not there) or (opcode == 5 and not there):
            return None
        old = self.rows.pop(key, None)
        new = None if opcode in (3, 5) else row
        if new is not None:
            self.rows[key] = new
        return old, new


class Retained:
    """The rows of a Copy, with the time or the number at which each came."""

    def __init__(self, kind: str, by: str, amount: int, field: int | None) -> None:
        self.kind, self.by, self.amount, self.field = kind, by, amount, field
        self.came: dict[Any, tuple[int, Row]] = {}
        self.newest: int | None = None
        self.begun: int | None = None
        self.number = 0

    @property
    def rows(self) -> Table:
        return {key: row for key, (_, row) in self.came.items()}

    def take(self, old: Row | None, new: Row | None, now: int) -> None:
        """The window before it changes a row; `old` is None for an insert."""
        if new is None:
            assert old is not None
            self.came.pop(old[0], None)
            return
        key = new[0]
        if self.field is not None:
            time = new[self.field]
            if not self._in_time(time):
                if old is not None:
                    self.came.pop(key, None)
                return
            self._by_time(time)
        elif self.by == "time":
            time = now
            if not self.came:
                self.begun = now
        else:
            self.number += 1
            time = self.number
            if self.kind == "jumping" and key not in self.came and len(self.came) >= self.amount:
                self.came.clear()
        if old is not None or key not in self.came:
            self._hold(key, time, new)

    def _in_time(self, time: int | None) -> bool:
        if time is None:
            return False
        self.newest = time if self.newest is None else max(time, self.newest)
        return self.newest - time < self.amount

    def _hold(self, key: Any, time: int, row: Row) -> None:
        self.came.pop(key, None)
        self.came[key] = (time, row)
        if self.by == "count" and self.kind == "sliding":
            while len(self.came) > self.amount:
                del self.came[min(self.came, key=lambda each: self.came[each][0])]

    def _by_time(self, time: int) -> None:
        assert self.newest is not None
        if self.kind == "sliding":
            self.came = {key: each for key, each in self.came.items() if self.newest - each[0] < self.amount}
        elif self.begun is None or time - self.begun >= self.amount:
            self.came.clear()
            self.begun = time

    def tick(self, now: int) -> None:
        """It is a full second, by the engine's time."""
        if self.kind == "sliding":
            self.came = {key: each for key, each in self.came.items() if now - each[0] < self.amount}
        elif self.came and self.begun is not None and now - self.begun >= self.amount:
            self.came.clear()


def filtered(rows: Table, condition: Callable[[Row], Any]) -> Table:
    return {key: row for key, row in rows.items() if condition(row)}


def computed(rows: Table, compute: Callable[[Row], Row]) -> Table:
    return {key: compute(row) for key, row in rows.items()}


FUNCTIONS: dict[str, Callable[[list[Row]], Any]] = {
    "n": len,
    "total": lambda rows: _or_null(sum, _values(rows, 2)),
    "whole": lambda rows: _or_null(sum, _values(rows, 3)),
    "average": lambda rows: _or_null(lambda values: sum(values) / len(values), _values(rows, 2)),
    "weighted": lambda rows: _weighted(rows),
    "deviation": lambda rows: _or_null(_deviation, _values(rows, 2)),
    "least": lambda rows: _or_null(min, _values(rows, 2)),
    "greatest": lambda rows: _or_null(max, _values(rows, 2)),
    "first": lambda rows: rows[0][2],
    "last": lambda rows: rows[-1][3],
}


def aggregated(rows: Table) -> Table:
    """By the second field, over the rows in the order in which they came."""
    groups: dict[Any, list[Row]] = {}
    for row in rows.values():
        if row[1] is not None:
            groups.setdefault(row[1], []).append(row)
    return {key: (key, *(compute(group) for compute in FUNCTIONS.values())) for key, group in groups.items()}


def _values(rows: list[Row], at: int) -> list[Any]:
    return [row[at] for row in rows if row[at] is not None and math.isfinite(row[at])]


def _or_null(compute: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    return compute(values) if values else None


def _weighted(rows: list[Row]) -> float | None:
    pairs = [(row[2], row[3]) for row in rows if None not in (row[2], row[3]) and math.isfinite(row[2])]
    weight = sum(each for _, each in pairs)
    return sum(value * each for value, each in pairs) / weight if weight else None


def _deviation(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
