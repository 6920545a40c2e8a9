"""How an engine begins: what its members have in common, and from where they read. Pure: opening.py asks the bus.

It is entry 1 of the order topic. The first one on the log counts, whoever wrote it; whoever comes later takes it, or
finds that it is set up differently and leaves. So all members read each input from the same position.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from ..bus import Place
from ..errors import BadFrame, BeginningDiffers
from ..wire.frame import ENTRY, MAP, Sealed, parse, seal
from .order import Position

_PACKAGES = ("numpy", "pyarrow")  # what they compute, or how they encode it, may change between versions


@dataclass(frozen=True, slots=True)
class Input:
    """An input window and where its first message stands, as the topic was when the engine began."""

    window: str
    topic: str
    schema: str
    position: Position | None
    """None for a queue: what it holds is read once, by whoever writes the order."""
    incarnation: int | None

    @property
    def place(self) -> Place | None:
        """Where a reader of it begins; None for a queue."""
        return None if self.position is None else Place(self.position, self.incarnation)


@dataclass(frozen=True, slots=True)
class Output:
    """An output window."""

    window: str
    topic: str
    schema: str


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is the same for all members. Where the inputs begin is the first member's finding."""

    version: str
    order: str
    """`derived` or `written`."""
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    limits: dict[str, int]
    python: str
    machine: str
    packages: dict[str, str]
    basis: bytes = b""
    """The digest of the snapshot of an earlier run with which it begins; empty where it begins with its inputs."""

    def sealed(self, source: int, run: int) -> Sealed:
        """As entry 1."""
        return seal(ENTRY, MAP, source=source, run=run, id=1, body=_encode(self))


class Begun(NamedTuple):
    """A beginning as it stands on the order topic: it is retained like this, so that no retention can remove it."""

    place: Place
    message: bytes

    @property
    def following(self) -> Place:
        """Where a reader of the order begins."""
        return Place(self.place.position + 1, self.place.incarnation)

    def encoded(self) -> bytes:
        """As a retained value."""
        return _encode((*self.place, self.message))

    @staticmethod
    def decoded(value: bytes) -> Begun | None:
        """None for what is none."""
        try:
            position, incarnation, message = _decode_begun(value)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return Begun(Place(position, incarnation), message)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Beginning).decode
_decode_begun = msgspec.msgpack.Decoder(tuple[Position, int | None, bytes]).decode


def platform_here() -> tuple[str, str, dict[str, str]]:
    """Python's version and machine, and the versions of those packages that are imported and matter."""
    version = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    packages = {name: str(vars(sys.modules[name]).get("__version__")) for name in _PACKAGES if name in sys.modules}
    return version, f"{platform.machine()} {sys.byteorder}", packages


def is_entry(data: bytes, source: int, run: int) -> bool:
    """Whether a message is an entry of this order, or a part of one."""
    try:
        frame = parse(data)
    except BadFrame:
        return False
    return (frame.kind, frame.source, frame.run) == (ENTRY, source, run)


def read_beginning(data: bytes, source: int, run: int) -> tuple[Beginning, int] | None:
    """The beginning that a message of the order topic is, and its chain; None for any other message."""
    try:
        frame = parse(data)
        if (frame.kind, frame.source, frame.run, frame.id, frame.link) != (ENTRY, source, run, 1, 0):
            return None
        return _decode(frame.body), frame.chain
    except (BadFrame, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def check(ours: Beginning, began: Beginning, *, switches: bool = False) -> None:
    """BeginningDiffers if a member that would begin like this is no member of the engine that began like that.

    `switches`: it has snapshots, and so it can be of a version to which a written order switches. Such a version may
    also have other output windows.
    """
    switchable = ours.version != began.version and began.order == "written"
    if switchable and switches:
        began = replace(began, version=ours.version, outputs=ours.outputs)
    mine, theirs = _facts(ours), _facts(began)
    pairs = [(name, mine.get(name), theirs.get(name)) for name in mine | theirs]
    differences = [(name, one, other) for name, one, other in pairs if one != other]
    if differences:
        text = "; ".join(f"{name}: here {one!r}, there {other!r}" for name, one, other in differences)
        way_out = ", or give it snapshots= and switch to its version (esp engine switch)" if switchable else ""
        raise BeginningDiffers(
            f"the engine at this URL began with another model or other settings: {text}. Make them the same, take "
            f"another URL, or begin a new run on all members (run=..., --run){way_out}",
            differences=differences,
        )


def _facts(beginning: Beginning) -> dict[str, object]:
    """All but where the inputs begin, each by a name for people."""
    facts: dict[str, object] = {
        "version of the model": beginning.version,
        "order": beginning.order,
        "Python": beginning.python,
        "machine": beginning.machine,
    }
    for name, windows in (("input", beginning.inputs), ("output", beginning.outputs)):
        for window in windows:
            facts[f"topic of {name} {window.window}"] = window.topic
            facts[f"schema of {name} {window.window}"] = window.schema
        facts[f"{name}s in order"] = [window.window for window in windows]
    facts |= beginning.limits
    facts |= {f"version of {name}": version for name, version in beginning.packages.items()}
    return facts
