"""Opening a bus: one that is not there yet is tried again, and tests put something between a client and its bus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .backoff import Backoff
from .bus import Bus
from .errors import BusUnavailable
from .registry import Driver

_log = logging.getLogger("esp_pubsub")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_between: Callable[[Bus], Bus] = lambda bus: bus  # noqa: E731


async def open_bus(found: Driver, name: str, options: Any, patience: float) -> Bus:
    """Open the bus with this driver; for so many seconds it is tried again."""
    loop, backoff = asyncio.get_running_loop(), Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
    until = loop.time() + patience
    while True:
        try:
            return _between(await found.open_bus(options))
        except BusUnavailable as error:
            left = until - loop.time()
            if left <= 0:
                raise
            _log.warning("the bus %s is not there yet: %s; it is tried again for %.0f s", name, error, left,
                         extra={"esp_bus": name})  # fmt: skip
            await asyncio.sleep(min(backoff.next(), left))


@contextmanager
def between(put: Callable[[Bus], Bus]) -> Iterator[None]:
    """Put something between each client that is opened meanwhile and its bus. For tests: it holds for the process."""
    global _between
    before, _between = _between, put
    try:
        yield
    finally:
        _between = before
