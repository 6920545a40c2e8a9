"""A step: what it is given, what it may emit, and what is left when it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.encode import Encoder
from esp_pubsub.engine.model import Calls
from esp_pubsub.engine.out import Out
from esp_pubsub.engine.steps import COMPARED_EVERY, Mark, Reading, Steps
from esp_pubsub.failover.accept import Accept
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.wire.frame import BLOCK, ROWS, Frame, Limits, frames, parse, seal
from esp_pubsub.wire.rows import codec
from esp_pubsub.writer import BlockWriter

SCHEMA = esp.Schema("id*:int64,symbol:string")
WINDOWS = ("Large", "Small")
LARGEST = 2_000


class Engine:
    """The computation of one member, and what its lines have."""

    def __init__(
        self,
        step: Callable[[str, esp.Block, Out], None],
        timer: Callable[[str, Out], None] | None = None,
        *,
        step_blocks: int = 10,
        step_bytes: int = 10_000,
        timed: bool = True,
    ) -> None:
        self.lines, outputs = [], {}
        for source, window in enumerate(WINDOWS, 1):
            outbox = Outbox(100, 1 << 20)
            line = Line(source, 0, outbox, suffix_only=True, buffer=100)
            line.reached_end()
            self.lines.append(line)
            outputs[window] = (BlockWriter(SCHEMA, Encoder(SCHEMA), outbox, source, 0, LARGEST), line)
        inputs = [Reading("Trades", SCHEMA, Accept(suffix_only=True, from_start=True))]
        calls = Calls(step, timer, timed)
        self.steps = Steps(calls, inputs, outputs, step_blocks=step_blocks, step_bytes=step_bytes)

    def take(self, id: int = 1) -> list[int]:
        return list(self.steps.take(0, block(id)))

    def tick(self, now: int) -> None:
        self.steps.now = now
        for key in self.steps.timers.due(now):
            if self.steps.timers.take(key):
                self.steps.fire(key)

    def emitted(self, at: int) -> list[list[tuple[Any, ...]]]:
        """The rows of each block of a line, in the order of their ids."""
        outbox, found = self.lines[at].outbox, []
        for id in range(outbox.first, outbox.last + 1):
            sealed = outbox.get(id)
            assert sealed is not None
            assert sealed.id == id
            frame = parse(frames([sealed], 0, 0)[0])
            found.append(codec(SCHEMA).decode(frame.body, frame.count)[2])
        return found


def block(id: int) -> Frame:
    body = codec(SCHEMA).encode([(id, "x")], 1, 0, Limits())
    sealed = seal(BLOCK, ROWS, 0, 1, 77, 3, id, SCHEMA.fingerprint, 0, body)
    return parse(frames([sealed], 0, 0)[0], position=id + 1_000)


def test_a_step_is_given_the_window_and_the_block_and_its_rows_go_out_in_order() -> None:
    def step(window: str, block: esp.Block, out: Out) -> None:
        assert (window, block.rows()) == ("Trades", [(block.id, "x")])
        out.emit("Large", [(block.id, "a")])
        out.emit("Small", [(block.id, "b")])
        out.emit("Large", [(block.id, "c")])

    engine = Engine(step)
    assert engine.take(1) == [0, 1, 0]
    assert engine.take(2) == [0, 1, 0]
    assert engine.emitted(0) == [[(1, "a")], [(1, "c")], [(2, "a")], [(2, "c")]]
    assert engine.emitted(1) == [[(1, "b")], [(2, "b")]]
    assert engine.steps.taken == 2


@pytest.mark.parametrize("rows", [[], (), {}, iter([])])
def test_where_there_are_no_rows_nothing_is_emitted(rows: Any) -> None:
    engine = Engine(lambda window, block, out: out.emit("Large", rows))
    assert engine.take() == []
    assert engine.lines[0].outbox.last == 0


def test_rows_may_come_from_a_generator() -> None:
    engine = Engine(lambda window, block, out: out.emit("Large", (row for row in [(1, "a"), (2, "b")])))
    assert engine.take() == [0]
    assert engine.emitted(0) == [[(1, "a"), (2, "b")]]


def test_a_step_that_raises_has_emitted_nothing_and_its_block_is_named() -> None:
    def step(window: str, block: esp.Block, out: Out) -> None:
        out.emit("Large", [(1, "a")])
        raise KeyError("IBM")

    engine = Engine(step)
    with pytest.raises(esp.StepFailed, match=r"KeyError.*block 5.*position 1005 of Trades.*IBM") as caught:
        engine.take(5)
    failed = caught.value
    assert (failed.window, failed.source, failed.run, failed.id, failed.position) == ("Trades", 77, 3, 5, 1_005)
    assert isinstance(failed.__cause__, KeyError)
    assert [line.outbox.last for line in engine.lines] == [0, 0]
    assert engine.steps.taken == 0


def test_a_step_that_ends_the_program_is_a_step_that_failed() -> None:
    def step(window: str, block: esp.Block, out: Out) -> None:
        raise SystemExit(3)

    with pytest.raises(esp.StepFailed, match="SystemExit"):
        Engine(step).take()


def _unknown_window(out: Out) -> None:
    out.emit("Elsewhere", [(1, "a")])


def _wrong_row(out: Out) -> None:
    out.emit("Large", [(1, "a"), ("2", "b")])


def _too_large_for_the_bus(out: Out) -> None:
    out.emit("Large", [(1, "a" * LARGEST)])


def _too_many_blocks(out: Out) -> None:
    for id in range(11):
        out.emit("Large", [(id, "a")])


def _too_many_bytes(out: Out) -> None:
    for id in range(8):
        out.emit("Large", [(id, "a" * 1_500)])


@pytest.mark.parametrize(
    ("does", "cause", "says"),
    [
        (_unknown_window, esp.ModelError, "no output window 'Elsewhere'; it has Large, Small"),
        (_wrong_row, esp.ValueRefused, "row 1"),
        (_too_large_for_the_bus, esp.TooLarge, "this bus takes 2000"),
        (_too_many_blocks, esp.TooLarge, "more than 10 blocks"),
        (_too_many_bytes, esp.TooLarge, "10000 bytes"),
    ],
)
def test_what_cannot_be_emitted_raises_in_the_step(
    does: Callable[[Out], None], cause: type[Exception], says: str
) -> None:
    engine = Engine(lambda window, block, out: does(out))
    with pytest.raises(esp.StepFailed, match=says) as caught:
        engine.take()
    assert type(caught.value.__cause__) is cause
    assert [line.outbox.last for line in engine.lines] == [0, 0]


def test_a_step_that_raises_is_named_by_its_line_in_the_model() -> None:
    def step(window: str, block: esp.Block, out: Out) -> None:
        out.emit("Large", [(1,)])  # this line, not one of ours

    line = step.__code__.co_firstlineno + 1
    with pytest.raises(esp.StepFailed, match=rf"\(test_steps\.py, line {line}\)"):
        Engine(step).take()


def test_each_step_has_the_whole_limit() -> None:
    engine = Engine(lambda window, block, out: [out.emit("Large", [(id, "a")]) for id in range(10)] and None)
    for id in range(1, 4):
        assert len(engine.take(id)) == 10


def test_out_is_of_use_while_its_step_runs_and_no_longer() -> None:
    kept: list[Out] = []
    engine = Engine(lambda window, block, out: kept.append(out))
    engine.take()
    with pytest.raises(esp.WrongOrder, match="this step has ended"):
        kept[0].emit("Large", [(1, "a")])


def test_a_step_whose_block_differs_from_the_one_on_the_bus_says_so() -> None:
    engine = Engine(lambda window, block, out: out.emit("Large", [(block.id, "a")]))
    engine.lines[0].heard(0, 1, 12_345)
    with pytest.raises(esp.InputDiffers) as caught:
        engine.take()
    assert (caught.value.id, caught.value.theirs) == (1, 12_345)


# timers


def waking(**timers: int) -> Callable[[str, esp.Block, Out], None]:
    def step(window: str, block: esp.Block, out: Out) -> None:
        for key, at in timers.items():
            out.wake(key, at)

    return step


def test_timers_are_due_by_time_and_then_by_key() -> None:
    engine = Engine(waking(b=20, a=20, c=10), lambda key, out: out.emit("Large", [(out.now, key)]))
    engine.steps.now = 5
    engine.take()
    timers = engine.steps.timers
    assert (timers.next, timers.due(9)) == (10, [])
    engine.tick(20)
    assert engine.emitted(0) == [[(20, "c")], [(20, "a")], [(20, "b")]]
    assert (timers.next, len(timers)) == (None, 0)


def test_a_later_call_takes_the_place_of_an_earlier_one_and_a_timer_can_be_cancelled() -> None:
    def step(window: str, block: esp.Block, out: Out) -> None:
        if block.id == 1:
            out.wake("a", 10)
            out.wake("b", 10)
            out.wake("a", 30)
        else:
            out.cancel("b")
            out.cancel("unknown")

    engine = Engine(step)
    engine.steps.now = 0
    engine.take(1)
    assert engine.steps.timers.items() == [("a", 30), ("b", 10)]
    engine.take(2)
    assert engine.steps.timers.due(29) == []
    assert engine.steps.timers.due(30) == ["a"]


def test_a_timer_that_an_earlier_one_of_the_same_entry_cancels_or_sets_anew_does_not_fire_in_it() -> None:
    def timer(key: str, out: Out) -> None:
        out.emit("Large", [(out.now, key)])
        if key == "a":
            out.cancel("b")
            out.wake("c", 40)
            out.wake("d", 5)

    engine = Engine(waking(a=10, b=11, c=12, d=13), timer)
    engine.steps.now = 0
    engine.take()
    for now in (20, 30, 40):
        engine.tick(now)
    assert engine.emitted(0) == [[(20, "a")], [(30, "d")], [(40, "c")]]
    assert len(engine.steps.timers) == 0


def test_a_step_that_raises_sets_no_timer() -> None:
    def step(window: str, block: esp.Block, out: Out) -> None:
        out.wake("a", 10)
        raise ValueError

    engine = Engine(step)
    engine.steps.now = 0
    with pytest.raises(esp.StepFailed):
        engine.take()
    assert len(engine.steps.timers) == 0


def test_a_timer_that_raises_is_named() -> None:
    def timer(key: str, out: Out) -> None:
        raise LookupError("nothing there")

    engine = Engine(waking(a=1), timer)
    engine.steps.now = 1
    with pytest.raises(
        esp.StepFailed, match=r"LookupError at its timer 'a': nothing there \(test_steps\.py, line \d+\).*Mend"
    ):
        engine.steps.fire("a")


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (lambda out: out.wake(7, 1), "a timer's key is a text"),
        (lambda out: out.wake("a", 1.5), "a number of microseconds"),
        (lambda out: out.wake("a", -1), "a number of microseconds"),
        (lambda out: out.wake("a", True), "a number of microseconds"),
    ],
)
def test_a_timer_that_cannot_be_raises_in_the_step(does: Callable[[Out], None], says: str) -> None:
    engine = Engine(lambda window, block, out: does(out))
    engine.steps.now = 0
    with pytest.raises(esp.StepFailed, match=says):
        engine.take()


def test_a_model_without_timers_has_no_time() -> None:
    for does in (lambda out: out.now, lambda out: out.wake("a", 1), lambda out: out.cancel("a")):
        engine = Engine(lambda window, block, out, does=does: does(out), timed=False)
        engine.steps.now = 5
        with pytest.raises(esp.StepFailed, match="timers=True"):
            engine.take()


def test_many_timers_that_are_set_anew_all_the_time_take_no_more_room_than_they_need() -> None:
    engine = Engine(lambda window, block, out: out.wake(f"{block.id % 10}", block.id))
    engine.steps.now = 0
    for id in range(1, 2_001):
        engine.take(id)
    assert len(engine.steps.timers) == 10
    assert len(engine.steps.timers._queue) <= 100


# the step chain


def compared(step: Callable[[str, esp.Block, Out], None]) -> Steps:
    engine = Engine(step)
    engine.steps.now = 0
    for id in range(1, COMPARED_EVERY + 1):
        engine.take(id)
    return engine.steps


def test_members_that_did_the_same_have_the_same_mark() -> None:
    one, other = compared(waking(a=1)), compared(waking(a=1))
    assert one.mark == other.mark
    assert one.mark.step == COMPARED_EVERY
    one.compare(other.mark)


@pytest.mark.parametrize(
    "differently",
    [waking(a=2), waking(), lambda window, block, out: out.emit("Small", [(block.id, "x")] if block.id == 500 else [])],
)
def test_members_that_did_something_else_are_found_out(differently: Callable[[str, esp.Block, Out], None]) -> None:
    one, other = compared(waking(a=1)), compared(differently)
    with pytest.raises(esp.StepsDiffer, match="up to step 1000") as caught:
        one.compare(other.mark)
    assert (caught.value.step, caught.value.theirs) == (1_000, other.mark.chain)


def test_a_mark_of_a_step_that_is_still_to_come_is_compared_once_it_is_there() -> None:
    engine = Engine(waking(a=1))
    engine.steps.now = 0
    engine.steps.compare(Mark(COMPARED_EVERY, 12_345))
    with pytest.raises(esp.StepsDiffer):
        for id in range(1, COMPARED_EVERY + 1):
            engine.take(id)
    assert engine.steps.taken == COMPARED_EVERY
