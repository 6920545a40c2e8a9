"""Subscriber: feed -> accept rule -> bounded buffer -> async for.

There is no task behind it: who asks for the next block reads the bus, decides what is delivered, and keeps the rest of
what was read for the next call. So nothing is read ahead of the user but one read's worth, and a subscriber that is not
asked costs nothing. A feed that died is replaced within the same call; what comes twice is dropped by the accept rule.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from .address import Address
from .backoff import Backoff
from .bus import Break, Bus, Feed, Message, Place, Start, parts
from .errors import (
    BadFrame,
    BusRefused,
    BusUnavailable,
    Closed,
    ConfigError,
    NoGroup,
    NothingStored,
    SchemaError,
    Unconfirmed,
    WrongOrder,
)
from .events import Block, View
from .failover.accept import Accept, Dropped, Outcome
from .failover.ledger import Ledger, furthest, not_read, parse_state
from .follower import Follower
from .notices import BadMessage, Failure, Forgotten, Held, Missed, Notice, Reconnected, Skipped
from .retained import retained_runs, retained_schema
from .schema import Schema
from .wire.frame import BLOCK, LIMITS, Frame, Limits, parse

if TYPE_CHECKING:
    from .client import Home

Begin = Start | Literal["none"]
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0
_EVENTS, _DATA = attrgetter("count"), attrgetter("data")


def check_start(start: Any, group: str | None = None) -> None:
    """ConfigError for anything that is no place on a topic; "none" is one for groups only."""
    if start == "none" and group is not None:
        return
    naive = isinstance(start, datetime) and start.tzinfo is None
    negative = isinstance(start, int) and (isinstance(start, bool) or start < 0)
    known = start in ("earliest", "latest") if isinstance(start, str) else isinstance(start, int | datetime)
    if naive or negative or not known:
        raise ConfigError(
            "start is 'earliest', 'latest', a position from 0 on, a datetime with a time zone, or, in a group, 'none', "
            f"not {start!r}"
        )


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """What can be set on a subscriber."""

    read_blocks: int = 1_000
    """The most blocks taken from the bus at once; they wait in memory until they are asked for."""
    read_bytes: int = 4 << 20
    """The same in bytes; one larger block is read alone."""
    unconfirmed: int = 100_000
    """How many messages a group's reader may have read and not confirmed; then reading raises Unconfirmed."""
    max_sources: int = 10_000
    """How many sources are remembered; the one not seen for longest is forgotten first, and that is told."""
    gap_timeout: float = 10.0
    """Seconds after which it is told (Held) that blocks are held because one before them has not come. It decides
    nothing: they are delivered when it comes, or when its sender proves that it will not."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        for name in ("read_blocks", "read_bytes", "unconfirmed", "max_sources"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name} is a number of at least 1, not {getattr(self, name)!r}")
        if not isinstance(self.gap_timeout, int | float) or self.gap_timeout <= 0:
            raise ConfigError(f"gap_timeout is a number of seconds, not {self.gap_timeout!r}")


@dataclass(frozen=True, slots=True)
class SubscriberStats:
    """A subscriber at one moment."""

    blocks: int = 0
    events: int = 0
    bytes: int = 0
    missed: int = 0
    skipped: int = 0
    doubles: int = 0
    stale: int = 0
    diverged: int = 0
    beats: int = 0
    bad: int = 0
    reconnects: int = 0
    unconfirmed: int = 0


class Subscriber:
    """An async iterator of blocks from one topic. Made by `Client.subscriber`; used on that client's loop, by one
    task.
    """

    def __init__(
        self, home: Home, bus: Bus, address: Address, topic: str, *, schema: Schema | None, start: Begin,
        group: str | None, options: SubscriberOptions, notify: Callable[[Notice], None],
    ) -> None:  # fmt: skip
        self.address = address
        self.topic = topic
        self.group = group
        self.schema = schema
        self.options = options
        self._home = home
        self._observer = home.observer
        self._bus = bus
        self._notify = notify
        self._schema_given = schema is not None
        self._view = View(address.options.collapse, address.options.rmretdel)
        self._start: Start = "earliest" if start == "none" else start  # from now on
        self._only_stored = start == "none"
        self._replay = bus.capabilities.replay
        self._read_to: int | None = None
        self._follower = self._new_follower()
        self._connected = True
        self._resumed = False
        self._accept = self._new_accept(from_start=start in ("earliest", 0) and not self._only_stored)
        self._ledger = Ledger() if group is not None else None
        self._ready: deque[Block] = deque()
        self._to_release: list[Any] = []
        self._incoming: Sequence[Message | Break] = ()
        self._gaps: dict[tuple[int, int, int], float] = {}  # when to tell of them
        self._taking = False
        self._storing = asyncio.Lock()  # a state that is older must not be stored after one that is newer
        self._closed = False
        self._last: Block | None = None
        self._unstored = False
        self._counts = dict.fromkeys(SubscriberStats.__slots__, 0)

    def _new_accept(self, *, from_start: bool) -> Accept:
        return Accept(
            suffix_only=self._bus.capabilities.suffix_only,
            from_start=from_start,
            max_sources=self.options.max_sources,
        )

    def _new_follower(self) -> Follower:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        return Follower(
            self._bus, self.topic, self._where, backoff, group=self.group, opened=self._reopened, trouble=self._lost
        )

    async def _where(self) -> Start:
        return self._start

    async def open(self) -> None:
        """Take the place on the topic: what is published from now on is seen. The client calls this."""
        self._accept = await self._begin(self._start, self._follower)

    async def _begin(self, start: Start, follower: Follower) -> Accept:
        """A reader that knows nothing yet. "Latest" becomes the place it stands for, so that a feed that dies unread
        loses nothing.
        """
        accept = self._new_accept(from_start=start in ("earliest", 0) and not self._only_stored)
        if not accept.from_start:
            accept.joined_at_run = await retained_runs(self._bus, self.topic)
        again = start
        if start == "latest" and self._replay:
            bounds = await self._bus.bounds(self.topic)
            again = Place(bounds.end, bounds.incarnation)
            start = again if self.group is None else bounds.end  # what it stored elsewhere is to be told
        await follower.open(start)
        self._start = again
        return accept

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Block:
        """The next block. Waits without end; put it in `asyncio.timeout` for one. Cancelled: nothing is lost."""
        if not self._ready:
            await self._fill()
        self._last = block = self._ready.popleft()
        return block

    async def batches(self, max_blocks: int | None = None) -> AsyncIterator[list[Block]]:
        """An async iterator over lists of blocks: whatever has come, at least one, at most `max_blocks`."""
        while True:
            if not self._ready:
                try:
                    await self._fill()
                except StopAsyncIteration:
                    return
            if not max_blocks or max_blocks >= len(self._ready):
                batch = list(self._ready)
                self._ready.clear()
            else:
                batch = [self._ready.popleft() for _ in range(max_blocks)]
            self._last = batch[-1]
            yield batch

    async def _fill(self) -> None:
        """Read until there is a block. Every await leaves a state from which the next call goes on."""
        self._home.check()
        if self._closed:
            raise Closed(f"the subscriber on {self.topic} is closed; open a new one")
        if self._taking:
            raise WrongOrder("two tasks read from one subscriber; give each its own")
        self._taking = True
        try:
            while not self._ready:
                if self._ledger is not None and len(self._ledger) > self.options.unconfirmed:
                    raise Unconfirmed(
                        f"{len(self._ledger)} messages of group {self.group!r} on {self.topic} are read and not "
                        "confirmed; confirm blocks, raise `unconfirmed`, or read without a group",
                        limit=self.options.unconfirmed,
                    )
                await self._step()
        except Closed:  # meanwhile, by another task
            raise StopAsyncIteration from None
        finally:
            self._taking = False

    async def _step(self) -> None:
        """One read, its outcome, and what can be let go. A feed that dies is replaced by the next read."""
        if not self._incoming:
            self._incoming = await self._read()
        feed = self._follower.feed
        assert feed is not None  # what came in goes with its feed
        try:
            anew = _is_anew(self._incoming)
            if not self._resumed and not anew:
                self._resume(feed)
            if self.schema is None:
                await self._find_schema(self._incoming)
            messages, self._incoming = self._incoming, ()
            self._take(messages)
            if self._replay:
                self._start = feed.place or self._start
            if anew:
                self._resume(feed)  # what is stored, if anything, is of what follows
            if self._unstored and not self._ready and self._ledger is not None:
                await self._store(self._ledger)  # a queue may have nothing more for us before that
            if self._to_release:
                await feed.release(self._to_release)
                self._to_release = []
        except BusUnavailable as error:
            await self._follower.lose(error)

    async def _read(self) -> Sequence[Message | Break]:
        """The next messages. While there are none it is told what has been held for long."""
        most = self.options.read_blocks, self.options.read_bytes
        while (due := self._tell_held()) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    return await self._follower.read(*most)
        return await self._follower.read(*most)

    def _tell_held(self) -> float | None:
        """Tell once of each gap behind which blocks have been held for `gap_timeout`; returns when to look again."""
        if self._bus.capabilities.suffix_only:
            return None
        now = asyncio.get_running_loop().time()
        gaps = {(s.number, s.run, s.last + 1): min(s.hold) - 1 for s in self._accept.sources.values() if s.hold}
        self._gaps = {gap: self._gaps.get(gap, now + self.options.gap_timeout) for gap in gaps}
        for (source, run, first), due in self._gaps.items():
            if due <= now:
                self._gaps[source, run, first] = math.inf
                self._notify(Held(source, run, first, gaps[source, run, first]))
        due = min(self._gaps.values(), default=math.inf)
        return None if due == math.inf else due

    def _lost(self, error: BusUnavailable) -> None:
        """The feed died, or another one cannot be had."""
        self._to_release = []
        self._incoming = ()  # it comes again: nothing of it was taken
        if self._connected:
            self._connected = False
            self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_READFAILED", error))

    def _reopened(self) -> None:
        """There is a feed again, after what was read, or, in a group, after what was confirmed."""
        self._connected, self._resumed = True, False
        if not self._replay:
            self._accept.redelivery()
            if self._ledger is not None:
                self._ledger.redelivery()
        self._counts["reconnects"] += 1
        place = self._start.position if isinstance(self._start, Place) else self._start
        self._notify(Reconnected(self.topic, f"reading goes on from {place}"))

    def _resume(self, feed: Feed) -> None:
        """Take up the state that the group stored with its position, once it is known."""
        if self._only_stored and feed.state is None:
            raise NothingStored(
                f"group {self.group!r} has confirmed nothing on {self.topic}, and start is none: say where it begins",
                group=self.group,
            )
        self._only_stored = False
        if self._ledger is not None and feed.state is not None:
            accept = self._accept
            try:
                accept.from_start, known = parse_state(feed.state)
            except ValueError as e:
                raise BusRefused(
                    f"what group {self.group!r} on {self.topic} stored cannot be read ({e}); was it another version?"
                ) from None
            while len(known) > self.options.max_sources:  # stored when more were to be remembered
                del known[next(iter(known))]
                accept.from_start = False
            self._ledger.known = furthest(self._ledger.known, known)
            self._follow(accept.resume(known))
        self._resumed = True

    def _take(self, read: Sequence[Message | Break]) -> None:
        """Messages to blocks and notices. Nothing is awaited here."""
        for broken, messages in parts(read):
            if broken is not None:
                self._broken(broken)
            self._accept_all(messages)

    def _accept_all(self, messages: Sequence[Message]) -> None:
        """Messages between which nothing is missing."""
        if self._replay and messages:
            messages = not_read(messages, self._read_to)
            self._read_to = messages[-1].position if messages else self._read_to
        if self._ledger is not None:
            for position, _ in messages:
                self._ledger.arrived(position)
        self._follow(self._accept.receive_all(messages, self.options.limits))

    def _follow(self, outcomes: Sequence[Outcome]) -> None:
        """Deliver and tell what the accept rule says."""
        frames = [outcome for outcome in outcomes if outcome.__class__ is Frame]
        self._deliver(frames)
        for outcome in outcomes if len(frames) < len(outcomes) else ():
            self._tell(outcome)

    def _deliver(self, frames: Sequence[Frame]) -> None:
        counts = self._counts
        counts["blocks"] += len(frames)
        counts["events"] += sum(map(_EVENTS, frames))
        counts["bytes"] += sum(map(len, map(_DATA, frames)))
        schema: Any = self.schema  # there is one wherever there are frames: see _find_schema
        ledger = self._ledger
        serials = repeat(0) if ledger is None else map(ledger.delivered, frames)
        self._ready.extend(map(Block, frames, repeat(schema), repeat(self._view), serials))
        if self._observer is not None:
            self._observer.delivered(self, frames)

    def _tell(self, outcome: Outcome) -> None:
        match outcome:
            case Frame():
                return
            case Dropped(frame, "beyond"):
                self._bad(
                    BadMessage(frame.position, f"block {frame.id} is beyond the window of its settled {frame.settled}")
                )
            case Dropped(frame, why, admits):
                self._counts[_COUNTED[why]] += 1
                self._let_go(frame.position, frame, admits)
            case BadMessage():
                self._bad(outcome)
            case _:
                if isinstance(outcome, Missed):
                    self._counts["missed"] += outcome.last - outcome.first + 1
                elif isinstance(outcome, Forgotten) and self._ledger is not None:
                    self._ledger.known.pop(outcome.source, None)
                self._notify(outcome)

    def _bad(self, bad: BadMessage) -> None:
        self._counts["bad"] += 1
        self._let_go(bad.position)
        self._notify(bad)

    def _let_go(self, position: Any, frame: Frame | None = None, admits: int = 0) -> None:
        if self._ledger is None or self._ledger.dropped(position, frame, admits):
            self._to_release.append(position)

    def _broken(self, broken: Break) -> None:
        self._counts["skipped"] += broken.messages or 0
        self._notify(Skipped(broken.messages, broken.reason))
        if broken.incarnation:
            for frame in self._accept.restart(from_start=True):
                self._let_go(frame.position)
            self._read_to = None
            self._only_stored = False  # something was, and what follows begins with its first message
            if self._ledger is not None:
                self._ledger.restart()
                self._unstored = False
            if not self._schema_given:
                self.schema = None

    async def _find_schema(self, messages: Sequence[Message | Break] = ()) -> None:
        """The topic's schema, which its publisher retained before it sent. Messages without one: SchemaError."""
        self.schema = await retained_schema(self._bus, self.topic)
        if self.schema is None and any(isinstance(message, Message) and _is_block(message) for message in messages):
            raise SchemaError(f"there are blocks on {self.topic}, but no schema is retained: pass schema=")

    async def confirm(self, block: Block | None = None) -> None:
        """Store that this block and all delivered before it are done (default: the last one you were given).

        The next reader of the group goes on behind it. Cumulative: confirming an earlier one again changes nothing.
        Cancelled: it may or may not be stored. BusUnavailable: it is not yet, and will be with one of the next blocks,
        unless another reader has taken over the group.
        """
        self._home.check()
        if self._ledger is None:
            raise NoGroup(f"the subscriber on {self.topic} has no group to confirm for; pass group=")
        if self._closed:
            raise Closed(f"the subscriber on {self.topic} is closed")
        block = block if block is not None else self._last
        if block is not None:
            if not self._ledger.has(block.serial):
                raise WrongOrder(f"block {block.id} was not delivered by this subscriber; confirm its own blocks")
            self._unstored = self._ledger.confirm(block.serial) or self._unstored
        try:
            await self._store(self._ledger)
        except BusUnavailable as error:
            await self._follower.lose(error)
            raise

    async def _store(self, ledger: Ledger) -> None:
        """Whatever is confirmed and not stored: the state, and then the position, which may be further once the state
        is stored (see `Ledger.dropped`).
        """
        async with self._storing:
            while self._unstored:
                if (feed := self._follower.feed) is None:
                    raise BusUnavailable(f"the link to {self.topic} is down; confirm again after the next block")
                last, done = ledger.confirmed, ledger.done
                self._unstored = False  # what is confirmed meanwhile sets it again
                try:
                    await feed.confirm(done, ledger.state(from_start=self._accept.from_start))
                except BaseException:
                    self._unstored = True
                    raise
                self._unstored = ledger.stored(last) or self._unstored

    async def seek(self, start: Start) -> None:
        """Read on from another place; without a group. What was read and not yet asked for is dropped."""
        self._home.check()
        check_start(start)
        if self._closed:
            raise Closed(f"the subscriber on {self.topic} is closed; open a new one")
        if self._taking:
            raise WrongOrder("another task is reading from this subscriber; seek when it does not")
        if self.group is not None:
            raise WrongOrder("a group reads on from what it confirmed; to seek, read without a group")
        if not self._replay:
            raise BusRefused(f"{self.topic}: this bus keeps nothing to seek in")
        self._taking = True
        try:
            follower = self._new_follower()
            accept = await self._begin(start, follower)
        finally:
            self._taking = False
        if self._closed:
            await follower.aclose()
            raise Closed(f"the subscriber on {self.topic} was closed meanwhile")
        old, self._follower, self._read_to, self._incoming = self._follower, follower, None, ()
        self._connected = True
        self._ready.clear()
        self._accept = accept
        await old.aclose()

    @property
    def stats(self) -> SubscriberStats:
        """What was delivered, dropped and missed so far."""
        counts = SubscriberStats(**self._counts)
        return replace(counts, unconfirmed=len(self._ledger)) if self._ledger is not None else counts

    async def aclose(self) -> None:
        """Stop reading; a group's next reader may go on at once. Bounded; twice is harmless."""
        if self._closed:
            return
        self._home.check()
        self._closed = True
        self._ready.clear()
        await self._follower.aclose()

    async def __aenter__(self) -> Subscriber:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _is_anew(read: Sequence[Message | Break]) -> bool:
    """It says that the topic is another one, and nothing else."""
    return len(read) == 1 and isinstance(read[0], Break) and read[0].incarnation


def _is_block(message: Message) -> bool:
    try:
        return parse(message.data).kind == BLOCK
    except BadFrame:
        return False


_COUNTED = {"double": "doubles", "stale": "stale", "diverged": "diverged", "beat": "beats"}
