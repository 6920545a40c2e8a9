"""What the scheduler knows: tenants, events, crons, deliveries, and what is due when. Pure.

The fields of State are its state, which snapshots keep. Everything else in it follows from them, and is made again
after a restart: the agenda, which says what is due next, the queues of deliveries that wait for their tenant, and the
rows that the step at hand emits. Members that went on and members that were restored take the same entries in the same
order, because an entry that does not count any more is passed over without a trace.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

import msgspec

from .windows import OUTPUTS

SECOND = 1_000_000
SLOTS = 1_024
KEEP, MOST_DONE = 600 * SECOND, 100_000
"""How long, and at most how many, events that are done can still be found."""
MOST_ROWS, MOST_SIZE = 1_000, 4 << 20
"""What a step may emit."""
_SEPARATOR = "\x1f"


class Kind(IntEnum):
    """What an entry of the agenda is about. At the same time, those come first that end something."""

    DELIVERY = 0
    TENANT = 1
    EVENT = 2
    CRON = 3


class Status(IntEnum):
    """Of an event that is kept. BigBen's names."""

    UN_PROCESSED = 0
    PROCESSING = 1
    PROCESSED = 2
    ERROR = 3


class Limits(msgspec.Struct, array_like=False, forbid_unknown_fields=True, frozen=True):
    """What a tenant may do, and how often its deliveries are tried. Times are in seconds; 0 is no limit of a rate."""

    events: int = 1_000_000
    """Events that wait for their time, and deliveries that have not ended."""
    crons: int = 100_000
    payload: int = 65_536
    """Characters of a payload."""
    requests: float = 0.0
    """Events scheduled a second."""
    rate: float = 0.0
    """Calls a second."""
    concurrency: int = 10
    """Calls at the same time."""
    retries: int = 3
    delay: float = 1.0
    multiplier: float = 2.0
    deadline: float = 30.0
    """For the outcome of one try."""
    backlog_every: float = 60.0
    backlog_limit: float = 86_400.0
    """How long after its time a delivery in error is still tried again."""


class Tenant(msgspec.Struct, array_like=True):
    """For whom events are kept, and how they are delivered."""

    kind: str
    props: str
    """As JSON."""
    limits: Limits
    paused: bool = False
    held: int = 0
    """Its events that wait for their time, and its deliveries that have not ended."""
    crons: int = 0
    calling: int = 0
    wake: int = 0
    """When it may call again; 0 where nothing waits for that."""
    next_request: int = 0
    next_call: int = 0


class Event(msgspec.Struct, array_like=True, gc=False):
    """One event, under the key of its tenant and id. A small one takes about 500 bytes with all that belongs to it."""

    at: int
    payload: str | None
    version: int
    payload_only: bool = False
    status: int = 0
    done: int = 0
    """When it was processed, or given up."""


class Delivery(msgspec.Struct, array_like=True):
    """Something that fell due and has not been delivered yet."""

    tenant: str
    id: str
    of: str
    """The key of its event, which knows of no other delivery, or cron; empty for an event in the past and a dry run."""
    event_id: str
    occurrence: int
    triggered: int
    body: str
    payload_only: bool
    state: str
    """waiting (for its tenant), calling, backoff, backlog, dead."""
    at: int
    """When it began to wait, or what it does ends."""
    tries: int = 0
    code: int = 0
    error: str = ""
    in_error: bool = False


class CronEntry(msgspec.Struct, array_like=True):
    """One cron, under the key of its tenant, id and type."""

    tenant: str
    id: str
    type: str
    expression: str
    payload: str | None
    zone: str
    gap: str
    misfire: str
    window: int
    most: int
    overlap: str
    jitter: int
    """How much later than its times it fires."""
    granularity: str | None
    retention: int
    version: int
    state: str
    """active, paused, ended (it is never due again), stopped (it could not be computed)."""
    due: int = 0
    """Its next time."""
    parked: bool = False
    """It was due while its tenant, or everything, was paused."""
    running: int = 0
    waiting: int = 0
    fired: int = 0
    missed: int = 0
    error: str = ""
    log: dict[str, list[tuple[int, str, str]]] = {}
    """By granularity: what fired when, with which status and error."""

    @property
    def fires(self) -> int:
        """When its next time fires."""
        return self.due + self.jitter


def key_of(*parts: str) -> str:
    """The key of an event (tenant, id) or a cron (tenant, id, type)."""
    return _SEPARATOR.join(parts)


def tenant_of(key: str) -> str:
    """The tenant in a key."""
    return key.partition(_SEPARATOR)[0]


def id_of(key: str) -> str:
    """The id in the key of an event."""
    return key.partition(_SEPARATOR)[2]


def delivery_key(tenant: str, id: str, event_id: str) -> str:
    """What names a delivery on the bus and as Idempotency-Key: tenant/id/occurrence, its parts quoted."""
    return f"{quote(tenant, safe='')}/{quote(id, safe='')}/{event_id}"


def slot(tenant: str, id: str) -> int:
    """In which of 1,024 slots an event, a cron or a delivery is. It never changes, so that engines can share them."""
    return int.from_bytes(blake2b(key_of(tenant, id).encode(), digest_size=8).digest(), "little") % SLOTS


def us(seconds: float) -> int:
    """Seconds as microseconds."""
    return round(seconds * SECOND)


def size_of(row: tuple[Any, ...]) -> int:
    """The characters of a row, which are most of it."""
    return sum(len(value) for value in row if type(value) is str)


@dataclass
class State:
    """The state, and what follows from it."""

    tenants: dict[str, Tenant] = field(default_factory=dict)
    events: dict[str, Event] = field(default_factory=dict)
    crons: dict[str, CronEntry] = field(default_factory=dict)
    deliveries: dict[str, Delivery] = field(default_factory=dict)
    serial: int = 0
    """Each change of an event or a cron gets the next one, as its version."""
    done: int = 0
    """Events that are done and can still be found."""
    paused: bool = False

    def __post_init__(self) -> None:
        self.now = 0
        self.rows: dict[str, list[tuple[Any, ...]]] = {window: [] for window in OUTPUTS}
        self.size = 0
        self._agenda = [(at, kind, key) for kind, key, at in self._planned()]
        heapq.heapify(self._agenda)
        self._queues: dict[str, list[tuple[int, str]]] = {}
        for key, delivery in self.deliveries.items():
            if delivery.state == "waiting":
                self.queue(key, delivery)
        self._forget = [(event.done, key) for key, event in self.events.items() if event.done]
        heapq.heapify(self._forget)

    def _planned(self) -> list[tuple[Kind, str, int]]:
        found = [(Kind.EVENT, key, event.at) for key, event in self.events.items() if event.status == 0]
        found += [(Kind.DELIVERY, key, each.at) for key, each in self.deliveries.items() if each.state != "waiting"]
        found += [(Kind.TENANT, name, tenant.wake) for name, tenant in self.tenants.items() if tenant.wake]
        found += [
            (Kind.CRON, key, cron.fires)
            for key, cron in self.crons.items()
            if cron.state == "active" and not cron.parked
        ]
        return found

    @property
    def full(self) -> bool:
        """The step at hand emits enough."""
        return self.size > MOST_SIZE or sum(map(len, self.rows.values())) - len(self.rows["Answers"]) >= MOST_ROWS

    def version(self) -> int:
        """The next one."""
        self.serial += 1
        return self.serial

    def emit(self, window: str, *row: Any) -> None:
        """One row to an output window, at the end of the step."""
        self.rows[window].append(row)
        self.size += size_of(row)

    def plan(self, at: int, kind: Kind, key: str) -> None:
        """Something is due then. What was planned for it before counts no more, since it has another time now."""
        heapq.heappush(self._agenda, (at, kind, key))
        if len(self._agenda) > 10_000 + 3 * (len(self.events) + len(self.crons) + len(self.deliveries)):
            self._agenda = [(at, kind, key) for kind, key, at in self._planned()]
            heapq.heapify(self._agenda)

    def next_due(self) -> int | None:
        """When the next thing is due."""
        while self._agenda and not self._counts(*self._agenda[0]):
            heapq.heappop(self._agenda)
        return self._agenda[0][0] if self._agenda else None

    def take_due(self) -> tuple[int, str] | None:
        """The next thing that is due by now. Whoever takes it gives it another status or time, so it counts no more."""
        at = self.next_due()
        if at is None or at > self.now:
            return None
        _, kind, key = heapq.heappop(self._agenda)
        return kind, key

    def _counts(self, at: int, kind: int, key: str) -> bool:
        if kind == Kind.EVENT:
            event = self.events.get(key)
            return event is not None and event.status == 0 and event.at == at
        if kind == Kind.DELIVERY:
            delivery = self.deliveries.get(key)
            return delivery is not None and delivery.state != "waiting" and delivery.at == at
        if kind == Kind.TENANT:
            return self.tenants[key].wake == at
        cron = self.crons.get(key)
        return cron is not None and cron.state == "active" and not cron.parked and cron.fires == at

    def queue(self, key: str, delivery: Delivery) -> None:
        """A delivery waits for its tenant."""
        heapq.heappush(self._queues.setdefault(delivery.tenant, []), (delivery.at, key))

    def next_queued(self, tenant: str) -> str | None:
        """The key of the first delivery that waits for this tenant."""
        queue = self._queues.get(tenant)
        while queue:
            at, key = queue[0]
            delivery = self.deliveries.get(key)
            if delivery is not None and delivery.state == "waiting" and delivery.at == at:
                return key
            heapq.heappop(queue)
        self._queues.pop(tenant, None)
        return None

    def settle(self, key: str, event: Event, status: Status) -> None:
        """An event is done: it can be found for a while."""
        event.status, event.done = int(status), self.now
        self.done += 1
        heapq.heappush(self._forget, (event.done, key))

    def drop(self, key: str) -> None:
        """There is no such event any more."""
        event = self.events.pop(key)
        if event.done:
            self.done -= 1
        elif event.status == 0:
            self.tenants[tenant_of(key)].held -= 1

    def forget(self, most: int) -> None:
        """Drop what was done long ago."""
        while self._forget and most:
            at, key = self._forget[0]
            event = self.events.get(key)
            if event is not None and event.done == at:
                if at + KEEP > self.now and self.done <= MOST_DONE:
                    return
                self.drop(key)
                most -= 1
            heapq.heappop(self._forget)
