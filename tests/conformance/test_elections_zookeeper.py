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
from tests.support.contests import Links, judge
from tests.support.proxy import Proxy
from tests.support.zookeeper import rounds

PATIENCE = 20.0  # a session, its rounding by the server, and what a loaded machine adds
QUIET = 0.5
CASES = [(name, False) for name in elections.CHECKS]
CASES += [(name, True) for name, check in elections.CHECKS.items() if "lose" in check.needs]


class Group:
    """Members in one process."""

    def __init__(self, hosts: str, *, hang: bool) -> None:
        self.host, _, self.port = hosts.partition(":")
        self.hang = hang
        self.name = f"group-{secrets.token_hex(4)}"
        self.links = Links()

    @contextlib.asynccontextmanager
    async def member(self, name: str) -> AsyncIterator[Election]:
        proxy = await asyncio.to_thread(Proxy, self.host, int(self.port))  # it reads a file
        async with proxy as link, asyncio.TaskGroup() as tasks:
            self.links[name] = link
            election = open_election(f"127.0.0.1:{link.port}/suite", self.name, name)
            running = tasks.create_task(election.run())
            yield election
            running.cancel()

    @property
    def hooks(self) -> dict[str, Any]:
        return {**self.links.hooks, "lose": self.links.silence} if self.hang else self.links.hooks


@pytest.mark.parametrize(("name", "hang"), CASES, ids=[f"{name}{'-hang' * hang}" for name, hang in CASES])
async def test_zookeeper(name: str, hang: bool, zookeeper: Any) -> None:
    async def open_contest() -> elections.Contest:
        group = Group(zookeeper.hosts, hang=hang)
        return elections.Contest(member=group.member, patience=PATIENCE, **group.hooks)

    await judge(name, open_contest, rounds(zookeeper.hosts), quiet=QUIET, stall=0.5)
