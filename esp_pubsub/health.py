"""Whether a client is well: its bus, its publishers, its readers, its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from .bus import Bus
from .engine.engine import Engine
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
class EngineHealth:
    """One member of an engine."""

    url: str
    role: str
    hindered: bool
    """It cannot read an input, or the order."""
    failure: str
    """What ended it; empty while it is at work."""


@dataclass(frozen=True, slots=True)
class Health:
    """A client at one moment. True if the bus answers, nothing that is open has failed, and no engine is hindered."""

    bus: str
    """What is wrong with the bus; empty if it answers."""
    publishers: tuple[PublisherHealth, ...]
    readers: tuple[ReaderHealth, ...]
    engines: tuple[EngineHealth, ...]

    def __bool__(self) -> bool:
        return not self.bus and self.alive and not any(engine.hindered for engine in self.engines)

    @property
    def alive(self) -> bool:
        """No publisher and no engine has failed for good, which only a restart mends. A bus that is away needs none."""
        failures = [each.failure for each in self.publishers] + [each.failure for each in self.engines]
        return not any(failures)

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
        tuple(_engine(each) for each in opened if isinstance(each, Engine)),
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
    stats = publisher.stats
    waiting = stats.given - min(stats.given, stats.acked)
    return PublisherHealth(publisher.topic, stats.role, waiting, _shown(publisher.failure))


def _engine(engine: Engine) -> EngineHealth:
    stats = engine.stats
    return EngineHealth(str(engine.address), stats.role, stats.hindered, _shown(engine.failure))


def _shown(failure: Exception | None) -> str:
    return "" if failure is None else f"{type(failure).__name__}: {failure}"


def _reader(subscriber: Subscriber) -> ReaderHealth:
    last = subscriber.last
    age = None if last is None else max(0.0, (datetime.now(UTC) - last.sent_at).total_seconds())
    return ReaderHealth(subscriber.topic, subscriber.group, age)
