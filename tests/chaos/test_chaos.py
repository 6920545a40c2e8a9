"""A short selection of `python -m tests.chaos`: one run each of some kinds of fault."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.chaos.__main__ import line, play
from tests.chaos.buses import Bus, Embedded
from tests.chaos.engine import play as play_engine
from tests.chaos.kafka import KafkaBus
from tests.chaos.run import Report
from tests.support.kafka import Kafka


def play_and_judge(bus: Bus, fault: str, members: int) -> None:
    judge(asyncio.run(play(bus, fault, random.randrange(1 << 30), members, seconds=1.5)))


def judge(report: Report) -> None:
    text = line(1, report)
    print(text)
    assert report.ok, text


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
def test_whatever_the_fault_the_history_of_the_run_holds(fault: str, members: int) -> None:
    play_and_judge(Embedded(None), fault, members)


@pytest.mark.parametrize("fault", ["kill", "broker-freeze"])
def test_on_kafka_too_the_history_of_the_run_holds(fault: str, kafka: Kafka) -> None:
    play_and_judge(KafkaBus(None, kafka), fault, 2)


@pytest.mark.parametrize(("fault", "shape"), [("kill", "merged"), ("freeze-long", "one"), ("all-killed", "merged")])
def test_subscribers_of_an_engine_get_what_its_model_emits_whatever_the_fault(fault: str, shape: str) -> None:
    judge(asyncio.run(play_engine(Embedded(None), fault, random.randrange(1 << 30), 2, seconds=1.5, shape=shape)))
