"""Sums in Spark of what a failover group publishes, one of which is killed: `make demo-spark`.

Two processes publish the same generated file of trades as one group, on the embedded bus. Spark adds them up by symbol,
batch after batch, into a table of SQLite. Half way the active publisher is killed. Then one publisher that
nobody harms publishes the same file on another bus, Spark adds that up too, and both tables are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql.functions import expr

from esp_pubsub.cli.demo import BLOCK, SCHEMA, URL, Demo
from esp_pubsub.spark_bridge import Ledger, foreach_batch

from .install import java
from .spark import session

EVENTS = 400_000
PATIENCE = 120.0
Row = tuple[str, int, int, int]


class Totals:
    """A query, and the table it adds to."""

    def __init__(self, spark: Any, bus: Path, place: Path) -> None:
        place.mkdir()
        self.database = place / "totals.db"
        self.batches = 0
        with closing(sqlite3.connect(self.database)) as connection:
            connection.execute("CREATE TABLE totals (symbol PRIMARY KEY, trades, quantity, tenths)")
        options = {"url": URL, "side": "in", "bus.dir": str(bus), "schema": SCHEMA}
        stream = spark.readStream.format("esp").options(**options).load()
        writer = foreach_batch(stream, self.add, ledger=lambda: Ledger(sqlite3.connect(self.database)))
        self.query = writer.option("checkpointLocation", str(place / "checkpoint")).start()

    def add(self, batch: Any, batch_id: int, connection: sqlite3.Connection) -> None:
        """In one transaction with the note that this batch was added."""
        value = "sum(cast(price * 10 AS bigint) * quantity)"
        rows = batch.groupBy("symbol").agg(*map(expr, ("count(*)", "sum(quantity)", value))).collect()
        connection.executemany(
            "INSERT INTO totals VALUES (?, ?, ?, ?) ON CONFLICT (symbol) DO UPDATE SET trades = trades + "
            "excluded.trades, quantity = quantity + excluded.quantity, tenths = tenths + excluded.tenths",
            [tuple(row) for row in rows],
        )
        self.batches += 1

    def rows(self) -> list[Row]:
        """The table as it is now."""
        with closing(sqlite3.connect(self.database)) as connection:
            return connection.execute("SELECT * FROM totals ORDER BY symbol").fetchall()

    async def until(self, trades: float) -> None:
        """Wait until so many trades were added."""
        async with asyncio.timeout(PATIENCE):
            while sum(row[1] for row in self.rows()) < trades:
                if self.query.exception() is not None:
                    raise self.query.exception()
                await asyncio.sleep(0.05)


@contextmanager
def quietly() -> Iterator[None]:
    """What Java says, now and later, is not for whoever looks at the demo: who is started in here has no stderr."""
    errors, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(errors, 2)
        os.close(errors)
        os.close(nowhere)


class SparkDemo(Demo):
    """The other demo's publishers, with Spark behind them."""

    def __init__(self, place: Path, events: int) -> None:
        super().__init__(place, events, "embedded", ())
        self.place = place

    async def play(self) -> bool:
        """The whole demo; True if both tables are equal, and right."""
        events = self.blocks * BLOCK
        with ExitStack() as stack:
            with quietly():
                spark = stack.enter_context(session(self.place / "spark"))
            disturbed = Totals(spark, self.place / "bus", self.place / "disturbed")
            async with asyncio.TaskGroup() as tasks:
                self.begun = time.time()
                for _ in range(2):
                    await self.start_publisher(tasks)
                while max(publisher.last.get("given", 0) for publisher in self.publishers) < self.blocks / 2:
                    await self.news()
                await self.kill_active()
                await disturbed.until(events)
                self.tell(f"Spark has added up {events} trades in {disturbed.batches} batches")
                self.end_publishers()
            disturbed.query.stop()
            self.tell("once more, and nobody is killed")
            self.settings = [f"dir={self.place / 'quiet'}"]
            quiet = Totals(spark, self.place / "quiet", self.place / "undisturbed")
            async with asyncio.TaskGroup() as tasks:
                await self.start_publisher(tasks)
                await quiet.until(events)
                self.end_publishers()
            quiet.query.stop()
        return self.compare(disturbed.rows(), quiet.rows(), events)

    def end_publishers(self) -> None:
        for publisher in self.publishers:
            if publisher.process.stdin is not None:
                publisher.process.stdin.close()

    def compare(self, disturbed: list[Row], quiet: list[Row], events: int) -> bool:
        """The outcome, for people."""
        self.tell("done")
        lines = [f"{'symbol':>14} {'trades':>10} {'quantity':>12} {'value':>16}"]
        for symbol, trades, quantity, tenths in disturbed:
            lines.append(f"{symbol:>14} {trades:>10} {quantity:>12} {tenths / 10:>16.1f}")
        added = sum(row[1] for row in disturbed)
        lines += [
            f"{'published':>14}: {events} trades, by a group of which one member was killed",
            f"{'added up':>14}: {added} trades",
            f"{'undisturbed':>14}: {'equal' if disturbed == quiet else 'DIFFERENT'}",
        ]
        sys.stdout.write("\n".join([*lines, ""]))
        return disturbed == quiet and added == events


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.demo_spark", description=__doc__)
    parser.add_argument("--events", type=int, default=EVENTS)
    given = parser.parse_args()
    sys.stdout.write("starting Spark\n")
    java()  # installed now, if it has to be
    with tempfile.TemporaryDirectory(prefix="esp-demo-") as place:
        return 0 if asyncio.run(SparkDemo(Path(place), given.events).run()) else 1


if __name__ == "__main__":
    sys.exit(main())
