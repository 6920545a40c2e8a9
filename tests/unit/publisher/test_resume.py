"""Publisher: sequences that are resumed, by one publisher too many or with other blocks."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.testing.faults import Faults
from tests.unit.workbench import SYMBOLS, TOPIC, URL, Bench, block, until


@pytest.fixture
async def other(bench: Bench) -> AsyncIterator[esp.Client]:
    """Another program on the same bus."""
    async with esp.init(dir=bench.directory) as client:
        yield client


def resumed(client: esp.Client, last: int = 0, chain: int = 0, **more: Any) -> Any:
    options = esp.PublisherOptions(ack_timeout=5.0, close_timeout=5.0)
    return client.publisher(
        URL, SYMBOLS, resume=esp.Resume("count", last, chain), options=options, on_notice=lambda _: None, **more
    )


async def send(pub: esp.Publisher, text: str, *ids: int) -> None:
    for id in ids:
        delivery = await pub.inject([(id, text)])
        assert (delivery.id, await delivery) == (id, "acked")


async def delivered(bench: Bench, count: int) -> list[str]:
    """What a subscriber has of the first blocks."""
    return [block.rows()[0][1] for block in await bench.blocks(count)]


async def test_other_blocks_under_ids_that_the_bus_has_are_refused_and_never_sent(bench: Bench) -> None:
    async with resumed(bench.client) as first:
        await send(first, "a", 1, 2, 3)
    second = await resumed(bench.client)
    with pytest.raises(esp.InputDiffers, match="another publisher resumes under this name") as differs:
        await second.inject([(1, "b")])
    frames = await bench.frames()
    assert (differs.value.id, differs.value.theirs) == (1, frames[0].chain)
    assert differs.value.ours not in [frame.chain for frame in frames]
    with pytest.raises(esp.InputDiffers):
        await second.inject([(1, "a")])  # it has ended
    await second.aclose()
    assert await delivered(bench, 3) == ["a", "a", "a"]
    assert len(await bench.frames()) == 3


async def test_what_differs_later_is_refused_where_it_differs(bench: Bench) -> None:
    async with resumed(bench.client) as first:
        await send(first, "a", 1, 2, 3)
    second = await resumed(bench.client)
    await send(second, "a", 1, 2)
    with pytest.raises(esp.InputDiffers) as differs:
        await second.inject([(3, "b")])
    assert differs.value.id == 3
    await second.aclose()


async def test_of_two_that_resume_at_once_the_one_whose_block_stands_second_fails(
    bench: Bench, other: esp.Client
) -> None:
    faults = Faults.into(other)
    async with resumed(bench.client) as first:
        second = await resumed(other)
        faults.hang("read")
        await send(first, "a", 1)
        delivery = await second.inject([(1, "b")])
        async with asyncio.timeout(60):
            while len(await bench.frames()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        with pytest.raises(esp.DeliveryUnknown):  # confirmed, and not acknowledged before it was read back
            await second.delivered(1, 0.05)
        faults.heal()
        with pytest.raises(esp.InputDiffers) as differs:
            await delivery
        frames = await bench.frames()
        assert (differs.value.id, differs.value.ours, differs.value.theirs) == (1, frames[1].chain, frames[0].chain)
        with pytest.raises(esp.InputDiffers):
            await second.aclose()
        await send(first, "a", 2)  # the first one goes on
    assert await delivered(bench, 2) == ["a", "a"]


async def test_two_that_resume_at_once_with_equal_blocks_are_both_acknowledged(bench: Bench, other: esp.Client) -> None:
    async with resumed(bench.client) as first, resumed(other) as second:
        await send(first, "a", 1, 2)
        await send(second, "a", 1, 2, 3)
        await send(first, "a", 3, 4)
    assert [frame.id for frame in await bench.frames()] == [1, 2, 1, 2, 3, 3, 4]
    assert await delivered(bench, 4) == ["a"] * 4


async def test_one_client_resumes_a_name_once_at_a_time(bench: Bench) -> None:
    async with resumed(bench.client):
        with pytest.raises(esp.WrongOrder, match=r"resumes 'count' on .+ already: close it first"):
            await resumed(bench.client)
        async with resumed(bench.client, side="out"):  # another topic
            pass
    async with resumed(bench.client) as pub:
        await send(pub, "a", 1)


async def test_another_chain_at_the_block_where_it_resumes_is_refused_at_opening(bench: Bench) -> None:
    async with resumed(bench.client) as first:
        await send(first, "a", 1, 2)
    with pytest.raises(esp.InputDiffers) as differs:
        await resumed(bench.client, 2, 99)
    assert (differs.value.id, differs.value.ours) == (2, 99)
    chain = (await bench.frames())[1].chain
    async with resumed(bench.client, 2, chain) as second:
        await send(second, "b", 3)


async def test_blocks_are_found_that_much_of_others_stands_after(bench: Bench) -> None:
    async with resumed(bench.client) as first:
        await send(first, "a", 1, 2)
    await bench.raw(*[block(1)] * 1_500)
    async with resumed(bench.client, 1, (await bench.frames())[0].chain) as second:
        await send(second, "a", 2)
    third = await resumed(bench.client)
    with pytest.raises(esp.InputDiffers):
        await third.inject([(1, "b")])
    await third.aclose()


async def test_what_readers_dropped_near_the_end_does_not_refuse_the_one_that_they_follow(bench: Bench) -> None:
    async with resumed(bench.client) as first:
        await send(first, "a", 1)
    chain = (await bench.frames())[0].chain
    await bench.raw(*[block(1)] * 1_500, block(1, source=first.source))  # another program's first block, dropped
    async with resumed(bench.client, 1, chain) as second:
        await send(second, "a", 2)


async def test_where_the_bus_was_purged_meanwhile_blocks_are_acknowledged_all_the_same(bench: Bench) -> None:
    async with resumed(bench.client) as pub:
        await send(pub, "a", 1, 2)
        bench.faults.hang("read")
        third = await pub.inject([(3, "a")])
        async with asyncio.timeout(60):
            while len(await bench.frames()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await bench.client.purge(URL)
        bench.faults.heal()
        assert await third == "acked"
        await send(pub, "a", 4, 5)
    assert [block.id for block in await bench.blocks(2)] == [4, 5]


async def test_a_lost_link_delays_what_is_read_back_and_loses_none_of_it(bench: Bench) -> None:
    async with resumed(bench.client) as pub:
        await send(pub, "a", 1)
        bench.faults.lose_link()
        delivery = await pub.inject([(2, "a")])
        await until(lambda: pub.stats.troubles > 0)
        bench.faults.restore()
        assert await delivery == "acked"
        await send(pub, "a", 3)


async def test_a_bus_that_keeps_nothing_to_read_again_is_taken_at_its_word(bench: Bench) -> None:
    bench.faults.capabilities = replace(bench.faults.capabilities, replay=False)
    bench.faults.hang("feed")
    async with resumed(bench.client) as first:
        await send(first, "a", 1)
    async with resumed(bench.client) as second:
        await send(second, "b", 1)  # nobody can see it
    assert [frame.id for frame in await bench.frames(TOPIC)] == [1, 1]
