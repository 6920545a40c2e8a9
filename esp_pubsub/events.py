"""Opcodes, flags, events and blocks. A block is 1..n events of one schema: the unit that is numbered and travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum, IntFlag
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from .errors import BadBody
from .records import instances, moment
from .schema import FieldType, Schema
from .wire.frame import ARROW, BODY_AT, MARKED, ROWS, TRANSACTIONAL, Frame
from .wire.rows import codec

T = TypeVar("T")


@cache
def arrow_bodies() -> ModuleType:
    """The extra `arrow`, asked for when there is a table."""
    from .wire import arrow

    return arrow


class Opcode(IntEnum):
    """What an event does to its key. `UPDATEBLOCK` comes in pairs: the new row, then the old one."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3
    UPSERT = 4
    SAFEDELETE = 5
    UPDATEBLOCK = 6


_OPCODES = {int(opcode): opcode for opcode in Opcode}  # a twentieth of the price of calling Opcode


class EventFlag(IntFlag):
    """Marks of one event: `PARTIAL` changes only the fields that are given, `RETENTION` was made by a retention
    policy.
    """

    NORMAL = 0
    PARTIAL = 1
    RETENTION = 2


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its values by field name, in schema order."""

    values: Mapping[str, Any]
    opcode: Opcode = Opcode.INSERT
    flags: EventFlag = EventFlag.NORMAL


_LAST = (datetime.max.replace(tzinfo=UTC) - moment(0)) // timedelta(microseconds=1)


def key_of(source: int, run: int, id: int, row: int) -> str:
    """See `Block.key`."""
    return f"{source:016x}:{run}:{id}:{row}"


@dataclass(slots=True, eq=False, repr=False)  # to be left as it is; freezing would triple the price of making one
class Block:
    """A block as it was delivered. Decoding happens when it is asked for, and again each time it is asked for.

    Every way of reading raises BadBody if the bytes, though whole, are not a body of the block's schema.
    """

    frame: Frame
    schema: Schema
    view: View
    serial: int = 0

    @property
    def id(self) -> int:
        """The client message ID: 1, 2, 3, ... in its run."""
        return self.frame.id

    @property
    def run(self) -> int:
        """The run of its source."""
        return self.frame.run

    @property
    def source(self) -> int:
        """The 64-bit number of the sequence it belongs to."""
        return self.frame.source

    @property
    def position(self) -> Any:
        """Where it stood on the bus: a number on a log, opaque on a queue."""
        return self.frame.position

    @property
    def name(self) -> str:
        """A text that names it among all blocks: source, run and id. The source is hexadecimal in it: as a number it is
        unsigned, of 64 bits, which is more than SQL's BIGINT holds.
        """
        return f"{self.frame.source:016x}:{self.frame.run}:{self.frame.id}"

    def key(self, row: int = 0) -> str:
        """A text that names one of its rows, counted from 0, among all rows of all blocks: source, run, id and row."""
        return key_of(self.frame.source, self.frame.run, self.frame.id, row)

    @property
    def transactional(self) -> bool:
        """All of its events are to be applied, or none."""
        return bool(self.frame.flags & TRANSACTIONAL)

    @property
    def sent_at(self) -> datetime:
        """When its sender wrote it, by that sender's clock."""
        return moment(0, min(self.frame.sent_at, _LAST))

    def __len__(self) -> int:
        """The number of events it was sent with."""
        return self.frame.count

    def __repr__(self) -> str:
        return f"<Block id={self.id} run={self.run} source={self.source:016x} events={len(self)}>"

    def rows(self) -> list[tuple[Any, ...]]:
        """Tuples in schema order; date and stamp as integers, money as Decimal.

        They hide opcodes and flags: the row of a delete looks like that of an insert. `changes()` shows the opcodes.
        """
        return self.decoded()[2]

    def as_(self, cls: type[T]) -> list[T]:
        """Instances of a class that `Schema.of` takes: `block.as_(Order)`. They hide opcodes and flags, as `rows` does.

        Raises SchemaDiffers where the class has other fields than the block, and ValueRefused for a row of which no
        instance can be made, such as one with a null in a field that is not `| None`.
        """
        return instances(cls, self.schema, self.rows())

    def changes(self) -> list[tuple[Opcode, tuple[Any, ...]]]:
        """The opcode and the row, as `rows()` has it, of each event, in order.

        They hide flags, which `events()` shows: in a partial update the fields that were not given are None.
        """
        opcodes, _flags, rows = self.decoded()
        try:
            if isinstance(opcodes, int):
                opcode = _OPCODES[opcodes]
                return [(opcode, row) for row in rows]
            return list(zip(map(_OPCODES.__getitem__, opcodes), rows, strict=True))
        except KeyError as e:
            raise self._bad(ValueError(f"{e} is not a valid Opcode")) from None

    def mappings(self) -> list[dict[str, Any]]:
        """Dictionaries by field name, with aware datetimes for date and stamp."""
        return self._named(self.rows())

    def events(self) -> list[Event]:
        """Mappings with opcode and flags."""
        opcodes, flags, rows = self.decoded()
        try:
            return [
                Event(values, Opcode(opcode), EventFlag(flag))
                for values, opcode, flag in zip(
                    self._named(rows), _each(opcodes, len(rows)), _each(flags, len(rows)), strict=True
                )
            ]
        except ValueError as e:
            raise self._bad(e) from None

    def table(self) -> Any:
        """A pyarrow.Table (extra `arrow`), with columns `_opcode` and `_flags` unless all events are plain inserts."""
        arrow = arrow_bodies()
        if (batch := self.record_batch()) is not None:
            return arrow.as_table(batch)
        opcodes, flags, rows = self.decoded()
        try:
            return arrow.table(self.schema, rows, opcodes, flags)
        except (ValueError, TypeError, OverflowError) as e:
            raise self._bad(e) from None

    def record_batch(self) -> Any:
        """The pyarrow.RecordBatch that it was sent as, not copied; None if it was sent as rows or is seen otherwise."""
        frame = self.frame
        if frame.body_kind != ARROW or self.view or frame.schema != self.schema.fingerprint:
            return None
        marked = bool(frame.flags & MARKED)
        try:
            return arrow_bodies().batch(self.schema, frame.body_view, frame.count, marked=marked)
        except (ValueError, TypeError, OverflowError) as e:
            raise self._bad(e) from None

    def decoded(self) -> tuple[int | bytes, int | bytes, list[tuple[Any, ...]]]:
        """Opcodes and flags (one for all, or one byte an event) and `rows()`."""
        frame = self.frame
        try:
            if frame.schema != self.schema.fingerprint:
                raise ValueError("its schema is another one than the topic's")
            if frame.body_kind == ARROW:
                marked = bool(frame.flags & MARKED)
                decoded = arrow_bodies().rows(self.schema, frame.body_view, frame.count, marked=marked)
            elif frame.body_kind == ROWS:
                decoded = codec(self.schema).decode(frame.data[BODY_AT:], frame.count)
            else:
                raise ValueError(f"a body of kind {frame.body_kind} holds no events")
            return self.view.apply(*decoded) if self.view else decoded
        except ValueError as e:
            raise self._bad(e) from None

    def _bad(self, why: Exception) -> BadBody:
        return BadBody(
            f"block {self.id} at position {self.position} arrived whole, but its body cannot be read: {why}",
            id=self.id,
            position=self.position,
        )

    def _named(self, rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
        names = self.schema.names
        mappings = [dict(zip(names, row, strict=True)) for row in rows]
        for f in self.schema.fields:
            if f.type in (FieldType.DATE, FieldType.STAMP):
                seconds = f.type is FieldType.DATE
                try:
                    for mapping in mappings:
                        value = mapping[f.name]
                        if value is not None:
                            mapping[f.name] = moment(value) if seconds else moment(0, value)
                except (OverflowError, TypeError, ValueError) as e:
                    raise self._bad(ValueError(f"field {f.name!r} holds no moment Python can show: {e}")) from None
        return mappings


@dataclass(frozen=True, slots=True)
class View:
    """How a subscriber wants events: `collapse` turns an update pair into one update, `rmretdel` leaves out deletes
    that a retention policy made. False when it changes nothing.
    """

    collapse: bool = False
    rmretdel: bool = False

    def __bool__(self) -> bool:
        return self.collapse or self.rmretdel

    def apply(
        self, opcodes: int | bytes, flags: int | bytes, rows: list[tuple[Any, ...]]
    ) -> tuple[int | bytes, int | bytes, list[tuple[Any, ...]]]:
        """The same events as this view has them."""
        if opcodes == Opcode.INSERT:
            return opcodes, flags, rows
        kept_opcodes, kept_flags, kept = bytearray(), bytearray(), []
        old = False
        for opcode, flag, row in zip(_each(opcodes, len(rows)), _each(flags, len(rows)), rows, strict=True):
            if self.collapse and opcode == Opcode.UPDATEBLOCK:
                old = not old
                if not old:
                    continue
                opcode = Opcode.UPDATE
            elif self.rmretdel and opcode == Opcode.DELETE and flag & EventFlag.RETENTION:
                continue
            kept_opcodes.append(opcode)
            kept_flags.append(flag)
            kept.append(row)
        return bytes(kept_opcodes), bytes(kept_flags), kept


PLAIN = View()


def _each(values: int | bytes, count: int) -> Sequence[int]:
    return [values] * count if isinstance(values, int) else values
