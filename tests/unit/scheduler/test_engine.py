"""The scheduler run by an engine of two members, on a bus in memory and a virtual clock."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timedelta
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.scheduler.model import Scheduler
from esp_pubsub.scheduler.windows import INPUTS
from tests.unit.virtual_group import World, in_a_world

URL = "dfESP://sim:5555/p/scheduler"
TENANT = {"do": "tenant", "tenant": "t", "type": "MESSAGING", "props": {"window": "Fires"}}


async def member(client: esp.Client) -> esp.Engine:
    return await client.engine(Scheduler(), URL, options=esp.EngineOptions(stall=0.5, close_timeout=1.0))


async def fires(client: esp.Client, count: int) -> list[dict[str, Any]]:
    """The first so many rows of what fell due."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(60), await client.subscriber(f"{URL}/Fires", start="earliest") as reader:
        while len(found) < count:
            found += (await anext(reader)).mappings()
    return found


def rows(*events: tuple[str, datetime]) -> list[tuple[Any, ...]]:
    return [("t", id, at.isoformat(), "p", None, None, None) for id, at in events]


@pytest.mark.parametrize("leaves", [True, False])
def test_each_event_fires_once_though_the_member_that_leads_leaves_or_is_cut_off(leaves: bool) -> None:
    async def scene(world: World) -> None:
        clients = {name: await world.client(name) for name in "ABU"}
        engines = {name: await member(clients[name]) for name in "AB"}
        user = clients["U"]
        commands = await user.publisher(f"{URL}/Commands", INPUTS["Commands"])
        await commands.inject([("c", json.dumps(TENANT))])
        events = await user.publisher(f"{URL}/Events", INPUTS["Events"])
        await asyncio.sleep(1)  # the tenant is known
        await events.inject(rows(("first", datetime.fromisoformat("1970-01-01T00:00Z"))))
        now: datetime = (await fires(user, 1))[0]["triggeredAt"]
        await events.inject(rows(*[(str(n), now + timedelta(seconds=1 + n / 10)) for n in range(100)]))
        await asyncio.sleep(4)
        (leader,) = (name for name, engine in engines.items() if engine.stats.role == "active")
        if leaves:
            await clients[leader].aclose()
        else:
            world.broker.cut(leader, 5)
        fired = await fires(user, 101)
        assert [row["id"] for row in fired] == ["first", *map(str, range(100))]
        assert max(row["triggeredAt"] - row["eventTime"] for row in fired[1:]) < timedelta(seconds=2)
        with pytest.raises(TimeoutError):
            await fires(user, 102)

    in_a_world(scene)
