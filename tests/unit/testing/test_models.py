"""A model is run without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.testing import check_model, run_model
from tests.integration.engines import Totals, outputs, trades


def test_a_model_emits_what_it_would_in_an_engine() -> None:
    emitted = run_model(Totals(), [("Trades", trades(id)) for id in range(1, 51)])
    assert {window: [block.rows() for block in blocks] for window, blocks in emitted.items()} == outputs(50)
    for blocks in emitted.values():
        assert [block.id for block in blocks] == list(range(1, len(blocks) + 1))


def test_opcodes_go_in_and_come_out() -> None:
    seen: list[Any] = []

    @esp.model(inputs={"a": "id*:int64"}, outputs={"b": "id*:int64"})
    def passes(window: str, block: esp.Block, out: esp.Out) -> None:
        seen.extend(opcode for opcode, _ in block.changes())
        out.emit("b", block)

    emitted = run_model(passes, [("a", [(1,)], esp.Opcode.DELETE)])
    assert seen == [esp.Opcode.DELETE]
    assert emitted["b"][0].changes() == [(esp.Opcode.DELETE, (1,))]


def test_a_second_run_goes_on_from_the_state_of_the_first() -> None:
    model = Totals()
    run_model(model, [("Trades", [(1, "IBM", 5)])])
    assert run_model(model, [("Trades", [(2, "IBM", 7)])])["Totals"][0].rows() == [("IBM", 12)]


@esp.model(inputs={"a": "id*:int64"}, outputs={"late": "id*:int64,at:int64"}, timers=True)
class Late:
    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        for (id,) in block.rows():
            out.wake(str(id), out.now + 10)

    def timer(self, key: str, out: esp.Out) -> None:
        out.emit("late", [(int(key), out.now)])


def test_times_among_the_input_make_timers_fire() -> None:
    emitted = run_model(Late(), [("a", [(1,)]), 5, ("a", [(2,)]), 12, 14, 15])
    assert [block.rows() for block in emitted["late"]] == [[(1, 12)], [(2, 15)]]
    with pytest.raises(ValueError, match="does not go back"):
        run_model(Late(), [5, 4])


def test_errors_are_those_of_an_engine() -> None:
    @esp.model(inputs={"a": "id*:int64"}, outputs={"b": "id*:int64"})
    def fails(window: str, block: esp.Block, out: esp.Out) -> None:
        raise ValueError("so")

    with pytest.raises(esp.StepFailed, match="so") as caught:
        run_model(fails, [("a", [(1,)]), ("a", [(2,)])])
    assert "pass-over" not in str(caught.value)  # there is no engine
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(esp.ValueRefused):
        run_model(fails, [("a", [("1",)])])


# in two processes

SCHEMAS = 'inputs={"a": "id*:int64,text:string"}, outputs={"b": "id*:int64,text:string"}'
MODELS = f"""
import random, time
from dataclasses import dataclass, field
import esp_pubsub as esp

@esp.model({SCHEMAS})
@dataclass
class Sound:
    seen: dict[str, int] = field(default_factory=dict)
    def step(self, window, block, out):
        print("this disturbs nobody")
        for id, text in block.rows():
            self.seen[text] = self.seen.get(text, 0) + 1
        out.emit("b", [(id, text) for text, id in self.seen.items()])

@esp.model({SCHEMAS})
def sets(window, block, out):
    out.emit("b", [(at, text) for at, text in enumerate({{text for _, text in block.rows()}})])

@esp.model({SCHEMAS})
def clock(window, block, out):
    out.emit("b", [(time.time_ns(), "x")])

@esp.model({SCHEMAS})
class Forgets:
    def __init__(self):
        self.count = 0
    def step(self, window, block, out):
        self.count += 1
        out.emit("b", [(self.count, "x")])
    def snapshot(self):
        return b""
    def restore(self, data):
        pass

@esp.model({SCHEMAS})
@dataclass
class Refused:
    seen: set[int] = field(default_factory=set)
    def step(self, window, block, out): ...

@esp.model({SCHEMAS})
def fails(window, block, out):
    raise ValueError("so")

class Plain: ...
"""
INPUT = [("a", [(id, f"{id} {at}") for at in range(5)]) for id in range(50)]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    return file


def test_a_model_that_looks_at_its_input_and_its_state_alone_does_the_same_in_another_process(models: Path) -> None:
    assert check_model(f"{models}:Sound", INPUT) == 50


@pytest.mark.parametrize("name", ["sets", "clock", "Forgets"])
def test_a_model_that_looks_at_something_else_is_found_and_the_step_is_named(models: Path, name: str) -> None:
    with pytest.raises(esp.StepsDiffer, match=rf"in step \d+ of .*:{name}") as caught:
        check_model(f"{models}:{name}", INPUT)
    assert 1 <= caught.value.step <= 50


@pytest.mark.parametrize(("name", "says"), [("fails", "ValueError.*so"), ("Refused", "seen")])
def test_what_ends_one_of_the_processes_is_told(models: Path, name: str, says: str) -> None:
    with pytest.raises(esp.ModelError, match=says):
        check_model(f"{models}:{name}", INPUT)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("models", "module and its name"), (":Sound", "module and its name"), ("nowhere.py:Sound", "nowhere.py"),
        ("no.such.module:Sound", "cannot be imported"),
        ("BROKEN:Sound", "NameError"), ("MODELS:Nowhere", "there is no Nowhere"),
        ("MODELS:Plain", "is no model"), ("esp_pubsub:Block", "without arguments"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_there_is_refused(models: Path, named: str, says: str) -> None:
    broken = models.with_name("broken.py")
    broken.write_text("nothing_of_this_name")
    with pytest.raises(esp.ConfigError, match=says):
        check_model(named.replace("MODELS", str(models)).replace("BROKEN", str(broken)), INPUT)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_also_a_short_check_restores_a_snapshot(models: Path, steps: int) -> None:
    with pytest.raises(esp.ModelError, match="seen"):
        check_model(f"{models}:Refused", INPUT[:steps])


def test_a_model_that_is_checked_is_given_by_its_name() -> None:
    with pytest.raises(esp.ConfigError, match=r"vwap\.py:Vwap"):
        check_model(Totals(), INPUT)  # type: ignore[arg-type]  # a mistake that is easily made
