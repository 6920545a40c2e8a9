"""Members of one failover group on a bus in memory and a virtual clock, each on a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import esp_pubsub as esp
from esp_pubsub.client import Client
from esp_pubsub.publisher import Publisher, PublisherOptions
from esp_pubsub.testing._sim_bus import Broker, SimBus
from esp_pubsub.testing._virtual import VirtualLoop
from esp_pubsub.wire.frame import BLOCK, parse
from tests.unit.workbench import SYMBOLS, TOPIC, URL

STALL = 0.5  # shorter than what the broker will do to a member


class World:
    """A broker, and whoever is connected to it."""

    def __init__(self, loop: VirtualLoop, stack: contextlib.AsyncExitStack, kind: str) -> None:
        self.loop = loop
        self.broker = Broker(loop, kind, deaths=False)
        self._stack = stack
        self._members: list[Publisher] = []  # each is closed by its client, also one that its scene forgets

    async def client(self, name: str) -> Client:
        client = Client(SimBus(self.broker, name), lambda notice: None)
        await client.start()
        self._stack.push_async_callback(self._close, client)
        return client

    async def member(self, name: str, close_timeout: float = 1.0, run: int = 0) -> Publisher:
        client = await self.client(name)
        options = PublisherOptions(stall=STALL, close_timeout=close_timeout)
        publisher = await client.publisher(URL, SYMBOLS, failover=esp.Failover("g", run=run), options=options)
        self._members.append(publisher)
        return publisher

    async def _close(self, client: Client) -> None:
        with contextlib.suppress(esp.EspError):  # of what a scene leaves behind
            await client.aclose()

    def stall(self, seconds: float) -> None:
        self.broker.stalled_until = self.loop.time() + seconds

    def ids(self) -> list[int]:
        """The blocks on the topic."""
        return [frame.id for frame in map(parse, self.broker.topic(TOPIC).log) if frame.kind == BLOCK]


def in_a_world(scene: Callable[[World], Coroutine[Any, Any, None]], kind: str = "log") -> None:
    loop = VirtualLoop(random.Random(1))  # type: ignore[abstract]

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await scene(World(loop, stack, kind))

    try:
        loop.run(run(), 1_000)
    finally:
        loop.end()
    assert not loop.problems


async def leads(publisher: Publisher, *, yes: bool = True) -> None:
    """Wait until it leads, or does not."""
    while (publisher.stats.role == "active") is not yes:  # noqa: ASYNC110  # on a virtual clock
        await asyncio.sleep(0.01)
