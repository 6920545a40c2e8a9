"""The timers of a model: by key, and in the order in which they are due. Pure."""

from __future__ import annotations

import heapq


class Timers:
    """One timer for each key."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._queue: list[tuple[int, str]] = []  # those that were replaced or cancelled since are in there still
        self._due: set[str] = set()

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: str, at: int | None) -> None:
        """At this time, or, with None, never."""
        self._due.discard(key)
        if at is None:
            self._at.pop(key, None)
            return
        self._at[key] = at
        heapq.heappush(self._queue, (at, key))
        if len(self._queue) > 2 * len(self._at) + 64:
            self._queue = [(at, key) for key, at in self._at.items()]
            heapq.heapify(self._queue)

    @property
    def next(self) -> int | None:
        """When the first one is due."""
        while self._queue and self._at.get(self._queue[0][1]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def due(self, now: int) -> list[str]:
        """The keys of those that are due, ordered by time and key. They are timers no more, and `take` says of each
        whether it is to fire.
        """
        keys = []
        while (at := self.next) is not None and at <= now:
            _, key = heapq.heappop(self._queue)
            del self._at[key]
            keys.append(key)
        self._due = set(keys)
        return keys

    def take(self, key: str) -> bool:
        """Whether one that was due still is: no step since has set it anew or cancelled it."""
        due = key in self._due
        self._due.discard(key)
        return due

    def items(self) -> list[tuple[str, int]]:
        """All of them, by key."""
        return sorted(self._at.items())
