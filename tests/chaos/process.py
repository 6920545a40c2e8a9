"""A process of a chaos run, started as `python -m tests.chaos.process <job>`: a member of the group, or a reader.

It writes its history to a file, one unbuffered line each, says on its standard output what the parent has to know, and
takes orders on its standard input: `begin`, `hand_over` and `close`. When that ends, so does the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import esp_pubsub as esp
from esp_pubsub import registry
from esp_pubsub.notices import Failure, Missed, Notice
from esp_pubsub.publisher import source_number
from esp_pubsub.testing.history import Confirmed, Delivered, Opened, Published, Record, digest, line, told

SCHEMA, GROUP = "id*:int64,text:string", "feed"
CONFIRM_EVERY = 20

now = time.monotonic


@dataclass
class Job:
    """What one process has to do."""

    role: str
    name: str
    bus: str
    window: str
    """Where it publishes or reads: `host:port/project/query/window`."""
    file: str
    options: dict[str, str] = field(default_factory=dict)
    """What the bus wants to know."""
    election: str | None = "log"
    """None: the one that the bus has of its own, else the log."""
    blocks: int = 0
    seed: int = 0
    run: int = 0
    rate: float = 1_000.0
    begun: float = 0.0
    hold: float = 0.0
    """How much later the last block comes."""
    """When the input began to come in; 0: with the order `begin`."""
    clock_off_by: float = 0.0
    group: str | None = None

    @property
    def source(self) -> int:
        return source_number(f"{self.window}/I/{GROUP}")

    def client(self, on_notice: Callable[[Notice], None]) -> Any:
        registry._BUSES["solace-double"] = "tests.support.solace"
        return esp.init(self.bus, on_notice=on_notice, **self.options)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.process", json.dumps(asdict(self))]


class Log:
    """The history of this process; every line reaches the file at once, so a kill loses none."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, record: Record) -> None:
        os.write(self._fd, line(record).encode())


def say(**what: Any) -> None:
    """One line for the parent."""
    os.write(1, (json.dumps({"at": now(), **what}) + "\n").encode())


def block(seed: int, run: int, id: int) -> list[tuple[int, str]]:
    """The block that follows from the input alone: one to three rows."""
    dice = random.Random(seed * 1_000_003 + run * 7_919 + id)
    return [(id * 10 + n, f"{dice.random():.17f}" * dice.randint(1, 4)) for n in range(dice.randint(1, 3))]


async def orders() -> AsyncIterator[str]:
    """What the parent wants; ends with the parent."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for text in reader:
        yield text.decode().strip()


class Member:
    """One publisher of the group."""

    def __init__(self, job: Job, log: Log) -> None:
        self.job = job
        self.log = log
        self.beginning, self.closing = asyncio.Event(), asyncio.Event()
        self.failure: Exception | None = None
        self.waiting: asyncio.Queue[tuple[esp.Delivery, str]] = asyncio.Queue()

    async def run(self) -> None:
        job = self.job
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.closing.set)
        async with job.client(self.notice) as client:
            publisher = await self.open(client)
            say(ready=True, role=publisher.stats.role)
            work = asyncio.create_task(self.work(publisher))
            closing = asyncio.create_task(self.closing.wait())
            try:
                await asyncio.wait([work, closing], return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    await work
                await publisher.aclose()
                if self.failure is not None:
                    raise self.failure
                self.take_outcomes()
            finally:
                for task in (work, closing):
                    task.cancel()
                await asyncio.gather(work, closing, return_exceptions=True)
        say(closed=True)

    async def open(self, client: esp.Client) -> Any:
        """What it is a member with."""
        failover = esp.Failover(GROUP, run=self.job.run, election=self.job.election)
        return await client.publisher(f"dfESP://{self.job.window}", SCHEMA, failover=failover)

    async def work(self, publisher: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.obey(publisher))
            tasks.create_task(self.tell_roles(publisher))
            tasks.create_task(self.note_outcomes())
            await self.publish(publisher)

    def notice(self, notice: Notice) -> None:
        noted(notice)
        if isinstance(notice, Failure) and notice.failure == "pubsubFail_APIFAIL":
            self.failure = notice.error
            self.closing.set()

    async def publish(self, publisher: Any) -> None:
        """The whole input, from the start: at its pace, or as fast as it goes where it is late."""
        job = self.job
        if not job.begun:
            await self.beginning.wait()
        for id in range(1, job.blocks + 1):
            early = job.begun + id / job.rate + (job.hold if id == job.blocks else 0.0) - now()
            if early > 0:
                await asyncio.sleep(early)
            rows = block(job.seed, job.run, id)
            self.note(id, digest(rows), "unknown")
            delivery = await publisher.inject(rows)
            self.waiting.put_nowait((delivery, digest(rows)))
        say(injected=True)

    def note(self, id: int, content: str, outcome: Any) -> None:
        self.log.write(Published(self.job.name, self.job.source, self.job.run, id, content, outcome, now()))

    async def note_outcomes(self) -> None:
        while True:
            delivery, content = await self.waiting.get()
            while True:
                with contextlib.suppress(esp.DeliveryUnknown):
                    self.note(delivery.id, content, await delivery)
                    break

    def take_outcomes(self) -> None:
        """After a close that flushed, everything is on the bus."""
        while not self.waiting.empty():
            delivery, content = self.waiting.get_nowait()
            self.note(delivery.id, content, "acked")

    async def tell_roles(self, publisher: Any) -> None:
        async for change in publisher.roles():
            say(role=change.role, event=change.event, term=change.term, m=change.m, last=change.last)

    async def obey(self, publisher: Any) -> None:
        async for order in orders():
            if order == "hand_over":
                await publisher.hand_over()
                say(handed_over=True)
            elif order.startswith("begin "):
                self.job.begun = float(order.removeprefix("begin "))
                self.beginning.set()
            elif order == "close":
                self.closing.set()
        os._exit(0)


class Reader:
    """One subscriber of each of its windows, of a group or not. It reads until it is told to close."""

    def __init__(self, job: Job, log: Log) -> None:
        self.job = job
        self.log = log

    async def run(self) -> None:
        job = self.job
        async with job.client(noted) as client:
            subscribers = {name: await self.open(client, name, url) for name, url in self.windows().items()}
            for name in subscribers:
                self.log.write(Opened(name, now()))
            say(ready=True)
            working = [asyncio.create_task(self.read(name, subscriber)) for name, subscriber in subscribers.items()]
            working.append(asyncio.create_task(self.obey()))
            try:
                done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await task
            finally:
                for task in working:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
            say(closed=True, stats=[asdict(subscriber.stats) for subscriber in subscribers.values()])

    def windows(self) -> dict[str, str]:
        """What it reads, by the name of the subscriber in the history."""
        return {self.job.name: f"dfESP://{self.job.window}?side=in"}

    async def open(self, client: esp.Client, name: str, url: str) -> esp.Subscriber:
        return await client.subscriber(
            url, SCHEMA, start=self.start(client), group=self.job.group, on_notice=partial(self.notice, name)
        )

    def start(self, client: esp.Client) -> Literal["earliest", "latest"]:
        """All there is: on a bus that keeps nothing, what comes from now on."""
        return "earliest" if self.job.group or client.bus.capabilities.replay else "latest"

    def is_last(self, got: esp.Block) -> bool:
        """Whether nothing comes after this one."""
        return got.id == self.job.blocks

    def finish(self, name: str, run: int) -> None:
        """A subscriber has come to the end of a run."""
        say(finished=run)

    async def read(self, name: str, subscriber: esp.Subscriber) -> None:
        async for got in subscriber:
            self.log.write(Delivered(name, got.source, got.run, got.id, digest(got.rows()), now()))
            last = self.is_last(got)
            if self.job.group and (last or got.id % CONFIRM_EVERY == 0):
                await self.confirm(name, subscriber, got)
            if last:
                self.finish(name, got.run)

    async def confirm(self, name: str, subscriber: esp.Subscriber, got: esp.Block) -> None:
        try:
            await subscriber.confirm(got)
        except esp.BusError as error:
            say(unconfirmed=str(error))
        else:
            self.log.write(Confirmed(name, got.source, got.run, got.id, now()))

    def notice(self, name: str, notice: Notice) -> None:
        noted(notice)
        self.log.write(told(name, notice, now()))
        if isinstance(notice, Missed) and notice.last == self.job.blocks:
            self.finish(name, notice.run)

    async def obey(self) -> None:
        async for order in orders():
            if order == "close":
                return
        os._exit(0)


def noted(notice: Notice) -> None:
    logging.getLogger("chaos").warning("%s", notice)


def _step_clock(seconds: float) -> None:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


def _root(error: BaseException) -> BaseException:
    return _root(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def main(kind: type[Job], roles: Mapping[str, Callable[[Any, Log], Any]]) -> None:
    """Do the job that stands on the command line."""
    job = kind(**json.loads(sys.argv[1]))
    if job.clock_off_by:
        _step_clock(job.clock_off_by)
    logging.basicConfig(level=logging.INFO, format=f"%(relativeCreated)6d {job.name} %(name)s %(message)s")
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # it shows a traceback for each link that is lost
    log = Log(job.file)
    try:
        asyncio.run(roles[job.role](job, log).run())
    except (esp.EspError, ExceptionGroup) as error:
        why = _root(error)
        if not isinstance(why, esp.EspError):
            raise
        logging.getLogger("chaos").error("left: %r", why)
        say(left=type(why).__name__, text=str(why))


if __name__ == "__main__":
    main(Job, {"member": Member, "reader": Reader})
