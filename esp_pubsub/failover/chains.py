"""The chains of the last blocks of one sequence, by id."""

from __future__ import annotations

import sys
from array import array


class Chains:
    """Chains of blocks that follow each other, up to `last`: the newest `most` of them."""

    __slots__ = ("_kept", "_most", "last")

    def __init__(self, most: int) -> None:
        self.last = 0
        self._most = most
        self._kept = array("I")

    def add(self, id: int, chain: int) -> None:
        """The chain of the next block; one of another place begins anew from there."""
        kept = self._kept
        if id != self.last + 1:
            del kept[:]
        elif len(kept) >= 2 * self._most:  # forgetting is cheap when it is rare
            del kept[: -self._most]
        kept.append(chain)
        self.last = id

    def extend(self, first: int, chains: bytes) -> None:
        """The chains of block `first` and of those behind it, as they stand in frames: four bytes each."""
        more = array("I", chains)
        if sys.byteorder == "big":
            more.byteswap()
        if first != self.last + 1:
            del self._kept[:]
        del self._kept[: -self._most]
        self._kept.extend(more)
        self.last = first - 1 + len(more)

    def get(self, id: int) -> int | None:
        """The chain of a block, if it is kept."""
        before = self.last - id
        return self._kept[~before] if 0 <= before < self._most and before < len(self._kept) else None
