"""Retained values: for each topic and key a stream-type queue of a few values, read at its last message.

Only who writes makes the queue, right before it writes. So a queue that is not there means that there is no value, and
one that is there has one, or will in a moment: one that stays empty belongs to a writer that died in between.

Reading has a connection of its own, because a broker that stumbles over a value must not end what others read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiormq.exceptions import ChannelNotFoundEntity

from esp_pubsub.errors import BusRefused, BusUnavailable

from .channel import LONGEST_NAME, Channel, Delivery, quoted, unused
from .link import Link
from .pipe import RabbitPipe
from .refusals import COMES_UP

T = TypeVar("T")

LARGEST = 512_000
# The length has room for a segment and several of the largest values: retention spares only the newest segment, which
# may be empty.
_ARGUMENTS: dict[str, Any] = {
    "x-queue-type": "stream",
    "x-max-length-bytes": 4_000_000,
    "x-stream-max-segment-size-bytes": 64_000,
}
_PROPERTIES = {"delivery_mode": 2}
_MOMENT = 0.1
_COMES = 2.0  # seconds in which the broker hands over a value that is there, always


def queue_of(topic: str, key: str) -> str:
    """The queue of a value: readable if it is short enough."""
    name = quoted(f"{topic}#{key}")
    if len(name) <= LONGEST_NAME:
        return name
    return f"#{hashlib.blake2b(name.encode(), digest_size=32).hexdigest()}"


def check_size(name: str, value: bytes) -> None:
    """Raise BusRefused for one that is too large to be kept."""
    if len(value) > LARGEST:
        raise BusRefused(f"a retained value has at most {LARGEST} bytes, {name} would have {len(value)}")


async def declare(channel: Channel, name: str) -> None:
    """Make the queue of a value, unless it is there."""
    await channel.queue_declare(name, durable=True, arguments=_ARGUMENTS)


async def _when_up(link: Link, work: Callable[[], Awaitable[T]]) -> T:
    """A broker that comes back serves other queues a moment before streams; so long it is asked again. And one that is
    asked for a stream that somebody makes just now may stumble, and close the connection.
    """
    end = asyncio.get_running_loop().time() + link.timeout
    while True:
        try:
            return await work()
        except BusUnavailable as error:
            if not any(words in str(error) for words in COMES_UP) or asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(_MOMENT)


async def put(link: Link, topic: str, key: str, value: bytes | None) -> None:
    """Retain a value; it is there for everybody when this returns."""
    await _when_up(link, lambda: _put(link, queue_of(topic, key), value))


async def get(link: Link, topic: str, key: str) -> bytes | None:
    """The value retained last."""
    return await _when_up(link, lambda: _get(link, queue_of(topic, key)))


async def _put(link: Link, name: str, value: bytes | None) -> None:
    if value is not None:
        check_size(name, value)
    channel = await link.channel("writing", f"retaining {name}", confirms=True)
    try:
        if value is None:
            await link.ask(f"forgetting {name}", channel.queue_delete(name))
            return
        await link.ask(f"retaining {name}", declare(channel, name))
        pipe = RabbitPipe(link, channel, "", name, _PROPERTIES)
        await link.ask(f"retaining {name}", pipe.write([value]))
        await link.ask(f"retaining {name}", pipe.confirmed(0))
        if pipe.unroutable:
            raise BusUnavailable(f"{name} was deleted while it was written")
    finally:
        link.drop(channel)


async def _get(link: Link, name: str) -> bytes | None:
    what = f"reading {name}"
    found: list[bytes] = []
    arrived = asyncio.Event()

    def hear(delivery: Delivery) -> None:
        found[:] = [delivery.data]
        arrived.set()

    channel = await link.channel("values", what)
    channel.on_message = hear
    channel.on_end.append(lambda _: arrived.set())
    try:
        await link.ask(what, channel.basic_qos(prefetch_count=1_000))
        await link.ask(what, channel.basic_consume(name, unused, arguments={"x-stream-offset": "last"}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COMES):
                await arrived.wait()
        # The broker hands over the whole last chunk at once, and it may hold several values. It answers a question on
        # the same channel when it is done with that; one that stands still has not said that there is none.
        await link.ask(what, channel.basic_qos(prefetch_count=1_000))
        if found and len(found[0]) > LARGEST:
            raise BusRefused(f"{name} holds a value of {len(found[0])} bytes, which is none of ours: delete that queue")
        return found[0] if found else None
    except BusUnavailable as error:
        if isinstance(error.__cause__, ChannelNotFoundEntity) and "no queue" in str(error):
            return None  # one that is there and cannot be reached, after a restart, is not found either
        raise
    finally:
        link.drop(channel)
