"""RabbitMQ under chaos: one node for all runs, in one of its modes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import aio_pika

from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST

from .buses import Bus
from .faults import HOUR, Fault
from .kafka import BROKER_FAULTS, LINK_FAULTS
from .process import CONFIRM_EVERY
from .run import PATIENCE, Run

if TYPE_CHECKING:
    from tests.support.zookeeper import ZooKeeper

    from .process import Job

ROOM = 100  # messages in the queue that refuses
PREFETCH = 2 * CONFIRM_EVERY
COMING_BACK = ("kill-reader", "restart-all", "mixed")  # of readers, which have to be members of a group for that


async def memory_alarm(run: Run) -> None:
    """The broker is short of memory, and takes nothing for a while."""
    await run.moment(0.1, 0.5)
    run.harmed("memory-alarm")
    broker = _bus(run).broker
    await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.00001")
    await run.pause(1.0, 2.0)
    await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.4")


async def reject_publish(run: Run) -> None:
    """A stranger's queue is full and refuses what does not fit, while he takes one message now and then: so there are
    holes among what is confirmed.
    """
    await run.moment(0.1, 0.4)
    run.harmed("reject-publish")
    async with _stranger(run) as channel:
        arguments = {"x-max-length": ROOM, "x-overflow": "reject-publish"}
        queue = await channel.declare_queue(exclusive=True, arguments=arguments)
        await queue.bind(run.label, run.topic)
        await _holds(run, channel, queue.name, ROOM)
        for _ in range(run.dice.randint(20, 200)):
            await queue.get(no_ack=True, fail=False)
            await run.pause(0.0, 0.01)


async def channel_cut(run: Run) -> None:
    """The group's reader stands still until the broker has handed it as much as it may have, of which it has confirmed
    a part. Then its link is cut, and the next time the broker closes it.
    """
    for low, high in ((0.1, 0.3), (0.5, 0.7)):
        await run.moment(low, high)
        reader = next(reader for reader in run.readers if reader.alive and reader.job.group)
        run.harmed("channel-cut")
        freezing = asyncio.create_task(reader.freeze(HOUR))
        async with _stranger(run) as channel:
            await _holds(run, channel, f"g@{run.topic}", 1)  # the broker keeps it although somebody reads
        if low < 0.5:
            run.links[reader.name].cut()
        else:
            await asyncio.to_thread(_bus(run).close_group_readers)
        freezing.cancel()
        reader.thaw()


async def exchange_deleted(run: Run) -> None:
    """Somebody deletes the exchange, and with it all bindings; publishers make it again."""
    for low, high in ((0.1, 0.3), (0.5, 0.7)):
        await run.moment(low, high)
        run.harmed("exchange-deleted")
        async with _stranger(run) as channel:
            await channel.exchange_delete(run.label)


async def passing_limit(run: Run) -> None:
    """All connections are closed, and for a while the virtual host lets nobody in."""
    await run.moment(0.15, 0.5)
    run.harmed("passing-limit")
    broker = _bus(run).broker
    await asyncio.to_thread(broker.ctl, "set_vhost_limits", '{"max-connections":0}')
    try:
        await asyncio.to_thread(broker.ctl, "close_all_connections", "chaos")
        await run.pause(0.5, 2.0)
    finally:
        await asyncio.to_thread(broker.ctl, "clear_vhost_limits")


def order_link(name: str) -> str:
    """The name of a process's link to the order."""
    return f"{name}, order"


async def order_hole(run: Run) -> None:
    """The link of the active to the order loses all bytes, so what it reads of the queues is in no entry; then it is
    killed. The next time the link is healed.
    """
    for low, high in ((0.1, 0.3), (0.5, 0.7)):
        await run.moment(low, high)
        active = await run.active()
        run.harmed("order-hole")
        run.links[order_link(active.name)].swallow()
        await run.pause(0.1, 0.6)
        if low < 0.5:
            active.kill()
            await run.start_member()
        else:
            run.links[order_link(active.name)].heal()


async def _holds(run: Run, channel: Any, queue: str, count: int) -> None:
    """Wait until a queue has so many messages that nobody was handed."""
    try:
        async with asyncio.timeout(PATIENCE):
            while (await channel.declare_queue(queue, passive=True)).declaration_result.message_count < count:
                await run.pause(0.0, 0.02)
    except TimeoutError:
        run.report.wrong.append(f"{queue} did not fill")
        raise


@contextlib.asynccontextmanager
async def _stranger(run: Run) -> AsyncIterator[Any]:
    """A channel of somebody who is no part of the run."""
    connection = await aio_pika.connect(_bus(run).broker.url)
    async with connection:
        yield await connection.channel()


BINDING_FAULTS: dict[str, Fault] = {"exchange-deleted": exchange_deleted}
QUEUE_FAULTS: dict[str, Fault] = {"reject-publish": reject_publish}
GROUP_FAULTS: dict[str, Fault] = {"channel-cut": channel_cut}
ORDER_FAULTS: dict[str, Fault] = {"order-hole": order_hole}


class RabbitBus(Bus):
    """RabbitMQ. A frozen broker is trouble after `timeout`, 5 s; one that is killed serves again after some 6 s.

    In direct mode there are no groups: both readers are without, and none that was killed comes back. What is lost with
    a link or a broker because nobody keeps it, such readers are told as missed.
    """

    name = "rabbitmq"
    progress = 20.0

    def __init__(self, zookeeper: ZooKeeper | None, broker: RabbitMQ, mode: str, election: str | None) -> None:
        """`election`: None for the one of the mode."""
        super().__init__(zookeeper)
        self.broker = broker
        self.mode = mode
        self.election = election
        self.faults |= LINK_FAULTS | BROKER_FAULTS | {"memory-alarm": memory_alarm, "passing-limit": passing_limit}
        if mode != "stream":
            self.queues = True
            self.faults |= QUEUE_FAULTS | BINDING_FAULTS
            self.may_miss = {*LINK_FAULTS, "broker-kill", "passing-limit", *BINDING_FAULTS}
            self.groups_may_miss = frozenset(BINDING_FAULTS)
        if mode == "persistent":
            self.faults |= GROUP_FAULTS
            self.engine_faults = ORDER_FAULTS
        if mode == "direct":
            for name in COMING_BACK:
                del self.faults[name]

    async def connect(self, run: Run, job: Job) -> None:
        job.election = self.election
        await super().connect(run, job)
        node, fault = self.broker.nodes[0], run.report.fault
        ports = {"port": node.port, "streamport": node.stream_port}
        if fault in LINK_FAULTS or (fault in GROUP_FAULTS and job.group):
            cut = "streamport" if self.mode == "stream" else "port"
            ports[cut] = await run.link(job.name, ports[cut])
        if self.queues and fault in (*LINK_FAULTS, *ORDER_FAULTS):  # the order of an engine has a link of its own
            ports["streamport"] = await run.link(order_link(job.name), ports["streamport"])
        job.options = {"host": HOST, "exchange": run.label, "mode": self.mode, **ports}
        if fault in GROUP_FAULTS:
            job.options["prefetch"] = str(PREFETCH)
        if self.mode == "direct":
            job.group = None

    def close_group_readers(self) -> None:
        """The broker closes the connections on which groups read."""
        for line in self.broker.ctl("list_connections", "pid", "client_properties").splitlines():
            pid, _, properties = line.partition("\t")
            if "esp-pubsub groups" in properties:
                self.broker.ctl("close_connection", pid, "chaos")

    async def mend(self) -> None:
        await asyncio.to_thread(self.broker.mend)


def _bus(run: Run) -> RabbitBus:
    assert isinstance(run.bus, RabbitBus)
    return run.bus
