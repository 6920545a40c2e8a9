"""Spark under chaos: a group publishes, a driver has two effects of what it reads, and all of them are harmed at once.

The driver (see spark_driver.py) keeps rows in a table and publishes them on another topic. What both hold when nothing
happens follows from the group's input; whatever was killed, they must hold exactly that, and the topic in that order.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from esp_pubsub.notices import InputDiffers, Missed, Notice

from .buses import Bus
from .process import SCHEMA, Job, block
from .run import Process, Report, Run

RATE, SECONDS = 60, 40.0  # blocks a second, and for how long
ROWS_A_BATCH = 500
LIFE = 600.0  # seconds that one driver may take at most
LOCAL, CLUSTER = "local[2,4]", "local-cluster[2,1,512]"
POINTS = {
    "kept": "the blocks have their ids and are in the ledger, and none is on the bus",
    "sent": "they are on the bus, and the ledger does not know it yet",
    "written": "the function has written its rows, and nothing of that is committed",
    "noted": "rows and note are committed, and Spark does not know it yet",
}


@dataclass
class DriverJob(Job):
    """What a driver has to do."""

    place: str = ""
    """Where checkpoint and database are, of all drivers of the run."""
    master: str = LOCAL
    dies: str = ""
    """The point at which it kills itself, if at any."""
    passes: int = 0
    """How often it gets through there before that."""
    checkpoint: str = "checkpoint"
    """In which folder of the place it is."""
    rows: int = ROWS_A_BATCH

    @property
    def database(self) -> str:
        return str(Path(self.place) / "effects.db")

    @property
    def results(self) -> str:
        """The window to which it publishes."""
        return f"{self.window}-results"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.spark_driver", json.dumps(asdict(self))]


class SparkRun(Run):
    """A run with drivers, of which one is there at a time."""

    def __init__(self, bus: Bus, fault: str, seed: int, members: int) -> None:
        super().__init__(bus, fault, seed, members, SECONDS)
        bus.progress = LIFE  # Spark has the machine: how soon publishers go on is judged where they have it
        self.rate = RATE
        self.blocks = int(RATE * SECONDS)
        self._job = replace(self._job, blocks=self.blocks, rate=self.rate)
        values = {**asdict(self._job), "role": "driver", "name": "driver", "place": str(self.place)}
        self.driver_job = DriverJob(**values)
        self.drivers: list[Process] = []

    async def start_driver(self, **more: Any) -> Process:
        driver = await self.start(replace(self.driver_job, **more))
        self.drivers.append(driver)
        return driver

    async def ended(self, driver: Process) -> None:
        """Wait for the end of a driver, and of all that was below it."""
        if not await self.until(lambda: driver.process.returncode is not None, LIFE):
            self.report.wrong.append(f"a driver was still there after {LIFE:g} s")
        end_all_of(driver)

    async def finish(self) -> None:
        """A driver that nobody harms comes to the end."""
        driver = await self.start_driver()
        await self.ended(driver)
        if not driver.finished:
            self.report.wrong.append(f"a driver ended with code {driver.process.returncode}, and not at the end")

    def end_all(self) -> None:
        for driver in self.drivers:
            end_all_of(driver)
        super().end_all()


def below(driver: Process) -> Iterator[tuple[int, str]]:
    """The processes of a driver, dead or not: number, and how it was started."""
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with suppress(OSError):  # it has just ended
                session = int((place / "stat").read_text().rpartition(")")[2].split()[3])
                if session == driver.process.pid:
                    yield int(place.name), (place / "cmdline").read_text().replace("\0", " ")


def kill(number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def end_all_of(driver: Process) -> None:
    for number, _ in below(driver):
        kill(number)


async def fail_over(run: Run) -> None:
    """Again and again the active publisher is killed, and another one started."""
    while True:
        await run.pause(4.0, 10.0)
        active = await run.active()
        run.harmed("publisher")
        active.kill()
        await run.start_member()


async def at_points(run: SparkRun) -> None:
    """The driver dies at two of the points."""
    for point in run.dice.sample(sorted(POINTS), 2):
        driver = await run.start_driver(dies=point, passes=run.dice.randint(0, 2))
        await run.ended(driver)
        if driver.process.returncode != -signal.SIGKILL:
            run.report.wrong.append(f"the driver that was to die when {POINTS[point]} lived on")
        driver.killed = True
        run.harmed(f"driver at {point}")
    await run.finish()


async def at_any_time(run: SparkRun) -> None:
    """The driver is killed whenever it is, with its JVM and without; what it leaves goes on beside the next one."""
    for _ in range(2):
        driver = await run.start_driver()
        if run.dice.random() < 0.8:
            await run.until(lambda driver=driver: any("batch" in said for said in driver.said), LIFE)
        await run.pause(0.0, 4.0)
        run.harmed("driver")
        driver.kill()
        if run.dice.random() < 0.5:
            end_all_of(driver)
    await run.finish()


async def harm_below(run: SparkRun, master: str, what: str, times: int) -> None:
    """Processes of a driver are killed below it. It may end by that, and is started again."""
    driver = await run.start_driver(master=master)
    for _ in range(times):
        begun = len(driver.said)
        await run.until(
            lambda driver=driver, begun=begun: len(driver.said) > begun or driver.process.returncode is not None, LIFE
        )
        await run.pause(0.0, 1.0)
        found = [number for number, command in below(driver) if what in command]
        if found and driver.alive and not driver.finished:
            run.harmed(what)
            kill(run.dice.choice(found))
        await run.until(lambda driver=driver: driver.process.returncode is not None, 1.0)
        if driver.process.returncode is not None and not driver.finished:
            driver.killed = True
            run.harmed("driver, by that")
            driver = await run.start_driver(master=master)
    await run.ended(driver)
    driver.killed = True  # what its log says of the dead is no fault
    if what not in run.report.faults:
        run.report.wrong.append(f"nothing of {what} was there to be killed")
    if not driver.finished:
        await run.finish()


async def workers(run: SparkRun) -> None:
    """Python processes that plan and read."""
    await harm_below(run, LOCAL, "pyspark", 4)


async def executors(run: SparkRun) -> None:
    """Executors, each a JVM with its Python processes."""
    await harm_below(run, CLUSTER, "CoarseGrainedExecutorBackend", 2)


async def begun(run: SparkRun, batches: int) -> None:
    """A driver does so many batches, or comes to the end, and is killed."""
    driver = await run.start_driver()
    await run.until(lambda: driver.finished or sum("batch" in said for said in driver.said) >= batches, LIFE)
    driver.kill()
    end_all_of(driver)


def copied(run: SparkRun, source: str, target: str) -> None:
    shutil.rmtree(run.place / target, ignore_errors=True)
    shutil.copytree(run.place / source, run.place / target)


def is_refused(driver: Process) -> bool:
    return any("refused" in said for said in driver.said)


async def checkpoint_restored(run: SparkRun) -> None:
    """A checkpoint that is older than the database is put back, and refused. With the right one the query goes on."""
    await begun(run, run.dice.randint(1, 2))
    copied(run, "checkpoint", "backup")
    await begun(run, run.dice.randint(2, 3))
    copied(run, "checkpoint", "newest")
    copied(run, "backup", "checkpoint")
    run.harmed("checkpoint")
    driver = await run.start_driver(rows=ROWS_A_BATCH + run.dice.randint(10, 100))
    await run.ended(driver)
    driver.killed = True
    if not is_refused(driver):
        run.report.wrong.append("a driver with a checkpoint that is older than the database was not refused")
    copied(run, "newest", "checkpoint")
    await run.finish()


async def checkpoint_copied(run: SparkRun) -> None:
    """Two drivers go on from one checkpoint and its copy, with batches of their own. One comes to the end."""
    await begun(run, run.dice.randint(1, 2))
    copied(run, "checkpoint", "copy")
    run.harmed("checkpoint")
    others: dict[str, Any] = {"checkpoint": "copy", "rows": ROWS_A_BATCH + run.dice.randint(10, 100)}
    both = [await run.start_driver(), await run.start_driver(**others)]
    for driver in both:
        await run.ended(driver)
        driver.killed = True
    for more in ({}, others):  # who met the other one at the database may have ended by that
        if any(driver.finished for driver in run.drivers[1:]):
            break
        driver = await run.start_driver(**more)
        await run.ended(driver)
        driver.killed = True
    else:
        run.report.wrong.append("no driver came to the end")


FAULTS: dict[str, Callable[[SparkRun], Awaitable[None]]] = {
    "spark-points": at_points,
    "spark-driver": at_any_time,
    "spark-workers": workers,
    "spark-executors": executors,
    "spark-restored": checkpoint_restored,
    "spark-copied": checkpoint_copied,
}


async def play(bus: Bus, fault: str, seed: int, members: int) -> Report:
    """One run."""
    run = SparkRun(bus, fault, seed, members)

    async def harm(_: Run) -> None:
        failing = asyncio.create_task(fail_over(run))
        try:
            await FAULTS[fault](run)
        finally:
            failing.cancel()
            await asyncio.wait([failing])
        await run.until(lambda: bool(run.leaders()))
        await compare(run)

    return await run.play(harm)


async def compare(run: SparkRun) -> None:
    """Table and topic against what follows from the input."""
    job = run.driver_job
    expected = [row for id in range(1, run.blocks + 1) for row in block(job.seed, 0, id)]
    with closing(sqlite3.connect(job.database)) as connection:
        table = connection.execute("SELECT id, text FROM effect ORDER BY id").fetchall()
    if table != expected:
        run.report.wrong.append(f"the table has {len(table)} rows, {len(set(table))} different, of {len(expected)}")
    notices: list[Notice] = []
    topic = await read(replace(job, options=run.drivers[-1].job.options), expected[-1][0], notices)
    if topic != [(id, f"seen {text}") for id, text in expected]:
        run.report.wrong.append(f"the topic has {len(topic)} rows, {len(set(topic))} different, of {len(expected)}")
    run.report.wrong += [str(notice) for notice in notices if isinstance(notice, InputDiffers | Missed)]


async def read(job: DriverJob, last: int, notices: list[Notice]) -> list[tuple[Any, ...]]:
    """What a subscriber gets of the results, and a moment more."""
    rows: list[tuple[Any, ...]] = []
    async with (
        job.client(notices.append) as client,
        client.subscriber(f"dfESP://{job.results}", SCHEMA, side="in", start="earliest") as subscriber,
    ):
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.5 if rows and rows[-1][0] == last else 60.0):
                    rows += (await anext(subscriber)).rows()
    return rows
