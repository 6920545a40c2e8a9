"""CSV: what SAS writes and reads beyond plain lines: escaped delimiters, empty opcodes, missing numbers."""

import pytest

from esp_pubsub.events import Opcode
from esp_pubsub.schema import Schema
from esp_pubsub.text import Batch, CsvReader, CsvWriter

from .test_csv import PLAIN, TRADE, fmt, read, read_until_bad


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (r"1,a\,b,2", "a,b"),
        (r'1,"a\,b",2', "a,b"),
        (r'1,"a\,",2', "a,"),
        (r"1,\,,2", ","),
        (r"1,a\\\,b,2", "a\\,b"),
        (r"1,c:\temp,2", r"c:\temp"),
        (r'1,"say \"hi\"",2', 'say "hi"'),
    ],
)
def test_a_backslash_makes_the_delimiter_a_part_of_the_value(line: str, value: str) -> None:
    assert read(TRADE, line, fmt(**PLAIN)) == [Batch([(1, value, 2.0)])]
    other = line.replace(",", ";")
    assert read(TRADE, other, fmt(**PLAIN, delimiter=";")) == [Batch([(1, value.replace(",", ";"), 2.0)])]


def test_a_text_that_ends_with_a_backslash_comes_back() -> None:
    rows = [(1, "a\\", 1.0), (2, "\\,", 2.0), (3, "\\", 3.0)]
    assert read(TRADE, CsvWriter(TRADE).write(rows).decode()) == [Batch(rows)]


def test_an_event_whose_opcode_is_left_out_is_an_insert() -> None:
    assert read(TRADE, ",n,1,a,2\nu,n,2,b,3\n ,n,3,c,4") == [
        Batch([(1, "a", 2.0), (2, "b", 3.0), (3, "c", 4.0)], bytes([Opcode.INSERT, Opcode.UPDATE, Opcode.INSERT]))
    ]


@pytest.mark.parametrize("kind", ["int32", "int64", "double", "money", "date", "stamp"])
def test_a_point_is_a_missing_number_where_that_is_said(kind: str) -> None:
    schema = Schema(f"id*:int64,v:{kind},s:string")
    assert read(schema, "1,.,.\n2, . ,x\n3,7,y", fmt(**PLAIN, missing_dot=True))[0].rows[:2] == [
        (1, None, "."), (2, None, "x"),
    ]  # fmt: skip
    _, error = read_until_bad(CsvReader(schema, fmt(**PLAIN)), "1,.,.")
    assert error.field == "v"
