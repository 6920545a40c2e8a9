"""TLS to a real RabbitMQ broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from esp_pubsub.errors import BusError, ConfigError
from esp_pubsub.notices import Notice
from tests.integration.members import inject
from tests.integration.rabbit import new_url, opened, publishing, reading
from tests.support.install import debian, run
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST, free_ports


@pytest.fixture
def url() -> str:
    return new_url()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an authority, and what it signed for a server and a client."""
    folder = tmp_path_factory.mktemp("tls")
    openssl = debian("openssl", "openssl")
    new = [openssl, "req", "-newkey", "rsa:2048", "-nodes", "-subj"]
    hint = "openssl makes no certificate"
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    run([*new, "/CN=ca", "-x509", "-days", "2", "-keyout", folder / "ca.key", "-out", folder / "ca.pem"], hint=hint)
    for name in ("server", "client"):
        run([*new, f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr"], hint=hint)
        sign = [openssl, "x509", "-req", "-days", "2", "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key"]
        files = ["-extfile", folder / "names", "-in", folder / f"{name}.csr", "-out", folder / f"{name}.pem"]
        run([*sign, "-CAcreateserial", *files], hint=hint)
    return folder


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[tuple[RabbitMQ, dict[str, Any]]]:
    """A broker that also speaks TLS, with those whose certificate it knows, and how to be let in."""
    port, streamport = free_ports(2)
    config = "\n".join([
        f"listeners.ssl.default = {HOST}:{port}",
        f"stream.listeners.ssl.1 = {HOST}:{streamport}",
        f"ssl_options.cacertfile = {certificates / 'ca.pem'}",
        f"ssl_options.certfile = {certificates / 'server.pem'}",
        f"ssl_options.keyfile = {certificates / 'server.key'}",
        "ssl_options.verify = verify_peer",
        "ssl_options.fail_if_no_peer_cert = true",
    ])  # fmt: skip
    with RabbitMQ(config=config) as broker:
        yield broker, {
            "port": port, "streamport": streamport, "ssl": True, "sslcacert": certificates / "ca.pem",
            "sslcert": certificates / "client.pem", "sslkey": certificates / "client.key",
        }  # fmt: skip


@pytest.mark.parametrize("mode", ["direct", "stream"])
async def test_tls_with_certificates_on_both_sides(secure: Any, certificates: Path, url: str, mode: str) -> None:
    broker, ours = secure
    ours = ours | {"mode": mode}
    notices: list[Notice] = []
    async with reading(broker, url, notices, **ours) as reader, publishing(broker, url, **ours) as publisher:
        await inject(publisher, 1, 3)
        await reader.to(3)
    for wrong, says in (
        ({"sslcacert": certificates / "client.pem"}, "check sslcacert"),
        ({"sslcert": None, "sslkey": None}, "set sslcert and sslkey"),
        ({"ssl": False, "sslcacert": None, "sslcert": None, "sslkey": None}, "set ssl = true"),
        ({"port": broker.nodes[0].port}, "check port, ssl"),
    ):
        with pytest.raises(BusError, match=says):
            async with opened(broker, **ours | wrong):
                pass
    with pytest.raises(ConfigError, match="TLS file"):
        async with opened(broker, **ours | {"sslcacert": certificates / "nix.pem"}):
            pass


async def test_a_stream_port_without_tls_is_refused_with_the_way_out(secure: Any) -> None:
    broker, ours = secure
    with pytest.raises(BusError, match="check streamport, ssl"):
        async with opened(broker, **ours | {"mode": "stream", "streamport": broker.stream_port}):
            pass
