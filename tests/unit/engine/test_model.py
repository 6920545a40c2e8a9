"""What may be declared as a model, and what an engine says of anything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

import esp_pubsub as esp
from esp_pubsub.engine.model import Calls, declared

TRADE = "id*:int64,symbol:string"


@dataclass
class Trade:
    id: Annotated[int, esp.Key]
    symbol: str


def step(window: str, block: esp.Block, out: esp.Out) -> None:
    """A step that does nothing."""


def test_a_function_is_a_model_and_stays_a_function() -> None:
    made = esp.model(inputs={"Trades": TRADE}, outputs={"Large": TRADE}, version="1")(lambda window, block, out: None)
    found, calls = declared(made)
    assert calls == Calls(made, None)
    assert (found.version, list(found.inputs), list(found.outputs)) == ("1", ["Trades"], ["Large"])


def test_an_instance_of_a_class_is_a_model_with_its_own_state() -> None:
    @esp.model(inputs={"Trades": TRADE}, outputs={"Large": TRADE})
    @dataclass
    class Counts:
        seen: list[str] = field(default_factory=list)

        def step(self, window: str, block: Any, out: Any) -> None:
            self.seen.append(window)

    one, other = Counts(), Counts()
    declared(one)[1].step("Trades", None, None)  # type: ignore[arg-type]
    assert (one.seen, other.seen) == (["Trades"], [])


def test_a_schema_is_given_as_such_or_as_a_string_or_as_a_class() -> None:
    schema = esp.Schema(TRADE)
    made = esp.model(inputs={"a": schema}, outputs={"b": TRADE, "c": Trade})(step)
    found, _ = declared(made)
    assert {*found.inputs.values(), *found.outputs.values()} == {schema}


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        ({}, {"b": TRADE}, "at least one input window"),
        ({"a": TRADE}, {}, "at least one output window"),
        ({"a/b": TRADE}, {"b": TRADE}, "no name of an input window"),
        ({"a": TRADE}, {7: TRADE}, "no name of an output window"),
        ([("a", TRADE)], {"b": TRADE}, "at least one input window"),
    ],
)
def test_windows_that_cannot_be_are_refused_when_the_model_is_declared(inputs: Any, outputs: Any, says: str) -> None:
    with pytest.raises(esp.ConfigError, match=says):
        esp.model(inputs=inputs, outputs=outputs)(step)


def test_a_step_that_awaits_is_refused_when_the_model_is_declared() -> None:
    async def awaits(window: str, block: esp.Block, out: esp.Out) -> None: ...

    with pytest.raises(esp.ConfigError, match="asynchronous"):
        esp.model(inputs={"a": TRADE}, outputs={"b": TRADE})(awaits)


@pytest.mark.parametrize("what", [7, object(), type("Stepless", (), {})])
def test_what_has_no_step_is_refused_when_the_model_is_declared(what: Any) -> None:
    with pytest.raises(esp.ConfigError, match="decorate a function, or a class with a method step"):
        esp.model(inputs={"a": TRADE}, outputs={"b": TRADE})(what)


def test_a_version_is_a_short_text() -> None:
    for version in (7, "x" * 129):
        with pytest.raises(esp.ConfigError, match="version"):
            esp.model(inputs={"a": TRADE}, outputs={"b": TRADE}, version=version)(step)  # type: ignore[arg-type]


def test_a_class_in_place_of_its_instance_is_named() -> None:
    @esp.model(inputs={"a": TRADE}, outputs={"b": TRADE})
    class Sums:
        def step(self, window: str, block: Any, out: Any) -> None: ...

    with pytest.raises(esp.ConfigError, match=r"pass Sums\(\)"):
        declared(Sums)


def test_what_was_never_declared_is_refused() -> None:
    with pytest.raises(esp.ConfigError, match=r"@esp\.model"):
        declared(lambda window, block, out: None)


def test_a_class_with_timers_has_a_method_for_them() -> None:
    class Stepping:
        def step(self, window: str, block: Any, out: Any) -> None: ...

    class Timed(Stepping):
        def timer(self, key: str, out: Any) -> None: ...

    windows: Any = {"inputs": {"a": TRADE}, "outputs": {"b": TRADE}}
    timed = esp.model(**windows, timers=True)(Timed)()
    assert declared(timed)[1].timer == timed.timer
    assert declared(esp.model(**windows)(Timed)())[1].timer is None
    with pytest.raises(esp.ConfigError, match="timer"):
        esp.model(**windows, timers=True)(Stepping)
