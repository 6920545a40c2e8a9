"""A Spark driver of a chaos run, started as `python -m tests.chaos.spark_driver <job>`.

It reads the group's topic, from its checkpoint on, until the last block has come, and has two effects that are to
happen once: rows in a table, by the ledger, and blocks on another topic. Told to, it kills itself at one of POINTS.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from esp_pubsub.spark_bridge import Ledger, foreach_batch, publish_batch
from tests.support.spark import session

from .process import SCHEMA, block, now
from .spark import DriverJob


class Driver:
    """One life of the driver. `parent`: where it hears us."""

    def __init__(self, job: DriverJob, parent: int) -> None:
        self.job = job
        self.parent = parent
        self.left = job.passes
        self.last = block(job.seed, 0, job.blocks)[-1][0]
        self.finished = threading.Event()
        self.options = {"bus": job.bus, "side": "in", **{f"bus.{key}": str(each) for key, each in job.options.items()}}

    def say(self, **what: Any) -> None:
        os.write(self.parent, (json.dumps({"at": now(), **what}) + "\n").encode())

    def comes_to(self, point: str) -> None:
        if point == self.job.dies:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def run(self) -> None:
        job = self.job
        with closing(sqlite3.connect(job.database)) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS effect (id, text)")
        read = {**self.options, "url": f"dfESP://{job.window}", "maxRowsPerTrigger": str(job.rows)}
        with session(Path(job.place), job.master, {"spark.executor.memory": "512m"}) as spark:
            stream = spark.readStream.format("esp").options(schema=SCHEMA, **read).load()
            writer = foreach_batch(stream, self.work, ledger=lambda: Noting(self))
            query = writer.option("checkpointLocation", str(Path(job.place) / job.checkpoint)).start()
            while not self.finished.wait(0.1):
                failure = query.exception()
                if failure is not None and "BatchDiffers" in str(failure):
                    self.say(refused=0)
                    return
                if failure is not None:
                    raise RuntimeError(str(failure))  # which asks Java for its text, and that will be gone
            query.stop()
        self.say(finished=0)

    def work(self, batch: Any, batch_id: int, connection: sqlite3.Connection) -> None:
        """Both effects. The blocks go first: who has written to a database of SQLite's keeps others from it."""
        seen, url = batch.selectExpr("id", "concat('seen ', text) AS text"), f"dfESP://{self.job.results}"
        publish_batch(
            seen, url, batch_id, order_by=["id"], schema=SCHEMA, block_size=64, ledger=lambda: Keeping(self),
            **self.options,
        )  # fmt: skip
        rows = [tuple(row) for row in batch.collect()]
        connection.executemany("INSERT INTO effect VALUES (?, ?)", rows)
        self.say(batch=batch_id, rows=len(rows))
        self.comes_to("written")


class Keeping(Ledger):
    """That of the blocks."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(sqlite3.connect(driver.job.database))
        self.driver = driver

    def waiting(self, stream: str) -> list[Any]:
        found = super().waiting(stream)
        self.driver.comes_to("kept")
        return found

    def published(self, stream: str, last: int) -> None:
        self.driver.comes_to("sent")
        super().published(stream, last)


class Noting(Ledger):
    """That of the table."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(sqlite3.connect(driver.job.database))
        self.driver = driver

    def close(self) -> None:
        """The transaction is over."""
        last = self.connection.execute("SELECT max(id) FROM effect").fetchone()[0]
        super().close()
        self.driver.comes_to("noted")
        if last == self.driver.last:
            self.driver.finished.set()


def main() -> None:
    os.setsid()  # all that is below it can be found by this, whoever of them is dead
    parent = os.dup(1)
    os.dup2(2, 1)  # what Java says is not for the parent
    Driver(DriverJob(**json.loads(sys.argv[1])), parent).run()


if __name__ == "__main__":
    main()
