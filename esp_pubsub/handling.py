"""Handlers: a function that is called with each block of a window, in order, and what happens when it raises.

    await esp.handle(client, url, bill, group="billing", on_error=esp.retry(3).then(esp.dead_letter(dead)))

A block is done when the function has returned, or when the policy has had its way with it. What is done is confirmed,
so the function is called with each block at least once: a process may die after the function and before the
confirmation.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ._tasks import first_error
from .address import Side
from .confirming import Confirmer
from .dead_letters import DeadLetters
from .errors import ConfigError, HandlerFailed
from .events import Block
from .subscriber import Subscriber

if TYPE_CHECKING:
    from .client import Client

_log = logging.getLogger("esp_pubsub.handle")

Handler = Callable[[Block], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A window to which blocks go that could not be handled. Made by `esp.dead_letter`."""

    url: str


@dataclass(frozen=True, slots=True)
class OnError:
    """What happens when a handler raises. Made by `esp.retry`."""

    times: int = 0
    delay: float = 0.0
    multiplier: float = 1.0
    end: Literal["stop", "skip"] | DeadLetter = "stop"

    def __post_init__(self) -> None:
        if not isinstance(self.times, int) or isinstance(self.times, bool) or self.times < 0:
            raise ConfigError(f"retry(times) is a number from 0 on, not {self.times!r}")
        for name, least in (("delay", 0), ("multiplier", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= least:
                raise ConfigError(f"retry({name}=...) is a number from {least} on, not {value!r}")
        if self.end not in ("stop", "skip") and not isinstance(self.end, DeadLetter):
            raise ConfigError(f"after the last try it is 'stop', 'skip' or esp.dead_letter(url), not {self.end!r}")

    def then(self, end: Literal["stop", "skip"] | DeadLetter) -> OnError:
        """What happens after the last try: `stop` raises HandlerFailed, so that the block comes again when the handler
        is started again; `skip` logs the error and goes on; `esp.dead_letter(url)` puts the block into that window.
        """
        return replace(self, end=end)


def retry(times: int = 3, delay: float = 0.1, multiplier: float = 2.0) -> OnError:
    """Call the handler up to `times` times more: after `delay` seconds, and then each time `multiplier` times later."""
    return OnError(times, delay, multiplier)


def dead_letter(url: str) -> DeadLetter:
    """The window that a block goes to which cannot be handled. `esp replay` publishes what is there once more."""
    return DeadLetter(url)


async def handle(
    client: Client,
    url: str,
    function: Handler,
    *,
    group: str,
    side: Side | None = None,
    on_error: OnError | DeadLetter | Literal["stop", "skip"] = "stop",
    drain: float = 10.0,
) -> None:
    """Await `function(block)` with each block of the window at `url`, in order, until cancelled.

    Run it in two processes or more with the same `group`: one of them handles, and when it dies another one goes on,
    after the last block that was confirmed. `on_error` says what happens when the function raises: `stop`, `skip`,
    `esp.dead_letter(url)`, or `esp.retry(...)` and then one of these.

    Cancelled, it waits up to `drain` seconds for the function, and confirms what was done. Raises HandlerFailed, and
    what `subscriber` raises.
    """
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(f"a handler is a function that is defined by `async def`, not {function!r:.80}")
    policy = on_error if isinstance(on_error, OnError) else OnError(end=on_error)
    if not isinstance(group, str):
        raise ConfigError(f"group is a name, such as 'billing', not {group!r:.80}", key="group")
    async with client.subscriber(url, side=side, group=group) as subscriber:
        letters = None
        if isinstance(policy.end, DeadLetter):
            letters = DeadLetters(client, policy.end.url, subscriber.topic)
        await _Handling(subscriber, function, policy, letters).run(drain)


def _raise_if_ours(error: BaseException) -> None:
    """A cancellation of this task goes on; one that the function made itself is an error like any other."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
        raise error


class _Handling:
    def __init__(self, subscriber: Subscriber, function: Handler, policy: OnError, letters: DeadLetters | None) -> None:
        self._subscriber = subscriber
        self._function = function
        self._policy = policy
        self._letters = letters
        self._confirmer = Confirmer(subscriber)
        self._at_work = False  # on a block: not to be interrupted
        self._ending = False

    async def run(self, drain: float) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                confirming = tasks.create_task(self._confirmer.run())
                working = tasks.create_task(self._work(), name=f"esp handler of {self._subscriber.topic}")
                try:
                    await asyncio.wait([working])
                except asyncio.CancelledError:
                    await self._drain(working, drain)
                    raise
                finally:
                    confirming.cancel()
        except ExceptionGroup as errors:
            error = first_error(errors)
            raise error from error.__cause__
        finally:
            await self._confirmer.finish()
            if self._letters is not None:
                await self._letters.aclose()

    async def _drain(self, working: asyncio.Task[None], seconds: float) -> None:
        """The block that is being handled is handled to its end, if that does not take too long."""
        self._ending = True
        if self._at_work:
            await asyncio.wait([working], timeout=seconds)
            if not working.done():
                _log.warning("%s took more than %g s to end; its block comes again", working.get_name(), seconds)
        working.cancel()

    async def _work(self) -> None:
        async for block in self._subscriber:
            await self._confirmer.room()
            self._at_work = True
            try:
                await self._function(block)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # the policy says what becomes of it
                _raise_if_ours(error)
                await self._failed(block, error)
            self._at_work = False
            self._confirmer.done(block)
            if self._ending:
                return

    async def _failed(self, block: Block, error: BaseException) -> None:
        """Try again, and in the end do what the policy says. When this returns, the block is done."""
        pause = self._policy.delay
        for number in range(1, self._policy.times + 1):
            _log.warning("%s of %s failed (%s: %s); try %d of %d follows in %g s", block, self._subscriber.topic,
                         type(error).__name__, error, number, self._policy.times, pause,
                         extra=self._extra(block))  # fmt: skip
            self._at_work = False
            if self._ending:
                raise asyncio.CancelledError
            await asyncio.sleep(pause)
            self._at_work = True
            pause *= self._policy.multiplier
            try:
                await self._function(block)
            except (Exception, asyncio.CancelledError) as again:  # noqa: BLE001
                _raise_if_ours(again)
                error = again
            else:
                return
        await self._give_up(block, error)

    async def _give_up(self, block: Block, error: BaseException) -> None:
        name = block.name
        if self._policy.end == "skip":
            _log.error("block %s of %s is skipped: %s: %s", name, self._subscriber.topic, type(error).__name__, error,
                       extra=self._extra(block))  # fmt: skip
        elif self._letters is not None and await self._letters.put(block, error):
            _log.error("block %s of %s went to %s: %s: %s", name, self._subscriber.topic, self._letters.url,
                       type(error).__name__, error, extra=self._extra(block))  # fmt: skip
        else:
            raise HandlerFailed(
                f"the handler raised {type(error).__name__} on block {name} of {self._subscriber.topic}: {error}. The "
                "block is not confirmed and comes again; to go on without it, say on_error='skip' or esp.dead_letter",
                block=name,
            ) from error

    def _extra(self, block: Block) -> dict[str, str]:
        """The fields of a record of the log."""
        return {"esp_topic": self._subscriber.topic, "esp_block": block.name}
