"""The cron dialects as tables, and how an expression is read by one: sets of numbers, as bits. Pure.

The facts are those of Quartz 2.3, Spring 5.3, cron4j 2.2 and Debian's cron; tests/vectors/cron has what they say. An
expression of which its library silently drops a part (a list with `W` in Quartz, say) is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import esp_pubsub as esp

FIRST_YEAR, LAST_YEAR = 1970, 2199
_LONGEST = 400  # characters of an expression


class CronRefused(esp.EspError):
    """A cron expression, a zone or a setting that cannot be."""

    expression: str
    reason: str


class NeverComes(CronRefused):
    """A cron expression that can be read, and whose date never comes, such as 30 February."""


class Range(NamedTuple):
    """What numbers a field has, and names for them."""

    name: str
    least: int
    most: int
    names: Mapping[str, int] = {}


def _named(names: str, first: int) -> dict[str, int]:
    return {name: at for at, name in enumerate(names.split(), first)}


_SECOND, _MINUTE, _HOUR = Range("second", 0, 59), Range("minute", 0, 59), Range("hour", 0, 23)
_DAY = Range("day of month", 1, 31)
_MONTH = Range("month", 1, 12, _named("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1))
_FROM_SUNDAY = Range("day of week", 0, 7, _named("SUN MON TUE WED THU FRI SAT", 0))
_SUNDAY_IS_1 = Range("day of week", 1, 7, _named("SUN MON TUE WED THU FRI SAT", 1))
_MONDAY_IS_1 = Range("day of week", 1, 7, _named("MON TUE WED THU FRI SAT SUN", 1))
_YEAR = Range("year", FIRST_YEAR, LAST_YEAR)
_MACROS = {
    "@YEARLY": "0 0 1 1 *",
    "@ANNUALLY": "0 0 1 1 *",
    "@MONTHLY": "0 0 1 * *",
    "@WEEKLY": "0 0 * * 0",
    "@DAILY": "0 0 * * *",
    "@MIDNIGHT": "0 0 * * *",
    "@HOURLY": "0 * * * *",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to write crons."""

    fields: tuple[Range, ...]
    optional: int
    """How many fields at the end may be left out."""
    days: Literal["both", "one", "star"]
    """Day of month and day of week: both must match; exactly one of them is given, the other one is `?`; or either one
    matches, and both must where one begins with `*`.
    """
    sunday: int = 0
    wraps: bool = False
    """A range may go over the end: `FRI-MON`."""
    open_step: bool = True
    """`5/15` is 5, 20, 35 and so on; else it is 5."""
    longest_step: bool = False
    """A step beyond the field's numbers is refused."""
    day_words: frozenset[str] = frozenset()
    week_words: frozenset[str] = frozenset()
    word_alone: bool = False
    """What says `L`, `W` or `#` is no part of a list."""
    macros: Mapping[str, str] = field(default_factory=dict)


DIALECTS: dict[str, Dialect] = {
    "QUARTZ": Dialect(
        (_SECOND, _MINUTE, _HOUR, _DAY, _MONTH, _SUNDAY_IS_1, _YEAR), optional=1, days="one", sunday=1, wraps=True,
        longest_step=True, day_words=frozenset(("L", "L-", "W", "LW", "L-W")), week_words=frozenset(("L", "L!", "#")),
        word_alone=True,
    ),
    "UNIX": Dialect((_MINUTE, _HOUR, _DAY, _MONTH, _FROM_SUNDAY), optional=0, days="star", macros=_MACROS),
    "SPRING": Dialect(
        (_SECOND, _MINUTE, _HOUR, _DAY, _MONTH, _MONDAY_IS_1), optional=0, days="both",
        day_words=frozenset(("?", "L", "L-", "W", "LW")), week_words=frozenset(("?", "L", "#")),
        macros={name: "0 " + expression for name, expression in _MACROS.items()},
    ),
    "CRON4J": Dialect(
        (_MINUTE, _HOUR, _DAY, _MONTH, _FROM_SUNDAY), optional=0, days="both", wraps=True, open_step=False,
        day_words=frozenset(("L",)),
    ),
}  # fmt: skip


class Last(NamedTuple):
    """So many days before the last day of the month; or the weekday nearest to that."""

    before: int
    weekday: bool = False


class Nearest(NamedTuple):
    """The weekday nearest to a day of the month, in that month."""

    day: int


class Nth(NamedTuple):
    """The nth such day of a month, the last one if 0. Sunday is 0."""

    weekday: int
    n: int


class Fields(NamedTuple):
    """An expression as bits: bit 5 of `minutes` is minute 5, bit 0 of `weekdays` is Sunday, bit 0 of `years` 1970."""

    seconds: int
    minutes: int
    hours: int
    days: int
    months: int
    weekdays: int
    years: int | None
    either: bool
    """One of day and weekday is enough."""
    days_like: tuple[Last | Nearest, ...]
    weekdays_like: tuple[Nth, ...]


def dialect_of(name: str) -> Dialect:
    """The dialect of this name. CronRefused for another one."""
    if name not in DIALECTS:
        raise CronRefused(f"there is no cron dialect {name!r:.40}: use {', '.join(DIALECTS)}", expression="", reason="")
    return DIALECTS[name]


def words(expression: str, dialect: str) -> dict[str, str]:
    """The text of each field, by its name, in capitals; seconds and years too where the dialect has none, or they are
    left out.
    """
    of = dialect_of(dialect)
    text = of.macros.get(expression.strip().upper(), expression).upper()
    parts = text.split()
    most = len(of.fields)
    if len(expression) > _LONGEST or not most - of.optional <= len(parts) <= most:
        fewest = f"{most - of.optional} or {most}" if of.optional else f"{most}"
        raise refused(expression, f"a {dialect} expression has {fewest} fields, and at most {_LONGEST} characters")
    found = {"second": "0", "year": "*"}
    found.update((field.name, part) for field, part in zip(of.fields, parts, strict=False))
    return found


def read(expression: str, dialect: str) -> Fields:
    """An expression in a dialect. CronRefused says which field cannot be read, and why."""
    of, texts = dialect_of(dialect), words(expression, dialect)
    ranges = {field.name: field for field in of.fields}

    def bits(name: str) -> int:
        return _bits(texts[name], ranges[name], of, expression) if name in ranges else 1

    day, week = texts["day of month"], texts["day of week"]
    if of.days == "one":
        if (day == "?") == (week == "?"):
            raise refused(expression, "exactly one of day of month and day of week is '?'")
        day, week = day.replace("?", "*"), week.replace("?", "*")
    days, days_like = _days(day, of, expression)
    weekdays, weekdays_like = _weekdays(week, ranges["day of week"], of, expression)
    return Fields(
        bits("second"), bits("minute"), bits("hour"), days, bits("month"), weekdays,
        None if texts["year"] == "*" else bits("year") >> FIRST_YEAR,
        of.days == "star" and not day.startswith("*") and not week.startswith("*"),
        days_like, weekdays_like,
    )  # fmt: skip


def refused(expression: str, reason: str) -> CronRefused:
    """The error that says so."""
    return CronRefused(
        f"the cron expression {expression!r:.100} cannot be: {reason}", expression=expression, reason=reason
    )


def _bits(text: str, field: Range, of: Dialect, expression: str) -> int:
    found = 0
    for item in text.split(","):
        for number in _numbers(item, field, of, expression):
            found |= 1 << number
    return found


def _numbers(item: str, field: Range, of: Dialect, expression: str) -> list[int]:
    """`*`, `5`, `1-5`, each perhaps with `/2`."""
    base, slash, by = item.partition("/")
    step = _step(by, item, field, of, expression) if slash else 1
    first, dash, last = base.partition("-")
    if base == "*" or (not base and slash and of.longest_step):
        low, high = field.least, field.most
    elif dash:
        low, high = (_number(each, item, field, expression) for each in (first, last))
        if low == 7 and field is _MONDAY_IS_1:
            low = 0
    else:
        low = high = _number(first, item, field, expression)
        if slash and of.open_step:
            high = field.most
    if low <= high:
        return list(range(low, high + 1))[::step]
    if not of.wraps or field is _YEAR:
        raise refused(expression, f"in the {field.name}, the range {item} ends before it begins")
    return [*range(low, field.most + 1), *range(field.least, high + 1)][::step]


def _step(by: str, item: str, field: Range, of: Dialect, expression: str) -> int:
    step = int(by) if by.isascii() and by.isdigit() and len(by) < 5 else 0
    if step < 1 or (of.longest_step and step > field.most):
        raise refused(expression, f"in the {field.name}, {item} has no step that can be")
    return step


def _number(text: str, item: str, field: Range, expression: str) -> int:
    if text in field.names:
        return field.names[text]
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else -1
    if number == 0 and field is _MONDAY_IS_1:
        return 7
    if not field.least <= number <= field.most:
        which = f"a number from {field.least} to {field.most}" + (
            f", or one of {' '.join(field.names)}" * bool(field.names)
        )
        raise refused(expression, f"in the {field.name}, {item!r} should be {which}")
    return number


def _days(text: str, of: Dialect, expression: str) -> tuple[int, tuple[Last | Nearest, ...]]:
    days, like = 0, []
    for item in text.split(","):
        if (found := _day_word(item, of, expression)) is None:
            days |= _bits("*" if item == "?" and "?" in of.day_words else item, _DAY, of, expression)
        else:
            like.append(found)
    _check_alone(bool(like), text, of, expression)
    return days, tuple(like)


def _day_word(item: str, of: Dialect, expression: str) -> Last | Nearest | None:
    """`L`, `L-3`, `LW`, `L-3W`, `15W`; None for anything else."""
    base = item.removesuffix("W")
    weekday = base != item
    if base == "L" and "LW" * weekday + "L" * (not weekday) in of.day_words:
        return Last(0, weekday)
    if base.startswith("L-") and "L-" + "W" * weekday in of.day_words:
        before = base[2:]
        if not (before.isascii() and before.isdigit() and len(before) < 3 and int(before) <= 30):
            raise refused(expression, f"in the day of month, {item} says how many days before the last one: 0 to 30")
        return Last(int(before), weekday)
    if weekday and "W" in of.day_words:
        return Nearest(_number(base, item, _DAY, expression))
    return None


def _weekdays(text: str, field: Range, of: Dialect, expression: str) -> tuple[int, tuple[Nth, ...]]:
    days, like = 0, []
    for item in text.split(","):
        day, nth, n = item.partition("#")
        if nth and "#" in of.week_words:
            if n not in ("1", "2", "3", "4", "5"):
                raise refused(expression, f"in the day of week, {item} says which one of the month: 1 to 5")
            like.append(Nth((_number(day, item, field, expression) - of.sunday) % 7, int(n)))
        elif item == "L" and "L!" in of.week_words:
            days |= 1 << 6
        elif item.endswith("L") and "L" in of.week_words:
            like.append(Nth((_number(item[:-1], item, field, expression) - of.sunday) % 7, 0))
        else:
            bits = _bits("*" if item == "?" and "?" in of.week_words else item, field, of, expression) >> of.sunday
            days |= (bits | bits >> 7) & 0x7F
    _check_alone(bool(like), text, of, expression)
    return days, tuple(like)


def _check_alone(special: bool, text: str, of: Dialect, expression: str) -> None:
    if special and of.word_alone and "," in text:
        raise refused(expression, f"{text} has L, W or # in a list; this dialect takes one alone")
