"""What is read from an order topic, and written to it, besides what the member that leads writes.

The beginning. It is entry 1. The first one on the log counts, whoever wrote it, and it is kept as a retained value too,
so that it outlives the topic's retention.

A block that is passed over, because the model raises on it everywhere. A member that meets the exception looks in the
order, up to its present end, for an entry that passes the block over. One that finds none takes no further step. So the
operator writes the entry, and starts the members again: they step up to the block, find the entry, and go on after it.

A switch to another version of the model. Members step up to that entry; those of the version before take a snapshot
there, and leave once the bus has all that they computed. Those of the new version begin with it (restoring.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from ..bus import Bus, Place
from ..errors import BusRefused, BusUnavailable, InputLost, NotOffered
from ..follower import read_to_end
from ..publisher import source_number
from ..retained import retain_beginning, retained_beginning
from ..wire.frame import Sealed, frames, glance
from .beginning import Beginning, Begun, check, is_entry, read_beginning
from .inputs import NEW_RUN
from .order import Entry, Order, Poisoned, Version

_WRITE_DEADLINE = 10.0  # seconds; the driver has a shorter one of its own
_TRIES = 10


async def begin(bus: Bus, topic: str, ours: Beginning, run: int, *, switches: bool) -> tuple[Begun, Beginning, int]:
    """The beginning that counts, and its chain: the retained one, else the first on the order topic, else ours.

    Raises BeginningDiffers if this member is not set up like it (see `check`), and InputLost where there was one and it
    is gone.
    """
    source = source_number(topic)
    while True:
        value = await retained_beginning(bus, topic)
        begun = await _first_entry(bus, topic, source, run) if value is None else Begun.decoded(value)
        if begun is not None and (found := read_beginning(begun.message, source, run)) is not None:
            if value is None:
                await retain_beginning(bus, topic, begun.encoded())
            check(ours, found[0], switches=switches)
            return begun, *found
        if value is not None:
            raise BusRefused(f"what is retained as the beginning of {topic} cannot be read: was it another program?")
        await _write(bus, topic, [ours.sealed(source, run)], "the engine's beginning; open the engine again")


async def _first_entry(bus: Bus, topic: str, source: int, run: int) -> Begun | None:
    """The beginning, if it stands on the topic. InputLost where there are entries, and the first of them is another."""
    incarnation = (await bus.bounds(topic)).incarnation
    async with aclosing(read_to_end(bus, topic)) as reads:
        async for messages in reads:
            for position, data in messages:
                if not is_entry(data, source, run):
                    continue
                if read_beginning(data, source, run) is None:
                    raise InputLost(
                        f"{topic} has lost its first entry, and no beginning is retained: {NEW_RUN}",
                        topic=topic,
                        position=position,
                    )
                return Begun(Place(position, incarnation), data)
    return None


async def read_ahead(bus: Bus, topic: str, order: Order, place: Place) -> int:
    """Move an order from a place to the topic's present end; returns the latest time of the entries in between."""
    now = 0
    async with aclosing(read_to_end(bus, topic, place)) as reads:
        async for messages in reads:
            for _, data in messages:
                if (entry := order.read(data)) is not None:
                    now = max(now, entry.now)
    return now


async def find_block(reads: Bus, orders: Bus, topic: str, run: int, block: Poisoned) -> str | None:
    """The input window that has this block; None if that cannot be seen from here. `topic` is the order's.

    BusRefused where there is no such engine, or none of its inputs has the block.
    """
    _, began, _ = await begun_on(orders, topic, run)
    all_seen = True
    for input in began.inputs:
        bounds = await reads.bounds(input.topic) if reads.capabilities.replay else None
        if input.position is None or bounds is None or bounds.incarnation != input.incarnation:
            all_seen = False  # a queue, or a topic of another bus
        elif await _has(reads, input.topic, block):
            return input.window
    if all_seen:
        windows = ", ".join(input.window for input in began.inputs)
        raise BusRefused(f"there is no block {block} in {windows}: copy its name from the error; nothing was written")
    return None


async def _has(bus: Bus, topic: str, block: Poisoned) -> bool:
    wanted = block.source, block.run, block.id
    async with aclosing(read_to_end(bus, topic)) as reads:
        async for messages in reads:
            if any(glance(data)[4:] == wanted for _, data in messages):
                return True
    return False


class From(NamedTuple):
    """From where an order can be read on: where `order` stands, at the engine's time `now`."""

    order: Order
    place: Place
    now: int


async def pass_over(bus: Bus, topic: str, run: int, block: Poisoned, start: From | None = None) -> None:
    """Write an entry that passes this step over, and read it back. `topic` is the order's; `start` is of a snapshot.

    Raises BusRefused where there is no such engine, or its order has lost what came after the start, or without one
    after the beginning; BusUnavailable where others keep writing in between.
    """
    await _say(bus, topic, run, start, lambda order, now: None if block in order.passed else Entry(now, (), (block,)))


async def switch(bus: Bus, topic: str, run: int, to: str, start: From | None = None) -> str:
    """Write an entry that switches to this version of the model, and read it back; returns the version that ran before,
    which is this one if there was nothing to write. Raises as `pass_over` does, and NotOffered for a derived order.
    """
    _, began, _ = await begun_on(bus, topic, run)
    if began.order != "written":
        raise NotOffered(
            "this engine takes the order of its one input, where a switch has no place: members step freely. Stop all "
            "of them, and begin a new run from their last snapshot (--run, --repeat); or have a written order from the "
            "beginning (--written-order)",
            capability="switch",
        )
    before = to

    def entry(order: Order, now: int) -> Entry | None:
        nonlocal before
        if order.runs.name == to:
            return None
        before = order.runs.name
        return Entry(now, (), (), to)

    await _say(bus, topic, run, start, entry)
    return before


async def _say(bus: Bus, topic: str, run: int, start: From | None, entry: Callable[[Order, int], Entry | None]) -> None:
    """Write the entry that is to follow all others, until one counts or there is none to write."""
    if start is None:
        begun, began, chain = await begun_on(bus, topic, run)
        start = From(Order(source_number(topic), run, 1, chain, Version(began.version)), begun.following, 0)
    bounds = await bus.bounds(topic)
    if bounds.incarnation != start.place.incarnation or start.place.position < bounds.first:
        raise BusRefused(
            f"{topic} has lost entries: it cannot be told which one comes next, unless by a snapshot: --snapshots DIR"
        )
    proposal = None
    for _ in range(_TRIES):
        order = start.order.copy()
        order.passed.update(start.order.passed)
        now = max(start.now, await read_ahead(bus, topic, order, start.place))
        if (proposal is not None and order.counts(proposal)) or (following := entry(order, now)) is None:
            return
        proposal = order.propose(following, bus.capabilities.max_message_bytes)
        await _write(bus, topic, proposal.frames, "the entry; try again")
    raise BusUnavailable(f"{topic}: no entry of ours came to count in {_TRIES} tries; try again", topic=topic)


async def begun_on(bus: Bus, topic: str, run: int) -> tuple[Begun, Beginning, int]:
    """How the engine began, and the chain of that. BusRefused where there is none."""
    value = await retained_beginning(bus, topic)
    begun = None if value is None else Begun.decoded(value)
    found = None if begun is None else read_beginning(begun.message, source_number(topic), run)
    if begun is None or found is None:
        raise BusRefused(f"no engine has begun on {topic}: is the URL, and the run, that of the engine?")
    return begun, *found


async def _write(bus: Bus, topic: str, sealed: Sequence[Sealed], what: str) -> None:
    """Through a pipe of its own, and confirmed; BusUnavailable where that takes too long."""
    pipe = await bus.pipe(topic)
    try:
        async with asyncio.timeout(_WRITE_DEADLINE):
            await pipe.write(frames(sealed, 0, time.time_ns() // 1000))
            confirmed = 0
            while confirmed < len(sealed):
                confirmed = await pipe.confirmed(confirmed)
    except TimeoutError:
        raise BusUnavailable(
            f"{topic}: the bus did not confirm within {_WRITE_DEADLINE:g} s {what}", topic=topic
        ) from None
    finally:
        await pipe.aclose()
