"""Values in order, each as often as it was inserted: the least and the greatest at once, after any removal. Pure.

`few` has them all while they are few. Because it takes long to move what stands in a long list, more than that are in
`many`, lists of at most MOST values, one after another; then `few` is empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import itemgetter
from typing import Any

MOST = 2_048
_last = itemgetter(-1)


def insert(few: list[Any], many: list[list[Any]], value: Any) -> None:
    """Add a value."""
    if not many and len(few) < MOST:
        insort(few, value)
        return
    if not many:
        many.append(few[:])
        few.clear()
    at = min(bisect_left(many, value, key=_last), len(many) - 1)
    values = many[at]
    insort(values, value)
    if len(values) > MOST:
        many.insert(at + 1, values[MOST // 2 :])
        del values[MOST // 2 :]


def remove(few: list[Any], many: list[list[Any]], value: Any) -> None:
    """Take away a value that was added."""
    if few:
        del few[bisect_left(few, value)]
        return
    at = bisect_left(many, value, key=_last)
    values = many[at]
    del values[bisect_left(values, value)]
    if not values:
        del many[at]
    if len(many) == 1 and len(many[0]) < MOST // 2:
        few += many.pop()


def least(many: list[list[Any]]) -> list[Any]:
    """The list that begins with the least value; None in it if there is none."""
    return many[0] if many else _NULL


def greatest(many: list[list[Any]]) -> list[Any]:
    """The list that ends with the greatest value; None in it if there is none."""
    return many[-1] if many else _NULL


_NULL = [None]
