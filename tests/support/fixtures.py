"""Fixtures: real brokers that tests share. Each is started when a test first asks for it, and ends with the session.

Tests keep apart by names of their own for topics, queues and nodes. A test may harm a broker: what it leaves frozen or
dead is mended before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:  # importing the vendors' clients takes time that most runs do not need to spend
    from .kafka import Kafka
    from .rabbitmq import RabbitMQ
    from .server import Broker
    from .zookeeper import ZooKeeper

    B = TypeVar("B", bound=Broker)

SHARED = ("kafka", "zookeeper", "rabbitmq", "own_rabbitmq")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "unit" in item.path.parts)  # what takes long goes first, so that processes end together


def _shared(broker: B, session: pytest.Session) -> Iterator[B]:
    failed = session.testsfailed
    with broker:
        yield broker
        broker.close(keep_logs=session.testsfailed > failed)


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[Kafka]:
    """One Kafka broker; see `tests.support.kafka`."""
    from .kafka import Kafka

    yield from _shared(Kafka(), request.session)


@pytest.fixture(scope="session")
def zookeeper(request: pytest.FixtureRequest) -> Iterator[ZooKeeper]:
    """One ZooKeeper server."""
    from .zookeeper import ZooKeeper

    yield from _shared(ZooKeeper(), request.session)


@pytest.fixture(scope="session")
def rabbitmq(request: pytest.FixtureRequest) -> Iterator[RabbitMQ]:
    """One RabbitMQ node."""
    from .rabbitmq import RabbitMQ

    yield from _shared(RabbitMQ(), request.session)


@pytest.fixture(scope="module")
def own_rabbitmq(request: pytest.FixtureRequest) -> Iterator[RabbitMQ]:
    """A node to restart: one that has seen the streams of many tests takes minutes to come up again."""
    from .rabbitmq import RabbitMQ

    yield from _shared(RabbitMQ(), request.session)


@pytest.fixture
def no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log elections in this process take no silence for the end of a leader, however long the machine stood still: it
    leads until it resigns, or its process dies.
    """
    from esp_pubsub.failover import ballot, log_election

    monkeypatch.setattr(ballot, "SILENT_BEATS", 10_000)
    monkeypatch.setattr(log_election, "UNHEARD_BEATS", 10_000)


@pytest.fixture(autouse=True)
def _mended(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in SHARED:
        if name in request.fixturenames:
            request.getfixturevalue(name).mend()
