"""Each window has, after each block, the rows that a naive computation from all rows has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_pubsub as esp
from esp_pubsub.testing.models import Trial
from esp_pubsub.windows import (
    Aggregate,
    Average,
    Compute,
    Copy,
    Count,
    Filter,
    First,
    Last,
    Max,
    Min,
    Project,
    Retention,
    Source,
    StandardDeviation,
    Sum,
    WeightedAverage,
    sliding,
)
from tests.unit.windows import naive

SECOND = 1_000_000
TRADE = "id*:int64,symbol:string,price:double,quantity:int64,at:stamp"
TOTALS = (
    "symbol*:string,n:int32,total:double,whole:int64,average:double,weighted:double,deviation:double,"
    "least:double,greatest:double,first:double,last:int64"
)
FUNCTIONS = {
    "n": Count(),
    "total": Sum("price"),
    "whole": Sum("quantity"),
    "average": Average("price"),
    "weighted": WeightedAverage("price", "quantity"),
    "deviation": StandardDeviation("price"),
    "least": Min("price"),
    "greatest": Max("price"),
    "first": First("price"),
    "last": Last("quantity"),
}  # fmt: skip
RETENTIONS = [
    *(Retention(kind, "time", 5 * SECOND, "at") for kind in ("sliding", "jumping")),
    *(Retention(kind, "time", 3 * SECOND) for kind in ("sliding", "jumping")),
    *(Retention(kind, "count", 4) for kind in ("sliding", "jumping")),
]

prices = st.one_of(st.integers(-40, 40).map(lambda each: each / 4), st.sampled_from([None, float("inf"), float("nan")]))
rows = st.tuples(
    st.integers(1, 8),
    st.sampled_from(["IBM", "SAS", None]),
    prices,
    st.one_of(st.integers(-3, 9), st.none()),
    st.one_of(st.sampled_from([0, 1, 1, 2, 3, 4, -2, -5]), st.none()),
)  # the last is how many seconds it is later than the one before; see `stamped`
OPCODES = [esp.Opcode.INSERT, esp.Opcode.UPDATE, esp.Opcode.DELETE, *[esp.Opcode.UPSERT] * 3, esp.Opcode.SAFEDELETE]
events = st.tuples(st.sampled_from(OPCODES), rows)
blocks = st.lists(events, min_size=1, max_size=6)
inserts = st.lists(rows.map(lambda row: (esp.Opcode.INSERT, row)), min_size=1, max_size=6)
times = st.integers(1, 4)


def stamped(script: list[Any]) -> list[Any]:
    """The same events with stamps, which mostly grow."""
    at, found = 20, []
    for each in script:
        if isinstance(each, int):
            found.append(each)
            continue
        found.append([])
        for opcode, (*values, later) in each:
            at += later or 0
            found[-1].append((opcode, (*values, None if later is None else at * SECOND)))
    return found


class View:
    """What a subscriber of a window has, from its blocks alone; they have to fit together."""

    def __init__(self) -> None:
        self.rows: dict[Any, tuple[Any, ...]] = {}

    def take(self, block: esp.Block) -> None:
        seen = set()
        changes = iter(block.changes())
        for opcode, row in changes:
            key = row[0]
            assert key not in seen, "one change for each key"
            seen.add(key)
            if opcode is esp.Opcode.INSERT:
                assert key not in self.rows
                self.rows[key] = row
            elif opcode is esp.Opcode.UPDATEBLOCK:
                assert same(next(changes), (opcode, self.rows[key]))
                self.rows[key] = row
            else:
                assert opcode is esp.Opcode.DELETE
                assert same(self.rows.pop(key), row)


def same(ours: Any, theirs: Any) -> bool:
    """Equal, where NaN is equal to itself."""
    return repr(ours) == repr(theirs)


def near(ours: Any, theirs: Any) -> bool:
    """The same rows, but for what rounding does to a deviation."""
    assert ours.keys() == theirs.keys()
    for key, row in ours.items():
        exact, deviation = (*row[:6], *row[7:]), row[6]
        assert same(exact, (*theirs[key][:6], *theirs[key][7:]))
        assert deviation == theirs[key][6] or abs(deviation - theirs[key][6]) < 1e-6
    return True


def played(project: Project, script: list[Any], restart: Callable[[int], bool]) -> Iterator[tuple[Any, Any, int]]:
    """Step on blocks and on times; gives each, and the blocks that followed."""
    trial, now = Trial(project), 0
    for number, each in enumerate(script):
        if restart(number):
            trial.restart()
        if isinstance(each, int):
            now += each * SECOND
            sent = trial.sent(now)
        else:
            sent = trial.sent(("Trades", [row for _, row in each], [opcode for opcode, _ in each]))
        yield each, list(trial.take(sent)), now


def check(make: Callable[[], Project], script: list[Any], expected: Callable[[Any, int], dict[str, Any]]) -> None:
    """All windows show what is expected after each event; also when the state is restored before each of them."""
    project = make()
    views = {name: View() for name in project.counts()}
    emitted = []
    for each, found, now in played(project, script, lambda _: False):
        for name, block in found:
            views[name].take(block)
        assert len({name for name, _ in found}) == len(found), "one block for each window"
        emitted.append([(name, block.frame.chain) for name, block in found])
        for name, table in expected(each, now).items():
            agrees = near if name == "Totals" else same_rows
            assert agrees(views[name].rows, table), name
            kind, held = project.counts()[name]
            if kind != "source" and held:
                assert held == len(table)
    restored = played(make(), script, lambda _: True)
    assert [[(name, block.frame.chain) for name, block in found] for _, found, _ in restored] == emitted


def same_rows(ours: naive.Table, theirs: naive.Table) -> bool:
    return {key: repr(row) for key, row in ours.items()} == {key: repr(row) for key, row in theirs.items()}


def fed(source: naive.Source, each: Any) -> list[tuple[Any, Any]]:
    """What a block changes in the source: of each key, from how its row was to how it is."""
    changes: dict[Any, tuple[Any, Any]] = {}
    for opcode, row in each if not isinstance(each, int) else ():
        if (change := source.take(opcode, row)) is not None:
            changes[row[0]] = (changes.pop(row[0], change)[0], change[1])
    return [change for change in changes.values() if change != (None, None)]


@settings(max_examples=40)
@given(st.lists(blocks, max_size=12).map(stamped))
def test_an_aggregate_of_a_keyed_source_is_what_all_its_rows_give(script: list[Any]) -> None:
    source = naive.Source()

    def expected(each: Any, now: int) -> dict[str, Any]:
        fed(source, each)
        return {"Trades": source.rows, "Totals": naive.aggregated(source.rows)}

    check(
        lambda: Project({"Trades": Source(TRADE), "Totals": Aggregate(TOTALS, FUNCTIONS)}, [("Trades", "Totals")]),
        script,
        expected,
    )


@pytest.mark.parametrize("retention", RETENTIONS, ids=lambda each: f"{each.kind} {each.by} {each.field or ''}")
@settings(max_examples=40)
@given(st.lists(st.one_of(blocks, times), max_size=14).map(stamped))
def test_a_copy_holds_what_its_retention_says(retention: Retention, script: list[Any]) -> None:
    source = naive.Source()
    copy = naive.Retained(retention.kind, retention.by, retention.amount, 4 if retention.field else None)

    def expected(each: Any, now: int) -> dict[str, Any]:
        for old, new in fed(source, each):
            copy.take(old, new, now)
        if isinstance(each, int) and retention.timed:
            copy.tick(now)
        return {"Held": copy.rows, "Totals": naive.aggregated(copy.rows)}

    check(
        lambda: Project(
            {"Trades": Source(TRADE), "Held": Copy(retention=retention), "Totals": Aggregate(TOTALS, FUNCTIONS)},
            [("Trades", "Held"), ("Held", "Totals")],
        ),
        script if retention.timed else [each for each in script if not isinstance(each, int)],
        expected,
    )


@pytest.mark.parametrize("retention", RETENTIONS, ids=lambda each: f"{each.kind} {each.by} {each.field or ''}")
def test_a_copy_holds_what_its_retention_says_for_long(retention: Retention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliding, "_GONE", 3)
    dice = random.Random(7)
    script: list[Any] = []
    for _ in range(250):
        if dice.random() < 0.2:
            script.append(dice.randrange(1, 3))
            continue
        script.append([])
        for _ in range(dice.randrange(1, 4)):
            values = (dice.randrange(12), dice.choice(["IBM", "SAS"]), dice.randrange(40) / 4, dice.randrange(9))
            later = dice.choice([0, 0, 0, 1, 1, 2, 3, -1, -2, -3])
            script[-1].append((dice.choice(OPCODES), (*values, later)))
    script = stamped(script)
    source = naive.Source()
    copy = naive.Retained(retention.kind, retention.by, retention.amount, 4 if retention.field else None)

    def expected(each: Any, now: int) -> dict[str, Any]:
        for old, new in fed(source, each):
            copy.take(old, new, now)
        if isinstance(each, int) and retention.timed:
            copy.tick(now)
        return {"Held": copy.rows, "Totals": naive.aggregated(copy.rows)}

    check(
        lambda: Project(
            {"Trades": Source(TRADE), "Held": Copy(retention=retention), "Totals": Aggregate(TOTALS, FUNCTIONS)},
            [("Trades", "Held"), ("Held", "Totals")],
        ),
        script if retention.timed else [each for each in script if not isinstance(each, int)],
        expected,
    )


@pytest.mark.parametrize("retention", RETENTIONS, ids=lambda each: f"{each.kind} {each.by} {each.field or ''}")
@settings(max_examples=40)
@given(st.lists(st.one_of(st.integers(1, 6), times.map(lambda each: -each)), max_size=14), st.data())
def test_a_copy_of_inserts_in_order_takes_them_at_once_and_holds_the_same(
    retention: Retention, script: list[int], data: st.DataObject
) -> None:
    copy = naive.Retained(retention.kind, retention.by, retention.amount, 4 if retention.field else None)
    id, at, plan = 0, 0, []
    for each in script:
        if each < 0:
            plan.append(-each)
            continue
        plan.append([])
        for _ in range(each):
            id, at = id + 1, at + data.draw(st.integers(0, 3)) * SECOND
            plan[-1].append((esp.Opcode.INSERT, (id, "IBM", id / 4, id, at)))

    def expected(each: Any, now: int) -> dict[str, Any]:
        for _, row in each if not isinstance(each, int) else ():
            copy.take(None, row, now)
        if isinstance(each, int) and retention.timed:
            copy.tick(now)
        return {"Held": copy.rows, "Totals": naive.aggregated(copy.rows)}

    check(
        lambda: Project(
            {
                "Trades": Source(TRADE, insert_only=True, indexed=False),
                "Held": Copy(retention=retention),
                "Totals": Aggregate(TOTALS, FUNCTIONS),
            },
            [("Trades", "Held"), ("Held", "Totals")],
        ),
        plan if retention.timed else [each for each in plan if not isinstance(each, int)],
        expected,
    )


@pytest.mark.parametrize("retention", RETENTIONS, ids=lambda each: f"{each.kind} {each.by} {each.field or ''}")
@settings(max_examples=40)
@given(st.lists(st.one_of(inserts, times), max_size=14).map(stamped))
def test_a_copy_rejects_inserts_of_keys_that_it_holds(retention: Retention, script: list[Any]) -> None:
    copy = naive.Retained(retention.kind, retention.by, retention.amount, 4 if retention.field else None)

    def expected(each: Any, now: int) -> dict[str, Any]:
        for _, row in each if not isinstance(each, int) else ():
            copy.take(None, row, now)
        if isinstance(each, int) and retention.timed:
            copy.tick(now)
        return {"Held": copy.rows, "Totals": naive.aggregated(copy.rows)}

    check(
        lambda: Project(
            {
                "Trades": Source(TRADE, insert_only=True, indexed=False),
                "Held": Copy(retention=retention),
                "Totals": Aggregate(TOTALS, FUNCTIONS),
            },
            [("Trades", "Held"), ("Held", "Totals")],
            outputs=["Held", "Totals"],
        ),
        script if retention.timed else [each for each in script if not isinstance(each, int)],
        expected,
    )


@settings(max_examples=40)
@given(st.lists(inserts, max_size=10).map(stamped))
def test_an_aggregate_of_inserts_alone_keeps_little_and_gives_the_same(script: list[Any]) -> None:
    rows: dict[int, Any] = {}

    def expected(each: Any, now: int) -> dict[str, Any]:
        for _, row in each:
            rows[len(rows)] = row
        return {"Totals": naive.aggregated(rows)}

    check(
        lambda: Project(
            {"Trades": Source(TRADE, insert_only=True, indexed=False), "Totals": Aggregate(TOTALS, FUNCTIONS)},
            [("Trades", "Totals")],
            outputs=["Totals"],
        ),
        script,
        expected,
    )


@settings(max_examples=40)
@given(st.lists(blocks, max_size=12).map(stamped))
def test_a_filter_has_the_rows_that_meet_its_condition(script: list[Any]) -> None:
    source = naive.Source()

    def expected(each: Any, now: int) -> dict[str, Any]:
        fed(source, each)
        some = naive.filtered(source.rows, lambda row: row[3] is not None and row[3] > 2)
        return {"Some": some, "Totals": naive.aggregated(some)}

    check(
        lambda: Project(
            {"Trades": Source(TRADE), "Some": Filter(lambda row: row[3] > 2), "Totals": Aggregate(TOTALS, FUNCTIONS)},
            [("Trades", "Some"), ("Some", "Totals")],
        ),
        script,
        expected,
    )


@settings(max_examples=40)
@given(st.lists(blocks, max_size=12).map(stamped))
def test_a_compute_has_a_row_for_each_row(script: list[Any]) -> None:
    source = naive.Source()

    def double(row: Any) -> Any:
        return (row[0], None if row[3] is None else row[3] * 2.0, row[4])

    def expected(each: Any, now: int) -> dict[str, Any]:
        fed(source, each)
        return {"More": naive.computed(source.rows, double)}

    check(
        lambda: Project(
            {
                "Trades": Source(TRADE),
                "More": Compute("id*:int64,double:double,at:stamp", {"double": lambda row: row[3] * 2}),
            },
            [("Trades", "More")],
        ),
        script,
        expected,
    )
