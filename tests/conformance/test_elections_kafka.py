"""The election suite over the core's log election on a real Kafka broker. Each member has a link of its own, which
breaks; a dead one's hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from esp_pubsub.bus import Election
from esp_pubsub.failover.control import Control
from esp_pubsub.failover.line import Position
from esp_pubsub.failover.log_election import LogElection
from esp_pubsub.failover.words import Beat, Identity, Setup
from esp_pubsub.testing import election_conformance as elections
from esp_pubsub.transports.kafka import Options, open_bus
from tests.chaos.kafka import KafkaWithWays
from tests.support.contests import Links, judge, rounds_of_a_bus
from tests.support.proxy import Proxy
from tests.support.server import HOST

PATIENCE = 40.0  # two timeouts of a link that hangs, and what a loaded machine adds
QUIET = 2.0
BEAT = 0.3  # so that a stall of the machine for a second deposes nobody
STALL = 0.5  # less than half of a silence
SETUP = Setup(("elections:0/p/q/w/I",), ("id*:int64",), "rows", "log")


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaWithWays]:
    with KafkaWithWays(16) as broker:  # five members, and ten that died
        yield broker


class Group:
    """Members in one process."""

    def __init__(self, ways: list[tuple[int, int]]) -> None:
        self.ways = ways  # those that are free
        self.topic = f"elections:0/M/F/{secrets.token_hex(4)}"
        self.source = secrets.randbits(63)
        self.links = Links()

    @contextlib.asynccontextmanager
    async def member(self, name: str) -> AsyncIterator[Election]:
        listen, port = way = self.ways.pop()
        identity = Identity(name, secrets.randbits(63), "", socket.gethostname(), os.getpid())

        def word(term: int, number: int, resigns: bool) -> Beat:
            return Beat(SETUP, identity, 0, term, number, (Position(0, 0, None),), resigns)

        proxy = await asyncio.to_thread(Proxy, HOST, port, listen=listen)  # it reads a file
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.ways.append, way)  # when the proxy is gone
            self.links[name] = await stack.enter_async_context(proxy)
            bus = await open_bus(Options(hostport=f"{HOST}:{listen}"))
            control = Control(bus, self.topic, self.source, 0, trouble=lambda error: None)
            election = LogElection(bus, control, identity, word, every=BEAT)
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(control.run()), tasks.create_task(election.run())]
                    await control.reading.wait()
                    yield election
                    for task in running:
                        task.cancel()
            finally:
                await bus.aclose()


@pytest.mark.parametrize("name", elections.CHECKS)
@pytest.mark.timeout(400)
async def test_the_log(name: str, broker: KafkaWithWays) -> None:
    ways = list(broker.ways)

    async def open_contest() -> elections.Contest:
        group = Group(ways)
        return elections.Contest(member=group.member, patience=PATIENCE, **group.links.hooks)

    service = rounds_of_a_bus(lambda: open_bus(Options(hostport=broker.bootstrap)))
    await judge(name, open_contest, service, quiet=QUIET, stall=STALL, limit=180.0, altogether=380.0)
