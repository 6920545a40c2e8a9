"""What stands behind the functions of `pubsubApi`: the library that `Init` begins, and its clients.

Callbacks run on threads of the library, never on its loop: blocks on one thread a subscriber, failures on one for all.
So a callback may call what it likes; only `Stop` does not wait there for what it would be waiting in.
"""

from __future__ import annotations

import asyncio
import ctypes
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from typing import Any

from .. import lib
from .._portal import Portal
from ..address import Address
from ..client import Client, log_notice
from ..errors import BusUnavailable, Closed, ConfigError, EspError, SchemaDiffers, WrongOrder
from ..events import Block, Opcode
from ..notices import Failure, Notice
from ..publisher import Publisher, PublisherOptions
from ..subscriber import Subscriber
from ..subscriber_options import SubscriberOptions
from . import log, text
from .modelingApi import BlockType, EventBlock, WindowSchema, from_block, pointer

PATIENCE = 30.0  # seconds that a call may take at most
_CALLBACK = 5.0  # seconds that Shutdown waits for an error callback that runs
_FAILURES = 100  # that may wait for the error callback


class Failures(IntEnum):
    """The first argument of an error callback."""

    pubsubFail_NONE = 0
    pubsubFail_APIFAIL = 1
    pubsubFail_THREADFAIL = 2
    pubsubFail_SERVERDISCONNECT = 3
    pubsubFail_CONNECTORFAIL = 4


class Codes(IntEnum):
    """The second argument of an error callback."""

    pubsubCode_NOERROR = 0
    pubsubCode_CLIENTEVENTSQUEUED = 1
    pubsubCode_CLIENTNOTCONNECTED = 2
    pubsubCode_READFAILED = 3
    pubsubCode_WRITEFAILED = 4
    pubsubCode_READEVENTSIZE = 5
    pubsubCode_READEVENTS = 6
    pubsubCode_WRITEEVENTS = 7


class Library:
    """What `Init` begins and `Shutdown` ends: the portal, the client of the bus, and the thread of error callbacks."""

    def __init__(self) -> None:
        self.portal = Portal("esp pubsubApi")
        self.connected: set[Started] = set()
        self.queue_bytes: dict[str, int] = {}
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._failures: queue.Queue[Callable[[], None] | None] = queue.Queue(_FAILURES)
        self._thread = threading.Thread(target=self._tell, name="esp error callbacks", daemon=True)
        self._thread.start()

    async def client(self) -> Client:
        """The connection to the bus, made when it is first needed."""
        async with self._opening:
            if self._client is None:
                self._client = await lib.init()
            return self._client

    def leave_bus(self) -> None:
        """To the end of the process: nobody may start threads any more."""
        if self._client is not None:
            self._client.leave_open()

    def tell(self, callback: Callable[[], None]) -> None:
        """Run an error callback soon; nobody waits for it."""
        try:
            self._failures.put_nowait(callback)
        except queue.Full:
            log.error("an error callback does not return: further failures are only logged")

    def _tell(self) -> None:
        while (callback := self._failures.get()) is not None:
            callback()

    def close(self) -> None:
        """End everything; what could not be flushed raises, when all is closed."""
        failures = self.stop_all(drain=True)
        try:
            self.portal.call_within(PATIENCE, lib.shutdown)
        finally:
            self.portal.close()
            with suppress(queue.Full):
                self._failures.put_nowait(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(_CALLBACK)
        if failures:
            raise failures[0]

    def stop_all(self, *, drain: bool) -> list[Exception]:
        """Stop every client, publishers last: callbacks may need them. `drain`: blocks that came are handed over."""
        failures: list[Exception] = []
        for started in sorted(self.connected, key=lambda each: isinstance(each, PublisherClient)):
            try:
                started.stop(wait=drain or isinstance(started, PublisherClient))
            except (EspError, TimeoutError) as error:
                failures.append(error)
        return failures


class Started:
    """What PublisherStart and SubscriberStart return."""

    def __init__(self, library: Library, url: str | bytes, failed: Any, context: object) -> None:
        self.library = library
        self.url = text(url, "a URL")
        self.address = Address.parse(self.url)
        self.address.require_window()
        self.buffer_bytes: int | None = None
        self.connected = False
        self.stopped = False
        self._failed = _callback(failed)
        self._context = _context(context)

    def connect(self) -> None:
        """Reach the bus, once."""
        self.usable()
        if self.connected:
            raise WrongOrder(f"{self.url} is connected already")
        self.library.portal.call_within(PATIENCE, self._connect)
        self.connected = True
        self.library.connected.add(self)

    async def _connect(self) -> None:
        await self.library.client()

    def usable(self) -> None:
        """Closed after Stop or Disconnect."""
        if self.stopped:
            raise Closed(f"{self.url} was stopped: one of Stop and Disconnect is enough, and then Start makes another")

    def fail(self, failure: Failures, code: Codes) -> None:
        """Have the script's error callback called."""
        if self._failed is not None:
            self.library.tell(lambda: self.call(self._failed, failure, code, self._context))

    def call(self, callback: Any, *args: object) -> None:
        """A callback may fail; what called it goes on."""
        try:
            callback(*args)
        except Exception:  # noqa: BLE001, RUF100  # the script's own
            log.exception("a callback of %s failed", self.url)

    def hear(self, notice: Notice) -> None:
        """Notices have no place in SAS's API but for failures: they are logged."""
        log_notice(notice)
        if isinstance(notice, Failure):
            self.fail(Failures[notice.failure], Codes[notice.code])

    def flush(self) -> None:
        """Wait for what was injected."""

    def stop(self, *, wait: bool) -> None:
        """Be of no use any more."""
        self.usable()
        self.stopped = True
        self.library.connected.discard(self)
        self.end(wait=wait)

    def end(self, *, wait: bool) -> None:
        """Let go; with `wait` what is queued comes first. Never waits for the thread that it is called on."""
        raise NotImplementedError


class PublisherClient(Started):
    """Opens its topic with the first block, because that says the schema."""

    def __init__(self, library: Library, url: str | bytes, failed: Any, context: object) -> None:
        super().__init__(library, url, failed, context)
        self._opening = asyncio.Lock()
        self._publisher: Publisher | None = None

    async def inject(self, block: EventBlock) -> None:
        """Publish a block, which has its id then."""
        publisher = await self._open(block.schema.text)
        if block.schema != publisher.schema:
            raise SchemaDiffers(
                f"the block has the schema {block.schema}, {self.url} was begun with {publisher.schema}",
                given=block.schema.text,
                retained=publisher.schema.text,
            )
        opcodes: Any = bytes([event.opcode for event in block.events])
        flags: Any = bytes([event.flags for event in block.events])
        delivery = await publisher.inject(
            [event.row for event in block.events],
            opcode=opcodes if opcodes.strip(b"\1") else Opcode.INSERT,
            flags=flags if flags.strip(b"\0") else 0,
            transactional=block.kind == BlockType.ebt_TRANS,
        )
        block.id = delivery.id

    async def _open(self, schema: str) -> Publisher:
        async with self._opening:
            if self._publisher is None:
                options = PublisherOptions(close_timeout=PATIENCE)
                if self.buffer_bytes is not None:
                    options = replace(options, buffer_bytes=self.buffer_bytes)
                client = await self.library.client()
                self._publisher = await client.publisher(self.url, schema, options=options, on_notice=self.hear)
            return self._publisher

    def flush(self) -> None:
        """Wait until the bus has it all."""
        if self._publisher is not None:
            self.library.portal.call_within(PATIENCE, self._publisher.flush)

    def end(self, *, wait: bool) -> None:
        """Without `wait` what is not acknowledged is given up."""
        publisher = self._publisher
        if publisher is None:
            return
        if not wait:
            publisher.options = replace(publisher.options, close_timeout=0.0)
        try:
            self.library.portal.call(publisher.aclose)
        except EspError as unflushed:
            if wait:
                raise
            log.warning("stopped without waiting: %s", unflushed)


class SubscriberClient(Started):
    """A thread that takes blocks from the loop and hands them to the script."""

    def __init__(self, library: Library, url: str | bytes, received: Any, failed: Any, context: object) -> None:
        self._received = _callback(received)
        if self._received is None:
            raise ConfigError("a subscriber needs a callback for its blocks")
        super().__init__(library, url, failed, context)
        self._subscriber: Subscriber
        self._blocks: Any
        self._reading: asyncio.Task[Any] | None = None
        self._drain = True
        self._thread = threading.Thread(target=self._work, name=f"esp subscriber {self.url}", daemon=True)

    def connect(self) -> None:
        """From now on the callback is called."""
        super().connect()
        self._thread.start()

    async def _connect(self) -> None:
        size = self.buffer_bytes or self.library.queue_bytes.get(self.address.hostport)
        options = SubscriberOptions() if size is None else SubscriberOptions(read_bytes=size)
        client = await self.library.client()
        self._subscriber = await client.subscriber(self.url, options=options, on_notice=self.hear)
        self._blocks = self._subscriber.batches()

    def _work(self) -> None:
        call = self.library.portal.call
        try:
            while blocks := call(self._next):
                for block in blocks:
                    if self.stopped and not self._drain:
                        break
                    self._hand_over(block)
                    if self._subscriber.group is not None:
                        with suppress(BusUnavailable):  # the next ones confirm this one too
                            call(self._subscriber.confirm, block)
        except EspError as error:
            if not self.stopped:
                log.error("%s: %s", self.url, error)
                self.fail(Failures.pubsubFail_APIFAIL, Codes.pubsubCode_READEVENTS)
        finally:
            with suppress(EspError):
                call(self._subscriber.aclose)

    async def _next(self) -> list[Block]:
        """The next blocks; none once it was stopped."""
        self._reading = None if self.stopped else asyncio.current_task()
        if self._reading is None:
            return []
        try:
            return list(await anext(self._blocks, []))
        except asyncio.CancelledError:
            if not self.stopped:
                raise
            return []
        finally:
            self._reading = None

    def _hand_over(self, block: Block) -> None:
        try:
            known = from_block(block)
        except EspError as error:
            log.error("%s: %s", self.url, error)
            self.fail(Failures.pubsubFail_APIFAIL, Codes.pubsubCode_READEVENTS)
            return
        self.call(self._received, known, WindowSchema(self.address.window or "", block.schema), self._context)

    def end(self, *, wait: bool) -> None:
        """The callback that runs may return; with `wait` it gets what was read before."""
        self._drain = wait
        if not self.connected:
            return
        self.library.portal.call_within(PATIENCE, self._wake)
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                raise Closed(f"{self.url} was stopped, but its callback does not return")

    async def _wake(self) -> None:
        if self._reading is not None:
            self._reading.cancel()


def _callback(function: Any) -> Any:
    """A function as it is; a ctypes one gets numbers where it wants pointers to our objects."""
    if function is None or not callable(function):
        return None
    kinds = getattr(function, "argtypes", None)
    if not kinds:
        return function

    def call(*args: object) -> None:
        given = zip(args, kinds, strict=True)
        function(
            *(pointer(a) if k is ctypes.c_void_p and isinstance(a, EventBlock | WindowSchema) else a for a, k in given)
        )

    return call


def _context(context: Any) -> object:
    """As it comes back to a C callback: pointers as numbers. What is no ctypes object comes back itself."""
    if isinstance(context, ctypes.c_void_p):
        return context.value
    if isinstance(context, ctypes.py_object):
        return id(context.value)
    return context
