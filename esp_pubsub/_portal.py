"""A loop in a thread, for callers that have none: the vendor-style API, Spark's workers, a notebook.

Every call has a deadline. A portal belongs to the process that made it: after a fork it refuses, and another is made.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, ParamSpec, TypeVar

from .errors import Closed, WrongOrder

P = ParamSpec("P")
T = TypeVar("T")
_STOP = 5.0


class Portal:
    """`with Portal() as portal: portal.call(function, ...)` runs coroutine functions on the portal's own loop."""

    def __init__(self, name: str = "esp portal") -> None:
        self._pid = os.getpid()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._handing = threading.Lock()  # what is handed to the loop comes before its end, or not at all
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            if self._ready.is_set():
                raise
        finally:
            self._closed = True
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=_STOP)

    def call(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a coroutine function on the loop and wait for its result, without a deadline of its own."""
        return self.call_within(None, function, *args, **kwargs)

    def call_within(
        self, seconds: float | None, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The same, but past `seconds` the coroutine is cancelled and TimeoutError raised."""

        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await function(*args, **kwargs)

        with self._handing:
            self._check()
            work: Coroutine[Any, Any, T] = bounded()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise Closed("the portal was closed during the call") from None
        except BaseException:
            future.cancel()
            raise

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise WrongOrder("this portal was made before a fork; make one in this process")
        if self._closed:
            raise Closed("this portal is closed; make another one")
        if threading.current_thread() is self._thread:
            raise WrongOrder("a call from the portal's own loop would wait for itself; await the coroutine instead")

    def close(self) -> None:
        """Cancel what still runs and end the thread, within five seconds. Idempotent."""
        if self._closed or self._pid != os.getpid():
            return
        with self._handing:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_STOP)

    def __enter__(self) -> Portal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
