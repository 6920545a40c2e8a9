"""Fencing on the embedded bus: a process that is stopped while it holds a lock is ended, so that the others go on.

It is not needed for safety: a process that was stopped and goes on later sends duplicates at worst. It is for users who
would rather lose a stopped process than wait for it.
"""

from __future__ import annotations

import logging
from typing import cast

from .._news import News
from ..bus import Bus, Deaths
from ..errors import BusUnavailable

_log = logging.getLogger("esp_pubsub.failover")


class Fence:
    """Ends stopped processes that hold a lock in the way of this one."""

    def __init__(self, bus: Bus, process: str) -> None:
        """`process` is this one, which is never ended."""
        self._deaths = cast(Deaths, bus)
        self._process = process
        self._in_the_way = ""
        self._news = News()

    def trouble(self, error: BusUnavailable) -> None:
        """A write failed; the error names the process that was in its way, if there was one."""
        self._in_the_way = getattr(error, "process", None) or ""
        self._news.tell()

    async def run(self) -> None:
        """End what is in the way, until cancelled."""
        while True:
            process, self._in_the_way = self._in_the_way, ""
            if process and process != self._process:
                ended = await self._deaths.end(process)
                _log.warning(
                    "fence: process %s held a lock and did not go on: %s",
                    process,
                    "killed" if ended else "not stopped, or gone",
                    extra={"esp_process": process},
                )
            await self._news.wait()
