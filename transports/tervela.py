"""Tervela, which its vendor and SAS have withdrawn: what its names and its client.config say, to move away. Pure.

There is no driver: `set_pubsub_lib("tervela")` says what to use instead.
"""

from __future__ import annotations

from esp_pubsub.address import Address, tervela_topic
from esp_pubsub.config import Secret, looks_secret
from esp_pubsub.errors import ConfigError

__all__ = ["INSTEAD", "metadata_topic", "read_config", "tervela_topic"]

INSTEAD = {
    "USERNAME": "username of solace.cfg, userid of rabbitmq.cfg",
    "PASSWORD": "password",
    "PRIMARY_TMX": "host of solace.cfg and rabbitmq.cfg, hostport of kafka.cfg",
    "SECONDARY_TMX": "a second place in host, or in hostport, with a comma",
    "LOGIN_TIMEOUT": "timeout",
    "GD_CONTEXT_NAME": "the group of a subscriber (queuename, groupid), or Failover's of a publisher",
    "GD_MAX_OUT": "nothing: a publisher keeps buffer_blocks, its PublisherOptions say how many",
}
"""What each name of a client.config is elsewhere."""


def metadata_topic(address: Address) -> str:
    """Where the name of the engine of a cluster was told."""
    return f"SAS.META.{address.hostport}"


def read_config(text: str, *, name: str = "client.config") -> dict[str, str]:
    """The lines `NAME value` of a client.config. ConfigError names the line and what was expected, and no value."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):  # elsewhere it may be of a password
            continue
        key, *value = line.split(None, 1)
        if key not in INSTEAD or not value or key in found:
            raise ConfigError(f"{name}:{number}: expected one of {', '.join(INSTEAD)}, once, and a value", source=name)
        found[key] = Secret(value[0].strip()) if looks_secret(key, value[0]) else value[0].strip()
    return found
