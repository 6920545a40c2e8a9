"""Tasks that run together: the first error ends them, and a cancellation is never forgotten."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from esp_pubsub._tasks import run_all, run_until_one_ends

Runs = Callable[..., Awaitable[None]]
both = pytest.mark.parametrize("run", [run_all, run_until_one_ends])


async def waits(future: asyncio.Future[None]) -> None:
    await future


def made() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@both
async def test_the_first_error_ends_the_others_and_is_raised_as_it_is(run: Runs) -> None:
    fails, other = made(), made()
    fails.set_exception(LookupError("gone"))
    with pytest.raises(LookupError, match="gone"):
        await run(waits(other), waits(fails))
    assert other.cancelled()


async def test_all_are_waited_for_or_the_first_alone() -> None:
    first, second = made(), made()
    first.set_result(None)
    await run_until_one_ends(waits(second), waits(first))
    assert second.cancelled()
    third = made()
    asyncio.get_running_loop().call_later(0.01, third.set_result, None)
    await run_all(waits(first), waits(third))
    assert third.done()


@both
@pytest.mark.parametrize("first", ["the error", "the cancellation"])
async def test_a_task_that_is_cancelled_in_the_turn_in_which_a_child_fails_is_cancelled(run: Runs, first: str) -> None:
    child, other = made(), made()

    async def stubborn() -> None:
        while True:  # as whoever tries again after an error
            try:
                await run(waits(child), waits(other))
            except LookupError:
                await asyncio.sleep(3_600)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0.01)
    for what in (child.set_exception, task.cancel) if first == "the error" else (task.cancel, child.set_exception):
        what(LookupError("gone"))
    ended, _ = await asyncio.wait([task], timeout=0.2)
    task.cancel()
    assert ended
    assert task.cancelled()


@both
@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_that_meets_an_error_is_not_lost(run: Any, turns: int) -> None:
    trouble = asyncio.get_running_loop().create_future()

    async def waits_out_trouble() -> None:
        while True:
            try:
                await run(asyncio.sleep(3_600), _fails(trouble, 2))
            except ZeroDivisionError:
                await asyncio.sleep(3_600)

    task = asyncio.create_task(waits_out_trouble())
    await asyncio.sleep(0.01)
    trouble.set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    task.cancel()
    assert task in done


async def test_an_error_in_what_cleans_up_after_a_cancellation_is_raised() -> None:
    async def cleans_up() -> None:
        try:
            await asyncio.sleep(3_600)
        finally:
            await run_all(_fails(asyncio.get_running_loop().create_future(), 0))

    task = asyncio.create_task(cleans_up())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(ZeroDivisionError):
        await task


async def _fails(trouble: asyncio.Future[None], turns: int) -> None:
    """Once there is trouble; it takes some turns to end."""
    if turns:
        await trouble
    for _ in range(turns):
        await asyncio.sleep(0)
    raise ZeroDivisionError
