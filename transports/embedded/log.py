"""A topic as a log in LMDB: one key per batch of messages, positions counted from 0 forever.

    key  b"\\0"                          value  INFO: version, incarnation, first, next, bytes
    key  position of a batch's first     value  HEAD: time, n; then n lengths; then n messages
         message, 8 bytes big endian

All functions work inside a transaction that the caller owns. Whole batches are trimmed, in the transaction that
appends, so a ring keeps its size; the batch just written always stays.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

import lmdb

from esp_pubsub.bus import Run
from esp_pubsub.errors import BusRefused

from .pages import DAMAGE

VERSION = 1
_INFO_KEY = b"\0"
_INFO = struct.Struct("<IQQQQ")
_HEAD = struct.Struct("<QI")
_ONE = struct.Struct("<QII")  # the head of a batch of one message, and its length
_KEY = struct.Struct(">Q")


class Info(NamedTuple):
    """What a log knows of itself: it holds positions first..next-1 in `size` bytes."""

    incarnation: int
    first: int
    next: int
    size: int


class Ring(NamedTuple):
    """How much a log keeps."""

    records: int
    size: int


def info(transaction: lmdb.Transaction) -> Info | None:
    """None for a log that nobody has begun."""
    value = transaction.get(_INFO_KEY)
    if value is None:
        return None
    version, *rest = _INFO.unpack(value)
    if version != VERSION:
        raise BusRefused(f"this bus directory was written by another version ({version}, this is {VERSION})")
    return Info(*rest)


def is_sound(transaction: lmdb.Transaction) -> bool:
    """The first and the last batch can be read, and are what the info says. lmdb.Error if a page is no page."""
    found = info(transaction)
    if found is None or found.first == found.next:
        return True
    cursor = transaction.cursor()
    if not cursor.last():
        return False
    last, n = _KEY.unpack(cursor.key())[0], _counted(cursor.value())
    return n > 0 and last + n == found.next and _counted(transaction.get(_KEY.pack(found.first), default=b"")) > 0


def _counted(value: bytes | memoryview[int]) -> int:
    """How many messages are in a batch; 0 if it is none."""
    if len(value) < _HEAD.size:
        return 0
    n: int = _HEAD.unpack_from(value)[1]
    end = _HEAD.size + 4 * n
    return n if end <= len(value) == end + sum(struct.unpack_from(f"<{n}I", value, _HEAD.size)) else 0


def begin(transaction: lmdb.Transaction) -> Info:
    """The log's info; a new log gets an incarnation nobody had before."""
    found = info(transaction)
    return found or _store(transaction, Info(_random(), 0, 0, 0))


def _random() -> int:
    return int.from_bytes(os.urandom(8), "little")


def _store(transaction: lmdb.Transaction, new: Info) -> Info:
    transaction.put(_INFO_KEY, _INFO.pack(VERSION, *new))
    return new


def pack(frames: Sequence[bytes], now: int) -> bytes:
    """The value of a batch, built before the lock is taken. `now`: microseconds since the epoch."""
    n = len(frames)
    return b"".join((_HEAD.pack(now, n), struct.pack(f"<{n}I", *map(len, frames)), *frames))


def append(transaction: lmdb.Transaction, value: bytes, count: int, ring: Ring) -> None:
    """Put a packed batch at the end and trim the front to the ring."""
    incarnation, first, end, size = begin(transaction)
    if not transaction.put(_KEY.pack(end), value, append=True):
        raise BusRefused(f"the topic holds something behind its end, position {end}: it is damaged")
    end += count
    size += len(value)
    if size > ring.size or end - first > ring.records:
        cursor = transaction.cursor()
        cursor.set_range(_KEY.pack(first))
        while (first := _KEY.unpack(cursor.key())[0]) < end - count and (
            size > ring.size or end - first > ring.records
        ):
            size -= len(cursor.value())
            cursor.delete()
    _store(transaction, Info(incarnation, first, end, size))


def empty(transaction: lmdb.Transaction) -> None:
    """Purge: everything goes, a new incarnation begins, positions go on."""
    old = begin(transaction)
    cursor = transaction.cursor()
    if cursor.set_range(_KEY.pack(0)):
        while cursor.delete():
            pass
    _store(transaction, Info(_random(), old.next, old.next, 0))


def read(transaction: lmdb.Transaction, begin: int, end: int, max_messages: int, max_bytes: int) -> Run:
    """Messages from position `begin` on, which the log must hold, up to `end`: at least one, then within bounds.

    None at all if what is there is damaged; then the transaction may be good for nothing any more.
    """
    batches: list[tuple[bytes, Sequence[int]]] = []
    position, size = begin, 0
    while position < end and position - begin < max_messages:
        try:
            first, value = position, transaction.get(_KEY.pack(position))
            if value is None:  # it is not the first of its batch
                cursor = transaction.cursor()
                if not _find(cursor, position):
                    break
                first, value = _KEY.unpack(cursor.key())[0], cursor.value()
            _, n, length = _ONE.unpack_from(value)
            if n == 1 and first == begin == end - 1 and len(value) == _ONE.size + length:
                return Run(begin, [(bytes(value), (_ONE.size, len(value)))])  # often, so in short
            lengths = struct.unpack_from(f"<{n}I", value, _HEAD.size)
        except (struct.error, *DAMAGE):
            break
        skipped = position - first
        ends = list(accumulate(lengths, initial=_HEAD.size + 4 * n))
        if skipped >= n or ends[-1] != len(value):
            break
        taken = _fitting(
            lengths[skipped:] if skipped else lengths, begin + max_messages - position, max_bytes - size,
            at_least=not batches,
        )  # fmt: skip
        if taken:
            batches.append((bytes(value), ends[skipped : skipped + taken + 1]))
        if skipped + taken < n:
            break
        size += ends[n] - ends[skipped]
        position = first + n
    return Run(begin, batches)


def mark(transaction: lmdb.Transaction, position: int) -> int | None:
    """What tells the message at a position from another one; None if the log does not hold it, or it is damaged."""
    cursor = transaction.cursor()
    try:
        if not _find(cursor, position):
            return None
        skipped, value = position - _KEY.unpack(cursor.key())[0], cursor.value()
        n = _counted(value)
        if skipped >= n:
            return None
        lengths = struct.unpack_from(f"<{n}I", value, _HEAD.size)
    except (struct.error, *DAMAGE):
        return None
    start = _HEAD.size + 4 * n + sum(lengths[:skipped])
    return crc32(value[start : start + lengths[skipped]])


def following(transaction: lmdb.Transaction, position: int, end: int) -> int:
    """Where the first batch at or behind a position begins; `end` if there is none."""
    cursor = transaction.cursor()
    return int(_KEY.unpack(cursor.key())[0]) if cursor.set_range(_KEY.pack(position)) else end


def _fitting(lengths: Sequence[int], most: int, max_bytes: int, *, at_least: bool) -> int:
    """How many messages from the front stay within both bounds; one at least, where nothing was taken before."""
    if len(lengths) > most or sum(lengths) > max_bytes:
        within = bisect_right(list(accumulate(lengths[: max(most, 0)])), max_bytes)
        return max(within, int(at_least))
    return len(lengths)


def _find(cursor: lmdb.Cursor, position: int) -> bool:
    """Put the cursor on the batch that holds a position."""
    key = _KEY.pack(position)
    if cursor.set_range(key):
        return bytes(cursor.key()) == key or (cursor.prev() and bytes(cursor.key()) != _INFO_KEY)
    return bool(cursor.last()) and bytes(cursor.key()) != _INFO_KEY


def position_at(transaction: lmdb.Transaction, found: Info, micros: int) -> int:
    """The first position written at or after a time, by the clocks of its writers; the end if there is none. Where the
    log is damaged it may be one before.
    """
    low, high = found.first, found.next
    cursor = transaction.cursor()
    while low < high:
        middle = (low + high) // 2
        if not _find(cursor, middle):
            return found.next
        base = _KEY.unpack(cursor.key())[0]
        value = cursor.value()
        n = _counted(value)
        if n and _HEAD.unpack_from(value)[0] < micros:
            low = max(base + n, middle + 1)
        else:
            high = base
    return low
