"""What the demos have in common: processes that say how they are, one line of JSON each time, and a picture of them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any


class Watched:
    """A process of a demo and the last thing it said."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, heard: asyncio.Event) -> None:
        self.name = name
        self.process = process
        self.last: dict[str, Any] = {}
        self.heard = heard

    @property
    def leads(self) -> bool:
        """Whether it is there and says that it is the active one."""
        return self.last.get("role") == "active" and self.process.returncode is None

    async def listen(self) -> None:
        """Keep the last thing it said, until it ends."""
        if self.process.stdout is not None:
            async for line in self.process.stdout:
                self.last.update(json.loads(line))
                self.heard.set()
        await self.process.wait()
        self.heard.set()


def say(**news: Any) -> None:
    """One line for the process that watches."""
    print(json.dumps(news), flush=True)


class Stage:
    """The processes of a demo, its log and its picture. Everything is relative to `begun`."""

    def __init__(self, module: str, bus: str, settings: Sequence[str]) -> None:
        """`module` is what each process runs, with a role and the bus and its settings."""
        self.begun = time.time()
        self.run_number = int(self.begun)
        self.heard = asyncio.Event()  # one of them said something, or ended
        self._module = module
        self._bus = bus
        self._settings = settings
        self._processes: list[asyncio.subprocess.Process] = []
        self._pauses = [0.0]
        self._live = sys.stdout.isatty()
        self._drawn = 0

    async def start(self, tasks: asyncio.TaskGroup, role: str, *arguments: object) -> Watched:
        """Another process."""
        command = [sys.executable, "-m", self._module, "--role", role, "--run", self.run_number, *arguments]
        process = await asyncio.create_subprocess_exec(
            *map(str, command), "--bus", self._bus, "--", *self._settings,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(process)
        watched = Watched(f"{role} {process.pid}", process, self.heard)
        tasks.create_task(watched.listen())
        return watched

    async def end(self) -> None:
        """End every process that is left."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def news(self) -> None:
        """Wait until a process says something, or ends."""
        self.heard.clear()
        async with asyncio.timeout(60):
            await self.heard.wait()

    async def kill_active(self, members: Sequence[Watched]) -> Watched:
        """End the member that says it is active, without a word of warning."""
        while not (leading := [member for member in members if member.leads]):
            await self.news()  # the subscriber can have its blocks before it says so
        active = leading[0]
        active.process.kill()
        active.last["role"] = "killed"
        return active

    async def until(self, subscriber: Watched, blocks: float, of: int, members: Sequence[Watched], what: str) -> None:
        """Wait for the subscriber to have so many blocks, drawing what happens meanwhile. `what` members count."""
        while subscriber.last.get("received", 0) < blocks:
            if subscriber.process.returncode is not None:
                raise RuntimeError(f"{subscriber.name} ended with code {subscriber.process.returncode}")
            await self.news()
            self._pauses.append(subscriber.last.get("pause", 0.0))
            self._picture(subscriber.last, of, members, what)

    @property
    def longest_pause(self) -> str:
        """That the subscriber has seen."""
        return f"{max(self._pauses) * 1000:.1f} ms"

    def _picture(self, last: dict[str, Any], of: int, members: Sequence[Watched], what: str) -> None:
        """Who is active, how far everybody is, the longest pause the subscriber has seen."""
        received = last.get("received", 0)
        self._draw(
            *(f"  {m.name:<18} {m.last.get('role', '-'):<9} {what} {m.last.get('given', 0)}" for m in members),
            f"  subscriber {_bar(received, of)} block {received} of {of}",
            f"  gaps {last.get('gaps', 0)}, duplicates {last.get('duplicates', 0)}, longest pause {self.longest_pause}",
        )

    def tell(self, text: str) -> None:
        """One line of the log."""
        self._erase()
        print(f"{time.time() - self.begun:6.2f} s  {text}", flush=True)

    def _draw(self, *lines: str) -> None:
        """On a terminal: the picture, in place of the one before."""
        if self._live:
            self._erase()
            print("\n".join(lines), flush=True)
            self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            print(f"\x1b[{self._drawn}A\x1b[J", end="")
            self._drawn = 0


def _bar(done: int, of: int) -> str:
    """How much of it is done, as a picture."""
    filled = round(40 * done / of)
    return f"[{'#' * filled}{'.' * (40 - filled)}]"


def report(**values: object) -> None:
    """The outcome in lines that a script can read."""
    for name, value in values.items():
        print(f"{name.replace('_', ' '):>16}: {value}")


def read_settings(given: Sequence[str]) -> dict[str, str] | None:
    """`key=value` settings of a bus; None if one of them is none."""
    settings = {key: value for key, equals, value in (each.partition("=") for each in given) if equals}
    return settings if len(settings) == len(given) else None
