"""Entry 1 of an engine: what it says, who is refused by it, and what is not taken for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import esp_pubsub as esp
from esp_pubsub.bus import Place
from esp_pubsub.engine.beginning import Beginning, Begun, Input, Output, check, platform_here, read_beginning
from esp_pubsub.wire.frame import BLOCK, MAP, frames, seal

OURS = Beginning(
    "1",
    "derived",
    (Input("Trades", "h:1/p/q/Trades/I", "id*:int64", 7, 3),),
    (Output("Large", "h:1/p/q/Large/O", "id*:int64"),),
    {"buffer": 100},
    "cpython 3.11",
    "x86_64 little",
    {"numpy": "2.0"},
)
SOURCE, RUN = 11, 4


def message(beginning: Beginning) -> bytes:
    return frames([beginning.sealed(SOURCE, RUN)], 0, 0)[0]


def test_what_was_written_is_read_with_its_chain() -> None:
    assert read_beginning(message(OURS), SOURCE, RUN) == (OURS, OURS.sealed(SOURCE, RUN).chain)


@pytest.mark.parametrize(
    "other",
    [
        message(OURS)[:-1],
        b"",
        b"foreign",
        frames([seal(BLOCK, MAP, source=SOURCE, run=RUN, id=1, body=message(OURS)[80:])], 0, 0)[0],
        frames([seal(6, MAP, source=SOURCE, run=RUN, id=2, body=message(OURS)[80:])], 0, 0)[0],
        frames([seal(6, MAP, source=SOURCE, run=RUN, id=1, link=9, body=message(OURS)[80:])], 0, 0)[0],
        frames([seal(6, MAP, source=SOURCE, run=RUN, id=1, body=b"\x80")], 0, 0)[0],
    ],
    ids=["torn", "empty", "foreign", "another kind", "another id", "another link", "another map"],
)
def test_anything_else_is_no_beginning(other: bytes) -> None:
    assert read_beginning(other, SOURCE, RUN) is None


@pytest.mark.parametrize(("source", "run"), [(SOURCE + 1, RUN), (SOURCE, RUN + 1)])
def test_the_beginning_of_another_engine_or_run_is_not_ours(source: int, run: int) -> None:
    assert read_beginning(message(OURS), source, run) is None


@given(st.binary(max_size=300))
def test_no_bytes_in_its_place_raise_anything(body: bytes) -> None:
    forged = frames([seal(6, MAP, source=SOURCE, run=RUN, id=1, body=body)], 0, 0)[0]
    read_beginning(forged, SOURCE, RUN)


def test_where_the_inputs_begin_may_differ() -> None:
    elsewhere = replace(OURS, inputs=(replace(OURS.inputs[0], position=0, incarnation=9),))
    check(elsewhere, OURS)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"version": "2"}, "version of the model"),
        ({"order": "written"}, "order"),
        ({"python": "cpython 3.12"}, "Python"),
        ({"machine": "arm64 little"}, "machine"),
        ({"limits": {"buffer": 99}}, "buffer"),
        ({"packages": {"numpy": "2.1"}}, "version of numpy"),
        ({"packages": {}}, "version of numpy"),
        ({"packages": {"numpy": "2.0", "pyarrow": "20"}}, "version of pyarrow"),
        ({"inputs": (replace(OURS.inputs[0], schema="id*:int32"),)}, "schema of input Trades"),
        ({"inputs": (replace(OURS.inputs[0], topic="h:1/p/q/Trades/O"),)}, "topic of input Trades"),
        ({"outputs": (*OURS.outputs, Output("More", "t", "s"))}, "topic of output More"),
    ],
)
def test_any_other_difference_is_refused_with_both_sides(change: dict[str, Any], name: str) -> None:
    with pytest.raises(esp.BeginningDiffers, match=name) as caught:
        check(replace(OURS, **change), OURS)
    assert name in [each for each, _, _ in caught.value.differences]


def test_the_order_of_the_windows_counts() -> None:
    two = (Output("A", "a", "s"), Output("B", "b", "s"))
    with pytest.raises(esp.BeginningDiffers, match="outputs in order"):
        check(replace(OURS, outputs=two), replace(OURS, outputs=two[::-1]))


def test_the_platform_names_python_the_machine_and_what_is_imported() -> None:
    python, machine, packages = platform_here()
    assert python.startswith("cpython 3.")
    assert machine.endswith(("little", "big"))
    assert set(packages) <= {"numpy", "pyarrow"}


def test_what_is_retained_of_it_is_read_again_and_anything_else_is_not() -> None:
    begun = Begun(Place(7, None), message(OURS))
    assert Begun.decoded(begun.encoded()) == begun
    for other in (b"", b"foreign", begun.encoded()[:-1], begun.encoded() + b"x"):
        assert Begun.decoded(other) is None
