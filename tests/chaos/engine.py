"""Engines under chaos: several members run one model, a process feeds its inputs, and two read both output windows.

What a subscriber must get follows from the order that was decided: see engine_order.py. It is compared block by block,
and so is the state in which each member ended.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from esp_pubsub.testing.history import Present, Published, Record, Verdict, check, digest, read

from .buses import Bus
from .engine_model import INPUTS, OUTPUTS
from .engine_order import Emitted, derived, source_of, written
from .engine_process import EngineJob
from .faults import ALONE, Fault
from .run import SECONDS, Process, Report, Run

RATE = 250.0  # blocks a second of each input
WITHOUT_LOG = ("new-run", "exchange-deleted")
"""Faults that need inputs which can be read again."""


class EngineRun(Run):
    """A run with an engine, and a process that feeds it."""

    def __init__(self, bus: Bus, fault: str, seed: int, members: int, seconds: float, shape: str = "") -> None:
        super().__init__(bus, fault, seed, members, seconds)
        shapes = sorted(INPUTS.keys() - ({"one"} if bus.queues else set()))
        drawn = self.dice.choice(shapes), self.dice.choice((100, 10_000))
        self.report.shape = shape or drawn[0]
        self.rate = RATE
        self.blocks = int(RATE * seconds)
        self.window = f"{self.label}:5555/p/q/Left"
        self.topic = f"{self.label}:5555/p/q/Seen/O"
        if bus.queues:
            self.soon = 1.0  # the queues of the inputs are there only when somebody reads them
        long_steps = 2 if fault in ("long-step", "mixed") else 0
        kept = self.dice.choice(("", str(self.place / "snapshots")))
        if fault in ("other-input", "new-run"):
            kept = ""  # who goes on from the others' state computes what they do, and a new run begins without
        if fault == "all-killed":
            kept = str(self.place / "snapshots")
        self._engine = EngineJob(
            **{**asdict(self._job), "window": self.window, "blocks": self.blocks, "rate": self.rate},
            shape=self.report.shape, buffer=drawn[1], long_steps=long_steps, snapshots=kept,
            all_lead=fault == "all-lead",
        )  # fmt: skip
        self._job = self._engine
        self.emitted: dict[int, Emitted] = {}

    @property
    def feeder(self) -> Process:
        return next(process for process in self.processes if process.job.role == "feeder")

    async def start_all(self) -> None:
        await self.start(replace(self._engine, role="feeder", name="feeder"))
        await super().start_all()

    async def start_member(self, **more: object) -> Process:
        """Another member; one with a rate of its own takes that long for its steps."""
        rate = more.get("rate")
        pause = 1.0 / (rate * len(INPUTS[self.report.shape])) if isinstance(rate, float) else 0.0
        return await super().start_member(**more, pause=pause)

    def slow(self, seconds: float) -> None:
        """Nothing comes to one of the inputs for so long."""
        self.feeder.order(f"slow {self.dice.choice(INPUTS[self.report.shape])} {seconds}")

    async def _play(self, fault: Fault) -> None:
        try:
            await super()._play(fault)
        finally:
            await self._find_emitted()

    async def _find_emitted(self) -> None:
        job = replace(self._engine, name="judge", role="judge")
        await self.bus.connect(self, job)
        times = {(record.publisher, record.id): record.at for record in self._fed()}
        if len(times) < self.blocks * len(INPUTS[job.shape]):
            self.report.wrong.append(f"{len(times)} blocks of input were acknowledged, not all")
        for run in range(self.end_run + 1):
            if job.shape == "one":
                self.emitted[run] = derived(job, times)
            else:
                async with job.client(lambda notice: None) as client:
                    self.emitted[run] = await written(job, client, run, times)

    def _fed(self) -> list[Published]:
        with Path(self.feeder.job.file).open() as lines:
            return [record for record in read(lines) if isinstance(record, Published)]

    # the verdict

    def names(self, process: Process) -> list[str]:
        names = super().names(process)
        return names if process.job.role != "reader" else [f"{names[0]}/{window}" for window in OUTPUTS]

    def verdict(self, records: list[Record]) -> Verdict:
        """Each output window by itself: its readers are owed what is emitted to it."""
        found = [self._verdict(records, window) for window in OUTPUTS]
        return Verdict(
            faults=sorted((fault for each in found for fault in each.faults), key=lambda fault: fault.at),
            published=sum(each.published for each in found),
            acked=sum(each.acked for each in found),
            delivered=sum(each.delivered for each in found),
            missed=sum(each.missed for each in found),
        )

    def _verdict(self, records: list[Record], window: str) -> Verdict:
        source = source_of(self._engine, window)
        last = len(self.emitted[self.end_run].blocks[window]) if self.end_run in self.emitted else 0
        own = [
            record
            for record in records
            if isinstance(record, Present)
            or (isinstance(record, Published) and record.source == source)
            or (not isinstance(record, Published) and record.subscriber.endswith(f"/{window}"))
        ]
        return check(own, progress=self.bus.progress, ends={(source, self.end_run): last})

    def records(self) -> list[Record]:
        """What readers got, and what the engine must have emitted. A member is there where its process is."""
        records = [record for record in super().records() if not isinstance(record, Published)]
        members = {member.name for member in self.members}
        records += [
            Present("engine", record.since, record.until)
            for record in records
            if isinstance(record, Present) and record.name in members
        ]
        for run, emitted in self.emitted.items():
            since = self.begun if run else 0.0
            outcome = "acked" if run == self.end_run else "unknown"
            for window, blocks in emitted.blocks.items():
                source = source_of(self._engine, window)
                records += [
                    Published("engine", source, run, id, digest(rows), outcome, max(at, since))  # type: ignore[arg-type]
                    for id, (rows, at) in enumerate(blocks, 1)
                ]
        return records

    def judge(self) -> None:
        super().judge()
        emitted = self.emitted.get(self.end_run)
        if emitted is None:
            self.report.wrong.append("what it must have emitted was not found")
            return
        self.report.wrong += emitted.judge(self._engine)
        self.report.restored = sum("restored" in said for member in self.members for said in member.said)
        for member in self.members:
            if self.may_leave.get(member.name) == "InputDiffers":
                continue  # it may have read all of its input before it hears of the others
            for said in member.said:
                if "state" in said and member.job.run == self.end_run and said["state"] != emitted.state:
                    self.report.wrong.append(f"{member.name} came to {said['state']}, not to {emitted.state}")


def _engine(run: Run) -> EngineRun:
    assert isinstance(run, EngineRun)
    return run


async def kill_standby(run: Run) -> None:
    """A standby is killed, and then the active one, before anybody else is started."""
    await run.moment(0.15, 0.4)
    active = await run.active()
    run.harmed("kill-standby")
    run.dice.choice(run.others(active) or [active]).kill()
    await run.start_member()
    await run.moment(0.5, 0.8)
    run.harmed("kill")
    (await run.active()).kill()
    await run.start_member()


async def slow_input(run: Run) -> None:
    """Nothing comes to one of the inputs for a while, and the active is killed meanwhile."""
    for low, high in ((0.1, 0.3), (0.5, 0.7)):
        await run.moment(low, high)
        run.harmed("slow-input")
        _engine(run).slow(run.dice.uniform(0.4, 1.2))
        await run.pause(0.0, 0.4)
        (await run.active()).kill()
        await run.start_member()


async def long_step(run: Run) -> None:
    """Steps take two seconds, each member's at other blocks; one that leads so wakes up as a second leader."""
    run.harmed("long-step")
    await run.moment(0.5, 0.9)
    (await run.active()).kill()
    await run.start_member()


async def all_killed(run: Run) -> None:
    """All members are killed at once, at some random points, and started again from their snapshots."""
    await run.moment(0.1, 0.6)
    for _ in range(run.dice.randint(1, 3)):
        run.harmed("all-killed")
        for member in run.members:
            member.kill()
        await run.pause(0.0, 0.2)
        for _ in range(run.report.members):
            await run.start_member()
        if run.dice.random() < 0.7:
            await run.active()
        await run.pause(0.0, 0.6)


async def all_lead(run: Run) -> None:
    """Every member is active all the time: all write the order, and all send. One is killed."""
    run.harmed("all-lead")
    await run.until(lambda: len(run.leaders()) == run.report.members)
    await run.moment(0.3, 0.7)
    run.dice.choice(run.leaders()).kill()
    await run.start_member()


ENGINE_FAULTS: dict[str, Fault] = {
    "kill-standby": kill_standby,
    "slow-input": slow_input,
    "long-step": long_step,
    "all-killed": all_killed,
    "all-lead": all_lead,
}


def faults_of(bus: Bus) -> dict[str, Fault]:
    """What an engine can suffer on this bus."""
    found = bus.faults | ENGINE_FAULTS | bus.engine_faults
    never = {*bus.may_lose, *(WITHOUT_LOG if bus.queues else ())}
    return {name: fault for name, fault in found.items() if name not in never}


async def play(bus: Bus, fault: str, seed: int, members: int, seconds: float = SECONDS, shape: str = "") -> Report:
    """One run."""
    return await EngineRun(bus, fault, seed, members, seconds, shape).play((ALONE | faults_of(bus))[fault])
