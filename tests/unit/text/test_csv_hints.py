"""Errors of CSV lines that say what would have read them."""

import pytest

from esp_pubsub.schema import Schema
from esp_pubsub.text import CsvReader

from .test_csv import PLAIN, fmt, read, read_until_bad


@pytest.mark.parametrize(("header", "hinted"), [(0, True), (1, False)])
def test_a_first_line_that_is_no_event_may_name_the_columns_and_that_is_said(header: int, hinted: bool) -> None:
    schema, lines = Schema("id*:int64,price:double"), "id,price\nx,1\n"
    _, error = read_until_bad(CsvReader(schema, fmt(**PLAIN, header=header)), lines)
    assert error.line == header + 1
    assert ("if this line names the columns, say so (header)" in str(error)) == hinted
    _, error = read_until_bad(CsvReader(schema, fmt(**PLAIN)), "1,2\n" + lines)
    assert error.line == 2 and "(header)" not in str(error)


def test_a_line_of_one_column_may_have_another_delimiter_and_that_is_said() -> None:
    schema = Schema("id*:int64,price:double")
    _, error = read_until_bad(CsvReader(schema, fmt(**PLAIN)), "1;2\n")
    assert str(error) == "line 1: it has 1 column, not 2 (id,price); is ',' right (delimiter)?"
    _, error = read_until_bad(CsvReader(schema, fmt(**PLAIN)), "1,2,3\n")
    assert "delimiter" not in str(error)


@pytest.mark.parametrize(("type", "unit"), [("date", "seconds"), ("stamp", "microseconds")])
def test_a_moment_that_is_no_integer_needs_a_date_format_and_that_is_said(type: str, unit: str) -> None:
    schema = Schema(f"id*:int64,at:{type}")
    _, error = read_until_bad(CsvReader(schema, fmt(**PLAIN)), "1,0\n2,2026-11-18\n")
    assert f", {unit} since 1970; for another spelling give its format (dateformat)" in str(error)
    dated = fmt(**PLAIN, dateformat="%Y-%m-%d")
    assert read(schema, "2,2026-11-18\n", dated) != []
