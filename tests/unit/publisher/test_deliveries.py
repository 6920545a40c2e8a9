"""Publisher: ids, deliveries, flush and close."""

import asyncio

import pytest

import esp_pubsub as esp
from tests.unit.workbench import ROW, Bench, outcome, ticks

# ids and deliveries


async def test_ids_count_from_one_without_a_hole(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        assert [(await pub.inject([ROW])).id for _ in range(200)] == list(range(1, 201))
        await pub.flush()
        assert [frame.id for frame in await bench.frames()] == list(range(1, 201))


async def test_every_publisher_is_a_source_of_its_own(bench: Bench) -> None:
    async with await bench.publisher() as one, await bench.publisher() as two:
        assert one.source != two.source
        assert (await one.inject([ROW])).id == (await two.inject([ROW])).id == 1
        await one.flush()
        await two.flush()
        assert {frame.source for frame in await bench.frames()} == {one.source, two.source}


async def test_a_delivery_tells_when_the_bus_has_the_block(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        delivery = await pub.inject([ROW])
        assert await delivery == "acked"
        assert await delivery == "acked"  # and again, at once
        assert "id=1" in repr(delivery)
        assert [frame.id for frame in await bench.frames()] == [1]


async def test_a_delivery_that_takes_too_long_is_unknown_and_may_be_awaited_again(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(ack_timeout=0.02) as pub:
        delivery = await pub.inject([ROW])
        for _ in range(2):
            with pytest.raises(esp.DeliveryUnknown, match="await the delivery again") as caught:
                await delivery
            assert caught.value.id == 1
        bench.faults.heal()
        assert await pub.delivered(1, timeout=5) == "acked"
        assert await delivery == "acked"


async def test_a_later_delivery_may_be_awaited_before_an_earlier_one(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher() as pub:
        deliveries = [await pub.inject([ROW]) for _ in range(3)]
        waiting = [asyncio.ensure_future(outcome(deliveries[i])) for i in (2, 0, 1, 2)]
        await ticks()
        bench.faults.heal()
        assert await asyncio.gather(*waiting) == ["acked"] * 4


async def test_a_delivery_that_was_given_up_leaves_nothing_behind(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(ack_timeout=0.001) as pub:
        delivery = await pub.inject([ROW])
        for _ in range(20):
            with pytest.raises(esp.DeliveryUnknown):
                await delivery
        assert len(pub._for_ack) <= 1
        bench.faults.heal()


async def test_an_id_that_was_not_given_yet_cannot_be_awaited(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        with pytest.raises((ValueError, esp.EspError), match="last one given is 0"):
            await pub.delivered(1)


# flush and close


async def test_flush_with_nothing_to_do_returns_at_once(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        await pub.flush(timeout=0)


async def test_flush_waits_for_every_block(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher() as pub:
        for _ in range(5):
            await pub.inject([ROW])
        flushing = asyncio.ensure_future(pub.flush())
        await ticks()
        assert not flushing.done()
        bench.faults.heal()
        await flushing
        assert pub.stats.acked == 5


async def test_flush_names_what_is_late(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        await (await pub.inject([ROW]))
        bench.faults.hang("confirmed")
        for _ in range(3):
            await pub.inject([ROW])
        with pytest.raises(esp.DeliveryUnknown, match="blocks 2 to 4") as caught:
            await pub.flush(timeout=0.02)
        assert (caught.value.id, caught.value.last) == (2, 4)
        bench.faults.heal()


async def test_closing_flushes(bench: Bench) -> None:
    pub = await bench.publisher()
    for _ in range(20):
        await pub.inject([ROW])
    await pub.aclose()
    assert pub.stats.acked == 20
    await pub.aclose()  # twice is harmless
    assert [frame.id for frame in await bench.frames()] == list(range(1, 21))


async def test_closing_names_what_is_not_acknowledged(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0.02)
    await pub.inject([ROW])
    await pub.inject([ROW])
    with pytest.raises(esp.DeliveryUnknown, match="1 to 2") as caught:
        await pub.aclose()
    assert (caught.value.id, caught.value.last) == (1, 2)
    assert pub._task is not None and pub._task.done()


async def test_a_delivery_that_waits_while_its_publisher_closes_hears_of_it(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0.02)
    delivery = await pub.inject([ROW])
    waiting = asyncio.ensure_future(outcome(delivery))
    await ticks()
    with pytest.raises(esp.DeliveryUnknown):
        await pub.aclose()
    assert isinstance(await waiting, esp.Closed)


async def test_a_delivery_awaited_after_the_close_does_not_wait_for_what_cannot_come(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0.02, ack_timeout=1.0)
    delivery = await pub.inject([ROW])
    with pytest.raises(esp.DeliveryUnknown):
        await pub.aclose()
    with pytest.raises(esp.Closed):  # not DeliveryUnknown, which says that it is still being tried
        await delivery
    with pytest.raises(esp.EspError):
        await pub.flush()


async def test_an_error_in_the_body_is_not_hidden_by_what_could_not_be_flushed(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    with pytest.raises(ZeroDivisionError):
        async with await bench.publisher(close_timeout=0.02) as pub:
            await pub.inject([ROW])
            raise ZeroDivisionError
    with pytest.raises(esp.DeliveryUnknown):
        async with await bench.publisher(close_timeout=0.02) as pub:
            await pub.inject([ROW])


async def test_after_the_close_every_call_says_so(bench: Bench) -> None:
    pub = await bench.publisher()
    delivery = await pub.inject([ROW])
    await pub.aclose()
    with pytest.raises(esp.Closed, match="open a new one"):
        await pub.inject([ROW])
    assert await delivery == "acked"
    await pub.flush()  # nothing is left to flush, and that is no error


async def test_a_close_wakes_whoever_waits_for_room(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(buffer_blocks=1, close_timeout=0.02)
    await pub.inject([ROW])
    waiting = [asyncio.ensure_future(outcome(pub.inject([ROW]))) for _ in range(3)]
    await ticks()
    with pytest.raises(esp.DeliveryUnknown):
        await pub.aclose()
    assert [type(found) for found in await asyncio.gather(*waiting)] == [esp.Closed] * 3
    assert pub.stats.given == 1


async def test_who_waits_in_line_when_the_close_begins_gets_no_id(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(buffer_blocks=1)
    await pub.inject([ROW])
    waiting = [asyncio.ensure_future(outcome(pub.inject([ROW]))) for _ in range(3)]
    await ticks()
    closing = asyncio.ensure_future(outcome(pub.aclose()))
    await ticks()
    bench.faults.heal()  # now there is room, and the close goes through
    found = await asyncio.gather(*waiting)
    await closing
    assert pub.stats.given == pub.stats.acked  # an id is a promise
    assert [type(each) for each in found] == [esp.Closed] * 3


async def test_a_close_that_was_cancelled_goes_on_sending_and_may_be_repeated(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(buffer_blocks=1)
    delivery = await pub.inject([ROW])
    waiting = [asyncio.ensure_future(outcome(pub.inject([ROW]))), asyncio.ensure_future(outcome(delivery))]
    await ticks()
    closing = asyncio.ensure_future(pub.aclose())
    await ticks()
    closing.cancel()  # while it flushes
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(60):
        assert type(await waiting[0]) is esp.Closed
        assert not waiting[1].done()
        bench.faults.heal()
        await pub.aclose()
        assert await waiting[1] == "acked"


async def test_the_client_closes_its_publishers(bench: Bench) -> None:
    pub = await bench.publisher()
    await pub.inject([ROW])
    await bench.client.aclose()
    assert pub.stats.acked == 1
    with pytest.raises(esp.Closed):
        await pub.inject([ROW])


async def test_an_ack_in_the_turn_in_which_its_waiter_gives_up_is_no_error_of_ours(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        bench.faults.hang("confirmed")
        delivery = await pub.inject([ROW])
        waiting = asyncio.ensure_future(pub.delivered(delivery.id))
        await ticks()
        waiting.cancel()
        pub._acked(delivery.id)  # the ack comes before the waiter has had its turn
        with pytest.raises(asyncio.CancelledError):
            await waiting
        bench.faults.heal()


async def test_who_gives_up_waiting_is_forgotten(bench: Bench) -> None:
    async with await bench.publisher(ack_timeout=60.0) as pub:
        bench.faults.hang("confirmed")
        delivery = await pub.inject([ROW])
        waiting = [asyncio.ensure_future(pub.delivered(delivery.id)) for _ in range(1_000)]
        await ticks()
        for task in waiting[1:]:
            task.cancel()
        await asyncio.wait(waiting[1:])
        assert len(pub._for_ack) <= 3
        bench.faults.heal()
        assert await waiting[0] == "acked"
