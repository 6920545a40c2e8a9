"""How a publisher takes part in a failover group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Failover:
    """How a publisher takes part in a failover group: `failover=Failover("feed")` on every member."""

    group: str
    run: int = 0
    """A source's sequence begins anew with a higher run (for example 20261118); all members name the same."""
    buffer: int = 10_000
    """Blocks a standby keeps ready (SAS's numbufferedmsgs); it is never more than that ahead of the active."""
    overflow: Literal["wait", "leave"] = "wait"
    """What `inject` does on a standby whose buffer is full: wait, or leave the group with Overrun."""
    election: str | None = None
    """How the members agree on who leads: `log`, on the group's control topic; what the bus has of its own (`token` and
    `presence` on RabbitMQ, `flow` on Solace); or `zookeeper://host:port,host:port`. None: the bus's own, else `log`."""
    fence: Literal["kill"] | None = None
    """`kill`: end a process that is stopped while it holds a lock everybody needs (embedded bus)."""

    def __post_init__(self) -> None:
        if not self.group or not isinstance(self.group, str):
            raise ConfigError(f"a failover group has a name, and that is a text, not {self.group!r}")
        if not isinstance(self.election, str | None) or self.election == "":
            raise ConfigError(f"election is a name, or the place of a service, not {self.election!r}")
        if not _is_number(self.buffer) or self.buffer < 1:
            raise ConfigError(
                f"buffer is at least 1, not {self.buffer!r}: a standby has to keep what it may have to send"
            )
        if not _is_number(self.run) or not 0 <= self.run < 1 << 64:
            raise ConfigError(f"run is a number from 0 to 2**64 - 1, not {self.run!r}")
        if self.overflow not in ("wait", "leave"):
            raise ConfigError(f"overflow is wait or leave, not {self.overflow!r}")
        if self.fence not in (None, "kill"):
            raise ConfigError(f"fence is None or kill, not {self.fence!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
