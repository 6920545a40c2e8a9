"""What the runners do with tasks that belong together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

Work = Coroutine[Any, Any, None]


async def run_all(*works: Work) -> None:
    """Run all of these at once. The first that fails ends the others, and its error is raised as it is."""
    await _run(works, until_one_ends=False)


async def run_until_one_ends(*works: Work) -> None:
    """Run all of these at once. The first that ends, ends the others; its error is raised as it is."""
    await _run(works, until_one_ends=True)


async def _run(works: tuple[Work, ...], *, until_one_ends: bool) -> None:
    error = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_outcome(work)) for work in works]
            while tasks and error is None:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                error = next((task.result() for task in tasks if task in ended and not task.cancelled()), None)
                tasks = [task for task in tasks if task not in ended]
                if until_one_ends:
                    break
            for task in tasks:
                task.cancel()
    finally:
        for work in works:
            work.close()  # one that was cancelled before it began would be warned of
    if error is not None:
        raise error


async def _outcome(work: Work) -> Exception | None:
    """How a task ended. It is returned, because on Python 3.11 a TaskGroup that is cancelled in the very turn in which
    a child raises forgets the cancellation: whoever catches the error and tries again would never end.
    """
    try:
        await work
    except Exception as error:  # noqa: BLE001  # raised by whoever asked
        return error
    return None


def first_error(group: ExceptionGroup[Exception]) -> Exception:
    """The error that ended a task group."""
    found = group.exceptions[0]
    return first_error(found) if isinstance(found, ExceptionGroup) else found
