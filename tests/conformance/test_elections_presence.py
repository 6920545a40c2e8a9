"""The election suite over a presence exchange, on a broker with an exchange type that does as SAS's plug-in does."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest

import esp_pubsub as esp
from esp_pubsub.bus import Election
from esp_pubsub.errors import BusRefused
from esp_pubsub.testing import election_conformance as elections
from esp_pubsub.testing._election_trial import Trial
from esp_pubsub.transports.rabbitmq import Options, open_bus
from tests.integration.members import SCHEMA, Reader, inject, inject_until_refused, is_active
from tests.support.contests import Links, judge, rounds_of_a_bus
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST

PATIENCE = 20.0  # three heartbeats until a silent one is found, and what a loaded machine adds
QUIET = 0.3
SOURCE = Path(__file__).with_name("x_presence.erl")
_LOAD = """
{ok, Module, Code} = compile:file("%s", [binary]),
{module, Module} = code:load_binary(Module, "", Code),
rabbit_registry:register(exchange, <<"x-presence">>, Module).
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitMQ]:
    """One node, which is nobody else's: the others' has no such exchanges."""
    with RabbitMQ() as broker:
        broker.ctl("eval", _LOAD % SOURCE)
        yield broker


class Group:
    """Members in one process, each with a link of its own, which breaks; a frozen one's hangs."""

    def __init__(self, port: int, exchange: str) -> None:
        self.port = port
        self.exchange = exchange
        self.name = f"group-{secrets.token_hex(4)}"
        self.links = Links()

    @contextlib.asynccontextmanager
    async def member(self, name: str) -> AsyncIterator[Election]:
        proxy = await asyncio.to_thread(Proxy, HOST, self.port)  # it reads a file
        async with proxy as link:
            self.links[name] = link
            options = Options(host=HOST, port=link.port, exchange=self.exchange, heartbeat=1.0, mode="direct")
            bus = await open_bus(options)
            try:
                async with asyncio.TaskGroup() as tasks:
                    election = bus.election("presence", self.name, name)
                    running = tasks.create_task(election.run())
                    yield election
                    running.cancel()
            finally:
                await bus.aclose()


@pytest.mark.parametrize("name", elections.CHECKS)
async def test_presence(name: str, broker: RabbitMQ) -> None:
    async def open_contest() -> elections.Contest:
        group = Group(broker.nodes[0].port, "esp-pubsub")  # all groups share the exchange
        hooks = {**group.links.hooks, "die": group.links.lose}
        return elections.Contest(member=group.member, patience=PATIENCE, **hooks)

    service = rounds_of_a_bus(lambda: open_bus(Options(host=HOST, port=broker.nodes[0].port, mode="direct")))
    await judge(name, open_contest, service, quiet=QUIET, stall=1.0)


@contextlib.asynccontextmanager
async def stranger(broker: RabbitMQ) -> AsyncIterator[Any]:
    connection = await aio_pika.connect(broker.url)
    async with connection:
        yield await connection.channel()


async def test_the_exchange_says_what_the_plug_in_was_seen_to_say(broker: RabbitMQ) -> None:
    """What the election rests on, and what Line is tested with."""
    async with stranger(broker) as channel:
        exchange = await channel.declare_exchange(f"x-{secrets.token_hex(4)}", "x-presence", auto_delete=True)
        one, other, member = [await channel.declare_queue(exclusive=True) for _ in range(3)]
        heard: asyncio.Queue[tuple[str, str, str, str]] = asyncio.Queue()

        async def hear(message: Any) -> None:
            said = message.headers
            assert (message.body, message.routing_key, said["exchange"]) == (b"", "", exchange.name)
            heard.put_nowait((message.exchange, said["action"], said["queue"], said["key"]))

        async def is_said(*expected: tuple[Any, str, str]) -> None:
            async with asyncio.timeout(60):
                found = sorted([await heard.get() for _ in expected])
            assert found == sorted((exchange.name, action, queue.name, key) for queue, action, key in expected)

        await one.consume(hear, no_ack=True)
        await one.bind(exchange, "")  # who listens is not heard of
        await member.bind(exchange, "a")
        await member.bind(exchange, "a")
        await member.bind(exchange, "b")
        await is_said((member, "bind", "a"), (member, "bind", "b"))
        await exchange.publish(aio_pika.Message(b"forged"), "", mandatory=False)
        await other.consume(hear, no_ack=True)
        await other.bind(exchange, "")
        await is_said((member, "bind", "a"), (member, "bind", "b"))
        await member.unbind(exchange, "b")
        await is_said(*2 * [(member, "unbind", "b")])
        await member.delete()
        await is_said(*2 * [(member, "unbind", "a")])


async def test_when_the_exchange_is_deleted_one_leads_all_the_same(broker: RabbitMQ) -> None:
    """Nobody is told of that. Who was there stands in one line with whoever makes the exchange anew."""
    group = Group(broker.nodes[0].port, f"shared-{secrets.token_hex(4)}")
    contest = elections.Contest(member=group.member, patience=PATIENCE)
    context = elections.Context(open_contest=asyncio.Event().wait, quiet=QUIET)  # type: ignore[arg-type]
    async with stranger(broker) as channel, asyncio.TaskGroup() as tasks:
        trial = Trial(context, contest, tasks)
        await trial.keen(2)
        await trial.one_leads()
        await channel.exchange_delete(group.exchange + "_failoverpresence")
        await trial.keen(1)
        async with asyncio.timeout(3 * PATIENCE):  # the broker's own tool is asked, and takes its time
            while len(await present(broker, group)) < 3:
                pass  # asking takes its time
        await trial.settles()
        await trial.close()
    trial.audit()


async def present(broker: RabbitMQ, group: Group) -> set[str]:
    """The keys of who stands in line."""
    table = await asyncio.to_thread(broker.ctl, "list_bindings", "source_name", "routing_key")
    lines = [line.split("\t") for line in table.splitlines()]
    return {key for source, key in lines if source == group.exchange + "_failoverpresence" and key}


# a publisher's


@contextlib.asynccontextmanager
async def member(port: int, url: str, **options: Any) -> AsyncIterator[esp.Publisher]:
    where = {"host": HOST, "port": port, "mode": "direct"}
    async with esp.init("rabbitmq", on_notice=lambda _: None, **where, **options) as client:
        publisher = await client.publisher(url, SCHEMA, failover=esp.Failover("feed", election="presence"))
        try:
            yield publisher
        finally:
            with contextlib.suppress(esp.EspError):
                await publisher.aclose()


@pytest.fixture
def url() -> str:
    return f"dfESP://host:5555/{secrets.token_hex(4)}/q/w"


async def test_when_a_leaders_link_is_cut_the_next_one_goes_on_behind_it(broker: RabbitMQ, url: str) -> None:
    port = broker.nodes[0].port
    proxy = await asyncio.to_thread(Proxy, HOST, port)
    async with (
        esp.init("rabbitmq", on_notice=lambda _: None, host=HOST, port=port, mode="direct") as client,
        client.subscriber(url, SCHEMA, side="in") as subscriber,
        proxy as link,
        member(link.port, url) as first,
    ):
        reader = Reader(subscriber)
        await is_active(first)
        async with member(port, url) as second:
            for each in (first, second):
                await inject(each, 1, 20)
            await reader.to(20)
            assert second.stats.role != "active"
            link.refuse()
            link.cut()
            await is_active(second)
            await inject(second, 21, 40)
            await reader.to(40)


async def test_a_stock_broker_refuses_it_and_other_elections_are_named(rabbitmq: RabbitMQ, url: str) -> None:
    async with member(rabbitmq.nodes[0].port, url) as publisher:
        with pytest.raises(BusRefused, match=r"no exchanges of type x-presence.*plug-in.*token, log, or zookeeper"):
            await inject_until_refused(publisher, 1)
