"""What goes wrong in the first hour, and that the error says what to write instead."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp

URL = "dfESP://test:5555/project/query/window"
SCHEMA = "id*:int64,symbol:string,price:double"


@pytest.fixture
async def client(bus_directory: Path) -> AsyncIterator[esp.Client]:
    async with esp.init(dir=bus_directory) as client:
        yield client


async def test_a_client_that_was_not_awaited_says_that_it_is_not_open(bus_directory: Path) -> None:
    forgotten: Any = esp.init(dir=bus_directory)
    with pytest.raises(esp.WrongOrder, match=r"not open yet: await it, or use async with, and then \.publisher on"):
        forgotten.publisher(URL, SCHEMA)


async def test_a_publisher_and_a_subscriber_that_were_not_awaited_say_so(client: esp.Client) -> None:
    publisher: Any = client.publisher(URL, SCHEMA)
    with pytest.raises(esp.WrongOrder, match=r"not open yet: await it, or use async with, and then \.inject on"):
        await publisher.inject([(1, "IBM", 101.5)])
    subscriber: Any = client.subscriber(URL, SCHEMA)
    with pytest.raises(esp.WrongOrder, match="not open yet: await it, or use async with, and then async for on"):
        async for _ in subscriber:
            break


async def test_what_python_looks_for_in_an_opening_is_only_missing(client: esp.Client) -> None:
    assert not hasattr(client.publisher(URL, SCHEMA), "__wrapped__")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"failover": "feed"}, r"failover is an esp\.Failover, such as esp\.Failover\('feed'\), not 'feed'"),
        ({"resume": "feed"}, r"resume is an esp\.Resume, such as esp\.Resume\('trades', last, chain\), not 'feed'"),
        ({"options": {"buffer_blocks": 5}}, r"options is an esp\.PublisherOptions, .* not \{'buffer_blocks': 5\}"),
        ({"options": esp.SubscriberOptions()}, r"options is an esp\.PublisherOptions"),
    ],
    ids=str,
)
async def test_an_option_of_a_publisher_of_the_wrong_type_is_named(
    client: esp.Client, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(esp.ConfigError, match=words):
        client.publisher(URL, SCHEMA, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"options": {"read_blocks": 5}}, r"options is an esp\.SubscriberOptions, .* not \{'read_blocks': 5\}"),
        ({"group": True}, "group is a name, such as 'billing', not True"),
        ({"group": ""}, "group is a name, such as 'billing', not ''"),
    ],
    ids=str,
)
async def test_an_option_of_a_subscriber_of_the_wrong_type_is_named(
    client: esp.Client, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(esp.ConfigError, match=words):
        client.subscriber(URL, SCHEMA, **given)


async def test_the_options_of_an_engine_of_the_wrong_type_are_named(client: esp.Client) -> None:
    with pytest.raises(esp.ConfigError, match=r"options is an esp\.EngineOptions"):
        client.engine(None, "dfESP://test:5555/p/c", options={"buffer": 5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "how", "words"),
    [
        ([], {}, "a block has at least one event, and there is none here: do not inject where there are no rows"),
        ([(1, "a", 1.0)], {"opcode": "upsert"}, r"opcodes are not text: write esp\.Opcode\.UPSERT, not 'upsert'"),
        ([(1, "a", 1.0)], {"flags": "P"}, r"flags are not text: write esp\.EventFlag\.PARTIAL, not 'P'"),
        ([(True, "a", 1.0)], {}, r"row 0, field 'id' \(int64\): bool True is not an integer: write int\(\.\.\.\)"),
        ([{"symbol": "a"}], {}, "row 0 has no 'id', which is a key of id"),
        ([{"id": 1, "prize": 2.0}], {}, "row 0 has 'prize', which is no field of id"),
    ],
    ids=str,
)
async def test_a_block_that_cannot_be_is_refused_with_the_way_out(
    client: esp.Client, given: Any, how: dict[str, Any], words: str
) -> None:
    async with client.publisher(URL, SCHEMA) as pub:
        with pytest.raises(esp.ValueRefused, match=words):
            await pub.inject(given, **how)


async def test_null_is_a_value_of_every_field_and_what_a_mapping_leaves_out_is_null(client: esp.Client) -> None:
    async with (
        client.publisher(URL, SCHEMA) as pub,
        client.subscriber(URL, side="in", start="earliest") as sub,
    ):
        await pub.inject([(None, None, None)])
        await pub.inject([{"id": 1}, {"id": None, "price": 2.0}])
        assert (await anext(sub)).rows() == [(None, None, None)]
        assert (await anext(sub)).rows() == [(1, None, None), (None, None, 2.0)]


async def test_rabbitmq_has_no_mode_that_loses_by_default() -> None:
    with pytest.raises(esp.ConfigError, match=r"say the mode: stream keeps .* persistent keeps .* mode = stream in"):
        await esp.init("rabbitmq")


async def test_a_schema_that_is_none_is_refused_with_what_it_may_be(client: esp.Client) -> None:
    wrong: Any = 5
    with pytest.raises(esp.SchemaError, match=r"a schema is a text such as 'id\*:int64,price:double', an .* not 5"):
        client.publisher(URL, wrong)
