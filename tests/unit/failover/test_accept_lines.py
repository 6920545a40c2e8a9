"""Whole lines of blocks taken in one loop: never anything else than frame by frame."""

from __future__ import annotations

import gc
import random
import struct
from collections.abc import Sequence
from itertools import accumulate, starmap
from weakref import ref
from zlib import crc32

import pytest

from esp_pubsub.bus import Message, Run
from esp_pubsub.errors import BadFrame
from esp_pubsub.failover.accept import Accept, Dropped, Outcome, _lines
from esp_pubsub.notices import BadMessage
from esp_pubsub.wire.frame import BEAT, BLOCK, CLAIM, LIMITS, ROWS, Frame, Limits, frames, parse, seal

SOURCES = (1, 2)


def line(source: int, run: int, length: int, word: bytes) -> list[bytes]:
    """One sender's blocks, each with what it knew to be settled."""
    chain, written = 0, []
    for id in range(1, length + 1):
        one = seal(BLOCK, ROWS, 0, 1, source, run, id, 5, chain, word + bytes([id]))
        chain = one.chain
        written += frames([one], max(0, id - (9 if word == b"b" else 3)), 0)
    return written


def disturbed(message: bytes, chance: random.Random) -> bytes:
    """A message with one thing wrong."""
    match chance.randrange(5):
        case 0:
            return message[: chance.randrange(len(message))]
        case 1:
            return message[:8] + struct.pack("<Q", 77) + message[16:]
        case 2:
            return message[:50] + b"?" + message[51:]
        case 3:
            return b"foreign"
        case _:  # whole, and says that it holds more events than it can
            sealed = message[40:44] + struct.pack("<I", 1_000) + message[48:]
            return message[:36] + struct.pack("<I", crc32(sealed, struct.unpack_from("<I", message, 32)[0])) + sealed


def a_topic(seed: int) -> list[bytes]:
    """What several senders may leave: lines interleaved, doubled, with holes, beats, other inputs, foreign bytes."""
    chance = random.Random(seed)
    lines = [line(source, run, 12, word) for source in SOURCES for run in (0, 1) for word in (b"a", b"a", b"b")]
    written: list[bytes] = []
    while lines:
        one = chance.choice(lines)
        taken = chance.randrange(1, 8)
        written += one[:taken]
        del one[: taken - chance.randrange(2)]
        if chance.random() < 0.4 or not one:
            lines.remove(one)
        if chance.random() < 0.2:
            written += frames([seal(BEAT, source=chance.choice(SOURCES))], chance.randrange(9), 0)
        if chance.random() < 0.1:
            written += frames([seal(CLAIM, source=1)], 0, 0)
        if chance.random() < 0.2:
            written.append(disturbed(chance.choice(line(chance.choice(SOURCES), 0, 12, b"a")), chance))
        if chance.random() < 0.1:
            del written[-2:-1]  # a hole
    return written


def one_by_one(accept: Accept, messages: Sequence[tuple[int, bytes]], limits: Limits) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for position, data in messages:
        try:
            outcomes += accept.receive(parse(data, position, limits))
        except BadFrame as e:
            outcomes.append(BadMessage(position, e.reason))
    return outcomes


@pytest.mark.parametrize("suffix_only", [True, False])
@pytest.mark.parametrize("from_start", [True, False])
@pytest.mark.parametrize("limits", [LIMITS, Limits(events=1)], ids=["usual limits", "one event a block"])
def test_what_follows_from_many_messages_is_what_follows_from_each(
    suffix_only: bool, from_start: bool, limits: Limits
) -> None:
    seen: set[str] = set()
    for seed in range(150):
        messages = list(enumerate(a_topic(seed)))
        together, apart = (Accept(suffix_only=suffix_only, from_start=from_start, window=6) for _ in range(2))
        cut = seed % (len(messages) + 1)
        found = together.receive_all(messages[:cut], limits) + together.receive_all(messages[cut:], limits)
        assert found == one_by_one(apart, messages, limits)
        assert list(together.sources) == list(apart.sources)  # in the order in which they were last seen
        for number, source in together.sources.items():
            other = apart.sources[number]
            assert [getattr(source, name) for name in source.__slots__] == [
                getattr(other, name) for name in other.__slots__
            ]
        seen |= {outcome.why if isinstance(outcome, Dropped) else type(outcome).__name__ for outcome in found}
    assert seen >= {"double", "stale", "diverged", "Frame", "NewRun", "InputDiffers", "BadMessage"}
    assert suffix_only or from_start or seen >= {"Joined", "Missed", "beyond"}


def run(first: int, messages: list[bytes]) -> Run:
    return Run(first, [(b"".join(messages), list(accumulate(map(len, messages), initial=0)))])


def test_each_of_those_who_share_what_was_read_finds_what_it_would_find_alone() -> None:
    worlds = [
        (suffix_only, from_start, limits, known)
        for suffix_only in (True, False)
        for from_start in (True, False)
        for limits in (LIMITS, Limits(events=1), Limits(frame_bytes=1))
        for known in (0, 4)
    ]
    for seed in range(40):
        topic = a_topic(seed)
        messages = list(starmap(Message, enumerate(topic)))
        cut = seed % (len(messages) + 1)
        shared = run(0, topic[:cut]), run(cut, topic[cut:])
        for suffix_only, from_start, limits, known in worlds:
            together, apart = (Accept(suffix_only=suffix_only, from_start=from_start, window=6) for _ in range(2))
            for accept in (together, apart) if known else ():
                accept.resume({1: (0, known, parse(line(1, 0, known, b"a")[-1]).chain)})
            found = [outcome for part in shared for outcome in together.receive_all(part, limits)]
            assert found == one_by_one(apart, messages, limits)
        assert any(_lines.get(part) for part in shared)
    kept = [ref(part) for part in shared]
    del shared
    gc.collect()
    assert [each() for each in kept] == [None, None]  # what was found there keeps no messages


def test_a_line_in_order_is_delivered_as_it_is_with_its_positions() -> None:
    messages = list(enumerate(line(1, 0, 200, b"a")))
    found = Accept(suffix_only=True, from_start=True).receive_all(messages)
    assert found == [parse(data, position) for position, data in messages]
    assert all(type(frame) is Frame for frame in found)
