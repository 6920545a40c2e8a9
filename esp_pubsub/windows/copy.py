"""A window that has the rows of another one, for as long as its retention says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esp_pubsub import ConfigError, Out

from .changes import Changes
from .held import Held
from .jumping import JumpingByCount, JumpingByStamp, JumpingByTime
from .retention import Retention
from .sliding import SlidingByCount, SlidingByStamp, SlidingByTime
from .window import Place, Stream

_KINDS: Mapping[tuple[str, str, bool], type[Held]] = {
    ("sliding", "time", True): SlidingByTime,
    ("sliding", "time", False): SlidingByStamp,
    ("sliding", "count", False): SlidingByCount,
    ("jumping", "time", True): JumpingByTime,
    ("jumping", "time", False): JumpingByStamp,
    ("jumping", "count", False): JumpingByCount,
}


class Copy:
    """The rows of another window, for as long as the retention says; without one it passes changes on as they are."""

    def __init__(self, *, retention: Retention | None = None) -> None:
        if retention is not None and not isinstance(retention, Retention):
            raise ConfigError(f"the retention of a Copy is a Retention, not {retention!r}")
        self.retention = retention

    @property
    def timed(self) -> bool:
        """It needs the engine's time."""
        return self.retention is not None and self.retention.timed

    def after(self, before: Stream) -> Stream:
        """See `Window.after`."""
        if self.retention is None:
            return before
        self.retention.at(before.schema)
        return Stream(before.schema, False)

    def state(self, before: Stream) -> Mapping[str, Any]:
        """See `Window.state`."""
        return {} if self.retention is None else self._kind(self.retention).state(before.schema)

    def open(self, place: Place) -> Held | Passing:
        """See `Window.open`."""
        if self.retention is None:
            return Passing()
        field = self.retention.at(place.before.schema)
        opened: Held = self._kind(self.retention)(place, *(field or (self.retention.amount,)))
        return opened

    @staticmethod
    def _kind(retention: Retention) -> type[Any]:
        return _KINDS[retention.kind, retention.by, retention.timed]


class Passing:
    """A Copy without retention. It holds nothing: what it would hold is what the window before it holds."""

    def take(self, changes: Changes, out: Out) -> Changes:
        """As they are."""
        return changes

    def count(self) -> int:
        """None."""
        return 0
