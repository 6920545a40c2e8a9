"""What a subscriber or publisher is told besides its blocks. All frozen; handed to `on_notice`, else logged.

Ids are inclusive on both ends. `source` is the 64-bit number of a sequence of blocks on its topic (PROTOCOL 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Joined:
    """A reader that was not there from the start begins with this block of this source."""

    source: int
    run: int
    id: int


@dataclass(frozen=True, slots=True)
class Missed:
    """Blocks that will not be delivered: retention or a purge took them, or they came too late."""

    source: int
    run: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Continuity ended on the bus itself: messages that went before they were read (None: nobody knows how many)."""

    messages: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that have been awaited for long while later ones are here. What comes of it is up to who sends them."""

    source: int
    run: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class NewRun:
    """A higher run replaced the current one of a source."""

    source: int
    old: int
    new: int


@dataclass(frozen=True, slots=True)
class InputDiffers:
    """A frame that does not continue the sequence delivered so far: another input under the same name."""

    source: int
    run: int
    id: int
    ours: int
    theirs: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A source not seen for longest was dropped from memory, because the bound on sources was reached."""

    source: int
    run: int
    last: int


@dataclass(frozen=True, slots=True)
class BadMessage:
    """A message that is no frame of ours, or a forged one. It was passed over and changed nothing."""

    position: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    """A new feed or pipe took the place of one that died."""

    topic: str
    after: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Trouble with the bus, in the words of the SAS callbacks (failure and code) and as the error behind it."""

    failure: str
    code: str
    error: Exception


Notice = Joined | Missed | Skipped | Held | NewRun | InputDiffers | Forgotten | BadMessage | Reconnected | Failure
