"""Which entries of the order topic count."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_pubsub.engine.order import FIRST, LAST, Entry, Order, Poisoned, Proposal, Taken, next_entry
from esp_pubsub.failover.belief import TIME_MAX
from esp_pubsub.wire.frame import BEAT, BODY_AT, ENTRY, MAP, frames, seal

SOURCE, RUN, CHAIN = 5, 2, 77
LARGEST = 1_000


def order() -> Order:
    return Order(SOURCE, RUN, 1, CHAIN)


def entry(now: int, *messages: bytes, to: int | None = None) -> Entry:
    return Entry(now, (Taken(0, to, messages),))


def written(proposal: Proposal) -> list[bytes]:
    return frames(proposal.frames, 0, 0)


def read(order: Order, messages: list[bytes]) -> list[Entry]:
    return [found for data in messages if (found := order.read(data)) is not None]


def test_an_entry_that_continues_the_chain_counts_and_says_what_was_written() -> None:
    ours = order()
    for now in (10, 20):
        said = entry(now, b"raw", b"more")
        proposal = ours.propose(said, LARGEST)
        assert not ours.is_decided(proposal)
        assert read(ours, written(proposal)) == [said]
        assert ours.is_decided(proposal)
        assert ours.counts(proposal)
    assert ours.last == 3


def test_of_two_writers_at_once_the_first_on_the_log_counts_for_everybody() -> None:
    one, other, third = order(), order(), order()
    first, second = one.propose(entry(10), LARGEST), other.propose(entry(11), LARGEST)
    log = written(second) + written(first)
    for reader in (one, other, third):
        assert read(reader, log) == [entry(11)]
        assert reader.void == 1
    assert one.is_decided(first)
    assert not one.counts(first)
    assert other.counts(second)
    again = one.propose(entry(12), LARGEST)
    assert read(third, written(again)) == [entry(12)]


def test_what_comes_twice_or_too_early_or_from_another_chain_is_void() -> None:
    writer, reader = order(), order()
    first = written(writer.propose(entry(10), LARGEST))
    read(writer, first)
    second = written(writer.propose(entry(20), LARGEST))
    assert read(reader, [*second, *first, *first]) == [entry(10)]
    stranger = Order(SOURCE, RUN, 2, 12_345)
    assert read(reader, written(stranger.propose(entry(30), LARGEST))) == []
    assert read(reader, second) == [entry(20)]
    assert reader.void == 3


def test_foreign_bytes_other_kinds_sources_and_runs_and_a_late_beginning_say_nothing() -> None:
    reader = order()
    mine = reader.propose(entry(10), LARGEST)
    others = [
        b"", b"foreign", written(mine)[0][:-1],
        *frames([seal(BEAT, MAP, source=SOURCE, run=RUN, id=2, link=CHAIN)], 0, 0),
        *frames([seal(ENTRY, MAP, 3, source=SOURCE + 1, run=RUN, id=2, link=CHAIN)], 0, 0),
        *frames([seal(ENTRY, MAP, 3, source=SOURCE, run=RUN - 1, id=2, link=CHAIN)], 0, 0),
        *frames([seal(ENTRY, MAP, source=SOURCE, run=RUN, id=1)], 0, 0),
    ]  # fmt: skip
    assert read(reader, others) == []
    assert (reader.last, reader.void) == (1, 0)
    assert read(reader, written(mine)) == [entry(10)]


def test_an_entry_larger_than_a_message_takes_several_and_is_taken_with_the_last() -> None:
    ours = order()
    said = entry(10, *[bytes([at]) * 700 for at in range(5)])
    proposal = ours.propose(said, LARGEST)
    messages = written(proposal)
    assert len(messages) > 3
    assert all(len(message) <= LARGEST for message in messages)
    assert read(ours, messages[:-1]) == []
    assert not ours.is_decided(proposal)
    assert read(ours, messages[-1:]) == [said]
    assert ours.counts(proposal)


def test_an_entry_of_more_frames_than_chains_are_kept_is_decided_with_its_last() -> None:
    ours = order()
    proposal = ours.propose(entry(10, b"x" * 200_000), BODY_AT + 100)
    messages = written(proposal)
    assert len(messages) > 1_500
    for message in messages[:-1]:
        assert ours.read(message) is None
        assert not ours.is_decided(proposal)
    assert ours.read(messages[-1]) is not None
    assert ours.is_decided(proposal)
    assert ours.counts(proposal)


@given(st.one_of(
    st.builds(Poisoned, st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 32), st.integers(1, 1 << 62)),
    st.builds(lambda at, key: Poisoned(0, 0, at, key), st.integers(0, 1 << 62), st.text()),
))  # fmt: skip
def test_a_step_is_read_by_the_name_that_the_error_gives_it(step: Poisoned) -> None:
    assert Poisoned.parse(str(step)) == step


@given(st.text() | st.sampled_from(["timer:a:b", "timer:7", "g:0:1", "1:2:", "::", "timer:1:\udc80"]))
def test_no_other_text_names_a_step(text: str) -> None:
    try:
        step = Poisoned.parse(text)
    except ValueError:
        return
    assert Poisoned.parse(str(step)) == step


def test_an_entry_whose_writer_died_in_the_middle_is_abandoned_by_the_next() -> None:
    dead, heir, reader = order(), order(), order()
    large = dead.propose(entry(10, b"x" * 3_000), LARGEST)
    begun = written(large)[:2]
    for each in (dead, heir, reader):
        assert read(each, begun) == []
    following = heir.propose(entry(20), LARGEST)
    rest = written(following) + written(large)[2:]
    assert read(reader, rest) == [entry(20)]
    assert read(dead, rest) == [entry(20)]
    assert dead.is_decided(large)
    assert not dead.counts(large)


def test_a_last_part_without_a_first_one_is_no_entry() -> None:
    ours = order()
    torn = seal(ENTRY, MAP, 2, source=SOURCE, run=RUN, id=2, link=CHAIN, body=b"\x90")
    assert read(ours, frames([torn], 0, 0)) == []
    assert read(ours, written(ours.propose(entry(10), LARGEST))) == [entry(10)]


def test_an_entry_that_cannot_be_read_counts_and_says_nothing() -> None:
    ours = order()
    forged = seal(ENTRY, MAP, 3, source=SOURCE, run=RUN, id=2, link=CHAIN, body=b"\xc1")
    assert read(ours, frames([forged], 0, 0)) == []
    assert ours.last == 2


@pytest.mark.parametrize(
    "values",
    [
        [-1, []], [TIME_MAX + 1, []], [10, [[0, -1, []]]], [10, [], [[1, 0, 1, b"\xff"]]],
        [10, [], [], b"\xff"],
    ],
    ids=str,
)  # fmt: skip
def test_an_entry_with_what_no_member_can_mean_counts_and_says_nothing(values: list[Any]) -> None:
    body = msgpack.packb(values, use_bin_type=False)
    [data] = frames([seal(ENTRY, MAP, FIRST | LAST, source=SOURCE, run=RUN, id=2, link=CHAIN, body=body)], 0, 0)
    reader = order()
    assert reader.read(data) is None
    assert reader.last == 2


def test_a_writer_proposes_where_there_is_something_to_take_or_a_timer_is_due_and_time_never_goes_back() -> None:
    takes = [Taken(0, 7, ())]
    assert next_entry(10, None, None, takes) == Entry(10, tuple(takes))
    assert next_entry(10, 12, None, takes) == Entry(12, tuple(takes))
    assert next_entry(10, None, None, []) is None
    assert next_entry(10, None, 11, []) is None
    assert next_entry(10, None, 10, []) == Entry(10, ())
    assert next_entry(10, 12, 12, []) == Entry(12, ())


@given(st.integers(0, 1 << 32))
def test_all_readers_take_one_order_whatever_writers_do(seed: int) -> None:
    dice = random.Random(seed)
    writers, log, proposals = [order() for _ in range(3)], list[bytes](), list[list[bytes]]()
    read_to = [0, 0, 0]
    for now in range(30):
        at = dice.randrange(3)
        if dice.random() < 0.7:  # else it writes without having read
            read(writers[at], log[read_to[at] :])
            read_to[at] = len(log)
        proposals.append(written(writers[at].propose(entry(now, b"x" * dice.choice((1, 2_000))), LARGEST)))
        sent = dice.choice(proposals)  # now, or later, or again
        log += sent[: dice.randint(1, len(sent))]
    taken = read(order(), log)
    for writer, begun in zip(writers, read_to, strict=True):
        read(writer, log[begun:])
    assert len({(writer.last, writer.chain) for writer in writers}) == 1
    assert read(order(), log) == taken
