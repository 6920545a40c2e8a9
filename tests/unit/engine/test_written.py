"""Engines with a written order, on a bus in memory and a virtual clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.engine import written
from esp_pubsub.failover.course import Course
from esp_pubsub.testing._sim_bus import SimFeed, SimPipe
from esp_pubsub.testing.faults import Faults
from tests.integration.members import AlwaysLeads
from tests.unit.virtual_group import World, in_a_world

URL = "dfESP://sim:5555/p/q"
INPUT, OUTPUT = f"{URL}/In", f"{URL}/Out"
SCHEMA = "id*:int64"


YEAR = 365 * 24 * 3_600 * 1_000_000


@esp.model(inputs={"In": SCHEMA}, outputs={"Out": SCHEMA}, timers=True)
class Echo:
    """Each block, and once more after a while."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        self.times.append(out.now)
        out.emit("Out", block)
        out.wake(str(block.id), out.now + 200_000)

    def timer(self, key: str, out: esp.Out) -> None:
        out.emit("Out", [(int(key),)])


async def member(client: esp.Client, model: Any = None, **options: Any) -> esp.Engine:
    return await client.engine(model or Echo(), URL, options=esp.EngineOptions(stall=0.5, close_timeout=1.0, **options))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # on a virtual clock
            await asyncio.sleep(0.01)


async def steps(engine: esp.Engine, count: int) -> None:
    await until(lambda: engine.stats.steps == count)


def test_a_beginning_that_nobody_confirms_is_waited_for_a_while_and_taken_at_the_next_attempt() -> None:
    async def scene(world: World) -> None:
        client = await world.client("A")
        faults = Faults.into(client)
        faults.hang("confirmed")
        async with asyncio.timeout(60):
            with pytest.raises(esp.BusUnavailable, match="/order"):
                await member(client)
        faults.heal()
        engine = await member(client)
        source = await client.publisher(INPUT, SCHEMA)
        await source.inject([(1,)])
        await steps(engine, 2)

    in_a_world(scene)


def test_a_leader_waits_for_what_another_one_ordered_though_a_timer_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esp_pubsub.failover.join.LogElection", lambda *_: AlwaysLeads())

    async def scene(world: World) -> None:
        ours, theirs = await member(await world.client("A")), await member(await world.client("B"))
        await until(lambda: ours.stats.role == theirs.stats.role == "active")
        source = await (await world.client("C")).publisher(INPUT, SCHEMA)
        await source.inject([(1,)])
        await steps(ours, 1)
        await steps(theirs, 1)
        world.broker.cut_topic("A", source.topic, 1.0, SimFeed)
        await source.inject([(2,)])
        await steps(theirs, 4)
        assert ours.stats.steps == 1
        await steps(ours, 4)

    in_a_world(scene)


def test_members_that_begin_to_lead_together_begin_at_the_wall_clocks_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hears the other lead before either knows what time it is."""
    monkeypatch.setattr("esp_pubsub.failover.join.LogElection", lambda *_: AlwaysLeads())

    async def scene(world: World) -> None:
        model = Echo()
        ours, theirs = await member(await world.client("A"), model), await member(await world.client("B"))
        await until(lambda: ours.stats.role == theirs.stats.role == "active")
        source = await (await world.client("C")).publisher(INPUT, SCHEMA)
        await source.inject([(1,)])
        await steps(ours, 2)
        assert abs(model.times[0] - time.time_ns() // 1000) < YEAR

    in_a_world(scene)


def test_a_member_that_comes_when_nobody_kept_the_time_reports_how_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(world: World) -> None:
        caplog.set_level(logging.INFO, "esp_pubsub")
        model, clock = Echo(), written.wall_clock
        source = await (await world.client("C")).publisher(INPUT, SCHEMA)
        first = await member(await world.client("A"))
        await source.inject([(1,)])
        await steps(first, 2)
        await first.aclose()
        monkeypatch.setattr("esp_pubsub.engine.written.wall_clock", lambda: clock() + 3_600_000_000)
        second = await member(await world.client("B"), model)
        await source.inject([(2,)])
        await steps(second, 4)
        assert 3_600_000_000 < model.times[1] - model.times[0] < 3_660_000_000
        assert "nobody kept the engine's time for 3" in caplog.text

    in_a_world(scene)


def test_an_engine_that_starts_hands_over_ends_and_starts_again_logs_nothing_above_info(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(world: World) -> None:
        source = await (await world.client("C")).publisher(INPUT, SCHEMA)
        for round in (1, 2):
            a, b = await member(await world.client(f"A{round}")), await member(await world.client(f"B{round}"))
            await source.inject([(round,)])
            await asyncio.gather(steps(a, 2 * round), steps(b, 2 * round))
            first, other = (a, b) if a.stats.role == "active" else (b, a)
            await first.hand_over()
            await until(lambda other=other: other.stats.role == "active")
            await first.aclose()
            await other.aclose()
            await asyncio.sleep(60)

    in_a_world(scene)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


async def with_an_order_pipe(world: World) -> tuple[esp.Engine, esp.Publisher, SimPipe]:
    """An engine that has taken a block, a publisher of its input, and the pipe through which it writes its order."""
    source = await (await world.client("C")).publisher(INPUT, SCHEMA)
    engine = await member(await world.client("A"))
    await source.inject([(1,)])
    await steps(engine, 2)
    [pipe] = [each for each in world.broker.open if isinstance(each, SimPipe) and each.name.endswith("/order")]
    return engine, source, pipe


def test_an_entry_that_is_lost_with_its_pipe_is_written_again_at_once() -> None:
    async def scene(world: World) -> None:
        engine, source, pipe = await with_an_order_pipe(world)
        vars(pipe)["_move"] = lambda: pipe.die("the connection is lost")
        await source.inject([(2,)])
        async with asyncio.timeout(2):
            await steps(engine, 4)

    in_a_world(scene)


def test_entries_that_are_read_back_need_no_confirmation() -> None:
    async def scene(world: World) -> None:
        engine, source, pipe = await with_an_order_pipe(world)
        vars(pipe)["_counts"] = False
        async with asyncio.timeout(2):
            for id in (2, 3):
                await source.inject([(id,)])
                await steps(engine, 2 * id)

    in_a_world(scene)


@esp.model(inputs={"In": SCHEMA}, outputs={"Out": SCHEMA})
def plain(window: str, block: esp.Block, out: esp.Out) -> None:
    out.emit("Out", block)


async def one_whose_reads_hang(world: World, order: Any) -> tuple[esp.Engine, esp.Engine]:
    """A member that leads, and reads nothing of its input any more, which nothing tells it; and one that reads."""
    source = await (await world.client("C")).publisher(INPUT, SCHEMA)
    ours = await member(await world.client("A"), plain, order=order)
    await until(lambda: ours.stats.role == "active")
    theirs = await member(await world.client("B"), plain, order=order)
    await until(lambda: theirs.stats.role == "candidate")
    world.broker.hang_topic("A", source.topic, 600.0)
    await source.inject([(1,)])
    return ours, theirs


@pytest.mark.parametrize("order", [None, "written"])
def test_a_leader_whose_reads_hang_silently_lets_one_that_reads_go_first(order: Any) -> None:
    async def scene(world: World) -> None:
        ours, theirs = await one_whose_reads_hang(world, order)
        async with asyncio.timeout(5):  # ten times `stall`
            await until(lambda: theirs.stats.lines[0].on_bus == 1)
        assert ours.stats.steps == 0
        assert theirs.stats.role == "active"

    in_a_world(scene)


@pytest.mark.parametrize("order", [None, "written"])
@pytest.mark.parametrize("mutant", ["no challenge", "no yielding"])
def test_without_a_challenge_nobody_would_go_on(order: Any, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the fault that the challenge is there for; a mutant of either half of it is caught by the test above."""
    method = "challenges" if mutant == "no challenge" else "yields"
    monkeypatch.setattr(Course, method, lambda *_: False)

    async def scene(world: World) -> None:
        _, theirs = await one_whose_reads_hang(world, order)
        await asyncio.sleep(60)
        assert theirs.stats.lines[0].on_bus == 0

    in_a_world(scene)


def test_a_standby_whose_reads_hang_challenges_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(world: World) -> None:
        source = await (await world.client("C")).publisher(INPUT, SCHEMA)
        ours = await member(await world.client("A"), plain)
        await until(lambda: ours.stats.role == "active")
        theirs = await member(await world.client("B"), plain)
        await until(lambda: theirs.stats.role == "candidate")
        world.broker.hang_topic("B", source.topic, 600.0)
        for id in range(20):
            await source.inject([(id,)])
            await asyncio.sleep(0.5)
        assert ours.stats.role == "active"

    in_a_world(scene)
    assert "challenges" not in caplog.text
