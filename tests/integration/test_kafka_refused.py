"""A Kafka that is not there, is none, or does not let us in: each a typed error, in time, with host and cause."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest, DescribeAclsRequest

import esp_pubsub as esp
from esp_pubsub.address import kafka_topic
from esp_pubsub.errors import BusRefused, BusUnavailable, ConfigError
from tests.integration.members import SCHEMA, Reader, inject, rows, until
from tests.support.kafka import PLAIN_USER, SCRAM_USER, Kafka
from tests.support.server import on_a_loop

TIMEOUT = 1.0
SLACK = 10.0  # what a loaded machine adds
PATIENT = 30.0  # where it must succeed
ACL = """
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:bob
"""  # alice may come in, and do nothing


@pytest.fixture(scope="module")
def secure() -> Iterator[Kafka]:
    with Kafka(secure=True, config=ACL) as kafka:
        on_a_loop(used(kafka))
        yield kafka


async def used(kafka: Kafka) -> None:
    """Come in by each door once: the first time, a JVM takes longer than the clients here wait."""
    ca = {"ssl_ca_location": kafka.certificate}
    doors = [
        ("ssl", globalconfig(security_protocol="ssl", **ca)),
        ("sasl_plaintext", sasl(PLAIN_USER, "PLAIN")),
        ("sasl_plaintext", sasl(SCRAM_USER, "SCRAM-SHA-256")),
        ("sasl_ssl", sasl(SCRAM_USER, "SCRAM-SHA-256", "SASL_SSL", **ca)),
    ]
    for listener, config in doors:
        async with esp.init("kafka", hostport=kafka.settings[listener], globalconfig=config, timeout=PATIENT):
            pass


@pytest.fixture
def url() -> str:
    return f"dfESP://host:5555/{secrets.token_hex(4)}/q/w"


async def refused(hostport: str, *kinds: type[esp.EspError], **settings: Any) -> str:
    """What `init` says; it names the host, and it says it in time: it asks once, and once more for the reason."""
    begun = time.monotonic()
    with pytest.raises(kinds) as caught:
        async with esp.init("kafka", hostport=hostport, **{"timeout": TIMEOUT} | settings):
            pass
    assert time.monotonic() - begun < 2 * TIMEOUT + SLACK
    assert hostport in str(caught.value)
    return str(caught.value)


def globalconfig(**settings: Any) -> str:
    return ";".join(f"{name.replace('_', '.')}={value}" for name, value in settings.items())


def sasl(user: tuple[str, str], mechanism: str, protocol: str = "SASL_PLAINTEXT", **more: Any) -> str:
    name, password = user
    return globalconfig(
        security_protocol=protocol, sasl_mechanism=mechanism, sasl_username=name, sasl_password=password, **more
    )


# nobody, or somebody else


async def test_nobody_listens_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        said = await refused(f"127.0.0.1:{bound.getsockname()[1]}", BusUnavailable)
    assert "refused" in said.lower() or "connect" in said.lower()


async def test_a_host_that_does_not_resolve() -> None:
    said = await refused("nowhere.invalid:9092", BusUnavailable)
    assert "name" in said.lower()


@contextlib.asynccontextmanager
async def impostor(answer: bytes | None) -> AsyncIterator[str]:
    """A server that says this to whatever comes and closes; or, with None, takes everything and says nothing."""

    serving: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with contextlib.suppress(OSError):
            if answer is None:
                while await reader.read(1_000):
                    pass
            elif await reader.read(1_000):
                writer.write(answer)
                await writer.drain()
            writer.close()
            await writer.wait_closed()
        serving.discard(asyncio.current_task())

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname())
        await until(lambda: not serving)  # whoever came has hung up
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"AMQP\x00\x00\x09\x01",
        b"",
        None,
        b"\x7f\xff\xff\xff" + bytes(1_000),
        b"\x00\x00\x00\x04\x00\x00\x00\x01",
    ],
    ids=["http", "ssh", "amqp", "silence and an end", "silence", "a huge size", "a short answer"],
)
async def test_something_that_is_no_kafka(answer: bytes | None) -> None:
    async with impostor(answer) as hostport:
        await refused(hostport, BusUnavailable, BusRefused)


# TLS


async def test_tls_with_a_trusted_certificate_works(secure: Kafka, url: str) -> None:
    config = globalconfig(security_protocol="ssl", ssl_ca_location=secure.certificate)
    async with (
        esp.init("kafka", hostport=secure.settings["ssl"], globalconfig=config) as client,
        client.publisher(url, SCHEMA) as publisher,
        client.subscriber(url, side="in", start="earliest") as subscriber,
    ):
        await (await inject(publisher, 1, 100))
        await Reader(subscriber).to(100)


async def test_a_certificate_that_nobody_trusts(secure: Kafka) -> None:
    config = globalconfig(security_protocol="ssl")
    said = await refused(secure.settings["ssl"], BusUnavailable, BusRefused, globalconfig=config)
    assert "certificate" in said


@pytest.fixture
def another_name(secure: Kafka, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the listener with TLS, which is not in its certificate."""
    address, _, port = secure.settings["ssl"].rpartition(":")
    resolve = socket.getaddrinfo

    def resolved(host: Any, *more: Any, **how: Any) -> Any:
        return resolve(address if host == "another.test" else host, *more, **how)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return f"another.test:{port}"


async def test_a_certificate_of_another_host(secure: Kafka, another_name: str) -> None:
    config = globalconfig(security_protocol="ssl", ssl_ca_location=secure.certificate)
    said = await refused(another_name, BusUnavailable, BusRefused, globalconfig=config)
    assert "certificate is not valid for 'another.test'" in said


@pytest.mark.parametrize(
    "switch", ["ssl.endpoint.identification.algorithm=none", "enable.ssl.certificate.verification=false"]
)
async def test_a_name_that_is_not_to_be_checked_is_not(secure: Kafka, another_name: str, switch: str) -> None:
    config = globalconfig(security_protocol="ssl", ssl_ca_location=secure.certificate)
    async with esp.init("kafka", hostport=another_name, globalconfig=f"{config};{switch}"):
        pass


async def test_a_certificate_that_is_not_to_be_checked_is_not(secure: Kafka) -> None:
    config = "security.protocol=ssl;enable.ssl.certificate.verification=false"
    async with esp.init("kafka", hostport=secure.settings["ssl"], globalconfig=config):
        pass


async def test_a_certificate_file_that_is_not_there(secure: Kafka) -> None:
    config = globalconfig(security_protocol="ssl", ssl_ca_location=secure.directory / "none.pem")
    with pytest.raises(ConfigError, match="TLS file"):
        await esp.init("kafka", hostport=secure.settings["ssl"], globalconfig=config)


async def test_tls_to_a_port_without(secure: Kafka) -> None:
    config = globalconfig(security_protocol="ssl", ssl_ca_location=secure.certificate)
    await refused(secure.bootstrap, BusUnavailable, BusRefused, globalconfig=config)


async def test_no_tls_to_a_port_with(secure: Kafka) -> None:
    await refused(secure.settings["ssl"], BusUnavailable, BusRefused)


# SASL and rights


@pytest.mark.parametrize("place", ["sasl_plaintext", "sasl_ssl"])
async def test_scram_with_the_right_password_works(secure: Kafka, url: str, place: str) -> None:
    more = {"ssl_ca_location": secure.certificate} if place == "sasl_ssl" else {}
    config = sasl(SCRAM_USER, "SCRAM-SHA-256", place, **more)
    async with (
        esp.init("kafka", hostport=secure.settings[place], globalconfig=config) as client,
        client.publisher(url, SCHEMA) as publisher,
        client.subscriber(url, side="in", start="earliest", group="g") as subscriber,
    ):
        await (await inject(publisher, 1, 10))
        await Reader(subscriber).to(10, confirm_every=5)


@pytest.mark.parametrize(("user", "mechanism"), [(PLAIN_USER, "PLAIN"), (SCRAM_USER, "SCRAM-SHA-256")])
async def test_a_wrong_password(secure: Kafka, user: tuple[str, str], mechanism: str) -> None:
    place = secure.settings["sasl_plaintext"]
    said = await refused(place, BusRefused, globalconfig=sasl((user[0], "hush-hush"), mechanism))
    assert "auth" in said.lower()
    assert "hush-hush" not in said


async def test_a_mechanism_that_the_broker_does_not_have(secure: Kafka) -> None:
    said = await refused(secure.settings["sasl_plaintext"], BusRefused, globalconfig=sasl(SCRAM_USER, "SCRAM-SHA-512"))
    assert "mechanism" in said.lower()


async def test_no_password_where_one_is_needed(secure: Kafka) -> None:
    await refused(secure.settings["sasl_plaintext"], BusUnavailable, BusRefused)


async def test_a_password_where_none_is_asked_for(secure: Kafka) -> None:
    await refused(secure.bootstrap, BusUnavailable, BusRefused, globalconfig=sasl(PLAIN_USER, "PLAIN"))


async def test_a_user_without_rights_is_told_which(secure: Kafka, url: str) -> None:
    config = sasl(PLAIN_USER, "PLAIN")
    begun = time.monotonic()
    with pytest.raises(BusRefused, match="Authorization"):
        async with esp.init(
            "kafka", hostport=secure.settings["sasl_plaintext"], globalconfig=config, timeout=TIMEOUT
        ) as client:
            publisher = await client.publisher(url, SCHEMA)
            await (await publisher.inject(rows(1)))
    assert time.monotonic() - begun < 2 * TIMEOUT + SLACK


RIGHTS = {  # what docs/how-to/kafka.md asks for, with its number in the protocol
    "topic": {"Read": 3, "Write": 4, "Create": 5, "Delete": 6, "Describe": 8, "DescribeConfigs": 10},
    "values": {"Read": 3, "Write": 4, "Create": 5, "Describe": 8},
    "group": {"Read": 3},
}
LACKING = {  # and what is said without it
    "topic Read": "reading TOPIC: the broker refused .TopicAuth",
    "topic Write": "writing to TOPIC: the broker refused .TopicAuth",
    "topic Create": "making the topic TOPIC: the broker refused .*Auth",
    "topic Delete": "emptying TOPIC: the broker refused .*Auth",
    "topic DescribeConfigs": "max.message.bytes of TOPIC: the broker refused .TopicAuth",
    "values Read": "reading retained values: the broker refused .TopicAuth",
    "values Write": "retaining a value: the broker refused .TopicAuth",
    "values Create": "making the topic values-TOPIC: the broker refused .*Auth",
    "group Read": "the broker refused .GroupAuth.* g@TOPIC",
}


async def grant(secure: Kafka, topic: str, lacking: str) -> None:
    """Let alice do all that is needed but one thing, and return when the broker goes by it."""
    places = {"topic": (2, topic, 3), "values": (2, f"values-{topic}", 3), "group": (3, f"g@{topic}", 3)}
    admin = AIOKafkaAdminClient(bootstrap_servers=secure.bootstrap)
    await admin.start()
    try:
        for place, rights in RIGHTS.items():
            for right, number in rights.items():
                if f"{place} {right}" != lacking:
                    given = (*places[place], f"User:{PLAIN_USER[0]}", "*", number, 3)
                    made = await admin._send_to_controller(CreateAclsRequest(*given))
                    assert made.creation_responses[0][0] == 0
                    async with asyncio.timeout(60):
                        while not (await admin._send_request(DescribeAclsRequest(*given))).resources:  # noqa: ASYNC110  # nobody tells
                            await asyncio.sleep(0.02)
    finally:
        await admin.close()


async def use_all(secure: Kafka, url: str, topic: str) -> None:
    """All that a user may do on one topic."""
    async with (
        asyncio.timeout(60),
        esp.init(
            "kafka", hostport=secure.settings["sasl_plaintext"], globalconfig=sasl(PLAIN_USER, "PLAIN"),
            valuestopic=f"values-{topic}", on_notice=lambda notice: None,
        ) as client,
        client.publisher(url, SCHEMA) as publisher,
    ):  # fmt: skip
        await (await inject(publisher, 1, 3))
        async with client.subscriber(url, side="in", start="earliest", group="g") as subscriber:
            await Reader(subscriber).to(3, confirm_every=1)
        await client.catalog().purge(f"{url.removeprefix('dfESP://')}/I")


async def test_the_rights_that_the_documentation_asks_for_are_enough(secure: Kafka, url: str) -> None:
    topic = kafka_topic(f"{url.removeprefix('dfESP://')}/I")
    await grant(secure, topic, "nothing")
    await use_all(secure, url, topic)


@pytest.mark.parametrize("lacking", LACKING)
async def test_a_right_that_is_missing_is_told_with_what_it_was_needed_for(
    secure: Kafka, url: str, lacking: str
) -> None:
    topic = kafka_topic(f"{url.removeprefix('dfESP://')}/I")
    await grant(secure, topic, lacking)
    with pytest.raises(BusRefused, match=LACKING[lacking].replace("TOPIC", topic)):
        await use_all(secure, url, topic)
