"""Requests: a topic that one server at a time reads, and a topic for the answers of each client that asks.

The servers of a topic are one group, so the broker gives it to one of them. A server answers one request after another
and commits each, so that the next server goes on after it; before the group is shared out anew it ends the one at hand.
A request whose server died is given to the next one. A request whose asker no longer waits is passed over. Its age is
measured by the broker's clock alone: a server writes a greeting when it is given the topic, and the broker stamps the
greeting as it stamps requests.

The first request of a client makes its topic for answers, and `aclose` removes it. Its name contains the hour in which
it was made. A client that is open for half a day makes another one, and each client that makes one removes a few that
are a day old: killed clients left them behind. A client whose topic was removed all the same makes another one.

Servers write answers only to topics whose name begins so: nobody can make them write elsewhere. A server has a producer
for each of these topics, because a producer asks the broker for all its topics again and again, and the broker might
make a topic that was removed.

The headers are those of Spring's ReplyingKafkaTemplate, and `timeout`, in milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition

from esp_pubsub._tasks import run_until_one_ends
from esp_pubsub.address import kafka_topic
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable, NoAnswer

from .link import Link, words
from .unpacking import bounded

if TYPE_CHECKING:
    from .bus import KafkaBus

REPLIES = "esp-pubsub.replies."
_REPLY, _NUMBER, _TIMEOUT = "kafka_replyTopic", "kafka_correlationId", "timeout"
_GREETING = ("server", b"")
_REPLACED, _ABANDONED = 12, 24  # hours after a topic for answers was made
_REMOVED = 20  # at once
_OPEN = 16  # topics for answers for which a server has a producer
_WAIT = 1.0
_READ = 1 << 20  # bytes that a read unpacks to, or one batch
_LOOK_EVERY = 0.1
_BY_BROKER = 1  # the client's number for a stamp of the broker's
_DIGITS = 12
_log = logging.getLogger("esp_pubsub.kafka")


_Hear = Callable[[bytes | None, bytes | BusError], None]
"""Takes an answer and the number of its request; without a number it takes an error, which answers all requests."""


class Asker:
    """What a bus has asked and not heard of yet."""

    def __init__(self, bus: KafkaBus) -> None:
        self._bus = bus
        self._numbers = itertools.count(1)
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._answers: asyncio.Task[_Answers] | None = None
        self._there: set[str] = set()  # the topics that have been seen
        self._doubted = False  # a request got no answer: perhaps our topic was removed
        self._closed = False

    async def request(self, topic: str, data: bytes, timeout: float) -> bytes:
        """See `Requests.request`."""
        at = TopicPartition(kafka_topic(topic), 0)
        number = b"%d" % next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout):
                answers = await self._open()
                await self._wait_for(at.topic)
                await answers.ask(at, data, number, timeout)
                return await answer
        except BusUnavailable:
            self._there.discard(at.topic)
            raise
        except TimeoutError:
            self._doubted = True
            raise NoAnswer(f"nobody answered on {topic} within {timeout:g} s", topic=topic, timeout=timeout) from None
        finally:
            del self._waiting[number]
            answer.cancel()

    async def _wait_for(self, topic: str) -> None:
        """Its first server makes a topic; a request would have the broker make another one, of many partitions."""
        while topic not in self._there:
            if await self._bus.link.topic_id(topic) is not None:
                self._there.add(topic)
                return
            await asyncio.sleep(_LOOK_EVERY)

    async def _open(self) -> _Answers:
        """The topic for our answers. A caller may give up waiting for it; it is opened all the same."""
        while not self._closed:
            opening = self._answers
            if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
                opening = self._answers = asyncio.create_task(_Answers.open(self._bus, self._hear))
            answers = await asyncio.shield(opening)
            doubted, self._doubted = self._doubted, False
            if not (answers.ended or self._is_old(answers) or (doubted and not await answers.is_there())):
                return answers
            if self._answers is opening:
                self._answers = None
            await answers.aclose()
        raise BusUnavailable("this bus was closed")

    def _is_old(self, answers: _Answers) -> bool:
        """Whether another topic should take its place, which has to wait while anybody else waits for an answer."""
        return answers.made_at <= _hour() - _REPLACED and len(self._waiting) == 1

    def _hear(self, number: bytes | None, answer: bytes | BusError) -> None:
        """See `_Hear`."""
        for each in self._waiting.values() if number is None else [self._waiting.get(number)]:
            if each is None or each.done():
                continue
            if isinstance(answer, bytes):
                each.set_result(answer)
            else:
                each.set_exception(answer)

    async def aclose(self) -> None:
        """Remove the topic for answers. Bounded."""
        self._closed = True
        opened, self._answers = self._answers, None
        if opened is not None:
            await asyncio.wait([opened])  # each step of it has a bound
            if not opened.cancelled() and opened.exception() is None:
                await opened.result().aclose()


def _hour() -> int:
    return int(time.time()) // 3600


class _Answers:
    """The topic for the answers to one client, and the clients to ask and to read with."""

    def __init__(self, link: Link, topic: str, largest: int, hear: _Hear) -> None:
        self.ended = False
        self.made_at = _hour()
        self._link = link
        self._at = TopicPartition(topic, 0)
        self._hear = hear
        self._producer: AIOKafkaProducer = link.producer(largest)
        self._consumer: AIOKafkaConsumer = link.consumer()
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, bus: KafkaBus, hear: _Hear) -> _Answers:
        """Make a topic for answers, and begin to read it."""
        topic = f"{REPLIES}{_hour()}.{secrets.token_hex(8)}"
        await bus.make_for_requests(topic)
        self = cls(bus.link, topic, bus.capabilities.max_message_bytes, hear)
        async with (
            bus.link.started(self._producer, f"a producer for requests, answered on {topic}"),
            bus.link.started(self._consumer, f"a consumer of {topic}"),
        ):
            self._consumer.assign([self._at])
            self._consumer.seek(self._at, 0)
        self._reading = asyncio.create_task(self._read(), name=f"kafka answers {topic}")
        bus.link.finish(_remove_abandoned(bus.link))  # no request waits for that
        return self

    async def ask(self, at: TopicPartition, data: bytes, number: bytes, timeout: float) -> None:
        """Write a request."""
        waits = b"%d" % max(1, round(timeout * 1000))
        headers = [(_REPLY, self._at.topic.encode()), (_NUMBER, number), (_TIMEOUT, waits)]
        await self._send(at, data, headers)

    async def _send(self, at: TopicPartition, data: bytes, headers: list[tuple[str, bytes]]) -> None:
        with words(f"asking {at.topic}"):
            await self._producer.send_and_wait(at.topic, data, partition=at.partition, headers=headers)

    async def _read(self) -> None:
        try:
            while True:
                with words(f"reading {self._at.topic}"), bounded(_READ):
                    found = await self._consumer.getmany(self._at, timeout_ms=round(_WAIT * 1000))
                for record in found.get(self._at, ()):
                    self._hear(dict(record.headers).get(_NUMBER, b""), record.value or b"")
        except BusError as error:
            self.ended = True
            self._hear(None, error)
            await asyncio.shield(self._link.finish(self._stop()))

    async def is_there(self) -> bool:
        """Whether the topic still exists."""
        return not self.ended and await self._link.topic_id(self._at.topic) is not None

    async def _stop(self) -> None:
        await self._link.stopped(self._consumer)
        await self._link.stopped(self._producer)

    async def aclose(self) -> None:
        """Remove the topic."""
        self.ended = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await asyncio.shield(self._link.finish(self._stop()))
        with suppress(BusError):
            await self._link.remove(self._at.topic)


async def _remove_abandoned(link: Link) -> None:
    """Remove a few topics that are a day old. Trouble, or a right that is missing, is passed over."""
    with suppress(BusError, TimeoutError):
        async with asyncio.timeout(link.timeout):
            found = [topic for topic in await link.topics() if topic.startswith(REPLIES)]
            old = [topic for topic in found if _made_at(topic) <= _hour() - _ABANDONED]
            for topic in random.sample(old, min(len(old), _REMOVED)):
                await link.remove(topic)


def _made_at(topic: str) -> int:
    """The hour in the name of a topic for answers; an hour that never comes if the name has none."""
    hour = topic.removeprefix(REPLIES).partition(".")[0]
    return int(hour) if hour.isdecimal() and len(hour) < _DIGITS else 10**_DIGITS


class Server(ConsumerRebalanceListener):
    """One server of a topic."""

    def __init__(self, bus: KafkaBus, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._link = link = bus.link
        self._largest = bus.capabilities.max_message_bytes
        self._at = TopicPartition(kafka_topic(topic), 0)
        self._answer = answer
        self._group = f"esp-pubsub.servers@{self._at.topic}"
        self._trouble: BusError | None = None
        options = link.settings.options
        session = round(options.session * 1000)
        self._busy = asyncio.Lock()
        self._producers: dict[str, AIOKafkaProducer] = {}  # the order in which they were last needed
        self._has_begun = asyncio.Event()  # the topic is ours, and the broker's time is known
        self._losses = 0
        self._handled = asyncio.Event()
        self._done = self._stored = 0  # the next request that is to be handled
        self._storing = asyncio.Lock()
        self._ahead = 0.0  # by how much the broker's clock is ahead of ours
        self._consumer: AIOKafkaConsumer = link.consumer(
            group_id=self._group,
            session_timeout_ms=session,
            heartbeat_interval_ms=min(round(link.settings.heartbeat * 1000), session // 3),
            max_poll_interval_ms=round(options.lease * 1000),
            auto_offset_reset="earliest",
        )

    async def run(self) -> None:
        """Answer until cancelled."""
        try:
            async with self._link.started(self._consumer, f"serving {self._at.topic}"):
                pass
            self._consumer.subscribe([self._at.topic], listener=self)
            await run_until_one_ends(self._serve(), self._commit_meanwhile())
        finally:
            await asyncio.shield(self._link.finish(self._stop()))

    async def _serve(self) -> None:
        while self._trouble is None:
            with words(f"serving {self._at.topic}"), bounded(_READ):
                found = await self._consumer.getmany(timeout_ms=round(_WAIT * 1000), max_records=1)
            losses = self._losses
            for record in found.get(self._at, ()):
                await self._has_begun.wait()
                async with self._busy:
                    if losses == self._losses:  # else another server has it
                        await self._handle(record)
                        self._handled.set()
        raise self._trouble

    async def _commit_meanwhile(self) -> None:
        while True:
            await self._handled.wait()
            self._handled.clear()
            await self._commit()

    async def _commit(self) -> None:
        """Store how far requests were handled. In trouble some are handled once more, by whoever serves next."""
        async with self._storing:
            done = self._done
            if done > self._stored:
                with suppress(BusError), words(f"serving {self._at.topic}"):
                    async with asyncio.timeout(self._link.timeout):
                        await self._consumer.commit({self._at: done})
                self._stored = done

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """aiokafka calls this before a rebalance, which begins when this returns."""
        async with self._busy:
            await self._commit()
            self._losses += 1
            self._has_begun.clear()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """aiokafka calls this after a rebalance."""
        if self._at in assigned:
            self._done = self._stored = 0
            try:
                self._ahead = await self._send(self._at.topic, b"", [_GREETING]) - time.monotonic()
            except BusError as error:  # which the client would only log
                self._trouble = error
            self._has_begun.set()

    async def _handle(self, record: Any) -> None:
        headers = dict(record.headers)
        reply, number = headers.get(_REPLY, b"").decode(errors="replace"), headers.get(_NUMBER)
        is_asked = reply.startswith(REPLIES) and number is not None
        if is_asked and self._is_waited_for(record, headers.get(_TIMEOUT, b"")):
            answer = await self._answer(record.value or b"")
            try:
                await self._reply(reply, answer, number)
            finally:  # its asker may have the answer already when this is cancelled
                self._done = record.offset + 1
        self._done = record.offset + 1

    async def _reply(self, topic: str, answer: bytes, number: bytes | None) -> None:
        try:
            if topic in self._producers or await self._link.topic_id(topic) is not None:  # else its asker is gone
                await self._send(topic, answer, [(_NUMBER, number or b"")])
        except BusError as error:
            _log.warning("an answer to a request on %s was not sent: %s", self._at.topic, error)

    def _is_waited_for(self, record: Any, waits: bytes) -> bool:
        """Whether its asker still waits, if it says for how long, and the broker stamped it."""
        if record.timestamp_type != _BY_BROKER or not waits.isdigit() or len(waits) > _DIGITS:
            return True
        return bool((record.timestamp + int(waits)) / 1000 >= time.monotonic() + self._ahead)

    async def _send(self, topic: str, data: bytes, headers: list[tuple[str, bytes]]) -> float:
        """Write to a topic. Returns the broker's time."""
        producer = self._producers.pop(topic, None)
        if producer is None:
            producer = self._link.producer(self._largest)
            async with self._link.started(producer, f"a producer for {topic}"):
                pass
        self._producers[topic] = producer
        if len(self._producers) > _OPEN:
            await self._link.stopped(self._producers.pop(next(iter(self._producers))))
        try:
            with words(f"writing to {topic}"):
                sent = await producer.send_and_wait(topic, data, partition=0, headers=headers)
        except BusRefused:
            raise
        except BusError:
            self._producers.pop(topic, None)
            await self._link.stopped(producer)
            raise
        return float(sent.timestamp) / 1000

    async def _stop(self) -> None:
        await self._commit()
        await self._link.stopped(self._consumer)  # before its producers: it calls us until then
        while self._producers:
            await self._link.stopped(self._producers.popitem()[1])
