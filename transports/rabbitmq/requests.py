"""Requests: a shared queue that goes with its last server, and answers by the broker's direct reply-to.

The queue has the name of the topic, as SAS has it (`host:port/M`). A request is acknowledged when it was answered, so
one whose server dies is given to another. It expires with its asker's patience.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from pamqp.commands import Basic

from esp_pubsub.errors import BusError, BusUnavailable, NoAnswer

from .channel import Channel, Delivery, quoted, unused
from .link import Link

_REPLIES = "amq.rabbitmq.reply-to"
_QUEUE: dict[str, Any] = {"x-max-length": 10_000, "x-overflow": "drop-head"}


class Asker:
    """What this bus has asked and not heard of yet."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[bytes]] = {}

    async def request(self, topic: str, data: bytes, timeout: float) -> bytes:
        """See `Requests.request`."""
        number = f"{next(self._numbers)}"
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout):
                channel = await self._open()
                properties = Basic.Properties(
                    reply_to=_REPLIES, correlation_id=number, expiration=str(max(1, round(timeout * 1000)))
                )
                await self._link.ask(
                    f"asking {topic}", channel.basic_publish(data, routing_key=quoted(topic), properties=properties)
                )
                return await answer
        except TimeoutError:
            raise NoAnswer(f"nobody answered on {topic} within {timeout:g} s", topic=topic, timeout=timeout) from None
        finally:
            del self._waiting[number]
            answer.cancel()

    async def _open(self) -> Channel:
        async with self._opening:
            if self._channel is None:
                channel = await self._link.channel("writing", "waiting for answers")
                channel.on_message = self._hear
                try:
                    await self._link.ask("waiting for answers", channel.basic_consume(_REPLIES, unused, no_ack=True))
                except BaseException:
                    self._link.drop(channel)
                    raise
                channel.on_end.append(self._end)
                self._channel = channel
            return self._channel

    def _hear(self, delivery: Delivery) -> None:
        answer = self._waiting.get(delivery.properties.correlation_id)
        if answer is not None and not answer.done():
            answer.set_result(delivery.data)

    def _end(self, error: BusError) -> None:
        self._channel = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)


async def serve(link: Link, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
    """See `Requests.serve`."""
    what, queue = f"serving {topic}", quoted(topic)
    channel = await link.channel("writing", what)
    asked: asyncio.Queue[Delivery | BusError] = asyncio.Queue()  # prefetch bounds it
    channel.on_message = asked.put_nowait
    channel.on_cancel = lambda: asked.put_nowait(BusUnavailable(f"{what}: the queue was deleted"))
    channel.on_end.append(asked.put_nowait)
    try:
        await link.ask(what, channel.queue_declare(queue, auto_delete=True, arguments=_QUEUE))
        await link.ask(what, channel.basic_qos(prefetch_count=1))
        await link.ask(what, channel.basic_consume(queue, unused))
        while True:
            request = await asked.get()
            if isinstance(request, BusError):
                raise request
            found = await answer(request.data)
            if request.properties.reply_to:
                properties = Basic.Properties(correlation_id=request.properties.correlation_id)
                reply = channel.basic_publish(found, routing_key=request.properties.reply_to, properties=properties)
                await link.ask(what, reply)
            await link.ask(what, channel.basic_ack(request.tag))
    finally:
        await asyncio.shield(link.drop(channel))
