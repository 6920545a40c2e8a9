"""Values in order, few or many."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import esp_pubsub as esp
from esp_pubsub.testing import run_model
from esp_pubsub.windows import Aggregate, Max, Min, Project, Source, ordered


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=120))
def test_the_least_and_the_greatest_are_those_of_a_sorted_list(script: list[tuple[int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "MOST", 4)
        few: list[int] = []
        many: list[list[int]] = []
        there: list[int] = []
        for value, added in script:
            if added:
                ordered.insert(few, many, value)
                there.append(value)
            elif value in there:
                ordered.remove(few, many, value)
                there.remove(value)
            assert few + [each for values in many for each in values] == sorted(there)
            assert not (few and many)
            assert all(1 <= len(values) <= 4 for values in many)
            assert (few or ordered.least(many))[0] == min(there, default=None)
            assert (few or ordered.greatest(many))[-1] == max(there, default=None)


def test_a_group_of_many_values_has_the_right_extremes() -> None:
    project = Project(
        {
            "In": Source("id*:int64,value:double"),
            "Out": Aggregate("value*:double,least:int64,most:int64", {"least": Min("id"), "most": Max("id")}),
        },
        [("In", "Out")],
        outputs=["Out"],
    )
    ids = list(range(10_000))
    random.Random(5).shuffle(ids)
    there = [(id, 0.5) for id in ids]
    run_model(project, [("In", there)])
    while there:
        gone, there = there[:777], there[777:]
        (block,) = run_model(project, [("In", gone, esp.Opcode.DELETE)])["Out"]
        if there:
            assert block.rows()[0] == (0.5, min(there)[0], max(there)[0])
    assert project.counts()["Out"] == ("aggregate", 0)
