"""Rows in, sealed blocks with ids out: the encoder and the outbox of one sequence. Pure.

A publisher has one of these, an engine one for each output window.
"""

from __future__ import annotations

from typing import Any

from .encode import Encoded, Encoder
from .errors import TooLarge
from .failover.outbox import Outbox
from .schema import Schema
from .wire.frame import BLOCK, BODY_AT, TRANSACTIONAL, Sealed, seal


class BlockWriter:
    """Makes the blocks of one sequence. Encoding and giving an id are two steps, because room is waited for between."""

    __slots__ = ("_encode", "_fingerprint", "_largest", "outbox", "run", "schema", "source")

    def __init__(self, schema: Schema, encoder: Encoder, outbox: Outbox, source: int, run: int, largest: int) -> None:
        """`largest`: the bytes of a message that the bus takes."""
        self.schema = schema
        self.outbox = outbox
        self.source = source
        self.run = run
        self._encode = encoder.encode
        self._fingerprint = schema.fingerprint
        self._largest = largest

    def encode(self, rows: Any, opcode: Any, flags: Any) -> Encoded:
        """A body, and what the header says of it. Raises ValueRefused or TooLarge; then nothing has happened."""
        encoded = self._encode(rows, opcode, flags)
        size = BODY_AT + len(encoded[3])
        if size > self._largest:
            raise TooLarge(f"a block of {size} bytes; this bus takes {self._largest}", size=size, limit=self._largest)
        return encoded

    def seal(self, encoded: Encoded, *, transactional: bool = False) -> Sealed:
        """The next block of the sequence. It counts once it is added to the outbox; seal the next one after that."""
        body_kind, marks, count, body = encoded
        if transactional:
            marks |= TRANSACTIONAL
        outbox = self.outbox
        return seal(
            BLOCK,
            body_kind,
            marks,
            count,
            self.source,
            self.run,
            outbox.last + 1,
            self._fingerprint,
            outbox.chain,
            body,
        )
