"""A process of a chaos run of engines: a member, a reader of both output windows, or the one that feeds the inputs.

Started as `python -m tests.chaos.engine_process <job>`; see process.py. The feeder takes another order, `slow WINDOW
SECONDS`: nothing comes to that input for so long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, cast

import esp_pubsub as esp
from esp_pubsub.testing.history import Published, digest

from .engine_model import END, INPUTS, OUTPUTS, Model, model_of
from .process import SCHEMA, Job, Log, Member, Reader, block, main, noted, now, orders, say

LONG_STEP = 2.0  # seconds
SNAPSHOT_EVERY = 0.2


@dataclass
class EngineJob(Job):
    """What a process of an engine's run has to do. `seed` is that of the input, and the salt of the model."""

    shape: str = ""
    buffer: int = 10_000
    pause: float = 0.0
    """Seconds that each step of this member takes more."""
    long_steps: int = 0
    """How many of its steps take two seconds."""
    snapshots: str = ""
    """Where they are, if there are any."""
    all_lead: bool = False
    """Its election is one that everybody wins, at any time."""

    @property
    def url(self) -> str:
        """Where the engine stands."""
        return f"dfESP://{self.window.rpartition('/')[0]}"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.engine_process", json.dumps(asdict(self))]


def fed(job: EngineJob, window: str, id: int) -> list[tuple[int, str]]:
    """The block of an input."""
    return block(job.seed, 100 + INPUTS[job.shape].index(window), id)


class EngineMember(Member):
    """One member of the engine."""

    job: EngineJob

    async def open(self, client: esp.Client) -> Any:
        job = self.job
        dice = random.Random(job.name)
        windows = INPUTS[job.shape]
        long = {(dice.choice(windows), dice.randint(1, job.blocks)) for _ in range(job.long_steps)}

        def between(window: str, id: int) -> None:
            seconds = LONG_STEP if (window, id) in long else job.pause
            if seconds:
                time.sleep(seconds)

        model = model_of(job.shape, job.seed, job.blocks, between)
        options = esp.EngineOptions(
            run=job.run, election=job.election, buffer=job.buffer, order="written" if job.shape == "ordered" else None,
            snapshot_every=SNAPSHOT_EVERY,
        )  # fmt: skip
        self._engine = await client.engine(model, job.url, snapshots=job.snapshots or None, options=options)
        if job.all_lead:
            from tests.integration.members import AlwaysLeads  # with pytest, which others need not load

            self._engine._group._election = AlwaysLeads()  # type: ignore[assignment]
        if since := self._engine.stats.steps:
            say(restored=since)
        return self._engine

    @property
    def model(self) -> Model:
        """The one that steps now: after a snapshot it is another one."""
        return cast(Model, self._engine._steps.calls.step.__self__)  # type: ignore[attr-defined]

    async def publish(self, publisher: Any) -> None:
        """The model steps by itself: say when it has come to the end."""
        while not self.model.ended:  # noqa: ASYNC110  # a model tells nobody
            await asyncio.sleep(0.05)
        say(injected=True, state=self.model.state)


class OutputReader(Reader):
    """A subscriber of each output window."""

    job: EngineJob

    def __init__(self, job: EngineJob, log: Log) -> None:
        super().__init__(job, log)
        self._ended: set[tuple[str, int]] = set()

    def windows(self) -> dict[str, str]:
        return {f"{self.job.name}/{window}": f"{self.job.url}/{window}" for window in OUTPUTS}

    def is_last(self, got: esp.Block) -> bool:
        return bool(got.rows()[-1][1] == END)

    def finish(self, name: str, run: int) -> None:
        self._ended.add((name, run))
        if all((each, run) in self._ended for each in self.windows()):
            say(finished=run)


class Feeder:
    """The publisher of each input."""

    def __init__(self, job: EngineJob, log: Log) -> None:
        self.job = job
        self.log = log
        self.beginning, self.closing = asyncio.Event(), asyncio.Event()
        self.slow_until: dict[str, float] = {}

    async def run(self) -> None:
        async with self.job.client(noted) as client:
            windows = INPUTS[self.job.shape]
            publishers = {window: await client.publisher(f"{self.job.url}/{window}", SCHEMA) for window in windows}
            say(ready=True)
            async with asyncio.TaskGroup() as tasks:
                obeying = tasks.create_task(self.obey())
                feeding = [tasks.create_task(self.feed(*each)) for each in publishers.items()]
                await self.closing.wait()
                for task in (obeying, *feeding):
                    task.cancel()
        say(closed=True)

    async def feed(self, window: str, publisher: esp.Publisher) -> None:
        """All blocks of an input, each at its time or as soon as the input is no longer slow."""
        job, waiting = self.job, asyncio.Queue[esp.Delivery]()
        await self.beginning.wait()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.note_outcomes(window, waiting))
            for id in range(1, job.blocks + 1):
                await self.due(window, job.begun + id / job.rate + (job.hold if id == job.blocks else 0.0))
                waiting.put_nowait(await publisher.inject(fed(job, window, id)))

    async def due(self, window: str, at: float) -> None:
        """Wait until then, and until the input is not slow."""
        while (early := max(at, self.slow_until.get(window, 0.0)) - now()) > 0:  # noqa: ASYNC110  # it may become slow
            await asyncio.sleep(early)

    async def note_outcomes(self, window: str, waiting: asyncio.Queue[esp.Delivery]) -> None:
        while True:
            delivery = await waiting.get()
            while True:
                with contextlib.suppress(esp.DeliveryUnknown):
                    outcome = await delivery
                    break
            content = digest(fed(self.job, window, delivery.id))
            self.log.write(Published(window, 0, 0, delivery.id, content, outcome, now()))

    async def obey(self) -> None:
        async for order in orders():
            if order.startswith("begin "):
                self.job.begun = float(order.removeprefix("begin "))
                self.beginning.set()
            elif order.startswith("slow "):
                _, window, seconds = order.split()
                self.slow_until[window] = now() + float(seconds)
            elif order == "close":
                self.closing.set()
        os._exit(0)


if __name__ == "__main__":
    main(EngineJob, {"member": EngineMember, "reader": OutputReader, "feeder": Feeder})
