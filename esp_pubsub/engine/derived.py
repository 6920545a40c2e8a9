"""Derived order: one input on a log and no timers. The order is the input's own, and costs nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from .._tasks import run_all
from .inputs import LogReader
from .order import Poisoned
from .snapshots import Standing
from .stepping import Stepping


class DerivedOrder:
    """Steps on the input as it is read."""

    def __init__(
        self, window: str, reader: LogReader, stepping: Stepping, is_passed_over: Callable[[Poisoned], Awaitable[bool]]
    ) -> None:
        """`is_passed_over` looks in the order topic, which is else empty here but for the beginning."""
        stepping.is_passed_over = is_passed_over
        self._window = window
        self._reader = reader
        self._stepping = stepping
        self._taken = reader.place

    @property
    def positions(self) -> tuple[int, ...]:
        """Up to where the input was taken."""
        return (self._taken.position,)

    @property
    def read(self) -> tuple[int, ...]:
        """Up to where the input was read."""
        return (self._reader.place.position,)

    @property
    def standing(self) -> Standing:
        """Where the member is; to be asked while nothing is stepped on."""
        return Standing(self._taken.position, 0, 0, None, ((self._taken.position, self._taken.incarnation),))

    @property
    def hindered_since(self) -> float | None:
        """Since when the input cannot be read."""
        return self._reader.lost_since

    async def ends(self) -> Sequence[int | None]:
        """See `engine.Ordered`."""
        return [await self._reader.end()]

    def has_taken(self, ends: Sequence[int | None]) -> bool:
        """See `engine.Ordered`."""
        return all(end is None or self._taken.position >= end for end in ends)

    def now(self) -> int:
        """It has no time."""
        return 0

    def heard(self, now: int) -> None:
        """See `now`."""

    async def run(self) -> None:
        """Step until cancelled. Raises what ends this member."""
        await run_all(self._step(), self._reader.say_if_silent(self._window))

    async def _step(self) -> None:
        try:
            while True:
                messages = await self._reader.read()
                async with self._stepping.whole():
                    await self._stepping.take(0, messages)
                    self._taken = self._reader.place
        finally:
            await self._reader.aclose()
