"""The computation of an engine: blocks and timers in, blocks of the output windows out. Pure: stepping.py runs it.

The theory (docs/explanation/engine.md). All members step on the same blocks and timers in the same order, from the same
beginning. A model looks at nothing but its arguments and its state. So all members emit the same blocks in the same
order and give them the same ids, and what line.py says of a group of publishers holds for each output window.

Where a model does look at something else, members differ. Blocks that differ are found by their chains. What does not
show in blocks yet, a timer or a step too few, is found by the step chain: a digest of everything stepped on and of
everything that the steps did, which members compare at every 1,000th step.
"""

from __future__ import annotations

import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple
from zlib import crc32

from ..errors import StepFailed, StepsDiffer
from ..events import PLAIN, Block
from ..failover.accept import Accept, Outcome
from ..failover.line import Line
from ..schema import Schema
from ..wire.frame import LIMITS, Frame, Limits
from ..writer import BlockWriter
from .model import Calls
from .order import Poisoned
from .out import Out
from .timers import Timers

COMPARED_EVERY, _COMPARED_KEPT = 1_000, 1_000
_ON_BLOCK = struct.Struct("<IQQQI").pack
_ON_EMITTED = struct.Struct("<II").pack


def line_of(error: BaseException) -> str:
    """The line of the model that raised this, to stand after the error's text; empty if the call itself failed."""
    lines = [(Path(frame.filename).name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)[1:]]
    of_the_model = [(file, line) for file, line in lines if file == lines[0][0]]
    return f" ({of_the_model[-1][0]}, line {of_the_model[-1][1]})" if of_the_model else ""


def _on_timer(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


class Mark(NamedTuple):
    """The step chain at one step."""

    step: int
    chain: int


class Reading(NamedTuple):
    """An input window: its schema, and what is known of its sources."""

    window: str
    schema: Schema
    accept: Accept


class Copy(NamedTuple):
    """A copy of the model, restored from its state."""

    calls: Calls
    shows: Callable[[bool], None]
    """Is told whether it did the same in the first step that did anything."""


class Steps:
    """One model at work. `taken` counts its steps, `now` is the time of the entry at hand; None in derived order."""

    def __init__(
        self,
        calls: Calls,
        inputs: Sequence[Reading],
        outputs: Mapping[str, tuple[BlockWriter, Line]],
        *,
        step_blocks: int,
        step_bytes: int,
        limits: Limits = LIMITS,
    ) -> None:
        """`outputs` are in the order of the group's lines. `step_blocks` and `step_bytes`: what a step may emit."""
        self.taken = 0
        self.now: int | None = None
        self.timers = Timers()
        self.inputs = inputs
        self.calls = calls
        self.chain = 0
        """Of everything stepped on, and of everything that the steps did."""
        self.marks: dict[int, int] = {}
        """The chain at the last steps that are compared."""
        self._limits = limits
        self._copy: Copy | None = None
        self._copys_out = Out({window: writer for window, (writer, _) in outputs.items()}, step_blocks, step_bytes)
        self._outputs = list(outputs.values())
        self._out = Out({window: writer for window, (writer, _) in outputs.items()}, step_blocks, step_bytes)
        self._heard: dict[int, int] = {}

    def go_on(self, calls: Calls, taken: int, chain: int, marks: dict[int, int]) -> None:
        """Stand after so many steps, with the step chain there: a snapshot was restored."""
        self.calls, self.taken, self.chain, self.marks = calls, taken, chain, marks

    def prove(self, copy: Copy | None) -> None:
        """Have a copy of the model take the same steps, until one of them shows whether it is one; None: no more."""
        self._copy = copy

    def receive(self, input: int, messages: Sequence[tuple[object, bytes]]) -> list[Outcome]:
        """What follows from messages of an input: the frames to step on, and what is to be told, in order."""
        return self.inputs[input].accept.receive_all(messages, self._limits)

    def has_stepped_on(self, source: int, run: int, id: int) -> bool:
        """Whether a block was taken, or will never be; to be asked while nothing is stepped on in part."""
        known = [reading.accept.sources.get(source) for reading in self.inputs]
        return any(each is not None and (each.run, each.last) >= (run, id) for each in known)

    def take(self, input: int, frame: Frame) -> Sequence[int]:
        """Step on one block; returns the output windows that have new blocks, by their places.

        Raises StepFailed if the model does: it has done nothing then, but its state may have changed. Raises
        InputDiffers if the bus holds another block than one that it emitted, StepsDiffer if another member did
        something else up to this step.
        """
        window, schema, _ = self.inputs[input]
        block = Block(frame, schema, PLAIN)
        out = self._out
        out.begin(self.now if self.calls.timed else None)
        try:
            self.calls.step(window, block, out)
        except (Exception, SystemExit) as error:
            out.end()
            raise StepFailed(
                f"the model raised {type(error).__name__} in the step on block {frame.id} of source "
                f"{frame.source:016x}, run {frame.run}, at position {frame.position} of {window}: {error}"
                f"{line_of(error)}. Mend the model, or have the block passed over: esp pass-over URL "
                f"{Poisoned(frame.source, frame.run, frame.id)}",
                window=window, source=frame.source, run=frame.run, id=frame.id, position=frame.position,
            ) from error  # fmt: skip
        if self._copy is not None:
            self._step_copy(self._copys_step(input, frame))
        return self._done(_ON_BLOCK(input, frame.source, frame.run, frame.id, frame.chain))

    def pass_over(self, input: int, frame: Frame) -> None:
        """This block's step failed, and the order says to go on. What the step changed in the state stays changed: it
        did so on every member.
        """
        self._out.begin(None)
        if self._copy is not None:
            self._step_copy(self._copys_step(input, frame), failed=True)
        self._done(b"passed" + _ON_BLOCK(input, frame.source, frame.run, frame.id, frame.chain))

    def fire(self, key: str) -> Sequence[int]:
        """Step on a timer that is due. Returns and raises what `take` does."""
        out = self._out
        out.begin(self.now if self.calls.timed else None)
        try:
            if self.calls.timer is not None:
                self.calls.timer(key, out)
        except (Exception, SystemExit) as error:
            out.end()
            raise StepFailed(
                f"the model raised {type(error).__name__} at its timer {key!r}: {error}{line_of(error)}. Mend the "
                f"model, or have the timer passed over: esp pass-over URL {quote(str(self.timer(key)))}",
                window="", source=0, run=0, id=0, position=None,
            ) from error  # fmt: skip
        if self._copy is not None:
            self._step_copy(self._copys_timer(key))
        return self._done(_on_timer(key))

    def timer(self, key: str) -> Poisoned:
        """The name of a timer that fires now."""
        return Poisoned(0, 0, self.now or 0, key)

    def pass_timer_over(self, key: str) -> None:
        """See `pass_over`."""
        self._out.begin(None)
        if self._copy is not None:
            self._step_copy(self._copys_timer(key), failed=True)
        self._done(b"passed" + _on_timer(key))

    # a copy beside the model

    def _copys_step(self, input: int, frame: Frame) -> Callable[[Calls], None]:
        window, schema, _ = self.inputs[input]
        return lambda copy: copy.step(window, Block(frame, schema, PLAIN), self._copys_out)

    def _copys_timer(self, key: str) -> Callable[[Calls], None]:
        return lambda copy: copy.timer(key, self._copys_out) if copy.timer is not None else None

    def _step_copy(self, step: Callable[[Calls], None], *, failed: bool = False) -> None:
        """The copy takes the step that the model has just taken, or in which the model failed."""
        assert self._copy is not None
        calls, shows = self._copy
        did, theirs = self._out.end(), self._copys_out  # it may be asked again
        theirs.begin(self.now if calls.timed else None)
        try:
            step(calls)
            same = not failed and theirs.end() == did
        except (Exception, SystemExit):  # noqa: BLE001  # as of the model itself
            same = failed
        if not same or (any(did) and not failed):
            self._copy = None
            shows(same)

    def _done(self, on: bytes) -> Sequence[int]:
        """The step has returned: its blocks get their ids, and its timers are set."""
        emitted, timers = self._out.end()
        chain = crc32(on, self.chain)
        places = []
        for at, encoded, transactional in emitted:
            writer, line = self._outputs[at]
            block = writer.seal(encoded, transactional)
            line.give(block)
            chain = crc32(_ON_EMITTED(at, block.chain), chain)
            places.append(at)
        for key, when in timers.items():
            self.timers.set(key, when)
            chain = crc32(f"{key}={when}".encode("utf-8", "surrogatepass"), chain)
        self.chain = chain
        self.taken += 1
        if self.taken % COMPARED_EVERY == 0:
            self._mark()
        return places

    def _mark(self) -> None:
        self.marks[self.taken] = self.chain
        self.marks.pop(self.taken - COMPARED_EVERY * _COMPARED_KEPT, None)
        if (theirs := self._heard.pop(self.taken, None)) is not None:
            self.compare(Mark(self.taken, theirs))

    @property
    def mark(self) -> Mark:
        """The last step that is compared, and the step chain there; that of a member that has not got to one is 0."""
        step = self.taken - self.taken % COMPARED_EVERY
        return Mark(step, self.marks.get(step, 0))

    def compare(self, theirs: Mark) -> None:
        """Another member says its mark: StepsDiffer if ours is another one, now or once we get there."""
        step, chain = theirs
        if step > self.taken:
            self._heard[step] = chain
            if len(self._heard) > _COMPARED_KEPT:
                del self._heard[min(self._heard)]
            return
        ours = self.marks.get(step)
        if ours is not None and ours != chain:
            raise StepsDiffer(
                f"up to step {step} this member of the engine did something else than the others (its step chain is "
                f"{ours:08x}, theirs {chain:08x}), though its blocks are the same so far: the model looks at something "
                "besides its input and its state (a clock, a random number, the order of a set)",
                step=step,
                ours=ours,
                theirs=chain,
            )
