"""What all windows with retention have in common. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from esp_pubsub import Out, Schema

from .changes import DELETED, EXPIRED, INSERTED, NEW, OLD, Changes, Row, Table, inserts_and_expired
from .retention import SECOND
from .window import DUPLICATE, NULL_KEY, Keys, Place, is_key, key_type, row_type

NO_STAMP = "the field that says its time is null"
TOO_LATE = "it is older than what the window holds"


class Held:
    """The rows of a window, by key. The classes that are derived say for how long."""

    def __init__(self, place: Place) -> None:
        schema = place.before.schema
        self._name = place.name
        self._table = Table(place.state["rows"])
        self._keys = Keys(schema, schema.keys)
        self._reject = place.reject

    @staticmethod
    def state(schema: Schema) -> Mapping[str, Any]:
        """See `Window.state`."""
        return {"rows": dict[key_type(schema), row_type(schema)]}  # type: ignore[misc]

    def count(self) -> int:
        """How many rows it holds."""
        return len(self._table.rows)

    def take(self, changes: Changes, out: Out) -> Changes:
        """What the window holds more, and less, after these changes."""
        if changes.only_inserts:
            rows = changes.rows
            keys = self._keys.of_all(rows)
            if keys is not None and self._may_add(rows) and self._table.add_new(keys, rows):
                return inserts_and_expired(rows, self._added(rows, keys, out))
        for kind, row in zip(changes.kinds, changes.rows, strict=True):
            if kind != OLD:
                self._apply(kind, row, out)
        return self._table.changes()

    def _apply(self, kind: int, row: Row, out: Out) -> None:
        key = self._keys.of(row)
        if kind in (DELETED, EXPIRED):
            self._drop(key, expired=kind == EXPIRED)
            return
        why = NULL_KEY if not is_key(key) else self._before(key, row)
        if why is None and kind == INSERTED and key in self._table.rows:
            why = DUPLICATE
        if why is None:
            self._put(key, row, out)
            return
        self._reject(why, row)
        if kind == NEW:
            self._drop(key, expired=True)

    # what a retention says otherwise

    def _may_add(self, rows: list[Row]) -> bool:
        """Whether all of these can be added at once: none is rejected, and none of them goes with this block."""
        raise NotImplementedError

    def _added(self, rows: list[Row], keys: list[Any], out: Out) -> list[Row]:
        """These were added; gives those that go for them."""
        return []

    def _before(self, key: Any, row: Row) -> str | None:
        """A row comes: let go what goes before it. Gives why the row is rejected, if it is."""
        return None

    def _put(self, key: Any, row: Row, out: Out) -> None:
        """Hold a row, and let go what goes for it."""
        self._table.put(key, row)

    def _drop(self, key: Any, *, expired: bool) -> None:
        """Hold the row of this key no longer, if it is held."""
        if key in self._table.rows:
            self._table.drop(key, expired=expired)


class Stamps:
    """The time of rows, by one of their fields: the newest that has come."""

    def __init__(self, at: int, amount: int, state: list[int]) -> None:
        """`at`: where the field stands in a row. `state`: the newest stamp, if there is one."""
        self.of = itemgetter(at)
        self._amount = amount
        self._newest = state

    def sorted(self, rows: list[Row]) -> list[int] | None:
        """The times of rows that are in order and not before any that came; else None."""
        times = list(map(self.of, rows))
        if None in times or (self._newest and times[0] < self._newest[0]) or times != sorted(times):
            return None
        return times

    def go_on(self, time: int) -> None:
        """A row of this time has come."""
        self._newest[:] = [time]

    def refuses(self, row: Row) -> str | None:
        """Why a row is rejected, if it is; else time may go on."""
        time = self.of(row)
        if time is None:
            return NO_STAMP
        if not self._newest or time > self._newest[0]:
            self.go_on(time)
        return TOO_LATE if self._newest[0] - time >= self._amount else None


def full_second(time: int) -> int:
    """The first full second that is not before this time: rows that go by the engine's time go then."""
    return -(-time // SECOND) * SECOND
