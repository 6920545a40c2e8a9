"""Engines beside Bytewax, Quix Streams and PySyncObj: `make bench NAME=engine_peers` (about a quarter of an
hour; less with EVENTS=100000, or with ONLY=bytewax, ONLY=quix or ONLY=gaps).

Totals by key, of 1,000 keys and 1,000,000 events, one row out for each event. An engine reads blocks of 256 events, or
of one, from the bus, and publishes what it computes. Bytewax gets blocks in memory: packed by msgpack, and it packs
what comes out, which is thrown away; and, for information, as rows that are ready. On Kafka, an engine reads blocks of
256 and Quix a message for each event, QUIX_EVENTS in all.

The gap of a Quix pair and of three members of PySyncObj, whose leader is killed TIMES times, at 1,000 a second: beside
that of an engine, which `make bench NAME=engine` measures.

The peers are installed into a directory that goes with the benchmark; PEERS names one that has them already.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import esp_pubsub as esp
from tests.support.kafka import Kafka

from .peers import rows
from .report import LIMIT, Crew, Member, Report, fail_on_notice, heard, in_turn, main, say
from .work import now

ENGINE = "dfESP://bench:5555/project/query"
EVENT, TOTAL = "key*:string,price:double,quantity:double", "key*:string,money:double"
EVENTS = int(os.environ.get("EVENTS", "1000000"))
QUIX_EVENTS = int(os.environ.get("QUIX_EVENTS", str(EVENTS // 5)))
TIMES = int(os.environ.get("TIMES", "10"))
PACE = 1_000
SESSION = 1_000  # ms: far less than what Quix takes by default, which is 45,000
PEERS = ("bytewax==0.21.1", "msgpack", "quixstreams==3.28.1", "pysyncobj==0.3.17")
BUFFER = {1: 1_000, 256: 200}  # blocks, by how many events they have


@esp.model(inputs={"Events": EVENT}, outputs={"Totals": TOTAL}, version="1")
@dataclass
class Totals:
    """What each key came to, for each event."""

    totals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        found, totals = [], self.totals
        for key, price, quantity in block.rows():
            money, shares = totals.get(key, (0.0, 0.0))
            money += price * quantity
            totals[key] = money, shares + quantity
            found.append((key, money))
        out.emit("Totals", found, opcode=esp.Opcode.UPSERT)


def client(directory: str, bootstrap: str | None) -> esp.Opening[esp.Client]:
    if bootstrap is None:
        return esp.init(dir=directory, on_notice=fail_on_notice)
    return esp.init("kafka", hostport=bootstrap, on_notice=fail_on_notice)


async def fill(directory: str, events: int, block: int, bootstrap: str | None = None) -> None:
    """The input, all of it."""
    every = list(rows(events))
    say(ready=True)
    async with client(directory, bootstrap) as opened, opened.publisher(f"{ENGINE}/Events", EVENT) as publisher:
        for at in range(0, events, block):
            await publisher.inject(every[at : at + block])
        await publisher.flush(LIMIT)
    say(filled=events)


async def compute(directory: str, events: int, block: int, bootstrap: str | None = None) -> None:
    """An engine, alone. Its clock begins when it leads."""
    blocks = -(-events // block)
    async with client(directory, bootstrap) as opened:
        await heard()
        async with opened.engine(Totals(), ENGINE, options=esp.EngineOptions(buffer=BUFFER[block])) as engine:
            while engine.stats.role != "active":  # noqa: ASYNC110  # what it looks at tells nobody
                await asyncio.sleep(0.001)
            began, before = now(), engine.stats.steps
            while engine.stats.lines[0].on_bus < blocks:  # noqa: ASYNC110  # the same
                await asyncio.sleep(0.005)
            say(rate=(blocks - before) * block / (now() - began) * 1e9)


# what is measured


def install(place: Path) -> str:
    """The peers, in an environment of their own; its Python."""
    venv.create(place, with_pip=True)
    subprocess.run([place / "bin" / "pip", "install", "--quiet", *PEERS], check=True)
    return str(place / "bin" / "python")


async def ours(events: int, block: int, bootstrap: str | None = None) -> float:
    """Events a second through an engine."""
    async with Crew("engine_peers") as crew:
        filling = await crew.start("fill", events=events, block=block, bootstrap=bootstrap)
        await filling.told()
        worker = await crew.start("compute", events=events, block=block, bootstrap=bootstrap)
        worker.tell()
        return float((await worker.told())["rate"])


async def in_bytewax(python: str, block: int, *, packed: bool) -> float:
    async with Crew("peers", python) as crew:
        worker = await crew.start("bytewax", events=EVENTS, block=block, packed=packed)
        worker.tell()
        return float((await worker.told())["rate"])


async def measure_bytewax(report: Report, python: str) -> None:
    for block, what, target in ((256, "256-event blocks", 2.0), (1, "single events", 1.0)):
        engine, packed, ready = (f"{what} in {how}" for how in ("an engine", "Bytewax", "Bytewax, rows ready"))
        contestants: dict[str, Callable[[], Any]] = {
            engine: partial(ours, EVENTS, block),
            packed: partial(in_bytewax, python, block, packed=True),
            ready: partial(in_bytewax, python, block, packed=False),
        }
        samples = await in_turn(contestants)
        report.figures(samples, "events/s")
        report.ratio(samples, engine, packed, target)
        report.ratio(samples, engine, ready, None)


async def in_quix(python: str) -> float:
    async with Kafka() as kafka, Crew("peers", python) as crew:
        filling = await crew.start("quix_fill", bootstrap=kafka.bootstrap, events=QUIX_EVENTS)
        await filling.told()
        worker = await crew.start("quix", bootstrap=kafka.bootstrap, events=QUIX_EVENTS)
        return float((await worker.told())["rate"])


async def on_kafka() -> float:
    async with Kafka() as kafka:
        return await ours(EVENTS, 256, kafka.bootstrap)


async def measure_quix(report: Report, python: str) -> None:
    names = "totals on Kafka, an engine", "totals on Kafka, Quix"
    samples = await in_turn({names[0]: on_kafka, names[1]: partial(in_quix, python)})
    report.figures(samples, "events/s")
    report.ratio(samples, *names, 5.0)


async def quix_gaps(python: str) -> list[float]:
    """The longest pause around each kill, in ms."""
    async with Kafka() as kafka, Crew("peers", python) as crew:
        started = 0

        async def member() -> Member:
            nonlocal started
            started += 1
            return await crew.start("quix", bootstrap=kafka.bootstrap, state=f"state-{started}", session=SESSION)

        active = await member()
        await crew.start("quix_feed", bootstrap=kafka.bootstrap, pace=PACE)
        await active.told()
        watcher = await crew.start("quix_watch", bootstrap=kafka.bootstrap)
        events = []
        for _ in range(TIMES):
            standby = await member()
            await asyncio.sleep(3.0)
            events.append(time.monotonic())
            await active.end()
            active = standby
            await active.told()
            await asyncio.sleep(1.0)
        os.kill(watcher.pid, signal.SIGUSR1)
        await watcher.told()
        return _longest(json.loads(Path(crew.directory, "times.json").read_text()), events)


def _longest(times: list[float], events: list[float]) -> list[float]:
    """The longest pause after each of them, and before the next."""
    pauses, found = list(pairwise(times)), []
    for at, end in pairwise([*events, float("inf")]):
        found.append(max(after - before for before, after in pauses if after > at and before < end) * 1e3)
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


async def pysyncobj_gap(python: str) -> float:
    """The longest pause that a member which follows sees when the leader is killed, in ms."""
    async with Crew("peers", python) as crew:
        ports = _free_ports(3)
        members = {
            port: await crew.start("pysyncobj", ports=[port, *(p for p in ports if p != port)], pace=PACE)
            for port in ports
        }
        leader = (await members[ports[0]].told())["leader"]
        follows = next(one for port, one in members.items() if port != leader)
        follows.tell()
        await asyncio.sleep(2.0)
        at = time.monotonic()
        await members[leader].end()
        await asyncio.sleep(4.0)
        os.kill(follows.pid, signal.SIGUSR1)
        while "times" not in (said := await follows.told()):
            pass
        return _longest(said["times"], [at])[0]


async def measure_gaps(report: Report, python: str) -> None:
    found = {
        f"gap after SIGKILL, a Quix pair, session {SESSION} ms": await quix_gaps(python),
        "gap after SIGKILL, three members of PySyncObj": [await pysyncobj_gap(python) for _ in range(TIMES)],
    }
    for name, gaps in found.items():
        report.result(f"{name}, p50", statistics.median(gaps), "ms", better="lower")
        report.result(f"{name}, the longest of {TIMES}", max(gaps), "ms", better="lower")


PARTS = {"bytewax": measure_bytewax, "quix": measure_quix, "gaps": measure_gaps}


async def measure(report: Report) -> None:
    """Everything, in turn."""
    with tempfile.TemporaryDirectory(prefix="esp-peers-") as place:
        python = os.environ.get("PEERS") or await asyncio.to_thread(install, Path(place))
        for part in os.environ.get("ONLY", ",".join(PARTS)).split(","):
            await PARTS[part](report, python)


if __name__ == "__main__":
    logging.getLogger("esp_pubsub").setLevel(logging.ERROR)  # roles are no news here
    main("engine_peers", measure, {role.__name__: role for role in (fill, compute)})
