"""Engines that switch to another version of their model, on the embedded bus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.engine.order import Poisoned
from esp_pubsub.engine.order_topic import pass_over, switch
from esp_pubsub.engine.restoring import newest_place
from esp_pubsub.publisher import source_number
from tests.integration.engines import URL, engine, feeding, leads, until

ORDER = "local:5555/M/F/engine/p/q/order"
ROW = "id*:int64,symbol:string,quantity:int64"
COUNT = "block*:int64,version:string,count:int64"
WINDOWS: dict[str, Any] = {"inputs": {"Trades": ROW}, "outputs": {"Counts": COUNT}}
SETTINGS: dict[str, Any] = {"order": "written", "snapshot_every": 0.1, "buffer": 50}


@esp.model(**WINDOWS, version="1")
@dataclass
class One:
    """How many rows it has seen."""

    count: int = 0

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        self.count += len(block.rows())
        out.emit("Counts", [(block.id, "1", self.count)])


@esp.model(inputs={"Trades": ROW}, outputs={"Counts": COUNT, "Twice": COUNT}, version="2")
@dataclass
class Two:
    """The same by a field of another name and type, and an output window more."""

    counts: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def migrate(version: str, data: Any) -> Any:
        return {"counts": {"all": data["count"]}} if version == "1" else data

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        self.counts["all"] += len(block.rows())
        out.emit("Counts", [(block.id, "2", self.counts["all"])])
        out.emit("Twice", [(block.id, "2", 2 * self.counts["all"])])


@esp.model(**WINDOWS, version="1")
@dataclass
class OneAgain(One):
    """The first version once more, which takes back what the second one left."""

    @classmethod
    def migrate(cls, version: str, data: Any) -> Any:
        assert version == "2"
        return {"count": data["counts"]["all"]}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


async def say(directory: Path, to: str) -> str:
    async with esp.init(dir=directory) as client:
        return await switch(client.bus, ORDER, 0, to)


async def feed(publisher: esp.Publisher, first: int, last: int) -> None:
    for id in range(first, last + 1):
        await publisher.inject([(id, "IBM", 1)])


async def counts(directory: Path, window: str, blocks: int) -> list[tuple[int, str, int]]:
    """The rows of so many blocks of a window, which must be one sequence."""
    notices: list[Any] = []
    async with (
        asyncio.timeout(60),
        esp.init(dir=directory, on_notice=notices.append) as client,
        client.subscriber(f"{URL}/{window}", start="earliest") as subscriber,
    ):
        found = [await anext(subscriber) for _ in range(blocks)]
    assert [block.id for block in found] == [*range(1, blocks + 1)]
    assert {block.run for block in found} == {0}
    assert not [notice for notice in notices if type(notice).__name__ != "Joined"]
    return [block.rows()[0] for block in found]


@contextlib.asynccontextmanager
async def opening(directory: Path, model: Any, kept: Path) -> AsyncIterator[asyncio.Task[esp.Engine]]:
    """A member that may have to wait before it is open."""
    async with esp.init(dir=directory, on_notice=lambda notice: None) as client, asyncio.TaskGroup() as tasks:
        options = esp.EngineOptions(**SETTINGS)

        async def opened() -> esp.Engine:
            return await client.engine(model, URL, snapshots=kept, options=options)

        task = tasks.create_task(opened())
        try:
            yield task
        finally:
            if not task.cancel():
                with contextlib.suppress(esp.EspError):
                    await task.result().aclose()


async def ends(member: esp.Engine) -> esp.Switched:
    with pytest.raises(esp.Switched) as caught:
        async with asyncio.timeout(30):
            await member.wait()
    return caught.value


async def test_subscribers_see_one_sequence_across_a_switch(bus_directory: Path, kept: Path) -> None:
    async with (
        feeding(bus_directory) as source,
        engine(bus_directory, One(), snapshots=kept, **SETTINGS) as a,
        engine(bus_directory, One(), snapshots=kept, **SETTINGS) as b,
        opening(bus_directory, Two(), kept) as c,
        opening(bus_directory, Two(), kept) as d,
    ):
        await leads(a)
        await feed(source, 1, 100)
        assert await say(bus_directory, "2") == "1"
        await feed(source, 101, 200)
        for old in (a, b):
            assert (await ends(old)).version == "2"
        async with asyncio.timeout(30):
            new = [await c, await d]
        await until(lambda: any(each.stats.role == "active" for each in new))
        await feed(source, 201, 300)
        rows = await counts(bus_directory, "Counts", 300)
        assert [count for _, _, count in rows] == [*range(1, 301)]
        versions = [version for _, version, _ in rows]
        assert versions == sorted(versions)
        await until(lambda: all(each.stats.steps == 300 for each in new))
        twice = await counts(bus_directory, "Twice", versions.count("2"))
        assert [count for _, _, count in twice] == [2 * n for n in range(301 - versions.count("2"), 301)]


async def test_a_standby_finishes_a_switch_in_whose_middle_the_active_member_dies(
    bus_directory: Path, kept: Path
) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, One(), snapshots=kept, **SETTINGS) as a:
        a._group._senders[0].run = asyncio.Event().wait  # type: ignore[method-assign,assignment]  # it sends nothing
        await leads(a)
        async with (
            engine(bus_directory, One(), snapshots=kept, **SETTINGS) as b,
            opening(bus_directory, Two(), kept) as c,
        ):
            await feed(source, 1, 30)
            await say(bus_directory, "2")
            await until(lambda: a.stats.steps == b.stats.steps == 30)
            assert b.stats.lines[0].on_bus == 0
            a._task.cancel()  # type: ignore[union-attr]  # as if it were killed
            assert (await ends(b)).version == "2"
            async with asyncio.timeout(30):
                two = await c
            await feed(source, 31, 60)
            await until(lambda: two.stats.steps == 60)
            rows = await counts(bus_directory, "Counts", 60)
            assert [count for _, _, count in rows] == [*range(1, 61)]


async def test_a_member_of_a_version_to_which_nobody_switched_waits_and_says_so(
    bus_directory: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        feeding(bus_directory) as source,
        engine(bus_directory, One(), snapshots=kept, **SETTINGS) as a,
        opening(bus_directory, Two(), kept) as waiting,
    ):
        await leads(a)
        await until(lambda: "the engine runs version '1'" in caplog.text)
        await feed(source, 1, 20)
        await until(lambda: a.stats.steps == 20)
        assert not waiting.done()


async def test_without_a_directory_a_member_of_another_version_is_refused(bus_directory: Path) -> None:
    async with engine(bus_directory, One(), **SETTINGS):
        with pytest.raises(esp.BeginningDiffers, match="snapshots="):
            async with engine(bus_directory, Two(), **SETTINGS):
                pass


async def test_a_switch_that_nobody_can_follow_is_taken_back(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source:
        async with engine(bus_directory, One(), snapshots=kept, **SETTINGS) as a:
            await leads(a)
            await feed(source, 1, 20)
            await say(bus_directory, "a typing error")
            await ends(a)
        with pytest.raises(esp.Switched):
            async with engine(bus_directory, One(), snapshots=kept, **SETTINGS):
                pass
        await say(bus_directory, "1")
        async with (
            engine(bus_directory, One(), snapshots=kept, **SETTINGS) as b,
            engine(bus_directory, One(), **SETTINGS) as c,
        ):
            await feed(source, 21, 40)
            await until(lambda: b.stats.steps == c.stats.steps == 40)
            rows = await counts(bus_directory, "Counts", 40)
            assert [count for _, _, count in rows] == [*range(1, 41)]


async def test_a_switch_back_goes_on_with_what_the_later_version_left(bus_directory: Path, kept: Path) -> None:
    models: list[Callable[[], Any]] = [One, Two, OneAgain, Two]
    async with feeding(bus_directory) as source:
        for at, make in enumerate(models):
            async with engine(bus_directory, make(), snapshots=kept, **SETTINGS) as only:
                await feed(source, 10 * at + 1, 10 * at + 10)
                await until(lambda only=only, at=at: only.stats.steps == 10 * at + 10)
                await say(bus_directory, "21"[at % 2])
                await ends(only)
        rows = await counts(bus_directory, "Counts", 40)
        assert [count for _, _, count in rows] == [*range(1, 41)]
        assert [block for block, _, _ in await counts(bus_directory, "Twice", 20)] == [*range(11, 21), *range(31, 41)]


async def test_two_switches_in_a_row_are_one_to_the_last(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source, opening(bus_directory, Two(), kept) as waiting:
        async with engine(bus_directory, One(), snapshots=kept, **SETTINGS) as a:
            await feed(source, 1, 20)
            await until(lambda: a.stats.steps == 20)
            await asyncio.gather(say(bus_directory, "3"), say(bus_directory, "4"))
            await say(bus_directory, "2")
            await ends(a)
        async with asyncio.timeout(30):
            two = await waiting
        await feed(source, 21, 40)
        await until(lambda: two.stats.steps == 40)
        assert [count for _, _, count in await counts(bus_directory, "Counts", 40)] == [*range(1, 41)]


async def test_an_order_of_which_retention_took_the_beginning_is_switched_by_a_snapshot(
    bus_directory: Path, kept: Path
) -> None:
    async with feeding(bus_directory) as source, esp.init(dir=bus_directory, ring_records=20) as client:
        options = esp.EngineOptions(**SETTINGS)
        only = await client.engine(One(), URL, snapshots=kept, options=options)
        for id in range(1, 61):
            await feed(source, id, id)
            await until(lambda id=id: only.stats.steps == id)
        await only.persist()
        with pytest.raises(esp.BusRefused, match="--snapshots"):
            await say(bus_directory, "2")
        start = await newest_place(client.bus, ORDER, source_number(ORDER.removesuffix("/order")), 0, kept)
        assert await switch(client.bus, ORDER, 0, "2", start) == "1"
        await ends(only)
        two = await client.engine(Two(), URL, snapshots=kept, options=options)
        assert two.stats.steps == 60
        await two.aclose()


async def test_a_switch_to_the_version_that_runs_writes_nothing(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, One(), snapshots=kept, **SETTINGS) as only:
        await leads(only)
        async with esp.init(dir=bus_directory) as client:
            end = (await client.bus.bounds(ORDER)).end
            assert await switch(client.bus, ORDER, 0, "1") == "1"
            assert (await client.bus.bounds(ORDER)).end == end
        await feed(source, 1, 5)
        await until(lambda: only.stats.steps == 5)


async def test_all_died_before_the_switch_and_one_that_comes_again_leaves_what_the_next_version_needs(
    bus_directory: Path, kept: Path
) -> None:
    async with feeding(bus_directory) as source, opening(bus_directory, Two(), kept) as waiting:
        async with engine(bus_directory, One(), snapshots=kept, **SETTINGS) as a:
            await feed(source, 1, 20)
            await until(lambda: a.stats.steps == 20)
            a._task.cancel()  # type: ignore[union-attr]  # as if it were killed
        await say(bus_directory, "2")
        await asyncio.sleep(0)
        assert not waiting.done()
        async with engine(bus_directory, One(), snapshots=kept, **SETTINGS) as b:
            await ends(b)
        async with asyncio.timeout(30):
            two = await waiting
        await feed(source, 21, 40)
        await until(lambda: two.stats.steps == 40)
        assert [count for _, _, count in await counts(bus_directory, "Counts", 40)] == [*range(1, 41)]


async def test_a_member_without_a_directory_says_what_is_missing(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source:
        async with engine(bus_directory, One(), **SETTINGS) as a:
            await leads(a)
            await feed(source, 1, 20)
            await until(lambda: a.stats.steps == 20)
            await say(bus_directory, "2")
            assert "could leave no snapshot" in str(await ends(a))
        async with engine(bus_directory, One(), snapshots=kept, **SETTINGS) as b:
            await ends(b)
        async with engine(bus_directory, Two(), snapshots=kept, **SETTINGS) as c:
            await leads(c)
            assert c.stats.steps == 20


@esp.model(**WINDOWS, version="2")
@dataclass
class Fails(One):
    @staticmethod
    def migrate(version: str, data: Any) -> Any:
        raise LookupError(f"no idea what version {version} left")


@esp.model(**WINDOWS, version="2")
@dataclass
class Unable(One):
    more: int = 0


async def test_a_state_that_cannot_be_migrated_is_refused_with_the_reason(bus_directory: Path, kept: Path) -> None:
    async with engine(bus_directory, One(), snapshots=kept, **SETTINGS) as a:
        await leads(a)
        await say(bus_directory, "2")
        await ends(a)
    for model, says in ((Fails(), "no idea what version 1 left"), (Unable(), r"migrate\(version, data\)")):
        with pytest.raises(esp.StateRefused, match=says):
            async with engine(bus_directory, model, snapshots=kept, **SETTINGS):
                pass


async def test_a_derived_order_has_no_place_for_a_switch(bus_directory: Path) -> None:
    async with engine(bus_directory, One()):
        with pytest.raises(esp.NotOffered, match="--repeat"):
            await say(bus_directory, "2")


async def test_what_was_passed_over_before_a_switch_is_passed_over_after_it(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, One(), snapshots=kept, **SETTINGS) as a:
        await feed(source, 1, 5)
        await until(lambda: a.stats.steps == 5)
        async with esp.init(dir=bus_directory) as client:
            async with client.subscriber(f"{URL}/Trades?side=in", start="earliest") as subscriber:
                block = await anext(subscriber)
            await pass_over(client.bus, ORDER, 0, Poisoned(block.source, block.run, 7))
        await say(bus_directory, "2")
        await ends(a)

        class Stumbles(Two):
            def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
                if block.id == 7:
                    raise ValueError("no such trade")
                super().step(window, block, out)

        async with engine(bus_directory, Stumbles(), snapshots=kept, **SETTINGS) as b:
            await feed(source, 6, 10)
            await until(lambda: b.stats.steps == 10)
