"""Update blocks that were read: of each pair the new row alone, whatever became of the lines around."""

import json
from typing import Any

import pytest

from esp_pubsub.events import Opcode
from esp_pubsub.schema import Schema
from esp_pubsub.text import Batch, CsvReader, JsonReader

TRADE = Schema("id*:int64,symbol:string,price:double")
WORDS = {"UB": "updateblock", "D": "delete", "I": "insert", "U": "update"}


def by_csv(rows: str, block: int) -> list[Batch]:
    reader = CsvReader(TRADE, block=block, on_bad=lambda bad: None)
    lines = "".join(f"{opcode},N,{id},{symbol},\n" for opcode, id, symbol in map(str.split, rows.split(" | ")))
    return [batch for at in range(0, len(lines), 7) for batch in reader.feed(lines[at : at + 7].encode())] + [
        *reader.close()
    ]


def by_json(rows: str, block: int) -> list[Batch]:
    reader = JsonReader(TRADE, block=block, on_bad=lambda bad: None)
    events: list[dict[str, Any]] = [
        {"@opcode": WORDS.get(opcode, opcode), "id": int(id) if id.isdecimal() else id, "symbol": symbol}
        for opcode, id, symbol in map(str.split, rows.split(" | "))
    ]
    return [*reader.feed(json.dumps([events]).encode()), *reader.close()]


@pytest.mark.parametrize("block", [1, 256])
@pytest.mark.parametrize("read", [by_csv, by_json])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("UB 1 new | D 1 old | UB 2 new | D 2 old", "U1 U2"),
        ("UB 1 new | UB 1 old | D 1 gone", "U1 D1"),
        ("UB 1 new | X 1 old | UB 1 new | UB 1 old", "U1 U1"),
        ("X 1 new | UB 1 old | UB 1 new | UB 1 old", "U1"),
        ("X 1 new | UB 1 old | UB 2 new | UB 2 old", "U2"),
        ("X 0 other | UB 1 new | UB 1 old", "U1"),
        ("X 0 other | D 0 gone", "D0"),
        ("UB x new | UB 1 old | UB 2 new | UB 2 old", "U2"),
        ("UB 1 new | UB x old | UB 2 new | UB 2 old", "U1 U2"),
        ("UB 1 new | UB 2 new | UB 2 old | I 3 new", "U1 U2 I3"),
    ],
    ids=[
        "a delete is the old row", "then a delete", "the old row is broken", "the new row is broken",
        "the new row is broken and others follow", "another row is broken", "a broken row and a delete",
        "the new row's key is broken", "the old row's key is broken", "an old row is missing",
    ],
)  # fmt: skip
def test_new_rows_are_never_taken_for_old_ones(read: Any, rows: str, expected: str, block: int) -> None:
    got = []
    for values, opcode, _ in read(rows, block):
        opcodes = [opcode] * len(values) if isinstance(opcode, int) else opcode
        got += [(Opcode(each).name[0] + str(row[0]), row[1]) for each, row in zip(opcodes, values, strict=True)]
    assert " ".join(mark for mark, _ in got) == expected
    assert "old" not in [symbol for _, symbol in got]


def test_a_line_that_is_no_row_may_be_the_old_one() -> None:
    reader = CsvReader(TRADE, on_bad=lambda bad: None)
    lines = 'UB,N,1,new,\nUB,N,1,"o"ld,\nUB,N,1,newer,\nUB,N,1,old,\n'
    batches = [*reader.feed(lines.encode()), *reader.close()]
    assert [row[1] for batch in batches for row in batch.rows] == ["new", "newer"]
