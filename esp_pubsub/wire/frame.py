"""The frame: 80 bytes of header and a body. One frame is one message on a bus (PROTOCOL 2).

    at  size  field
     0     4  magic E5 50 42 01 (the last byte is the version)
     4     4  term                                          \
     8     8  settled                                        | written by the sender,
    16     8  settled once more                              | anew at every write
    24     8  sent-at, microseconds since the epoch, UTC    /
    32     4  link: the chain of the block before           \
    36     4  chain: crc32(bytes 40.., link)                 |
    40     1  kind                                           | sealed with the id:
    41     1  body                                           | the same bytes on every
    42     2  flags                                          | member, never touched again
    44     4  event count                                    |
    48     8  source    56  8  run    64  8  id              |
    72     8  schema fingerprint                             |
    80        body                                          /

`chain` is a digest of everything from byte 40 on, seeded with the chain of the block before, so it stands for all
blocks 1..id: one crc over one run of bytes proves that the block is whole, how long it is, and where in the sequence
it belongs. Of what stands in front, only `settled` decides anything, and it stands there twice; term and sent-at
are for people. Kinds other than blocks are sealed the same way, with link 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import BadFrame

try:
    from isal.isal_zlib import crc32  # the extra `fast`: the same digest, three to ten times as fast
except ImportError:
    from zlib import crc32

Buffer = bytes | memoryview  # and whatever else has bytes to read

MAGIC = b"\xe5PB\x01"
HEADER = struct.Struct("<4s4xQQ8xIIBBHIQQQQ")  # term and sent-at are read when asked for
CHAIN_AT, SEALED_AT = 36, 40
BODY_AT = HEADER.size

BLOCK, BEAT, CLAIM, REQUEST, REPLY, ENTRY, STANDBY, CHALLENGE = 1, 2, 3, 4, 5, 6, 7, 8
NO_BODY, ROWS, ARROW, MAP = 0, 1, 2, 3
TRANSACTIONAL, MARKED = 1, 2  # flags; MARKED: an Arrow body with opcode and flag columns in front
WINDOW_FRAMES = 512
WINDOW_BYTES = 16 << 20

_HEAD = struct.Struct("<4sIQQQII")
_SEALED = struct.Struct("<BBHIQQQQ")
_LARGE = 4_096  # bytes from which on a view is cheaper than a copy
_SMALL = 1 << 16  # bytes up to which a message of one event cannot be over a limit
_SOURCE = struct.Struct("<Q")
_GLANCE = struct.Struct("<4s28xIIB7xQQQ")
_head = _HEAD.pack
_seal = _SEALED.pack
_unpack = HEADER.unpack_from
_new = tuple.__new__


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is built and on what is believed; checked before memory is taken."""

    frame_bytes: int = 64 << 20
    events: int = 1_000_000


LIMITS = Limits()


class Frame(NamedTuple):
    """One parsed header, the whole message it came from, and where that message stood on the bus."""

    magic: bytes
    settled: int
    settled_again: int
    link: int
    chain: int
    kind: int
    body_kind: int
    flags: int
    count: int  # type: ignore[assignment]  # a tuple's own count() is of no use here
    source: int
    run: int
    id: int
    schema: int
    position: Any
    data: bytes

    @property
    def body(self) -> bytes:
        """A copy of the body's bytes."""
        return self.data[BODY_AT:]

    @property
    def body_view(self) -> bytes | memoryview:
        """The body's bytes, not copied where they are many."""
        data = self.data
        return memoryview(data)[BODY_AT:] if len(data) > _LARGE else data[BODY_AT:]

    @property
    def sent_at(self) -> int:
        """Microseconds since the epoch, by the clock of who wrote it."""
        return int(_HEAD.unpack_from(self.data)[4])

    @property
    def term(self) -> int:
        """The term of the leadership it was written under, 0 without a group."""
        return int(_HEAD.unpack_from(self.data)[1])


class Sealed(NamedTuple):
    """A frame that has its id and its place, before a sender puts the volatile fields in front."""

    id: int
    link: int
    chain: int
    size: int
    """Bytes of the message it will be."""
    head: bytes
    body: Buffer


def seal(
    kind: int, body_kind: int = NO_BODY, flags: int = 0, count: int = 0, source: int = 0, run: int = 0, id: int = 0,
    schema: int = 0, link: int = 0, body: Buffer = b"",
) -> Sealed:  # fmt: skip
    """Give a body its place. What comes back is the same on every member that says the same."""
    head = _seal(kind, body_kind, flags, count, source, run, id, schema)
    return _new(Sealed, (id, link, crc32(body, crc32(head, link)), BODY_AT + len(body), head, body))


def frames(sealed: Iterable[Sealed], settled: int, sent_at: int, term: int = 0) -> list[bytes]:
    """The messages of one write; the volatile fields are the same for all of them."""
    return [
        _head(MAGIC, term, settled, settled, sent_at, link, chain) + head + body
        for _, link, chain, _, head, body in sealed
    ]


def parse(data: bytes, position: Any = None, limits: Limits = LIMITS) -> Frame:
    """One message as a frame. Raises BadFrame with a reason; believes nothing before it is checked."""
    try:
        fields = _unpack(data)
    except struct.error:
        raise BadFrame(_why(data, limits), reason=_why(data, limits)) from None
    if (
        fields[0] != MAGIC
        or fields[1] != fields[2]
        or crc32(data[SEALED_AT:] if len(data) < _LARGE else memoryview(data)[SEALED_AT:], fields[3]) != fields[4]
        or (
            (len(data) > _SMALL or fields[8] > 1 or limits is not LIMITS)
            and _over(limits, len(data) - BODY_AT, fields[8])
        )
    ):
        reason = _why(data, limits)
        raise BadFrame(reason, reason=reason)
    return _new(Frame, fields + (position, data))  # noqa: RUF005  # twice as fast as unpacking


def continuing(
    messages: Iterable[tuple[Any, bytes]],
    source: int,
    run: int,
    id: int,
    link: int,
    beyond: int,
    limits: Limits = LIMITS,
) -> list[Frame]:
    """The messages in front that are blocks id + 1, id + 2, ... of this line, whole and each linked to the one before.

    Ends before the first that is anything else, or further than `beyond` (0: no matter how far) ahead of its own
    `settled`: that one wants a closer look. Says no more than `parse` would, for all of them in one loop.
    """
    found: list[Frame] = []
    strict = limits is not LIMITS
    id += 1
    for message in messages:
        data = message[1]
        try:
            fields = _unpack(data)
        except struct.error:
            break
        size = len(data)
        if (
            fields[11] != id
            or fields[3] != link
            or fields[9] != source
            or fields[10] != run
            or fields[5] != BLOCK
            or fields[1] != fields[2]
            or fields[0] != MAGIC
            or (beyond and id - fields[1] > beyond)
            or crc32(data[SEALED_AT:] if size < _LARGE else memoryview(data)[SEALED_AT:], link) != fields[4]
            or ((fields[8] > 1 or size > _SMALL or strict) and _over(limits, size - BODY_AT, fields[8]))
        ):
            break
        found.append(_new(Frame, fields + message))  # its position and its data
        link = fields[4]
        id += 1
    return found


def source_of(data: bytes) -> int:
    """The source that a message claims to be of; 0 for what is too short to claim one."""
    try:
        return int(_SOURCE.unpack_from(data, 48)[0])
    except struct.error:
        return 0


def glance(data: bytes) -> tuple[bytes, int, int, int, int, int, int]:
    """Magic, link, chain, kind, source, run and id as a message claims them, for who knows what they must be."""
    try:
        found: tuple[bytes, int, int, int, int, int, int] = _GLANCE.unpack_from(data)
        return found
    except struct.error:
        return b"", 0, 0, 0, 0, 0, 0


def _over(limits: Limits, length: int, count: int) -> bool:
    return length > limits.frame_bytes or count > limits.events or count > length


def _why(data: bytes, limits: Limits) -> str:
    """The first thing that is wrong with this message, in words."""
    if data[:3] != MAGIC[:3]:
        return "no frame: it does not begin with E5 50 42"
    if data[3:4] != MAGIC[3:]:
        return f"protocol version {data[3:4].hex()}, this is version {MAGIC[3:].hex()}; a newer esp-pubsub may read it"
    length = len(data) - BODY_AT
    if length < 0:
        return f"truncated: {len(data)} bytes, a header alone has {BODY_AT}"
    _, settled, settled_again, link, chain, _, _, _, count, *_ = _unpack(data)
    if settled != settled_again:
        return "the two copies of settled differ"
    if length > limits.frame_bytes:
        return f"a body of {length} bytes, the limit is {limits.frame_bytes}"
    if crc32(data[SEALED_AT:], link) != chain:
        return "the chain does not match the bytes"
    if count > length:
        return f"{count} events cannot be in {length} bytes"
    return f"{count} events, the limit is {limits.events}"
