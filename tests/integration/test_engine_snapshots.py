"""Engines that are restarted from snapshots, on the embedded bus."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import esp_pubsub as esp
from esp_pubsub.engine import snapshots
from esp_pubsub.engine.order import Poisoned
from esp_pubsub.engine.order_topic import pass_over
from esp_pubsub.engine.snapshot import Writer, read
from tests.integration.engines import MODEL, URL, Outputs, Totals, engine, feed, feeding, leads, until
from tests.integration.test_engine_order import Merge, check
from tests.integration.test_engine_order import feed as feed_both
from tests.integration.test_engine_order import feeding as feeding_both

OFTEN = {"snapshot_every": 0.05}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


def files(directory: Path, kind: str = "snapshot") -> list[Path]:
    return sorted(directory.glob(f"*.{kind}"))


async def counted(directory: Path, more_than: int = 0) -> None:
    """Wait until one counts."""
    await until(lambda: len(files(directory)) > more_than)


async def purge_order(directory: Path, topic: str) -> None:
    async with esp.init(dir=directory) as client:
        await client.catalog().purge(topic)


async def test_members_that_all_died_go_on_from_a_snapshot(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source:
        for last in (100, 200, 300):
            async with engine(bus_directory, snapshots=kept, **OFTEN) as a:
                if last > 100:
                    assert a.stats.steps > 0  # it did not begin at the beginning
                async with engine(bus_directory, snapshots=kept, **OFTEN) as b:
                    await feed(source, range(last - 99, last + 1), pause=0.001)
                    await until(lambda a=a, b=b, last=last: a.stats.steps == b.stats.steps == last)
                    await asyncio.wait([asyncio.ensure_future(counted(kept))])
                    for each in (a, b):
                        each._task.cancel()  # type: ignore[union-attr]  # as if it were killed
        async with engine(bus_directory, snapshots=kept, **OFTEN) as last_one:
            await leads(last_one)
            await Outputs(bus_directory).to(300)


async def test_a_member_goes_on_from_the_snapshot_that_was_asked_for(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, snapshots=kept, **OFTEN) as only:
        await leads(only)
        await feed(source, range(1, 51), pause=0.001)
        await until(lambda: only.stats.steps == 50)
        await only.persist()
        assert only.stats.last_snapshot is not None
    async with feeding(bus_directory) as source, engine(bus_directory, snapshots=kept, **OFTEN) as again:
        assert again.stats.steps == 50
        await leads(again)
        await Outputs(bus_directory).to(50)


async def test_a_written_order_its_timers_and_its_time_are_taken_up(bus_directory: Path, kept: Path) -> None:
    async with feeding_both(bus_directory) as sources:
        for last in (30, 60, 90):
            async with engine(bus_directory, Merge(), snapshots=kept, **OFTEN) as only:
                if last > 30:
                    assert only.stats.steps > 0
                await feed_both(sources, range(last - 29, last + 1), pause=0.001)
                await until(lambda only=only, last=last: only.stats.steps >= 3 * last)
                await asyncio.wait([asyncio.ensure_future(counted(kept))])
                only._task.cancel()  # type: ignore[union-attr]
        async with engine(bus_directory, Merge(), snapshots=kept):
            await check(bus_directory, 90)


async def test_few_are_kept_and_what_never_counted_goes(bus_directory: Path, kept: Path) -> None:
    kept.mkdir()
    async with feeding(bus_directory) as source, engine(bus_directory, snapshots=kept, **OFTEN) as a:
        await leads(a)
        async with engine(bus_directory, snapshots=kept, **OFTEN) as b:
            for begin in range(1, 400, 20):
                await feed(source, range(begin, begin + 20), pause=0.002)
            await until(lambda: b.stats.last_snapshot is not None)
            for kind, most in (("snapshot", 3), ("new", 2), ("tmp", 0)):
                await until(lambda kind=kind, most=most: len(files(kept, kind)) <= most)
            assert files(kept)


async def test_a_torn_snapshot_is_passed_over_for_an_older_one(
    bus_directory: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, snapshots=kept, **OFTEN) as only:
        await leads(only)
        for begin in (1, 51):
            await feed(source, range(begin, begin + 50))
            await until(lambda begin=begin: only.stats.steps == begin + 49)
            await only.persist()
    newest = files(kept)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    Path(kept, newest.name.replace("-0", "-9", 1)).write_bytes(b"foreign")
    async with engine(bus_directory, snapshots=kept) as again:
        assert 0 < again.stats.steps <= 100
        await until(lambda: again.stats.steps == 100)
    assert caplog.text.count("is passed over") >= 2


async def test_a_snapshot_of_another_version_of_the_model_is_passed_over(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, snapshots=kept, **OFTEN) as only:
        await leads(only)
        await feed(source, range(1, 51))
        await until(lambda: only.stats.steps == 50)
        await only.persist()
    for file in files(kept):  # as if this were the engine's version
        snapshot, parts = read(file.read_bytes())
        writer = Writer()
        pieces = [writer.head(replace(snapshot, version="2")), *map(writer.part, parts), writer.end()]
        file.write_bytes(b"".join(pieces))
    async with engine(bus_directory, snapshots=kept) as again:
        assert again.stats.steps < 50
        await until(lambda: again.stats.steps == 50)


@esp.model(**MODEL, version="1")
class Forgets(Totals.__mro__[0]):  # type: ignore[misc]
    """Its own restore forgets what it has summed up."""

    def snapshot(self) -> bytes:
        return b"nothing"

    def restore(self, data: bytes) -> None:
        self.totals = {}


async def test_a_snapshot_whose_restore_forgets_something_never_counts(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory) as a:
        await leads(a)
        async with (
            engine(bus_directory, Forgets(), snapshots=kept, **OFTEN) as b,
            asyncio.timeout(30),
            asyncio.TaskGroup() as tasks,
        ):
            feeding_on = tasks.create_task(feed(source, range(1, 100_000), pause=0.002))
            with pytest.raises(esp.InputDiffers):
                await b.wait()
            feeding_on.cancel()
        assert files(kept) == files(kept, "new") == []


async def test_a_member_that_leads_finds_out_that_its_restore_forgets_something(
    bus_directory: Path, kept: Path
) -> None:
    async with (
        feeding(bus_directory) as source,
        engine(bus_directory, Forgets(), snapshots=kept, snapshot_every=100.0) as only,
        asyncio.timeout(30),
        asyncio.TaskGroup() as tasks,
    ):
        await leads(only)
        await feed(source, range(1, 11))
        await until(lambda: only.stats.steps == 10)
        waiting = tasks.create_task(told(only))
        await until(lambda: files(kept, "new"))
        await feed(source, range(11, 21))
        assert "does something else" in await waiting
        await until(lambda: only.stats.lines[1].on_bus == 20)
        assert files(kept) == []


async def test_a_standby_that_differs_withdraws_what_it_took(bus_directory: Path, kept: Path) -> None:
    class Wanders(Totals):
        def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
            super().step(window, block, out)
            if block.id == 150:
                self.totals["IBM"] += 1

    async with feeding(bus_directory) as source, engine(bus_directory) as a:
        await leads(a)
        async with engine(bus_directory, Wanders(), snapshots=kept, **OFTEN) as b:
            await feed(source, range(1, 101), pause=0.002)
            await counted(kept)
            await feed(source, range(101, 201), pause=0.002)
            with pytest.raises(esp.InputDiffers):
                async with asyncio.timeout(30):
                    await b.wait()
        assert files(kept) == files(kept, "new") == []


@dataclass
class Stumbles(Totals):
    """Raises in the middle of a step, when it has changed its state already."""

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        super().step(window, block, out)
        if block.id == 31:
            raise ValueError("no such trade")


async def test_no_snapshot_is_taken_after_a_step_that_failed(bus_directory: Path, kept: Path) -> None:
    async with (
        feeding(bus_directory) as source,
        engine(bus_directory, Stumbles(), snapshots=kept, snapshot_every=100.0) as only,
    ):
        await leads(only)
        only._group.hand_over = asyncio.Event().wait  # type: ignore[method-assign,assignment]  # it takes long
        await feed(source, range(1, 32))
        await until(lambda: only._stepping.is_torn and not only._stepping.between.locked())
        with pytest.raises(esp.Closed, match="a step failed"):
            async with asyncio.timeout(30):
                await only.persist()
    assert list(kept.iterdir()) == []


async def test_no_snapshot_is_taken_of_a_member_that_stopped_in_the_middle_of_what_it_read(
    bus_directory: Path, kept: Path
) -> None:
    async with (
        feeding(bus_directory) as source,
        engine(bus_directory, snapshots=kept, snapshot_every=100.0, buffer=3) as only,
    ):
        await feed(source, range(1, 101))
        await until(lambda: only.stats.steps >= 3)  # it waits for room: nobody leads yet
        only._stepper.cancel()  # type: ignore[union-attr]
        with pytest.raises(esp.Closed):
            async with asyncio.timeout(30):
                await only.persist()
    assert list(kept.iterdir()) == []


async def test_who_waits_for_a_snapshot_of_a_member_that_is_closed_is_told(bus_directory: Path, kept: Path) -> None:
    async with engine(bus_directory, snapshots=kept, snapshot_every=100.0) as only:
        waiting = asyncio.ensure_future(only.persist())
        await asyncio.sleep(0)
        await only.aclose()
        with pytest.raises(esp.Closed):
            async with asyncio.timeout(30):
                await waiting


@dataclass
class Sets(Totals):
    """Has state that no snapshot keeps as it is."""

    seen: set[int] = field(default_factory=set)

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        self.seen.add(block.id)
        super().step(window, block, out)


async def test_a_state_that_would_come_back_different_is_told_and_the_engine_goes_on(
    bus_directory: Path, kept: Path
) -> None:
    notices: list[Any] = []
    async with feeding(bus_directory) as source, esp.init(dir=bus_directory, on_notice=notices.append) as client:
        model = esp.model(**MODEL, version="1")(Sets)()
        async with client.engine(model, URL, snapshots=kept, options=esp.EngineOptions(**OFTEN)) as only:  # type: ignore[arg-type]
            await leads(only)
            await feed(source, range(1, 11))
            with pytest.raises(esp.StateRefused, match="seen") as caught:
                async with asyncio.timeout(30):
                    await only.persist()
            assert caught.value.path == "seen"
            await Outputs(bus_directory).to(10)
    told = [notice for notice in notices if type(notice).__name__ == "Failure"]
    assert [type(notice.error) for notice in told] == [esp.StateRefused]
    assert files(kept) == files(kept, "new") == files(kept, "tmp") == []


async def test_a_directory_that_cannot_be_written_stops_snapshots_and_no_step(bus_directory: Path, kept: Path) -> None:
    kept.write_text("a file is in the way")
    async with feeding(bus_directory) as source, engine(bus_directory, snapshots=kept, **OFTEN) as only:
        await leads(only)
        await feed(source, range(1, 11))
        with pytest.raises(esp.EspError, match="no snapshot was taken"):
            async with asyncio.timeout(30):
                await only.persist()
        await Outputs(bus_directory).to(10)


@pytest.mark.parametrize("what", ["a file in the way", "read-only"])
async def test_a_directory_that_cannot_be_used_is_reported_before_anything_comes(
    bus_directory: Path, kept: Path, what: str
) -> None:
    notices: list[Any] = []
    kept.write_text("a file is in the way")
    directory = kept if what == "a file in the way" else Path("/proc/snapshots")
    async with (
        esp.init(dir=bus_directory, on_notice=notices.append) as client,
        client.engine(Totals(), URL, snapshots=directory),
    ):
        await until(lambda: notices)
    assert [(notice.code, type(notice.error)) for notice in notices] == [("pubsubCode_SNAPSHOT", esp.EspError)]


async def test_an_engine_without_snapshots_says_so(bus_directory: Path) -> None:
    class Plain:
        def step(self, window: str, block: esp.Block, out: esp.Out) -> None: ...

    async with engine(bus_directory) as only:
        with pytest.raises(esp.WrongOrder, match="snapshots="):
            await only.persist()
    with pytest.raises(esp.ConfigError, match="make it a dataclass"):
        async with engine(bus_directory, esp.model(**MODEL)(Plain)(), snapshots=Path(os.devnull)):
            pass


@esp.model(**MODEL, version="1")
class Raises(Totals.__mro__[0]):  # type: ignore[misc]
    """Its own snapshot raises something, or its own restore does."""

    def __init__(self, *, snapshot: bool = False, restore: bool = False) -> None:
        super().__init__()
        self.raises = snapshot, restore

    def snapshot(self) -> bytes:
        if self.raises[0]:
            raise KeyError("what snapshot misses")
        return repr(self.totals).encode()

    def restore(self, data: bytes) -> None:
        if self.raises[1]:
            raise KeyError("what restore misses")
        self.totals = ast.literal_eval(data.decode())


async def test_a_model_that_raises_in_its_own_snapshot_stops_snapshots_and_no_step(
    bus_directory: Path, kept: Path
) -> None:
    async with (
        feeding(bus_directory) as source,
        engine(bus_directory, Raises(snapshot=True), snapshots=kept, **OFTEN) as only,
    ):
        await leads(only)
        await feed(source, range(1, 11))
        with pytest.raises(esp.EspError, match="what snapshot misses"):
            async with asyncio.timeout(30):
                await only.persist()
        await feed(source, range(11, 21))
        await Outputs(bus_directory).to(20)


async def test_a_snapshot_on_which_the_models_own_restore_raises_is_passed_over(
    bus_directory: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, Raises(), snapshots=kept, **OFTEN) as only:
        await leads(only)
        await feed(source, range(1, 11))
        await until(lambda: only.stats.steps == 10)
        await only.persist()
    async with engine(bus_directory, Raises(restore=True), snapshots=kept, snapshot_every=100.0) as again:
        await until(lambda: again.stats.steps == 10)
    assert "what restore misses" in caplog.text
    assert "is passed over" in caplog.text


async def test_a_timers_key_that_no_snapshot_can_hold_stops_snapshots_and_no_step(
    bus_directory: Path, kept: Path
) -> None:
    @dataclass
    class Wakes:
        def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
            out.wake("\ud800", out.now + 3_600_000_000)

        def timer(self, key: str, out: esp.Out) -> None: ...

    model = esp.model(**MODEL, timers=True)(Wakes)()  # type: ignore[arg-type]
    async with feeding(bus_directory) as source, engine(bus_directory, model, snapshots=kept, **OFTEN) as only:
        await feed(source, range(1, 11))
        await until(lambda: only.stats.steps == 10)
        with pytest.raises(esp.EspError, match="UnicodeEncodeError"):
            async with asyncio.timeout(30):
                await only.persist()
        await feed(source, range(11, 21))
        await until(lambda: only.stats.steps == 20)


async def test_who_waits_for_a_snapshot_that_cannot_be_marked_is_told(bus_directory: Path, kept: Path) -> None:
    async with (
        feeding(bus_directory) as source,
        engine(bus_directory, snapshots=kept, snapshot_every=0.3) as only,
        asyncio.timeout(30),
        asyncio.TaskGroup() as tasks,
    ):
        await leads(only)
        await feed(source, range(1, 11))
        await until(lambda: only.stats.steps == 10)
        waiting = tasks.create_task(told(only))
        await until(lambda: files(kept, "new"))
        files(kept, "new")[0].unlink()  # as another member does whose snapshots count sooner
        assert "cannot be marked" in await waiting
        await only.persist()  # the next one counts


async def told(engine: esp.Engine) -> str:
    """What keeps a snapshot from counting."""
    with pytest.raises(esp.EspError) as caught:
        await engine.persist()
    return str(caught.value)


async def test_a_directory_that_somebody_empties_meanwhile_ends_no_engine(bus_directory: Path, kept: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, snapshots=kept, **OFTEN) as only:
        await leads(only)
        rotate = only._snapshots._rotate  # type: ignore[union-attr]

        def emptied() -> None:
            for file in kept.iterdir():
                file.unlink()
            rotate()

        only._snapshots._rotate = emptied  # type: ignore[union-attr,method-assign]
        await feed(source, range(1, 11))
        await until(lambda: only.stats.last_snapshot is not None)
        await feed(source, range(11, 21))
        await Outputs(bus_directory).to(20)
        assert only._failure is None


async def test_who_waits_on_a_member_that_is_closed_before_it_began_is_told(bus_directory: Path, kept: Path) -> None:
    async with engine(bus_directory, snapshots=kept) as only, asyncio.timeout(30):
        waiting = asyncio.ensure_future(only.persist())
        changes = asyncio.ensure_future(anext(only.roles()))
        await only.aclose()
        with pytest.raises(esp.Closed):
            await waiting
        assert (await changes).role == "left"
        with pytest.raises(esp.Closed):
            await only.persist()


async def test_what_an_engine_left_that_began_otherwise_is_in_nobodys_way(bus_directory: Path, kept: Path) -> None:
    for directory, blocks in ((bus_directory, 40), (bus_directory / "n", 4)):
        async with feeding(directory) as source, engine(directory, snapshots=kept, **OFTEN) as only:
            await leads(only)
            for last in range(blocks // 4, blocks + 1, blocks // 4):
                await feed(source, range(last - blocks // 4 + 1, last + 1))
                await until(lambda only=only, last=last: only.stats.steps == last)
                await only.persist()
        async with engine(directory, snapshots=kept) as again:
            assert again.stats.steps == blocks


@esp.model(**MODEL, version="1")
@dataclass
class Large(Totals.__mro__[0]):  # type: ignore[misc]
    """Its snapshot is written in several pieces."""

    names: dict[int, str] = field(default_factory=lambda: dict.fromkeys(range(20000), "x" * 100))


async def test_a_snapshot_that_another_member_removed_while_it_was_written_never_counts(
    bus_directory: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, removed = snapshots._append, list[Path]()

    def append_and_remove(file: Path, pieces: Any) -> None:
        append(file, pieces)
        if not removed:
            file.unlink()
            removed.append(file)

    monkeypatch.setattr(snapshots, "_append", append_and_remove)
    async with feeding(bus_directory) as source, engine(bus_directory, Large(), snapshots=kept, **OFTEN) as only:
        await leads(only)
        await feed(source, range(1, 11))
        await until(lambda: removed and only.stats.steps == 10)
        with contextlib.suppress(esp.EspError):
            await only.persist()  # it may be the one that was removed
        await only.persist()
    async with engine(bus_directory, Large(), snapshots=kept) as again:
        assert again.stats.steps == 10


async def test_a_standby_that_differs_withdraws_what_it_took_though_it_is_closed_meanwhile(
    bus_directory: Path, kept: Path
) -> None:
    class Wanders(Totals):
        def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
            super().step(window, block, out)
            if block.id == 150:
                self.totals["IBM"] += 1

    async with feeding(bus_directory) as source, engine(bus_directory) as a:
        await leads(a)
        async with engine(bus_directory, Wanders(), snapshots=kept, **OFTEN) as b:
            await feed(source, range(1, 101), pause=0.002)
            await counted(kept)
            taken, writing, written = b._snapshots, asyncio.Event(), asyncio.Event()
            withdraw = taken.withdraw  # type: ignore[union-attr]

            async def withdraw_late() -> None:  # something is being written, on a slow disk
                writing.set()
                await written.wait()
                await withdraw()

            taken.withdraw = withdraw_late  # type: ignore[union-attr,method-assign]
            await feed(source, range(101, 201), pause=0.002)
            async with asyncio.timeout(30):
                await writing.wait()
                closing = asyncio.ensure_future(b.aclose())
                await asyncio.sleep(0)
                written.set()
                with pytest.raises(esp.InputDiffers):
                    await closing
        assert files(kept) == files(kept, "new") == []


@pytest.mark.parametrize("order", [None, "written"])
async def test_a_block_that_was_passed_over_before_it_came_is_passed_over_by_a_restored_member_too(
    bus_directory: Path, kept: Path, order: Any
) -> None:
    settings: dict[str, Any] = {"snapshots": kept, "order": order, **OFTEN}
    topic = "local:5555/M/F/engine/p/q/order"
    async with feeding(bus_directory) as source, esp.init(dir=bus_directory) as client:
        async with engine(bus_directory, Stumbles(), **settings) as only:
            await leads(only)
            await feed(source, range(1, 11))
            async with client.subscriber(f"{URL}/Trades?side=in", start="earliest") as subscriber:
                block = await anext(subscriber)
            await pass_over(client.bus, topic, 0, Poisoned(block.source, block.run, 31))
            await feed(source, range(11, 21))
            await until(lambda: only.stats.steps == 20)
            await only.persist()
        async with engine(bus_directory, Stumbles(), **settings) as again:
            assert again.stats.steps == 20
            await feed(source, range(21, 41))
            await until(lambda: again.stats.steps == 40)


async def test_a_member_that_is_closed_while_it_writes_a_snapshot_leaves_no_part_of_it(
    bus_directory: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = asyncio.Event()
    create = snapshots._create

    async def hangs(self: Any, file: Path, standing: Any) -> None:
        await asyncio.to_thread(create, file)
        writes.set()
        await asyncio.Event().wait()

    async with feeding(bus_directory) as source, engine(bus_directory, snapshots=kept, **OFTEN) as only:
        await leads(only)
        monkeypatch.setattr(snapshots.Snapshots, "_write", hangs)
        await feed(source, range(1, 11))
        async with asyncio.timeout(30):
            await writes.wait()
        assert files(kept, "tmp")
    assert files(kept, "tmp") == []
