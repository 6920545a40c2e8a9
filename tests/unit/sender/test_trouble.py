"""The sender: what it believes, when it begins anew, and that the rules hold whatever happens."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from esp_pubsub.errors import BusRefused, BusUnavailable
from esp_pubsub.wire.frame import WINDOW_FRAMES
from tests.unit.sender.scripted import Bench, ScriptedPipe, ids, ticks

# rule 3: trouble


async def test_after_trouble_a_new_pipe_begins_behind_what_is_settled(bench: Bench) -> None:
    first = await bench.pipe()
    bench.give(5)
    await ticks()
    first.confirm(2)
    await ticks()
    error = BusUnavailable("gone")
    first.fail(error)
    second = await bench.pipe(1)
    await ticks()
    assert first.closed
    assert second.ids == [3, 4, 5]
    assert {frame.settled for frame in second.frames} == {2}
    assert bench.troubles == [error, None]
    second.confirm(3)
    await ticks()
    assert (bench.outbox.settled, bench.acked) == (5, [2, 5])


async def test_a_frame_is_the_same_each_time_it_is_written(bench: Bench) -> None:
    first = await bench.pipe()
    bench.give(2)
    await ticks()
    first.confirm(1)
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    await ticks()
    assert second.frames[0].data[32:] == first.frames[1].data[32:]


async def test_a_late_confirmation_of_a_dropped_pipe_counts_for_nothing(bench: Bench) -> None:
    first = await bench.pipe()
    bench.give(5)
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    first.confirm(5)
    await ticks()
    assert (bench.outbox.settled, second.ids) == (0, ids(1, 5))
    second.confirm(1)
    await ticks()
    assert bench.outbox.settled == 1


async def test_a_failed_write_goes_back_even_if_the_confirmations_are_silent(bench: Bench) -> None:
    first = await bench.pipe()
    first.write_gate.clear()
    bench.give(3)
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    await ticks()
    assert second.ids == ids(1, 3)


async def test_what_was_confirmed_before_the_write_failed_still_counts(bench: Bench) -> None:
    first = await bench.pipe()
    first.write_gate.clear()
    bench.give(3)
    await ticks()
    first.confirm(1)
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    await ticks()
    assert second.ids == [2, 3]


async def test_a_bus_that_leaves_blocks_unconfirmed_is_trouble() -> None:
    bench = Bench(suffix_only=False, stall=0.02)
    first = await bench.pipe()
    bench.give(3)
    await ticks()
    first.confirm(1)
    second = await bench.pipe(1)
    await ticks()
    assert first.closed
    assert second.ids == [2, 3]
    assert isinstance(bench.troubles[0], BusUnavailable)
    assert "blocks 2 to 3" in str(bench.troubles[0])


async def test_an_idle_pipe_never_stalls() -> None:
    bench = Bench(suffix_only=True, stall=0.2)
    pipe = await bench.pipe()
    bench.give(1)
    await ticks()
    pipe.confirm(1)
    ended, _ = await asyncio.wait([bench.task], timeout=0.3)
    assert not ended
    assert (bench.troubles, len(bench.bus.pipes)) == ([], 1)


async def test_a_new_pipe_waits_until_the_old_one_is_closed(bench: Bench) -> None:
    first = await bench.pipe()
    first.close_gate.clear()
    bench.give(1)
    await ticks()
    first.fail()
    ended, _ = await asyncio.wait([bench.task], timeout=0.02)
    assert not ended
    assert len(bench.bus.pipes) == 1
    first.close_gate.set()
    assert (await bench.pipe(1)).frames == [] or first.closed


async def test_a_bus_that_cannot_be_reached_is_tried_again(bench: Bench) -> None:
    first = await bench.pipe()
    bench.give(1)
    bench.bus.errors = [BusUnavailable("still away") for _ in range(5)]
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    await ticks()
    assert second.ids == [1]
    assert [error is None for error in bench.troubles] == [False] * 6 + [True]


async def test_being_over_trouble_is_told_also_when_there_was_no_pipe_before() -> None:
    bench = Bench(suffix_only=True)
    bench.bus.errors = [BusUnavailable("away from the start")]
    await bench.pipe()
    await ticks()
    assert [error is None for error in bench.troubles] == [False, True]


@pytest.mark.parametrize("where", ["pipe", "write", "confirmed"])
async def test_a_bus_that_refuses_ends_it(bench: Bench, where: str) -> None:
    first = await bench.pipe()
    bench.give(1)
    if where == "write":
        first.write_gate.clear()
    await ticks()
    error = BusRefused("no")
    if where == "pipe":
        bench.bus.errors = [error]
        first.fail()
    else:
        first.fail(error)
    await asyncio.wait([bench.task], timeout=5)
    assert bench.task.exception() is error
    assert len(bench.bus.pipes) == 1


async def test_a_fault_of_the_driver_ends_it_and_is_not_taken_for_trouble(bench: Bench) -> None:
    pipe = await bench.pipe()
    bench.give(1)
    await ticks()
    pipe.fail(ZeroDivisionError("a bug"))
    await asyncio.wait([bench.task], timeout=5)
    error = bench.task.exception()
    assert isinstance(error, ZeroDivisionError) or (
        isinstance(error, ExceptionGroup) and isinstance(error.exceptions[0], ZeroDivisionError)
    )


async def test_confirmations_of_more_than_was_written_do_not_go_unnoticed(bench: Bench) -> None:
    pipe = await bench.pipe()
    bench.give(2)
    await ticks()
    pipe.confirm(3)
    await ticks()
    assert bench.outbox.settled <= 2
    assert bench.task.done() or bench.troubles or bench.outbox.settled == 2


@pytest.mark.parametrize("when", range(6))
async def test_cancelled_in_the_turn_of_a_trouble_it_ends(bench: Bench, when: int) -> None:
    pipe = await bench.pipe()
    bench.give(1)
    await ticks()
    pipe.fail()
    await ticks(when)
    bench.task.cancel()
    done, _ = await asyncio.wait([bench.task], timeout=0.5)
    assert done, "the cancellation was lost"
    assert bench.task.cancelled()


async def test_cancelled_it_closes_its_pipe(bench: Bench) -> None:
    pipe = await bench.pipe()
    bench.give(1)
    await ticks()
    bench.task.cancel()
    await asyncio.wait([bench.task], timeout=1)
    assert bench.task.cancelled()
    assert pipe.closed


# all of it


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_the_rules_hold(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    moves: list[Callable[[ScriptedPipe], Any]] = [
        lambda pipe: bench.give(chance.choice((1, 5, 300))),
        lambda pipe: pipe.confirm(chance.randint(pipe._count, len(pipe.frames))),
        lambda pipe: pipe.confirm_all(),
        lambda pipe: pipe.write_gate.clear(),
        lambda pipe: pipe.write_gate.set(),
        lambda pipe: pipe.fail(),
    ]
    begins: dict[int, int] = {}
    for _ in range(300):
        pipe = await bench.pipe(max(0, len(bench.bus.pipes) - 1))
        settled = bench.outbox.settled
        chance.choices(moves, (6, 6, 2, 1, 3, 0.3))[0](pipe)
        await ticks(chance.randint(1, 5))
        assert bench.outbox.settled >= settled
        for number, each in enumerate(bench.bus.pipes):
            if each.ids and number not in begins:
                begins[number] = bench.outbox.settled
        last = bench.bus.pipes[-1]
        if last.ids and not bench.bus.capabilities.suffix_only:
            assert all(f.id <= f.settled + 2 * WINDOW_FRAMES for f in last.frames)
            assert last.ids[-1] - bench.outbox.settled <= WINDOW_FRAMES
    for number, each in enumerate(bench.bus.pipes):
        assert each.ids == ids(each.ids[0], each.ids[-1]) if each.ids else True
        assert not each.ids or each.ids[0] <= begins[number] + 1
    for _ in range(50):
        pipe = bench.bus.pipes[-1]
        pipe.write_gate.set()
        pipe.confirm_all()
        await ticks(5)
        if pipe.closed or pipe._error:
            await bench.pipe(len(bench.bus.pipes) - (not pipe._error))
    assert bench.outbox.settled == bench.outbox.last
    assert len(bench.outbox) == 0
