"""Which groups a topic has, and how far they are, without the broker's management plug-in.

AMQP lists no queues. So whoever opens a group notes its name in a retained value of the topic; what is behind a name is
asked of the group's queue and, on streams, of its stored position. A group whose queue was deleted is passed over.
"""

from __future__ import annotations

import contextlib

import msgpack
from aiormq.exceptions import ChannelNotFoundEntity

from esp_pubsub.bus import GroupState
from esp_pubsub.errors import BusError, BusUnavailable

from . import values
from .channel import quoted
from .link import Link

_KEY = "groups"
_TRIES = 3  # two that note at the same moment: the later value counts, so who is not in it notes again


async def note(link: Link, topic: str, group: str) -> None:
    """Note that a topic has this group. It reads well without: trouble, or a right that is missing, is passed over."""
    with contextlib.suppress(BusError):
        for _ in range(_TRIES):
            known = await _names(link, topic)
            if group in known:
                return
            await values.put(link, topic, _KEY, msgpack.packb(sorted({*known, group})))


async def states(link: Link, topic: str, incarnation: int | None) -> list[GroupState]:
    """The groups of a topic. `incarnation`: of its stream, None where it has none."""
    found = []
    for name in await _names(link, topic):
        queue = quoted(f"{name}@{topic}")
        counts = await _counts(link, queue)
        if counts is None:
            continue
        waiting, readers = counts
        reader = "" if not readers else "1 reader" if readers == 1 else f"1 of {readers} readers"
        if incarnation is None:
            found.append(GroupState(name, None, reader, None, waiting))
        else:
            position = await _position(link, topic, name, incarnation)
            found.append(GroupState(name, position, reader, None))
    return found


async def _names(link: Link, topic: str) -> list[str]:
    packed = await values.get(link, topic, _KEY)
    try:
        found = [] if packed is None else msgpack.unpackb(packed)
    except ValueError:
        found = []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


async def _counts(link: Link, queue: str) -> tuple[int, int] | None:
    """Messages that wait in a queue and are with no reader, and its consumers. None if it is not there."""
    what = f"looking at {queue}"
    channel = await link.channel("values", what)
    try:
        declared = await link.ask(what, channel.queue_declare(queue, passive=True))
    except BusUnavailable as error:
        if isinstance(error.__cause__, ChannelNotFoundEntity):
            return None
        raise
    finally:
        link.drop(channel)
    return declared.message_count or 0, declared.consumer_count or 0


async def _position(link: Link, topic: str, group: str, incarnation: int) -> int | None:
    """What a group has stored of the stream that is there now."""
    packed = await values.get(link, topic, f"position of {group}")
    try:
        stored, _, *base = (None, b"") if packed is None else msgpack.unpackb(packed)
    except (ValueError, TypeError):
        return None
    return stored if isinstance(stored, int) and base in ([], [incarnation]) else None
