"""Time zones as tables of when their clocks change, from the package tzdata and from nowhere else. Pure.

The system's own zones may differ between the machines of an engine's members, and with them when a cron fires. So its
version is part of what members compare: `tzdata_version`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from zoneinfo import ZoneInfo

import esp_pubsub as esp

from .dialects import FIRST_YEAR, LAST_YEAR, CronRefused

try:
    import tzdata
except ImportError:  # pragma: no cover  # the tests have it
    raise esp.NotInstalled(
        "the scheduler takes time zones from the package tzdata: pip install 'esp-pubsub[scheduler]'", extra="scheduler"
    ) from None

_PROBED = 7 * 86_400  # no zone changes its clocks twice within this time


def tzdata_version() -> str:
    """The version of the package that time zones come from. Members of an engine must have the same one."""
    return str(tzdata.__version__)


@dataclass(frozen=True, slots=True)
class Zone:
    """From each of `starts` on, in seconds since 1970, the zone's clocks are ahead of UTC by the offset beside it."""

    starts: tuple[int, ...]
    offsets: tuple[int, ...]

    def at(self, second: int) -> int:
        """Which of them an instant falls into."""
        return max(bisect_right(self.starts, second) - 1, 0)


def _files() -> dict[str, bytes]:
    """All zones that there are. They are read when this module is imported: a step of a model reads nothing."""
    package = Path(str(tzdata.__file__)).parent
    names = (package / "zones").read_text().split()
    return {name: (package / "zoneinfo" / name).read_bytes() for name in names}


ZONES = _files()


@lru_cache(maxsize=1_000)
def zone(name: str) -> Zone:
    """The zone of this IANA name. CronRefused for another one."""
    if name not in ZONES:
        raise CronRefused(
            f"there is no time zone {name!r:.60}: use an IANA name such as UTC or Europe/Berlin", expression="",
            reason="unknown time zone",
        )  # fmt: skip
    info = ZoneInfo.from_file(BytesIO(ZONES[name]), name)

    def offset(second: int) -> int:
        found = datetime.fromtimestamp(second, info).utcoffset()
        return int(found.total_seconds()) if found is not None else 0

    at, end = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (FIRST_YEAR, LAST_YEAR + 1))
    starts, offsets = [at], [offset(at)]
    while at < end:
        later = at + _PROBED
        if (new := offset(later)) != offsets[-1]:
            low, high = at, later
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if offset(middle) != offsets[-1] else (middle, high)
            starts.append(high)
            offsets.append(new)
        at = later
    return Zone(tuple(starts), tuple(offsets))
