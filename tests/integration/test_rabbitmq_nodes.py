"""Two RabbitMQ nodes in a cluster that hear of each other late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from esp_pubsub.notices import Notice
from tests.integration.members import until
from tests.integration.rabbit import PERSISTENT, go_on, has_role, member, new_url, reading, settings
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST, free_ports

LATE = 0.1  # seconds, on each way
BLOCKS, WAITS_AT = 3_000, 500


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[RabbitMQ, list[Proxy]]]:
    """Two nodes, and the ways on which they hear each other."""
    async with AsyncExitStack() as stack:
        ports = free_ports(2)
        ways = [await stack.enter_async_context(Proxy(HOST, port)) for port in ports]
        joined = RabbitMQ(ways=[(port, way.port) for port, way in zip(ports, ways, strict=True)])
        yield await stack.enter_async_context(joined), ways


async def test_no_reader_finds_a_hole_when_the_active_is_killed_while_the_nodes_hear_of_each_other_late(
    cluster: tuple[RabbitMQ, list[Proxy]],
) -> None:
    """The active is on the first node, a reader on each; the standby is on the active's node, then on the other one."""
    broker, ways = cluster
    near, far = ({"port": node.port, "streamport": node.stream_port} for node in broker.nodes)
    patient = PERSISTENT | {"timeout": 10.0}
    for standby in (near, far):
        url = new_url()
        told: list[Notice] = []
        async with (
            reading(broker, url, told, "near", **patient, **near) as here,
            reading(broker, url, told, "far", **patient, **far) as there,
            member(settings(broker, **patient, **near), url, BLOCKS, WAITS_AT) as active,
        ):
            await has_role(active, "active")
            async with (
                member(settings(broker, **patient, **standby), url, BLOCKS, WAITS_AT) as other,
                asyncio.TaskGroup() as tasks,
            ):
                for reader in (here, there):
                    tasks.create_task(reader.to(BLOCKS))
                await has_role(other, "candidate")
                for way in ways:
                    way.delay(LATE)
                await go_on(active, other)
                await until(lambda here=here, there=there: here.following > there.following + 20)
                active.kill()
                await has_role(other, "active")
                for way in ways:
                    way.heal()
            await here.nothing_more()
            await there.nothing_more()
            assert told == []
            assert here.subscriber.stats.doubles and there.subscriber.stats.doubles, "nothing was sent again"
