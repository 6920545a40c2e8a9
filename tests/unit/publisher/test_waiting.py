"""Publisher: who waits for room, in which order, and what others get done meanwhile."""

import asyncio

import pytest

from tests.unit.workbench import ROW, Bench, outcome, ticks


async def test_inject_waits_while_the_buffer_is_full_of_blocks(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=3) as pub:
        for _ in range(3):
            await pub.inject([ROW])
        waiting = asyncio.ensure_future(pub.inject([ROW]))
        await ticks()
        assert not waiting.done()
        assert (pub.stats.given, pub.stats.waiting_blocks) == (3, 3)
        bench.faults.heal()
        assert (await waiting).id == 4
        await pub.flush()
        assert (pub.stats.waiting_blocks, pub.stats.waiting_bytes) == (0, 0)


async def test_inject_waits_while_the_buffer_is_full_of_bytes(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_bytes=10_000) as pub:
        await pub.inject([(1, "x" * 6_000, 0.0)])
        waiting = asyncio.ensure_future(pub.inject([(2, "x" * 6_000, 0.0)]))
        await ticks()
        assert not waiting.done()
        assert pub.stats.waiting_bytes <= 10_000
        bench.faults.heal()
        assert (await waiting).id == 2


async def test_one_block_larger_than_the_buffer_passes_when_it_is_empty(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_bytes=1_000) as pub:
        assert (await pub.inject([(1, "x" * 50_000, 0.0)])).id == 1
        large = asyncio.ensure_future(pub.inject([(2, "x" * 50_000, 0.0)]))
        small = asyncio.ensure_future(pub.inject([ROW]))
        await ticks()
        assert not large.done() and not small.done()
        bench.faults.heal()
        assert ((await large).id, (await small).id) == (2, 3)
        await pub.flush()


async def test_who_came_first_is_served_first(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=1) as pub:
        await pub.inject([ROW])
        ids: list[tuple[str, int]] = []

        async def inject(name: str) -> None:
            ids.append((name, (await pub.inject([ROW])).id))

        waiting = []
        for name in "abcde":
            waiting.append(asyncio.ensure_future(inject(name)))
            await ticks(2)
        bench.faults.heal()
        await asyncio.gather(*waiting)
        assert ids == list(zip("abcde", range(2, 7), strict=True))


async def test_who_comes_back_stands_at_the_end_of_the_line(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=4) as pub:
        for _ in range(4):
            await pub.inject([ROW])
        order: list[str] = []

        async def twice(name: str) -> None:
            for _ in range(2):
                await pub.inject([ROW])
                order.append(name)

        waiting = []
        for name in "ab":
            waiting.append(asyncio.ensure_future(twice(name)))
            await ticks(2)
        bench.faults.heal()  # room for all four at once
        await asyncio.gather(*waiting)
        assert order == ["a", "b", "a", "b"]


async def test_a_cancelled_inject_published_nothing(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=1) as pub:
        await pub.inject([(1, "one", 1.0)])
        cancelled = [asyncio.ensure_future(pub.inject([(2, "two", 2.0)])) for _ in range(2)]
        last = asyncio.ensure_future(pub.inject([(3, "three", 3.0)]))
        await ticks()
        for task in cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        bench.faults.heal()
        assert (await last).id == 2
        await pub.flush()
    assert [block.rows()[0][1] for block in await bench.blocks(2)] == ["one", "three"]


async def test_an_inject_cancelled_as_room_comes_leaves_the_line_to_the_next(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher(buffer_blocks=1) as pub:
        await pub.inject([ROW])
        first, second = (asyncio.ensure_future(outcome(pub.inject([ROW]))) for _ in range(2))
        await ticks()
        acked = pub._sender._acked

        def cancel_too(id: int) -> None:
            acked(id)
            first.cancel()

        pub._sender._acked = cancel_too
        bench.faults.heal()
        found = await second
        assert first.cancelled()
        assert found.id == 2


async def test_other_tasks_get_their_turn_while_one_injects_without_waiting(bench: Bench) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with await bench.publisher() as pub:
        task = asyncio.ensure_future(other())
        for _ in range(1_000):
            await pub.inject([ROW])
        task.cancel()
    assert turns >= 10


async def test_many_who_wait_for_room_wake_one_another_in_turn(bench: Bench) -> None:
    async with await bench.publisher(buffer_blocks=5) as pub:
        wakings = 0
        wait = asyncio.Event.wait

        async def counted(event: asyncio.Event) -> bool:
            nonlocal wakings
            wakings += event in pub._queue
            return await wait(event)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.Event, "wait", counted)
            deliveries = await asyncio.gather(*(pub.inject([ROW]) for _ in range(500)))
        assert [delivery.id for delivery in deliveries] == list(range(1, 501))
        assert wakings < 5 * 500  # not one for each of those who wait, each time one of them goes
