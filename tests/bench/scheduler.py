"""The scheduler on the embedded bus, two processes of it: `make bench NAME=scheduler` (TIMES=10 for fewer kills).

What is due is delivered to a window, and a subscriber in this process notes when it came. Nothing stands beside it yet.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from statistics import median

from aiohttp import web

import esp_pubsub as esp
from esp_pubsub import http
from esp_pubsub.scheduler.app import SchedulerOptions, running

from .failover import p99
from .report import Crew, Member, Report, main, say

PLACE = "dfESP://bench:5555/scheduler/main"
DUE, RATE, KILLED, CALLED = 10_000, 50_000, 1_000, 5_000
TIMES = int(os.environ.get("TIMES", "50"))
_LIST = 1_000


async def schedule(directory: str) -> None:
    """One process of the scheduler, until killed. It says that it is there, and when it leads."""
    async with (
        esp.init(dir=directory, on_notice=lambda notice: None) as client,
        running(client, PLACE, SchedulerOptions(port=0, private=True)) as process,
    ):
        say(ready=os.getpid())
        say(role=process.engine.stats.role)
        async for change in process.engine.roles():
            say(role=change.role)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Member, esp.Client]]:
    """Two processes, of which the first one leads, and a client of their bus. They know the tenant t."""
    async with Crew("scheduler") as crew:
        first = await crew.start("schedule")
        while (await first.told())["role"] != "active":
            pass
        await crew.start("schedule")
        async with esp.init(dir=crew.directory, on_notice=lambda notice: None) as client:
            await client.scheduler(PLACE).register("t", "MESSAGING", {"window": "Fires"})
            yield first, client


class Fires:
    """When each event came, by its id, and when it was due."""

    def __init__(self, client: esp.Client) -> None:
        self.late: dict[str, float] = {}
        self.began = self.ended = 0.0
        self.doubled = 0
        self.reads = asyncio.Event()
        self._client = client

    async def read(self, count: int) -> None:
        """So many events."""
        async with self._client.subscriber(f"{PLACE}/Fires", start="latest") as subscriber:
            self.reads.set()
            async for block in subscriber:
                at = time.time()
                for row in block.rows():
                    self.doubled += row[3] in self.late
                    self.late[row[3]] = at - row[5] / 1e6
                self.began, self.ended = self.began or at, at
                if len(self.late) >= count:
                    return


async def fired(client: esp.Client, due: list[float]) -> Fires:
    """Schedule events at these times, and wait until all have come."""
    fires = Fires(client)
    reading = asyncio.ensure_future(fires.read(len(due)))
    await fires.reads.wait()
    scheduler = client.scheduler(PLACE)
    for first in range(0, len(due), _LIST):
        answers = await scheduler.schedule([
            {"tenant": "t", "id": str(first + at), "payload": "x" * 100,
             "eventTime": datetime.fromtimestamp(when, UTC).isoformat()}
            for at, when in enumerate(due[first : first + _LIST])
        ])  # fmt: skip
        assert not [answer for answer in answers if "error" in answer], answers[0]
    await reading
    assert fires.doubled == 0, f"{fires.doubled} came twice"
    return fires


async def lateness() -> float:
    """p99 of the seconds by which events came late that are due within one second."""
    async with pair() as (_, client):
        begin = time.time() + 12
        fires = await fired(client, [begin + at / DUE for at in range(DUE)])
        return p99(list(fires.late.values()))


async def sustained() -> float:
    """Fires a second, of events that are all due at once."""
    async with pair() as (_, client):
        fires = await fired(client, [time.time() + 25] * RATE)
        return len(fires.late) / max(1e-9, fires.ended - fires.began)


async def killed(kill: bool) -> float:
    """p99 of the lateness at 1,000 fires a second, with the leader killed or not."""
    async with pair() as (first, client):
        begin = time.time() + 4
        if kill:
            after = begin + random.uniform(0.5, 2.5) - time.time()  # a moment
            asyncio.get_running_loop().call_later(after, os.kill, first.pid, signal.SIGKILL)
        fires = await fired(client, [begin + at / KILLED for at in range(3 * KILLED)])
        return p99(list(fires.late.values()))


async def called() -> float:
    """HTTP deliveries a second to a server of this process."""
    times: list[float] = []

    async def take(_: web.Request) -> web.Response:
        times.append(time.time())
        return web.Response()

    async with pair() as (_, client), http.serve([web.post("/", take)], open_here=True) as port:
        scheduler, props = client.scheduler(PLACE), {"url": f"http://127.0.0.1:{port}/"}
        await scheduler.register("t", "HTTP", props, {"concurrency": 100})
        at = datetime.fromtimestamp(time.time() + 6, UTC).isoformat()
        for first in range(0, CALLED, _LIST):
            await scheduler.schedule({"tenant": "t", "id": str(first + n), "eventTime": at} for n in range(_LIST))
        while len(times) < CALLED:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.1)
        return CALLED / (times[-1] - times[0])


async def measure(report: Report) -> None:
    """All of it."""
    report.result("lateness of 10,000 events due within a second, p99", await lateness(), "s", 0.25, "lower")
    report.result("fires, a second member following", await sustained(), "/s", 5_000)
    report.result("HTTP deliveries", await called(), "/s", 1_000)
    added = [await killed(True) - await killed(False) for _ in range(TIMES)]
    report.result(f"lateness that a kill adds, 1,000 fires/s, p99, median of {TIMES}", median(added), "s", 0.1, "lower")
    report.result(f"the same, worst of {TIMES}", max(added), "s", better="lower")


if __name__ == "__main__":
    main("scheduler", measure, {"schedule": schedule})
