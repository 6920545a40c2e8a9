"""Blocks one behind the other, as a file or a peer holds them: four bytes of length, then the message that the block
would be on a bus (docs/reference/protocol.md), which has a checksum and says which schema it is of.

SAS has a format of this name too. Its form is not public, so neither can read the other's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import BadFrame
from ..events import Opcode
from ..schema import Schema
from ..wire.frame import BLOCK, BODY_AT, LIMITS, ROWS, frames, parse, seal
from ..wire.rows import codec
from .values import FLAG_LETTERS, BadText, Batch, Pending

LENGTH = struct.Struct("<I")
SIZES = range(BODY_AT, BODY_AT + LIMITS.frame_bytes + 1)
"""What a length may say."""
_FLAGS = bytes(FLAG_LETTERS)


class BinaryWriter:
    """Events to bytes."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema.fingerprint
        self._encode = codec(schema).encode

    def write(
        self, rows: Sequence[Sequence[Any]], opcode: int | bytes = Opcode.INSERT, flags: int | bytes = 0
    ) -> bytes:
        """A block."""
        body = self._encode(rows, opcode, flags)
        (message,) = frames([seal(BLOCK, ROWS, count=len(rows), schema=self._schema, body=body)], 0, 0)
        return LENGTH.pack(len(message)) + message


class BinaryReader:
    """Bytes to events, fed as they come. `feed` and `close` are to be iterated to their end.

    Blocks are the input's own, at most `block` events each. Whatever is wrong raises BadText, whose line is the number
    of the block, and ends the reading.
    """

    def __init__(self, schema: Schema, *, block: int = 256) -> None:
        self._schema = schema
        self._decode = codec(schema).decode
        self._pending = Pending(schema, block)
        self._rest = bytearray()  # of the input, not read yet
        self._blocks = 0
        self._ended: BadText | None = None

    def feed(self, data: bytes) -> Iterator[Batch]:
        """More of the input; gives out the blocks that are whole now."""
        if self._ended is not None:
            raise self._ended
        rest = self._rest
        rest += data
        while len(rest) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(rest)[0]
            if end - LENGTH.size not in SIZES:
                raise self._bad("it has no length; the input is not of this format, or was cut")
            if len(rest) < end:
                break
            message = bytes(rest[LENGTH.size : end])
            del rest[:end]
            yield from self._block(message)

    def close(self) -> Iterator[Batch]:
        """The end of the input, which must be the end of a block."""
        if self._ended is not None:
            raise self._ended
        if self._rest:
            raise self._bad("the input ends in the middle of it")
        yield from ()

    def _block(self, message: bytes) -> Iterator[Batch]:
        try:
            frame = parse(message)
            if frame.kind != BLOCK or frame.body_kind != ROWS:
                raise ValueError("it holds no rows")
            if frame.schema != self._schema.fingerprint:
                raise ValueError(f"its schema is another one than {self._schema}")
            *marks, rows = self._decode(frame.body, frame.count)
            opcodes, flags = (bytes([each]) * len(rows) if isinstance(each, int) else each for each in marks)
            if flags.translate(None, _FLAGS):
                raise ValueError("it holds a flag that there is not")
        except (BadFrame, ValueError) as e:
            raise self._bad(str(e)) from None
        self._blocks += 1
        self._pending.extend(rows, opcodes, flags)
        yield from self._pending.take(rest=True)

    def _bad(self, why: str) -> BadText:
        number = self._blocks + 1
        self._ended = BadText(f"block {number}: {why}", line=number, column=None, field=None, type=None, value=None)
        return self._ended
