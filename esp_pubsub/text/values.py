"""What every type, opcode and flag looks like as text, and what becomes of events that were read."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import repeat
from operator import floordiv, sub
from typing import Any, NamedTuple

from ..errors import ConfigError, EspError
from ..events import EventFlag, Opcode
from ..schema import Field, FieldType, Schema
from ..wire.rows import money_text

EMPTY = "\udc00"
"""Stands in CSV for a text that was given and is empty, where an empty one is null; no UTF-8 can hold it."""

TYPE_LIMITS = {
    FieldType.INT32: (-(1 << 31), (1 << 31) - 1),
    FieldType.INT64: (-(1 << 63), (1 << 63) - 1),
    FieldType.DATE: (-(1 << 63), (1 << 63) - 1),
    FieldType.STAMP: (-(1 << 63), (1 << 63) - 1),
}
Key = tuple[Any, ...] | None

MAX_ITEMS = 1 << 16  # of an array, as the wire has it
ARRAY_ITEMS = {
    FieldType.ARRAY_INT32: FieldType.INT32,
    FieldType.ARRAY_INT64: FieldType.INT64,
    FieldType.ARRAY_DOUBLE: FieldType.DOUBLE,
}
EMPTY_VALUES: dict[FieldType, Any] = {FieldType.STRING: "", FieldType.RSTRING: "", FieldType.BLOB: b""}
"""What a text that was given and is empty means; for all others it is null."""
OPCODE_LETTERS = {
    Opcode.INSERT: "I",
    Opcode.UPDATE: "U",
    Opcode.DELETE: "D",
    Opcode.UPSERT: "P",
    Opcode.SAFEDELETE: "S",
    Opcode.UPDATEBLOCK: "UB",
}
OPCODES = {spelt: opcode for opcode, letters in OPCODE_LETTERS.items() for spelt in (letters, letters.lower())}
FLAG_LETTERS = {
    EventFlag.NORMAL: "N",
    EventFlag.PARTIAL: "P",
    EventFlag.RETENTION: "R",
    EventFlag.PARTIAL | EventFlag.RETENTION: "PR",
}
FLAGS = {spelt: flags for flags, letters in FLAG_LETTERS.items() for spelt in (letters, letters.lower())}

_EPOCH = datetime(1970, 1, 1)
_SECOND, _MICROSECOND = timedelta(seconds=1), timedelta(microseconds=1)
_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # among them what the error handler `surrogateescape` leaves
_ISO = {f"%Y-%m-%d{sep}%H:%M:%S{f}": (sep, span) for sep in " T" for f, span in (("", "auto"), (".%f", "microseconds"))}
_GLIBC = {"%k": "%H", "%l": "%I", "%e": "%d", "%T": "%H:%M:%S", "%D": "%m/%d/%y", "%R": "%H:%M", "%F": "%Y-%m-%d"}
_DIRECTIVE = re.compile("%.", re.DOTALL)


class BadText(EspError):
    """A line of text that is no event. What does not apply is None."""

    line: int
    column: int | None
    field: str | None
    type: FieldType | None
    value: Any


class Batch(NamedTuple):
    """Events that were read, as `inject(rows, opcode=..., flags=...)` takes them fastest."""

    rows: list[tuple[Any, ...]]
    opcode: Opcode | bytes = Opcode.INSERT
    flags: int | bytes = 0


class Pending:
    """Events read and not yet given out. Where blocks are cut follows from the events alone, never from how the input
    was fed, so that every member of a failover group cuts the same ones.
    """

    def __init__(self, schema: Schema, block: int) -> None:
        if block < 1:
            raise ConfigError(f"a block has at least one event, not {block}")
        self._block = block
        self._keys = [i for i, field in enumerate(schema.fields) if field.key]
        self.rows: list[tuple[Any, ...]] = []
        self.opcodes = bytearray()
        self.flags = bytearray()
        self._awaits_old = False  # the row before was the new one of an update block
        self._of: Key = None
        self._sure = True

    def add(self, opcode: int, flags: int, row: tuple[Any, ...]) -> None:
        """One more event. Of an update block only the new row counts, as an update."""
        special = self._awaits_old or opcode == Opcode.UPDATEBLOCK
        if special and self._is_old(opcode, tuple([row[i] for i in self._keys])):
            return
        self.rows.append(row)
        self.opcodes.append(Opcode.UPDATE if opcode == Opcode.UPDATEBLOCK else opcode)
        self.flags.append(flags)

    def extend(self, rows: Iterable[tuple[Any, ...]], opcodes: bytes, flags: bytes) -> None:
        """Many at once."""
        if self._awaits_old or Opcode.UPDATEBLOCK in opcodes:
            for opcode, flag, row in zip(opcodes, flags, rows, strict=True):
                self.add(opcode, flag, row)
        else:
            self.rows += rows
            self.opcodes += opcodes
            self.flags += flags

    def pass_over(self, opcode: int, key: Key) -> None:
        """A bad row is one of a pair too. `opcode`: 0 if that is what is bad; `key`: None if it cannot be told."""
        self._is_old(opcode, key)

    def _is_old(self, opcode: int, key: Key) -> bool:
        """The row behind a new one, whatever its opcode, unless it has another key: then its old one did not come.
        Behind a row of no opcode, which may have been a new one, only one of an update block is taken for its old one.
        """
        due, self._awaits_old = self._awaits_old and (self._sure or opcode == Opcode.UPDATEBLOCK), False
        if due and (self._of is None or key is None or key == self._of):
            return True
        if opcode == Opcode.UPDATEBLOCK or (opcode == 0 and key is not None):
            self._awaits_old, self._of, self._sure = True, key, opcode != 0
        return False

    def take(self, *, rest: bool = False) -> list[Batch]:
        """All that is full, with `rest` also what is not."""
        size, rows, opcodes, flags = self._block, self.rows, self.opcodes, self.flags
        end = len(rows) if rest else len(rows) - len(rows) % size
        if not end:
            return []
        self.rows, self.opcodes, self.flags = rows[end:], opcodes[end:], flags[end:]
        batches = []
        for at in range(0, end, size):
            to = min(at + size, end)
            opcode, flag = opcodes[at], flags[at]
            batches.append(
                Batch(
                    rows[at:to],
                    Opcode(opcode) if opcodes.count(opcode, at, to) == to - at else bytes(opcodes[at:to]),
                    flag if flags.count(flag, at, to) == to - at else bytes(flags[at:to]),
                )
            )
        return batches


def shown(value: Any) -> str:
    """A value as a message has it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Dates:
    """Moments as text: integers, or by a format of strptime, to the microsecond.

    A stamp may have a fraction behind its seconds although the format does not name one; written, it has one if it is
    not whole. Moments without a time zone are UTC.
    """

    def __init__(self, dateformat: str) -> None:
        plain = _DIRECTIVE.sub(lambda m: _GLIBC.get(m[0], m[0]), dateformat)
        try:
            sample = datetime(2026, 11, 18, 21, 30, 40, tzinfo=UTC).strftime(plain)
            datetime.strptime(sample, plain)
        except ValueError as e:
            raise ConfigError(f"the date format {dateformat!r} cannot be read back: {e}") from None
        self._plain = plain
        named = "%f" in _DIRECTIVE.findall(plain)
        self._fraction = plain if named else _DIRECTIVE.sub(lambda m: "%S.%f" if m[0] == "%S" else m[0], plain)
        self._seconds_last = plain.endswith("%S") and self._fraction != plain
        self.iso = _ISO.get(plain)
        self._cached = lru_cache(4_096)(self._parse)

    def micros(self, text: str) -> int:
        """Microseconds since 1970."""
        head, dot, tail = text.rpartition(".")
        if self._seconds_last and dot and len(tail) <= 6 and tail.isascii() and tail.isdecimal():
            with suppress(ValueError):  # then the point is one of the format's own
                return self._cached(head) + int(tail.ljust(6, "0"))  # stamps come by the second: most are parsed
        return self._cached(text)

    def _parse(self, text: str) -> int:
        try:
            when = datetime.strptime(text, self._plain)
        except ValueError:
            when = datetime.strptime(text, self._fraction)
        if when.tzinfo is not None:
            when = when.astimezone(UTC).replace(tzinfo=None)
        return (when - _EPOCH) // _MICROSECOND

    def text(self, micros: int) -> str:
        """The moment, in this format. OverflowError beyond the years 1 to 9999."""
        when = _EPOCH + timedelta(microseconds=micros)
        if self.iso is not None:
            return when.isoformat(*self.iso)
        return when.replace(tzinfo=UTC).strftime(self._fraction if when.microsecond else self._plain)


def value_parser(field: Field, dates: Dates | None) -> Callable[[str], Any]:
    """One text to its value, or ValueError with what it should have been. An empty text is null."""
    parse = _parsers(dates)[field.type]
    if field.type in (FieldType.STRING, FieldType.RSTRING):
        return lambda text: parse(text) if text else None
    return lambda text: parse(text.strip()) if text else None


def quoted_parser(field: Field, dates: Dates | None) -> Callable[[str], Any]:
    """The same for CSV, where EMPTY may stand for an empty text."""
    parse = value_parser(field, dates)
    empty = EMPTY_VALUES.get(field.type)
    return lambda text: parse(text) if text != EMPTY else empty


def _parsers(dates: Dates | None) -> dict[FieldType, Callable[[str], Any]]:
    whole = {kind: _integer(*limits) for kind, limits in TYPE_LIMITS.items()}
    parsers: dict[FieldType, Callable[[str], Any]] = {
        **whole,
        FieldType.DOUBLE: _double,
        FieldType.STRING: _string,
        FieldType.RSTRING: _string,
        FieldType.MONEY: _money,
        FieldType.BLOB: _blob,
    }
    if dates is None:
        parsers |= {FieldType.DATE: _since_1970("seconds"), FieldType.STAMP: _since_1970("microseconds")}
    else:
        parsers |= {FieldType.DATE: _date(dates), FieldType.STAMP: _stamp(dates)}
    return parsers | {kind: _array(parsers[item]) for kind, item in ARRAY_ITEMS.items()}


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if _INTEGER.fullmatch(text) and low <= int(text) <= high:
            return int(text)
        raise ValueError(f"an integer from {low} to {high}")

    return parse


def _since_1970(unit: str) -> Callable[[str], int]:
    integer = _integer(*TYPE_LIMITS[FieldType.STAMP])

    def parse(text: str) -> int:
        try:
            return integer(text)
        except ValueError as e:
            raise ValueError(f"{e}, {unit} since 1970; for another spelling give its format (dateformat)") from None

    return parse


def _double(text: str) -> float:
    try:
        if text.isascii() and "_" not in text:
            return float(text)
    except ValueError:
        pass
    raise ValueError("a number")


def _string(text: str) -> str:
    if _NOT_UTF8.search(text):
        raise ValueError("UTF-8")
    return text


def _money(text: str) -> Decimal:
    try:
        value = Decimal(text)
        if text.isascii() and "_" not in text and money_text(value):
            return value
    except (InvalidOperation, ValueError):
        pass
    raise ValueError("a finite decimal of at most 96 digits")


def _blob(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise ValueError("base64") from None


def _date(dates: Dates) -> Callable[[str], int]:
    stamp = _stamp(dates)

    def parse(text: str) -> int:
        seconds, rest = divmod(stamp(text), 1_000_000)
        if rest:
            raise ValueError("a date in whole seconds")
        return seconds

    return parse


def _stamp(dates: Dates) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return dates.micros(text)
        except (ValueError, OverflowError):
            raise ValueError("a moment in the date format") from None

    return parse


def _array(item: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        if text[:1] != "[" or text[-1:] != "]" or len(text) < 2:
            raise ValueError("an array such as [1;2;3]")
        texts = text[1:-1].split(";") if text != "[]" else []
        if len(texts) > MAX_ITEMS:
            raise ValueError(f"an array of at most {MAX_ITEMS} items")
        try:
            return tuple([item(t.strip()) for t in texts])
        except ValueError as e:
            raise ValueError(f"an array, of which every item is {e}") from None

    return parse


def iso_moments(texts: Sequence[str], sep: str, stamps: bool) -> list[int]:
    """Moments of the shape 2026-11-18T20:15:00, in microseconds and with a fraction where they are stamps, else in
    seconds. ValueError or TypeError if any of them may be something else.
    """
    if "".join(texts).encode().translate(None, b"0123456789-:." + sep.encode()):
        raise ValueError
    if min(map(len, texts)) < 19 or max(map(len, texts)) > (26 if stamps else 19):
        raise ValueError
    spans = map(sub, map(datetime.fromisoformat, texts), repeat(_EPOCH))
    return list(map(floordiv, spans, repeat(_MICROSECOND if stamps else _SECOND)))


def value_texts(field: Field, dates: Dates | None) -> Callable[[Any], str]:
    """One value that is not null to its text."""
    kind = field.type
    if kind in ARRAY_ITEMS:
        return lambda value: f"[{';'.join(map(repr, value))}]"
    if kind is FieldType.MONEY:
        return lambda value: format(value, "f")
    if kind is FieldType.BLOB:
        return lambda value: b64encode(value).decode()
    if kind is FieldType.DOUBLE:
        return repr
    if dates is not None and kind in (FieldType.DATE, FieldType.STAMP):
        unit = 1_000_000 if kind is FieldType.DATE else 1
        return lambda value: dates.text(value * unit)
    return str
