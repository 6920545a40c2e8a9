"""Written order: the member that leads writes what comes next, and every member steps on what it reads back.

Each member follows the order topic and carries out the entries that count (order.py). The one that leads also proposes
the next entry: when all entries so far are carried out, and there is something to take or a timer is due. What arrives
meanwhile goes into the next one, so the busier the inputs are, the more an entry holds.

A proposal is decided by what is read back, never by the pipe it went through. One that was void, because another writer
was first, is made again after what counts; one that was written though the bus did not say so counts when it is read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from .._news import News
from .._tasks import run_all, run_until_one_ends
from ..backoff import Backoff
from ..bus import Bus, Message, Pipe, Place
from ..errors import BusUnavailable
from ..failover import belief
from ..notices import Failure, Notice
from ..wire.frame import frames
from .clock import Clock
from .inputs import LogInput, LogReader, Offer, QueueInput, earliest
from .order import Entry, Order, Poisoned, Proposal, Span, Taken, next_entry
from .order_topic import read_ahead
from .snapshots import Standing
from .stepping import Stepping

_log = logging.getLogger("esp_pubsub.engine")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_QUEUED_BYTES = 4 << 20  # of a queue's messages in one entry
_WRITE_DEADLINE = 10.0  # seconds; the driver has a shorter one of its own
_LEADS_EVERY = 0.05  # seconds between two looks at who leads, where nothing else happens


def wall_clock() -> int:
    """Microseconds since the epoch. The simulation has clocks of its own."""
    return time.time_ns() // 1000


class WrittenOrder:
    """One member's part in a written order."""

    def __init__(
        self,
        bus: Bus,
        order: Order,
        reader: LogReader,
        inputs: Sequence[LogInput | QueueInput],
        stepping: Stepping,
        clock: Clock,
        changed: News,
        *,
        span: Span,
        leads: Callable[[], bool],
        notify: Callable[[Notice], None],
    ) -> None:
        """`bus` has the order topic, `reader` reads it. `leads`: whether this member leads now. `changed` is told when
        that may be different.
        """
        self._span = span
        self.clock = clock
        self._knows_time = False  # from a leader who lived when it said so, or from its own wall clock
        self._jumped = False  # to it, and that was not reported
        self._bus = bus
        self._order = order
        self._reader = reader
        stepping.is_passed_over = self._is_passed_over
        self._inputs = inputs
        self._stepping = stepping
        self._changed = changed
        self._leads = leads
        self._notify = notify
        self._carried_out = order.last
        self._place = order.last, order.chain, reader.place.position - 1
        self._read_to = reader.place.position
        self._unread_since: float | None = None
        self._pipe: Pipe | None = None
        self._trouble: asyncio.Task[None] | None = None  # of that pipe
        self._largest = bus.capabilities.max_message_bytes
        self._loop = asyncio.get_running_loop()

    @property
    def positions(self) -> tuple[int, ...]:
        """Up to where entries took each input; 0 for a queue."""
        return tuple(each.taken if isinstance(each, LogInput) else 0 for each in self._inputs)

    @property
    def read(self) -> tuple[int, ...]:
        """Up to where each input was read; 0 for a queue."""
        return tuple(each.end if isinstance(each, LogInput) else 0 for each in self._inputs)

    @property
    def standing(self) -> Standing:
        """Where the member is; to be asked while nothing is stepped on."""
        inputs = tuple(
            (each.taken, each.incarnation) if isinstance(each, LogInput) else (None, None) for each in self._inputs
        )
        order = self._order
        return Standing(*self._place, self._reader.place.incarnation, inputs, tuple(order.passed), order.runs)

    async def ends(self) -> Sequence[int | None]:
        """See `engine.Ordered`."""
        return [await each.bus_end() if isinstance(each, LogInput) else None for each in self._inputs]

    def has_taken(self, ends: Sequence[int | None]) -> bool:
        """See `engine.Ordered`."""
        return all(
            each.taken >= (end or 0) if isinstance(each, LogInput) else each.is_empty
            for each, end in zip(self._inputs, ends, strict=True)
        )

    @property
    def hindered_since(self) -> float | None:
        """Since when some input, or the order, cannot be read, or no entry was read back that this member wrote."""
        lost = [each.lost_since for each in self._inputs]
        return earliest(*lost, self._reader.lost_since, self._unread_since)

    def now(self) -> int:
        """What time it is for the engine; 0 while this member does not know, and does not lead."""
        if not self._knows_time:
            if not self._leads():
                return 0
            self._knows_time = self._jumped = True  # nobody counts whom we could have heard
            self.clock.jump(self._loop.time(), wall_clock())
        return self.clock.read(self._loop.time(), wall_clock())

    def heard(self, now: int) -> None:
        """A living leader says what time it is, if it knows."""
        ours, wall = self.clock.read(self._loop.time(), wall_clock()), wall_clock()
        if now and (not self._knows_time or belief.time(now, ours, wall)):
            self._knows_time = True
            self._advance(now)

    def _advance(self, now: int) -> None:
        self.clock.heard(now, self._loop.time(), wall_clock())

    async def run(self) -> None:
        """Step, and write while this member leads, until cancelled. Raises what ends this member."""
        logs = [each.run() for each in self._inputs if isinstance(each, LogInput)]
        await run_all(self._follow(), self._write(), *logs)

    # what every member does

    async def _follow(self) -> None:
        order = self._order
        try:
            while True:
                for message in await self._reader.read():
                    if (entry := order.read(message.data)) is not None:
                        async with self._stepping.whole():
                            await self._carry_out(entry)
                            self._place = order.last, order.chain, message.position
                        self._span.check(order)
                    self._carried_out = order.last
                self._read_to = self._reader.place.position
                self._changed.tell()
        finally:
            await self._reader.aclose()

    async def _carry_out(self, entry: Entry) -> None:
        self._advance(entry.now)
        if entry.switch is not None:
            return
        await self._stepping.tick(entry.now)
        for take in entry.takes:
            if not 0 <= take.input < len(self._inputs):
                continue  # it says nothing here, nor anywhere
            source = self._inputs[take.input]
            if isinstance(source, LogInput):
                await self._stepping.take(take.input, await source.take(take.to or 0))
            else:
                await self._stepping.take(take.input, [Message(None, data) for data in take.messages])

    async def _is_passed_over(self, block: Poisoned) -> bool:
        if block in self._order.passed:
            return True
        last, chain, position = self._place
        ahead = Order(self._order.source, self._order.run, last, chain)
        await read_ahead(self._bus, self._reader.topic, ahead, Place(position + 1, self._reader.place.incarnation))
        return block in ahead.passed

    # what the one that leads does

    async def _write(self) -> None:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            self._unread_since = self._unread_since if self._leads() else None
            while not self._leads():
                await self._wait(_LEADS_EVERY)
            try:
                await self._lead(backoff)
            except BusUnavailable as error:
                self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_WRITEFAILED", error))
                await asyncio.sleep(backoff.next())

    async def _lead(self, backoff: Backoff) -> None:
        """Write entries, and read queues, as long as this member leads."""
        try:
            queues = [each.run() for each in self._inputs if isinstance(each, QueueInput)]
            await run_until_one_ends(self._propose(backoff), *queues)
        finally:
            await self._drop_pipe()

    async def _propose(self, backoff: Backoff) -> None:
        await self._catch_up()
        self._report_jump()
        while self._leads():
            if (found := self._next_entry()) is None:
                await self._wait_for_more()
                continue
            entry, offers = found
            proposal = self._order.propose(entry, self._largest)
            await self._put(proposal)
            while self._leads() and self._carried_out < self._order.last:
                await self._wait(_LEADS_EVERY)
            if self._order.counts(proposal):
                for queue, offer in offers:
                    queue.counts(offer)
            backoff.reset()

    async def _catch_up(self) -> None:
        """Carry out what stands on the topic now: what others wrote comes first."""
        bounds = await self._bus.bounds(self._reader.topic)
        while self._leads() and (self._read_to < bounds.end or self._carried_out < self._order.last):
            await self._wait(_LEADS_EVERY)

    def _report_jump(self) -> None:
        """Once all entries so far are carried out it is known how long nobody kept the time."""
        now, last = self.now(), self._stepping.steps.now
        if self._jumped and last is not None and now - last > 1_000_000:
            _log.info("nobody kept the engine's time for %.1f s: it goes on at the wall clock's", (now - last) / 1e6)
        self._jumped = False

    def _next_entry(self) -> tuple[Entry, list[tuple[QueueInput, Offer]]] | None:
        """All that there is to take now. None if there is nothing and no timer is due, or an entry is under way."""
        if self._carried_out < self._order.last:
            return None
        takes, offers = [], list[tuple[QueueInput, Offer]]()
        for at, each in enumerate(self._inputs):
            if isinstance(each, LogInput):
                if each.end > each.taken:
                    takes.append(Taken(at, each.end, ()))
            elif (offer := each.offer(_QUEUED_BYTES)) is not None:
                offers.append((each, offer))
                takes.append(Taken(at, None, tuple(message.data for message in offer.messages)))
        steps = self._stepping.steps
        entry = next_entry(self.now(), steps.now, steps.timers.next, takes)
        return None if entry is None else (entry, offers)

    async def _wait_for_more(self) -> None:
        due = self._stepping.steps.timers.next
        if due is None or self._carried_out < self._order.last:
            await self._wait(_LEADS_EVERY)
        else:
            await self._wait(min(_LEADS_EVERY, max(0.0, (due - self.now()) / 1e6)))

    async def _wait(self, seconds: float) -> None:
        """Until something is new, for so long at most."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _put(self, proposal: Proposal) -> None:
        """Write it, and wait until it is decided, or this member leads no more. BusUnavailable where it is not in time,
        or the pipe has trouble. The pipe is dropped then, and after a cancelled write.
        """
        topic, order = self._reader.topic, self._order
        self._unread_since = self._unread_since or self._loop.time()
        try:
            async with asyncio.timeout(_WRITE_DEADLINE):
                if self._pipe is None:
                    await self._open_pipe(topic)
                if self._pipe is not None:
                    await self._pipe.write(frames(proposal.frames, 0, wall_clock()))
                while self._leads() and not order.is_decided(proposal):
                    if self._trouble is not None and self._trouble.done():
                        self._trouble.result()  # which raises it
                    await self._wait(_LEADS_EVERY)
        except TimeoutError:
            await self._drop_pipe()
            raise BusUnavailable(f"{topic}: no entry was read back within {_WRITE_DEADLINE:g} s", topic=topic) from None
        except BaseException:
            await self._drop_pipe()
            raise
        self._unread_since = None

    async def _open_pipe(self, topic: str) -> None:
        self._pipe = pipe = await self._bus.pipe(topic)
        self._trouble = asyncio.create_task(_trouble(pipe), name=f"esp pipe of {topic}")
        self._trouble.add_done_callback(lambda _: self._changed.tell())

    async def _drop_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            trouble.cancel()
            await asyncio.wait([trouble])
            _ = trouble.cancelled() or trouble.exception()  # it is seen
        if pipe is not None:
            await pipe.aclose()


async def _trouble(pipe: Pipe) -> None:
    """Wait until the pipe has trouble, and raise it. What it confirms says nothing: it is read back, or it is not."""
    confirmed = 0
    while True:
        confirmed = await pipe.confirmed(confirmed)
