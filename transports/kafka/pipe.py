"""A pipe: a producer of its own, with one batch inside the client and the next one assembled meanwhile.

The client sends a partition's batches one after another, and repeats one whose connection broke. So a batch may stand
in the log twice, and a failed one may yet be written; but none can be written behind one that is missing, as long as it
is handed over only when the one before is acknowledged. After the first failure the producer is thrown away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition

from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .link import Link, words

LARGEST_BATCH = 900_000
ENVELOPE = 256  # bytes that a batch adds to its one message, at most


class KafkaPipe:
    """A `Pipe`."""

    def __init__(self, link: Link, at: TopicPartition, largest: int) -> None:
        """`largest`: the bytes of a batch that the topic takes."""
        self._link = link
        self._at = at
        self._largest = largest
        self._producer: AIOKafkaProducer = link.producer(min(LARGEST_BATCH, largest))
        self._batch: Any = None
        self._count = 0  # messages in the batch at hand
        self._confirmed = 0
        self._error: BusError | None = None
        self._to_send = asyncio.Event()
        self._taken = asyncio.Event()
        self._acked = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect, and learn who leads the partition, so that the first write does not pay for it."""
        topic, partition = self._at
        async with self._link.started(self._producer, f"a producer for {topic}"):
            with words(f"asking for the partitions of {topic}"):
                found = await self._producer.partitions_for(topic)
            if partition not in found:
                raise BusRefused(
                    f"{topic} has the partitions {sorted(found)}, and not {partition}, which is configured"
                )
        self._sending = asyncio.create_task(self._send(), name=f"kafka pipe {topic}")

    async def write(self, frames: Sequence[bytes]) -> None:
        """See `Pipe.write`."""
        now = time.time_ns() // 1_000_000
        if frames and (size := max(map(len, frames))) > self._largest - ENVELOPE:
            self._end(BusRefused(f"a message of {size} bytes; {self._at.topic} takes {self._largest - ENVELOPE}"))
        put = self._put(frames, now)
        while put < len(frames):  # the batch is full and has to be sent first
            self._taken.clear()
            await self._taken.wait()
            put += self._put(frames[put:], now)

    def _put(self, frames: Sequence[bytes], now: int) -> int:
        """Put messages into the batch at hand, as many as fit."""
        if self._error is not None:
            raise self._error
        if self._batch is None:
            with words(f"writing to {self._at.topic}"):
                self._batch = self._producer.create_batch()
        append, before = self._batch.append, self._count
        for frame in frames:
            if append(key=None, value=frame, timestamp=now) is None:
                break
            self._count += 1
        self._to_send.set()
        return self._count - before

    async def _send(self) -> None:
        try:
            while True:
                while not self._count:
                    self._to_send.clear()
                    await self._to_send.wait()
                batch, count, self._batch, self._count = self._batch, self._count, None, 0
                self._taken.set()
                await self._send_one(batch)
                self._confirmed += count
                self._acked.set()
        except BusError as error:
            self._end(error)

    async def _send_one(self, batch: Any) -> None:
        topic, partition = self._at
        with words(f"writing to {topic}"):
            batch.close()
            async with asyncio.timeout(2 * self._link.timeout + 1):
                await (await self._producer.send_batch(batch, topic, partition=partition))

    def _end(self, error: BusError) -> None:
        self._error = self._error or error
        self._taken.set()
        self._acked.set()

    async def confirmed(self, past: int) -> int:
        """See `Pipe.confirmed`."""
        while self._confirmed <= past:
            if self._error is not None:
                raise self._error
            self._acked.clear()
            await self._acked.wait()
        return self._confirmed

    @property
    def closed(self) -> bool:
        """Nothing of it is left."""
        return self._closing is not None and self._closing.done()

    async def aclose(self) -> None:
        """See `Pipe.aclose`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._end(BusUnavailable(f"this pipe to {self._at.topic} was closed"))
        self._batch, self._count = None, 0
        await self._link.stopped(
            self._producer
        )  # first, so that whoever awaits the last batch learns what became of it
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
