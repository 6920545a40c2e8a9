"""A short selection of `python -m tests.chaos`: one run each of some kinds of fault."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.chaos.__main__ import line, play


@pytest.mark.parametrize(
    ("fault", "members"),
    [
        ("kill", 3),
        ("freeze-long", 2),
        ("hand-over-then-kill", 2),
        ("restart-all", 2),
        ("new-run", 2),
        ("kill-reader", 2),
    ],
)
@pytest.mark.timeout(60)
def test_whatever_the_fault_the_history_of_the_run_holds(fault: str, members: int) -> None:
    report = asyncio.run(play("embedded", fault, random.randrange(1 << 30), members, seconds=1.5))
    text = line(1, report)
    print(text)
    assert report.ok, text
