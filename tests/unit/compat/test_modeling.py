import logging
from decimal import Decimal
from typing import Any

import pytest

from esp_pubsub.compat import modelingApi as m

TEXT = "id*:int64,name:string,price:money,day:date,at:stamp,list:array(i32)"
DATES = "%Y-%m-%d %H:%M:%S"


@pytest.fixture
def schema() -> Any:
    return m.SchemaCreate("window", TEXT)


def test_an_event_is_read_as_the_engine_reads_it_blanks_fractions_and_nulls_included(schema: Any) -> None:
    event = m.EventCreate2(schema, "p, n, 7, , 10.50, 2026-11-18 20:15:00, 2026-11-18 20:15:00.250, [1;2;3]", DATES)
    assert event.row == (7, None, Decimal("10.50"), 1795032900, 1795032900250000, (1, 2, 3))
    assert (m.EventGetOpcode(event), m.EventGetFlags(event)) == (m.eo_UPSERT, 0)


def test_without_a_date_format_moments_are_integers_and_bytes_are_text_too(schema: Any) -> None:
    event = m.EventCreate2(schema, b"i,p,7,IBM,-0.5,60,60000001,", None)
    assert event.row == (7, "IBM", Decimal("-0.5"), 60, 60000001, None)
    assert m.EventGetFlags(event) == 1


@pytest.mark.parametrize("bad", ["i,n,x,a,,,,", 'i,n,1,"a,,,,', 'i,n,1,a,,,,\n"', "i,n,1\n", "", "ub,n,1,a,,,,"])
def test_a_line_that_is_no_event_leaves_nothing_behind_for_the_next(
    bad: str, schema: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2, 3):
        assert m.EventCreate2(schema, f"i,n,{number},a,,,,", None).row[0] == number
        assert m.EventCreate2(schema, bad, None) is None
    assert m.EventCreate2(schema, 'i,n,4,"two\nlines",,,,\n', None).row[:2] == (4, "two\nlines")
    assert m.EventCreate2(schema, "i,n,5,a,,,,", None).row[0] == 5
    assert len(set(caplog.messages)) == 1  # and the line that it names is always the first


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("i,n,7,IBM,10.50,60,60000001,[1;2]", "I,N:7,IBM,10.50,60,60000001,[1;2]"),
        ('u,n,7,"a,b",,,,', 'U,N:7,"a,b",,,,'),
        ('d,n,7,"",,,,', 'D,N:7,"",,,,'),
        ("s,p,7,x,,,,", "S,P:7,x,,,,"),
    ],
)
def test_an_event_is_written_as_toStringCSV_has_it(schema: Any, line: str, expected: str) -> None:
    event = m.EventCreate2(schema, line, None)
    assert m.EventToStringCSV(event, schema, True, False) == expected
    assert m.EventToStringCSV(event, schema, False, False) == expected.partition(":")[2]


def test_a_block_holds_the_events_that_its_vector_had(schema: Any) -> None:
    vector = m.EventVCreate()
    for number in (1, 2):
        assert m.EventVPushback(vector, m.EventCreate2(schema, f"i,n,{number},a,,,,", None)) == 1
    block = m.EventBlockNew1(vector, m.ebt_TRANS)
    m.EventVPushback(vector, m.EventCreate2(schema, "i,n,3,a,,,,", None))
    assert m.EventBlockGetSize(block) == 2
    assert m.EventBlockGetEvent(block, 1).row[0] == 2
    assert m.EventBlockGetType(block) == m.ebt_TRANS
    assert m.EventBlockGetMsgId(block) == m.EventBlockGetTID(block) == 0
    m.EventBlockDestroy(block)
    assert m.EventBlockGetSize(block) == 0


def test_a_vector_of_strings_is_read_by_index() -> None:
    vector = m.StringV(["a", "b"])
    assert (m.StringVSize(vector), m.StringVGet(vector, 1), m.StringVFree(vector)) == (2, "b", None)
    assert m.SchemaGetString(m.SchemaCreate("w", " id* : int64 ")) == "id*:int64"


def _two_schemas() -> list[Any]:
    return m.EventV(
        m.EventCreate2(m.SchemaCreate("w", text), line, None)
        for text, line in (("id*:int64", "i,n,1"), ("id*:int64,b:string", "i,n,1,x"))
    )


FAILURES: dict[str, tuple[Any, Any]] = {
    "no vector": (lambda s: m.StringVSize(None), 0),
    "beyond a vector": (lambda s: m.StringVGet(m.StringV(["a"]), 1), None),
    "before a vector": (lambda s: m.StringVGet(m.StringV(["a"]), -1), None),
    "string of nothing": (lambda s: m.StringVGet(None, 0), None),
    "no schema text": (lambda s: m.SchemaCreate("w", None), None),
    "no key": (lambda s: m.SchemaCreate("w", "id:int64"), None),
    "an event of no schema": (lambda s: m.EventCreate2(None, "i,n,1", None), None),
    "a wrong value": (lambda s: m.EventCreate2(s, "i,n,x,a,,,,", None), None),
    "a wrong opcode": (lambda s: m.EventCreate2(s, "-,n,1,a,,,,", None), None),
    "too few fields": (lambda s: m.EventCreate2(s, "i,n,1", None), None),
    "no line": (lambda s: m.EventCreate2(s, "", None), None),
    "two lines": (lambda s: m.EventCreate2(s, "i,n,1,a,,,,\ni,n,2,a,,,,", None), None),
    "a quote that is open": (lambda s: m.EventCreate2(s, 'i,n,1,"a,,,,', None), None),
    "no UTF-8": (lambda s: m.EventCreate2(s, b"i,n,1,\xff,,,,", None), None),
    "a lone surrogate": (lambda s: m.EventCreate2(s, "i,n,1,\udcff,,,,", None), None),
    "a date format that is none": (lambda s: m.EventCreate2(s, "i,n,1,a,,,,", "%Q"), None),
    "an event that failed": (lambda s: m.EventVPushback(m.EventVCreate(), None), 0),
    "a vector that failed": (lambda s: m.EventVPushback(None, m.EventCreate2(s, "i,n,1,a,,,,", None)), 0),
    "an empty block": (lambda s: m.EventBlockNew1(m.EventVCreate(), m.ebt_NORMAL), None),
    "a block of two schemas": (lambda s: m.EventBlockNew1(_two_schemas(), m.ebt_NORMAL), None),
    "a block of no kind": (lambda s: m.EventBlockNew1(m.EventV([m.EventCreate2(s, "i,n,1,a,,,,")]), 7), None),
    "an event of no block": (lambda s: m.EventBlockGetEvent(None, 0), None),
    "the size of no block": (lambda s: m.EventBlockGetSize(123456), 0),
    "the text of no event": (lambda s: m.EventToStringCSV(None, s, True, False), None),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_a_value_and_a_line_in_the_log(case: str, schema: Any, caplog: pytest.LogCaptureFixture) -> None:
    function, expected = FAILURES[case]
    with caplog.at_level(logging.ERROR, "esp_pubsub.compat"):
        assert function(schema) == expected
    quiet = "beyond" in case or "before" in case  # to look there is how one finds the end
    assert len(caplog.records) == (0 if quiet else 1)


def test_what_needs_no_freeing_may_be_freed_even_when_it_is_nothing() -> None:
    assert m.StringVFree(None) is None
    assert m.EventBlockDestroy(None) is None


def test_the_logging_handler_shows_the_library_in_the_vendor_layout(capsys: pytest.CaptureFixture[str]) -> None:
    handler = m.getLoggingHandler()
    logger = logging.getLogger()
    logger.addHandler(handler)
    try:
        m.StringVSize(None)
        logging.getLogger("mine").error("not the library's")
    finally:
        logger.removeHandler(handler)
    shown = capsys.readouterr().err
    assert "; ERROR; " in shown and "; DF.ESP; (" in shown and "StringVSize" in shown
    assert "not the library's" not in shown
