"""Publisher: blocks in, ids given, deliveries out."""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from .address import Address
from .bus import Bus
from .encode import Encoder
from .errors import BusError, Closed, ConfigError, DeliveryUnknown, EspError
from .events import Opcode
from .failover.outbox import Outbox
from .notices import Failure, Notice, Reconnected
from .schema import Schema
from .sender import Sender
from .wire.frame import BLOCK, BODY_AT, LIMITS, TRANSACTIONAL, Limits, seal

if TYPE_CHECKING:
    from .client import Home

_log = logging.getLogger("esp_pubsub.publisher")
_YIELD_EVERY = 64  # injects that found room, before the loop gets a turn

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
    """How long the bus may leave written blocks unconfirmed before the sender begins anew."""
    close_timeout: float = 10.0
    """How long closing waits for what is not acknowledged yet."""
    body: Literal["rows", "arrow"] = "rows"
    """How blocks travel; Arrow tables given to `inject` travel as Arrow only under "arrow"."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        if self.buffer_blocks < 1 or self.buffer_bytes < 1:
            raise ConfigError("buffer_blocks and buffer_bytes are at least 1")
        if self.body not in ("rows", "arrow"):
            raise ConfigError(f"body is rows or arrow, not {self.body!r}")


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """A publisher at one moment. Ids are those of the last block."""

    given: int
    sent: int
    acked: int
    events: int
    bytes: int
    waiting_blocks: int
    waiting_bytes: int
    troubles: int


class Delivery:
    """What became of one block: awaited, `"acked"`, or DeliveryUnknown past the ack timeout; then it may be awaited
    again.
    """

    __slots__ = ("_publisher", "id")

    def __init__(self, publisher: Publisher, id: int) -> None:
        self._publisher = publisher
        self.id = id

    def __await__(self) -> Generator[Any, None, Outcome]:
        return self._publisher.delivered(self.id).__await__()

    def __repr__(self) -> str:
        return f"<Delivery id={self.id}>"


class Publisher:
    """Publishes blocks of one schema to one topic. Made by `Client.publisher`; used on that client's loop.

    Attributes: `address`, `topic`, `schema`, `source` (the 64-bit number of the sequence), `run`.
    """

    def __init__(
        self, home: Home, bus: Bus, address: Address, topic: str, schema: Schema, options: PublisherOptions,
        notify: Callable[[Notice], None],
    ) -> None:  # fmt: skip
        self.address = address
        self.topic = topic
        self.schema = schema
        self.source = source_number(f"{topic}/{secrets.token_hex(8)}")
        self.run = 0
        self.options = options
        self._home = home
        self._notify = notify
        self._encode = Encoder(schema, options.body, options.limits).encode
        self._outbox = Outbox(options.buffer_blocks, options.buffer_bytes)
        self._sender = Sender(
            bus, topic, self._outbox,
            source=self.source, run=self.run, stall=options.stall, acked=self._acked, trouble=self._trouble,
        )  # fmt: skip
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._failure: Exception | None = None
        self._line = asyncio.Lock()
        self._room = asyncio.Event()
        self._for_ack: list[tuple[int, int, asyncio.Future[None]]] = []
        self._events = 0
        self._bytes = 0
        self._troubles = 0
        self._turns = 0
        self._asked = 0

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to send. The client calls this."""
        self._task = tasks.create_task(self._send(), name=f"esp sender {self.topic}")

    async def _send(self) -> None:
        try:
            await self._sender.run()
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

        `rows` is a sequence of tuples in schema order, of mappings, of dataclass instances or of `Event`; a `Block`
        that was received; or an Arrow table or pandas frame. `opcode` and `flags` hold for all events or give one
        each. A value that does not fit raises ValueRefused before an id is given. Cancelled: nothing was published.
        """
        self._check()
        body_kind, marks, count, body = self._encode(rows, opcode, flags)
        size = BODY_AT + len(body)
        self._turns += 1
        if self._turns % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        outbox = self._outbox
        if self._line.locked() or not outbox.room(size):
            async with self._line:
                while not outbox.room(size):
                    self._room.clear()
                    await self._room.wait()
                    self._check()
        if transactional:
            marks |= TRANSACTIONAL
        id = outbox.last + 1  # from here on nothing is awaited
        outbox.add(
            seal(BLOCK, body_kind, marks, count, self.source, self.run, id, self.schema.fingerprint, outbox.chain, body)
        )
        self._events += count
        self._bytes += size
        self._sender.wake()
        return Delivery(self, id)

    def _acked(self, id: int) -> None:
        self._outbox.trim(id)
        self._room.set()
        waiting = self._for_ack
        while waiting and waiting[0][0] <= id:
            _, _, future = heapq.heappop(waiting)
            if not future.done():
                future.set_result(None)

    def _trouble(self, error: BusError | None) -> None:
        if error is None:
            self._notify(Reconnected(self.topic, f"publishing goes on behind block {self._sender.settled}"))
            return
        self._troubles += 1
        self._notify(Failure("pubsubFail_SERVERDISCONNECT", "pubsubCode_WRITEFAILED", error))

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._notify(Failure("pubsubFail_APIFAIL", "pubsubCode_WRITEEVENTS", error))
        self._wake_all()

    def _wake_all(self) -> None:
        """Everybody who waits looks again, and finds us failed or closed."""
        self._room.set()
        for _, _, future in self._for_ack:
            if not future.done():
                future.set_result(None)
        self._for_ack.clear()

    async def delivered(self, id: int, timeout: float | None = None) -> Outcome:
        """Wait until the block with this id is acknowledged. DeliveryUnknown past the timeout (or ack_timeout)."""
        if id > self._outbox.last:
            raise ValueError(f"no block has the id {id} yet; the last one given is {self._outbox.last}")
        if id > self._sender.settled:
            self._raise_failure()
            future = asyncio.get_running_loop().create_future()
            self._asked += 1
            heapq.heappush(self._for_ack, (id, self._asked, future))
            seconds = self.options.ack_timeout if timeout is None else timeout
            try:
                async with asyncio.timeout(seconds):
                    await future
            except TimeoutError:
                raise DeliveryUnknown(
                    f"block {id} on {self.topic} is not acknowledged after {seconds:g} s; it keeps its id and is still "
                    "being tried: await the delivery again",
                    id=id,
                ) from None
            if id > self._sender.settled:
                self._raise_failure()
                raise Closed(f"the publisher on {self.topic} was closed with block {id} not acknowledged", id=id)
        return "acked"

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every block that has an id is acknowledged. DeliveryUnknown names the first that is late."""
        self._home.check()
        if self._outbox.last <= self._sender.settled:
            return
        try:
            await self.delivered(self._outbox.last, timeout)
        except DeliveryUnknown:
            first, last = self._sender.settled + 1, self._outbox.last
            raise DeliveryUnknown(
                f"blocks {first} to {last} on {self.topic} are not acknowledged in time", id=first, last=last
            ) from None

    @property
    def stats(self) -> PublisherStats:
        """What was given, sent and acknowledged so far."""
        return PublisherStats(
            given=self._outbox.last, sent=self._sender.sent, acked=self._sender.settled, events=self._events,
            bytes=self._bytes, waiting_blocks=len(self._outbox), waiting_bytes=self._outbox.bytes,
            troubles=self._troubles,
        )  # fmt: skip

    def _check(self) -> None:
        self._home.check()
        if self._closing:
            raise Closed(f"the publisher on {self.topic} is closed; open a new one")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def aclose(self) -> None:
        """Flush within `close_timeout`, then stop. DeliveryUnknown names what is not acknowledged. Idempotent."""
        if self._closing:
            return
        self._home.check()
        self._closing = True
        try:
            if self._failure is None:
                await self.flush(self.options.close_timeout)
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
            self._wake_all()

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self.aclose()
        except EspError as unflushed:
            if error is None:
                raise
            _log.warning("closing after an error: %s", unflushed)


def source_number(name: str) -> int:
    """The 64-bit number by which frames name a source."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
