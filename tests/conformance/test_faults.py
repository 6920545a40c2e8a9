"""What `Faults` does beyond what the conformance suite provokes with it."""

import asyncio
import secrets
import time

import pytest
import sample_bus

from esp_pubsub.errors import BusRefused, BusUnavailable
from esp_pubsub.testing.faults import Faults


@pytest.fixture
async def faults():
    bus = Faults(await sample_bus.open_bus(sample_bus.Options(hub=secrets.token_hex(4))))
    yield bus
    await bus.aclose()


async def data(feed, count):
    found = []
    while len(found) < count:
        found += [message.data for message in await feed.read(100, 1 << 20)]
    return found


async def test_lost_link_ends_everything_until_it_is_restored(faults):
    feed, pipe = await faults.feed("t", "latest", None), await faults.pipe("t")
    waiting = [asyncio.ensure_future(call) for call in (feed.read(1, 1), pipe.confirmed(0))]
    await asyncio.sleep(0)
    faults.lose_link()
    faults.lose_link()
    assert [type(e) for e in await asyncio.gather(*waiting, return_exceptions=True)] == [BusUnavailable] * 2
    for call in (faults.pipe("t"), faults.feed("t", "latest", None), faults.retained("t", "k"), pipe.write([b"x"])):
        with pytest.raises(BusUnavailable, match="lost"):
            await call
    faults.restore()
    with pytest.raises(BusUnavailable, match="lost"):
        await pipe.write([b"x"])
    again = await faults.feed("t", "latest", None)
    await (await faults.pipe("t")).write([b"y"])
    assert await data(again, 1) == [b"y"]
    for dead in (feed, pipe):
        await dead.aclose()


async def test_delay_makes_a_bus_confirm_late(faults):
    pipe = await faults.pipe("t")
    faults.delay(0.05, "confirmed")
    await pipe.write([b"x"])
    began = time.monotonic()
    assert await pipe.confirmed(0) == 1
    assert time.monotonic() - began >= 0.05
    faults.heal()
    await pipe.write([b"y"])
    async with asyncio.timeout(0.05):
        assert await pipe.confirmed(1) == 2


@pytest.mark.parametrize("call", ["write", "confirmed", "read"])
async def test_what_hangs_goes_on_when_healed_and_can_be_cancelled(faults, call):
    feed, pipe = await faults.feed("t", "latest", None), await faults.pipe("t")
    if call != "write":
        await pipe.write([b"x"])
    calls = {
        "write": lambda: pipe.write([b"x"]),
        "confirmed": lambda: pipe.confirmed(0),
        "read": lambda: feed.read(1, 1),
    }
    faults.hang(call)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await calls[call]()
    waiting = asyncio.ensure_future(calls[call]())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    faults.heal()
    async with asyncio.timeout(1):
        await waiting
        assert call == "read" or await data(feed, 1) == [b"x"]


async def test_what_hangs_ends_with_the_link(faults):
    pipe = await faults.pipe("t")
    faults.hang("write")
    waiting = asyncio.ensure_future(pipe.write([b"x"]))
    await asyncio.sleep(0)
    faults.lose_link()
    with pytest.raises(BusUnavailable, match="lost"):
        await waiting


@pytest.mark.parametrize("hole", [False, True])
async def test_the_nth_message_is_refused_over_several_writes_and_pipes(faults, hole):
    feed, one, other = await faults.feed("t", "latest", None), await faults.pipe("t"), await faults.pipe("t")
    faults.refuse(5, hole=hole)
    faults.refuse(7)
    await one.write([b"1", b"2"])
    waiting = asyncio.ensure_future(other.confirmed(1))
    await asyncio.sleep(0)
    with pytest.raises(BusUnavailable, match="refused"):
        await other.write([b"3", b"4", b"5", b"6"])
    assert await waiting == 2
    for call in (other.confirmed(2), other.write([b"no"])):
        with pytest.raises(BusUnavailable, match="refused"):
            await call
    with pytest.raises(BusUnavailable, match="refused"):
        await one.write([b"7"])
    assert await data(feed, 5 if hole else 4) == [b"1", b"2", b"3", b"4", *([b"6"] if hole else [])]


async def test_the_error_can_be_chosen_and_ends_a_waiting_confirmed(faults):
    pipe = await faults.pipe("t")
    faults.refuse(error=BusRefused("no"))
    waiting = asyncio.ensure_future(pipe.confirmed(0))
    await asyncio.sleep(0)
    with pytest.raises(BusRefused, match="no"):
        await pipe.write([b"x", b"y"])
    with pytest.raises(BusRefused, match="no"):
        await waiting
