"""Some seeds of the simulation; `make simulate SEEDS=10000` runs many."""

from __future__ import annotations

import random

import pytest

from esp_pubsub.testing import simulation

FIRST = 1 + random.SystemRandom().randrange(1_000_000)
EACH = 20


@pytest.mark.parametrize("part", range(10))
def test_whatever_happens_every_subscriber_sees_one_sequence(part: int) -> None:
    assert simulation.main(["--first", str(FIRST + part * EACH), "--seeds", str(EACH)]) == 0
