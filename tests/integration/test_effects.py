"""Effects and commands: what a model wants done outside, and what it is told to do."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.testing import Faults
from tests.integration.engines import leads, until
from tests.integration.shops import ORDER, OUTCOME, PAID, URL, Shop

ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def shop(directory: Path, **options: Any) -> AsyncIterator[tuple[esp.Engine, esp.Client]]:
    """A shop, and a client of its bus."""
    async with (
        esp.init(dir=directory, on_notice=lambda notice: None) as client,
        client.engine(Shop(), URL, **options) as engine,
    ):
        await leads(engine)
        yield engine, client


@contextlib.asynccontextmanager
async def paying(client: esp.Client, handler: Callable[[esp.Call], Any], **options: Any) -> AsyncIterator[None]:
    """An effect at work."""
    task = asyncio.ensure_future(esp.effect(client, f"{URL}/Calls", f"{URL}/Outcomes", handler, **options))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def paid(client: esp.Client, orders: int) -> list[tuple[int, int]]:
    """The rows of so many paid orders, sorted."""
    found: list[tuple[int, int]] = []
    async with asyncio.timeout(30), client.subscriber(f"{URL}/Paid", PAID, start="earliest") as subscriber:
        async for block in subscriber:
            found += block.rows()
            if len(found) >= orders:
                return sorted(found)
    raise AssertionError("the subscriber ended")


async def test_a_command_is_answered_with_the_rows_that_the_model_emits_for_it(bus_directory: Path) -> None:
    async with shop(bus_directory), esp.init(dir=bus_directory) as us:
        answers = await us.call(f"{URL}/Orders", [(1, 10), (2, 20)], answers=f"{URL}/Answers")
        assert [row[1:] for row in answers] == [(1, 1), (2, 2)]
        assert [row[1:] for row in await us.call(f"{URL}/Orders", [(3, 30)], answers=f"{URL}/Answers")] == [(3, 3)]


async def test_many_commands_at_once_get_their_own_answers(bus_directory: Path) -> None:
    async with shop(bus_directory), esp.init(dir=bus_directory) as us, esp.init(dir=bus_directory) as others:
        called = [client.call(f"{URL}/Orders", [(n, n)], answers=f"{URL}/Answers")
                  for n, client in enumerate([us, others] * 50)]  # fmt: skip
        assert [rows[0][1] for rows in await asyncio.gather(*called)] == list(range(100))


async def test_a_command_without_an_answer_ends_in_time_and_is_carried_out_once(bus_directory: Path) -> None:
    async with shop(bus_directory) as (engine, _), esp.init(dir=bus_directory) as us:
        await us.call(f"{URL}/Orders", [(1, 10)], answers=f"{URL}/Answers")
        await engine.aclose()
        with pytest.raises(esp.NoAnswer, match="carried out once"):
            await us.call(f"{URL}/Orders", [(2, 20)], answers=f"{URL}/Answers", timeout=0.05)
        async with shop(bus_directory):
            answers = await us.call(f"{URL}/Orders", [(3, 30)], answers=f"{URL}/Answers")
            assert [row[1:] for row in answers] == [(3, 3)]


async def test_a_command_needs_a_window_of_answers_that_begins_with_a_key(bus_directory: Path) -> None:
    async with shop(bus_directory), esp.init(dir=bus_directory) as us:
        with pytest.raises(esp.ConfigError, match=r"the first field of .*/Paid is a text"):
            await us.call(f"{URL}/Orders", [(1, 10)], answers=f"{URL}/Paid")
        with pytest.raises(esp.ConfigError, match="start the engine first"):
            await us.call(f"{URL}/Orders", [(1, 10)], answers=f"{URL}/Nothing")
        with pytest.raises(esp.ConfigError, match="start the engine first"):
            await us.call(f"{URL}/Nothing", [(1, 10)], answers=f"{URL}/Answers")


async def test_each_call_is_handled_and_its_outcome_reaches_the_model(bus_directory: Path) -> None:
    async with shop(bus_directory) as (_, client), esp.init(dir=bus_directory) as us:
        seen: list[str] = []

        async def pay(call: esp.Call) -> tuple[str, int]:
            seen.append(call.key)
            await asyncio.sleep(0.001 * (call.values["amount"] % 3))
            return (call.key, 1)

        async with paying(client, pay, concurrency=8):
            orders = await us.publisher(f"{URL}/Orders", ORDER)
            for n in range(100):
                await orders.inject([(2 * n, n), (2 * n + 1, n)])
            assert await paid(us, 200) == [(n, 1) for n in range(200)]
        assert max(Counter(seen).values()) == 1


async def test_an_effect_that_ends_and_begins_again_handles_what_was_not_confirmed(bus_directory: Path) -> None:
    async with shop(bus_directory) as (_, client), esp.init(dir=bus_directory) as us:
        orders = await us.publisher(f"{URL}/Orders", ORDER)
        for n in range(50):
            await orders.inject([(n, n)])
        handled: list[str] = []
        cut = asyncio.Event()

        async def pay(call: esp.Call) -> tuple[str, int]:
            handled.append(call.key)
            if len(handled) % 7 == 0:
                cut.set()
                await asyncio.sleep(3600)
            return (call.key, 1)

        while len(set(handled)) < 50:
            cut.clear()
            async with esp.init(dir=bus_directory) as own, paying(own, pay, concurrency=2):
                waiting = asyncio.ensure_future(cut.wait())
                await until(lambda: cut.is_set() or len(set(handled)) == 50)
                waiting.cancel()

        async def at_last(call: esp.Call) -> tuple[str, int]:
            return (call.key, 1)

        async with paying(client, at_last):
            assert await paid(us, 50) == [(n, 1) for n in range(50)]  # though some were handled twice


async def test_outcomes_that_come_twice_count_once(bus_directory: Path) -> None:
    async with shop(bus_directory) as (engine, client), esp.init(dir=bus_directory) as us:
        twice = await us.publisher(f"{URL}/Outcomes", OUTCOME)

        async def pay(call: esp.Call) -> tuple[str, int]:
            await twice.inject([(call.key, 1)])
            return (call.key, 1)

        async with paying(client, pay):
            orders = await us.publisher(f"{URL}/Orders", ORDER)
            for n in range(20):
                await orders.inject([(n, n)])
            assert await paid(us, 20) == [(n, 1) for n in range(20)]
            await until(lambda: engine.stats.steps == 60)
            assert engine.stats.lines[2].given == 20


async def test_a_handler_that_raises_ends_the_effect_and_its_call_comes_again(bus_directory: Path) -> None:
    async with shop(bus_directory) as (_, client), esp.init(dir=bus_directory) as us:
        orders = await us.publisher(f"{URL}/Orders", ORDER)
        await orders.inject([(1, 10)])

        async def fails(call: esp.Call) -> None:
            raise OSError("no route")

        with pytest.raises(esp.EffectFailed, match=r"OSError on call .*: no route") as failed:
            async with asyncio.timeout(10):
                await esp.effect(client, f"{URL}/Calls", f"{URL}/Outcomes", fails)
        assert failed.value.key.endswith(":0:1:0")

        async def pay(call: esp.Call) -> tuple[str, int]:
            assert call.key == failed.value.key
            return (call.key, 1)

        async with paying(client, pay):
            assert await paid(us, 1) == [(1, 1)]


async def test_a_slow_call_does_not_stop_the_others_and_nothing_after_it_is_confirmed(bus_directory: Path) -> None:
    async with shop(bus_directory) as (_, client), esp.init(dir=bus_directory) as us:
        orders = await us.publisher(f"{URL}/Orders", ORDER)
        for n in range(30):
            await orders.inject([(n, n)])
        slow = asyncio.Event()

        async def pay(call: esp.Call) -> tuple[str, int]:
            if call.row[0] == 0:
                await slow.wait()
            return (call.key, 1)

        async with esp.init(dir=bus_directory) as own, paying(own, pay, concurrency=4):
            assert await paid(us, 29) == [(n, 1) for n in range(1, 30)]
        again: list[int] = []

        async def seen(call: esp.Call) -> tuple[str, int]:
            again.append(call.row[0])
            return (call.key, 1)

        async with paying(client, seen):
            assert (await paid(us, 30))[0] == (0, 1)
        assert again[0] == 0


async def test_effects_that_are_killed_handle_every_call_and_the_model_takes_each_once(
    bus_directory: Path, tmp_path: Path
) -> None:
    handled = tmp_path / "handled"
    handled.touch()
    async with shop(bus_directory), esp.init(dir=bus_directory) as us:
        orders = await us.publisher(f"{URL}/Orders", ORDER)
        for n in range(300):
            await orders.inject([(n, n)])
        processes = [await paying_process(bus_directory, handled) for _ in range(2)]
        try:
            for part in (1, 2, 3):
                await until(lambda: len(handled.read_text().split()) > 50 * part)  # noqa: B023
                for process in processes[-2:]:
                    process.kill()
                    await process.wait()
                    processes.append(await paying_process(bus_directory, handled))
            assert await paid(us, 300) == [(n, 1) for n in range(300)]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
    assert len(set(handled.read_text().split())) == 300


async def paying_process(directory: Path, handled: Path) -> asyncio.subprocess.Process:
    """An effect in a process of its own, which notes each call that it handles."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.shops", str(directory), str(handled), cwd=ROOT
    )


async def test_an_effect_rides_out_a_bus_that_fails(bus_directory: Path) -> None:
    async with shop(bus_directory), esp.init(dir=bus_directory) as us:
        orders = await us.publisher(f"{URL}/Orders", ORDER)
        async with esp.init(dir=bus_directory, on_notice=lambda notice: None) as own:
            faults = Faults.into(own)

            async def pay(call: esp.Call) -> tuple[str, int]:
                if call.row[0] % 10 == 5:
                    faults.lose_link()
                    faults.restore()
                return (call.key, 1)

            async with paying(own, pay):
                for n in range(40):
                    await orders.inject([(n, n)])
                assert await paid(us, 40) == [(n, 1) for n in range(40)]


async def test_options_that_cannot_work_are_refused(bus_directory: Path) -> None:
    async with shop(bus_directory) as (_, client):

        async def pay(call: esp.Call) -> None: ...

        with pytest.raises(esp.ConfigError, match="concurrency is a number of at least 1, not 0"):
            await esp.effect(client, f"{URL}/Calls", f"{URL}/Outcomes", pay, concurrency=0)


def test_a_key_is_asked_for_after_emitting() -> None:
    @esp.model(inputs={"A": "id*:int64"}, outputs={"B": "id*:int64"})
    def hasty(window: str, block: esp.Block, out: esp.Out) -> None:
        out.key("B")

    with pytest.raises(esp.StepFailed, match="emit first, then ask for the key"):
        esp.testing.run_model(hasty, [("A", [(1,)])])
