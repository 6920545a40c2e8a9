"""One run: a group, two readers, one fault (or several) at random points, and the verdict on their history."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esp_pubsub.testing.history import Delivered, Ended, Present, Published, Record, Told, Verdict, check, read
from tests.support.proxy import Proxy

from .process import Job

if TYPE_CHECKING:
    from .buses import Bus

ROOT = Path(__file__).parents[2]
RATES = {2: 1_500, 3: 1_200, 5: 700, 6: 40}  # six are there for long
SECONDS = 2.5  # of input
PATIENCE = 30.0  # seconds that a wait may take at most: what is evidence stands in the verdict, which has its own bound
HOLD = 15.0  # seconds after which readers whose link was lost are back, to be told what they missed by the last block
AFTER = 2.5  # seconds after a fault in which a gap counts as its own

now = time.monotonic


class Process:
    """A process of the run, as the parent sees it."""

    def __init__(self, job: Job, process: asyncio.subprocess.Process) -> None:
        self.job = job
        self.name = job.name
        self.process = process
        self.role = ""
        self.said: list[dict[str, Any]] = []
        self.ready = self.frozen = self.killed = self.asked_to_end = False
        self.finished: list[int] = []
        self.left = ""
        self.spans: list[list[float]] = []
        self.news = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and not self.killed

    @property
    def caught_up(self) -> bool:
        """A member has read all of its input."""
        return any("injected" in said for said in self.said)

    async def listen(self) -> None:
        """Take in what it says, until it ends."""
        assert self.process.stdout is not None
        async for text in self.process.stdout:
            if text.endswith(b"\n"):
                self.hear(json.loads(text))
        await self.process.wait()
        self.away()
        self.role = "gone"
        self.news.set()

    def hear(self, said: dict[str, Any]) -> None:
        self.said.append(said)
        self.role = said.get("role", self.role)
        self.left = said.get("left", self.left)
        if "finished" in said:
            self.finished.append(said["finished"])
        if "ready" in said:
            self.ready = True
            self.there()
        self.news.set()

    def led(self) -> Iterator[tuple[float, float]]:
        """The times in which it was active, as it says; one that is gone was so until then."""
        since = None
        for said in self.said:
            if said.get("event") == "won":
                since = said["at"]
            elif since is not None and said.get("role", "active") != "active":
                yield since, said["at"]
                since = None
        if since is not None and self.spans:
            yield since, max(since, self.spans[-1][1])

    def there(self) -> None:
        if not self.spans or self.spans[-1][1] != float("inf"):
            self.spans.append([now(), float("inf")])

    def away(self) -> None:
        if self.spans and self.spans[-1][1] == float("inf"):
            self.spans[-1][1] = now()

    def send(self, number: int) -> None:
        """A signal, if it is still there: the number is ours until we have waited for it."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.killed = True
        self.away()
        self.send(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end, once: a second signal would meet Python on its own way out."""
        self.away()
        if not self.asked_to_end:
            self.asked_to_end = True
            self.send(signal.SIGTERM)

    async def freeze(self, seconds: float) -> None:
        self.frozen = True
        self.away()
        self.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.thaw()

    def thaw(self) -> None:
        self.frozen = False
        self.send(signal.SIGCONT)
        if self.alive:
            self.there()

    def order(self, text: str) -> None:
        if self.alive and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.write(f"{text}\n".encode())


@dataclass
class Report:
    """What became of a run."""

    fault: str
    seed: int
    members: int
    verdict: Verdict | None = None
    wrong: list[str] = field(default_factory=list)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    takeovers: int = 0
    duels: list[float] = field(default_factory=list)
    """For each term that began while another member was active too: for how long both were."""
    seconds: float = 0.0
    kept: str = ""
    mode: str = ""
    """Of the bus, where it has several."""
    shape: str = ""
    """Of the engine, where there is one."""
    restored: int = 0
    """How many of its members went on from a snapshot."""

    @property
    def ok(self) -> bool:
        return self.verdict is not None and self.verdict.ok and not self.wrong


class Run:
    """What faults work with: `dice`, the members, the readers, and ways to start and to harm them."""

    def __init__(self, bus: Bus, fault: str, seed: int, members: int, seconds: float = SECONDS) -> None:
        self.dice = random.Random(seed)
        self.place = Path(tempfile.mkdtemp(prefix="esp-chaos-"))
        self.label = f"chaos-{secrets.token_hex(4)}"  # a cluster of its own, by name: topics, control, election
        self.window = f"{self.label}:5555/p/q/w"
        self.topic = f"{self.window}/I"
        """What the members publish to and the readers read; one of them, if there are several."""
        self.bus = bus
        self.stack = AsyncExitStack()
        """What is entered for this run."""
        self.links: dict[str, Proxy] = {}
        self.report = Report(fault, seed, members)
        self.rate = RATES.get(members, 700)
        self.seconds = seconds
        self.blocks = int(self.rate * seconds)
        self.soon = 0.1
        """Seconds from when somebody leads to the first block of input."""
        self.begun = float("inf")
        self.end_run = 0
        self.processes: list[Process] = []
        self.may_leave: dict[str, str] = {}
        hold = HOLD if fault in bus.may_miss else 0.0
        self._job = Job("", "", bus.name, self.window, "", blocks=self.blocks, seed=seed, rate=self.rate, hold=hold)
        self._harmed: list[tuple[str, float]] = []
        self._numbers = 0
        self._tasks: asyncio.TaskGroup

    # processes

    @property
    def members(self) -> list[Process]:
        return [process for process in self.processes if process.job.role == "member"]

    @property
    def readers(self) -> list[Process]:
        return [process for process in self.processes if process.job.role == "reader"]

    async def start(self, job: Job) -> Process:
        self._numbers += 1
        job.file = str(self.place / f"{self._numbers:03}-{job.name}.jsonl")
        await self.bus.connect(self, job)
        with open(f"{job.file}.err", "wb") as errors:  # noqa: ASYNC230  # the parent has time
            process = Process(
                job,
                await asyncio.create_subprocess_exec(
                    *job.command(), cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                ),
            )  # fmt: skip
        self.processes.append(process)
        self._tasks.create_task(process.listen())
        return process

    async def start_member(self, **more: Any) -> Process:
        """Another member; it reads the input from the start, at the pace at which it comes in."""
        begun = self.begun if self.begun != float("inf") else 0.0
        values = {"name": f"m{self._numbers + 1}", "begun": begun, "role": "member"} | more
        return await self.start(replace(self._job, **values))

    async def start_reader(self, name: str, group: str | None = None) -> Process:
        return await self.start(replace(self._job, role="reader", name=name, group=group))

    async def link(self, name: str, port: int, *, listen: int = 0) -> int:
        """A proxy for one process, which `links` has by its name; returns where it listens."""
        self.links[name] = await self.stack.enter_async_context(Proxy("127.0.0.1", port, listen=listen))
        return self.links[name].port

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Wait for something that processes say; False if it does not come."""
        deadline = now() + seconds
        while not condition():
            if now() > deadline:
                return False
            for process in self.processes:
                process.news.clear()
            waits = [asyncio.ensure_future(process.news.wait()) for process in self.processes]
            await asyncio.wait(waits, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        return True

    def leaders(self) -> list[Process]:
        return [m for m in self.members if m.role == "active" and m.alive and not m.frozen]

    async def active(self) -> Process:
        """Who leads. Waits for somebody to."""
        patience = max(PATIENCE, self.bus.progress)
        if not await self.until(lambda: bool(self.leaders()), patience):
            self.report.wrong.append(f"nobody led for {patience:g} s")
            raise TimeoutError
        return self.leaders()[-1]

    def others(self, *but: Process) -> list[Process]:
        return [m for m in self.members if m.alive and m.ready and not m.frozen and m not in but]

    def harmed(self, how: str) -> None:
        """A fault happens now."""
        self._harmed.append((how, now()))
        self.report.faults[how] = self.report.faults.get(how, 0) + 1

    async def moment(self, low: float = 0.15, high: float = 0.75) -> None:
        """A random point in the time of the input."""
        await asyncio.sleep(max(0.0, self.begun + self.seconds * self.dice.uniform(low, high) - now()))

    async def pause(self, low: float, high: float) -> None:
        await asyncio.sleep(self.dice.uniform(low, high))

    # the run

    async def play(self, fault: Callable[[Run], Awaitable[None]]) -> Report:
        begun = now()
        try:
            async with self.stack, asyncio.TaskGroup() as self._tasks:
                try:
                    await self._play(fault)
                finally:
                    self.end_all()
        except* TimeoutError:
            pass
        finally:
            await self.bus.mend()
        self.judge()
        self.report.seconds = now() - begun
        if self.report.ok:
            await asyncio.to_thread(shutil.rmtree, self.place)
        else:
            self.report.kept = str(self.place)
        return self.report

    async def _play(self, fault: Callable[[Run], Awaitable[None]]) -> None:
        await self.start_all()
        if not await self.until(lambda: all(process.ready for process in self.processes)):
            self.report.wrong.append("a process did not get ready")
            return
        await self.active()
        self.begun = now() + self.soon
        for process in self.processes:
            process.order(f"begin {self.begun!r}")
        await fault(self)
        await self.until(self.finished, max(0.0, self.begun + self.seconds - now()) + PATIENCE)
        for process in self.processes:
            process.thaw()
        # One that has not read all of its input cannot know whether what went before was the same.
        await self.until(lambda: all(m.caught_up or m.left for m in self.members if m.alive), PATIENCE)
        for process in self.processes:
            process.order("close")
        if not await self.until(lambda: not any(process.alive for process in self.processes), PATIENCE):
            still = [process.name for process in self.processes if process.alive]
            self.report.wrong.append(f"these did not end: {still}")

    async def start_all(self) -> None:
        await self.start_reader("all")
        await self.start_reader("group", "g")
        for _ in range(self.report.members):
            await self.start_member()

    def finished(self) -> bool:
        """Each reader came to the end, in one of its lives; one that was killed for good need not."""
        finished = {reader.name for reader in self.readers if self.end_run in reader.finished}
        return all(reader.killed or reader.name in finished for reader in self.readers)

    def end_all(self) -> None:
        for process in self.processes:
            if process.process.returncode is None:
                process.kill()

    def judge(self) -> None:
        records = self.records()
        self.report.verdict = self.verdict(records)
        self._judge_missed(records)
        for process in self.processes:
            self._judge_exit(process)
        self.report.takeovers = sum(said.get("event") == "won" for m in self.members for said in m.said) - 1
        self._measure(records)
        self.report.duels = self.duels()

    def verdict(self, records: list[Record]) -> Verdict:
        """What the checker finds."""
        ends = {(self._job.source, self.end_run): self.blocks}
        return check(records, progress=self.bus.progress, ends=ends)

    def duels(self) -> list[float]:
        """For each term that began while another member of the same run was active: for how long both were."""
        terms = [(since, until, member) for member in self.members for since, until in member.led()]
        found = []
        for since, until, member in terms:
            shared = [
                min(until, end) - since
                for begun, end, other in terms
                if other is not member and other.job.run == member.job.run and begun <= since < end
            ]
            found += [max(shared)] if shared else []
        return found

    def _judge_missed(self, records: list[Record]) -> None:
        """Nothing may be missed, but what the bus lost, or what nobody keeps for a reader."""
        fault, bus = self.report.fault, self.bus
        may = {
            name
            for reader in self.readers
            if fault in bus.may_lose or fault in (bus.groups_may_miss if reader.job.group else bus.may_miss)
            for name in self.names(reader)
        }
        for record in records:
            if isinstance(record, Told) and record.notice == "Missed" and record.subscriber not in may:
                self.report.wrong.append(f"{record.subscriber} missed blocks {record.first} to {record.last}")

    def _judge_exit(self, process: Process) -> None:
        code = process.process.returncode
        if process.killed:
            return
        expected = self.may_leave.get(process.name, "")
        if code != 0 or process.left != expected:
            self.report.wrong.append(f"{process.name} ended with code {code}, left {process.left!r}, not {expected!r}")
        errors = Path(f"{process.job.file}.err").read_text()
        for sign in ("Traceback", "never retrieved", "was destroyed"):
            if sign in errors:
                self.report.wrong.append(f"{process.name}: {sign!r} in its log")

    def records(self) -> list[Record]:
        """Everything that was written, in the order of the lives of each process."""
        found: list[Record] = []
        for process in self.processes:
            path = Path(process.job.file)
            if path.exists():
                with path.open() as lines:
                    records = list(read(lines))
                if self.may_leave.get(process.name) != "InputDiffers":  # what it published is nobody's block
                    found += records
                elif not all(isinstance(record, Published) for record in records):
                    self.report.wrong.append(f"{process.name} wrote what it should not")
            for name in self.names(process):
                if process.job.role == "reader" and process.killed:
                    found.append(Ended(name, process.spans[-1][1] if process.spans else now()))
                found += [Present(name, since, min(until, now())) for since, until in process.spans]
        return found

    def names(self, process: Process) -> list[str]:
        """What it is called in the history."""
        return [process.name]

    def _measure(self, records: list[Record]) -> None:
        """The longest time without a block behind each fault, as readers without a group saw it."""
        times: dict[str, list[float]] = {}
        for record in records:
            if isinstance(record, Delivered) and record.subscriber.startswith("all"):
                times.setdefault(record.subscriber, [self.begun]).append(record.at)
        for how, at in self._harmed:
            gaps = [
                after - before
                for name in times
                for before, after in zip(times[name], times[name][1:], strict=False)
                if after > at and before < at + AFTER
            ]
            if gaps:
                self.report.gaps.setdefault(how, []).append(max(gaps))
