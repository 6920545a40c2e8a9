"""CSV and JSON against Python's own `csv` and typed conversion: `make bench NAME=text` (one process, processor time).

A round of work is a file of 8,192 trades of 13 columns. The whole path is from bytes to the bodies of blocks of 256
events, checked and encoded, and from the rows of such blocks to bytes.
"""

from __future__ import annotations

import csv
import io
import json
import random
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import esp_pubsub as esp
from esp_pubsub.encode import Encoder
from esp_pubsub.text import CsvFormat, CsvReader, CsvWriter, JsonReader, JsonWriter
from esp_pubsub.wire.rows import codec

from .report import STAMP, Report, main, rates

SCHEMA = esp.Schema(
    "id*:int64,symbol:string,venue:string,price:double,bid:double,ask:double,quantity:int64,fee:money,"
    "traded:stamp,settled:date,buyer:int64,seller:int64,note:string"
)
EVENTS, BLOCK, PIECE = 8_192, 256, 1 << 16
PLAIN = CsvFormat(opcode=esp.Opcode.INSERT, flags=esp.EventFlag.NORMAL)
CONVERT = (int, str, str, float, float, float, int, Decimal, int, int, int, int, str)


def trades() -> list[tuple[Any, ...]]:
    """The same ones every time."""
    dice = random.Random(2026)
    return [
        (
            number, f"SYM{dice.randint(0, 997)}", dice.choice(("XNYS", "XNAS", "BATS")), dice.randint(1, 99_999) / 100,
            dice.randint(1, 99_999) / 100, dice.randint(1, 99_999) / 100, dice.randint(1, 5_000),
            Decimal(dice.randint(1, 9_999)) / 100, STAMP + number * 997, STAMP // 1_000_000 + number,
            dice.randint(1, 1 << 40), dice.randint(1, 1 << 40), f"order-{number}",
        )
        for number in range(EVENTS)
    ]  # fmt: skip


def read_peer(text: bytes) -> list[list[Any]]:
    """What one writes without us: `csv.reader`, and each value converted."""
    rows = csv.reader(io.TextIOWrapper(io.BytesIO(text), newline=""))
    return [[convert(value) for convert, value in zip(CONVERT, row, strict=True)] for row in rows]


def write_peer(rows: list[tuple[Any, ...]]) -> bytes:
    """The same for `csv.writer`."""
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()


def read(reader: CsvReader | JsonReader, text: bytes, encode: Any = None) -> int:
    """Bytes to blocks, and to bodies if there is an encoder."""
    count = 0
    for at in range(0, len(text), PIECE):
        for batch in reader.feed(text[at : at + PIECE]):
            count += len(batch.rows)
            if encode is not None:
                encode(*batch)
    for batch in reader.close():
        count += len(batch.rows)
        if encode is not None:
            encode(*batch)
    return count


def spelt(rows: list[tuple[Any, ...]], dateformat: str) -> bytes:
    """The file with moments as text."""
    return CsvWriter(SCHEMA, CsvFormat(opcode=PLAIN.opcode, flags=PLAIN.flags, dateformat=dateformat)).write(rows)


async def measure(report: Report) -> None:
    """Reading, writing, and the same with opcodes, nulls, a date format and JSON."""
    rows = trades()
    blocks = [rows[at : at + BLOCK] for at in range(0, EVENTS, BLOCK)]
    text = write_peer(rows)
    marked = CsvWriter(SCHEMA).write(rows)
    holed = write_peer([(*row[:6], None, *row[7:12], None) if row[0] % 7 == 0 else row for row in rows])
    iso = "%Y-%m-%d %H:%M:%S"
    dated = CsvFormat(opcode=PLAIN.opcode, flags=PLAIN.flags, dateformat=iso)
    dated_text = spelt(rows, iso)
    document = JsonWriter(SCHEMA).write(rows) + b"]"
    encode, decode = Encoder(SCHEMA).encode, codec(SCHEMA).decode
    bodies = [codec(SCHEMA).encode(block) for block in blocks]
    if [row for batch in CsvReader(SCHEMA, PLAIN).feed(text) for row in batch.rows] != rows[:EVENTS]:
        raise RuntimeError("the trades do not come back as they were")

    def read_dated() -> list[list[Any]]:
        def moment(value: str) -> datetime:
            return datetime.fromisoformat(value).replace(tzinfo=UTC)

        convert = [*CONVERT[:8], moment, moment, *CONVERT[10:]]
        split = csv.reader(io.TextIOWrapper(io.BytesIO(dated_text), newline=""))
        return [[c(value) for c, value in zip(convert, row, strict=True)] for row in split]

    samples = rates(
        {
            "csv.reader and conversion": lambda: read_peer(text),
            "CsvReader": lambda: read(CsvReader(SCHEMA, PLAIN), text),
            "CsvReader and encode": lambda: read(CsvReader(SCHEMA, PLAIN), text, encode),
            "with opcodes": lambda: read(CsvReader(SCHEMA), marked, encode),
            "with nulls": lambda: read(CsvReader(SCHEMA, PLAIN), holed, encode),
            "csv.reader and fromisoformat": read_dated,
            "with an ISO date format": lambda: read(CsvReader(SCHEMA, dated), dated_text, encode),
            "csv.writer": lambda: write_peer(rows),
            "CsvWriter": lambda: [CsvWriter(SCHEMA, PLAIN).write(block) for block in blocks],
            "decode and CsvWriter": lambda: [CsvWriter(SCHEMA, PLAIN).write(decode(b, BLOCK)[2]) for b in bodies],
            "json.loads": lambda: json.loads(document),
            "JsonReader": lambda: read(JsonReader(SCHEMA), document),
            "json.dumps": lambda: json.dumps([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], default=str),
            "JsonWriter": lambda: [JsonWriter(SCHEMA).write(block) for block in blocks],
        },
        EVENTS,
    )
    report.figures(samples, "events/s")
    report.ratio(samples, "CsvReader", "csv.reader and conversion", None)
    report.ratio(samples, "CsvReader and encode", "csv.reader and conversion", 0.6)
    report.ratio(samples, "with opcodes", "csv.reader and conversion", None)
    report.ratio(samples, "with nulls", "csv.reader and conversion", None)
    report.ratio(samples, "with an ISO date format", "csv.reader and fromisoformat", None)
    report.ratio(samples, "CsvWriter", "csv.writer", None)
    report.ratio(samples, "decode and CsvWriter", "csv.writer", 0.6)
    report.ratio(samples, "JsonReader", "json.loads", None)
    report.ratio(samples, "JsonWriter", "json.dumps", None)


if __name__ == "__main__":
    main("text", measure)
