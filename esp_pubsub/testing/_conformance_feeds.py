"""Checks of the reading side: starts, bounds, breaks, cancellation, close, concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from esp_pubsub.bus import Bus, Feed, Message, Place
from esp_pubsub.errors import BusError, BusUnavailable, Closed

from ._trial import Failed, Trial, check, numbered, place_of, require, same, short


@check()
async def latest_is_in_place(t: Trial) -> None:
    """A feed is in place when `feed` returns: all that is written from then on is read, nothing from before."""
    topic, other = t.topic(), await t.bus()
    await t.write_to(topic, [b"before"])
    for n in range(20):
        feed = await t.feed(topic, bus=other)
        await t.write_to(topic, [b"%d" % n])
        await t.expect(feed, [b"%d" % n])
        await t.within("aclose of a feed", feed.aclose())


@check("replay")
async def start_earliest(t: Trial) -> None:
    """`earliest` begins with the first message that is kept and goes on with what is written later."""
    topic = t.topic()
    await t.write_to(topic, [b"1", b"2"])
    feed = await t.feed(topic, "earliest")
    await t.expect(feed, [b"1", b"2"])
    await t.write_to(topic, [b"3"])
    await t.expect(feed, [b"3"])
    await t.expect(await t.feed(topic, "earliest", bus=await t.bus()), [b"1", b"2", b"3"])


@check("replay")
async def start_at_a_number(t: Trial) -> None:
    """A number is the position of the first message read; the position behind the last one waits for the next."""
    topic = t.topic()
    sent = numbered(12)
    pipe = await t.pipe(topic)
    for at in (0, 5, 6):
        await t.put(pipe, sent[at : {0: 5, 5: 6, 6: 12}[at]], at)
    known = await t.expect(await t.feed(topic, "earliest"), sent)
    for n, message in enumerate(known):
        found = await t.expect(await t.feed(topic, message.position), sent[n:])
        require(found == known[n:], "another reader saw other positions")
    feed = await t.feed(topic, known[-1].position + 1)
    async with t.meanwhile(feed.read(10, 1 << 20)) as waiting:
        await t.write_to(topic, [b"next"])
        (found_next,) = await t.within("read behind the last one", waiting)
    require(isinstance(found_next, Message) and found_next.data == b"next", f"{short(found_next)} came")


@check("replay")
async def start_beyond_the_end(t: Trial) -> None:
    """A number beyond the end waits until the log has got there."""
    topic = t.topic()
    await t.write_to(topic, [b"0"])
    (first,) = await t.read(await t.feed(topic, "earliest"), 1)
    feed = await t.feed(topic, first.position + 5)
    await t.quietly("read beyond the end", feed.read(10, 1 << 20))
    later = [b"%d" % n for n in range(1, 8)]
    await t.write_to(topic, later)
    known = await t.read(await t.feed(topic, "earliest"), 8)
    expected = [message for message in known if message.position >= first.position + 5]
    found = await t.read(feed, len(expected))
    require(found == expected, f"{short(found)} came first")


@check("replay")
async def start_at_a_time(t: Trial) -> None:
    """A time begins with the first message written at or after it; a time to come waits."""
    topic = t.topic()
    await t.write_to(topic, [b"before"])
    await asyncio.sleep(t.context.quiet)
    between = datetime.now(UTC)
    await asyncio.sleep(t.context.quiet)
    await t.write_to(topic, [b"after", b"and after"])
    await t.expect(await t.feed(topic, between), [b"after", b"and after"])
    await t.expect(await t.feed(topic, between - timedelta(days=1)), [b"before", b"after", b"and after"])
    elsewhere = between.astimezone(tz=None)
    await t.expect(await t.feed(topic, elsewhere), [b"after", b"and after"])
    await t.quietly("read from a time to come", (await t.feed(topic, between + timedelta(days=1))).read(10, 1 << 20))


@check("replay")
async def bounds_of_a_log(t: Trial) -> None:
    """`bounds` tells the first position kept and the one behind the last; every message lies between them."""
    topic = t.topic()
    feed = await t.feed(topic, "earliest")
    empty = await t.bounds(topic)
    require(empty.first == empty.end, f"an empty topic has the bounds {empty}")
    await t.write_to(topic, numbered(7))
    bounds, elsewhere = await t.bounds(topic), await t.bounds(topic, await t.bus())
    require(bounds == elsewhere, f"one connection tells the bounds {bounds}, another one {elsewhere}")
    found = await t.read(feed, 7)
    ends = found[0].position, found[-1].position + 1
    require((bounds.first, bounds.end) == ends, f"positions {ends[0]} to {ends[1]} - 1 are read, but it has {bounds}")
    stands = place_of(feed).incarnation
    require(bounds.incarnation == stands, f"bounds tell the incarnation {bounds.incarnation}, the feed reads {stands}")
    if t.capabilities.incarnation:
        require(bounds.incarnation is not None, "incarnation is claimed, but bounds tell none")


@check("replay")
async def bounds_of_a_topic_that_nobody_knows(t: Trial) -> None:
    """A topic that nobody has written to or read is empty; a feed at its end reads the first message."""
    topic = t.topic()
    bounds = await t.bounds(topic)
    require(bounds.first == bounds.end, f"nobody has written to it, and it has the bounds {bounds}")
    require(await t.bounds(topic) == bounds, "nothing was written, and bounds tell something else")
    feed = await t.feed(topic, Place(bounds.end, bounds.incarnation))
    await t.write_to(topic, numbered(2))
    found = await t.expect(feed, numbered(2))
    begin = found[0].position
    require((await t.bounds(topic)).first == begin, f"the first message is at {begin}, bounds tell something else")


@check()
async def bounded_reads(t: Trial) -> None:
    """More than one message stay within max_messages and max_bytes; one larger message comes alone."""
    topic = t.topic()
    by_count, by_bytes, tight = await t.feed(topic), await t.feed(topic), await t.feed(topic)
    sent = numbered(9, size=100)
    sent[4] = b"L" * 1_000
    pipe = await t.pipe(topic)
    await t.put(pipe, sent[:7])
    await t.put(pipe, sent[7:], 7)
    for feed, most, size in ((by_count, 2, 1 << 20), (by_bytes, 100, 250), (tight, 1, 1)):
        same(await _read_within(t, feed, len(sent), most, size), sent)


async def _read_within(t: Trial, feed: Feed, count: int, most: int, size: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        items = await t.within("read", feed.read(most, size))
        require(len(items) > 0, "read returned nothing; it should have waited")
        data = [item.data for item in items if isinstance(item, Message)]
        require(len(data) <= most, f"read({most}, {size}) returned {len(data)} messages")
        require(
            len(data) == 1 or sum(map(len, data)) <= size, f"read({most}, {size}) returned {sum(map(len, data))} bytes"
        )
        found += data
    return found


@check()
async def read_waits(t: Trial) -> None:
    """A read where nothing is waits; one that was cancelled so loses nothing."""
    topic = t.topic()
    feed = await t.feed(topic)
    await t.quietly("read of an empty topic", feed.read(10, 1 << 20))
    await t.write_to(topic, [b"a"])
    await t.expect(feed, [b"a"])
    await t.quietly("read at the end", feed.read(10, 1 << 20))


@check()
async def cancelled_read(t: Trial) -> None:
    """A read cancelled at any point, also when its messages have just come, loses none and doubles none."""
    topic = t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic)
    sent = numbered(60)
    found: list[bytes] = []
    for n, message in enumerate(sent):
        point, late = n % 10 // 2, bool(n % 2)
        async with t.meanwhile(t.cancelled(feed.read(3, 1 << 20), point, late=late)) as reading:
            await t.put(pipe, [message], n)
            items = await t.within("a cancelled read", reading)
        found += [item.data for item in items or () if isinstance(item, Message)]
    if len(found) < len(sent):
        found += [message.data for message in await t.read(feed, len(sent) - len(found))]
    same(found, sent)


@check()
async def two_topics(t: Trial) -> None:
    """Topics do not know each other, not even when one's name begins with the other's."""
    one = t.topic()
    topics = [one, one + "x", t.topic()]
    feeds = [await t.feed(topic) for topic in topics]
    for topic in topics:
        await t.write_to(topic, [topic.encode()] * 3)
    for topic, feed in zip(topics, feeds, strict=True):
        await t.expect(feed, [topic.encode()] * 3)
        await t.quietly("read of a topic that has nothing more", feed.read(10, 1 << 20))


@check()
async def many_at_once(t: Trial) -> None:
    """Eight topics, each with two pipes and two feeds at work at once over two connections: everybody gets all."""
    here, there = await t.bus(), await t.bus()

    async def write(topic: str, bus: Bus, name: str) -> None:
        pipe = await t.pipe(topic, bus)
        sent = numbered(50, name)
        for at in range(0, 50, 5):
            await t.put(pipe, sent[at : at + 5], at)

    async def read(feed: Feed) -> None:
        found = [message.data for message in await t.read(feed, 100)]
        for name in "ab":
            same([data for data in found if data.startswith(name.encode())], numbered(50, name))

    async with asyncio.TaskGroup() as tasks:
        for topic in [t.topic() for _ in range(8)]:
            for bus in (here, there):
                tasks.create_task(read(await t.feed(topic, bus=bus)))
            tasks.create_task(write(topic, here, "a"))
            tasks.create_task(write(topic, there, "b"))


@check()
async def slow_reader_holds_up_nobody(t: Trial) -> None:
    """A feed that is not read holds up neither writers nor other feeds, and has it all when it is read at last."""
    topic = t.topic()
    slow, quick = await t.feed(topic, bus=await t.bus()), await t.feed(topic)
    sent = numbered(500, size=200)
    pipe = await t.pipe(topic)
    for at in range(0, 500, 50):
        await t.put(pipe, sent[at : at + 50], at)
        await t.expect(quick, sent[at : at + 50])
    await t.expect(slow, sent)


@check()
async def closed_feed(t: Trial) -> None:
    """Closing a feed twice is harmless, and a read that waits ends with BusUnavailable; other feeds go on."""
    topic = t.topic()
    feed, other = await t.feed(topic), await t.feed(topic)
    async with t.meanwhile(feed.read(10, 1 << 20)) as waiting:
        await t.within("aclose of a feed", feed.aclose())
        await t.raises(BusUnavailable, "read of a feed that is closed", waiting)
    await t.within("aclose for the second time", feed.aclose())
    await t.raises(BusError, "read after aclose", feed.read(10, 1 << 20))
    await t.write_to(topic, [b"a"])
    await t.expect(other, [b"a"])


@check()
async def cancelled_close(t: Trial) -> None:
    """An aclose cancelled anywhere can be called again; afterwards what it closed is closed."""
    topic = t.topic()
    for n in range(10):
        feed, pipe, bus = await t.feed(topic), await t.pipe(topic), await t.bus()
        for closing in (feed, pipe, bus):
            await t.cancelled(closing.aclose(), n // 2, late=bool(n % 2))
            await t.within("aclose for the second time", closing.aclose())
        await t.raises(BusError, "read after aclose", feed.read(10, 1 << 20))


@check()
async def closed_bus(t: Trial) -> None:
    """Closing a bus ends what waits on it with BusUnavailable, twice is harmless; others do not notice."""
    topic, bus = t.topic(), await t.bus()
    outside = await t.feed(topic)
    feed, pipe = await t.feed(topic, bus=bus), await t.pipe(topic, bus)
    await t.put(pipe, [b"a"])
    await t.expect(feed, [b"a"])
    async with t.meanwhile(feed.read(10, 1 << 20)) as reading, t.meanwhile(pipe.confirmed(1)) as confirming:
        await t.within("aclose of a bus", bus.aclose())
        await t.raises(BusUnavailable, "read on a bus that is closed", reading)
        await t.raises(BusUnavailable, "confirmed on a bus that is closed", confirming)
    await t.raises(BusError, "a write on a bus that is closed", pipe.write([b"ghost"]))
    for closing in (feed, pipe, bus):
        await t.within("aclose after the bus", closing.aclose())
    try:
        await t.within("pipe of a bus that is closed", bus.pipe(topic))
    except (BusError, Closed):
        pass
    else:
        raise Failed("a closed bus handed out a pipe")
    await t.write_to(topic, [b"b"])
    await t.expect(outside, [b"a", b"b"])


@check("cut")
async def lost_link_of_a_feed(t: Trial) -> None:
    """A feed whose link is lost raises BusUnavailable, also where it waits, and closes; another connection works."""
    assert t.context.cut is not None
    topic, bus = t.topic(), await t.bus()
    feed = await t.feed(topic, bus=bus)
    async with t.meanwhile(feed.read(10, 1 << 20)) as waiting:
        await t.within("cut", t.context.cut(bus))
        await t.raises(BusUnavailable, "read without a link", waiting)
    await t.within("aclose of a feed without a link", feed.aclose())
    await t.within("aclose of a bus without a link", bus.aclose())
    again = await t.feed(topic, bus=await t.bus())
    await t.write_to(topic, [b"a"])
    await t.expect(again, [b"a"])


@check("replay", "trim")
async def retention_passes_a_reader(t: Trial) -> None:
    """A feed that retention passed gets one Break with the exact number it missed, and goes on behind it."""
    topic = t.topic()
    feed, untouched = await t.feed(topic, "earliest"), await t.feed(topic, "latest")
    await t.write_to(topic, numbered(5))
    await t.expect(untouched, numbered(5))
    last = (await t.expect(feed, numbered(2), max_messages=2))[-1]
    first = await _trimmed(t, topic)
    await _check_passed(t, feed, last.position + 1, first, [*numbered(5)[2:], *(b"filler %d" % n for n in range(30))])


@check("replay", "trim")
async def start_at_an_expired_number(t: Trial) -> None:
    """A number that is no longer kept gives a Break with the exact count first; `earliest` gives none."""
    topic = t.topic()
    known = await t.feed(topic, "earliest")
    await t.write_to(topic, numbered(3))
    old = (await t.read(known, 3))[1].position
    first = await _trimmed(t, topic)
    await _check_passed(t, await t.feed(topic, old), old, first)
    earliest = (await t.read(await t.feed(topic, "earliest"), 1))[0]
    require(earliest.position == first, f"earliest began at {earliest.position}, but the log at {first}")


@check("replay", "trim", "groups")
async def retention_passes_a_group(t: Trial) -> None:
    """A group whose stored position is no longer kept gets a Break with the exact count, and its state."""
    topic = t.topic()
    feed = await t.feed(topic, "earliest", group="g")
    await t.write_to(topic, numbered(3))
    found = await t.read(feed, 3)
    await t.within("confirm", feed.confirm(found[1].position, b"state"))
    await t.within("aclose of a feed", feed.aclose())
    first = await _trimmed(t, topic)
    again = await t.feed(topic, "earliest", group="g")
    await _check_passed(t, again, found[1].position + 1, first)
    require(again.state == b"state", f"the state is {short(again.state)}")


async def _trimmed(t: Trial, topic: str) -> int:
    """Make retention take at least ten messages and leave some; the first position that is kept."""
    assert t.context.trim is not None
    pipe = await t.pipe(topic)
    for n in range(30):
        await t.put(pipe, [b"filler %d" % n], n)
    before = (await t.bounds(topic)).first
    await t.within("trim", t.context.trim(topic))
    await t.write_to(topic, [b"fresh"])
    first = (await t.bounds(topic)).first
    require(first >= before + 10, f"trim moved the first position from {before} to {first} only")
    return first


async def _check_passed(t: Trial, feed: Feed, at: int, first: int, fetched: Sequence[bytes] = ()) -> None:
    """The feed that stood at `at` is told of what it missed and goes on at `first`."""
    told, rest, ahead = await t.broken(feed, fetched)
    passed = first - at - ahead
    require(told.messages == passed, f"{passed} messages were passed over, but the Break says {told.messages}")
    require(not told.incarnation, "retention is no new incarnation")
    rest = rest or await t.read(feed, 1)
    require(rest[0].position == first, f"reading went on at {rest[0].position}, but the log begins at {first}")


@check()
async def come_back(t: Trial) -> None:
    """`place` is behind what was read last: a feed that is opened there goes on without a Break. A queue has none."""
    topic, sent = t.topic(), numbered(6)
    feed = await t.feed(topic)
    await t.write_to(topic, sent)
    if not t.capabilities.replay:
        await t.expect(feed, sent)
        require(feed.place is None, f"without replay a feed has no place, but {feed.place}")
        return
    for n in range(6):
        await t.expect(feed, [sent[n]], max_messages=1)
        again = await t.feed(topic, place_of(feed))
        await t.write_to(topic, [b"%d" % n])
        sent.append(b"%d" % n)
        await t.expect(again, sent[n + 1 :])
        await t.within("aclose of a feed", again.aclose())
