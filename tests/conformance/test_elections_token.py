"""The election suite over RabbitMQ's token. Each member has a link of its own, which breaks; a dead one's hangs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

import pytest

from esp_pubsub.bus import Election
from esp_pubsub.testing import election_conformance as elections
from esp_pubsub.transports.rabbitmq import Options, open_bus, token
from tests.support.contests import Links, judge, rounds_of_a_bus
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST

PATIENCE = 20.0  # three heartbeats until a silent one is found, and what a loaded machine adds
QUIET = 0.3


class Group:
    """Members in one process."""

    def __init__(self, rabbitmq: RabbitMQ) -> None:
        self.port = rabbitmq.nodes[0].port
        self.name = f"group-{secrets.token_hex(4)}"
        self.links = Links()

    @contextlib.asynccontextmanager
    async def member(self, name: str) -> AsyncIterator[Election]:
        proxy = await asyncio.to_thread(Proxy, HOST, self.port)  # it reads a file
        async with proxy as link:
            self.links[name] = link
            bus = await open_bus(Options(host=HOST, port=link.port, heartbeat=1.0, timeout=2.0, mode="direct"))
            try:
                async with asyncio.TaskGroup() as tasks:
                    election = bus.election("token", self.name, name)
                    running = tasks.create_task(election.run())
                    yield election
                    running.cancel()
            finally:
                await bus.aclose()


@pytest.mark.parametrize("name", elections.CHECKS)
async def test_the_token(name: str, rabbitmq: RabbitMQ) -> None:
    async def open_contest() -> elections.Contest:
        group = Group(rabbitmq)
        return elections.Contest(member=group.member, patience=PATIENCE, **group.links.hooks)

    service = rounds_of_a_bus(lambda: open_bus(Options(host=HOST, port=rabbitmq.nodes[0].port, mode="direct")))
    await judge(name, open_contest, service, quiet=QUIET, stall=1.0)


async def test_a_leader_that_gives_the_token_back_gets_it_again_before_a_standby(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker takes back what is held for half an hour: so it is renewed, and the leader goes on to lead."""
    monkeypatch.setattr(token, "RENEW", 0.2)
    group = Group(rabbitmq)
    async with group.member("a") as leader, group.member("b") as standby, asyncio.timeout(2 * PATIENCE):
        assert isinstance(leader, token.TokenElection)
        term = await leader.campaign()
        waiting = asyncio.ensure_future(standby.campaign())
        watching = asyncio.ensure_future(leader.watch())
        held = {leader._tag}
        while len(held) < 4:
            await leader._news.wait()
            held.add(leader._tag)
        assert not watching.done() and not waiting.done()
        watching.cancel()
        await leader.resign()
        assert await waiting > term
