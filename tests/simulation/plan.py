"""What a seed of the simulation stands for: the kind of bus, the processes, the pace of inputs, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .forger import FORGED

Kind = Literal["log", "holes", "queues"]


@dataclass(frozen=True, slots=True)
class Accident:
    """Something that goes wrong at a moment; `seconds` says how long, where that means anything."""

    at: float
    what: str
    who: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed stands for."""

    seed: int
    kind: Kind
    subscribers: int
    grouped: bool
    blocks: int
    deaths: bool
    all_lead: bool
    faults: float
    buffer: int
    pace: tuple[float, ...]
    calm_after: float
    accidents: tuple[Accident, ...]
    late: float | None
    """When one more subscriber comes, who sees what is sent from then on."""
    readers: int
    """How many there are of each group; one of them reads at a time."""
    haste: float
    """How many of a user's calls are cancelled after a moment, as a share."""
    restless: bool
    """Whether readers of groups lose them to each other, and die, all the time."""
    engine: bool
    """Whether the members are of an engine; else they are publishers. The rest is about engines."""
    written: bool
    """Whether a written order is asked for; several inputs, timers and queues need one anyway."""
    inputs: int
    timers: bool
    prefilled: bool
    """Whether all of the input is there before the members are, where that can be."""
    clocks: tuple[float, ...]
    """How wrong each member's clock is, in seconds."""
    entry_bytes: int
    """The largest message of the order beside queues."""
    ahead: int
    """How many blocks of an input a member reads ahead of the order."""
    snapshots: float
    """Seconds between two snapshots of a member; 0 for none."""
    retention: bool
    """Whether inputs and order lose what no snapshot needs; else snapshots are torn."""
    random_model: bool
    """Whether steps do more than the input says, whatever a model may do."""
    input_kind: Kind | None
    """Of the bus of the inputs, if that is another one."""

    def __str__(self) -> str:
        lines = [f"{name} = {getattr(self, name)}" for name in self.__slots__ if name != "accidents"]
        return "\n".join([*lines, *map(str, self.accidents)])

    @property
    def has_written_order(self) -> bool:
        """Whether an engine's order is written, and so may switch to another version of its model."""
        return self.written or self.timers or self.inputs > 1 or (self.input_kind or self.kind) == "queues"


_MEMBERS = ("freeze", "kill", "cut", "hand over", "pause the input", "kill all", "the input stops")
_SUBSCRIBERS = ("freeze a subscriber", "kill a subscriber", "cut a subscriber")
_BUS = ("stall", "slow")
ENGINES = (
    "cut a line", "cut a line", "cut an input", "cut the order", "cut the order's reader", "cut a feeder", "close",
    "set the clock", "hang an input", "a long step", "kill all members", "kill all members", "tear a snapshot",
    "retention",
)  # fmt: skip


OF_MEMBERS = {what for what in ENGINES if "feeder" not in what and "kill" not in what}


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    kind: Kind = rng.choice(("log", "log", "holes", "queues"))
    members, subscribers = rng.choice((2, 2, 3)), rng.choice((1, 1, 2))
    calm_after = rng.uniform(0.5, 2.5)
    grouped = kind == "queues" or rng.random() < 0.7
    what = [*_MEMBERS, *_MEMBERS, *_BUS, *(_SUBSCRIBERS if grouped else _SUBSCRIBERS[:1])]
    accidents = [
        Accident(rng.uniform(0.05, calm_after), rng.choice(what), rng.randrange(6), rng.choice((0.05, 0.3, 0.7, 1.2)))
        for _ in range(rng.randrange(8))
    ]
    return Plan(
        seed=seed,
        kind=kind,
        subscribers=subscribers,
        grouped=grouped,
        blocks=rng.choice((5, 20, 40)),
        deaths=rng.random() < 0.5,
        all_lead=rng.random() < 0.15,
        faults=rng.choice((0.0, 0.02, 0.1)),
        buffer=rng.choice((3, 10, 100)),
        pace=tuple(rng.choice((0.001, 0.01, 0.05)) for _ in range(members)),
        calm_after=calm_after,
        accidents=_in_order(accidents),
        late=rng.uniform(0.02, 1.0) if rng.random() < 0.3 else None,
        readers=rng.choice((1, 2)) if grouped else 1,
        haste=rng.choice((0.0, 0.3)),
        restless=grouped and rng.random() < 0.2,
        engine=rng.choices((False, True), (2, 1))[0],
        written=rng.random() < 0.5,
        inputs=rng.choice((1, 2)),
        timers=rng.random() < 0.5,
        prefilled=rng.random() < 0.2,
        clocks=tuple(rng.choice((0.0, 0.0, 0.3, -3_600.0, 3_600.0)) for _ in range(members)),
        entry_bytes=rng.choice((256, 1 << 20)),
        ahead=rng.choice((2, 10_000)),
        snapshots=rng.choice((0.0, 0.05, 0.05, 0.2)),
        retention=rng.random() < 0.5,
        random_model=rng.random() < 0.5,
        input_kind=rng.choice((None, None, "log", "holes", "queues")),
    )


def _restless(plan: Plan) -> Iterator[Accident]:
    rng = random.Random(plan.seed + 3)
    for _ in range(int(16 * plan.calm_after)):
        what = rng.choice(("cut a subscriber", "cut a subscriber", "kill a subscriber"))
        yield Accident(rng.uniform(0.05, plan.calm_after), what, rng.randrange(6), 0.02)


def of_engines(plan: Plan) -> Iterator[Accident]:
    """What goes wrong in an engine besides."""
    rng = random.Random(plan.seed + 4)
    for _ in range(rng.randrange(8)):
        yield Accident(
            rng.uniform(0.05, plan.calm_after), rng.choice(ENGINES), rng.randrange(6), rng.choice((0.3, 0.7, 1.2))
        )
    for _ in range(rng.choice((0, 1, 1, 2, 4)) if plan.snapshots else 0):
        yield Accident(rng.uniform(0.05, plan.calm_after), "switch", rng.randrange(6), 0.0)


def of_forgers(plan: Plan) -> Iterator[Accident]:
    """What somebody forges who is no member."""
    rng = random.Random(plan.seed + 8)
    for _ in range(rng.choice((0, 0, 1, 6))):
        yield Accident(rng.uniform(0.05, plan.calm_after), rng.choice(list(FORGED)), 0, 0.0)


def _in_order(accidents: Iterable[Accident]) -> tuple[Accident, ...]:
    return tuple(sorted(accidents, key=lambda accident: accident.at))


def all_accidents(plan: Plan) -> tuple[Accident, ...]:
    """Everything that goes wrong, in the order in which it does."""
    restless = _restless(plan) if plan.restless else ()
    besides = of_engines(plan) if plan.engine else ()
    return _in_order([*plan.accidents, *restless, *besides, *of_forgers(plan)])
