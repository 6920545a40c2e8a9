"""One client a process, for whoever comes next: Spark's workers live on between tasks, and opening costs more than
reading. It is closed when nobody has used it for a while, or the program ends; a process that Spark kills takes it too.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from esp_pubsub._portal import Portal
from esp_pubsub.bus import Feed
from esp_pubsub.client import Client
from esp_pubsub.errors import BusUnavailable, EspError, NotOffered
from esp_pubsub.lib import init

from .options import Options

T = TypeVar("T")
_IDLE = 30.0
_OPEN, _CLOSE = 30.0, 10.0
_lock = threading.Lock()
_kept: dict[tuple[object, ...], Connection] = {}


class Connection:
    """A client on a loop in a thread."""

    def __init__(self, options: Options) -> None:
        self.portal = Portal("esp spark")
        self.feeds: dict[str, tuple[int | None, int, Feed]] = {}
        """By topic: one that was left open, the topic's incarnation, and where the feed stands."""
        self.users = 0
        self.used_at = time.monotonic()
        self.wanted = threading.Event()
        """Set: it is to be closed at once."""

        async def opened() -> Client:
            settings: dict[str, Any] = dict(options.settings)
            return await init(options.bus, config=options.config, **settings)

        try:
            self.client = self.ask(_OPEN, opened)
        except BaseException:
            self.portal.close()
            raise
        self.bus = self.client.bus

    def ask(self, seconds: float, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run a coroutine function on the loop. BusUnavailable when time is up."""
        try:
            return self.portal.call_within(seconds, function, *arguments)
        except TimeoutError:
            raise BusUnavailable(
                f"no answer from the bus within {seconds:g} s (the option timeout says how long to wait)"
            ) from None

    def close(self) -> None:
        """Close the client and end the thread; bounded."""
        try:
            with suppress(EspError, RuntimeError):  # it is of no use any more; a program that ends has no more threads
                self.ask(_CLOSE, self.client.aclose)
        finally:
            self.portal.close()


@contextmanager
def connected(options: Options) -> Iterator[Connection]:
    """The process's connection for these options; what a task of its loop does for the user ends with this."""
    key = (os.getpid(), *options.connection)
    with _lock:
        found = _kept.get(key)
        if found is None:
            found = _kept[key] = Connection(options)
            threading.Thread(target=_close_when_idle, args=[key, found], name="esp spark idle", daemon=True).start()
        found.users += 1
    try:
        yield found
    finally:
        with _lock:
            found.users -= 1
            found.used_at = time.monotonic()


def _close_when_idle(key: tuple[object, ...], connection: Connection) -> None:
    while True:
        at_once = connection.wanted.wait(_IDLE)
        with _lock:
            if at_once or (not connection.users and time.monotonic() - connection.used_at >= _IDLE):
                _kept.pop(key, None)
                break
    connection.close()


def close_all() -> None:
    """Close the connections of this process, whoever uses them, and wait for that."""
    with _lock:
        found = list(_kept.values())
    for connection in found:
        connection.wanted.set()
    for thread in threading.enumerate():
        if thread.name == "esp spark idle":
            thread.join(_CLOSE)


atexit.register(close_all)


def require_replay(connection: Connection, bus: str) -> None:
    """NotOffered for a bus on which a batch could not be read again."""
    offered = connection.bus.capabilities
    if not (offered.replay and offered.suffix_only):
        way_out = f"set {offered.replays_with}" if offered.replays_with else "use one that is a log"
        raise NotOffered(
            f"Spark reads a batch again after a failure, and the bus {bus!r} as it is set keeps nothing to read again: "
            f"{way_out}",
            capability="replay",
        )
