"""What a grouped subscriber has read and not confirmed, and which position and state may be stored (PROTOCOL 4).

Two orders meet here. Messages *arrive* in the order of the bus; blocks are *delivered*, and confirmed, in the order of
their ids. Confirming a block makes its state final at once, but a position may be stored only when everything that
arrived in front of it is done: confirmed, or dropped. A block that was held, or one not yet confirmed, stops it. So the
stored state may be ahead of the stored position, never behind it, and whoever goes on from there drops what it reads
again as doubles. But what was dropped and has proven that a block could be delivered has to come again with the block:
it is done when the block is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgpack

from ..bus import Message
from ..wire.frame import Frame

_LEDGERS = count(1)
_DROPPED_KEPT = 4_096
Known = dict[int, tuple[int, int, int | None]]


class _Delivered:
    __slots__ = ("chain", "id", "position", "run", "serial", "source")

    def __init__(self, serial: int, frame: Frame) -> None:
        self.serial = serial
        self.source = frame.source
        self.run = frame.run
        self.id = frame.id
        self.chain = frame.chain
        self.position = frame.position


class Ledger:
    """One reader's unconfirmed blocks. Positions are whatever the driver gave, each only once.

    `known` is the confirmed state, `source -> (run, last, chain)`; `done` the last position up to which everything is.
    """

    def __init__(self) -> None:
        self.known: Known = {}  # in the order in which they were last confirmed
        self.done: Any = None
        self._first = next(_LEDGERS) << 48  # no two readers number their blocks alike
        self.confirmed = self._first - 1
        self._serial = self._first - 1
        self._arrived: deque[Any] = deque()
        self._undone: set[Any] = set()
        self._delivered: deque[_Delivered] = deque()
        self._unstored: deque[_Delivered] = deque()
        self._adrift: dict[tuple[int, int, int], _Delivered] = {}
        self._proofs: dict[tuple[int, int, int], Any] = {}  # by block, the position of a frame without which it is held

    def __len__(self) -> int:
        """Blocks that were delivered and are not confirmed."""
        return len(self._delivered)

    def arrived(self, position: Any) -> None:
        """A message was read."""
        if len(self._arrived) > 2 * len(self._undone) + _DROPPED_KEPT:  # dropped, behind a block that is not confirmed
            self._arrived = deque(position for position in self._arrived if position in self._undone)
        self._arrived.append(position)
        self._undone.add(position)

    def dropped(self, position: Any, frame: Frame | None = None, admits: int = 0) -> bool:
        """A message will not be delivered; True if it may be let go at once. `admits` is what `Dropped` says.

        Not so one that was delivered from a feed that died and came back, or without which a block that was delivered
        would be held when it comes again: it is let go when that block is confirmed and that is stored. One such frame
        is enough for a block.
        """
        if frame is not None and self._adrift:
            delivered = self._adrift.pop((frame.source, frame.run, frame.id), None)
            if delivered is not None:
                delivered.position = position
                return False
        if frame is not None and admits:
            block = frame.source, frame.run, admits
            if block not in self._proofs and self._comes_again(*block):
                self._proofs[block] = position
                return False
        self._undone.discard(position)
        self._move_on()
        return True

    def _comes_again(self, source: int, run: int, id: int) -> bool:
        """Whether that block was delivered, and is not confirmed or that is not stored."""
        confirmed = self.known.get(source, (-1, 0, 0))[:2] >= (run, id)
        blocks = self._unstored if confirmed else self._delivered
        return any(block.id == id and block.run == run and block.source == source for block in blocks)

    def delivered(self, frame: Frame) -> int:
        """A block goes to the user; returns the number to confirm it by."""
        self._serial += 1
        self._delivered.append(_Delivered(self._serial, frame))
        return self._serial

    def confirm(self, serial: int) -> bool:
        """Everything delivered up to this number is done. False if that was known."""
        delivered = self._delivered
        if not delivered or delivered[0].serial > serial:
            return False
        while delivered and delivered[0].serial <= serial:
            block = delivered.popleft()
            known: tuple[int, int, int | None] = self.known.pop(block.source, (-1, 0, 0))
            if (block.run, block.id) > known[:2]:  # another reader of the group may have confirmed further
                known = (block.run, block.id, block.chain)
            self.known[block.source] = known
            self._undone.discard(block.position)
            if self._proofs:
                self._let_go_of_proof(block)
            self._unstored.append(block)
            self.confirmed = block.serial
        self._move_on()
        return True

    def stored(self, serial: int) -> bool:
        """What was confirmed up to this number is safe. True if `done` is further by that."""
        done, unstored = self.done, self._unstored
        while unstored and unstored[0].serial <= serial:
            block = unstored.popleft()
            self._undone.discard(block.position)
            if self._proofs:
                self._let_go_of_proof(block)
            self._adrift.pop((block.source, block.run, block.id), None)
        self._move_on()
        return bool(self.done != done)

    def _let_go_of_proof(self, block: _Delivered) -> None:
        self._undone.discard(self._proofs.pop((block.source, block.run, block.id), None))

    def _move_on(self) -> None:
        arrived, undone = self._arrived, self._undone
        while arrived and arrived[0] not in undone:
            self.done = arrived.popleft()

    def has(self, serial: int) -> bool:
        """Whether a block of this number was delivered from here."""
        return self._first <= serial <= self._serial

    def redelivery(self) -> None:
        """A queue's feed died: what is unconfirmed comes again, under other positions."""
        self.done = None
        self._arrived.clear()
        self._undone.clear()
        self._proofs.clear()
        for block in (*self._unstored, *self._delivered):
            block.position = None
            self._adrift[block.source, block.run, block.id] = block

    def cut(self, position: Any) -> None:
        """The log lost what stood from this position on: of blocks from there only the ids are known any more."""
        self._arrived = deque(each for each in self._arrived if each < position)
        self._undone = {each for each in self._undone if each < position}
        self._proofs = {block: each for block, each in self._proofs.items() if each < position}
        if self.done is not None and self.done >= position:
            self.done = position - 1
        for block in (*self._unstored, *self._delivered):
            if block.position is not None and block.position >= position:
                block.position = None
                self._adrift[block.source, block.run, block.id] = block

    def restart(self) -> None:
        """Another incarnation of the topic: nothing that was read can be confirmed any more."""
        self.known.clear()
        self._delivered.clear()
        self._unstored.clear()
        self._adrift.clear()
        self.redelivery()

    def state(self, *, from_start: bool) -> bytes:
        """The confirmed state as bytes to store."""
        packed: bytes = msgpack.packb((1, from_start, [(source, *known) for source, known in self.known.items()]))
        return packed


def not_read(messages: Sequence[Message], read_to: Any) -> Sequence[Message]:
    """Of what a log's feed gives, what its reader has not read; `read_to` is the last position that it has.

    A group's new feed begins where the group confirmed, which may be before that. A position that arrived twice could
    be let go twice, and the first time would be too early.
    """
    if read_to is None or not messages or messages[0].position > read_to:
        return messages
    return [message for message in messages if message.position > read_to]


def parse_state(state: bytes) -> tuple[bool, Known]:
    """What `Ledger.state` gave: from_start and `source -> (run, last, chain)`. Raises ValueError."""
    try:
        version, from_start, known = msgpack.unpackb(state, use_list=False)
        if version != 1:
            raise ValueError(f"version {version}")
        return bool(from_start), {source: (run, last, chain) for source, run, last, chain in known}
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise ValueError(f"not a stored accept state: {e}") from None


def furthest(ours: Mapping[int, tuple[int, int, int | None]], theirs: Known) -> Known:
    """Of two states, per source the one that is further: what either has delivered is not delivered again."""
    merged = dict(theirs)
    for source, known in ours.items():
        if source not in merged or known[:2] > merged[source][:2]:
            merged[source] = known
    return merged
