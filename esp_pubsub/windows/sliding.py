"""Windows in which each row goes by itself. Pure.

The keys stand in a list in the order in which their rows go, up to `head` they have gone. A row that is updated or
deleted leaves its old place in that list behind, and what is found there later is no news.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from esp_pubsub import Out, Schema

from .changes import Changes, Row
from .held import Held, Stamps, full_second
from .window import Place, key_type

_GONE = 4_096  # places of rows that have gone, below which the list is left as it is


class Sliding(Held):
    """What goes first stands first."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._order: list[Any] = place.state["order"]
        self._times: list[int] = place.state["times"]
        self._head: list[int] = place.state["head"]
        if not self._head:
            self._head.append(0)

    @staticmethod
    def state(schema: Schema) -> Mapping[str, Any]:
        """See `Window.state`."""
        return {
            **Held.state(schema), "order": list[key_type(schema)], "times": list[int], "head": list[int],  # type: ignore[misc]
        }  # fmt: skip

    def _next(self, end: int) -> tuple[list[Any], list[int]]:
        """The keys, and the times, from the first place up to this one; they are gone."""
        order, times, head = self._order, self._times, self._head[0]
        keys, theirs = order[head:end], times[head:end]
        if end > _GONE and end * 2 > len(order):
            del order[:end], times[:end]
            end = 0
        self._head[0] = end
        return keys, theirs


class SlidingByStamp(Sliding):
    """By a field of the rows."""

    def __init__(self, place: Place, at: int, amount: int) -> None:
        super().__init__(place)
        self._stamps = Stamps(at, amount, place.state["newest"])
        self._amount = amount

    @staticmethod
    def state(schema: Schema) -> Mapping[str, Any]:
        """See `Window.state`."""
        return {**Sliding.state(schema), "newest": list[int]}

    def _may_add(self, rows: list[Row]) -> bool:
        times = self._stamps.sorted(rows)
        return times is not None and times[-1] - times[0] < self._amount

    def _added(self, rows: list[Row], keys: list[Any], out: Out) -> list[Row]:
        times = list(map(self._stamps.of, rows))
        self._stamps.go_on(times[-1])
        self._order += keys
        self._times += times
        held = self._table.rows
        return [held.pop(key) for key in self._due(times[-1])]

    def _before(self, key: Any, row: Row) -> str | None:
        why = self._stamps.refuses(row)
        if why is None:
            for each in self._due(self._stamps.of(row)):
                self._table.drop(each, expired=True)
        return why

    def _put(self, key: Any, row: Row, out: Out) -> None:
        time, held = self._stamps.of(row), self._table.rows.get(key)
        self._table.put(key, row)
        if held is not None and self._stamps.of(held) == time:
            return
        place = bisect_right(self._times, time, self._head[0])
        self._order.insert(place, key)
        self._times.insert(place, time)

    def _due(self, now: int) -> list[Any]:
        """The keys of the rows that go at this time; they have no place any more."""
        end = bisect_right(self._times, now - self._amount, self._head[0])
        if end == self._head[0]:
            return []
        keys, times = self._next(end)
        held, of = self._table.rows, self._stamps.of
        found = {key: None for key, time in zip(keys, times, strict=True) if key in held and of(held[key]) == time}
        return list(found)


class SlidingByArrival(Sliding):
    """In the order in which rows came. A list of times has nothing in it where the rows go by count."""

    def __init__(self, place: Place, amount: int) -> None:
        super().__init__(place)
        self._left: dict[Any, int] = place.state["left"]
        self._amount = amount

    @staticmethod
    def state(schema: Schema) -> Mapping[str, Any]:
        """See `Window.state`. `left`: how many places a row has left behind."""
        return {**Sliding.state(schema), "left": dict[key_type(schema), int]}  # type: ignore[misc]

    def _put(self, key: Any, row: Row, out: Out) -> None:
        self._leave(key)
        super()._put(key, row, out)

    def _drop(self, key: Any, *, expired: bool) -> None:
        self._leave(key)
        super()._drop(key, expired=expired)

    def _leave(self, key: Any) -> None:
        if key in self._table.rows:
            self._left[key] = self._left.get(key, 0) + 1

    def _live(self, keys: list[Any]) -> list[Any]:
        """Those of these places at which a row stands; the others are forgotten."""
        left = self._left
        if not left:
            return keys
        found = []
        for key in keys:
            if not (places := left.pop(key, 0)):
                found.append(key)
            elif places > 1:
                left[key] = places - 1
        return found


class SlidingByCount(SlidingByArrival):
    """So many rows, the newest."""

    def _leave(self, key: Any) -> None:
        """Rows may be updated forever and none be too many, so places that were left are cleared away now and then."""
        super()._leave(key)
        head = self._head[0]
        if len(self._order) - head > 2 * len(self._table.rows) + _GONE:
            self._order[:] = self._live(self._order[head:])
            self._head[0] = 0

    def _may_add(self, rows: list[Row]) -> bool:
        return len(rows) <= self._amount

    def _added(self, rows: list[Row], keys: list[Any], out: Out) -> list[Row]:
        self._order += keys
        held = self._table.rows
        return [held.pop(key) for key in self._due()]

    def _put(self, key: Any, row: Row, out: Out) -> None:
        super()._put(key, row, out)
        self._order.append(key)
        for each in self._due():
            self._table.drop(each, expired=True)

    def _due(self) -> list[Any]:
        """The keys of the rows that are too many; they have no place any more."""
        found: list[Any] = []
        while (more := len(self._table.rows) - self._amount - len(found)) > 0:
            found += self._live(self._next(self._head[0] + more)[0])
        return found


class SlidingByTime(SlidingByArrival):
    """By the engine's time. A timer is set while there are places."""

    def _may_add(self, rows: list[Row]) -> bool:
        return True

    def _added(self, rows: list[Row], keys: list[Any], out: Out) -> list[Row]:
        self._note(keys, out)
        return []

    def _put(self, key: Any, row: Row, out: Out) -> None:
        super()._put(key, row, out)
        self._note([key], out)

    def _note(self, keys: list[Any], out: Out) -> None:
        if self._head[0] == len(self._order):
            out.wake(self._name, full_second(out.now + self._amount))
        self._order += keys
        self._times += [out.now] * len(keys)

    def due(self, out: Out) -> Changes:
        """What goes by now."""
        end = bisect_right(self._times, out.now - self._amount, self._head[0])
        for key in self._live(self._next(end)[0]):
            self._table.drop(key, expired=True)
        if self._head[0] < len(self._times):
            out.wake(self._name, full_second(self._times[self._head[0]] + self._amount))
        return self._table.changes()
