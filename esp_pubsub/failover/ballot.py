"""Who leads, judged from a log alone: beats and claims in the one order that everybody reads.

The leader writes a numbered beat every so often. A member that has read none for a while writes a claim of the next
term that names the last beat it read. Everybody judges a claim by what stands *before* it in the log: it is void if
its term is not the next one, or if two or more later beats of the leader stand there. The first claim that is not void
leads, and a leader that reads it steps down. So no clock is compared with another one, and a member that was merely
slow to read deposes nobody: the beats it had not read yet are what voids its claim.

A reader that joined in the middle knows nothing until it reads a beat; until then it takes any claim of a higher term
for good, and the first beat puts that right. Where the past cannot be read, two such readers may each take themselves
for the leader of one term. Then both beat on and each reads the other's beats, and for everybody the lower nonce leads.
"""

from __future__ import annotations

LATER_BEATS = 2


class Ballot:
    """One reader's verdicts. `leader` is the nonce of the member that leads `term`, None if nobody does."""

    __slots__ = ("_led_last", "known", "leader", "number", "term")

    def __init__(self, *, from_start: bool = True) -> None:
        """`from_start`: the log is read from its first message."""
        self.known = from_start
        self.term = 0
        self.leader: int | None = None
        self.number = 0
        self._led_last: int | None = None  # in this term

    def beat(self, term: int, nonce: int, number: int, *, resigns: bool = False) -> bool:
        """Read a beat. True if it is the present leader's; a beat that resigns leaves the term without a leader."""
        if self.known and (term < self.term or (term == self.term and not self._counts(nonce, resigns))):
            return False
        self.known = True
        self.term = term
        self.number = number
        self._led_last = nonce
        self.leader = None if resigns else nonce
        return True

    def _counts(self, nonce: int, resigns: bool) -> bool:
        """Whether a beat of the present term is its leader's, who may be another one than was known."""
        if self.leader is None:
            return not resigns and self._led_last not in (None, nonce)
        return nonce == self.leader or (nonce < self.leader and not resigns)

    def claim(self, term: int, nonce: int, saw_nonce: int, saw_number: int) -> bool:
        """Read a claim, which names the last beat its writer had read. True if it leads from here on."""
        if self.known:
            later = self.number - (saw_number if saw_nonce == self.leader else 0)
            if term != self.term + 1 or (self.leader is not None and later >= LATER_BEATS):
                return False
        elif term <= self.term:
            return False
        self.term = term
        self.leader = self._led_last = nonce
        self.number = 0
        return True
