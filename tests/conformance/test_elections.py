"""The election suite over the core's log election, on the embedded bus as it is and with `Faults` around it."""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from esp_pubsub.bus import Bus, Election, Feed, Start
from esp_pubsub.failover.control import Control
from esp_pubsub.failover.line import Position
from esp_pubsub.failover.log_election import LogElection
from esp_pubsub.failover.words import Beat, Identity, Setup
from esp_pubsub.registry import driver
from esp_pubsub.testing import election_conformance as elections
from esp_pubsub.testing.faults import Faults
from tests.support.contests import judge, rounds_of_a_bus

BEAT = 0.04
PATIENCE = 10.0  # a loaded machine notices late; an election that never does is still found
QUIET = 0.4  # more than the longest silence
SILENCE = 4 * BEAT  # the shortest: who stood still for so long was rightly deposed
SETUP = Setup(("elections:0/p/q/w/I",), ("id*:int64",), "rows", "log")
every_check = pytest.mark.parametrize("name", elections.CHECKS)


class LogGroup:
    """A group whose members have a connection each, in one process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.topic = f"elections:0/M/F/{secrets.token_hex(4)}"
        self.source = secrets.randbits(63)
        self.tasks: dict[str, list[asyncio.Task[None]]] = {}

    async def connect(self) -> Bus:
        found = driver("embedded")
        bus: Bus = await found.open_bus(found.Options(dir=self.directory))
        return bus

    async def bus(self, name: str) -> Bus:
        return await self.connect()

    def identity(self, name: str, bus: Any) -> Identity:
        return Identity(name, secrets.randbits(63), bus.process, socket.gethostname(), os.getpid())

    @contextlib.asynccontextmanager
    async def member(self, name: str) -> AsyncIterator[Election]:
        bus = await self.bus(name)
        identity = self.identity(name, bus)

        def word(term: int, number: int, resigns: bool) -> Beat:
            return Beat(SETUP, identity, 0, term, number, (Position(0, 0, None),), resigns)

        control = Control(bus, self.topic, self.source, 0, trouble=lambda error: None)
        election = LogElection(bus, control, identity, word, every=BEAT)
        try:
            async with asyncio.TaskGroup() as tasks:
                self.tasks[name] = [tasks.create_task(control.run()), tasks.create_task(election.run())]
                await control.reading.wait()
                yield election
                for task in self.tasks[name]:
                    task.cancel()
        finally:
            await bus.aclose()

    async def die(self, name: str) -> None:
        """No process can be killed here: nothing is heard or said from now on."""
        for task in self.tasks[name]:
            task.cancel()

    @property
    def hooks(self) -> dict[str, Any]:
        return {"die": self.die}


class Link(Faults):
    """A connection with faults, of what passes for a process of its own."""

    def __init__(self, inner: Bus, process: str, gone: dict[str, asyncio.Event], **claims: bool) -> None:
        super().__init__(inner)
        self.process = process
        self.processes = gone
        self.processes[process] = asyncio.Event()
        self.capabilities = dataclasses.replace(inner.capabilities, **claims)

        self.awake = asyncio.Event()
        self.awake.set()

    async def feed(self, topic: str, start: Start, group: str | None) -> Feed:
        return HeldFeed(await super().feed(topic, start, group), self.awake)

    def freeze(self) -> None:
        self.awake.clear()
        self.hang("pipe", "feed", "write", "confirmed", "read")

    def thaw(self) -> None:
        self.awake.set()
        self.heal()

    async def gone(self, process: str) -> None:
        await self.processes[process].wait()

    async def end(self, process: str) -> bool:
        return False


class HeldFeed:
    """What it reads it does not hand over before `awake` is set, also if it was being read when that was cleared."""

    def __init__(self, inner: Any, awake: asyncio.Event) -> None:
        self.inner = inner
        self.awake = awake

    async def read(self, max_messages: int, max_bytes: int) -> Any:
        found = await self.inner.read(max_messages, max_bytes)
        await self.awake.wait()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FaultyGroup(LogGroup):
    """The same with links that can be cut, and members that can hang."""

    def __init__(self, directory: Path, **claims: bool) -> None:
        super().__init__(directory)
        self.claims = claims
        self.links: dict[str, Link] = {}
        self.gone: dict[str, asyncio.Event] = {}

    async def bus(self, name: str) -> Bus:
        link = self.links[name] = Link(await self.connect(), name, self.gone, **self.claims)
        return link

    async def die(self, name: str) -> None:
        self.links[name].lose_link()
        self.gone[name].set()

    async def lose(self, name: str) -> None:
        self.links[name].lose_link()

    async def heal(self, name: str) -> None:
        self.links[name].restore()

    async def freeze(self, name: str) -> None:
        self.links[name].freeze()

    async def thaw(self, name: str) -> None:
        self.links[name].thaw()

    @property
    def hooks(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("die", "lose", "heal", "freeze", "thaw")}


async def carry_out(name: str, group: Any, *arguments: Any, **claims: bool) -> None:
    async def open_contest() -> elections.Contest:
        made = group(*arguments, **claims)
        return elections.Contest(member=made.member, patience=PATIENCE, **made.hooks)

    service = rounds_of_a_bus(group(*arguments, **claims).connect)
    await judge(name, open_contest, service, quiet=QUIET, stall=SILENCE / 2, limit=120.0)


@every_check
async def test_embedded(name: str, bus_directory: Path) -> None:
    await carry_out(name, LogGroup, bus_directory)


@every_check
@pytest.mark.parametrize("deaths", [False, True], ids=["without death notices", "with death notices"])
async def test_embedded_with_faults(name: str, deaths: bool, bus_directory: Path) -> None:
    await carry_out(name, FaultyGroup, bus_directory, deaths=deaths)
