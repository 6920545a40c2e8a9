"""Publisher: blocks in, ids given, deliveries out."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import secrets
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .address import Address
from .bus import Bus
from .errors import (
    BusError,
    BusUnavailable,
    Closed,
    ConfigError,
    DeliveryUnknown,
    EspError,
    InputDiffers,
    Overrun,
    WrongOrder,
)
from .events import Opcode
from .failover.group import Group
from .failover.join import Elect, join
from .failover.line import Line
from .failover.membership import Role, RoleChange
from .failover.options import Failover
from .failover.words import Setup
from .notices import Failure, Notice, Reconnected
from .read_back import ReadBack
from .sender import Sender
from .wire.frame import BODY_AT, LIMITS, Limits
from .writer import BlockWriter

if TYPE_CHECKING:
    from .client import Home

_log = logging.getLogger("esp_pubsub.publisher")
_TURN = 80 << 10  # work that injects may do before the loop gets a turn: a kilobyte a block, and its bytes

Outcome = Literal["acked", "covered"]


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """What can be set on a publisher."""

    buffer_blocks: int = 10_000
    """Blocks that may have an id and not be acknowledged yet; then `inject` waits."""
    buffer_bytes: int = 64 << 20
    """The same in bytes."""
    ack_timeout: float = 30.0
    """How long awaiting a delivery, or a flush, takes before DeliveryUnknown."""
    stall: float = 5.0
    """How long the bus may leave written blocks unconfirmed before the sender begins anew; a tenth more, so that a
    driver which waits as long itself is heard first."""
    close_timeout: float = 10.0
    """How long closing waits for what is not acknowledged yet."""
    body: Literal["rows", "arrow"] = "rows"
    """How blocks travel; Arrow tables given to `inject` travel as Arrow only under "arrow". In a group they are rebuilt
    first, so that all its members send the same bytes, and all need the same major version of pyarrow."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        for name in ("buffer_blocks", "buffer_bytes"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name} is a number of at least 1, not {getattr(self, name)!r}")
        for name in ("ack_timeout", "stall", "close_timeout"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not (seconds > 0 if name == "stall" else seconds >= 0):
                raise ConfigError(f"{name} is a number of seconds, not {seconds!r}")
        if self.body not in ("rows", "arrow"):
            raise ConfigError(f"body is rows or arrow, not {self.body!r}")


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """A publisher at one moment. Ids are those of the last block; role and what follows are a failover member's."""

    given: int
    sent: int
    acked: int
    events: int
    bytes: int
    waiting_blocks: int
    waiting_bytes: int
    troubles: int
    role: Role = "active"
    term: int = 0
    """The last one in which this member led."""
    on_bus: int = 0
    """How far the bus is known to hold the sequence."""
    last_switch: RoleChange | None = None

    @property
    def lag(self) -> int:
        """How many blocks the bus holds that this member has not been given yet."""
        return max(0, self.on_bus - self.given)


@dataclass(frozen=True, slots=True)
class Resume:
    """A sequence that its user keeps count of, over the lives of publishers that follow each other.

    The publisher goes on after block `last`, whose chain is `chain`; everything up to there must be on the bus. Blocks
    that are sent again, with the same ids and bytes, are duplicates that no subscriber sees.

    Other blocks under the same ids, by another publisher of this name or by this one before it was started again, are
    InputDiffers, raised before the block counts as acknowledged: opening reads the topic from block `last` on, and what
    is sent is read back. One client has one publisher of a name on a topic at a time.

    A bus that cannot be read again (RabbitMQ's modes direct and persistent, Solace) does not show other blocks: there
    `acked` says that the bus has the block, and not that subscribers take it for the one with this id.
    """

    name: str
    last: int = 0
    chain: int = 0

    def __post_init__(self) -> None:
        for name, bits in (("last", 64), ("chain", 32)):
            number = getattr(self, name)
            if not isinstance(number, int) or not 0 <= number < 1 << bits:
                raise ConfigError(f"{name} is a number from 0 to 2**{bits} - 1, not {number!r}")


class Window(NamedTuple):
    """Where a publisher publishes."""

    address: Address
    topic: str


class Delivery:
    """What became of one block. Awaited: `acked`, or `covered` if another member of the failover group sent it.

    Past the ack timeout it raises DeliveryUnknown: the block is still being tried, and may be awaited again.
    """

    __slots__ = ("_publisher", "id")

    def __init__(self, publisher: Publisher, id: int) -> None:
        self._publisher = publisher
        self.id = id

    @property
    def source(self) -> int:
        """The 64-bit number of the sequence that the block belongs to."""
        return self._publisher.source

    @property
    def run(self) -> int:
        """The run of its source."""
        return self._publisher.run

    def __await__(self) -> Generator[Any, None, Outcome]:
        return self._publisher.delivered(self.id).__await__()

    def __repr__(self) -> str:
        return f"<Delivery id={self.id}>"


class Publisher:
    """Publishes blocks of one schema to one topic. Made by `Client.publisher`; used on that client's loop.

    Attributes: `address`, `topic`, `schema`, `source` (the 64-bit number of the sequence), `run`.
    """

    _left_open = False  # it was started, and neither closed nor told of as left open

    def __init__(
        self, home: Home, window: Window, bus: Bus, writer: BlockWriter, options: PublisherOptions,
        notify: Callable[[Notice], None],
    ) -> None:  # fmt: skip
        self.address, self.topic = window
        self.schema = writer.schema
        self.source = writer.source
        self.run = writer.run
        self.options = options
        self._home = home
        self._observer = home.observer
        self._notify = notify
        self._bus = bus
        self._writer = writer
        self._encode = writer.encode
        self._outbox = writer.outbox
        self._sender = Sender(
            bus,
            self.topic,
            self._outbox,
            source=self.source,
            run=self.run,
            stall=options.stall,
            acked=self._acked,
            trouble=self._trouble,
        )
        self._add = self._outbox.add
        self._group: Group | None = None
        self._group_line: Line | None = None
        self._read_back: ReadBack | None = None
        self._leaves_when_full = False
        self._task: asyncio.Task[None] | None = None
        self._closing = False  # no more blocks are taken
        self._closed = False  # nothing more is sent
        self._failure: Exception | None = None
        self._queue: deque[asyncio.Event] = deque()  # tasks that wait for room; only the first is woken
        self._for_ack: list[tuple[int, int, asyncio.Future[None]]] = []
        self._asked = 0
        self._awaited = 0
        self._worked = 0
        self._events = 0
        self._bytes = 0
        self._troubles = 0

    def join(self, failover: Failover, control_topic: str, setup: Setup, line: Line, elect: Elect | None) -> None:
        """Be a member of a failover group with this line. The client calls this before `start`."""
        self._group = join(
            self._bus, failover, control_topic, setup, [(line, self._sender)],
            elect=elect, stall=self.options.stall, changed=self._changed,
        )  # fmt: skip
        self._group_line, self._add = line, line.give
        self._leaves_when_full = failover.overflow == "leave"

    async def look_back(self, resume: Resume) -> None:
        """Find what the bus has of a resumed sequence, and read back what is sent. The client calls this before
        `start`. Raises InputDiffers where the bus has another block.
        """
        if self._bus.capabilities.replay:
            back = self._read_back = ReadBack(
                self._bus, self.topic, self._outbox, source=self.source, name=resume.name, acked=self._settle
            )
            self._add = back.add
            await back.look_back()

    @property
    def at_work(self) -> bool:
        """Whether it was started, and has not ended by trouble or by closing."""
        return self._task is not None and not self._task.done()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to send. The client calls this."""
        self._left_open = True
        self._task = tasks.create_task(self._work(), name=f"esp publisher {self.topic}")

    async def _work(self) -> None:
        try:
            if self._read_back is not None:
                await self._read_back.run(self._sender)
            else:
                await (self._group or self._sender).run()
        except Exception as error:  # noqa: BLE001  # whatever it is, everybody who waits must hear of it
            self._fail(error)

    async def inject(
        self,
        rows: Any,
        *,
        opcode: Opcode | int | Sequence[int] = Opcode.INSERT,
        flags: int | Sequence[int] = 0,
        transactional: bool = False,
    ) -> Delivery:
        """Publish one block and return its Delivery; waits while the buffer is full.

        `rows` is a sequence of tuples in schema order, of mappings, of `Event`, or of instances of a dataclass, a
        msgspec Struct or a pydantic model with the fields of the schema; a `Block` that was received; or an Arrow table
        or pandas frame. Any value may be None; a mapping may leave out fields that are no keys, which are None then.
        `opcode` and `flags` hold for all events or give one each. A value that does not fit raises ValueRefused before
        an id is given. Cancelled: nothing was published.
        """
        self._check()
        encoded = self._encode(rows, opcode, flags)
        size = BODY_AT + len(encoded[3])
        if size > self._writer.largest:
            raise self._writer.too_large(size)
        outbox = self._outbox
        self._worked += size + 1024
        if self._worked > _TURN and not self._queue and outbox.room(size):
            self._worked = 0
            await asyncio.sleep(0)
            self._check()
        if self._queue or not outbox.room(size):
            await self._wait_for_room(size)
        block = self._writer.seal(encoded, transactional)  # from here on nothing is awaited
        try:
            self._add(block)
        except InputDiffers as differs:
            self._fail(differs)
            raise
        self._events += encoded[2]
        self._bytes += size
        if self._observer is not None:
            self._observer.given(self, block.id, encoded[2], size)
        if self._group is None:
            self._sender.wake()
        else:
            self._group.given()
            if self._for_ack:
                self._changed()
        return Delivery(self, block.id)

    async def _wait_for_room(self, size: int) -> None:
        """First come, first served. When this returns there is room, until the caller awaits something."""
        turn = asyncio.Event()
        self._queue.append(turn)
        try:
            while self._queue[0] is not turn or not self._outbox.room(size):
                self._leave_if_full()
                turn.clear()
                await turn.wait()
                self._check()
        finally:
            self._queue.remove(turn)
            self._tell_room()

    def _tell_room(self) -> None:
        """There may be room: for the first in the line, who tells the next."""
        if self._queue:
            self._queue[0].set()

    def _leave_if_full(self) -> None:
        """A standby whose input cannot wait gives up once it knows that another member leads."""
        group = self._group
        if self._leaves_when_full and group is not None and group.role != "active" and group.others_lead():
            overrun = Overrun(
                f"the standby buffer of {len(self._outbox)} blocks on {self.topic} is full; this member leaves"
            )
            self._fail(overrun)
            raise overrun

    def _acked(self, id: int) -> None:
        """The sender's blocks up to this one are on the bus."""
        if self._group is not None and self._group_line is not None:
            self._group.acked(self._group_line, id)
            self._changed()
        elif self._read_back is not None:
            self._read_back.confirmed(id)
        else:
            self._settle(id)

    def _settle(self, id: int) -> None:
        self._outbox.settle(id)
        self._deliver(id)

    def _changed(self) -> None:
        """The group knows more than before, or has another role."""
        self._deliver(self._delivered)
        if self._observer is not None and self._group is not None:
            self._observer.role(self, self._group.roles.last)

    @property
    def _delivered(self) -> int:
        """Up to here every block that was given is on the bus."""
        return self._outbox.settled if self._group_line is None else self._group_line.delivered

    def _deliver(self, id: int) -> None:
        """Blocks up to this one are delivered: wake those who wait for that, or for room."""
        self._tell_room()
        if self._observer is not None:
            self._observer.acked(self, id)
        waiting = self._for_ack
        while waiting and waiting[0][0] <= id:
            _, _, future = heapq.heappop(waiting)
            if not future.done():
                future.set_result(None)

    def _trouble(self, error: BusError | None) -> None:
        if error is None:
            self._notify(Reconnected(self.topic, f"publishing goes on after block {self._outbox.settled}"))
            return
        self._troubles += 1
        if self._group is not None and isinstance(error, BusUnavailable):
            self._group.trouble(error)
        self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_WRITEFAILED", error))

    def _fail(self, error: Exception) -> None:
        """Nothing more will be sent: everybody who waits is told, and so is whoever comes."""
        if self._failure is None:
            self._failure = error
            self._notify(Failure("pubsubFail_APIFAIL", "pubsubCode_WRITEEVENTS", error))
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._group is not None:
            self._group.leave()
        self._wake_all()

    def _wake_all(self) -> None:
        """Everybody who waits looks again, and finds us failed or closed."""
        if self._observer is not None:
            self._observer.ended(self)
        for turn in self._queue:
            turn.set()
        for _, _, future in self._for_ack:
            if not future.done():
                future.set_result(None)
        self._for_ack.clear()

    async def delivered(self, id: int, timeout: float | None = None) -> Outcome:
        """Wait until the block with this id is on the bus. DeliveryUnknown past the timeout (or ack_timeout)."""
        if not 1 <= id <= self._outbox.last:
            raise ValueError(f"no block has the id {id}; the last one given is {self._outbox.last}")
        self._home.check()
        if id > self._delivered:
            self._raise_if_over(id)
            await self._wait_for(id, self.options.ack_timeout if timeout is None else timeout)
        if id > self._delivered:
            self._raise_if_over(id)
        return "acked" if self._group_line is None or self._group_line.has_sent(id) else "covered"

    async def _wait_for(self, id: int, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._asked += 1
        self._awaited += 1
        heapq.heappush(self._for_ack, (id, self._asked, future))
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            if id <= self._delivered:  # in this very turn
                return
            raise DeliveryUnknown(
                f"block {id} on {self.topic} is not acknowledged after {seconds:g} s; it keeps its id and is still "
                "being tried: await the delivery again",
                id=id,
            ) from None
        finally:
            self._awaited -= 1
            if len(self._for_ack) > 2 * self._awaited:  # those who gave up leave when they are the most
                self._for_ack = [waiting for waiting in self._for_ack if not waiting[2].done()]
                heapq.heapify(self._for_ack)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every block that has an id is on the bus. DeliveryUnknown names the first that is late."""
        self._home.check()
        last = self._outbox.last
        if last <= self._delivered:
            return
        try:
            await self.delivered(last, timeout)
        except DeliveryUnknown:
            first = self._delivered + 1
            raise DeliveryUnknown(
                f"blocks {first} to {last} on {self.topic} are not acknowledged in time", id=first, last=last
            ) from None

    async def hand_over(self) -> None:
        """Send what has an id, then let another member of the failover group lead; at once on a standby.

        Without another member this one leads again after a while. Waits as long as the bus takes; where leadership ends
        meanwhile, by a stall for example, it waits on until the bus holds all that had an id, whoever sent it. If this
        member leaves its group before, that raises what ended it, or Closed with the id. Cancelled, it leads on, unless
        everything was sent already.
        """
        self._check()
        if self._group is None:
            raise WrongOrder(f"the publisher on {self.topic} is in no failover group; pass failover=")
        try:
            await self._group.hand_over()
        except Closed:
            if self._failure is None:
                raise
            raise self._failure from None

    async def roles(self) -> AsyncIterator[RoleChange]:
        """The role changes of this failover member from now on, as they happen; ends after the last, `left`."""
        if self._group is None:
            raise WrongOrder(f"the publisher on {self.topic} is in no failover group; pass failover=")
        async for change in self._group.roles.changes():
            yield change

    @property
    def stats(self) -> PublisherStats:
        """What was given, sent and acknowledged so far, and what this member is in its group."""
        plain = PublisherStats(
            given=self._outbox.last,
            sent=self._sender.sent,
            acked=self._delivered,
            events=self._events,
            bytes=self._bytes,
            waiting_blocks=len(self._outbox),
            waiting_bytes=self._outbox.bytes,
            troubles=self._troubles,
            on_bus=self._outbox.settled,
        )
        group = self._group
        if group is None:
            return plain
        return replace(plain, role=group.role, term=group.membership.term, last_switch=group.roles.last)

    @property
    def failure(self) -> Exception | None:
        """What ended it for good; None while it is at work, or was closed."""
        return self._failure

    def _check(self) -> None:
        self._home.check()
        if self._closing:
            raise Closed(f"the publisher on {self.topic} is closed; open a new one")
        if self._failure is not None:
            raise self._failure

    def _raise_if_over(self, id: int) -> None:
        """Nothing more will become of a block that is not acknowledged by now."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Closed(f"the publisher on {self.topic} was closed before block {id} was acknowledged", id=id)

    async def aclose(self) -> None:
        """Flush within `close_timeout`, then stop. DeliveryUnknown names what is not acknowledged. Idempotent.

        An active failover member lets the next one lead; a standby waits for its blocks to be covered.
        """
        self._home.check()
        if self._closed:
            return
        self._closing = True
        for turn in self._queue:
            turn.set()  # whoever waits for room gives up, before anything is flushed
        try:
            if self._failure is None:
                await self.flush(self.options.close_timeout)
                await self._leave_group()
        except asyncio.CancelledError:
            raise  # still sending: closing again goes on from here
        except BaseException:
            await self._stop()
            raise
        await self._stop()
        if self._failure is not None and self._delivered < self._outbox.last:
            raise self._failure

    async def _leave_group(self) -> None:
        if self._group is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.close_timeout):
                    await self._group.hand_over()

    async def _stop(self) -> None:
        self._closed = True
        self._left_open = False
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
        finally:
            self._wake_all()

    def tell_left_open(self) -> None:
        """A ResourceWarning if nobody closed it, once, and a line in the log if blocks are lost by that."""
        if not self._left_open or self._home.forked:
            return
        self._left_open = False
        if waiting := len(self._outbox):
            lost = "%s: %d blocks (from id %d) are not acknowledged and may be lost; use async with, or await aclose()"
            _log.warning(lost, f"the publisher on {self.topic} was never closed", waiting, self._outbox.first)
        warnings.warn(f"unclosed publisher on {self.topic}", ResourceWarning, source=self, stacklevel=2)

    def __del__(self) -> None:
        self.tell_left_open()

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self.aclose()
        except EspError as unflushed:
            if error is None:
                raise
            _log.warning("closing after an error: %s", unflushed)


def sequence_name(failover: Failover | None, resume: Resume | None) -> str:
    """What tells this sequence from the topic's others."""
    if failover is not None:
        return failover.group
    return f"resume:{resume.name}" if resume is not None else secrets.token_hex(8)


def source_of_resumed(topic: str, name: str) -> int:
    """The source of a publisher with `Resume(name)`."""
    return source_number(f"{topic}/{sequence_name(None, Resume(name))}")


def source_number(name: str) -> int:
    """The 64-bit number by which frames name a source."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
