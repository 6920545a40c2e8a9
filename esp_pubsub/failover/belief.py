"""What a member believes of what stands on the topics of its group. Pure.

Whoever may write on a topic can say anything there. A word with a number outside these bounds has no voice, and an
entry with one counts and says nothing.
"""

from __future__ import annotations

TERM_MAX = (1 << 32) - 1
CHAIN_MAX = (1 << 32) - 1
NUMBER_MAX = (1 << 64) - 1
TIME_MAX = 1 << 62
"""Microseconds since the epoch. An engine's clock stands still there: nobody gets so far but by a forged entry."""


def next_term(term: int) -> int:
    """The term that a claim may be of. After the highest term comes the first, so nobody can use the terms up."""
    return term % TERM_MAX + 1
