"""Checks of the writing side: order, confirmation, the prefix rule, trouble, cancellation, close."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable

from esp_pubsub.bus import Message, Pipe
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from ._trial import Trial, check, is_in_order, numbered, require, same, short


@check()
async def order_of_one_pipe(t: Trial) -> None:
    """What one pipe writes is read in the order of its writes, whatever their sizes."""
    topic = t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic)
    sent = numbered(100)
    at = 0
    for size in (1, 7, 2, 40, 1, 1, 48):
        await t.within("write", pipe.write(sent[at : at + size]))
        at += size
    await t.expect(feed, sent)


@check("replay")
async def one_order_for_all_readers(t: Trial) -> None:
    """Several pipes write one topic at once: all readers see the same order, and each pipe's own within it."""
    topic = t.topic()
    feeds = [await t.feed(topic), await t.feed(topic, bus=await t.bus())]
    sent = await _write_from_four(t, topic)
    feeds.append(await t.feed(topic, "earliest"))
    first, *others = [await t.read(feed, 80) for feed in feeds]
    _check_each_pipe(first, sent)
    for other in others:
        require(other == first, "two readers saw different orders or positions")
    positions = [message.position for message in first]
    require(positions == sorted(set(positions)), f"positions do not only grow: {short(positions)}")


@check()
async def order_of_several_pipes(t: Trial) -> None:
    """Several pipes write one topic at once: every reader sees each pipe's messages in their order, each once."""
    topic = t.topic()
    feeds = [await t.feed(topic), await t.feed(topic, bus=await t.bus())]
    sent = await _write_from_four(t, topic)
    for feed in feeds:
        _check_each_pipe(await t.read(feed, 80), sent)


async def _write_from_four(t: Trial, topic: str) -> list[list[bytes]]:
    other = await t.bus()
    sent = [numbered(20, name) for name in "abcd"]
    pipes = [await t.pipe(topic), await t.pipe(topic), await t.pipe(topic, other), await t.pipe(topic, other)]

    async def write(pipe: Pipe, messages: list[bytes]) -> None:
        for at in range(0, 20, 2):
            await t.put(pipe, messages[at : at + 2], at)

    async with asyncio.TaskGroup() as tasks:
        for pipe, messages in zip(pipes, sent, strict=True):
            tasks.create_task(write(pipe, messages))
    return sent


def _check_each_pipe(found: list[Message], sent: list[list[bytes]]) -> None:
    for messages in sent:
        same([message.data for message in found if message.data in messages], messages)


@check()
async def confirmations_count_in_order(t: Trial) -> None:
    """`confirmed` counts a pipe's messages from its first, reaches their number and never goes beyond it."""
    pipe = await t.pipe(t.topic())
    await t.put(pipe, numbered(3))
    await t.put(pipe, numbered(1), 3)
    await t.put(pipe, numbered(50), 4)
    await t.quietly("confirmed(54), with 54 messages written,", pipe.confirmed(54))


@check()
async def each_pipe_counts_for_itself(t: Trial) -> None:
    """The confirmations of a new pipe begin at 0, and those of another pipe on the topic do not count."""
    topic = t.topic()
    one, other = await t.pipe(topic), await t.pipe(topic)
    await t.put(one, numbered(5))
    await t.quietly("confirmed(0) of a pipe that wrote nothing", other.confirmed(0))
    await t.put(await t.pipe(topic), numbered(2))


@check()
async def confirmed_waits_for_the_next(t: Trial) -> None:
    """`confirmed(n)` waits until message n + 1 is confirmed; it may wait while another task writes."""
    pipe = await t.pipe(t.topic())
    async with t.meanwhile(pipe.confirmed(0)) as waiting:
        await t.within("write", pipe.write(numbered(1)))
        require(await t.within("confirmed(0)", waiting) == 1, "one message written, another number confirmed")
    async with t.meanwhile(pipe.confirmed(1)) as waiting:
        await asyncio.sleep(t.context.quiet)
        require(not waiting.done(), "confirmed(1) did not wait for the second message")
        await t.within("write", pipe.write(numbered(1)))
        await t.within("confirmed(1)", waiting)


@check()
async def confirmed_means_readable(t: Trial) -> None:
    """Every message that is confirmed is read by a feed that was there before, also over another connection."""
    topic = t.topic()
    here, there = await t.feed(topic), await t.feed(topic, bus=await t.bus())
    pipe = await t.pipe(topic)
    for n in range(20):
        await t.put(pipe, [b"%d" % n], n)
        await t.expect(here, [b"%d" % n])
        await t.expect(there, [b"%d" % n])


@check()
async def nothing_and_empty(t: Trial) -> None:
    """Writing no messages does nothing and counts nothing; a message of no bytes is a message."""
    topic = t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic)
    await t.within("write of nothing", pipe.write([]))
    await t.quietly("confirmed(0), with nothing written,", pipe.confirmed(0))
    pipe = await t.pipe(topic)
    await t.put(pipe, [b"", b"a", b""])
    await t.within("write of nothing", pipe.write([]))
    await t.put(pipe, [b"b"], 3)
    await t.expect(feed, [b"", b"a", b"", b"b"])


@check()
async def any_bytes(t: Trial) -> None:
    """Bytes come back as they went, all 256 of them, and as `bytes`."""
    topic = t.topic()
    feed = await t.feed(topic)
    sent = [bytes(range(256)), b"\0" * 1000, b"\xff\xfe", b"\r\n", bytes(range(256)) * 300]
    await t.write_to(topic, sent)
    found = await t.expect(feed, sent)
    require(all(type(message.data) is bytes for message in found), "the data of a message is not bytes")


@check()
async def largest_message(t: Trial) -> None:
    """A message of `max_message_bytes` passes."""
    topic = t.topic()
    feed = await t.feed(topic)
    await t.write_to(topic, [b"x" * t.capabilities.max_message_bytes])
    (found,) = await t.read(feed, 1)
    require(len(found.data) == t.capabilities.max_message_bytes, f"it came with {len(found.data)} bytes")


@check()
async def oversized_message_is_refused(t: Trial) -> None:
    """A message over `max_message_bytes` is BusRefused, and is not on the bus."""
    topic = t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic)
    await t.raises(BusRefused, "a message over max_message_bytes", _write_and_confirm(pipe, [_oversized(t)]))
    await t.within("aclose of a pipe", pipe.aclose())
    await t.write_to(topic, [b"after"])
    await t.expect(feed, [b"after"])


async def _write_and_confirm(pipe: Pipe, sent: list[bytes], before: int = 0) -> int:
    await pipe.write(sent)
    count = before
    while count < before + len(sent):
        count = await pipe.confirmed(count)
    return count


def _oversized(t: Trial) -> bytes:
    return b"x" * (t.capabilities.max_message_bytes + 1)


@check()
async def dead_pipe_stays_dead(t: Trial) -> None:
    """A pipe that had trouble takes nothing more, so that nothing follows what is missing; a new pipe works."""
    topic = t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic)
    await t.put(pipe, [b"before"])
    await t.raises(BusRefused, "a message over max_message_bytes", _write_and_confirm(pipe, [_oversized(t)], 1))
    await t.raises(BusError, "a write to a dead pipe", pipe.write([b"ghost"]))
    await t.within("aclose of a dead pipe", pipe.aclose())
    await t.write_to(topic, [b"after"])
    await t.expect(feed, [b"before", b"after"])


@check()
async def dead_pipe_confirms_no_more(t: Trial) -> None:
    """`confirmed` raises when what it waits for can no longer come: also where it waits while a write is refused."""
    pipe = await t.pipe(t.topic())
    await t.put(pipe, [b"before"])
    async with t.meanwhile(pipe.confirmed(1)) as waiting:
        await _went(t, pipe.write([_oversized(t)]))
        await t.raises(BusError, "confirmed of a dead pipe", waiting)
    await t.within("aclose of a dead pipe", pipe.aclose())


@check()
async def prefix_rule_in_one_write(t: Trial) -> None:
    """One message of a write cannot go: what is on the bus is a prefix, or has a hole that the pipe reports."""
    topic = t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic)
    sent = [b"1", b"2", _oversized(t), b"4", b"5"]
    counts = [0]
    async with t.meanwhile(_count(pipe, counts)) as counting:
        await _went(t, pipe.write(sent))
        await asyncio.wait([counting], timeout=min(1.0, t.patience))
    await t.within("aclose of a pipe", pipe.aclose())
    await _check_prefix(t, sent, await t.all_there_is(feed), counts[-1])
    require(counts[-1] <= 2, f"{counts[-1]} messages are confirmed, but the third cannot be")


@check("fail_in_the_middle")
async def prefix_rule(t: Trial) -> None:
    """A message in the middle is refused or goes unconfirmed: what follows it stays away, or the hole is reported.

    With `suffix_only`, what is on the bus afterwards is a prefix of what was written. Without, something may be missing
    in the middle, but then the pipe never confirms past the hole.
    """
    assert t.context.fail_in_the_middle is not None
    bus, topic = await t.bus(), t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic, bus)
    sent = numbered(3)
    await t.put(pipe, sent)
    counts = [3]
    async with t.meanwhile(_count(pipe, counts)) as counting:
        async with t.context.fail_in_the_middle(bus, topic) as unlucky:
            sent += [unlucky, b"next", b"next but one"]
            alive = await _went(t, pipe.write(sent[3:]))
            await asyncio.wait([counting], timeout=min(1.0, t.patience))
        if alive:
            sent.append(b"late")
            await _went(t, pipe.write([b"late"]))
            await asyncio.wait([counting], timeout=t.context.quiet)
    require(counts[-1] == 3, f"{counts[-1]} messages are confirmed, but the fourth was to be refused")
    await t.within("aclose of a pipe", pipe.aclose())
    await _check_prefix(t, sent, await t.all_there_is(feed), counts[-1])
    await t.write_to(topic, [b"a new pipe"], await t.bus())
    await t.expect(feed, [b"a new pipe"])


async def _went(t: Trial, call: Awaitable[object]) -> bool:
    """Whether a call that may be trouble, or may never be answered, ended well."""
    with contextlib.suppress(BusError, TimeoutError):
        async with asyncio.timeout(min(1.0, t.patience)):
            await call
            return True
    return False


async def _count(pipe: Pipe, counts: list[int]) -> None:
    """As far as a pipe confirms, as a sender follows it, until it raises."""
    while True:
        counts.append(await pipe.confirmed(counts[-1]))


async def _check_prefix(t: Trial, sent: list[bytes], found: list[bytes], confirmed: int) -> None:
    require(is_in_order(found, sent), f"what is on the bus is not in the order of the writes: {short(found)}")
    whole = next((n for n, (one, other) in enumerate(zip(sent, found, strict=False)) if one != other), len(found))
    require(confirmed <= whole, f"{confirmed} messages were confirmed in order, but only {whole} are on the bus")
    if t.capabilities.suffix_only:
        require(
            whole == len(found), f"suffix_only is claimed, but {short(found[whole:])} stands behind a missing message"
        )


@check()
async def closed_pipe(t: Trial) -> None:
    """Closing a pipe twice is harmless, ends a waiting `confirmed` with BusUnavailable, and the pipe takes no more."""
    topic = t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic)
    await t.put(pipe, [b"before"])
    async with t.meanwhile(pipe.confirmed(1)) as waiting:
        await t.within("aclose of a pipe", pipe.aclose())
        await t.raises(BusUnavailable, "confirmed of a pipe that is closed", waiting)
    await t.within("aclose for the second time", pipe.aclose())
    await t.raises(BusError, "a write to a closed pipe", pipe.write([b"ghost"]))
    await t.write_to(topic, [b"after"])
    await t.expect(feed, [b"before", b"after"])


@check()
async def cancelled_write(t: Trial) -> None:
    """A write cancelled anywhere leaves a pipe that closes, and in order what is on the bus of it, each once."""
    topic = t.topic()
    feed = await t.feed(topic)
    attempts = []
    for n in range(24):
        sent = numbered(5, f"{n}-")
        pipe = await t.pipe(topic)
        await t.cancelled(pipe.write(sent), n // 2, late=bool(n % 2))
        await t.within("aclose after a cancelled write", pipe.aclose())
        attempts.append(sent)
    await t.write_to(topic, [b"end"])
    found: list[bytes] = []
    while not found or found[-1] != b"end":
        found += [message.data for message in await t.read(feed, 1)]
    for sent in attempts:
        of_this = [data for data in found if data in sent]
        whole = of_this == sent[: len(of_this)]
        require(whole or not t.capabilities.suffix_only, f"a cancelled write left a hole: {short(of_this)}")
        require(is_in_order(of_this, sent), f"a cancelled write is out of order or doubled: {short(of_this)}")


@check()
async def cancelled_confirmed(t: Trial) -> None:
    """`confirmed` cancelled anywhere leaves a pipe that closes; what was written is on the bus all the same."""
    topic = t.topic()
    feed = await t.feed(topic)
    for n in range(12):
        pipe = await t.pipe(topic)
        async with t.meanwhile(t.cancelled(pipe.confirmed(0), n // 2, late=bool(n % 2))) as cancelled:
            await t.within("write", pipe.write([b"%d" % n]))
            await t.within("a cancelled confirmed", cancelled)
        await t.expect(feed, [b"%d" % n])
        await t.within("aclose after a cancelled confirmed", pipe.aclose())


@check("cut")
async def lost_link_of_a_pipe(t: Trial) -> None:
    """A pipe whose link is lost raises BusUnavailable, closes, and left a prefix or a hole it did not confirm."""
    assert t.context.cut is not None
    bus, topic = await t.bus(), t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic, bus)
    sent = numbered(10)
    await t.put(pipe, sent[:5])
    async with t.meanwhile(pipe.confirmed(5)) as waiting:
        await t.within("cut", t.context.cut(bus))
        with contextlib.suppress(BusUnavailable):  # an idle pipe may notice only when there is something to send
            await t.within("a write without a link", pipe.write(sent[5:]))
        await t.raises(BusUnavailable, "confirmed without a link", waiting)
    await t.raises(BusUnavailable, "a write without a link", _write_and_confirm(pipe, sent[5:], 5))
    await t.within("aclose without a link", pipe.aclose())
    await t.within("aclose of a bus without a link", bus.aclose())
    await _check_prefix(t, sent, await t.all_there_is(feed), 5)
    await t.write_to(topic, [b"again"], await t.bus())
    await t.expect(feed, [b"again"])
