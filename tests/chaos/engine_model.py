"""The models that engines run under chaos: what they emit says in which order they stepped, and on what.

Each block of input is one block of `Seen`; some are one of `Sums` too, and timers emit to both. Whether a timer fires
depends on what came before it was due, so another order gives other blocks, and another number of them. The last block
of each output window says so: it follows from the last block of each input.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import msgspec

import esp_pubsub as esp

from .process import SCHEMA

END = "end"
OUTPUTS = {"Seen": SCHEMA, "Sums": SCHEMA}
INPUTS = {"one": ("Left",), "ordered": ("Left",), "merged": ("Left", "Right")}
"""By the shape of the engine: one input in derived order, one in written order, two and timers."""
LAST = 150_000  # microseconds from the last block of input to the timer that ends it
LONGEST = 80_000  # to any other timer

Between = Callable[[str, int], None]


def _at_once(window: str, id: int) -> None:
    return


class Model:
    """What both have in common. `between` is called in each step and changes nothing: it takes time."""

    def __init__(self, salt: int, blocks: int, between: Between = _at_once) -> None:
        self.salt = salt
        self.blocks = blocks
        self.stepped: list[tuple[str, int]] = []
        self.fired = 0
        self.ended = False
        self._between = between
        self._chain = salt
        self._count = 0

    @property
    def state(self) -> list[int]:
        """Equal for all who stepped on the same in the same order."""
        return [self._count, self._chain, self.fired, len(self.stepped)]

    def snapshot(self) -> bytes:
        """See `esp.model`."""
        state = self.stepped, self.fired, self.ended, self._chain, self._count
        return msgspec.msgpack.encode(state)

    def restore(self, data: bytes) -> None:
        """See `esp.model`."""
        stepped, self.fired, self.ended, self._chain, self._count = msgspec.msgpack.decode(data)
        self.stepped = [(window, id) for window, id in stepped]

    def see(self, window: str, block: esp.Block, out: esp.Out) -> None:
        """What each step on a block does."""
        self._between(window, block.id)
        self.stepped.append((window, block.id))
        rows = []
        for id, text in block.rows():
            self._add(f"{window} {block.id} {id} {text}")
            rows.append((self._count, f"{window} {block.id} {text} {self._chain:08x}"))
        out.emit("Seen", rows)
        if len(rows) > 1:
            out.emit("Sums", [(self._count, f"{window} {block.id} {self._chain:08x}")], opcode=esp.Opcode.UPSERT)

    def end(self, out: esp.Out) -> None:
        """The last blocks."""
        self._add(END)
        self.ended = True
        for window in OUTPUTS:
            out.emit(window, [(self._count, END)])

    def _add(self, text: str) -> None:
        self._count += 1
        self._chain = crc32(text.encode(), self._chain)


@esp.model(inputs={"Left": SCHEMA}, outputs=OUTPUTS, version="1")
class One(Model):
    """One input."""

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        self.see(window, block, out)
        if block.id == self.blocks:
            self.end(out)


@esp.model(inputs={"Left": SCHEMA, "Right": SCHEMA}, outputs=OUTPUTS, version="1", timers=True)
class Merged(Model):
    """Two inputs, and timers that are replaced and cancelled by what comes before they are due."""

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        self.see(window, block, out)
        self._add(str(out.now))
        kind = block.id % 11
        if kind == 7:
            out.cancel(f"{window} {block.id % 5}")
        else:
            out.wake(f"{window} {block.id % 5}", out.now + (kind * LONGEST) // 11)
        if block.id == self.blocks and {("Left", block.id), ("Right", block.id)} <= set(self.stepped):
            out.wake(END, out.now + LAST)

    def timer(self, key: str, out: esp.Out) -> None:
        self.fired += 1
        if key == END:
            self.end(out)
            return
        self._add(f"{key} {out.now}")
        out.emit("Sums", [(self._count, f"timer {key} {self._chain:08x}")])
        if self._count % 3 == 0:
            out.emit("Seen", [(self._count, f"timer {key}")])


def model_of(shape: str, salt: int, blocks: int, between: Between = _at_once) -> Model:
    """A new one."""
    return (Merged if shape == "merged" else One)(salt, blocks, between)
