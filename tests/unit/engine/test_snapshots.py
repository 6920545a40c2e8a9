"""Snapshots of several members in one directory, on a bus in memory and a virtual clock."""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.engine import snapshots
from tests.unit.virtual_group import World, in_a_world

URL = "dfESP://sim:5555/p/q"
SCHEMA = "id*:int64"


@esp.model(inputs={"In": SCHEMA}, outputs={"Out": SCHEMA})
@dataclass
class Sum:
    total: int = 0

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        self.total += block.id
        out.emit("Out", [(self.total,)])


async def member(world: World, name: str, kept: Path) -> esp.Engine:
    client = await world.client(name)
    return await client.engine(Sum(), URL, snapshots=kept, options=esp.EngineOptions(snapshot_every=1_000.0))


async def steps(count: int, *engines: esp.Engine) -> None:
    async with asyncio.timeout(60):
        while any(engine.stats.steps < count for engine in engines):  # noqa: ASYNC110  # on a virtual clock
            await asyncio.sleep(0.01)


def test_members_that_take_snapshots_at_the_same_time_do_not_remove_each_others(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        source = await (await world.client("S")).publisher(f"{URL}/In", SCHEMA)
        engines = [await member(world, name, tmp_path) for name in "ABC"]
        for id in range(1, 11):
            await source.inject([(id,)])
        await steps(10, *engines)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(engine.persist())  # each counts with the next block
            await asyncio.sleep(0.5)
            for age, file in enumerate(await asyncio.to_thread(lambda: sorted(tmp_path.glob("*.new")))):
                await asyncio.to_thread(os.utime, file, (age, age))
            await source.inject([(11,)])
        assert len(await asyncio.to_thread(lambda: list(tmp_path.glob("*.snapshot")))) == 3

    in_a_world(scene)


def test_a_member_that_is_closed_while_a_write_fails_leaves_no_error_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(snapshots, "_append", full)

    async def scene(world: World) -> None:
        source = await (await world.client("S")).publisher(f"{URL}/In", SCHEMA)
        engine = await member(world, "A", tmp_path)
        await source.inject([(1,)])
        await steps(1, engine)
        asking = asyncio.ensure_future(engine.persist())
        while not await asyncio.to_thread(lambda: [*tmp_path.iterdir()]):  # noqa: ASYNC110  # on a virtual clock
            await asyncio.sleep(0.0001)
        await asyncio.sleep(0.0001)
        engine._task.cancel()  # type: ignore[union-attr]  # the write is under way
        with pytest.raises(esp.EspError):
            await asking
        await asyncio.sleep(1)
        engine._snapshots._under_way = None  # type: ignore[union-attr]
        gc.collect()

    in_a_world(scene)
