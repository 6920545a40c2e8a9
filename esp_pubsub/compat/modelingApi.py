"""SAS's `modelingApi`: schemas, events and blocks, as a script for `pubsubApi` makes and reads them.

What has to be freed there is an object here: to free it is allowed, and nobody needs it. Functions take the objects,
or the numbers that a ctypes callback was given for them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ..errors import SchemaDiffers, ValueRefused, WrongOrder
from ..events import Block, EventFlag, Opcode
from ..schema import Schema
from ..text import BadText, Batch, CsvFormat, CsvReader, CsvWriter
from ..text.values import FLAG_LETTERS, OPCODE_LETTERS
from ..wire.frame import LIMITS
from . import fails_with, text

T = TypeVar("T")


class LogLevel(IntEnum):
    """What `Init` lets through; the numbers are those of Python's logging."""

    ll_Trace = 5
    ll_Debug = 10
    ll_Info = 20
    ll_Warn = 30
    ll_Error = 40
    ll_Fatal = 50
    ll_Off = 60


class BlockType(IntEnum):
    """Whether the events of a block are applied one by one, or all or none."""

    ebt_NORMAL = 0
    ebt_TRANS = 1


ll_Trace, ll_Debug, ll_Info, ll_Warn, ll_Error, ll_Fatal, ll_Off = LogLevel
ebt_NORMAL, ebt_TRANS = BlockType
eo_INSERT, eo_UPDATE, eo_DELETE, eo_UPSERT, eo_SAFEDELETE, eo_UPDATEBLOCK = Opcode


class StringV(list[str]):
    """A vector of strings, also a list."""


class EventV(list["Event"]):
    """A vector of events, also a list."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class WindowSchema:
    """A schema and the name it was given."""

    name: str
    schema: Schema


@dataclass(slots=True, weakref_slot=True, eq=False)
class Event:
    """One event: its values in schema order, date and stamp as integers, money as Decimal."""

    schema: Schema
    row: tuple[Any, ...]
    opcode: Opcode = Opcode.INSERT
    flags: EventFlag = EventFlag.NORMAL


@dataclass(slots=True, weakref_slot=True, eq=False)
class EventBlock:
    """Events that travel together. `id` is the client message ID, 0 until the block was injected."""

    schema: Schema
    events: Sequence[Event] = field(repr=False)
    kind: BlockType = ebt_NORMAL
    id: int = 0


def from_block(block: Block) -> EventBlock:
    """A block that was received. BadBody if it cannot be read."""
    opcodes, flags, rows = block.decoded()
    marks = [bytes([each]) * len(rows) if isinstance(each, int) else each for each in (opcodes, flags)]
    try:
        events = [
            Event(block.schema, row, Opcode(opcode), EventFlag(flag))
            for row, opcode, flag in zip(rows, *marks, strict=True)
        ]
    except ValueError as e:
        raise ValueRefused(f"block {block.id}: {e}", row=0, field="opcodes", value=opcodes) from None
    return EventBlock(block.schema, events, ebt_TRANS if block.transactional else ebt_NORMAL, block.id)


_READERS = 64
_readers: dict[tuple[Schema, str | None], CsvReader] = {}  # at rest; one costs more to make than a line to read
_pointers: WeakValueDictionary[int, Any] = WeakValueDictionary()


def pointer(thing: object) -> int:
    """The number by which a ctypes callback passes this object back, as long as the object is there."""
    _pointers[id(thing)] = thing
    return id(thing)


def the(kind: type[T], given: object) -> T:
    """The object of this kind that was passed. WrongOrder for anything else, such as what a failed call returned."""
    found = _pointers.get(given) if isinstance(given, int) else given
    if not isinstance(found, kind):
        raise WrongOrder(f"{given!r:.80} is no {kind.__name__}; did the call fail that should have made it?")
    return found


class _Layout(logging.Formatter):
    """SAS's: time; level; thread; DF.ESP; (place); text."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03d; %(levelname)s; %(thread)08d; DF.ESP; (%(filename)s:%(lineno)d); %(message)s",
            "%Y-%m-%dT%H:%M:%S",
        )


def getLoggingHandler() -> logging.Handler:
    """A handler that shows what the library logs on the standard error, in SAS's layout."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Layout())
    handler.addFilter(logging.Filter("esp_pubsub"))
    return handler


@fails_with(0)
def StringVSize(vector: object) -> int:
    """How many strings there are."""
    return len(the(StringV, vector))


@fails_with(None)
def StringVGet(vector: object, index: int) -> str | None:
    """One of them; None beyond the end."""
    strings = the(StringV, vector)
    return strings[index] if 0 <= index < len(strings) else None


def StringVFree(vector: object) -> None:
    """Nothing needs to be freed."""


@fails_with(None)
def SchemaCreate(name: str | bytes, schema: str | bytes) -> WindowSchema:
    """A schema from its text, such as the answer to `?get=schema`; None if it is none."""
    return WindowSchema(text(name, "the name of a schema"), Schema(text(schema, "a schema")))


@fails_with(None)
def EventCreate2(schema: object, csv: str | bytes, dateformat: str | bytes | None = None) -> Event:
    """An event from a line `opcode,flag,field,...`; None if the line is no event of this schema.

    Without a date format, dates are seconds and stamps microseconds since 1970.
    """
    fields = the(WindowSchema, schema).schema
    dates = text(dateformat, "a date format") if dateformat else None
    line = text(csv, "an event").rstrip("\r\n")
    if line.lstrip()[:2] in ("ub", "UB"):
        raise ValueRefused("an update block is output only; publish an update", row=0, field="opcode", value=line)
    reader = _readers.pop((fields, dates), None)  # taken out, so that no other thread has it meanwhile
    if reader is not None and "\n" not in line and "\r" not in line:
        try:
            found = list(reader.feed(_encoded(line)))
        except BadText:
            found = []
        if len(found) == 1:
            _readers[fields, dates] = reader
            return _event(fields, found[0])
    reader = _reader(fields, dates)
    found = [*reader.feed(_encoded(line)), *reader.close()]
    if len(found) != 1:
        raise ValueRefused(f"one event is one line, not {line!r:.80}", row=0, field="", value=line)
    if len(_readers) >= _READERS:
        _readers.clear()
    _readers[fields, dates] = _reader(fields, dates)
    return _event(fields, found[0])


def _reader(fields: Schema, dates: str | None) -> CsvReader:
    return CsvReader(fields, CsvFormat(dateformat=dates), block=1, max_line=LIMITS.frame_bytes)


def _encoded(line: str) -> bytes:
    return f"{line}\n".encode(errors="surrogateescape")


def _event(fields: Schema, batch: Batch) -> Event:
    assert isinstance(batch.opcode, Opcode) and isinstance(batch.flags, int)  # a batch of one has one
    return Event(fields, batch.rows[0], batch.opcode, EventFlag(batch.flags))


def EventVCreate() -> EventV:
    """An empty vector of events."""
    return EventV()


@fails_with(0)
def EventVPushback(vector: object, event: object) -> int:
    """Put an event at the end."""
    the(EventV, vector).append(the(Event, event))
    return 1


@fails_with(None)
def EventBlockNew1(vector: object, kind: int) -> EventBlock:
    """A block of all events of a vector, which stays as it is; None if there are none, or of different schemas."""
    events = tuple(the(EventV, vector))
    if not events:
        raise ValueRefused("a block has at least one event; this vector is empty", row=0, field="", value=events)
    for row, event in enumerate(events):
        if event.schema != events[0].schema:
            raise SchemaDiffers(
                f"event {row} has the schema {event.schema}, the first one {events[0].schema}; a block has one",
                given=event.schema.text,
                retained=events[0].schema.text,
            )
    if kind not in tuple(BlockType):
        raise ValueRefused(f"a block is ebt_NORMAL or ebt_TRANS, not {kind!r}", row=0, field="kind", value=kind)
    return EventBlock(events[0].schema, events, BlockType(kind))


def EventBlockDestroy(block: object) -> None:
    """From now on the block is empty, and `PublisherInject` refuses it."""
    if isinstance(block, EventBlock):
        block.events = ()


@fails_with(0)
def EventBlockGetSize(block: object) -> int:
    """How many events it has."""
    return len(the(EventBlock, block).events)


@fails_with(None)
def EventBlockGetEvent(block: object, index: int) -> Event | None:
    """One of its events; None beyond the end."""
    events = the(EventBlock, block).events
    return events[index] if 0 <= index < len(events) else None


@fails_with(0)
def EventBlockGetMsgId(block: object) -> int:
    """Its client message ID; 0 for one that was not injected."""
    return the(EventBlock, block).id


@fails_with(0)
def EventBlockGetTID(block: object) -> int:
    """The same: a block has one number here."""
    return the(EventBlock, block).id


@fails_with(None)
def EventBlockGetType(block: object) -> BlockType:
    """`ebt_NORMAL` or `ebt_TRANS`."""
    return the(EventBlock, block).kind


@fails_with(None)
def EventGetOpcode(event: object) -> Opcode:
    """`eo_INSERT` and the like. Of a pair of `eo_UPDATEBLOCK` the first is the new row."""
    return the(Event, event).opcode


@fails_with(None)
def EventGetFlags(event: object) -> EventFlag:
    """A bit mask: 1 partial update, 2 made by a retention policy."""
    return the(Event, event).flags


@fails_with(None)
def EventToStringCSV(event: object, schema: object = None, marks: object = True, other: object = False) -> str:
    """An event as text: `I,N:` and its fields, without `marks` the fields. `schema` and `other` change nothing."""
    known = the(Event, event)
    line = _writer(known.schema).write([known.row]).decode().removesuffix("\n")
    flags = known.flags & (EventFlag.PARTIAL | EventFlag.RETENTION)
    return f"{OPCODE_LETTERS[known.opcode]},{FLAG_LETTERS[flags]}:{line}" if marks else line


@fails_with(None)
def SchemaGetString(schema: object) -> str:
    """The text of a schema."""
    return the(WindowSchema, schema).schema.text


@lru_cache(16)
def _writer(schema: Schema) -> CsvWriter:
    return CsvWriter(schema, CsvFormat(opcode=Opcode.INSERT, flags=EventFlag.NORMAL))
