"""Whatever a model is made of, as long as it makes the allowed calls only, all members emit equal blocks: stepped by
themselves, in two processes, and as members of an engine in the simulation (any batches, deaths, snapshots).

EXAMPLES=10000 draws as many models here, and a tenth as many in whole engines.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_pubsub.engine.model import calls_of
from esp_pubsub.engine.state import State
from esp_pubsub.testing import check_model, run_model
from esp_pubsub.testing.models import Trial
from tests.simulation.programs import Memory, Program, draw, make_model
from tests.simulation.run import run

EXAMPLES = int(os.environ.get("EXAMPLES", "150"))
INPUTS, OUTPUTS = {"Left": "id*:int64,text:string", "Right": "id*:int64,text:string"}, ("One", "Two")

Input = list[Any]
PROGRAMS = st.builds(lambda dice, timers: draw(dice, timers=timers), st.randoms(use_true_random=False), st.booleans())


@st.composite
def inputs(draws: st.DrawFn) -> Input:
    """Blocks of both windows with some rows each, and times in between that do not go back."""
    found: Input = []
    now = 0
    for what in draws(st.lists(st.integers(0, 3), min_size=1, max_size=25)):
        if what == 3:
            now += draws(st.sampled_from((0, 1_000, 30_000, 250_000)))
            found.append(now)
        else:
            rows = [(len(found), text) for text in draws(st.lists(st.text(max_size=3), min_size=1, max_size=3))]
            found.append((("Left", "Right", "Left")[what], rows))
    return found


def member(program: Program, input: Input, restart: Callable[[Trial, int], None]) -> tuple[list[Any], int, Any]:
    """What each step of a member emits, by the chains of its blocks; its step chain; the timers that it has left."""
    trial = Trial(make_model(program, INPUTS, OUTPUTS))
    taken = []
    for at, each in enumerate(input):
        taken.append([(window, block.id, block.frame.chain) for window, block in trial.take(trial.sent(each))])
        restart(trial, at)
    return taken, trial.steps.chain, trial.steps.timers.items()


def drawn_input(dice: random.Random, count: int) -> Input:
    """The same without hypothesis."""
    now, found = 0, Input()
    for id in range(count):
        found.append((dice.choice(("Left", "Right")), [(id, dice.choice("xyz")) for _ in range(dice.randint(1, 3))]))
        now += dice.choice((0, 1_000, 30_000))
        found.append(now)
    return found


def is_never_restarted(trial: Trial, at: int) -> None:
    return


@settings(max_examples=EXAMPLES)
@given(PROGRAMS, inputs(), st.sets(st.integers(0, 25)))
def test_a_member_that_goes_on_from_a_copy_emits_what_one_does_that_was_never_disturbed(
    program: Program, input: Input, cuts: set[int]
) -> None:
    def restart(trial: Trial, at: int) -> None:
        if at in cuts:
            trial.restart()

    assert member(program, input, restart) == member(program, input, is_never_restarted)


@settings(max_examples=EXAMPLES)
@given(PROGRAMS, inputs(), st.sets(st.integers(0, 25)))
def test_a_member_that_is_restored_in_another_process_emits_what_one_does_that_was_never_disturbed(
    program: Program, input: Input, cuts: set[int]
) -> None:
    state = State(make_model(program, INPUTS, OUTPUTS))

    def restart(trial: Trial, at: int) -> None:
        if at in cuts:
            parts = list(state.copy(trial.steps.calls.step.__self__))  # type: ignore[attr-defined]
            trial.steps.calls = calls_of(state.restored(parts), trial.model)

    assert member(program, input, restart) == member(program, input, is_never_restarted)


@pytest.mark.parametrize("name", [field.name for field in fields(Memory)])
def test_a_copy_that_has_lost_a_field_of_the_state_is_found(name: str) -> None:
    def restart(trial: Trial, at: int) -> None:
        memory: Any = trial.steps.calls.step.__self__.memory  # type: ignore[attr-defined]
        setattr(memory, name, getattr(Memory(), name) if at == 10 else getattr(memory, name))

    for seed in range(100):
        program, input = draw(random.Random(seed), timers=True), drawn_input(random.Random(seed), 20)
        if member(program, input, restart) != member(program, input, is_never_restarted):
            return
    pytest.fail(f"no program of these looks at {name}")


@pytest.mark.parametrize("seed", range(max(3, EXAMPLES // 1_000)))
def test_two_processes_emit_the_same_though_they_hash_otherwise_and_one_is_restarted(tmp_path: Path, seed: int) -> None:
    file = tmp_path / "drawn.py"
    file.write_text(
        "from random import Random\nfrom tests.simulation.programs import draw, make_model\n"
        f"model = make_model(draw(Random({seed}), timers=True), {INPUTS}, {OUTPUTS})\n"
    )
    input = drawn_input(random.Random(seed), 60)
    emitted = run_model(make_model(draw(random.Random(seed), timers=True), INPUTS, OUTPUTS), input)
    assert check_model(f"{file}:model", input) == sum(map(len, emitted.values())) > 0


@pytest.mark.parametrize("seed", range(max(15, EXAMPLES // 10)))
def test_members_of_an_engine_that_go_on_from_snapshots_publish_what_its_order_yields(seed: int) -> None:
    run(seed, engine=True, random_model=True, snapshots=0.05)
