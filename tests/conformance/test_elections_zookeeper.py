"""The election suite over ZooKeeper. Each member has a link of its own, which breaks or hangs; a dead one's hangs."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from esp_pubsub.bus import Election
from esp_pubsub.testing import election_conformance as elections
from esp_pubsub.transports.zookeeper import open_election
from tests.support.proxy import Proxy

PATIENCE = 8.0  # a session, its rounding by the server, and what a loaded machine adds
QUIET = 0.5
CASES = [(name, False) for name in elections.CHECKS]
CASES += [(name, True) for name, check in elections.CHECKS.items() if "lose" in check.needs]


class Group:
    """Members in one process."""

    def __init__(self, hosts: str, *, hang: bool) -> None:
        self.host, _, self.port = hosts.partition(":")
        self.hang = hang
        self.name = f"group-{secrets.token_hex(4)}"
        self.links: dict[str, Proxy] = {}

    @contextlib.asynccontextmanager
    async def member(self, name: str) -> AsyncIterator[Election]:
        proxy = await asyncio.to_thread(Proxy, self.host, int(self.port))  # it reads a file
        async with proxy as link, asyncio.TaskGroup() as tasks:
            self.links[name] = link
            election = open_election(f"127.0.0.1:{link.port}/suite", self.name, name)
            running = tasks.create_task(election.run())
            yield election
            running.cancel()

    async def silence(self, name: str) -> None:
        self.links[name].swallow()

    async def lose(self, name: str) -> None:
        if self.hang:
            return await self.silence(name)
        self.links[name].refuse()
        self.links[name].cut()

    async def heal(self, name: str) -> None:
        self.links[name].heal()

    @property
    def hooks(self) -> dict[str, Any]:
        return {
            "die": self.silence, "lose": self.lose, "heal": self.heal, "freeze": self.silence, "thaw": self.heal
        }  # fmt: skip


@pytest.mark.parametrize(("name", "hang"), CASES, ids=[f"{name}{'-hang' * hang}" for name, hang in CASES])
async def test_zookeeper(name: str, hang: bool, zookeeper: Any) -> None:
    async def open_contest() -> elections.Contest:
        group = Group(zookeeper.hosts, hang=hang)
        return elections.Contest(member=group.member, patience=PATIENCE, **group.hooks)

    try:
        await elections.CHECKS[name](elections.Context(open_contest=open_contest, quiet=QUIET))
    except elections.NotClaimed as why:
        pytest.skip(str(why))
