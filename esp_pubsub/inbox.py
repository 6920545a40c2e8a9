"""What a subscriber makes of what it read: the accept rule's outcomes as blocks, notices and counts. Awaits nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

from .bus import Break, Message, parts
from .events import Block, View
from .failover.accept import Accept, Dropped, Outcome
from .failover.ledger import Known, Ledger, furthest, not_read
from .notices import BadMessage, Forgotten, Held, Missed, Notice, Skipped
from .schema import Schema
from .subscriber_options import SubscriberOptions, SubscriberStats
from .wire.frame import Frame

_EVENTS, _DATA = attrgetter("count"), attrgetter("data")
_COUNTED = {"double": "doubles", "stale": "stale", "diverged": "diverged", "beat": "beats"}


class Inbox:
    """What one subscriber has received: `ready` is for its user, `to_release` for the bus, because nobody needs it."""

    def __init__(
        self,
        accept: Accept,
        ledger: Ledger | None,
        schema: Schema | None,
        view: View,
        options: SubscriberOptions,
        *,
        replay: bool,
        notify: Callable[[Notice], None],
        observe: Callable[[Sequence[Frame]], None] | None,
    ) -> None:
        """`ledger`: a group's. `observe` is called with what is delivered."""
        self.accept = accept
        self.ready: deque[Block] = deque()
        self.to_release: list[Any] = []
        self.schema = schema
        self.counts = dict.fromkeys(SubscriberStats.__slots__, 0)
        self._ledger = ledger
        self._schema_given = schema is not None
        self._view = view
        self._options = options
        self._replay = replay
        self._notify = notify
        self._observe = observe
        self._read_to: int | None = None
        self._gaps: dict[tuple[int, int, int], float] = {}  # when to tell of them

    def begin(self, accept: Accept) -> None:
        """Another place on the topic: what is ready is of the old one."""
        self.accept, self._read_to = accept, None
        self.ready.clear()

    def take(self, read: Sequence[Message | Break]) -> None:
        """What a feed returned. There is a schema if a block is among it."""
        for broken, messages in parts(read):
            if broken is not None:
                self._broken(broken)
            self._accept_all(messages)

    def _accept_all(self, messages: Sequence[Message]) -> None:
        """Messages between which nothing is missing."""
        if self._replay and messages:
            messages = not_read(messages, self._read_to)
            self._read_to = messages[-1].position if messages else self._read_to
        if self._ledger is not None:
            for position, _ in messages:
                self._ledger.arrived(position)
        self._follow(self.accept.receive_all(messages, self._options.limits))

    def resume(self, ledger: Ledger, known: Known, *, from_start: bool) -> None:
        """Take up what the group stored with its position."""
        self.accept.from_start = from_start
        while len(known) > self._options.max_sources:  # stored when more were to be remembered
            del known[next(iter(known))]
            self.accept.from_start = False
        ledger.known = furthest(ledger.known, known)
        self._follow(self.accept.resume(known))

    def redelivery(self) -> None:
        """A queue's feed died: what is held or not confirmed comes again."""
        self.accept.redelivery()
        if self._ledger is not None:
            self._ledger.redelivery()

    def _follow(self, outcomes: Sequence[Outcome]) -> None:
        """Deliver and tell what the accept rule says."""
        frames = [outcome for outcome in outcomes if outcome.__class__ is Frame]
        self._deliver(frames)
        for outcome in outcomes if len(frames) < len(outcomes) else ():
            self._tell(outcome)

    def _deliver(self, frames: Sequence[Frame]) -> None:
        counts = self.counts
        counts["blocks"] += len(frames)
        counts["events"] += sum(map(_EVENTS, frames))
        counts["bytes"] += sum(map(len, map(_DATA, frames)))
        schema: Any = self.schema
        ledger = self._ledger
        serials = repeat(0) if ledger is None else map(ledger.delivered, frames)
        self.ready.extend(map(Block, frames, repeat(schema), repeat(self._view), serials))
        if self._observe is not None:
            self._observe(frames)

    def _tell(self, outcome: Outcome) -> None:
        match outcome:
            case Frame():
                return
            case Dropped(frame, "beyond"):
                self._bad(
                    BadMessage(frame.position, f"block {frame.id} is beyond the window of its settled {frame.settled}")
                )
            case Dropped(frame, why, admits):
                self.counts[_COUNTED[why]] += 1
                self._let_go(frame.position, frame, admits)
            case BadMessage():
                self._bad(outcome)
            case _:
                if isinstance(outcome, Missed):
                    self.counts["missed"] += outcome.last - outcome.first + 1
                elif isinstance(outcome, Forgotten) and self._ledger is not None:
                    self._ledger.known.pop(outcome.source, None)
                self._notify(outcome)

    def _bad(self, bad: BadMessage) -> None:
        self.counts["bad"] += 1
        self._let_go(bad.position)
        self._notify(bad)

    def _let_go(self, position: Any, frame: Frame | None = None, admits: int = 0) -> None:
        if self._ledger is None or self._ledger.dropped(position, frame, admits):
            self.to_release.append(position)

    def _broken(self, broken: Break) -> None:
        self.counts["skipped"] += broken.messages or 0
        self._notify(Skipped(broken.messages, broken.reason))
        if broken.incarnation:
            for frame in self.accept.restart(from_start=True):
                self._let_go(frame.position)
            self._read_to = None
            if self._ledger is not None:
                self._ledger.restart()
            if not self._schema_given:
                self.schema = None
        elif broken.cut is not None:
            self._read_to = None if self._read_to is None else min(self._read_to, broken.cut - 1)
            if self._ledger is not None:
                self._ledger.cut(broken.cut)

    def tell_held(self, now: float) -> float | None:
        """Tell once of each gap behind which blocks have been held for `gap_timeout`; returns when to look again."""
        if self.accept.suffix_only:
            return None
        gaps = {(s.number, s.run, s.last + 1): min(s.hold) - 1 for s in self.accept.sources.values() if s.hold}
        self._gaps = {gap: self._gaps.get(gap, now + self._options.gap_timeout) for gap in gaps}
        for (source, run, first), due in self._gaps.items():
            if due <= now:
                self._gaps[source, run, first] = math.inf
                self._notify(Held(source, run, first, gaps[source, run, first]))
        due = min(self._gaps.values(), default=math.inf)
        return None if due == math.inf else due
