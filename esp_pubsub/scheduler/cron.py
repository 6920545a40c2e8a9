"""When a cron fires next. Pure, and our own: the next time is state, so all members of an engine have to agree on it.

    Cron("0 30 9 ? * MON-FRI", "QUARTZ", "Europe/Berlin").next_after(now)

Clocks that are set forward leave a gap, and clocks that are set back show an hour twice. An expression that names hours
means times on the wall: what falls into the gap is due at its end (`gap="after"`), or not at all (`"skip"`), and what
falls into the hour that comes twice is due once, the first time. An expression that admits every hour means an
interval: it is due whenever the clock shows such a time, so a cron of each minute misses and repeats none.
"""

from __future__ import annotations

from datetime import date
from functools import lru_cache
from typing import Literal

from .dialects import FIRST_YEAR, LAST_YEAR, CronRefused, Fields, Last, NeverComes, Nth, read, refused
from .zones import Zone, zone

__all__ = ["Cron", "CronRefused", "Gap", "NeverComes", "cron"]

Gap = Literal["after", "skip"]
_SECOND = 1_000_000
_DAY = 86_400
_EPOCH = date(1970, 1, 1).toordinal()
_BEGIN = (date(FIRST_YEAR, 1, 1).toordinal() - _EPOCH) * _DAY - 1
_SEARCHED = 41  # years, in which each date falls on each day of the week, 29 February too
_ALL_HOURS = (1 << 24) - 1
_FIVE_WEEKS = sum(1 << 7 * week for week in range(5))
_MONTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


class Cron:
    """An expression in a dialect and a time zone. CronRefused for what cannot be, NeverComes for what never is due."""

    __slots__ = ("_fields", "_first", "_hourly", "_skip", "_zone")

    def __init__(self, expression: str, dialect: str = "QUARTZ", in_zone: str = "UTC", gap: Gap = "after") -> None:
        if gap not in ("after", "skip"):
            raise refused(expression, f"gap is after or skip, not {gap!r:.40}")
        self._fields: Fields = read(expression, dialect)
        self._zone: Zone = zone(in_zone)
        self._skip = gap == "skip"
        self._hourly = self._fields.hours == _ALL_HOURS
        self._first = (_lowest(self._fields.hours) * 60 + _lowest(self._fields.minutes)) * 60
        self._first += _lowest(self._fields.seconds)
        if self._next_wall(_BEGIN, LAST_YEAR) is None:
            why = "its date never comes"
            raise NeverComes(
                f"the cron expression {expression!r:.100} is never due: {why}", expression=expression, reason=why
            )

    def next_after(self, instant: int) -> int | None:
        """The first time it is due after an instant, both in microseconds since 1970; None if there is none any more,
        as far as its years or the year 2199.
        """
        second = instant // _SECOND
        starts, offsets = self._zone.starts, self._zone.offsets
        at = self._zone.at(second)
        offset = offsets[at]
        wall = second + offset
        if not self._hourly and at and offsets[at - 1] > offset:
            wall = max(wall, starts[at] + offsets[at - 1] - 1)  # the wall has shown all times before that
        found = self._next_wall(wall)
        while found is not None:
            if at + 1 == len(starts) or found - offset < starts[at + 1]:
                return (found - offset) * _SECOND
            at += 1
            start, before, offset = starts[at], offset, offsets[at]
            if self._hourly or self._skip:
                wall = start + (offset if self._hourly else max(offset, before)) - 1
            elif found < start + offset:
                return start * _SECOND  # it fell into the gap
            else:
                wall = start + max(offset, before) - 1
            if found <= wall or (self._hourly and offset < before):
                found = self._next_wall(wall)
        return None

    def next_times(self, instant: int, n: int = 5) -> list[int]:
        """The next n times after an instant; fewer where there are no more."""
        found: list[int] = []
        while len(found) < n and (next := self.next_after(found[-1] if found else instant)) is not None:
            found.append(next)
        return found

    def last_until(self, instant: int, after: int) -> int | None:
        """The last time it was due up to an instant, if that is after another one."""
        back = _SECOND
        low = max(instant - back, after)
        while (found := self.next_after(low)) is None or found > instant:
            if low == after:
                return None
            back *= 4
            low = max(instant - back, after)
        high = instant
        while (later := self.next_after(found)) is not None and later <= instant:
            middle = (later + high) // 2
            last = self.next_after(middle)
            if last is not None and last <= instant:
                found = last
            else:
                found, high = later, middle
        return found

    def _next_wall(self, wall: int, until: int | None = None) -> int | None:
        """The next time on the wall after this one that the expression says."""
        day, second = divmod(wall + 1, _DAY)
        on = date.fromordinal(day + _EPOCH)
        year, month = on.year, on.month
        days = self._days(year, month)
        if days >> on.day & 1 and (time := self._time(second)) is not None:
            return day * _DAY + time
        days = days >> (on.day + 1) << (on.day + 1)
        last = until or (LAST_YEAR if self._fields.years is not None else min(year + _SEARCHED, LAST_YEAR))
        while not days:
            month += 1
            if month == 13:
                year, month = year + 1, 1
                if year > last:
                    return None
            days = self._days(year, month)
        return (date(year, month, _lowest(days)).toordinal() - _EPOCH) * _DAY + self._first

    def _time(self, second: int) -> int | None:
        """The first time of a day from this second on."""
        fields = self._fields
        hour, rest = divmod(second, 3_600)
        minute, rest = divmod(rest, 60)
        if fields.hours >> hour & 1:
            if fields.minutes >> minute & 1 and (left := fields.seconds >> rest):
                return second + _lowest(left)
            if left := fields.minutes >> (minute + 1):
                minute += 1 + _lowest(left)
                return (hour * 60 + minute) * 60 + _lowest(fields.seconds)
        if left := fields.hours >> (hour + 1):
            hour += 1 + _lowest(left)
            return hour * 3_600 + self._first % 3_600
        return None

    def _days(self, year: int, month: int) -> int:
        """The days of a month on which it is due, as bits."""
        fields = self._fields
        if not fields.months >> month & 1:
            return 0
        if fields.years is not None and (year < FIRST_YEAR or not fields.years >> (year - FIRST_YEAR) & 1):
            return 0
        first = date(year, month, 1).toordinal() % 7  # the day of the week, with Sunday as 0
        length = _MONTHS[month - 1] + (month == 2 and (year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)))
        whole = (2 << length) - 2
        days, weekdays = fields.days, (fields.weekdays >> first | fields.weekdays << (7 - first)) & 0x7F
        by_week = weekdays * _FIVE_WEEKS << 1
        for like in fields.days_like:
            days |= _day_like(like, first, length)
        for nth in fields.weekdays_like:
            by_week |= _nth(nth, first, length)
        return (days | by_week if fields.either else days & by_week) & whole


@lru_cache(maxsize=200_000)
def cron(expression: str, dialect: str, in_zone: str, gap: Gap) -> Cron:
    """The one cron of these."""
    return Cron(expression, dialect, in_zone, gap)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _day_like(like: Last | tuple[int], first: int, length: int) -> int:
    if isinstance(like, Last):
        day, weekday = length - like.before, like.weekday
        if day < 1:
            return 0
    else:
        day, weekday = like[0], True
        if day > length:
            return 0
    if weekday:
        on = (first + day - 1) % 7
        if on == 6:  # Saturday
            day += -1 if day > 1 else 2
        elif on == 0:
            day += 1 if day < length else -2
    return 1 << day


def _nth(nth: Nth, first: int, length: int) -> int:
    day = (nth.weekday - first) % 7 + 1
    if nth.n:
        return 1 << (day + 7 * (nth.n - 1))
    return 1 << (day + 7 * ((length - day) // 7))
