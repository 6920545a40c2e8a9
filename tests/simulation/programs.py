"""Random models: each is made of what a user may do in a step, and of nothing else.

A program says what the steps do: which of its acts come with which block or timer, and each act only at every so many
steps. Acts change a state of all kinds of fields that a snapshot keeps, emit what the state says, and set and cancel
timers. So a member whose state is another one, or that takes another order, emits something else soon.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import esp_pubsub as esp

OUTPUT = "id*:int64,text:string,value:double"
KEYS = ("0", "1", "p", "q\u00e9")
_KEPT = 5  # items of what a state remembers
_MOST_WAKES = 40  # timers that a program sets in all, or a world with it would not end
_DELAYS = (-5, 0, 0, 1_000, 30_000, 30_000, 200_000)
_SOURCES = ("row", "mean", "counts", "recent", "accounts", "last", "nothing")
_STATEFUL = ("count", "forget", "note", "average", "account", "swap", "nest", "bytes")

Row = tuple[Any, ...]


@dataclass
class Account:
    """What is known of a key."""

    name: str
    sums: list[float] = field(default_factory=list)
    last: tuple[int, str] | None = None


@dataclass
class Memory:
    """A model's state, with a field of every kind."""

    acts: int = 0
    wakes: int = 0
    mean: float = -0.0
    text: str = ""
    raw: bytes = b""
    is_odd: bool = False
    last: tuple[int, float] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    recent: list[tuple[int, str]] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)
    nested: dict[int, dict[str, list[int]]] = field(default_factory=dict)


class Act(NamedTuple):
    """One thing that a step does, at every `every`-th step. `key` and `number` mean something to most kinds."""

    what: str
    every: int
    key: str
    number: int
    window: int = 0
    opcodes: tuple[int, ...] = (1,)
    """Of an emit: one for all rows, or one for each in turn."""
    flags: int = 0


class Program(NamedTuple):
    """What happens with each block, by its id, and with each timer, by its key."""

    blocks: tuple[tuple[Act, ...], ...] = ()
    timers: tuple[tuple[Act, ...], ...] = ()


def draw(dice: random.Random, *, timers: bool) -> Program:
    """A program. The dice may be those of hypothesis."""
    blocks = tuple(_acts(dice, timers=timers) for _ in range(dice.randint(1, 4)))
    return Program(blocks, tuple(_acts(dice, timers=True) for _ in KEYS) if timers else ())


def _acts(dice: random.Random, *, timers: bool) -> tuple[Act, ...]:
    kinds = ("emit", "emit", "state", "state", "wake", "cancel")[: None if timers else 4]
    return tuple(_act(dice, dice.choice(kinds)) for _ in range(dice.randint(1, 6)))


def _act(dice: random.Random, kind: str) -> Act:
    every, key = dice.choice((1, 1, 2, 3)), dice.choice(KEYS)
    if kind == "emit":
        opcodes = tuple(dice.choice((1, 2, 3, 4, 5)) for _ in range(dice.choice((1, 1, 3))))
        source = dice.choice(_SOURCES)
        return Act(source, every, key, dice.randint(0, 3), dice.randint(0, 1), opcodes, dice.choice((0, 0, 2)))
    if kind == "state":
        return Act(dice.choice(_STATEFUL), every, key, dice.randint(-3, 1 << 40))
    return Act(kind, every, key, dice.choice(_DELAYS))


def perform(acts: tuple[Act, ...], memory: Memory, row: Row, out: Any, windows: tuple[str, ...]) -> None:
    """Do what a step is to do. `row` is what it is about."""
    memory.acts += 1
    for act in acts:
        if memory.acts % act.every:
            continue
        if act.what in _SOURCES:
            _emit(act, memory, row, out, windows)
        elif act.what == "cancel":
            out.cancel(act.key)
        elif act.what == "wake":
            if memory.wakes < _MOST_WAKES:
                memory.wakes += 1
                out.wake(act.key, max(0, out.now + act.number))
        else:
            _change(act, memory, row)


def _emit(act: Act, memory: Memory, row: Row, out: Any, windows: tuple[str, ...]) -> None:
    """One block, or several, or none where there is nothing to say."""
    rows = _rows(act.what, memory, row)
    opcodes: Any = act.opcodes[0]
    if len(act.opcodes) > 1:
        opcodes = [act.opcodes[at % len(act.opcodes)] for at in range(len(rows))]
    for _ in range(max(1, act.number - 1)):
        out.emit(windows[act.window % len(windows)], rows, opcode=opcodes, flags=act.flags)


def _rows(what: str, memory: Memory, row: Row) -> list[Row]:
    match what:
        case "row":
            return [(memory.acts, repr(row), memory.mean)]
        case "mean":
            return [(memory.acts, f"{memory.text}{memory.is_odd}{memory.raw!r}", memory.mean)]
        case "counts":
            return [(many, key, memory.mean) for key, many in memory.counts.items()]
        case "recent":
            return [(id, text, None) for id, text in memory.recent]
        case "accounts":
            return [(at, repr(account), sum(account.sums)) for at, account in enumerate(memory.accounts.values())]
        case "last":
            return [] if memory.last is None else [(memory.last[0], repr(memory.nested), memory.last[1])]
        case _:
            return []


def _change(act: Act, memory: Memory, row: Row) -> None:
    key, number = f"{act.key}{memory.acts % 3}", act.number
    match act.what:
        case "count":
            memory.counts[key] = (memory.counts.get(key, 0) + number) % (1 << 60)
        case "forget":
            for oldest in list(memory.counts)[:1]:  # so the order of its keys matters
                del memory.counts[oldest]
        case "note":
            memory.recent = [*memory.recent, (memory.acts, repr(row))][-_KEPT:]
        case "average":
            memory.mean = memory.mean * 0.9 + (number % 1_000) / 3.0
        case "account":
            account = memory.accounts.setdefault(key, Account(key))
            account.sums = [*account.sums, number / 7.0][-_KEPT:]
            account.last = (memory.acts, key)
        case "swap":
            memory.last = None if memory.last and number % 2 else (number, memory.mean)
            memory.is_odd = not memory.is_odd
        case "nest":
            inner = memory.nested.setdefault(memory.acts % 3, {})
            inner[key] = [*inner.get(key, []), memory.acts][-_KEPT:]
        case _:
            memory.raw = (memory.raw + number.to_bytes(8, "big", signed=True))[-11:]
            memory.text = f"{memory.text}{key}"[-11:]


def make_model(program: Program, inputs: dict[str, str], outputs: tuple[str, ...]) -> Any:
    """A model that does what the program says, and nothing else."""

    @esp.model(inputs=inputs, outputs=dict.fromkeys(outputs, OUTPUT), version="1", timers=bool(program.timers))
    @dataclass
    class Random:
        memory: Memory = field(default_factory=Memory)

        def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
            for row in block.rows():
                acts = program.blocks[block.id % len(program.blocks)]
                perform(acts, self.memory, (window, block.id, *row), out, outputs)

        def timer(self, key: str, out: esp.Out) -> None:
            perform(program.timers[KEYS.index(key)], self.memory, (key, out.now), out, outputs)

    return Random()
