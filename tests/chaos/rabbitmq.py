"""RabbitMQ under chaos: one node for all runs, in one of its modes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST

from .buses import Bus
from .kafka import BROKER_FAULTS, LINK_FAULTS
from .run import Run

if TYPE_CHECKING:
    from tests.support.zookeeper import ZooKeeper

    from .process import Job


async def memory_alarm(run: Run) -> None:
    """The broker is short of memory, and takes nothing for a while."""
    await run.moment(0.1, 0.5)
    run.harmed("memory-alarm")
    broker = _bus(run).broker
    await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.00001")
    await run.pause(1.0, 2.0)
    await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.4")


class RabbitBus(Bus):
    """RabbitMQ. A frozen broker is trouble after `timeout`, 5 s; one that is killed serves again after some 6 s."""

    name = "rabbitmq"
    progress = 20.0

    def __init__(self, zookeeper: ZooKeeper | None, broker: RabbitMQ, mode: str) -> None:
        super().__init__(zookeeper)
        self.broker = broker
        self.mode = mode
        self.faults |= LINK_FAULTS | BROKER_FAULTS | {"memory-alarm": memory_alarm}
        if mode == "direct":  # what nobody keeps is lost with the broker, and told so
            del self.faults["broker-kill"]

    async def connect(self, run: Run, job: Job) -> None:
        await super().connect(run, job)
        node = self.broker.nodes[0]
        ports = {"port": node.port, "streamport": node.stream_port}
        if run.report.fault in LINK_FAULTS:
            cut = "streamport" if self.mode == "stream" else "port"
            ports[cut] = await run.link(job.name, ports[cut])
        job.options = {"host": HOST, "exchange": run.label, "mode": self.mode, **ports}

    async def mend(self) -> None:
        await asyncio.to_thread(self.broker.mend)


def _bus(run: Run) -> RabbitBus:
    assert isinstance(run.bus, RabbitBus)
    return run.bus
