"""The conformance suite over a real RabbitMQ broker, in each mode, and the log election over its streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from esp_pubsub.bus import Bus
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.registry import driver
from esp_pubsub.testing import conformance
from esp_pubsub.testing import election_conformance as elections
from tests.conformance import test_elections as log
from tests.support.rabbitmq import RabbitMQ

EXCHANGE = "conformance"
MODES: dict[str, dict[str, Any]] = {
    "direct": {"mode": "direct"},
    "persistent": {"buspersistence": True},
    "quorum": {"buspersistence": True, "quorum": True},
    "stream": {"mode": "stream"},
}
# All that is another code path in a mode: values and requests are the same in each, quorum queues are for groups only,
# and what streams are without groups is shown in tests/integration/test_rabbitmq_stream.py.
PARTS = {"direct": "", "persistent": "_conformance_pipes _conformance_feeds _conformance_groups"}
PARTS["quorum"], PARTS["stream"] = "_conformance_groups", "_conformance_groups _conformance_purges"
CASES = [
    (mode, name)
    for mode in MODES
    for name, check in conformance.CHECKS.items()
    if not PARTS[mode] or check.body.__module__.rpartition(".")[2] in PARTS[mode]
]


async def open_rabbitmq(rabbitmq: RabbitMQ, **settings: Any) -> Bus:
    found = driver("rabbitmq")
    node = rabbitmq.nodes[0]
    options = found.Options(
        host="127.0.0.1", port=node.port, streamport=rabbitmq.stream_port, exchange=EXCHANGE, **settings
    )
    return await found.open_bus(options)


def context(rabbitmq: RabbitMQ, settings: dict[str, Any]) -> conformance.Context:
    @asynccontextmanager
    async def fail_in_the_middle(bus: Bus, topic: str) -> AsyncIterator[bytes]:
        """One of the queues takes no large message; so the broker refuses that one, and takes what follows."""
        connection = await aio_pika.connect(rabbitmq.url)
        async with connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(
                exclusive=True, arguments={"x-max-length-bytes": 10_000, "x-overflow": "reject-publish"}
            )
            await queue.bind(EXCHANGE, topic)
            yield bytes(20_000)

    async def cut(bus: Any) -> None:
        """What this connection has open is aborted, and where it connects to, nobody is there."""
        bus.link.addresses = [("127.0.0.1", 1)]
        for _, transport in bus.link._connections.values():
            transport.abort()
        if bus._streams is not None:
            bus._streams.address = replace(bus._streams.address, hosts=(("127.0.0.1", 1),))
            for opened in bus._streams._open:
                opened._link.end(BusUnavailable("cut"))

    async def open_bus() -> Bus:
        bus: Any = await open_rabbitmq(rabbitmq, **settings)
        if bus._streams is not None:  # it offers no catalog, but what deletes a stream purges it
            bus.capabilities, bus.purge = replace(bus.capabilities, catalog=True), bus._streams.purge
        return bus  # type: ignore[no-any-return]

    return conformance.Context(
        open_bus=open_bus,
        fail_in_the_middle=fail_in_the_middle,
        cut=cut,
        patience=20.0,
        quiet=0.1,
    )


@pytest.mark.parametrize(("mode", "name"), CASES)
async def test_rabbitmq(mode: str, name: str, rabbitmq: RabbitMQ) -> None:
    settings = MODES[mode] | ({"prefetch": 20} if name == "released_messages_do_not_block" else {})
    try:
        await conformance.CHECKS[name](context(rabbitmq, settings))
    except conformance.NotClaimed as why:
        pytest.skip(str(why))


# elections


class StreamGroup(log.FaultyGroup):
    """Members of a group whose control topic is a stream; their links have faults."""

    def __init__(self, rabbitmq: RabbitMQ) -> None:
        super().__init__(Path(), deaths=False)
        self.rabbitmq = rabbitmq

    async def connect(self) -> Bus:
        return await open_rabbitmq(self.rabbitmq, mode="stream")


@pytest.mark.parametrize("name", [name for name in elections.CHECKS if "twenty" not in name])  # that one is long
async def test_the_log_on_streams(name: str, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    """As slow as in production: with a broker between the members, silence is longer."""
    for what, seconds in (("BEAT", 0.1), ("SILENCE", 0.4), ("QUIET", 1.0), ("PATIENCE", 20.0)):
        monkeypatch.setattr(log, what, seconds)
    await log.carry_out(name, StreamGroup, rabbitmq)
