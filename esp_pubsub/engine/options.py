"""What can be set on an engine, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from ..failover.membership import Role, RoleChange
from ..failover.options import Failover
from ..wire.frame import LIMITS, Limits


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What can be set on a member of an engine. What decides the output is compared between members."""

    run: int = 0
    """The output begins anew with a higher run (for example 20261118), from the input as it is then."""
    repeat: bool = False
    """A new run begins with the last snapshot of the run before: what came after that is emitted again."""
    buffer: int = 10_000
    """Blocks of each output window that a member may have computed and the bus does not hold yet."""
    buffer_bytes: int = 64 << 20
    """The same in bytes."""
    step_blocks: int = 1_000
    """Blocks that one step may emit."""
    step_bytes: int = 64 << 20
    """Bytes that one step may emit."""
    max_sources: int = 10_000
    """How many sources of an input are remembered; see `SubscriberOptions.max_sources`."""
    order: Literal["written"] | None = None
    """`written`: have a written order also where the input's own would do, so that a new version can be switched to."""
    election: str | None = None
    """See `Failover.election`."""
    fence: Literal["kill"] | None = None
    """See `Failover.fence`."""
    stall: float = 5.0
    """How long the bus may leave written blocks unconfirmed before this member lets others go first."""
    snapshot_every: float = 60.0
    """Seconds between two snapshots of a member that stands by; what is read again after a restart is about as much."""
    close_timeout: float = 10.0
    """How long closing waits until the bus holds what this member computed."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        for name in ("buffer", "buffer_bytes", "step_blocks", "step_bytes", "max_sources"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is a number of at least 1, not {value!r}")
        for name in ("stall", "close_timeout", "snapshot_every"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not (seconds >= 0 if name == "close_timeout" else seconds > 0):
                raise ConfigError(f"{name} is a number of seconds, not {seconds!r}")
        if self.order not in (None, "written"):
            raise ConfigError(f"order is written, or not given, not {self.order!r}")
        self.failover("engine")  # it checks the rest

    def failover(self, group: str) -> Failover:
        """How an engine of this name takes part in its group."""
        return Failover(group, run=self.run, buffer=self.buffer, election=self.election, fence=self.fence)


@dataclass(frozen=True, slots=True)
class LineStats:
    """One output window of an engine, as this member sees it."""

    window: str
    given: int
    """The last block that this member computed."""
    on_bus: int
    """How far the bus is known to hold the sequence."""
    waiting_blocks: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A member of an engine at one moment."""

    role: Role
    term: int
    """The last one in which this member led."""
    steps: int
    """How many blocks and timers the model has stepped on."""
    positions: tuple[int, ...]
    """Of the next message of each input, in the order in which the model names them; 0 for a queue."""
    hindered: bool
    """It cannot read an input, or the order, at the moment; one that leads may lead on without."""
    lines: tuple[LineStats, ...]
    last_switch: RoleChange | None
    last_snapshot: float | None
    """When a snapshot of this member counted last, in seconds since the epoch; None if none has."""
