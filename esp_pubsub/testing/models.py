"""A model without an engine: what it emits for an input, and whether it does so again in another process.

    blocks = run_model(Totals(), [("Trades", [(1, "IBM", 100)]), ("Trades", [(2, "SAS", 50)])])
    assert [block.rows() for block in blocks["Totals"]] == [[("IBM", 100)], [("SAS", 50)]]

    check_model("totals.py:Totals", [("Trades", [(1, "IBM", 100)]), ("Trades", [(2, "SAS", 50)])])

`run_model` takes the very steps that an engine takes: rows are checked and encoded, ids are given, and errors are the
same. `check_model` takes them in two processes whose sets and dicts of strings hash otherwise, in one of them with a
snapshot and a restore every few steps, and compares every block.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import msgpack

from ..encode import Encoder
from ..engine.loading import load_model
from ..engine.model import calls_of, declared
from ..engine.options import EngineOptions
from ..engine.state import State
from ..engine.steps import Reading, Steps, line_of
from ..errors import ConfigError, ModelError, StepFailed, StepsDiffer
from ..events import PLAIN, Block
from ..failover.accept import Accept
from ..failover.line import Line
from ..failover.outbox import Outbox
from ..wire.frame import frames, parse
from ..writer import BlockWriter

_RESTARTS = 0.2  # of the steps are followed by a restart, and the first and the last
_INPUT = 1  # the source of the input's blocks; those of the output windows follow


Input = Iterable[tuple[Any, ...] | int]
Sent = tuple[str, bytes] | int


def run_model(model: Any, input: Input) -> dict[str, list[Block]]:
    """What a model emits to each of its output windows, for blocks of input: `(window, rows)` or `(window, rows,
    opcode)`, where rows are what `inject` takes. A number among them is a time in microseconds: it is that time from
    there on, and timers that are due fire. Before the first one it is 0.

    StepFailed as in an engine; ValueRefused or TooLarge for input that could not be published. The model keeps the
    state that it has after this, so a second call goes on from there, but for its timers.
    """
    trial = Trial(model)
    emitted: dict[str, list[Block]] = {window: [] for window in trial.model.outputs}
    for each in input:
        for name, block in trial.take(trial.sent(each)):
            emitted[name].append(block)
    return emitted


class Trial:
    """A model at work, without an engine."""

    def __init__(self, model: Any) -> None:
        self.model, calls = declared(model)
        self._at_work = model
        self._state: State | None = None
        with suppress(ConfigError):  # one of which no snapshot can be taken
            self._state = State(model)
        options = EngineOptions()
        inputs = self.model.inputs.items()
        self._writers = {window: _writer(schema, at) for at, (window, schema) in enumerate(inputs, _INPUT)}
        self._outputs = {}
        for at, (window, schema) in enumerate(self.model.outputs.items(), _INPUT + len(inputs)):
            writer = _writer(schema, at)
            self._outputs[window] = writer, Line(writer.source, 0, writer.outbox, suffix_only=True, buffer=1)
        readings = [Reading(name, schema, Accept(suffix_only=True, from_start=True)) for name, schema in inputs]
        self._places = {reading.window: at for at, reading in enumerate(readings)}
        self.steps = Steps(
            calls, readings, self._outputs, step_blocks=options.step_blocks, step_bytes=options.step_bytes
        )
        self.steps.now = 0

    def sent(self, each: tuple[Any, ...] | int) -> Sent:
        """A block of input as it would be on the bus; a time as it is."""
        if isinstance(each, int):
            return each
        window, rows, *opcode = each
        if window not in self._writers:
            raise ModelError(f"the model has no input window {window!r}; it has {', '.join(self._writers)}")
        writer = self._writers[window]
        writer.outbox.add(writer.seal(writer.encode(rows, *opcode)))
        return window, _taken(writer.outbox)[0]

    def take(self, sent: Sent) -> Iterator[tuple[str, Block]]:
        """Step on a block, or on the timers that are due at a time; gives what is emitted, with its window."""
        steps = self.steps
        if isinstance(sent, int):
            if sent < (steps.now or 0):
                raise ValueError(f"time does not go back: it was {steps.now}, and then {sent}")
            steps.now = sent
            for key in steps.timers.due(sent):
                if steps.timers.take(key):
                    steps.fire(key)
                    yield from self._emitted()
            return
        window, message = sent
        try:
            steps.take(self._places[window], parse(message))
        except StepFailed as failed:  # without its advice: there is no engine that could pass the block over
            raised: Any = failed.__cause__
            raise StepFailed(
                f"the model raised {type(raised).__name__} in the step on block {failed.id} of {window}: {raised}"
                f"{line_of(raised)}",
                window=window, source=failed.source, run=failed.run, id=failed.id, position=failed.position,
            ) from raised  # fmt: skip
        yield from self._emitted()

    def _emitted(self) -> Iterator[tuple[str, Block]]:
        for name, (writer, _) in self._outputs.items():
            for found in _taken(writer.outbox):
                yield name, Block(parse(found), self.model.outputs[name], PLAIN)

    def restart(self) -> None:
        """Go on as a copy that was restored from a snapshot, if there is one. StateRefused where it would differ."""
        if self._state is None:
            return
        copying = self._state.copy(self._at_work)
        while True:
            try:
                next(copying)
            except StopIteration as done:
                self._at_work = done.value
                self.steps.calls = calls_of(done.value, self.model)
                return


def check_model(named: str, input: Input) -> int:
    """Run a model over this input (see `run_model`) in two processes, and compare; returns how many blocks it emitted.

    `named`: `module:name` or `file.py:name`, a function or a class that is made without arguments. StepsDiffer names
    the first step after which the two are not the same; what ends either process otherwise is raised as ModelError.
    """
    trial = Trial(load_model(named))
    messages = [trial.sent(each) for each in input]
    one, other = (_in_a_process(named, messages, seed) for seed in (1, 2))
    for step, (ours, theirs) in enumerate(zip_longest(one, other), 1):
        if ours != theirs:
            raise StepsDiffer(
                f"in step {step} of {named}, two processes did something else: {ours} and {theirs} (output window, id "
                "and chain of each block). The model looks at something besides its input and its state, or its state "
                "does not survive a snapshot",
                step=step, ours=0, theirs=0,
            )  # fmt: skip
    return sum(map(len, one))


def _in_a_process(named: str, messages: list[Sent], seed: int) -> list[Any]:
    """What each step emitted, by the chains of its blocks."""
    ended = subprocess.run(
        [sys.executable, "-m", __name__, named, str(seed)], input=msgpack.packb(messages), capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": str(seed)}, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise ModelError(f"{named} failed: {ended.stderr.decode(errors='replace').strip().rpartition(chr(10))[2]}")
    found: list[Any] = msgpack.unpackb(ended.stdout)
    return found


def _main(named: str, seed: str) -> None:
    """One of the two processes; the second one restarts its model from a snapshot every few steps."""
    trial = Trial(load_model(named))
    dice, steps = random.Random(seed), []
    output, sys.stdout = sys.stdout, sys.stderr  # a model that prints disturbs nobody
    messages = msgpack.unpackb(sys.stdin.buffer.read())
    for sent in messages:
        taken = trial.take(sent if isinstance(sent, int) else (sent[0], sent[1]))
        steps.append([(window, block.id, block.frame.chain) for window, block in taken])
        if seed == "2" and (len(steps) in (1, len(messages)) or dice.random() < _RESTARTS):
            trial.restart()
    output.buffer.write(msgpack.packb(steps))


def _writer(schema: Any, source: int) -> BlockWriter:
    most = EngineOptions()
    outbox = Outbox(most.step_blocks, most.step_bytes)
    return BlockWriter(schema, Encoder(schema, rebuild=True), outbox, source, 0, most.limits.frame_bytes)


def _taken(outbox: Outbox) -> list[bytes]:
    return frames(outbox.settle(outbox.last), 0, 0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
