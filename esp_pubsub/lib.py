"""SAS's three calls: SetPubsubLib, Init, Shutdown."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

from .client import Client, Opening, open_client
from .errors import EspError
from .notices import Notice
from .registry import chosen_bus, driver


class _Choice(NamedTuple):
    bus: str | None
    config: str | os.PathLike[str] | None
    settings: dict[str, Any]


_NONE = _Choice(None, None, {})
_choice = _NONE
_clients: WeakSet[Client] = WeakSet()


def set_pubsub_lib(bus: str, config: str | os.PathLike[str] | None = None, **settings: Any) -> None:
    """Choose the bus for every `init` that names none. Raises at once for an unknown name or a missing extra."""
    global _choice
    driver(bus)
    _choice = _Choice(bus, config, settings)


def init(
    bus: str | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    on_notice: Callable[[Notice], None] | None = None,
    **settings: Any,
) -> Opening[Client]:
    """A client: `client = await init()`, or `async with init() as client`.

    Without `bus`: the one of `set_pubsub_lib`, else that of the environment's ESP_PUBSUB_BUS, else the embedded bus.
    `config` names the bus's cfg file, `settings` are its keys and win over the file. `connect_timeout`, or
    ESP_PUBSUB_CONNECT_TIMEOUT, is how long a bus that is not there yet is tried again, such as `60s`; without it, it is
    tried once. `on_notice` is told of gaps, reconnects and trouble; without it they are logged.
    """
    choice = _choice if bus in (None, _choice.bus) else _Choice(str(bus), None, {})
    name = choice.bus or chosen_bus()

    async def opened() -> Client:
        client = await open_client(name, config or choice.config, on_notice, {**choice.settings, **settings})
        _clients.add(client)
        return client

    return Opening(opened)


async def shutdown() -> None:
    """Close every client that is open on this loop, and forget the choice of `set_pubsub_lib`.

    What the first one could not flush raises, when all are closed.
    """
    global _choice
    _choice = _NONE
    failures: list[Exception] = []
    for client in list(_clients):
        if client.is_here():
            try:
                await client.aclose()
            except EspError as error:
                failures.append(error)
    if failures:
        raise failures[0]
