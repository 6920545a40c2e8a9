"""What a fetch's batches hold, if somebody else wrote them."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CorruptRecordException
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

from esp_pubsub.transports.kafka import unpacking


def varint(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def record(number: int, value: bytes, *header: bytes) -> bytes:
    headers = b"".join(varint(len(name)) + name + varint(0) for name in header)
    body = b"\0" + varint(0) + varint(number) + varint(-1) + varint(len(value)) + value + varint(len(header)) + headers
    return varint(len(body)) + body


def batch(base: int, *records: bytes) -> bytes:
    count = len(records)
    sealed = struct.pack(">hiqqqhii", 0, count - 1, 1, 1, -1, -1, -1, count) + b"".join(records)
    return struct.pack(">qiibI", base, len(sealed) + 9, -1, 2, calc_crc32c(sealed)) + sealed


def read(data: bytes) -> list[tuple[int, bytes]]:
    at = TopicPartition("t", 0)
    more: Any = (None, 0, None, None, True, "read_uncommitted")
    with unpacking.bounded(1 << 20):
        return [(found.offset, found.value) for found in unpacking._Records(at, MemoryRecords(data), *more)]


def test_a_header_whose_name_is_no_text_costs_its_batch_and_nothing_behind_it() -> None:
    poison = batch(2, record(0, b"theirs", b"h\xe9ader"), record(1, b"theirs too"))
    found = read(batch(0, record(0, b"a"), record(1, b"b")) + poison + batch(4, record(0, b"c")))
    assert [position for position, _ in found] == [0, 1, 3, 4]
    assert found[2][1].startswith(b"t: a batch that cannot be unpacked: 'utf-8'")
    assert [found[0][1], found[1][1], found[3][1]] == [b"a", b"b", b"c"]


def test_a_batch_whose_sum_is_wrong_is_not_passed_over() -> None:
    data = bytearray(batch(0, record(0, b"a")))
    data[-2] ^= 1
    with pytest.raises(CorruptRecordException):
        read(bytes(data))


def test_a_size_that_is_no_batch_ends_the_fetch_instead_of_looping() -> None:
    with pytest.raises(CorruptRecordException):
        read(batch(0, record(0, b"a")) + struct.pack(">qi", 1, 0))
