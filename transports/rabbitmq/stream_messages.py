"""Messages as they stand in a stream: AMQP 1.0, one data section, which every client of streams and every AMQP 0-9-1
consumer of the queue can read.

Several are published as one entry, an uncompressed sub-batch: the broker writes an entry whole or not at all. What
others wrote is read too: other sections are passed over, gzip is undone; what has no data section, or is compressed in
another way, is handed on as it is.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress

from esp_pubsub.bus import Message

from .stream_link import CHUNK, LARGEST_FRAME, Chunk

ENVELOPE = 12  # bytes around a message
FRAME = 64  # bytes around all of them, at most
MOST = 0xFFFF  # messages in an entry

_DATA = b"\0Su\xb0"  # a described value, 0x75, data: binary with a length of four bytes
_entry = struct.Struct(">I4sI")
_batch = struct.Struct(">BHII")
_GZIP = 1
_SUB_BATCH = 0x80
_PIECE = 1 << 18  # bytes that are unpacked at once, or as many as one message has
_message = tuple.__new__


def publication(number: int, messages: Sequence[bytes]) -> list[bytes]:
    """The content of a PUBLISH of one entry; `number` comes back when it is confirmed."""
    parts = [b""]
    pack = _entry.pack
    for data in messages:
        size = len(data)
        parts.append(pack(size + 8, _DATA, size))
        parts.append(data)
    parts[0] = struct.pack(">BIQ", 0, 1, number)
    if len(messages) > 1:
        size = ENVELOPE * len(messages) + sum(map(len, messages))
        parts[0] += _batch.pack(_SUB_BATCH, len(messages), size, size)
    return parts


def messages_of(header: Chunk, content: memoryview, base: int) -> Iterator[list[Message]]:
    """What a delivered chunk holds, unpacked piece by piece. ValueError if it is damaged."""
    data = content[CHUNK : CHUNK + header.length]
    if len(data) != header.length or zlib.crc32(data) != header.crc:
        raise ValueError("a chunk has another checksum than it says")
    at, end, position = 0, len(data), base + header.first
    try:
        while at < end:
            if data[at] < _SUB_BATCH:
                found: list[Message] = []
                at = _take(found, data, at, end, position)
                position += len(found)
                yield found
            else:
                kind, count, whole, size = _batch.unpack_from(data, at)
                at += _batch.size
                yield from _unpack(kind >> 4 & 7, count, whole, data[at : at + size], position)
                at += size
                position += count
    except (IndexError, struct.error) as e:
        raise ValueError("a chunk is not made of entries") from e


def _unpack(way: int, count: int, whole: int, data: memoryview, position: int) -> Iterator[list[Message]]:
    """The messages of a sub-batch; itself, if that cannot be read: the broker does not look into what it is given."""
    if way == 0:
        found: list[Message] = []
        with suppress(IndexError):
            if len(data) == whole:
                _take(found, data, 0, whole, position)
        yield found if len(found) == count else [_message(Message, (position, bytes(data)))]
    elif way == _GZIP and _is_whole(data, count, whole):
        for _, piece in _unzip(data, whole):
            found = []
            _take(found, piece, 0, len(piece), position)
            position += len(found)
            yield found
    else:
        yield [_message(Message, (position, bytes(data)))]


def _is_whole(data: memoryview, count: int, whole: int) -> bool:
    """Whether it unpacks to what it says. Nothing of it is kept for that."""
    try:
        return whole <= LARGEST_FRAME and sum(found for found, _ in _unzip(data, whole)) == count
    except (IndexError, zlib.error):
        return False


def _unzip(data: memoryview, left: int) -> Iterator[tuple[int, memoryview]]:
    """What is packed by gzip, `left` bytes, in pieces of so many whole messages. IndexError if it is something else."""
    undo, rest = zlib.decompressobj(31), bytearray()
    packed: bytes | memoryview = data
    while not undo.eof and (piece := undo.decompress(packed, _PIECE)):
        packed = undo.unconsumed_tail
        rest += piece
        left -= len(piece)
        if left < 0:
            break
        count = at = 0
        while (past := at + 4 + int.from_bytes(rest[at : at + 4], "big")) <= len(rest) and rest[at] < _SUB_BATCH:
            count, at = count + 1, past
        if at:
            whole, rest = rest, rest[at:]
            yield count, memoryview(whole)[:at]
    if left or rest:
        raise IndexError("what is packed is not what it says")


def _take(found: list[Message], data: memoryview, at: int, end: int, position: int) -> int:
    """Entries that are one message each, up to the end or the next sub-batch; where they end."""
    unpack, append = _entry.unpack_from, found.append
    while at < end and data[at] < _SUB_BATCH:
        if end - at >= ENVELOPE:
            size, kind, length = unpack(data, at)
        else:
            size, kind, length = int.from_bytes(data[at : at + 4], "big"), b"", 0
        past = at + 4 + size
        if past > end:
            raise IndexError("an entry is longer than what holds it")
        if kind == _DATA and length + 8 == size:
            append(_message(Message, (position, bytes(data[at + ENVELOPE : past]))))
        else:
            append(_message(Message, (position, _body(bytes(data[at + 4 : past])))))
        at = past
        position += 1
    return at


def _body(entry: bytes) -> bytes:
    """The data of an AMQP 1.0 message of whatever sections; the whole, if it is none or has no data."""
    parts: list[bytes] = []
    at, end = 0, len(entry)
    while at < end:
        descriptor = entry[at : at + 2]
        if descriptor == b"\0\x53":
            section, at = entry[at + 2 : at + 3], at + 3
        elif descriptor == b"\0\x80":
            section, at = entry[at + 9 : at + 10], at + 10
        else:
            return entry
        form = entry[at] if at < end else 0
        width = {0xA0: 1, 0xB0: 4, 0xC0: 1, 0xD0: 4, 0xE0: 1, 0xF0: 4}.get(form & 0xF0, 0)
        fixed = {0x40: 0, 0x50: 1, 0x60: 2, 0x70: 4, 0x80: 8, 0x90: 16}.get(form & 0xF0)
        if not width and fixed is None:
            return entry
        start = at + 1 + width
        at = start + (int.from_bytes(entry[at + 1 : start], "big") if width else fixed or 0)
        if at > end:
            return entry
        if section == b"u":
            parts.append(entry[start:at])
    return b"".join(parts) if parts else entry
