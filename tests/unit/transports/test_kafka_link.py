"""What brokers answer when they are not in good order, and what the client makes of settings that are odd."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import NodeNotReadyError

from esp_pubsub.errors import BusRefused, BusUnavailable, ConfigError
from esp_pubsub.testing.virtual import run_virtual
from esp_pubsub.transports.kafka.client import paced
from esp_pubsub.transports.kafka.link import Link, security, words
from esp_pubsub.transports.kafka.options import KafkaOptions, settings

AT = TopicPartition("t", 0)
NOT_COORDINATOR, LOADING, UNKNOWN_TOPIC, NO_RIGHT_TO_TOPIC = 16, 14, 3, 29


def link(**options: Any) -> Link:
    return Link(settings(KafkaOptions("h:1", **options)), None)


def with_brokers(link: Link, answers: Callable[[int, Any], Any], nodes: int = 1) -> Link:
    """`answers` says what a broker answers; None: nothing, ever."""

    async def send(node: int, request: Any) -> Any:
        if (answer := answers(node, request)) is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(answer, Exception):
            raise answer
        return answer

    brokers = [SimpleNamespace(nodeId=node) for node in range(nodes)]
    asker = SimpleNamespace(_client=SimpleNamespace(cluster=SimpleNamespace(brokers=lambda: brokers), send=send))

    async def asking() -> Any:
        return None, asker

    link._asking = asking  # type: ignore[method-assign]
    return link


def topic(error: int, *, id: bytes = b"", partitions: int = 0) -> Any:
    return SimpleNamespace(topics=[(error, "t", id, False, [()] * partitions, 0, {})])


def group(*, error: int = 0, its: int = 0, offset: int = -1, text: str = "") -> Callable[[int, Any], Any]:
    def answers(node: int, request: Any) -> Any:
        if "Coordinator" in type(request).__name__:
            return SimpleNamespace(error_code=0, coordinator_id=node)
        return SimpleNamespace(error_code=error, topics=[] if error else [("t", [(0, offset, text, its)])])

    return answers


@pytest.mark.parametrize("error", [NOT_COORDINATOR, LOADING])
async def test_a_coordinator_that_cannot_tell_is_no_group_that_stored_nothing(error: int) -> None:
    with pytest.raises(BusUnavailable, match="position of group g"):
        await with_brokers(link(), group(error=error)).committed("g", AT)
    with pytest.raises(BusUnavailable, match="position of group g"):
        await with_brokers(link(), group(its=error)).committed("g", AT)


async def test_what_a_group_stored_is_its_position_and_text() -> None:
    assert await with_brokers(link(), group(offset=7, text="x")).committed("g", AT) == (7, "x")
    assert await with_brokers(link(), group()).committed("g", AT) is None


async def test_a_topic_that_one_broker_does_not_know_yet_is_no_topic_without_partitions() -> None:
    with pytest.raises(BusUnavailable, match="UnknownTopic"):
        await with_brokers(link(), lambda *_: topic(UNKNOWN_TOPIC)).partitions("t")
    assert await with_brokers(link(), lambda *_: topic(0, partitions=3)).partitions("t") == 3


async def test_a_topic_has_no_id_only_where_the_broker_says_that_there_is_no_topic() -> None:
    assert await with_brokers(link(), lambda *_: topic(0, id=b"id")).topic_id("t") == b"id"
    assert await with_brokers(link(), lambda *_: topic(UNKNOWN_TOPIC)).topic_id("t") is None
    with pytest.raises(BusRefused, match="Authorization"):
        await with_brokers(link(), lambda *_: topic(NO_RIGHT_TO_TOPIC)).topic_id("t")


async def test_a_question_that_one_broker_leaves_unanswered_goes_to_another_one_and_stays_there() -> None:
    asked: list[int] = []

    def answers(node: int, request: Any) -> Any:
        asked.append(node)
        return {0: None, 1: NodeNotReadyError()}.get(node, topic(0, id=b"id"))

    ours = with_brokers(link(timeout=0.3), answers, 3)
    assert await ours.topic_id("t") == b"id"
    assert asked[-1] == 2
    asked.clear()
    assert await ours.topic_id("t") == b"id"
    assert asked == [2]


async def test_a_question_that_nobody_answers_is_trouble() -> None:
    with pytest.raises(BusUnavailable):
        await with_brokers(link(timeout=0.1), lambda *_: None, 3).topic_id("t")
    with pytest.raises(BusUnavailable, match="no broker is known"):
        await with_brokers(link(), lambda *_: None, 0).topic_id("t")


async def test_making_a_topic_without_a_known_controller_is_trouble() -> None:
    ours = link()
    admin = AIOKafkaAdminClient(bootstrap_servers="h:1")

    async def nothing_new() -> bool:
        return True

    async def asking() -> Any:
        return admin, None

    admin._client.force_metadata_update = nothing_new
    ours._asking = asking  # type: ignore[method-assign]
    with pytest.raises(BusUnavailable, match="no controller"):
        await ours.create("t", 1, 0, {})


async def test_a_start_without_an_end_is_given_up_and_stopped() -> None:
    """So an idempotent producer starts on a frozen broker."""
    ours, stopped, cancelled = link(timeout=0.1), asyncio.Event(), asyncio.Event()

    class Endless:
        async def start(self) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async def stop(self) -> None:
            assert cancelled.is_set()
            stopped.set()

    with pytest.raises(BusUnavailable, match="a producer"):
        async with ours.started(Endless(), "a producer"):
            pass
    assert stopped.is_set()
    stopped.clear()
    cancelled.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), ours.started(Endless(), "a producer"):
            pass
    await ours.aclose()
    assert stopped.is_set()


@pytest.mark.parametrize("error", [AssertionError("x"), UnicodeError("x"), AttributeError("x"), TimeoutError("x")])
def test_whatever_comes_from_inside_the_client_is_said_in_our_words(error: Exception) -> None:
    with pytest.raises(BusUnavailable, match=f"reading: {type(error).__name__}: x") as caught, words("reading"):
        raise error
    assert caught.value.__cause__ is error


def test_what_was_said_in_our_words_stays_as_it_is() -> None:
    refused = BusRefused("no")
    with pytest.raises(BusRefused) as caught, words("reading"):
        raise refused
    assert caught.value is refused


@pytest.mark.parametrize("port", ["0", "99999", "123456789"])
def test_a_port_that_cannot_be_is_refused_as_a_setting(port: str) -> None:
    with pytest.raises(ConfigError, match=f"hostport is host:port.*{port}"):
        KafkaOptions(f"a:1,127.0.0.1:{port}")


async def test_an_address_of_version_6_is_not_taken_for_a_name() -> None:
    ours = link()
    ours.settings = settings(KafkaOptions("[::1]:1", timeout=0.3))
    with pytest.raises(BusUnavailable, match=r"Kafka at \[::1\]:1: .*(?i:Errno 111|refused|Errno 99|address)"):
        await ours._find_reason()


def test_an_encrypted_key_without_its_password_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With none at all, OpenSSL would wait at the terminal for somebody to type it."""
    context = Mock()
    monkeypatch.setattr("ssl.create_default_context", lambda **_: context)
    config = "security.protocol=ssl;ssl.certificate.location=c.pem;ssl.key.location=k.pem"
    security(settings(KafkaOptions("h:1", globalconfig=config)))
    context.load_cert_chain.assert_called_once_with("c.pem", "k.pem", "")


class Asked:
    """A client whose cluster has no topic until it was asked so often."""

    def __init__(self, there_after: int) -> None:
        self.there_after = there_after
        self.times: list[float] = []

    async def _metadata_update(self, cluster: Any, topics: Any) -> bool:
        self.times.append(asyncio.get_running_loop().time())
        return True

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return {0} if len(self.times) > self.there_after else None


def test_a_client_asks_for_a_topic_that_is_not_there_a_little_later_each_time() -> None:
    async def scene(_: Any) -> None:
        asked: Any = Asked(there_after=20)
        paced(asked)
        began = asyncio.get_running_loop().time()
        for _ in range(25):
            assert await asked._metadata_update(asked, ["t"])
        pauses = [after - before for before, after in itertools.pairwise([began, *asked.times])]
        assert pauses[0] == 0
        assert all(0.01 <= pause <= 0.5 for pause in pauses[1:21])
        assert min(pauses[7:21]) >= 0.25
        assert pauses[21:] == [0] * 4, "it is there"

    run_virtual(scene)


def test_the_client_says_once_in_a_while_that_a_topic_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("aiokafka.cluster")
    for _ in range(100):
        log.error("Topic %s not found in cluster metadata", "seldom-1")
    log.error("Topic %s not found in cluster metadata", "seldom-2")
    assert len([each for each in caplog.records if "seldom" in each.getMessage()]) == 2
