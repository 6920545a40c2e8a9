"""What the election suite needs wherever members have links that can be cut, and machines that are not always quiet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from esp_pubsub.testing import election_conformance as elections

from .proxy import Proxy


class Links(dict[str, Proxy]):
    """The members' links by name, and what the suite does to them."""

    async def silence(self, name: str) -> None:
        self[name].swallow()

    async def lose(self, name: str) -> None:
        self[name].refuse()
        self[name].cut()

    async def heal(self, name: str) -> None:
        self[name].heal()

    @property
    def hooks(self) -> dict[str, Any]:
        """Who dies is heard of no more, as nobody closes what it had open."""
        return {
            "die": self.silence, "lose": self.lose, "heal": self.heal, "freeze": self.silence, "thaw": self.heal
        }  # fmt: skip


async def judge(
    name: str,
    open_contest: Callable[[], Awaitable[elections.Contest]],
    *,
    quiet: float,
    stall: float,
    limit: float = 60.0,
) -> None:
    """Carry out one check; again, if it failed and this process stood still for `stall` seconds meanwhile: who does so
    may be deposed, and is, which the check takes for a fault.
    """
    while True:
        try:
            async with _stood_still() as longest:
                await elections.CHECKS[name](elections.Context(open_contest=open_contest, quiet=quiet, limit=limit))
        except elections.NotClaimed as why:
            pytest.skip(str(why))
        except elections.Failed:
            if longest() < stall:
                raise
            continue
        return


@contextlib.asynccontextmanager
async def _stood_still() -> AsyncIterator[Callable[[], float]]:
    """For how long, at most, this process did not come to its turn."""
    loop, longest = asyncio.get_running_loop(), 0.0

    async def look() -> None:
        nonlocal longest
        while True:
            before = loop.time()
            await asyncio.sleep(0.01)
            longest = max(longest, loop.time() - before - 0.01)

    looking = asyncio.ensure_future(look())
    try:
        yield lambda: longest
    finally:
        looking.cancel()
