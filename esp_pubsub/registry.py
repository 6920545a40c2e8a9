"""From the name of a bus or an election to its driver. Built-in ones are a table; others come from entry points.

A bus's driver is a module with `Options`, a frozen dataclass, and `async open_bus(options) -> Bus`. An election's is
one with `open_election(place, group, member) -> Election`. Either is imported when it is asked for, so a name costs
nothing until then.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

from .bus import Bus, Election
from .errors import ConfigError, NotInstalled, NotOffered

GROUP, ELECTIONS = "esp_pubsub.transports", "esp_pubsub.elections"
_BUSES = {name: f"esp_pubsub.transports.{name}" for name in ("embedded", "kafka", "memory", "rabbitmq", "solace")}
_WITHDRAWN = {
    "tervela": "Tervela has no driver: its vendor and SAS have withdrawn it. Use solace, rabbitmq or kafka, under the "
    "same URLs; esp_pubsub.transports.tervela reads what a client.config says"
}
_ELECTIONS = {"zookeeper": "esp_pubsub.transports.zookeeper"}


class Driver(Protocol):
    """What a bus's module has."""

    Options: type[Any]
    open_bus: Callable[[Any], Awaitable[Bus]]


def chosen_bus() -> str:
    """The bus of whoever names none: that of the environment, else the embedded one."""
    return os.environ.get("ESP_PUBSUB_BUS") or "embedded"


def names() -> list[str]:
    """The buses that can be named."""
    return sorted({*_BUSES, *(point.name for point in entry_points(group=GROUP))})


def driver(name: str) -> Driver:
    """The driver of a bus. ConfigError for a name nobody has, NotInstalled if its extra is missing. May import, so it
    blocks.
    """
    found: Driver = _module("bus", name, GROUP, _BUSES)
    return found


def election(kind: str) -> Callable[[str, str], Election]:
    """What makes an election of this kind, for a group and a member's name; `log` is the core's own and not here.

    `kind` is a name, with the place of its service where it has one: `zookeeper://host:port`. Raises and blocks as
    `driver` does.
    """
    name, _, place = kind.partition("://")
    return partial(_module("election", name, ELECTIONS, {**_ELECTIONS, "log": ""}).open_election, place)


def _module(what: str, name: str, group: str, built_in: Mapping[str, str]) -> Any:
    points = {point.name: point.value for point in entry_points(group=group)}
    module = built_in.get(name) or points.get(name)
    if module is None:
        if what == "bus" and name in _WITHDRAWN:
            raise NotOffered(_WITHDRAWN[name], capability=name)
        known = sorted({*built_in, *points})
        if name in built_in:
            raise ConfigError(f"the {what} {name!r} has no place: write it without ://", **{what: name})
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"no {what} is called {name!r}; {hint}", **{what: name})
    try:
        return import_module(module)
    except ImportError as e:
        raise NotInstalled(
            f"the {what} {name!r} needs {e.name}, which is not installed: pip install 'esp-pubsub[{name}]'", extra=name
        ) from e
