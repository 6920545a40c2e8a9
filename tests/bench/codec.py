"""Encode and decode against bare msgpack, pyarrow and struct: `make bench NAME=codec` (one process, processor time).

A round of work is one block of 256 events, or 256 blocks of one event, sealed one by one and put in one write as the
sender does.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from msgpack import packb, unpackb

from esp_pubsub.bus import Message
from esp_pubsub.encode import Encoder
from esp_pubsub.events import PLAIN, Block
from esp_pubsub.failover.accept import Accept
from esp_pubsub.wire import arrow
from esp_pubsub.wire.frame import ARROW, BLOCK, BODY_AT, ROWS, Sealed, frames, parse, seal
from esp_pubsub.wire.rows import codec

from .report import SCHEMA, SMALL_FROM, Report, main, rates, rows, small_row

EVENTS = 256
SOURCE = 7
HEADER = struct.Struct("<4sIQQQIIBBHIQQQQ")  # all 15 fields


def sealed_rows(blocks: Sequence[Sequence[Any]]) -> list[Sealed]:
    """Blocks of one chain, encoded and sealed as a publisher does."""
    encode, chain, done = codec(SCHEMA).encode, 0, []
    for id, block in enumerate(blocks, 1):
        one = seal(BLOCK, ROWS, 0, len(block), SOURCE, 0, id, SCHEMA.fingerprint, chain, encode(block))
        chain = one.chain
        done.append(one)
    return done


def to_frames(blocks: Sequence[Sequence[Any]]) -> list[bytes]:
    """What travels for these blocks of rows."""
    return frames(sealed_rows(blocks), 0, time.time_ns() // 1000)


def from_frames(messages: Sequence[bytes]) -> None:
    """Every frame to its rows, by the codec."""
    decode = codec(SCHEMA).decode
    for message in messages:
        frame = parse(message)
        decode(frame.data[BODY_AT:], frame.count)


def from_blocks(messages: Sequence[bytes]) -> None:
    """Every frame to its rows, as a subscriber's user gets them."""
    for message in messages:
        Block(parse(message), SCHEMA, PLAIN).rows()


def compare_rows(report: Report) -> None:
    """A block of 256 rows there and back."""
    block = rows(EVENTS)
    message = to_frames([block])
    packed = packb(block)
    if Block(parse(message[0]), SCHEMA, PLAIN).rows() != block:
        raise RuntimeError("the block does not come back as it was")
    samples = rates(
        {
            "rows to frame": lambda: to_frames([block]),
            "msgpack packb": lambda: packb(block),
            "frame to rows": lambda: from_frames(message),
            "frame to Block.rows()": lambda: from_blocks(message),
            "msgpack unpackb": lambda: unpackb(packed),
            "msgpack unpackb use_list=False": lambda: unpackb(packed, use_list=False),
        },
        EVENTS,
    )
    report.figures(samples, "events/s")
    report.ratio(samples, "rows to frame", "msgpack packb", 1.2)
    report.ratio(samples, "frame to rows", "msgpack unpackb", 0.85)
    report.ratio(samples, "frame to rows", "msgpack unpackb use_list=False", None)
    report.ratio(samples, "frame to Block.rows()", "msgpack unpackb", None)


def compare_arrow(report: Report) -> None:
    """A record batch of 256 rows there and back; ours through `inject`'s encoder and `Block.table`."""
    columns = [pa.array(column) for column in zip(*rows(EVENTS), strict=True)]
    target = arrow.arrow_schema(SCHEMA)
    batch = pa.record_batch([c.cast(f.type) for c, f in zip(columns, target, strict=True)], schema=target)
    encode = Encoder(SCHEMA, "arrow").encode
    ids = itertools.count(1)

    def to_frame() -> list[bytes]:
        kind, flags, count, body = encode(batch)
        one = seal(BLOCK, kind, flags, count, SOURCE, 0, next(ids), SCHEMA.fingerprint, 0, body)
        return frames([one], 0, time.time_ns() // 1000)

    (message,), peer = to_frame(), batch.serialize()
    frame = parse(message)
    body = frame.body
    if frame.body_kind != ARROW or Block(frame, SCHEMA, PLAIN).table().to_batches() != [batch]:
        raise RuntimeError("the record batch does not come back as it was")
    samples = rates(
        {
            "record batch to frame": to_frame,
            "pyarrow serialize": batch.serialize,
            "frame to table": lambda: Block(parse(message), SCHEMA, PLAIN).table(),
            "pyarrow read_record_batch": lambda: pa.ipc.read_record_batch(peer, target),
            "pyarrow read_record_batch, validate": lambda: pa.ipc.read_record_batch(peer, target).validate(full=True),
            "record batch to body": lambda: encode(batch),
            "body to record batch": lambda: arrow.batch(SCHEMA, body, EVENTS, marked=False),
        },
        EVENTS,
    )
    report.figures(samples, "events/s")
    report.ratio(samples, "record batch to body", "pyarrow serialize", 0.5)
    report.ratio(samples, "body to record batch", "pyarrow read_record_batch", 0.5)
    report.ratio(samples, "record batch to frame", "pyarrow serialize", 0.5)
    report.ratio(samples, "frame to table", "pyarrow read_record_batch", 0.5)
    report.ratio(samples, "frame to table", "pyarrow read_record_batch, validate", 0.7)


def compare_single(report: Report) -> None:
    """256 blocks of one event, each with a body of 100 bytes."""
    singles = [small_row(SMALL_FROM + i) for i in range(EVENTS)]
    blocks = [[row] for row in singles]
    messages = to_frames(blocks)
    packed = [packb(row) for row in singles]
    if {len(parse(message).body) for message in messages} != {100}:
        raise RuntimeError("the small blocks are not of 100 bytes")

    def pack_each() -> None:
        for row in singles:
            packb(row)

    def unpack_each() -> None:
        for data in packed:
            unpackb(data)

    samples = rates(
        {
            "single events to frames": lambda: to_frames(blocks),
            "msgpack packb of each row": pack_each,
            "frames to single events": lambda: from_frames(messages),
            "frames to single Block.rows()": lambda: from_blocks(messages),
            "msgpack unpackb of each row": unpack_each,
        },
        EVENTS,
    )
    report.figures(samples, "blocks/s")
    report.ratio(samples, "single events to frames", "msgpack packb of each row", 0.35)
    report.ratio(samples, "frames to single events", "msgpack unpackb of each row", 0.25)
    report.ratio(samples, "frames to single Block.rows()", "msgpack unpackb of each row", None)


def compare_header(report: Report) -> None:
    """Header, chain and accept rule together, over a sequence in order."""
    messages = to_frames([[small_row(SMALL_FROM + i)] for i in range(4 * EVENTS)])
    read = [Message(position, message) for position, message in enumerate(messages)]  # as a feed hands them out
    unpack = HEADER.unpack_from

    def accept_each() -> None:
        Accept(suffix_only=True, from_start=True).receive_all(read)

    def unpack_each() -> None:
        for message in messages:
            unpack(message)

    accepted = Accept(suffix_only=True, from_start=True).receive_all(read)
    if accepted != [parse(message, position) for position, message in read]:
        raise RuntimeError("the accept rule did not deliver the sequence as it is")
    samples = rates({"parse and accept": accept_each, "struct unpack_from": unpack_each}, len(messages))
    report.figures(samples, "frames/s")
    report.ratio(samples, "parse and accept", "struct unpack_from", 0.2)


async def measure(report: Report) -> None:
    compare_rows(report)
    compare_arrow(report)
    compare_single(report)
    compare_header(report)


if __name__ == "__main__":
    main("codec", measure)
