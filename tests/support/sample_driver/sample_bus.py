"""A bus in the memory of one process, as a sample of a driver: queues, as a broker has them.

Every feed without a group has a queue of its own from the moment it is opened; every group has one that stays. A
message goes into each queue of its topic. One that a queue has no room for is refused, and what follows it in the same
write may still fit: so something can be missing in the middle of a pipe, the pipe says so, and `suffix_only` is not
claimed. A queue forgets what is done, so neither is `replay`.

A real driver talks to its system where this one touches the shared `_Hub`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from esp_pubsub.bus import Bounds, Break, Capabilities, Message, Start
from esp_pubsub.config import SIZE
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable, ConfigError, NoAnswer


@dataclass(frozen=True, slots=True)
class Options:
    """Keywords of `init(bus="sample")`, keys of the section `sample` in sample.cfg, ESP_PUBSUB_<KEY>."""

    hub: str = "default"
    """Whoever names the same one, in the same process and loop, is on the same bus."""
    queue_size: int = field(default=16 << 20, metadata=SIZE)
    """The most a queue holds, in bytes, so also the largest message; what does not fit is refused."""

    def __post_init__(self) -> None:
        if self.queue_size < 1:
            raise ConfigError("queue_size is at least 1")


class _Queue:
    """Messages for one reader at a time. What it was given stays here until it is done."""

    def __init__(self, limit: int) -> None:
        self.waiting: deque[Message] = deque()
        self.given: dict[int, bytes] = {}
        self.state: bytes | None = None
        self.reader: SampleFeed | None = None
        self.changed = asyncio.Event()
        self._room = limit
        self._next = 0

    def put(self, data: bytes) -> bool:
        """Add a message, if there is room for it."""
        if len(data) > self._room:
            return False
        self._room -= len(data)
        self.waiting.append(Message(self._next, data))
        self._next += 1
        self.wake()
        return True

    def take(self, max_messages: int, max_bytes: int) -> list[Message]:
        """The next messages, within bounds, or one larger one."""
        found: list[Message] = []
        while self.waiting and len(found) < max_messages:
            max_bytes -= len(self.waiting[0].data)
            if found and max_bytes < 0:
                break
            found.append(self.waiting.popleft())
        self.given.update(found)
        return found

    def done(self, positions: Iterable[int]) -> None:
        """Forget messages that were given."""
        self._room += sum(len(self.given.pop(position, b"")) for position in positions)

    def give_back(self) -> None:
        """The reader is gone: what it did not confirm comes first to the next one, in its old place."""
        self.reader = None
        self.waiting.extendleft(Message(*given) for given in reversed(self.given.items()))
        self.given.clear()
        self.wake()

    def wake(self) -> None:
        """Let every reader look again."""
        self.changed.set()
        self.changed = asyncio.Event()


class _Hub:
    """The system behind the connections."""

    def __init__(self) -> None:
        self.queues: defaultdict[str, dict[str, _Queue]] = defaultdict(dict)
        self.values: dict[tuple[str, str], bytes] = {}
        self.questions: defaultdict[str, asyncio.Queue[tuple[bytes, asyncio.Future[bytes]]]]
        self.questions = defaultdict(asyncio.Queue)


_hubs: defaultdict[str, _Hub] = defaultdict(_Hub)


async def open_bus(options: Options) -> SampleBus:
    """What the registry calls. A real driver connects here."""
    return SampleBus(_hubs[options.hub], options)


class SampleBus:
    """A `Bus` and `Requests`."""

    def __init__(self, hub: _Hub, options: Options) -> None:
        self.capabilities = Capabilities(
            suffix_only=False, replay=False, retained=True, groups=True, incarnation=False, requests=True,
            catalog=False, max_message_bytes=options.queue_size,
        )  # fmt: skip
        self._hub = hub
        self._options = options
        self._open: set[SamplePipe | SampleFeed] = set()
        self._closed = False

    def _check(self) -> None:
        if self._closed:
            raise BusUnavailable("this bus was closed")

    async def pipe(self, topic: str) -> SamplePipe:
        """See `Bus.pipe`."""
        self._check()
        pipe = SamplePipe(self._hub.queues[topic], self.capabilities.max_message_bytes)
        self._open.add(pipe)
        return pipe

    async def feed(self, topic: str, start: Start, group: str | None) -> SampleFeed:
        """See `Bus.feed`. With no replay there is nothing but what comes from now on, or what waits for a group."""
        self._check()
        queues, name = self._hub.queues[topic], group or f" {secrets.token_hex(8)}"
        queue = queues.setdefault(name, _Queue(self._options.queue_size))
        feed = SampleFeed(queue, None if group else lambda: queues.pop(name))
        self._open.add(feed)
        return feed

    async def bounds(self, topic: str) -> Bounds:
        """See `Bus.bounds`. There are none without replay, and nobody asks."""
        raise BusRefused("this bus keeps no log")

    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        """See `Bus.retain`."""
        self._check()
        if value is None:
            self._hub.values.pop((topic, key), None)
        else:
            self._hub.values[topic, key] = value

    async def retained(self, topic: str, key: str) -> bytes | None:
        """See `Bus.retained`."""
        self._check()
        return self._hub.values.get((topic, key))

    async def request(self, topic: str, data: bytes, timeout: float) -> bytes:
        """See `Requests.request`."""
        self._check()
        answer = asyncio.get_running_loop().create_future()
        self._hub.questions[topic].put_nowait((data, answer))
        try:
            async with asyncio.timeout(timeout):
                return bytes(await answer)
        except TimeoutError:
            raise NoAnswer(f"nobody answered on {topic} within {timeout:g} s", topic=topic, timeout=timeout) from None
        finally:
            answer.cancel()

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """See `Requests.serve`."""
        self._check()
        while True:
            data, asker = await self._hub.questions[topic].get()
            if not asker.done():
                found = await answer(data)
                if not asker.done():
                    asker.set_result(found)

    async def aclose(self) -> None:
        """See `Bus.aclose`."""
        self._closed = True
        while self._open:
            await self._open.pop().aclose()


class SamplePipe:
    """A `Pipe`. What is taken is confirmed; the first message refused ends the count, and the pipe."""

    def __init__(self, queues: dict[str, _Queue], limit: int) -> None:
        self._queues = queues
        self._limit = limit
        self._count = 0
        self._dead: BusError | None = None
        self._changed = asyncio.Event()

    async def write(self, frames: Sequence[bytes]) -> None:
        """See `Pipe.write`."""
        await asyncio.sleep(0)  # a writer that never waits would starve its loop
        if self._dead is not None:
            raise self._dead
        if any(len(frame) > self._limit for frame in frames):
            self._dead = BusRefused(f"a message of more than {self._limit} bytes")
        else:
            self._put(frames)
        self._changed.set()
        if self._dead is not None:
            raise self._dead

    def _put(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            taken = [queue.put(frame) for queue in self._queues.values()]
            if not all(taken):
                self._dead = BusUnavailable("a queue is full: a message was refused")
            elif self._dead is None:
                self._count += 1

    async def confirmed(self, past: int) -> int:
        """See `Pipe.confirmed`."""
        while self._count <= past:
            if self._dead is not None:
                raise self._dead
            self._changed.clear()
            await self._changed.wait()
        return self._count

    async def aclose(self) -> None:
        """See `Pipe.aclose`."""
        self._dead = self._dead or BusUnavailable("this pipe was closed")
        self._changed.set()


class SampleFeed:
    """A `Feed`. Without a group its queue is thrown away with it, and what it read is done at once."""

    place = None  # a queue has none
    unconfirmed: int | None = None  # set by who reads; this queue hands out all that it has

    def __init__(self, queue: _Queue, forget: Callable[[], object] | None) -> None:
        self.state: bytes | None = None
        self._queue = queue
        self._forget = forget
        self._closed = False

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        while not self._closed:
            if self._queue.reader in (None, self) and self._queue.waiting:
                if self._queue.reader is None:
                    self._queue.reader, self.state = self, self._queue.state
                found = self._queue.take(max_messages, max_bytes)
                if self._forget is not None:
                    self._queue.done(message.position for message in found)
                return found
            await self._queue.changed.wait()
        raise BusUnavailable("this feed was closed")

    async def release(self, positions: Sequence[int]) -> None:
        """See `Feed.release`."""
        self._queue.done(positions)

    async def confirm(self, position: int | None, state: bytes) -> None:
        """See `Feed.confirm`."""
        if self._closed or self._queue.reader is not self:
            raise BusUnavailable("another reader has taken over the group")
        if position is not None:
            self._queue.done([given for given in self._queue.given if given <= position])
        self._queue.state = state

    async def aclose(self) -> None:
        """See `Feed.aclose`."""
        if self._closed:
            return
        self._closed = True
        if self._forget is not None:
            self._forget()
        if self._queue.reader is self:
            self._queue.give_back()
        self._queue.wake()
