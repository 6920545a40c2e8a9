"""What the engine of the simulation computes, and the one order in which all its members must compute it.

The theory. A member's model says each of its steps: a block of an input, or a timer, and the engine's time. The first
member to take step n decides what step n is; all others must take the same. So members take prefixes of one order, and
the judge, who computes each step of it at once with a model of his own and none of the engine's classes, knows what
every block of the output windows must be before anybody can have sent it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import esp_pubsub as esp
from esp_pubsub.testing.models import run_model

from .processes import Content, content_of
from .programs import OUTPUT, Memory, Program, perform

if TYPE_CHECKING:
    from .run import Run

INPUTS, OUTPUTS = ("Left", "Right"), ("One", "Two")
INPUT = "id*:int64,to:string,wake:int64,drop:int64"
_KEYS = 4  # of timers: one takes the place of another all the time
_LATE = 60_000_000  # microseconds after its time at which a step may be taken, by a member that comes late
_CHAINED = 10  # timers set by timers, or it would never end

Row = tuple[int, str, int | None, int | None]


def script(seed: int, blocks: int) -> list[Row]:
    """The blocks of an input. Each says to which windows the model emits: now this one for a while, now that one, or
    both, or neither, or one twice; and which timer it sets and cancels.
    """
    rng, to = random.Random(seed), list[str]()
    while len(to) < blocks:
        to += [rng.choice(("0", "1", "01", "0", "1", "01", "011", ""))] * rng.choice((1, 2, 5))
    wakes, drops = (None, None, None, 0, 2_000, 40_000, 300_000, 1_200_000), (None, None, None, None, 0, 1, 2, 3)
    return [(id, to[id - 1], rng.choice(wakes), rng.choice(drops)) for id in range(1, blocks + 1)]


class Step(NamedTuple):
    """What a model steps on: the block of a window, by its id, or a timer, by its key. `now`: None without timers."""

    window: str | None
    what: int | str
    now: int | None
    version: str
    """Of the model."""

    def __str__(self) -> str:
        return f"{self.window or 'timer'} {self.what} at {self.now} by version {self.version}"


@dataclass
class Computation:
    """The model's own part: what it emits and which timers it sets depends on all steps so far and on nothing else.
    `count` is how many there were.
    """

    count: int = 0
    chained: int = 0
    memory: Memory = field(default_factory=Memory)

    def on_block(self, window: str, row: Row, out: Any, program: Program, *, timers: bool) -> None:
        """A block has one row."""
        id, to, wake, drop = row
        self.count += 1
        for at, line in enumerate(to):
            out.emit(OUTPUTS[int(line)], [(self.count, f"{window} {id}.{at}", None)])
        if timers and wake is not None:
            out.wake(str(id % _KEYS), out.now + wake)
        if timers and drop is not None:
            out.cancel(str(drop))
        if program.blocks:
            perform(program.blocks[id % len(program.blocks)], self.memory, (window, id), out, OUTPUTS)

    def on_timer(self, key: str, out: Any, program: Program) -> None:
        """It may set another one, or cancel it: perhaps one that is due at the same time."""
        self.count += 1
        out.emit(OUTPUTS[self.count % 2], [(self.count, f"timer {key}", None)])
        other = str(self.count // 3 % _KEYS)
        if self.count % 3 == 0:
            out.cancel(other)
        elif self.count % 3 == 1 and self.chained < _CHAINED:
            self.chained += 1
            out.wake(other, out.now + (0, 30_000)[self.count % 2])
        if program.timers:
            perform(program.timers[len(key + other) % len(program.timers)], self.memory, (key,), out, OUTPUTS)


def make_model(
    takes: Callable[[int, Step], None], inputs: Sequence[str], program: Program, *, timers: bool, version: str = "1"
) -> Any:
    """A model for one member. `takes` is called as each step begins, with the number of those before it. All versions
    compute the same.
    """

    @esp.model(
        inputs=dict.fromkeys(inputs, INPUT), outputs=dict.fromkeys(OUTPUTS, OUTPUT), version=version, timers=timers
    )
    @dataclass
    class Model:
        computation: Computation = field(default_factory=Computation)

        def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
            [row] = block.rows()
            takes(self.computation.count, Step(window, block.id, out.now if timers else None, version))
            self.computation.on_block(window, row, out, program, timers=timers)

        def timer(self, key: str, out: esp.Out) -> None:
            takes(self.computation.count, Step(None, key, out.now, version))
            self.computation.on_timer(key, out, program)

    return Model()


class OneOrder:
    """The order, as far as any member took it, and what it yields. It is also the `out` of the judge's own model."""

    def __init__(self, run: Run, scripts: Mapping[str, Sequence[Row]], program: Program, *, timers: bool) -> None:
        self.steps: list[Step] = []
        self.emitted: dict[str, list[Content]] = {window: [] for window in OUTPUTS}
        self.taken = dict.fromkeys(scripts, 0)
        self.timers: dict[str, tuple[int, int]] = {}  # by key: when it is due, and when it was set
        self.now = 0
        self._run = run
        self._scripts = scripts
        self._program = program
        self._has_timers = timers
        self._computation = Computation()

    def take(self, process: str, at: int, step: Step) -> None:
        """A member takes its step with this number, from 0 on."""
        if at > len(self.steps):
            self._run.wrong(f"{process} takes step {at + 1}, and nobody took step {len(self.steps) + 1}")
            return
        if at < len(self.steps):
            if self.steps[at] != step:
                self._run.wrong(f"{process} took {step} as step {at + 1}, and others took {self.steps[at]}")
            return
        self.steps.append(step)
        self._run.tell(f"step {at + 1} is {step}, by {process}")
        if step.now is not None:
            self._check_time(process, step.now)
        if step.window is None:
            self._fire(process, str(step.what))
        else:
            self._step(process, step.window, int(step.what))

    def _check_time(self, process: str, now: int) -> None:
        if now < self.now:
            self._run.wrong(f"{process} took a step at {now}, after one at {self.now}")
        earliest, latest = self._run.clocks_say
        if not earliest - _LATE <= now <= latest:
            self._run.wrong(f"{process} took a step at {now}, and the clocks say from {earliest} to {latest}")
        self.now = now

    def _fire(self, process: str, key: str) -> None:
        due = self._due()
        at, _ = self.timers.pop(key, (None, 0))
        if at is None or at > self.now:
            self._run.wrong(f"{process} took timer {key} at {self.now}, and it is set for {at}")
        elif due and due[0] < (at, key):
            self._run.wrong(f"{process} took timer {key}, and {due[0]} comes first")
        self._computation.on_timer(key, self, self._program)

    def _step(self, process: str, window: str, id: int) -> None:
        if id != self.taken[window] + 1:
            self._run.wrong(f"{process} took block {id} of {window} after {self.taken[window]}")
        if due := self._due():
            self._run.wrong(f"{process} took block {id} of {window} at {self.now} before timer {due[0]}")
        self.taken[window] = id
        row = self._scripts[window][id - 1]
        self._computation.on_block(window, row, self, self._program, timers=self._has_timers)

    def _due(self) -> list[tuple[int, str]]:
        """The timers that come first at this time. One that was set at it may wait for the next entry."""
        return sorted((at, key) for key, (at, since) in self.timers.items() if at <= self.now and since < self.now)

    def emit(self, window: str, rows: list[Any], opcode: Any = 1, flags: int = 0) -> None:
        """See `Out.emit`."""
        opcodes = opcode if isinstance(opcode, list) else [opcode] * len(rows)
        if rows:
            self.emitted[window].append([(what, flags, row) for what, row in zip(opcodes, rows, strict=True)])

    def wake(self, key: str, at: int) -> None:
        """See `Out.wake`."""
        self.timers[key] = at, self.now

    def cancel(self, key: str) -> None:
        """See `Out.cancel`."""
        self.timers.pop(key, None)

    def check_whole(self) -> None:
        """What the judge computed is what `run_model` makes of the same order, where that has no timers."""
        if self._has_timers or not self._scripts:
            return
        model = make_model(lambda at, step: None, list(self._scripts), self._program, timers=False)
        steps = [(str(window), [self._scripts[str(window)][int(id) - 1]]) for window, id, _, _ in self.steps]
        emitted = {
            window: [content_of(block) for block in blocks] for window, blocks in run_model(model, steps).items()
        }
        if emitted != self.emitted:
            self._run.wrong(f"run_model makes {emitted} of the order, and the judge {self.emitted}")

    @property
    def is_complete(self) -> bool:
        """Whether nothing comes any more."""
        return not self.timers and all(self.taken[window] == len(rows) for window, rows in self._scripts.items())
