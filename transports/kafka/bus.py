"""Kafka as a bus: one topic of ours is one partition there, whose order all readers share.

A pipe is a producer that has one batch under way, a feed is a consumer; both are thrown away after trouble. Positions
are the broker's offsets. What is missing of a pipe is always its end, because no batch is handed to the client before
the one in front of it is acknowledged (`suffix_only`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta

from aiokafka import TopicPartition

from esp_pubsub.address import is_control, kafka_topic
from esp_pubsub.bus import Bounds, Capabilities, GroupState, Place, Start
from esp_pubsub.errors import BusRefused, BusUnavailable, ConfigError

from .feed import PURGED, KafkaFeed, Seen, incarnation
from .link import Link, security, words
from .options import KafkaOptions, settings
from .pipe import ENVELOPE, KafkaPipe
from .requests import Asker, Server
from .values import CONFIGS, Values

# A writer's clock that is wrong must not decide what is kept, or whether a message is taken at all.
_STAMPED = {"message.timestamp.type": "LogAppendTime"}
_CONTROL = {**_STAMPED, "retention.ms": "3600000", "segment.ms": "600000"}  # beats are of use for seconds
_PURGED_AT, _NAME = "purged", "name"
_SEEN_KEPT = 1_000  # ends of feeds
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


async def open_bus(options: KafkaOptions) -> KafkaBus:
    """Connect to the cluster. ConfigError for settings that cannot be, BusUnavailable, BusRefused with the reason."""
    taken = settings(options)
    try:
        context = await asyncio.to_thread(security, taken)
    except OSError as e:
        raise ConfigError(f"a TLS file cannot be used: {e}") from e
    link = Link(taken, context)
    try:
        await link.begin()
        largest = await link.largest_message()
    except BaseException:
        await link.aclose()
        raise
    return KafkaBus(link, min(largest, taken.max_bytes or largest))


class KafkaBus:
    """A `Bus`, `Requests` and `Catalog` over one cluster."""

    def __init__(self, link: Link, largest: int) -> None:
        self.link = link
        self.capabilities = Capabilities(
            suffix_only=True, replay=True, retained=True, groups=True, incarnation=True, requests=True, catalog=True,
            max_message_bytes=largest - ENVELOPE, shows_groups=True,
        )  # fmt: skip
        self._options = link.settings.options
        self._largest = largest
        self._values = Values(link, self._options.valuestopic)
        self._asker = Asker(self)
        self._ids: dict[str, bytes] = {}  # as last seen; what was there before is another topic
        self._checked: set[str] = set()  # topics that take what the broker takes
        self._purges: dict[bytes, int] = {}  # by topic id: the last one that a reader here came across
        self.seen: dict[tuple[bytes, int], Seen] = {}
        """By topic id and the position that a reader here wants next: what it read last."""
        self._open: set[KafkaPipe | KafkaFeed] = set()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    def _at(self, name: str) -> TopicPartition:
        if self._closed:
            raise BusUnavailable("this bus was closed")
        return TopicPartition(kafka_topic(name), self._options.partition)

    async def topic_id(self, name: str) -> bytes | None:
        """What tells a topic from another one of its name; None while there is none."""
        found = await self.link.topic_id(self._at(name).topic)
        if found is not None:
            self._ids[name] = found
        return found

    async def _ensure(self, name: str) -> bytes:
        """The id of a topic, which is made if it is not there."""
        at = self._at(name)
        configs = _CONTROL if is_control(name) else _STAMPED
        if self._options.retention and configs is _STAMPED:
            configs = {**_STAMPED, "retention.ms": str(round(self._options.retention * 1000))}
        found = await self._made(at, configs)
        if name not in self._ids and await self.retained(name, _NAME) is None:
            await self.retain(name, _NAME, b"")
        self._ids[name] = found
        return found

    async def _made(self, at: TopicPartition, configs: dict[str, str]) -> bytes:
        for _ in range(100):
            found = await self.link.topic_id(at.topic)
            if found is not None:
                return found
            await self.link.create(at.topic, at.partition + 1, self._options.replication, configs)
            await asyncio.sleep(0.02)  # until the broker that we ask has heard of it
        raise BusUnavailable(f"the topic {at.topic} is not there, though the broker was asked to make it")

    async def pipe(self, topic: str) -> KafkaPipe:
        """See `Bus.pipe`."""
        at = self._at(topic)
        await self._ensure(topic)  # each time: somebody may have deleted it
        if topic not in self._checked:
            largest = await self.link.largest_of(at.topic)
            if largest < self._largest:
                raise BusRefused(
                    f"the topic {at.topic} takes {largest} bytes at once, the broker {self._largest}: set "
                    f"globalconfig message.max.bytes={largest}, or raise the topic's max.message.bytes"
                )
            self._checked.add(topic)
        pipe = KafkaPipe(self.link, at, self._largest)
        await pipe.open()
        await self._keep(pipe)
        return pipe

    async def _keep(self, opened: KafkaPipe | KafkaFeed) -> None:
        """To be closed with the bus, also if nobody holds it any more: the client's tasks and sockets go on."""
        self._open = {each for each in self._open if not each.closed} | {opened}
        if self._closed:  # while it was opened
            await opened.aclose()
            raise BusUnavailable("this bus was closed")

    async def feed(self, topic: str, start: Start, group: str | None) -> KafkaFeed:
        """See `Bus.feed`."""
        at, topic_id, partitions = await self._readable(topic)
        if group is not None and partitions > 1:
            raise BusRefused(f"{at.topic} has several partitions; a group reads topics of one, so that order is kept")
        comes_from = start.incarnation if isinstance(start, Place) else None
        feed = KafkaFeed(self, topic, at, await self._position(at, start), topic_id, group, comes_from)
        await feed.open()
        await self._keep(feed)
        return feed

    async def _readable(self, topic: str) -> tuple[TopicPartition, bytes, int]:
        """A topic that is made if it is not there: where we read it, its id, and how many partitions it has."""
        at = self._at(topic)
        topic_id = await self._ensure(topic)
        partitions = await self.link.partitions(at.topic)
        if at.partition >= partitions:
            raise BusRefused(
                f"{at.topic} has the partitions {[*range(partitions)]}, and not {at.partition}, which is configured"
            )
        return at, topic_id, partitions

    async def bounds(self, topic: str) -> Bounds:
        """See `Bus.bounds`."""
        at, topic_id, _ = await self._readable(topic)
        first, end = await self.link.bounds(at)
        return Bounds(first, end, incarnation(topic_id, await self.purged_at(topic)))

    async def _position(self, at: TopicPartition, start: Start) -> int:
        if isinstance(start, int | Place):
            return start if isinstance(start, int) else start.position
        first, end = await self.link.bounds(at)
        if isinstance(start, datetime):
            found = await self.link.position_at(at, (start.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1))
            return end if found is None else found
        return first if start == "earliest" else end

    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        """See `Bus.retain`."""
        await self._ensure_values()
        await self._values.put(topic, key, value)

    async def retained(self, topic: str, key: str) -> bytes | None:
        """See `Bus.retained`."""
        await self._ensure_values()
        return await self._values.get(topic, key)

    async def forget(self, topic: str, key: str) -> None:
        """Let go of a retained value whose key is never used again."""
        await self._ensure_values()
        await self._values.forget(topic, key)

    async def _ensure_values(self) -> None:
        if self._closed:
            raise BusUnavailable("this bus was closed")
        if not self._values.there:
            await self._made(TopicPartition(self._options.valuestopic, 0), CONFIGS)
            self._values.there = True

    async def purged_at(self, topic: str) -> int:
        """The position of the last purge, -1 if there was none since the topic was made."""
        found, there = await self.retained(topic, _PURGED_AT), self._ids.get(topic, b"")
        topic_id, mark = found.split(b":") if found else (b"", b"-1")
        return max(self._purges.get(there, -1), int(mark) if topic_id == there.hex().encode() else -1)

    def saw_purge(self, topic_id: bytes, mark: int) -> None:
        """A reader came across the message that a purge leaves, which is there before it is retained where that is."""
        self._purges[topic_id] = max(mark, self._purges.get(topic_id, -1))

    def saw(self, topic_id: bytes, last: Seen) -> None:
        """A feed ended after this message."""
        if len(self.seen) >= _SEEN_KEPT:
            del self.seen[next(iter(self.seen))]
        self.seen[topic_id, last.offset + 1] = last

    async def group_states(self, topic: str) -> Sequence[GroupState]:
        """See `Groups.group_states`. Kafka knows who reads, and not since when."""
        at, _, _ = await self._readable(topic)
        states = []
        for name, hosts in await self.link.groups(at):
            stored = await self.link.committed(name, at)
            position = None if stored is None else stored[0]
            states.append(GroupState(name.removesuffix(f"@{at.topic}"), position, hosts, None))
        return states

    async def request(self, topic: str, data: bytes, timeout: float) -> bytes:
        """See `Requests.request`."""
        return await self._asker.request(topic, data, timeout)

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """See `Requests.serve`."""
        await self.make_for_requests(kafka_topic(topic))
        await Server(self, topic, answer).run()

    async def make_for_requests(self, topic: str) -> None:
        """Make a topic of one partition, whose messages are of use for seconds, unless it is there."""
        if self._closed:
            raise BusUnavailable("this bus was closed")
        await self._made(TopicPartition(topic, 0), _CONTROL)

    async def topics(self) -> Sequence[str]:
        """See `Catalog.topics`: those that were opened by a client of ours and are still there."""
        await self._ensure_values()
        there = set(await self.link.topics())
        return sorted(name for name in await self._values.topics(_NAME) if kafka_topic(name) in there)

    async def purge(self, topic: str) -> None:
        """See `Catalog.purge`."""
        at = self._at(topic)
        topic_id = await self._ensure(topic)
        producer = self.link.producer(1 << 16)
        async with self.link.started(producer, f"a producer for {at.topic}"):
            with words(f"purging {at.topic}"):
                async with asyncio.timeout(self.link.timeout):
                    mark = (await producer.send_and_wait(at.topic, b"", PURGED, at.partition)).offset
        await self.link.stopped(producer)
        await self.retain(topic, _PURGED_AT, f"{topic_id.hex()}:{mark}".encode())
        await self.link.delete_before(at, mark + 1)

    async def aclose(self) -> None:
        """See `Bus.aclose`."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(opened.aclose() for opened in self._open), self._asker.aclose(), self._values.aclose())
        await self.link.aclose()
