"""CSV: every type both ways, every slip found by line and column, whatever the pieces it comes in."""

import tracemalloc
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_pubsub.encode import Encoder
from esp_pubsub.errors import ConfigError, EspError
from esp_pubsub.events import EventFlag, Opcode
from esp_pubsub.schema import Schema
from esp_pubsub.text import BadText, Batch, CsvFormat, CsvReader, CsvWriter
from esp_pubsub.wire.rows import codec

EVERY = Schema(
    "i*:int32,l:int64,d:double,s:string,r:rstring,t:date,u:stamp,m:money,b:blob,"
    "ai:array(i32),al:array(i64),ad:array(dbl)"
)
TRADE = Schema("id*:int64,symbol:string,price:double")
PLAIN: dict[str, Any] = {"opcode": Opcode.INSERT, "flags": EventFlag.NORMAL}
I32, I64 = 1 << 31, 1 << 63
ISO = "%Y-%m-%d %H:%M:%S"
SECOND = 1_000_000
AT = 1_795_032_900  # 2026-11-18 20:15:00


def fmt(**settings: Any) -> CsvFormat:
    return CsvFormat(**settings)


def read(schema: Schema, text: bytes | str, format: CsvFormat | None = None, **settings: Any) -> list[Batch]:
    reader = CsvReader(schema, format, **settings)
    data = text.encode() if isinstance(text, str) else text
    return [*reader.feed(data), *reader.close()]


def read_until_bad(reader: CsvReader, text: bytes | str) -> tuple[list[tuple[Any, ...]], BadText]:
    """The rows given out in front of the error, and the error."""
    rows: list[tuple[Any, ...]] = []
    with pytest.raises(BadText) as caught:
        for part in (lambda: reader.feed(text.encode() if isinstance(text, str) else text), reader.close):
            for batch in part():
                rows += batch.rows
    return rows, caught.value


BOTH_WAYS: list[tuple[str, dict[str, Any], str, str, list[tuple[Any, ...]]]] = [
    # what it shows, the format, one field's type, the text of the field, its values
    ("int32", {}, "int32", f"{I32 - 1}\n{-I32}\n0\n\n", [I32 - 1, -I32, 0, None]),
    ("int64", {}, "int64", f"{I64 - 1}\n{-I64}\n\n", [I64 - 1, -I64, None]),
    ("double", {}, "double", "0.1\n-0.0\n1e+300\n5e-324\ninf\n-inf\n\n",
        [0.1, -0.0, 1e300, 5e-324, *map(float, ("inf", "-inf")), None]),
    ("string", {}, "string", 'plain\ntwo words\nüñ価\n""\n\n', ["plain", "two words", "üñ価", "", None]),
    ("quoted", {}, "string", '"a,b"\n"say ""hi"""\n"two\nlines"\n"a\rb"\n"c\r\nd"\n',
        ["a,b", 'say "hi"', "two\nlines", "a\rb", "c\r\nd"]),
    ("blanks", {}, "string", '" in front"\n" "\nbehind \n', [" in front", " ", "behind "]),
    ("backslashes", {}, "rstring", '"C:\\\\dir"\n"\\\\"\n"\\\\""x"\n', ["C:\\dir", "\\", '\\"x']),
    ("the word None", {}, "string", "None\n\n", ["None", None]),
    ("date", {}, "date", "1760000000\n-1\n\n", [1_760_000_000, -1, None]),
    ("stamp", {}, "stamp", "1760000000000001\n-1\n\n", [1_760_000_000_000_001, -1, None]),
    ("money", {}, "money", "12.5\n-0.000000001\n123456789012345678901234567890.12\n\n", [
        Decimal("12.5"), Decimal("-0.000000001"), Decimal("123456789012345678901234567890.12"), None]),
    ("small money", {}, "money", "0.000000001\n", [Decimal("1E-9")]),
    ("blob", {}, "blob", 'AP8=\n""\n\n', [b"\0\xff", b"", None]),
    ("array of int32", {}, "array(i32)", f"[1;-2;{I32 - 1}]\n[]\n\n", [(1, -2, I32 - 1), (), None]),
    ("array of int64", {}, "array(i64)", f"[{-I64}]\n[1;2;3]\n", [(-I64,), (1, 2, 3)]),
    ("array of doubles", {}, "array(dbl)", "[0.1;1e+300;inf]\n[]\n", [(0.1, 1e300, float("inf")), ()]),
    ("an array under its delimiter", {"delimiter": ";"}, "array(i32)", '"[1;2]"\n[3]\n', [(1, 2), (3,)]),
    ("tabs", {"delimiter": "\t"}, "string", 'a,b\n"c\td"\n', ["a,b", "c\td"]),
    ("iso date", {"dateformat": ISO}, "date", "2026-11-18 20:15:00\n1969-12-31 23:59:59\n\n", [AT, -1, None]),
    ("iso stamp", {"dateformat": ISO}, "stamp",
        "2026-11-18 20:15:00.000001\n2026-11-18 20:15:00\n0001-01-01 00:00:00\n",
        [
        AT * SECOND + 1, AT * SECOND, -62_135_596_800 * SECOND]),
    ("T stamp", {"dateformat": "%Y-%m-%dT%H:%M:%S.%f"}, "stamp",
        "2026-11-18T20:15:00.120000\n2026-11-18T20:15:00.000000\n",
        [
        1_795_032_900_120_000, AT * SECOND]),
    ("dense stamp", {"dateformat": "%Y%m%dT%H:%M:%S.%f"}, "stamp", "20261118T20:15:00.120000\n",
        [1_795_032_900_120_000]),
    ("fraction not named", {"dateformat": "%d.%m.%Y %H:%M:%S"}, "stamp",
        "18.11.2026 20:15:00.000001\n18.11.2026 20:15:00\n",
        [
        AT * SECOND + 1, AT * SECOND]),
    ("fraction in the middle", {"dateformat": "%H:%M:%S %d/%m/%Y"}, "stamp", "20:15:00.000001 18/11/2026\n",
        [AT * SECOND + 1]),
    ("a point of its own", {"dateformat": "%Y%m%d.%H%M%S"}, "stamp", "20261118.201500\n20261118.201500.500000\n",
        [AT * SECOND, AT * SECOND + 500_000]),
    ("points in the hour", {"dateformat": "%Y-%m-%d %H.%M.%S"}, "date", "2026-11-18 20.15.00\n", [AT]),
    ("hours as glibc has them", {"dateformat": "%d%b%y:%k:%M:%S"}, "date", "18Nov26:20:15:00\n", [AT]),
    ("a delimiter in a date", {"dateformat": "%d,%m,%Y"}, "date", '"18,11,2026"\n', [1_794_960_000]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "kind", "texts", "values"), [v[1:] for v in BOTH_WAYS], ids=[v[0] for v in BOTH_WAYS]
)
def test_every_type_is_read_and_written_the_same(settings: Any, kind: str, texts: str, values: list[Any]) -> None:
    schema, format = Schema(f"k*:int32,v:{kind}"), fmt(**PLAIN, **settings)
    rows = [(1, value) for value in values]
    mark = "1" + format.delimiter
    lines = _per_value(texts, len(values))
    text = "".join(f"{mark}{line}\n" for line in lines)
    written = CsvWriter(schema, format).write(rows)
    assert written.decode() == text
    for line, row in zip(lines, rows, strict=True):  # alone, together, and by the way that looks at each value
        assert read(schema, f"{mark}{line}\n", format) == [Batch([row])]
    (batch,) = read(schema, text, format)
    assert batch == Batch(rows)
    assert [str(value) for _, value in batch.rows] == [str(value) for value in values]  # -0.0 is no 0.0
    bad: list[BadText] = []
    (batch,) = read(schema, f"x{format.delimiter}x\n" + text, format, on_bad=bad.append)
    assert (batch, len(bad)) == (Batch(rows), 1)
    Encoder(schema).encode(*batch)


def _per_value(texts: str, count: int) -> list[str]:
    """One text a value, although a quoted one may hold ends of lines."""
    if '"' not in texts:
        return texts.removesuffix("\n").split("\n")
    lines, open_ = [""], False
    for letter in texts.removesuffix("\n"):
        open_ ^= letter == '"'
        if letter == "\n" and not open_:
            lines.append("")
        else:
            lines[-1] += letter
    assert len(lines) == count
    return lines


SPELLINGS: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("int64", " 7", 7, {}),
    ("int64", "7 ", 7, {}),
    ("int64", "+7", 7, {}),
    ("int64", "007", 7, {}),
    ("int64", '"7"', 7, {}),
    ("int64", '""', None, {}),
    ("double", "1E3", 1000.0, {}),
    ("double", " 1 ", 1.0, {}),
    ("double", "Infinity", float("inf"), {}),
    ("money", "12.50", Decimal("12.50"), {}),
    ("money", "1e3", Decimal("1E3"), {}),
    ("money", " 5 ", Decimal(5), {}),
    ("string", '  "a, b"', "a, b", {}),
    ("string", r'"say \"hi\""', 'say "hi"', {}),
    ("string", r"say \"hi\"", 'say "hi"', {}),
    ("string", r"C:\new\table", r"C:\new\table", {}),
    ("string", 'it is 5" long', 'it is 5" long', {}),
    ("string", '"a"', "a", {}),
    ("string", '"a,"",b"', 'a,",b', {}),
    ("string", '",""" ', None, {"bad": True}),
    ("array(i32)", " [ 1 ; 2 ] ", (1, 2), {}),
    ("blob", "", None, {}),
    ("stamp", "2026-11-18 20:15:00.1", 1_795_032_900_100_000, {"dateformat": ISO}),
    ("stamp", "18.11.2026 20:15:00.5", 1_795_032_900_500_000, {"dateformat": "%d.%m.%Y %H:%M:%S"}),
    ("stamp", " 2026-11-18 20:15:00 ", 1_795_032_900_000_000, {"dateformat": ISO}),
    ("stamp", "2026-11-18T20:15:00+0100", 1_795_029_300_000_000, {"dateformat": "%Y-%m-%dT%H:%M:%S%z"}),
    ("stamp", "2026-11-18T20:15:00.5-0100", 1_795_036_500_500_000, {"dateformat": "%Y-%m-%dT%H:%M:%S%z"}),
]


@pytest.mark.parametrize(("kind", "text", "value", "settings"), SPELLINGS)
def test_other_spellings_are_understood(kind: str, text: str, value: Any, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    bad = settings.pop("bad", False)
    schema = Schema(f"k*:int32,v:{kind}")
    if bad:
        with pytest.raises(BadText):
            read(schema, f"1,{text}\n", fmt(**PLAIN, **settings))
        return
    assert read(schema, f"1,{text}\n", fmt(**PLAIN, **settings)) == [Batch([(1, value)])]


WRONG: list[tuple[str, str, str, dict[str, Any]]] = [
    ("int32", str(I32), "an integer from", {}),
    ("int32", "1.0", "an integer from", {}),
    ("int32", "1_000", "an integer from", {}),
    ("int32", "٣", "an integer from", {}),
    ("int64", str(-I64 - 1), "an integer from", {}),
    ("int64", "9" * 5_000, "an integer from", {}),
    ("int64", "nan", "an integer from", {}),
    ("double", "1,5", "columns", {}),
    ("double", "1_0.5", "a number", {}),
    ("double", "cheap", "a number", {}),
    ("money", "NaN", "a finite decimal", {}),
    ("money", "Infinity", "a finite decimal", {}),
    ("money", "1e1000", "a finite decimal", {}),
    ("money", "9" * 97, "a finite decimal", {}),
    ("money", "1_0", "a finite decimal", {}),
    ("date", "2026-11-18", "an integer from", {}),
    ("date", "2026-11-18", "date format", {"dateformat": ISO}),
    ("date", "2026-11-18 20:15:00.5", "whole seconds", {"dateformat": ISO}),
    ("stamp", "2026-02-30 00:00:00", "date format", {"dateformat": ISO}),
    ("stamp", "2026-11-18 20:15:00.0000001", "date format", {"dateformat": ISO}),
    ("stamp", "2026-11-18 20:15:00+01", "date format", {"dateformat": ISO}),
    ("stamp", "2026-11-18 20:15:00.000+01", "date format", {"dateformat": ISO}),
    ("stamp", "1760000000000001", "date format", {"dateformat": ISO}),
    ("blob", "AP8", "base64", {}),
    ("blob", "A P8=", "base64", {}),
    ("array(i32)", "1;2", "an array such as", {}),
    ("array(i32)", "[1;;2]", "every item is an integer", {}),
    ("array(i32)", f"[{I32}]", "every item is an integer", {}),
    ("array(dbl)", "[1,2]", "columns", {}),
    ("array(i32)", f"[{'1;' * 65_535}1;]", "field larger than field limit", {}),
]


@pytest.mark.parametrize(("kind", "text", "words", "settings"), WRONG, ids=[f"{w[0]}:{w[1]:.25}" for w in WRONG])
def test_a_wrong_value_is_named_by_line_column_field_and_type(
    kind: str, text: str, words: str, settings: dict[str, Any]
) -> None:
    schema = Schema(f"k*:int32,v:{kind}")
    reader = CsvReader(schema, fmt(**PLAIN, **settings))
    rows, error = read_until_bad(reader, f"1,\n2,\n3,{text}\n4,\n")
    assert rows == [(1, None), (2, None)]
    assert error.line == 3 and "line 3" in str(error) and words in str(error)
    if words not in ("columns", "field larger than field limit"):
        assert (error.column, error.field, error.type, error.value) == (2, "v", schema.fields[1].type, text)
        assert "column 2" in str(error) and "'v'" in str(error) and kind in str(error)
    assert len(str(error)) < 300


def test_opcodes_and_flags_are_columns_of_both_ways() -> None:
    lines = "I,N,1,a,\nU,P,2,,2.5\nD,N,3,,\nP,R,4,d,\nS,PR,5,,\n"
    rows = [(1, "a", None), (2, None, 2.5), (3, None, None), (4, "d", None), (5, None, None)]
    batch = Batch(rows, bytes([1, 2, 3, 4, 5]), bytes([0, 1, 0, 2, 3]))
    assert read(TRADE, lines) == [batch]
    assert read(TRADE, lines.lower()) == [batch]
    assert CsvWriter(TRADE).write(*batch).decode() == lines
    Encoder(TRADE).encode(*batch)


def test_one_opcode_for_a_block_is_given_as_one() -> None:
    (batch,) = read(TRADE, "p,p,1,a,\nP,P,2,b,\n")
    assert batch == Batch([(1, "a", None), (2, "b", None)], Opcode.UPSERT, 1)
    (batch,) = read(TRADE, "i,n,1,a,\n")
    assert batch.opcode is Opcode.INSERT and type(batch.flags) is int  # what inject takes fastest


def test_a_format_may_leave_out_opcode_flags_and_key() -> None:
    upsert = fmt(opcode=Opcode.UPSERT, flags=EventFlag.PARTIAL)
    assert read(TRADE, "1,a,\n", upsert) == [Batch([(1, "a", None)], Opcode.UPSERT, 1)]
    assert read(TRADE, "d,1,a,\n", fmt(flags=EventFlag.NORMAL)) == [Batch([(1, "a", None)], Opcode.DELETE)]
    assert read(TRADE, "p,1,a,\n", fmt(opcode=Opcode.UPDATE)) == [Batch([(1, "a", None)], Opcode.UPDATE, 1)]
    keyless = fmt(**PLAIN, keyless=True)
    rows = [(None, "a", 1.5), (None, "b", None)]
    assert read(TRADE, "a,1.5\nb,\n", keyless) == [Batch(rows)]
    assert read(TRADE, "x\na,1.5\nb,\n", keyless, on_bad=print) == [Batch(rows)]
    assert CsvWriter(TRADE, keyless).write(rows) == b"a,1.5\nb,\n"
    last = Schema("a:string,k*:int64")
    assert read(last, "x\n", keyless) == [Batch([("x", None)])]
    with pytest.raises(ConfigError, match="one key"):
        CsvReader(Schema("a*:int32,b*:int32"), keyless)


@pytest.mark.parametrize("kind", ["int64", "string"])
def test_a_lone_column_is_a_row_where_it_is_null_too(kind: str) -> None:
    schema, keyless = Schema(f"id*:int64,v:{kind}"), fmt(**PLAIN, keyless=True)
    written = CsvWriter(schema, keyless).write([(1, None), (2, None)])
    assert written == b'""\n""\n'
    assert [row for batch in read(schema, written, keyless) for row in batch.rows] == [
        (None, "" if kind == "string" else None)
    ] * 2


def test_a_text_is_not_taken_for_a_byte_order_mark() -> None:
    schema = Schema("id*:string")
    rows = [("\ufeffa",), ("\ufeff",), ("b\ufeff",)]
    written = CsvWriter(schema, fmt(**PLAIN)).write(rows)
    assert read(schema, written, fmt(**PLAIN)) == [Batch(rows)]


@pytest.mark.parametrize("size", [1, 2, 3, 256])
def test_an_update_block_is_read_as_its_update(size: int) -> None:
    text = "UB,N,1,new,\nUB,N,1,old,\nI,N,2,b,\nUB,N,3,new,\nUB,N,oops,old,\nD,N,4,,\n"
    bad: list[BadText] = []
    batches = read(TRADE, text, block=size, on_bad=bad.append)
    assert [row for batch in batches for row in batch.rows] == [
        (1, "new", None), (2, "b", None), (3, "new", None), (4, None, None),
    ]  # fmt: skip
    opcodes = [
        opcode
        for rows, given, _ in batches
        for opcode in ([given] * len(rows) if isinstance(given, int) else given)
    ]  # fmt: skip
    assert opcodes == [2, 1, 2, 3]
    assert [error.line for error in bad] == [5]
    written = CsvWriter(TRADE).write([(1, "new", None), (1, "old", None)], Opcode.UPDATEBLOCK)
    assert written == b"UB,N,1,new,\nUB,N,1,old,\n"
    assert read(TRADE, written.decode()) == [Batch([(1, "new", None)], Opcode.UPDATE)]


@pytest.mark.parametrize(
    ("line", "column", "field", "words"),
    [
        ("x,n,1,a,2", 1, "opcode", "no opcode"),
        ("-,n,1,a,2", 1, "opcode", "no opcode"),
        ("1,a,2", 1, "opcode", "no opcode"),
        ("i,x,1,a,2", 2, "flags", "no flag"),
        ("i,n,1,a", None, None, "it has 4 columns, not 5 (opcode,flags,id,symbol,price)"),
        ("i,n,1,a,2,3", None, None, "it has 6 columns, not 5"),
        ("id*:int64,symbol:string,price:money", None, None, "the schema that stands here is"),
        ('i,n,1,"a"b,2', None, None, "expected after"),
    ],
)
def test_a_line_of_another_shape_is_named(line: str, column: Any, field: Any, words: str) -> None:
    rows, error = read_until_bad(CsvReader(TRADE), f"i,n,1,a,2\r\n{line}\r\ni,n,3,c,4\r\n")
    assert rows == [(1, "a", 2.0)]
    assert (error.line, error.column, error.field) == (2, column, field)
    assert words in str(error)
    bad: list[BadText] = []
    batches = read(TRADE, f"i,n,1,a,2\r\n{line}\r\ni,n,3,c,4\r\n", on_bad=bad.append)
    assert batches == [Batch([(1, "a", 2.0), (3, "c", 4.0)])]
    assert [(e.line, str(e)) for e in bad] == [(2, str(error))]


def test_a_reader_that_ended_says_so_again() -> None:
    reader = CsvReader(TRADE)
    _, error = read_until_bad(reader, "oops\n")
    for again in (lambda: reader.feed(b"i,n,1,a,2\n"), reader.close):
        with pytest.raises(BadText) as caught:
            list(again())
        assert caught.value is error


def test_everything_in_front_of_a_bad_line_in_a_million_is_given_out() -> None:
    reader = CsvReader(Schema("id*:int64,v:int64"), fmt(**PLAIN))
    count, last = 0, None
    with pytest.raises(BadText, match="line 700001: column 2, field 'v'") as caught:
        for batch in reader.feed(b"1,2\n" * 699_999 + b"3,4\n5,seven\n" + b"1,2\n" * 299_999):
            count, last = count + len(batch.rows), batch.rows[-1]
    assert (count, last) == (700_000, (3, 4))
    assert (caught.value.line, caught.value.column, caught.value.value) == (700_001, 2, "seven")


def test_a_bad_line_is_passed_over_and_counted() -> None:
    bad: list[BadText] = []
    reader = CsvReader(Schema("id*:int64,v:int64"), fmt(**PLAIN), on_bad=bad.append)
    text = b"1,2\n" * 7_000 + b"3,seven\n" + b"1,2\n" * 12_999
    counts = [len(batch.rows) for part in (reader.feed(text), reader.close()) for batch in part]
    assert sum(counts) == 19_999 and set(counts[:-1]) == {256}
    assert reader.skipped == len(bad) == 1 and bad[0].line == 7_001


ROUGH = (  # ends of lines of all kinds, quotes, blank lines, the schema, slips, bytes that are not UTF-8, no end
    b"\xef\xbb\xbfi,n,1,a,1\r\n\r\ni,n,2,\"two\r\nlines\",\ri,n,3,\"\",\n\n"
    b"id*:int64,symbol:string,price:double\ni,n,4,\xff,\ni,n,5,\xc3\xbc,\ni,n,six,f,\nUB,n,7,new,\nUB,n,7,old,\n"
    b'i,n,8,"a"b,\ni,n,9,"open,\ni,n,10,j,\ni,n,11,"C:\\\\",\ni,n,12,l,1e3\ni,n,13,m,'
)  # fmt: skip


def rough(sizes: list[int], block: int, **settings: Any) -> tuple[list[Batch], list[str]]:
    bad: list[BadText] = []
    reader = CsvReader(TRADE, block=block, on_bad=bad.append, **settings)
    batches, at = [], 0
    while at < len(ROUGH):
        size = sizes[at % len(sizes)]
        batches += reader.feed(ROUGH[at : at + size])
        at += size
    return [*batches, *reader.close()], [str(error) for error in bad]


def test_rough_input_is_read_as_far_as_it_can_be() -> None:
    ((rows, opcodes, flags),), bad = rough([1 << 20], 256)
    assert rows == [
        (1, "a", 1.0), (2, "two\r\nlines", None), (3, "", None), (5, "ü", None), (7, "new", None), (10, "j", None),
        (11, "C:\\", None), (12, "l", 1000.0), (13, "m", None),
    ]  # fmt: skip
    assert flags == 0 and opcodes == bytes([1, 1, 1, 1, 2, 1, 1, 1, 1])
    assert [text.partition(":")[0] for text in bad] == ["line 8", "line 10", "line 13", "line 14"]
    assert "field 'symbol' (string): '\\udcff' is not UTF-8" in bad[0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.sampled_from([1, 2, 3, 256]),
    st.sampled_from([24, 1 << 20]),
)
def test_the_pieces_it_comes_in_change_nothing(sizes: list[int], block: int, max_line: int) -> None:
    assert rough(sizes, block, max_line=max_line) == rough([1 << 20], block, max_line=max_line)


def test_blocks_are_full_but_for_the_last() -> None:
    text = "".join(f"i,n,{n},a,\n" for n in range(10)).encode()
    reader = CsvReader(TRADE, block=4)
    assert [len(b.rows) for b in reader.feed(text[:30])] == []
    assert [len(b.rows) for b in reader.feed(text[30:])] == [4, 4]
    assert [len(b.rows) for b in reader.close()] == [2]
    with pytest.raises(ConfigError, match="at least one event"):
        CsvReader(TRADE, block=0)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_they_like(end: str) -> None:
    text = f"i,n,1,a,{end}i,n,2,b,{end}i,n,3,c,"
    assert read(TRADE, text) == read(TRADE, text + end) == [Batch([(1, "a", None), (2, "b", None), (3, "c", None)])]
    _, error = read_until_bad(CsvReader(TRADE), f"i,n,1,a,{end}{end}oops{end}")
    assert error.line == 3


def test_a_byte_order_mark_and_empty_input_are_nothing() -> None:
    assert read(TRADE, b"\xef\xbb\xbfi,n,1,a,\n") == [Batch([(1, "a", None)])]
    for nothing in (b"", b"\n\n", b"\xef\xbb\xbf"):
        assert read(TRADE, nothing) == []
    _, error = read_until_bad(CsvReader(TRADE), "i,n,1,a,\n".encode("utf-16"))
    assert error.line == 1


def test_an_unclosed_quote_is_found_at_the_end() -> None:
    text = 'i,n,1,a,\ni,n,2,"b,\ni,n,3,c,\n'
    rows, error = read_until_bad(CsvReader(TRADE), text)
    assert rows == [(1, "a", None)]
    assert error.line == 2 and "quote" in str(error)
    bad: list[BadText] = []
    assert read(TRADE, text, on_bad=bad.append) == [Batch([(1, "a", None), (3, "c", None)])]
    assert [e.line for e in bad] == [2]


@pytest.mark.parametrize("line", [b"x" * 300, b'i,n,5,"' + b"y\n" * 150])
def test_a_line_without_end_is_bounded(line: bytes) -> None:
    reader = CsvReader(TRADE, max_line=200)
    rows, error = read_until_bad(reader, b"i,n,1,a,\n" + line)
    assert rows == [(1, "a", None)]
    assert error.line == 2 and "200 bytes" in str(error)


def test_a_line_may_be_as_long_as_it_may_be_whatever_ends_it() -> None:
    line = b"i,n,1,abc,"
    for pieces in ([line, b"\n"], [line + b"\r", b"\n"], [line + b"\r\n"], [line[:5], line[5:] + b"\r"]):
        reader = CsvReader(TRADE, max_line=len(line), block=1)
        batches = [batch for piece in pieces for batch in reader.feed(piece)]
        assert [*batches, *reader.close()] == [Batch([(1, "abc", None)])]
        reader = CsvReader(TRADE, max_line=len(line) - 1)
        with pytest.raises(BadText, match="longer than the 9 bytes"):
            for piece in pieces:
                list(reader.feed(piece))
            list(reader.close())


def test_a_row_is_given_out_as_soon_as_its_line_ends() -> None:
    for pieces in ([b'i,n,1,"a\nb",', b"\n"], [b'i,n,1,"a\n', b'b"', b",", b"\n"], [b"i,n,1,a,", b"\r", b"i"]):
        reader = CsvReader(TRADE, block=1)
        given = [len(list(reader.feed(piece))) for piece in pieces]
        assert given == [0] * (len(pieces) - 1) + [1]


def test_a_line_without_end_takes_no_memory() -> None:
    bad: list[BadText] = []
    reader = CsvReader(TRADE, max_line=10_000, on_bad=bad.append)
    tracemalloc.start()
    try:
        assert list(reader.feed(b"i,n,1,a,\n")) == []
        for _ in range(500):
            assert list(reader.feed(b"x" * 10_000)) == []
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    batches = [*reader.feed(b"\ni,n,2,b,\n"), *reader.close()]
    assert batches == [Batch([(1, "a", None), (2, "b", None)])]
    assert [e.line for e in bad] == [2] and reader.skipped == 1
    _, error = read_until_bad(CsvReader(TRADE), b"i,n,1,a,\n\n\noops\n")
    assert error.line == 4


def test_a_field_over_the_limit_of_the_standard_library_is_a_bad_line() -> None:
    bad: list[BadText] = []
    batches = read(TRADE, f"i,n,1,{'a' * 200_000},\ni,n,2,b,\n", on_bad=bad.append)
    assert batches == [Batch([(2, "b", None)])]
    assert "field larger than field limit" in str(bad[0]) and bad[0].line == 1


def test_header_lines_are_passed_over() -> None:
    text = 'Trades of "today\n# by us\ni,n,1,a,\noops\n'
    rows, error = read_until_bad(CsvReader(TRADE, fmt(header=2)), text)
    assert rows == [(1, "a", None)] and error.line == 4
    assert read(TRADE, "only\n", fmt(header=3)) == []


def test_a_header_that_names_the_columns_must_fit_the_schema() -> None:
    named = fmt(header="names")
    header = "opcode,flags,id,symbol,price\n"
    assert read(TRADE, header + "i,n,1,a,\n", named) == [Batch([(1, "a", None)])]
    assert read(TRADE, '"id", symbol ,price\n1,a,\n', fmt(**PLAIN, header="names")) == [Batch([(1, "a", None)])]
    for wrong in ("id,symbol,price\n", "opcode,flags,id,price,symbol\n", "i,n,1,a,\n", "\n", '"open\n'):
        rows, error = read_until_bad(CsvReader(TRADE, named, on_bad=print), wrong + "i,n,1,a,\n")
        assert rows == [] and error.line == 1
        assert "opcode,flags,id,symbol,price" in str(error)
    writer = CsvWriter(TRADE, named)
    assert writer.write([(1, "a", None)]) == (header + "I,N,1,a,\n").encode()
    assert writer.write([(2, "b", None)]) == b"I,N,2,b,\n"
    odd = Schema("a;b*:int32")
    text = CsvWriter(odd, fmt(**PLAIN, header="names", delimiter=";")).write([(1,)])
    assert text == b'"a;b"\n1\n'
    assert read(odd, text, fmt(**PLAIN, header="names", delimiter=";")) == [Batch([(1,)])]


@pytest.mark.parametrize("settings", [{}, PLAIN, {"delimiter": ";"}, {"header": "names"}])
@pytest.mark.parametrize("schema", [TRADE, Schema("a*:string,b:string,c:rstring")])
def test_schema_lines_are_written_and_passed_over(schema: Schema, settings: dict[str, Any]) -> None:
    rows: list[tuple[Any, ...]] = (
        [(1, "a", None), (2, "b", 2.5)] if schema is TRADE else [("a", "b", None), ("c", "d", "e")]
    )
    format = fmt(**settings)
    plain = CsvWriter(schema, format).write(rows).decode()
    for when, times in (("never", 0), ("once", 1), ("pereventblock", 2)):
        writer = CsvWriter(schema, format, include_schema=when)  # type: ignore[arg-type]
        text = (writer.write(rows) + writer.write(rows)).decode()
        assert text.count(schema.text + "\n") == times
        assert read(schema, text, format) == [Batch([*rows, *rows])]
    assert text.startswith(plain.split("\n")[0] if settings.get("header") else schema.text)


@pytest.mark.parametrize("delimiter", ["", ",,", "a", "1", '"', "\\", "\n", " ", "-", "."])
def test_a_delimiter_that_values_may_hold_is_refused(delimiter: str) -> None:
    with pytest.raises(ConfigError, match="delimiter"):
        fmt(delimiter=delimiter)


@pytest.mark.parametrize("settings", [{"header": -1}])
def test_a_header_of_less_than_nothing_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match="header"):
        fmt(**settings)


@pytest.mark.parametrize("dateformat", ["%Q", "%Y-%m-%d %", "%s"])
def test_a_date_format_that_cannot_be_read_back_is_refused(dateformat: str) -> None:
    with pytest.raises(ConfigError, match="date format"):
        CsvReader(TRADE, fmt(dateformat=dateformat))


def test_a_moment_beyond_the_calendar_cannot_be_written_with_a_date_format() -> None:
    schema = Schema("k*:int32,v:stamp")
    assert CsvWriter(schema, fmt(**PLAIN)).write([(1, I64 - 1)]) == f"1,{I64 - 1}\n".encode()
    with pytest.raises(ValueError, match="cannot show"):
        CsvWriter(schema, fmt(**PLAIN, dateformat=ISO)).write([(1, I64 - 1)])


texts = st.none() | st.text(st.characters(exclude_categories=["Cs"])) | st.text('a ,;"\\\r\n\t', max_size=8)
int32s, int64s = st.integers(-I32, I32 - 1), st.integers(-I64, I64 - 1)
doubles = st.floats(allow_nan=False)
moments = st.none() | st.integers(-62_135_596_800, 253_402_300_799)
money = st.none() | st.builds(lambda n, e: Decimal(n).scaleb(-e), st.integers(-(10**25), 10**25), st.integers(0, 20))
every = st.tuples(
    int32s, st.none() | int64s, st.none() | doubles, texts, texts, moments,
    moments.map(lambda seconds: seconds and seconds * SECOND + 7), money,
    st.none() | st.binary(max_size=20), st.none() | st.lists(int32s, max_size=3).map(tuple),
    st.none() | st.lists(int64s, max_size=3).map(tuple), st.none() | st.lists(doubles, max_size=3).map(tuple),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), every), min_size=1, max_size=12),
    st.sampled_from([None, ISO, "%d.%m.%YT%H:%M:%S.%f"]),
    st.sampled_from([",", ";", "|", "\t", "§"]),
    st.integers(1, 40),
)
def test_whatever_is_written_is_read_as_the_same_events(
    events: list[tuple[int, int, Any]], dateformat: str | None, delimiter: str, size: int
) -> None:
    if (
        dateformat and dateformat[1] != "Y"
    ):  # this platform's strftime does not pad years, and strptime wants them padded
        events = [(o, f, (*r[:5], 0, 0, *r[7:])) for o, f, r in events]
    rows = codec(EVERY).decode(codec(EVERY).encode([row for *_, row in events]), len(events))[2]
    opcodes, flags = bytes(o for o, *_ in events), bytes(f for _, f, _ in events)
    format = fmt(dateformat=dateformat, delimiter=delimiter)
    text = CsvWriter(EVERY, format).write(rows, opcodes, flags)
    reader = CsvReader(EVERY, format, block=100)
    batches = [b for at in range(0, len(text), size) for b in reader.feed(text[at : at + size])] + list(reader.close())
    (batch,) = batches
    assert batch.rows == rows
    assert Encoder(EVERY).encode(*batch) == Encoder(EVERY).encode(rows, opcodes, flags)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200) | st.text('i,n1"\\\r\n[;]', max_size=60).map(str.encode), st.integers(1, 50))
def test_whatever_comes_ends_or_is_skipped_in_good_order(data: bytes, size: int) -> None:
    schema = Schema("a*:int32,b:string")
    reader = CsvReader(schema, max_line=40, block=2, on_bad=lambda error: None)
    for at in range(0, len(data), size):
        for batch in reader.feed(data[at : at + size]):
            Encoder(schema).encode(*batch)
    for batch in reader.close():
        Encoder(schema).encode(*batch)
    try:
        read(schema, data)
    except EspError as e:
        assert isinstance(e, BadText) and 1 <= e.line <= data.count(b"\n") + data.count(b"\r") + 1
