"""What a bus retains of a topic for those who come when no publisher is alive: its schema, its sources' runs, and of an
engine's order topic the first message.

Everybody reads and writes them here. Other programs may write there too, so what cannot be read is one error for all.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from .bus import Bus
from .errors import BusRefused, SchemaError
from .schema import Schema

SCHEMA_KEY, RUNS_KEY, BEGINNING_KEY = "schema", "runs", "beginning"


async def retained_schema(bus: Bus, topic: str) -> Schema | None:
    """The schema of a topic; None while it has none, or where the bus retains nothing. SchemaError for what is none."""
    if not bus.capabilities.retained or (retained := await bus.retained(topic, SCHEMA_KEY)) is None:
        return None
    try:
        return Schema(retained.decode())
    except (UnicodeDecodeError, SchemaError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else str(error)
    raise SchemaError(f"what is retained as the schema of {topic} cannot be read ({why}): was it another program?")


async def retain_schema(bus: Bus, topic: str, schema: Schema) -> None:
    """Let everybody know the schema of a topic."""
    await bus.retain(topic, SCHEMA_KEY, schema.text.encode())


async def forget_schema(bus: Bus, topic: str) -> None:
    """Let the next publisher say it anew. One that is open does not say it again."""
    await bus.retain(topic, SCHEMA_KEY, None)


async def has_schema(bus: Bus, topic: str) -> bool:
    """Whether anybody has said it, and so wants to publish there. It is not read."""
    return bus.capabilities.retained and await bus.retained(topic, SCHEMA_KEY) is not None


async def retained_runs(bus: Bus, topic: str) -> dict[int, int]:
    """The current runs of a topic, `source -> run`; none where the bus retains nothing. BusRefused for what is none."""
    retained = await bus.retained(topic, RUNS_KEY) if bus.capabilities.retained else None
    try:
        runs = msgpack.unpackb(retained, strict_map_key=False) if retained else {}
        if isinstance(runs, dict) and all(isinstance(each, int) for pair in runs.items() for each in pair):
            return runs
    except (ValueError, msgpack.UnpackException):
        pass
    raise BusRefused(f"what is retained as the runs of {topic} cannot be read: was it another program?")


async def retain_runs(bus: Bus, topic: str, runs: Mapping[int, int]) -> None:
    """Let everybody know the current runs of a topic: all of them, as they are one value."""
    await bus.retain(topic, RUNS_KEY, msgpack.packb(dict(runs)))


async def retained_beginning(bus: Bus, topic: str) -> bytes | None:
    """The message with which an engine's order topic began; None while it has not begun."""
    return await bus.retained(topic, BEGINNING_KEY)


async def retain_beginning(bus: Bus, topic: str, message: bytes) -> None:
    """Let everybody know it, so that the topic's retention cannot remove it."""
    await bus.retain(topic, BEGINNING_KEY, message)
