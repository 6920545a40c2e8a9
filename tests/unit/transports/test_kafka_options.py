"""What becomes of the keys of kafka.cfg, and of librdkafka's settings in it."""

from __future__ import annotations

import logging
import ssl
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiokafka.protocol.admin import SaslAuthenticateRequest_v0, SaslAuthenticateRequest_v1
from aiokafka.protocol.metadata import MetadataRequest_v0

from esp_pubsub.errors import ConfigError
from esp_pubsub.transports.kafka import options as options_module
from esp_pubsub.transports.kafka.link import Link, security
from esp_pubsub.transports.kafka.options import KafkaOptions, Settings, settings

TAKEN = {  # setting: its value, where it goes, what it is there
    "bootstrap.servers": ("a:1,b:2", "options.hostport", "a:1,b:2"),
    "metadata.broker.list": ("a:1", "options.hostport", "a:1"),
    "client.id": ("me", "client_id", "me"),
    "group.id": ("g", "options.groupid", "g"),
    "auto.offset.reset": ("smallest", "options.initialoffset", "smallest"),
    "security.protocol": ("ssl", "protocol", "SSL"),
    "sasl.mechanism": ("scram-sha-512", "mechanism", "SCRAM-SHA-512"),
    "sasl.mechanisms": ("PLAIN", "mechanism", "PLAIN"),
    "sasl.username": ("u", "username", "u"),
    "sasl.password": ("p=", "password", "p="),
    "ssl.ca.location": ("ca.pem", "ca", "ca.pem"),
    "ssl.certificate.location": ("c.pem", "certificate", "c.pem"),
    "ssl.key.location": ("k.pem", "key", "k.pem"),
    "ssl.key.password": ("kp", "key_password", "kp"),
    "enable.ssl.certificate.verification": ("false", "verify", False),
    "ssl.endpoint.identification.algorithm": ("none", "verify_name", False),
    "compression.codec": ("lz4", "compression", "lz4"),
    "compression.type": ("none", "compression", None),
    "enable.idempotence": ("true", "idempotent", True),
    "message.max.bytes": ("5000", "max_bytes", 5_000),
    "request.timeout.ms": ("1500", "options.timeout", 1.5),
    "socket.timeout.ms": ("1500", "options.timeout", 1.5),
    "message.timeout.ms": ("1500", "options.timeout", 1.5),
    "delivery.timeout.ms": ("1500", "options.timeout", 1.5),
    "session.timeout.ms": ("9000", "options.session", 9.0),
    "heartbeat.interval.ms": ("100", "heartbeat", 0.1),
    "max.poll.interval.ms": ("90000", "options.lease", 90.0),
    "fetch.message.max.bytes": ("100", "options.fetch_size", 100),
    "max.partition.fetch.bytes": ("100", "options.fetch_size", 100),
    "fetch.max.bytes": ("100", "options.fetch_size", 100),
}
WRONG = {  # a value that cannot be, and what is said of it
    "security.protocol": ("tls", "security.protocol is one of plaintext, ssl, sasl_plaintext, sasl_ssl"),
    "sasl.mechanism": ("GSSAPI", "sasl.mechanism is one of plain, scram-sha-256, scram-sha-512, oauthbearer"),
    "enable.ssl.certificate.verification": ("maybe", "is true or false"),
    "ssl.endpoint.identification.algorithm": ("http", "is none or https"),
    "compression.codec": ("rar", "is none, gzip, snappy, lz4 or zstd"),
    "message.max.bytes": ("1MB", "is a whole number"),
    "request.timeout.ms": ("5s", "is a number of milliseconds"),
    "acks": ("1", "acks is all or -1 here, always, not '1'"),
    "enable.auto.commit": ("true", "enable.auto.commit is false here, always, not 'true'"),
}


def taken(config: str = "", **more: Any) -> Settings:
    return settings(KafkaOptions("h:1", globalconfig=config, **more))


@pytest.mark.parametrize("name", options_module._MEANS)
@pytest.mark.parametrize("place", ["globalconfig", "topicconfig"])
def test_a_setting_with_an_equivalent_goes_where_that_is_and_changes_nothing_else(name: str, place: str) -> None:
    value, where, expected = TAKEN[name]
    before, after = asdict(taken()), asdict(settings(KafkaOptions("h:1", **{place: f"{name} = {value}"})))  # type: ignore[arg-type]
    before["options"][place] = f"{name} = {value}"
    target = before["options"] if where.startswith("options.") else before
    target[where.removeprefix("options.")] = expected
    assert after == before


@pytest.mark.parametrize("name", options_module._SO_ANYWAY)
def test_a_setting_that_is_so_anyway_changes_nothing(name: str) -> None:
    value = (options_module._SO_ANYWAY[name] or ("17",))[-1]
    assert taken(f"{name}={value}").protocol == "PLAINTEXT"


@pytest.mark.parametrize("name", options_module._INSTEAD)
def test_a_setting_without_an_equivalent_is_named_with_what_to_do_instead(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no meaning here; .") as caught:
        taken(f"client.id=me;{name}=17")
    assert options_module._INSTEAD[name] in str(caught.value)
    assert caught.value.key == name  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_cannot_be_is_refused_with_those_that_can(name: str) -> None:
    value, said = WRONG[name]
    with pytest.raises(ConfigError, match=said) as caught:
        taken(f"{name}={value}")
    assert caught.value.key == name  # type: ignore[attr-defined]


def test_a_setting_that_nobody_knows_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"topicconfig: 'sasl.usrname' is not known here.*'sasl.username'"):
        taken(topicconfig="sasl.usrname=u")


@pytest.mark.parametrize("text", ["acks", "acks=", "acks all"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected name=value"):
        taken(text)


def test_empty_entries_and_spaces_do_not_matter_and_the_last_one_wins() -> None:
    assert taken(" ; client.id = a ;; client.id = b; ").client_id == "b"


# what belongs together


def test_sasl_without_a_user_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no sasl\.username"):
        taken("security.protocol=sasl_ssl")


def test_a_token_needs_its_file_and_no_user(tmp_path: Path) -> None:
    config = "security.protocol=sasl_ssl;sasl.mechanism=OAUTHBEARER"
    with pytest.raises(ConfigError, match="needs tokenfile") as caught:
        taken(config)
    assert caught.value.key == "tokenfile"  # type: ignore[attr-defined]
    assert taken(config, tokenfile=str(tmp_path / "token")).mechanism == "OAUTHBEARER"


async def test_a_token_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    config = "security.protocol=sasl_ssl;sasl.mechanism=OAUTHBEARER"
    provider = Link(taken(config, tokenfile=str(file)), None)._common["sasl_oauth_token_provider"]
    for token in ("first", "second"):
        file.write_text(f"{token}\n")
        assert await provider.token() == token


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The TLS context that is made, and what it was made with."""
    made = Mock()
    made.return_value = made
    monkeypatch.setattr("ssl.create_default_context", made)
    return made


def test_without_tls_there_is_no_context(context: Any) -> None:
    assert security(taken("security.protocol=sasl_plaintext;sasl.username=u")) is None


def test_a_client_certificate_is_shown_with_its_key_and_password(context: Any) -> None:
    files = "ssl.ca.location=ca.pem;ssl.certificate.location=c.pem;ssl.key.location=k.pem;ssl.key.password=p"
    assert security(taken(f"security.protocol=ssl;{files}")) is context
    context.assert_called_once_with(cafile="ca.pem")
    context.load_cert_chain.assert_called_once_with("c.pem", "k.pem", "p")


@pytest.mark.parametrize(
    ("config", "name_is_checked", "mode"),
    [
        ("", True, ssl.CERT_REQUIRED),
        ("ssl.endpoint.identification.algorithm=none", False, ssl.CERT_REQUIRED),
        ("ssl.endpoint.identification.algorithm=https", True, ssl.CERT_REQUIRED),
        ("enable.ssl.certificate.verification=false", False, ssl.CERT_NONE),
        ("enable.ssl.certificate.verification=true", True, ssl.CERT_REQUIRED),
    ],
)
def test_name_and_certificate_are_checked_unless_told_otherwise(config: str, name_is_checked: bool, mode: int) -> None:
    made = security(taken(f"security.protocol=ssl;{config}"))
    assert made is not None
    assert (made.check_hostname, made.verify_mode) == (name_is_checked, mode)


# what the client is given


async def test_what_is_set_is_what_the_client_is_started_with() -> None:
    config = "client.id=me;compression.codec=gzip;enable.idempotence=true;request.timeout.ms=700"
    link = Link(taken(config, fetch_size=1_234), None)
    producer, plain, consumer = link.producer(1_000), Link(taken(), None).producer(1_000), link.consumer()
    try:
        assert link.timeout == 0.7
        assert producer.client._client_id == "me"
        assert producer.client._request_timeout_ms == 700
        assert producer._compression_type == "gzip"
        assert producer._txn_manager is not None  # idempotent
        assert consumer._max_partition_fetch_bytes == 1_234
        assert consumer._enable_auto_commit is False
        assert plain._txn_manager is None
    finally:
        producer._closed = plain._closed = consumer._closed = True  # for the client's own complaint


@pytest.mark.parametrize(
    "wrong",
    [{"timeout": 0.05}, {"session": 0.1}, {"lease": 0.1}, {"partition": -1}, {"initialoffset": "middle"}],
)
def test_an_option_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        KafkaOptions("h:1", **wrong)


@pytest.mark.parametrize(
    ("text", "password"),
    [
        ("sasl.password='a;b=c';acks=all", "a;b=c"), ('sasl.password="a;b" ; acks=all', "a;b"),
        ("acks=all;sasl.password='it''s'", "it's"), ('sasl.password="say ""a"""', 'say "a"'),
        ("sasl.password='a\"b'", 'a"b'), ("sasl.password=a'b ;;acks=all;", "a'b"), ("sasl.password=p= x", "p= x"),
    ],
)  # fmt: skip
def test_a_value_with_a_semicolon_stands_in_quotes(text: str, password: str) -> None:
    assert settings(KafkaOptions("h:1", globalconfig=text)).password == password


@pytest.mark.parametrize(
    "text",
    [
        "sasl.password=abc;hunter2", "sasl.password=abc;hunter2=x", "sasl.password='abc;hunter2", "'hunter2'=a",
        "sasl.password='abc'hunter2", "ssl.key.password=abc;hunter2=x;acks=all", "sasl.password='abc;x' hunter2=1",
    ],
)  # fmt: skip
def test_no_error_shows_a_part_of_a_password_that_is_not_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match=r"stands in quotes: sasl\.password='a;b'") as caught:
        settings(KafkaOptions("h:1", globalconfig=text))
    assert "hunter2" not in f"{caught.value} {vars(caught.value)}"


@pytest.mark.parametrize("hostport", ["alice:hunter2@kafka", "alice:hunter2@kafka:9092", "k:1,a:hunter2@k:2"])
def test_a_user_in_hostport_is_refused_and_not_shown(hostport: str) -> None:
    with pytest.raises(ConfigError, match=r"the user is sasl\.username") as caught:
        KafkaOptions(hostport)
    assert "hunter2" not in f"{caught.value} {vars(caught.value)}"


@pytest.mark.parametrize("request_of", [SaslAuthenticateRequest_v0, SaslAuthenticateRequest_v1])
def test_the_client_logs_no_password_at_debug(request_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "aiokafka"):
        logging.getLogger("aiokafka.conn").debug("Request to %s:%d %d: %s", "h", 1, 2, request_of(b"\0alice\0hunter2"))
        logging.getLogger("aiokafka.conn").debug("Request to %s: %s", "h", MetadataRequest_v0(["topic"]))
    assert "hunter2" not in caplog.text
    assert f"Request to h:1 2: {request_of.__name__}(***)" in caplog.text
    assert "topics=['topic']" in caplog.text
