"""From a bus's name to its driver. Built-in names are a table; others come from entry points of installed packages.

A driver is a module with `Options`, a frozen dataclass, and `async open_bus(options) -> Bus`. It is imported when it is
asked for, so a name costs nothing until then.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

from .bus import Bus
from .errors import ConfigError, NotInstalled

GROUP = "esp_pubsub.transports"
_BUILT_IN = {"embedded": "esp_pubsub.transports.embedded", "kafka": "esp_pubsub.transports.kafka"}


class Driver(Protocol):
    """What a driver's module has."""

    Options: type[Any]
    open_bus: Callable[[Any], Awaitable[Bus]]


def names() -> list[str]:
    """The buses that can be named."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def driver(name: str) -> Driver:
    """The driver of a bus. ConfigError for a name nobody has, NotInstalled if its extra is missing."""
    module = _BUILT_IN.get(name) or next((p.value for p in entry_points(group=GROUP) if p.name == name), None)
    if module is None:
        known = names()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"no bus is called {name!r}; {hint}", bus=name)
    try:
        found: Driver = import_module(module)
    except ImportError as e:
        raise NotInstalled(
            f"the bus {name!r} needs {e.name}, which is not installed: pip install 'esp-pubsub[{name}]'", extra=name
        ) from e
    return found
