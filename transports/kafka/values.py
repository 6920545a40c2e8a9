"""Retained values: a compacted topic of which a reader keeps the last value of each key.

There is no reading by key. So a consumer follows the topic, and before an answer it is read to its present end. Each
value carries a number one higher than the last one known, and a lower one never replaces a higher: the client may write
a message twice, and the second copy late.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from esp_pubsub.errors import BusError, BusUnavailable

from .link import Link, words
from .unpacking import bounded

CONFIGS = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": "600000",  # how long a reader may take from the beginning to the end
    "message.timestamp.type": "LogAppendTime",
}


_READ = 4 << 20  # bytes that are unpacked at once


class Values:
    """The values of one cluster."""

    there = False
    """The topic is, as far as is known; to be set by who makes it."""

    def __init__(self, link: Link, topic: str) -> None:
        self._link = link
        self._at = TopicPartition(topic, 0)
        self._consumer: AIOKafkaConsumer | None = None
        self._producer: AIOKafkaProducer | None = None
        self._last: dict[bytes, tuple[int, bytes | None]] = {}
        self._line = asyncio.Lock()
        self._closed = False

    async def get(self, topic: str, key: str) -> bytes | None:
        """The value retained last."""
        async with self._line:
            await self._read_to_end()
            return self._last.get(_key(topic, key), (0, None))[1]

    async def topics(self, key: str) -> list[str]:
        """The topics for which this key is retained."""
        async with self._line:
            await self._read_to_end()
            names = [name.decode().rpartition("|") for name, (_, value) in self._last.items() if value is not None]
            return [topic for topic, _, each in names if each == key]

    async def put(self, topic: str, key: str, value: bytes | None) -> None:
        """Retain a value; it is there for everybody when this returns."""
        name = _key(topic, key)
        async with self._line:
            await self._read_to_end()
            number = self._last.get(name, (0, None))[0] + 1
            await self._write(name, msgpack.packb([number, value]))
            await self._read_to_end()

    async def forget(self, topic: str, key: str) -> None:
        """Let go of a value whose key is never used again: nothing of either is kept."""
        async with self._line:
            await self._write(_key(topic, key), None)

    async def _write(self, key: bytes, value: bytes | None) -> None:
        producer = self._producer
        if producer is None:
            producer = self._link.producer(1 << 20)
            async with self._link.started(producer, "a producer for retained values"):
                self._see_that_it_is_open()
                self._producer = producer
        try:
            with words("retaining a value"):
                async with asyncio.timeout(2 * self._link.timeout + 1):
                    await producer.send_and_wait(self._at.topic, value, key, self._at.partition)
        except BaseException:
            self._producer, self.there = None, False
            await self._link.stopped(producer)
            raise

    async def _read_to_end(self) -> None:
        try:
            _, end = await self._link.bounds(self._at)
            if self._consumer is not None and await self._position(self._consumer) > end:
                await self._begin_anew()  # this is not the topic that it was
            consumer = self._consumer or await self._begin()
            await self._follow(consumer, end)
        except BusError:
            await self._begin_anew()
            raise

    async def _begin(self) -> AIOKafkaConsumer:
        consumer = self._link.consumer()
        async with self._link.started(consumer, "a consumer of retained values"):
            first, _ = await self._link.bounds(self._at)
            with words("reading retained values"):
                consumer.assign([self._at])
                consumer.seek(self._at, first)
            self._see_that_it_is_open()
            self._consumer = consumer
        return consumer

    def _see_that_it_is_open(self) -> None:
        if self._closed:
            raise BusUnavailable("this bus was closed")

    async def _begin_anew(self) -> None:
        """Whatever went wrong: nothing that was read before may stand for what is there now."""
        consumer, self._consumer, self._last, self.there = self._consumer, None, {}, False
        if consumer is not None:
            await self._link.stopped(consumer)

    async def _position(self, consumer: AIOKafkaConsumer) -> int:
        with words("reading retained values"):
            return int(await consumer.position(self._at))

    async def _follow(self, consumer: AIOKafkaConsumer, end: int) -> None:
        deadline = asyncio.get_running_loop().time() + self._link.timeout
        with words("reading retained values"), bounded(_READ):
            while await self._position(consumer) < end:
                found = await consumer.getmany(self._at, timeout_ms=200)
                self._take(found.get(self._at, ()))
                if not found and asyncio.get_running_loop().time() > deadline:
                    raise BusUnavailable(f"{self._at.topic} was not read to its end in {self._link.timeout:g} s")

    def _take(self, records: Any) -> None:
        for record in records:
            if record.value is None:
                self._last.pop(record.key, None)
                continue
            try:
                number, value = msgpack.unpackb(record.value)
                if number > self._last.get(record.key, (0, None))[0]:
                    self._last[record.key] = number, value
            except (ValueError, TypeError):
                continue  # foreign

    async def aclose(self) -> None:
        """Bounded; twice is harmless."""
        self._closed = True
        consumer, producer, self._consumer, self._producer = self._consumer, self._producer, None, None
        for client in (consumer, producer):
            if client is not None:
                await self._link.stopped(client)


def _key(topic: str, key: str) -> bytes:
    return f"{topic}|{key}".encode()
