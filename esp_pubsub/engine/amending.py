"""A block that stops an engine, because the model raises on it everywhere, is passed over by an entry of the order.

A member that meets the exception looks in the order, up to its present end, for an entry that passes the block over.
One that finds none takes no further step. So the operator writes the entry, and starts the members again: they step up
to the block, find the entry, and go on after it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from ..bus import Bus, Message, Place
from ..errors import BusRefused, BusUnavailable
from ..retained import retained_beginning
from ..wire.frame import frames
from .beginning import Begun, read_beginning
from .order import Entry, Order, Poisoned

_TRIES = 10


async def passed_over(bus: Bus, topic: str, order: Order, place: Place) -> set[Poisoned]:
    """The blocks that entries pass over, from this place on to the topic's present end. `order` stands there, and is
    moved to the end.
    """
    async for _ in _entries(bus, topic, order, place):
        pass
    return order.passed


async def _entries(bus: Bus, topic: str, order: Order, place: Place) -> AsyncIterator[Entry]:
    bounds = await bus.bounds(topic)
    if place.position >= bounds.end:
        return
    feed = await bus.feed(topic, place, None)
    try:
        while feed.place is None or feed.place.position < bounds.end:
            for message in await feed.read(1_000, 4 << 20):
                if isinstance(message, Message) and (entry := order.read(message.data)) is not None:
                    yield entry
    finally:
        await feed.aclose()


async def pass_over(bus: Bus, topic: str, source: int, run: int, block: Poisoned) -> None:
    """Write an entry that passes this block over, and read it back. `topic` is the order's, `source` and `run` are its.

    Raises BusRefused where there is no such engine, or its order has lost entries; BusUnavailable where others keep
    writing in between.
    """
    value = await retained_beginning(bus, topic)
    begun = None if value is None else Begun.decoded(value)
    found = None if begun is None else read_beginning(begun.message, source, run)
    if begun is None or found is None:
        raise BusRefused(f"no engine has begun on {topic}: is the URL, and the run, that of the engine?")
    bounds = await bus.bounds(topic)
    if bounds.incarnation != begun.place.incarnation or begun.following.position < bounds.first:
        raise BusRefused(f"{topic} has lost entries: it cannot be told which one comes next")
    for _ in range(_TRIES):
        order, now = Order(source, run, 1, found[1]), 0
        async for entry in _entries(bus, topic, order, begun.following):
            now = max(now, entry.now)
        if block in order.passed:
            return
        proposal = order.propose(Entry(now, (), (block,)), bus.capabilities.max_message_bytes)
        pipe = await bus.pipe(topic)
        try:
            await pipe.write(frames(proposal.frames, 0, time.time_ns() // 1000))
            await pipe.confirmed(0)
        finally:
            await pipe.aclose()
    raise BusUnavailable(f"{topic}: no entry of ours came to count in {_TRIES} tries; try again", topic=topic)
