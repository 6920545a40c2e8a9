"""Engines on the embedded bus: `make bench NAME=engine` (about five minutes; TIMES=10 for fewer kills).

Throughput and latency are ratios to what a user would write instead: a subscriber and a publisher in one loop, which
survives nothing. Its clock runs from its first block. An engine's clock begins when it leads, and blocks that it had
computed by then do not count, though it still has to send them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import esp_pubsub as esp
from esp_pubsub.failover.ballot import SILENT_BEATS
from esp_pubsub.failover.log_election import BEAT_EVERY

from .embedded import blocks_of, paced
from .failover import p99
from .report import (
    LIMIT,
    SCHEMA,
    SMALL_FROM,
    Crew,
    Member,
    Report,
    fail_on_notice,
    heard,
    in_turn,
    main,
    say,
    small_row,
)
from .work import hand_over_when_asked, note_times, now, say_roles

ENGINE = "dfESP://bench:5555/project/query"
SINGLES, LARGE = 200_000, 12_000
BUFFER = 1_000
PACE, SECONDS, WARM = 1_000, 5, 500
RATE = 1_000
TIMES = int(os.environ.get("TIMES", "50"))
SILENCE = BEAT_EVERY * (SILENT_BEATS + 2)


@esp.model(inputs={"Ins": SCHEMA}, outputs={"Outs": SCHEMA})
def passes(window: str, block: esp.Block, out: esp.Out) -> None:
    """Decode everything and emit it again."""
    out.emit("Outs", block.rows())


@esp.model(inputs={"Ins": SCHEMA, "Others": SCHEMA}, outputs={"Outs": SCHEMA})
def merges(window: str, block: esp.Block, out: esp.Out) -> None:
    """The same, of two inputs, so in a written order."""
    out.emit("Outs", block.rows())


MODELS = {"derived": passes, "written": merges}


def client(directory: str) -> Any:
    return esp.init(dir=directory, on_notice=fail_on_notice)


# what members do


async def fill(directory: str, count: int, shape: str, windows: list[str]) -> None:
    """The input, all of it, in turn to these windows."""
    blocks = blocks_of(shape)
    async with client(directory) as opened:
        publishers = [await opened.publisher(f"{ENGINE}/{window}", SCHEMA) for window in windows]
        for number in range(count):
            await publishers[number % len(publishers)].inject(blocks[number % len(blocks)])
        for publisher in publishers:
            await publisher.flush(LIMIT)
    say(filled=count)
    say(filled=count)


async def compute(directory: str, count: int, order: str = "derived") -> None:
    """An engine, alone."""
    async with client(directory) as opened:
        await heard()
        async with opened.engine(MODELS[order], ENGINE, options=esp.EngineOptions(buffer=BUFFER)) as engine:
            while engine.stats.role != "active":  # noqa: ASYNC110  # what it looks at tells nobody
                await asyncio.sleep(0.001)
            began, before = now(), engine.stats.steps
            while engine.stats.lines[0].on_bus < count:  # noqa: ASYNC110  # the same
                await asyncio.sleep(0.005)
            say(rate=(count - before) / (now() - began) * 1e9)


async def loop(directory: str, count: int) -> None:
    """What an engine replaces."""
    async with (
        client(directory) as opened,
        opened.subscriber(f"{ENGINE}/Ins", SCHEMA, side="in", start="earliest") as subscriber,
        opened.publisher(f"{ENGINE}/Outs", SCHEMA, side="out") as publisher,
    ):
        await heard()
        began = now()
        async for block in subscriber:
            await publisher.inject(block.rows())
            if block.id == count:
                break
        await publisher.flush(LIMIT)
        say(rate=count / (now() - began) * 1e9)


async def feed_paced(directory: str) -> None:
    """Stamps in the key field."""
    _, *rest = small_row(SMALL_FROM)
    async with client(directory) as opened, opened.publisher(f"{ENGINE}/Ins", SCHEMA) as publisher:

        async def send(stamp: int) -> None:
            await publisher.inject([(stamp, *rest)])

        await heard()
        await paced(send)
        await publisher.flush(LIMIT)
        say(done=True)
        await heard()


async def receive_paced(directory: str, window: str, side: str) -> None:
    async with client(directory) as opened, opened.subscriber(
        f"{ENGINE}/{window}", SCHEMA, side=side, start="earliest"
    ) as subscriber:  # fmt: skip
        say(ready=True)
        took: list[int] = []
        async for block in subscriber:
            took.append(now() - block.rows()[0][0])
            if len(took) == PACE * SECONDS + WARM:
                break
        say(took=took[WARM:])


async def member(directory: str, order: str = "derived") -> None:
    """A member until ended; SIGUSR1 hands over. Tells of roles, and of having computed what the bus holds."""
    async with client(directory) as opened, opened.engine(MODELS[order], ENGINE) as engine:
        say(ready=os.getpid())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say_roles(engine))
            tasks.create_task(hand_over_when_asked(engine))
            told = False
            while True:
                stats = engine.stats
                stands_by = stats.role == "candidate" and 0 < stats.lines[0].on_bus <= stats.lines[0].given
                if stands_by and not told:
                    say(stands_by=stats.steps)
                told = stands_by
                await asyncio.sleep(0.005)


async def feed(directory: str) -> None:
    """RATE blocks a second, until ended."""
    async with client(directory) as opened, opened.publisher(f"{ENGINE}/Ins", SCHEMA) as publisher:
        say(ready=True)
        begun, number = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - begun) * RATE)
            while number < due:
                number += 1
                await publisher.inject([small_row(number)])
            await asyncio.sleep(1 / RATE)


async def watch(directory: str) -> None:
    async with client(directory) as opened, opened.subscriber(f"{ENGINE}/Outs", SCHEMA, start="earliest") as subscriber:
        await note_times(subscriber, Path(directory, "times.json"))


# what is measured


async def throughput(role: str, shape: str, count: int, **more: str) -> float:
    windows = ["Ins", "Others"] if more.get("order") == "written" else ["Ins"]
    async with Crew("engine") as crew:
        filling = await crew.start("fill", count=count, shape=shape, windows=windows)
        await filling.told()
        worker = await crew.start(role, count=count, **more)
        worker.tell()
        return float((await worker.told())["rate"])


async def latencies(order: str | None) -> tuple[float, float]:
    """p50 and p99 in ms, from the input's publisher to a subscriber: of the input itself, or through an engine."""
    async with Crew("engine") as crew:
        if order is not None:
            computing = await crew.start("member", order=order)
            await until(computing, "role", "active")
        where = {"window": "Outs", "side": "out"} if order is not None else {"window": "Ins", "side": "in"}
        reader = await crew.start("receive_paced", **where)
        writer = await crew.start("feed_paced")
        writer.tell()
        took = (await until(reader, "took"))["took"]
    return statistics.median(took) / 1e6, statistics.quantiles(took, n=100)[98] / 1e6


async def until(member: Member, key: str, value: Any = None) -> dict[str, Any]:
    """Read on until a member says this."""
    while True:
        said = await member.told()
        if key in said and value in (None, said[key]):
            return said


async def gaps(how: signal.Signals) -> list[float]:
    """The longest pause around each of so many switches, in ms."""
    async with Crew("engine") as crew:
        active = await crew.start("member")
        await until(active, "role", "active")
        watcher = await crew.start("watch")
        await crew.start("feed")
        standby = await crew.start("member")
        await until(standby, "stands_by")
        events = []
        for _ in range(TIMES):
            await asyncio.sleep(0.15)
            events.append(time.monotonic())
            os.kill(active.pid, how)
            await until(standby, "role", "active")
            await asyncio.sleep(0.15)
            if how == signal.SIGUSR1:
                active, standby = standby, active
            else:
                await active.end()
                active, standby = standby, await crew.start("member")
            await until(standby, "stands_by")
        os.kill(watcher.pid, signal.SIGUSR1)
        await until(watcher, "written")
        seen = json.loads(Path(crew.directory, "times.json").read_text())
        return [_longest(seen, at - 0.05, at + SILENCE + 0.5) for at in events]


def _longest(seen: list[float], begin: float, end: float) -> float:
    near = [at for at in seen if begin <= at <= end]
    return max(after - before for before, after in pairwise(near)) * 1000


async def measure(report: Report) -> None:
    """Everything, in turn."""
    for shape, count, what, target in (
        ("large", LARGE, "256-event blocks", 0.7),
        ("small", SINGLES, "single events", 0.6),
    ):
        ours, written, theirs = (f"{what} through {how}" for how in ("an engine", "one with a written order", "a loop"))
        contestants: dict[str, Callable[[], Any]] = {
            ours: partial(throughput, "compute", shape, count),
            written: partial(throughput, "compute", shape, count, order="written"),
            theirs: partial(throughput, "loop", shape, count),
        }
        samples = await in_turn(contestants)
        report.figures(samples, "blocks/s")
        report.ratio(samples, ours, theirs, target)
        report.ratio(samples, written, ours, 0.7)
    trips: dict[str, list[float]] = {}
    orders = {"through an engine": "derived", "through one with a written order": "written", "one bus trip": None}
    for _ in range(3):
        for name, order in orders.items():
            p50, p99_ = await latencies(order)
            trips.setdefault(f"p50 {name}", []).append(p50)
            trips.setdefault(f"p99 {name}", []).append(p99_)
    report.figures(trips, "ms", "lower")
    for quantile in ("p50", "p99"):
        for name, most in (("through an engine", 2.5), ("through one with a written order", 4.0)):
            report.ratio(trips, f"{quantile} {name}", f"{quantile} one bus trip", most, "lower")
    for name, how, most in (
        ("SIGKILL", signal.SIGKILL, 50.0),
        ("hand-over", signal.SIGUSR1, 50.0),
        ("SIGSTOP", signal.SIGSTOP, SILENCE * 1000 + 200),
    ):
        found = await gaps(how)
        report.result(f"gap after {name} p50", statistics.median(found), "ms", better="lower")
        report.result(f"gap after {name} p99 of {TIMES}", p99(found), "ms", most, "lower")


if __name__ == "__main__":
    logging.getLogger("esp_pubsub").setLevel(logging.ERROR)  # roles are no news here
    roles = (fill, compute, loop, feed_paced, receive_paced, member, feed, watch)
    main("engine", measure, {role.__name__: role for role in roles})
