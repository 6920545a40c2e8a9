"""Derived order: one input on a log and no timers. The order is the input's own, and costs nothing."""

from __future__ import annotations

from .inputs import LogReader
from .stepping import Stepping


class DerivedOrder:
    """Steps on the input as it is read."""

    def __init__(self, reader: LogReader, stepping: Stepping) -> None:
        self._reader = reader
        self._stepping = stepping

    @property
    def positions(self) -> tuple[int, ...]:
        """Up to where the input was read."""
        return (self._reader.place.position,)

    def now(self) -> int:
        """It has no time."""
        return 0

    def heard(self, now: int) -> None:
        """See `now`."""

    async def run(self) -> None:
        """Step until cancelled. Raises what ends this member."""
        try:
            while True:
                await self._stepping.take(0, await self._reader.read())
        finally:
            await self._reader.aclose()
