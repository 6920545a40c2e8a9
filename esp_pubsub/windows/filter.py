"""A window with those rows of another one that meet a condition. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from esp_pubsub import Out

from .changes import DELETED, INSERTED, NEW, OLD, Changes, Row
from .window import Place, Reject, Stream, bound

_NO_CONDITION = "its condition cannot be computed"


class Filter:
    """The rows for which the condition is true; not those for which it is false or null, or cannot be computed.

    The condition is a callable that takes a row, or has `bind(schema)`. It looks at nothing but the row: an update asks
    it again about the old one. A row that meets it no longer is deleted.
    """

    def __init__(self, condition: Any) -> None:
        self.condition = condition

    def after(self, before: Stream) -> Stream:
        """See `Window.after`."""
        bound(self.condition, before.schema)
        return before

    def state(self, before: Stream) -> Mapping[str, Any]:
        """See `Window.state`."""
        return {}

    def open(self, place: Place) -> Filtering:
        """See `Window.open`."""
        return Filtering(bound(self.condition, place.before.schema), place.reject)


class Filtering:
    """A Filter window at work."""

    def __init__(self, condition: Callable[[Row], Any], reject: Reject) -> None:
        self._condition = condition
        self._reject = reject

    def take(self, changes: Changes, out: Out) -> Changes:
        """What changes among the rows that meet the condition."""
        rows: list[Row] = []
        kinds = bytearray()
        met_now = False
        for kind, row in zip(changes.kinds, changes.rows, strict=True):
            met = self._met(row, kind)
            if kind == NEW:
                met_now = met
            elif kind == OLD and met != met_now:  # an update that comes in or goes out
                kind = DELETED if met else kind
                if met_now:
                    kinds[-1] = INSERTED
            if met:
                rows.append(row)
                kinds.append(kind)
        return Changes(rows, bytes(kinds))

    def _met(self, row: Row, kind: int) -> bool:
        try:
            return bool(self._condition(row))
        except Exception:  # noqa: BLE001  # whatever a user's callable raises: one row that it cannot judge
            if kind in (INSERTED, NEW):
                self._reject(_NO_CONDITION, row)
            return False

    def count(self) -> int:
        """None: it holds no rows."""
        return 0
