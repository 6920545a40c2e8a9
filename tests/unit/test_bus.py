"""What a feed returns: a run is the list of its messages, whatever is asked first, and breaks part what was read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

from esp_pubsub.bus import Break, Message, Run, parts

FIRST = 7


def run(batches: list[list[bytes]]) -> Run:
    """Batches in which a few bytes stand in front of the first message and behind the last."""
    return Run(
        FIRST, [(b"in front" + b"".join(b) + b"behind", list(accumulate(map(len, b), initial=8))) for b in batches]
    )


def listed(batches: list[list[bytes]]) -> list[Message]:
    return [Message(at, data) for at, data in enumerate((data for batch in batches for data in batch), FIRST)]


@pytest.mark.parametrize(
    "ask",
    [
        list, len, bool, lambda it: it[0], lambda it: it[-1], lambda it: it[len(it) // 2], lambda it: it[-len(it)],
        lambda it: it[1:], lambda it: it[:], lambda it: it[::-1], lambda it: (it[0], list(it), it[0], it[-1]),
        lambda it: [it[at] for at in range(len(it))],
    ],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [[1], [2], [3], [1, 1], [1, 2, 1], [5, 4]])
def test_a_run_is_a_list_of_its_messages(sizes: list[int], ask: Callable[[Any], Any]) -> None:
    batches = [[b"%d/%d" % (batch, n) * n for n in range(size)] for batch, size in enumerate(sizes)]
    assert ask(run(batches)) == ask(listed(batches))


@pytest.mark.parametrize("at", [0, 2, -1, -3])
def test_a_run_ends_where_a_list_would(at: int) -> None:
    assert run([[b"a", b"b", b"c"]])[at] == listed([[b"a", b"b", b"c"]])[at]
    for beyond in (3, -4):
        with pytest.raises(IndexError):
            run([[b"a", b"b", b"c"]])[beyond]


@pytest.mark.parametrize("taken_apart", [False, True])
def test_a_part_of_each_message_is_had_without_taking_them_apart(taken_apart: bool) -> None:
    found = run([[b"abcd", b"efgh"], [b"ijkl"]])
    if taken_apart:
        list(found)
    assert found.part(1, 3) == b"bcfgjk"


def test_an_empty_run_has_nothing() -> None:
    assert (list(Run(0, [])), len(Run(0, [])), Run(0, []).part(0, 4)) == ([], 0, b"")


def test_what_was_read_is_cut_at_its_breaks() -> None:
    a, b, c = (Message(n, b"m") for n in range(3))
    one, two = Break("one", 1), Break("two", None)
    assert list(parts([a, b, c])) == [(None, [a, b, c])]
    assert list(parts([one])) == [(None, []), (one, [])]
    assert list(parts([a, one, b, c, two])) == [(None, [a]), (one, [b, c]), (two, [])]
    whole = run([[b"a", b"b"]])
    assert next(parts(whole))[1] is whole
