"""Kafka under chaos: one broker for all runs, three for a run whose fault needs them, and the faults of its own."""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING

from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from esp_pubsub.address import kafka_topic
from tests.support.kafka import Kafka, KafkaCluster, KafkaServer
from tests.support.server import HOST, free_ports

from .buses import Bus
from .faults import Fault
from .run import Run

if TYPE_CHECKING:
    from tests.support.zookeeper import ZooKeeper

    from .process import Job

WAYS = 8  # five members, two readers, and one to spare


class KafkaWithWays(Kafka):
    """A broker with more listeners, each of which names a proxy's port as its address: so the link of one client can be
    cut, and no client finds a way around its proxy.
    """

    ways: list[tuple[int, int]]
    """Where the proxy listens, and where the broker does."""

    def __init__(self, ways: int = WAYS) -> None:
        super().__init__()
        self._many = ways

    def _properties(self, number: int, node: KafkaServer, quorum: str) -> str:
        found = iter(free_ports(2 * self._many))
        self.ways = list(zip(found, found, strict=True))
        text = super()._properties(number, node, quorum)
        for key, value in (
            ("listeners", "WAY{0}://{host}:{2}"),
            ("advertised.listeners", "WAY{0}://{host}:{1}"),
            ("listener.security.protocol.map", "WAY{0}:PLAINTEXT"),
        ):
            more = ",".join(value.format(index, *ports, host=HOST) for index, ports in enumerate(self.ways))
            text = re.sub(rf"(?m)^{re.escape(key)}=", f"{key}={more},", text)
        return text


async def link_hole(run: Run) -> None:
    """The link of the active loses all bytes until another one leads, and is healed."""
    await run.moment(0.1, 0.5)
    active = await run.active()
    run.harmed("link-hole")
    run.links[active.name].swallow()
    if not await run.until(lambda: any(leader is not active for leader in run.leaders())):
        run.report.wrong.append("nobody took over from a leader whose link was cut")
    await run.pause(0.0, 1.0)
    run.links[active.name].heal()


async def link_reset(run: Run) -> None:
    """All links are cut at once, twice."""
    for low, high in ((0.1, 0.4), (0.5, 0.8)):
        await run.moment(low, high)
        run.harmed("link-reset")
        for link in run.links.values():
            link.cut()


async def link_half_open(run: Run) -> None:
    """All links stay open without an answer, twice; new ones are in order."""
    for low, high in ((0.1, 0.3), (0.5, 0.7)):
        await run.moment(low, high)
        run.harmed("link-half-open")
        for link in run.links.values():
            link.half_open()


async def broker_freeze(run: Run) -> None:
    """The broker stands still for 3 s."""
    await run.moment(0.1, 0.5)
    run.harmed("broker-freeze")
    broker = run.bus.broker
    broker.freeze()
    await asyncio.sleep(3.0)
    broker.thaw()


async def broker_kill(run: Run) -> None:
    """The broker is killed, and started again."""
    await run.moment(0.1, 0.5)
    run.harmed("broker-kill")
    broker = run.bus.broker
    broker.kill()
    await asyncio.to_thread(broker.restart)


async def topic_anew(run: Run) -> None:
    """The topic is deleted: once somebody makes it again at once, and once members do."""
    topic = kafka_topic(run.topic)
    admin = AIOKafkaAdminClient(bootstrap_servers=run.bus.broker.bootstrap)
    await admin.start()
    try:
        for low, high in ((0.1, 0.3), (0.5, 0.7)):
            await run.moment(low, high)
            run.harmed("topic-anew")
            await admin.delete_topics([topic])
            while low < 0.5 and (await admin.create_topics([NewTopic(topic, 1, 1)])).topic_errors[0][1]:
                await run.pause(0.0, 0.02)  # until the old one is gone
    finally:
        await admin.close()


async def cut_tail(run: Run) -> None:
    """The broker is killed, and comes back without the last messages of the topic."""
    await run.moment(0.1, 0.5)
    run.harmed("cut-tail")
    broker = _bus(run).broker
    broker.kill()
    (log,) = (broker.nodes[0].directory / "data" / f"{kafka_topic(run.topic)}-0").glob("*.log")
    for index in log.parent.glob("*index"):
        index.unlink()
    os.truncate(log, int(log.stat().st_size * run.dice.uniform(0.5, 1.0)))
    await asyncio.to_thread(broker.restart)


async def leader_broker_kill(run: Run) -> None:
    """Of three brokers, the one that leads the topic's partition is killed, and started again."""
    cluster = _bus(run).cluster
    assert cluster is not None
    await run.moment(0.1, 0.5)
    topic = kafka_topic(run.topic)
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    await admin.start()
    try:
        (found,) = await admin.describe_topics([topic])
    finally:
        await admin.close()
    (partition,) = found["partitions"]
    if len(partition["replicas"]) != 3:
        run.report.wrong.append(f"the topic has the copies {partition['replicas']}")
    run.harmed("leader-broker-kill")
    node = cluster.nodes[partition["leader"] - 1]
    node.kill()
    await run.pause(0.5, 3.0)
    await asyncio.to_thread(node.restart)


LINK_FAULTS: dict[str, Fault] = {"link-hole": link_hole, "link-reset": link_reset, "link-half-open": link_half_open}
BROKER_FAULTS: dict[str, Fault] = {"broker-freeze": broker_freeze, "broker-kill": broker_kill}
LOSSES: dict[str, Fault] = {"topic-anew": topic_anew, "cut-tail": cut_tail}
CLUSTER_FAULTS: dict[str, Fault] = {"leader-broker-kill": leader_broker_kill}


class KafkaBus(Bus):
    """Kafka. The client's deadlines are those that users have, and bounds follow from them.

    progress: a broker that is killed serves again after 5 s; a request that was under way is given up after `timeout`,
    5 s, and connecting anew takes as long at worst. A group waits 6 s for a reader that died.
    """

    name = "kafka"
    progress = 16.0
    may_lose = frozenset(LOSSES)

    def __init__(self, zookeeper: ZooKeeper | None, broker: Kafka) -> None:
        super().__init__(zookeeper)
        self.broker = broker
        self.cluster: KafkaCluster | None = None
        self.faults |= BROKER_FAULTS | LOSSES | CLUSTER_FAULTS
        if isinstance(broker, KafkaWithWays):
            self.faults |= LINK_FAULTS

    async def connect(self, run: Run, job: Job) -> None:
        await super().connect(run, job)
        fault, broker = run.report.fault, self.broker
        address = broker.bootstrap
        if fault in LINK_FAULTS and isinstance(broker, KafkaWithWays):
            listen, port = broker.ways[len(run.links)]
            await run.link(job.name, port, listen=listen)
            address = f"{HOST}:{listen}"
        elif fault in CLUSTER_FAULTS:
            if self.cluster is None:
                self.cluster = await run.stack.enter_async_context(KafkaCluster())
            address = self.cluster.bootstrap
        job.options = {"hostport": address}

    async def mend(self) -> None:
        self.cluster = None
        await asyncio.to_thread(self.broker.mend)


def _bus(run: Run) -> KafkaBus:
    assert isinstance(run.bus, KafkaBus)
    return run.bus
