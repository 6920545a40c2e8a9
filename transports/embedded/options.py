"""What can be set on the embedded bus."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from esp_pubsub.config import DURATION, SIZE
from esp_pubsub.errors import ConfigError

from .place import default_directory


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """Keywords of `init`, keys of the section `embedded` in a cfg file, ESP_PUBSUB_<KEY> in the environment.

    All clients of one directory should set the same; of ring sizes, each writer trims to its own.
    """

    dir: Path = field(default_factory=default_directory)
    """The bus directory; whoever names the same one is on the same bus."""
    durability: str = "os"
    """What an acknowledgement means: `os` survives the death of any process, `disk` also a power cut."""
    ring_size: int = field(default=1 << 30, metadata=SIZE)
    """The most a topic keeps, in bytes; its oldest batches go first."""
    ring_records: int = 10_000_000
    """The most a topic keeps, in messages."""
    lease: float = field(default=10.0, metadata=DURATION)
    """How long a group waits for a reader that lives but does not read, before another one takes its place."""
    deadline: float = field(default=5.0, metadata=DURATION)
    """How long a write may wait for a lock before it is trouble."""

    def __post_init__(self) -> None:
        if self.ring_size < 1 << 16 or self.ring_records < 1:
            raise ConfigError("ring_size is at least 64KiB and ring_records at least 1")
        if self.lease < 0.1 or self.deadline < 0.1:
            raise ConfigError("lease and deadline are at least 100ms")
        if self.durability not in ("os", "disk"):
            raise ConfigError(f"durability is os or disk, not {self.durability!r}")
