"""How long to wait before the next attempt: twice as long each time, and partly at random, so that many who lost the
same bus do not come back at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """The pauses between attempts at one thing. Pure: whoever asks does the waiting."""

    __slots__ = ("_draw", "_first", "_longest", "_pause")

    def __init__(self, first: float, longest: float, draw: Callable[[], float] = random.random) -> None:
        """`draw` gives numbers from 0 to 1."""
        self._first = self._pause = first
        self._longest = longest
        self._draw = draw

    def next(self) -> float:
        """Seconds to wait now: between half of this attempt's pause and all of it."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return pause * (1 + self._draw()) / 2

    def reset(self) -> None:
        """It worked: the next pause is the first one again."""
        self._pause = self._first
