"""The election suite over Solace's exclusive queue, on the double. Each member has a link of its own, which breaks, as
it does when a process dies; that of one that stands still hangs. With SOLACE_CFG, over a real broker too; links to it
break too, where its host is one that is reached without TLS, whose certificate would name another. None hangs: a broker
finds that out by the keep-alives of TCP, and the proxy would answer them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from esp_pubsub.bus import Election
from esp_pubsub.config import load_options
from esp_pubsub.registry import driver
from esp_pubsub.testing import election_conformance as elections
from tests.support.contests import Links, judge, rounds_of_a_bus
from tests.support.proxy import Proxy
from tests.support.server import HOST
from tests.support.solace import Solace, open_bus, plain_place

PATIENCE = 25.0  # three signs of life until a silent one is found, and what a loaded machine adds
QUIET = 0.2
KEEPALIVE = 2.0  # so that who only waits for the processor is not taken for dead
TIMEOUT = 10.0
REAL = os.environ.get("SOLACE_CFG")

pytest_plugins = ["tests.support.solace_client"]


@contextlib.asynccontextmanager
async def seated(bus: Any, line: str, name: str) -> AsyncIterator[Election]:
    try:
        async with asyncio.TaskGroup() as tasks:
            election = bus.election("flow", line, name)
            running = tasks.create_task(election.run())
            yield election
            running.cancel()
    finally:
        await bus.aclose()


class Group:
    """Members in one process."""

    def __init__(self, place: tuple[str, int], open_bus: Callable[[str], Awaitable[Any]]) -> None:
        """`open_bus` is told the host to connect to."""
        self.place = place
        self.open_bus = open_bus
        self.name = f"group-{secrets.token_hex(4)}"
        self.links = Links()

    @contextlib.asynccontextmanager
    async def member(self, name: str) -> AsyncIterator[Election]:
        proxy = await asyncio.to_thread(Proxy, *self.place)  # it reads a file
        async with proxy as link:
            self.links[name] = link
            bus = await self.open_bus(f"{HOST}:{link.port}")
            async with seated(bus, self.name, name) as election:
                yield election

    @property
    def cuts(self) -> dict[str, Any]:
        return {"die": self.links.lose, "lose": self.links.lose, "heal": self.links.heal}


@pytest.mark.parametrize("name", elections.CHECKS)
async def test_the_flow_on_the_double(name: str) -> None:
    async with Solace() as solace:

        async def open_double(host: str) -> Any:
            options = driver("solace").Options
            return await open_bus(options(host=host, username="us", keepalive=KEEPALIVE, timeout=TIMEOUT))

        async def open_contest() -> elections.Contest:
            group = Group((HOST, solace.port), open_double)
            hooks = {**group.links.hooks, "die": group.links.lose}
            return elections.Contest(member=group.member, patience=PATIENCE, **hooks)

        service = rounds_of_a_bus(lambda: open_double(f"{HOST}:{solace.port}"))
        await judge(name, open_contest, service, quiet=QUIET, stall=1.0)


@pytest.mark.usefixtures("solace_client", "what_is_left_is_told")
@pytest.mark.skipif(REAL is None, reason="SOLACE_CFG names no broker: make test-solace SOLACE_CFG=path")
@pytest.mark.parametrize("name", elections.CHECKS)
async def test_the_flow_on_a_broker(name: str) -> None:
    found = driver("solace")
    options = await asyncio.to_thread(load_options, found.Options, section="solace", config=REAL)

    async def open_real(host: str) -> Any:
        return await found.open_bus(replace(options, host=host))

    async def open_contest() -> elections.Contest:
        place = plain_place(options.host)
        if place is not None:
            group = Group(place, open_real)
            return elections.Contest(member=group.member, patience=PATIENCE, **group.cuts)
        line = f"group-{secrets.token_hex(4)}"

        @contextlib.asynccontextmanager
        async def member(name: str) -> AsyncIterator[Election]:
            async with seated(await found.open_bus(options), line, name) as election:
                yield election

        return elections.Contest(member=member, patience=PATIENCE)

    await judge(name, open_contest, rounds_of_a_bus(lambda: found.open_bus(options)), quiet=1.0, stall=1.0)
