"""An engine with a large state, on the embedded bus: `make bench NAME=engine_state` (about two minutes; with fewer
keys: KEYS=100000).

The state has 1,000,000 keys of about 100 bytes each. While 1,000 blocks a second come in, the standby takes a snapshot:
how late are the steps and the loop of the active member, which sends its beats, and how much memory has the standby?
Then the snapshot is restored; beside it, in turn, msgpack unpacks the same bytes.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgpack

import esp_pubsub as esp
from esp_pubsub.engine.snapshot import read
from esp_pubsub.engine.state import State

from .report import LIMIT, REPETITIONS, Crew, Member, Report, heard, main, say
from .work import now, say_roles

ENGINE = "dfESP://bench:5555/project/query"
SCHEMA = "stamp*:int64,first:int64"
KEYS = int(os.environ.get("KEYS", "1000000"))
AT_ONCE = 1_000  # keys that one block fills
RATE, SECONDS = 1_000, 4.0
TICK = 0.005
_latest = [0]  # how late a step was, in ns


@esp.model(inputs={"Ins": SCHEMA}, outputs={"Outs": SCHEMA}, version="1")
@dataclass
class Accounts:
    """A block fills some keys, or changes one of them. It looks at a clock, and says nothing of it to anybody."""

    accounts: dict[str, tuple[float, int, str]] = field(default_factory=dict)

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        for stamp, first in block.rows():
            if not stamp:
                for number in range(first, first + AT_ONCE):
                    self.accounts[f"account-{number:08d}"] = (number * 0.5, number, f"{number:064d}")
                continue
            _latest[0] = max(_latest[0], now() - stamp)
            key = f"account-{first:08d}"
            money, count, text = self.accounts[key]
            self.accounts[key] = money + 0.25, count + 1, text
        out.emit("Outs", block.rows())


def client(directory: str) -> esp.Opening[esp.Client]:
    return esp.init(dir=directory)


async def lateness(worst: list[float]) -> None:
    """How late the loop is at most, in seconds."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK
        await asyncio.sleep(TICK)
        worst[0] = max(worst[0], loop.time() - due)


async def member(directory: str, kept: str | None = None) -> None:
    """A member until ended. At SIGUSR1 it begins to measure, and takes a snapshot if it can; at SIGUSR2 it says what it
    measured.
    """
    asked, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, asked.set)
    loop.add_signal_handler(signal.SIGUSR2, ended.set)
    options = esp.EngineOptions(snapshot_every=3_600.0)
    async with (
        client(directory) as opened,
        opened.engine(Accounts(), ENGINE, snapshots=kept, options=options) as engine,
        asyncio.TaskGroup() as tasks,
    ):
        say(ready=os.getpid())
        tasks.create_task(say_roles(engine))
        while engine.stats.steps < KEYS // AT_ONCE:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.01)
        say(filled=engine.stats.steps)
        worst = [0.0]
        tasks.create_task(lateness(worst))
        while True:
            await asked.wait()
            asked.clear()
            worst[0], _latest[0], began = 0.0, 0, time.monotonic()
            if kept is not None:
                await engine.persist()
                say(persisted=time.monotonic() - began, loop=worst[0] * 1e3)
            await ended.wait()
            ended.clear()
            say(loop=worst[0] * 1e3, step=_latest[0] / 1e6)


async def feed(directory: str) -> None:
    """The blocks that fill, then RATE blocks a second until ended."""
    async with client(directory) as opened, opened.publisher(f"{ENGINE}/Ins", SCHEMA) as publisher:
        for first in range(0, KEYS, AT_ONCE):
            await publisher.inject([(0, first)])
        await publisher.flush(LIMIT)
        await heard()
        begun, number = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - begun) * RATE)
            for at in range(number, due):
                await publisher.inject([(now(), at % KEYS)])
            number = due
            await asyncio.sleep(1 / RATE)


async def restore(directory: str, kept: str) -> None:
    """The snapshot in that directory, restored and unpacked in turn; seconds of each."""
    say(ready=True)
    file = next(Path(kept).glob("*.snapshot")).read_bytes()  # nobody waits for this loop
    _, parts = read(file)
    state = State(Accounts())
    works: dict[str, Callable[[], object]] = {
        "read and checked": lambda: read(file),
        "restored": lambda: state.restored(parts),
        "unpacked by msgpack": lambda: [msgpack.unpackb(part.body) for part in parts],
    }
    took: dict[str, list[float]] = {name: [] for name in works}
    for (name, work), _ in itertools.product(works.items(), range(REPETITIONS)):
        gc.collect()
        began = time.perf_counter()
        work()
        took[name].append(time.perf_counter() - began)
    say(took=took, bytes=len(file))


# what is measured


async def until(one: Member, key: str) -> dict[str, float]:
    """Read on until a member says this."""
    while True:
        if key in (said := await one.told()):
            return said


async def peak(one: Member, done: asyncio.Task[object]) -> int:
    """The most memory that it has until then."""
    most = 0
    while not done.done():
        most = max(most, one.memory()["own"])
        await asyncio.sleep(0.01)
    return most


async def measure(report: Report) -> None:
    """Everything, in turn."""
    async with Crew("engine_state") as crew:
        kept = str(Path(crew.directory, "kept"))
        active = await crew.start("member")
        standby = await crew.start("member", kept=kept)
        bare = standby.memory()["own"]
        feeder = await crew.start("feed")
        for one in (active, standby):
            await until(one, "filled")
        feeder.tell()
        await asyncio.sleep(1.0)
        state = standby.memory()["own"] - bare
        os.kill(active.pid, signal.SIGUSR1)
        await asyncio.sleep(SECONDS)
        os.kill(active.pid, signal.SIGUSR2)
        quiet = await until(active, "step")
        os.kill(active.pid, signal.SIGUSR1)
        os.kill(standby.pid, signal.SIGUSR1)
        persisting = asyncio.create_task(until(standby, "persisted"))
        most = await peak(standby, persisting)
        os.kill(active.pid, signal.SIGUSR2)
        busy, took = await until(active, "step"), await persisting
        for what, name in (("step", "a step"), ("loop", "the loop, so a beat,")):
            report.result(f"{name} of the active member at most late", quiet[what], "ms", None, "lower")
            report.result(f"{name} meanwhile", busy[what], "ms", 20.0, "lower")
        report.result("the loop of the standby that takes the snapshot", took["loop"], "ms", None, "lower")
        report.result("from asking for a snapshot until it counts", took["persisted"], "s", None, "lower")
        report.result("state of a member", state / 1e6, "MB", None, "lower")
        report.result("memory of a member that takes a snapshot / its state", most / state, "ratio", 2.2, "lower")
        restoring = await crew.start("restore", kept=kept)
        found = await until(restoring, "took")
    samples: dict[str, list[float]] = found["took"]  # type: ignore[assignment]
    report.result("snapshot", found["bytes"] / 1e6, "MB", None, "lower")
    for name, seconds in samples.items():
        report.result(f"{KEYS:,} keys {name}", median(seconds), "s", None, "lower")
    report.result(
        "rate restored / unpacked by msgpack",
        median(theirs / ours for ours, theirs in zip(samples["restored"], samples["unpacked by msgpack"], strict=True)),
        "ratio", 2.0,
    )  # fmt: skip


if __name__ == "__main__":
    logging.getLogger("esp_pubsub").setLevel(logging.ERROR)  # roles are no news here
    main("engine_state", measure, {role.__name__: role for role in (member, feed, restore)})
