"""Scanning: what of a topic comes next, found out ahead of the batches that will deliver it. Pure.

`take` runs the accept rule over whatever was read, `advance` cuts batches from what it found: whole blocks, up to so
many rows, one at least. Of a block only its place is kept, so what is ahead is small, and bounded by `full`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from esp_pubsub.bus import Break, Message
from esp_pubsub.failover.accept import Accept, Dropped, Outcome
from esp_pubsub.notices import BadMessage, Forgotten, InputDiffers, Missed
from esp_pubsub.wire.frame import Frame

from .offsets import COUNTS, Mark, OffsetRefused

BLOCKS_AHEAD, ROWS_AHEAD = 100_000, 8_000_000
PASSED_MOST = 1_000  # ranges in one offset; a batch ends there
SOURCES_MOST = 1_000  # in one offset; the one not seen for longest goes
_log = logging.getLogger("esp_pubsub.spark")


@dataclass(slots=True)
class _Stretch:
    """Messages that are not delivered (`first` to `end`, perhaps none), and the block behind them if it has come."""

    first: int
    end: int
    odd: Counter[str] | None = None
    """What was counted of these messages."""
    forgotten: tuple[int, ...] = ()
    position: int = -1
    rows: int = 0
    known: tuple[int, tuple[int, int, int]] = (0, (0, 0, 0))
    """The block's source, and what the accept rule knows of it behind the block."""


class Scan:
    """One topic, from a mark on."""

    def __init__(self, topic: str, mark: Mark, topics: int = 1, *, fresh: bool = False) -> None:
        """`topics`: how many share what may be ahead. `fresh`: the query begins here, with the first that there is."""
        self.topic = topic
        self._blocks_ahead, self._rows_ahead = BLOCKS_AHEAD // topics, ROWS_AHEAD // topics
        self.mark = mark
        self.head = mark.position
        """Behind what was looked at."""
        self.accept = Accept(suffix_only=True, from_start=mark.from_start, max_sources=SOURCES_MOST)
        self.accept.resume(mark.sources)
        self.seen = Counter(mark.counts)
        """What was counted up to `head`."""
        self._ahead: deque[_Stretch] = deque()  # each ends with a block
        self._rows = 0
        self._open = _Stretch(mark.position, mark.position)  # behind the last block
        self._fresh = fresh
        self._begin = mark.position  # of the next batch

    @property
    def full(self) -> bool:
        """Enough is ahead."""
        return len(self._ahead) >= self._blocks_ahead or self._rows >= self._rows_ahead

    @property
    def rows_ahead(self) -> int:
        """Rows of all blocks that were found and not given to a batch."""
        return self._rows

    @property
    def next_rows(self) -> int:
        """Rows of the next block, 0 if none is ahead."""
        return self._ahead[0].rows if self._ahead else 0

    def take(self, messages: Sequence[Message | Break]) -> None:
        """What was read from `head` on. OffsetRefused where the topic's continuity ended."""
        plain: list[Message] = []
        for each in messages:
            if isinstance(each, Message):
                plain.append(each)
            elif each.incarnation or plain or not self._fresh:
                raise refused(self.topic, each, self.head)
            else:
                said = "%s: what stood from %s on was removed before the query began (%s)"
                _log.warning(said, self.topic, self.head, each.reason)
        if plain and self._fresh:
            self._fresh, self._begin = False, plain[0].position
            self._open = _Stretch(self._begin, self._begin)
        for outcome in self.accept.receive_all(plain):
            self._note(outcome)
        if plain:
            self.head = plain[-1].position + 1

    def _note(self, outcome: Outcome) -> None:
        open_ = self._open
        match outcome:
            case Frame():
                open_.position, open_.rows = outcome.position, outcome.count
                open_.known = outcome.source, (outcome.run, outcome.id, outcome.chain)
                self._ahead.append(open_)
                self._rows += outcome.count
                _count(self.seen, open_)
                self._open = _Stretch(outcome.position + 1, outcome.position + 1)
            case Dropped(frame, why):
                if why == "double":
                    self._odd("doubles")
                open_.end = frame.position + 1
            case BadMessage(position, reason):
                _log.warning("%s: the message at %s is passed over: %s", self.topic, position, reason)
                self._odd("bad")
                open_.end = position + 1
            case Missed(_, _, first, last):
                _log.warning("%s: %s", self.topic, outcome)
                self._odd("missed", last - first + 1)
            case InputDiffers():
                _log.warning("%s: %s", self.topic, outcome)
            case Forgotten(source, _, _):
                open_.forgotten += (source,)

    def _odd(self, what: str, count: int = 1) -> None:
        if self._open.odd is None:
            self._open.odd = Counter()
        self._open.odd[what] += count

    def advance(self, most_rows: int | None, end: int | None = None) -> Mark:
        """Go on by a batch, and return the mark behind it; the present one while there is no block for it.

        A batch ends in front of the block that would be too much, or that stands at `end` or behind it.
        """
        rows, sources, passed = 0, dict(self.mark.sources), list[tuple[int, int]]()
        counts, position, from_start = Counter(self.mark.counts), self.mark.position, self.mark.from_start
        while self._ahead and len(passed) < PASSED_MOST:
            each = self._ahead[0]
            if end is not None and each.position >= end:
                break
            if position > self.mark.position and most_rows is not None and rows + each.rows > most_rows:
                break
            self._ahead.popleft()
            rows, position = rows + each.rows, each.position + 1
            if each.end > each.first:
                passed.append((each.first, each.end))
            _count(counts, each)
            for source in each.forgotten:
                sources.pop(source, None)
                from_start = False
            source, known = each.known
            sources.pop(source, None)  # the order in which they were last seen
            sources[source] = known
        if position > self.mark.position:
            self._rows -= rows
            self.mark = replace(
                self.mark, position=position, from_start=from_start, sources=sources, begun=self._begin,
                passed=tuple(passed), counts={name: counts[name] for name in COUNTS},
            )  # fmt: skip
            self._begin = position
        return self.mark


def _count(counts: Counter[str], stretch: _Stretch) -> None:
    counts["blocks"] += 1
    counts["rows"] += stretch.rows
    if stretch.odd is not None:
        counts.update(stretch.odd)


def refused(topic: str, broken: Break, position: int) -> OffsetRefused:
    """Why a query cannot go on, and the way out."""
    if broken.incarnation:
        return OffsetRefused(
            f"{topic} was purged, or deleted and made anew, since position {position} was read ({broken.reason}); "
            "begin with a new checkpoint"
        )
    passed = "messages" if broken.messages is None else f"{broken.messages} messages"
    return OffsetRefused(
        f"{topic}: {passed} from position {position} on were removed before they were read ({broken.reason}); begin "
        "with a new checkpoint, and keep more or read sooner"
    )
