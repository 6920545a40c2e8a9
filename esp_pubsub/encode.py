"""What a user may publish, as the body of a block: rows, mappings, dataclasses, events, blocks, tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from .errors import BadBody, TooLarge, ValueRefused
from .events import Block, Event, Opcode, View, arrow_bodies
from .records import is_record
from .schema import Schema
from .wire.frame import ARROW, BODY_AT, LIMITS, MARKED, ROWS, TRANSACTIONAL, Buffer, Limits
from .wire.rows import codec, wrong_opcode

_INSERT = Opcode.INSERT  # five times as fast to get at


Encoded = tuple[int, int, int, Buffer]  # what the header says of a body, kind, flags and count, and the body


def arrow_body() -> str:
    """What members that send Arrow must have in common: another major version of pyarrow may write other bytes."""
    return f"arrow of pyarrow {arrow_bodies().pa.__version__.partition('.')[0]}"


@lru_cache(maxsize=256)
def _is_table(kind: type) -> bool:
    return any(hasattr(kind, name) for name in ("__arrow_c_stream__", "__arrow_c_array__", "__dataframe__"))


class Encoder:
    """Bodies of one schema, of one kind. Whatever does not fit raises ValueRefused or TooLarge, before anything
    happened.
    """

    def __init__(
        self,
        schema: Schema,
        kind: Literal["rows", "arrow"] = "rows",
        limits: Limits = LIMITS,
        *,
        rebuild: bool = False,
    ) -> None:
        """`rebuild`: tables are made anew, so that equal events give equal bytes whatever the tables are made of."""
        self._schema = schema
        self._arrow = kind == "arrow"
        self._limits = limits
        self._rebuild = rebuild
        self._rows = codec(schema).encode
        plain: tuple[Any, Any] = arrow_bodies().as_they_are(schema) if self._arrow and not rebuild else (None, None)
        self._plain_type, self._plain_schema = plain

    def encode(self, data: Any, opcode: Any = Opcode.INSERT, flags: Any = 0) -> Encoded:
        """`opcode` and `flags`: one for all events, or a sequence with one for each; events and tables bring their
        own.
        """
        if type(data) is list and data and type(data[0]) is tuple:
            if opcode is _INSERT and type(flags) is int and flags == 0 and not self._arrow:  # nearly always
                return ROWS, 0, len(data), self._rows(data, 1, 0, self._limits)
            return self._from_rows(data, opcode, flags)
        if (
            type(data) is self._plain_type
            and data.schema.equals(self._plain_schema)
            and (opcode is _INSERT and type(flags) is int and flags == 0)
        ):
            return self._from_batch(data.serialize(), data.num_rows, False)
        if isinstance(data, Block):
            return self._from_block(data)
        if _is_table(type(data)):  # type: ignore[arg-type]  # every type is hashable
            return self._from_table(data, opcode, flags)
        return self._from_rows(*_plain(data, self._schema, opcode, flags))

    def _from_rows(self, rows: Sequence[Any], opcode: Any, flags: Any) -> Encoded:
        if not rows:
            raise _empty(rows)
        opcodes: int | bytes
        marks: int | bytes
        if opcode is _INSERT and type(flags) is int and flags == 0:
            opcodes, marks = 1, 0
        else:
            opcodes, marks = _opcodes(opcode, len(rows)), _each(flags, len(rows), "flags")
        if not self._arrow:
            return ROWS, 0, len(rows), self._rows(rows, opcodes, marks, self._limits)
        self._rows(rows, opcodes, marks, self._limits)
        return self._from_batch(*arrow_bodies().encode_rows(self._schema, rows, opcodes, marks))

    def _from_batch(self, body: Buffer, count: int, marked: bool) -> Encoded:
        if not count:
            raise _empty(None)
        if count > self._limits.events or len(body) > self._limits.frame_bytes:
            raise TooLarge(
                f"a block of {count} events and {len(body)} bytes; it has at most {self._limits.events} events and "
                f"{self._limits.frame_bytes} bytes",
                size=len(body),
                limit=self._limits.frame_bytes,
            )
        return ARROW, MARKED if marked else 0, count, body

    def _from_block(self, block: Block) -> Encoded:
        """A block that was received goes on as it is, if it can be read."""
        if block.frame.schema != self._schema.fingerprint:
            raise ValueRefused(
                f"the block's schema is {block.schema}, the publisher's is {self._schema}", row=0, field="", value=block
            )
        frame = block.frame
        if frame.count > self._limits.events or len(frame.data) - BODY_AT > self._limits.frame_bytes:
            raise TooLarge(
                f"a received block of {frame.count} events, {len(frame.data)} bytes, is over this publisher's limits",
                size=len(frame.data),
                limit=self._limits.frame_bytes,
            )
        try:
            whole = Block(frame, self._schema, View())
            if frame.flags & MARKED or whole.record_batch() is None:
                whole.changes()
        except BadBody as e:
            raise ValueRefused(
                f"the block cannot be read, so it is not passed on: {e}", row=0, field="", value=block
            ) from e
        return frame.body_kind, frame.flags & (MARKED | TRANSACTIONAL), frame.count, frame.body_view

    def _from_table(self, data: Any, opcode: Any, flags: Any) -> Encoded:
        """An Arrow table or batch, or a frame that can become one; with columns _opcode and _flags, or without."""
        arrow = arrow_bodies()
        try:
            table = arrow.from_frame(data)
            body, count, marked = arrow.encode(self._schema, table)
            if marked:
                opcode, flags = arrow.marks(table)
                _opcodes(opcode, count), _each(flags, count, "flags")
            if self._arrow and not self._rebuild and (marked or (opcode is _INSERT and flags == 0)):
                return self._from_batch(body, count, marked)
            rows = arrow.rows(self._schema, body, count, marked=marked)[2]
        except ValueRefused:
            raise
        except (ValueError, TypeError, ArithmeticError, NotImplementedError) as e:
            raise ValueRefused(
                f"the table does not fit the schema {self._schema}: {e}", row=0, field="", value=data
            ) from e
        return self._from_rows(rows, opcode, flags)


def _empty(data: Any) -> ValueRefused:
    text = "a block has at least one event, and there is none here: do not inject where there are no rows"
    return ValueRefused(text, row=0, field="", value=data)


def _each(values: Any, count: int, what: str) -> int | bytes:
    """One small integer for all events, or one byte an event."""
    if type(values) is bytes and len(values) == count > 0:
        return values[0] if values.count(values[0]) == count else values
    if isinstance(values, str):
        example = "esp.Opcode.UPSERT" if what == "opcodes" else "esp.EventFlag.PARTIAL"
        raise ValueRefused(f"{what} are not text: write {example}, not {values!r:.80}", row=0, field=what, value=values)
    if not isinstance(values, Iterable | int):
        raise ValueRefused(
            f"{what} are one integer, or one for each event, not {values!r}", row=0, field=what, value=values
        )
    listed = [values] if isinstance(values, int) else list(values)
    if len(listed) not in (1 if isinstance(values, int) else count, count):
        raise ValueRefused(f"{len(listed)} {what} for {count} events", row=0, field=what, value=values)
    for row, value in enumerate(listed):
        if not isinstance(value, int) or not 0 <= value < 256:
            raise ValueRefused(f"row {row}: {value!r} cannot be in {what}", row=row, field=what, value=value)
    return int(listed[0]) if len(set(listed)) == 1 else bytes(listed)


def _opcodes(values: Any, count: int) -> int | bytes:
    """Known ones only, and update-block rows in pairs."""
    opcodes = _each(values, count, "opcodes")
    listed = bytes([opcodes]) * count if isinstance(opcodes, int) else opcodes
    if wrong := wrong_opcode(listed):
        row, why = wrong
        raise ValueRefused(f"row {row}: {why}", row=row, field="opcodes", value=listed[row])
    return opcodes


def _plain(data: Any, schema: Schema, opcode: Any, flags: Any) -> tuple[Sequence[Any], Any, Any]:
    """Rows in schema order, with their opcodes and flags."""
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise ValueRefused(
            f"a block is a sequence of rows, not one {type(data).__name__}; for a single event: [row]",
            row=0,
            field="",
            value=data,
        )
    rows = data if isinstance(data, list | tuple) else list(data)
    if rows and isinstance(rows[0], Event):
        if not all(isinstance(row, Event) for row in rows):
            raise ValueRefused("a block is made of events, or of rows, not of both", row=0, field="", value=data)
        opcode, flags = [event.opcode for event in rows], [event.flags for event in rows]
        rows = [event.values for event in rows]
    if rows and isinstance(rows[0], Mapping):
        keys = schema.keys
        rows = [_from_mapping(number, row, schema, keys) for number, row in enumerate(rows)]
    elif rows and is_record(type(rows[0])):  # type: ignore[arg-type]  # as above
        rows = [_from_record(number, row, schema) for number, row in enumerate(rows)]
    return rows, opcode, flags


def _from_mapping(number: int, row: Any, schema: Schema, keys: Sequence[str]) -> list[Any]:
    """Values in schema order. A name that is not given is null, if it is no key's; an unknown one is refused."""
    if not isinstance(row, Mapping):
        raise ValueRefused(f"row {number} is no mapping, as row 0 is", row=number, field="", value=row)
    unknown = row.keys() - set(schema.names)
    if unknown:
        name = min(unknown, key=str)
        raise ValueRefused(
            f"row {number} has {name!r}, which is no field of {schema}", row=number, field=str(name), value=row[name]
        )
    for name in keys:
        if name not in row:
            raise ValueRefused(
                f"row {number} has no {name!r}, which is a key of {schema}; a key is given, if need be as None",
                row=number, field=name, value=row,
            )  # fmt: skip
    return [row.get(name) for name in schema.names]


def _from_record(number: int, row: Any, schema: Schema) -> list[Any]:
    try:
        return [getattr(row, name) for name in schema.names]
    except AttributeError:
        field = next(field for field in schema.fields if not hasattr(row, field.name))
        raise ValueRefused(
            f"row {number}, a {type(row).__name__}, has no field {field.name!r} ({field.type})",
            row=number, field=field.name, value=row,
        ) from None  # fmt: skip
