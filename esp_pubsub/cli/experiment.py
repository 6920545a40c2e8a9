"""SAS's experiment, which proves an engine's failover: `python -m esp_pubsub.cli.demo engine --full`.

Without more on the embedded bus, in a directory that goes with it; on any other with a log: `--bus rabbitmq
host=host mode=stream`. It needs the extras cli and http.

`esp adapter -k pub` publishes a file of 1,000,000 trades, in blocks of one. Two processes of `esp engine` run the
model: the trades of the last five minutes, hour and day, and an aggregate of each by symbol. `esp adapter -k sub`
writes what comes out of each aggregate to a file. At a random point the active engine is killed. At the end the other
one is asked over HTTP how many rows its windows hold, and the files are compared, byte for byte, with what the model
emits when it runs alone, without engine and bus.
"""

from __future__ import annotations

import argparse
import asyncio
import filecmp
import json
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from ..engine.model import declared
from ..testing import run_model
from ..text import CsvWriter
from ..windows import load_project
from .stage import read_settings, report
from .trades import DATEFORMAT, MOST, counts, lines, trades

MODEL = Path(__file__).with_suffix(".xml")
AGGREGATES = {f"Aggregate{name}": f"trades_aggr{name.lower()}.csv" for name in ("5min", "1HR", "24HR")}
PATIENCE = 60.0  # seconds without anything new
T = TypeVar("T", bound="Esp")
_KILL = (0.1, 0.8)  # of the trades, between which the active engine is killed
_AT_ONCE = 1_000  # trades whose output is in memory, in the undisturbed run
_SAYS = re.compile(r"esp: (?:Standby s|Hot failover)[^\n]*")


def write_undisturbed(of: int, place: Path) -> None:
    """What a subscriber of each aggregate writes when nothing disturbs it: what the model emits for these trades."""
    project, source = load_project(MODEL), trades(of)
    writers = {window: CsvWriter(schema) for window, schema in declared(project)[0].outputs.items()}
    with ExitStack() as stack:
        files = {window: stack.enter_context((place / name).open("wb")) for window, name in AGGREGATES.items()}
        while rows := list(islice(source, _AT_ONCE)):
            for window, blocks in run_model(project, [("TradesSource", [row]) for row in rows]).items():
                for block in blocks:
                    opcodes, flags, changed = block.decoded()
                    files[window].write(writers[window].write(changed, opcodes, flags))


class Stuck(Exception):
    """It does not go on; says what it waited for, or who has ended."""


class Esp:
    """A command `esp` at work."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None

    def said(self) -> str:
        """All of its log."""
        return self.log.read_text()


class Engine(Esp):
    """A member, which shows itself over HTTP."""

    async def shows(self, page: str) -> bytes:
        """One of its pages."""
        port = re.findall(r"http://127\.0\.0\.1:(\d+)", self.said())[0]
        return await asyncio.to_thread(_fetch, f"http://127.0.0.1:{port}{page}")

    async def stats(self) -> dict[str, Any]:
        """Role, steps and more; of one that does not show itself yet, neither."""
        if "http://" not in self.said():
            return {"role": "starting", "steps": 0}
        found: dict[str, Any] = json.loads(await self.shows("/engine"))
        return found

    async def has_taken(self, steps: int, *roles: str) -> bool:
        """Whether it is so far, or further; and has one of these roles, if any are named."""
        stats = await self.stats()
        return bool(stats["steps"] >= steps and (not roles or stats["role"] in roles))


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        found: bytes = answer.read()
        return found


class Experiment:
    """All of its processes, and what it finds."""

    def __init__(self, place: Path, of: int, bus: str, environment: dict[str, str]) -> None:
        self.of = of
        self.bus = bus
        self.place = place
        self.begun = time.monotonic()
        self.url = f"dfESP://experiment{int(time.time())}:5555/tradesRMQ/trades"  # the bus may hold earlier ones
        self._environment = os.environ | environment
        self._running: list[Esp] = []

    def tell(self, text: str) -> None:
        """One line of what happens."""
        print(f"{time.monotonic() - self.begun:7.2f} s  {text}", flush=True)

    async def run(self, *, undisturbed: bool) -> bool:
        """The whole experiment; True if files and counts are as they have to be. `undisturbed`: nobody is killed."""
        expected = self.place / "undisturbed"
        expected.mkdir()
        shutil.copy(MODEL, self.place / "model.xml")
        with (self.place / "trades.csv").open("w") as file:  # nothing else happens yet
            file.writelines(lines(self.of))
        self.tell(f"made {self.of:,} trades")
        write_undisturbed(self.of, expected)
        self.tell("computed what the model emits when it runs alone")
        try:
            return await self._play(undisturbed=undisturbed)
        finally:
            for each in self._running:
                if each.lives:
                    each.process.kill()
                await each.process.wait()

    async def _play(self, *, undisturbed: bool) -> bool:
        engines = [await self._start_engine(number) for number in (1, 2)]
        subscribers = [await self._subscribe(window, file) for window, file in AGGREGATES.items()]
        for window, file in AGGREGATES.items():
            await self._until(f"{window} is read", (self.place / file).exists)
        begun = time.monotonic()
        publisher = await self._start(
            Esp, "publisher", "adapter", "-k", "pub", "-h", f"{self.url}/TradesSource", "-f", "trades.csv", "-t", "csv",
            "-d", DATEFORMAT, "-l", self.bus,
        )  # fmt: skip
        pause = None if undisturbed else await self._kill_active(engines)
        try:
            await self._until("the subscribers have written everything", self._is_written)
        except Stuck as e:  # the files differ: what else there is to see, the report says
            self.tell(str(e))
        elapsed = time.monotonic() - begun
        await self._until("the publisher has ended", lambda: not publisher.lives)
        for subscriber in subscribers:
            subscriber.process.terminate()  # and it ends in order
            async with asyncio.timeout(PATIENCE):
                await subscriber.process.wait()
            self._running.remove(subscriber)
        self.tell(f"all is written after {elapsed:.1f} s: {self.of / elapsed:,.0f} trades a second")
        return await self._report(engines, pause)

    # processes

    async def _start(self, kind: type[T], name: str, *words: object) -> T:
        """Another process; its log has its name."""
        command = [str(word) for word in words]
        self.tell(f"$ esp {shlex.join(command)}")
        log = self.place / f"{name}.log"
        with log.open("w") as file:  # the system writes to it, not we
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "esp_pubsub.cli", *command, cwd=self.place, env=self._environment,
                stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        started = kind(name, process, log)
        self._running.append(started)
        return started

    async def _start_engine(self, number: int) -> Engine:
        engine = await self._start(
            Engine, f"engine{number}", "engine", "model.xml", self.url, "--bus", self.bus, "--http", 0
        )
        roles = ("active",) if number == 1 else ("active", "candidate")
        await self._until(f"{engine.name} is {roles[-1]}", partial(engine.has_taken, 0, *roles))
        return engine

    async def _subscribe(self, window: str, file: str) -> Esp:
        return await self._start(
            Esp, window, "adapter", "-k", "sub", "-h", f"{self.url}/{window}?snapshot=false", "-f", file, "-t", "csv",
            "-l", self.bus,
        )  # fmt: skip

    async def _kill_active(self, engines: list[Engine]) -> float:
        """Kill it at a random point, and forget it; gives how long the subscriber was without a line."""
        at, leading = int(self.of * random.uniform(*_KILL)), []

        async def one_leads() -> bool:  # on a busy machine it may be the other one by now
            leading.extend([each for each in engines if await each.has_taken(at, "active")])
            return bool(leading)

        await self._until(f"the active engine takes step {at:,}", one_leads)
        active, other = sorted(engines, key=lambda each: each is not leading[0])
        before = len(other.said())
        active.process.kill()
        self.tell(f"killed {active.name}, the active one, at a random point: after {at:,} trades or a moment later")
        engines.remove(active)
        self._running.remove(active)
        pause = await self._pause(lambda: "switched to active" in other.said()[before:])
        await active.process.wait()
        for line in _SAYS.findall(other.said()[before:]):
            self.tell(f"{other.name}: {line}")
        return pause

    async def _pause(self, is_over: Callable[[], bool]) -> float:
        """The longest time for which the day's file does not grow."""
        name = AGGREGATES["Aggregate24HR"]
        file, end = self.place / name, (self.place / "undisturbed" / name).stat().st_size
        longest, grown, last = 0.0, time.monotonic(), file.stat().st_size
        while time.monotonic() - grown < PATIENCE:
            await asyncio.sleep(0.001)
            if (size := file.stat().st_size) > last:
                longest, grown, last = max(longest, time.monotonic() - grown), time.monotonic(), size
                if size == end or is_over():
                    return longest
        raise Stuck(f"the subscriber got nothing for {PATIENCE:.0f} s after the kill; see {self.place}")

    # what there is

    def _is_written(self) -> bool:
        return all(
            (self.place / name).stat().st_size >= (self.place / "undisturbed" / name).stat().st_size
            for name in AGGREGATES.values()
        )

    def _written(self) -> int:
        """Bytes, by all of them: who waits goes on waiting while this grows."""
        return sum(file.stat().st_size for file in self.place.iterdir() if file.is_file())

    async def _until(self, what: str, condition: Callable[[], bool | Awaitable[bool]]) -> None:
        """Wait for it, as long as there is anything new and no process ends that should not."""
        written, since = self._written(), time.monotonic()
        while True:
            if failed := [each for each in self._running if each.process.returncode not in (None, 0)]:
                raise Stuck(f"{failed[0].name} has ended: {failed[0].said()[-2_000:]}")
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            if (now := self._written()) != written:
                written, since = now, time.monotonic()
            if time.monotonic() - since > PATIENCE:
                raise Stuck(f"for {PATIENCE:.0f} s nothing is new, and not yet: {what}")
            await asyncio.sleep(0.05)

    async def _report(self, engines: Sequence[Engine], pause: float | None) -> bool:
        """The outcome in lines that a script can read."""
        right = True
        for engine in engines:
            await self._until(f"{engine.name} takes the last step", partial(engine.has_taken, self.of))
            shown = (await engine.shows("/windows")).decode()
            self.tell(f"{engine.name} shows its windows:\n{shown.rstrip()}")
            found = {each.attrib["name"]: int(each.attrib["count"]) for each in ElementTree.fromstring(shown)}
            right = right and found == counts(self.of)
        same = True
        for window, name in AGGREGATES.items():
            same = same and filecmp.cmp(self.place / name, self.place / "undisturbed" / name, shallow=False)
            self.tell(f"{name}: {(self.place / f'{window}.log').read_text().splitlines()[-1]}")
        report(
            bus=self.bus, trades=f"{self.of:,}, a block each",
            pause="nobody was killed" if pause is None else f"{pause * 1000:.0f} ms",
            counts="as they have to be" if right else "WRONG",
            files="identical to those of an undisturbed run" if same else "DIFFERENT",
        )  # fmt: skip
        return right and same


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="esp demo engine --full", description=__doc__)
    parser.add_argument("--full", action="store_true", help="this experiment; without it the short demo")
    parser.add_argument("--bus", default="embedded")
    parser.add_argument("--config", type=Path, help="the cfg file of the bus, or the folder it is in")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the bus, as in its cfg file")
    parser.add_argument("--trades", type=int, default=MOST, help=f"how many, from 1,000 to {MOST:,}")
    parser.add_argument("--undisturbed", action="store_true", help="kill nobody")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave all files here, in a new directory")
    given = parser.parse_args()
    settings = read_settings(given.settings)
    if settings is None:
        parser.error("what follows the options is key=value, such as hostport=host:port")
    if not 1_000 <= given.trades <= MOST:
        parser.error(f"--trades is a number from 1,000 to {MOST:,}")
    environment = {f"ESP_PUBSUB_{key.upper()}": value for key, value in settings.items()}
    if given.config is not None:
        environment["ESP_PUBSUB_CONFIG"] = str(given.config.absolute())
    with ExitStack() as stack:
        if given.keep is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="esp-experiment-")))
        else:
            place = given.keep.absolute()
            try:
                place.mkdir(parents=True)
            except OSError as e:
                parser.error(f"--keep is a new directory: {e}")
        if given.bus == "embedded":
            environment.setdefault("ESP_PUBSUB_DIR", str(place / "bus"))
        experiment = Experiment(place, given.trades, given.bus, environment)
        try:
            return 0 if asyncio.run(experiment.run(undisturbed=given.undisturbed)) else 1
        except Stuck as e:
            print(e, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
