"""What the benchmarks share: figures and their report, processes of a repetition, and the rows that travel.

A benchmark alternates between us and a peer within each of five repetitions and judges the median of the five ratios:
what else the machine does hits both. Absolute figures have no target. A missed target is printed and fails nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import esp_pubsub as esp

REPETITIONS = 5
LIMIT = 300.0  # seconds that any one wait may take
URL = "dfESP://bench:5555/project/query/window"
SCHEMA = esp.Schema("id*:int64,symbol:string,client:string,price:double,quantity:double,at:stamp")
STAMP = 1_760_000_000_000_000
_ROOT = Path(__file__).resolve().parents[2]


def rows(count: int, first: int = 0) -> list[tuple[Any, ...]]:
    """Events of SCHEMA as an exchange might send them."""
    return [(i, f"SYM{i % 997}", f"client-{i % 4_999:06d}", i * 0.25, float(i % 500), STAMP + i) for i in
            range(first, first + count)]  # fmt: skip


def small_row(number: int) -> tuple[Any, ...]:
    """The event of a block whose body has 100 bytes, for numbers from 2^32 on (nine bytes as int64)."""
    return (number, "SYM", "c" * 53, 101.5, 0.25, STAMP)


SMALL_FROM = 1 << 40


_WIDTH = 72


class Report:
    """Prints each result as it comes and, last, one line of JSON."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._results: list[dict[str, Any]] = []

    def result(self, name: str, value: float, unit: str, target: float | None = None, better: str = "higher") -> None:
        """One figure; without a target it is for information."""
        met = target is None or (value >= target if better == "higher" else value <= target)
        shown = float(f"{value:.6g}")
        self._results.append(
            {"name": name, "value": shown, "unit": unit, "target": target, "better": better, "met": met}
        )
        goal = "" if target is None else f"{'>=' if better == 'higher' else '<='} {target:g}"
        verdict = "" if target is None else "met" if met else "MISSED"
        print(f"{name:{_WIDTH}}  {shown:>12,g} {unit:<12} {goal:<9} {verdict}", flush=True)

    def figures(self, samples: Mapping[str, Sequence[float]], unit: str, better: str = "higher") -> None:
        """The median of each contestant, for information."""
        for name, values in samples.items():
            self.result(name, median(values), unit, better=better)

    def ratio(
        self, samples: Mapping[str, Sequence[float]], ours: str, peer: str, target: float | None, better: str = "higher"
    ) -> None:
        """The median of ours / peer, repetition by repetition."""
        ratios = [a / b for a, b in zip(samples[ours], samples[peer], strict=True)]
        self.result(f"{ours} / {peer}", median(ratios), "ratio", target, better)

    def finish(self) -> None:
        """The line for programs."""
        print(json.dumps({"bench": self.name, "results": self._results}), flush=True)


def rate(work: Callable[[], object], units: int, seconds: float = 0.2) -> float:
    """Units per second of processor time, doing `work` (which is `units` of them) over and over for so long."""
    work()
    rounds, began = 0, time.process_time()
    while True:
        work()
        rounds += 1
        elapsed = time.process_time() - began
        if elapsed >= seconds:
            return rounds * units / elapsed


def rates(contestants: Mapping[str, Callable[[], object]], units: int) -> dict[str, list[float]]:
    """Five rates of each, taken in turn."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(REPETITIONS):
        for name, work in contestants.items():
            samples[name].append(rate(work, units))
    return samples


async def in_turn(contestants: Mapping[str, Callable[[], Awaitable[float]]]) -> dict[str, list[float]]:
    """Five measurements of each, taken in turn."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(REPETITIONS):
        for name, measure in contestants.items():
            samples[name].append(await measure())
    return samples


class Member:
    """A process of a benchmark, as its parent has it."""

    def __init__(self, role: str, process: asyncio.subprocess.Process) -> None:
        self.role = role
        self.pid = process.pid
        self._process = process

    async def told(self) -> dict[str, Any]:
        """The next thing it says."""
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.role} ended before it was done; its error stands above")
        said: dict[str, Any] = json.loads(line)
        return said

    def tell(self) -> None:
        """Let it go on from its `heard`."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    async def end(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()

    def memory(self) -> dict[str, int]:
        """Bytes it holds now: `all`, and of these what is its `own` and not a file's pages."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        sizes = {name: int(fields[key].split()[0]) << 10 for name, key in (("all", "VmRSS"), ("own", "RssAnon"))}
        return sizes


class Crew:
    """The processes of one repetition and their directory; when it is left, both are gone.

    A member runs `python -m <module> <role> <settings as JSON>`, see `main`.
    """

    def __init__(self, module: str, python: str = sys.executable) -> None:
        self._module = module
        self._python = python
        self._members: list[Member] = []
        self._temporary: tempfile.TemporaryDirectory[str]

    async def __aenter__(self) -> Crew:
        self._temporary = tempfile.TemporaryDirectory(prefix="esp-bench-")
        self.directory = self._temporary.name
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for member in self._members:
                await member.end()
        finally:
            self._temporary.cleanup()

    async def start(self, role: str, **settings: Any) -> Member:
        """A member that has said it is ready."""
        process = await asyncio.create_subprocess_exec(
            self._python, "-m", f"tests.bench.{self._module}", role,
            json.dumps({"directory": self.directory, **settings}),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=_ROOT, limit=1 << 24,
        )  # fmt: skip
        member = Member(role, process)
        self._members.append(member)
        await member.told()
        return member


def say(**said: Any) -> None:
    """A member tells its parent."""
    print(json.dumps(said), flush=True)


async def heard() -> None:
    """A member says it is ready and waits until its parent lets it go on."""
    say(ready=os.getpid())
    async with asyncio.timeout(LIMIT):
        if not await asyncio.to_thread(sys.stdin.readline):
            raise SystemExit("the parent is gone")


def main(
    name: str,
    measure: Callable[[Report], Awaitable[None]],
    roles: Mapping[str, Callable[..., Awaitable[None]]] | None = None,
) -> None:
    """A benchmark's entry: the parent without arguments, a member with a role and its settings."""

    async def bounded(work: Awaitable[None]) -> None:
        async with asyncio.timeout(4 * LIMIT):
            await work

    if roles is not None and len(sys.argv) > 1:
        asyncio.run(bounded(roles[sys.argv[1]](**json.loads(sys.argv[2]))))
        return
    report = Report(name)
    asyncio.run(bounded(measure(report)))
    report.finish()


def fail_on_notice(notice: object) -> None:
    """An `on_notice` for runs in which nothing may go wrong: a Joined alone is expected."""
    if type(notice).__name__ != "Joined":
        os.write(2, f"benchmark broken: {notice}\n".encode())
        os._exit(3)
