"""Rows in, sealed blocks with ids out: the encoder and the outbox of one sequence. Pure.

A publisher has one of these, an engine one for each output window.
"""

from __future__ import annotations

from .encode import Encoded, Encoder
from .errors import TooLarge
from .failover.outbox import Outbox
from .schema import Schema
from .wire.frame import BLOCK, TRANSACTIONAL, Sealed, seal


class BlockWriter:
    """Makes the blocks of one sequence. Encoding and giving an id are two steps, because room is waited for between."""

    __slots__ = ("_fingerprint", "encode", "largest", "outbox", "run", "schema", "source")

    def __init__(self, schema: Schema, encoder: Encoder, outbox: Outbox, source: int, run: int, largest: int) -> None:
        """`largest`: the bytes of a message that the bus takes."""
        self.schema = schema
        self.outbox = outbox
        self.source = source
        self.run = run
        self.largest = largest
        self.encode = encoder.encode
        """See `Encoder.encode`. Check the size against `largest` before `seal`."""
        self._fingerprint = schema.fingerprint

    def too_large(self, size: int) -> TooLarge:
        """The error for a message of so many bytes, more than the bus takes."""
        return TooLarge(f"a block of {size} bytes; this bus takes {self.largest}", size=size, limit=self.largest)

    def seal(self, encoded: Encoded, transactional: bool = False) -> Sealed:
        """The next block of the sequence. It counts once it is added to the outbox; seal the next one after that."""
        body_kind, marks, count, body = encoded
        if transactional:
            marks |= TRANSACTIONAL
        outbox = self.outbox
        return seal(
            BLOCK, body_kind, marks, count, self.source, self.run, outbox.last + 1, self._fingerprint, outbox.chain,
            body,
        )  # fmt: skip
