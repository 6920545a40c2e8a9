"""Feeds of one client on one topic: what one has read the others need not."""

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from esp_pubsub.bus import Break
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.transports.embedded import log
from esp_pubsub.transports.embedded.bus import EmbeddedBus, EmbeddedFeed, open_bus
from esp_pubsub.transports.embedded.options import EmbeddedOptions

TOPIC, SENT = "test:0/project/query/window/I", [b"%d" % n for n in range(30)]


@pytest.fixture
async def bus(bus_directory: Path) -> AsyncIterator[EmbeddedBus]:
    opened = await open_bus(EmbeddedOptions(dir=bus_directory))
    pipe = await opened.pipe(TOPIC)
    await pipe.write(SENT)
    yield opened
    await opened.aclose()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions from which the log was read."""
    positions: list[int] = []
    read = log.read

    def noted(transaction: Any, position: int, *bounds: int) -> Any:
        positions.append(position)
        return read(transaction, position, *bounds)

    monkeypatch.setattr(log, "read", noted)
    return positions


async def feeds(bus: EmbeddedBus, count: int) -> list[EmbeddedFeed]:
    return [await bus.feed(TOPIC, "earliest", None) for _ in range(count)]


async def test_feeds_that_go_side_by_side_read_the_log_once(bus: EmbeddedBus, looked: list[int]) -> None:
    side_by_side = await feeds(bus, 4)
    for first in range(0, 30, 10):
        found = [await feed.read(10, 1 << 20) for feed in side_by_side]
        assert [item.data for item in found[0]] == SENT[first : first + 10]
        assert all(other is found[0] for other in found)
    assert looked == [0, 10, 20]


async def test_feeds_with_other_bounds_or_places_read_for_themselves(bus: EmbeddedBus, looked: list[int]) -> None:
    one, other = await feeds(bus, 2)
    assert len(await one.read(10, 1 << 20)) == 10
    assert len(await other.read(5, 1 << 20)) == 5
    assert len(await one.read(5, 1 << 20)) == 5
    assert looked == [0, 0, 10]


async def test_a_topic_that_was_emptied_is_read_anew(bus: EmbeddedBus) -> None:
    one, other = await feeds(bus, 2)
    assert len(await one.read(100, 1 << 20)) == 30
    await bus.purge(TOPIC)
    pipe = await bus.pipe(TOPIC)
    await pipe.write([b"new"])
    for feed in (one, other):
        (broken,) = await feed.read(100, 1 << 20)
        assert broken.incarnation
        (message,) = await feed.read(100, 1 << 20)
        assert (message.position, message.data) == (30, b"new")


async def test_what_was_read_is_kept_only_while_there_is_another_feed(bus: EmbeddedBus) -> None:
    one, other = await feeds(bus, 2)
    await one.read(100, 1 << 20)
    reading = bus._reading[TOPIC]
    assert reading._run is not None
    assert len(reading._run) == 30
    await other.aclose()
    assert not reading._run
    (alone,) = await feeds(bus, 1)
    await one.aclose()
    await alone.read(100, 1 << 20)
    assert not reading._run


def changed(at: int, number: int, messages: list[bytes]) -> bytes:
    """A batch in which one number is another."""
    batch = bytearray(log.pack(messages, 0))
    struct.pack_into("<I", batch, at, number)
    return bytes(batch)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        bytes(12),
        bytes(16),
        changed(8, 1 << 31, [b"number"]),
        changed(8, 2, [b"number too large by one"]),
        changed(8, 1, [b"number", b"too small"]),
        changed(12, 1 << 31, [b"length"]),
        changed(12, 5, [b"length", b"of one of two"]),
    ],
)
async def test_a_batch_that_is_damaged_is_told_and_passed(bus: EmbeddedBus, damage: bytes) -> None:
    store = await bus.topic(TOPIC)
    pipe = await bus.pipe(TOPIC)
    await pipe.write([b"whole"])
    await pipe.confirmed(0)
    await store.write(lambda t: t.put((0).to_bytes(8, "big"), damage), 5.0)
    (feed,) = await feeds(bus, 1)
    assert await feed.read(100, 1 << 20) == [Break("what stands here is damaged", 30)]
    assert list(await feed.read(100, 1 << 20)) == [(30, b"whole")]
    await pipe.write([b"the last"])
    await pipe.confirmed(1)
    await store.write(lambda t: t.put((31).to_bytes(8, "big"), damage), 5.0)
    assert await feed.read(100, 1 << 20) == [Break("what stands here is damaged", 1)]


async def test_a_feed_that_is_closed_while_it_waits_for_its_group_is_in_nobodys_way(bus: EmbeddedBus) -> None:
    reading, waiting = await bus.feed(TOPIC, "earliest", "g"), await bus.feed(TOPIC, "earliest", "g")
    assert len(await reading.read(1, 1)) == 1
    read = asyncio.create_task(waiting.read(1, 1))
    await asyncio.wait([read], timeout=0.01)
    await waiting.aclose()
    with pytest.raises(BusUnavailable, match="closed"):
        await read
    await reading.aclose()
    following = await bus.feed(TOPIC, "earliest", "g")
    async with asyncio.timeout(bus.options.lease / 2):
        assert len(await following.read(1, 1)) == 1
