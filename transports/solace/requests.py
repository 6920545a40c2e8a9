"""Requests: direct messages, each to one of those who share a subscription.

SAS sends them Deliver-To-One, which the vendor's Python client does not offer; a shared subscription has the same end:
one server gets each. A request bears its asker's inbox and a number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgpack

from esp_pubsub.errors import BusError, NoAnswer

from .inbox import Inbox, letter
from .link import Inbound, Link
from .names import OURS, topic_name

_MOST_WAITING = 10_000


async def request(link: Link, inbox: Inbox, topic: str, data: bytes, timeout: float) -> bytes:
    """See `Requests.request`."""
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def hear(data: bytes) -> None:
        if not answer.done():
            answer.set_result(data)

    def end(error: BusError) -> None:
        if not answer.done():
            answer.set_exception(error)

    number = inbox.enter(hear)
    link.on_lost.add(end)
    try:
        async with asyncio.timeout(timeout):
            await inbox.publisher.send([(topic_name(topic), msgpack.packb([inbox.topic, number, data]))])
            return await answer
    except TimeoutError:
        raise NoAnswer(f"nobody answered on {topic} within {timeout:g} s", topic=topic, timeout=timeout) from None
    finally:
        link.on_lost.discard(end)
        inbox.leave(number)
        answer.cancel()


async def serve(link: Link, inbox: Inbox, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
    """See `Requests.serve`."""
    asked: asyncio.Queue[Inbound | BusError] = asyncio.Queue()

    def hear(request: Inbound | BusError) -> None:
        if isinstance(request, BusError) or asked.qsize() < _MOST_WAITING:  # what is too much gets no answer
            asked.put_nowait(request)

    link.on_lost.add(hear)
    flow = await link.subscribe(topic_name(topic), hear, share=OURS)
    try:
        while True:
            request = await asked.get()
            if isinstance(request, BusError):
                raise request
            if (known := _read(request.data)) is not None:
                asker, number, data = known
                await inbox.publisher.send([(asker, letter(number, await answer(data)))])
    finally:
        link.on_lost.discard(hear)
        await asyncio.shield(asyncio.ensure_future(flow.aclose()))


def _read(data: bytes) -> tuple[str, int, bytes] | None:
    """What a stranger may have put on the topic is None."""
    try:
        asker, number, asked = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    known = isinstance(asker, str) and asker.startswith(f"{OURS}/inbox/") and isinstance(asked, bytes)
    return (asker, number, asked) if known and isinstance(number, int) and 0 <= number < 1 << 63 else None
