"""A topic as a list of messages, without a bus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from esp_pubsub.bus import Message
from esp_pubsub.encode import Encoder
from esp_pubsub.schema import Schema
from esp_pubsub.wire.frame import BLOCK, Frame, Sealed, frames, parse, seal

SCHEMA = Schema("id*:int64")


class Topic:
    """Messages in order, positions from `first` on."""

    def __init__(self, first: int = 0) -> None:
        self.messages: list[Message] = []
        self._next = first

    def put(self, *blocks: Sealed | bytes | None) -> None:
        """Blocks, foreign bytes, or None for a position that holds nothing."""
        for each in blocks:
            if each is not None:
                data = each if isinstance(each, bytes) else frames([each], 0, 0)[0]
                self.messages.append(Message(self._next, data))
            self._next += 1


def line(source: int, count: int, *, run: int = 0, rows: int = 1, behind: Sealed | None = None) -> list[Sealed]:
    """Blocks 1, 2, 3, ... of one source, or those that continue one."""
    found: list[Sealed] = []
    for _ in range(count):
        last, chain = (0, 0) if behind is None else (behind.id, behind.chain)
        kind, flags, events, body = Encoder(SCHEMA).encode([(last * 100 + i,) for i in range(rows)])
        behind = seal(BLOCK, kind, flags, events, source, run, last + 1, SCHEMA.fingerprint, chain, body)
        found.append(behind)
    return found


def frame_of(schema: Schema, rows: Any, kind: str = "rows", *, id: int = 1, **marks: Any) -> Frame:
    """One block as it is read."""
    body_kind, flags, events, body = Encoder(schema, kind).encode(rows, **marks)  # type: ignore[arg-type]
    block = seal(BLOCK, body_kind, flags, events, 7, 3, id, schema.fingerprint, 0, body)
    return parse(frames([block], 0, 1_700_000_000_000_001)[0], id)


def cut(messages: Sequence[Message], sizes: Iterable[int]) -> Iterable[Sequence[Message]]:
    """The same messages in reads of these sizes, the last one with what is left."""
    at = 0
    for size in sizes:
        yield messages[at : at + size]
        at += size
    yield messages[at:]
