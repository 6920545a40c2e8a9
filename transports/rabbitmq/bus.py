"""RabbitMQ as a bus: topics are routing keys of one topic exchange, and every reader has a queue.

`direct`: a reader gets what is published while it reads. `persistent`: groups have durable queues, which are read by
one member at a time. `stream`: topics are logs, see stream.py; what follows is about queues.

Confirmed means: in every queue that is bound. A broker confirms each message alone, so what is
missing of a pipe may stand in the middle (not `suffix_only`).

After a lost link nothing is recovered by itself: each pipe and feed that is opened declares what it needs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from esp_pubsub.bus import Bounds, Capabilities, GroupState, Start
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable, ConfigError

from . import groups, requests, values
from .channel import Channel
from .feed import RabbitFeed
from .group import GroupFeed
from .link import Link, security
from .options import RabbitOptions, plain
from .pipe import RabbitPipe
from .presence import PresenceElection
from .stream import StreamFeed, StreamPipe, Streams, retention
from .stream_group import StreamGroupFeed
from .stream_link import Address
from .token import TokenElection

_LONGEST_KEY = 255


async def open_bus(options: RabbitOptions) -> RabbitBus:
    """Connect to the broker and find or make the exchange. ConfigError, BusUnavailable or BusRefused say why not."""
    try:
        context = await asyncio.to_thread(security, options)
    except OSError as e:
        raise ConfigError(f"a TLS file cannot be used: {e}") from e
    link, streams = Link(options, context), None
    try:
        if options.kind == "stream":
            link.drop(await link.channel("reading", "connecting"))  # first: AMQP tells best which settings are wrong
            address = Address(
                tuple(options.stream_addresses), plain(options.userid), plain(options.password), plain(options.vhost),
                context, options.timeout,
            )  # fmt: skip
            streams = Streams(address, retention(options.streamsize, options.retention))
            await streams.begin()
        bus = RabbitBus(link, streams)
        if streams is None:
            await bus.find_exchange()
        return bus
    except BaseException:
        await link.aclose()
        raise


class RabbitBus:
    """A `Bus`, `Requests`, `Elections` and, of queues, `Logs`, over one virtual host."""

    def __init__(self, link: Link, streams: Streams | None) -> None:
        self.link = link
        self._streams = streams
        log, largest = streams is not None, link.options.maxmessage
        self.capabilities = Capabilities(
            suffix_only=log, replay=log, retained=True, groups=link.options.kind != "direct", incarnation=log,
            requests=True, catalog=False,
            max_message_bytes=largest if streams is None else min(largest, streams.max_message_bytes),
            elections=("token", "presence") if streams is None else (), logs=streams is None,
            brief_groups=link.options.kind == "direct", replays_with="mode=stream",
            shows_groups=link.options.kind != "direct",
        )  # fmt: skip
        self._theirs = False  # somebody else made the exchange, in another way that will do
        self._asker = requests.Asker(link)
        self._properties: dict[str, Any] = {"delivery_mode": 2 if self.capabilities.groups else 1}
        if link.options.contenttype:
            self._properties["content_type"] = link.options.contenttype
        if link.options.header_table:
            self._properties["headers"] = link.options.header_table
        self._open: set[RabbitPipe | RabbitFeed | StreamGroupFeed] = set()
        self._unroutable = 0
        self.missed: dict[tuple[str, str | None], list[str]] = {}
        """Where feeds ended, and with them their queues: as many that come in their place are told."""
        self.unstored: dict[tuple[str, str | None], tuple[bytes | None, bytes]] = {}
        """What a group's lost feed had confirmed and not stored, by `ackwindow`, behind what the broker had of it."""
        self._noted: set[tuple[str, str]] = set()  # topics and groups
        self.room: dict[tuple[str, str | None], int] = {}
        """How many messages a group's feed needs beside `prefetch`, for those that wait for others."""
        self._log: asyncio.Task[RabbitBus] | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    # the exchange

    async def find_exchange(self) -> None:
        """See to it that there is one that will do."""
        channel = await self.link.channel("reading", "finding the exchange")
        try:
            await self.declare_exchange(channel)
        except BusRefused as error:
            options, text = self.link.options, str(error)
            wrong_type = "'type'" in text
            if "inequivalent" not in text or wrong_type or (options.kind == "persistent" and "'durable'" in text):
                way = "is no topic exchange" if wrong_type else "cannot be used"
                raise BusRefused(
                    f"the exchange {options.exchange!r} {way} ({text}): name another one, or delete it"
                ) from None
            self._theirs = True
        finally:
            self.link.drop(channel)

    async def declare_exchange(self, channel: Channel) -> None:
        """Make it, or see that it is there."""
        name, what = self.link.options.exchange, f"the exchange {self.link.options.exchange!r}"
        if not self._theirs:
            await self.link.ask(what, channel.exchange_declare(name, exchange_type="topic", durable=True))
            return
        try:
            await self.link.ask(what, channel.exchange_declare(name, passive=True))
        except BusUnavailable:
            self._theirs = False  # it may be gone; the next one makes it
            raise

    def bind_again(self, channel: Channel, queue: str, topic: str) -> None:
        """See to it that a queue is bound, as it was."""
        name = self.link.options.exchange
        if self._theirs or channel.make_topic_exchange(name):
            channel.bind(queue, name, topic)

    # what the seam asks for

    def _check(self, topic: str) -> None:
        if self._closed:
            raise BusUnavailable("this bus was closed")
        if len(topic.encode()) > _LONGEST_KEY:
            raise BusRefused(f"a routing key has at most {_LONGEST_KEY} bytes, {topic} has more: use shorter names")

    async def pipe(self, topic: str) -> RabbitPipe | StreamPipe:
        """See `Bus.pipe`."""
        self._check(topic)
        if self._streams is not None:
            return await self._streams.pipe(topic)
        channel = await self.link.channel("writing", f"writing to {topic}", confirms=True)
        try:
            await self.declare_exchange(channel)
        except BaseException:
            self.link.drop(channel)
            raise
        pipe = RabbitPipe(self.link, channel, self.link.options.exchange, topic, self._properties)
        self._keep(pipe)
        return pipe

    async def feed(self, topic: str, start: Start, group: str | None) -> RabbitFeed | StreamFeed | StreamGroupFeed:
        """See `Bus.feed`. Queues keep nothing that was done, so a start is where a queue begins: now."""
        self._check(topic)
        feed = await self._open_feed(topic, start, group)
        if group is not None and self.capabilities.groups:
            try:
                await self._note(topic, group)  # after: what is published meanwhile must not be missed for that
            except BaseException:
                await feed.aclose()
                raise
        return feed

    async def _open_feed(
        self, topic: str, start: Start, group: str | None
    ) -> RabbitFeed | StreamFeed | StreamGroupFeed:
        if self._streams is not None and group is None:
            return await self._streams.feed(topic, start)
        if self._streams is not None and group is not None:
            reader = StreamGroupFeed(self, self._streams, topic, start, group)
            await reader.open()
            self._keep(reader)
            return reader
        if not isinstance(start, str):
            raise BusRefused(f"{topic}: a queue keeps nothing to begin with {start}: start is latest")
        feed = RabbitFeed(self, topic) if group is None else GroupFeed(self, topic, group)
        try:
            await feed.open()
        except BusRefused as error:
            if group is None or "'x-delivery-limit'" not in str(error):
                raise
            feed = GroupFeed(self, topic, group, limited=True)
            await feed.open()
        if missed := self.missed.get(feed.seat):
            feed.tell(missed.pop(0))
        self._keep(feed)
        return feed

    async def _note(self, topic: str, group: str) -> None:
        if (topic, group) not in self._noted:
            self._noted.add((topic, group))
            await groups.note(self.link, topic, group)

    async def group_states(self, topic: str) -> Sequence[GroupState]:
        """See `Groups.group_states`. The broker knows whether somebody reads, and neither who nor since when."""
        self._check(topic)
        incarnation = None if self._streams is None else (await self._streams.bounds(topic, make=True)).incarnation
        return await groups.states(self.link, topic, incarnation)

    async def bounds(self, topic: str) -> Bounds:
        """See `Bus.bounds`."""
        self._check(topic)
        if self._streams is None:
            raise BusRefused("a queue has no positions to tell")
        return await self._streams.bounds(topic, make=True)

    def _keep(self, opened: RabbitPipe | RabbitFeed | StreamGroupFeed) -> None:
        """To be closed with the bus, also if nobody holds it any more."""
        gone = {each for each in self._open if each.closed}
        self._unroutable += sum(each.unroutable for each in gone if isinstance(each, RabbitPipe))
        self._open = (self._open - gone) | {opened}

    @property
    def unroutable(self) -> int:
        """How many messages were published for which there was no queue, so nobody."""
        return self._unroutable + sum(each.unroutable for each in self._open if isinstance(each, RabbitPipe))

    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        """See `Bus.retain`."""
        self._check("")
        await values.put(self.link, topic, key, value)

    async def retained(self, topic: str, key: str) -> bytes | None:
        """See `Bus.retained`."""
        self._check("")
        return await values.get(self.link, topic, key)

    async def request(self, topic: str, data: bytes, timeout: float) -> bytes:
        """See `Requests.request`."""
        self._check(topic)
        return await self._asker.request(topic, data, timeout)

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """See `Requests.serve`."""
        self._check(topic)
        await requests.serve(self.link, topic, answer)

    async def log(self) -> RabbitBus:
        """See `Logs.log`: streams, under the same settings."""
        self._check("")
        if self._log is None or (self._log.done() and (self._log.cancelled() or self._log.exception())):
            options = replace(self.link.options, mode="stream", quorum=False)
            self._log = asyncio.create_task(open_bus(options))
        return await asyncio.shield(self._log)

    def election(self, kind: str, line: str, member: str) -> TokenElection | PresenceElection:
        """See `Elections.election`."""
        return PresenceElection(self, line, member) if kind == "presence" else TokenElection(self, line)

    async def aclose(self) -> None:
        """See `Bus.aclose`."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(opened.aclose() for opened in self._open))
        if self._log is not None:
            self._log.cancel()  # if it is not open by now
            with suppress(asyncio.CancelledError, BusError, ConfigError):
                await (await self._log).aclose()
        if self._streams is not None:
            await self._streams.aclose()
        await self.link.aclose()
