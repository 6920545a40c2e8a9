"""What members of the benchmarks do alike: open the embedded bus so that nothing may go wrong, and publish flat out.

`now` is CLOCK_MONOTONIC in nanoseconds, which the processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import esp_pubsub as esp

from .report import LIMIT, SCHEMA, SMALL_FROM, URL, fail_on_notice, heard, say, small_row

Blocks = Sequence[Sequence[tuple[Any, ...]]]
now = time.monotonic_ns


def small_blocks() -> list[list[tuple[Any, ...]]]:
    """Blocks of one event whose bodies have 100 bytes, to be published in turn."""
    return [[small_row(SMALL_FROM + i)] for i in range(64)]


@asynccontextmanager
async def publishing(directory: str) -> AsyncIterator[esp.Publisher]:
    """A publisher on a client of its own."""
    async with (
        esp.init(dir=directory, on_notice=fail_on_notice) as client,
        client.publisher(URL, SCHEMA) as publisher,
    ):
        yield publisher


@asynccontextmanager
async def subscribing(directory: str, count: int = 1, **how: Any) -> AsyncIterator[list[esp.Subscriber]]:
    """So many subscribers of one client, in place."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(esp.init(dir=directory, on_notice=fail_on_notice))
        yield [await stack.enter_async_context(client.subscriber(URL, SCHEMA, side="in", **how)) for _ in range(count)]


async def publish_flat_out(directory: str, count: int, blocks: Blocks) -> None:
    """Inject so many blocks and wait until the last is acknowledged; say when that began and ended."""
    async with publishing(directory) as publisher:
        await heard()
        began = now()
        for number in range(count):
            await publisher.inject(blocks[number % len(blocks)])
        await publisher.flush(LIMIT)
        say(began=began, ended=now(), acked=publisher.stats.acked)


async def say_roles(member: esp.Publisher | esp.Engine) -> None:
    """Tell of each role that it takes, until cancelled."""
    async for change in member.roles():
        say(role=change.role, at=time.monotonic())


async def hand_over_when_asked(member: esp.Publisher | esp.Engine) -> None:
    """Hand over at each SIGUSR1, until cancelled."""
    wanted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, wanted.set)
    while True:
        await wanted.wait()
        wanted.clear()
        await member.hand_over()


async def compete(publisher: esp.Publisher, begun: float, rate: int) -> None:
    """A member of a failover group, at the pace of a clock that all members share, until SIGTERM. SIGUSR1 hands over.

    Tells of role changes and, as a standby, of having caught up.
    """
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    say(ready=os.getpid())

    async def publish() -> None:
        number, told = 0, False
        while True:
            due = int((time.monotonic() - begun) * rate)
            while number < due:
                number += 1
                await publisher.inject([(number, "x" * 60)])
            stands_by = publisher.stats.role != "active" and publisher.stats.on_bus >= number - rate // 4
            if stands_by and not told:
                say(stands_by=number)
            told = stands_by
            await asyncio.sleep(1 / rate)

    async with asyncio.TaskGroup() as tasks:
        work = [tasks.create_task(each) for each in (say_roles(publisher), hand_over_when_asked(publisher), publish())]
        await ended.wait()
        for task in work:
            task.cancel()


async def note_times(subscriber: esp.Subscriber, file: Path) -> None:
    """Note when each block came; on SIGUSR1 write it all out and end."""
    times: list[float] = []
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, ended.set)
    say(ready=os.getpid())

    async def read() -> None:
        async for block in subscriber:
            if block.id != len(times) + 1:
                raise RuntimeError(f"block {block.id} after {len(times)}")
            times.append(time.monotonic())

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read())
        await ended.wait()
        reading.cancel()
    file.write_text(json.dumps(times))
    say(written=len(times))
