"""Real Kafka: one broker or three, each its own controller, on loopback.

The first start on a machine fills the cache: the jars; the checkpoint that formatting writes, which is the same for
every broker and costs a Java start each time; and an archive of the classes that a broker loads, which saves more than
a third of a start. The timeouts are those with which a broker is back within seconds of a kill.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from .install import cached, classpath, debian, java, run
from .proxy import Proxy
from .server import HOST, Broker, Server, ServerFailed, clean_environment, free_ports, on_a_loop

VERSION = "4.3.1"
JARS = (f"org.apache.kafka:kafka_2.13:{VERSION}", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4")
JVM = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
PLAIN_USER, SCRAM_USER = ("alice", "secret"), ("bob", "pw")

_LOGGING = """
Configuration:
  Appenders:
    Console:
      name: OUT
      PatternLayout: {pattern: "%d %p %c{1} %m%n"}
  Loggers:
    Root:
      level: WARN
      AppenderRef: {ref: OUT}
    Logger:
      - {name: kafka.server.KafkaRaftServer, level: INFO}
"""
_BROKER = """
process.roles=broker,controller
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
num.network.threads=2
num.io.threads=2
offsets.topic.num.partitions=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
log.cleaner.dedupe.buffer.size=2097152
auto.create.topics.enable=false
"""
_ALONE = """
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
broker.session.timeout.ms=1000
broker.heartbeat.interval.ms=200
"""
_CLUSTERED = """
default.replication.factor=3
min.insync.replicas=2
offsets.topic.replication.factor=3
transaction.state.log.replication.factor=3
transaction.state.log.min.isr=2
share.coordinator.state.topic.replication.factor=3
broker.session.timeout.ms=1500
broker.heartbeat.interval.ms=300
replica.lag.time.max.ms=1500
controller.quorum.election.timeout.ms=500
controller.quorum.fetch.timeout.ms=1000
controller.quorum.election.backoff.max.ms=300
"""
_SECURITY = """
ssl.keystore.type=PEM
ssl.client.auth=none
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256
"""
_PROTOCOLS = {"PLAINTEXT": "PLAINTEXT", "BEHIND": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
_SECURE = {"SSL": "SSL", "SASL": "SASL_PLAINTEXT", "SASLTLS": "SASL_SSL"}


class KafkaServer(Server):
    """One broker. `ports` by the name of the listener; PROXY is the port to which BEHIND sends its clients."""

    def __init__(self, name: str, command: Sequence[str], root: Path, ports: dict[str, int]) -> None:
        listening = [port for listener, port in ports.items() if listener != "PROXY"]
        super().__init__(name, command, root, listening, clean_environment(), sign="Kafka Server started")
        self.ports = ports

    @property
    def address(self) -> str:
        """Where clients without security connect."""
        return f"{HOST}:{self.ports['PLAINTEXT']}"

    def proxy(self) -> Proxy:
        """A proxy, to be entered, around which no client finds a way: the broker names it as its own address."""
        return Proxy(HOST, self.ports["BEHIND"], listen=self.ports["PROXY"])


class Kafka(Broker):
    """One broker. Topics are not made by themselves.

    `config`: more lines for server.properties, which win over ours. With `secure` there are three more listeners, of
    which `settings` tells: TLS, SASL, and both; the certificate is `certificate`, the users are PLAIN_USER and
    SCRAM_USER.
    """

    nodes: Sequence[KafkaServer] = ()
    troubles = (*Broker.troubles, KafkaError)
    count = 1

    def __init__(self, *, secure: bool = False, config: str = "") -> None:
        super().__init__()
        self._secure = secure
        self._config = config
        self._jars: str
        self._made: Path  # what of a broker is made once and kept in the cache

    @property
    def bootstrap(self) -> str:
        """Where clients without security connect."""
        return self._addresses("PLAINTEXT")

    @property
    def certificate(self) -> Path:
        return self.directory / "certificate.pem"

    @property
    def settings(self) -> dict[str, str]:
        found = {"bootstrap_servers": self.bootstrap}
        if self._secure:
            found |= {protocol.lower(): self._addresses(listener) for listener, protocol in _SECURE.items()}
            found |= {"cafile": str(self.certificate), "plain": ":".join(PLAIN_USER), "scram": ":".join(SCRAM_USER)}
        return found

    def proxy(self) -> Proxy:
        """A proxy before the (first) broker, see there."""
        return self.nodes[0].proxy()

    def _addresses(self, listener: str) -> str:
        return ",".join(f"{HOST}:{node.ports[listener]}" for node in self.nodes)

    def _install(self) -> None:
        self._jars = classpath(f"kafka-{VERSION}", JARS)
        machine = Path(java()).resolve()
        key = hashlib.sha256(f"{machine} {machine.stat().st_mtime_ns} {self._jars} {JVM}".encode()).hexdigest()[:12]
        self._made = cached(f"kafka-{VERSION}-made-{key}", lambda place: _Trial(place).play())

    def _lay_out(self) -> None:
        listeners = (*_PROTOCOLS, *(_SECURE if self._secure else ()), "PROXY")
        found = iter(free_ports(len(listeners) * self.count))
        ports = [{listener: next(found) for listener in listeners} for _ in range(self.count)]
        (self.directory / "log4j2.yaml").write_text(_LOGGING)
        if self._secure:
            self._certify()
        self.nodes = [
            KafkaServer(f"kafka-{number}", self._command(f"kafka-{number}"), self.directory, ports[number - 1])
            for number in range(1, self.count + 1)
        ]
        quorum = ",".join(f"{number}@{HOST}:{its['CONTROLLER']}" for number, its in enumerate(ports, 1))
        for number, node in enumerate(self.nodes, 1):
            config = node.directory / "server.properties"
            config.write_text(self._properties(number, node, quorum))
            self._format(number, config, node.directory / "data")

    def _command(self, name: str) -> list[str]:
        temporary = self.directory / "tmp"  # what native libraries leave there goes with the data
        temporary.mkdir(exist_ok=True)
        return [
            java(), *JVM, self._sharing(), f"-Djava.io.tmpdir={temporary}",
            f"-Dlog4j2.configurationFile={self.directory / 'log4j2.yaml'}",
            "-cp", self._jars, "kafka.Kafka", str(self.directory / name / "server.properties"),
        ]  # fmt: skip

    def _sharing(self) -> str:
        return f"-XX:SharedArchiveFile={self._made / 'classes.jsa'}"

    def _properties(self, number: int, node: KafkaServer, quorum: str) -> str:
        protocols = _PROTOCOLS | (_SECURE if self._secure else {})
        at = {listener: f"{listener}://{HOST}:{node.ports[listener]}" for listener in protocols}
        told = at | {"BEHIND": f"BEHIND://{HOST}:{node.ports['PROXY']}"}
        del told["CONTROLLER"]
        lines = [
            f"node.id={number}",
            f"controller.quorum.voters={quorum}",
            f"listeners={','.join(at.values())}",
            f"advertised.listeners={','.join(told.values())}",
            f"listener.security.protocol.map={','.join(map(':'.join, protocols.items()))}",
            f"log.dirs={node.directory / 'data'}",
            _BROKER,
            _ALONE if self.count == 1 else _CLUSTERED,
        ]
        if self._secure:
            lines += [
                _SECURITY,
                f"ssl.keystore.location={self.directory / 'server.pem'}",
                *map(_jaas, ("sasl", "sasltls")),
            ]
        return "\n".join([*lines, self._config])

    def _certify(self) -> None:
        key = self.directory / "key.pem"
        make = [debian("openssl", "openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj"]
        names = ["/CN=localhost", "-addext", f"subjectAltName=DNS:localhost,IP:{HOST}"]
        run([*make, *names, "-keyout", key, "-out", self.certificate], hint="openssl makes no certificate")
        (self.directory / "server.pem").write_text(key.read_text() + self.certificate.read_text())

    def _format(self, number: int, config: Path, data: Path) -> None:
        """What Kafka's tool would write into a data folder."""
        data.mkdir()
        shutil.copy(self._made / "bootstrap.checkpoint", data)
        identity = urlsafe_b64encode(b"\x01" + secrets.token_bytes(15)).decode().rstrip("=")  # no leading "-"
        (data / "meta.properties").write_text(
            f"version=1\ncluster.id={CLUSTER}\nnode.id={number}\ndirectory.id={identity}\n"
        )

    def _use(self) -> None:
        on_a_loop(_use(self.bootstrap, self.count))


class KafkaCluster(Kafka):
    """Three brokers; a topic has three copies unless it says otherwise, and is written to while two are there."""

    count = 3


class _Trial(Kafka):
    """The broker that makes what the cache keeps."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self._made = place

    def play(self) -> None:
        with self:
            self.stop()

    def _install(self) -> None:
        self._jars = classpath(f"kafka-{VERSION}", JARS)

    def _sharing(self) -> str:
        return f"-XX:ArchiveClassesAtExit={self._made / 'classes.jsa'}"

    def _format(self, number: int, config: Path, data: Path) -> None:
        user, password = SCRAM_USER
        scram = f"SCRAM-SHA-256=[name={user},password={password}]"
        tool = [java(), "-Xmx64m", "-XX:TieredStopAtLevel=1", "-cp", self._jars, "kafka.tools.StorageTool"]
        run([*tool, "format", "-t", CLUSTER, "-c", config, "--add-scram", scram], hint="Kafka formats no folder")
        shutil.copy(data / "bootstrap.checkpoint", self._made)


def _jaas(listener: str) -> str:
    user, password = PLAIN_USER
    modules = "org.apache.kafka.common.security"
    return (
        f"listener.name.{listener}.plain.sasl.jaas.config="
        f'{modules}.plain.PlainLoginModule required user_{user}="{password}";\n'
        f"listener.name.{listener}.scram-sha-256.sasl.jaas.config={modules}.scram.ScramLoginModule required;"
    )


async def _use(bootstrap: str, count: int) -> None:
    """Make a topic with a copy on each broker, write to it, commit a position: each of these is slow the first time."""
    quick = {"bootstrap_servers": bootstrap, "request_timeout_ms": 3_000, "retry_backoff_ms": 50}
    partition = TopicPartition("ready", 0)
    async with asyncio.timeout(15), AsyncExitStack() as stack:
        admin = AIOKafkaAdminClient(**quick)
        stack.push_async_callback(admin.close)  # `async with` does not close what could not start
        await admin.start()
        present = len((await admin.describe_cluster())["brokers"])
        made = await admin.create_topics([NewTopic("ready", 1, count)])
        wrong = [error for error in made.topic_errors if error[1] not in (0, 36)]  # made, or there already
        if present < count or wrong:
            raise ServerFailed(f"{present} of {count} brokers are there {wrong or ''}")
        producer = AIOKafkaProducer(**quick, acks="all")
        stack.push_async_callback(producer.stop)
        await producer.start()
        await producer.send_and_wait("ready", b"ready", partition=0)
        consumer = AIOKafkaConsumer(**quick, group_id="ready", enable_auto_commit=False)
        stack.push_async_callback(consumer.stop)
        await consumer.start()
        consumer.assign([partition])
        await consumer.commit({partition: 0})
