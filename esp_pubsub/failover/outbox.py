"""The outbox: blocks that have an id and are not yet known to be on the bus for every subscriber.

Ids go in without a hole and leave from the front. What is in here is all the memory a publisher takes: `room` says
whether one more block fits. One block always fits into an empty outbox, whatever its size.
"""

from __future__ import annotations

from ..wire.frame import Sealed


class Outbox:
    """Blocks by id, in order: `first` .. `last`. Empty when first is last + 1."""

    __slots__ = ("_blocks", "bytes", "chain", "first", "last", "max_blocks", "max_bytes")

    def __init__(self, max_blocks: int, max_bytes: int) -> None:
        self.max_blocks = max_blocks
        self.max_bytes = max_bytes
        self.first = 1
        self.last = 0
        self.chain = 0
        self.bytes = 0
        self._blocks: dict[int, Sealed] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def begin_behind(self, last: int, chain: int) -> None:
        """The first block to come is last + 1, and that chain its link."""
        self.first, self.last, self.chain = last + 1, last, chain

    def room(self, size: int) -> bool:
        """Whether a block that takes `size` bytes may go in now."""
        return not self._blocks or (len(self._blocks) < self.max_blocks and self.bytes + size <= self.max_bytes)

    def add(self, block: Sealed) -> None:
        """Append the block last + 1, sealed with our chain as its link."""
        id, link, chain, size, _, _ = block
        if id != self.last + 1 or link != self.chain:
            raise ValueError(f"block {id} does not follow block {self.last}")
        self._blocks[id] = block
        self.last = id
        self.chain = chain
        self.bytes += size

    def pass_over(self, block: Sealed) -> None:
        """Count the block last + 1 as one that was added and let go; nothing may be in here."""
        id, link, chain, _, _, _ = block
        if id != self.last + 1 or link != self.chain or self._blocks:
            raise ValueError(f"block {id} cannot be passed over behind block {self.last}")
        self.last, self.first, self.chain = id, id + 1, chain

    def trim(self, past: int) -> list[Sealed]:
        """Let go of everything up to and including `past`; returns what that was."""
        end = min(past, self.last) + 1
        take = self._blocks.pop
        taken = [take(id) for id in range(self.first, end)]
        if taken:
            self.bytes -= sum([block.size for block in taken])
            self.first = end
        return taken

    def get(self, id: int) -> Sealed | None:
        """A block that is in here."""
        return self._blocks.get(id)

    def after(self, id: int, max_blocks: int, max_bytes: int) -> list[Sealed]:
        """Blocks id + 1, id + 2, ... within both bounds, though never none because one block is large."""
        found: list[Sealed] = []
        blocks, size = self._blocks, 0
        for number in range(max(id + 1, self.first), min(self.last, id + max_blocks) + 1):
            block = blocks[number]
            size += block.size
            if found and size > max_bytes:
                break
            found.append(block)
        return found
