"""A step: what it is given, what it may emit, and what is left when it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.encode import Encoder
from esp_pubsub.engine.out import Out
from esp_pubsub.engine.steps import Steps
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

    def __init__(self, step: Callable[[str, esp.Block, Out], None], *, step_blocks: int = 10, step_bytes: int = 10_000):
        self.lines, outputs = [], {}
        for source, window in enumerate(WINDOWS, 1):
            outbox = Outbox(100, 1 << 20)
            line = Line(source, 0, outbox, suffix_only=True, buffer=100)
            self.lines.append(line)
            outputs[window] = (BlockWriter(SCHEMA, Encoder(SCHEMA), outbox, source, 0, LARGEST), line)
        self.steps = Steps(step, {"Trades": SCHEMA}, outputs, step_blocks=step_blocks, step_bytes=step_bytes)

    def take(self, id: int = 1) -> list[int]:
        return list(self.steps.take("Trades", block(id)))

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
