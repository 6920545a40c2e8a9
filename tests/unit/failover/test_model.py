"""The model check: the quick worlds are exhausted here, all of them by `make model`."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from esp_pubsub.failover.accept import Accept
from esp_pubsub.failover.outbox import Outbox
from tests.model import worlds
from tests.model.explorer import Broken, Counterexample, Moves, Workshop, explore, freeze, thaw
from tests.model.judges import Code, frame
from tests.model.line_scene import LineScene
from tests.model.scene import Scene

QUICK = [scene.name for scene in worlds.scenes() if scene.quick]


def scene(name: str) -> Scene | LineScene:
    return next(scene for scene in worlds.scenes() if scene.name == name)


@pytest.mark.parametrize("name", QUICK)
def test_a_world_has_neither_a_wrong_history_nor_a_dead_end(name: str) -> None:
    found = worlds.check(scene(name))
    assert found.states > 1_000
    assert found.done > 0


def test_worlds_have_different_names_and_most_are_quick() -> None:
    names = [scene.name for scene in worlds.scenes()]
    assert len(names) == len(set(names))
    assert len(QUICK) > len(names) / 3


def test_main_prints_worlds_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert worlds.main(["queues, strays"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("queues, strays of the last run")
    assert "states" in first
    assert last.endswith("0 counterexamples")


def test_main_prints_a_counterexample_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settle = Outbox.settle
    monkeypatch.setattr(Outbox, "settle", lambda self, id: settle(self, id + 1))
    assert worlds.main(["log, both lead"]) == 1
    text = capsys.readouterr().out
    assert "was told as missed, and nothing took it" in text
    assert text.splitlines()[-1].endswith("1 counterexamples")


# the explorer itself


class Counter:
    """A world of numbers: one may go up by one or by two, some are forbidden, one is the goal."""

    name = "counter"

    def __init__(self, most: int, goal: int, broken: int = -1) -> None:
        self.most, self.goal, self.broken = most, goal, broken

    def start(self) -> int:
        return 0

    def moves(self, state: int) -> Moves:
        for by in (1, 2):
            if state + by <= self.most:
                yield f"up by {by}", lambda by=by: self.up(state, by)  # type: ignore[misc]

    def up(self, state: int, by: int) -> int:
        if state + by == self.broken:
            raise Broken(f"{state + by} is forbidden")
        return state + by

    def done(self, state: int) -> bool:
        return state == self.goal

    def hopes(self, state: int) -> bool:
        return True

    def show(self, state: int) -> str:
        return f"at {state}"


def test_a_world_is_exhausted() -> None:
    found = explore(Counter(9, 9))
    assert (found.states, found.done) == (10, 1)


def test_a_broken_rule_is_told_with_the_shortest_history() -> None:
    with pytest.raises(Counterexample) as caught:
        explore(Counter(9, 9, broken=6))
    text = str(caught.value)
    assert "6 is forbidden" in text
    assert [line.split()[-1] for line in text.splitlines() if "at " in line] == ["0", "2", "4"]


def test_a_dead_end_is_told_with_the_shortest_history() -> None:
    with pytest.raises(Counterexample, match="can not be delivered") as caught:
        explore(Counter(9, 5))
    assert str(caught.value).splitlines()[-2].endswith("at 6")


class Living(NamedTuple):
    """A number, and how many faults there may be."""

    at: int
    lives: int


class Faulty(Counter):
    """The same where only a fault leads on from 1."""

    def start(self) -> Living:  # type: ignore[override]
        return Living(0, 1)

    def moves(self, state: Living) -> Moves:  # type: ignore[override]
        if state.at != 1:
            yield "up", lambda: state._replace(at=state.at + 1)
        if state.lives:
            yield "fault", lambda: Living(2, state.lives - 1)

    def done(self, state: Living) -> bool:  # type: ignore[override]
        return state.at == self.goal


def test_a_dead_end_is_one_though_a_fault_would_lead_out_of_it() -> None:
    with pytest.raises(Counterexample, match="can not be delivered") as caught:
        explore(Faulty(9, 3))
    assert [line.split()[1] for line in str(caught.value).splitlines()[1:-1]] == ["start"]


def test_a_world_without_end_is_given_up() -> None:
    with pytest.raises(RuntimeError, match="more than 50 states"):
        explore(Counter(1_000, 1_000), 50)


class Sharing:
    """An object that holds another one twice."""

    def __init__(self) -> None:
        self.one = Accept(suffix_only=False, from_start=True)
        self.queue = deque([self.one, 5])
        self.table: dict[int, Any] = {1: {2, 3}, 4: [self.one]}


def test_a_snapshot_is_a_copy_that_shares_what_was_shared() -> None:
    value = Sharing()
    value.one.receive(frame(Code("A", 0, 2, 0)))
    picture = freeze(value)
    copy = thaw(picture)
    assert copy.one is copy.queue[0] is copy.table[4][0]
    assert copy.one is not value.one
    assert freeze(copy) == picture
    copy.one.receive(frame(Code("A", 0, 1, 0)))
    assert freeze(value) == picture != freeze(copy)


class Calling:
    """An object that calls a method of another one, which it also holds, in a tuple."""

    def __init__(self) -> None:
        self.held = (1, Sharing())
        self.call = self.held[1].one.receive


def test_a_snapshot_copies_what_tuples_hold_and_whose_method_is_called() -> None:
    value = Calling()
    copy = thaw(freeze(value))
    assert copy.held[1] is not value.held[1]
    assert copy.call.__self__ is copy.held[1].one is copy.held[1].queue[0]
    copy.call(frame(Code("A", 0, 1, 0)))
    assert (len(copy.held[1].one.sources), len(value.held[1].one.sources)) == (1, 0)


def test_a_workshop_calls_each_thing_once_and_remembers_what_was_wrong() -> None:
    calls: list[int] = []

    def receive(accept: Accept, id_: int) -> None:
        calls.append(id_)
        if id_ == 3:
            raise Broken("three")
        accept.receive(frame(Code("A", 0, id_, 0)))

    works = Workshop()
    number = works.keep(Accept(suffix_only=True, from_start=True))
    assert works.change(number, receive, 1) == works.change(number, receive, 1) != number
    for _ in range(2):
        with pytest.raises(Broken, match="three"):
            works.change(number, receive, 3)
    assert calls == [1, 3]
    last: Callable[[Accept], int] = lambda accept: accept.sources[7].last  # noqa: E731
    assert works.look(works.change(number, receive, 1), last) == 1
    assert len(works) == 2
