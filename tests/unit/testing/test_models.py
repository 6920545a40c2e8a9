"""A model is run without an engine."""

from __future__ import annotations

from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.testing import run_model
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


def test_errors_are_those_of_an_engine() -> None:
    @esp.model(inputs={"a": "id*:int64"}, outputs={"b": "id*:int64"})
    def fails(window: str, block: esp.Block, out: esp.Out) -> None:
        raise ValueError("so")

    with pytest.raises(esp.StepFailed, match="so"):
        run_model(fails, [("a", [(1,)])])
    with pytest.raises(esp.ValueRefused):
        run_model(fails, [("a", [("1",)])])
