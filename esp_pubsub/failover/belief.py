"""What a member believes of the messages on the topics of its group, and what it passes over. Pure.

Anybody with the right to write there can write anything. So a value that no member can mean changes nothing and ends no
member:

    what is said                          it is believed                              otherwise
    a number                              in 64 bits and not below 0; a term and a    the word has no voice
                                          chain in 32 bits, a time to 2^62
    the term of a claim                   if it is the next one                       the claim is void
    the term of a beat                    if its member leads that term, by what      the beat does not count
                                          was read, or has beaten in it before
    the chain of a position               if it is that of the block on the bus, as   the position is passed over
                                          far as this member has read that, or has
                                          sent it
    the settled of a position             up to the last block that this member has   the position is passed over
                                          read or sent; beyond, with the chain of
                                          this member's own block; else as below
    the setup of another group            if its member beats on, where nobody of     the beat is passed over
                                          our group leads, or we do and its nonce
                                          is lower
    the settled of a beat on the line     up to the last block that came; where the   it proves nothing beyond
                                          bus shows its last message, and no block
                                          came: always
    the time of an engine                 up to a minute after our own, or after      it is passed over
                                          the wall clock, of a member that beats on
    that all are to stop, the step chain  of a member that beats on                   it is passed over
    of an engine, and what it has taken
    a challenge                           if this member leads and has not moved      it is passed over
                                          for long, at most once a minute
    that somebody stands by               by nobody: it is for people

Some positions cannot be checked. A member that has neither read nor sent a block of a line learns only from beats how
far an idle group is. A member that leads does not read its lines, and learns only from beats that another leader is
further. On a bus that may lose single messages, any member may lack the last ones. Such a position is believed if the
beat before it was of the same member; a single beat is not enough. A higher run is always believed: a sequence begins
anew with it.
"""

from __future__ import annotations

TERM_MAX = (1 << 32) - 1
CHAIN_MAX = (1 << 32) - 1
NUMBER_MAX = (1 << 64) - 1
TIME_MAX = 1 << 62
"""Microseconds since the epoch. An engine's clock stands still there: nobody gets so far but by a forged entry."""
TIME_AHEAD = 60_000_000  # microseconds


def next_term(term: int) -> int:
    """The term that a claim may be of. After the highest term comes the first, so nobody can use the terms up."""
    return term % TERM_MAX + 1


def position(
    settled: int, chain: int | None, *, bus: int | None, ours: int | None, shown: int, sees_all: bool, beats_on: bool
) -> bool:
    """Whether a beat is believed that a line is settled so far, and has this chain there.

    `bus` is the chain of that block on the bus, `ours` that of our own block, where they are known. `shown` is the last
    block of which this member knows itself that it is on the bus; `sees_all`: it reads whatever comes there, and so
    will know by itself. `beats_on`: the beat before was of the same member.
    """
    if chain is not None and shown:
        known = ours if bus is None else bus
        if known is not None:
            return chain == known
    return settled <= shown or (beats_on and not (shown and sees_all))


def time(now: int, ours: int, wall: int) -> bool:
    """Whether a leader is believed that it is `now`, by a member that knows the time."""
    return now <= max(ours, wall) + TIME_AHEAD
