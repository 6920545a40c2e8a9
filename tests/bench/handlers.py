"""What `esp.handle` costs against a loop over the subscriber: `make bench NAME=handlers`.

Both await the same function with each block of a group, and confirm. The loop confirms every 256th block, as the how-to
on tuning says; the handler confirms while it goes on.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from tempfile import TemporaryDirectory

import esp_pubsub as esp

from .report import LIMIT, SCHEMA, URL, Report, fail_on_notice, in_turn, small_row

BLOCKS = int(os.environ.get("BLOCKS", "50000"))
CONFIRM_EVERY = 256
Function = Callable[[esp.Block], Awaitable[None]]


class Enough(Exception):
    """Every block has come."""


def counting() -> Function:
    """What is awaited with each block: it raises when it has had all of them."""
    taken = 0

    async def function(block: esp.Block) -> None:
        nonlocal taken
        taken += 1
        if taken == BLOCKS:
            raise Enough

    return function


async def loop(client: esp.Client, group: str) -> None:
    function = counting()
    async with client.subscriber(URL, side="in", group=group) as subscriber:
        number = 0
        async for block in subscriber:
            await function(block)
            number += 1
            if not number % CONFIRM_EVERY:
                await subscriber.confirm(block)


async def handler(client: esp.Client, group: str) -> None:
    await esp.handle(client, URL, counting(), side="in", group=group)


async def rate(client: esp.Client, work: Callable[[esp.Client, str], Awaitable[None]]) -> float:
    """Blocks a second, from the opening of the reader to the last block."""
    began = time.perf_counter()
    try:
        await work(client, secrets.token_hex(4))
    except (Enough, esp.HandlerFailed):
        return BLOCKS / (time.perf_counter() - began)
    raise RuntimeError("it ended before the last block")


async def measure(directory: str, report: Report) -> None:
    async with esp.init(dir=directory, on_notice=fail_on_notice) as client:
        async with client.publisher(URL, SCHEMA) as publisher:
            for number in range(BLOCKS):
                await publisher.inject([small_row(number)])
            await publisher.flush(LIMIT)
        samples = await in_turn({"async for": lambda: rate(client, loop), "handle": lambda: rate(client, handler)})
    report.figures(samples, "blocks/s")
    report.ratio(samples, "handle", "async for", 0.9)


def main() -> None:
    report = Report("handlers")
    with TemporaryDirectory(prefix="esp") as directory:
        asyncio.run(measure(directory, report))
    report.finish()


if __name__ == "__main__":
    main()
