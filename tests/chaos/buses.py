"""What the harness has to know of a bus: how its clients are opened, and what can happen to this bus alone.

Another bus is another small class here: `client` for the processes, `start` and `stop` for what has to run beside them,
`faults` for what only it can suffer (see faults.py for the shape).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import esp_pubsub as esp


class BusUnderTest(Protocol):
    """A bus for one run, in a place of its own."""

    faults: ClassVar[dict[str, Callable[[Any], Awaitable[None]]]]

    def __init__(self, place: Path) -> None: ...

    def client(self, on_notice: Callable[[Any], None]) -> Any:
        """What `init` returns; called in each process."""

    async def start(self) -> None:
        """Start what must run; called in the parent, before anything else."""

    async def stop(self) -> None:
        """Undo `start`."""


class Embedded:
    """A directory, and no server."""

    faults: ClassVar[dict[str, Callable[[Any], Awaitable[None]]]] = {}

    def __init__(self, place: Path) -> None:
        self.directory = place / "bus"

    def client(self, on_notice: Callable[[Any], None]) -> Any:
        return esp.init("embedded", dir=self.directory, on_notice=on_notice)

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return


BUSES: dict[str, type[BusUnderTest]] = {"embedded": Embedded}
