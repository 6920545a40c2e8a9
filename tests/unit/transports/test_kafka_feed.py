"""A Kafka feed over a client that is not in good order: silent, cancelled, without its topic, without its group."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError, OffsetOutOfRangeError

from esp_pubsub.bus import Break, Message, Place
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.testing import run_virtual
from esp_pubsub.transports.kafka.feed import KafkaFeed, Seen, incarnation
from esp_pubsub.transports.kafka.group import Membership

AT = TopicPartition("t", 0)
ANSWERED = "t: fetches were not answered"


def record(offset: int) -> Any:
    return SimpleNamespace(key=None, offset=offset, timestamp=offset, value=b"x")


class Consumer:
    """What a feed asks of its client. `answered`: whether the broker answers fetches."""

    def __init__(self, answered: bool = True, *records: int) -> None:
        self.answered = answered
        self.records = list(records)
        self.place: int | None = None
        self.ends_at = 1_000
        self.polled = 0
        self._subscription = SimpleNamespace()

    def seek(self, at: TopicPartition, position: int) -> None:
        self.place = position

    def last_poll_timestamp(self, at: TopicPartition) -> int:
        self.polled += self.answered
        return self.polled

    def assign(self, places: list[TopicPartition]) -> None: ...

    async def getmany(self, at: TopicPartition, *, timeout_ms: int, max_records: int | None) -> Any:
        if self.place is not None and self.place > self.ends_at:
            raise OffsetOutOfRangeError
        if not self.records and timeout_ms:
            await asyncio.sleep(timeout_ms / 1000)
        found, self.records = self.records, []
        return {at: [record(each) for each in found]} if found else {}


class Bus:
    """`ids`: what the broker says of the topic's id, one answer after the other; the last one forever."""

    def __init__(self, *ids: bytes | BaseException | None, timeout: float = 5.0, end: int = 100) -> None:
        self.ids = list(ids)
        self.end = end
        self.seen: dict[Any, Seen] = {}
        self.link = SimpleNamespace(
            timeout=timeout, bounds=self.bounds, stopped=self.stopped,
            settings=SimpleNamespace(options=SimpleNamespace(lease=60.0)),
        )  # fmt: skip

    async def topic_id(self, name: str) -> bytes | None:
        said = self.ids.pop(0) if len(self.ids) > 1 else self.ids[0]
        if said == b"":
            await asyncio.sleep(self.link.timeout)
            raise BusUnavailable("no answer")
        if isinstance(said, BaseException):
            raise said
        return said

    async def bounds(self, at: TopicPartition) -> tuple[int, int]:
        return 0, self.end

    async def stopped(self, consumer: Any) -> None: ...

    def saw(self, topic_id: bytes, last: Seen) -> None:
        self.seen[topic_id, last.offset + 1] = last

    async def purged_at(self, name: str) -> int:
        return -1


def feed(bus: Bus, consumer: Any, group: str | None = None) -> KafkaFeed:
    made = KafkaFeed(bus, "n", AT, 90, b"A", group)  # type: ignore[arg-type]
    made._consumer = consumer
    made.place = Place(90, incarnation(b"A", -1))
    made._answered_at = made._asked_at = made._now()
    made._looked_at = made._now() - 10
    return made


def on_a_virtual_clock(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(lambda init: scene())


async def polled(feed: KafkaFeed, every: float, rest: float = 0.0) -> None:
    """Read with a short patience, over and over."""
    while True:
        try:
            async with asyncio.timeout(every):
                await feed.read(10, 100)
        except TimeoutError:
            await asyncio.sleep(rest)


def test_a_broker_that_answers_no_fetch_is_told_to_a_reader_of_short_patience_too() -> None:
    async def scene() -> None:
        for every, rest in ((0.15, 0.0), (2.4, 0.0), (0.1, 2.0), (30.0, 0.0)):
            ours = feed(Bus(b"A"), Consumer(answered=False))
            begun = ours._now()
            with pytest.raises(BusUnavailable, match=ANSWERED):
                await polled(ours, every, rest)
            assert 5.0 < ours._now() - begun < 10.0

    on_a_virtual_clock(scene)


def test_a_broker_that_answers_fetches_is_not_called_silent_however_it_is_read() -> None:
    async def scene() -> None:
        for every, rest in ((0.15, 0.0), (2.4, 0.0), (0.1, 2.0), (0.3, 20.0), (30.0, 0.0)):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(60):
                    await polled(feed(Bus(b"A"), Consumer()), every, rest)

    on_a_virtual_clock(scene)


def test_a_reader_that_was_away_is_given_what_came_meanwhile_and_no_error() -> None:
    async def scene() -> None:
        ours = feed(Bus(b"A"), Consumer(False, 90, 91))
        await asyncio.sleep(100)
        assert [message.position for message in await ours.read(10, 100)] == [90, 91]  # type: ignore[union-attr]

    on_a_virtual_clock(scene)


def test_who_leaves_questions_unanswered_is_told_to_a_reader_of_short_patience_too() -> None:
    async def scene() -> None:
        ours = feed(Bus(b""), Consumer())
        with pytest.raises(BusUnavailable, match="no answer"):
            await polled(ours, 0.15)
        assert ours._now() < 6.0
        await ours.aclose()

    on_a_virtual_clock(scene)


def test_a_question_that_is_under_way_ends_with_the_feed() -> None:
    async def scene() -> None:
        ours = feed(Bus(b""), Consumer())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ours.read(10, 100)
        await ours.aclose()
        assert len(asyncio.all_tasks()) == 1

    on_a_virtual_clock(scene)


def test_one_broker_that_does_not_know_the_topic_for_a_moment_makes_no_break() -> None:
    async def scene() -> None:
        ours = feed(Bus(None, None, b"A"), Consumer(True, 90))
        assert await ours.read(10, 100) == [Message(90, b"x")]

    on_a_virtual_clock(scene)


def test_a_topic_that_is_made_anew_while_nobody_knows_it_is_a_break() -> None:
    async def scene() -> None:
        consumer = Consumer()
        ours = feed(Bus(None, b"B"), consumer)
        [broken] = await ours.read(10, 100)
        assert isinstance(broken, Break)
        assert broken.incarnation
        assert consumer.place == 0

    on_a_virtual_clock(scene)


def test_a_topic_that_is_made_anew_and_ends_in_front_of_its_reader_is_one_break() -> None:
    async def scene() -> None:
        consumer = Consumer(True, 90)
        ours = feed(Bus(b"A", b"B", end=5), consumer)
        await ours.read(10, 100)
        ours._seek(91)
        consumer.ends_at = 5
        [broken] = await ours.read(10, 100)
        assert isinstance(broken, Break)
        assert broken.incarnation
        assert (consumer.place, ours.place) == (0, (0, incarnation(b"B", -1)))
        consumer.records = [0, 1]
        ours._looked_at -= 10
        assert [message.position for message in await ours.read(10, 100)] == [0, 1]  # type: ignore[union-attr]

    on_a_virtual_clock(scene)


def test_a_log_that_lost_its_end_is_read_on_from_there() -> None:
    async def scene() -> None:
        consumer = Consumer()
        ours = feed(Bus(b"A", end=80), consumer)
        ours._seek(90)
        consumer.ends_at = 80
        [broken] = await ours.read(10, 100)
        assert broken == Break("the topic lost what it had from 80 to 90", None, cut=80)
        assert (consumer.place, ours.place) == (80, (80, incarnation(b"A", -1)))

    on_a_virtual_clock(scene)


class Log(Consumer):
    """Messages 90 to 119 of a topic, of which the client is unsure again with each fetch."""

    unsure: Callable[[], None]

    async def getmany(self, at: TopicPartition, *, timeout_ms: int, max_records: int | None) -> Any:
        await asyncio.sleep(0.01)
        self.unsure()
        assert self.place is not None
        found = [record(each) for each in range(self.place, 120)][:max_records]
        self.place += len(found)
        return {at: found} if found else {}


def test_a_client_that_is_unsure_of_its_topics_all_the_time_hinders_no_reader() -> None:
    async def scene() -> None:
        consumer = Log()
        ours = feed(Bus(b"A"), consumer)
        consumer.unsure, consumer.place = ours._be_unsure, 90
        read: list[int] = []
        async with asyncio.timeout(10):
            while len(read) < 30:
                read += [message.position for message in await ours.read(4, 100)]  # type: ignore[union-attr]
        assert read == [*range(90, 120)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await ours.read(4, 100)
        await ours.aclose()

    on_a_virtual_clock(scene)


def test_a_log_that_lost_its_end_and_has_grown_again_is_read_from_where_it_has_grown() -> None:
    async def scene() -> None:
        async def position_at(at: TopicPartition, micros: int) -> int:
            assert micros == (95 + 1) * 1_000, "younger than what was read last"
            return 93

        consumer = Log()
        ours = feed(Bus(b"A"), consumer)
        ours._link.position_at = position_at  # type: ignore[method-assign]
        consumer.unsure, consumer.place = lambda: None, 90
        await ours.read(6, 100)
        consumer.unsure = ours._be_unsure
        await ours.aclose()
        again = KafkaFeed(ours._bus, "n", AT, 96, b"A", None, NOW)
        again._consumer = consumer  # type: ignore[assignment]
        ours._bus.seen[b"A", 96] = Seen(95, 95, b"another")
        await again._begin(None)
        assert consumer.place == 95
        again._answered_at = again._asked_at = again._looked_at = again._now()
        [broken] = await again.read(10, 100)
        assert broken == Break("the topic lost what it had from 93 to 96", None, cut=93)
        assert (consumer.place, again.place) == (93, (93, NOW))

    on_a_virtual_clock(scene)


NOW = incarnation(b"A", -1)


@pytest.mark.parametrize(
    ("position", "comes_from", "stored", "begins", "cut"),
    [
        (90, NOW, None, 80, True),
        (80, NOW, None, 80, False),
        (90, NOW, 70, 70, True),
        (70, NOW, 90, 80, True),
        (0, None, 90, 80, True),
        (90, None, 70, 70, False),
        (90, None, None, 90, False),  # a number waits for its message
    ],
)
def test_a_reader_that_comes_back_to_a_log_that_lost_its_end_is_told(
    position: int, comes_from: int | None, stored: int | None, begins: int, cut: bool
) -> None:
    async def scene() -> None:
        consumer = Consumer()
        ours = KafkaFeed(Bus(b"A", end=80), "n", AT, position, b"A", None, comes_from)  # type: ignore[arg-type]
        ours._consumer = consumer  # type: ignore[assignment]
        await ours._begin(None if stored is None else (stored, b"A", b"state"))
        assert (ours.place, consumer.place) == ((begins, NOW), min(begins, 80))
        assert [broken.cut for broken in ours._ahead] == ([80] if cut else [])  # type: ignore[union-attr]

    on_a_virtual_clock(scene)


def test_a_topic_that_is_gone_is_told_after_the_timeout() -> None:
    async def scene() -> None:
        ours = feed(Bus(None), Consumer())
        with pytest.raises(BusUnavailable, match="t is not there any more"):
            await ours.read(10, 100)
        assert 5.0 <= ours._now() < 7.0

    on_a_virtual_clock(scene)


def test_a_feed_stands_behind_what_it_gave_out_and_a_topic_made_anew_is_told_alone() -> None:
    async def scene() -> None:
        consumer = Consumer(True, 90, 91)
        ours = feed(Bus(b"A"), consumer)
        await ours.read(1, 100)
        assert ours.place == (91, incarnation(b"A", -1))
        ours._bus.ids = [b"B"]  # type: ignore[attr-defined]
        ours._looked_at -= 10
        await ours._look()
        ours._ahead.append(Message(0, b"new"))
        assert [item.position for item in await ours.read(10, 100)] == [91]  # type: ignore[union-attr]
        assert ours.place == (92, incarnation(b"A", -1))
        [broken] = await ours.read(10, 100)
        assert isinstance(broken, Break)
        assert ours.place == (0, incarnation(b"B", -1))
        await ours.read(10, 100)
        assert ours.place == (1, incarnation(b"B", -1))
        await ours.aclose()

    on_a_virtual_clock(scene)


async def test_a_partition_that_was_just_lost_is_trouble_and_no_error_of_the_client() -> None:
    def seek(at: TopicPartition, position: int) -> None:
        raise IllegalStateError("No current assignment")

    ours = feed(Bus(b"B"), SimpleNamespace(seek=seek))
    with pytest.raises(BusUnavailable, match="IllegalState"):
        await ours.read(10, 100)


# groups


def consumer(fetched: Callable[..., Any]) -> AIOKafkaConsumer:
    """The client's own, with nothing behind it."""
    made = AIOKafkaConsumer(bootstrap_servers="h:1", group_id="g")
    made._coordinator = SimpleNamespace(check_errors=lambda: None)
    made._fetcher = SimpleNamespace(fetched_records=fetched)
    made._closed = True  # for the client's own complaint at the end
    return made


@pytest.mark.parametrize("how", ["cancelled", "failed", "shared out"])
async def test_a_read_that_did_not_return_does_not_count_as_reading_for_ever(how: str) -> None:
    """The client would keep a reader that hangs in his group, whatever `lease` says."""

    async def fetched(*_: Any, **__: Any) -> Any:
        if how == "failed":
            raise IllegalStateError("x")
        if how == "cancelled":
            raise asyncio.CancelledError
        await asyncio.get_running_loop().create_future()

    client = consumer(fetched)
    client._closed = False
    ours = feed(Bus(b"A"), client)
    with pytest.raises((BusUnavailable, asyncio.CancelledError)):
        assert await ours._getmany(AT, 0.0) == {}
        raise asyncio.CancelledError
    assert client._subscription._fetch_count == 0
    client._closed = True


def test_a_group_that_is_shared_out_without_end_is_told_when_its_broker_is_gone() -> None:
    async def scene() -> None:
        async def getmany(*_: Any, **__: Any) -> Any:
            await asyncio.get_running_loop().create_future()

        async def look_up() -> Any:
            raise BusUnavailable("the group's broker is gone")

        client = SimpleNamespace(getmany=getmany, subscription=lambda: {"t"}, _subscription=SimpleNamespace())
        ours = feed(Bus(b"A"), client, "g")
        assert ours._membership is not None
        ours._membership.look_up = look_up  # type: ignore[method-assign]
        with pytest.raises(BusUnavailable, match="the group's broker is gone"):
            await ours.read(10, 100)
        assert 5.0 < ours._now() < 7.0

    on_a_virtual_clock(scene)


class Committing:
    def __init__(self) -> None:
        self.positions: list[int] = []

    async def commit(self, offsets: dict[TopicPartition, Any]) -> None:
        self.positions.append(offsets[AT].offset)


def membership(retain: Callable[..., Any], forgotten: list[str]) -> Membership:
    async def forget(name: str, key: str) -> None:
        forgotten.append(key)

    bus: Any = SimpleNamespace(link=SimpleNamespace(timeout=5.0), retain=retain, forget=forget)
    made = Membership(bus, "n", "g", AT)
    made.on_partitions_assigned([AT])
    return made


async def test_a_reader_that_lost_its_group_while_it_retained_a_state_stores_no_position() -> None:
    async def retain(*_: Any) -> None:
        ours.on_partitions_revoked([AT])
        ours.on_partitions_assigned([AT])

    ours, client = membership(retain, []), Committing()
    with pytest.raises(BusUnavailable, match="given anew"):
        await ours.store(client, 101, b"id", b"s" * 4_000)  # type: ignore[arg-type]
    assert client.positions == []


async def test_of_large_states_the_last_one_is_kept_and_the_others_are_let_go() -> None:
    retained: list[str] = []
    forgotten: list[str] = []

    async def retain(name: str, key: str, state: bytes) -> None:
        retained.append(key)

    ours, client = membership(retain, forgotten), Committing()
    for position in range(3):
        await ours.store(client, position, b"id", b"s" * 4_000)  # type: ignore[arg-type]
    assert forgotten == retained[:-1]
    assert len(set(retained)) == 3
    await ours.store(client, 3, b"id", b"small")  # type: ignore[arg-type]
    assert forgotten == retained


async def test_nobody_is_told_of_a_commit_that_fails_after_nobody_waits_for_it_any_more() -> None:
    """aiokafka shields what it sends, so it goes on after its caller was cancelled."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
    fails = asyncio.Event()

    async def _do_commit_offsets() -> None:
        await fails.wait()
        raise IllegalStateError("x")

    class Shielding(Committing):
        async def commit(self, offsets: dict[TopicPartition, Any]) -> None:
            await asyncio.shield(_do_commit_offsets())

    async def retain(*_: Any) -> None: ...

    storing = asyncio.ensure_future(membership(retain, []).store(Shielding(), 1, b"id", b"s"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    storing.cancel()
    await asyncio.wait([storing])
    fails.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert told == []
