"""Solace without a broker: names, what an administrator has to make, and how messages count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from esp_pubsub.address import Address
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable
from esp_pubsub.transports.solace import Options, told
from esp_pubsub.transports.solace.administration import endpoints
from esp_pubsub.transports.solace.names import LONGEST_QUEUE, queue_name, topic_name
from esp_pubsub.transports.solace.pipe import SolacePipe

URL = "dfESP://host:5555/project/query/window"


@pytest.mark.parametrize(
    ("name", "queue"),
    [
        ("g@host:5555/p/q/w/I", "g@host:5555/p/q/w/I"),
        ("a key/with: all.sorts ü?", "a key/with: all.sorts +c3bc++3f+"),
        ("a*b>c;d", "a+2a+b+3e+c+3b+d"),
    ],
)
def test_a_queue_is_named_readably_where_that_is_possible(name: str, queue: str) -> None:
    assert queue_name(name) == queue


@pytest.mark.parametrize("name", ["x" * 201, "/x", "x/", "x//y", "#x"])
def test_what_no_queue_can_be_called_is_shortened_to_a_digest(name: str) -> None:
    assert queue_name(name).startswith("esp-pubsub/")
    assert len(queue_name(name)) <= LONGEST_QUEUE
    assert queue_name(name) != queue_name(name + "x")


def test_a_topic_that_is_too_long_is_refused() -> None:
    assert topic_name("x" * 250) == "x" * 250
    with pytest.raises(BusRefused, match="250 bytes"):
        topic_name("x" * 251)


def test_what_an_administrator_has_to_make() -> None:
    found = list(endpoints(Address.parse(URL), "billing", "feed", persistent=True))
    assert {each.name for each in found} >= {
        "billing@host:5555/project/query/window/O",
        "last@host:5555/project/query/window/I",
        "flow@host:5555/M/F/feed#feed",
        "host:5555/project/query/window/I#schema",
    }
    assert {each.name for each in found if each.last_value} == {
        f"last@host:5555/project/query/window/{side}" for side in "IO"
    }
    assert len({each.name for each in found}) == len(found)
    direct = list(endpoints(Address.parse(URL), "billing", None, persistent=False))
    assert not any("billing" in each.name or "flow" in each.name for each in direct)


def test_it_is_told_as_requests_to_semp() -> None:
    options = Options(
        host="tcp://broker", username="o'neil", vpn_name="a vpn", queuename="billing", buspersistence=True
    )
    lines = told(options, URL, "feed")
    assert all(line.startswith(("#", "curl")) for line in lines)
    assert any('"queueName": "last@host:5555/project/query/window/I"' in line and '"maxMsgSpoolUsage": 0' in line
               for line in lines)  # fmt: skip
    assert any("msgVpns/a%20vpn/queues/billing%40host%3A5555%2Fproject%2Fquery%2Fwindow%2FO/subscriptions" in line
               for line in lines)  # fmt: skip


def test_it_is_told_what_profiles_have_to_allow() -> None:
    lines = told(Options(host="tcp://broker", username="us", vpn_name="a vpn"), URL, None)
    (profile,) = (line for line in lines if "/clientProfiles/" in line)
    assert "-X PATCH" in profile and "msgVpns/a%20vpn/clientProfiles/$PROFILE" in profile
    for allowed in ("GuaranteedMsgSend", "GuaranteedMsgReceive", "SharedSubscriptions"):
        assert f'"allow{allowed}Enabled": true' in profile
    for topic in ("host:5555/>", "esp-pubsub/>"):
        for kind in ("publish", "subscribe"):
            assert any(f"aclProfiles/$ACL/{kind}TopicExceptions" in line and f'"{topic}"' in line for line in lines)
    assert any("are for us alone" in line for line in lines)


class Taker:
    """A session that takes everything, and says of it what it is told to say."""

    lost: BusError | None = None

    def __init__(self) -> None:
        self.on_lost: set[Any] = set()
        self.sent: list[bytes] = []

    async def publisher(self, taken: Any, *, guaranteed: bool) -> Any:
        self.taken = taken
        return self

    async def send(self, messages: Sequence[tuple[str, bytes]]) -> None:
        self.sent += [data for _, data in messages]

    async def aclose(self) -> None:
        pass


async def opened(timeout: float = 5.0) -> tuple[Taker, SolacePipe]:
    link: Any = Taker()
    pipe = SolacePipe(link, "t", None, 100, timeout)
    await pipe.open()
    await pipe.write([b"1", b"2", b"3"])
    return link, pipe


async def test_receipts_count_in_order_however_they_come() -> None:
    link, pipe = await opened()
    for number, count in ((3, 0), (1, 1), (2, 3)):
        link.taken(number, None)
        assert pipe._count == count
    assert await pipe.confirmed(0) == 3


@pytest.mark.parametrize("kind", [BusUnavailable, BusRefused])
async def test_a_refusal_ends_the_pipe_as_what_it_is_and_nothing_counts_behind_it(kind: type[BusError]) -> None:
    link, pipe = await opened()
    link.taken(1, None)
    link.taken(2, kind("full"))
    link.taken(3, None)
    assert await pipe.confirmed(0) == 1
    for call in (pipe.confirmed(1), pipe.write([b"4"])):
        with pytest.raises(kind, match="message 2 of this pipe was refused: full"):
            await call
    assert link.sent == [b"1", b"2", b"3"]


async def test_a_broker_that_says_nothing_of_what_was_written_is_trouble() -> None:
    _, pipe = await opened(timeout=0.02)
    with pytest.raises(BusUnavailable, match="nothing was confirmed for"):
        await pipe.confirmed(0)


async def test_where_nothing_was_written_nothing_is_waited_for() -> None:
    link, pipe = await opened(timeout=0.02)
    for number in (1, 2, 3):
        link.taken(number, None)
    assert await pipe.confirmed(2) == 3
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await pipe.confirmed(3)
