"""What the checks of the conformance suite stand on: the system under test, one trial of a check, and bounded waits.

Every wait ends after `patience`. Where something must *not* happen, it is watched for `quiet`: a short bound, which can
miss a fault but never invents one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from esp_pubsub.bus import Bounds, Break, Bus, Capabilities, Feed, Message, Pipe, Place, Start
from esp_pubsub.errors import BusError

T = TypeVar("T")


class Failed(AssertionError):
    """A check found that the driver does not keep the contract; the message says how."""


class NotClaimed(Exception):
    """The check does not apply: a capability is not claimed, or the system has no such hook."""


def _namer() -> Callable[[], str]:
    """Names that nobody used before, in the form of a window's topic."""
    run, number = secrets.token_hex(4), itertools.count()
    return lambda: f"conformance:0/{run}/{next(number)}/w/I"


@dataclass(frozen=True, kw_only=True)
class Context:
    """The system under test. Only `open_bus` is needed; a hook that is missing skips the checks that need it."""

    open_bus: Callable[[], Awaitable[Bus]]
    """A new connection, independent of the others, to the same system."""
    new_topic: Callable[[], str] = field(default_factory=_namer)
    """The name of a topic that nobody used before."""
    fail_in_the_middle: Callable[[Bus, str], AbstractAsyncContextManager[bytes]] | None = None
    """Entered for a topic, it gives a message; that one, written inside, the system refuses or never confirms.

    What is written after it is taken, at once or when the context has been left.
    """
    cut: Callable[[Bus], Awaitable[None]] | None = None
    """Lose the link of this connection, for good."""
    trim: Callable[[str], Awaitable[None]] | None = None
    """Let retention take the oldest messages of a topic, at least ten of them. It may write messages of its own."""
    open_hasty_bus: Callable[[], Awaitable[Bus]] | None = None
    """A connection whose reader loses its group within half of `patience` if it does not read."""
    patience: float = 5.0
    """How long anything that must happen may take."""
    quiet: float = 0.05
    """How long the suite watches that something does not happen."""
    limit: float = 60.0
    """How long one check may take altogether."""


class Trial:
    """One run of one check. What it opened is closed at its end, within a bound."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.patience = context.patience
        self.capabilities: Capabilities
        self._first: Bus
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._first = await self.bus()
        self.capabilities = self._first.capabilities
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stack.aclose()
        except Exception:
            if error is None:
                raise
            # What made the check fail says more than that closing failed too.

    def topic(self) -> str:
        """A fresh name."""
        return self.context.new_topic()

    async def bus(self, opener: Callable[[], Awaitable[Bus]] | None = None) -> Bus:
        """Another connection."""
        bus = await self.within("open_bus", (opener or self.context.open_bus)())
        self._stack.push_async_callback(self._close, bus)
        return bus

    async def _close(self, bus: Bus) -> None:
        await self.within("aclose of a bus", bus.aclose())

    async def pipe(self, topic: str, bus: Bus | None = None) -> Pipe:
        """A pipe, of the trial's first connection unless told otherwise."""
        return await self.within("pipe", (bus or self._first).pipe(topic))

    async def feed(
        self, topic: str, start: Start = "latest", *, group: str | None = None, bus: Bus | None = None
    ) -> Feed:
        """A feed, of the trial's first connection unless told otherwise."""
        return await self.within("feed", (bus or self._first).feed(topic, start, group))

    async def bounds(self, topic: str, bus: Bus | None = None) -> Bounds:
        """What a log holds, by the trial's first connection unless told otherwise."""
        return await self.within("bounds", (bus or self._first).bounds(topic))

    async def within(self, what: str, call: Awaitable[T]) -> T:
        """The result of a call that must end within `patience`."""
        scope = asyncio.timeout(self.patience)
        try:
            async with scope:
                return await call
        except TimeoutError:
            if not scope.expired():
                raise
            raise Failed(f"{what} had not ended after {self.patience:g} s") from None

    async def quietly(self, what: str, call: Awaitable[Any]) -> None:
        """The call must still wait after `quiet`; then it is cancelled."""
        scope = asyncio.timeout(self.context.quiet)
        try:
            async with scope:
                result = await call
        except TimeoutError:
            if scope.expired():
                return
            raise
        raise Failed(f"{what} should have waited, but returned {short(result)}")

    async def raises(self, kind: type[BusError], what: str, call: Awaitable[Any]) -> None:
        """The call must raise this kind of trouble within `patience`."""
        try:
            result = await self.within(what, call)
        except kind:
            return
        except BusError as other:
            raise Failed(f"{what} should have raised {kind.__name__}, but raised {other!r}") from other
        raise Failed(f"{what} should have raised {kind.__name__}, but returned {short(result)}")

    async def put(self, pipe: Pipe, sent: Sequence[bytes], before: int = 0) -> None:
        """Write, and wait until all is confirmed; `before` messages of this pipe were confirmed already."""
        await self.within("write", pipe.write(sent))
        await self.settled(pipe, before, before + len(sent))

    async def settled(self, pipe: Pipe, count: int, total: int) -> None:
        """Wait from `count` confirmations on until there are `total`, which is all that was written."""
        while count < total:
            now = await self.within(f"confirmed({count})", pipe.confirmed(count))
            if not count < now <= total:
                raise Failed(f"confirmed({count}) returned {now}, with {total} messages written")
            count = now

    async def write_to(self, topic: str, sent: Sequence[bytes], bus: Bus | None = None) -> None:
        """Write through a new pipe, wait for confirmation, close."""
        pipe = await self.pipe(topic, bus)
        await self.put(pipe, sent)
        await self.within("aclose of a pipe", pipe.aclose())

    async def read(self, feed: Feed, count: int, max_messages: int = 100) -> list[Message]:
        """Read until there are `count` messages or more; a Break is a failure."""
        found: list[Message] = []
        while len(found) < count:
            what = f"read, with {len(found)} of {count} messages read,"
            for item in await self.within(what, feed.read(max_messages, 1 << 20)):
                if isinstance(item, Break):
                    raise Failed(f"an unexpected Break after {len(found)} messages: {item}")
                found.append(item)
        return found

    async def expect(
        self, feed: Feed, sent: Sequence[bytes], max_messages: int = 100, *, again: Sequence[bytes] = ()
    ) -> list[Message]:
        """Exactly these messages come next, in this order. Some of the end of `again` may come before them: they were
        confirmed over a link that was lost at once, and a queue does not say when it has let go of a message.
        """
        found = await self.read(feed, len(sent), max_messages)
        repeated = len(again) - again.index(found[0].data) if found and found[0].data in again else 0
        found += await self.read(feed, len(sent) + repeated - len(found), max_messages)
        same([message.data for message in found], [*again[len(again) - repeated :], *sent])
        return found[repeated:]

    async def broken(self, feed: Feed, fetched: Sequence[bytes] = ()) -> tuple[Break, list[Message], int]:
        """The Break that must come next, the messages behind it that came with it, and how many came in front of it:
        of those that a feed may have fetched before it was broken, in their order.
        """
        ahead = 0
        while True:
            items = await self.within("read, for a Break,", feed.read(100, 1 << 20))
            for at, item in enumerate(items):
                if isinstance(item, Break):
                    return item, [each for each in items[at + 1 :] if isinstance(each, Message)], ahead
                if ahead >= len(fetched) or item.data != fetched[ahead]:
                    raise Failed(f"a Break should have come first, but {short(item)} did")
                ahead += 1

    async def all_there_is(self, feed: Feed) -> list[bytes]:
        """What comes until nothing has come for `quiet`, four times over: for what may be there or not."""
        found: list[bytes] = []
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(4 * self.context.quiet):
                    items = await feed.read(100, 1 << 20)
                found += [item.data for item in items if isinstance(item, Message)]
        return found

    @contextlib.asynccontextmanager
    async def meanwhile(self, call: Awaitable[T]) -> AsyncIterator[asyncio.Task[T]]:
        """A call that waits while the body runs; cancelled at the end. What it raises is in the task."""
        task = asyncio.ensure_future(_coroutine(call))
        try:
            await asyncio.sleep(0)
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=self.patience)
            if not task.cancelled() and task.done():
                task.exception()

    async def cancelled(self, call: Awaitable[T], point: int, *, late: bool = False) -> T | None:
        """Cancel a call where it waits for the `point`th time; its result if it was not, or not any more.

        `late` cancels when what it waits for has happened and the call has not heard of it: where results get lost.
        """
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(_coroutine(_CancelAt(call, point, late)))
            await self.within("a cancelled call", asyncio.wait([task]))
        return None if task.cancelled() else task.result()


class _CancelAt(Awaitable[T]):
    """An awaitable that cancels its own task where it suspends for the nth time."""

    def __init__(self, call: Awaitable[T], point: int, late: bool) -> None:
        self._call, self._point, self._late = call, point, late

    def __await__(self) -> Generator[Any, Any, T]:
        task = asyncio.current_task()
        steps = self._call.__await__()
        error: BaseException | None = None
        for number in itertools.count():
            try:
                waits_for = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            if number == self._point and task is not None:
                self._arm(task, waits_for)
            error = None
            try:
                yield waits_for
            except BaseException as raised:  # noqa: BLE001  # handed on to the call, as `yield from` does
                error = raised
        raise AssertionError("a call without end")

    def _arm(self, task: asyncio.Task[Any], waits_for: Any) -> None:
        if self._late and waits_for is not None:
            waits_for.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)


async def _coroutine(call: Awaitable[T]) -> T:
    return await call


def place_of(feed: Feed) -> Place:
    """Where a feed of a log stands."""
    place = feed.place
    if not isinstance(place, Place):
        raise Failed(f"a feed that has read stands at a Place, not {place!r}")
    return place


def numbered(count: int, name: str = "m", size: int = 0) -> list[bytes]:
    """So many messages that can be told apart, each at least `size` bytes long."""
    return [f"{name}{n}".encode().ljust(size, b".") for n in range(count)]


def same(found: Sequence[bytes], sent: Sequence[bytes]) -> None:
    """What was read is what was sent."""
    for at, (one, other) in enumerate(itertools.zip_longest(found, sent)):
        if one != other:
            raise Failed(f"message {at} of {len(sent)} should be {short(other)}, but is {short(one)}")


def require(holds: bool, otherwise: str) -> None:
    """Fail with this reason unless something holds."""
    if not holds:
        raise Failed(otherwise)


def is_in_order(found: Iterable[bytes], sent: Iterable[bytes]) -> bool:
    """Whether what was found is what was sent, in order and without doubles, perhaps with some missing."""
    left = iter(sent)
    return all(one in left for one in found)


def short(value: object) -> str:
    """A repr that fits into a line."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


Body = Callable[[Trial], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: an async callable that takes a `Context` and raises Failed, NotClaimed, or what the driver raised."""

    name: str
    claim: str
    needs: tuple[str, ...]
    body: Body

    async def __call__(self, context: Context) -> None:
        """Carry it out once."""
        scope = asyncio.timeout(context.limit)
        try:
            async with scope, Trial(context) as trial:
                for need in self.needs:
                    if not getattr(trial.capabilities, need, None) and not getattr(context, need, None):
                        kind = "the capability" if hasattr(trial.capabilities, need) else "the hook"
                        raise NotClaimed(f"{kind} {need} is not there")
                await self.body(trial)
        except TimeoutError:
            if not scope.expired():
                raise
            raise Failed(f"the check had not ended after {context.limit:g} s") from None
        except ExceptionGroup as group:
            raise _first(group) from group


def _first(error: Exception) -> Exception:
    """The first error in a group of groups: the others mostly follow from it."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


CHECKS: dict[str, Check] = {}


def check(*needs: str) -> Callable[[Body], Body]:
    """Enter a function as a check. `needs` are capabilities and hooks without which it is skipped."""

    def enter(body: Body) -> Body:
        name = body.__name__
        CHECKS[name] = Check(name, (body.__doc__ or "").strip(), needs, body)
        return body

    return enter
