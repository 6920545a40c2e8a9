"""Publisher: statistics, notices, trouble, and calls in the wrong place."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub import notices
from tests.unit.workbench import ROW, TOPIC, URL, Bench, outcome, ticks, until
from tests.unit.workbench import TRADES as SCHEMA

# statistics, notices and trouble


async def test_the_statistics_count_what_was_given_sent_and_acknowledged(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    async with await bench.publisher() as pub:
        assert (pub.stats.given, pub.stats.sent, pub.stats.acked, pub.stats.events, pub.stats.bytes) == (0, 0, 0, 0, 0)
        await pub.inject([ROW, ROW])
        await pub.inject([ROW])
        async with asyncio.timeout(60):
            while len(frames := await bench.frames()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        stats = pub.stats
        assert (stats.given, stats.sent, stats.acked, stats.events) == (2, 2, 0, 3)
        assert (stats.waiting_blocks, stats.troubles) == (2, 0)
        assert stats.bytes == stats.waiting_bytes == sum(len(frame.data) for frame in frames)
        bench.faults.heal()
        await pub.flush()
        assert (pub.stats.acked, pub.stats.waiting_blocks, pub.stats.waiting_bytes) == (2, 0, 0)


async def test_trouble_is_told_in_the_words_of_sas_and_so_is_its_end(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        await (await pub.inject([ROW]))
        bench.faults.lose_link()
        delivery = await pub.inject([ROW])  # an idle publisher has nothing to lose
        await until(lambda: bool(bench.told))
        failure = bench.told[0]
        assert isinstance(failure, notices.Failure)
        assert (failure.failure, failure.code) == ("pubsubFail_SERVERDISCONNECT", "pubsubCode_WRITEFAILED")
        assert isinstance(failure.error, esp.BusUnavailable)
        bench.faults.restore()
        assert await delivery == "acked"
        assert isinstance(bench.told[-1], notices.Reconnected)
        assert bench.told[-1].topic == TOPIC
        assert pub.stats.troubles == len(bench.told) - 1


async def test_the_end_of_trouble_is_told_if_the_bus_was_away_from_the_start(bench: Bench) -> None:
    bench.faults.hang("pipe")
    async with await bench.publisher() as pub:
        delivery = await pub.inject([ROW])
        await ticks()
        bench.faults.lose_link()
        bench.faults.heal()
        await until(lambda: bool(bench.told))
        bench.faults.restore()
        assert await delivery == "acked"
        assert isinstance(bench.told[-1], notices.Reconnected)


async def test_the_order_is_kept_over_many_troubles(bench: Bench) -> None:
    stop = asyncio.Event()

    async def trouble(pub: esp.Publisher) -> None:
        for number in range(12):
            acked, troubles = pub.stats.acked, pub.stats.troubles
            if number % 3:
                bench.faults.refuse(number)
            else:
                bench.faults.lose_link()
                await ticks(number)
                bench.faults.restore()
            await until(lambda: pub.stats.troubles > troubles and pub.stats.acked > acked and told_over(pub))  # noqa: B023
        stop.set()

    def told_over(pub: esp.Publisher) -> bool:
        return sum(isinstance(told, notices.Reconnected) for told in bench.told) == pub.stats.troubles

    async with await bench.publisher(buffer_blocks=50) as pub:
        await (await pub.inject([(1, "x", 0.0)]))
        troubling = asyncio.ensure_future(outcome(trouble(pub)))
        while not stop.is_set() and not troubling.done():
            await pub.inject([(pub.stats.given + 1, "x", 0.0)])
        assert await troubling is None
        await pub.flush()
        given = pub.stats.given
    blocks = await bench.blocks(given)
    assert [block.id for block in blocks] == list(range(1, given + 1))
    assert [block.rows()[0][0] for block in blocks] == list(range(1, given + 1))
    assert sum(isinstance(told, notices.Failure) for told in bench.told) == pub.stats.troubles
    assert isinstance(bench.told[-1], notices.Reconnected)


async def test_a_bus_that_refuses_for_good_ends_it_and_everybody_hears_of_it(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(buffer_blocks=2)
    delivery = await pub.inject([ROW])
    bench.faults.refuse(1, error=esp.BusRefused("no such queue"))
    await pub.inject([ROW])
    waiting = [asyncio.ensure_future(outcome(awaited)) for awaited in (delivery, pub.inject([ROW]), pub.flush())]
    found = await asyncio.gather(*waiting)
    assert [type(each) for each in found] == [esp.BusRefused] * 3
    with pytest.raises(esp.BusRefused, match="no such queue"):
        await pub.inject([ROW])
    [failure] = [told for told in bench.told if isinstance(told, notices.Failure)]
    assert (failure.failure, failure.code) == ("pubsubFail_APIFAIL", "pubsubCode_WRITEEVENTS")
    with pytest.raises(esp.EspError):
        await pub.aclose()


async def test_what_a_refusing_bus_did_not_take_is_named_at_the_close(bench: Bench) -> None:
    bench.faults.refuse(1, error=esp.BusRefused("no such queue"))
    with pytest.raises(esp.EspError):  # not in silence: block 1 is on no bus
        async with await bench.publisher() as pub:
            await pub.inject([ROW])
            await until(lambda: bool(bench.told))


@pytest.mark.parametrize("when", range(-6, 8))
async def test_a_close_at_the_moment_of_trouble_ends(bench: Bench, when: int) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0)
    await pub.inject([ROW])
    await until(lambda: pub.stats.sent == 1)
    assert pub._task is not None
    if when >= 0:
        bench.faults.lose_link()
        await ticks(when)
    closing = asyncio.ensure_future(outcome(pub.aclose()))
    if when < 0:
        await ticks(-when)
        bench.faults.lose_link()
    done, _ = await asyncio.wait([closing], timeout=2)
    if not done:
        pub._task.cancel()
    await asyncio.wait([closing])
    assert done, "the close waits forever"


# the wrong place


async def test_another_loop_is_told(bench: Bench) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0.01)
    delivery = await pub.inject([ROW])

    def elsewhere() -> list[Any]:
        async def all_of_them() -> list[Any]:
            calls: list[Callable[[], Awaitable[Any]]] = [
                lambda: pub.inject([ROW]), pub.flush, lambda: delivery, lambda: pub.delivered(1), pub.aclose,
            ]  # fmt: skip
            found = []
            for call in calls:
                try:
                    async with asyncio.timeout(0.5):
                        found.append(await call())
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                    found.append(error)
            return found

        return asyncio.run(all_of_them())

    found = await asyncio.to_thread(elsewhere)
    bench.faults.heal()
    assert [type(error) for error in found] == [esp.WrongOrder] * 5
    assert all("another event loop" in str(error) for error in found)
    assert await delivery == "acked"
    await pub.aclose()


FORK = """
import asyncio, os, sys, traceback
import esp_pubsub as esp

URL = "dfESP://test:5555/project/query/window"

async def refused(awaited):
    try:
        async with asyncio.timeout(60):
            await awaited
    except esp.WrongOrder as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("no WrongOrder")

async def child(client, pub, sub, delivery):
    await refused(pub.inject([(1,)]))
    await refused(pub.flush())
    await refused(delivery)
    await refused(anext(sub))
    await refused(pub.aclose())
    await refused(client.aclose())
    try:
        client.publisher(URL, "id*:int64")
    except esp.WrongOrder:
        pass
    await refused(open_again())
    async with esp.init(dir=sys.argv[2]) as own, own.publisher(URL, "id*:int64") as mine:
        await (await mine.inject([(2,)]))

async def open_again():
    await esp.init(dir=sys.argv[1])

async def main():
    async with esp.init(dir=sys.argv[1]) as client, client.publisher(URL, "id*:int64") as pub:
        async with client.subscriber(URL, side="in", start="earliest") as sub:
            delivery = await pub.inject([(1,)])
            pid = os.fork()
            if pid == 0:
                try:
                    asyncio.run(child(client, pub, sub, delivery))
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert status[1] == 0, status
            async with asyncio.timeout(60):
                print((await anext(sub)).rows())
            await (await pub.inject([(3,)]))
            print((await anext(sub)).rows())

asyncio.run(main())
"""


def test_a_forked_child_is_told_and_harms_nobody(bus_directory: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, bus_directory / "parent", bus_directory / "child"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    assert (done.stdout, done.returncode) == ("[(1,)]\n[(3,)]\n", 0), done.stderr


async def test_a_publisher_that_was_not_awaited_says_so(bench: Bench) -> None:
    opening = bench.client.publisher(URL, SCHEMA)
    pub = await opening
    with pytest.raises(esp.WrongOrder, match="opened already"):
        await opening
    await pub.aclose()


async def test_a_publisher_cannot_be_had_from_a_closed_client(bus_directory: Path) -> None:
    client = await esp.init(dir=bus_directory)
    opening = client.publisher(URL, SCHEMA)
    await client.aclose()
    with pytest.raises(esp.Closed):
        client.publisher(URL, SCHEMA)
    with pytest.raises(esp.Closed):
        await opening


async def test_the_log_election_is_refused_where_the_past_cannot_be_read(bench: Bench) -> None:
    bench.faults.capabilities = replace(bench.faults.capabilities, replay=False, elections=("token",))
    with pytest.raises(esp.ConfigError, match=r"election 'log'.*take one of 'token', 'zookeeper://"):
        await bench.client.publisher(URL, SCHEMA, failover=esp.Failover("feed", election="log"))
