"""Confirming for a group's reader what is done, while it goes on reading."""

from __future__ import annotations

import asyncio
import logging

from ._news import News
from .backoff import Backoff
from .errors import BusUnavailable, EspError
from .events import Block
from .subscriber import Subscriber

_log = logging.getLogger("esp_pubsub.confirming")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_LAST = 5.0  # seconds for the last confirmation
_BEHIND = 10_000  # blocks that may be done and not confirmed


class Confirmer:
    """One confirmation at a time: what is done meanwhile is confirmed together by the next one."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._done: Block | None = None
        self._behind = 0
        self._news = News()

    def done(self, block: Block) -> None:
        """This block, and all that were delivered before it, are done."""
        self._done = block
        self._behind += 1
        self._news.tell()

    async def room(self) -> None:
        """Wait while too much is done and not confirmed."""
        while self._behind >= _BEHIND:
            await self._news.wait()

    async def run(self) -> None:
        """Confirm what is done, until cancelled; call `finish` then. While the bus is away it is tried again."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            while self._done is None:
                await self._news.wait()
            try:
                await self._confirm(self._done)
            except BusUnavailable as error:
                _log.info("what was done is confirmed later: %s", error)
                await asyncio.sleep(backoff.next())
            else:
                backoff.reset()

    async def _confirm(self, block: Block) -> None:
        count = self._behind
        await self._subscriber.confirm(block)
        self._behind -= count
        if self._done is block:
            self._done = None
        self._news.tell()

    async def finish(self) -> None:
        """Confirm what is left, once. What cannot be confirmed comes again to the group's next reader."""
        if self._done is None:
            return
        try:
            async with asyncio.timeout(_LAST):
                await self._confirm(self._done)
        except (EspError, TimeoutError) as error:
            _log.warning("what was done up to block %s could not be confirmed and comes again: %s", self._done, error)
