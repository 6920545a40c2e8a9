"""What the log says of roles: what is normal at INFO, what an operator should look at at WARNING, all with fields."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from esp_pubsub.publisher import Publisher
from tests.unit.virtual_group import World, in_a_world, leads
from tests.unit.workbench import TOPIC

SWITCHED = "Hot failover state switched to"


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "esp_pubsub")


def loud(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno > logging.INFO]


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key.startswith("esp_")}


async def both(*publishers: Publisher) -> None:
    """Each publishes its part of the input."""
    for id in (1, 2, 3):
        await asyncio.gather(*[publisher.inject([(id, "a")]) for publisher in publishers])
    await asyncio.gather(*[publisher.flush() for publisher in publishers])


async def pair(world: World) -> tuple[Publisher, Publisher]:
    """A leads and B stands by; both have published their first blocks."""
    a = await world.member("A")
    await leads(a)
    b = await world.member("B")
    await both(a, b)
    await asyncio.sleep(5)
    return a, b


@pytest.mark.parametrize("kind", ["log", "queues"])
def test_a_start_a_hand_over_and_an_end_in_order_log_nothing_above_info(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(world: World) -> None:
        a, b = await pair(world)
        await a.hand_over()
        await leads(b)
        await asyncio.sleep(5)
        await b.aclose()
        await leads(a)
        await asyncio.sleep(5)
        await a.aclose()

    in_a_world(scene, kind)
    assert [record.getMessage() for record in loud(caplog)] == []
    roles = [record.getMessage().removeprefix(f"{SWITCHED} ").split(":")[0] for record in caplog.records
             if record.getMessage().startswith(SWITCHED)]  # fmt: skip
    assert sorted(roles) == [*["active"] * 3, *["standby"] * 2, *["standby (handed over)"] * 3]


@pytest.mark.parametrize("kind", ["log", "queues"])
def test_a_member_whose_leader_fell_silent_warns_and_names_it(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(world: World) -> None:
        _, b = await pair(world)
        world.broker.kill("A")
        await leads(b)
        await asyncio.sleep(5)

    in_a_world(scene, kind)
    [silent] = [record for record in loud(caplog) if f"{SWITCHED} active" in record.getMessage()]
    said = fields(silent)
    name = said["esp_member"]
    assert silent.getMessage() == f"{SWITCHED} active: {name} on {TOPIC}, after {name} fell silent"  # of one process
    assert said == {
        "esp_topic": TOPIC, "esp_member": name, "esp_term": 2, "esp_role": "active", "esp_event": "synced"
    }  # fmt: skip
    [sending] = [record for record in caplog.records if "sending buffered" in record.getMessage()
                 and fields(record)["esp_term"] == 2]  # fmt: skip
    assert (fields(sending)["esp_m"], fields(sending)["esp_last"]) == (3, 3)


def test_a_leader_that_loses_its_bus_warns(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(world: World) -> None:
        a = await world.member("A")
        await leads(a)
        world.broker.cut("A", 10)
        await leads(a, yes=False)

    in_a_world(scene)
    lost = [fields(record) for record in loud(caplog) if record.getMessage().startswith(SWITCHED)]
    assert [(said["esp_role"], said["esp_event"]) for said in lost] == [("standby", "suspended")]
