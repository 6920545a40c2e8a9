"""Whether an engine's leader goes on in its inputs, as it sees itself, and as a standby sees it. Pure.

A leader whose reads hang silently has nothing to send, beats on, and knows of no trouble. A standby that could go on,
and that has read beyond what the leader says it has taken, challenges it, if the leader has not moved for long: it
names the place up to which it has read. A leader that reads this, has less, and has not moved, lets others go first.

Who is wrong costs one change of the leader. A standby whose own reads hang never challenges: it has read less.
"""

from __future__ import annotations

from typing import NamedTuple

Places = tuple[int, ...]
"""Of each input a position, 0 for a queue; and then the number of steps."""


class Reach(NamedTuple):
    """How far a member of an engine is."""

    read: Places
    """After what it has read of its inputs."""
    taken: Places
    """After what its steps have taken of them."""


class Course:
    """What one member sees of the leader's and of its own progress."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds without any progress after which somebody else is to lead."""
        self._patience = patience
        self._leader: tuple[int, Places] | None = None  # its term, and what it had taken
        self._since = 0.0  # when it moved last, or when there was nothing for it to take
        self._ours: Places | None = None
        self._moved_at = 0.0

    @property
    def term(self) -> int:
        """Of the leader that was heard last."""
        return 0 if self._leader is None else self._leader[0]

    def heard(self, term: int, taken: Places, now: float) -> None:
        """A leader says what it has taken."""
        if term >= self.term and self._leader != (term, taken):
            self._leader, self._since = (term, taken), now

    def challenges(self, reach: Reach, now: float) -> bool:
        """Whether a standby is to challenge the leader now. To be asked again and again."""
        if self._leader is None or not _beyond(reach.read, self._leader[1]):
            self._since = now
            return False
        if now < self._since + self._patience:
            return False
        self._since = now  # once more after a while, if nothing comes of it
        return True

    def begins(self) -> None:
        """This member leads from now on."""
        self._ours = None

    def moves(self, taken: Places, now: float) -> None:
        """A leader says how far it is itself. To be said again and again."""
        if self._ours != taken:
            self._ours, self._moved_at = taken, now

    def yields(self, read: Places, now: float) -> bool:
        """Whether a leader that is challenged by somebody who has read so far lets others go first. Half the patience
        is enough: the other one was patient before it spoke.
        """
        return self._ours is not None and _beyond(read, self._ours) and now >= self._moved_at + self._patience / 2


def _beyond(read: Places, taken: Places) -> bool:
    return any(one > other for one, other in zip(read, taken, strict=False))
