"""A cron in English, for whoever set it up and wants to see that it says what was meant. Pure."""

from __future__ import annotations

from collections.abc import Callable

from .dialects import dialect_of, read, words

_DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_NTH = {"1": "first", "2": "second", "3": "third", "4": "fourth", "5": "fifth"}


def describe(expression: str, dialect: str) -> str:
    """When it is due, in words. CronRefused for an expression that cannot be."""
    either = read(expression, dialect).either
    text = words(expression, dialect)
    days = []
    if text["day of month"] not in ("*", "?"):
        days.append(_listed(text["day of month"], _day, "day"))
    if text["day of week"] not in ("*", "?"):
        days.append(_listed(text["day of week"], lambda item: _weekday(item, dialect), "day"))
    parts = [*_time(text["second"], text["minute"], text["hour"])]
    if days:
        parts.append("on " + (" or on " if either else " if that is also ").join(days))
    if text["month"] != "*":
        parts.append("in " + _listed(text["month"], lambda item: _month(item), "month"))
    if text["year"] != "*":
        parts.append("in " + _listed(text["year"], str, "year"))
    return ", ".join(parts)


def _time(second: str, minute: str, hour: str) -> list[str]:
    if (second + minute + hour).isdigit():
        return [f"at {int(hour):02}:{int(minute):02}" + (f":{int(second):02}" if int(second) else "")]
    found = [] if second == "0" else [_part(second, "second")]
    if (minute != "*" or not found) and not (minute == "0" and not found):
        found.append(_part(minute, "minute"))
    if hour != "*" or not found:
        found.append(_part(hour, "hour"))
    return found


def _part(text: str, unit: str) -> str:
    """A field of the time: every 5 seconds; at minute 5 and 10; every 2 hours from 9 to 17."""
    said = _listed(text, lambda item: str(int(item)), unit)
    return said if said.startswith("every") else f"at {unit} {said}"


def _listed(text: str, name: Callable[[str], str], unit: str) -> str:
    said = [_item(item, name, unit) for item in text.split(",")]
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"


def _item(item: str, name: Callable[[str], str], unit: str) -> str:
    base, _, step = item.partition("/")
    every = f"every {unit}" if step in ("", "1") else f"every {int(step)} {unit}s"
    if base in ("*", "?", "") or (base == "0" and step):
        return every
    first, dash, last = base.partition("-")
    said = f"{name(first)} to {name(last)}" if dash and first != "L" else name(base)
    return f"{every} from {said}" if step else said


def _day(item: str) -> str:
    base = item.removesuffix("W")
    nearest = "the weekday nearest to " if base != item else ""
    if base in ("L", "L-0"):
        return "the last weekday of the month" if nearest else "the last day of the month"
    if base.startswith("L-"):
        return f"{nearest}{int(base[2:])} days before the last day of the month"
    return f"{nearest}day {int(base)}"


def _weekday(item: str, dialect: str) -> str:
    day, _, n = item.partition("#")
    last = day.endswith("L") and dialect in ("QUARTZ", "SPRING")
    day = day.removesuffix("L") if last else day
    if not day:  # `L` alone is the last day of the week
        return "Saturday"
    if day.isdigit():
        name = _DAYS[(int(day) - dialect_of(dialect).sunday) % 7]
    else:
        name = next(full for full in _DAYS if full.upper().startswith(day))
    return f"the {_NTH[n]} {name} of the month" if n else f"the last {name} of the month" if last else name


def _month(item: str) -> str:
    return _MONTHS[int(item) - 1] if item.isdigit() else next(full for full in _MONTHS if full.upper().startswith(item))
