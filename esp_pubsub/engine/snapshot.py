"""A snapshot: all that a member needs to go on from a place in the order. Pure: snapshots.py has the files.

It says where in the order it stands, what was taken of each input and the whole state of its accept rule, the timers,
where each line is, the step chain, and the model's state (state.py). A digest over all of it ends the file: one that is
torn, foreign or of another version is passed over.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from os import SEEK_CUR
from typing import Any, BinaryIO, cast

import msgspec

from ..errors import BadFrame
from ..failover.accept import Accept, Source
from ..wire.frame import Limits, parse
from .order import Poisoned, Version
from .state import Part

MAGIC = b"esp-pubsub snapshot 1\n"
_LENGTHS = struct.Struct("<HI")  # of a part: its field's name and its body
_END = _LENGTHS.pack(0xFFFF, 0)
_DIGEST = 32


class SourceState(msgspec.Struct, frozen=True, array_like=True):
    """What an accept rule knows of a source."""

    number: int
    run: int
    last: int
    chain: int | None
    joining: bool
    admitted: int
    held: list[tuple[int | None, bytes]]
    """Frames beyond the last, with their positions, in the order in which they came."""
    diverged: list[tuple[int, int]]


class InputState(msgspec.Struct, frozen=True, array_like=True):
    """What was taken of an input."""

    window: str
    position: int | None
    """After the last message that was taken; None for a queue."""
    incarnation: int | None
    from_start: bool
    sources: list[SourceState]
    """In the order in which they were last seen."""


class LineState(msgspec.Struct, frozen=True, array_like=True):
    """Where an output window is: its last block and that block's chain."""

    topic: str
    last: int
    chain: int


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """Everything but the model's state."""

    order: int
    """The source of the engine's order, which names the engine and its run."""
    beginning: int
    """The chain of its entry 1."""
    version: str
    """Of the model."""
    place: int
    """How far it is: in written order the id of the last frame, in derived order the position after the input's last
    message.
    """
    chain: int
    """Of that frame; 0 in derived order."""
    position: int
    """Of that frame on the order topic; 0 in derived order."""
    incarnation: int | None
    """Of the order topic."""
    inputs: list[InputState]
    lines: list[LineState]
    steps: int
    step_chain: int
    marks: list[tuple[int, int]]
    now: int | None
    timers: list[tuple[str, int]]
    passed: list[Poisoned] = []
    """Blocks that entries up to its place pass over, and that may come yet."""
    runs: Version | None = None
    """The version that runs after its place: another one, if it was taken at a switch. None in derived order."""
    kinds: dict[str, str] = {}
    """What the fields of the state are, that are in slices: `dict` or `list`."""


def digest_of(data: bytes) -> bytes:
    """What names a snapshot, and proves that it is whole."""
    return data[-_DIGEST:]


class NotASnapshot(ValueError):
    """Bytes that are none, or none of this engine."""


class Writer:
    """A snapshot as a file, a piece at a time: `head`, each `part`, `end`."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=_DIGEST)

    def head(self, snapshot: Snapshot) -> bytes:
        """The file's beginning."""
        return self._said(MAGIC) + self.part(Part("", _encode(snapshot)))

    def part(self, part: Part) -> bytes:
        """One more part of the state."""
        name = part.field.encode()
        return self._said(_LENGTHS.pack(len(name), len(part.body)) + name + part.body)

    def end(self) -> bytes:
        """The file's end: without it, it is torn."""
        return self._said(_END) + self._digest.digest()

    def _said(self, piece: bytes) -> bytes:
        self._digest.update(piece)
        return piece


def read_head(file: BinaryIO) -> Snapshot:
    """Everything but the state, of a file that need not be whole. NotASnapshot for anything else."""
    try:
        if file.read(len(MAGIC)) != MAGIC:
            raise NotASnapshot("it is no snapshot of this version of esp-pubsub")
        name, size = _LENGTHS.unpack(file.read(_LENGTHS.size))
        file.seek(name, SEEK_CUR)
        return cast(Snapshot, _decode(file.read(size)))
    except (msgspec.MsgspecError, struct.error) as e:
        raise NotASnapshot(f"it cannot be read: {e}") from None


def read(data: bytes) -> tuple[Snapshot, list[Part]]:
    """A file as a snapshot. NotASnapshot for anything else, and nothing else whatever the bytes."""
    whole = memoryview(data)
    body, digest = whole[:-_DIGEST], whole[-_DIGEST:]
    if not data.startswith(MAGIC):
        raise NotASnapshot("it is no snapshot of this version of esp-pubsub")
    if blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise NotASnapshot("it is torn: its digest does not match")
    at, parts = len(MAGIC), []
    try:
        while (lengths := body[at : at + _LENGTHS.size]) != _END:
            name, size = _LENGTHS.unpack(lengths)
            at += _LENGTHS.size
            parts.append(Part(bytes(body[at : at + name]).decode(), bytes(body[at + name : at + name + size])))
            at += name + size
        return _decode(parts[0].body), parts[1:]
    except (msgspec.MsgspecError, struct.error, UnicodeDecodeError, IndexError) as e:
        raise NotASnapshot(f"it cannot be read: {e}") from None


def accept_state(accept: Accept) -> list[SourceState]:
    """What an accept rule knows."""
    return [
        SourceState(
            source.number, source.run, source.last, source.chain, source.joining, source.admitted,
            [(frame.position, frame.data) for frame in source.hold.values()], list(source.diverged.items()),
        )
        for source in accept.sources.values()
    ]  # fmt: skip


def sources_of(state: InputState) -> dict[int, Source]:
    """What an accept rule knew. NotASnapshot for frames that are none."""
    found: dict[int, Source] = {}
    for known in state.sources:
        source = Source(known.number, known.run, known.last, known.chain, joining=known.joining)
        source.admitted = known.admitted
        source.diverged = dict(known.diverged)
        try:
            frames = [parse(data, position, Limits(len(data), 1 << 32)) for position, data in known.held]  # as it was
        except BadFrame as e:
            raise NotASnapshot(f"it holds a frame that cannot be read: {e}") from None
        source.hold = {frame.id: frame for frame in frames}
        found[known.number] = source
    return found


_encode = msgspec.msgpack.Encoder().encode
_decode: Any = msgspec.msgpack.Decoder(Snapshot).decode
