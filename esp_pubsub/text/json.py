"""JSON, in the two shapes that SAS has, and plain objects.

`[[{"field": value}, ...], ...]`: blocks of events, as they are injected.
`{"events": {"entries": [{"@opcode": "insert", "field": value}, ...]}}`: one such message a block, as subscribers get
them; `{"events": [{"event": {...}}, ...]}` is read as well. Messages may follow each other.
`[{"field": value}, ...]`, or such objects one after another, as in NDJSON: read only.
Without an opcode an event is an insert; a field that is left out is null.

Strings may stand for values of any type, spelt as in CSV; that is how money (a JSON number would lose digits with many
readers), blobs, moments of a date format, and the doubles that JSON has no number for are written.
"""

from __future__ import annotations

import json
import math
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Generator, Iterator, Sequence
from decimal import Decimal
from typing import Any, Literal

from ..events import EventFlag, Opcode
from ..schema import Field, FieldType, Schema
from .values import (
    ARRAY_ITEMS,
    EMPTY_VALUES,
    FLAG_LETTERS,
    FLAGS,
    MAX_ITEMS,
    OPCODES,
    TYPE_LIMITS,
    BadText,
    Batch,
    Dates,
    Key,
    Pending,
    shown,
    value_parser,
    value_texts,
)

_WORDS = OPCODES | {opcode.name.lower(): opcode for opcode in Opcode}
_BLANKS = re.compile(r"[ \t\r\n]*")
_MESSAGE = {"events", "schema"}  # what tells a message from an event, unless fields have these names
_LOOKAHEAD = 16  # so near to the end of what there is, an error may only mean that the rest is still to come


class JsonReader:
    """Bytes to events, fed as they come. `feed` and `close` are to be iterated to their end.

    Blocks are the input's own, at most `block` events each; events that stand in none are cut by `block`. A bad event
    raises BadText once all before it was given out, and ends the reading; with `on_bad` that is called with the error
    instead, the event is passed over and counted in `skipped`. What is no JSON always ends it.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dateformat: str | None = None,
        block: int = 256,
        max_value: int = 1 << 24,
        ignore_unknown: bool = False,
        on_bad: Callable[[BadText], object] | None = None,
    ) -> None:
        """`max_value`: characters that one event, or one message, may have. `ignore_unknown`: fields that the
        schema has not are passed over, where they are an error else.
        """
        self.skipped = 0
        self._max_value = max_value
        self._ignores_unknown = ignore_unknown
        self._on_bad = on_bad
        dates = None if dateformat is None else Dates(dateformat)
        self._parsers = [(field, _parser(field, dates)) for field in schema.fields]
        self._names = frozenset(schema.names)
        exact = any(field.type is FieldType.MONEY for field in schema.fields)
        self._json = json.JSONDecoder(parse_float=Decimal if exact else None)
        self._decode = getincrementaldecoder("utf-8-sig")().decode
        self._pending = Pending(schema, block)
        self._text = ""  # of the input, not read yet
        self._tried = 0  # so much of it was not enough
        self._depth = 0
        self._next = "value"  # or a comma; with "or end": or a closing bracket
        self._line = 1
        self._events = 0
        self._ended: BadText | None = None

    def feed(self, data: bytes) -> Iterator[Batch]:
        """More of the input; gives out the blocks that are whole now."""
        yield from self._read(data, last=False)

    def close(self) -> Iterator[Batch]:
        """The end of the input; gives out the rest."""
        yield from self._read(b"", last=True)
        if self._depth:
            yield from self._end("the array is not closed", len(self._text))
        yield from self._pending.take(rest=True)

    def _read(self, data: bytes, *, last: bool) -> Iterator[Batch]:
        if self._ended is not None:
            raise self._ended
        bad = None
        try:
            self._text += self._decode(data, last)
        except UnicodeDecodeError as e:
            self._text += e.object[: e.start].decode()
            bad = "bytes that are not UTF-8 stand here"
        at = 0
        while True:
            start = self._blanks(at)
            if start == len(self._text):
                at = start
                break
            end = yield from self._step(start, last and bad is None)
            if end == start:
                break
            at = end
        if bad is not None:
            yield from self._end(bad, len(self._text))
        self._line += self._text.count("\n", 0, at)
        self._text = self._text[at:]
        yield from self._pending.take()

    def _blanks(self, at: int) -> int:
        found = _BLANKS.match(self._text, at)
        return found.end() if found else at

    def _step(self, at: int, last: bool) -> Generator[Batch, None, int]:
        """One bracket, comma, event or message; returns where it ends, `at` if that is still to come."""
        letter = self._text[at]
        if self._depth and letter == "]" and self._next.endswith("end"):
            self._depth -= 1
            self._next = "comma or end" if self._depth else "value"
            yield from self._pending.take(rest=True)
        elif self._next == "comma or end":
            if letter != ",":
                yield from self._end(f"a comma or a bracket should stand where {letter!r} stands", at)
            self._next = "value"
        elif letter == "[" and self._depth < 2:
            yield from self._pending.take(rest=True)
            self._depth += 1
            self._next = "value or end"
        elif letter == "{":
            at = yield from self._value(at, last)
            return at
        else:
            what = ("an array, a message or an event", "an event or an array of events", "an event")[self._depth]
            yield from self._end(f"{what} should stand where {letter!r} stands", at)
        return at + 1

    def _value(self, at: int, last: bool) -> Generator[Batch, None, int]:
        size = len(self._text) - at
        if not last and size < 1.5 * self._tried and self._text.rstrip()[-1] not in "}]":
            return at
        try:
            value, end = self._json.raw_decode(self._text, at)
        except RecursionError:
            yield from self._end("it is nested too deeply", at)
        except ValueError as e:
            place, reason = (e.pos, e.msg) if isinstance(e, json.JSONDecodeError) else (at, str(e))
            waits = reason.startswith("Unterminated string") or len(self._text) - place < _LOOKAHEAD
            if waits and not last and size <= self._max_value:
                self._tried = size
                return at
            why = f"longer than {self._max_value} characters, or " if size > self._max_value else ""
            yield from self._end(f"{why}no JSON: {reason}", place)
        self._tried = 0
        if self._depth:
            self._next = "comma or end"
            yield from self._event(value, at)
        else:
            yield from self._message(value, at)
        return end

    def _message(self, message: Any, at: int) -> Iterator[Batch]:
        if not self._names.isdisjoint(message) and not _MESSAGE & message.keys() - self._names:
            yield from self._event(message, at)
            return
        yield from self._pending.take(rest=True)
        events = message.get("events")
        if isinstance(events, dict):
            events = events.get("entries")
        elif isinstance(events, list):
            events = [event.get("event") if isinstance(event, dict) else event for event in events]
        if isinstance(events, list):
            for event in events:
                yield from self._event(event, at)
            yield from self._pending.take(rest=True)
        elif "schema" not in message:
            yield from self._refuse(self._bad(f"a message without events: {shown(message)}", at, value=message))

    def _event(self, event: Any, at: int) -> Iterator[Batch]:
        self._events += 1
        word = event.get("@opcode", "insert") if isinstance(event, dict) else None
        opcode: int = _WORDS.get(word.lower(), 0) if isinstance(word, str) else 0
        try:
            if isinstance(event, dict) and not opcode:
                raise self._bad(f"{shown(word)} is no opcode", at, "@opcode", value=word)
            flags, values = self._converted(event, at)
        except BadText as e:
            self._pending.pass_over(opcode, self._key_of(event))
            yield from self._refuse(e)
        else:
            self._pending.add(opcode, flags, values)

    def _key_of(self, event: Any) -> Key:
        """As far as a bad event has one."""
        try:
            return tuple([parse(event[field.name]) for field, parse in self._parsers if field.key])
        except (ValueError, OverflowError, LookupError, TypeError):
            return None

    def _converted(self, event: Any, at: int) -> tuple[int, tuple[Any, ...]]:
        if not isinstance(event, dict):
            raise self._bad(f"{shown(event)} is no event", at, value=event)
        letters = event.get("@flags", "N")
        if not isinstance(letters, str) or letters not in FLAGS:
            raise self._bad(f"{shown(letters)} is no flag", at, "@flags", value=letters)
        for name in event.keys() - self._names:
            if not self._ignores_unknown and not name.startswith("@"):
                raise self._bad(f"{name!r} is no field of the schema", at, name, value=event[name])
        values = []
        for field, parse in self._parsers:
            value = event.get(field.name)
            try:
                values.append(None if value is None else parse(value))
            except (ValueError, OverflowError) as e:
                why = f"field {field.name!r} ({field.type}): {shown(value)} is not {e}"
                raise self._bad(why, at, field.name, field.type, value) from None
        return FLAGS[letters], tuple(values)

    def _bad(
        self, why: str, at: int, field: str | None = None, type: FieldType | None = None, value: Any = None
    ) -> BadText:
        line = self._line + self._text.count("\n", 0, at)
        return BadText(
            f"line {line}, event {self._events}: {why}", line=line, column=None, field=field, type=type, value=value
        )

    def _refuse(self, error: BadText) -> Iterator[Batch]:
        if self._on_bad is None:
            self._ended = error
            yield from self._pending.take(rest=True)
            raise error
        self.skipped += 1
        self._on_bad(error)

    def _end(self, why: str, at: int) -> Iterator[Batch]:
        self._events += 1
        self._on_bad = None
        yield from self._refuse(self._bad(why, at))


def _parser(field: Field, dates: Dates | None) -> Callable[[Any], Any]:
    """A JSON value that is not null to the field's, or ValueError with what it should have been."""
    kind = field.type
    from_text = value_parser(field, dates)
    from_json = _parsers(from_text).get(kind)
    empty = EMPTY_VALUES.get(kind)

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            return from_text(value) if value else empty
        if from_json is None:
            raise ValueError("a string")
        return from_json(value)

    return convert


def _parsers(from_text: Callable[[str], Any]) -> dict[FieldType, Callable[[Any], Any]]:
    def money(value: Any) -> Any:
        if type(value) not in (int, Decimal):
            raise ValueError("a finite decimal")
        return from_text(str(value))

    numbers = {kind: _integer(*limits) for kind, limits in TYPE_LIMITS.items()}
    numbers |= {FieldType.DOUBLE: _double, FieldType.MONEY: money}
    return numbers | {kind: _array(numbers[item]) for kind, item in ARRAY_ITEMS.items()}


def _integer(low: int, high: int) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) is int and low <= value <= high:
            return value
        raise ValueError(f"an integer from {low} to {high}")

    return convert


def _double(value: Any) -> Any:
    if type(value) not in (int, float, Decimal) and value not in ("nan", "inf", "-inf"):
        raise ValueError("a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number that a double can hold") from None


def _array(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise ValueError(f"an array of at most {MAX_ITEMS} items")
        return tuple([item(one) for one in value])

    return convert


class JsonWriter:
    """Events to bytes: in the shape `inject` one array of blocks, begun by the first and ended by `close`; in the shape
    `events` one message for each block.
    """

    def __init__(
        self, schema: Schema, *, shape: Literal["inject", "events"] = "inject", dateformat: str | None = None
    ) -> None:
        dates = None if dateformat is None else Dates(dateformat)
        self._names = schema.names
        self._shows = [_shower(field, dates) for field in schema.fields]
        self._array = shape == "inject"
        self._before = "["
        self._encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

    def write(
        self, rows: Sequence[Sequence[Any]], opcode: int | bytes = Opcode.INSERT, flags: int | bytes = 0
    ) -> bytes:
        """A block. ValueError for a moment that the date format cannot show."""
        try:
            columns = [show(column) for show, column in zip(self._shows, zip(*rows, strict=True), strict=True)]
        except OverflowError as e:
            raise ValueError(f"the block holds a moment that the date format cannot show: {e}") from None
        events = [dict(zip(self._names, row, strict=True)) for row in zip(*columns, strict=True)]
        if opcode != Opcode.INSERT:
            opcodes = [opcode] * len(rows) if isinstance(opcode, int) else opcode
            words = [Opcode(one).name.lower() for one in opcodes]
            events = [{"@opcode": word, **event} for word, event in zip(words, events, strict=True)]
        if flags:
            marks = [flags] * len(rows) if isinstance(flags, int) else flags
            events = [{"@flags": FLAG_LETTERS[EventFlag(m)], **e} for m, e in zip(marks, events, strict=True)]
        if not self._array:
            return f"{self._encode({'events': {'entries': events}})}\n".encode()
        before, self._before = self._before, ",\n"
        return f"{before}{self._encode(events)}".encode()

    def close(self) -> bytes:
        """The end of the text."""
        if not self._array:
            return b""
        return b"[]\n" if self._before == "[" else b"]\n"


def _shower(field: Field, dates: Dates | None) -> Callable[[Sequence[Any]], Sequence[Any]]:
    kind = field.type
    show = value_texts(field, dates)
    if kind is FieldType.DOUBLE:
        return lambda column: [_finite(value) for value in column]
    if kind is FieldType.ARRAY_DOUBLE:
        return lambda column: [None if value is None else [_finite(item) for item in value] for value in column]
    if kind in (FieldType.MONEY, FieldType.BLOB) or (dates is not None and kind in (FieldType.DATE, FieldType.STAMP)):
        return lambda column: [None if value is None else show(value) for value in column]
    return lambda column: column


def _finite(value: Any) -> Any:
    return value if value is None or math.isfinite(value) else repr(value)
