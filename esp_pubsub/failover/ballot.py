"""The log election: who leads, judged from a log alone, and when a member claims to. Pure: log_election.py performs.

`Ballot` is the judge. Every member reads beats and claims in the one order of the log and comes to the same verdict.
`Contender` is one member's part: what it writes, and when.

The leader writes a numbered beat every so often. A member that has read none for a while writes a claim of the next
term that names the last beat it read. Everybody judges a claim by what stands *before* it in the log: it is void if
its term is not the next one, or if two or more later beats of the leader stand there. The first claim that is not void
leads, and a leader that reads it steps down. A beat of a higher term, whose claim was not read, counts when its member
beats again: a single one may be anybody's (belief.py). So no clock is compared with another one, and a member that was
merely slow to read deposes nobody: the beats it had not read yet are what voids its claim.

A reader that joined in the middle knows nothing until it reads a beat; until then it takes any claim of a higher term
for good, and the first beat puts that right.

All this rests on a log that can be read again: a member that was away reads on from where it was, so nobody misses a
claim, and no term is claimed with success twice.
"""

from __future__ import annotations

from collections.abc import Callable

from .belief import next_term
from .words import Beat, Claim, Identity, Word

LATER_BEATS = 2
SILENT_BEATS = 4
UNHEARD_BEATS = 12  # a leader that could not make itself heard for so many knows that somebody else may lead


class Ballot:
    """One reader's verdicts. `leader` is the nonce of the member that leads `term`, None if nobody does."""

    __slots__ = ("_doubted", "known", "leader", "number", "term")

    def __init__(self, *, from_start: bool = True) -> None:
        """`from_start`: the log is read from its first message."""
        self.known = from_start
        self.term = 0
        self.leader: int | None = None
        self.number = 0
        self._doubted = (0, 0, 0)  # term, nonce and number of the last beat of another member

    def beat(self, term: int, nonce: int, number: int, *, resigns: bool = False) -> bool:
        """Read a beat. True if it is the present leader's; a beat that resigns leaves the term without a leader."""
        if self.known and not self._counts(term, nonce, number):
            return False
        self.known = True
        self.term = term
        self.number = number
        self.leader = None if resigns else nonce
        return True

    def _counts(self, term: int, nonce: int, number: int) -> bool:
        """Whether a beat is the leader's, who may be another one than was known: then it has to beat twice."""
        if (term, nonce) == (self.term, self.leader):
            return True
        if term <= self.term:
            return False
        (before, who, last), self._doubted = self._doubted, (term, nonce, number)
        return not self.term or ((term, nonce) == (before, who) and number > last)

    def claim(self, term: int, nonce: int, saw_nonce: int, saw_number: int) -> bool:
        """Read a claim, which names the last beat its writer had read. True if it leads from here on."""
        if self.known:
            later = self.number - (saw_number if saw_nonce == self.leader else 0)
            if term != next_term(self.term) or (self.leader is not None and later >= LATER_BEATS):
                return False
        elif term <= self.term:
            return False
        self.term = term
        self.leader = nonce
        self.number = 0
        return True


class Contender:
    """One member's part in a log election: whether it leads, and when it is to claim.

    It leads from the moment at which it reads back its own claim and finds it good, until it reads somebody else's, or
    gives up. It claims when the leader was silent for a while, has resigned, or is known to be dead.

    A claim may come true after its campaign is over. A leader that does not work would be the worst of all, so that
    term is `unwanted`: the member resigns it as soon as it can.
    """

    def __init__(self, identity: Identity, run: int, *, beat: float, draw: Callable[[], float]) -> None:
        """`beat`: seconds between two beats; `draw`: a number from 0 to 1, another one at each call."""
        self.term: int | None = None
        """The term that this member leads."""
        self.unwanted: int | None = None
        self._identity = identity
        self._run = run
        self._beat = beat
        self._draw = draw
        self._ballot: Ballot | None = None  # None: nobody has spoken yet
        self._campaigns = False
        self._nobody_leads = True
        self._dead: int | None = None
        self._lets_others = False
        self._saw = (0, 0)
        self._number = 0
        self.heard_at = 0.0
        self._read_back = 0

    @property
    def leader(self) -> int | None:
        """The nonce of the member that leads, by what was read so far."""
        return self._ballot.leader if self._ballot is not None else None

    def hear(self, said: Word, now: float, *, from_start: bool) -> bool:
        """Read a word, in the order of the log; False if it changes nothing. `from_start`: as for `Ballot`."""
        if not isinstance(said, Beat | Claim):
            return False
        if self._ballot is None:
            self._ballot = Ballot(from_start=from_start)
        ballot, nonce = self._ballot, said.identity.nonce
        ours = nonce == self._identity.nonce
        if isinstance(said, Beat):
            if not ballot.beat(said.term, nonce, said.number, resigns=said.resigns):
                return False
            self._saw = (nonce, said.number)
            if not ours:
                self.term = None
        else:
            if ours:
                self._read_back = said.term
            if not ballot.claim(said.term, nonce, said.saw_nonce, said.saw_number):
                return ours
            self.term = said.term if ours else None
            self._number, self._saw = 0, (0, 0)  # nothing yet of this term
            if not self._campaigns:
                self._do_not_want()
        self.heard_at = now
        self._nobody_leads = ballot.leader in (None, self._dead)
        if ballot.leader not in (None, self._identity.nonce):
            self._lets_others = False  # they had their turn
        return True

    def died(self, nonce: int) -> None:
        """The process of this member is gone. What it wrote before may still be read after this."""
        self._dead = nonce
        if self.leader == nonce:
            self._nobody_leads = True

    def campaign(self) -> None:
        """A campaign begins."""
        self._campaigns = True

    def end_campaign(self) -> int | None:
        """A campaign is over, however it ended; returns the term that was won."""
        self._campaigns = False
        if self.term is not None:
            self._lets_others = False
        return self.term

    def withdraw(self) -> None:
        """A campaign is given up: a term that was won by it is not wanted."""
        self._campaigns = False
        self._do_not_want()

    def _do_not_want(self) -> None:
        if self.term is not None:
            self.unwanted, self.term = self.term, None

    def resign(self) -> int | None:
        """Lead no more and let others go first; returns the term that was led."""
        term, self.term = self.term, None
        self._lets_others = True
        return term

    def claim_at(self, now: float) -> float:
        """When to claim if nothing is heard before; `now` if nobody leads."""
        if self._nobody_leads and not (self._lets_others and self._ballot is not None):
            return now
        return self.heard_at + self.silence() * (2 if self._lets_others else 1)

    def silence(self) -> float:
        """Seconds without a beat after which a member claims. Drawn anew each time, so that few claim at once."""
        return self._beat * (SILENT_BEATS + 2 * self._draw())

    def claim(self) -> Claim:
        """A claim of the next term."""
        term = self._ballot.term if self._ballot is not None else 0
        return Claim(self._identity, self._run, next_term(term), *self._saw)

    def is_judged(self, term: int) -> bool:
        """Whether our claim of this term was read back, or the log is past that term."""
        return self._read_back == term or (self._ballot is not None and next_term(self._ballot.term) != term)

    def number(self) -> int:
        """The number of our next beat in this term."""
        self._number += 1
        return self._number
