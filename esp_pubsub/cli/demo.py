"""Run your publisher twice, kill either one: `python -m esp_pubsub.cli.demo`.

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
import json
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
        say(publisher.stats)


async def tell(publisher: Publisher) -> None:
    """All the while, how it is."""
    while True:
        say(publisher.stats)
        await asyncio.sleep(0.1)


def say(stats: PublisherStats) -> None:
    """One line for the process that watches."""
    print(json.dumps({"role": stats.role, "given": stats.given, "acked": stats.acked, "term": stats.term}), flush=True)


async def subscribe(opening: Opening[Client], run: int, output: Path, blocks: int) -> None:
    """Everything that comes, as CSV, in the order it comes; gaps and doubles are counted by the ids."""
    last = gaps = doubles = 0
    longest, before, told = 0.0, time.perf_counter(), 0.0
    with output.open("w", newline="") as file:
        writer = csv.writer(file)
        async with (
            opening as client,
            client.subscriber(URL, side="in", start="earliest", group="demo") as subscriber,
        ):
            print(json.dumps({"received": 0}), flush=True)
            async for block in subscriber:
                if block.run != run:
                    continue
                now = time.perf_counter()
                longest, before = max(longest, now - before) if last else 0.0, now
                doubles += block.id <= last
                gaps += block.id > last + 1
                last = block.id
                writer.writerows(block.rows())
                if now - told > 0.1 or last == blocks:
                    told = now
                    await subscriber.confirm(block)
                    news = {"received": last, "gaps": gaps, "doubles": doubles, "pause": longest}
                    print(json.dumps(news), flush=True)
                    longest = 0.0
                if last == blocks:
                    return


class Watched:
    """A process of the demo and the last thing it said."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, heard: asyncio.Event) -> None:
        self.name = name
        self.process = process
        self.last: dict[str, Any] = {}
        self.heard = heard

    @property
    def leads(self) -> bool:
        """Whether it is there and says that it is the active one."""
        return self.last.get("role") == "active" and self.process.returncode is None

    async def listen(self) -> None:
        """Keep the last thing it said, until it ends."""
        if self.process.stdout is not None:
            async for line in self.process.stdout:
                self.last.update(json.loads(line))
                self.heard.set()
        await self.process.wait()
        self.heard.set()


class Demo:
    """The process that starts, kills and watches the others."""

    def __init__(self, place: Path, events: int, bus: str, settings: Sequence[str]) -> None:
        self.blocks = -(-events // BLOCK)
        self.bus = bus
        self.settings = settings or [f"dir={place / 'bus'}"] * (bus == "embedded")
        self.trades, self.output = place / "trades.csv", place / "received.csv"
        self.publishers: list[Watched] = []
        self.processes: list[asyncio.subprocess.Process] = []
        self.pauses: list[float] = []
        self.live = sys.stdout.isatty()
        self.drawn = 0
        self.heard = asyncio.Event()  # one of them said something, or ended
        self.begun = time.time()
        self.run_number = int(self.begun)

    async def start(self, tasks: asyncio.TaskGroup, role: str, *arguments: object) -> Watched:
        """Another process of this file."""
        command = [sys.executable, "-m", "esp_pubsub.cli.demo", "--role", role, "--run", self.run_number, *arguments]
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            "--bus",
            self.bus,
            "--",
            *self.settings,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.processes.append(process)
        watched = Watched(f"{role} {process.pid}", process, self.heard)
        tasks.create_task(watched.listen())
        return watched

    async def start_publisher(self, tasks: asyncio.TaskGroup) -> None:
        """Another member of the group."""
        watched = await self.start(tasks, "publisher", "--trades", self.trades, "--begun", self.begun)
        self.publishers.append(watched)
        self.tell(f"started {watched.name}")

    async def run(self) -> bool:
        """The whole demo; True if nothing was lost or doubled."""
        write_trades(self.trades, self.blocks * BLOCK)
        try:
            return await self.play()
        finally:
            for process in self.processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    async def play(self) -> bool:
        """Start, kill, start, kill, and compare."""
        async with asyncio.TaskGroup() as tasks:
            subscriber = await self.start(tasks, "subscriber", "--output", self.output, "--blocks", self.blocks)
            await self.news()
            self.begun = time.time()
            for _ in range(2):
                await self.start_publisher(tasks)
            for share in (1 / 3, 2 / 3):
                await self.until(subscriber, share * self.blocks)
                await self.kill_active()
                if share < 0.5:
                    await self.start_publisher(tasks)
            await self.until(subscriber, self.blocks)
            for publisher in self.publishers:
                if publisher.process.stdin is not None:
                    publisher.process.stdin.close()
        return self.report(subscriber.last)

    async def until(self, subscriber: Watched, id: int | float) -> None:
        """Wait for the subscriber to have a block, drawing what happens meanwhile."""
        while subscriber.last.get("received", 0) < id:
            if subscriber.process.returncode is not None:
                raise RuntimeError(f"{subscriber.name} ended with code {subscriber.process.returncode}")
            await self.news()
            self.pauses.append(subscriber.last.get("pause", 0.0))
            self.draw(subscriber.last)

    async def news(self) -> None:
        """Wait until a process says something, or ends."""
        self.heard.clear()
        async with asyncio.timeout(60):
            await self.heard.wait()

    async def kill_active(self) -> None:
        """End the publisher that says it is active, without a word of warning."""
        while not (leading := [p for p in self.publishers if p.leads]):
            await self.news()  # the subscriber can have its blocks before it says so
        active = leading[0]
        active.process.kill()
        active.last["role"] = "killed"
        self.tell(f"killed {active.name}, the active one, at its block {active.last['given']}")

    def tell(self, text: str) -> None:
        """One line of the log."""
        self.erase()
        print(f"{time.time() - self.begun:6.2f} s  {text}", flush=True)

    def draw(self, last: dict[str, Any]) -> None:
        """On a terminal: who is active, how far everybody is, the longest pause the subscriber has seen."""
        if not self.live:
            return
        self.erase()
        done = round(40 * last["received"] / self.blocks)
        pause = max(self.pauses) * 1000
        lines = [
            *(f"  {p.name:<18} {p.last.get('role', '-'):<9} block {p.last.get('given', 0)}" for p in self.publishers),
            f"  subscriber [{'#' * done}{'.' * (40 - done)}] block {last['received']} of {self.blocks}",
            f"  gaps {last.get('gaps', 0)}, duplicates {last.get('doubles', 0)}, longest pause {pause:.1f} ms",
        ]
        print("\n".join(lines), flush=True)
        self.drawn = len(lines)

    def erase(self) -> None:
        """Take the last drawing off the screen."""
        if self.drawn:
            print(f"\x1b[{self.drawn}A\x1b[J", end="")
            self.drawn = 0

    def report(self, last: dict[str, Any]) -> bool:
        """The outcome in lines that a script can read."""
        same = filecmp.cmp(self.trades, self.output, shallow=False)
        acked = max(p.last.get("acked", 0) for p in self.publishers)
        good = same and last["gaps"] == last["doubles"] == 0 and acked == last["received"] == self.blocks
        self.tell("done")
        for name, value in (
            ("bus", self.bus), ("sent", f"{self.blocks} blocks, {self.blocks * BLOCK} events"), ("acked", acked),
            ("received", last["received"]), ("duplicates", last["doubles"]), ("gaps", last["gaps"]),
            ("longest pause", f"{max(self.pauses) * 1000:.1f} ms"), ("elapsed", f"{time.time() - self.begun:.1f} s"),
            ("files", "identical" if same else "DIFFERENT"),
        ):  # fmt: skip
            print(f"{name:>14}: {value}")
        return good


def main() -> int:
    """The command line; a role other than demo is how the demo starts itself."""
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
    settings = {key: value for key, equals, value in (each.partition("=") for each in given.settings) if equals}
    if len(settings) < len(given.settings):
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
