"""What a model knows of the calls that it has made: which of them have no outcome yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..events import Block


@dataclass
class Outcomes:
    """A field of a model that makes calls; see `esp.effect`. It holds only what has no outcome yet.

    out.emit("Calls", [(url, body)])
    self.calls.expect(out.key("Calls"), event_id)
    ...
    for event_id, row in self.calls.take(block): ...
    """

    waiting: dict[str, str] = field(default_factory=dict)
    """By the key of the call, what the model said about it."""

    def expect(self, key: str, about: str = "") -> None:
        """A call with this key was emitted (`Out.key`). `about` is a text of yours, which comes with its outcome."""
        self.waiting[key] = about

    def take(self, block: Block) -> list[tuple[str, tuple[Any, ...]]]:
        """The outcomes in a block of the window of outcomes, each with what was said about its call. One that comes
        again, or that nobody waits for, is left out.
        """
        return [(self.waiting.pop(row[0]), row) for row in block.rows() if row[0] in self.waiting]
