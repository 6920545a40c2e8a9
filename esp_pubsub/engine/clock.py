"""The engine's time: one number of microseconds for all members, which never decreases. Pure.

Whoever lives counts on with its monotonic clock from the last `now` that it computed or heard, in an entry or in a
beat. That is drawn towards the wall clock by at most one part in a thousand. So a wrong clock, or a new leader with
another one, moves timers by milliseconds, not by hours, and no two clocks are compared.

A member that leads, and has heard the time from no living leader since it started, jumps forward to the wall clock:
nobody counted meanwhile.
"""

from __future__ import annotations

from ..failover.belief import TIME_MAX

_SLEW = 0.001


class Clock:
    """One member's view of the engine's time. The caller reads both clocks: seconds, and microseconds of the epoch."""

    def __init__(self, now: int, monotonic: float) -> None:
        """`now`: the last one that is known, of an entry or a snapshot; 0 if there is none."""
        self._now = float(now)
        self._read_at = monotonic

    def read(self, monotonic: float, wall: int) -> int:
        """What time it is for the engine."""
        passed = max(0.0, monotonic - self._read_at) * 1e6
        ahead = self._now + passed - wall
        drawn = min(passed * _SLEW, abs(ahead))
        self._now += passed - drawn if ahead > 0 else passed + drawn
        self._read_at = max(self._read_at, monotonic)
        return min(int(self._now), TIME_MAX)

    def heard(self, now: int, monotonic: float, wall: int) -> None:
        """A living leader says what time it is: it counts if it is later than ours."""
        self._now = max(float(now), float(self.read(monotonic, wall)))

    def jump(self, monotonic: float, wall: int) -> int:
        """Nobody has counted since the last `now`: go forward to the wall clock. Returns by how many microseconds."""
        before = self.read(monotonic, wall)
        self._now = max(self._now, float(wall))
        return int(self._now) - before
