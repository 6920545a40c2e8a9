"""A snapshot as a file: what is written is read, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_pubsub.engine.snapshot import (
    MAGIC,
    InputState,
    LineState,
    NotASnapshot,
    Snapshot,
    SourceState,
    Writer,
    accept_state,
    read,
    sources_of,
)
from esp_pubsub.engine.state import Part
from esp_pubsub.failover.accept import Accept
from esp_pubsub.wire.frame import BLOCK, LIMITS, Frame, Limits, frames, seal
from tests.unit.failover.accept_reader import SUFFIX, b, beat, block

PARTS = [Part("totals", b"\x90"), Part("", b""), Part("queue", b"x" * 1_000)]


def snapshot(accept: Accept | None = None) -> Snapshot:
    sources = [] if accept is None else accept_state(accept)
    from_start = accept is None or accept.from_start
    return Snapshot(
        order=7, beginning=8, version="1", place=9, chain=10, position=11, incarnation=None,
        inputs=[InputState("Trades", 5, None, from_start, sources)], lines=[LineState("t", 3, 4)], steps=100,
        step_chain=12, marks=[(0, 1)], now=13, timers=[("a", 14)],
    )  # fmt: skip


def file(parts: list[Part]) -> bytes:
    writer = Writer()
    return b"".join([writer.head(snapshot()), *[writer.part(part) for part in parts], writer.end()])


def test_what_was_written_is_read() -> None:
    assert read(file(PARTS)) == (snapshot(), PARTS)
    assert read(file([])) == (snapshot(), [])


def test_a_file_that_is_torn_at_any_byte_is_none() -> None:
    whole = file(PARTS)
    for end in range(len(whole)):
        with pytest.raises(NotASnapshot):
            read(whole[:end])


def test_a_file_in_which_one_bit_is_another_is_none() -> None:
    whole = bytearray(file(PARTS))
    for at in random.Random(7).sample(range(len(whole)), 200):
        whole[at] ^= 1
        with pytest.raises(NotASnapshot):
            read(bytes(whole))
        whole[at] ^= 1


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for each in (data, MAGIC + data):
        with pytest.raises(NotASnapshot):
            read(each)


def frames_of(dice: random.Random) -> list[Frame]:
    """What two senders of one source, two other sources and a diverged one may leave, in any order."""
    found = []
    for position in range(60):
        id, settled = dice.randint(1, 12), dice.randint(0, 12)
        kind = dice.randrange(8)
        if kind == 0:
            frame = beat(settled)
        elif kind == 1:
            frame = b(id, settled)
        elif kind == 2:
            frame = block(id, settled, source=dice.choice((3, 9)))
        elif kind == 3 and position > 30:
            frame = block(id, settled, run=1)
        else:
            frame = block(id, settled)
        found.append(frame._replace(position=position))
    return found


Forget = Callable[[list[SourceState]], list[SourceState]]


def restored(accept: Accept, forget: Forget = list) -> Accept:
    """What becomes of an accept rule in a snapshot."""
    writer = Writer()
    head = snapshot(accept)
    inputs = [msgspec.structs.replace(each, sources=forget(each.sources)) for each in head.inputs]
    found, _ = read(writer.head(msgspec.structs.replace(head, inputs=inputs)) + writer.end())
    theirs = Accept(suffix_only=accept.suffix_only, from_start=True, max_sources=2)
    theirs.from_start, theirs.sources = found.inputs[0].from_start, sources_of(found.inputs[0])
    return theirs


def half_way(dice: random.Random, *, suffix_only: bool) -> tuple[Accept, list[Frame]]:
    """An accept rule somewhere in a history, and what follows there."""
    history = frames_of(dice)
    accept, cut = Accept(suffix_only=suffix_only, from_start=True, max_sources=2), dice.randrange(len(history))
    for frame in history[:cut]:
        accept.receive(frame)
    return accept, history[cut:]


@SUFFIX
@given(st.integers(0, 1 << 32))
def test_an_accept_rule_that_was_restored_decides_as_the_one_that_was_not(suffix_only: bool, seed: int) -> None:
    ours, following = half_way(random.Random(seed), suffix_only=suffix_only)
    theirs = restored(ours)
    for frame in following:
        assert theirs.receive(frame) == ours.receive(frame)
    assert accept_state(theirs) == accept_state(ours)


def without(**fields: Any) -> Forget:
    return lambda states: [msgspec.structs.replace(state, **fields) for state in states]


@pytest.mark.parametrize(
    "forget",
    [
        pytest.param(without(diverged=[]), id="what diverged"),
        pytest.param(without(held=[]), id="what is held"),
        pytest.param(without(chain=None), id="the chain"),
        pytest.param(lambda states: sorted(states, key=lambda state: state.number), id="the order of the sources"),
        pytest.param(lambda states: states[:1], id="a source"),
    ],
)
def test_what_a_snapshot_forgets_of_an_accept_rule_is_found(forget: Forget) -> None:
    for seed in range(500):
        ours, following = half_way(random.Random(seed), suffix_only=bool(seed % 2))
        theirs = restored(ours, forget)
        if any(theirs.receive(frame) != ours.receive(frame) for frame in following):
            return
    pytest.fail("nobody decided otherwise without it")


def test_a_held_frame_that_the_engines_own_limits_let_through_is_read() -> None:
    accept = Accept(suffix_only=False, from_start=True)
    held = seal(BLOCK, 1, 0, 1, 5, 0, 3, 0, 0, b"x" * (LIMITS.frame_bytes + 1))
    assert accept.receive_all([(0, frames([held], 0, 0)[0])], Limits(frame_bytes=2 * LIMITS.frame_bytes)) == []
    assert list(sources_of(snapshot(accept).inputs[0])[5].hold) == [3]
