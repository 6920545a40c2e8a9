"""Any number of tasks waiting for something to change."""

from __future__ import annotations

import asyncio


class News:
    """Look at what you wait for, then `wait`, with no await in between: then no `tell` is missed."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        """Wake everybody who waits now."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Wait for the next `tell`."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)
