"""A model without an engine: what it emits for an input, and whether it does so again in another process.

    blocks = run_model(Totals(), [("Trades", [(1, "IBM", 100)]), ("Trades", [(2, "SAS", 50)])])
    assert [block.rows() for block in blocks["Totals"]] == [[("IBM", 100)], [("SAS", 50)]]

`run_model` is the very step an engine takes: rows are checked and encoded, ids are given, and errors are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..encode import Encoder
from ..engine.model import declared
from ..engine.options import EngineOptions
from ..engine.steps import Reading, Steps
from ..events import PLAIN, Block, Opcode
from ..failover.accept import Accept
from ..failover.line import Line
from ..failover.outbox import Outbox
from ..wire.frame import frames, parse
from ..writer import BlockWriter

_INPUT = 1  # the source of the input's blocks; those of the output windows follow


def run_model(model: Any, input: Iterable[tuple[Any, ...]]) -> dict[str, list[Block]]:
    """What a model emits to each of its output windows, for blocks of input: `(window, rows)` or `(window, rows,
    opcode)`, where rows are what `inject` takes.

    StepFailed as in an engine; ValueRefused or TooLarge for input that could not be published. The model keeps the
    state that it has after this, so a second call goes on from there.
    """
    found, calls = declared(model)
    options = EngineOptions()
    writers = {window: _writer(schema, at) for at, (window, schema) in enumerate(found.inputs.items(), _INPUT)}
    outputs = {}
    for at, (window, schema) in enumerate(found.outputs.items(), _INPUT + len(writers)):
        writer = _writer(schema, at)
        outputs[window] = writer, Line(writer.source, 0, writer.outbox, suffix_only=True, buffer=1)
    inputs = [Reading(name, schema, Accept(suffix_only=True, from_start=True)) for name, schema in found.inputs.items()]
    places = {reading.window: at for at, reading in enumerate(inputs)}
    steps = Steps(calls, inputs, outputs, step_blocks=options.step_blocks, step_bytes=options.step_bytes)
    emitted: dict[str, list[Block]] = {window: [] for window in outputs}
    for window, rows, *opcode in input:
        steps.take(places[window], parse(_sent(writers[window], rows, *opcode)[0]))
        for name, (writer, _) in outputs.items():
            schema = found.outputs[name]
            emitted[name] += [Block(parse(message), schema, PLAIN) for message in _taken(writer.outbox)]
    return emitted


def _writer(schema: Any, source: int) -> BlockWriter:
    most = EngineOptions()
    outbox = Outbox(most.step_blocks, most.step_bytes)
    return BlockWriter(schema, Encoder(schema, rebuild=True), outbox, source, 0, most.limits.frame_bytes)


def _sent(writer: BlockWriter, rows: Any, opcode: Any = Opcode.INSERT) -> list[bytes]:
    writer.outbox.add(writer.seal(writer.encode(rows, opcode, 0)))
    return _taken(writer.outbox)


def _taken(outbox: Outbox) -> list[bytes]:
    return frames(outbox.settle(outbox.last), 0, 0)
