"""What a user declares: a model, its windows and its version. Pure.

    @esp.model(inputs={"Trades": Trade}, outputs={"Large": Trade})
    def large(window, block, out): ...

    @esp.model(inputs={"Trades": Trade}, outputs={"Totals": Total}, version="totals/1")
    @dataclass
    class Totals:
        def step(self, window, block, out): ...

Every member of an engine computes the same blocks from the same input, so a step may look at nothing but its arguments
and the fields of its model: no clock, no I/O, no randomness, no order of a set.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError
from ..events import Block
from ..schema import Schema, SchemaLike, as_schema

if TYPE_CHECKING:
    from .out import Out

_WINDOW = re.compile(r"[A-Za-z0-9_-]{1,128}")
_DECLARED = "__esp_model__"
_MOST_VERSION = 128
M = TypeVar("M", bound=Callable[..., Any])

Step = Callable[[str, Block, "Out"], None]
Timer = Callable[[str, "Out"], None]


@dataclass(frozen=True, slots=True)
class Model:
    """What was declared of a function or a class."""

    name: str
    version: str
    inputs: Mapping[str, Schema]
    outputs: Mapping[str, Schema]
    timers: bool
    """It asks for the time."""


@dataclass(frozen=True, slots=True)
class Calls:
    """What an engine calls of a model: its step, and, of a class with timers, what is called when one is due."""

    step: Step
    timer: Timer | None
    timed: bool = False
    """It may ask for the time."""
    ask: Callable[[Any], Any] | None = None
    """Answers questions about its state."""
    counts: Callable[[], dict[str, tuple[str, int]]] | None = None
    """Of each window that it keeps, the kind, such as `copy`, and how many rows it holds."""


def model(
    *, inputs: Mapping[str, SchemaLike], outputs: Mapping[str, SchemaLike], version: str = "", timers: bool = False
) -> Callable[[M], M]:
    """Declare a function, or a class with a method `step`, as a model. It is changed in no other way.

    `inputs` and `outputs` name windows and their schemas: a Schema, a schema string, or a class that `Schema.of` takes.
    `version` is a text of yours that changes when the model computes something else: members of different versions
    never run together. With `timers` a step may use `out.now`, `out.wake` and `out.cancel`, and a class has a method
    `timer(key, out)`. ConfigError for what cannot be run.
    """

    def declare(declared: M) -> M:
        name = getattr(declared, "__qualname__", repr(declared))
        _check_callable(declared, name)
        if not isinstance(version, str) or len(version) > _MOST_VERSION:
            raise ConfigError(f"the version of model {name} is a text of at most {_MOST_VERSION} characters")
        if timers and not isinstance(declared, FunctionType) and not callable(getattr(declared, "timer", None)):
            raise ConfigError(f"model {name} has timers: give it a method timer(key, out)")
        made = Model(name, version, _windows(inputs, name, "input"), _windows(outputs, name, "output"), timers)
        setattr(declared, _DECLARED, made)
        return declared

    return declare


def declared(of: Any) -> tuple[Model, Calls]:
    """The declaration of a model and what is called of it: a function, or methods of an instance. ConfigError without
    one.
    """
    if isinstance(of, type):
        raise ConfigError(f"an engine runs an instance of {of.__name__}, not the class: pass {of.__name__}()")
    found = getattr(of, _DECLARED, None)
    if not isinstance(found, Model):
        raise ConfigError(
            f"{of!r} is no model: decorate its function or class with @esp.model(inputs=..., outputs=...)"
        )
    return found, calls_of(of, found)


def calls_of(of: Any, model: Model) -> Calls:
    """What is called of a function or an instance that is this model."""
    if isinstance(of, FunctionType):
        return Calls(of, None, model.timers)
    timer = of.timer if model.timers else None
    return Calls(of.step, timer, model.timers, getattr(of, "ask", None), getattr(of, "counts", None))


def _check_callable(declared: Any, name: str) -> None:
    step = declared if isinstance(declared, FunctionType) else getattr(declared, "step", None)
    if not callable(step) or not isinstance(declared, type | FunctionType):
        raise ConfigError(f"{name} is no model: decorate a function, or a class with a method step(window, block, out)")
    if inspect.iscoroutinefunction(step):
        raise ConfigError(
            f"the step of model {name} is asynchronous; a step awaits nothing, because all members must do the same: "
            "make it a plain function"
        )


def _windows(given: Mapping[str, SchemaLike], name: str, what: str) -> dict[str, Schema]:
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"model {name} has at least one {what} window: {what}s={{'Trades': schema}}")
    for window in given:
        if not isinstance(window, str) or not _WINDOW.fullmatch(window):
            raise ConfigError(f"{window!r} is no name of an {what} window: use letters, digits, '_' and '-'")
    return {window: as_schema(schema) for window, schema in given.items()}
