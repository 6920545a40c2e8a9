"""What a block does to a window: rows, and what each of them is. Pure.

A block that leaves a window has at most one change for each key: from how the row was before the block to how it is
after it. An update is two rows, the new one and then the old one, as SAS has it.
"""

from __future__ import annotations

from itertools import compress
from typing import Any, NamedTuple

from esp_pubsub import EventFlag, Opcode, Out, TooLarge

Row = tuple[Any, ...]

INSERTED, DELETED, NEW, OLD, EXPIRED = b"\x01\x03\x06\x07\x08"
"""What a row is: inserted, deleted, the new or the old one of an update, or removed by a retention."""

_KINDS = bytes((INSERTED, DELETED, NEW, OLD, EXPIRED))
_OPCODES = bytes.maketrans(
    _KINDS, bytes((Opcode.INSERT, Opcode.DELETE, Opcode.UPDATEBLOCK, Opcode.UPDATEBLOCK, Opcode.DELETE))
)
_FLAGS = bytes.maketrans(_KINDS, bytes((0, 0, 0, 0, EventFlag.RETENTION)))
_ADDED = bytes.maketrans(_KINDS, b"\x01\x00\x01\x00\x00")
_REMOVED = bytes.maketrans(_KINDS, b"\x00\x01\x00\x01\x01")
_INSERT, _EXPIRED = bytes((INSERTED,)), bytes((EXPIRED,))


class Changes(NamedTuple):
    """The rows of a block, and one byte for each that says what it is."""

    rows: list[Row]
    kinds: bytes

    @property
    def only_inserts(self) -> bool:
        """Whether nothing but inserts is in it."""
        return self.kinds.count(INSERTED) == len(self.kinds)

    def added(self) -> list[Row]:
        """The rows that a window has after the block, of those in it."""
        return self.rows if self.only_inserts else list(compress(self.rows, self.kinds.translate(_ADDED)))

    def removed(self) -> list[Row]:
        """The rows that a window no longer has after the block."""
        return [] if self.only_inserts else list(compress(self.rows, self.kinds.translate(_REMOVED)))

    def emit(self, window: str, out: Out) -> None:
        """One block; more than one only where one would be over a limit."""
        rows, kinds = self
        try:
            if self.only_inserts:
                out.emit(window, rows)
            else:
                out.emit(window, rows, opcode=kinds.translate(_OPCODES), flags=kinds.translate(_FLAGS))
        except TooLarge:
            middle = len(rows) // 2
            middle += kinds[middle] == OLD
            if middle in (0, len(rows)):
                raise
            Changes(rows[:middle], kinds[:middle]).emit(window, out)
            Changes(rows[middle:], kinds[middle:]).emit(window, out)


NOTHING = Changes([], b"")


def inserts(rows: list[Row]) -> Changes:
    """These rows, all inserted."""
    return Changes(rows, _INSERT * len(rows))


def inserts_and_expired(rows: list[Row], gone: list[Row]) -> Changes:
    """These rows inserted, and those removed by a retention."""
    return Changes(rows + gone, _INSERT * len(rows) + _EXPIRED * len(gone)) if gone else inserts(rows)


class Table:
    """The rows that a window holds, by key, and what a block has changed of them so far."""

    __slots__ = ("_before", "_expired", "rows")

    def __init__(self, rows: dict[Any, Row]) -> None:
        self.rows = rows
        self._before: dict[Any, Row | None] = {}
        self._expired: dict[Any, None] = {}

    def add_new(self, keys: list[Any], rows: list[Row]) -> bool:
        """Hold these rows, if no key is held yet or comes twice; else nothing has happened. They are not noted."""
        held = self.rows
        if not held.keys().isdisjoint(keys):
            return False
        before = len(held)
        held.update(zip(keys, rows, strict=True))
        if len(held) == before + len(keys):
            return True
        for key in keys:
            held.pop(key, None)
        return False

    def put(self, key: Any, row: Row) -> None:
        """Hold this row, in the place of the one that has its key."""
        self._note(key)
        self.rows[key] = row

    def drop(self, key: Any, *, expired: bool = False) -> None:
        """Hold the row of this key no longer, by retention or otherwise."""
        self._note(key)
        del self.rows[key]
        if expired:
            self._expired[key] = None
        else:
            self._expired.pop(key, None)

    def _note(self, key: Any) -> None:
        """This key's row changes: in the order of the last change of each, rows come where they would one by one."""
        self._before[key] = self._before.pop(key) if key in self._before else self.rows.get(key)

    def undo(self) -> None:
        """Have all rows again as they were before the block."""
        for key, old in self._before.items():
            self.rows.pop(key, None)
            if old is not None:
                self.rows[key] = old

    def changes(self) -> Changes:
        """What the block has changed: of each key, from how its row was to how it is. The block has ended."""
        rows: list[Row] = []
        kinds = bytearray()
        for key, old in self._before.items():
            new = self.rows.get(key)
            if new is not None:
                rows.append(new)
                kinds.append(INSERTED if old is None else NEW)
            if old is not None:
                rows.append(old)
                kinds.append(OLD if new is not None else EXPIRED if key in self._expired else DELETED)
        self._before, self._expired = {}, {}
        return Changes(rows, bytes(kinds))
