"""The chains of the last blocks of one sequence, by id."""

from __future__ import annotations

import sys
from array import array


class Chains:
    """Chains by id; at least those of the newest `most` blocks, of each the one that came last.

    Nearly always blocks come in order, and are kept as one line. Where they jump, the line so far is put aside.
    """

    __slots__ = ("_aside", "_line", "_line_end", "_most", "last")

    def __init__(self, most: int) -> None:
        self.last = 0
        """The highest id there ever was."""
        self._most = most
        self._line = array("I")
        self._line_end = 0
        self._aside: dict[int, int] = {}

    def add(self, id: int, chain: int) -> None:
        """The chain of one block."""
        line = self._line
        if id != self._line_end + 1:
            self._put_aside()
        elif len(line) >= 2 * self._most:  # forgetting is cheap when it is rare
            del line[: -self._most]
        line.append(chain)
        self._line_end = id
        if id > self.last:
            self.last = id

    def extend(self, first: int, chains: bytes) -> None:
        """The chains of block `first` and of those behind it, as they stand in frames: four bytes each."""
        more = array("I", chains)
        if sys.byteorder == "big":
            more.byteswap()
        if first != self._line_end + 1:
            self._put_aside()
        del self._line[: -self._most]
        self._line.extend(more)
        self._line_end = first - 1 + len(more)
        self.last = max(self.last, self._line_end)

    def get(self, id: int) -> int | None:
        """The chain of a block, if it is kept."""
        before = self._line_end - id
        if 0 <= before < self._most and before < len(self._line):
            return self._line[~before]
        return self._aside.get(id) if id > self.last - self._most else None  # what is older may have come again since

    def _put_aside(self) -> None:
        aside, end = self._aside, self._line_end
        aside.update(zip(range(end - len(self._line) + 1, end + 1), self._line, strict=True))
        for old in [id for id in aside if id <= self.last - self._most]:
            del aside[old]
        del self._line[:]
