"""Effects: what a model wants done outside, done by handlers that are no part of the engine.

A model only emits. What it wants done, it emits as rows of a window of calls. `effect` hands each to a handler, and
publishes what the handler returns to a window of outcomes, an input of the engine. So the state and the decisions of
the engine are exactly once. The effect itself is at least once: a handler may have done its work when its process is
killed, and then the call comes again, with the same key. The other side can tell by the key.

Calls are handled at once, so many of them, and end in any order. They are confirmed in their order: those before the
first that has not ended. An outcome is on the bus before its call is confirmed, and may come twice (`esp.Outcomes`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._news import News
from ._tasks import first_error
from .confirming import Confirmer
from .errors import BadBody, ConfigError, DeliveryUnknown, EffectFailed
from .events import Block, Opcode
from .publisher import Publisher
from .schema import Schema
from .subscriber import Subscriber

if TYPE_CHECKING:
    from .client import Client

_log = logging.getLogger("esp_pubsub.effect")
_HELD = 10_000  # blocks that are read and not done


@dataclass(frozen=True, slots=True)
class Call:
    """One row of the window of calls."""

    key: str
    """Names it among all calls of all runs, and is the same when it comes again; see `Block.key`."""
    row: tuple[Any, ...]
    opcode: Opcode
    schema: Schema

    @property
    def values(self) -> Mapping[str, Any]:
        """The row by the names of its fields."""
        return dict(zip(self.schema.names, self.row, strict=True))


Handler = Callable[[Call], Awaitable[Sequence[Any] | None]]


async def effect(
    client: Client, calls: str, outcomes: str, handler: Handler, *, group: str = "effects", concurrency: int = 16
) -> None:
    """Handle the calls that an engine emits to the window `calls`, until cancelled.

    `handler` is awaited with each `Call`, at most `concurrency` at once. What it returns, a row of the window
    `outcomes`, is published there; None publishes nothing. The row says which call it is about: by `call.key`, or by
    what the model put into the call. Run it in two processes or more with the same `group`: one of them handles, and
    when it dies another one goes on.

    A handler that raises ends it with EffectFailed; what must not end it, a handler returns as an outcome. Its call
    then comes again when this is started again. Raises also what `subscriber` and `publisher` raise.
    """
    if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
        raise ConfigError(f"concurrency is a number of at least 1, not {concurrency!r}")
    async with client.subscriber(calls, start="earliest", group=group) as subscriber:
        await _Effect(client, subscriber, outcomes, handler, concurrency).run()


class _Held:
    """A block of calls that are not all done."""

    __slots__ = ("block", "left")

    def __init__(self, block: Block, left: int) -> None:
        self.block = block
        self.left = left


class _Effect:
    def __init__(
        self, client: Client, subscriber: Subscriber, outcomes: str, handler: Handler, concurrency: int
    ) -> None:
        self._client = client
        self._subscriber = subscriber
        self._outcomes = outcomes
        self._handler = handler
        self._free = asyncio.Semaphore(concurrency)
        self._held: deque[_Held] = deque()
        self._confirmer = Confirmer(subscriber)
        self._news = News()
        self._publisher: Publisher | None = None
        self._opening = asyncio.Lock()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                confirming = tasks.create_task(self._confirmer.run())
                async for block in self._subscriber:
                    while len(self._held) >= _HELD:
                        await self._news.wait()
                    await self._confirmer.room()
                    await self._begin(block, tasks)
                confirming.cancel()
        except ExceptionGroup as errors:
            error = first_error(errors)
            raise error from error.__cause__
        finally:
            await self._confirmer.finish()
            if self._publisher is not None:
                await self._publisher.aclose()

    async def _begin(self, block: Block, tasks: asyncio.TaskGroup) -> None:
        try:
            changes = block.changes()
        except BadBody as error:  # nobody can handle it, now or later
            _log.error("passed over: %s", error)
            changes = []
        held = _Held(block, len(changes))
        self._held.append(held)
        for row, (opcode, values) in enumerate(changes):
            await self._free.acquire()
            call = Call(block.key(row), values, opcode, block.schema)
            task = tasks.create_task(self._handle(call, held), name=f"esp effect {call.key}")
            task.add_done_callback(lambda _: self._free.release())
        self._let_go()

    async def _handle(self, call: Call, held: _Held) -> None:
        try:
            outcome = await self._handler(call)
        except Exception as error:
            raise EffectFailed(
                f"the handler raised {type(error).__name__} on call {call.key}: {error}. Return an outcome for what a "
                "handler expects; the call comes again when the effect is started again",
                key=call.key,
            ) from error
        if outcome is not None:
            await self._publish(call, outcome)
        held.left -= 1
        self._let_go()

    async def _publish(self, call: Call, outcome: Sequence[Any]) -> None:
        """Have the bus hold the outcome."""
        publisher = await self._open()
        delivery = await publisher.inject([outcome])
        while True:
            try:
                await delivery
                return
            except DeliveryUnknown as error:
                _log.warning("the outcome of call %s waits for the bus: %s", call.key, error)

    async def _open(self) -> Publisher:
        """The publisher of outcomes. The engine has emitted a call, so it has said the schema of its inputs."""
        async with self._opening:
            if self._publisher is None:
                schema = await self._client.window_schema(self._outcomes, "in")
                self._publisher = await self._client.publisher(self._outcomes, schema)
            return self._publisher

    def _let_go(self) -> None:
        """Calls have ended: those before the first that has not may be confirmed."""
        while self._held and not self._held[0].left:
            self._confirmer.done(self._held.popleft().block)
        self._news.tell()
