"""Subscriber: feed -> accept rule -> bounded buffer -> async for.

There is no task behind it: who asks for the next block reads the bus, decides what is delivered, and keeps the rest of
what was read for the next call. So nothing is read ahead of the user but one read's worth, and a subscriber that is not
asked costs nothing. A feed that died is replaced within the same call; what comes twice is dropped by the accept rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from .address import Address
from .backoff import Backoff
from .bus import Break, Bus, Feed, Message, Place, Start
from .errors import (
    BadFrame,
    BusRefused,
    BusUnavailable,
    Closed,
    NoGroup,
    NothingStored,
    SchemaError,
    Unconfirmed,
    WrongOrder,
)
from .events import Block, View
from .failover.accept import Accept
from .failover.ledger import Ledger, parse_state
from .follower import Follower
from .inbox import Inbox
from .notices import Failure, Notice, Reconnected
from .retained import retained_runs, retained_schema
from .schema import Schema
from .subscriber_options import Begin, SubscriberOptions, SubscriberStats, check_start
from .wire.frame import BLOCK, parse

if TYPE_CHECKING:
    from .client import Home

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0


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
        self.options = options
        self._home = home
        self._bus = bus
        self._notify = notify
        self._start: Start = "earliest" if start == "none" else start  # from now on
        self._only_stored = start == "none"
        self._replay = bus.capabilities.replay
        self._follower = self._new_follower()
        self._connected = True
        self._resumed = False
        self._ledger = Ledger() if group is not None else None
        self._inbox = Inbox(
            self._new_accept(self._start), self._ledger, schema,
            View(address.options.collapse, address.options.rmretdel), options, replay=self._replay, notify=notify,
            observe=None if home.observer is None else partial(home.observer.delivered, self),
        )  # fmt: skip
        self._ready = self._inbox.ready
        self._incoming: Sequence[Message | Break] = ()
        self._taking = False
        self._storing = asyncio.Lock()  # a state that is older must not be stored after one that is newer
        self._closed = False
        self._last: Block | None = None
        self._unstored = False

    @property
    def schema(self) -> Schema | None:
        """As given, or as its publisher retained it; None while nobody has published."""
        return self._inbox.schema

    def _new_accept(self, start: Start) -> Accept:
        return Accept(
            suffix_only=self._bus.capabilities.suffix_only,
            from_start=start in ("earliest", 0) and not self._only_stored,
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
        self._inbox.begin(await self._begin(self._start, self._follower))

    async def _begin(self, start: Start, follower: Follower) -> Accept:
        """A reader that knows nothing yet. "Latest" becomes the place it stands for, so that a feed that dies unread
        loses nothing.
        """
        accept = self._new_accept(start)
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
            self._inbox.take(messages)
            if self._replay:
                self._start = feed.place or self._start
            if anew:
                self._only_stored = False  # something was, and what follows begins with its first message
                self._unstored = False
                self._resume(feed)  # what is stored, if anything, is of what follows
            if self._unstored and not self._ready and self._ledger is not None:
                await self._store(self._ledger)  # a queue may have nothing more for us before that
            if self._inbox.to_release:
                await feed.release(self._inbox.to_release)
                self._inbox.to_release = []
        except BusUnavailable as error:
            await self._follower.lose(feed, error)

    async def _read(self) -> Sequence[Message | Break]:
        """The next messages. While there are none it is told what has been held for long."""
        most = self.options.read_blocks, self.options.read_bytes
        loop = asyncio.get_running_loop()
        if self._follower.feed is not None and self._ledger is not None:
            self._follower.feed.unconfirmed = len(self._ledger)
        while (due := self._inbox.tell_held(loop.time())) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    return await self._follower.read(*most)
        return await self._follower.read(*most)

    def _lost(self, error: BusUnavailable) -> None:
        """The feed died, or another one cannot be had."""
        self._inbox.to_release = []
        self._incoming = ()  # it comes again: nothing of it was taken
        if self._connected:
            self._connected = False
            self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_READFAILED", error))

    def _reopened(self) -> None:
        """There is a feed again, after what was read, or, in a group, after what was confirmed."""
        self._connected, self._resumed = True, False
        if not self._replay:
            self._inbox.redelivery()
        self._inbox.counts["reconnects"] += 1
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
            try:
                from_start, known = parse_state(feed.state)
            except ValueError as e:
                raise BusRefused(
                    f"what group {self.group!r} on {self.topic} stored cannot be read ({e}); was it another version?"
                ) from None
            self._inbox.resume(self._ledger, known, from_start=from_start)
        self._resumed = True

    async def _find_schema(self, messages: Sequence[Message | Break] = ()) -> None:
        """The topic's schema, which its publisher retained before it sent. Messages without one: SchemaError."""
        schema = self._inbox.schema = await retained_schema(self._bus, self.topic)
        if schema is None and any(isinstance(message, Message) and _is_block(message) for message in messages):
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
        await self._store(self._ledger)

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
                    await feed.confirm(done, ledger.state(from_start=self._inbox.accept.from_start))
                except BaseException as error:
                    self._unstored = True
                    if isinstance(error, BusUnavailable):
                        await self._follower.lose(feed, error)
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
        old, self._follower, self._incoming = self._follower, follower, ()
        self._connected = True
        self._inbox.begin(accept)
        await old.aclose()

    @property
    def last(self) -> Block | None:
        """The block that it gave out last."""
        return self._last

    @property
    def stats(self) -> SubscriberStats:
        """What was delivered, dropped and missed so far."""
        counts = SubscriberStats(**self._inbox.counts)
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
