"""How an engine begins: what its members have in common, and from where they read. Pure: opening.py asks the bus.

It is entry 1 of the order topic. The first one on the log counts, whoever wrote it; whoever comes later takes it, or
finds that it is set up differently and leaves. So all members read each input from the same position.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ..errors import BadFrame, BeginningDiffers
from ..wire.frame import ENTRY, MAP, Sealed, parse, seal

_PACKAGES = ("numpy", "pyarrow")  # what they compute, or how they encode it, may change between versions


@dataclass(frozen=True, slots=True)
class Input:
    """An input window and where its first message stands, as the topic was when the engine began."""

    window: str
    topic: str
    schema: str
    position: int
    incarnation: int | None
    runs: dict[int, int]
    """The runs of its sources that were retained then, where the first message is not the topic's first."""

    @property
    def from_start(self) -> bool:
        """Nothing of the topic lies in front of the first message."""
        return self.position == 0


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
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    limits: dict[str, int]
    python: str
    machine: str
    packages: dict[str, str]

    def sealed(self, source: int, run: int) -> Sealed:
        """As entry 1."""
        return seal(ENTRY, MAP, source=source, run=run, id=1, body=_encode(self))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Beginning).decode


def platform_here() -> tuple[str, str, dict[str, str]]:
    """Python's version and machine, and the versions of those packages that are imported and matter."""
    version = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    packages = {name: str(vars(sys.modules[name]).get("__version__")) for name in _PACKAGES if name in sys.modules}
    return version, f"{platform.machine()} {sys.byteorder}", packages


def read_beginning(data: bytes, source: int, run: int) -> tuple[Beginning, int] | None:
    """The beginning that a message of the order topic is, and its chain; None for any other message."""
    try:
        frame = parse(data)
        if (frame.kind, frame.source, frame.run, frame.id, frame.link) != (ENTRY, source, run, 1, 0):
            return None
        return _decode(frame.body), frame.chain
    except (BadFrame, msgspec.MsgspecError):
        return None


def check(ours: Beginning, began: Beginning) -> None:
    """BeginningDiffers if a member that would begin like this is no member of the engine that began like that."""
    differences = [
        (name, mine, theirs) for name, mine in _facts(ours).items() if mine != (theirs := _facts(began).get(name))
    ] + [(name, None, theirs) for name, theirs in _facts(began).items() if name not in _facts(ours)]
    if differences:
        text = "; ".join(f"{name}: here {mine!r}, there {theirs!r}" for name, mine, theirs in differences)
        raise BeginningDiffers(
            f"this member of the engine is set up differently from how the engine began: {text}. Make it the same, or "
            "begin a new run on all members (run=...)",
            differences=differences,
        )


def _facts(beginning: Beginning) -> Mapping[str, object]:
    """All but where the inputs begin, each by a name for people."""
    facts: dict[str, object] = {
        "version of the model": beginning.version,
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
