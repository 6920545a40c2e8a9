"""What becomes of a cron's times that come late, at once, or all at the same moment. Pure functions."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, NamedTuple

from .cron import Cron

Misfire = Literal["skip", "latest", "all"]
Overlap = Literal["skip", "one", "all"]

ON_TIME = 1_000_000
"""What is up to a second late, as after a takeover, is no misfire."""
COUNTED = 100
"""Times that are missed are counted up to this number."""


class Due(NamedTuple):
    """Times that are to fire now, oldest first, and how many others are passed over, up to COUNTED."""

    fire: list[int]
    missed: int


def due(cron: Cron, first: int, now: int, misfire: Misfire, window: int, most: int) -> Due:
    """What is to be done of a cron's times from `first` up to now, in microseconds.

    Those that are on time fire. Of the others, `skip` fires none, `latest` the last one where none is on time, and
    `all` the last `most` that are not older than `window`.
    """
    at_most, back = (most, window) if misfire == "all" else (COUNTED, ON_TIME)
    since = max(first - 1, now - max(back, ON_TIME) - 1)
    fire = _last(cron, since, now, at_most)
    if not fire and misfire == "latest":
        fire = _last(cron, first - 1, now, 1)
    return Due(fire, _count(cron, first, fire[0] if fire else now + 1))


def _last(cron: Cron, since: int, now: int, most: int) -> list[int]:
    found: list[int] = []
    until = now
    while len(found) < most and (one := cron.last_until(until, since)) is not None:
        found.append(one)
        until = one - 1
    return found[::-1]


def _count(cron: Cron, first: int, before: int) -> int:
    """How many times there are from `first` on, before another one."""
    missed, at = 0, cron.next_after(first - 1)
    while at is not None and at < before and missed < COUNTED:
        missed, at = missed + 1, cron.next_after(at)
    return missed


def overlaps(policy: Overlap, running: int, waiting: int) -> Literal["fire", "wait", "skip"]:
    """What becomes of a time that comes while earlier ones of its cron are still being delivered: `skip` leaves it out,
    `one` has one wait, `all` delivers them side by side.
    """
    if policy == "all" or not running:
        return "fire"
    return "wait" if policy == "one" and not waiting else "skip"


def jitter(name: str, most: int) -> int:
    """How much later than its times a cron of this name fires: from 0 up to, and without, `most` microseconds. It is
    spread evenly over names, and the same for all times of one, so they stay as far apart as they are. It is never
    negative, so nothing fires before its time, and again at it.
    """
    if most <= 0:
        return 0
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % most
