"""Real RabbitMQ: a private node of Debian's package with streams and event exchange, or two of them in a cluster.

The scripts below SCRIPTS run as whoever calls them, and with RABBITMQ_ALLOW_INPUT the process that is started becomes
the broker itself, so that a signal hits it. Nodes find each other through an epmd of their own, which would else be
started by the first one and outlive it. If the way between them is to lead somewhere else, each has one for itself,
and that is told where the others are to be found.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import aio_pika
from aio_pika.exceptions import AMQPError

from .install import debian
from .server import HOST, PATIENCE, Broker, Server, ServerFailed, clean_environment, free_ports, on_a_loop

SCRIPTS = Path("/usr/lib/rabbitmq/bin")
TOOL_PORTS = 10  # as many command line tools can run at once
_ONLY_LOOPBACK = "-kernel inet_dist_use_interface {127,0,0,1}"
_PLUGINS = "[rabbitmq_stream,rabbitmq_event_exchange]."
_CONFIG = """
heartbeat = 10
stream.advertised_host = 127.0.0.1
disk_free_limit.absolute = 50MB
vm_memory_high_watermark.absolute = 1GB
log.console.level = info
"""


class RabbitServer(Server):
    """One node. `port` is AMQP's, `stream_port` that of the stream protocol."""

    def __init__(self, name: str, root: Path, ports: Sequence[int], shared: dict[str, str]) -> None:
        self.node = f"{name}@localhost"
        self.port, self.stream_port, distribution = ports
        home = root / name
        self.environment = clean_environment(
            **shared,
            HOME=str(home),
            RABBITMQ_NODENAME=self.node,
            RABBITMQ_NODE_IP_ADDRESS=HOST,
            RABBITMQ_NODE_PORT=str(self.port),
            RABBITMQ_DIST_PORT=str(distribution),
            RABBITMQ_ALLOW_INPUT="1",
            RABBITMQ_CONF_ENV_FILE="/dev/null",
            RABBITMQ_LOGS="-",
            RABBITMQ_LOG_BASE=str(home),
            RABBITMQ_MNESIA_BASE=str(home / "mnesia"),
            RABBITMQ_CONFIG_FILE=str(home / "rabbitmq.conf"),
            RABBITMQ_ADVANCED_CONFIG_FILE=str(home / "advanced.config"),
            RABBITMQ_ENABLED_PLUGINS_FILE=str(home / "enabled_plugins"),
            RABBITMQ_FEATURE_FLAGS_FILE=str(home / "feature_flags"),
            RABBITMQ_GENERATED_CONFIG_DIR=str(home / "generated"),
            RABBITMQ_PID_FILE=str(home / "pid"),
            RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=_ONLY_LOOPBACK,
            RABBITMQ_CTL_ERL_ARGS=_ONLY_LOOPBACK,
        )
        command = [str(SCRIPTS / "rabbitmq-server"), "-noinput"]
        listening = [self.port, self.stream_port]
        super().__init__(name, command, root, listening, self.environment, sign="Server startup complete")

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}/"

    def write(self, cookie: str, config: str) -> None:
        """Put its configuration where it reads it."""
        secret = self.directory / ".erlang.cookie"
        secret.write_text(cookie)
        secret.chmod(0o400)
        (self.directory / "enabled_plugins").write_text(_PLUGINS)
        own = [
            f"listeners.tcp.default = {HOST}:{self.port}",
            f"stream.listeners.tcp.1 = {HOST}:{self.stream_port}",
            f"stream.advertised_port = {self.stream_port}",
        ]
        (self.directory / "rabbitmq.conf").write_text("\n".join([*own, _CONFIG, config, ""]))

    def ctl(self, *words: str, tool: str = "rabbitmqctl") -> str:
        """What one of RabbitMQ's own tools says, asked about this node; it takes half a second."""
        return subprocess.run(
            [SCRIPTS / tool, "-q", *words], env=self.environment, cwd=self.directory, check=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=PATIENCE,
        ).stdout  # fmt: skip


class RabbitMQ(Broker):
    """One node, or two in a cluster.

    `config`: more lines for the rabbitmq.conf of each. `ways`: for each of two nodes the port where it hears the other
    one, and the port where that one calls it, which is somebody's who carries it there.
    """

    nodes: Sequence[RabbitServer] = ()
    troubles = (*Broker.troubles, AMQPError, subprocess.CalledProcessError)

    def __init__(self, *, count: int = 1, config: str = "", ways: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__()
        self._count = len(ways) or count
        self._config = config
        self._ways = ways
        self._told: list[socket.socket] = []
        self._alone = False  # the first node of several has to found the cluster

    @property
    def url(self) -> str:
        """Where AMQP clients connect (to the first node)."""
        return self.nodes[0].url

    @property
    def stream_port(self) -> int:
        """Where stream clients connect (to the first node)."""
        return self.nodes[0].stream_port

    @property
    def settings(self) -> dict[str, str]:
        streams = ",".join(f"{HOST}:{node.stream_port}" for node in self.nodes)
        return {"url": ",".join(node.url for node in self.nodes), "streams": streams}

    def ctl(self, *words: str, tool: str = "rabbitmqctl") -> str:
        """What one of RabbitMQ's own tools says, asked about the first node; it takes half a second."""
        return self.nodes[0].ctl(*words, tool=tool)

    def _install(self) -> None:
        debian(str(SCRIPTS / "rabbitmq-server"), "rabbitmq-server")

    def _lay_out(self) -> None:
        self._alone = self._count > 1
        free = iter(free_ports(TOOL_PORTS + 4 * self._count))
        tools = [next(free) for _ in range(TOOL_PORTS)]
        shared = {"ERL_EPMD_ADDRESS": HOST}
        shared |= {"RABBITMQ_CTL_DIST_PORT_MIN": str(tools[0]), "RABBITMQ_CTL_DIST_PORT_MAX": str(tools[-1])}
        self._mappers = [next(free) for _ in self._ways or (None,)]
        command = [debian("epmd", "erlang-base")]
        self.helpers = [
            Server(f"epmd{port}", command, self.directory, [port], clean_environment(ERL_EPMD_PORT=str(port), **shared))
            for port in self._mappers
        ]
        cookie = secrets.token_hex(16)
        nodes = []
        for number in range(self._count):
            ports = [next(free) for _ in range(3)]
            if self._ways:
                ports[2] = self._ways[number][0]
            mapper = self._mappers[number % len(self._mappers)]
            nodes.append(RabbitServer(f"n{number + 1}", self.directory, ports, shared | {"ERL_EPMD_PORT": str(mapper)}))
        self.nodes = nodes
        for number, node in enumerate(self.nodes):
            # Nobody but the first node founds a cluster: the others, empty, look for it.
            join = "cluster_formation.peer_discovery_backend = classic_config\n"
            join += f"cluster_formation.classic_config.nodes.1 = {self.nodes[0].node}\n"
            node.write(cookie, (join if number else "") + self._config)

    def _come_up(self) -> None:
        self._launch(self.helpers)
        if self._ways and not self._told:
            (_, first), (_, second) = self._ways
            self._told = [_tell(self._mappers[0], "n2", second), _tell(self._mappers[1], "n1", first)]
        if self._alone:
            self._launch(self.nodes[:1])
            self._alone = False
        super()._come_up()

    def _use(self) -> None:
        on_a_loop(_use([node.url for node in self.nodes]))
        if len(self.nodes) > 1:
            present = json.loads(self.ctl("cluster_status", "--formatter", "json"))["running_nodes"]
            if len(present) < len(self.nodes):
                raise ServerFailed(f"only {present} are in the cluster")

    def _close_all(self) -> None:
        for told in self._told:
            told.close()
        self._told.clear()
        super()._close_all()


def _tell(mapper: int, name: str, port: int) -> socket.socket:
    """Tell an epmd that there is a node of that name at that port, as long as the socket is open."""
    told = socket.create_connection((HOST, mapper), timeout=PATIENCE)
    alive = struct.pack(">BHBBHHH", 120, port, 77, 0, 6, 5, len(name)) + name.encode() + bytes(2)
    told.sendall(len(alive).to_bytes(2, "big") + alive)
    code, refused = told.recv(6)[:2]
    if code != 118 or refused:
        told.close()
        raise ServerFailed(f"epmd did not take the name {name}")
    return told


async def _use(urls: Sequence[str]) -> None:
    """Open a channel on each node."""
    for url in urls:
        async with asyncio.timeout(10):
            connection = await aio_pika.connect(url)
            async with connection:
                await connection.channel()
