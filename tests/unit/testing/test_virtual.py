"""The virtual clock and faults, as a user's tests have them."""

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.testing import Faults, Stuck, run_virtual

URL = "dfESP://test:5555/project/query/window"
SCHEMA = "id*:int64"


def test_an_hour_of_publishing_passes_at_once() -> None:
    async def scene(init: Any) -> tuple[int, float]:
        async with (
            init() as one,
            init() as two,
            one.publisher(URL, SCHEMA) as pub,
            two.subscriber(URL, side="in", start="earliest") as sub,
        ):
            for number in range(60):
                assert await (await pub.inject([(number,)])) == "acked"
                await asyncio.sleep(60)
            blocks = [await anext(sub) for _ in range(60)]
        assert [block.rows() for block in blocks] == [[(number,)] for number in range(60)]
        return len(blocks), asyncio.get_running_loop().time()

    began, threads = time.monotonic(), threading.active_count()
    count, virtual = run_virtual(scene, limit=4_000)
    assert (count, threading.active_count()) == (60, threads)
    assert virtual > 3_600 > 100 * (time.monotonic() - began)


def test_a_group_goes_on_when_its_active_member_closes() -> None:
    async def scene(init: Any) -> list[int]:
        async with init() as one, init() as two, two.subscriber(URL, SCHEMA, side="in", start="earliest") as sub:
            feeds = [await client.publisher(URL, SCHEMA, failover=esp.Failover("g")) for client in (one, two)]
            for number in range(10):
                for pub in feeds:
                    await pub.inject([(number,)])
            await feeds[0].flush()
            active, standby = sorted(feeds, key=lambda pub: pub.stats.role)
            await active.aclose()
            await standby.inject([(10,)])
            return [(await anext(sub)).id for _ in range(11)]

    assert run_virtual(scene) == list(range(1, 12))


def test_a_scene_that_waits_for_nothing_is_stuck_at_once() -> None:
    async def scene(init: Any) -> None:
        async with init() as client, client.subscriber(URL, SCHEMA, side="in") as sub:
            await anext(sub)

    with pytest.raises(Stuck, match=r"waits in \S*scene \(test_virtual\.py:\d+\) for \S+ \(\w+\.py:\d+\)"):
        run_virtual(scene)


def test_a_scene_that_never_ends_is_stuck_at_its_limit() -> None:
    async def scene(_: Any) -> None:
        for _ in range(100):
            await asyncio.sleep(1)

    with pytest.raises(Stuck, match=r"9\.000 s"):
        run_virtual(scene, limit=9.5)


def test_an_error_of_the_scene_is_raised() -> None:
    async def scene(init: Any) -> None:
        async with init() as client, client.publisher(URL, SCHEMA) as pub:
            await pub.inject([("one",)])

    with pytest.raises(esp.ValueRefused):
        run_virtual(scene)


def test_an_error_that_nobody_took_is_raised() -> None:
    async def scene(_: Any) -> None:
        def fail() -> None:
            raise ValueError("unseen")

        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="unseen"):
        run_virtual(scene)


async def test_within_a_coroutine_it_refuses() -> None:
    async def scene(_: Any) -> None:
        raise AssertionError("it ran")

    with pytest.raises(esp.WrongOrder, match="plain function"):
        run_virtual(scene)
    await asyncio.sleep(0)  # our loop still runs


def test_notices_come_to_whoever_asked_for_them() -> None:
    told: list[Any] = []

    async def scene(init: Any) -> None:
        async with init(on_notice=told.append) as client:
            faults = Faults.into(client)
            assert client.bus is faults
            async with client.publisher(URL, SCHEMA) as pub:
                faults.refuse(2)
                deliveries = [await pub.inject([(number,)]) for number in range(3)]
                assert [await delivery for delivery in deliveries] == ["acked"] * 3

    run_virtual(scene)
    assert [type(notice).__name__ for notice in told] == ["Failure", "Reconnected"]


def test_what_a_thread_is_given_is_done_a_moment_later() -> None:
    def fails() -> None:
        raise OSError("so")

    async def scene(init: Any) -> None:
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(OSError, match="so"):
            await asyncio.to_thread(fails)
        done: list[int] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.to_thread(done.append, 1)
        await asyncio.sleep(1)
        assert done == [1]  # a thread that was begun is not cancelled

    run_virtual(scene)
