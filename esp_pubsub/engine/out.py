"""What a step may do: emit blocks to the model's output windows, and set timers. Pure.

Rows are checked and encoded when they are emitted, so a row that does not fit raises in the step, at its own line. Ids
are given, and timers set, after the step has returned: one that raises has done nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..encode import Encoded
from ..errors import ModelError, TooLarge, WrongOrder
from ..events import Opcode, key_of
from ..wire.frame import BODY_AT
from ..writer import BlockWriter

Emitted = list[tuple[int, Encoded, bool]]  # which output window, the body, whether it is transactional


class Out:
    """Handed to each step, and of use in that step only."""

    __slots__ = ("_emitted", "_now", "_open", "_size", "_step_blocks", "_step_bytes", "_timers", "_windows")

    def __init__(self, writers: Mapping[str, BlockWriter], step_blocks: int, step_bytes: int) -> None:
        self._windows = {window: (at, writer) for at, (window, writer) in enumerate(writers.items())}
        self._step_blocks = step_blocks
        self._step_bytes = step_bytes
        self._emitted: Emitted = []
        self._size = 0
        self._open = False
        self._now: int | None = None
        self._timers: dict[str, int | None] = {}

    @property
    def now(self) -> int:
        """The engine's time, in microseconds since the epoch: the same for all members, and for all steps of one entry.

        It never decreases. ModelError for a model that is declared without `timers`.
        """
        if self._now is None:
            raise ModelError("this model is declared without timers: esp.model(..., timers=True)")
        return self._now

    def wake(self, key: str, at: int) -> None:
        """Have `timer(key, out)` called once at this time, or with the next entry if that is past. A later call with
        this key takes the place of an earlier one.
        """
        self._check_timer(key)
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < 1 << 63:
            raise ModelError(f"a timer's time is a number of microseconds since the epoch, not {at!r}")
        self._timers[key] = at

    def cancel(self, key: str) -> None:
        """Have no timer of this key."""
        self._check_timer(key)
        self._timers[key] = None

    def _check_timer(self, key: str) -> None:
        _ = self.now
        if not self._open:
            raise WrongOrder("this step has ended: set timers while the step runs")
        if not isinstance(key, str):
            raise ModelError(f"a timer's key is a text, not {key!r}")

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

    def key(self, window: str, row: int = 0) -> str:
        """The key that a row of the block has which this step emitted last to this window; see `Block.key`."""
        at, writer = self._windows.get(window, (-1, None))
        blocks = sum(1 for emitted in self._emitted if emitted[0] == at)
        if writer is None or not blocks:
            raise ModelError(f"this step has emitted nothing to {window!r}: emit first, then ask for the key")
        return key_of(writer.source, writer.run, writer.outbox.last + blocks, row)

    def begin(self, now: int | None) -> None:
        """A step begins. The engine calls this."""
        self._emitted, self._timers, self._size, self._now, self._open = [], {}, 0, now, True

    def end(self) -> tuple[Emitted, dict[str, int | None]]:
        """The step has ended: what it emitted, and the timers that it set or, with None, cancelled. The engine calls
        this.
        """
        self._open = False
        return self._emitted, self._timers
