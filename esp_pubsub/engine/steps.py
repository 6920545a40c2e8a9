"""The computation of an engine: a block in, blocks of the output windows out. Pure: engine.py reads and sends.

The theory (docs/explanation/engine.md). All members step on the same blocks in the same order, from the same
beginning. A model looks at nothing but its arguments and its state. So all members emit the same blocks in the same
order and give them the same ids, and what line.py says of a group of publishers holds for each output window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import StepFailed
from ..events import PLAIN, Block
from ..failover.line import Line
from ..schema import Schema
from ..wire.frame import Frame
from ..writer import BlockWriter
from .model import Step
from .out import Out


class Steps:
    """One model at work. `taken` counts its steps."""

    def __init__(
        self,
        step: Step,
        inputs: Mapping[str, Schema],
        outputs: Mapping[str, tuple[BlockWriter, Line]],
        *,
        step_blocks: int,
        step_bytes: int,
    ) -> None:
        """`outputs` are in the order of the group's lines. `step_blocks` and `step_bytes`: what a step may emit."""
        self.taken = 0
        self._step = step
        self._inputs = inputs
        self._outputs = list(outputs.values())
        self._out = Out({window: writer for window, (writer, _) in outputs.items()}, step_blocks, step_bytes)

    def take(self, window: str, frame: Frame) -> Sequence[int]:
        """Step on one block; returns the output windows that have new blocks, by their places.

        Raises StepFailed if the model does: it has emitted nothing then, but its state may have changed. Raises
        InputDiffers if the bus holds another block than one that it emitted.
        """
        block = Block(frame, self._inputs[window], PLAIN)
        out = self._out
        out.begin()
        try:
            self._step(window, block, out)
        except Exception as error:
            out.end()
            raise StepFailed(
                f"the model raised {type(error).__name__} in the step on block {block.id} of source "
                f"{block.source:016x}, run {block.run}, at position {block.position} of {window}: {error}",
                window=window,
                source=block.source,
                run=block.run,
                id=block.id,
                position=block.position,
            ) from error
        self.taken += 1
        emitted = out.end()
        for at, encoded, transactional in emitted:
            writer, line = self._outputs[at]
            line.give(writer.seal(encoded, transactional))
        return [at for at, _, _ in emitted]
