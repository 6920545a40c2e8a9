"""Windows whose rows all go at once. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esp_pubsub import Out, Schema

from .changes import Changes, Row
from .held import Held, Stamps, full_second
from .window import Place


class Jumping(Held):
    """Its rows go when one comes that is too many, or too late for them."""

    def __init__(self, place: Place, amount: int) -> None:
        super().__init__(place)
        self._amount = amount

    def _drop_all(self) -> None:
        for key in list(self._table.rows):
            self._table.drop(key, expired=True)


class JumpingByCount(Jumping):
    """They go when there are so many, and one more comes."""

    def _may_add(self, rows: list[Row]) -> bool:
        return len(self._table.rows) + len(rows) <= self._amount

    def _before(self, key: Any, row: Row) -> str | None:
        if len(self._table.rows) >= self._amount and key not in self._table.rows:
            self._drop_all()
        return None


class JumpingByStamp(Jumping):
    """They go when one comes that is so much later than the first of them."""

    def __init__(self, place: Place, at: int, amount: int) -> None:
        super().__init__(place, amount)
        self._stamps = Stamps(at, amount, place.state["newest"])
        self._begun: list[int] = place.state["begun"]

    @staticmethod
    def state(schema: Schema) -> Mapping[str, Any]:
        """See `Window.state`. `begun`: the time of the first row."""
        return {**Held.state(schema), "newest": list[int], "begun": list[int]}

    def _may_add(self, rows: list[Row]) -> bool:
        times = self._stamps.sorted(rows)
        return times is not None and bool(self._table.rows) and times[-1] - self._begun[0] < self._amount

    def _added(self, rows: list[Row], keys: list[Any], out: Out) -> list[Row]:
        self._stamps.go_on(self._stamps.of(rows[-1]))
        return []

    def _before(self, key: Any, row: Row) -> str | None:
        why = self._stamps.refuses(row)
        if why is None:
            time = self._stamps.of(row)
            if not self._begun or time - self._begun[0] >= self._amount:
                self._drop_all()
                self._begun[:] = [time]
        return why


class JumpingByTime(Jumping):
    """They go so long after the first of them came, by the engine's time. A timer is set while there are rows."""

    def _may_add(self, rows: list[Row]) -> bool:
        return bool(self._table.rows)

    def _put(self, key: Any, row: Row, out: Out) -> None:
        if not self._table.rows:
            out.wake(self._name, full_second(out.now + self._amount))
        super()._put(key, row, out)

    def due(self, out: Out) -> Changes:
        """What goes by now."""
        self._drop_all()
        return self._table.changes()
