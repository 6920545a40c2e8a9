"""Clients of a real RabbitMQ broker, and somebody else on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest

import esp_pubsub as esp
from esp_pubsub.notices import Notice
from esp_pubsub.registry import driver
from tests.integration.members import SCHEMA, Reader
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST

EXCHANGE = "integration"
PERSISTENT: dict[str, Any] = {"buspersistence": True}
MODES = pytest.mark.parametrize("mode", [{}, PERSISTENT], ids=["direct", "persistent"])

ROOT = Path(__file__).parents[2]
MEMBER = """
import asyncio, json, sys
import esp_pubsub as esp
from tests.integration.members import SCHEMA, rows

async def main(settings, url, blocks, waits_at):
    async with esp.init("rabbitmq", on_notice=lambda notice: None, **json.loads(settings)) as client:
        async with client.publisher(url, SCHEMA, failover=esp.Failover("feed")) as publisher:
            async def tell():
                print(publisher.stats.role, flush=True)
                async for change in publisher.roles():
                    print(change.role, flush=True)
            telling = asyncio.create_task(tell())
            for id in range(1, int(blocks) + 1):
                if id == int(waits_at):
                    await asyncio.to_thread(sys.stdin.readline)
                await publisher.inject(rows(id))
                await asyncio.sleep(0.001 * (publisher.stats.on_bus < id))  # who is late hurries
            await publisher.flush(30)
            await telling  # until somebody kills it

asyncio.run(main(*sys.argv[1:]))
"""

logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # it tells of the trouble that is meant here


def new_url() -> str:
    """A window of its own for each test."""
    return f"dfESP://host:5555/{secrets.token_hex(4)}/q/w"


def topic_of(url: str) -> str:
    return f"{url.removeprefix('dfESP://')}/I"


def settings(rabbitmq: RabbitMQ, **more: Any) -> dict[str, Any]:
    node = rabbitmq.nodes[0]
    return {
        "host": HOST, "port": node.port, "streamport": node.stream_port, "exchange": EXCHANGE, "timeout": 5.0,
        "buspersistence": False,
    } | more  # fmt: skip


@contextlib.asynccontextmanager
async def opened(rabbitmq: RabbitMQ, **more: Any) -> AsyncIterator[Any]:
    """The bus itself."""
    found, before = driver("rabbitmq"), asyncio.all_tasks()
    bus = await found.open_bus(found.Options(**settings(rabbitmq, **more)))
    ours = asyncio.all_tasks() - before
    try:
        yield bus
    finally:
        await bus.aclose()
    assert not {task for task in ours if not task.done()}, "a task is left"


@contextlib.asynccontextmanager
async def publishing(rabbitmq: RabbitMQ, url: str, **more: Any) -> AsyncIterator[esp.Publisher]:
    async with (
        esp.init("rabbitmq", on_notice=lambda _: None, **settings(rabbitmq, **more)) as client,
        client.publisher(url, SCHEMA) as publisher,
    ):
        yield publisher


@contextlib.asynccontextmanager
async def reading(
    rabbitmq: RabbitMQ, url: str, notices: list[Notice], group: str | None = None, **more: Any
) -> AsyncIterator[Reader]:
    async with (
        esp.init("rabbitmq", on_notice=notices.append, **settings(rabbitmq, **more)) as client,
        client.subscriber(url, SCHEMA, side="in", group=group) as subscriber,
    ):
        yield Reader(subscriber)


@contextlib.asynccontextmanager
async def stranger(rabbitmq: RabbitMQ) -> AsyncIterator[Any]:
    """A channel of somebody who does what he likes."""
    connection = await aio_pika.connect(rabbitmq.url)
    async with connection:
        yield await connection.channel()


async def confirmed(pipe: Any, count: int) -> int:
    found = 0
    async with asyncio.timeout(60):
        while found < count:
            found = await pipe.confirmed(found)
    return found


@contextlib.asynccontextmanager
async def member(
    options: dict[str, Any], url: str, blocks: int, waits_at: int = 0
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A member of a failover group in a process of its own, which publishes so many blocks. It waits at one of them, if
    told so, until it may `go_on`.
    """
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MEMBER, json.dumps(options), url, str(blocks), str(waits_at), cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.kill()
        await made.communicate()


async def go_on(*members: asyncio.subprocess.Process) -> None:
    for member in members:
        assert member.stdin is not None
        member.stdin.write(b"go on\n")
        await member.stdin.drain()


async def has_role(member: asyncio.subprocess.Process, role: str) -> None:
    assert member.stdout is not None
    async with asyncio.timeout(60):
        while (line := await member.stdout.readline()) != f"{role}\n".encode():
            assert line, f"it ended before it was {role}"
