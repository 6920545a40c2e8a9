"""Checks of groups: one reader at a time, hand-over, positions and states, histories, release."""

from __future__ import annotations

import asyncio
import random

from esp_pubsub.bus import Bus, Feed, Message
from esp_pubsub.errors import BusUnavailable

from ._trial import Failed, Trial, check, numbered, require, same, short


async def _member(t: Trial, topic: str, bus: Bus | None = None, group: str = "g") -> Feed:
    """A reader of a group. On a bus that keeps nothing it is there before anything is written."""
    return await t.feed(topic, "earliest", group=group, bus=bus)


async def _close(t: Trial, *feeds: Feed) -> None:
    for feed in feeds:
        await t.within("aclose of a group's feed", feed.aclose())


async def _confirm(t: Trial, feed: Feed, message: Message | None, state: bytes) -> None:
    await t.within("confirm", feed.confirm(None if message is None else message.position, state))


@check("groups")
async def group_keeps_its_place(t: Trial) -> None:
    """The next reader of a group begins behind what was confirmed and is handed the state stored with it."""
    topic, sent = t.topic(), numbered(10)
    feed = await _member(t, topic)
    await t.write_to(topic, sent)
    found = await t.expect(feed, sent)
    require(feed.state is None, f"a new group has the state {short(feed.state)}")
    await _confirm(t, feed, found[3], b"four")
    await _close(t, feed)
    again = await _member(t, topic, await t.bus())
    await t.expect(again, sent[4:])
    require(again.state == b"four", f"the state should be b'four', but is {short(again.state)}")


@check("groups")
async def unconfirmed_is_redelivered(t: Trial) -> None:
    """What a reader read and did not confirm comes first to the next one, in its old order."""
    topic, sent = t.topic(), numbered(10)
    feed = await _member(t, topic)
    await t.write_to(topic, sent)
    await t.expect(feed, sent[:6], max_messages=6)
    await _close(t, feed)
    again = await _member(t, topic)
    await t.expect(again, sent)
    await _close(t, again)
    await t.expect(await _member(t, topic), sent)


@check("groups")
async def confirm_is_cumulative(t: Trial) -> None:
    """Confirming a message confirms all before it, also when they were read in several reads and never confirmed."""
    topic, sent = t.topic(), numbered(20)
    feed = await _member(t, topic)
    await t.write_to(topic, sent)
    found = [(await t.expect(feed, [data], max_messages=1))[0] for data in sent]
    await _confirm(t, feed, found[17], b"18")
    await _close(t, feed)
    await t.expect(await _member(t, topic), sent[18:])


@check("groups")
async def position_never_goes_back(t: Trial) -> None:
    """Confirming again what lies further back does not bring back what was done."""
    topic, sent = t.topic(), numbered(10)
    feed = await _member(t, topic)
    await t.write_to(topic, sent)
    found = await t.expect(feed, sent)
    for n in (7, 2, 7, 0):
        await _confirm(t, feed, found[n], b"state")
    await _close(t, feed)
    await t.expect(await _member(t, topic), sent[8:])


@check("groups")
async def confirm_without_position(t: Trial) -> None:
    """`confirm(None, state)` stores the state and moves nothing, before and after the first position."""
    topic, sent = t.topic(), numbered(6)
    feed = await _member(t, topic)
    await t.write_to(topic, sent)
    await t.expect(feed, sent)
    await _confirm(t, feed, None, b"early")
    await _close(t, feed)
    second = await _member(t, topic)
    found = await t.expect(second, sent)
    require(
        second.state == b"early", f"with nothing else stored, the state should be b'early', not {short(second.state)}"
    )
    await _confirm(t, second, found[2], b"third")
    await _confirm(t, second, None, b"later")
    await _close(t, second)
    third = await _member(t, topic)
    await t.expect(third, sent[3:])
    require(third.state == b"later", f"the state should be b'later', but is {short(third.state)}")


@check("groups")
async def state_may_be_any_bytes(t: Trial) -> None:
    """A state of no bytes is a state; one of 16 KiB of any bytes comes back whole."""
    topic = t.topic()
    feed = await _member(t, topic)
    for state in (b"", bytes(range(256)) * 64):
        await t.write_to(topic, [b"one", b"two"])
        (found, *_) = await t.read(feed, 2)
        await _confirm(t, feed, found, state)
        await _close(t, feed)
        feed = await _member(t, topic)
        (found, *_) = await t.expect(feed, [b"two"])
        require(feed.state == state, f"the state should be {short(state)}, but is {short(feed.state)}")
        await _confirm(t, feed, found, state)


@check("groups")
async def start_of_a_group(t: Trial) -> None:
    """`start` counts for a group that has nothing stored; once it has, its position does."""
    topic = t.topic()
    await t.write_to(topic, [b"before"])
    feed = await t.feed(topic, "latest", group="g")
    await t.write_to(topic, [b"1", b"2"])
    found = await t.expect(feed, [b"1", b"2"])
    await _confirm(t, feed, found[0], b"")
    await _close(t, feed)
    await t.write_to(topic, [b"3"])
    await t.expect(await t.feed(topic, "latest", group="g"), [b"2", b"3"])


@check("groups")
async def one_reader_at_a_time(t: Trial) -> None:
    """While one reader reads for a group, another one waits and gets nothing; all comes to the one."""
    topic = t.topic()
    one, other = await _member(t, topic), await _member(t, topic, await t.bus())
    await t.write_to(topic, [b"0"])
    await t.expect(one, [b"0"])
    async with t.meanwhile(other.read(10, 1 << 20)) as waiting:
        for n in range(1, 6):
            await t.write_to(topic, [b"%d" % n])
            await t.expect(one, [b"%d" % n])
        await t.quietly("a read beside the reader of the group", asyncio.shield(waiting))


@check("groups")
async def hand_over_at_close(t: Trial) -> None:
    """When a group's reader closes, the one that waits goes on at once, behind what was confirmed, with the state."""
    topic, buses = t.topic(), (await t.bus(), await t.bus())
    sent = numbered(8)
    feed = await _member(t, topic, buses[0])
    await t.write_to(topic, sent)
    for n in range(6):
        found = await t.expect(feed, sent[n : n + 2], max_messages=1)
        following = await _member(t, topic, buses[(n + 1) % 2])
        async with t.meanwhile(following.read(1, 1 << 20)) as waiting:
            await _confirm(t, feed, found[0], b"%d" % n)
            await _close(t, feed)
            first = (await t.within("read of the next reader of the group", waiting))[0]
        data = first.data if isinstance(first, Message) else None
        require(data == sent[n + 1], f"{short(first)} came to the next reader, not the message that was not confirmed")
        require(following.state == b"%d" % n, f"the state of message {n} should come, but {short(following.state)} did")
        await _close(t, following)
        feed = await _member(t, topic, buses[(n + 1) % 2])


@check("groups")
async def hand_over_when_a_bus_closes(t: Trial) -> None:
    """A reader whose whole connection closes leaves its group to the next one at once."""
    topic, bus = t.topic(), await t.bus()
    feed, following = await _member(t, topic, bus), await _member(t, topic)
    await t.write_to(topic, [b"a", b"b"])
    found = await t.expect(feed, [b"a", b"b"])
    await _confirm(t, feed, found[0], b"state")
    await t.within("aclose of a bus", bus.aclose())
    await t.expect(following, [b"b"])
    require(following.state == b"state", f"the state is {short(following.state)}")


@check("groups")
async def cancelled_reader_leaves_its_group(t: Trial) -> None:
    """A reader cancelled at any point of its first read, or while it waited, and then closed holds up nobody."""
    topic, there = t.topic(), await t.bus()
    first = await _member(t, topic)
    await t.write_to(topic, [b"a"])
    await t.expect(first, [b"a"])
    await t.quietly("a read beside the reader of the group", (waiting := await _member(t, topic, there)).read(1, 1))
    await _close(t, waiting, first)
    for n in range(12):
        feed = await _member(t, topic, there)
        await t.cancelled(feed.read(10, 1 << 20), n // 2, late=bool(n % 2))
        await _close(t, feed)
        following = await _member(t, topic)
        await t.expect(following, [b"a"])
        await _close(t, following)


@check("groups")
async def cancelled_confirm(t: Trial) -> None:
    """A confirm cancelled anywhere is stored or is not; position and state are those of one and the same confirm."""
    topic, sent = t.topic(), numbered(24)
    feed = await _member(t, topic)
    await t.write_to(topic, sent)
    at = 0
    for n in range(12):
        found = await t.read(feed, 1, max_messages=1)
        await t.cancelled(feed.confirm(found[0].position, b"%d" % (at + 1)), n // 2, late=bool(n % 2))
        await _close(t, feed)
        feed = await _member(t, topic)
        (first, *_) = await t.read(feed, 1, max_messages=1)
        before, at = at, sent.index(first.data)
        require(at in (before, before + 1), f"after message {before} was confirmed, {short(first)} came")
        stored = 0 if feed.state is None else int(feed.state)
        require(stored == at, f"the state of message {stored} came with the position behind {at}")
        await _close(t, feed)
        feed = await _member(t, topic)


@check("groups")
async def former_reader_moves_nothing(t: Trial) -> None:
    """A reader whose group another one reads for gets BusUnavailable for a confirm, and moves nothing."""
    topic, sent = t.topic(), numbered(6)
    former = await _member(t, topic)
    await t.write_to(topic, sent)
    old = await t.expect(former, sent)
    await _close(t, former)
    reader = await _member(t, topic, await t.bus())
    found = await t.expect(reader, sent)
    await _confirm(t, reader, found[1], b"mine")
    await t.raises(BusUnavailable, "confirm of a former reader", former.confirm(old[4].position, b"stolen"))
    await _close(t, reader)
    last = await _member(t, topic)
    await t.expect(last, sent[2:])
    require(last.state == b"mine", f"a former reader's confirm stored the state {short(last.state)}")


@check("groups", "open_hasty_bus")
async def deposed_reader_moves_nothing(t: Trial) -> None:
    """A reader that did not read in time loses its group; its confirm is BusUnavailable and moves nothing."""
    topic, sent = t.topic(), numbered(6)
    frozen = await _member(t, topic, await t.bus(t.context.open_hasty_bus))
    await t.write_to(topic, sent)
    old = await t.expect(frozen, sent[:4], max_messages=4)
    await _confirm(t, frozen, old[0], b"old")
    reader = await _member(t, topic)
    found = await t.expect(reader, sent[1:])
    require(reader.state == b"old", f"the state should be b'old', but is {short(reader.state)}")
    await t.raises(BusUnavailable, "confirm of a deposed reader", frozen.confirm(old[3].position, b"stolen"))
    await _close(t, frozen)
    await _confirm(t, reader, found[0], b"mine")
    await _close(t, reader)
    last = await _member(t, topic)
    await t.expect(last, sent[2:])
    require(last.state == b"mine", f"a deposed reader's confirm stored the state {short(last.state)}")


@check("groups", "open_hasty_bus")
async def deposed_reader_reads_no_more(t: Trial) -> None:
    """A reader that lost its group while it did not read gets BusUnavailable when it reads again, not messages."""
    topic, sent = t.topic(), numbered(4)
    frozen = await _member(t, topic, await t.bus(t.context.open_hasty_bus))
    await t.write_to(topic, sent)
    await t.expect(frozen, sent[:2], max_messages=2)
    reader = await _member(t, topic)
    await t.expect(reader, sent)
    await t.raises(BusUnavailable, "read of a deposed reader", frozen.read(10, 1 << 20))
    await t.write_to(topic, [b"next"])
    await t.expect(reader, [b"next"])


@check("groups", "open_hasty_bus")
async def waiting_reader_keeps_its_group(t: Trial) -> None:
    """A reader that waits in `read` keeps its group, however long nothing comes."""
    topic = t.topic()
    feed = await _member(t, topic, await t.bus(t.context.open_hasty_bus))
    await t.write_to(topic, [b"a"])
    await t.expect(feed, [b"a"])
    other = await _member(t, topic)
    async with t.meanwhile(feed.read(10, 1 << 20)) as reading, t.meanwhile(other.read(10, 1 << 20)) as waiting:
        # As long as a silent reader could have kept it; that nothing happens is what is watched for.
        await asyncio.wait([reading, waiting], timeout=t.patience / 2, return_when=asyncio.FIRST_COMPLETED)
        await t.quietly("a read beside a reader of the group that waits", asyncio.shield(waiting))
        await t.write_to(topic, [b"b"])
        (found,) = await t.within("read", reading)
    require(isinstance(found, Message) and found.data == b"b", f"{short(found)} came")


@check("groups", "cut")
async def lost_link_of_a_group(t: Trial) -> None:
    """A group's reader whose link is lost and that is closed is followed by the next; its confirm moves nothing."""
    assert t.context.cut is not None
    topic, sent, bus = t.topic(), numbered(4), await t.bus()
    feed = await _member(t, topic, bus)
    await t.write_to(topic, sent)
    found = await t.expect(feed, sent)
    await _confirm(t, feed, found[0], b"state")
    await t.within("cut", t.context.cut(bus))
    await t.raises(BusUnavailable, "confirm without a link", feed.confirm(found[2].position, b"ghost"))
    await _close(t, feed)
    following = await _member(t, topic, await t.bus())
    await t.expect(following, sent[1:], again=[] if t.capabilities.replay else sent[:1])
    require(following.state == b"state", f"the state is {short(following.state)}")


@check("groups", "cut")
async def readers_that_die_in_a_row(t: Trial) -> None:
    """What readers left whose links were lost one after the other comes first, in its old order: each time behind what
    was confirmed and in front of what was written meanwhile.
    """
    assert t.context.cut is not None
    topic, left, state = t.topic(), list[bytes](), b""
    again: list[bytes] = []
    feed = await _member(t, topic, bus := await t.bus())
    turns = [(4, 1), (2, 0), (7, 3), (2, 1)]
    for turn, (reads, confirms) in enumerate(turns[: 2 if t.capabilities.replay else 4]):  # a log keeps its order
        new = numbered(4, f"{turn}-")
        await t.write_to(topic, new)
        left += new
        found = await t.expect(feed, left[:reads], max_messages=1, again=again)
        again += [] if t.capabilities.replay else left[:confirms]
        if confirms:
            state = b"%d" % turn
            await _confirm(t, feed, found[confirms - 1], state)
            del left[:confirms]
        await t.within("cut", t.context.cut(bus))
        await _close(t, feed)
        feed = await _member(t, topic, bus := await t.bus())
    await t.expect(feed, left, again=again)
    require(feed.state == state, f"the state should be {short(state)}, but is {short(feed.state)}")


@check("groups")
async def two_groups(t: Trial) -> None:
    """Groups of one topic, and of one name on two topics, each get everything and keep their own place and state."""
    one, other = t.topic(), t.topic()
    places = [(one, "g"), (one, "gg"), (other, "g")]
    feeds = [await _member(t, topic, group=group) for topic, group in places]
    plain = await t.feed(one)
    sent = numbered(6)
    await t.write_to(one, sent)
    await t.write_to(other, sent)
    await t.expect(plain, sent)
    for n, feed in enumerate(feeds):
        found = await t.expect(feed, sent)
        await _confirm(t, feed, found[n], b"%d" % n)
    await _close(t, *feeds)
    for n, (topic, group) in enumerate(places):
        feed = await _member(t, topic, group=group)
        await t.expect(feed, sent[n + 1 :])
        require(feed.state == b"%d" % n, f"the state of {group} is {short(feed.state)}, not {n}")


@check("groups")
async def history_of_a_group(t: Trial) -> None:
    """Sixty random steps (write, read, confirm, restart) agree with a list and an index, for three seeds."""
    for seed in range(3):
        await _History(t, seed).play(60)


class _History:
    """A group beside its model: what was written, how far it is confirmed, with which state, what the reader has."""

    def __init__(self, t: Trial, seed: int) -> None:
        self.t, self.random, self.seed = t, random.Random(seed), seed
        self.topic = t.topic()
        self.written: list[bytes] = []
        self.done = self.base = self.at = 0
        self.state: bytes | None = None
        self.stored: bytes | None = None
        self.read: list[Message] = []
        self.fresh = True

    async def play(self, steps: int) -> None:
        """Take random steps, then restart once more and read all that is left."""
        self.buses = [await self.t.bus(), await self.t.bus()]
        self.feed = await _member(self.t, self.topic, self.buses[0])
        self.pipe = await self.t.pipe(self.topic)
        for step in range(steps):
            kind = self.random.choice([self.write, self.take, self.take, self.confirm, self.note, self.restart])
            try:
                await kind()
            except Failed as why:
                raise Failed(f"seed {self.seed}, step {step}, {kind.__name__}: {why}") from why
        await self.restart()
        await self.write()
        await self.t.expect(self.feed, self.written[self.done :])

    async def write(self) -> None:
        new = numbered(self.random.randint(1, 4), f"{len(self.written)}-")
        await self.t.put(self.pipe, new, len(self.written))
        self.written += new

    async def take(self) -> None:
        if self.fresh:
            self.base = self.at = self.done
        at = self.at
        if at == len(self.written):
            return
        found = await self.t.read(self.feed, 1, max_messages=self.random.randint(1, 3))
        same([message.data for message in found], self.written[at : at + len(found)])
        ours = not self.fresh or self.feed.state == self.state
        require(ours, f"the state is {short(self.feed.state)}, not {short(self.state)}")
        self.read += found
        self.fresh, self.at = False, at + len(found)

    async def confirm(self) -> None:
        if self.fresh or not self.read:
            return
        chosen = self.random.randrange(len(self.read))
        self.stored = self.random.randbytes(5)
        await _confirm(self.t, self.feed, self.read[chosen], self.stored)
        self.done = max(self.done, self.base + chosen + 1)

    async def note(self) -> None:
        if self.fresh:
            return
        self.stored = self.random.randbytes(5)
        await _confirm(self.t, self.feed, None, self.stored)

    async def restart(self) -> None:
        await _close(self.t, self.feed)
        self.feed = await _member(self.t, self.topic, self.random.choice(self.buses))
        self.state, self.fresh, self.read = self.stored, True, []


@check("groups")
async def released_messages_do_not_block(t: Trial) -> None:
    """Ten times as many messages as a read may bring are released, never confirmed; then a new one is still read."""
    topic = t.topic()
    feed, pipe = await _member(t, topic), await t.pipe(topic)
    for n in range(10):
        sent = numbered(10, f"{n}-")
        await t.put(pipe, sent, 10 * n)
        found = await t.expect(feed, sent, max_messages=10)
        await t.within("release", feed.release([message.position for message in found]))
    await t.put(pipe, [b"new"], 100)
    (new,) = await t.expect(feed, [b"new"], max_messages=10)
    await _confirm(t, feed, new, b"state")
    await _close(t, feed)
    await t.put(pipe, [b"last"], 101)
    await t.expect(await _member(t, topic), [b"last"])


@check("groups")
async def released_out_of_order(t: Trial) -> None:
    """Releasing some of what was read, and nothing at all, takes away nothing else."""
    topic, sent = t.topic(), numbered(10)
    feed = await _member(t, topic)
    await t.write_to(topic, sent)
    found = await t.expect(feed, sent)
    await t.within("release of nothing", feed.release([]))
    await t.within("release", feed.release([found[n].position for n in (7, 1, 4)]))
    await _confirm(t, feed, found[2], b"state")
    await _close(t, feed)
    again = [message.data for message in await t.read(await _member(t, topic), 5)]
    kept = [sent[n] for n in (3, 5, 6, 8, 9)]
    require([data for data in again if data in kept][:5] == kept, f"not all that was kept came again: {short(again)}")


@check()
async def release_without_a_group(t: Trial) -> None:
    """A feed without a group may release what it read; it goes on."""
    topic = t.topic()
    feed, pipe = await t.feed(topic), await t.pipe(topic)
    for n in range(10):
        sent = numbered(10, f"{n}-")
        await t.put(pipe, sent, 10 * n)
        found = await t.expect(feed, sent, max_messages=10)
        await t.within("release", feed.release([message.position for message in found]))
