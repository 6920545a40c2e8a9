"""What can be set on Kafka: the keys of `kafka.cfg`, with librdkafka's own settings in `globalconfig`, `topicconfig`.

SAS's client is librdkafka, ours is not. So each of its settings is mapped to what we have (`_MEANS`), is true here
anyway (`_SO_ANYWAY`), or is refused with what to do instead (`_INSTEAD`); none is passed over in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from esp_pubsub.bus import Start
from esp_pubsub.config import DURATION, SIZE, Secret, without_user
from esp_pubsub.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """Keywords of `init`, keys of the section `kafka` in kafka.cfg, ESP_PUBSUB_<KEY> in the environment."""

    hostport: str
    """Brokers to begin with: `host:port,host:port`."""
    partition: int = 0
    """The one partition that a topic's order lives in."""
    initialoffset: str | None = None
    """Where a subscriber begins that says nothing else: smallest, largest or a number."""
    groupid: str | None = None
    """The group of a subscriber that names none."""
    globalconfig: str = ""
    """librdkafka's global settings: `security.protocol=sasl_ssl;sasl.mechanism=PLAIN`."""
    topicconfig: str = ""
    """librdkafka's topic settings."""
    metatopic: str | None = None
    """SAS's topic for metadata replies; accepted, and not needed here: schemas are retained values."""
    replication: int = 0
    """Copies of a topic that is made; 0: as the broker has it set."""
    retention: float = field(default=0.0, metadata=DURATION)
    """How long a topic that is made keeps messages; 0: as the broker has it set."""
    valuestopic: str = "esp-pubsub.values"
    """The compacted topic of schemas, runs and the like; the same for all clients."""
    timeout: float = field(default=5.0, metadata=DURATION)
    """How long the broker may leave a request unanswered before that is trouble."""
    session: float = field(default=6.0, metadata=DURATION)
    """How long a group waits for a reader that died; brokers take at least 6 s unless told otherwise."""
    lease: float = field(default=60.0, metadata=DURATION)
    """How long a group waits for a reader that lives but does not read."""
    tokenfile: str | None = None
    """With OAUTHBEARER: the file that holds the token, read again at each connection."""
    fetch_size: int = field(default=4 << 20, metadata=SIZE)
    """The most that is fetched at once; one larger message comes alone."""

    def __post_init__(self) -> None:
        if self.partition < 0:
            raise ConfigError(
                f"partition is from 0 on, not {self.partition}: blocks have one order, and so has one partition; "
                "failover rests on it",
                key="partition",
            )
        if not all(
            (found := re.fullmatch(r"[^\s@]+:([0-9]{1,5})", each)) and 0 < int(found[1]) < 1 << 16
            for each in self.hostport.split(",")
        ):
            shown = without_user(_plain(self.hostport))
            raise ConfigError(
                f"hostport is host:port, several with commas, not {shown!r}; the user is sasl.username in globalconfig",
                key="hostport",
            )
        if self.timeout < 0.1 or self.session < 0.3 or self.lease < 0.3:
            raise ConfigError("timeout is at least 100ms, session and lease are at least 300ms")
        if self.initialoffset is not None:
            _start(self.initialoffset)

    @property
    def start(self) -> Start | None:
        """`initialoffset` in our words."""
        return None if self.initialoffset is None else _start(self.initialoffset)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to talk to the brokers: the options, with librdkafka's settings taken in."""

    options: KafkaOptions
    client_id: str = "esp-pubsub"
    protocol: str = "PLAINTEXT"
    mechanism: str = "PLAIN"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    key_password: str | None = field(default=None, repr=False)
    verify: bool = True
    verify_name: bool = True
    compression: str | None = None
    idempotent: bool = False
    max_bytes: int | None = None
    heartbeat: float = 0.3

    @property
    def encrypted(self) -> bool:
        """Whether connections are TLS."""
        return self.protocol.endswith("SSL")


def settings(options: KafkaOptions) -> Settings:
    """Take in `globalconfig` and `topicconfig`. ConfigError names what has no meaning here, and the way out."""
    taken = Settings(options)
    for place in ("globalconfig", "topicconfig"):
        text = getattr(options, place)
        before = ""
        for name, value in _entries(place, _plain(text)):
            if before.endswith("password") and name not in _KNOWN:
                raise _unreadable(place, before)  # it may be the rest of one
            taken, before = _take(taken, place, name, value), name
    if taken.protocol.startswith("SASL") and taken.mechanism != "OAUTHBEARER" and taken.username is None:
        raise ConfigError("security.protocol is SASL, and there is no sasl.username", key="globalconfig")
    if taken.mechanism == "OAUTHBEARER" and taken.protocol.startswith("SASL") and options.tokenfile is None:
        raise ConfigError("sasl.mechanism OAUTHBEARER needs tokenfile, the file that holds the token", key="tokenfile")
    return taken


def _plain(text: str) -> str:
    return text.reveal() if isinstance(text, Secret) else text


def _entries(place: str, text: str) -> Iterator[tuple[str, str]]:
    """Names and values; a quote inside a quoted value stands there twice."""
    at, before = 0, ""
    while at < len(text):
        found = _ENTRY.match(text, at)
        if found is None:
            raise _unreadable(place, before)
        name, single, double, bare = found.groups()
        if name is not None:
            values = (single or "").replace("''", "'"), (double or "").replace('""', '"'), (bare or "").rstrip()
            yield name, next(filter(None, values), "")
            before = name
        at = found.end()


def _unreadable(place: str, before: str) -> ConfigError:
    """It shows nothing of what it cannot read: that may be a part of a password."""
    where = f"after the value of {before}" if before else "at its beginning"
    return ConfigError(
        f"{place}: expected name=value, several with ';', {where}; a value that has ';' in it, or begins with a quote, "
        "stands in quotes: sasl.password='a;b'",
        key=place,
    )


def _take(taken: Settings, place: str, name: str, value: str) -> Settings:
    if name in _SO_ANYWAY:
        if (allowed := _SO_ANYWAY[name]) and value.lower() not in allowed:
            raise ConfigError(f"{place}: {name} is {' or '.join(allowed)} here, always, not {value!r}", key=name)
        return taken
    if name in _INSTEAD:
        raise ConfigError(f"{place}: {name} has no meaning here; {_INSTEAD[name]}", key=name)
    if name not in _MEANS:
        near = get_close_matches(name, [*_MEANS, *_SO_ANYWAY], 1, 0.0)[0]
        raise ConfigError(f"{place}: {name!r} is not known here; the nearest that is: {near!r}", key=name)
    where, convert = _MEANS[name]
    try:
        converted = convert(value)
    except ValueError:
        raise ConfigError(f"{place}: {name} is {convert.__doc__}", key=name) from None
    if where.startswith("options."):
        return replace(taken, options=replace(taken.options, **{where.removeprefix("options."): converted}))
    changed: dict[str, Any] = {where: converted}
    return replace(taken, **changed)


def _start(text: str) -> Start:
    found: Start | None = {"smallest": "earliest", "earliest": "earliest", "largest": "latest", "latest": "latest"}.get(
        text  # type: ignore[assignment]
    )
    if found is not None:
        return found
    if not text.isdecimal():
        raise ConfigError(f"initialoffset is smallest, largest or a number, not {text!r}", key="initialoffset")
    return int(text)


def _text(value: str) -> str:
    """a text"""
    return value


def _switch(value: str) -> bool:
    """true or false"""
    return value.lower() in ("true", "1") or _not(value, "false", "0")


def _not(value: str, *allowed: str) -> bool:
    if value.lower() not in allowed:
        raise ValueError
    return False


def _seconds(value: str) -> float:
    """a number of milliseconds"""
    return int(value) / 1000


def _number(value: str) -> int:
    """a whole number"""
    return int(value)


def _one_of(*words: str) -> Callable[[str], str]:
    def convert(value: str) -> str:
        if value.upper() not in words:
            raise ValueError
        return value.upper()

    convert.__doc__ = f"one of {', '.join(words).lower()}"
    return convert


def _compression(value: str) -> str | None:
    """none, gzip, snappy, lz4 or zstd"""
    if value not in ("none", "gzip", "snappy", "lz4", "zstd"):
        raise ValueError
    return None if value == "none" else value


def _name_check(value: str) -> bool:
    """none or https"""
    return value.lower() == "https" or _not(value, "none")


_protocol = _one_of("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_mechanism = _one_of("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_MEANS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "bootstrap.servers": ("options.hostport", _text),
    "metadata.broker.list": ("options.hostport", _text),
    "client.id": ("client_id", _text),
    "group.id": ("options.groupid", _text),
    "auto.offset.reset": ("options.initialoffset", _text),
    "security.protocol": ("protocol", _protocol),
    "sasl.mechanism": ("mechanism", _mechanism),
    "sasl.mechanisms": ("mechanism", _mechanism),
    "sasl.username": ("username", _text),
    "sasl.password": ("password", _text),
    "ssl.ca.location": ("ca", _text),
    "ssl.certificate.location": ("certificate", _text),
    "ssl.key.location": ("key", _text),
    "ssl.key.password": ("key_password", _text),
    "enable.ssl.certificate.verification": ("verify", _switch),
    "ssl.endpoint.identification.algorithm": ("verify_name", _name_check),
    "compression.codec": ("compression", _compression),
    "compression.type": ("compression", _compression),
    "enable.idempotence": ("idempotent", _switch),
    "message.max.bytes": ("max_bytes", _number),
    "request.timeout.ms": ("options.timeout", _seconds),
    "socket.timeout.ms": ("options.timeout", _seconds),
    "message.timeout.ms": ("options.timeout", _seconds),
    "delivery.timeout.ms": ("options.timeout", _seconds),
    "session.timeout.ms": ("options.session", _seconds),
    "heartbeat.interval.ms": ("heartbeat", _seconds),
    "max.poll.interval.ms": ("options.lease", _seconds),
    "fetch.message.max.bytes": ("options.fetch_size", _number),
    "max.partition.fetch.bytes": ("options.fetch_size", _number),
    "fetch.max.bytes": ("options.fetch_size", _number),
}
_SO_ANYWAY: dict[str, tuple[str, ...]] = {  # what they are here; none: whatever is said changes nothing
    "acks": ("all", "-1"),
    "request.required.acks": ("all", "-1"),
    "enable.auto.commit": ("false",),
    "auto.commit.enable": ("false",),
    "enable.auto.offset.store": ("false",),
    "enable.sparse.connections": (),
    "linger.ms": (),
    "queue.buffering.max.ms": (),
    "batch.size": (),
    "batch.num.messages": (),
    "queue.buffering.max.messages": (),
    "queue.buffering.max.kbytes": (),
    "max.in.flight": (),
    "max.in.flight.requests.per.connection": (),
    "socket.keepalive.enable": (),
    "socket.nagle.disable": (),
    "log.connection.close": (),
    "broker.address.family": (),
    "api.version.request": (),
    "fetch.wait.max.ms": (),
    "topic.metadata.refresh.interval.ms": (),
    "statistics.interval.ms": (),
}
_INSTEAD = {
    "retries": "a publisher goes back by itself until it is closed, and readers drop what comes twice",
    "message.send.max.retries": "a publisher goes back by itself until it is closed, and readers drop what comes twice",
    "partitioner": "a topic's blocks stand in one partition: set partition",
    "transactional.id": "blocks have ids, and readers drop what comes twice",
    "isolation.level": "nothing here is written in transactions",
    "sasl.kerberos.service.name": "Kerberos is not offered: use PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER",
    "sasl.oauthbearer.config": "put the token into a file and set tokenfile",
    "sasl.oauthbearer.token.endpoint.url": "put the token into a file and set tokenfile",
    "ssl.keystore.location": "set ssl.certificate.location and ssl.key.location to PEM files",
    "ssl.ca.pem": "write it to a file and set ssl.ca.location",
    "ssl.certificate.pem": "write it to a file and set ssl.certificate.location",
    "ssl.key.pem": "write it to a file and set ssl.key.location",
    "ssl.cipher.suites": "the system's OpenSSL chooses",
    "debug": "set the level of the loggers aiokafka and esp_pubsub",
    "log_level": "set the level of the loggers aiokafka and esp_pubsub",
    "offset.store.method": "set a group; confirm stores its position with the broker",
    "produce.offset.report": "a delivery says acked",
    "group.instance.id": "readers of a group take each other's place without it",
    "partition.assignment.strategy": "a topic has one partition and its group one reader at a time",
}
_KNOWN = _MEANS.keys() | _SO_ANYWAY.keys() | _INSTEAD.keys()
_ENTRY = re.compile(
    r"""\s*+(?:([^\s=;'"]++)\s*+=\s*+(?:'((?:[^']++|'')++)'|"((?:[^"]++|"")++)"|([^\s;'"][^;]*+))\s*+)?(?:;|\Z)"""
)
