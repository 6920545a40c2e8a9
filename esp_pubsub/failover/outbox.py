"""The outbox: blocks that have an id and are not yet known to be on the bus for every subscriber.

Ids go in without a hole and leave from the front. `settled` is the one place that says how far the bus holds the
sequence (m of PROTOCOL 1): sender, line and publisher all read it here. What is in here is all the memory that a
publisher takes: `room` says whether one more block fits. One block always fits into an empty outbox, whatever its size.
"""

from __future__ import annotations

from ..wire.frame import Sealed


class Outbox:
    """Blocks by id, in order: `first` .. `last`. Empty when first is last + 1.

    `settled` may be beyond `last`: another member of the group has sent blocks that this one has not been given yet.
    """

    __slots__ = ("_blocks", "bytes", "chain", "first", "last", "max_blocks", "max_bytes", "settled")

    def __init__(self, max_blocks: int, max_bytes: int) -> None:
        self.max_blocks = max_blocks
        self.max_bytes = max_bytes
        self.first = 1
        self.last = 0
        self.settled = 0
        self.chain = 0
        self.bytes = 0
        self._blocks: dict[int, Sealed] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def begin_after(self, last: int, chain: int) -> None:
        """The next block is last + 1, and its link is this chain; the bus holds everything before it."""
        self.first, self.last, self.settled, self.chain = last + 1, last, last, chain

    def room(self, size: int) -> bool:
        """Whether a block that takes `size` bytes may go in now."""
        return not self._blocks or (len(self._blocks) < self.max_blocks and self.bytes + size <= self.max_bytes)

    def add(self, block: Sealed) -> None:
        """Append the block last + 1, sealed with our chain as its link. One that is settled already is not kept."""
        id, link, chain, size, _, _ = block
        if id != self.last + 1 or link != self.chain:
            raise ValueError(f"block {id} does not follow block {self.last}")
        if id > self.settled:
            self._blocks[id] = block  # this may find no memory, and then nothing has happened
            self.bytes += size
        else:
            self.first = id + 1
        self.last = id
        self.chain = chain

    def settle(self, id: int) -> list[Sealed]:
        """The bus holds everything up to this block: let go of it, and return what was let go."""
        if id > self.settled:
            self.settled = id
        end = min(id, self.last) + 1
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
        """Blocks id + 1, id + 2, ... within both bounds, but at least one if there is one, however large."""
        found: list[Sealed] = []
        blocks, size = self._blocks, 0
        for number in range(max(id + 1, self.first), min(self.last, id + max_blocks) + 1):
            block = blocks[number]
            size += block.size
            if found and size > max_bytes:
                break
            found.append(block)
        return found
