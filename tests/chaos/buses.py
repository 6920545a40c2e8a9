"""What the harness has to know of a bus: what its clients are told, and what can happen to this bus alone.

Another bus is another small class: it serves all runs, `connect` says how a process of a run reaches it, and `faults`
are those of faults.py and what only it can suffer. The servers are somebody else's.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, ClassVar

from .faults import FAULTS, ZOOKEEPER_FAULTS, Fault
from .run import Run

if TYPE_CHECKING:
    from tests.support.server import Broker
    from tests.support.zookeeper import ZooKeeper

    from .process import Job


class Bus:
    """What all buses share: the election."""

    name: ClassVar[str]
    broker: Broker
    """What all runs share, where the bus has a server."""
    progress: ClassVar[float]
    """Seconds without a block that are too long, in any run."""
    queues = False
    """It has no logs, but where it opens them by itself."""
    may_miss: Set[str] = frozenset()
    """Faults that take from a reader without a group what nobody keeps for it."""
    groups_may_miss: Set[str] = frozenset()
    """Those that take it from a group too."""

    may_lose: Set[str] = frozenset()
    """Faults that take from the bus itself what it had confirmed. No engine goes on without its input."""

    def __init__(self, zookeeper: ZooKeeper | None) -> None:
        """`zookeeper`: where members elect their leader; on the bus itself if there is none."""
        self.zookeeper = zookeeper
        self.faults: dict[str, Fault] = FAULTS | (ZOOKEEPER_FAULTS if zookeeper else {})
        self.engine_faults: dict[str, Fault] = {}
        """What only an engine can suffer."""

    async def connect(self, run: Run, job: Job) -> None:
        """Tell a process of a run the way."""
        if self.zookeeper is None:
            return
        port = self.zookeeper.nodes[0].port
        if run.report.fault in ZOOKEEPER_FAULTS and job.role == "member":
            port = await run.link(job.name, port)
        job.election = f"zookeeper://127.0.0.1:{port}/{run.label}"

    async def mend(self) -> None:
        """Undo what a run has done to it."""


class Embedded(Bus):
    """A directory, and no server."""

    name = "embedded"
    progress = 8.0  # it gives up a lock that a frozen process holds after 5 s

    async def connect(self, run: Run, job: Job) -> None:
        await super().connect(run, job)
        job.options = {"dir": str(run.place / "bus")}
