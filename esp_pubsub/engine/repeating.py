"""A new run that begins with the last snapshot of the run before it.

It is for an engine that cannot go on: its order was lost, or an input was purged; or that is to go on with another
version of its model, and has a derived order, where a switch has no place. Ids begin anew, and what was emitted after
the snapshot is emitted again. So it is done for who says so only (`repeat`).

Entry 1 of the run names the snapshot by its digest, and says from where its inputs are read: so all members begin with
the same one. What a queue held when the snapshot was taken, and that entries took since, is in the order of the run
before, and lost to the new one; readers of queues report it as Missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError, InputLost
from .beginning import Beginning, Input
from .snapshot import NotASnapshot, Snapshot, digest_of, read
from .snapshots import of_earlier_runs
from .state import Part

_log = logging.getLogger("esp_pubsub.engine")


async def repeats(ours: Beginning, directory: Path, engine: int, run: int, *, repeat: bool) -> Beginning:
    """How a run begins that nobody has begun: with the last snapshot of an earlier one, if there is any.

    ConfigError where there is one and `repeat` was not given, or there is none and it was.
    """
    found = await asyncio.to_thread(_last, directory, engine, run)
    if found is None and repeat:
        raise ConfigError(f"repeat is given, and {directory} has no snapshot of an earlier run of this engine")
    if found is None:
        return ours
    if not repeat:
        raise ConfigError(
            f"{directory} has snapshots of an earlier run of this engine. With repeat=True, or --repeat, run {run} "
            "begins with the last of them, and what came after that is emitted again; with another directory it begins "
            "with all that its inputs have"
        )
    return _begins_with(ours, found[0], found[1])


async def earlier(directory: Path | None, engine: int, run: int, digest: bytes) -> tuple[Snapshot, Sequence[Part]]:
    """The snapshot with which the run began. InputLost where this member does not have it."""
    if directory is not None:
        found = await asyncio.to_thread(_last, directory, engine, run, digest)
        if found is not None:
            return found[1:]
    raise InputLost(
        f"this run of the engine began with snapshot {digest.hex()[:16]} of an earlier one, and "
        f"{directory or 'this member'} does not have it: pass snapshots= with the directory of the others, or copy it",
        topic="",
        position=0,
    )


def _last(
    directory: Path, engine: int, run: int, digest: bytes | None = None
) -> tuple[bytes, Snapshot, list[Part]] | None:
    """The first of the files that is sound, and, if one is given, has this digest."""
    for file in of_earlier_runs(directory, engine, run):
        try:
            data = file.read_bytes()
            if digest in (None, digest_of(data)):
                return digest_of(data), *read(data)
        except (NotASnapshot, OSError) as error:
            _log.warning("the snapshot %s is passed over: %s", file.name, error)
    return None


def _begins_with(ours: Beginning, digest: bytes, snapshot: Snapshot) -> Beginning:
    """With each input where the snapshot left it, if that still stands there; else as the input is."""
    states = {each.window: each for each in snapshot.inputs}

    def begins(input: Input) -> Input:
        state = states.get(input.window)
        if state is None or state.position is None or input.position is None or state.incarnation != input.incarnation:
            return input
        return replace(input, position=max(input.position, state.position))

    return replace(ours, inputs=tuple(map(begins, ours.inputs)), basis=digest)
