"""Run your publisher twice, kill either one: `python -m esp_pubsub.cli.demo`.

`python -m esp_pubsub.cli.demo engine` is a demo of engines, and with `--full` it is SAS's experiment.

Without arguments on the embedded bus, in a directory that goes with it; on any other: `--bus kafka hostport=host:port`.

Two processes publish the same generated file of trades as one failover group; a third one subscribes and writes what
it gets to a CSV file. At a third of the way the active publisher is killed and a new one started, at two thirds the
next one is killed. At the end both files are compared, byte for byte. Each demo is a run of its own: the bus may hold
what earlier ones published.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import filecmp
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from esp_pubsub import Client, Failover, Publisher, PublisherStats, init
from esp_pubsub.client import Opening

from .stage import Stage, Watched, read_settings, report, say

URL = "dfESP://demo:5555/trades/cq/TradesSource"
SCHEMA = "id*:int64,symbol:string,price:money,quantity:int32,at:stamp"
EVENTS, BLOCK, RATE = 200_000, 100, 250  # blocks a second
SYMBOLS = ("IBM", "SAS", "AAPL", "MSFT", "ORCL", "SAP", "TSLA", "NVDA")


def write_trades(path: Path, events: int) -> None:
    """The input: the same trades every time."""
    dice = random.Random(2026)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for number in range(1, events + 1):
            price = f"{dice.randint(1, 99)}.{dice.randint(1, 9)}"
            writer.writerow((number, dice.choice(SYMBOLS), price, dice.randint(1, 999), 1_760_000_000_000_000 + number))


def read_blocks(path: Path) -> Iterator[list[tuple[Any, ...]]]:
    """The trades again, as rows, in blocks."""
    with path.open(newline="") as file:
        rows = [(int(i), symbol, price, int(quantity), int(at)) for i, symbol, price, quantity, at in csv.reader(file)]
    for first in range(0, len(rows), BLOCK):
        yield rows[first : first + BLOCK]


async def publish(opening: Opening[Client], run: int, trades: Path, begun: float) -> None:
    """One member: it keeps to the rate of the input, and hurries where it is late, as a member that joined late is."""
    async with (
        opening as client,
        client.publisher(URL, SCHEMA, failover=Failover("demo", run=run)) as publisher,
        asyncio.TaskGroup() as tasks,
    ):
        telling = tasks.create_task(tell(publisher))
        for number, rows in enumerate(read_blocks(trades), 1):
            await publisher.inject(rows)
            early = begun + number / RATE - time.time()
            if early > 0:
                await asyncio.sleep(early)
        await publisher.flush()
        await asyncio.to_thread(sys.stdin.read)  # until the demo closes this, it may yet be killed
        telling.cancel()
        say_how(publisher.stats)


async def tell(publisher: Publisher) -> None:
    """All the while, how it is."""
    while True:
        say_how(publisher.stats)
        await asyncio.sleep(0.1)


def say_how(stats: PublisherStats) -> None:
    """One line for the process that watches."""
    say(role=stats.role, given=stats.given, acked=stats.acked, term=stats.term)


async def subscribe(opening: Opening[Client], run: int, output: Path, blocks: int) -> None:
    """Everything that comes, as CSV, in the order it comes; gaps and duplicates are counted by the ids."""
    last = gaps = duplicates = 0
    longest, before, told = 0.0, time.perf_counter(), 0.0
    with output.open("w", newline="") as file:
        writer = csv.writer(file)
        async with (
            opening as client,
            client.subscriber(URL, side="in", start="earliest", group="demo") as subscriber,
        ):
            say(received=0)
            async for block in subscriber:
                if block.run != run:
                    continue
                now = time.perf_counter()
                longest, before = max(longest, now - before) if last else 0.0, now
                duplicates += block.id <= last
                gaps += block.id > last + 1
                last = block.id
                writer.writerows(block.rows())
                if now - told > 0.1 or last == blocks:
                    told = now
                    await subscriber.confirm(block)
                    say(received=last, gaps=gaps, duplicates=duplicates, pause=longest)
                    longest = 0.0
                if last == blocks:
                    return


class Demo:
    """The process that starts, kills and watches the others."""

    def __init__(self, place: Path, events: int, bus: str, settings: Sequence[str]) -> None:
        self.blocks = -(-events // BLOCK)
        self.bus = bus
        self.trades, self.output = place / "trades.csv", place / "received.csv"
        self.publishers: list[Watched] = []
        settings = settings or [f"dir={place / 'bus'}"] * (bus == "embedded")
        self.stage = Stage("esp_pubsub.cli.demo", bus, settings)

    async def start_publisher(self, tasks: asyncio.TaskGroup) -> None:
        """Another member of the group."""
        stage = self.stage
        watched = await stage.start(tasks, "publisher", "--trades", self.trades, "--begun", stage.begun)
        self.publishers.append(watched)
        stage.tell(f"started {watched.name}")

    async def run(self) -> bool:
        """The whole demo; True if nothing was lost or doubled."""
        write_trades(self.trades, self.blocks * BLOCK)
        try:
            return await self.play()
        finally:
            await self.stage.end()

    async def play(self) -> bool:
        """Start, kill, start, kill, and compare."""
        async with asyncio.TaskGroup() as tasks:
            subscriber = await self.stage.start(tasks, "subscriber", "--output", self.output, "--blocks", self.blocks)
            await self.stage.news()
            self.stage.begun = time.time()
            for _ in range(2):
                await self.start_publisher(tasks)
            for share in (1 / 3, 2 / 3):
                await self.until(subscriber, share * self.blocks)
                active = await self.stage.kill_active(self.publishers)
                self.stage.tell(f"killed {active.name}, the active one, at its block {active.last['given']}")
                if share < 0.5:
                    await self.start_publisher(tasks)
            await self.until(subscriber, self.blocks)
            for publisher in self.publishers:
                if publisher.process.stdin is not None:
                    publisher.process.stdin.close()
        return self.report(subscriber.last)

    async def until(self, subscriber: Watched, blocks: float) -> None:
        """Wait for the subscriber to have so many blocks."""
        await self.stage.until(subscriber, blocks, self.blocks, self.publishers, "block")

    def report(self, last: dict[str, Any]) -> bool:
        """The outcome in lines that a script can read."""
        same = filecmp.cmp(self.trades, self.output, shallow=False)
        acked = max(p.last.get("acked", 0) for p in self.publishers)
        good = same and last["gaps"] == last["duplicates"] == 0 and acked == last["received"] == self.blocks
        self.stage.tell("done")
        report(
            bus=self.bus, sent=f"{self.blocks} blocks, {self.blocks * BLOCK} events", acked=acked,
            received=last["received"], duplicates=last["duplicates"], gaps=last["gaps"],
            longest_pause=self.stage.longest_pause, elapsed=f"{time.time() - self.stage.begun:.1f} s",
            files="identical" if same else "DIFFERENT",
        )  # fmt: skip
        return good


def main() -> int:
    """The command line; a role other than demo is how the demo starts itself."""
    if sys.argv[1:2] == ["engine"]:
        del sys.argv[1]
        from . import demo_engine, experiment

        return experiment.main() if "--full" in sys.argv else demo_engine.main()
    parser = argparse.ArgumentParser(prog="esp demo", description=__doc__)
    parser.add_argument("--role", choices=("demo", "publisher", "subscriber"), default="demo")
    parser.add_argument("--bus", default="embedded")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the bus, as in its cfg file")
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--run", type=int, default=0)
    parser.add_argument("--trades", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--begun", type=float, default=0.0)
    parser.add_argument("--blocks", type=int, default=0)
    given = parser.parse_args()
    if given.role != "demo":
        logging.getLogger("esp_pubsub").setLevel(logging.ERROR)  # the demo tells what happens in its own words
    settings = read_settings(given.settings)
    if settings is None:
        parser.error("what follows the options is key=value, such as hostport=host:port")
    opening = init(given.bus, config=None, on_notice=None, **settings)
    if given.role == "publisher":
        asyncio.run(publish(opening, given.run, given.trades, given.begun))
    elif given.role == "subscriber":
        asyncio.run(subscribe(opening, given.run, given.output, given.blocks))
    else:
        with tempfile.TemporaryDirectory(prefix="esp-demo-") as place:
            return 0 if asyncio.run(Demo(Path(place), given.events, given.bus, given.settings).run()) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
