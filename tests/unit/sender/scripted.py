"""A bus that does as the test says, and a sender at work on it."""

import asyncio
from collections.abc import Callable, Sequence

from esp_pubsub.bus import Capabilities
from esp_pubsub.errors import BusError, BusUnavailable
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.sender import Sender
from esp_pubsub.wire.frame import BEAT, BLOCK, ROWS, Frame, parse, seal

SOURCE, RUN, TERM = 77, 3, 9


class ScriptedPipe:
    """Takes what is written; confirms and fails when told to."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.writes: list[int] = []
        self.closed = False
        self.write_gate = asyncio.Event()
        self.write_gate.set()
        self.close_gate = asyncio.Event()
        self.close_gate.set()
        self._count = 0
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def ids(self) -> list[int]:
        return [frame.id for frame in self.frames if frame.kind == BLOCK]

    @property
    def beats(self) -> list[int]:
        return [frame.settled for frame in self.frames if frame.kind == BEAT]

    def confirm(self, count: int) -> None:
        """So many messages of this pipe are confirmed, counted from its first."""
        self._count = count
        self._news.set()

    def confirm_all(self) -> None:
        self.confirm(len(self.frames))

    def fail(self, error: Exception | None = None) -> None:
        self._error = error or BusUnavailable("scripted")
        self._news.set()
        self.write_gate.set()

    async def write(self, frames: Sequence[bytes]) -> None:
        assert not self.closed
        self.frames += [parse(data) for data in frames]
        self.writes.append(len(frames))
        await self.write_gate.wait()
        if self._error is not None:
            raise self._error

    async def confirmed(self, past: int) -> int:
        while self._count <= past:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._count

    async def aclose(self) -> None:
        await self.close_gate.wait()
        self.closed = True


class ScriptedBus:
    """Hands out scripted pipes, one at a time."""

    def __init__(self, *, suffix_only: bool) -> None:
        self.capabilities = Capabilities(
            suffix_only=suffix_only, replay=False, retained=False, groups=False, incarnation=False, requests=False,
            catalog=False, max_message_bytes=1 << 30,
        )  # fmt: skip
        self.pipes: list[ScriptedPipe] = []
        self.errors: list[Exception] = []

    async def pipe(self, topic: str) -> ScriptedPipe:
        assert topic == "topic"
        assert all(pipe.closed for pipe in self.pipes), "two pipes at once"
        if self.errors:
            raise self.errors.pop(0)
        self.pipes.append(ScriptedPipe())
        return self.pipes[-1]


class Bench:
    """A sender at work, and what it told."""

    def __init__(self, *, suffix_only: bool, stall: float = 5.0) -> None:
        self.bus = ScriptedBus(suffix_only=suffix_only)
        self.outbox = Outbox(1 << 20, 1 << 40)
        self.acked: list[int] = []
        self.troubles: list[BusError | None] = []
        self.sender = Sender(
            self.bus, "topic", self.outbox,  # type: ignore[arg-type]
            source=SOURCE, run=RUN, stall=stall, acked=self._acked, trouble=self.troubles.append,
        )  # fmt: skip
        self.sender.term = TERM
        self.task = asyncio.ensure_future(self.sender.run())
        BENCHES.append(self)

    def _acked(self, id: int) -> None:
        self.acked.append(id)
        self.outbox.settle(id)

    def give(self, count: int = 1, size: int = 10) -> None:
        body = bytes(size)
        for _ in range(count):
            self.outbox.add(
                seal(BLOCK, ROWS, 0, 1, SOURCE, RUN, self.outbox.last + 1, 5, self.outbox.chain, body)
            )  # fmt: skip
        self.sender.wake()

    async def pipe(self, number: int = 0) -> ScriptedPipe:
        await until(lambda: len(self.bus.pipes) > number)
        return self.bus.pipes[number]


BENCHES: list[Bench] = []


async def end(bench: Bench) -> None:
    for pipe in bench.bus.pipes:
        pipe.close_gate.set()
    bench.task.cancel()
    done, _ = await asyncio.wait([bench.task], timeout=2)
    if not done:  # a sender that swallowed its cancellation; the test says so, and no task is left behind
        bench.task.cancel()
        await asyncio.wait([bench.task])
    assert done
    assert all(pipe.closed for pipe in bench.bus.pipes)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def ticks(count: int = 20) -> None:
    """Long enough for everything that does not wait for time."""
    for _ in range(count):
        await asyncio.sleep(0)


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))
