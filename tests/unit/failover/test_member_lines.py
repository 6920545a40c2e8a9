"""A standby that takes whole lines of the topic at once: it knows neither more nor less than frame by frame."""

from __future__ import annotations

import contextlib
import random

import pytest

from esp_pubsub.errors import BadFrame, InputDiffers
from esp_pubsub.failover.member import Member
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.wire.frame import BLOCK, ROWS, Sealed, frames, parse, seal

OURS, OTHER, BLOCKS = 1, 2, 60


def line(source: int = OURS, differs_at: int = BLOCKS + 1) -> list[Sealed]:
    """The blocks of one input."""
    chain, sealed = 0, []
    for id in range(1, BLOCKS + 1):
        body = bytes([id, id >= differs_at])
        sealed.append(seal(BLOCK, ROWS, 0, 1, source, 0, id, 5, chain, body))
        chain = sealed[-1].chain
    return sealed


def a_topic(chance: random.Random, blocks: list[Sealed]) -> list[bytes]:
    """What senders without a hole leave: each goes on somewhere at or before the end; others write between."""
    written: list[bytes] = []
    end = 0
    other = line(OTHER)
    while end < BLOCKS:
        at = chance.choice((end, end, end, chance.randrange(end + 1)))
        until = min(BLOCKS, at + chance.randrange(1, 12))
        written += frames(blocks[at:until], 0, 0)
        end = max(end, until)
        if chance.random() < 0.2:
            written.append(chance.choice([b"foreign", *frames(other[:1], 0, 0)]))
    return written


def knows(member: Member) -> tuple[int, int, int]:
    return member.m, member.agreed, member.outbox.first


def differs_by(blocks: list[Sealed], member: Member) -> bool:
    """Whether its own blocks turn out to be others than those on the bus."""
    try:
        for block in blocks:
            member.give(block)
    except InputDiffers:
        return True
    return False


def differs_at(messages: list[bytes], member: Member) -> bool:
    """The same, taking one message after the other."""
    try:
        for message in messages:
            with contextlib.suppress(BadFrame):
                member.follow(parse(message))
    except InputDiffers:
        return True
    return False


@pytest.mark.parametrize("seed", range(300))
def test_many_messages_say_what_each_of_them_says(seed: int) -> None:
    chance = random.Random(seed)
    on_bus = line(differs_at=chance.choice((BLOCKS + 1, BLOCKS + 1, chance.randrange(1, BLOCKS))))
    messages, input = a_topic(chance, on_bus), line()
    many, each = (Member(OURS, 0, Outbox(BLOCKS, 1 << 20), suffix_only=True, buffer=BLOCKS) for _ in range(2))

    while messages:
        batch, messages = messages[: (n := chance.randrange(1, 20))], messages[n:]
        differs = differs_at(batch, each)
        try:
            many.follow_all(list(enumerate(batch)))
        except InputDiffers:
            assert differs
            return
        assert not differs
        assert knows(many) == knows(each)
        blocks, input = input[: (n := chance.choice((0, 5, 15)))], input[n:]
        differs = differs_by(blocks, each)
        assert differs_by(blocks, many) == differs
        if differs:
            return
        assert knows(many) == knows(each)
