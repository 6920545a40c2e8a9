"""A world for one test: a bus in memory, and a clock that jumps to the next timer as soon as nobody has anything to do.

    async def scene(init):
        async with init() as client, client.publisher(URL, SCHEMA) as pub:
            await (await pub.inject([(1, "IBM")]))
            await asyncio.sleep(3_600)  # at once

    run_virtual(scene)

There is no thread and no socket in it, so nothing else has to be waited for; what `asyncio.to_thread` is given runs a
moment later, while nobody else has a turn. The bus is a log that keeps what it confirms and takes a few virtual
milliseconds for everything; it has no catalog, no requests and no start by time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from ..client import Client, Opening
from ..errors import WrongOrder
from ..notices import Notice
from ._sim_bus import Broker, SimBus
from ._virtual import Stuck, VirtualLoop

__all__ = ["Init", "Stuck", "run_virtual"]

T = TypeVar("T")


Init = Callable[..., Opening[Client]]
"""`esp_pubsub.init` for the bus of this world, with `on_notice` alone; each call is another connection."""


def run_virtual(scene: Callable[[Init], Coroutine[Any, Any, T]], *, limit: float = 3_600.0) -> T:
    """Run a scene on a virtual clock, and return what it returns. Called from a plain function, as `asyncio.run` is.

    Stuck when nothing can go on any more, or once `limit` virtual seconds have passed. An error that nobody took care
    of, such as that of a task nobody awaited, is an AssertionError. What the scene left running is cancelled.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise WrongOrder("a virtual clock has a loop of its own: call run_virtual from a plain function")
    loop = VirtualLoop(random.Random(0))  # type: ignore[abstract]  # it has what the SDK calls
    broker = Broker(loop, "log", deaths=False)

    def init(*, on_notice: Callable[[Notice], None] | None = None) -> Opening[Client]:
        async def opened() -> Client:
            client = Client(SimBus(broker, "test"), on_notice)
            await client.start()
            return client

        return Opening(opened)

    try:
        result = loop.run(scene(init), limit)
    finally:
        loop.end()
    if loop.problems:
        raise AssertionError("; ".join(loop.problems))
    return result
