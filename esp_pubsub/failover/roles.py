"""The role changes of a member, for those who ask, and the tasks that wait for a hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from .membership import RoleChange

_KEPT = 100


class Roles:
    """The role changes of one member, as they happen."""

    def __init__(self) -> None:
        self.last: RoleChange | None = None
        self._queues: set[asyncio.Queue[RoleChange]] = set()

    def changed(self, change: RoleChange) -> None:
        """The member took another role."""
        self.last = change
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(change)

    async def changes(self) -> AsyncIterator[RoleChange]:
        """Those from now on; ends after the last, `left`. Of more than a hundred that wait, the oldest are lost."""
        if self.last is not None and self.last.role == "left":
            return
        queue: asyncio.Queue[RoleChange] = asyncio.Queue(_KEPT)
        self._queues.add(queue)
        try:
            while True:
                change = await queue.get()
                yield change
                if change.role == "left":
                    return
        finally:
            self._queues.discard(queue)


class HandOver:
    """The tasks that wait until a member has handed over. One hand-over serves all that ask for it meanwhile."""

    def __init__(self) -> None:
        self.waiting = 0
        self._done: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until `done`, or raise what `failed` was given. Cancelled, the others wait on."""
        if self._done is None:
            self._done = asyncio.get_running_loop().create_future()
        self.waiting += 1
        try:
            await asyncio.shield(self._done)
        finally:
            self.waiting -= 1

    def given_up(self) -> None:
        """Nobody waits any more."""
        self._done = None

    def done(self) -> None:
        """The member has handed over, or what it was to send is on the bus."""
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_result(None)

    def failed(self, error: Exception) -> None:
        """The member has left before that."""
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(error)
            done.exception()  # it is seen, also if nobody waits any more
