"""Run your engine twice, kill either one: `python -m esp_pubsub.cli.demo_engine`.

Without arguments on the embedded bus, in a directory that goes with it; on any other with a log: `--bus kafka
hostport=host:port`.

One process publishes generated trades. Two processes run the model of SAS's experiment on them: the average price of
each symbol, and more, in the last five minutes, hour and day. At a third of the way the active engine is killed and a
new one started, at two thirds the next one is killed. A fourth process subscribes to all three output windows. At the
end what it got is compared with what the model emits when nothing disturbs it, value by value.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from esp_pubsub import Client, init
from esp_pubsub.client import Opening
from esp_pubsub.testing import run_model
from esp_pubsub.windows import load_project

from .experiment import AGGREGATES, MODEL
from .stage import Stage, Watched, read_settings, report, say
from .trades import SCHEMA, trades

EVENTS, BLOCK, RATE = 40_000, 20, 250  # blocks a second
WINDOWS = tuple(AGGREGATES)


def url(run: int) -> str:
    """Each demo has a place of its own: the bus may hold what earlier ones published."""
    return f"dfESP://demo:5555/market/cq{run}"


def blocks_of(events: int) -> Iterator[list[tuple[Any, ...]]]:
    """The trades in blocks."""
    source = trades(events)
    while rows := list(islice(source, BLOCK)):
        yield rows


async def feed(opening: Opening[Client], run: int, blocks: int) -> None:
    """Publish the trades, at their rate."""
    async with opening as client, client.publisher(f"{url(run)}/TradesSource", SCHEMA) as publisher:
        begun = time.monotonic()
        for number, rows in enumerate(blocks_of(blocks * BLOCK), 1):
            await publisher.inject(rows)
            await asyncio.sleep(max(0.0, begun + number / RATE - time.monotonic()))
        await publisher.flush()


async def compute(opening: Opening[Client], run: int) -> None:
    """One member of the engine."""
    async with opening as client, client.engine(load_project(MODEL), url(run)) as engine:
        while True:
            stats = engine.stats
            say(role=stats.role, given=stats.steps)
            await asyncio.sleep(0.1)


async def subscribe(opening: Opening[Client], run: int, output: Path, blocks: int) -> None:
    """Write everything that comes from all windows; gaps and duplicates are counted by the ids."""
    totals = dict.fromkeys(("received", "gaps", "duplicates"), 0)
    longest = 0.0

    async def read(client: Client, window: str) -> None:
        nonlocal longest
        last, before = 0, 0.0
        with Path(output, window).open("w") as file:  # noqa: ASYNC230  # a small one, in a demo
            async with client.subscriber(f"{url(run)}/{window}", start="earliest") as subscriber:
                async for block in subscriber:
                    now = time.perf_counter()
                    if window == WINDOWS[0]:
                        longest, before = max(longest, now - before) if last else 0.0, now
                        totals["received"] += 1
                    totals["duplicates"] += block.id <= last
                    totals["gaps"] += block.id > last + 1
                    last = block.id
                    file.write(json.dumps(block.rows()) + "\n")
                    file.flush()

    async with opening as client:
        readers = [asyncio.create_task(read(client, window)) for window in WINDOWS]
        while totals["received"] < blocks:
            await asyncio.wait(readers, timeout=0.1)
            say(**totals, pause=longest)
            longest = 0.0
        await asyncio.wait(readers, timeout=0.5)  # the other windows may be a moment later
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        say(**totals, pause=longest)


class Demo:
    """The process that starts, kills and watches the others."""

    def __init__(self, place: Path, events: int, bus: str, settings: Sequence[str]) -> None:
        self.blocks = -(-events // BLOCK)
        self.bus = bus
        self.output = place
        self.engines: list[Watched] = []
        self.stage = Stage(
            "esp_pubsub.cli.demo_engine", bus, settings or [f"dir={place / 'bus'}"] * (bus == "embedded")
        )

    async def start_engine(self, tasks: asyncio.TaskGroup) -> None:
        """Another member."""
        watched = await self.stage.start(tasks, "engine")
        self.engines.append(watched)
        self.stage.tell(f"started {watched.name}")

    async def run(self) -> bool:
        """The whole demo; True if the output is that of an undisturbed run."""
        try:
            return await self.play()
        finally:
            await self.stage.end()

    async def play(self) -> bool:
        """Start, kill, start, kill, and compare."""
        stage, blocks = self.stage, self.blocks
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                await self.start_engine(tasks)
            while not any(engine.leads for engine in self.engines):
                await stage.news()
            subscriber = await stage.start(tasks, "subscriber", "--output", self.output, "--blocks", blocks)
            await stage.start(tasks, "trades", "--blocks", blocks)
            for share in (1 / 3, 2 / 3):
                await self.until(subscriber, share * blocks)
                active = await stage.kill_active(self.engines)
                stage.tell(f"killed {active.name}, the active one, at its step {active.last['given']}")
                if share < 0.5:
                    await self.start_engine(tasks)
            await self.until(subscriber, blocks)
            await subscriber.process.wait()
            for engine in self.engines:
                if engine.process.returncode is None:
                    engine.process.kill()
        return self.report(subscriber.last)

    async def until(self, subscriber: Watched, blocks: float) -> None:
        """Wait for the subscriber to have so many blocks."""
        await self.stage.until(subscriber, blocks, self.blocks, self.engines, "step")

    def report(self, last: dict[str, Any]) -> bool:
        """The outcome in lines that a script can read."""
        undisturbed = run_model(
            load_project(MODEL), (("TradesSource", rows) for rows in blocks_of(self.blocks * BLOCK))
        )
        same = True
        for window, emitted in undisturbed.items():
            written = Path(self.output, window).read_text().splitlines()
            same = same and written == [json.dumps(block.rows()) for block in emitted]
        self.stage.tell("done")
        report(
            bus=self.bus, steps=f"{self.blocks} blocks, {self.blocks * BLOCK} trades",
            emitted=", ".join(f"{window} {len(blocks)}" for window, blocks in undisturbed.items()),
            received=last["received"], duplicates=last["duplicates"], gaps=last["gaps"],
            longest_pause=self.stage.longest_pause, elapsed=f"{time.time() - self.stage.begun:.1f} s",
            output="that of an undisturbed run" if same else "DIFFERENT",
        )  # fmt: skip
        return same and last["gaps"] == last["duplicates"] == 0


def main() -> int:
    """The command line; a role other than demo is how the demo starts itself."""
    parser = argparse.ArgumentParser(prog="python -m esp_pubsub.cli.demo_engine", description=__doc__)
    parser.add_argument("--role", choices=("demo", "engine", "trades", "subscriber"), default="demo")
    parser.add_argument("--bus", default="embedded")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the bus, as in its cfg file")
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--run", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--blocks", type=int, default=0)
    given = parser.parse_args()
    if given.role != "demo":
        logging.getLogger("esp_pubsub").setLevel(logging.ERROR)  # the demo tells what happens in its own words
    settings = read_settings(given.settings)
    if settings is None:
        parser.error("what follows the options is key=value, such as hostport=host:port")
    opening = init(given.bus, config=None, on_notice=None, **settings)
    if given.role == "engine":
        asyncio.run(compute(opening, given.run))
    elif given.role == "trades":
        asyncio.run(feed(opening, given.run, given.blocks))
    elif given.role == "subscriber":
        asyncio.run(subscribe(opening, given.run, given.output, given.blocks))
    else:
        with tempfile.TemporaryDirectory(prefix="esp-demo-") as place:
            return 0 if asyncio.run(Demo(Path(place), given.events, given.bus, given.settings).run()) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
