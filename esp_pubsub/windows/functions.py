"""What an expression may call: each function, what it takes and what it gives. Pure.

Positions in a text count from 1, as in SAS. What SAS does with an argument that makes no sense, such as a negative
length, is not known: the result is null. A null argument gives null, which the caller sees to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STRING, INTEGER, REAL, BOOLEAN = "string", "integer", "real", "boolean"


@dataclass(frozen=True, slots=True)
class Function:
    """A function of an expression. The last `optional` arguments may be left out."""

    takes: tuple[str, ...]
    gives: str
    call: Callable[..., Any]
    optional: int = 0
    may_be_null: bool = False
    """It may give null although no argument is null."""


def _left(text: str, count: int) -> str | None:
    return text[:count] if count >= 0 else None


def _right(text: str, count: int) -> str | None:
    if count < 0:
        return None
    return text[-count:] if count else ""


def _mid(text: str, first: int, count: int | None = None) -> str | None:
    if first < 1 or (count is not None and count < 0):
        return None
    return text[first - 1 :] if count is None else text[first - 1 : first - 1 + count]


def _instr(text: str, part: str) -> int:
    return text.find(part) + 1


def _match(text: str, pattern: str) -> bool:
    """Whether the whole text is like the pattern, in which `*` is any characters and `?` is one."""
    at = here = 0
    star, again = -1, 0  # where to go on when what came after the last star was wrong
    while at < len(text):
        if here < len(pattern) and pattern[here] == "*":
            star, again, here = here, at, here + 1
        elif here < len(pattern) and pattern[here] in (text[at], "?"):
            at, here = at + 1, here + 1
        elif star >= 0:
            again, at, here = again + 1, again + 1, star + 1
        else:
            return False
    return not pattern[here:].strip("*")


def _ceil(value: float) -> float:
    return float(math.ceil(value)) if math.isfinite(value) else value


def _floor(value: float) -> float:
    return float(math.floor(value)) if math.isfinite(value) else value


FUNCTIONS = {
    "abs": Function((REAL,), REAL, abs),
    "ceil": Function((REAL,), REAL, _ceil),
    "floor": Function((REAL,), REAL, _floor),
    "instr": Function((STRING, STRING), INTEGER, _instr),
    "left": Function((STRING, INTEGER), STRING, _left, may_be_null=True),
    "len": Function((STRING,), INTEGER, len),
    "lower": Function((STRING,), STRING, str.lower),
    "match_string": Function((STRING, STRING), BOOLEAN, _match),
    "mid": Function((STRING, INTEGER, INTEGER), STRING, _mid, optional=1, may_be_null=True),
    "right": Function((STRING, INTEGER), STRING, _right, may_be_null=True),
    "trim": Function((STRING,), STRING, str.strip),
    "upper": Function((STRING,), STRING, str.upper),
}
"""By name, in lower case. `isnull` is built in, because it takes anything and never gives null."""

CLOCKS = frozenset({"today", "now", "datetime", "time", "timer", "clock", "currenttime"})
CHANCES = frozenset({"rand", "ranuni", "random", "guid", "uuid", "esp_aguid"})


# What operators do where one instruction of Python does not do it.


def quotient(left: int, right: int) -> int | None:
    """Integers divide to an integer, towards zero: SAS's published samples show `1 / 60` as 0."""
    if right == 0:
        return None
    found = abs(left) // abs(right)
    return found if (left < 0) == (right < 0) else -found


def remainder(left: float, right: float) -> float | None:
    """What is left of an integer division, with the sign of the dividend; of reals likewise."""
    if right == 0:
        return None
    if isinstance(left, int) and isinstance(right, int):
        found = abs(left) % abs(right)
        return found if left >= 0 else -found
    return math.fmod(left, right) if math.isfinite(left) else None


def integer(value: float) -> int | None:
    """A real as an integer, without what is after the point."""
    return int(value) if math.isfinite(value) else None
