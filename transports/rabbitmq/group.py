"""Groups: a durable queue for each, with a single active consumer, named as SAS names a subscriber's: prefix and topic.

The broker hands messages to one reader at a time, and what that one did not acknowledge comes first to the next, in its
old order. What is stored with the position is a retained value, written before the acknowledgement, on the channel that
reads: a broker that has given the group to somebody else has closed it. So a broker short of memory or disk, which
reads nothing from who writes, holds confirming back too: it waits, while what was handed over can be read.

In mode direct the queue is bounded, and is gone some time after its last reader: such a group is for engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from esp_pubsub.bus import Break, Message
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .channel import LONGEST_NAME, Delivery, quoted
from .feed import RabbitFeed
from .options import MOST
from .pipe import RabbitPipe
from .values import check_size, declare, queue_of

if TYPE_CHECKING:
    from .bus import RabbitBus

_log = logging.getLogger("esp_pubsub.rabbitmq")
PERSISTENT = {"delivery_mode": 2}
POISONED = 100
_EXPIRES = 60_000  # milliseconds without a reader after which a brief group's queue is gone


class GroupFeed(RabbitFeed):
    """A `Feed` with a group."""

    _purpose = "groups"
    _confirms = True
    _missed = None  # the queue keeps it

    def __init__(self, bus: RabbitBus, topic: str, group: str, *, limited: bool = False) -> None:
        """`limited`: its quorum queue has a limit of deliveries, or none because a broker before 4.0 made it."""
        super().__init__(bus, topic)
        self._brief = bus.capabilities.brief_groups
        self._limited = limited
        self._group = group
        self._prefetch = min(self._prefetch + bus.room.get(self.seat, 0), MOST)
        self._queue = quoted(f"{group}@{topic}")
        if len(self._queue) > LONGEST_NAME:
            raise BusRefused(
                f"a queue's name has at most {LONGEST_NAME} characters, {self._queue} has more: use shorter names"
            )
        self._state_key = f"state of {group}"
        self._unacked: dict[int, None] = {}  # tags that were handed out, in order
        self._consuming: asyncio.Task[None] | None = None
        self._active = False  # the state was read: what came in front of it is ours
        self._states: RabbitPipe | None = None
        self._stored = 0
        self._line = asyncio.Lock()
        self._known: bytes | None = None  # what the broker has
        self._due: tuple[int | None, bytes] | None = None  # confirmed, and not stored yet
        self._storing_late: asyncio.Task[None] | None = None
        self._told = False

    @property
    def seat(self) -> tuple[str, str | None]:
        """See `RabbitFeed.seat`."""
        return self._topic, self._group

    @property
    def _arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {"x-single-active-consumer": True}
        if self._brief:
            bytes_held = self._link.options.queuesize
            return found | {"x-expires": _EXPIRES, "x-max-length-bytes": bytes_held, "x-overflow": "drop-head"}
        if self._link.options.quorum:
            found["x-queue-type"] = "quorum"
            if self._link.version(self._purpose) >= (4, 0) and not self._limited:
                found["x-delivery-limit"] = -1  # it has one of its own, and then drops the message
        return found

    async def open(self) -> None:
        """See `RabbitFeed.open`."""
        try:
            await super().open()
        except BusRefused as error:
            if "inequivalent" not in str(error):
                raise
            raise BusRefused(
                f"the queue {self._queue} was made with other arguments ({error}): set quorum as it was, name another "
                "group, or delete the queue"
            ) from None

    async def _place(self) -> None:
        if self._limited:
            _log.warning(
                "%s was made without x-delivery-limit=-1, so the broker drops a message that was handed out too often: "
                "set a policy with delivery-limit -1 for it", self._queue,
            )  # fmt: skip
        await self._channel.queue_declare(self._queue, durable=True, arguments=self._arguments)
        await self._bind()

    async def _begin(self) -> None:
        """Stand in line for the queue. Not before the first read: who does not read must not keep others from it."""
        if self._consuming is None:
            self._consuming = asyncio.create_task(self._link.ask(f"reading {self._queue}", self._consume()))
            self._consuming.add_done_callback(self._begun)
        if not self._consuming.done():
            await asyncio.wait([self._consuming])

    def _begun(self, consuming: asyncio.Task[None]) -> None:
        if consuming.cancelled():
            return
        error = consuming.exception()
        if isinstance(error, BusError):
            self._end(error)

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        self._check()
        await self._begin()
        while not self._ahead:
            self._check()
            self._see_whether_full()
            self._check()
            self._arrived.clear()
            await self._arrived.wait()
        self._check()
        if not self._active:
            self.state = await self._bus.retained(self._topic, self._state_key)
            self._check()
            await self._see_whether_poisoned(self._ahead[0])
            self._check()
            await self._catch_up()
            self._active = True
        if self._break is not None:
            told, self._break = self._break, None
            return [told]
        taken = self._take(max_messages, max_bytes)
        for message in taken:
            if isinstance(message, Message):
                self._unacked[message.position - self._base] = None
        return taken

    async def _catch_up(self) -> None:
        """Store what was confirmed on a feed that was lost before `ackwindow` was over: its messages come again and are
        let go as doubles. Not if another reader has stored something since.
        """
        self._known = self.state
        known, due = self._bus.unstored.get(self.seat, (None, None))
        if due is not None and known == self.state:
            await self._store(None, due)
            self.state = due
        self._bus.unstored.pop(self.seat, None)

    def _see_whether_full(self) -> None:
        """Whether the broker hands out nothing more before something is confirmed. It counts those that wait for others
        too, which may stand behind them: then another feed asks for more, and gets all of these again.
        """
        unacked, options = len(self._unacked), self._link.options
        if unacked < self._prefetch:
            return
        waiting = 0 if self.unconfirmed is None else unacked - self.unconfirmed
        if self._prefetch < min(options.prefetch + waiting, MOST):
            self._bus.room[self.seat] = 2 * waiting
            self._end(
                BusUnavailable(
                    f"{self._queue}: {waiting} of {unacked} unconfirmed messages wait for one that has not come: "
                    "asking for more at once"
                )
            )
        elif not self._told:
            self._told = True
            _log.warning(
                "%s: %d messages were read and none of them is confirmed, so no more come: confirm more often, "
                "or raise prefetch", self._queue, unacked,
            )  # fmt: skip

    async def _see_whether_poisoned(self, first: Delivery) -> None:
        """A message that is given back forever ends its readers one after another."""
        times = await self._times_given(first)
        if times % 10 == 0:
            _log.warning("%s: its first message was read %d times and never confirmed", self._queue, times)
        if times >= POISONED:
            raise BusRefused(
                f"{self._queue}: its first message was read {times} times and never confirmed. Begin again when what "
                "reads it is mended, or purge the queue to go on without it"
            )

    async def _times_given(self, first: Delivery) -> int:
        """How often in a row the queue's first message was handed out. A quorum queue counts; for the others it is kept
        on the broker, because a message that ends its readers' processes is a new one to each of them.
        """
        counted = (first.properties.headers or {}).get("x-delivery-count")
        if self._link.options.quorum and isinstance(counted, int):
            return counted + 1
        if not first.redelivered:
            return 1
        key, mark, times = f"tries of {self._group}", hashlib.blake2b(first.data, digest_size=16).digest(), 2
        with contextlib.suppress(BusUnavailable):  # it is counted where that can be done
            kept = await self._bus.retained(self._topic, key) or b""
            if kept[:16] == mark:
                times = int.from_bytes(kept[16:], "big") + 1
            await self._bus.retain(self._topic, key, mark + times.to_bytes(4, "big"))
        return times

    async def release(self, positions: Sequence[int]) -> None:
        """See `Feed.release`."""
        tags = [tag for tag in (position - self._base for position in positions) if tag in self._unacked]
        if not tags or self._error is not None:
            return
        for tag in tags:
            del self._unacked[tag]
        await self._link.ask(f"letting go on {self._queue}", self._ack(tags))

    async def _ack(self, tags: Sequence[int]) -> None:
        for tag in tags:
            await self._channel.basic_ack(tag, wait=False)

    async def confirm(self, position: int | None, state: bytes) -> None:
        """See `Feed.confirm`."""
        self._check()
        tag = None if position is None else position - self._base
        if not self._active or (tag is not None and not 0 < tag <= self._taken):
            raise BusUnavailable(f"{self._queue}: this is not the reader that was given the message")
        if self._link.options.ackwindow:
            before = self._due[0] if self._due is not None else None
            self._due = (tag if before is None or (tag is not None and tag > before) else before, state)
            if self._storing_late is None:
                self._storing_late = asyncio.create_task(self._store_late())
            return
        await self._store(tag, state)

    async def _store_late(self) -> None:
        """SAS's ackwindow: what is confirmed may stay unacknowledged for so long."""
        options = self._link.options
        try:
            while self._error is None:
                await asyncio.sleep(max(options.ackwindow, options.acktimer))
                await self._store_due()
        except BusError as error:
            self._end(error)

    async def _store_due(self) -> None:
        due = self._due
        if due is not None:
            await self._store(*due)
            if self._due is due:
                self._due = None

    async def _store(self, tag: int | None, state: bytes) -> None:
        what = f"storing the position of {self._queue}"
        await self._link.see_through(what, self._store_in_line(what, tag, state))

    async def _store_in_line(self, what: str, tag: int | None, state: bytes) -> None:
        async with self._line:
            name = queue_of(self._topic, self._state_key)
            check_size(name, state)
            if self._states is None:
                self._states = RabbitPipe(self._link, self._channel, "", name, PERSISTENT)
                await self._states.until_unblocked()
                await self._link.ask(what, declare(self._channel, name))
            await self._states.write([state])
            self._stored = await self._states.confirmed(self._stored)
            if self._states.unroutable:
                raise BusUnavailable(f"{name} was deleted: the state of group {self._group!r} was not stored")
            self._known = state
            done = [] if tag is None else list(takewhile(lambda each: each <= tag, self._unacked))
            if done:
                for each in done:
                    del self._unacked[each]
                await self._link.ask(what, self._channel.basic_ack(done[-1], multiple=True))

    async def _close(self) -> None:
        late, self._storing_late = self._storing_late, None
        if late is not None:
            late.cancel()
            await asyncio.wait([late])
        if self._error is None:
            try:
                await self._link.ask(f"closing {self._queue}", self._last_store())
            except BusError as error:
                _log.warning("%s", error)
        if self._due is not None:
            self._bus.unstored[self.seat] = self._known, self._due[1]
        if self._states is not None:
            self._states.end(BusUnavailable(f"this feed of {self._topic} was closed"))
        if self._consuming is not None and not self._consuming.done():
            await asyncio.wait([self._consuming])
        await super()._close()

    async def _last_store(self) -> None:
        await self._store_due()
        async with self._line:
            return
