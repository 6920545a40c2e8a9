"""Feeds: a consumer of its own for each, assigned to the partition, or subscribed as a member of a group.

What the client does not tell is found out here: that fetches are no longer answered (it would wait forever), that
retention passed the reader, that the topic was emptied (`PURGED`, a message that purge leaves and deletes) or deleted
and made anew (another topic id, looked for once a second), or that it lost its end (a broker that has it no more: after
trouble the last message is read once more, and may be another one).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError

from esp_pubsub.bus import Break, Message, Place
from esp_pubsub.errors import BusRefused, BusUnavailable

from .group import Membership
from .link import words
from .unpacking import bounded

if TYPE_CHECKING:
    from .bus import KafkaBus

PURGED = b"esp-pubsub: everything before this was purged"
_LOOK_EVERY = 1.0
_WAIT = 0.25
_NOWHERE = TopicPartition("-", 0)
_HEAD = 80  # bytes by which messages are told apart: with its chain, they name a block
_message = tuple.__new__


def incarnation(topic_id: bytes, purged: int) -> int:
    """What tells a topic from what it was before it was purged (`KafkaBus.purged_at`), or deleted and made anew."""
    mark = hashlib.blake2b(topic_id + purged.to_bytes(8, "big", signed=True), digest_size=8).digest()
    return int.from_bytes(mark, "big")


class Seen(NamedTuple):
    """A message that was read."""

    offset: int
    timestamp: int  # of the broker, in milliseconds
    head: bytes


def _seen(record: Any) -> Seen:
    return Seen(record.offset, record.timestamp, (record.value or b"")[:_HEAD])


def _is_another(seen: Seen, records: Sequence[Any]) -> bool:
    """Whether something else stands there now."""
    return any(each.offset == seen.offset and _seen(each) != seen for each in records)


class KafkaFeed:
    """A `Feed`."""

    state: bytes | None = None
    unconfirmed: int | None = None
    place: Place | None = None

    def __init__(
        self,
        bus: KafkaBus,
        name: str,
        at: TopicPartition,
        position: int,
        topic_id: bytes,
        group: str | None,
        comes_from: int | None = None,
    ) -> None:
        """`position` is the first one wanted, which may lie beyond the end, if the group has not stored another; of a
        reader that comes back, `comes_from` says of which incarnation that is.
        """
        self._bus = bus
        self._link = bus.link
        self._name = name
        self._at = at
        self._from = 0  # what is read in front of it is dropped
        self._waits = False  # for that position, which is beyond the end
        self._position = position  # behind what was read
        self._last: Seen | None = None  # what was read last
        self._expected: Seen | None = None  # what stands there, unless the topic lost its end
        self._topic_id = self._given_id = topic_id  # of what is read, and of what was given out
        self._purged = -1
        self._comes_from = comes_from
        self._done = position  # the group's position
        self._state_after: bytes | None = None  # the break that is ahead
        self._ahead: deque[Message | Break] = deque()
        self._after: deque[tuple[Place, bytes]] = deque()  # each break in there, and the topic's id
        self._stamp = 0
        self._answered_at = 0.0
        self._asked_at = 0.0
        self._doubted = False  # we were away, and cannot say yet whether fetches are answered
        self._looked_at = 0.0
        self._unsure = False  # whether the topic is what it was
        self._looking: asyncio.Task[bytes] | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._membership = Membership(bus, name, group, at) if group is not None else None
        self._changes = 0
        self._begun = False
        self._read_at = self._now()
        self._consumer: AIOKafkaConsumer

    async def open(self) -> None:
        """Take the place: what is written from now on is read."""
        self._consumer = (self._membership or self._link).consumer(self._be_unsure)
        async with self._link.started(self._consumer, f"a consumer of {self._at.topic}"):
            if self._membership is None:
                await self._begin(None)
        self._answered_at = self._asked_at = self._looked_at = self._now()

    def _be_unsure(self) -> None:
        """The client knows its topics no more. Before it was answered for the first time that says nothing."""
        self._unsure = self._stamp != 0 or self._last is not None

    async def _begin(self, stored: tuple[int, bytes, bytes] | None) -> None:
        """Stand where the group stands, or where our reader wants to."""
        first, end = await self._link.bounds(self._at)
        purged = await self._bus.purged_at(self._name)
        now, behind_purge = incarnation(self._topic_id, purged), max(first, purged + 1)
        known = self._known(now, stored)
        seen = self._bus.seen.get((self._topic_id, known))
        end_then = await self._end_of(seen, end) if known > end else end
        # nothing is awaited from here on
        if self._membership is None:  # not before: without a place it would look for one, and pause for not having it
            self._consumer.assign([self._at])
        self._purged = purged
        heard = self._comes_from in (None, now)
        if stored is None:
            if not heard:
                self._begin_anew(behind_purge, "the topic was purged, or made anew, while this reader was away")
        elif stored[1] != self._topic_id or purged >= stored[0]:
            how = "made anew" if stored[1] != self._topic_id else "purged"
            self._position = behind_purge
            if self._comes_from != now:
                self._begin_anew(behind_purge, f"the topic was {how} since the group stored its position")
        else:
            self._position = stored[0]
            self.state = stored[2]
            if not heard:
                self.state, self._state_after = None, stored[2]
                self._begin_anew(stored[0], "the topic was purged, or made anew, and the group went on with it")
        if self._position < first:
            self._pass(first)
        if known > end:
            self._lose_end(known, end_then)
        elif self._position > end:
            self._waits = True
        else:
            self._expected = seen
        self._done = self._position
        self.place = Place(self._position, now)
        self._go_back(end)
        self._begun = True

    def _known(self, now: int, stored: tuple[int, bytes, bytes] | None) -> int:
        """Up to where the topic had messages, as our reader and its group know."""
        ours = self._position if self._comes_from == now else 0
        return ours if stored is None or stored[1] != self._topic_id else max(ours, stored[0])

    def _go_back(self, end: int | None = None) -> None:
        """Fetch what was read last again, and what follows it; not behind the end."""
        self._expected = self._expected or self._last
        self._from = self._position
        place = self._position if self._expected is None else min(self._position, self._expected.offset)
        self._seek(place if end is None else min(place, end))

    def _seek(self, position: int) -> None:
        with words(f"reading {self._at.topic}"):  # a group may have lost the partition this very moment
            self._consumer.seek(self._at, position)

    async def _hold_group(self, membership: Membership) -> None:
        """Be the group's reader: wait for the partition, then stand where the group stands."""
        with words(f"joining group {membership.group}"):
            membership.join(self._consumer)
        asked_before, self._read_at = self._read_at, self._now()
        if self._begun and self._read_at - asked_before > self._link.settings.options.lease:
            raise BusUnavailable(f"group {membership.group!r} on {self._at.topic} was not read and was given away")
        answered_at = self._now()
        while not membership.owned.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT):
                    await membership.owned.wait()
            await self._getmany(_NOWHERE, 0.0)  # tells of trouble, and that we still wait
            if self._now() - answered_at > self._link.timeout:  # but not that the group's broker is gone
                await membership.look_up()
                answered_at = self._now()
            self._read_at = self._now()
        if membership.changes == self._changes:
            return
        changes, stored = membership.changes, await membership.look_up()
        if not self._begun:
            await self._begin(await membership.resume(stored))
        elif stored != membership.stored:
            raise BusUnavailable(f"another reader of group {membership.group!r} on {self._at.topic} went on meanwhile")
        else:
            self._seek(self._position)  # given back to us, and nobody stored anything
        self._changes, self._answered_at = changes, self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        if self._now() - self._asked_at > _LOOK_EVERY and not self._doubted:  # nobody asked meanwhile
            self._answered_at = max(self._answered_at, self._now() - self._link.timeout / 2)
            self._doubted = True
        try:
            while True:
                if self._closed:
                    raise BusUnavailable(f"this feed of {self._at.topic} was closed")
                if self._membership is not None:
                    await self._hold_group(self._membership)
                if self._ahead:
                    return self._take(max_messages, max_bytes)
                await self._look()
                if not self._ahead:
                    await self._fetch(max_messages, max_bytes)
        finally:
            self._asked_at = self._now()

    def _take(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """From what was fetched: one at least, then within both bounds."""
        taken: list[Message | Break] = []
        ahead, size = self._ahead, 0
        while ahead and len(taken) < max_messages:
            item = ahead[0]
            anew = isinstance(item, Break) and item.incarnation
            size += len(item.data) if isinstance(item, Message) else 0
            if taken and (size > max_bytes or anew):
                break
            taken.append(ahead.popleft())
            if isinstance(item, Break):
                self.place, self._given_id = self._after.popleft()
                self._done = self._done if item.cut is None else min(self._done, item.cut)
            if anew and self.place is not None:
                self._done = self.place.position
                self.state, self._state_after = self._state_after, None
                break
        if isinstance(last := taken[-1], Message) and self.place is not None:
            self.place = Place(last.position + 1, self.place.incarnation)
        return taken

    async def _getmany(
        self, at: TopicPartition, wait: float, messages: int | None = None, size: int = 1
    ) -> Mapping[Any, Any]:
        """What the client has by then. Nothing while the group is shared out: it would wait for the end of that."""
        with words(f"reading {self._at.topic}"), bounded(size):
            try:
                async with asyncio.timeout(wait + _WAIT):
                    found: Mapping[Any, Any] = await self._consumer.getmany(
                        at, timeout_ms=round(wait * 1000), max_records=messages
                    )
                    return found
            except BaseException as error:
                # the client takes a call that did not return for one that goes on, and a reader that hangs for one that
                # reads, who would keep his group forever
                subscription = self._consumer._subscription  # noqa: SLF001
                subscription._fetch_count, subscription._last_fetch_ended = 0, time.monotonic()  # noqa: SLF001
                if isinstance(error, TimeoutError):
                    return {}
                raise

    async def _fetch(self, max_messages: int, max_bytes: int) -> None:
        silent = self._silent()
        try:
            found = await self._getmany(self._at, 0.0 if silent else _WAIT, max_messages, max_bytes)
        except BusUnavailable as error:
            if isinstance(error.__cause__, OffsetOutOfRangeError):
                await self._out_of_range()
            elif not isinstance(error.__cause__, NoOffsetForPartitionError):  # a group that has yet to be told where
                raise
            return
        if self._membership is not None and self._membership.changes != self._changes:
            return  # they may be from another place; they come again
        records = found.get(self._at)
        if self._unsure:  # they may be from another topic, or stand where others stood
            with_last = self._expected is not None or self._last is None
            await self._look()
            if self._ahead or not records or not with_last:
                return  # they come again, with what was read last in front
            self._seek(records[-1].offset + 1)
        if not records:
            if silent and self._silent():
                raise BusUnavailable(f"{self._at.topic}: fetches were not answered for {self._link.timeout:g} s")
        elif (expected := self._expected) is not None and _is_another(expected, records):
            self._go_back()
            self._lose_end(expected.offset + 1, await self._end_of(expected, expected.offset))
            self._seek(self._position)
        else:
            self._keep(records)

    def _keep(self, records: Sequence[Any]) -> None:
        ahead = self._ahead
        for record in records:
            if record.key is not None and record.key == PURGED:
                self._purged = record.offset
                self._bus.saw_purge(self._topic_id, record.offset)
                self._tell(Break("the topic was purged", None, incarnation=True), record.offset + 1)
            elif record.offset >= self._from:
                ahead.append(_message(Message, (record.offset, record.value or b"")))
        last = self._last = _seen(records[-1])
        self._position, self._waits = last.offset + 1, False
        if self._expected is not None and self._expected.offset <= last.offset:
            self._expected = None
        self._answered_at, self._doubted = self._now(), False

    def _silent(self) -> bool:
        """Whether fetches are not answered. The client takes a broker that does not answer for one that has nothing."""
        membership = self._membership
        if membership is not None and (membership.changes != self._changes or not membership.owned.is_set()):
            return False  # nothing is fetched
        with words(f"reading {self._at.topic}"):
            stamp = self._consumer.last_poll_timestamp(self._at) or 0
        if stamp != self._stamp:  # the value is of the wall clock; that it changes is all it says
            self._stamp, self._answered_at, self._doubted = stamp, self._now(), False
        return self._now() - self._answered_at > self._link.timeout

    async def _out_of_range(self) -> None:
        """Retention or a purge passed us, the topic lost its end, or it is another one than it was."""
        self._unsure = True
        await self._look()
        if self._ahead:
            return
        first, end = await self._link.bounds(self._at)
        purged = await self._bus.purged_at(self._name)
        position, self._purged = self._position, purged
        if position > end:
            if self._waits:
                self._seek(end)
                return
            self._lose_end(position, await self._end_of(self._last, end))
        elif position < first:
            if purged >= position:
                self._begin_anew(max(first, purged + 1), "the topic was purged")
            else:
                self._pass(first)
        self._seek(self._position)

    def _pass(self, first: int) -> None:
        passed, self._position = first - self._position, first
        self._tell(Break("retention took messages before they were read", passed), first)

    async def _end_of(self, seen: Seen | None, most: int) -> int:
        """What is left of a topic that lost its end: what it has since is younger than what was read of it."""
        younger = None if seen is None else await self._link.position_at(self._at, (seen.timestamp + 1) * 1_000)
        return most if younger is None else min(younger, most)

    def _lose_end(self, known: int, end: int) -> None:
        """The sources go on: their readers know by the ids what comes twice, and what was lost before they read it."""
        self._from, self._position, self._last, self._expected = 0, min(self._position, end), None, None
        reason = f"the topic lost what it had from {end} to {known}"
        self._tell(Break(reason, None, cut=end), self._position)

    def _begin_anew(self, first: int, reason: str) -> None:
        self._from, self._position, self._last, self._expected = 0, first, None, None
        self._tell(Break(reason, None, incarnation=True), first)

    def _tell(self, broken: Break, following: int) -> None:
        self._ahead.append(broken)
        self._after.append((Place(following, incarnation(self._topic_id, self._purged)), self._topic_id))

    async def _look(self) -> None:
        """Whether the topic is still the one it was. The question outlives a read that is cancelled meanwhile."""
        while self._looking is not None or self._unsure or self._now() - self._looked_at >= _LOOK_EVERY:
            if self._looking is None:
                if self._unsure:
                    self._unsure = False
                    self._go_back()
                self._looking = asyncio.create_task(self._identify())
            looking = self._looking
            await asyncio.wait([looking])
            if looking.result() != self._topic_id:
                first, _ = await self._link.bounds(self._at)
                purged = await self._bus.purged_at(self._name)
                self._seek(first)
                self._topic_id, self._purged = looking.result(), purged
                self._begin_anew(first, "the topic was deleted and made anew")
            self._looking, self._looked_at = None, self._now()

    async def _identify(self) -> bytes:
        """The id of the topic; also of one that is being made anew."""
        given_up_at = self._now() + self._link.timeout
        while (topic_id := await self._bus.topic_id(self._name)) is None:
            if self._now() > given_up_at:
                raise BusUnavailable(f"the topic {self._at.topic} is not there any more")
            await asyncio.sleep(min(_LOOK_EVERY, self._link.timeout) / 4)
        return topic_id

    async def release(self, positions: Sequence[int]) -> None:
        """See `Feed.release`: a log lets go by itself."""

    async def confirm(self, position: int | None, state: bytes) -> None:
        """See `Feed.confirm`."""
        membership = self._membership
        if membership is None:
            raise BusRefused("a feed without a group stores no position")
        if self._closed or not membership.owned.is_set() or membership.changes != self._changes:
            raise BusUnavailable(f"this is not the reader of group {membership.group!r} on {self._at.topic} any more")
        done = self._done if position is None else max(self._done, position + 1)
        await membership.store(self._consumer, done, self._given_id, state)
        self._done = max(self._done, done)

    @property
    def closed(self) -> bool:
        """Nothing of it is left."""
        return self._closing is not None and self._closing.done()

    async def aclose(self) -> None:
        """See `Feed.aclose`."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if not self._ahead and (last := self._last or self._expected) is not None:
            self._bus.saw(self._topic_id, last)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
            _ = self._looking.cancelled() or self._looking.exception()  # taken, though nobody asked
        await self._link.stopped(self._consumer)
