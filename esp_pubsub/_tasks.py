"""What the runners do with task groups."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_all(*works: Coroutine[Any, Any, None]) -> None:
    """Run all of these at once. The first that fails ends the others, and its error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work)
    except ExceptionGroup as group:
        raise first_error(group) from None


def first_error(group: ExceptionGroup[Exception]) -> Exception:
    """The error that ended a task group."""
    found = group.exceptions[0]
    return first_error(found) if isinstance(found, ExceptionGroup) else found
