"""What a standby is told to be covered is on the bus, with the bytes that it was given."""

from __future__ import annotations

import random

import pytest

from esp_pubsub.errors import InputDiffers
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.outbox import Outbox
from tests.unit.failover.test_line_reads import BLOCKS, INPUT, OURS, RUN, Topic, line


def live(seed: int, *, differs: bool, suffix_only: bool = True) -> None:
    """A standby that reads its group's topic from the start, hears beats, which say nothing of most blocks, and is
    given its input; where it `differs`, from some block on. Nothing is forgotten, so each block can be compared.
    """
    chance = random.Random(seed)
    topic = Topic(chance, [INPUT], damages=False, higher_run=False)
    topic.fill()
    differs_at = chance.randrange(2, BLOCKS) if differs else BLOCKS + 1
    one = Line(OURS, RUN, Outbox(BLOCKS, 1 << 20), suffix_only=suffix_only, buffer=BLOCKS)
    own, read = line(differs_at=differs_at), 0
    try:
        while read < len(topic.messages) or one.outbox.last < BLOCKS:
            if (step := chance.random()) < 0.4:
                some = topic.messages[read : read + chance.choice((1, 5, 20))]
                one.follow_all(list(enumerate(some, read)))
                read += len(some)
            elif step < 0.5:
                settled = chance.randrange(1, BLOCKS + 1)
                one.heard(RUN, settled, chance.choice((None, INPUT[settled - 1].chain)))
            else:
                for block in own[one.outbox.last :][: chance.choice((1, 4))]:
                    one.give(block)
            assert one.covered <= min(one.outbox.last, one.m)
            assert one.covered < differs_at, "it was told that the bus has what only this member was given"
        assert not differs, "it has compared nothing"
        assert one.covered == BLOCKS
    except InputDiffers as found:
        assert differs_at <= found.id  # any of its blocks may be the one


@pytest.mark.parametrize(
    "how",
    [{"differs": False}, {"differs": True}, {"differs": True, "suffix_only": False}],
    ids=["equal input", "another input", "another input, beats are believed further"],
)
@pytest.mark.parametrize("seed", range(100))
def test_a_block_is_covered_only_once_it_was_compared_where_it_can_be(seed: int, how: dict[str, bool]) -> None:
    live(seed, **how)
