"""How far the groups of a topic are."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

from .bus import Bus, Groups, GroupState, Message
from .errors import BadFrame, NotOffered
from .records import moment
from .wire.frame import parse

_FIRST = 5.0  # seconds for the message at which a group stands
_LAST = 1 << 53  # microseconds since 1970, in the year 2255: nothing guards what a frame says


@dataclass(frozen=True, slots=True)
class GroupLag:
    """A group at one moment."""

    name: str
    topic: str
    position: int | None
    """Where its next reader begins; what it has confirmed in another order may be further. None: it has a queue."""
    behind: int
    """Messages that are on the topic from there on, or that wait in its queue and were handed to no reader yet."""
    seconds: float | None
    """How long ago the first of them was sent; 0 where there is none, None where that cannot be seen."""
    reader: str
    """Who reads for it now; empty: nobody."""
    since: datetime | None
    """Since when, where the bus knows."""


async def group_lags(bus: Bus, topic: str) -> list[GroupLag]:
    """The groups of a topic, by name. NotOffered where the bus cannot say."""
    if not bus.capabilities.shows_groups:
        raise NotOffered("this bus cannot say which groups there are: look at the broker", capability="shows_groups")
    found = sorted(await cast(Groups, bus).group_states(topic))
    return [await _lag(bus, topic, state) for state in found]


async def _lag(bus: Bus, topic: str, state: GroupState) -> GroupLag:
    since = None if state.since is None else moment(0, int(state.since * 1e6))
    if state.waiting is not None:
        return GroupLag(state.name, topic, None, state.waiting, None, state.reader, since)
    bounds = await bus.bounds(topic)
    position = max(bounds.first, min(state.position or 0, bounds.end))
    sent = await _sent_at(bus, topic, position) if position < bounds.end else None
    seconds = 0.0 if sent is None else max(0.0, (datetime.now(UTC) - sent).total_seconds())
    return GroupLag(state.name, topic, position, bounds.end - position, seconds, state.reader, since)


async def _sent_at(bus: Bus, topic: str, position: int) -> datetime | None:
    """When the message at this position was sent."""
    feed = await bus.feed(topic, position, None)
    try:
        async with asyncio.timeout(_FIRST):
            messages = [each for each in await feed.read(1, 1) if isinstance(each, Message)]
            return moment(0, min(parse(messages[0].data).sent_at, _LAST)) if messages else None
    except (BadFrame, TimeoutError):
        return None
    finally:
        await feed.aclose()
