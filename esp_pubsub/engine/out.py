"""What a step may do: emit blocks to the model's output windows. Pure.

Rows are checked and encoded when they are emitted, so a row that does not fit raises in the step, at its own line. Ids
are given after the step has returned: one that raises has emitted nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..encode import Encoded
from ..errors import ModelError, TooLarge, WrongOrder
from ..events import Opcode
from ..wire.frame import BODY_AT
from ..writer import BlockWriter

Emitted = list[tuple[int, Encoded, bool]]  # which output window, the body, whether it is transactional


class Out:
    """Handed to each step, and of use in that step only."""

    __slots__ = ("_emitted", "_open", "_size", "_step_blocks", "_step_bytes", "_windows")

    def __init__(self, writers: Mapping[str, BlockWriter], step_blocks: int, step_bytes: int) -> None:
        self._windows = {window: (at, writer) for at, (window, writer) in enumerate(writers.items())}
        self._step_blocks = step_blocks
        self._step_bytes = step_bytes
        self._emitted: Emitted = []
        self._size = 0
        self._open = False

    def emit(
        self,
        window: str,
        rows: Any,
        *,
        opcode: Opcode | int | Sequence[int] = Opcode.INSERT,
        flags: int | Sequence[int] = 0,
        transactional: bool = False,
    ) -> None:
        """Publish one block to an output window; nothing where there are no rows. What it takes is what `inject` takes.

        Raises ValueRefused or TooLarge for rows that no block can carry, TooLarge for more than a step may emit, and
        ModelError for a window that the model does not have.
        """
        if not self._open:
            raise WrongOrder("this step has ended: emit while the step runs")
        if window not in self._windows:
            raise ModelError(f"the model has no output window {window!r}; it has {', '.join(self._windows)}")
        if not hasattr(rows, "__len__"):
            rows = list(rows)
        if not len(rows):
            return
        at, writer = self._windows[window]
        encoded = writer.encode(rows, opcode, flags)
        size = BODY_AT + len(encoded[3])
        if size > writer.largest:
            raise writer.too_large(size)
        self._size += size
        if len(self._emitted) >= self._step_blocks or self._size > self._step_bytes:
            raise TooLarge(
                f"one step emits more than {self._step_blocks} blocks or {self._step_bytes} bytes: put more rows into "
                "a block, or raise step_blocks or step_bytes on every member",
                size=self._size,
                limit=self._step_bytes,
            )
        self._emitted.append((at, encoded, transactional))

    def begin(self) -> None:
        """A step begins. The engine calls this."""
        self._emitted, self._size, self._open = [], 0, True

    def end(self) -> Emitted:
        """The step has ended: what it emitted. The engine calls this."""
        self._open = False
        return self._emitted
