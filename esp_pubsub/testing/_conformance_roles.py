"""Checks of what a bus may offer besides streams: retained values, requests, the catalog."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

from esp_pubsub.bus import Bus, Catalog, Requests
from esp_pubsub.errors import BusError, NoAnswer

from ._trial import Failed, Trial, check, require, short

_ASK = b"ready?"


# retained values


async def _retain(t: Trial, bus: Bus, topic: str, key: str, value: bytes | None) -> None:
    await t.within("retain", bus.retain(topic, key, value))


async def _retained(t: Trial, bus: Bus, topic: str, key: str, value: bytes | None) -> None:
    found = await t.within("retained", bus.retained(topic, key))
    require(found == value, f"the value of {key!r} should be {short(value)}, but is {short(found)}")
    require(found is None or type(found) is bytes, f"the value of {key!r} is a {type(found).__name__}, not bytes")


@check("retained")
async def last_value_wins(t: Trial) -> None:
    """Every connection gets the value retained last, as soon as `retain` has returned; None forgets it."""
    topic, here, there = t.topic(), await t.bus(), await t.bus()
    await _retained(t, there, topic, "k", None)
    for n in range(20):
        await _retain(t, here, topic, "k", b"%d" % n)
        await _retained(t, there, topic, "k", b"%d" % n)
    await _retain(t, there, topic, "k", b"theirs")
    await _retained(t, here, topic, "k", b"theirs")
    await _retained(t, await t.bus(), topic, "k", b"theirs")
    await _retain(t, here, topic, "k", None)
    await _retain(t, here, topic, "k", None)
    await _retained(t, there, topic, "k", None)
    await _retain(t, here, topic, "k", b"again")
    await _retained(t, there, topic, "k", b"again")


@check("retained")
async def values_by_topic_and_key(t: Trial) -> None:
    """Values of two topics or two keys are independent; a key may hold blanks, slashes and any letter."""
    bus, one, other = await t.bus(), t.topic(), t.topic()
    keys = ["k", "kk", "a key/with: all.sorts ü", "x" * 200]
    for topic in (one, other):
        for key in keys:
            await _retain(t, bus, topic, key, f"{topic} {key}".encode())
    await _retain(t, bus, one, "k", None)
    for topic in (one, other):
        for key in keys:
            await _retained(t, bus, topic, key, None if (topic, key) == (one, "k") else f"{topic} {key}".encode())


@check("retained")
async def values_of_any_bytes(t: Trial) -> None:
    """A value may be empty, which is not forgotten, and any bytes up to 64 KiB."""
    here, there, topic = await t.bus(), await t.bus(), t.topic()
    for value in (b"", b"\0", bytes(range(256)), bytes(range(256)) * 256, b"small again"):
        await _retain(t, here, topic, "k", value)
        await _retained(t, there, topic, "k", value)


@check("retained")
async def values_beside_messages(t: Trial) -> None:
    """Retaining is no message: no feed of the topic sees it, and messages change no value."""
    topic, bus = t.topic(), await t.bus()
    feed = await t.feed(topic, bus=bus)
    await _retain(t, bus, topic, "k", b"value")
    await t.quietly("read after a retain", feed.read(10, 1 << 20))
    await t.write_to(topic, [b"message"])
    await t.expect(feed, [b"message"])
    await _retained(t, bus, topic, "k", b"value")


@check("retained")
async def values_retained_at_once(t: Trial) -> None:
    """Forty values retained at once over two connections are all there; of one key, one of them is."""
    topic, buses = t.topic(), (await t.bus(), await t.bus())
    async with asyncio.TaskGroup() as tasks:
        for n in range(40):
            tasks.create_task(_retain(t, buses[n % 2], topic, f"{n}", b"%d" % n))
            tasks.create_task(_retain(t, buses[n % 2], topic, "all", b"%d" % n))
    for n in range(40):
        await _retained(t, buses[(n + 1) % 2], topic, f"{n}", b"%d" % n)
    found = [await t.within("retained", bus.retained(topic, "all")) for bus in buses]
    require(found[0] == found[1] and found[0] in [b"%d" % n for n in range(40)], f"of one key, {found} are there")


# requests


@contextlib.asynccontextmanager
async def _serving(t: Trial, bus: Bus, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> AsyncIterator[None]:
    """A server at work: it is in place when it has answered once."""

    async def told(data: bytes) -> bytes:
        return data if data == _ASK else await answer(data)

    async with t.meanwhile(cast(Requests, bus).serve(topic, told)) as serving:
        await t.within("the first answer of a server", _until_answered(bus, topic))
        yield
        if serving.done():
            raise Failed(f"serve ended: {serving.exception()!r}")


async def _until_answered(bus: Bus, topic: str) -> None:
    while True:
        with contextlib.suppress(NoAnswer, BusError):
            await cast(Requests, bus).request(topic, _ASK, 0.5)
            return


async def _ask(t: Trial, bus: Bus, topic: str, data: bytes) -> bytes:
    return await t.within("request", cast(Requests, bus).request(topic, data, t.patience))


async def _backwards(data: bytes) -> bytes:
    return data[::-1]


@check("requests")
async def request_is_answered(t: Trial) -> None:
    """A request gets its server's answer, over another connection, whatever the bytes."""
    topic, bus, asker = t.topic(), await t.bus(), await t.bus()
    async with _serving(t, bus, topic, _backwards):
        for data in (b"abc", b"", bytes(range(256)), b"ab" * 30_000):
            answer = await _ask(t, asker, topic, data)
            require(answer == data[::-1], f"the answer to {short(data)} is {short(answer)}")
        require(await _ask(t, bus, topic, b"abc") == b"cba", "another answer over the server's own connection")


@check("requests")
async def nobody_answers(t: Trial) -> None:
    """With no server a request is NoAnswer within its timeout, also beside a server of another topic."""
    topic, bus = t.topic(), await t.bus()
    async with _serving(t, bus, topic + "x", _backwards):
        began = time.monotonic()
        try:
            answer = await t.within("request", cast(Requests, bus).request(topic, b"?", 0.2))
        except NoAnswer:
            pass
        else:
            raise Failed(f"nobody serves this topic, but {short(answer)} came")
        require(time.monotonic() - began < 1.2, "a request with a timeout of 0.2 s took more than 1.2 s")


@check("requests")
async def each_request_once(t: Trial) -> None:
    """With three servers and twenty askers at once, each request is handled once and each answer is its asker's own."""
    topic, servers, askers = t.topic(), [await t.bus() for _ in range(3)], [await t.bus(), await t.bus()]
    handled: Counter[bytes] = Counter()

    async def answer(data: bytes) -> bytes:
        handled[data] += 1
        await asyncio.sleep(0)
        return b"answer to " + data

    async def ask(number: int) -> None:
        for n in range(5):
            data = b"%d-%d" % (number, n)
            found = await _ask(t, askers[number % 2], topic, data)
            require(found == b"answer to " + data, f"{short(data)} was answered with {short(found)}")

    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(_serving(t, server, topic, answer))
        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(ask(number))
    require(len(handled) == 100, f"100 requests were answered, but {len(handled)} handled")
    twice = [data for data, count in handled.items() if count > 1]
    require(not twice, f"handled more than once: {short(twice)}")


@check("requests")
async def late_answer(t: Trial) -> None:
    """An answer that comes after its asker's timeout goes to nobody, and the server serves on."""
    topic, bus, asker = t.topic(), await t.bus(), await t.bus()
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(data: bytes) -> bytes:
        if data == b"slow":
            begun.set()
            await go_on.wait()
        return b"answer to " + data

    async with _serving(t, bus, topic, slow):
        await _ask(t, asker, topic, b"first")  # which takes longer where answers need a place of their own
        try:
            await t.within("request", cast(Requests, asker).request(topic, b"slow", 0.3))
        except NoAnswer:
            pass
        else:
            raise Failed("an answer came before the server gave one")
        require(begun.is_set(), "the server was not asked within 0.3 s")
        go_on.set()
        for n in range(5):
            found = await _ask(t, asker, topic, b"%d" % n)
            require(found == b"answer to %d" % n, f"{short(found)} came in answer to {n}")


@check("requests")
async def slow_server(t: Trial) -> None:
    """A server that takes its time answers within the asker's timeout; it is asked one thing at a time."""
    topic, bus, asker = t.topic(), await t.bus(), await t.bus()
    at_once, most = 0, 0

    async def slow(data: bytes) -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.05)
        at_once -= 1
        return data

    async with _serving(t, bus, topic, slow):
        asked = [b"%d" % n for n in range(6)]
        found = await asyncio.gather(*(_ask(t, asker, topic, data) for data in asked))
    require(found == asked, f"{short(found)} came in answer to {short(asked)}")
    require(most == 1, f"a server was asked {most} things at a time")


@check("requests")
async def former_server(t: Trial) -> None:
    """A server that was cancelled is asked no more: another one gets all requests, with none there is NoAnswer."""
    topic, bus, other = t.topic(), await t.bus(), await t.bus()

    async def first(data: bytes) -> bytes:
        return b"first"

    async def second(data: bytes) -> bytes:
        return b"second"

    async with _serving(t, bus, topic, first):
        require(await _ask(t, other, topic, b"?") == b"first", "another server answered")
    async with _serving(t, other, topic, second):
        for _ in range(10):
            require(await _ask(t, bus, topic, b"?") == b"second", "a server answered that was cancelled")
    try:
        await t.within("request", cast(Requests, bus).request(topic, b"?", 0.2))
    except NoAnswer:
        return
    raise Failed("a server answered that was cancelled")


@check("requests")
async def cancelled_request(t: Trial) -> None:
    """A request cancelled anywhere leaves nothing behind: the next ones get their own answers."""
    topic, bus, asker = t.topic(), await t.bus(), await t.bus()
    async with _serving(t, bus, topic, _backwards):
        for n in range(16):
            call = cast(Requests, asker).request(topic, b"cancelled %d" % n, t.patience)
            await t.cancelled(call, n // 2, late=bool(n % 2))
            data = b"kept %d" % n
            found = await _ask(t, asker, topic, data)
            require(found == data[::-1], f"{short(found)} came in answer to {short(data)}")


# the catalog


@check("catalog")
async def topics_are_listed(t: Trial) -> None:
    """The catalog lists each topic that was written to, once, sorted, over every connection."""
    bus = await t.bus()
    written = [t.topic() for _ in range(5)]
    for topic in written:
        await t.write_to(topic, [b"a", b"b"])
    for catalog in (bus, await t.bus()):
        names = list(await t.within("topics", cast(Catalog, catalog).topics()))
        missing = sorted(set(written) - set(names))
        require(not missing, f"not in the catalog: {short(missing)}")
        require(names == sorted(set(names)), f"the catalog is not sorted, or has doubles: {short(names)}")
