"""The conformance suite over a real Kafka broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.structs import BrokerMetadata

from esp_pubsub.address import kafka_topic
from esp_pubsub.bus import Bus
from esp_pubsub.registry import driver
from esp_pubsub.testing import conformance
from tests.support.kafka import Kafka

NOBODY = "127.0.0.1:1"
every_check = pytest.mark.parametrize("name", conformance.CHECKS)


async def open_kafka(kafka: Kafka, **settings: Any) -> Bus:
    found = driver("kafka")
    return await found.open_bus(found.Options(hostport=kafka.bootstrap, **settings))


async def limit(kafka: Kafka, topic: str, size: int) -> None:
    """Let a topic take so many bytes at once, and return when it does."""
    key = "max.message.bytes"
    place = ConfigResource(ConfigResourceType.TOPIC, kafka_topic(topic), {key: f"{size}"})
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.alter_configs([place])
        asked = ConfigResource(ConfigResourceType.TOPIC, kafka_topic(topic), {key: None})
        while (await admin.describe_configs([asked]))[0].resources[0][4][0][1] != f"{size}":  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # what the broker says of it, its log goes by a moment later
    finally:
        await admin.close()


def context(kafka: Kafka) -> conformance.Context:
    @asynccontextmanager
    async def fail_in_the_middle(bus: Bus, topic: str) -> AsyncIterator[bytes]:
        """The client takes a message, and the broker refuses the batch: the topic takes less than it did."""
        await limit(kafka, topic, 50_000)
        yield bytes(60_000)
        await limit(kafka, topic, 1_048_588)

    async def cut(bus: Any) -> None:
        """What this connection has open is closed, and wherever it connects to, nobody is there."""
        bus.link._common["bootstrap_servers"] = NOBODY
        clients = [bus.link._admin, bus.link._asker, bus._values._consumer, bus._values._producer]
        clients += [getattr(opened, "_producer", None) or opened._consumer for opened in bus._open]
        for owner in clients:
            client = getattr(owner, "_client", None) or getattr(owner, "client", None)
            if client is not None:
                client.cluster.broker_metadata = lambda node: BrokerMetadata(node, "127.0.0.1", 1, None)
                client._bootstrap_servers = NOBODY
                for connection in list(client._conns.values()):
                    connection.close()

    async def trim(topic: str) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        await admin.start()
        try:
            await admin.delete_records({TopicPartition(kafka_topic(topic), 0): RecordsToDelete(10)})
        finally:
            await admin.close()

    return conformance.Context(
        open_bus=lambda: open_kafka(kafka, timeout=5.0),
        open_hasty_bus=lambda: open_kafka(kafka, lease=3.0, session=3.0),
        fail_in_the_middle=fail_in_the_middle,
        cut=cut,
        trim=trim,
        patience=20.0,
        quiet=0.5,
        limit=150.0,
    )


@every_check
async def test_kafka(name: str, kafka: Kafka) -> None:
    try:
        await conformance.CHECKS[name](context(kafka))
    except conformance.NotClaimed as why:
        pytest.skip(str(why))
