"""Engines with a written order, on the embedded bus: several inputs, timers, and members that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.engine.order import Poisoned
from esp_pubsub.engine.order_topic import pass_over
from tests.integration.engines import URL, engine, leads, until
from tests.integration.members import AlwaysLeads

TICK = "id*:int64,text:string"
PAUSE = 20_000  # microseconds from an event to its timer


@esp.model(inputs={"Left": TICK, "Right": TICK}, outputs={"Merged": TICK, "Fired": TICK}, timers=True)
@dataclass
class Merge:
    """Both inputs in one window, in the order in which they came, and an event for each timer."""

    count: int = 0

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        rows = []
        for id, text in block.rows():
            self.count += 1
            rows.append((self.count, f"{window} {id} {text}"))
        out.emit("Merged", rows)
        out.wake(f"{window} {block.id}", out.now + PAUSE)

    def timer(self, key: str, out: esp.Out) -> None:
        self.count += 1
        out.emit("Fired", [(self.count, key)])


@contextlib.asynccontextmanager
async def feeding(directory: Path) -> AsyncIterator[dict[str, esp.Publisher]]:
    """A publisher of each input."""
    async with (
        esp.init(dir=directory) as client,
        client.publisher(f"{URL}/Left", TICK) as left,
        client.publisher(f"{URL}/Right", TICK) as right,
    ):
        yield {"Left": left, "Right": right}


async def feed(sources: dict[str, esp.Publisher], ids: range, pause: float = 0.0) -> None:
    for id in ids:
        for publisher in sources.values():
            await publisher.inject([(id, "x")])
            if pause:
                await asyncio.sleep(random.uniform(0, pause))


async def read(directory: Path, window: str, count: int) -> list[tuple[Any, ...]]:
    """The first rows of an output window; ids must follow each other, and nothing may be missed."""
    notices: list[Any] = []
    rows: list[tuple[Any, ...]] = []
    async with (
        asyncio.timeout(60),
        esp.init(dir=directory, on_notice=notices.append) as client,
        client.subscriber(f"{URL}/{window}", start="earliest") as subscriber,
    ):
        while len(rows) < count:
            block = await anext(subscriber)
            rows += block.rows()
    assert not [notice for notice in notices if type(notice).__name__ != "Joined"]
    return rows


async def check(directory: Path, blocks: int) -> None:
    """Every event of both inputs is there once, in the order of its input, and has fired once, after it was merged."""
    merged, fired = await read(directory, "Merged", 2 * blocks), await read(directory, "Fired", 2 * blocks)
    for window in ("Left", "Right"):
        assert [text for _, text in merged if text.startswith(window)] == [
            f"{window} {id} x" for id in range(1, blocks + 1)
        ]
    assert sorted(text for _, text in fired) == sorted(
        f"{window} {id}" for window in ("Left", "Right") for id in range(1, blocks + 1)
    )
    counts = sorted(count for count, _ in (*merged, *fired))
    assert counts == list(range(1, 4 * blocks + 1))
    at = {text.removesuffix(" x"): count for count, text in merged}
    assert all(count > at[key] for count, key in fired)


async def test_several_inputs_and_timers_have_one_order_for_all_members(bus_directory: Path) -> None:
    async with feeding(bus_directory) as sources, engine(bus_directory, Merge()) as a:
        await leads(a)
        async with engine(bus_directory, Merge()) as b:
            await feed(sources, range(1, 51), pause=0.002)
            await check(bus_directory, 50)
            await until(lambda: b.stats.steps == a.stats.steps == 200)
            assert a.stats.positions == b.stats.positions == (50, 50)


async def test_a_member_that_takes_over_goes_on_with_the_order(bus_directory: Path) -> None:
    async with feeding(bus_directory) as sources, engine(bus_directory, Merge()) as a:
        await leads(a)
        async with engine(bus_directory, Merge()) as b, asyncio.TaskGroup() as tasks:
            tasks.create_task(feed(sources, range(1, 201), pause=0.002))
            for one, other in ((a, b), (b, a), (a, b)):
                await leads(one)
                await asyncio.sleep(0.05)
                await one.hand_over()
                await leads(other)
            await check(bus_directory, 200)


async def test_an_engine_that_is_started_again_steps_through_the_same_order(bus_directory: Path) -> None:
    async with feeding(bus_directory) as sources:
        for last in (20, 40, 60):
            async with engine(bus_directory, Merge()) as only:
                await feed(sources, range(last - 19, last + 1))
                await until(lambda only=only, last=last: only.stats.steps == 4 * last)
                await until(lambda only=only: all(line.waiting_blocks == 0 for line in only.stats.lines))
        await check(bus_directory, 60)


async def test_an_order_is_one_though_every_member_writes_it_all_the_time(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esp_pubsub.failover.join.LogElection", lambda *_: AlwaysLeads())
    async with (
        feeding(bus_directory) as sources,
        engine(bus_directory, Merge()) as a,
        engine(bus_directory, Merge()) as b,
        engine(bus_directory, Merge()) as c,
    ):
        for each in (a, b, c):
            await leads(each)
        await feed(sources, range(1, 101), pause=0.002)
        await check(bus_directory, 100)
        assert any(each._order._order.void for each in (a, b, c))  # type: ignore[attr-defined]


@esp.model(inputs={"Left": TICK, "Right": TICK}, outputs={"Merged": TICK, "Fired": TICK}, timers=True)
class Stumbles:
    """Its first timer raises."""

    def __init__(self) -> None:
        self.fired = 0

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        out.wake(f"a:{block.id}", out.now + PAUSE)

    def timer(self, key: str, out: esp.Out) -> None:
        self.fired += 1
        if key == "a:1":
            raise ValueError("too early")


async def test_a_timer_that_raises_is_passed_over_once_the_order_says_so(bus_directory: Path) -> None:
    async with feeding(bus_directory) as sources:
        left = sources["Left"]
        await left.inject([(1, "x")])
        async with engine(bus_directory, Stumbles()) as only:
            with pytest.raises(esp.StepFailed, match="too early") as caught:
                async with asyncio.timeout(30):
                    await only.wait()
        step = Poisoned.parse(str(caught.value).rpartition(" ")[2])
        assert step.timer == "a:1"
        async with esp.init(dir=bus_directory) as client:
            await pass_over(client.bus, "local:5555/M/F/engine/p/q/order", 0, step)
        model = Stumbles()
        async with engine(bus_directory, model) as again:
            await until(lambda: again.stats.steps == 2)
            await left.inject([(2, "x")])
            await until(lambda: model.fired == 2)


async def test_a_timer_fires_while_nothing_comes(bus_directory: Path) -> None:
    async with feeding(bus_directory) as sources, engine(bus_directory, Merge()) as only:
        await leads(only)
        await sources["Left"].inject([(1, "x")])
        assert await read(bus_directory, "Fired", 1) == [(2, "Left 1")]


async def test_time_goes_on_over_the_death_of_all_members(bus_directory: Path) -> None:
    """A timer that was due while nobody lived fires once somebody does."""
    async with feeding(bus_directory) as sources:
        async with engine(bus_directory, Merge()) as first:
            await leads(first)
            await sources["Left"].inject([(1, "x")])
            await until(lambda: first.stats.steps >= 1)
        async with engine(bus_directory, Merge()):
            assert await read(bus_directory, "Fired", 1) == [(2, "Left 1")]


async def test_a_model_that_looks_at_something_else_is_found_by_its_step_chain(bus_directory: Path) -> None:
    def late(more: int) -> Any:
        @esp.model(inputs={"Left": TICK, "Right": TICK}, outputs={"Merged": TICK}, timers=True)
        def model(window: str, block: esp.Block, out: esp.Out) -> None:
            out.wake("never", (1 << 62) + more)
            out.emit("Merged", block)

        return model

    async with feeding(bus_directory) as sources, engine(bus_directory, late(0)) as a:
        await leads(a)
        async with engine(bus_directory, late(1)) as b:
            await feed(sources, range(1, 601))
            with pytest.raises(esp.StepsDiffer, match="up to step 1000"):
                async with asyncio.timeout(30):
                    await b.wait()


async def test_an_order_that_is_emptied_under_an_engine_ends_it_by_name(bus_directory: Path) -> None:
    async with feeding(bus_directory) as sources, engine(bus_directory, Merge()) as only:
        await leads(only)
        await feed(sources, range(1, 3))
        await until(lambda: only.stats.steps >= 4)
        async with esp.init(dir=bus_directory) as client:
            await client.catalog().purge("local:5555/M/F/engine/p/q/order")
        with pytest.raises(esp.InputLost, match=r"/order on from position") as caught:
            async with asyncio.timeout(30):
                await only.wait()
        assert caught.value.topic.endswith("/order")


async def test_foreign_bytes_on_the_order_topic_change_nothing(bus_directory: Path) -> None:
    async with feeding(bus_directory) as sources, engine(bus_directory, Merge()) as only:
        await leads(only)
        async with esp.init(dir=bus_directory) as client:
            pipe = await client.bus.pipe("local:5555/M/F/engine/p/q/order")
            for id in range(1, 21):
                await pipe.write([b"foreign", b""])
                await feed(sources, range(id, id + 1))
            await pipe.aclose()
        await check(bus_directory, 20)
