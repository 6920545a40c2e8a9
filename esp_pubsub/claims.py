"""What a client claims before it sends: the schema of a topic, the run of a source, a place in an election.

What a bus retains has no compare-and-set. So claims of one client take turns, and what was written is looked at again.
"""

from __future__ import annotations

import asyncio
from typing import cast

from .address import other_side
from .bus import Bus, Elections
from .errors import ConfigError, SchemaDiffers, SchemaError, Stale
from .failover.join import Elect
from .registry import election
from .retained import has_schema, retain_runs, retain_schema, retained_runs, retained_schema
from .schema import Schema

_WRITTEN_BESIDE = 0.05  # seconds within which a claim that was made at the same moment is on the bus too


class Claims:
    """The claims of one client."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def schema(self, bus: Bus, topic: str, schema: Schema) -> None:
        """Retain the topic's schema before anything is sent, and find out if somebody else was first with another."""
        if not bus.capabilities.retained:
            return
        async with self._turn:
            if not await has_schema(bus, topic):
                await retain_schema(bus, topic, schema)
            await find_schema(bus, topic, schema)

    async def run(self, bus: Bus, topic: str, source: int, run: int) -> None:
        """Raise the run that is retained for a source, or find that ours is over. What was written is looked at again
        after a moment: others, who read before it, may have written without it.
        """
        if not bus.capabilities.retained:
            return
        while True:
            async with self._turn:
                runs = await retained_runs(bus, topic)
                current = runs.get(source, -1)
                if current > run:
                    raise Stale(
                        f"run {run} of this group on {topic} is over, the current one is {current}: pass a higher run",
                        run=run,
                        current=current,
                    )
                if current == run:
                    return
                await retain_runs(bus, topic, {**runs, source: run})
            await asyncio.sleep(_WRITTEN_BESIDE)


async def find_schema(bus: Bus, topic: str, given: Schema | None) -> Schema | None:
    """The schema of a topic: as given, if the topic does not differ, else as retained; None while it has none."""
    if not bus.capabilities.retained:
        if given is None:
            raise SchemaError("this bus retains no schemas: pass schema=")
        return given
    found = await retained_schema(bus, topic)
    if found is None:
        if given is None and await has_schema(bus, other_side(topic)):
            other = "in" if topic.endswith("/O") else "out"
            raise SchemaError(
                f"nobody has published to {topic}, but somebody has to the other side of this window: "
                f"pass side={other!r}"
            )
        return given
    if given is not None and given != found:
        raise SchemaDiffers(
            f"the schema given is {given}, the topic {topic} has {found}; use that, or another window",
            given=given.text,
            retained=found.text,
        )
    return found


async def find_election(bus: Bus, named: str | None, control: str) -> tuple[str, Elect | None]:
    """The kind of election that a group has, and what makes it from its line and a member's name; None: the group's
    own, the log's. `named`: by the user; None: the bus's own, else `log`. ConfigError if the bus cannot do that one.
    """
    kind = named or next(iter(bus.capabilities.elections), "log")
    if kind == "log":
        if not bus.capabilities.replay:
            others = ", ".join(repr(own) for own in (*bus.capabilities.elections, "zookeeper://..."))
            raise ConfigError(f"election 'log': the past of a topic cannot be read on this bus; take one of {others}")
        return kind, None
    if kind in bus.capabilities.elections:
        elections = cast(Elections, bus)
        return kind, lambda line, member: elections.election(kind, f"{control}#{line}", member)
    return kind, await asyncio.to_thread(election, kind)
