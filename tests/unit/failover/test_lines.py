"""A member with two lines, alone on a bus in memory."""

import asyncio

from tests.simulation.lines import Lines
from tests.simulation.processes import WINDOWS
from tests.unit.virtual_group import World, in_a_world


def test_a_block_is_sent_at_once_whichever_line_it_is_given_to() -> None:
    async def scene(world: World) -> None:
        client = await world.client("A")
        lines = Lines(client.bus, WINDOWS, 10)
        async with asyncio.TaskGroup() as tasks:
            member = tasks.create_task(lines.group.run())
            while lines.group.role != "active":  # noqa: ASYNC110  # on a virtual clock
                await asyncio.sleep(0.01)
            for to in ((1,), (0,), (0, 1), (1,)):
                await asyncio.sleep(1)
                async with asyncio.timeout(0.1):  # much less than what would make it resign
                    for at, id in await lines.take(to):
                        await lines.delivered(at, id)
            member.cancel()
        assert lines.given == [2, 3]

    in_a_world(scene)
