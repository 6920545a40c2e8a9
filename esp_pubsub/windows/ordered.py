"""Values in order, each as often as it was inserted: the least and the greatest at once, after any removal. Pure.

They are lists of at most so many values, one after another, because what stands in a long list is expensive to move.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import itemgetter
from typing import Any

_MOST = 2_048
_last = itemgetter(-1)


def insert(chunks: list[list[Any]], value: Any) -> None:
    """Add a value."""
    if not chunks:
        chunks.append([value])
        return
    at = min(bisect_left(chunks, value, key=_last), len(chunks) - 1)
    chunk = chunks[at]
    insort(chunk, value)
    if len(chunk) > _MOST:
        chunks.insert(at + 1, chunk[_MOST // 2 :])
        del chunk[_MOST // 2 :]


def remove(chunks: list[list[Any]], value: Any) -> None:
    """Take away a value that was added."""
    at = bisect_left(chunks, value, key=_last)
    chunk = chunks[at]
    del chunk[bisect_left(chunk, value)]
    if not chunk:
        del chunks[at]
