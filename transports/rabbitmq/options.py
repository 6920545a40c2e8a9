"""What can be set on RabbitMQ: the keys of `rabbitmq.cfg`, under SAS's names where SAS has them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from esp_pubsub.config import DURATION, SIZE, Secret, without_user
from esp_pubsub.errors import ConfigError

MOST = 65_535  # of messages that a reader may be handed before it lets go
Mode = Literal["direct", "persistent", "stream"]


@dataclass(frozen=True, slots=True)
class RabbitOptions:
    """Keywords of `init`, keys of the section `rabbitmq` in rabbitmq.cfg, ESP_PUBSUB_<KEY> in the environment."""

    host: str = "localhost"
    """Where a node is; several, of one cluster, with commas, each with its own `:port` if it has one."""
    port: int = 0
    """The port of hosts that name none; 0: 5672, or 5671 with `ssl`."""
    vhost: str = "/"
    """The virtual host."""
    userid: str = "guest"
    """The user; brokers let guest in from their own machine only."""
    password: str = field(default=Secret("guest"), repr=False)
    """Its password."""
    exchange: str = "esp-pubsub"
    """The topic exchange of all topics; it is made if it is not there."""
    mode: str | None = None
    """direct, persistent or stream; None: what `buspersistence` says. One of the two is needed."""
    buspersistence: bool | None = None
    """True: persistent, groups have durable queues and messages are written to disk. False: direct, what nobody reads
    now is gone."""
    queuename: str | None = None
    """The prefix of a subscriber's durable queue, which is its group; for subscribers that name none."""
    quorum: bool = False
    """Groups have quorum queues, which live on several nodes."""
    ssl: bool = False
    """TLS, on both ports."""
    sslcacert: Path | None = None
    """PEM file of who signed the broker's certificate; None: as the system trusts."""
    sslcert: Path | None = None
    """PEM file of our certificate, if the broker asks for one."""
    sslkey: Path | None = None
    """PEM file of its key."""
    contenttype: str | None = None
    """The content type that messages are sent with."""
    headers: str = ""
    """Headers that messages are sent with: `name=value;name=value`."""
    ackwindow: float = field(default=0.0, metadata=DURATION)
    """How long a group may leave confirmed messages unacknowledged; 0: each confirm is stored before it returns."""
    acktimer: float = field(default=1.0, metadata=DURATION)
    """How often a group looks for what has been unacknowledged for `ackwindow`."""
    prefetch: int = 5_000
    """How many messages the broker hands to a reader that has not let them go; a group that confirms less often than
    this waits for itself."""
    queuesize: int = field(default=64 << 20, metadata=SIZE)
    """The most that waits in the broker for a reader without a group; the oldest is dropped first, and that is told."""
    maxmessage: int = field(default=16 << 20, metadata=SIZE)
    """The largest message. Brokers take 16 MiB unless their max_message_size says otherwise."""
    streamport: int = 0
    """Where hosts speak the stream protocol; 0: 5552, or 5551 with `ssl`."""
    streamsize: int = field(default=0, metadata=SIZE)
    """The most that a stream which is made keeps in bytes, from 64 MiB on; 0: without a bound."""
    retention: float = field(default=0.0, metadata=DURATION)
    """How long it keeps messages; 0: without a bound. The broker drops whole segments."""
    timeout: float = field(default=5.0, metadata=DURATION)
    """How long the broker may leave a question or a message unanswered before that is trouble."""
    heartbeat: float = field(default=2.0, metadata=DURATION)
    """Whole seconds between signs of life. A broker or a client is taken for dead after about three of them."""

    def __post_init__(self) -> None:
        self._check_mode()
        if not all(re.fullmatch(r"([^\s:,@\[\]]+|\[[^\]]+\])(:[0-9]{1,5})?", each) for each in self.host.split(",")):
            shown = without_user(plain(self.host))
            raise ConfigError(
                f"host is a name, several with commas, each with or without :port, not {shown!r}; the user is userid",
                key="host",
            )
        if not re.fullmatch(r"[a-zA-Z0-9\-_.:@#,/ ]{1,255}", self.exchange):
            raise ConfigError("exchange has letters, digits, blanks and -_.:@#,/ in its name", key="exchange")
        if not 1 <= self.prefetch <= MOST:
            raise ConfigError(f"prefetch is from 1 to {MOST}, which is what AMQP can say", key="prefetch")
        if self.heartbeat < 1 or self.heartbeat % 1 or self.timeout < 0.1:
            raise ConfigError("heartbeat is at least 1s, in whole seconds; timeout is at least 100ms", key="heartbeat")
        if self.acktimer <= 0 or self.queuesize < 1 or self.maxmessage < 1:
            raise ConfigError("acktimer, queuesize and maxmessage are more than 0")
        if (self.sslcert is None) != (self.sslkey is None):
            raise ConfigError("sslcert and sslkey are given together", key="sslcert")
        if not self.ssl and (self.sslcacert or self.sslcert):
            raise ConfigError("TLS files are given, but ssl is not true", key="ssl")
        if self.quorum and self.kind == "direct":
            raise ConfigError("quorum queues are durable: set buspersistence = true", key="quorum")
        self.header_table  # noqa: B018  # complains

    def _check_mode(self) -> None:
        if self.mode is None and self.buspersistence is None:
            raise ConfigError(
                "say the mode: stream keeps blocks for every reader, persistent keeps them for groups, direct loses "
                "what nobody reads now. Write mode = stream in rabbitmq.cfg, init(mode='stream'), or "
                "ESP_PUBSUB_MODE=stream",
                key="mode",
            )
        if self.mode not in (None, "direct", "persistent", "stream"):
            raise ConfigError(f"mode is direct, persistent or stream, not {self.mode!r}", key="mode")

    @property
    def kind(self) -> Mode:
        """The mode that follows from `mode` and `buspersistence`."""
        return self.mode or ("persistent" if self.buspersistence else "direct")  # type: ignore[return-value]

    @property
    def groupid(self) -> str | None:
        """The group of a subscriber that names none."""
        return self.queuename if self.kind != "direct" else None

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each node."""
        default = self.port or (5671 if self.ssl else 5672)
        found = []
        for each in self.host.split(","):
            name, colon, port = each.rpartition(":") if not each.endswith("]") else (each, "", "")
            found.append((name.strip("[]"), int(port)) if colon else (each.strip("[]"), default))
        return found

    @property
    def stream_addresses(self) -> list[tuple[str, int]]:
        """The same for streams; a port behind a host is that of AMQP."""
        port = self.streamport or (5551 if self.ssl else 5552)
        return [(host, port) for host, _ in self.addresses]

    @property
    def header_table(self) -> dict[str, str]:
        """`headers` as a table."""
        pairs = [entry.partition("=") for entry in self.headers.split(";") if entry.strip()]
        if not all(name.strip() and equals for name, equals, _ in pairs):
            raise ConfigError("headers is name=value, several with ';'", key="headers")
        return {name.strip(): value.strip() for name, _, value in pairs}


def plain(password: str) -> str:
    """What stands behind a secret."""
    return password.reveal() if isinstance(password, Secret) else password
