"""Events: scheduled, updated, removed, fired at their time. Statuses and their reasons are BigBen's. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import esp_pubsub as esp

from . import attempts
from .attempts import Ended
from .state import Event, Kind, State, Status, Tenant, delivery_key, id_of, key_of, tenant_of, us

LONGEST_NAME = 256
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = (datetime(9999, 12, 31, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


class Refused(esp.EspError):
    """A request that is not carried out: 400 it cannot be, 404 there is no such thing, 412 the version is another one,
    429 too much of it.
    """

    code: int


class Request(NamedTuple):
    """A row of the window Events."""

    tenant: str | None
    id: str | None
    time: str | None
    payload: str | None
    mode: str | None
    option: str | None
    version: int | None


class Answer(NamedTuple):
    """What became of a request."""

    code: int
    status: str | None
    version: int | None = None
    event_id: str | None = None
    message: str | None = None


def event_id(event: Event) -> str:
    """BigBen's eventId: another one for each time that the event is scheduled, and `a-` before one that delivers its
    payload only.
    """
    return f"{'a-' if event.payload_only else ''}{event.at:x}-{event.version:x}"


def take(state: State, request: str, row: tuple[Any, ...]) -> list[Ended]:
    """One row of the window Events, and its answer."""
    asked = Request(*row)
    ended: list[Ended] = []
    try:
        answer, ended = _MODES[_checked_mode(asked)](state, asked)
    except Refused as refused:
        answer = Answer(refused.code, "REJECTED", message=str(refused))
    state.emit(
        "Answers", request, answer.code, answer.status, (asked.tenant or "")[:LONGEST_NAME],
        (asked.id or "")[:LONGEST_NAME], answer.version, answer.event_id, answer.message, None,
    )  # fmt: skip
    return ended


def fire(state: State, key: str) -> list[Ended]:
    """The time of an event has come."""
    event = state.events[key]
    event.status = int(Status.PROCESSING)
    tenant = tenant_of(key)
    state.tenants[tenant].held -= 1
    return _deliver(state, key, event, event.at, of=key)


def _deliver(state: State, key: str, event: Event, at: int, of: str) -> list[Ended]:
    return attempts.deliver(
        state, tenant_of(key), id_of(key), event.payload, payload_only=event.payload_only, of=of,
        event_id=event_id(event), occurrence=at,
    )  # fmt: skip


def _upsert(state: State, asked: Request) -> tuple[Answer, list[Ended]]:
    name, time = _given(asked.tenant, "tenant"), _given(asked.time, "eventTime")
    tenant = tenant_named(state, name)
    payload_only = _checked_option(asked)
    at = _moment(time)
    if asked.payload is not None and len(asked.payload) > tenant.limits.payload:
        raise refused(
            400, f"the payload has {len(asked.payload)} characters; this tenant may have {tenant.limits.payload}"
        )
    id = _given(asked.id, "id")
    key = key_of(name, id)
    known = state.events.get(key)
    check_version(asked.version, known.version if known else 0)
    _check_rate(state, tenant)
    waits = known is not None and known.status == Status.UN_PROCESSED
    if not waits and (known is None or known.done or at <= state.now):  # it takes the place of no other
        check_quota(tenant)
    if at <= state.now:
        return _past(state, key, known, Event(at, asked.payload, state.version(), payload_only))
    if known is not None and known.status == Status.UN_PROCESSED and known.at == at:
        known.version = state.version()
        known.payload = known.payload if asked.payload is None else asked.payload
        return Answer(200, "UPDATED", known.version, event_id(known)), []
    if known is not None:
        _remove(state, key, known)
    event = state.events[key] = Event(at, asked.payload, state.version(), payload_only)
    tenant.held += 1
    state.plan(at, Kind.EVENT, key)
    return Answer(200, "UPDATED" if known else "ACCEPTED", event.version, event_id(event)), []


def _past(state: State, key: str, known: Event | None, event: Event) -> tuple[Answer, list[Ended]]:
    """Delivered at once, and not kept."""
    if known is not None and known.status == Status.UN_PROCESSED:
        state.drop(key)
    ended = _deliver(state, key, event, event.at, of="")
    return Answer(200, "TRIGGERED", event.version, event_id(event)), ended


def _remove_asked(state: State, asked: Request) -> tuple[Answer, list[Ended]]:
    name, id = _given(asked.tenant, "tenant"), _given(asked.id, "id")
    tenant_named(state, name)
    key = key_of(name, id)
    known = state.events.get(key)
    check_version(asked.version, known.version if known else 0)
    if known is None:
        return Answer(200, None), []
    _remove(state, key, known)
    return Answer(200, "DELETED", known.version, event_id(known)), []


def _remove(state: State, key: str, event: Event) -> None:
    attempts.cancel(state, delivery_key(tenant_of(key), id_of(key), event_id(event)))
    state.drop(key)


def _dry_run(state: State, asked: Request) -> tuple[Answer, list[Ended]]:
    """Deliver an event now, and leave it as it is."""
    name, id = _given(asked.tenant, "tenant"), _given(asked.id, "id")
    key = key_of(name, id)
    known = state.events.get(key)
    if known is None:
        raise refused(404, "there is no such event")
    check_quota(tenant_named(state, name))
    trial = Event(known.at, known.payload, state.version(), known.payload_only)
    ended = _deliver(state, key, trial, known.at, of="")
    return Answer(200, Status(known.status).name, known.version, event_id(known)), ended


_MODES = {"UPSERT": _upsert, "REMOVE": _remove_asked, "DRYRUN": _dry_run}


def refused(code: int, why: str) -> Refused:
    """The error that says so."""
    return Refused(why, code=code)


def tenant_named(state: State, name: str) -> Tenant:
    """The tenant of this name. Refused if there is none."""
    tenant = state.tenants.get(name)
    if tenant is None:
        raise refused(400, f"tenant {name[:LONGEST_NAME]} is not known: register it first")
    return tenant


def check_version(asked: int | None, found: int) -> None:
    """A version that is given has to be the one at hand; 0 is that of nothing."""
    if asked is not None and asked != found:
        raise refused(412, f"the version is {found}, not {asked}")


def check_quota(tenant: Tenant) -> None:
    """Refused where a tenant has as much as it may have."""
    if tenant.held >= tenant.limits.events:
        raise refused(429, f"this tenant has {tenant.held} events that are not delivered yet, and may have no more")


def _check_rate(state: State, tenant: Tenant) -> None:
    """Requests may come at the tenant's rate, and those of a second at once."""
    if tenant.limits.requests:
        next = max(tenant.next_request, state.now) + us(1 / tenant.limits.requests)
        if next > state.now + us(1):
            raise refused(429, f"this tenant may schedule {tenant.limits.requests} events a second")
        tenant.next_request = next


def _given(value: str | None, name: str) -> str:
    if not value:
        raise refused(400, f"{name} is missing")
    if len(value) > LONGEST_NAME or (name == "tenant" and not value.isprintable()):
        raise refused(
            400, f"{name} is a text of at most {LONGEST_NAME} characters, a tenant's without control characters"
        )
    return value


def _checked_mode(asked: Request) -> str:
    mode = asked.mode or "UPSERT"
    if mode not in _MODES:
        raise refused(400, f"mode {mode:.40} is none of {', '.join(_MODES)}")
    return mode


def _checked_option(asked: Request) -> bool:
    """Whether the payload alone is delivered."""
    if asked.option not in (None, "", "FULL_EVENT", "PAYLOAD_ONLY"):
        raise refused(400, f"deliveryOption {asked.option:.40} is none of FULL_EVENT, PAYLOAD_ONLY")
    if asked.option == "PAYLOAD_ONLY" and asked.payload is None:
        raise refused(400, "with deliveryOption PAYLOAD_ONLY the payload must not be null")
    return asked.option == "PAYLOAD_ONLY"


def _moment(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError("it has no offset, such as Z")
        at = (moment - _EPOCH) // timedelta(microseconds=1)
    except (ValueError, OverflowError) as e:
        raise refused(
            400, f"eventTime {text:.40} is no ISO 8601 time such as 2018-01-31T04:00:00Z: {e!s:.100}"
        ) from None
    if not 0 <= at <= _LAST:
        raise refused(400, f"eventTime {text:.40} is not between 1970 and 9999")
    return at
