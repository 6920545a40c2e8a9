"""A member with two lines, alone on a bus in memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import esp_pubsub as esp
from tests.simulation.lines import Lines
from tests.simulation.processes import WINDOWS
from tests.unit.virtual_group import World, in_a_world


@contextlib.asynccontextmanager
async def leading(world: World) -> AsyncIterator[Lines]:
    client = await world.client("A")
    lines = Lines(client.bus, WINDOWS, 10)
    async with asyncio.TaskGroup() as tasks:
        member = tasks.create_task(lines.group.run())
        while lines.group.role != "active":  # noqa: ASYNC110  # on a virtual clock
            await asyncio.sleep(0.01)
        yield lines
        member.cancel()


async def publish(lines: Lines, *to: int) -> None:
    for at, id in await lines.take(to):
        await lines.delivered(at, id)


def test_a_block_is_sent_at_once_whichever_line_it_is_given_to() -> None:
    async def scene(world: World) -> None:
        async with leading(world) as lines:
            for to in ((1,), (0,), (0, 1), (1,)):
                await asyncio.sleep(1)
                async with asyncio.timeout(0.1):  # much less than what would make it resign
                    await publish(lines, *to)
            assert lines.given == [2, 3]

    in_a_world(scene)


def test_a_hand_over_that_ends_with_its_member_names_the_block_that_is_not_on_the_bus_and_its_line() -> None:
    async def scene(world: World) -> None:
        async with leading(world) as lines:
            await publish(lines, 0)
            await publish(lines, 0)
            topic = WINDOWS[1].topic
            world.broker.cut_topic("A", topic, 100)
            await lines.take((1,))
            world.loop.call_later(0.1, lines.group.leave)
            with pytest.raises(esp.Closed, match="block 1 is not known to be on the bus") as caught:
                await lines.group.hand_over()
            assert caught.value.id == 1
            assert topic in str(caught.value)

    in_a_world(scene)
