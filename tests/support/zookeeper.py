"""Real ZooKeeper, one server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

from kazoo.client import KazooClient

from .contests import Round, Service
from .install import classpath, java
from .server import HOST, Broker, Server, ServerFailed, clean_environment, free_ports

VERSION = "3.9.5"
JARS = (
    f"org.apache.zookeeper:zookeeper:{VERSION}",
    "io.dropwizard.metrics:metrics-core:4.1.12.1",  # ZooKeeper calls these two provided, and serves nobody without
    "org.xerial.snappy:snappy-java:1.1.10.7",
    "org.slf4j:slf4j-simple:2.0.13",
)
JVM = ("-Xms32m", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_CONFIG = """
tickTime=200
minSessionTimeout=400
maxSessionTimeout=60000
maxClientCnxns=0
admin.enableServer=false
4lw.commands.whitelist=ruok,srvr,stat,mntr
"""


class ZooKeeperServer(Server):
    """One server; `port` is where clients connect."""

    def __init__(self, command: Sequence[str], root: Path, port: int) -> None:
        super().__init__("zookeeper", command, root, [port], clean_environment())
        self.port = port

    def serves(self) -> bool:
        with suppress(OSError), socket.create_connection((HOST, self.port), timeout=1) as connection:
            connection.sendall(b"srvr")
            with connection.makefile("rb") as answer:
                return b"Mode:" in answer.read()
        return False


class ZooKeeper(Broker):
    """One server. Sessions time out after 0.4 to 60 s. `config`: more lines for zoo.cfg."""

    nodes: Sequence[ZooKeeperServer] = ()

    def __init__(self, *, config: str = "") -> None:
        super().__init__()
        self._config = config
        self._jars: str

    @property
    def hosts(self) -> str:
        """Where clients connect."""
        return f"{HOST}:{self.nodes[0].port}"

    @property
    def settings(self) -> dict[str, str]:
        return {"hosts": self.hosts}

    def _install(self) -> None:
        self._jars = classpath(f"zookeeper-{VERSION}", JARS)

    def _lay_out(self) -> None:
        [port] = free_ports(1)
        config = self.directory / "zoo.cfg"
        command = [
            java(), *JVM, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", f"-Djava.io.tmpdir={self.directory}",
            "-cp", self._jars, "org.apache.zookeeper.server.ZooKeeperServerMain", str(config),
        ]  # fmt: skip
        node = ZooKeeperServer(command, self.directory, port)
        own = [f"dataDir={node.directory}", f"clientPort={port}", f"clientPortAddress={HOST}"]
        config.write_text("\n".join([*own, _CONFIG, self._config]))
        self.nodes = [node]

    def _use(self) -> None:
        if not self.nodes[0].serves():
            raise ServerFailed("no answer to srvr")


def rounds(hosts: str) -> Service:
    """A value set, and read, over a link of its own."""
    path = f"/probe-{secrets.token_hex(4)}"

    @contextlib.asynccontextmanager
    async def service() -> AsyncIterator[Round]:
        client = KazooClient(hosts, timeout=30)

        def ask() -> None:
            client.set(path, b"")
            client.get(path)

        await asyncio.to_thread(client.start)
        try:
            await asyncio.to_thread(client.create, path, ephemeral=True)
            yield lambda: asyncio.to_thread(ask)
        finally:
            await asyncio.to_thread(client.stop)
            client.close()

    return service
