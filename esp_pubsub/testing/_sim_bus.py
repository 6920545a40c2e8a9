"""A simulated bus, for `run_virtual` and for tests/simulation: logs, logs with holes, or queues. It delays, refuses,
forgets and comes late.

It keeps the contract of the seam and nothing more. What a pipe wrote goes to the bus in its own time, in order, also
when whoever wrote it is frozen, dead or has closed the pipe, and then perhaps only a part of it. Confirmed is what is
in the log, or in every queue bound. Trouble is drawn from the seed while there are faults: the rest of a pipe is lost,
said at once or never; all is written and nothing confirmed; single messages are missing where the bus may lose them;
a feed dies; a confirm is stored, and said not to be.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..bus import Bounds, Break, Capabilities, Message, Place, Start
from ..errors import BusUnavailable
from ._sim_election import Lines, SimElection
from ._virtual import VirtualLoop

DEADLINE = 0.4


class Queue:
    """Messages for one reader. `unread` are in order; `taken` were given to the feed at hand, by their number; `came`
    is all that ever came to it.
    """

    def __init__(self) -> None:
        self.came: list[bytes] = []
        self.unread: deque[bytes] = deque()
        self.taken: dict[int, bytes] = {}

    def give_back(self) -> None:
        """The feed died: what was taken comes again, first and in its old order."""
        self.unread.extendleft(data for _, data in sorted(self.taken.items(), reverse=True))
        self.taken.clear()


class Topic:
    """A log, or queues. `groups` are positions and states, `holders` who reads for them."""

    def __init__(self, *, is_log: bool) -> None:
        self.is_log = is_log
        self.log: list[bytes] = []
        self.first = 0  # what was in front of it is kept no more
        self.queues: dict[str, Queue] = {}
        self.positions: dict[str, int] = {}
        self.states: dict[str, bytes] = {}
        self.holders: dict[str, SimFeed] = {}
        self.retained: dict[str, bytes] = {}


class Broker:
    """What all connections share."""

    def __init__(self, loop: VirtualLoop, kind: str, *, deaths: bool) -> None:
        """`kind`: `log`, `holes` or `queues`, which has logs beside them (`Logs`)."""
        self.loop = loop
        self.kind = kind
        self.faults = 0.0
        self.slow_until = 0.0
        self.stalled_until = 0.0
        self.ended = False
        self.log_bytes = 1 << 20  # the largest message of the logs beside queues
        self.dead: set[str] = set()
        self.never_away: set[str] = set()  # whose queues are not durable, and who must miss nothing
        self.cut_until: dict[str, float] = {}
        self.hung: set[tuple[str, str]] = set()  # processes and topics that they read, which bring nothing, silently
        self.topics_cut_until: dict[tuple[str, str, type], float] = {}
        self.topics: dict[str, Topic] = {}
        self.open: list[SimPipe | SimFeed] = []
        self.numbers = itertools.count(1)
        self._news: list[asyncio.Future[None]] = []
        self.lines = Lines(self)
        log = kind != "queues"
        self.capabilities = Capabilities(
            suffix_only=kind == "log", replay=log, retained=True, groups=True, incarnation=False, requests=False,
            catalog=False, max_message_bytes=1 << 20, deaths=deaths, logs=not log,
            elections=() if log else ("token",),
        )  # fmt: skip

    def topic(self, name: str, *, is_log: bool | None = None) -> Topic:
        """The topic of that name. A new one is of the broker's kind, unless it says otherwise."""
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = Topic(is_log=self.kind != "queues" if is_log is None else is_log)
        return found

    def draws(self, share: float = 1.0) -> bool:
        """Whether something goes wrong now."""
        return self.faults > 0 and self.loop.rng.random() < self.faults * share

    def delay(self) -> float:
        """How long a step takes."""
        now, rng = self.loop.time(), self.loop.rng
        wait = max(0.0, self.stalled_until - now)
        return wait + rng.random() * (0.08 if now < self.slow_until else 0.004)

    def check(self, process: str) -> None:
        """BusUnavailable if this process has no link."""
        if self.ended or process in self.dead or self.loop.time() < self.cut_until.get(process, 0.0):
            raise BusUnavailable(f"{process} has no link")

    async def ask(self, process: str) -> None:
        """The time of one question and answer."""
        self.check(process)
        delay = self.delay()
        await asyncio.sleep(min(delay, DEADLINE))
        self.check(process)
        if delay > DEADLINE:
            raise BusUnavailable("no answer in time")

    def cut(self, process: str, seconds: float) -> None:
        """A process loses its link for a while."""
        self.cut_until[process] = self.loop.time() + seconds
        self.lines.cut(process, noticed_after=self.loop.rng.random())
        for one in [one for one in self.open if one.process == process]:
            one.die("the link is lost")

    def cut_topic(self, process: str, topic: str, seconds: float, what: type[SimPipe | SimFeed] | None = None) -> None:
        """A process cannot write to a topic for a while, or, with SimFeed, not read it; all else it can do."""
        what = what or SimPipe
        self.topics_cut_until[process, topic, what] = self.loop.time() + seconds
        for one in [one for one in self.open if isinstance(one, what) and (one.process, one.name) == (process, topic)]:
            one.die("the topic is cut off")

    def check_topic(self, process: str, topic: str, what: type[SimPipe | SimFeed]) -> None:
        """BusUnavailable if this process can open no such thing on a topic."""
        if self.loop.time() < self.topics_cut_until.get((process, topic, what), 0.0):
            raise BusUnavailable(f"{topic} is cut off from {process}")

    def hang_topic(self, process: str, topic: str, seconds: float) -> None:
        """A process reads nothing of a topic for a while, and nothing says so."""
        self.hung.add((process, topic))
        self.loop.in_bus(seconds, self._go_on, process, topic)

    def _go_on(self, process: str, topic: str) -> None:
        self.hung.discard((process, topic))
        self.tell_news()

    def kill(self, process: str) -> None:
        """A process is gone."""
        self.loop.frozen.add(process)
        self.dead.add(process)
        self.lines.cut(process, noticed_after=0.0)
        for one in [one for one in self.open if one.process == process]:
            one.die("the process is gone")
        self.tell_news()

    def tell_news(self) -> None:
        """Something changed."""
        news, self._news = self._news, []
        for future in news:
            if not future.done():
                future.set_result(None)

    async def news(self) -> None:
        """Wait until something changes."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._news.append(future)
        await future


class SimPipe:
    """See `Pipe`. `_waiting` is what was handed over and has not come to the bus."""

    def __init__(self, broker: Broker, topic: str, process: str, *, is_log: bool) -> None:
        self.process = process
        self.name = topic
        self._broker = broker
        self._topic = broker.topic(topic, is_log=is_log)
        self._waiting: deque[bytes] = deque()
        self._confirmed = 0
        self._counts = True
        self._is_cut = False
        self._error: str | None = None
        self._moving = False
        self._on_the_way: dict[str, float] = {}
        broker.open.append(self)

    async def write(self, frames: Sequence[bytes]) -> None:
        """See `Pipe.write`."""
        self._check()
        if not self._is_cut:  # else nothing may ever stand behind what is missing
            self._waiting.extend(frames)
        if self._waiting and not self._moving:
            self._moving = True
            self._broker.loop.in_bus(self._broker.delay(), self._move)
        await self._broker.ask(self.process)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise BusUnavailable(self._error)

    def _move(self) -> None:
        """Some of what waits comes to the bus, with or without an accident."""
        broker, rng = self._broker, self._broker.loop.rng
        if self._waiting and broker.draws():
            self._accident(rng.choice(("cut", "cut in silence", "unconfirmed", "hole")))
        count = min(len(self._waiting), rng.randrange(1, 12))
        for _ in range(count):
            self._put(self._waiting.popleft())
        broker.tell_news()
        self._moving = bool(self._waiting)
        if self._moving:
            broker.loop.in_bus(broker.delay(), self._move)

    def _accident(self, kind: str) -> None:
        said = "/F/" in self.name and not self.name.endswith("/order")  # each word of a group stands alone
        if kind == "hole" and (self._broker.capabilities.suffix_only or said):
            kind = "cut"
        self._broker.loop.tell(f"{self.process}: {kind} in a pipe to {self.name}")
        if kind == "hole":
            self._hole()
            return
        if kind.startswith("cut"):
            keep = self._broker.loop.rng.randrange(len(self._waiting) + 1)
            while len(self._waiting) > keep:
                self._waiting.pop()
            self._counts, self._is_cut = False, True
        if kind == "unconfirmed":
            self._counts = False
        if kind != "cut in silence" and self._broker.loop.rng.random() < 0.5:
            self.die(f"{kind} (drawn)")

    def _hole(self) -> None:
        """The next message is missing, in one queue or in the log; the pipe says so a little later."""
        self._counts = False
        missing = self._waiting.popleft()
        if self._topic.queues:
            unlucky = self._broker.loop.rng.choice(list(self._topic.queues))
            self._put(missing, unlucky)
        self._broker.loop.in_bus(self._broker.loop.rng.random() * 0.05, self.die, "a message was refused")

    def _put(self, data: bytes, unlucky: str | None = None) -> None:
        if self._topic.is_log:
            self._topic.log.append(data)
        elif "/F/" in self.name:
            for queue in self._topic.queues.values():
                queue.unread.append(data)
        else:
            self._spread(data, unlucky)
            return
        self._confirmed += self._counts

    def _spread(self, data: bytes, unlucky: str | None) -> None:
        """To each queue in its own time; confirmed when it has come to all."""
        loop, latest = self._broker.loop, 0.0
        for name, queue in self._topic.queues.items():
            at = max(self._on_the_way.get(name, 0.0), loop.time() + loop.rng.random() * 0.01)
            self._on_the_way[name], latest = at, max(at, latest)
            if name != unlucky:
                loop.in_bus(at - loop.time(), self._arrive, queue, data)
        if unlucky is None:
            before = self._on_the_way.get("", 0.0)
            self._on_the_way[""] = max(before, latest)
            loop.in_bus(max(0.0, self._on_the_way[""] - loop.time()) + 1e-6, self._has_arrived, self._counts)

    def _arrive(self, queue: Queue, data: bytes) -> None:
        queue.unread.append(data)
        queue.came.append(data)
        self._broker.tell_news()

    def _has_arrived(self, counts: bool) -> None:
        self._confirmed += counts
        self._broker.tell_news()

    async def confirmed(self, past: int) -> int:
        """See `Pipe.confirmed`."""
        while self._confirmed <= past:
            self._check()
            await self._broker.news()
        await self._broker.ask(self.process)
        return self._confirmed

    def die(self, reason: str) -> None:
        """Trouble: what waits comes late, or only a part of it."""
        if self._error is None:
            self._error = reason
            keep = self._broker.loop.rng.randrange(len(self._waiting) + 1)
            while len(self._waiting) > keep:
                self._waiting.pop()
            if self in self._broker.open:
                self._broker.open.remove(self)
            self._broker.tell_news()

    async def aclose(self) -> None:
        """See `Pipe.aclose`."""
        self.die("closed")


class SimFeed:
    """See `Feed`."""

    state: bytes | None = None
    unconfirmed: int | None = None

    def __init__(self, broker: Broker, topic: str, process: str, group: str | None, *, is_log: bool) -> None:
        self.process = process
        self.name = topic
        self._broker = broker
        self._topic = broker.topic(topic, is_log=is_log)
        self._group = group
        self._error: str | None = None
        self._key = group or f"{process}/{next(broker.numbers)}"
        self._holds = group is None
        self.position = 0
        broker.open.append(self)

    def begin(self, start: Start) -> None:
        """Begin there."""
        log, start = self._topic.log, start.position if isinstance(start, Place) else start
        first = self._topic.first
        self.position = first if start == "earliest" else len(log) if start == "latest" else int(start)  # type: ignore[arg-type]
        if not self._topic.is_log:
            self._topic.queues.setdefault(self._key, Queue())

    @property
    def place(self) -> Place | None:
        """See `Feed.place`."""
        return Place(self.position, None) if self._topic.is_log else None

    def _check(self) -> None:
        if self._error is not None:
            raise BusUnavailable(self._error)
        self._broker.check(self.process)

    async def _hold(self) -> None:
        topic, group = self._topic, str(self._group)
        while topic.holders.get(group) is not None:
            await self._broker.news()
            self._check()
        topic.holders[group] = self
        self._holds = True
        self.state = topic.states.get(group)
        self.position = topic.positions.get(group, self.position)

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        self._check()
        if not self._holds:
            await self._hold()
        while not self._has_some():
            await self._broker.news()
            self._check()
        await asyncio.sleep(self._broker.delay())
        self._check()
        if self.process not in self._broker.never_away and self._broker.draws(0.05):
            self.die("a feed died (drawn)")
            self._check()
        return self._take(min(max_messages, self._broker.loop.rng.randrange(1, 40)))

    def _has_some(self) -> bool:
        if (self.process, self.name) in self._broker.hung:
            return False
        if not self._topic.is_log:
            return bool(self._topic.queues[self._key].unread)
        return self.position < len(self._topic.log)

    def _take(self, count: int) -> list[Message | Break]:
        if self._topic.is_log:
            log, before = self._topic.log, self.position
            first = max(before, self._topic.first)
            self.position = min(len(log), first + count)
            found: list[Message | Break] = [Break("retention", first - before)] if first > before else []
            return found + [Message(at, log[at]) for at in range(first, self.position)]
        queue = self._topic.queues[self._key]
        found = []
        while queue.unread and len(found) < count:
            number, data = next(self._broker.numbers), queue.unread.popleft()
            queue.taken[number] = data
            found.append(Message(number, data))
        return found

    async def release(self, positions: Sequence[Any]) -> None:
        """See `Feed.release`."""
        self._check()
        if not self._topic.is_log:
            for position in positions:
                self._topic.queues[self._key].taken.pop(position, None)

    async def confirm(self, position: Any, state: bytes) -> None:
        """See `Feed.confirm`: the state first, then the position."""
        await self._broker.ask(self.process)
        self._check()
        if not self._holds:
            raise BusUnavailable("another reader has the group")
        topic, group = self._topic, str(self._group)
        topic.states[group] = state
        if not self._topic.is_log:
            await self._broker.ask(self.process)
            self._check()
            taken = topic.queues[self._key].taken
            for number in [number for number in taken if position is not None and number <= position]:
                del taken[number]
        elif position is not None:
            topic.positions[group] = max(position + 1, topic.positions.get(group, 0))
        if self._broker.draws(0.5):
            self.die("stored, and said not to be (drawn)")
            self._check()

    def die(self, reason: str) -> None:
        """Trouble, or the end."""
        if self._error is not None:
            return
        self._error = reason
        if self in self._broker.open:
            self._broker.open.remove(self)
        topic = self._topic
        if self._group is None:
            topic.queues.pop(self._key, None)
        elif topic.holders.get(self._group) is self:
            del topic.holders[self._group]
            if not topic.is_log:
                topic.queues[self._key].give_back()
        self._broker.tell_news()

    async def aclose(self) -> None:
        """See `Feed.aclose`."""
        self.die("closed")


class SimBus:
    """See `Bus`, `Deaths`, `Logs` and `Elections`: the connection of one process."""

    def __init__(self, broker: Broker, process: str, *, is_log: bool | None = None) -> None:
        """`is_log`: what it makes topics of, if not of the broker's kind."""
        self.process = process
        self.capabilities = broker.capabilities
        self._broker = broker
        self._is_log = broker.kind != "queues" if is_log is None else is_log
        if self._is_log and not self.capabilities.replay:
            self.capabilities = replace(
                self.capabilities, replay=True, logs=False, elections=(), max_message_bytes=broker.log_bytes
            )

    async def log(self) -> SimBus:
        """See `Logs.log`."""
        return SimBus(self._broker, self.process, is_log=True)

    def election(self, kind: str, line: str, member: str) -> SimElection:
        """See `Elections.election`."""
        return SimElection(self._broker, line, self.process)

    async def pipe(self, topic: str) -> SimPipe:
        """See `Bus.pipe`."""
        await self._broker.ask(self.process)
        self._broker.check_topic(self.process, topic, SimPipe)
        return SimPipe(self._broker, topic, self.process, is_log=self._is_log)

    async def feed(self, topic: str, start: Start, group: str | None) -> SimFeed:
        """See `Bus.feed`."""
        await self._broker.ask(self.process)
        self._broker.check_topic(self.process, topic, SimFeed)
        feed = SimFeed(self._broker, topic, self.process, group, is_log=self._is_log)
        feed.begin(start)
        self._broker.tell_news()
        return feed

    async def bounds(self, topic: str) -> Bounds:
        """See `Bus.bounds`."""
        await self._broker.ask(self.process)
        found = self._broker.topic(topic, is_log=self._is_log)
        return Bounds(found.first, len(found.log), None)

    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        """See `Bus.retain`."""
        await self._broker.ask(self.process)
        if value is not None:
            self._broker.topic(topic, is_log=self._is_log).retained[key] = value

    async def retained(self, topic: str, key: str) -> bytes | None:
        """See `Bus.retained`."""
        await self._broker.ask(self.process)
        return self._broker.topic(topic, is_log=self._is_log).retained.get(key)

    async def gone(self, process: str) -> None:
        """See `Deaths.gone`."""
        while process not in self._broker.dead:
            await self._broker.news()
        await asyncio.sleep(self._broker.delay())

    async def end(self, process: str) -> bool:
        """See `Deaths.end`: nobody holds a lock here."""
        return False

    async def aclose(self) -> None:
        """See `Bus.aclose`."""
        for one in [one for one in self._broker.open if one.process == self.process]:
            one.die("the bus was closed")
