"""What a dead reader of a group left comes first, in its old order: what we take for granted of RabbitMQ's queues.

Where it did not, a subscriber would take what comes late for missed. Every driver is asked for it by the conformance
check `readers_that_die_in_a_row`; here are the ways to die, and the kinds of queues, that only this broker has.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from typing import Any

import pytest

from esp_pubsub.errors import BusUnavailable
from tests.integration.rabbit import PERSISTENT, ROOT, confirmed, new_url, opened, settings, topic_of
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ

CLASSIC, QUORUM = PERSISTENT, PERSISTENT | {"quorum": True}
PREFETCH = 10
READER = """
import asyncio, json, sys
from esp_pubsub.registry import driver
from tests.integration.test_redelivery import read_and_confirm

async def main(options, topic, count, done):
    found = driver("rabbitmq")
    bus = await found.open_bus(found.Options(**json.loads(options)))
    _, read = await read_and_confirm(bus, topic, int(count), int(done))
    print(json.dumps(read), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def topic() -> str:
    return topic_of(new_url())


async def read_and_confirm(bus: Any, topic: str, count: int, done: int) -> tuple[Any, list[str]]:
    """A reader that has read so many messages and confirmed the first ones of them, and what it read."""
    feed, found = await bus.feed(topic, "latest", "g"), []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await feed.read(count - len(found), 1 << 20)
        if done:
            await feed.confirm(found[done - 1].position, b"state")
        await feed.confirm(None, b"state")  # it is answered after the broker has taken the acknowledgement
    return feed, [message.data.decode() for message in found]


async def _closes(rabbitmq: RabbitMQ, topic: str, count: int, done: int, **more: Any) -> list[str]:
    async with opened(rabbitmq, **more) as bus:
        feed, found = await read_and_confirm(bus, topic, count, done)
        await feed.aclose()
    return found


async def _is_cut_off(rabbitmq: RabbitMQ, topic: str, count: int, done: int, **more: Any) -> list[str]:
    async with Proxy("127.0.0.1", rabbitmq.nodes[0].port) as proxy, opened(rabbitmq, port=proxy.port, **more) as bus:
        feed, found = await read_and_confirm(bus, topic, count, done)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(BusUnavailable):
            while True:  # what it was handed is still there
                await feed.read(1, 1)
    return found


async def _is_killed(rabbitmq: RabbitMQ, topic: str, count: int, done: int, **more: Any) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, json.dumps(settings(rabbitmq, **more)), topic, str(count), str(done),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            found: list[str] = json.loads(await process.stdout.readline())
    finally:
        process.kill()
        await process.communicate()
    return found


class Written:
    """The group's queue: messages that are numbered as they are written."""

    def __init__(self, pipe: Any) -> None:
        self.left: list[str] = []
        """What is not confirmed."""
        self._pipe = pipe
        self._numbers = count(1)
        self._last = 0

    async def more(self, messages: int) -> None:
        for _ in range(messages):
            self._last = next(self._numbers)
            self.left.append(f"{self._last}")
        await self._pipe.write([each.encode() for each in self.left[-messages:]])
        await confirmed(self._pipe, self._last)


async def _group(bus: Any, topic: str) -> Written:
    """One that has a queue and never read."""
    await (await bus.feed(topic, "latest", "g")).aclose()
    return Written(await bus.pipe(topic))


@pytest.mark.parametrize("kind", [CLASSIC, QUORUM], ids=["classic", "quorum"])
async def test_what_readers_left_that_died_in_a_row_comes_first_in_its_old_order(
    rabbitmq: RabbitMQ, topic: str, kind: dict[str, Any]
) -> None:
    """Each was handed more than it read, and as a rule dies with what others had left before it."""
    async with opened(rabbitmq, **kind) as bus:
        group = await _group(bus, topic)
        for turn, way in enumerate((_closes, _is_cut_off, _is_killed) * 3):
            await group.more(4)
            reads, done = 3 + turn % 2, turn % 4
            found = await way(rabbitmq, topic, reads, done, prefetch=PREFETCH, **kind)
            assert found == group.left[:reads], f"reader {turn}"
            del group.left[:done]
        await group.more(4)
        assert await _closes(rabbitmq, topic, len(group.left), 0, **kind) == group.left


@pytest.mark.parametrize(("kind", "kept"), [(CLASSIC, True), (QUORUM, False)], ids=["classic", "quorum"])
async def test_only_a_classic_queue_keeps_its_order_for_a_reader_with_a_smaller_prefetch(
    rabbitmq: RabbitMQ, topic: str, kind: dict[str, Any], kept: bool
) -> None:
    """What comes back to a quorum queue goes behind what came back before, also to what the last reader was not
    handed. So the members of a group need the same `prefetch`, as docs/how-to/rabbitmq.md says.
    """
    async with opened(rabbitmq, **kind) as bus:
        group = await _group(bus, topic)
        await group.more(8)
        for prefetch in (6, 2):
            assert await _closes(rabbitmq, topic, 2, 0, prefetch=prefetch, **kind) == ["1", "2"]
        found = await _closes(rabbitmq, topic, 8, 0, prefetch=8, **kind)
        assert found == group.left if kept else found == ["3", "4", "5", "6", "1", "2", "7", "8"]
