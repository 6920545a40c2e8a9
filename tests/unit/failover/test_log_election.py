"""The log election on a virtual clock: what a member does that stood still."""

from __future__ import annotations

import asyncio
from typing import Any

from esp_pubsub.bus import Bounds, Bus, Feed, Start
from esp_pubsub.failover.control import Control
from esp_pubsub.failover.line import Position
from esp_pubsub.failover.log_election import LogElection
from esp_pubsub.failover.words import Beat, Identity, Setup
from esp_pubsub.testing.virtual import Init, run_virtual

SETUP = Setup(("t",), ("id*:int64",), "rows", "log")


class Frozen:
    """A bus whose feeds hand nothing over from `freeze` until somebody asks how long the topic is."""

    def __init__(self, inner: Bus) -> None:
        self.inner = inner
        self.awake = asyncio.Event()
        self.awake.set()

    async def feed(self, topic: str, start: Start, group: str | None) -> Feed:
        return FrozenFeed(await self.inner.feed(topic, start, group), self.awake)

    async def bounds(self, topic: str) -> Bounds:
        """The answer is under way for a moment, in which all that was held up is read."""
        if not self.awake.is_set():
            self.awake.set()
            await asyncio.sleep(0.05)
        return await self.inner.bounds(topic)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FrozenFeed:
    def __init__(self, inner: Any, awake: asyncio.Event) -> None:
        self.inner = inner
        self.awake = awake

    async def read(self, max_messages: int, max_bytes: int) -> Any:
        found = await self.inner.read(max_messages, max_bytes)
        await self.awake.wait()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def member(tasks: asyncio.TaskGroup, bus: Any, nonce: int) -> tuple[LogElection, list[asyncio.Task[None]]]:
    identity = Identity(f"member-{nonce}", nonce, "", "h", nonce)

    def word(term: int, number: int, resigns: bool) -> Beat:
        return Beat(SETUP, identity, 0, term, number, (Position(0, 0, None),), resigns)

    control = Control(bus, "control", 7, 0, trouble=lambda error: None)
    election = LogElection(bus, control, identity, word)
    return election, [tasks.create_task(control.run()), tasks.create_task(election.run())]


def test_a_member_that_hears_the_leader_while_it_asks_whether_it_has_heard_everything_does_not_claim() -> None:
    async def scene(init: Init) -> None:
        async with init() as one, init() as other, asyncio.TaskGroup() as tasks:
            frozen = Frozen(other.bus)
            (leader, one_works), (standby, other_works) = member(tasks, one.bus, 1), member(tasks, frozen, 2)
            await leader.campaign()
            watching = tasks.create_task(leader.watch())
            waiting = tasks.create_task(standby.campaign())
            await asyncio.sleep(5.0)
            frozen.awake.clear()
            await asyncio.sleep(5.0)
            assert frozen.awake.is_set(), "it was no test: nobody wanted to claim"
            assert not watching.done() and not waiting.done()
            for task in (watching, waiting, *one_works, *other_works):
                task.cancel()

    run_virtual(scene)
