"""Requests on Kafka beyond the conformance suite: topics for answers, requests that nobody waits for, forged ones."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from esp_pubsub.address import kafka_topic
from esp_pubsub.bus import Bus, Requests
from esp_pubsub.errors import BusError, BusRefused, NoAnswer
from esp_pubsub.registry import driver
from esp_pubsub.transports.kafka import requests
from esp_pubsub.transports.kafka.requests import REPLIES
from tests.support.kafka import Kafka


@pytest.fixture
def topic() -> Iterator[str]:
    return f"host:5555/{secrets.token_hex(4)}/M"


@contextlib.asynccontextmanager
async def opened(kafka: Kafka) -> AsyncIterator[Bus]:
    found = driver("kafka")
    bus: Bus = await found.open_bus(found.Options(hostport=kafka.bootstrap))
    try:
        yield bus
    finally:
        await bus.aclose()


@contextlib.asynccontextmanager
async def serving(bus: Bus, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(cast(Requests, bus).serve(topic, answer))
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def ask(bus: Bus, topic: str, data: bytes = b"?", timeout: float = 20.0) -> bytes:
    return await cast(Requests, bus).request(topic, data, timeout)


async def echo(data: bytes) -> bytes:
    return data


@contextlib.asynccontextmanager
async def started(client: Any) -> AsyncIterator[Any]:
    await client.start()
    try:
        yield client
    finally:
        await (client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop())


async def for_answers(kafka: Kafka) -> set[str]:
    """The topics for answers that are there."""
    async with started(AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
        return {name for name in await admin.list_topics() if name.startswith(REPLIES)}


async def make(kafka: Kafka, *names: str) -> None:
    async with started(AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
        await admin.create_topics([NewTopic(name, 1, 1) for name in names])


async def write(kafka: Kafka, name: str, data: bytes, headers: Any = ()) -> None:
    async with started(AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)) as producer:
        await producer.send_and_wait(name, data, partition=0, headers=list(headers))


async def test_a_client_that_asks_has_a_topic_for_answers_until_it_is_closed(kafka: Kafka, topic: str) -> None:
    before = await for_answers(kafka)
    async with opened(kafka) as server, serving(server, topic, echo), opened(kafka) as asker:
        assert await ask(asker, topic, b"1") == b"1"
        assert len(await for_answers(kafka) - before) == 1
        assert await ask(asker, topic, b"2") == b"2"
        assert len(await for_answers(kafka) - before) == 1
    assert await for_answers(kafka) <= before


async def test_topics_that_killed_clients_left_behind_are_removed_after_a_day(kafka: Kafka, topic: str) -> None:
    hour = int(time.time()) // 3600
    old, young, strange = f"{REPLIES}{hour - 24}.00", f"{REPLIES}{hour - 23}.11", f"{REPLIES}x.22"
    await make(kafka, old, young, strange)
    async with opened(kafka) as server, serving(server, topic, echo), opened(kafka) as asker:
        await ask(asker, topic)
        async with asyncio.timeout(30):
            while old in (found := await for_answers(kafka)):  # noqa: ASYNC110  # it is removed meanwhile
                await asyncio.sleep(0.05)
        assert {young, strange} <= found


async def test_a_client_that_is_open_for_half_a_day_makes_another_topic_for_answers(
    kafka: Kafka, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(kafka) as server, serving(server, topic, echo), opened(kafka) as asker:
        before = await for_answers(kafka)
        await ask(asker, topic)
        (first,) = await for_answers(kafka) - before
        monkeypatch.setattr(requests, "_hour", lambda: int(time.time()) // 3600 + 12)
        assert await ask(asker, topic, b"later") == b"later"
        (second,) = await for_answers(kafka) - before
        assert second != first


async def test_a_client_whose_topic_for_answers_was_removed_makes_another(kafka: Kafka, topic: str) -> None:
    async with opened(kafka) as server, serving(server, topic, echo), opened(kafka) as asker:
        before = await for_answers(kafka)
        await ask(asker, topic)
        async with started(AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
            await admin.delete_topics(list(await for_answers(kafka) - before))
        with pytest.raises((NoAnswer, BusError)):
            await ask(asker, topic, timeout=0.5)
        assert await ask(asker, topic, b"again") == b"again"


async def test_a_request_that_nobody_waits_for_any_more_is_passed_over(kafka: Kafka, topic: str) -> None:
    handled: list[bytes] = []

    async def answer(data: bytes) -> bytes:
        handled.append(data)
        return data

    async with opened(kafka) as server, opened(kafka) as asker:
        async with serving(server, topic, answer):
            await ask(asker, topic, b"first")
        for timeout in (b"1", b"60000"):
            headers = [
                ("kafka_replyTopic", (REPLIES + "22").encode()),
                ("kafka_correlationId", b"1"),
                ("timeout", timeout),
            ]
            await write(kafka, kafka_topic(topic), b"waits " + timeout, headers)
        async with serving(server, topic, answer):
            await ask(asker, topic, b"last")
    assert handled == [b"first", b"waits 60000", b"last"]


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("kafka_replyTopic", b"{other}"), ("kafka_correlationId", b"1")),
        (("kafka_replyTopic", b"\xff\xfe"), ("kafka_correlationId", b"1")),
        (("kafka_replyTopic", REPLIES.encode() + b"/no/ topic"), ("kafka_correlationId", b"1")),
        (("kafka_replyTopic", REPLIES.encode() + b"33"),),
        (("kafka_replyTopic", REPLIES.encode() + b"33"), ("kafka_correlationId", b"1"), ("timeout", b"9" * 5000)),
        (("kafka_replyTopic", REPLIES.encode() + b"33"), ("kafka_correlationId", b"1"), ("timeout", b"-\xb2")),
    ],
)  # fmt: skip
async def test_a_server_writes_answers_nowhere_else_whatever_a_request_says(
    kafka: Kafka, topic: str, headers: tuple[tuple[str, bytes], ...]
) -> None:
    other = kafka_topic(topic) + ".other"
    await make(kafka, other)
    await write(kafka, other, b"only this")
    async with opened(kafka) as server, serving(server, topic, echo), opened(kafka) as asker:
        await ask(asker, topic)
        await write(
            kafka,
            kafka_topic(topic),
            b"forged",
            [(name, value.replace(b"{other}", other.encode())) for name, value in headers],
        )
        assert await ask(asker, topic, b"next") == b"next"
    async with started(AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap)) as consumer:
        at = TopicPartition(other, 0)
        assert await consumer.end_offsets([at]) == {at: 1}


async def test_a_request_larger_than_the_bus_takes_is_refused(kafka: Kafka, topic: str) -> None:
    async with opened(kafka) as server, serving(server, topic, echo), opened(kafka) as asker:
        largest = asker.capabilities.max_message_bytes
        assert largest is not None
        with pytest.raises(BusRefused):
            await ask(asker, topic, bytes(largest + 10_000))
        assert await ask(asker, topic, bytes(largest // 2)) == bytes(largest // 2)


async def test_an_answer_larger_than_the_bus_takes_is_none_and_the_server_serves_on(kafka: Kafka, topic: str) -> None:
    async def large(data: bytes) -> bytes:
        return bytes(3_000_000) if data == b"large" else data

    async with opened(kafka) as server, serving(server, topic, large), opened(kafka) as asker:
        await ask(asker, topic)
        with pytest.raises(NoAnswer):
            await ask(asker, topic, b"large", timeout=0.5)
        assert await ask(asker, topic, b"small") == b"small"
