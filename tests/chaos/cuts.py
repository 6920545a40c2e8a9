"""All links are cut, again and again: `python -m tests.chaos.cuts --bus rabbitmq --mode stream --times 300`.

One process publishes, alone and as a member of a failover group, and reads, by itself and for a group, through a proxy
that resets all its connections so many times in a row. What is published must arrive, each block once and in order.
What this process and the broker hold when everybody has come back must be as much in the end as after the first cuts:
tasks, descriptors, channels, objects, memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import esp_pubsub as esp
from esp_pubsub.notices import Missed, Notice
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST

SCHEMA = "id*:int64,text:string"
WARM = 20
"""Cuts after which nothing is to grow any more: until then caches fill."""
BLOCKS = 20  # for each cut
BACK = 30.0  # seconds in which everybody has to come back
QUIET = 30.0  # seconds in which what was left behind has to be gone
_STEADY = 10  # equal looks, a tenth of a second apart
_PAGE = resource.getpagesize()
ROOM = {"memory": 12 << 20, "objects": 1_000, "broker's descriptors": 10, "broker's memory": sys.maxsize}
"""What may be more in the end: the allocator keeps what it had to take once, some objects and the broker's files come
and go, and the broker collects its garbage when it likes.
"""


class Ended(Exception):
    """It did not hold."""


class Line:
    """A publisher and the readers of what it publishes."""

    def __init__(self, publisher: esp.Publisher, readers: list[esp.Subscriber], whole: bool) -> None:
        self.publisher = publisher
        self.given = 0
        self._readers = readers
        self._whole = whole
        self._seen = [0] * len(readers)
        self._reading: list[asyncio.Task[None]] = []

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        self._reading = [tasks.create_task(self._read(number)) for number in range(len(self._readers))]

    async def _read(self, number: int) -> None:
        subscriber = self._readers[number]
        async for block in subscriber:
            before = self._seen[number]
            if block.id <= before or (self._whole and block.id != before + 1):
                raise Ended(f"block {block.id} of {self.publisher.topic} came after block {before}")
            self._seen[number] = block.id
            if subscriber.group is not None and block.id % 10 == 0:
                with contextlib.suppress(esp.BusUnavailable):  # the next one confirms this one too
                    await subscriber.confirm(block)

    async def publish(self, count: int) -> None:
        for _ in range(count):
            self.given += 1
            await self.publisher.inject([(self.given, "x" * 50)])

    async def come_back(self) -> None:
        """Until what is published from now on is confirmed and read."""
        await self.publish(1)
        since = self.given
        while min(self._seen) < since or self.publisher.stats.acked < since:
            await asyncio.sleep(0.02)
            if not self._whole and self.publisher.stats.acked == self.given:
                await self.publish(1)  # who was away a moment ago did not get the one before

    def end(self) -> None:
        for task in self._reading:
            task.cancel()


class Held:
    """What this process and the broker hold."""

    def __init__(self, broker: RabbitMQ, buses: list[Any]) -> None:
        self._broker = broker
        self._buses = buses

    def here(self) -> dict[str, int]:
        """What can be looked at often."""
        connections = [connection for bus in self._buses for connection, _ in bus.link._connections.values()]
        return {
            "tasks": len(asyncio.all_tasks()),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "channels": sum(len(connection.channels) for connection in connections),
        }

    async def all(self, most: Mapping[str, int]) -> dict[str, int]:
        """Everything, when it has come to rest. The broker counts what it closes a moment longer: so it is asked until
        it says the same twice, and no more than `most`.
        """
        before, same, end = self.here(), 0, time.monotonic() + QUIET
        while same < _STEADY and time.monotonic() < end:
            await asyncio.sleep(0.1)
            now = self.here()
            same, before = (same + 1 if now == before else 0), now
        gc.collect()
        there, last = await self._there(), {}
        while time.monotonic() < end and (
            there != last or any(there[what] > most.get(what, there[what]) for what in there)
        ):
            there, last = await self._there(), there
        found = before | there
        found["broker's descriptors"] = len(os.listdir(f"/proc/{self._broker.nodes[0].pid}/fd"))
        found["objects"] = len(gc.get_objects())
        found["memory"] = _memory(os.getpid())
        found["broker's memory"] = _memory(self._broker.nodes[0].pid)
        return found

    async def _there(self) -> dict[str, int]:
        found = {}
        for what in ("connections", "channels", "queues"):
            text = await asyncio.to_thread(self._broker.ctl, f"list_{what}", "name" if what == "queues" else "pid")
            found[f"broker's {what}"] = len(text.splitlines())
        return found


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


async def cut(both: list[Line], proxies: list[Proxy]) -> float:
    """Cut all links while something is under way; how long it takes until everybody is back."""
    for line in both:
        await line.publish(BLOCKS)
    for proxy in proxies:
        proxy.cut()
    began = time.monotonic()
    async with asyncio.timeout(BACK):
        for line in both:
            await line.come_back()
    return time.monotonic() - began


async def play(broker: RabbitMQ, mode: str, times: int, warm: int, say: Callable[[str], None]) -> list[str]:
    """What has grown."""
    told: list[Notice] = []
    whole = mode != "direct"
    async with AsyncExitStack() as stack:
        node = broker.nodes[0]
        proxies = [await stack.enter_async_context(Proxy(HOST, port)) for port in (node.port, node.stream_port)]
        settings = {"host": HOST, "port": proxies[0].port, "streamport": proxies[1].port, "exchange": "cuts"}
        clients = [
            await stack.enter_async_context(esp.init("rabbitmq", on_notice=told.append, mode=mode, **settings))
            for _ in range(3)
        ]
        both = []
        for client, failover in zip(clients, (None, esp.Failover("feed")), strict=False):
            url = f"dfESP://cuts:5555/{secrets.token_hex(4)}/q/w"
            groups = {"direct": (None,), "persistent": ("g",), "stream": (None, "g")}[mode]
            readers = [
                await stack.enter_async_context(clients[2].subscriber(url, SCHEMA, side="in", group=group))
                for group in groups
            ]
            publisher = await stack.enter_async_context(client.publisher(url, SCHEMA, failover=failover))
            both.append(Line(publisher, readers, whole))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for line in both:
            line.begin(tasks)
            stack.callback(line.end)
        held = Held(broker, [client.bus for client in clients])
        slowest = 0.0
        looks: list[dict[str, int]] = []
        for count in (warm, times - warm):
            for _ in range(count):
                slowest = max(slowest, await cut(both, proxies))
                if whole and any(isinstance(notice, Missed) for notice in told):
                    raise Ended(f"something was missed: {told}")
                told.clear()
            looks.append(await held.all(looks[0] if looks else {}))
        first, last = looks
        troubles = sum(line.publisher.stats.troubles for line in both)
    say(f"{mode}: {times} cuts, {troubles} troubles of publishers, the slowest was mended after {slowest:.2f} s")
    say(f"  {'':<22} {f'after {warm}':>12} {f'after {times}':>12}")
    grown = [what for what in first if last[what] - first[what] > ROOM.get(what, 0)]
    for what in first:
        say(f"  {what:<22} {first[what]:>12,} {last[what]:>12,}{'  GROWN' if what in grown else ''}")
    return grown


async def run(given: argparse.Namespace) -> list[str]:
    async with RabbitMQ() as broker:
        return [
            what for mode in given.mode for what in await play(broker, mode, given.times, min(WARM, given.times), print)
        ]


def main() -> int:
    modes = ("direct", "persistent", "stream")
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.cuts", description=__doc__)
    parser.add_argument("--bus", choices=("rabbitmq",), default="rabbitmq")
    parser.add_argument("--mode", choices=modes, action="append")
    parser.add_argument("--times", type=int, default=300)
    given = parser.parse_args()
    given.mode = given.mode or modes
    logging.disable(logging.CRITICAL)  # a line for each link that is lost
    return 1 if asyncio.run(run(given)) else 0


if __name__ == "__main__":
    sys.exit(main())
