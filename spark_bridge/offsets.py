"""Offsets: how far a query is, as Spark keeps it in its checkpoint. Pure.

Executors keep nothing, so the accept rule runs where batches are planned, and what it found goes into the offset:

    position   the first message that was not looked at
    sources    what the accept rule knows there, so that planning can go on from an offset alone
    begun      where the batch that ends there began: Spark asks anew where a query begins, and retention moves
    passed     which messages of that batch are not delivered: doubles, beats, foreign ones

A batch is therefore fixed by the offset at its end, whoever reads it, however often. The counts only grow; the
difference of two offsets is what a batch did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from esp_pubsub.errors import EspError

VERSION = 1
COUNTS = ("blocks", "rows", "doubles", "missed", "bad")
Known = Mapping[int, tuple[int, int, int | None]]


class OffsetRefused(EspError):
    """A checkpoint that this query cannot go on from: of another URL, expired, or of a topic that is no more."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far one topic is."""

    position: int
    incarnation: int | None
    from_start: bool = True
    sources: Known = field(default_factory=dict)
    begun: int | None = None
    """Where the batch that ends here began; None if it has nothing of this topic."""
    passed: tuple[tuple[int, int], ...] = ()
    """Ranges of positions, the end not included."""
    counts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    def ranges(self) -> Iterator[tuple[int, int]]:
        """What is delivered in the batch that ends here."""
        at = self.position if self.begun is None else self.begun
        for first, end in self.passed:
            if at < first:
                yield at, first
            at = end
        if at < self.position:
            yield at, self.position

    def still(self) -> Mark:
        """The same place at the end of a batch that has nothing of this topic."""
        return self if self.begun is None else replace(self, begun=None, passed=())

    def to_json(self) -> dict[str, Any]:
        """Numbers and texts only; those of 64 bits as texts, because not every reader has such numbers."""
        return {
            "position": str(self.position),
            "incarnation": None if self.incarnation is None else f"{self.incarnation:016x}",
            "fromStart": self.from_start,
            "sources": {f"{n:016x}": [str(run), str(last), chain] for n, (run, last, chain) in self.sources.items()},
            "begun": None if self.begun is None else str(self.begun),
            "passed": [[str(first), str(end)] for first, end in self.passed],
            **self.counts,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Mark:
        """The other way. KeyError, TypeError or ValueError for what is none."""
        mark, begun = found["incarnation"], found["begun"]
        return cls(
            int(found["position"]),
            None if mark is None else int(mark, 16),
            bool(found["fromStart"]),
            {int(n, 16): (int(run), int(last), chain) for n, (run, last, chain) in found["sources"].items()},
            None if begun is None else int(begun),
            tuple((int(first), int(end)) for first, end in found["passed"]),
            {name: int(found[name]) for name in COUNTS},
        )


Offset = Mapping[str, Mark]
"""By topic."""


def to_json(offset: Offset) -> dict[str, Any]:
    """What Spark stores."""
    return {"version": VERSION, "topics": {topic: mark.to_json() for topic, mark in sorted(offset.items())}}


def from_json(found: Mapping[str, Any], topics: tuple[str, ...]) -> dict[str, Mark]:
    """An offset of these very topics. OffsetRefused for any other."""
    try:
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}")
        offset = {topic: Mark.from_json(mark) for topic, mark in found["topics"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise OffsetRefused(f"the checkpoint holds no offset of ours ({e!r}); give this query one of its own") from None
    if offset.keys() != set(topics):
        raise OffsetRefused(
            f"the checkpoint is one of {', '.join(sorted(offset))}, the query reads {', '.join(sorted(topics))}; "
            "give each query a checkpoint of its own"
        )
    return offset
