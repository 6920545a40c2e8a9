"""The loops of an aggregate, over the rows of a block and over the groups that they touch: written for its parts, and
compiled. Pure. Nothing of what a user wrote gets into them: numbers of places do, and what `parts.py` says.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import inf, sqrt
from types import CodeType
from typing import Any, get_origin

from .changes import Row
from .ordered import greatest, insert, least, remove
from .parts import Part
from .window import is_key

Group = tuple[Any, ...]

_LOW, _HIGH = -(1 << 63), (1 << 63) - 1
_CARRY = 64

_SOURCE = """\
def change(groups, added, removed, reject):
    touched, get, low, high = {{}}, groups.get, -inf, inf
    for row in removed:
        key = {key}
        g = get(key)
        if g is None:  # its key is null
            continue
        touched[key] = g
        n = g[0]
        {values}
        {remove}
    for row in added:
        key = {key}
        g = get(key)
        if g is None:
            if not is_key(key):
                reject(row)
                continue
            g = groups[key] = {group}
        touched[key] = g
        n = g[0]
        {values}
        {add}
    return touched

def results(touched):
    found = []
    append = found.append
    for key, g in touched.items():
        n = g[0]
        append(({row},))
    return found
"""


class Loops:
    """`change(groups, added, removed, reject)` adds and removes rows, and gives the groups that they touched, by key.
    `results(groups)` gives the row of each.
    """

    def __init__(self, parts: Sequence[Part], key_ats: Sequence[int], results: Sequence[str]) -> None:
        """`key_ats`: the places of what makes up the key. `results` are the fields of a row, in Python."""
        ats = sorted({at for part in parts for at in part.ats})
        extras = ["[]" if get_origin(extra) is list else "{}" for part in parts for extra in part.extras]
        numbers = ", ".join(repr(number) for part in parts for number in part.numbers)
        keys = [f"row[{at}]" for at in key_ats]
        self._source = _SOURCE.format(
            key=keys[0] if len(keys) == 1 else f"({', '.join(keys)})",
            values=_lines(f"v{at} = row[{at}]" for at in ats),
            add=_lines(_change(parts, "+")),
            remove=_lines(_change(parts, "-")),
            group=f"({', '.join([f'[{numbers}]', *extras])},)",
            row=", ".join(results),
        )

    def compiled(self, key_of: Callable[[Row], Any], fit: Callable[[Any, int, Any], Any]) -> Mapping[str, Any]:
        """The two functions, by name. `key_of` gives the key of a row that comes; `fit` gives an integer if it is less
        than so much, else None.
        """
        names = {**_NAMES, "key_of": key_of, "fit": fit}
        exec(_code(self._source), names)
        return names


def _change(parts: Sequence[Part], sign: str) -> Iterator[str]:
    """What a row changes that is added, `+`, or removed, `-`. Parts for which the same rows count share a condition."""
    for valid in dict.fromkeys(part.valid for part in parts):
        these = [part for part in parts if part.valid == valid]
        lines = [line for part in these for line in (part.add() if sign == "+" else part.remove())]
        other = [line for part in these for line in part.other(sign)]
        if not valid:
            yield from lines
            continue
        yield f"if {valid}:"
        yield from (f"    {line}" for line in lines)
        if other:
            yield "else:"
            yield from (f"    {line}" for line in other)


def _lines(lines: Iterable[str]) -> str:
    return "\n        ".join(lines) or "pass"


@lru_cache(maxsize=1_024)
def _code(source: str) -> CodeType:
    return compile(source, "<the loops of an Aggregate>", "exec")


def _whole(n: list[Any], at: int) -> int:
    """The integer at this place, kept within 64 bits, and what the number after it has carried."""
    if not _LOW <= n[at] <= _HIGH:
        carry = (n[at] - _LOW) >> _CARRY
        n[at] -= carry << _CARRY
        n[at + 1] += carry
    total: int = n[at] + (n[at + 1] << _CARRY)
    return total


def _first(n: list[int], at: int, kept: dict[int, Row]) -> Row:
    while n[at] not in kept:
        n[at] += 1
    return kept[n[at]]


def _last(n: list[int], at: int, kept: dict[int, Row]) -> Row:
    while n[at] - 1 not in kept:
        n[at] -= 1
    return kept[n[at] - 1]


def _double(value: int | None) -> float | None:
    return None if value is None else float(value)


_NAMES = {
    "inf": inf,
    "sqrt": sqrt,
    "insort": insort,
    "bisect_left": bisect_left,
    "insert": insert,
    "remove": remove,
    "least": least,
    "greatest": greatest,
    "is_key": is_key,
    "whole": _whole,
    "first": _first,
    "last": _last,
    "double": _double,
}
