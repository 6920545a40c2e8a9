"""Whether a client is well: its bus, its publishers, its readers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from .bus import Bus
from .errors import BusError
from .publisher import Publisher
from .subscriber import Subscriber

_PLACE = "health:1/M"  # a portable name that nobody publishes to


@dataclass(frozen=True, slots=True)
class PublisherHealth:
    """One publisher."""

    topic: str
    role: str
    """In its failover group; a publisher without one is active."""
    waiting: int
    """Blocks that are not acknowledged yet."""
    failure: str
    """What ended it; empty while it is at work."""


@dataclass(frozen=True, slots=True)
class ReaderHealth:
    """One subscriber."""

    topic: str
    group: str | None
    age: float | None
    """Seconds since the last block that it gave out was sent; None before the first."""


@dataclass(frozen=True, slots=True)
class Health:
    """A client at one moment. True if the bus answers and no publisher has failed."""

    bus: str
    """What is wrong with the bus; empty if it answers."""
    publishers: tuple[PublisherHealth, ...]
    readers: tuple[ReaderHealth, ...]

    def __bool__(self) -> bool:
        return not self.bus and self.alive

    @property
    def alive(self) -> bool:
        """No publisher has failed for good, which only a restart mends. A bus that is away is no reason for one."""
        return not any(publisher.failure for publisher in self.publishers)

    @property
    def flushed(self) -> bool:
        """The bus has everything that was given to the publishers."""
        return not any(publisher.waiting for publisher in self.publishers)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"ok": bool(self), "alive": self.alive, "flushed": self.flushed, **asdict(self)}


async def health(bus: Bus, opened: Iterable[object], timeout: float) -> Health:
    """See `Client.health`."""
    opened = list(opened)
    return Health(
        await _trouble(bus, timeout),
        tuple(_publisher(each) for each in opened if isinstance(each, Publisher)),
        tuple(_reader(each) for each in opened if isinstance(each, Subscriber)),
    )


async def _trouble(bus: Bus, timeout: float) -> str:
    if not bus.capabilities.retained:
        return ""  # there is no question that costs nothing
    try:
        async with asyncio.timeout(timeout):
            await bus.retained(_PLACE, "health")
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except BusError as error:
        return str(error)
    return ""


def _publisher(publisher: Publisher) -> PublisherHealth:
    stats, failure = publisher.stats, publisher.failure
    shown = "" if failure is None else f"{type(failure).__name__}: {failure}"
    return PublisherHealth(publisher.topic, stats.role, stats.given - min(stats.given, stats.acked), shown)


def _reader(subscriber: Subscriber) -> ReaderHealth:
    last = subscriber.last
    age = None if last is None else max(0.0, (datetime.now(UTC) - last.sent_at).total_seconds())
    return ReaderHealth(subscriber.topic, subscriber.group, age)
