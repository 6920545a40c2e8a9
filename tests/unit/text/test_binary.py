"""Blocks in binary: every type both ways, whatever the pieces they come in, and nothing taken for what it is not."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_pubsub.encode import Encoder
from esp_pubsub.errors import EspError
from esp_pubsub.events import Opcode
from esp_pubsub.schema import Schema
from esp_pubsub.text import BadText, Batch, BinaryReader, BinaryWriter
from esp_pubsub.text.binary import LENGTH
from esp_pubsub.wire.frame import BEAT, frames, seal

EVERY = Schema("i*:int32,d:double,s:string,u:stamp,m:money,b:blob,ai:array(i32)")
ROWS: list[tuple[Any, ...]] = [
    (1, 0.1, "two\nlines", -1, Decimal("10.5"), b"\0\xff", (1, 2)),
    (2, None, "", None, None, b"", ()),
    (3, *[None] * 6),
]
MIXED = bytes([Opcode.INSERT, Opcode.UPSERT, Opcode.DELETE])
TRADE = Schema("id*:int64,symbol:string")
(BEATING,) = frames([seal(BEAT)], 0, 0)


def read(data: bytes, schema: Schema = EVERY, block: int = 256, size: int = 1 << 20) -> list[Batch]:
    reader = BinaryReader(schema, block=block)
    batches = [batch for at in range(0, len(data), size) for batch in reader.feed(data[at : at + size])]
    return [*batches, *reader.close()]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_blocks_come_out_as_they_went_in(size: int) -> None:
    writer = BinaryWriter(EVERY)
    data = writer.write(ROWS) + writer.write(ROWS, MIXED, bytes([0, 1, 3]))
    assert read(data, size=size) == [Batch(ROWS), Batch(ROWS, MIXED, bytes([0, 1, 3]))]
    assert [len(batch.rows) for batch in read(data, block=2, size=size)] == [2, 1, 2, 1]


def test_of_an_update_block_the_new_row_counts() -> None:
    data = BinaryWriter(TRADE).write([(1, "new"), (1, "old")], Opcode.UPDATEBLOCK)
    assert read(data, TRADE) == [Batch([(1, "new")], Opcode.UPDATE)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda good, _: good[:-1], "block 2: the input ends in the middle of it"),
        (lambda good, _: good[: len(good) // 2 + 2], "block 2: the input ends in the middle of it"),
        (lambda good, _: good[:-1] + b"\xff", "block 2: "),
        (lambda good, _: good + b"1,IBM\n", "block 3: it has no length"),
        (lambda good, _: good + b"\0\0\0\0", "block 3: it has no length"),
        (lambda good, other: good + other, "block 3: its schema is another one"),
        (lambda good, _: good + LENGTH.pack(len(BEATING)) + BEATING, "block 3: it holds no rows"),
        (lambda good, _: good + BinaryWriter(TRADE).write([(1, "a")], 77), "block 3: not a rows body: opcodes"),
        (lambda good, _: good + BinaryWriter(TRADE).write([(1, "a")], 1, 8), "block 3: it holds a flag that"),
        (lambda good, _: good + BinaryWriter(TRADE).write([(1, "a")], 1, 300), "block 3: "),
    ],
    ids=[
        "cut",
        "cut behind a length",
        "changed",
        "text",
        "nothing",
        "another schema",
        "no block",
        "opcode",
        "flag",
        "great flag",
    ],
)
def test_what_is_no_block_ends_it_when_all_before_was_given_out(change: Any, why: str) -> None:
    good = BinaryWriter(TRADE).write([(1, "a")]) * 2
    reader, got = BinaryReader(TRADE), []
    with pytest.raises(BadText) as bad:
        for part in (lambda: reader.feed(change(good, BinaryWriter(EVERY).write(ROWS))), reader.close):
            got.extend(part())
    assert str(bad.value).startswith(why) and bad.value.line == int(why[6])
    assert got == [Batch([(1, "a")])] * (int(why[6]) - 1)
    for again in (reader.close, lambda: reader.feed(good)):
        with pytest.raises(BadText):
            list(again())


@settings(max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 150), st.integers(1, 50))
def test_whatever_comes_ends_or_is_read_in_good_order(noise: bytes, at: int, size: int) -> None:
    data = bytearray(BinaryWriter(TRADE).write([(1, "a"), (2, "b")]) * 2)
    data[at : at + len(noise)] = noise
    try:
        for batch in read(bytes(data), TRADE, size=size):
            Encoder(TRADE).encode(*batch)
    except EspError as e:
        assert isinstance(e, BadText)
