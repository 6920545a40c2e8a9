"""The Kafka driver's pipes and feeds as the bus opens them, and its retained values, over a broker that is none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from aiokafka import TopicPartition
from aiokafka.errors import ConsumerStoppedError, OffsetOutOfRangeError

from esp_pubsub.errors import BusRefused, BusUnavailable
from esp_pubsub.transports.kafka import bus as bus_module
from esp_pubsub.transports.kafka.bus import KafkaBus
from esp_pubsub.transports.kafka.link import Link
from esp_pubsub.transports.kafka.options import KafkaOptions, settings
from esp_pubsub.transports.kafka.pipe import KafkaPipe
from esp_pubsub.transports.kafka.values import Values

NAME = "x:1/a/b/c/I"
AT = TopicPartition("t", 3)


class Opened:
    """A pipe or a feed that was opened."""

    closed = False

    def __init__(self, *_: Any) -> None: ...

    async def open(self) -> None: ...

    async def aclose(self) -> None:
        self.closed = True


class Cluster:
    """`topic`: the id of the one topic, None if it is not there; `largest`: what it takes."""

    def __init__(self) -> None:
        self.topic: bytes | None = b"A"
        self.largest: int | Exception = 1_048_588
        self.made = 0

    def bus(self) -> KafkaBus:
        made = KafkaBus(Link(settings(KafkaOptions("h:1")), None), 1_048_588)
        for name in ("topic_id", "create", "largest_of", "partitions", "bounds"):
            setattr(made.link, name, getattr(self, name))
        made.retained = self.retained  # type: ignore[method-assign]
        return made

    async def topic_id(self, topic: str) -> bytes | None:
        return self.topic

    async def create(self, *_: Any) -> None:
        self.made += 1
        self.topic = b"made"

    async def largest_of(self, topic: str) -> int:
        if isinstance(self.largest, Exception):
            raise self.largest
        return self.largest

    async def partitions(self, topic: str) -> int:
        return 1

    async def bounds(self, at: TopicPartition) -> tuple[int, int]:
        return 0, 100

    async def retained(self, topic: str, key: str) -> bytes | None:
        return b""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(bus_module, "KafkaPipe", Opened)
    monkeypatch.setattr(bus_module, "KafkaFeed", Opened)
    return Cluster()


async def test_a_topic_that_was_deleted_is_made_again_for_the_next_pipe(cluster: Cluster) -> None:
    bus = cluster.bus()
    await bus.pipe(NAME)
    cluster.topic = None
    await bus.pipe(NAME)
    assert cluster.made == 1


async def test_what_a_topic_takes_is_compared_also_if_it_was_read_first(cluster: Cluster) -> None:
    bus = cluster.bus()
    await bus.feed(NAME, "latest", None)
    cluster.largest = 50_000
    with pytest.raises(BusRefused, match="takes 50000 bytes"):
        await bus.pipe(NAME)


async def test_what_a_topic_takes_is_asked_again_if_that_failed_once(cluster: Cluster) -> None:
    bus = cluster.bus()
    cluster.largest = BusUnavailable("once")
    with pytest.raises(BusUnavailable):
        await bus.pipe(NAME)
    cluster.largest = 50_000
    with pytest.raises(BusRefused):
        await bus.pipe(NAME)


async def test_a_purge_that_a_reader_came_across_counts_before_it_is_retained(cluster: Cluster) -> None:
    bus = cluster.bus()
    await bus.topic_id(NAME)
    assert await bus.purged_at(NAME) == -1
    bus.saw_purge(b"A", 40)
    bus.saw_purge(b"A", 30)
    assert await bus.purged_at(NAME) == 40
    cluster.topic = b"B"
    await bus.topic_id(NAME)
    assert await bus.purged_at(NAME) == -1


async def test_a_bus_that_is_closed_while_it_opens_something_keeps_nothing_of_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = cluster.bus()
    made: list[Any] = []

    async def open_late(self: Opened) -> None:
        made.append(self)
        await bus.aclose()

    monkeypatch.setattr(Opened, "open", open_late)
    with pytest.raises(BusUnavailable, match="closed"):
        await bus.pipe(NAME)
    assert [each.closed for each in made] == [True]


# pipes


async def test_an_error_from_inside_the_client_ends_a_pipe_and_not_in_silence() -> None:
    async def send_batch(*_: Any, **__: Any) -> Any:
        raise AssertionError("Unrecognized partition")

    batch = SimpleNamespace(append=lambda **_: 1, close=lambda: None)
    producer = SimpleNamespace(create_batch=lambda: batch, send_batch=send_batch)
    pipe = KafkaPipe(SimpleNamespace(timeout=5.0, producer=lambda size: producer), AT, 1_000)  # type: ignore[arg-type]
    sending = asyncio.create_task(pipe._send())
    await pipe.write([b"x"])
    with pytest.raises(BusUnavailable, match="Unrecognized partition"):
        await pipe.confirmed(0)
    await sending


# retained values


class ValuesTopic:
    """A compacted topic in memory, and as much of a client as reads and writes it."""

    def __init__(self) -> None:
        self.log: list[tuple[bytes, bytes | None]] = []
        self.position_now = 0
        self.started_anew = 0
        self.timeout = 1.0

    async def bounds(self, at: TopicPartition) -> tuple[int, int]:
        return 0, len(self.log)

    def consumer(self) -> Any:
        self.started_anew += 1
        return self

    def producer(self, size: int) -> Any:
        return self

    async def start(self) -> None: ...

    def started(self, client: Any, what: str) -> Any:
        return Link(settings(KafkaOptions("h:1")), None).started(self, what)

    async def stop(self) -> None: ...

    async def stopped(self, client: Any) -> None: ...

    def assign(self, at: Any) -> None: ...

    def seek(self, at: TopicPartition, position: int) -> None:
        self.position_now = position

    async def position(self, at: TopicPartition) -> int:
        return self.position_now

    async def getmany(self, at: TopicPartition, *, timeout_ms: int) -> Any:
        if self.position_now > len(self.log):
            raise OffsetOutOfRangeError({at: self.position_now})
        found = [SimpleNamespace(key=key, value=value) for key, value in self.log[self.position_now :]]
        self.position_now = len(self.log)
        return {at: found}

    async def send_and_wait(self, topic: str, value: bytes | None, key: bytes, partition: int) -> None:
        self.log.append((key, value))

    def kept(self) -> dict[bytes, bytes]:
        """What compaction leaves for good."""
        return {key: value for key, value in dict(self.log).items() if value is not None}


async def test_what_is_let_go_leaves_nothing_on_the_topic_and_nothing_in_memory() -> None:
    topic = ValuesTopic()
    values = Values(topic, "values")  # type: ignore[arg-type]
    for number in range(100):
        await values.put("t", f"state-{number}", b"s" * 3_000)
        await values.forget("t", f"state-{number}")
    await values.put("t", "schema", b"its")
    assert await values.get("t", "state-7") is None
    assert list(topic.kept()) == list(values._last) == [b"t|schema"]


async def test_a_value_that_is_retained_no_more_keeps_its_number() -> None:
    """A second copy of what was written before may come late, and must not be taken for news."""
    topic = ValuesTopic()
    values = Values(topic, "values")  # type: ignore[arg-type]
    await values.put("t", "schema", b"its")
    await values.put("t", "schema", None)
    topic.log.append((b"t|schema", msgpack.packb([1, b"its"])))
    assert await values.get("t", "schema") is None


async def test_values_of_a_topic_made_anew_are_read_from_its_beginning() -> None:
    topic = ValuesTopic()
    values = Values(topic, "values")  # type: ignore[arg-type]
    for number in range(9):
        await values.put("t", "schema", b"%d" % number)
    values.there = True
    topic.log = [(b"t|schema", msgpack.packb([1, b"new"]))]
    assert await values.get("t", "schema") == b"new"


async def test_after_trouble_values_are_read_by_a_new_client_of_a_topic_that_is_looked_for_again() -> None:
    topic = ValuesTopic()
    values = Values(topic, "values")  # type: ignore[arg-type]
    await values.put("t", "schema", b"its")
    values.there = True
    working, topic.getmany = topic.getmany, None  # type: ignore[assignment,method-assign]
    await topic.send_and_wait("", b"foreign", b"", 0)
    with pytest.raises(BusUnavailable):
        await values.get("t", "schema")
    assert not values.there
    topic.getmany = working  # type: ignore[method-assign]
    assert await values.get("t", "schema") == b"its"
    assert topic.started_anew == 2


async def test_values_that_are_closed_while_they_are_asked_for_are_trouble() -> None:
    topic = ValuesTopic()
    values = Values(topic, "values")  # type: ignore[arg-type]
    await values.put("t", "schema", b"its")

    async def position_while_closed(at: TopicPartition) -> int:
        await values.aclose()
        return 0

    async def stopped(at: TopicPartition, *, timeout_ms: int) -> Any:
        raise ConsumerStoppedError

    topic.position, topic.getmany = position_while_closed, stopped  # type: ignore[method-assign]
    for _ in range(2):  # also by who waited in line
        with pytest.raises(BusUnavailable):
            await values.get("t", "schema")
    assert values._consumer is None
