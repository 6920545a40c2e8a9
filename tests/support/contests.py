"""What the election suite needs wherever members have links that can be cut, and machines that are not always quiet."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from esp_pubsub.bus import Bus, Feed, Pipe
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.testing import election_conformance as elections

from .proxy import Proxy

PAUSE = 0.01  # seconds between two rounds of a probe

Round = Callable[[], Awaitable[object]]
"""One question to the service that elections rest on, and its answer."""
Service = Callable[[], AbstractAsyncContextManager[Round]]


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
    service: Service,
    *,
    quiet: float,
    stall: float,
    limit: float = 60.0,
    altogether: float = 280.0,
) -> None:
    """Carry out one check; again, if it failed and the service, or this process, stood still for `stall` seconds
    meanwhile: a leader that is not heard for so long may be deposed, and is, which the check takes for a fault.

    `service`: the one that the elections rest on, over a link of its own that nobody harms. `limit` is for one time,
    `altogether` for all: less than the test's own timeout, so that it is the check that fails in the end.
    """
    loop = asyncio.get_running_loop()
    context = elections.Context(open_contest=open_contest, quiet=quiet, limit=limit)
    last = loop.time() + altogether - limit  # what begins later could not end in time
    async with watched(service) as probe:
        while True:
            probe.begin()
            try:
                await elections.CHECKS[name](context)
            except elections.NotClaimed as why:
                pytest.skip(str(why))
            except elections.Failed as failed:
                longest = probe.longest
                failed.add_note(f"meanwhile the service took {longest:.3f} s, at most, for one round")
                if longest < stall or loop.time() > last:
                    raise
                continue
            return


class Probe:
    """Asks the service again and again, and notes for how long there was no answer."""

    def __init__(self, ask: Round) -> None:
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self.begin()

    def begin(self) -> None:
        """Forget what was noted."""
        self._answered_at, self._longest = self._loop.time(), 0.0

    @property
    def longest(self) -> float:
        """Seconds without an answer, at most, since it began. It grows while an answer is waited for."""
        return max(self._longest, self._loop.time() - self._answered_at)

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await self._ask()
            self._longest, self._answered_at = self.longest, self._loop.time()
            await asyncio.sleep(PAUSE)


@contextlib.asynccontextmanager
async def watched(service: Service) -> AsyncIterator[Probe]:
    """Ask a service all the time."""
    async with service() as ask:
        await ask()  # what is slow the first time only
        probe = Probe(ask)
        running = asyncio.create_task(probe.run())
        try:
            yield probe
        finally:
            running.cancel()
            await asyncio.wait([running])
    if not running.cancelled():
        running.result()


@contextlib.asynccontextmanager
async def this_process() -> AsyncIterator[Round]:
    """The loop and a thread, which both want the processor."""
    yield lambda: asyncio.to_thread(lambda: None)


def rounds_of_a_bus(open_bus: Callable[[], Awaitable[Bus]]) -> Service:
    """A message to a topic of its own, its confirmation, and the message read back."""

    @contextlib.asynccontextmanager
    async def service() -> AsyncIterator[Round]:
        bus = await open_bus()
        rounds = _BusRounds(bus)
        try:
            yield rounds.ask
        finally:
            await rounds.drop()
            await bus.aclose()

    return service


class _BusRounds:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._topic = f"probe:0/p/q/{secrets.token_hex(4)}/I"
        self._open: tuple[Pipe, Feed] | None = None
        self._confirmed = 0

    async def ask(self) -> None:
        """After trouble it is asked again: until there is an answer the bus stands still."""
        while True:
            try:
                await self._ask()
            except BusUnavailable:
                await self.drop()
                await asyncio.sleep(PAUSE)
            else:
                return

    async def _ask(self) -> None:
        if self._open is None:
            feed = await self._bus.feed(self._topic, "latest", None)
            try:
                self._open, self._confirmed = (await self._bus.pipe(self._topic), feed), 0
            except BaseException:
                await feed.aclose()
                raise
        pipe, feed = self._open
        await pipe.write([b"probe"])
        self._confirmed = await pipe.confirmed(self._confirmed)
        await feed.read(1, 1 << 20)

    async def drop(self) -> None:
        opened, self._open = self._open, None
        for end in opened or ():
            await end.aclose()
