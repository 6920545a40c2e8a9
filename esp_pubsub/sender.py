"""The one sender of a publisher, on every bus: outbox -> pipe, acknowledgements in order, go back after trouble.

    rule 1   a pipe begins after what is settled and goes on in order, never beyond the window; it passes over only
             what another member has settled meanwhile
    rule 2   confirmations count in order, and only within the pipe that sends now
    rule 3   after any trouble the pipe is dropped for good; a new one begins by rule 1. There is no other retry
    rule 5   where holes can be, an idle pipe that has not yet carried `settled` writes one beat on the topic

Settled is m of PROTOCOL 1: the highest id known to be on the bus for every subscriber. It has one home, the outbox.
Two tasks share a pipe: one writes, one takes confirmations; either one's trouble ends both.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from ._tasks import run_all
from .backoff import Backoff
from .bus import Bus, Pipe
from .errors import BusError, BusUnavailable
from .failover.outbox import Outbox
from .wire.frame import BEAT, WINDOW_BYTES, WINDOW_FRAMES, Sealed, frames, seal

_BATCH_BLOCKS = 500
_BATCH_BYTES = 1 << 20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0
GRACE = 1.1  # times `stall`: a driver that waits as long knows more of the trouble than we do


class Sender:
    """Moves blocks from an outbox to a topic. `sent` only grows, but for trouble, after which it begins at settled."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        outbox: Outbox,
        *,
        source: int,
        run: int,
        stall: float,
        acked: Callable[[int], None],
        trouble: Callable[[BusError | None], None],
    ) -> None:
        """`acked(id)` is called when the bus confirmed blocks up to this one, and has the outbox let go of them;
        `trouble(error)` at each trouble, `trouble(None)` when it is over.

        `stall`: how long the bus may leave what was written unconfirmed before that is trouble.
        """
        self.sent = 0
        self.term = 0
        self._troubled = False
        self._bus = bus
        self._topic = topic
        self._outbox = outbox
        self._beat = seal(BEAT, source=source, run=run)
        self._stall = stall
        self._acked = acked
        self._trouble = trouble
        self._wake = asyncio.Event()
        self._suffix_only = bus.capabilities.suffix_only
        self._outstanding = asyncio.Event()
        self._written: deque[tuple[int, list[Sealed]]] = (
            deque()
        )  # in the pipe at hand, unconfirmed: id of the first, blocks
        self._written_bytes = 0
        self._carried = 0  # the settled that the pipe at hand has carried

    def wake(self) -> None:
        """There is something new in the outbox."""
        self._wake.set()

    async def run(self) -> None:
        """Send until cancelled, through one pipe after another. BusRefused ends it: trying again will not help."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            began = self._outbox.settled
            try:
                await self._one_pipe()
            except BusUnavailable as error:
                self._troubled = True
                self._trouble(error)
            if self._outbox.settled > began:
                backoff.reset()
            await asyncio.sleep(backoff.next())

    async def _one_pipe(self) -> None:
        pipe = await self._bus.pipe(self._topic)
        if self._troubled:
            self._troubled = False
            self._trouble(None)
        self.sent = self._outbox.settled
        self._written.clear()
        self._written_bytes = 0
        self._carried = 0
        try:
            await run_all(self._write(pipe), self._confirm(pipe))
        finally:
            await pipe.aclose()

    async def _write(self, pipe: Pipe) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                self._wake.clear()
                await self._wake.wait()
                continue
            carries = self._outbox.settled
            await pipe.write(frames(batch, carries, time.time_ns() // 1000, self.term))
            self._carried = carries

    def _next_batch(self) -> list[Sealed]:
        """What to write now; entered as written before it is, because a confirmation may overtake the write."""
        settled = self._outbox.settled
        self.sent = max(self.sent, settled)  # another member may have sent some of it meanwhile
        batch = self._outbox.after(self.sent, *self._window())
        first = self.sent + 1
        if batch:
            self.sent = batch[-1].id
        elif not self._suffix_only and not self._written and self._carried < settled:
            batch, first = [self._beat], settled
        if batch:
            self._written.append((first, batch))
            if not self._suffix_only:
                self._written_bytes += _size(batch)
            self._outstanding.set()
        return batch

    def _window(self) -> tuple[int, int]:
        """How many blocks and bytes may be written now."""
        if self._suffix_only:
            return _BATCH_BLOCKS, _BATCH_BYTES
        blocks = self._outbox.settled + WINDOW_FRAMES - self.sent
        if not self._written:
            return blocks, WINDOW_BYTES
        following = self._outbox.after(self.sent, 1, 0)
        bytes_left = WINDOW_BYTES - self._written_bytes
        return (blocks, bytes_left) if following and _size(following) <= bytes_left else (0, 0)

    async def _confirm(self, pipe: Pipe) -> None:
        done = 0
        while True:
            if not self._written:
                self._outstanding.clear()
                await self._outstanding.wait()
            try:
                async with asyncio.timeout(GRACE * self._stall):
                    now_done = await pipe.confirmed(done)
            except TimeoutError:
                blocks = f"{self._outbox.settled + 1} to {self.sent}"
                raise BusUnavailable(
                    f"{self._topic}: nothing confirmed for {self._stall:g} s, blocks {blocks} are written",
                    topic=self._topic,
                ) from None
            self._count(now_done - done)
            done = now_done

    def _count(self, confirmed: int) -> None:
        """So many more messages of this pipe are confirmed, in order."""
        before = settled = self._outbox.settled
        while confirmed:
            first, batch = self._written.popleft()
            taken, rest = batch[:confirmed], batch[confirmed:]
            confirmed -= len(taken)
            settled = max(settled, first + len(taken) - 1)
            if not self._suffix_only:
                self._written_bytes -= _size(taken)
            if rest:
                self._written.appendleft((first + len(taken), rest))
        if settled > before:
            self._acked(settled)
        self._wake.set()


def _size(blocks: list[Sealed]) -> int:
    return sum(block.size for block in blocks)
