"""Engines on the embedded bus: every member has its own client, or is a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.engine import inputs
from esp_pubsub.engine.order import Poisoned
from esp_pubsub.engine.order_topic import pass_over
from esp_pubsub.publisher import source_number
from esp_pubsub.testing.faults import Faults
from esp_pubsub.wire.frame import BLOCK, ENTRY, ROWS, frames, seal
from tests.integration.engines import (
    MODEL,
    TRADE,
    URL,
    Outputs,
    Totals,
    engine,
    feed,
    feeding,
    leads,
    trades,
    until,
)
from tests.integration.members import AlwaysLeads

ROOT = Path(__file__).parents[2]
ORDER = "local:5555/M/F/engine/p/q/order"

# what subscribers see


async def test_subscribers_of_every_output_window_see_one_sequence_across_a_hand_over(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory) as a:
        await leads(a)
        async with engine(bus_directory) as b:
            await feed(source, range(1, 101))
            await until(lambda: b.stats.steps == 100)
            await a.hand_over()
            await leads(b)
            await feed(source, range(101, 201))
            await Outputs(bus_directory).to(200)
            assert a.stats.role != "active"


async def test_an_engine_that_is_closed_lets_the_next_one_go_on(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory) as a:
        await leads(a)
        async with engine(bus_directory) as b:
            await feed(source, range(1, 51))
            await a.aclose()
            await a.aclose()
            await feed(source, range(51, 101))
            await Outputs(bus_directory).to(100)
            assert b.stats.role == "active"
        await a.wait()
        with pytest.raises(esp.Closed):
            await a.hand_over()


async def test_an_engine_that_is_started_again_takes_up_its_windows_where_they_were(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source:
        for last in (40, 80, 120):
            async with engine(bus_directory) as only:
                await feed(source, range(last - 39, last + 1))
                await until(lambda only=only, last=last: only.stats.steps == last and only.stats.role == "active")
        await Outputs(bus_directory).to(120)


async def test_windows_are_exact_though_every_member_sends_all_the_time(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esp_pubsub.failover.join.LogElection", lambda *_: AlwaysLeads())
    async with feeding(bus_directory) as source, engine(bus_directory) as a, engine(bus_directory) as b:
        await leads(a)
        await leads(b)
        await feed(source, range(1, 301), pause=0.001)
        await Outputs(bus_directory).to(300)


async def test_a_full_outbox_makes_the_input_wait_and_loses_nothing(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source:
        await feed(source, range(1, 201))
        async with engine(bus_directory, buffer=3) as a, engine(bus_directory, buffer=3) as b:
            assert all(line.waiting_blocks <= 3 for each in (a, b) for line in each.stats.lines if not line.on_bus)
            await until(lambda: {a.stats.role, b.stats.role} >= {"active"})
            await Outputs(bus_directory).to(200)


@contextlib.asynccontextmanager
async def process(directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "tests.integration.engines", str(directory)]
    made = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.kill()
        await made.wait()


async def says(made: asyncio.subprocess.Process, role: str) -> None:
    assert made.stdout is not None
    async with asyncio.timeout(60):
        while json.loads(await made.stdout.readline()) != role:
            pass


async def test_killed_and_stopped_processes_leave_no_gap_and_no_duplicate(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, process(bus_directory) as a:
        await says(a, "active")
        async with process(bus_directory) as b, asyncio.TaskGroup() as tasks:
            await says(b, "candidate")
            tasks.create_task(feed(source, range(1, 1_001), pause=0.002))
            await asyncio.sleep(0.3)
            a.kill()
            await says(b, "active")
            async with process(bus_directory) as c:
                await says(c, "candidate")
                b.send_signal(signal.SIGSTOP)
                await says(c, "active")
                b.send_signal(signal.SIGCONT)
                await Outputs(bus_directory).to(1_000)


# how it begins


async def test_whoever_comes_later_begins_where_the_first_member_did(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source:
        await feed(source, range(1, 11))
        async with engine(bus_directory) as a:
            await until(lambda: a.stats.steps == 10)
        async with esp.init(dir=bus_directory) as client:
            await client.catalog().purge(ORDER)  # type: ignore[attr-defined]
        async with engine(bus_directory) as b:  # from what is retained
            await until(lambda: b.stats.steps == 10)


async def test_members_that_begin_at_the_same_moment_agree(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, contextlib.AsyncExitStack() as stack:
        opening = [stack.enter_async_context(engine(bus_directory)) for _ in range(4)]
        engines = await asyncio.gather(*opening)
        await feed(source, range(1, 51))
        await until(lambda: [each.stats.steps for each in engines] == [50] * 4)
        await Outputs(bus_directory).to(50)


async def test_an_order_that_lost_its_first_entry_and_what_was_retained_of_it_is_refused(bus_directory: Path) -> None:
    source = source_number(ORDER)
    async with esp.init(dir=bus_directory) as client:
        pipe = await client.bus.pipe(ORDER)
        await pipe.write(frames([seal(ENTRY, source=source, id=5)], 0, 0))
        await pipe.aclose()
    with pytest.raises(esp.InputLost, match="lost its first entry"):
        async with engine(bus_directory):
            pass
    async with engine(bus_directory, run=1):
        pass


async def test_foreign_bytes_in_front_of_the_beginning_do_no_harm(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client:
        pipe = await client.bus.pipe(ORDER)
        await pipe.write([b"foreign", *frames([seal(ENTRY, source=1, id=5)], 0, 0)])
        await pipe.aclose()
    async with engine(bus_directory, order="written") as a:
        await leads(a)
        async with engine(bus_directory, order="written"):
            pass


@pytest.mark.parametrize(
    ("options", "name"),
    [({"step_bytes": 9}, "step_bytes"), ({"step_blocks": 7}, "step_blocks"), ({"max_sources": 5}, "max_")],
)
async def test_a_member_with_other_limits_is_refused_with_both_sides(
    bus_directory: Path, options: dict[str, Any], name: str
) -> None:
    async with engine(bus_directory):
        with pytest.raises(esp.BeginningDiffers, match=name):
            async with engine(bus_directory, **options):
                pass


async def test_a_member_with_another_version_of_the_model_is_refused(bus_directory: Path) -> None:
    newer = esp.model(**MODEL, version="2")(lambda window, block, out: None)
    async with engine(bus_directory):
        with pytest.raises(esp.BeginningDiffers, match=r"version of the model: here '2', there '1'"):
            async with engine(bus_directory, newer):
                pass


async def test_a_higher_run_begins_anew_and_ends_the_one_before(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, run=1) as old:
        await leads(old)
        await feed(source, range(1, 21))
        await until(lambda: old.stats.lines[1].on_bus == 20)
        async with engine(bus_directory, run=2) as new:
            await leads(new)
            await feed(source, range(21, 41))
            await Outputs(bus_directory).to(40, run=2)
            with pytest.raises(esp.Stale):
                await old.wait()
        with pytest.raises(esp.Stale):
            async with engine(bus_directory, run=1):
                pass


# what goes wrong


async def test_a_step_that_raises_everywhere_stops_the_engine_after_all_before_it_is_sent(bus_directory: Path) -> None:
    class Stumbles(Totals):
        def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
            if block.id == 31:
                raise ZeroDivisionError("no such price")
            super().step(window, block, out)

    async with feeding(bus_directory) as source:
        await feed(source, range(1, 41))
        async with engine(bus_directory, Stumbles()) as a, engine(bus_directory, Stumbles()) as b:
            for each in (a, b):
                with pytest.raises(esp.StepFailed, match=r"ZeroDivisionError.*block 31 .*no such price"):
                    async with asyncio.timeout(30):
                        await each.wait()
        await Outputs(bus_directory).to(30)


@pytest.mark.parametrize("order", [None, "written"])
async def test_a_poisoned_block_is_passed_over_once_the_order_says_so(bus_directory: Path, order: Any) -> None:
    class Stumbles(Totals):
        def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
            if block.id == 31:
                raise ZeroDivisionError("no such price")
            super().step(window, block, out)

    async with feeding(bus_directory) as source:
        await feed(source, range(1, 31))
        await source.inject([(0, "IBM", 0)])
        async with engine(bus_directory, Stumbles(), order=order) as a:
            with pytest.raises(esp.StepFailed, match=r"esp pass-over URL [0-9a-f]{16}:0:31$") as caught:
                async with asyncio.timeout(30):
                    await a.wait()
        failed = caught.value
        async with esp.init(dir=bus_directory) as client:
            for _ in range(2):  # twice is harmless
                await pass_over(client.bus, ORDER, 0, Poisoned(failed.source, failed.run, failed.id))
            with pytest.raises(esp.BusError, match="no engine has begun"):
                await pass_over(client.bus, "local:5555/M/F/engine/p/nowhere/order", 0, Poisoned(1, 0, 1))
        async with engine(bus_directory, Stumbles(), order=order) as b, engine(bus_directory, Stumbles(), order=order):
            await source.inject(trades(31))
            await until(lambda: b.stats.steps == 32)
            await Outputs(bus_directory).to(31)


async def test_a_standby_that_computes_something_else_leaves_and_the_others_go_on(bus_directory: Path) -> None:
    class Wanders(Totals):
        def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
            super().step(window, block, out)
            if block.id == 50:
                self.totals["IBM"] += 1

    async with feeding(bus_directory) as source, engine(bus_directory) as a:
        await leads(a)
        async with engine(bus_directory, Wanders()) as b:
            await feed(source, range(1, 101), pause=0.001)
            with pytest.raises(esp.InputDiffers):
                async with asyncio.timeout(30):
                    await b.wait()
        await Outputs(bus_directory).to(100)


async def test_an_input_that_is_emptied_under_an_engine_ends_it_by_name(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory) as only:
        await feed(source, range(1, 11))
        await until(lambda: only.stats.steps == 10)
        async with esp.init(dir=bus_directory) as client:
            await client.purge(f"{URL}/Trades", side="in")
        with pytest.raises(esp.InputLost, match=r"position 10 .*new run") as caught:
            async with asyncio.timeout(30):
                await only.wait()
        assert (caught.value.topic, caught.value.position) == ("local:5555/p/q/Trades/I", 10)


@contextlib.asynccontextmanager
async def cuttable(directory: Path) -> AsyncIterator[tuple[esp.Engine, Faults]]:
    """A member whose input can be cut, and nothing else."""
    quiet = {"on_notice": lambda notice: None}
    async with esp.init(dir=directory, **quiet) as reads, esp.init(dir=directory, **quiet) as writes:
        faults = Faults.into(reads)
        async with reads.engine(Totals(), URL, output=writes, options=esp.EngineOptions(stall=0.3)) as made:
            yield made, faults


@pytest.mark.parametrize("order", [None, "written"])
async def test_an_input_to_which_nothing_ever_came_is_reported_with_its_place(
    bus_directory: Path, order: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inputs, "_SILENT", 0.05)
    async with esp.init(dir=bus_directory) as client:
        windows = {"Trades": f"{URL}/Trades?side=out"}
        async with client.engine(Totals(), URL, windows=windows, options=esp.EngineOptions(order=order)):
            await until(lambda: "nothing has come to input window Trades, which is read at" in caplog.text)
    assert "local:5555/p/q/Trades/O" in caplog.text


async def test_a_failed_step_is_told_as_one(bus_directory: Path) -> None:
    notices: list[Any] = []
    model = esp.model(**MODEL)(lambda window, block, out: out.emit("Nowhere", []))
    async with feeding(bus_directory) as source, esp.init(dir=bus_directory, on_notice=notices.append) as client:
        await source.inject(trades(1))
        member = await client.engine(model, URL)
        with pytest.raises(esp.StepFailed):
            await member.wait()
    assert [notice.code for notice in notices] == ["pubsubCode_STEP"]


async def test_an_active_member_whose_input_is_cut_lets_one_that_can_read_go_on(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, cuttable(bus_directory) as (a, cut):
        await leads(a)
        async with cuttable(bus_directory) as (b, _):
            await feed(source, range(1, 21))
            await until(lambda: a.stats.steps == b.stats.steps == 20)
            cut.lose_link()
            await feed(source, range(21, 41))
            await leads(b)
            await Outputs(bus_directory).to(40)
            assert a.stats.last_switch is not None
            cut.restore()
            await until(lambda: a.stats.steps == 40)


async def test_where_no_member_can_read_one_leads_on_and_goes_on_once_it_can(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, cuttable(bus_directory) as (only, cut):
        await leads(only)
        await feed(source, range(1, 21))
        await until(lambda: only.stats.steps == 20)
        cut.lose_link()
        await feed(source, range(21, 41))
        await until(lambda: only.stats.role != "active")
        await leads(only)
        assert only.stats.hindered
        cut.restore()
        await until(lambda: not only.stats.hindered)
        await Outputs(bus_directory).to(40)


async def test_foreign_bytes_on_the_input_are_told_and_passed(bus_directory: Path) -> None:
    notices: list[Any] = []
    async with feeding(bus_directory) as source, esp.init(dir=bus_directory, on_notice=notices.append) as client:
        async with client.engine(Totals(), URL) as only:
            await feed(source, range(1, 6))
            await source.flush()
            pipe = await client.bus.pipe("local:5555/p/q/Trades/I")
            await pipe.write([b"foreign"])
            await pipe.aclose()
            await feed(source, range(6, 11))
            await until(lambda: only.stats.steps == 10)
        assert [type(notice).__name__ for notice in notices].count("BadMessage") == 1


# where it stands


async def test_input_and_output_may_be_on_two_buses(tmp_path: Path) -> None:
    ins, outs = tmp_path / "in", tmp_path / "out"
    async with feeding(ins) as source, esp.init(dir=ins) as reads, esp.init(dir=outs) as writes:
        async with reads.engine(Totals(), URL, output=writes) as only:
            await feed(source, range(1, 31))
            await leads(only)
            await Outputs(outs).to(30)
        async with esp.init(dir=outs) as client:
            assert [name for name in await client.catalog().topics() if "Trades" in name] == []


async def test_windows_may_be_elsewhere(bus_directory: Path) -> None:
    windows = {"Trades": "dfESP://local:5555/other/q/Feed?side=out", "Large": "dfESP://local:5555/p/other/L"}
    async with esp.init(dir=bus_directory) as client:
        source = await client.publisher("dfESP://local:5555/other/q/Feed", TRADE, side="out")
        async with (
            client.engine(Totals(), URL, windows=windows),
            client.subscriber("dfESP://local:5555/p/other/L", start="earliest") as large,
        ):
            await source.inject([(1, "IBM", 900)])
            async with asyncio.timeout(30):
                assert (await anext(large)).rows() == [(1, "IBM", 900)]


@pytest.mark.parametrize(
    ("url", "windows", "says"),
    [
        ("dfESP://local:5555/p", None, "contquery"),
        (f"{URL}/w", None, "contquery"),
        (URL, {"Nowhere": f"{URL}/w"}, "'Nowhere'"),
        (URL, {"Trades": f"{URL}/Large?side=out"}, "two windows"),
        (URL, {"Trades": URL}, "window is missing"),
    ],
)
async def test_a_place_that_cannot_be_is_refused(
    bus_directory: Path, url: str, windows: dict[str, str] | None, says: str
) -> None:
    async with esp.init(dir=bus_directory) as client:
        with pytest.raises(esp.ConfigError, match=says):
            await client.engine(Totals(), url, windows=windows)


async def test_a_schema_that_the_input_does_not_have_is_refused(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client, client.publisher(f"{URL}/Trades", "id*:int32"):
        with pytest.raises(esp.SchemaDiffers):
            await client.engine(Totals(), URL)


async def test_a_step_that_takes_long_is_reported_with_its_block(
    bus_directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esp_pubsub.engine.stepping._LONG_STEP", 0.0)
    async with feeding(bus_directory) as source, engine(bus_directory) as only:
        await source.inject(trades(1))
        await until(lambda: only.stats.steps == 1)
    assert "the step on block 1 of source" in caplog.text


async def test_a_member_whose_closing_is_cancelled_leads_no_more(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory) as a:
        await leads(a)
        async with engine(bus_directory) as b:
            a._group.hand_over = asyncio.Event().wait  # type: ignore[method-assign,assignment]  # it takes long
            closing = asyncio.ensure_future(a.aclose())
            await until(lambda: a._stepper is not None and a._stepper.done())
            closing.cancel()
            await leads(b)
            await feed(source, range(1, 11))
            await Outputs(bus_directory).to(10)


async def test_no_block_is_said_to_be_passed_over_where_the_order_has_lost_entries(bus_directory: Path) -> None:
    async with feeding(bus_directory) as source, engine(bus_directory, order="written") as only:
        await leads(only)
        await feed(source, range(1, 11))
        await until(lambda: only.stats.steps == 10)
    async with esp.init(dir=bus_directory) as client:
        await client.catalog().purge(ORDER)
        with pytest.raises(esp.BusError, match="has lost entries"):
            await pass_over(client.bus, ORDER, 0, Poisoned(1, 0, 1))


async def test_a_block_whose_body_cannot_be_read_is_passed_over_on_every_member(bus_directory: Path) -> None:
    schema = esp.Schema(TRADE).fingerprint
    bad = seal(BLOCK, ROWS, 0, 1, 77, 0, 1, schema, 0, b"no rows")
    async with feeding(bus_directory) as source, engine(bus_directory) as a, engine(bus_directory) as b:
        await feed(source, range(1, 11))
        await source.flush()
        async with esp.init(dir=bus_directory) as client:
            pipe = await client.bus.pipe("local:5555/p/q/Trades/I")
            await pipe.write(frames([bad], 0, 0))
            await pipe.confirmed(0)
            await pipe.aclose()
        await feed(source, range(11, 21))
        await Outputs(bus_directory).to(20)
        await until(lambda: a.stats.steps == b.stats.steps == 21)
