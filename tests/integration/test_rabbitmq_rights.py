"""What the page on rights says: with the permissions of a role a program does what the role does, and nothing else."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.errors import BusError, BusRefused
from tests.integration.members import SCHEMA, rows
from tests.integration.rabbit import EXCHANGE, new_url, opened, settings, topic_of
from tests.support.rabbitmq import RabbitMQ


async def user(rabbitmq: RabbitMQ, configure: str, write: str, read: str, keys: str) -> dict[str, Any]:
    """One with these permissions, who may write these routing keys."""
    name, password = secrets.token_hex(4), secrets.token_hex(4)
    for words in (
        ("add_user", name, password),
        ("set_permissions", name, configure, write, read),
        ("set_topic_permissions", name, EXCHANGE, keys, ".*"),
    ):
        await asyncio.to_thread(rabbitmq.ctl, *words)
    return {"userid": name, "password": password}


async def test_a_publisher_and_a_reader_do_their_work_and_nothing_else(rabbitmq: RabbitMQ) -> None:
    url, other = new_url(), new_url()
    topic = topic_of(url)
    async with esp.init("rabbitmq", **settings(rabbitmq)) as administrator:
        for each in (url, other):
            async with administrator.publisher(each, SCHEMA):
                pass  # its schema is retained from now on
    publisher = await user(rabbitmq, f"^{EXCHANGE}$", f"^{EXCHANGE}$", f"^{topic}#", f"^{topic}$")
    reader = await user(rabbitmq, rf"^({EXCHANGE}$|amq\.gen)", r"^amq\.gen", rf"^({EXCHANGE}$|amq\.gen|{topic}#)", "^$")
    async with (
        esp.init("rabbitmq", **settings(rabbitmq, **reader)) as reading,
        reading.subscriber(url, side="in") as subscriber,
        esp.init("rabbitmq", **settings(rabbitmq, **publisher)) as writing,
        writing.publisher(url, SCHEMA) as published,
    ):
        assert await (await published.inject(rows(1))) == "acked"
        async with asyncio.timeout(60):
            assert (await anext(subscriber)).id == 1
        with pytest.raises(BusRefused, match="ACCESS_REFUSED"):
            await writing.publisher(other, SCHEMA)
    for who in (publisher, reader):
        async with opened(rabbitmq, **who) as bus:
            for forbidden in (topic_of(other), "host:5555/M/F/feed"):
                with pytest.raises(BusError, match="ACCESS_REFUSED"):
                    pipe = await bus.pipe(forbidden)
                    await pipe.write([b"x"])
                    await pipe.confirmed(0)
            with pytest.raises(BusRefused, match="ACCESS_REFUSED"):
                await bus.retain(topic, "runs", b"x")
