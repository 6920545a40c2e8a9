"""The state of a model comes back from a snapshot as it was, or it is said which part of it would not."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import esp_pubsub as esp
from esp_pubsub.engine.state import Part, State


class Side(Enum):
    BUY = "b"
    SELL = "s"


@dataclass
class Position:
    quantity: int = 0
    money: Decimal = Decimal(0)
    sides: list[Side] = field(default_factory=list)


@dataclass(slots=True)
class Model:
    totals: dict[str, tuple[float, int]] = field(default_factory=dict)
    positions: dict[str, Position] = field(default_factory=dict)
    queue: list[bytes] = field(default_factory=list)
    by_number: dict[int, list[str]] = field(default_factory=dict)
    last: datetime | None = None
    anything: Any = None


def copied(model: Any) -> tuple[list[Part], Any]:
    parts, copying = [], State(model).copy(model)
    while True:
        try:
            parts.append(next(copying))
        except StopIteration as done:
            return parts, done.value


def check(model: Any) -> Any:
    """Both ways back: as the member goes on, and as another one restores it."""
    parts, copy = copied(model)
    assert copy == model
    assert copy is not model
    assert State(type(model)()).restored(parts) == model
    return copy


def test_a_state_of_many_types_comes_back_as_it_was() -> None:
    model = Model(
        {"IBM": (1.5, 3), "SAS": (-0.0, 0)}, {"IBM": Position(3, Decimal("1.10"), [Side.BUY])}, [b"", b"x"],
        {1: ["a"], -7: []}, datetime(2026, 11, 20, tzinfo=UTC), {"a": [1, None, True, 2.5]},
    )  # fmt: skip
    copy = check(model)
    assert list(copy.by_number) == [1, -7]
    assert math.copysign(1, copy.totals["SAS"][0]) == -1


def test_large_ones_go_in_slices_and_nothing_is_shared_with_the_copy() -> None:
    model = Model(by_number={at: [str(at)] for at in range(10_000)}, queue=[b"x"] * 5_000)
    parts, copy = copied(model)
    assert [part.field for part in parts].count("by_number") == 5
    assert [part.field for part in parts].count("queue") == 3
    model.by_number[3].append("more")
    assert copy.by_number[3] == ["3"]


def test_what_a_dataclass_makes_after_its_fields_is_made_again() -> None:
    @dataclass
    class Derived:
        prices: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.total = sum(self.prices)

    assert check(Derived([1, 2])).total == 3


class Subclassed(str):
    __slots__ = ()


class Number(IntEnum):
    ONE = 1


SHARED: list[str] = []


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (Model(anything={1, 2}), "anything"),
        (Model(anything=(1, 2)), "anything"),
        (Model(anything=[(1, 2)]), r"anything\[0\]"),
        (Model(anything=Decimal(1)), "anything"),
        (Model(anything=Number.ONE), "anything"),
        (Model(anything=Subclassed("x")), "anything"),
        (Model(anything=object()), "anything"),
        (Model(anything=lambda: None), "anything"),
        (Model(anything=1 << 70), "anything"),
        (Model(anything="\ud800"), "anything"),
        (Model(totals=defaultdict(tuple)), "totals"),
        (Model(totals=OrderedDict()), "totals"),
        (Model(totals=Counter()), "totals"),
        (Model(totals={"IBM": [1.5, 3]}), "totals"),
        (Model(totals={"IBM": (1, 3)}), "totals"),
        (Model(totals={"IBM": ("1.5", 3)}), "totals"),
        (Model(totals={7: (1.5, 3)}), "totals"),
        (Model(totals={Subclassed("IBM"): (1.5, 3)}), "totals"),
        (Model(by_number={1: SHARED, 2: SHARED}), r"by_number\[2\]"),
        (Model(by_number={True: []}), "by_number"),
        (Model(positions={"IBM": Position(sides=(Side.BUY,))}), r"positions\['IBM'\].sides"),
        (Model(queue=[bytearray(b"x")]), "queue"),
        (Model(last="2026-11-20"), "last"),
    ],
)  # fmt: skip
def test_what_would_come_back_different_is_refused_with_its_path(model: Model, path: str) -> None:
    with pytest.raises(esp.StateRefused, match=path) as caught:
        copied(model)
    assert caught.value.path.startswith(path.partition("\\")[0].partition(" ")[0])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(JSON)
def test_whatever_is_in_a_field_it_comes_back_the_same_or_is_refused(value: Any) -> None:
    model = Model(anything=value)
    try:
        parts, copy = copied(model)
    except esp.StateRefused:
        return
    assert repr(copy.anything) == repr(value)
    assert repr(State(Model()).restored(parts).anything) == repr(value)


class Own:
    """Says itself what its state is."""

    def __init__(self, remembers: bool = True) -> None:
        self.count, self.forgotten, self.remembers = 0, 0, remembers

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode((self.count, self.forgotten))

    def restore(self, data: bytes) -> None:
        self.count, forgotten = msgspec.msgpack.decode(data)
        self.forgotten = forgotten if self.remembers else self.forgotten


def test_a_model_may_say_itself_what_its_state_is() -> None:
    model = Own()
    state = State(model)
    model.count = model.forgotten = 7
    copying = state.copy(model)
    part = next(copying)
    with pytest.raises(StopIteration) as done:
        next(copying)
    assert (done.value.value.count, done.value.value.forgotten) == (7, 7)
    assert state.restored([part]).count == 7


def test_a_restore_that_forgets_what_snapshot_gives_is_refused() -> None:
    model = Own(remembers=False)
    state = State(model)
    model.count = model.forgotten = 7
    copying = state.copy(model)
    next(copying)
    with pytest.raises(esp.StateRefused, match="snapshot\\(\\) of a restored Own"):
        next(copying)


def test_a_model_that_cannot_be_copied_is_refused_at_once() -> None:
    model = Own()
    model.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(esp.ConfigError, match="cannot be copied"):
        State(model)


def test_a_function_has_no_state() -> None:
    def step(window: str, block: Any, out: Any) -> None: ...

    parts, copy = copied(step)
    assert (parts, copy) == ([], step)
    assert State(step).restored([]) is step


def test_a_model_whose_state_cannot_be_had_is_refused_at_once() -> None:
    class Plain:
        pass

    @dataclass
    class Untyped:
        what: Nowhere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(esp.ConfigError, match="make it a dataclass"):
        State(Plain())
    with pytest.raises(esp.ConfigError, match="its field what"):
        State(Untyped(1))
    with pytest.raises(esp.StateRefused, match="no bytes"):
        model = Own()
        model.snapshot = lambda: "text"  # type: ignore[assignment,return-value,method-assign]
        copied(model)


@pytest.mark.parametrize("parts", [[], [Part("totals", b"\xc1")], [Part("nowhere", b"\x90")], [Part("last", b"\x01")]])
def test_parts_of_something_else_are_refused(parts: list[Part]) -> None:
    with pytest.raises(ValueError, match="the state"):
        State(Model()).restored(parts)


@pytest.mark.parametrize(
    "last",
    [
        datetime(2026, 7, 1, 10, tzinfo=timezone(timedelta(hours=2))),
        datetime(2026, 7, 1, 10, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2026, 10, 25, 2, 30, fold=1),
    ],
)
def test_a_time_of_another_zone_is_refused_because_it_would_come_back_with_another_hour(last: datetime) -> None:
    with pytest.raises(esp.StateRefused, match="the state's last is datetime"):
        copied(Model(last=last))


def test_a_field_that_is_made_empty_after_the_others_is_refused_once_it_holds_something() -> None:
    @dataclass
    class Empties:
        totals: dict[str, int] = field(init=False)

        def __post_init__(self) -> None:
            self.totals = {}

    model = check(Empties())
    model.totals["IBM"] = 1
    with pytest.raises(esp.StateRefused, match="totals is set to something else by __post_init__"):
        copied(model)


def test_what_a_model_keeps_besides_its_fields_is_refused() -> None:
    @dataclass
    class Besides:
        count: int = 0

    model = check(Besides())
    model.seen = 1
    with pytest.raises(esp.StateRefused, match="seen is no field"):
        copied(model)
