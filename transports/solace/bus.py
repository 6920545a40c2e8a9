"""Solace as a bus: topics are topics of a message VPN, under SAS's names.

Without `buspersistence` messages are direct: a reader gets what is published while it reads. With it they are
guaranteed: groups have durable exclusive queues, which are read by one member at a time.

What is missing of a pipe may stand in the middle (not `suffix_only`): the broker refuses single guaranteed messages,
and drops single direct ones.

The vendor's client can connect anew by itself, and does not here: a link that was lost is trouble, and each pipe and
feed that is opened then finds a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any

from esp_pubsub.bus import Bounds, Capabilities, Start
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from . import requests
from .feed import SolaceFeed
from .flow import FlowElection
from .group import GroupFeed
from .inbox import Inbox
from .link import Ended, Flow, Inbound, Link, NotSubscribed
from .names import last_value_queue, topic_name
from .options import SolaceOptions
from .pipe import SolacePipe
from .values import Cell, may_make

_LAST_VALUE = 0.5  # seconds that a takeover may spend on last values


class SolaceBus:
    """A `Bus`, `Requests` and `Elections` over one message VPN."""

    capabilities: Capabilities

    def __init__(self, connect: Callable[[], Awaitable[Link]], options: SolaceOptions) -> None:
        """`connect` makes a session."""
        self.options = options
        self.missed: dict[str, str] = {}
        """Where a feed ended, and with it its place: who comes next is told."""
        self.made: set[str] = set()
        """Queues that are known to be there."""
        self._connect = connect
        self._connecting = asyncio.Lock()
        self._link: Link | None = None
        self._inbox: Inbox
        self._open: set[SolacePipe | SolaceFeed] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect, and find out what the broker lets us have."""
        try:
            link, _ = await self.link()
            retained = await may_make(self, link)
        except BaseException:
            await self.aclose()
            raise
        self.capabilities = Capabilities(
            suffix_only=False, replay=False, retained=retained, groups=self.options.buspersistence, incarnation=False,
            requests=True, catalog=False, max_message_bytes=self.options.maxmessage, elections=("flow",),
            shows_last=self.options.buspersistence,
        )  # fmt: skip

    async def link(self) -> tuple[Link, Inbox]:
        """The session, a new one where it was lost."""
        async with self._connecting:
            if self._closed:
                raise BusUnavailable("this bus was closed")
            if self._link is None or self._link.lost is not None:
                if self._link is not None:
                    self.in_background(self._link.aclose())
                    self._link = None
                link, inbox = await self._connect(), Inbox()
                try:
                    await inbox.open(link)
                except BaseException:
                    self.in_background(link.aclose())
                    raise
                self._link, self._inbox = link, inbox
            return self._link, self._inbox

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something bounded that raises nothing; the bus does not end before it has."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def make(self, link: Link, queue: str, topic: str) -> None:
        """See that a durable queue is there, and gets what is published to a topic."""
        flow = await self.stand_in_line(link, queue, lambda _: None, topic=topic)
        self.made.add(queue)
        await asyncio.shield(self.in_background(flow.aclose()))

    async def stand_in_line(
        self,
        link: Link,
        queue: str,
        ended: Ended,
        *,
        topic: str | None = None,
        active: Callable[[bool], None] | None = None,
    ) -> Flow:
        """Bind to a durable queue, whose messages do not matter; it is made if it is not there and may be."""
        try:
            return await link.bind(queue, lambda _: None, ended, topic=topic, make=True, active=active)
        except NotSubscribed:  # it would get nothing, whoever made it
            raise
        except BusRefused as error:
            try:  # an administrator may have made it
                return await link.bind(queue, lambda _: None, ended, active=active)
            except BusRefused:
                raise BusRefused(f"{error}; have it made by an administrator: esp doctor --solace says how") from None

    def guaranteed(self, link: Link, topic: str) -> SolacePipe:
        """A pipe of guaranteed messages, not open yet."""
        return SolacePipe(link, topic, None, self.options.maxmessage, self.options.timeout)

    # what the seam asks for

    async def pipe(self, topic: str) -> SolacePipe:
        """See `Bus.pipe`."""
        link, inbox = await self.link()
        pipe = SolacePipe(
            link, topic_name(topic), None if self.options.buspersistence else inbox, self.options.maxmessage,
            self.options.timeout,
        )  # fmt: skip
        await pipe.open()
        self._keep(pipe)
        return pipe

    async def feed(self, topic: str, start: Start, group: str | None) -> SolaceFeed:
        """See `Bus.feed`. Without a replay log nothing is kept that was done: a start is where a queue begins, now."""
        link, _ = await self.link()
        feed: SolaceFeed
        if group is None:
            if start == "latest" or (start == "earliest" and not self.options.replaylog):
                feed = SolaceFeed(self, link, topic_name(topic), self.missed.pop(topic, None))
            else:
                raise BusRefused(f"{topic}: without a group nothing is kept to begin with {start}: start is latest")
        else:
            if not self.options.buspersistence:
                raise BusRefused("groups have durable queues: set buspersistence = true")
            feed = GroupFeed(self, link, topic_name(topic), group, self._replay(topic, start))
        await feed.open()
        self._keep(feed)
        return feed

    async def bounds(self, topic: str) -> Bounds:
        """See `Bus.bounds`."""
        raise BusRefused("a queue has no positions to tell")

    def _replay(self, topic: str, start: Start) -> Any:
        if isinstance(start, int) or (isinstance(start, datetime) and not self.options.replaylog):
            raise BusRefused(f"{topic}: a queue keeps nothing to begin with {start}; a replay log knows times")
        return start if self.options.replaylog and start != "latest" else None

    def _keep(self, opened: SolacePipe | SolaceFeed) -> None:
        """To be closed with the bus, also if nobody holds it any more."""
        self._open = {each for each in self._open if not each.closed} | {opened}

    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        """See `Bus.retain`."""
        cell = await self._cell(topic, key)
        try:
            await cell.put(value)
        finally:
            await asyncio.shield(self.in_background(cell.aclose()))

    async def retained(self, topic: str, key: str) -> bytes | None:
        """See `Bus.retained`."""
        cell = await self._cell(topic, key)
        try:
            return await cell.get()
        finally:
            await asyncio.shield(self.in_background(cell.aclose()))

    async def _cell(self, topic: str, key: str) -> Cell:
        if not self.capabilities.retained:
            raise BusRefused("the broker lets us make no queues, so no value is retained")
        link, _ = await self.link()
        return Cell(self, link, topic, key)

    async def request(self, topic: str, data: bytes, timeout: float) -> bytes:
        """See `Requests.request`."""
        link, inbox = await self.link()
        return await requests.request(link, inbox, topic, data, timeout)

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """See `Requests.serve`."""
        link, inbox = await self.link()
        await requests.serve(link, inbox, topic, answer)

    def election(self, kind: str, line: str, member: str) -> FlowElection:
        """See `Elections.election`."""
        return FlowElection(self, line)

    async def give_last_values(self, line: str) -> None:
        """Readers to which nothing has come yet get the last message of their topic, where a queue keeps it: this is
        how a member that takes over learns where the bus stands when nobody is left who could say so.

        A line is of an engine, host and port; which of its topics the group sends to is not said here.
        """
        engine = line.partition("/")[0] + "/"
        fresh = [
            each for each in self._open if type(each) is SolaceFeed and each.fresh and each.topic.startswith(engine)
        ]
        for feed in fresh:
            try:
                async with asyncio.timeout(_LAST_VALUE):
                    data = await self._last_value(feed.topic)
            except (BusError, TimeoutError):
                continue
            if feed.fresh:
                feed.give(data)

    async def _last_value(self, topic: str) -> bytes:
        link, _ = await self.link()
        found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def hear(message: Inbound) -> None:
            if not found.done():
                found.set_result(message.data)

        flow = await link.browse(last_value_queue(topic), hear)
        try:
            return await found
        finally:
            await asyncio.shield(self.in_background(flow.aclose()))

    async def aclose(self) -> None:
        """See `Bus.aclose`."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(opened.aclose() for opened in self._open))
        async with self._connecting:
            if self._link is not None:
                await self._link.aclose()
        if self._background:
            await asyncio.wait(self._background)
