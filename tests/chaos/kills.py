"""Kills, stops and restarts on the embedded bus, without failover groups: `python -m tests.chaos.kills --times 100`.

Five trials, each with real processes on one bus directory; the quick version of each is in the test suite:

    publishers   a publisher is killed at a random point, over and over: what it said was acknowledged is read back
    readers      so is the reader of a group: it goes on exactly, and quickly
    hand-overs   a group's reader is killed, or stands still, while the next one waits: that goes on at once, or after
                 the lease
    stops        a publisher, and a reader, stand still under load: what the others see of it
    crowd        sixteen processes open and close at random, some are killed: nothing is left behind
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import esp_pubsub as esp
from esp_pubsub.notices import Missed, Notice
from esp_pubsub.testing.history import Confirmed, Delivered, Opened, Published, Record, check, line, read

ROOT = Path(__file__).parents[2]
URL, SCHEMA = "dfESP://kills:5555/p/q/w", "id*:int64,text:string"
FILES = {"data.mdb", "lock.mdb", "bell", "holder", "boot"}
REOPEN = 1.0  # seconds; a bound on what the SDK does, not on starting Python
DEADLINE = 1.0  # how long a publisher waits for a lock
RING = 16 << 30  # all that is published is to be there in the end, however fast the machine is
LEASE = 1.0  # how long a group waits for a reader that lives
HOLDER = struct.Struct("<H200s")  # what whoever holds a topic's lock writes into the file `holder`
now = time.monotonic


# the processes


def say(*what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def client(directory: str, on_notice: Callable[[Notice], None] = lambda notice: None, **settings: Any) -> Any:
    return esp.init(dir=directory, on_notice=on_notice, ring_size=RING, **settings)


async def publish(directory: str, dice: random.Random, pace: float) -> None:
    """Publish forever, at a pace or flat out, and say what was acknowledged, and how long that took at most."""
    begun = now()
    async with client(directory, deadline=DEADLINE) as bus, bus.publisher(URL, SCHEMA) as publisher:
        await (await publisher.inject([(1, "first")]))
        say("opened", now() - begun, publisher.source)
        late = 0.0
        while True:
            at = now()
            for _ in range(1 if pace else dice.randint(1, 40)):
                last = await publisher.inject([(publisher.stats.given + 1, "x" * dice.choice((10, 100, 9_000)))])
            await last
            late = max(late, now() - at)
            say("acked", last.id, late)
            late = 0.0
            if pace:
                await asyncio.sleep(pace)


async def consume(directory: str, dice: random.Random, file: str) -> None:
    """Read for a group, write the history, confirm now and then; say when the first block came."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(record: Record) -> None:
        os.write(fd, line(record).encode())

    begun = now()
    async with client(directory, lease=LEASE) as bus, bus.subscriber(URL, SCHEMA, side="in", group="g") as subscriber:
        note(Opened("g", begun))
        say("subscribed")
        opened = False
        async for block in subscriber:
            if not opened:
                opened = True
                say("opened", now() - begun)
            note(Delivered("g", block.source, block.run, block.id, "", now()))
            if dice.random() < 0.1:
                await subscriber.confirm(block)
                note(Confirmed("g", block.source, block.run, block.id, now()))


async def follow(directory: str, dice: random.Random, _: str) -> None:
    """Read everything there is; say how many blocks came, how many were missed, and the longest wait."""
    missed = 0

    def notice(what: Notice) -> None:
        nonlocal missed
        missed += what.last - what.first + 1 if isinstance(what, Missed) else 0

    async with (
        client(directory, notice) as bus,
        bus.subscriber(URL, SCHEMA, side="in", start="earliest") as subscriber,
    ):
        say("opened", 0.0)
        count, said, before, longest = 0, now(), now(), 0.0
        async for block in subscriber:
            count, longest, before = count + 1, max(longest, now() - before), now()
            if now() - said > 0.05:
                said = now()
                say("read", count, missed, block.id, longest)
                longest = 0.0


async def come_and_go(directory: str, dice: random.Random, seconds: str) -> None:
    """Open and close clients with all that they offer; say if a descriptor is left behind."""
    end = now() + float(seconds)
    async with client(directory):
        pass
    before = len(os.listdir("/proc/self/fd"))
    while True:
        async with client(directory) as bus:
            url = f"dfESP://kills:5555/p/q/w{dice.randrange(3)}"
            publisher = await bus.publisher(url, SCHEMA)
            group = dice.choice((None, "g"))
            subscriber = await bus.subscriber(url, SCHEMA, side="in", start="earliest", group=group)
            say("opened", 0.0)
            for id in range(dice.randrange(5)):
                await (await publisher.inject([(id, "x")]))
                with contextlib.suppress(TimeoutError, esp.BusUnavailable):
                    async with asyncio.timeout(dice.uniform(0.0, 0.05)):
                        block = await anext(subscriber)
                        if group:
                            await subscriber.confirm(block)
            if dice.random() < 0.5:
                await publisher.aclose()
            if dice.random() < 0.5:
                await subscriber.aclose()
        if now() > end:
            break
        await asyncio.sleep(dice.uniform(0.0, 0.02))
    after = len(os.listdir("/proc/self/fd"))
    say("done", after - before)


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    "publish": publish,
    "consume": consume,
    "follow": follow,
    "come_and_go": come_and_go,
}


# the parent


class Child:
    """One of those processes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[list[Any]] = []
        self.opened: float | None = None
        self.news = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for text in self.process.stdout:
            if text.endswith(b"\n"):
                self.said.append(json.loads(text))
                if self.said[-1][0] == "opened":
                    self.opened = self.said[-1][1]
                self.news.set()
        await self.process.wait()
        self.news.set()

    async def until_open(self) -> float:
        async with asyncio.timeout(15):
            while self.opened is None:
                self.news.clear()
                await self.news.wait()
                assert self.process.returncode in (None, -signal.SIGKILL), "it ended by itself"
        return self.opened

    def send(self, number: int) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def kill(self) -> None:
        """End it, and take in all that it said before."""
        self.send(signal.SIGKILL)
        await self.process.wait()
        await self._listening

    def last(self, word: str) -> list[Any]:
        return next((said for said in reversed(self.said) if said[0] == word), [])


class Place:
    """A bus directory and the processes on it; all gone at the end."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.path = Path(tempfile.mkdtemp(prefix="esp-kills-"))
        self.directory = str(self.path / "bus")
        self.children: list[Child] = []

    async def start(self, role: str, more: Any = "") -> Child:
        command = [sys.executable, "-m", "tests.chaos.kills", "--role", role, "--dir", self.directory,
                   "--seed", str(self.dice.randrange(1 << 30)), f"--more={more}"]  # fmt: skip
        child = Child(await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE))
        self.children.append(child)
        return child

    async def __aenter__(self) -> Place:
        return self

    async def __aexit__(self, *error: object) -> None:
        for child in self.children:
            child.send(signal.SIGCONT)
            await child.kill()
        await asyncio.to_thread(shutil.rmtree, self.path)

    async def everything(self) -> AsyncIterator[esp.Block]:
        """All blocks on the topic, in order."""
        async with client(self.directory) as bus:
            end = (await bus.bus.bounds("kills:5555/p/q/w/I")).end
            async with bus.subscriber(URL, SCHEMA, side="in", start="earliest") as subscriber:
                async for block in subscriber:
                    yield block
                    if block.position == end - 1:
                        return


async def kill_publishers(times: int, seed: int) -> dict[str, Any]:
    """Every id whose acknowledgement was recorded is read back, once and in order. Another publisher is not harmed."""
    acked: dict[int, int] = {}
    opened: list[float] = []
    async with Place(seed) as place:
        witness = await place.start("publish", 0.002)
        await witness.until_open()
        for _ in range(times):
            victim = await place.start("publish", 0.0)
            opened.append(await victim.until_open())
            await asyncio.sleep(place.dice.uniform(0.0, 0.15))
            await victim.kill()
            acked[victim.last("opened")[2]] = (victim.last("acked") or [0, 1])[1]
        await witness.kill()
        acked[witness.last("opened")[2]] = witness.last("acked")[1]
        last: dict[int, int] = {}
        async for block in place.everything():
            assert block.id == last.get(block.source, 0) + 1, (block, last)
            last[block.source] = block.id
    lost = {source: (id, last.get(source, 0)) for source, id in acked.items() if last.get(source, 0) < id}
    assert not lost, f"acknowledged and read back up to: {lost}"
    assert max(opened) < REOPEN, opened
    waits = [said[2] for said in witness.said if said[0] == "acked"]
    return {"kills": times, "blocks": sum(last.values()), "reopen s": max(opened), "witness waited s": max(waits)}


async def kill_readers(times: int, seed: int) -> dict[str, Any]:
    """The history of a group's reader that is killed over and over is exact, and each new one has a block soon."""
    opened: list[float] = []
    async with Place(seed) as place:
        file = str(place.path / "g.jsonl")
        publisher = await place.start("publish", 0.001)
        await publisher.until_open()
        for _ in range(times):
            reader = await place.start("consume", file)
            opened.append(await reader.until_open())
            await asyncio.sleep(place.dice.uniform(0.0, 0.15))
            await reader.kill()
            _close_line(file)
        await publisher.kill()
        reader = await place.start("consume", file)
        await reader.until_open()
        _, _, source = publisher.last("opened")
        end = publisher.last("acked")[1]
        with open(file) as lines:  # noqa: ASYNC230  # the parent has time
            async with asyncio.timeout(20):
                records: list[Record] = list(read(lines))
                while not any(isinstance(record, Delivered) and record.id >= end for record in records[-2_000:]):
                    await asyncio.sleep(0.1)
                    records += read(lines)
        blocks = [block.id async for block in place.everything()]
    records += [Published("p", source, 0, id, "", "acked" if id <= end else "unknown", 0.0) for id in blocks]
    verdict = check(records, ends={(source, 0): end})
    assert verdict.ok and not verdict.missed, verdict
    assert max(opened) < REOPEN, opened
    return {"kills": times, "blocks": end, "deliveries": verdict.delivered, "reopen s": max(opened)}


async def hand_over(times: int, seed: int) -> dict[str, Any]:
    """A reader that waits has a block soon after the one before it died, or its lease after that one stood still."""
    waits: dict[str, list[float]] = {"killed": [], "stopped": []}
    async with Place(seed) as place:
        publisher = await place.start("publish", 0.001)
        await publisher.until_open()
        reader = await place.start("consume", place.path / "0.jsonl")
        await reader.until_open()
        for turn in range(1, times + 1):
            following = await place.start("consume", place.path / f"{turn}.jsonl")
            await _until(lambda child=following: bool(child.last("subscribed")))
            await asyncio.sleep(place.dice.uniform(0.05, 0.15))  # it waits for the group
            assert following.opened is None
            how = place.dice.choice(sorted(waits)) if turn > 2 else sorted(waits)[turn - 1]
            at = now()
            reader.send(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            await following.until_open()
            waits[how].append(now() - at)
            await reader.kill()
            reader = following
    assert max(waits["killed"]) < REOPEN, waits
    assert max(waits["stopped"]) < LEASE + REOPEN, waits
    return {"times": times, **{f"{how} s": max(seen) for how, seen in waits.items()}}


def _close_line(file: str) -> None:
    """A reader that was killed may have left half a line, which another one must not continue."""
    with open(file, "rb+") as lines:
        data = lines.read()
        lines.truncate(data.rfind(b"\n") + 1)


async def stop(times: int, seed: int, seconds: float = 0.4) -> dict[str, Any]:
    """A reader and a publisher stand still under load, the latter also while it holds the lock, and once for longer
    than others wait for that. How long a paced publisher beside them waits is bounded by the length of the stop.
    """
    slack = 2.0
    waits: dict[str, list[float]] = {"reader": [], "publisher": [], "lock": [], "lock, long": []}
    async with Place(seed) as place:
        witness, flat_out = await place.start("publish", 0.002), await place.start("publish", 0.0)
        reader = await place.start("follow")
        for child in (witness, flat_out, reader):
            await child.until_open()
        topic = next((place.path / "bus" / "topics").iterdir())
        for what in [*("reader", "publisher", "lock") * times, "lock, long"]:
            length = 2.0 * DEADLINE if what == "lock, long" else seconds
            victim = reader if what == "reader" else flat_out
            if not what.startswith("lock") or not await stop_with_lock(topic / "holder", victim):
                await asyncio.sleep(place.dice.uniform(0.0, 0.1))
                victim.send(signal.SIGSTOP)
            heard = len(witness.said)
            await asyncio.sleep(length)
            so_far = len(witness.said)
            victim.send(signal.SIGCONT)
            await _until(lambda so_far=so_far: len(witness.said) > so_far + 5)
            waited = max(said[2] for said in witness.said[heard:] if said[0] == "acked")
            assert waited < length + slack, (what, waited)
            waits[what].append(waited)
        size = (topic / "data.mdb").stat().st_size
        blocks = await _stopped_and_whole(place, witness, flat_out, reader)
    figures = {f"{what}: others waited s": max(seen) for what, seen in waits.items()}
    return {"stops": 3 * times + 1, "of s": seconds, "blocks": blocks, "file MB": size / 1e6, **figures}


async def stop_with_lock(page: Path, victim: Child, seconds: float = 4.0) -> bool:
    """Stop a process at a moment at which it holds the topic's lock. False if no such moment was met."""
    end = now() + seconds
    while now() < end:
        for _ in range(500):
            if _holder(page) == victim.process.pid:
                victim.send(signal.SIGSTOP)
                await asyncio.sleep(0.05)  # were the lock free, the witness would have taken it meanwhile
                if _holder(page) == victim.process.pid:
                    return True
                victim.send(signal.SIGCONT)
        await asyncio.sleep(0.001)
    return False


def _holder(page: Path) -> int:
    length, name = HOLDER.unpack_from(page.read_bytes())
    parts = name[:length].split(b"/")  # read while it is written, it may be anything
    return int(parts[-2]) if len(parts) > 2 else 0


async def _stopped_and_whole(place: Place, witness: Child, flat_out: Child, reader: Child) -> int:
    """After the stops: everything is there, once and in order, and the reader comes to the end."""
    for child in (witness, flat_out):
        await child.kill()
    last: dict[int, int] = {}
    async for block in place.everything():
        assert block.id == last.get(block.source, 0) + 1
        last[block.source] = block.id
    for child in (witness, flat_out):
        assert last[child.last("opened")[2]] >= child.last("acked")[1]
    async with client(place.directory) as bus, bus.publisher(URL, SCHEMA) as publisher:
        await asyncio.sleep(0.1)
        await (await publisher.inject([(0, "so that the reader says how far it is")]))
        await _until(lambda: reader.last("read")[1] == sum(last.values()) + 1)
    assert reader.last("read")[2] == 0, "nothing was trimmed, so nothing was missed"
    return sum(last.values())


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110  # a child says it
            await asyncio.sleep(0.05)


async def crowd(seconds: float, seed: int, count: int = 16) -> dict[str, Any]:
    """Processes come and go, some by force; afterwards there is no slot, no descriptor and no file too many."""
    async with Place(seed) as place:
        async with client(place.directory) as bus:  # all topics are open all the time: only a check frees a slot
            for number in range(3):
                await (await (await bus.publisher(f"{URL}{number}", SCHEMA)).inject([(0, "x")]))
            figures = await _come_and_go(place, seconds, count)
            slots = _slots(bus)
        files = _files(Path(place.directory))
    assert not slots, slots
    assert not files, files
    return {"processes": count, "seconds": seconds, **figures, "slots": 0, "descriptors": 0, "files": 0}


async def _come_and_go(place: Place, seconds: float, count: int) -> dict[str, int]:
    running = [await place.start("come_and_go", seconds) for _ in range(count)]
    for child in running:
        await child.until_open()
    end, kills = now() + seconds, 0
    while now() < end - 1:
        await asyncio.sleep(place.dice.uniform(0.05, 0.3))
        victim = place.dice.randrange(count)
        if running[victim].opened is not None:  # one that still starts has nothing to leave behind
            await running[victim].kill()
            kills += 1
            running[victim] = await place.start("come_and_go", max(0.5, end - now()))
    for children in (running, [await place.start("come_and_go", 1.0)]):  # the last one opens when all others are gone
        async with asyncio.timeout(30):
            for child in children:
                await child.process.wait()
                await child._listening
                assert child.process.returncode == 0, child.said
                assert child.last("done") == ["done", 0], f"descriptors left behind: {child.said}"
    return {"kills": kills}


def _slots(bus: esp.Client) -> list[str]:
    """Slots of readers other than ourselves, without a check for dead ones."""
    stores = [bus.bus.meta, *bus.bus._topics.values()]  # type: ignore[attr-defined]
    lines = [(store.path.name, line) for store in stores for line in store._env.readers().splitlines()[1:]]
    return [f"{name}: {line}" for name, line in lines if line.split()[0] != str(os.getpid())]


def _files(directory: Path) -> list[str]:
    """Files that have no business there."""
    places = [directory / "meta", *(directory / "topics").iterdir()]
    found = [path for place in places for path in place.iterdir() if path.name not in FILES]
    return [str(path) for path in [*found, *directory.iterdir()] if path.name not in ("meta", "topics")]


async def long_version(times: int, seconds: float, seed: int) -> None:
    print(f"seed {seed}", flush=True)
    for name, trial in (
        ("publishers", kill_publishers(times, seed)),
        ("readers", kill_readers(times, seed)),
        ("hand-overs", hand_over(max(2, times // 4), seed)),
        ("stops", stop(max(1, times // 4), seed)),
        ("crowd", crowd(seconds, seed)),
    ):
        print(shown(name, await trial), flush=True)


def shown(name: str, figures: dict[str, Any]) -> str:
    values = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items())
    return f"{name}: {', '.join(values)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kills", description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--dir", help=argparse.SUPPRESS)
    parser.add_argument("--more", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role is None:
        asyncio.run(long_version(given.times, given.seconds, given.seed))
    else:
        more = float(given.more) if given.role == "publish" else given.more
        asyncio.run(ROLES[given.role](given.dir, random.Random(given.seed), more))


if __name__ == "__main__":
    main()
