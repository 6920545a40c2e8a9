"""What can be set on Solace: the keys of `solace.cfg`, most of them what SAS has in its list `session`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from esp_pubsub.config import DURATION, SIZE, Secret
from esp_pubsub.errors import ConfigError

_HOST = re.compile(r"((tcp|tcps|ws|wss)://)?([^\s:,/\[\]]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_ENCRYPTED = ("tcps://", "wss://")


@dataclass(frozen=True, slots=True)
class SolaceOptions:
    """Keywords of `init`, keys of the section `solace` in solace.cfg, ESP_PUBSUB_<KEY> in the environment."""

    host: str
    """Where a broker is, `tcp://name:55555` or `tcps://name:55443`; several with commas are tried in turn."""
    username: str
    password: str = field(default=Secret(""), repr=False)
    vpn_name: str = "default"
    """The message VPN."""
    buspersistence: bool = False
    """True: guaranteed messages, groups have durable queues. False: direct messages, what nobody reads now is gone."""
    queuename: str | None = None
    """The prefix of a subscriber's durable queue, which is its group; for subscribers that name none."""
    replaylog: bool = False
    """The broker keeps a replay log: a new group may start at what was written before it."""
    sslcacert: Path | None = None
    """A folder of PEM or DER files: who may have signed the broker's certificate."""
    sslcert: Path | None = None
    sslkey: Path | None = None
    compression: int = 0
    """From 1, fast, to 9, small; 0: none. The port must be one that expects it."""
    keepalive: float = field(default=1.0, metadata=DURATION)
    """The time between signs of life; after three without an answer the link is taken for dead."""
    queuesize: int = field(default=64 << 20, metadata=SIZE)
    """The most that waits here for a reader of direct messages; the oldest is dropped first, and that is told."""
    maxmessage: int = field(default=10_000_000, metadata=SIZE)
    """The largest message. Queues take 10,000,000 bytes unless their max-message-size says otherwise."""
    timeout: float = field(default=5.0, metadata=DURATION)
    """How long the broker may leave a question or a message unanswered before that is trouble."""

    def __post_init__(self) -> None:
        if not all(_HOST.fullmatch(each) for each in self.host.split(",")):
            raise ConfigError(
                f"host is tcp://name:55555 or tcps://name:55443, several with commas, not {self.host!r}", key="host"
            )
        if not 0 <= self.compression <= 9:
            raise ConfigError("compression is from 0 to 9", key="compression")
        if self.keepalive < 0.05 or self.timeout < 0.1:
            raise ConfigError("keepalive is at least 50ms, timeout at least 100ms", key="keepalive")
        if self.queuesize < 1 or self.maxmessage < 1:
            raise ConfigError("queuesize and maxmessage are more than 0")
        if (self.sslcert is None) != (self.sslkey is None):
            raise ConfigError("sslcert and sslkey are given together", key="sslcert")
        if (self.sslcacert or self.sslcert) and not self.encrypted:
            raise ConfigError("TLS files are given, but no host begins with tcps:// or wss://", key="host")
        if self.encrypted and self.sslcacert is None:
            raise ConfigError("TLS needs sslcacert, the folder of who may have signed the certificate", key="sslcacert")

    @property
    def encrypted(self) -> bool:
        """Whether a host is reached by TLS."""
        return any(each.startswith(_ENCRYPTED) for each in self.host.split(","))

    @property
    def groupid(self) -> str | None:
        """The group of a subscriber that names none."""
        return self.queuename if self.buspersistence else None


def plain(password: str) -> str:
    """What stands behind a secret."""
    return password.reveal() if isinstance(password, Secret) else password
