"""Processes of the embedded bus are killed and stopped under load. The long version: `python -m tests.chaos.kills`."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.chaos.kills import crowd, hand_over, kill_publishers, kill_readers, shown, stop


@pytest.mark.parametrize(
    ("trial", "amount"), [(kill_publishers, 6), (kill_readers, 6), (hand_over, 4), (stop, 3), (crowd, 5)]
)
def test_processes_are_harmed_and_nothing_is_lost(
    trial: Callable[[Any, int], Awaitable[dict[str, Any]]], amount: int
) -> None:
    seed = random.randrange(1 << 30)
    sys.stdout.write(f"seed {seed}\n")
    figures = asyncio.run(trial(amount, seed))  # type: ignore[arg-type]
    sys.stdout.write(shown(trial.__name__, figures) + "\n")
