"""Checks of topics that are purged: readers are told, once, whether they read on or come back, alone or in a group."""

from __future__ import annotations

from collections.abc import Sequence

from esp_pubsub.bus import Break, Bus, Catalog, Feed

from ._trial import Trial, check, numbered, place_of, require, short


@check("incarnation", "catalog", "replay")
async def purge_is_a_break(t: Trial) -> None:
    """A purge takes all messages; every reader gets a Break with `incarnation`; positions are not used again."""
    topic, bus = t.topic(), await t.bus()
    waiting, behind = await t.feed(topic), await t.feed(topic, "earliest")
    sent = numbered(10)
    await t.write_to(topic, sent)
    last = (await t.expect(waiting, sent))[-1].position
    await t.expect(behind, sent[:3], max_messages=3)
    before = await t.bounds(topic)
    await _purge(t, bus, topic)
    after = await t.bounds(topic)
    require(after.first == after.end > last, f"it was emptied behind {last}, and has the bounds {after}")
    require(after.incarnation != before.incarnation, "bounds tell the same incarnation as before the purge")
    await t.write_to(topic, [b"new"])
    fresh = await t.expect(await t.feed(topic, "earliest"), [b"new"])
    require(fresh[0].position > last, f"position {fresh[0].position} was used before: the last one was {last}")
    for feed, fetched in ((waiting, []), (behind, sent[3:])):
        await _told_anew(t, feed, fetched=fetched)
        require(await t.read(feed, 1) == fresh, "reading does not go on with the first new message")


@check("incarnation", "catalog", "replay")
async def purge_wakes_a_reader(t: Trial) -> None:
    """A reader that waits is told of a purge without anything being written."""
    topic, bus = t.topic(), await t.bus()
    feed = await t.feed(topic)
    await t.write_to(topic, [b"old"])
    await t.expect(feed, [b"old"])
    async with t.meanwhile(feed.read(10, 1 << 20)) as waiting:
        await _purge(t, bus, topic)
        told = (await t.within("read during a purge", waiting))[0]
    require(isinstance(told, Break) and told.incarnation, f"{short(told)} came")


@check("incarnation", "catalog", "groups")
async def purge_and_a_group(t: Trial) -> None:
    """A group that stored something before a purge gets the Break when it reads again, and then what is new."""
    topic, bus = t.topic(), await t.bus()
    feed = await t.feed(topic, "earliest", group="g")
    await t.write_to(topic, numbered(5))
    found = await t.read(feed, 5)
    await t.within("confirm", feed.confirm(found[3].position, b"old"))
    await t.within("aclose of a feed", feed.aclose())
    await _purge(t, bus, topic)
    await t.write_to(topic, [b"new 0", b"new 1"])
    again = await t.feed(topic, "earliest", group="g")
    await _told_anew(t, again)
    rest = await t.expect(again, [b"new 0", b"new 1"], max_messages=1)
    await t.within("confirm", again.confirm(rest[0].position, b"new"))
    await t.within("aclose of a feed", again.aclose())
    third = await t.feed(topic, "earliest", group="g")
    await t.expect(third, [b"new 1"])
    require(third.state == b"new", f"the state is {short(third.state)}")


@check("incarnation", "catalog", "groups")
async def purge_under_a_group(t: Trial) -> None:
    """A group's reader that reads on past a purge loses its state with the Break: it is of what is no more."""
    topic, bus = t.topic(), await t.bus()
    feed = await t.feed(topic, "earliest", group="g")
    await t.write_to(topic, numbered(2))
    await t.within("confirm", feed.confirm((await t.read(feed, 2))[0].position, b"old"))
    await t.within("aclose of a feed", feed.aclose())
    feed = await t.feed(topic, "earliest", group="g")
    await t.expect(feed, [b"m1"])
    require(feed.state == b"old", f"the state is {short(feed.state)}")
    await _purge(t, bus, topic)
    await _told_anew(t, feed)
    await t.write_to(topic, [b"new"])
    await t.expect(feed, [b"new"])


@check("incarnation", "catalog", "replay")
async def come_back_after_a_purge(t: Trial) -> None:
    """A feed that is opened where a reader stood before a purge gives the Break first, whether there is something new
    or not, and then all that is new. One that is opened where that reader stands after the Break gives none.
    """
    for new in ([], [b"new 0", b"new 1"]):
        topic, bus = t.topic(), await t.bus()
        feed = await t.feed(topic)
        await t.write_to(topic, numbered(3))
        await t.expect(feed, numbered(3))
        await t.within("aclose of a feed", feed.aclose())
        await _purge(t, bus, topic)
        if new:
            await t.write_to(topic, new)
        again = await t.feed(topic, place_of(feed))
        await _told_anew(t, again)
        third = await t.feed(topic, place_of(again))
        await t.write_to(topic, [b"last"])
        for each in (again, third):
            await t.expect(each, [*new, b"last"])


@check("incarnation", "catalog", "groups", "replay")
async def group_comes_back_after_a_purge(t: Trial) -> None:
    """What a group stored before a purge makes no second Break for a reader that had the first one; who stood there
    before the purge gets the Break, and then what the group has confirmed since counts.
    """
    topic, bus = t.topic(), await t.bus()
    feed = await t.feed(topic, "earliest", group="g")
    await t.write_to(topic, numbered(5))
    await t.within("confirm", feed.confirm((await t.read(feed, 5))[3].position, b"old"))
    await t.within("aclose of a feed", feed.aclose())
    before = place_of(feed)
    await _purge(t, bus, topic)
    await t.write_to(topic, [b"new 0", b"new 1"])
    feed = await t.feed(topic, before, group="g")
    await _told_anew(t, feed)
    await t.expect(feed, [b"new 0"], max_messages=1)
    await t.within("aclose of a feed", feed.aclose())
    again = await t.feed(topic, place_of(feed), group="g")
    found = await t.expect(again, [b"new 0", b"new 1"])
    require(again.state is None, f"the state is {short(again.state)}, of what was purged")
    await t.within("confirm", again.confirm(found[0].position, b"new"))
    await t.within("aclose of a feed", again.aclose())
    late = await t.feed(topic, before, group="g")
    await _told_anew(t, late, b"new")
    await t.expect(late, [b"new 1"])


async def _told_anew(t: Trial, feed: Feed, state: bytes | None = None, fetched: Sequence[bytes] = ()) -> None:
    """The feed gives a Break with `incarnation`, alone, and what its group has confirmed since."""
    told, rest, _ = await t.broken(feed, fetched)
    require(told.incarnation, f"the Break does not tell of an incarnation: {told}")
    require(not rest, f"a Break with incarnation comes alone, but {short(rest)} came with it")
    require(feed.state == state, f"after the Break the state is {short(feed.state)}, not {short(state)}")


async def _purge(t: Trial, bus: Bus, topic: str) -> None:
    catalog: Catalog = bus  # type: ignore[assignment]  # the capability says so
    await t.within("purge", catalog.purge(topic))
