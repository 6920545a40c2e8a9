"""What the engine of the simulation computes, and the one order in which all its members must compute it.

The theory. A member's model says each of its steps: a block of an input, or a timer, and the engine's time. The first
member to take step n decides what step n is; all others must take the same. So members take prefixes of one order, and
the judge, who computes each step of it at once with a model of his own and none of the engine's classes, knows what
every block of the output windows must be before anybody can have sent it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import esp_pubsub as esp
from esp_pubsub.testing.models import run_model

from .processes import SCHEMA

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

    def __str__(self) -> str:
        return f"{self.window or 'timer'} {self.what} at {self.now}"


class Computation:
    """The model's own part: what it emits and which timers it sets depends on all steps so far and on nothing else."""

    def __init__(self) -> None:
        self.count = 0
        self.chained = 0

    def on_block(self, window: str, row: Row, out: Any, *, timers: bool) -> None:
        """A block has one row."""
        id, to, wake, drop = row
        self.count += 1
        for at, line in enumerate(to):
            out.emit(OUTPUTS[int(line)], [(self.count, f"{window} {id}.{at}")])
        if timers and wake is not None:
            out.wake(str(id % _KEYS), out.now + wake)
        if timers and drop is not None:
            out.cancel(str(drop))

    def on_timer(self, key: str, out: Any) -> None:
        """It may set another one, or cancel it: perhaps one that is due at the same time."""
        self.count += 1
        out.emit(OUTPUTS[self.count % 2], [(self.count, f"timer {key}")])
        other = str(self.count // 3 % _KEYS)
        if self.count % 3 == 0:
            out.cancel(other)
        elif self.count % 3 == 1 and self.chained < _CHAINED:
            self.chained += 1
            out.wake(other, out.now + (0, 30_000)[self.count % 2])


def make_model(takes: Callable[[Step], None], inputs: Sequence[str], *, timers: bool) -> Any:
    """A model for one member. `takes` is called as each step begins."""

    @esp.model(inputs=dict.fromkeys(inputs, INPUT), outputs=dict.fromkeys(OUTPUTS, SCHEMA), version="1", timers=timers)
    class Model:
        def __init__(self) -> None:
            self.computation = Computation()

        def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
            [row] = block.rows()
            takes(Step(window, block.id, out.now if timers else None))
            self.computation.on_block(window, row, out, timers=timers)

        def timer(self, key: str, out: esp.Out) -> None:
            takes(Step(None, key, out.now))
            self.computation.on_timer(key, out)

    return Model()


class OneOrder:
    """The order, as far as any member took it, and what it yields. It is also the `out` of the judge's own model."""

    def __init__(self, run: Run, scripts: Mapping[str, Sequence[Row]], *, timers: bool) -> None:
        self.steps: list[Step] = []
        self.emitted: dict[str, list[Any]] = {window: [] for window in OUTPUTS}
        self.taken = dict.fromkeys(scripts, 0)
        self.timers: dict[str, tuple[int, int]] = {}  # by key: when it is due, and when it was set
        self.now = 0
        self._run = run
        self._scripts = scripts
        self._has_timers = timers
        self._computation = Computation()

    def take(self, process: str, at: int, step: Step) -> None:
        """A member takes its step with this number, from 0 on."""
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
        self._computation.on_timer(key, self)

    def _step(self, process: str, window: str, id: int) -> None:
        if id != self.taken[window] + 1:
            self._run.wrong(f"{process} took block {id} of {window} after {self.taken[window]}")
        if due := self._due():
            self._run.wrong(f"{process} took block {id} of {window} at {self.now} before timer {due[0]}")
        self.taken[window] = id
        self._computation.on_block(window, self._scripts[window][id - 1], self, timers=self._has_timers)

    def _due(self) -> list[tuple[int, str]]:
        """The timers that come first at this time. One that was set at it may wait for the next entry."""
        return sorted((at, key) for key, (at, since) in self.timers.items() if at <= self.now and since < self.now)

    def emit(self, window: str, rows: Any) -> None:
        """See `Out.emit`."""
        self.emitted[window].append(rows)

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
        model = make_model(lambda step: None, list(self._scripts), timers=False)
        steps = [(str(window), [self._scripts[str(window)][int(id) - 1]]) for window, id, _ in self.steps]
        emitted = {window: [block.rows() for block in blocks] for window, blocks in run_model(model, steps).items()}
        if emitted != self.emitted:
            self._run.wrong(f"run_model makes {emitted} of the order, and the judge {self.emitted}")

    @property
    def is_complete(self) -> bool:
        """Whether nothing comes any more."""
        return not self.timers and all(self.taken[window] == len(rows) for window, rows in self._scripts.items())
