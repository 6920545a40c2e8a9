"""What stays bounded: `make bench NAME=soak` (three minutes; `PAUSE=10` shortens the first part).

A subscriber reads a little and then asks for nothing for PAUSE seconds, while 5,000,000 events are published into a
ring that holds a small part of them. Then it reads to the end: what it was given and what it was told it missed must
add up to what was published, exactly. Bounds that are configured: the publisher's buffer and the subscriber's one read.
The ring is a bound too, but of pages of a file: the kernel counts them to whoever maps them and takes them back at
need. So a process's own memory is judged without the ring, and all of its memory with it.

Then a small ring turns over a hundred times, with a reader behind it: its file keeps its size, its last tenth the
speed of its second. A file grows by whole batches of up to 1 MiB while it finds its size; one that leaks, by rings.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import esp_pubsub as esp
from esp_pubsub.notices import Missed, Skipped

from .report import LIMIT, REPETITIONS, SCHEMA, URL, Crew, Member, Report, heard, main, rows, say

PAUSE = float(os.environ.get("PAUSE", "60"))
PUBLISHED, EVENTS = 5_000_000, 256
RING = 64 << 20
BUFFER, READ = 16 << 20, 4 << 20
MARGIN = 50 << 20
READ_FIRST = 100  # blocks, before the pause
SMALL_RING, TURNS, TENTHS = 8 << 20, 110, 10
_EVENT_BYTES = 50  # of the rows below, a little less than they take: the ring turns over more often than TURNS
now = time.monotonic


def split(events: int) -> list[int]:
    """Events as sizes of blocks."""
    full, rest = divmod(events, EVENTS)
    return [EVENTS] * full + [rest] * (rest > 0)


async def publish(directory: str, ring: int, events: int, tenths: int) -> None:
    """Inject so many events flat out; after every tenth wait for its acknowledgement and tell the rate so far."""
    sizes = split(events)
    blocks = [rows(EVENTS, EVENTS * i) for i in range(16)]
    options = esp.PublisherOptions(buffer_bytes=BUFFER)
    async with (
        esp.init(dir=directory, ring_size=ring) as client,
        client.publisher(URL, SCHEMA, options=options) as publisher,
    ):
        await heard()
        for part in range(tenths):
            began, first = now(), part * len(sizes) // tenths
            for number in range(first, (part + 1) * len(sizes) // tenths):
                await publisher.inject(blocks[number % len(blocks)][: sizes[number]])
            await publisher.flush(LIMIT)
            done = (part + 1) * len(sizes) // tenths - first
            say(rate=done * EVENTS / (now() - began))
        stats = publisher.stats
        say(blocks=stats.acked, events=stats.events, bytes=stats.bytes, troubles=stats.troubles)
        await heard()


async def receive(directory: str, ring: int, blocks: int, stop_after: int) -> None:
    """Read to block `blocks`; after `stop_after` blocks ask for nothing until the parent says so."""
    missed: list[int] = []
    skipped: list[int | None] = []

    def on_notice(notice: object) -> None:
        if isinstance(notice, Missed):
            missed.append(notice.last - notice.first + 1)
        elif isinstance(notice, Skipped):
            skipped.append(notice.messages)
        else:
            raise RuntimeError(f"nobody expected {notice}")

    options = esp.SubscriberOptions(read_bytes=READ)
    async with (
        esp.init(dir=directory, ring_size=ring, on_notice=on_notice) as client,
        client.subscriber(URL, SCHEMA, side="in", start="earliest", options=options) as subscriber,
    ):
        say(ready=True)
        delivered = events = 0
        async for block in subscriber:
            delivered += 1
            events += len(block.rows())
            if block.id == blocks:
                break
            if delivered == stop_after:
                await heard()
        stats = subscriber.stats
        say(delivered=delivered, events=events, missed=sum(missed), skipped=sum(n or 0 for n in skipped),
            turns_unknown=skipped.count(None), bad=stats.bad, doubles=stats.doubles)  # fmt: skip
        await heard()


ROLES = {role.__name__: role for role in (publish, receive)}


@asynccontextmanager
async def watched(*members: Member) -> AsyncIterator[dict[str, dict[str, int]]]:
    """The most memory that each member held while the body ran, by role; looked at twenty times a second."""
    most: dict[str, dict[str, int]] = {member.role: {"all": 0, "own": 0} for member in members}

    def look() -> None:
        for member in members:
            for kind, size in member.memory().items():
                most[member.role][kind] = max(most[member.role][kind], size)

    async def keep_looking() -> None:
        while True:
            look()
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(keep_looking())
        yield most
        look()
        looking.cancel()


async def measure_pause(report: Report) -> None:
    blocks = len(split(PUBLISHED))
    async with Crew("soak") as crew:
        reader = await crew.start("receive", ring=RING, blocks=blocks, stop_after=READ_FIRST)
        writer = await crew.start("publish", ring=RING, events=PUBLISHED, tenths=1)
        async with watched(reader, writer) as most:
            writer.tell()
            await reader.told()  # it has read its first blocks, and stops
            paused = now()
            rate = (await writer.told())["rate"]
            sent = await writer.told()
            took = now() - paused
            await asyncio.sleep(max(0.0, PAUSE - took))
            reader.tell()
            got = await reader.told()
    if sent["blocks"] != blocks or sent["troubles"] or got["bad"] or got["doubles"] or got["turns_unknown"]:
        raise RuntimeError(f"not what a quiet machine does: {sent}, {got}")
    report.result("published during the pause", rate, "events/s")
    report.result("blocks published", blocks, "blocks")
    report.result("blocks delivered", got["delivered"], "blocks")
    report.result(
        "delivered + Missed - published", abs(got["delivered"] + got["missed"] - blocks), "blocks", 0, "lower"
    )
    report.result(
        "delivered + Skipped - published", abs(got["delivered"] + got["skipped"] - blocks), "blocks", 0, "lower"
    )
    for role, bound in (("publish", BUFFER), ("receive", READ)):
        for kind, limit in (("own", bound + MARGIN), ("all", bound + RING + MARGIN)):
            name = {"publish": "publisher", "receive": "subscriber"}[role]
            words = "own memory" if kind == "own" else "memory with the ring's pages"
            report.result(f"{name}, {words}", most[role][kind] / (1 << 20), "MiB", limit / (1 << 20), "lower")


def log_bytes(directory: str) -> int:
    """What the topic's file takes on disk."""
    return sum(path.stat().st_blocks * 512 for path in Path(directory, "topics").glob("*/data.mdb"))


async def turn_over() -> tuple[float, float, float, float]:
    """Turns of a small ring; its file at the end over the ring, and over what it was after the second tenth; the last
    tenth's speed over the second's.
    """
    events = SMALL_RING * TURNS // _EVENT_BYTES
    async with Crew("soak") as crew:
        reader = await crew.start("receive", ring=SMALL_RING, blocks=len(split(events)), stop_after=0)
        writer = await crew.start("publish", ring=SMALL_RING, events=events, tenths=TENTHS)
        writer.tell()
        rates, sizes = [], []
        for _ in range(TENTHS):
            rates.append((await writer.told())["rate"])
            sizes.append(log_bytes(crew.directory))
        sent, got = await writer.told(), await reader.told()
    if got["delivered"] + got["missed"] != sent["blocks"]:
        raise RuntimeError(f"the reader lost count: {got} of {sent}")
    return sent["bytes"] / SMALL_RING, sizes[-1] / SMALL_RING, sizes[-1] / sizes[1], rates[-1] / rates[1]


async def measure_turns(report: Report) -> None:
    samples = [await turn_over() for _ in range(REPETITIONS)]
    turns, size, growth, speed = (median(column) for column in zip(*samples, strict=True))
    report.result("turns of the small ring", turns, "turns", 100)
    report.result("its file / the ring", size, "ratio", better="lower")
    report.result("its file at the end / after the second tenth", growth, "ratio", 1.25, "lower")
    report.result("its last tenth / its second tenth", speed, "ratio", 0.9)


async def measure(report: Report) -> None:
    await measure_pause(report)
    await measure_turns(report)


if __name__ == "__main__":
    main("soak", measure, ROLES)
