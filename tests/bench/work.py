"""What members of the benchmarks do alike: open the embedded bus so that nothing may go wrong, and publish flat out.

`now` is CLOCK_MONOTONIC in nanoseconds, which the processes of a machine share.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
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
