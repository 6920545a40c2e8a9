"""What a project refuses, what it rejects of its input, and how it says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.testing import run_model
from esp_pubsub.testing.models import Trial
from esp_pubsub.windows import (
    GROUP_FUNCTIONS,
    Aggregate,
    Average,
    Compute,
    Copy,
    Count,
    Filter,
    First,
    Max,
    Min,
    Project,
    Retention,
    Source,
    Sum,
)
from esp_pubsub.windows.changes import INSERTED, NEW, OLD, Changes

TRADE = "id*:int64,symbol:string,price:double,at:stamp"
INSERT, UPDATE, DELETE, UPSERT, SAFEDELETE, UPDATEBLOCK = esp.Opcode


def project(**windows: Any) -> Project:
    """These windows in a row, after a source."""
    names = ["Trades", *windows]
    return Project({"Trades": Source(TRADE), **windows}, list(pairwise(names)))


def sliding(**retention: Any) -> Copy:
    return Copy(retention=Retention(**{"kind": "sliding", "by": "time", "amount": 1_000_000, **retention}))


def totals(**functions: Any) -> Aggregate:
    return Aggregate("symbol*:string,result:double", {"result": functions.get("result", Count())})


# what cannot be a project


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Project({}, []), "at least one window"),
        (lambda: Project({"a b": Source(TRADE)}, []), "no name of a window"),
        (lambda: Project({"a": Source}, []), "has to be a Source, Copy"),  # type: ignore[dict-item]
        (lambda: Project({"a": Source(TRADE)}, [("a", "b")]), "names a window that there is not"),
        (lambda: Project({"a": Source(TRADE)}, [("a",)]), "pair of names"),  # type: ignore[list-item]
        (lambda: Project({"a": Source(TRADE), "b": Source(TRADE)}, [("a", "b")]), "is a source, and an edge"),
        (lambda: Project({"a": Source(TRADE), "b": Copy()}, []), "no edge leads to window b"),
        (
            lambda: Project({"a": Source(TRADE), "b": Copy(), "c": Copy()}, [("a", "b"), ("b", "c"), ("a", "c")]),
            "two edges lead to window c, from b and a",
        ),
        (
            lambda: Project({"a": Source(TRADE), "b": Copy(), "c": Copy()}, [("b", "c"), ("c", "b")]),
            "make a circle: b from c from b",
        ),
        (lambda: Project({"a": Copy()}, [("a", "a")]), "make a circle: a from a"),
        (lambda: Project({"a": Source(TRADE)}, [], outputs=["b"]), "'b' of outputs= is no window"),
        (lambda: Source(TRADE, indexed=False), "insert_only=True"),
        (lambda: Retention("rolling", "time", 1), "sliding or jumping"),  # type: ignore[arg-type]
        (lambda: Retention("sliding", "time", 0), "the amount of a retention"),
        (lambda: Retention("sliding", "count", 5, "at"), "looks at no field"),
        (lambda: Copy(retention=5), "is a Retention, not 5"),  # type: ignore[arg-type]
        (lambda: project(b=sliding(field="when")), "window b, after Trades: there is no field 'when'"),
        (lambda: project(b=sliding(field="price")), "'price' of a retention is double, and has to be a stamp"),
        (lambda: project(b=Filter("price > 3")), "window b, after Trades: an expression is a callable"),
        (lambda: Compute(TRADE, {"id": str}), "'id' of a Compute is no field"),
        (lambda: project(b=Compute("symbol*:string", {})), "a Compute keeps the keys"),
        (lambda: project(b=Compute("id*:int64,money:money", {})), "there is no field 'money'"),
        (lambda: project(b=Compute("id*:int64,price:int64", {})), "'price' is int64, and double in the window before"),
        (lambda: Aggregate("symbol*:string,n:int64", {}), "'n' of an Aggregate has no function"),
        (lambda: Aggregate("symbol*:string", {"n": Count()}), "'n' of an Aggregate is no field"),
        (lambda: project(b=Aggregate("symbol*:int64,n:int64", {"n": Count()})), "is int64, and string in the window"),
        (lambda: project(b=totals(result=Sum("symbol"))), "'symbol' is string, and has to be a number"),
        (lambda: project(b=totals(result=Min("symbol"))), "'result' is double, and its function computes string"),
        (lambda: project(b=totals(result=First("other"))), "there is no field 'other'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(make: Callable[[], Any], says: str) -> None:
    with pytest.raises((esp.ConfigError, esp.SchemaError)) as refused:
        make()
    assert says in str(refused.value)


def test_an_error_of_a_window_has_its_name() -> None:
    with pytest.raises(esp.SchemaError) as refused:
        project(Held=sliding(field="price"))
    assert refused.value.window == "Held"  # type: ignore[attr-defined]
    assert refused.value.field == "price"  # type: ignore[attr-defined]


# what a source makes of its events


def after(events: list[tuple[int, Any]], *more: Any) -> tuple[list[Any], dict[str, int]]:
    """What the source emits for the last of these blocks, and what it rejects in all."""
    made = project()
    blocks = [events, *more]
    found = run_model(made, [("Trades", [row for _, row in each], [opcode for opcode, _ in each]) for each in blocks])
    return found["Trades"][-1].changes(), made.rejected.get("Trades", {})


IBM, DEARER, SAS = (1, "IBM", 1.0, 5), (1, "IBM", 2.0, 6), (2, "SAS", 3.0, 7)


def test_an_update_block_is_the_new_row_and_the_old_one() -> None:
    assert after([(INSERT, IBM)], [(UPDATE, DEARER)]) == ([(UPDATEBLOCK, DEARER), (UPDATEBLOCK, IBM)], {})
    assert after([(INSERT, IBM)], [(UPSERT, DEARER)]) == ([(UPDATEBLOCK, DEARER), (UPDATEBLOCK, IBM)], {})
    assert after([(INSERT, IBM)], [(UPDATEBLOCK, DEARER), (UPDATEBLOCK, (1, "?", 9.0, 9))])[0][1] == (UPDATEBLOCK, IBM)
    assert after([(UPSERT, IBM)]) == ([(INSERT, IBM)], {})


def test_a_delete_has_the_row_that_was_there() -> None:
    assert after([(INSERT, IBM)], [(DELETE, (1, None, None, None))]) == ([(DELETE, IBM)], {})
    assert after([(INSERT, IBM)], [(SAFEDELETE, (9, None, None, None)), (INSERT, SAS)]) == ([(INSERT, SAS)], {})


def test_a_block_changes_each_key_once() -> None:
    assert after([(INSERT, IBM), (UPDATE, DEARER)]) == ([(INSERT, DEARER)], {})
    assert after([(INSERT, SAS)], [(INSERT, IBM), (DELETE, IBM), (DELETE, SAS)]) == ([(DELETE, SAS)], {})


def test_events_that_do_not_fit_are_counted_by_reason() -> None:
    _, rejected = after([(INSERT, IBM), (INSERT, DEARER), (UPDATE, SAS), (DELETE, SAS), (INSERT, (None, "", 0.0, 0))])
    assert rejected == {
        "insert of a key that is there": 1, "update or delete of a key that is not there": 2, "its key is null": 1,
    }  # fmt: skip


def test_a_source_of_inserts_rejects_all_else() -> None:
    made = Project({"Trades": Source(TRADE, insert_only=True, indexed=False)}, [])
    found = run_model(made, [("Trades", [IBM, SAS, (None, "", 0.0, 0)], [INSERT, UPSERT, INSERT])])
    assert found["Trades"][0].changes() == [(INSERT, IBM)]
    assert sum(made.rejected["Trades"].values()) == 2


def test_a_partial_update_leaves_the_other_fields() -> None:
    made = project()
    trial = Trial(made)
    list(trial.take(trial.sent(("Trades", [IBM]))))
    event = esp.Event({"id": 1, "symbol": None, "price": 2.0, "at": None}, UPDATE, esp.EventFlag.PARTIAL)
    (_, block), = trial.take(trial.sent(("Trades", [event])))  # fmt: skip
    assert block.changes()[0] == (UPDATEBLOCK, (1, "IBM", 2.0, 5))


def test_of_a_transactional_block_all_events_are_taken_or_none() -> None:
    made = project(Held=sliding(field="at"))
    made.step("Trades", Transaction([(INSERT, IBM)]), Nowhere())  # type: ignore[arg-type]
    made.step("Trades", Transaction([(UPDATE, DEARER), (INSERT, SAS), (DELETE, (7, "", 0.0, 0))]), Nowhere())  # type: ignore[arg-type]
    assert made.counts() == {"Trades": ("source", 1), "Held": ("copy", 1)}
    assert sum(made.rejected["Trades"].values()) == 3


class Transaction:
    """A block whose events are to be applied together."""

    transactional = True

    def __init__(self, events: list[tuple[int, Any]]) -> None:
        self._events = events

    def decoded(self) -> Any:
        return bytes(opcode for opcode, _ in self._events), 0, [row for _, row in self._events]


class Nowhere:
    """An Out of nothing."""

    def emit(self, *_: Any, **__: Any) -> None:
        """Keep nothing."""


# rejections are the same for all members


def test_rejections_survive_a_restart_and_are_logged_at_powers_of_ten(caplog: pytest.LogCaptureFixture) -> None:
    trial = Trial(project(Held=sliding(field="at")))
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            list(trial.take(trial.sent(("Trades", [IBM, IBM]))))
            trial.restart()
    assert trial.steps.calls.step.__self__.rejected == {"Trades": {"insert of a key that is there": 23}}  # type: ignore[attr-defined]
    assert len([each for each in caplog.records if "insert of a key that is there" in each.message]) == 2


def test_a_row_that_is_too_late_or_has_no_stamp_is_rejected_where_it_is_held() -> None:
    made = project(Held=sliding(field="at"))
    rows = [(1, "a", 0.0, 5_000_000), (2, "a", 0.0, 4_000_000), (3, "a", 0.0, 4_000_001), (4, "a", 0.0, None)]
    found = run_model(made, [("Trades", rows)])
    assert [row[0] for row in found["Held"][0].rows()] == [1, 3]
    assert made.rejected["Held"] == {
        "it is older than what the window holds": 1, "the field that says its time is null": 1,
    }  # fmt: skip


def test_a_row_that_a_condition_or_an_expression_cannot_take_is_rejected() -> None:
    made = project(
        Some=Filter(lambda row: 1 / row[2] > 0), More=Compute("id*:int64,more:int32", {"more": lambda row: row[2]})
    )
    found = run_model(made, [("Trades", [(1, "a", 0.0, 0), (2, "a", 2.5, 0)])])
    assert found["More"][0].rows() == [(2, None)]
    assert made.rejected == {
        "Some": {"its condition cannot be computed": 1}, "More": {"field more cannot be computed, and is null": 1},
    }  # fmt: skip


def test_a_sum_that_does_not_fit_is_null_and_right_again_once_it_does() -> None:
    made = Project(
        {
            "In": Source("id*:int64,group:string,number:int64"),
            "Sums": Aggregate("group*:string,small:int32,large:int64,real:double", {
                "small": Sum("number"), "large": Sum("number"), "real": Average("number"),
            }),
        },
        [("In", "Sums")],
    )  # fmt: skip
    most, trial = (1 << 63) - 1, Trial(made)
    seen = []
    for opcode, id, number in ((INSERT, 1, most), (INSERT, 2, most), (INSERT, 3, 5), (DELETE, 1, 0), (DELETE, 2, 0)):
        found = dict(trial.take(trial.sent(("In", [(id, "a", number)], opcode))))
        seen.append(found["Sums"].rows()[0][1:])
        trial.restart()
    assert [row[1] for row in seen] == [most, None, None, None, 5]
    assert [row[0] for row in seen] == [None, None, None, None, 5]
    assert seen[1][2] == float(most)
    assert seen[4][2] == 5.0


def test_what_retention_removes_has_its_flag_in_the_windows_after_it_too() -> None:
    made = project(Held=sliding(field="at"), Totals=totals(result=Max("price")))
    found = run_model(made, [("Trades", [(1, "IBM", 1.0, 0)]), ("Trades", [(2, "SAS", 1.0, 1_000_000)])])
    for window in ("Held", "Totals"):
        inserted, deleted = found[window][1].events()
        assert (inserted.opcode, inserted.flags) == (INSERT, 0)
        assert (deleted.opcode, deleted.flags) == (DELETE, esp.EventFlag.RETENTION)


def test_windows_that_are_empty_again_keep_nothing() -> None:
    made = project(Held=Copy(retention=Retention("sliding", "count", 9)), Totals=totals(result=First("price")))
    run_model(made, [("Trades", [IBM, SAS]), ("Trades", [DEARER], UPDATE), ("Trades", [IBM, SAS], DELETE)])
    assert made.counts() == {"Trades": ("source", 0), "Held": ("copy", 0), "Totals": ("aggregate", 0)}
    left = {name: kept for name, kept in vars(made).items() if name.startswith("w") and kept and kept != [0]}
    assert left == {"w1_order": [1, 2, 1], "w1_left": {1: 2, 2: 1}}  # forgotten as rows go by their places


def test_rows_that_are_updated_for_ever_take_no_more_memory() -> None:
    made = project(Held=Copy(retention=Retention("sliding", "count", 9)))
    run_model(made, [("Trades", [IBM, SAS], UPSERT)] * 20_000)
    assert len(made.w1_order) < 10_000  # type: ignore[attr-defined]


class Narrow:
    """An Out that takes three rows in a block."""

    def __init__(self) -> None:
        self.blocks: list[list[Any]] = []

    def emit(self, window: str, rows: list[Any], **_: Any) -> None:
        if len(rows) > 3:
            raise esp.TooLarge("too many", size=len(rows), limit=3)
        self.blocks.append(rows)


def test_a_block_that_is_too_large_goes_out_as_several_that_tear_no_update_apart() -> None:
    out, rows = Narrow(), [(at,) for at in range(7)]
    Changes(rows, bytes((INSERTED, NEW, OLD, NEW, OLD, NEW, OLD))).emit("Held", out)  # type: ignore[arg-type]
    assert [row for block in out.blocks for row in block] == rows
    assert all(block[0][0] in (0, 1, 3, 5) for block in out.blocks)


def test_a_class_stands_for_its_schema_and_functions_have_their_names_in_sas() -> None:
    assert Source("id*:int64").schema == esp.Schema("id*:int64")
    assert sorted(GROUP_FUNCTIONS) == [
        "ESP_aAve", "ESP_aCount", "ESP_aFirst", "ESP_aLast", "ESP_aMax", "ESP_aMin", "ESP_aStd", "ESP_aSum",
        "ESP_aWAve",
    ]  # fmt: skip
