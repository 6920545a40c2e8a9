"""A queue as an input: who gives it up lets go of it, whatever happens at that moment."""

import asyncio
from pathlib import Path

import pytest

import esp_pubsub as esp
from esp_pubsub._news import News
from esp_pubsub.engine.inputs import QueueInput
from esp_pubsub.testing import Faults

TOPIC = "local:5555/p/q/Trades/I"


@pytest.mark.parametrize("turns", range(8))
async def test_a_queue_is_let_go_when_the_role_and_the_link_are_lost_at_the_same_time(
    bus_directory: Path, turns: int
) -> None:
    async with esp.init(dir=bus_directory) as client:
        faults = Faults(client.bus)
        reading = asyncio.create_task(QueueInput(faults, TOPIC, "engine.p.q", News(), lambda _: None).run())
        await asyncio.sleep(0.05)  # it waits for messages
        faults.lose_link()
        for _ in range(turns):
            await asyncio.sleep(0)
        faults.restore()
        reading.cancel()
        done, _ = await asyncio.wait([reading], timeout=5)
        reading.cancel()
        assert reading in done, "it reads on"
