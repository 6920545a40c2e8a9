"""What things are called on the broker."""

from __future__ import annotations

import hashlib
import re

from esp_pubsub.errors import BusRefused

OURS = "esp-pubsub"
LONGEST_QUEUE = 200
LONGEST_TOPIC = 250
_NOT_IN_QUEUES = re.compile(r"[^a-zA-Z0-9\-_.:@#,/ ]")


def topic_name(topic: str) -> str:
    """A topic, as it is. BusRefused for one that is too long."""
    if len(topic.encode()) > LONGEST_TOPIC:
        raise BusRefused(f"a topic has at most {LONGEST_TOPIC} bytes, {topic} has more: use shorter names")
    return topic


def queue_name(name: str) -> str:
    """As the name of a queue: what it cannot have is written in hexadecimal between two '+'; a long one is shortened
    to a digest.
    """
    quoted = _NOT_IN_QUEUES.sub(lambda found: "+" + found[0].encode().hex() + "+", name)
    if len(quoted) > LONGEST_QUEUE or quoted[0] in "#/" or quoted[-1] == "/" or "//" in quoted:
        return f"{OURS}/{_digest(name)}"
    return quoted


def group_queue(topic: str, group: str) -> str:
    """What a group has to read, named as SAS names a subscriber's queue: prefix and topic."""
    return queue_name(f"{group}@{topic}")


def value_queue(topic: str, key: str) -> str:
    """Where a retained value stands."""
    return queue_name(f"{topic}#{key}")


def value_topic(topic: str, key: str) -> str:
    """What is published to get there."""
    return f"{OURS}/value/{_digest(f'{topic}#{key}')}"


def probe() -> tuple[str, str]:
    """A queue that serves nothing but to find out whether there can be values, and its topic."""
    return value_queue(OURS, "values"), value_topic(OURS, "values")


def last_value_queue(topic: str) -> str:
    """The queue, which an administrator makes, that keeps the last message of a topic."""
    return queue_name(f"last@{topic}")


def flow_queue(line: str) -> str:
    """The exclusive queue of a failover group."""
    return queue_name(f"flow@{line}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
