"""An engine with two output windows, on a bus in memory and a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import esp_pubsub as esp
from tests.unit.virtual_group import World, in_a_world

URL = "dfESP://sim:5555/p/q"
SCHEMA = "id*:int64,to:string"


@esp.model(inputs={"In": SCHEMA}, outputs={"One": SCHEMA, "Two": SCHEMA})
def router(window: str, block: esp.Block, out: esp.Out) -> None:
    for row in block.rows():
        for to in row[1].split():
            out.emit(to, [row])


class Member:
    """The only member of an engine, and a publisher of its input."""

    def __init__(self, engine: esp.Engine, source: esp.Publisher) -> None:
        self.engine = engine
        self.given = 0
        self._source = source

    async def take(self, to: str) -> None:
        """It takes a block for these windows."""
        self.given += 1
        await self._source.inject([(self.given, to)])
        while self.engine.stats.steps < self.given:  # noqa: ASYNC110  # on a virtual clock
            await asyncio.sleep(0.001)

    async def publish(self, to: str) -> None:
        """It takes a block for these windows, and sends what it has."""
        await self.take(to)
        while any(line.on_bus < line.given for line in self.engine.stats.lines):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def leading(world: World) -> AsyncIterator[Member]:
    source = await (await world.client("C")).publisher(f"{URL}/In", SCHEMA)
    engine = await (await world.client("A")).engine(router, URL, options=esp.EngineOptions(stall=0.5))
    while engine.stats.role != "active":  # noqa: ASYNC110  # on a virtual clock
        await asyncio.sleep(0.01)
    yield Member(engine, source)


def test_a_block_is_sent_at_once_whichever_line_it_is_given_to() -> None:
    async def scene(world: World) -> None:
        async with leading(world) as member:
            for to in ("Two", "One", "One Two", "Two"):
                await asyncio.sleep(1)
                async with asyncio.timeout(0.1):  # much less than what would make it resign
                    await member.publish(to)
            assert [line.on_bus for line in member.engine.stats.lines] == [2, 3]

    in_a_world(scene)


def test_a_hand_over_that_ends_with_its_member_names_the_block_that_is_not_on_the_bus_and_its_line() -> None:
    async def scene(world: World) -> None:
        async with leading(world) as member:
            await member.publish("One")
            await member.publish("One")
            topic = member.engine.stats.lines[1].window
            world.broker.cut_topic("A", topic, 100)
            await member.take("Two")
            world.loop.call_later(0.1, member.engine._group.leave)
            with pytest.raises(esp.Closed, match="block 1 is not known to be on the bus") as caught:
                await member.engine.hand_over()
            assert caught.value.id == 1
            assert topic in str(caught.value)

    in_a_world(scene)
