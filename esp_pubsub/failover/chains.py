"""The chains of the last blocks of one sequence, by id."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence


def chains_of(chains: Sequence[int] | bytes) -> array[int]:
    """Numbers, or how they stand in frames: four bytes each, little endian."""
    found = array("I", chains)
    if isinstance(chains, bytes) and sys.byteorder == "big":
        found.byteswap()
    return found


class Chains:
    """Chains by id; at least those of the newest `most` blocks, of each the one that came last.

    Nearly always blocks come in order, and are kept as one line. Where they jump, the line so far is put aside.
    """

    __slots__ = ("_aside", "_line", "_line_end", "_most", "last")

    def __init__(self, most: int) -> None:
        self.last = 0
        """The highest id there ever was."""
        self._most = most
        self._line = chains_of([])
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

    def extend(self, first: int, chains: array[int]) -> None:
        """The chains of block `first` and of those behind it."""
        if first != self._line_end + 1:
            self._put_aside()
        del self._line[: -self._most]
        self._line.extend(chains)
        self._line_end = first - 1 + len(chains)
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
        del self._line[:]
        if len(aside) > 2 * self._most:
            for old in [id for id in aside if id <= self.last - self._most]:
                del aside[old]
