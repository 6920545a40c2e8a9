"""A new run of an engine that begins with a snapshot of the run before, on the embedded bus."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from tests.integration.engines import URL, engine, feeding, leads, until
from tests.integration.test_engine_switch import SETTINGS, One, Two, feed

DERIVED = SETTINGS | {"order": None}
ORDERS = pytest.mark.parametrize("settings", [DERIVED, SETTINGS], ids=["derived", "written"])


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


async def counts(directory: Path, blocks: int, run: int) -> list[int]:
    """What so many blocks of a run say, which must be one sequence."""
    async with (
        asyncio.timeout(60),
        esp.init(dir=directory, on_notice=lambda notice: None) as client,
        client.subscriber(f"{URL}/Counts", start="earliest") as subscriber,
    ):
        found: list[esp.Block] = []
        while len(found) < blocks:
            block = await anext(subscriber)
            found += [block] * (block.run == run)
    assert [block.id for block in found] == [*range(1, blocks + 1)]
    return [count for block in found for _, _, count in block.rows()]


async def first_run(directory: Path, kept: Path, source: esp.Publisher, settings: Any) -> None:
    """Twenty blocks, of which a snapshot has ten."""
    async with engine(directory, One(), snapshots=kept, **settings) as only:
        await leads(only)
        await feed(source, 1, 10)
        await until(lambda: only.stats.steps == 10)
        await only.persist()
    async with engine(directory, One(), **settings) as only:
        await feed(source, 11, 20)
        await until(lambda: only.stats.lines[0].on_bus == 20)


async def purge(directory: Path, topic: str) -> None:
    async with esp.init(dir=directory) as client:
        await client.catalog().purge(f"local:5555/{topic}")


@ORDERS
async def test_what_came_after_the_snapshot_is_emitted_again_in_the_new_run(
    bus_directory: Path, kept: Path, settings: Any
) -> None:
    async with feeding(bus_directory) as source:
        await first_run(bus_directory, kept, source, settings)
        again = {"snapshots": kept, "run": 1, "repeat": True, **settings}
        async with engine(bus_directory, One(), **again) as a, engine(bus_directory, One(), **again) as b:
            await feed(source, 21, 30)
            await until(lambda: a.stats.steps == b.stats.steps == 20)
            await a.persist()
        async with engine(bus_directory, One(), **again) as c:  # it begins with a snapshot of its own run
            assert c.stats.steps == 20
            await feed(source, 31, 40)
            assert await counts(bus_directory, 30, 1) == [*range(11, 41)]


@ORDERS
async def test_it_is_refused_unless_it_was_asked_for_and_changes_nothing(
    bus_directory: Path, kept: Path, settings: Any
) -> None:
    async with feeding(bus_directory) as source:
        await first_run(bus_directory, kept, source, settings)
        for given, says in (
            ({"snapshots": kept}, "--repeat"),
            ({"snapshots": kept / "elsewhere", "repeat": True}, "no snapshot of an earlier run"),
            ({"repeat": True}, "pass snapshots="),
        ):
            with pytest.raises(esp.ConfigError, match=says):
                async with engine(bus_directory, One(), run=1, **given, **settings):  # type: ignore[arg-type]
                    pass
        async with engine(bus_directory, One(), snapshots=kept, **settings) as old:
            assert old.stats.steps == 10
            await until(lambda: old.stats.steps == 20)


async def test_a_new_run_without_snapshots_begins_with_what_its_inputs_have(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source:
        await first_run(bus_directory, kept, source, SETTINGS)
        async with engine(bus_directory, One(), run=1, **SETTINGS):
            assert await counts(bus_directory, 20, 1) == [*range(1, 21)]


async def test_it_is_the_way_out_where_an_input_was_purged(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source:
        await first_run(bus_directory, kept, source, DERIVED)
        await purge(bus_directory, "p/q/Trades/I")
        with pytest.raises(esp.InputLost, match="--repeat"):
            async with asyncio.timeout(30), engine(bus_directory, One(), snapshots=kept, **DERIVED) as old:
                await old.wait()
        async with engine(bus_directory, One(), snapshots=kept, run=1, repeat=True, **DERIVED):
            await feed(source, 31, 40)
            assert await counts(bus_directory, 10, 1) == [*range(11, 21)]


async def test_it_is_the_way_out_where_the_order_was_lost(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source:
        await first_run(bus_directory, kept, source, SETTINGS)
        await purge(bus_directory, "M/F/engine/p/q/order")
        with pytest.raises(esp.InputLost, match="--repeat"):
            async with asyncio.timeout(30), engine(bus_directory, One(), snapshots=kept, **SETTINGS) as old:
                await old.wait()
        async with engine(bus_directory, One(), snapshots=kept, run=1, repeat=True, **SETTINGS):
            await feed(source, 21, 30)
            assert await counts(bus_directory, 20, 1) == [*range(11, 31)]


async def test_another_version_may_begin_it(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source:
        await first_run(bus_directory, kept, source, DERIVED)
        async with engine(bus_directory, Two(), snapshots=kept, run=1, repeat=True, **DERIVED):
            assert await counts(bus_directory, 10, 1) == [*range(11, 21)]


async def test_a_member_that_does_not_have_the_snapshot_is_told(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source:
        await first_run(bus_directory, kept, source, DERIVED)
        async with engine(bus_directory, One(), snapshots=kept, run=1, repeat=True, **DERIVED):
            for elsewhere in (None, kept / "elsewhere"):
                with pytest.raises(esp.InputLost, match="does not have it"):
                    async with engine(bus_directory, One(), snapshots=elsewhere, run=1, **DERIVED):
                        pass
