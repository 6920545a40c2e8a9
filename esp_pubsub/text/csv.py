"""CSV lines: `opcode,flags,field,field,...`, as SAS has them.

A column that is empty is null, or an insert where it is the opcode's; `""` is an empty text. A value in double quotes
may hold delimiters, quotes (doubled, or after a backslash) and ends of lines. A backslash before a delimiter makes it a
part of the value, in quotes or not; before anything but that, a quote or a backslash it is itself. Blanks after a
delimiter count for nothing. Lines end as they like. An update block is read as the update that it makes: its second
row, the old one, is passed over. A column that stands alone is written as `""` where it is null, for an empty line is
no row.

Reading goes by pieces: the standard library splits a piece into rows, the rows are turned into columns, and each column
is converted and checked by a few C loops. Only where that fails, the piece is gone through again value by value, which
finds the line, the column and the reason.
"""

from __future__ import annotations

import csv
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from io import StringIO
from itertools import islice
from typing import Any, Literal

from ..errors import ConfigError, SchemaError
from ..events import EventFlag, Opcode
from ..schema import Field, FieldType, Schema
from .values import (
    EMPTY,
    FLAG_LETTERS,
    FLAGS,
    OPCODE_LETTERS,
    OPCODES,
    BadText,
    Batch,
    Dates,
    Key,
    Pending,
    iso_moments,
    quoted_parser,
    shown,
    value_texts,
)

Texts = Sequence[str]

MAX_LINE = 1 << 20  # bytes; a field may have as many characters as csv.field_size_limit says, which is the process's
_PIECE = 1 << 16  # bytes taken at once: a few hundred rows, so that columns pay off and memory stays small
_NOT_CLOSED = "unexpected end of data"  # so says the standard library
_BOM = b"\xef\xbb\xbf"
_END_OF_LINE = re.compile(r"\r\n|\r|\n")
_CSV_OPCODES = OPCODES | {"": Opcode.INSERT}
_NUMBERS = set(FieldType) - {FieldType.STRING, FieldType.RSTRING, FieldType.BLOB}
_WRONG = (ValueError, ArithmeticError, LookupError, TypeError, struct.error)  # what the quick way stumbles with


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFormat:
    """What lines look like, read or written."""

    delimiter: str = ","
    opcode: Opcode | None = None
    """None: it stands in the first column. Else there is no such column, and this is what events read get."""
    flags: EventFlag | None = None
    """The same for the column of flags, in front of the fields."""
    header: int | Literal["names"] = 0
    """So many lines in front that say nothing, or one line that names the columns as the schema does."""
    keyless: bool = False
    """The lines have no column for the key (there is one key then); read, it is null."""
    dateformat: str | None = None
    """How dates and stamps are spelt, as strptime has it; None: as integers, seconds and microseconds since 1970."""
    missing_dot: bool = False
    """A number, or a moment, that is a point alone is null when read, as SAS spells a missing value."""

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter.isalnum() or self.delimiter in " \"'\\\r\n+-._[]":
            raise ConfigError(f"the delimiter {self.delimiter!r} cannot be told from values; take one such as , ; or |")
        if self.header != "names" and self.header < 0:
            raise ConfigError(f"a header has no or more lines, not {self.header}")

    def fields(self, schema: Schema) -> list[Field]:
        """The fields that have a column."""
        if not self.keyless:
            return list(schema.fields)
        if len(schema.keys) != 1:
            raise ConfigError(f"lines without a key column need a schema with one key, not {schema}")
        return [field for field in schema.fields if not field.key]

    def names(self, schema: Schema) -> list[str]:
        """The columns."""
        marks = [name for name, given in (("opcode", self.opcode), ("flags", self.flags)) if given is None]
        return marks + [field.name for field in self.fields(schema)]

    def dates(self) -> Dates | None:
        """How moments are spelt, if not as integers."""
        return None if self.dateformat is None else Dates(self.dateformat)


class CsvReader:
    """Bytes to events, fed as they come. `feed` and `close` are to be iterated to their end.

    A bad line raises BadText once all before it was given out, and ends the reading; with `on_bad` that is called
    with the error instead, the line is passed over and counted in `skipped`.
    """

    def __init__(
        self,
        schema: Schema,
        format: CsvFormat | None = None,
        *,
        block: int = 256,
        max_line: int = MAX_LINE,
        on_bad: Callable[[BadText], object] | None = None,
    ) -> None:
        self.skipped = 0
        self._format = format = format or CsvFormat()
        self._schema = schema
        self._max_line = max_line
        self._too_long_text = f"it is longer than the {max_line} bytes that it may have; perhaps a quote is not closed"
        self._on_bad = on_bad
        self._split = partial(
            csv.reader, delimiter=format.delimiter, escapechar="\\", skipinitialspace=True, strict=True
        )
        self._fields = format.fields(schema)
        self._marks = (format.opcode is None) + (format.flags is None)
        self._key = next(i for i, field in enumerate(schema.fields) if field.key)
        self._keys = [i for i, field in enumerate(self._fields) if field.key]
        dates = format.dates()
        self._parsers = [_parser(field, dates, format.missing_dot) for field in self._fields]
        self._columns = [
            _column_parser(field, dates, parse) for field, parse in zip(self._fields, self._parsers, strict=True)
        ]
        self._backslashes = re.compile(rf'(\\[\\"{re.escape(format.delimiter)}])|\\')
        quoted = rf'(?:\A|(?<=[{re.escape(format.delimiter)}\r\n])) *"([^"\\]*(?:(?:""|\\.)[^"\\]*)*)"'
        self._quotations = re.compile(quoted, re.DOTALL)
        self._schema_fits = format.opcode is not None and all(
            field.type in (FieldType.STRING, FieldType.RSTRING) for field in self._fields
        )
        self._header = 1 if format.header == "names" else format.header
        self._pending = Pending(schema, block)
        self._rest = bytearray()  # of the input, not read yet
        self._open = False  # it begins with a row that has a quote that is not closed
        self._quoted = False  # there came quotes behind it
        self._dropping = False  # it is inside of a line that is too long
        self._begun = False
        self._line = 0  # how many lines were read
        self._ended: BadText | None = None

    def feed(self, data: bytes) -> Iterator[Batch]:
        """More of the input; gives out the blocks that are full now."""
        for at in range(0, len(data), _PIECE):
            if self._ended is not None:
                raise self._ended
            yield from self._take(bytes(data[at : at + _PIECE]))

    def close(self) -> Iterator[Batch]:
        """The end of the input; gives out the rest."""
        if self._ended is not None:
            raise self._ended
        rest, self._rest = bytes(self._rest), bytearray()
        if not self._dropping:
            yield from self._parse(rest, last=True)
        yield from self._pending.take(rest=True)

    def _take(self, piece: bytes) -> Iterator[Batch]:
        rest, before = self._rest, max(len(self._rest) - 1, 0)
        rest += piece
        self._quoted = self._quoted or b'"' in piece
        # a carriage return at the very end may be half of an end of line
        end = max(rest.rfind(b"\n", before), rest.rfind(b"\r", before, len(rest) - 1)) + 1
        if end and (self._quoted or not self._open):
            lines = bytes(rest[:end])
            del rest[:end]
            self._open = self._quoted = False
            if self._dropping:
                lines = lines[self._first_line(lines) :]
                self._dropping = False
            yield from self._parse(lines)
        yield from self._bound()

    def _first_line(self, data: bytes | bytearray) -> int:
        """Its length; it counts as read."""
        text = data.decode("latin-1")
        found = _END_OF_LINE.search(text)
        self._line += 1
        return found.end() if found else len(text)

    def _bound(self) -> Iterator[Batch]:
        """A line that has no end in sight is a bad one."""
        while len(self._rest) - self._rest.endswith(b"\r") > self._max_line and not self._dropping:
            yield from self._refuse(_bad_line(self._line + 1, self._too_long_text))
            if self._open:
                self._open = False
                rest = bytes(self._rest)
                rest = rest[self._first_line(rest) :]
                end = max(rest.rfind(b"\n"), rest.rfind(b"\r", 0, len(rest) - 1)) + 1
                self._rest = bytearray(rest[end:])
                yield from self._parse(rest[:end])
            else:
                self._dropping = True
        if self._dropping:
            del self._rest[:-1]  # it may be half of an end of line

    def _parse(self, data: bytes, *, last: bool = False) -> Iterator[Batch]:
        """Whole lines, though perhaps not whole rows."""
        if not self._begun and data:
            self._begun = True
            data = data.removeprefix(_BOM)
        try:
            text, clean = data.decode(), True
        except UnicodeDecodeError:
            text, clean = data.decode(errors="surrogateescape"), False
        if self._header:
            text = self._behind_header(text)
        marked = self._marked(text)
        reader = self._split(StringIO(marked, newline=""))
        try:
            rows = list(reader) if len(data) <= self._max_line else None
        except csv.Error:
            rows = None
        if rows is None:
            yield from self._parse_broken(text, marked, clean, last)
            return
        yield from self._convert(rows, partial(self._starts, marked), clean)
        self._line += reader.line_num

    def _marked(self, text: str) -> str:
        """As the standard library can read it and lose nothing: only backslashes that escape, empty texts spelt out."""
        if "\\" in text:
            text = self._backslashes.sub(lambda m: m[1] or "\\\\", text)
        if '"' in text and '""' in text:  # the first look costs nothing
            text = self._quotations.sub(lambda m: m[0] if m[1] else f'"{EMPTY}"', text)
        return text

    def _starts(self, marked: str) -> list[int]:
        """How many lines stand in front of each row."""
        reader = self._split(StringIO(marked, newline=""))
        ends = [reader.line_num for _ in reader]
        return [0, *ends]

    def _behind_header(self, text: str) -> str:
        while self._header and text:
            found = _END_OF_LINE.search(text)
            line, text = (text[: found.start()], text[found.end() :]) if found else (text, "")
            if self._format.header == "names":
                self._header += line == self._schema.text
                if not self._header > 1:
                    self._check_names(line)
            self._header -= 1
            self._line += 1
        return text

    def _check_names(self, line: str) -> None:
        expected = self._format.names(self._schema)
        try:
            names = next(self._split([line]), [])
        except csv.Error:
            names = [line]
        if [name.strip() for name in names] != expected:
            self._ended = BadText(
                f"line 1: the header names {shown(self._format.delimiter.join(names))}, "
                f"the columns are {self._format.delimiter.join(expected)}",
                line=1, column=None, field=None, type=None, value=line,
            )  # fmt: skip
            raise self._ended

    def _parse_broken(self, text: str, marked: str, clean: bool, last: bool) -> Iterator[Batch]:
        """Row by row: somewhere a quote is not closed (yet), or is followed by something."""
        lines, given, at = list(StringIO(marked, newline="")), list(StringIO(text, newline="")), 0
        while at < len(lines):
            reader = self._split(islice(lines, at, None))
            rows, starts, error = [], [0], ""
            try:
                for row in reader:
                    if self._too_long(given[at + starts[-1] : at + reader.line_num]):
                        error = self._too_long_text
                        break
                    rows.append(row)
                    starts.append(reader.line_num)
            except csv.Error as e:
                error = str(e)
                if error != _NOT_CLOSED and self._too_long(given[at + starts[-1] : at + reader.line_num]):
                    error = self._too_long_text
            self._line += at
            yield from self._convert(rows, starts.copy, clean)
            self._line -= at
            at += starts[-1]
            if not error:
                break
            if error == _NOT_CLOSED and not last:
                self._quoted = b'"' in self._rest
                self._rest[:0] = "".join(given[at:]).encode(errors="surrogateescape")
                self._open = True
                break
            why = "a quote that opens in it is not closed" if error == _NOT_CLOSED else error
            yield from self._refuse(_bad_line(self._line + at + 1, why, value=given[at]))
            at += 1  # what stands behind its first line may be in order
        self._line += at

    def _too_long(self, lines: Sequence[str]) -> bool:
        text = "".join(lines)
        return len(text) * 4 > self._max_line < len(text.rstrip("\r\n").encode(errors="surrogateescape"))

    def _convert(self, rows: list[list[str]], starts: Callable[[], Sequence[int]], clean: bool) -> Iterator[Batch]:
        if not rows:
            return
        if not (clean and self._by_column(rows)):
            numbered = self._events_only(rows, starts())
            if len(numbered) == len(rows) or not (clean and numbered and self._by_column([row for row, _ in numbered])):
                yield from self._by_value(numbered)
        yield from self._pending.take()

    def _by_column(self, rows: list[list[str]]) -> bool:
        """All rows at once, or nothing if there is anything special about one of them."""
        if self._schema_fits and any(map(self._is_schema, rows)):
            return False
        try:
            columns: list[Any] = list(zip(*rows, strict=True))
            if len(columns) != self._marks + len(self._fields):
                return False
            opcodes, flags = self._mark_columns(columns[: self._marks], len(rows))
            values = [parse(column) for parse, column in zip(self._columns, columns[self._marks :], strict=True)]
        except _WRONG:
            return False
        if self._format.keyless:
            values.insert(self._key, (None,) * len(rows))
        self._pending.extend(zip(*values, strict=True), opcodes, flags)
        return True

    def _mark_columns(self, columns: list[Texts], count: int) -> tuple[bytes, bytes]:
        opcode, flags = self._format.opcode, self._format.flags
        return (
            bytes(map(_CSV_OPCODES.__getitem__, columns[0])) if opcode is None else bytes([opcode]) * count,
            bytes(map(FLAGS.__getitem__, columns[-1])) if flags is None else bytes([flags]) * count,
        )

    def _events_only(self, rows: list[list[str]], starts: Sequence[int]) -> list[tuple[list[str], int]]:
        """With their line; no empty lines, and no lines that repeat the schema."""
        return [
            (row, self._line + start + 1)
            for row, start in zip(rows, starts, strict=False)
            if row and not self._is_schema(row)
        ]

    def _is_schema(self, row: list[str]) -> bool:
        return self._format.delimiter.join(row) == self._schema.text

    def _by_value(self, rows: list[tuple[list[str], int]]) -> Iterator[Batch]:
        for row, line in rows:
            opcode: int = _CSV_OPCODES.get(row[0].strip(), 0) if self._format.opcode is None else self._format.opcode
            try:
                if not opcode:
                    raise self._wrong_opcode(row, line)
                flags, values = self._row(row, line)
            except BadText as e:
                yield from self._refuse(e, opcode, self._key_of(row))
                continue
            self._pending.add(opcode, flags, values)

    def _key_of(self, row: list[str]) -> Key:
        """As far as a bad row has one."""
        if self._format.keyless:
            return (None,)
        try:
            return tuple([self._parsers[i](row[self._marks + i]) for i in self._keys])
        except (ValueError, IndexError):
            return None

    def _row(self, row: list[str], line: int) -> tuple[int, tuple[Any, ...]]:
        flags: int = 0 if self._format.flags is None else self._format.flags
        if len(row) != self._marks + len(self._fields):
            raise _bad_line(line, self._wrong_count(len(row)), value=row)
        if self._format.flags is None:
            if (text := row[self._marks - 1].strip()) not in FLAGS:
                why = f"column {self._marks}: {shown(text)} is no flag; there are {', '.join(FLAG_LETTERS.values())}"
                raise _bad_line(line, why, column=self._marks, field="flags", value=text)
            flags = FLAGS[text]
        values = []
        for at, (field, parse) in enumerate(zip(self._fields, self._parsers, strict=True), self._marks):
            try:
                values.append(parse(row[at]))
            except ValueError as e:
                why = f"column {at + 1}, field {field.name!r} ({field.type}): {shown(row[at])} is not {e}"
                if line == 1 and self._format.header == 0:
                    why += "; if this line names the columns, say so (header)"
                raise _bad_line(line, why, at + 1, field.name, field.type, row[at]) from None
        if self._format.keyless:
            values.insert(self._key, None)
        return flags, tuple(values)

    def _wrong_count(self, columns: int) -> str:
        names, delimiter = self._format.names(self._schema), self._format.delimiter
        if columns == 1:
            return f"it has 1 column, not {len(names)} ({delimiter.join(names)}); is {delimiter!r} right (delimiter)?"
        return f"it has {columns} columns, not {len(names)} ({delimiter.join(names)})"

    def _wrong_opcode(self, row: list[str], line: int) -> BadText:
        text = self._format.delimiter.join(row)
        try:
            other = Schema(text)
        except SchemaError:
            letters = ", ".join(OPCODE_LETTERS.values())
            why = f"column 1: {shown(row[0])} is no opcode; there are {letters}, and formats without that column"
            return _bad_line(line, why, column=1, field="opcode", value=row[0])
        return _bad_line(line, f"the schema that stands here is {other}, not {self._schema}", value=text)

    def _refuse(self, error: BadText, opcode: int = 0, key: Key = None) -> Iterator[Batch]:
        self._pending.pass_over(opcode, key)
        if self._on_bad is None:
            self._ended = error
            yield from self._pending.take(rest=True)
            raise error
        self.skipped += 1
        self._on_bad(error)


def _bad_line(
    line: int,
    why: str,
    column: int | None = None,
    field: str | None = None,
    type: FieldType | None = None,
    value: Any = None,
) -> BadText:
    return BadText(f"line {line}: {why}", line=line, column=column, field=field, type=type, value=value)


def _parser(field: Field, dates: Dates | None, missing_dot: bool) -> Callable[[str], Any]:
    parse = quoted_parser(field, dates)
    if missing_dot and field.type in _NUMBERS:
        return lambda text: None if text.strip() == "." else parse(text)
    return parse


def _column_parser(field: Field, dates: Dates | None, parse: Callable[[str], Any]) -> Callable[[Texts], Sequence[Any]]:
    """A column of texts to its values, or any of the errors in _WRONG, which only say that a closer look is due."""
    kind = field.type
    if kind in (FieldType.STRING, FieldType.RSTRING):
        return _string_column
    if kind is FieldType.DOUBLE:
        return _number_column(float, b"0123456789+-.eE", parse)
    if kind is FieldType.MONEY:
        return _number_column(Decimal, b"0123456789+-.", parse, longest=90)
    if kind is FieldType.INT32:
        return _number_column(int, b"0123456789+-", parse, "i")
    if kind is FieldType.INT64 or (dates is None and kind in (FieldType.DATE, FieldType.STAMP)):
        return _number_column(int, b"0123456789+-", parse, "q")
    if kind in (FieldType.DATE, FieldType.STAMP) and dates is not None and dates.iso is not None:
        return _iso_column(dates.iso[0], kind is FieldType.STAMP, parse)
    return lambda texts: list(map(parse, texts))


def _string_column(texts: Texts) -> Sequence[Any]:
    if EMPTY in "".join(texts):
        return ["" if text == EMPTY else text or None for text in texts]
    return texts if all(texts) else [text or None for text in texts]


def _number_column(
    convert: Callable[[str], Any], letters: bytes, parse: Callable[[str], Any], code: str = "", longest: int = 0
) -> Callable[[Texts], Sequence[Any]]:
    def column(texts: Texts) -> Sequence[Any]:
        # Python takes more for a number than a file may hold: 1_000, other alphabets' digits, blanks.
        if "".join(texts).encode().translate(None, letters) or (longest and max(map(len, texts)) > longest):
            return list(map(parse, texts))
        if all(texts):
            values = present = list(map(convert, texts))
        else:
            values = [convert(text) if text else None for text in texts]
            present = [value for value in values if value is not None]
        if code:
            struct.pack(f"{len(present)}{code}", *present)  # the quickest look at the limits
        return values

    return column


def _iso_column(sep: str, stamps: bool, parse: Callable[[str], Any]) -> Callable[[Texts], Sequence[Any]]:
    def column(texts: Texts) -> Sequence[Any]:
        try:
            return iso_moments(texts, sep, stamps)
        except (ValueError, TypeError):
            return list(map(parse, texts))

    return column


class CsvWriter:
    """Events to bytes."""

    def __init__(
        self,
        schema: Schema,
        format: CsvFormat | None = None,
        *,
        include_schema: Literal["never", "once", "pereventblock"] = "never",
    ) -> None:
        self._format = format = format or CsvFormat()
        self._fields = format.fields(schema)
        self._key = next(i for i, field in enumerate(schema.fields) if field.key)
        dates = format.dates()
        self._shows = [_column_texts(field, value_texts(field, dates), format.delimiter) for field in self._fields]
        self._first = schema.text + "\n" if include_schema == "once" else ""
        if format.header == "names":
            names = [f'"{name}"' if format.delimiter in name else name for name in format.names(schema)]
            self._first += format.delimiter.join(names) + "\n"
        self._each = schema.text + "\n" if include_schema == "pereventblock" else ""

    def write(
        self, rows: Sequence[Sequence[Any]], opcode: int | bytes = Opcode.INSERT, flags: int | bytes = 0
    ) -> bytes:
        """The lines of a block. ValueError for a moment that the date format cannot show."""
        columns: list[Any] = list(zip(*rows, strict=True))
        if self._format.keyless and columns:
            del columns[self._key]
        try:
            shows = [show(column) for show, column in zip(self._shows, columns, strict=True)]
        except OverflowError as e:
            raise ValueError(f"the block holds a moment that the date format cannot show: {e}") from None
        if self._format.flags is None:
            shows.insert(0, _letters(flags, FLAG_LETTERS, len(rows)))
        if self._format.opcode is None:
            shows.insert(0, _letters(opcode, OPCODE_LETTERS, len(rows)))
        if len(shows) == 1:
            shows = [[text or '""' for text in shows[0]]]  # a line with nothing in it is none
        first, self._first = self._first, ""
        lines = "\n".join(map(self._format.delimiter.join, zip(*shows, strict=True)))
        return f"{first}{self._each}{lines}\n".encode() if rows else first.encode()


def _letters(marks: int | bytes, table: Any, count: int) -> Texts:
    return [table[marks]] * count if isinstance(marks, int) else [table[mark] for mark in marks]


def _column_texts(field: Field, show: Callable[[Any], str], delimiter: str) -> Callable[[Sequence[Any]], Texts]:
    special = re.compile(rf'[{re.escape(delimiter)}"\\\r\n]|^ |^$|^\ufeff')  # the last would be a byte order mark

    def quoted(text: str) -> str:
        if not special.search(text):
            return text
        text = text.replace("\\", "\\\\").replace('"', '""')
        return f'"{text}"'

    def by_value(column: Sequence[Any]) -> Texts:
        return ["" if value is None else quoted(show(value)) for value in column]

    def numbers(column: Sequence[Any]) -> Texts:
        shows = list(map(quick, column))
        joined = "".join(shows)
        return shows if "None" not in joined and "E" not in joined else by_value(column)

    def strings(column: Sequence[Any]) -> Texts:
        if None in column or not all(column):
            return by_value(column)
        joined = "".join(column)
        return by_value(column) if any(letter in joined for letter in letters) else column

    letters = (delimiter, '"', "\\", "\r", "\n", " ", "\ufeff")
    quick = repr if field.type is FieldType.DOUBLE else str
    if field.type in (FieldType.STRING, FieldType.RSTRING):
        return strings
    return numbers if field.type in (FieldType.DOUBLE, FieldType.MONEY) or show is str else by_value
