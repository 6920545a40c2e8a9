"""Where blocks come into a project. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from esp_pubsub import Block, ConfigError, EventFlag, Opcode

from .changes import Changes, Row, Table, inserts
from .window import DUPLICATE, NULL_KEY, Keys, Reject, SchemaLike, Stream, is_key, key_type, row_type, schema_from

_UNKNOWN = "update or delete of a key that is not there"
_NO_INSERT = "no insert, and the window takes inserts only"
_UNDONE = "another event of its transactional block was rejected"

_INSERT, _UPDATE, _DELETE, _UPSERT, _SAFEDELETE, _UPDATEBLOCK = map(int, Opcode)
_PARTIAL = int(EventFlag.PARTIAL)


class Source:
    """An input of the project. It holds its rows by key, so it knows what an update or a delete changes.

    With `insert_only` it takes nothing but inserts. With `indexed=False` (SAS's `pi_EMPTY`) it holds no rows, and does
    not see that a key comes twice; such a source is `insert_only`.
    """

    def __init__(self, schema: SchemaLike, *, insert_only: bool = False, indexed: bool = True) -> None:
        if not indexed and not insert_only:
            raise ConfigError(
                "a source that holds no rows does not know what an update changes: add insert_only=True, or leave out "
                "indexed=False"
            )
        self.schema = schema_from(schema)
        self.insert_only = insert_only
        self.indexed = indexed

    @property
    def stream(self) -> Stream:
        """What it gives."""
        return Stream(self.schema, self.insert_only)

    def state(self) -> Mapping[str, Any]:
        """See `Window.state`."""
        if self.indexed:
            return {"rows": dict[key_type(self.schema), row_type(self.schema)]}  # type: ignore[misc]
        return {"taken": list[int]}

    def open(self, state: Mapping[str, Any], reject: Reject) -> Intake:
        """The source at work."""
        return Intake(self, state, reject)


class Intake:
    """A source at work: it makes changes of the events of a block."""

    def __init__(self, source: Source, state: Mapping[str, Any], reject: Reject) -> None:
        self._table = Table(state["rows"]) if source.indexed else None
        self._taken: list[int] = [] if source.indexed else state["taken"]
        """How many events it has taken, where it holds none."""
        self._keys = Keys(source.schema, source.schema.keys)
        self._insert_only = source.insert_only
        self._reject = reject

    def take(self, block: Block) -> Changes:
        """What the block's events change, but for those that are rejected."""
        changes = self._changes(block)
        if self._table is None:
            self._taken[:] = [self.count() + len(changes.rows)]
        return changes

    def _changes(self, block: Block) -> Changes:
        opcodes, flags, rows = block.decoded()
        keys = self._keys.of_all(rows) if opcodes == _INSERT else None
        if keys is not None and (self._table is None or self._table.add_new(keys, rows)):
            return inserts(rows)
        return self._one_by_one(block, _each(opcodes, len(rows)), _each(flags, len(rows)), rows)

    def _one_by_one(self, block: Block, opcodes: Sequence[int], flags: Sequence[int], rows: list[Row]) -> Changes:
        taken: list[Row] = []
        rejected: list[tuple[str, Row]] = []
        old_one = False
        for opcode, flag, row in zip(opcodes, flags, rows, strict=True):
            if opcode == _UPDATEBLOCK:
                old_one = not old_one
                if not old_one:  # the second row of the pair
                    continue
            if why := self._apply(opcode, flag, row):
                rejected.append((why, row))
            else:
                taken.append(row)
        if rejected and block.transactional:
            rejected += [(_UNDONE, row) for row in taken]
            taken = []
            if self._table is not None:
                self._table.undo()
        for why, row in rejected:
            self._reject(why, row)
        return inserts(taken) if self._table is None else self._table.changes()

    def _apply(self, opcode: int, flag: int, row: Row) -> str | None:
        """Apply one event; or why it is rejected."""
        key = self._keys.of(row)
        if not is_key(key):
            return NULL_KEY
        if self._insert_only and opcode != _INSERT:
            return _NO_INSERT
        if self._table is None:
            return None
        old = self._table.rows.get(key)
        if opcode == _INSERT and old is not None:
            return DUPLICATE
        if old is None and opcode in (_UPDATE, _UPDATEBLOCK, _DELETE):
            return _UNKNOWN
        if opcode in (_DELETE, _SAFEDELETE):
            if old is not None:
                self._table.drop(key)
        elif old is not None and flag & _PARTIAL:
            self._table.put(key, tuple([was if now is None else now for now, was in zip(row, old, strict=True)]))
        else:
            self._table.put(key, row)
        return None

    def count(self) -> int:
        """How many rows it holds; how many it has taken, if it holds none."""
        return sum(self._taken) if self._table is None else len(self._table.rows)


def _each(marks: int | bytes, count: int) -> Sequence[int]:
    return [marks] * count if isinstance(marks, int) else marks
