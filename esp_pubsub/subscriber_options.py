"""What can be set on a subscriber, where it begins, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from .bus import Start
from .errors import ConfigError
from .wire.frame import LIMITS, Limits

Begin = Start | Literal["none"]


def check_start(start: Any, group: str | None = None) -> None:
    """ConfigError for anything that is no place on a topic; "none" is one for groups only."""
    if start == "none" and group is not None:
        return
    naive = isinstance(start, datetime) and start.tzinfo is None
    negative = isinstance(start, int) and (isinstance(start, bool) or start < 0)
    known = start in ("earliest", "latest") if isinstance(start, str) else isinstance(start, int | datetime)
    if naive or negative or not known:
        raise ConfigError(
            "start is 'earliest', 'latest', a position from 0 on, a datetime with a time zone, or, in a group, 'none', "
            f"not {start!r}"
        )


def check_group(group: Any) -> None:
    """ConfigError for what is no name of a group."""
    if group is not None and (not isinstance(group, str) or not group):
        raise ConfigError(f"group is a name, such as 'billing', not {group!r:.80}", key="group")


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """What can be set on a subscriber."""

    read_blocks: int = 1_000
    """The most blocks taken from the bus at once; they wait in memory until they are asked for."""
    read_bytes: int = 4 << 20
    """The same in bytes; one larger block is read alone."""
    unconfirmed: int = 100_000
    """How many messages a group's reader may have read and not confirmed; then reading raises Unconfirmed."""
    max_sources: int = 10_000
    """How many sources are remembered; the one not seen for longest is forgotten first, and that is told."""
    gap_timeout: float = 10.0
    """Seconds after which it is told (Held) that blocks are held because one before them has not come. It decides
    nothing: they are delivered when it comes, or when its sender proves that it will not."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        for name in ("read_blocks", "read_bytes", "unconfirmed", "max_sources"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name} is a number of at least 1, not {getattr(self, name)!r}")
        if not isinstance(self.gap_timeout, int | float) or self.gap_timeout <= 0:
            raise ConfigError(f"gap_timeout is a number of seconds, not {self.gap_timeout!r}")


@dataclass(frozen=True, slots=True)
class SubscriberStats:
    """A subscriber at one moment."""

    blocks: int = 0
    events: int = 0
    bytes: int = 0
    missed: int = 0
    skipped: int = 0
    doubles: int = 0
    stale: int = 0
    diverged: int = 0
    beats: int = 0
    bad: int = 0
    reconnects: int = 0
    unconfirmed: int = 0
