"""Solace under chaos: the double of its broker, in this process, for all runs. What it shows is that the driver and the
election hold against what the double does, see tests/support/solace.py; it is not the vendor's broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.server import HOST
from tests.support.solace import Solace

from .buses import Bus
from .kafka import LINK_FAULTS
from .run import Run

if TYPE_CHECKING:
    from tests.support.zookeeper import ZooKeeper

    from .process import Job


class SolaceBus(Bus):
    """Guaranteed messages. A link that hangs is noticed after three signs of life, 3 s, by either end."""

    name = "solace-double"
    progress = 20.0
    may_miss = frozenset(LINK_FAULTS)

    def __init__(self, zookeeper: ZooKeeper | None, double: Solace, election: str | None) -> None:
        """`election`: None for the one of the bus."""
        super().__init__(zookeeper)
        self.double = double
        self.election = election
        self.faults |= LINK_FAULTS

    async def connect(self, run: Run, job: Job) -> None:
        job.election = self.election
        await super().connect(run, job)
        port = self.double.port
        if run.report.fault in LINK_FAULTS:
            port = await run.link(job.name, port)
        job.options = {"host": f"{HOST}:{port}", "username": "chaos", "buspersistence": "true"}
