"""A deterministic asyncio loop: virtual time, and several processes that take turns in an order drawn from a seed.

The theory. Every callback belongs to the process that scheduled it, by a context variable, so tasks, timers and what
they start stay in theirs. Within one process the loop is asyncio's: first come, first served. Between processes there
is no order, so the next one to have a turn is drawn. Time stands still while anybody has something to do and then jumps
to the next timer. A frozen process has no turns; what happens to it waits, timers too. A killed one is frozen for good,
until the world ends and its tasks are cancelled, so that nothing is left behind.

Hashes of futures and tasks are numbers in the order of their making: sets of them have the same order in every run.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PROCESS: ContextVar[str] = ContextVar("process", default="bus")
CIRCLES = 50_000  # turns in one moment
MOST_SHOWN = 10  # tasks of a world that is stuck


class _Future(asyncio.Future[Any]):
    def __new__(cls, *_: Any, loop: VirtualLoop, **__: Any) -> _Future:
        self = super().__new__(cls)
        self.number = next(loop.numbers)
        return self

    number: int

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    def __new__(cls, *_: Any, loop: VirtualLoop, **__: Any) -> _Task:
        self = super().__new__(cls)  # type: ignore[call-arg]  # typeshed gives __new__ what belongs to __init__
        self.number = next(loop.numbers)
        return self

    number: int

    def __hash__(self) -> int:
        return self.number


class Stuck(Exception):
    """Nobody can go on, and no timer will change that."""


def where(task: asyncio.Task[Any]) -> str:
    """The function of a task and its line, and where the innermost one stands that it awaits."""
    frames = []
    at: Any = task.get_coro()
    while at is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(at, f"{kind}_frame")), None)
        if kind is None or getattr(at, f"{kind}_frame") is None:
            break
        frames.append(getattr(at, f"{kind}_frame"))
        at = getattr(at, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    places = [f"{f.f_code.co_qualname} ({Path(f.f_code.co_filename).name}:{f.f_lineno})" for f in frames]
    return " for ".join(dict.fromkeys(places[:1] + places[-1:])) or "a callback"


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the head of the file. `told` is the history, `problems` what nobody took care of, `numbers` are hashes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.frozen: set[str] = set()
        self.told: list[str] = []
        self.problems: list[str] = []
        self.turns = 0
        self.numbers = itertools.count(1)
        self._now = 0.0
        self._jumped_at = 0
        self._ready: dict[str, deque[events.Handle]] = {}
        self._timers: list[tuple[float, int, events.TimerHandle]] = []
        self._timer_numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running = False

    def tell(self, text: str) -> None:
        """Write a line of the history."""
        self.told.append(f"{self._now:8.4f}  {text}")

    # what asyncio asks of a loop

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def get_debug(self) -> bool:
        """Never."""
        return False

    def is_running(self) -> bool:
        """Whether it runs."""
        return self._running

    def is_closed(self) -> bool:
        """Never."""
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> events.Handle:
        """See asyncio."""
        handle = events.Handle(callback, args, self, context)
        self._enter(handle, context)
        return handle

    def _enter(self, handle: events.Handle, context: Context | None) -> None:
        name = PROCESS.get() if context is None else context.get(PROCESS, "bus")
        queue = self._ready.get(name)
        if queue is None:
            queue = self._ready[name] = deque()
        queue.append(handle)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        """See asyncio."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        """See asyncio."""
        context = copy_context() if context is None else context
        handle = events.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._timer_numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        """See asyncio."""
        return _Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], *, name: Any = None, context: Any = None
    ) -> asyncio.Task[T]:
        """See asyncio."""
        task = _Task(coro, loop=self, name=name, context=context)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """As if a thread had done it a moment later. Whoever was killed by then has not done it."""
        future = self.create_future()
        self.call_later(self.rng.random() * 0.004, self._work, future, func, args)
        return future

    def _work(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        events._set_running_loop(None)  # it may block, as a thread may
        try:
            result, error = func(*args), None
        except Exception as raised:  # noqa: BLE001  # it is for whoever waits
            result, error = None, raised
        finally:
            events._set_running_loop(self)
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Note what nobody took care of."""
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    # the world

    def spawn(self, process: str, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of a process."""
        context = copy_context()
        context.run(PROCESS.set, process)
        return self.create_task(coro, context=context)

    def in_bus(self, delay: float, callback: Callable[..., object], *args: Any) -> events.TimerHandle:
        """A timer that belongs to the world, not to whoever sets it."""
        context = copy_context()
        context.run(PROCESS.set, "bus")
        return self.call_later(delay, callback, *args, context=context)

    def run(self, main: Coroutine[Any, Any, T], limit: float) -> T:
        """Run until `main`, a task of the world, is done. Stuck past the limit."""
        events._set_running_loop(self)
        self._running = True
        try:
            task = self.spawn("bus", main)
            while not task.done():
                self._turn(limit)
            return task.result()
        finally:
            self._running = False
            events._set_running_loop(None)

    def _turn(self, limit: float) -> None:
        """One callback of one process, or a jump to the next timer."""
        timers, now = self._timers, self._now
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                self._enter(handle, handle._context)  # type: ignore[attr-defined]
        names = [name for name, queue in self._ready.items() if queue and name not in self.frozen]
        if not names:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers or timers[0][0] > limit:
                raise Stuck(f"nothing more happens at {now:.3f} s: {self._who_waits()}")
            self._now, self._jumped_at = timers[0][0], self.turns
            return
        if self.turns - self._jumped_at > CIRCLES:
            raise Stuck(f"at {now:.3f} s {' and '.join(names)} go round in circles")
        queue = self._ready[names[0] if len(names) == 1 else names[int(self.rng.random() * len(names))]]
        handle = queue.popleft()
        self.turns += 1
        if not handle.cancelled():
            handle._run()

    def _who_waits(self) -> str:
        """The tasks that are not done, and where each of them stands."""
        left = sorted((task for task in self._tasks if not task.done()), key=hash)
        shown = [f"{task.get_name()} waits in {where(task)}" for task in left[:MOST_SHOWN]]
        return "; ".join(shown) + (f"; and {len(left) - MOST_SHOWN} more" if len(left) > MOST_SHOWN else "")

    def end(self) -> None:
        """Thaw everybody, cancel every task and wait until all are done."""
        self.frozen.clear()

        async def cancelled() -> None:
            for _ in range(100):
                left = sorted((t for t in self._tasks if t is not asyncio.current_task(self)), key=hash)
                if not left:
                    return
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=1.0)
                for task in left:
                    if task.done() and not task.cancelled():
                        task.exception()
            self.problems.append(f"tasks that do not end: {self._tasks}")

        self.run(cancelled(), self._now + 1_000)
