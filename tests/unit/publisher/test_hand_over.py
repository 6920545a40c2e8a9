"""A hand-over ends when all that had an id is on the bus and another member may lead, or it says why not."""

from __future__ import annotations

import asyncio

import pytest

import esp_pubsub as esp
from tests.unit.virtual_group import World, in_a_world, leads


def test_a_hand_over_outlasts_the_end_of_leadership_and_ends_when_all_is_on_the_bus() -> None:
    async def scene(world: World) -> None:
        a = await world.member("A")
        await (await a.inject([(1, "a")]))
        world.stall(30)
        await a.inject([(2, "b")])
        handing = asyncio.create_task(a.hand_over())
        await leads(a, yes=False)
        assert a.stats.last_switch is not None
        assert a.stats.last_switch.event != "handed over"
        await asyncio.sleep(20)
        assert not handing.done(), "nobody has sent block 2"
        await handing
        assert sorted(set(world.ids())) == [1, 2]
        assert a.stats.role != "active"

    in_a_world(scene)


def test_a_hand_over_ends_when_another_member_has_sent_what_is_missing() -> None:
    async def scene(world: World) -> None:
        a = await world.member("A")
        await leads(a)
        b = await world.member("B")
        for publisher in (a, b):
            await (await publisher.inject([(1, "a")]))
        world.broker.cut("A", 10)
        for publisher in (a, b):
            await publisher.inject([(2, "b")])
        handing = asyncio.create_task(a.hand_over())
        await leads(b)
        await b.flush()
        await asyncio.sleep(3)
        assert not handing.done(), "the bus has it, and A cannot know"
        await handing
        assert (a.stats.on_bus, a.stats.role == "active", b.stats.role) == (2, False, "active")
        assert await a.delivered(2) == "covered"

    in_a_world(scene)


def test_only_what_had_an_id_when_a_hand_over_was_asked_for_is_waited_for() -> None:
    async def scene(world: World) -> None:
        a = await world.member("A")
        await leads(a)
        b = await world.member("B")
        await a.inject([(1, "a")])
        world.broker.cut("A", 10)
        handing = asyncio.create_task(a.hand_over())
        await leads(b)
        await b.inject([(1, "a")])
        await a.inject([(2, "b")])
        await handing
        assert set(world.ids()) == {1}

    in_a_world(scene)


@pytest.mark.parametrize("leaves", ["before leadership ends", "after"])
def test_a_hand_over_of_a_member_that_leaves_names_the_block_that_may_be_missing(leaves: str) -> None:
    async def scene(world: World) -> None:
        a = await world.member("A", close_timeout=0.1)
        await (await a.inject([(1, "a")]))
        world.stall(30)
        await a.inject([(2, "b")])
        handing = asyncio.create_task(a.hand_over())
        await (leads(a, yes=False) if leaves == "after" else asyncio.sleep(0))
        with pytest.raises(esp.DeliveryUnknown):
            await a.aclose()
        with pytest.raises(esp.Closed, match="block 2 is not known to be on the bus") as caught:
            await handing
        assert vars(caught.value) == {"id": 2}

    in_a_world(scene)


def test_a_hand_over_of_a_member_whose_input_differs_raises_that() -> None:
    async def scene(world: World) -> None:
        a = await world.member("A")
        await leads(a)
        b = await world.member("B")
        await a.inject([(1, "a")])
        world.broker.cut("A", 10)
        handing = asyncio.create_task(a.hand_over())
        await leads(b)
        await (await b.inject([(1, "another")]))
        with pytest.raises(esp.InputDiffers):
            await handing

    in_a_world(scene)


def test_a_hand_over_that_was_given_up_after_leadership_ended_does_not_happen_later() -> None:
    async def scene(world: World) -> None:
        a = await world.member("A")
        await leads(a)
        world.stall(5)
        await a.inject([(1, "a")])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await a.hand_over()
        assert a.stats.role != "active"
        await a.flush()
        await leads(a)
        await asyncio.sleep(5)
        assert a.stats.last_switch is not None
        assert (a.stats.role, a.stats.last_switch.event) == ("active", "won")

    in_a_world(scene)


def test_closing_a_member_that_has_lost_its_leadership_is_bounded_and_names_what_is_missing() -> None:
    async def scene(world: World) -> None:
        a = await world.member("A", close_timeout=2)
        await (await a.inject([(1, "a")]))
        world.stall(60)
        await a.inject([(2, "b")])
        await leads(a, yes=False)
        began = world.loop.time()
        with pytest.raises(esp.DeliveryUnknown) as caught:
            await a.aclose()
        assert (caught.value.id, world.loop.time() - began < 4.5) == (2, True)

    in_a_world(scene)


def test_closing_the_active_member_lets_the_other_one_lead_though_it_loses_its_link_while_it_hands_over() -> None:
    async def scene(world: World) -> None:
        a = await world.member("A", close_timeout=2)
        await leads(a)
        b = await world.member("B")
        for publisher in (a, b):
            await (await publisher.inject([(1, "a")]))
        closing = asyncio.create_task(a.aclose())
        world.broker.cut("A", 30)
        began = world.loop.time()
        await closing
        assert world.loop.time() - began < 4.5
        await leads(b)

    in_a_world(scene)
