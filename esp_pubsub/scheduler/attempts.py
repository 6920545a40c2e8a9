"""Deliveries: what fell due is emitted, tried again, given up. Pure: a worker makes the calls and says what came of it.

    waiting --> calling --2xx--> done
                   | 4xx ------> dead letter
                   | else -----> backoff --> waiting ...    at 0, 1, 3 and 7 s
                   | 4th time -> backlog --> waiting ...    each minute until backlog_limit, then a dead letter

For a tenant of a window there is nothing to wait for: what is emitted is delivered.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from .state import Delivery, Kind, State, Status, Tenant, delivery_key, slot, us

WINDOW = "WINDOW"
"""The kind of a tenant whose deliveries are rows of the window Fires."""
_LATER = frozenset((408, 425, 429))  # of 4xx, those that ask to come again
_LONGEST_ASKED = 3_600.0  # seconds between two tries
_MOST_ERROR = 1_024
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_json = msgspec.json.encode


class Ended(NamedTuple):
    """A delivery of a cron came to its end, or is in error, which is told once."""

    of: str
    occurrence: int
    status: Status
    error: str


def iso(at: int) -> str:
    """A time as ISO 8601, in UTC."""
    return (_EPOCH + timedelta(microseconds=at)).replace(tzinfo=None).isoformat() + "Z"


def deliver(
    state: State, tenant: str, id: str, payload: str | None, *, payload_only: bool, of: str, event_id: str,
    occurrence: int,
) -> list[Ended]:  # fmt: skip
    """Something falls due now."""
    body = payload or ""
    if not payload_only:
        body = _json({
            "id": id, "eventTime": iso(occurrence), "tenant": tenant, "payload": payload, "mode": "UPSERT",
            "deliveryOption": "FULL_EVENT", "eventId": event_id, "triggeredAt": iso(state.now),
            "eventStatus": "TRIGGERED",
        }).decode()  # fmt: skip
    key = delivery_key(tenant, id, event_id)
    delivery = Delivery(tenant, id, of, event_id, occurrence, state.now, body, payload_only, "waiting", state.now)
    state.deliveries[key] = delivery
    state.tenants[tenant].held += 1
    state.queue(key, delivery)
    return dispatch(state, tenant)


def dispatch(state: State, name: str) -> list[Ended]:
    """Emit what waits for a tenant, as far as it may be called now."""
    tenant, ended = state.tenants[name], []
    while not (state.paused or tenant.paused) and (key := state.next_queued(name)) is not None:
        delivery = state.deliveries[key]
        if (later := _later(state, tenant)) is not None:
            if later and tenant.wake != later:
                tenant.wake = later
                state.plan(later, Kind.TENANT, name)
            break
        if tenant.kind == WINDOW:
            state.emit("Fires", *_row(key, delivery))
            ended += _end(state, key, delivery, Status.PROCESSED)
        else:
            _call(state, key, delivery, tenant)
    return ended


def _later(state: State, tenant: Tenant) -> int | None:
    """When this tenant's next delivery may be emitted: None for now, 0 for when one of its calls ends."""
    if state.full:
        return state.now
    if tenant.kind == WINDOW:
        return None
    if tenant.calling >= tenant.limits.concurrency:
        return 0
    if tenant.limits.rate:
        if tenant.next_call > state.now:
            return tenant.next_call
        tenant.next_call = state.now + us(1 / tenant.limits.rate)
    return None


def _row(key: str, delivery: Delivery) -> tuple[object, ...]:
    option = "PAYLOAD_ONLY" if delivery.payload_only else "FULL_EVENT"
    return (
        key, slot(delivery.tenant, delivery.id), delivery.tenant, delivery.id, delivery.event_id, delivery.occurrence,
        delivery.triggered, option, delivery.body,
    )  # fmt: skip


def _call(state: State, key: str, delivery: Delivery, tenant: Tenant) -> None:
    delivery.tries += 1
    delivery.state, delivery.at = "calling", state.now + us(tenant.limits.deadline)
    tenant.calling += 1
    state.plan(delivery.at, Kind.DELIVERY, key)
    state.emit("Calls", *_row(key, delivery), delivery.tries, delivery.at, tenant.kind, tenant.props)


def outcome(state: State, key: str, attempt: int, code: int, text: str, retry_after: float) -> list[Ended]:
    """A worker says what came of a call. One that is told again, or too late, changes nothing; but a success counts
    whenever it comes.
    """
    delivery = state.deliveries.get(key)
    if delivery is None:
        return []
    tenant = state.tenants[delivery.tenant]
    ended = []
    if 200 <= code < 300 and 1 <= attempt <= delivery.tries:
        _hang_up(delivery, tenant)
        ended = _end(state, key, delivery, Status.PROCESSED)
    elif delivery.state == "calling" and attempt == delivery.tries:
        _hang_up(delivery, tenant)
        ended = _failed(state, key, delivery, code, text, retry_after)
    return ended + dispatch(state, delivery.tenant)


def turn(state: State, key: str) -> list[Ended]:
    """The time of what a delivery does is over: a call had no outcome, or it is to be tried again."""
    delivery = state.deliveries[key]
    ended = []
    if delivery.state == "calling":
        _hang_up(delivery, state.tenants[delivery.tenant])
        ended = _failed(state, key, delivery, 0, "no outcome by the deadline", 0)
    elif delivery.state == "dead":
        state.emit("Dead", *_row(key, delivery), delivery.tries, delivery.code, delivery.error, state.now)
        ended = _end(state, key, delivery, Status.ERROR)
    else:
        delivery.state, delivery.at = "waiting", state.now
        state.queue(key, delivery)
    return ended + dispatch(state, delivery.tenant)


def cancel(state: State, key: str) -> None:
    """No further try of this delivery, if there is one."""
    delivery = state.deliveries.pop(key, None)
    if delivery is not None:
        tenant = state.tenants[delivery.tenant]
        tenant.held -= 1
        _hang_up(delivery, tenant)


def retry(state: State, tenant: str) -> int:
    """Have the tenant's backlog tried again now; returns how many."""
    found = [(key, each) for key, each in state.deliveries.items() if each.tenant == tenant and each.state == "backlog"]
    for key, delivery in found:
        delivery.at = state.now
        state.plan(state.now, Kind.DELIVERY, key)
    return len(found)


def _hang_up(delivery: Delivery, tenant: Tenant) -> None:
    if delivery.state == "calling":
        tenant.calling -= 1


def _failed(state: State, key: str, delivery: Delivery, code: int, text: str, retry_after: float) -> list[Ended]:
    limits = state.tenants[delivery.tenant].limits
    delivery.code, delivery.error = code, text[:_MOST_ERROR]
    if 400 <= code < 500 and code not in _LATER:
        _give_up(state, key, delivery)
        return []
    asked = us(min(retry_after, _LONGEST_ASKED)) if retry_after > 0 else 0
    if delivery.tries <= limits.retries:
        delay = min(limits.delay * limits.multiplier ** (delivery.tries - 1), _LONGEST_ASKED)
        delivery.state, delivery.at = "backoff", state.now + max(us(delay), asked)
        state.plan(delivery.at, Kind.DELIVERY, key)
        return []
    again = state.now + max(us(limits.backlog_every), asked)
    if again > delivery.occurrence + us(limits.backlog_limit):
        _give_up(state, key, delivery)
        return []
    ended = _in_error(state, delivery)
    delivery.state, delivery.at = "backlog", again
    state.plan(again, Kind.DELIVERY, key)
    return ended


def _in_error(state: State, delivery: Delivery) -> list[Ended]:
    if delivery.in_error:
        return []
    delivery.in_error = True
    event = state.events.get(delivery.of)
    if event is not None:
        event.status = int(Status.ERROR)
    return [Ended(delivery.of, delivery.occurrence, Status.ERROR, delivery.error)]


def _give_up(state: State, key: str, delivery: Delivery) -> None:
    """Once a step has room for the dead letter."""
    delivery.state, delivery.at = "dead", state.now
    state.plan(state.now, Kind.DELIVERY, key)


def _end(state: State, key: str, delivery: Delivery, status: Status) -> list[Ended]:
    del state.deliveries[key]
    state.tenants[delivery.tenant].held -= 1
    event = state.events.get(delivery.of)
    if event is not None:
        state.settle(delivery.of, event, status)
    return [] if delivery.in_error else [Ended(delivery.of, delivery.occurrence, status, delivery.error)]
