"""A standby that takes whole lines of the topic at once: it knows neither more nor less than message by message."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pytest

from esp_pubsub.bus import Message, Run
from esp_pubsub.errors import BadFrame, EspError, InputDiffers, Stale
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.wire.frame import BEAT, BLOCK, CLAIM, ROWS, Sealed, frames, glance, parse, seal, source_of

OURS, OTHER, RUN, BLOCKS = 1, 2, 5, 60


def line(source: int = OURS, differs_at: int = BLOCKS + 1, run: int = RUN) -> list[Sealed]:
    """The blocks of one input."""
    chain, sealed = 0, []
    for id in range(1, BLOCKS + 1):
        body = bytes([id, id >= differs_at]) * (1 + id % 3)
        sealed.append(seal(BLOCK, ROWS, 0, 1, source, run, id, 5, chain, body))
        chain = sealed[-1].chain
    return sealed


INPUT, STRANGERS, EARLIER, NEXT_RUN = line(), line(OTHER), line(run=RUN - 1), line(run=RUN + 1)
DIFFERS, EARLY_DIFFERS = line(differs_at=30), line(differs_at=2)


def on_topic(*ids: int, blocks: Sequence[Sealed] = INPUT) -> list[bytes]:
    return [frames([blocks[id - 1]], 0, 0)[0] for id in ids]


@dataclass
class Topic:
    """What disciplined senders leave on a bus that loses ends only: each began at some id whose predecessor was on the
    bus, however far back, and went on without a hole; several at once, and others write between.
    """

    chance: random.Random
    inputs: Sequence[Sequence[Sealed]]
    damages: bool
    higher_run: bool
    messages: list[bytes] = field(default_factory=list)
    end: int = 0

    def fill(self) -> None:
        chance, senders = self.chance, list[tuple[int, Sequence[Sealed]]]()
        while self.end < BLOCKS:
            if not senders or chance.random() < 0.25:
                back = chance.choice((0, 0, 1, 3, 8, self.end))
                senders.append((max(0, self.end - back), chance.choice(self.inputs)))
            at, blocks = senders.pop(chance.randrange(len(senders)))
            until = min(BLOCKS, at + chance.choice((1, 2, 4, 12)))
            for block in blocks[at:until]:
                self._write(frames([block], chance.randrange(block.id), 0, chance.randrange(3))[0])
            self.end = max(self.end, until)
            if until < BLOCKS and chance.random() < 0.8:  # or it dies
                senders.append((until, blocks))
            if chance.random() < 0.3:
                self.messages += self._by_others()

    def _write(self, message: bytes) -> None:
        if self.damages and self.chance.random() < 0.05:
            at = self.chance.randrange(len(message))
            damaged = message[:at] + bytes([message[at] ^ 1 << self.chance.randrange(8)]) + message[at + 1 :]
            self.messages.append(self.chance.choice((damaged, message[:-1], message[: self.chance.randrange(80)])))
            if self.chance.random() < 0.5:
                return
        self.messages.append(message)

    def _by_others(self) -> list[bytes]:
        """What is no block of this line."""
        chance = self.chance
        at = chance.randrange(BLOCKS - 5)
        some = slice(at, at + chance.randrange(1, 5))
        what: list[Callable[[], list[bytes]]] = [
            lambda: [chance.choice((b"", b"foreign", bytes(80), chance.randbytes(100)))],
            lambda: frames(STRANGERS[some], at, 0),
            lambda: frames(EARLIER[some], at, 0),
            lambda: frames([seal(BEAT, source=OURS, run=RUN)], chance.randrange(self.end + 1), 0),
            lambda: frames([seal(CLAIM, source=OURS, run=RUN), seal(BEAT, source=OTHER)], 0, 0),
            lambda: [message[:3] + b"\x02" + message[4:] for message in on_topic(at + 1)],
        ]
        if self.higher_run and chance.random() < 0.1:
            what = [lambda: frames([*NEXT_RUN[:1], seal(BEAT, source=OURS, run=RUN + 1)], 0, 0)]
        return chance.choice(what)()


def as_read(chance: random.Random, at: int, messages: list[bytes]) -> Sequence[Message]:
    """One read of a log, as buses return it."""
    if chance.random() < 0.3:
        return [Message(at + number, data) for number, data in enumerate(messages)]
    batches, rest = [], messages
    while rest:
        batch, rest = rest[: (n := chance.randrange(1, 9))], rest[n:]
        batches.append((b"".join(batch), list(accumulate(map(len, batch), initial=0))))
    run = Run(at, batches)
    if chance.random() < 0.2:
        list(run)  # another reader has taken it apart
    return run


def ids_of(messages: list[bytes]) -> list[int]:
    """0 for what is not of our source."""
    return [glance(data)[-1] if source_of(data) == OURS else 0 for data in messages]


def misleading(ids: list[int], at: int) -> list[int]:
    """How many messages from there on begin and end as a line of the next blocks does, and are not that line."""
    first = ids[at]
    if not first or (at and ids[at - 1] != first - 1):
        return []
    sizes = range(2, min(len(ids) - at, 40) + 1)
    return [n for n in sizes if ids[at + n - 1] == first + n - 1 and ids[at : at + n] != list(range(first, first + n))]


def beginning(chance: random.Random, messages: list[bytes]) -> int:
    """Often behind a sender that went back: the bus holds more than what comes next, and a read may mislead."""
    ids = ids_of(messages)
    behind = [at for at, (id, most) in enumerate(zip(ids, accumulate(ids, max), strict=True)) if 0 < id < most - 2]
    places = [at for at in behind if at + 1 < len(ids) and misleading(ids, at + 1)] or behind
    return chance.choice(places) if places and chance.random() < 0.7 else chance.randrange(len(messages))


def size_of_a_read(chance: random.Random, ids: list[int]) -> int:
    """Often one whose ends mislead, or so many that the next read can be one."""
    if (sizes := misleading(ids, 0)) and chance.random() < 0.5:
        return chance.choice(sizes)
    if (before := [at for at in range(1, len(ids)) if misleading(ids, at)]) and chance.random() < 0.7:
        return before[0]
    return chance.choice((1, 3, 20, 60))


def one_by_one(member: Line, messages: Sequence[bytes]) -> None:
    for data in messages:
        try:
            frame = parse(data)
        except BadFrame:
            continue  # foreign bytes say nothing
        member.follow(frame)


def raised_by(step: Callable[[], object]) -> EspError | None:
    try:
        step()
    except (InputDiffers, Stale) as error:
        return error
    return None


class Pair:
    """Two members with one life; the first takes at once what the other takes message by message."""

    def __init__(self, buffer: int, *, damages: bool) -> None:
        self.many, self.each = (
            Line(OURS, RUN, Outbox(buffer, 1 << 20), suffix_only=True, buffer=buffer) for _ in range(2)
        )
        self.damages = damages

    def take(self, position: int, messages: list[bytes], chance: random.Random) -> bool:
        """Whether both go on."""
        read = as_read(chance, position, messages)
        return self._same(
            raised_by(lambda: self.many.follow_all(read)), raised_by(lambda: one_by_one(self.each, messages))
        )

    def both(self, step: Callable[[Line], object]) -> bool:
        return self._same(raised_by(lambda: step(self.many)), raised_by(lambda: step(self.each)))

    def _same(self, many: EspError | None, each: EspError | None) -> bool:
        if self.damages and isinstance(many, InputDiffers):
            # the link of a block tells the chain of the one before it, also where that one itself cannot be read
            assert (many.ours, many.theirs) == (INPUT[many.id - 1].chain, DIFFERS[many.id - 1].chain)
            assert not isinstance(each, InputDiffers) or each.id >= many.id
            return False
        assert (type(many), many and vars(many)) == (type(each), each and vars(each))
        known = [
            (one.m, one.covered, one.eligible, one.outbox.first, one.outbox.last, len(one.outbox))
            for one in (self.many, self.each)
        ]
        assert known[0] == known[1]
        if self.damages:
            assert self.many.agreed >= self.each.agreed
        else:
            assert self.many.agreed == self.each.agreed
        for id in range(1, BLOCKS + 1):
            if not self.damages or self.each.chain_at(id) is not None:
                assert self.many.chain_at(id) == self.each.chain_at(id)
        return many is None


def live(seed: int, *, damages: bool) -> None:
    """One history, followed by a pair from anywhere until its end or theirs."""
    chance = random.Random(seed)
    inputs = chance.choice(([INPUT], [INPUT], [INPUT], [INPUT, INPUT, DIFFERS], [DIFFERS]))
    topic = Topic(chance, inputs, damages, higher_run=chance.random() < 0.2)
    topic.fill()
    buffer = chance.choice((1, 3, 10, BLOCKS))
    pair, at, given = Pair(buffer, damages=damages), beginning(chance, topic.messages), 0
    ahead = chance.choice((0.05, 0.2, 0.8))  # how early our own input comes
    while at < len(topic.messages) or given < BLOCKS:
        going_on = True
        if at < len(topic.messages) and chance.random() > ahead / 2:
            read = topic.messages[at : at + size_of_a_read(chance, ids_of(topic.messages[at:]))]
            going_on, at = pair.take(at, read, chance), at + len(read)
        elif chance.random() < 0.05:
            pair.both(Line.rejoin)
            at = min(at, beginning(chance, topic.messages))
        elif chance.random() < 0.1:
            id = chance.randrange(topic.end)
            chain = chance.choice((None, inputs[0][id - 1].chain)) if id else None
            going_on = pair.both(lambda one: one.heard(RUN, id, chain))  # noqa: B023
        elif at == len(topic.messages):
            pair.both(Line.reached_end)
        for _ in range(chance.choice((0, 1, 5, 20))):
            if given < BLOCKS and pair.each.outbox.room(INPUT[given].size) and going_on:
                going_on = pair.both(lambda one: one.give(INPUT[given]))  # noqa: B023
                given += 1
        if not going_on or (at == len(topic.messages) and not pair.each.outbox.room(1)):
            break


@pytest.mark.parametrize("damages", [False, True], ids=["all whole", "some damaged"])
@pytest.mark.parametrize("seed", range(150))
def test_many_messages_say_what_each_of_them_says(seed: int, damages: bool) -> None:
    live(seed, damages=damages)


def follower(given: int = 0, buffer: int = 50) -> Line:
    found = Line(OURS, RUN, Outbox(buffer, 1 << 20), suffix_only=True, buffer=buffer)
    for block in INPUT[:given]:
        found.give(block)
    return found


def test_a_standby_that_began_behind_a_sender_that_went_back_stays_in_its_group() -> None:
    """A wrote 1..13; B, which knew of 7, wrote 8..11 and died; A went on with 14 and 15, and so did C with 14, 15, 16.
    A standby that begins with B's 8 reads as many messages as there are ids, and they are not those ids.
    """
    one = follower()
    for ids in ((8,), (9, 10, 11, 14, 15, 14, 15, 16)):
        one.follow_all(list(enumerate(on_topic(*ids))))
    assert [id for id in range(1, 20) if one.chain_at(id) is not None] == [8, 9, 10, 11, 14, 15, 16]
    for block in INPUT[:16]:
        one.give(block)
    assert (one.m, one.agreed, one.covered, one.eligible) == (16, 16, 16, True)


def test_another_publishers_frames_are_not_taken_for_blocks_that_are_missing() -> None:
    one = follower()
    read = [*on_topic(5, 6), *on_topic(1, 2, blocks=STRANGERS), *on_topic(9)]
    one.follow_all([(0, read[0])])
    one.follow_all(list(enumerate(read[1:])))
    assert [one.chain_at(id) for id in (7, 8)] == [None, None]
    for block in INPUT[:9]:
        one.give(block)
    assert one.agreed == 9


def test_a_higher_run_between_two_blocks_is_not_passed_over() -> None:
    one = follower(given=20)
    one.follow_all([(0, message) for message in on_topic(5)])
    with pytest.raises(Stale):
        one.follow_all(list(enumerate([*on_topic(6), *on_topic(1, blocks=NEXT_RUN), *on_topic(8)])))


def test_a_whole_copy_counts_though_one_before_it_was_damaged() -> None:
    one = follower(given=5)
    whole = on_topic(1, 2, 3, 3, 2)
    one.follow_all([(0, whole[0])])
    one.follow_all(list(enumerate([whole[1], whole[2][:-1], *whole[3:]])))
    assert (one.m, one.agreed) == (3, 3)


def test_a_block_of_another_input_is_remembered_while_blocks_of_the_line_come() -> None:
    """What continues from it proves nothing, also when the line itself was taken at once."""
    one = follower()
    one.follow_all(list(enumerate(on_topic(1, 2, 3))))
    others = on_topic(4, 5, 6, blocks=EARLY_DIFFERS)
    one.follow_all(list(enumerate([*others[:2], *on_topic(4), others[2]])))
    assert one.m == 4
