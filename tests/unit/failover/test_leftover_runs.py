"""What a group of a higher run left on the control topic, and who comes with a lower one.

A run is retained before the first word of it, and what is retained only grows. So a beat of a higher run, however old,
says what the bus has said at open already. Only where the retained value was lost a newcomer meets the beat first; it
leaves then as well, and rightly: readers know the higher run, and drop whatever comes of a lower one.
"""

from __future__ import annotations

import asyncio

import msgpack
import pytest

import esp_pubsub as esp
from esp_pubsub.testing import Faults
from esp_pubsub.wire.frame import BEAT, BLOCK, parse
from tests.unit.virtual_group import World, in_a_world, leads
from tests.unit.workbench import SYMBOLS, TOPIC, URL

CONTROL, RUNS = "test:5555/M/F/g", "runs"


def beats(world: World) -> set[int]:
    """The runs that were spoken of."""
    return {frame.run for frame in map(parse, world.broker.topic(CONTROL).log) if frame.kind == BEAT}


def retained(world: World) -> dict[int, int]:
    value = world.broker.topic(TOPIC).retained.get(RUNS)
    return {} if value is None else msgpack.unpackb(value, strict_map_key=False)


async def gone(world: World, name: str, run: int, blocks: int = 1) -> None:
    """A group of this run led, and published so many blocks; its only member has lost its link for good."""
    one = await world.member(name, run=run)
    for id in range(1, blocks + 1):
        await (await one.inject([(id, "a")]))
    while run not in beats(world):  # noqa: ASYNC110  # on a virtual clock
        await asyncio.sleep(0.01)
    world.broker.cut(name, 10_000)


def test_nobody_speaks_of_a_run_before_it_is_retained() -> None:
    async def scene(world: World) -> None:
        client = await world.client("A")
        async with client.publisher(URL, SYMBOLS):  # the schema is retained
            faults = Faults.into(client)
        faults.hang("retain")
        opening = asyncio.ensure_future(_opened(client, 7))
        await asyncio.sleep(60)
        assert (beats(world), list(retained(world).values())) == (set(), [])
        faults.heal()
        one = await opening
        assert list(retained(world).values()) == [7]
        await leads(one)
        await asyncio.sleep(1)
        assert beats(world) == {7}

    in_a_world(scene)


async def _opened(client: esp.Client, run: int) -> esp.Publisher:
    return await client.publisher(URL, SYMBOLS, failover=esp.Failover("g", run=run))


def test_a_newcomer_of_a_lower_run_is_refused_before_it_reads_what_the_higher_one_left() -> None:
    async def scene(world: World) -> None:
        await gone(world, "A", run=7)
        with pytest.raises(esp.Stale, match=r"run 6 .* the current one is 7: pass a higher run"):
            await world.member("B", run=6)

    in_a_world(scene)


@pytest.mark.parametrize("blocks", [0, 1], ids=["by its beat alone", "by a block as well"])
def test_where_the_retained_run_was_lost_what_a_higher_one_left_still_keeps_a_lower_one_off_the_topic(
    blocks: int,
) -> None:
    async def scene(world: World) -> None:
        reader = await (await world.client("R")).subscriber(URL, side="in", start="earliest")
        await gone(world, "A", 7, blocks)
        for id in range(1, blocks + 1):
            assert ((found := await anext(reader)).run, found.id) == (7, id)
        world.broker.topic(TOPIC).retained[RUNS] = msgpack.packb({})

        newcomer = await world.member("B", run=6)
        delivery = await newcomer.inject([(1, "a")])
        with pytest.raises(esp.Stale, match=r"run 7 .* replaced ours, 6: .* pass that run or a higher one") as caught:
            await delivery
        assert (caught.value.run, caught.value.current) == (6, 7)
        runs = [frame.run for frame in map(parse, world.broker.topic(TOPIC).log) if frame.kind == BLOCK]
        assert runs == [7] * blocks, "who has read run 7 would have dropped it"

        again = await world.member("C", run=7)  # the way out that the error names
        for id in (1, 2):
            await (await again.inject([(id, "a")]))
        for id in range(blocks + 1, 3):
            assert ((found := await anext(reader)).run, found.id) == (7, id)

    in_a_world(scene)


def test_what_a_group_of_a_lower_run_left_ends_nobody() -> None:
    async def scene(world: World) -> None:
        await gone(world, "A", run=7)
        newcomer = await world.member("B", run=8)
        assert await (await newcomer.inject([(1, "a")])) == "acked"
        assert beats(world) == {7, 8}

    in_a_world(scene)
