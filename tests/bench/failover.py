"""What a subscriber sees of a failover on the embedded bus, and what a group costs: `make bench NAME=failover`.

Members publish 1,000 blocks a second, paced by one clock. The active one is killed, stopped or asked to hand over, 50
times each (TIMES); the gap is the longest pause between two blocks that the subscriber saw around that. Then a
publisher without a group and the active of a group of two publish flat out, each with a core of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import esp_pubsub as esp
from esp_pubsub.failover.ballot import SILENT_BEATS
from esp_pubsub.failover.log_election import BEAT_EVERY
from tests.bench.report import URL, Crew, Member, Report, heard, main, say
from tests.bench.work import hand_over_when_asked, note_times, say_roles

SCHEMA = "id*:int64,text:string"
RATE = 1_000
TIMES = int(os.environ.get("TIMES", "50"))
FLAT_OUT = 200_000
SILENCE = BEAT_EVERY * (SILENT_BEATS + 2)


async def member(directory: str, begun: float) -> None:
    """Publish by the common clock until ended; SIGUSR1 hands over; tell of role changes and of having caught up."""
    async with esp.init(dir=directory) as client:
        publisher = await client.publisher(URL, SCHEMA, failover=esp.Failover("bench"))
        say(ready=os.getpid())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say_roles(publisher))
            tasks.create_task(hand_over_when_asked(publisher))
            number, told = 0, False
            while True:
                due = int((time.monotonic() - begun) * RATE)
                while number < due:
                    number += 1
                    await publisher.inject([(number, "x" * 60)])
                stands_by = publisher.stats.role != "active" and publisher.stats.on_bus >= number - RATE // 4
                if stands_by and not told:
                    say(stands_by=number)
                told = stands_by
                await asyncio.sleep(1 / RATE)


async def watch(directory: str) -> None:
    """Note when each block came; on SIGUSR1 write it all out and end."""
    async with esp.init(dir=directory) as client, client.subscriber(URL, side="in", start="earliest") as subscriber:
        await note_times(subscriber, Path(directory, "times.json"))


async def flat_out(directory: str, grouped: bool, core: int) -> None:
    """Publish as fast as it goes; tell rate and CPU."""
    os.sched_setaffinity(0, {core})
    async with esp.init(dir=directory) as client:
        failover = esp.Failover("flat") if grouped else None
        async with client.publisher(URL, SCHEMA, failover=failover) as publisher:
            await heard()
            used, begun = time.process_time(), time.perf_counter()
            for number in range(1, FLAT_OUT + 1):
                await publisher.inject([(number, "x" * 60)])
            await publisher.flush(60)
            seconds = time.perf_counter() - begun
            say(rate=FLAT_OUT / seconds, cpu=time.process_time() - used)
            await asyncio.Event().wait()


async def until(member: Member, key: str, value: Any = None) -> dict[str, Any]:
    """Read on until a member says this."""
    while True:
        said = await member.told()
        if key in said and value in (None, said[key]):
            return said


async def gaps(how: signal.Signals) -> list[float]:
    """The longest pause around each of so many switches, in ms."""
    async with Crew("failover") as crew:
        watcher = await crew.start("watch")
        begun = time.monotonic()
        active = await crew.start("member", begun=begun)
        await until(active, "role", "active")
        standby = await crew.start("member", begun=begun)
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
                active, standby = standby, await crew.start("member", begun=begun)
            await until(standby, "stands_by")
        os.kill(watcher.pid, signal.SIGUSR1)
        await until(watcher, "written")
        seen = json.loads(Path(crew.directory, "times.json").read_text())
        return [_longest(seen, at - 0.05, at + SILENCE + 0.5) for at in events]


def _longest(seen: list[float], begin: float, end: float) -> float:
    near = [at for at in seen if begin <= at <= end]
    return max(after - before for before, after in pairwise(near)) * 1000


async def pidfd_latency() -> list[float]:
    """From SIGKILL to the loop's callback, in ms: the bare mechanism of a death notice."""
    found = []
    for _ in range(TIMES):
        process = await asyncio.create_subprocess_exec("sleep", "60")
        fd = os.pidfd_open(process.pid)
        noticed = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, noticed.set)
        begun = time.perf_counter()
        process.kill()
        await noticed.wait()
        found.append((time.perf_counter() - begun) * 1000)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        await process.wait()
    return found


async def throughput(grouped: bool) -> list[dict[str, Any]]:
    """What each process says of a flat-out run: one publisher alone, or the active and the standby of a group."""
    async with Crew("failover") as crew:
        members = [await crew.start("flat_out", grouped=grouped, core=core) for core in range(1 + grouped)]
        for each in members:
            each.tell()
        return [await until(each, "rate") for each in members]


def p99(values: list[float]) -> float:
    """The value that 99 of 100 do not exceed."""
    return sorted(values)[min(len(values) - 1, round(0.99 * len(values)))]


async def measure(report: Report) -> None:
    """Everything, in turn."""
    report.result("bare pidfd p99", p99(await pidfd_latency()), "ms", better="lower")
    report.result("bare silence, at most", SILENCE * 1000, "ms", better="lower")
    for name, how, target in (
        ("SIGKILL", signal.SIGKILL, 50.0),
        ("SIGSTOP", signal.SIGSTOP, SILENCE * 1000 + 200),
        ("hand-over", signal.SIGUSR1, 50.0),
    ):
        found = await gaps(how)
        report.result(f"gap after {name} p50", statistics.median(found), "ms", better="lower")
        report.result(f"gap after {name} p99 of {TIMES}", p99(found), "ms", target, "lower")
    costs, shares, alone_rates, active_rates = [], [], [], []
    for _ in range(5):
        (alone,), (active, standby) = await throughput(False), await throughput(True)
        alone_rates.append(alone["rate"])
        active_rates.append(active["rate"])
        costs.append(1 - active["rate"] / alone["rate"])
        shares.append(standby["cpu"] / active["cpu"])
    report.result("publisher alone", statistics.median(alone_rates), "blocks/s")
    report.result("active of a group of two", statistics.median(active_rates), "blocks/s")
    report.result("throughput a group costs its active", statistics.median(costs), "share", 0.15, "lower")
    report.result("standby CPU / active CPU", statistics.median(shares), "ratio", 0.8, "lower")


if __name__ == "__main__":
    main("failover", measure, {"member": member, "watch": watch, "flat_out": flat_out})
