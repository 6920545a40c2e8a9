"""The bus `memory`, for tests: an embedded bus of this process alone, of which nothing is left when the process ends.

Clients that give the same `name` are on the same bus.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from esp_pubsub.bus import Bus
from esp_pubsub.errors import ConfigError
from esp_pubsub.registry import driver

_NAME = re.compile("[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True)
class Options:
    """Keywords of `init`, keys of the section `memory` in a cfg file, ESP_PUBSUB_<KEY> in the environment."""

    name: str = "memory"
    """Which bus of this process."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError("name has 1 to 32 letters, digits, '_' and '-'", key="name")


async def open_bus(options: Options) -> Bus:
    """Open the bus of that name, making it if it is not there yet."""
    embedded: Any = await asyncio.to_thread(driver, "embedded")
    home = await asyncio.to_thread(_home, os.getpid())
    bus: Bus = await embedded.open_bus(embedded.Options(dir=home / options.name))
    return bus


@cache
def _home(pid: int) -> Path:
    """The folder of this process; a child that was forked has another one."""
    home = Path(tempfile.mkdtemp(prefix="esp"))

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(home, ignore_errors=True)

    atexit.register(remove)
    return home
