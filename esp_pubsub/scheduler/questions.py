"""What can be asked of the scheduler: it changes nothing. Pure.

A question is a dict with one key, what is asked; its value says of what. An answer is a dict; one with an `error` has a
`code` beside it: 400 for what cannot be asked, 404 for what there is not.
"""

from __future__ import annotations

import heapq
from typing import Any

import msgspec

from .attempts import iso
from .crons import evaluator, shown
from .describe import describe
from .dialects import CronRefused
from .events import Refused, event_id, refused
from .state import Delivery, Event, State, Status, Tenant, id_of, key_of, tenant_of

MOST_LISTED = 1_000


class Find(msgspec.Struct, tag="find", tag_field="ask", forbid_unknown_fields=True):
    """One event."""

    tenant: str
    id: str


class Events(msgspec.Struct, tag="events", tag_field="ask", forbid_unknown_fields=True):
    """Events by tenant, status and due time (`since` included, `until` not), ordered by due time, a page at a time."""

    tenant: str | None = None
    status: str | None = None
    since: int = 0
    until: int = 1 << 62
    limit: int = 100
    cursor: str | None = None
    """Of the last answer: go on after it."""


class Tenants(msgspec.Struct, tag="tenants", tag_field="ask", forbid_unknown_fields=True):
    """All tenants."""


class Crons(msgspec.Struct, tag="crons", tag_field="ask", forbid_unknown_fields=True):
    """Crons of a tenant, all of them or those of an id, by key, a page at a time."""

    tenant: str
    id: str | None = None
    limit: int = 100
    cursor: str | None = None


class Log(msgspec.Struct, tag="log", tag_field="ask", forbid_unknown_fields=True):
    """The event log of a cron."""

    tenant: str
    id: str
    type: str


class Backlog(msgspec.Struct, tag="backlog", tag_field="ask", forbid_unknown_fields=True):
    """Deliveries of a tenant that are in error and will be tried again."""

    tenant: str
    limit: int = 100


class Counts(msgspec.Struct, tag="counts", tag_field="ask", forbid_unknown_fields=True):
    """How much there is."""


Question = Find | Events | Tenants | Crons | Log | Backlog | Counts


def answer(state: State, question: Any) -> dict[str, Any]:
    """The answer to any question, to one that cannot be asked too."""
    try:
        asked = msgspec.convert(question, Question)
        found: dict[str, Any] = _ANSWERS[type(asked)](state, asked)
    except msgspec.ValidationError as e:
        return {"code": 400, "error": str(e)}
    except Refused as e:
        return {"code": e.code, "error": str(e)}
    return found


def _find(state: State, asked: Find) -> dict[str, Any]:
    key = key_of(asked.tenant, asked.id)
    event = state.events.get(key)
    if event is None:
        raise refused(404, "not found")
    return _event(key, event)


def _event(key: str, event: Event) -> dict[str, Any]:
    return {
        "id": id_of(key), "tenant": tenant_of(key), "eventTime": iso(event.at), "payload": event.payload,
        "deliveryOption": "PAYLOAD_ONLY" if event.payload_only else "FULL_EVENT", "eventId": event_id(event),
        "eventStatus": Status(event.status).name, "version": event.version,
    } | ({"processedAt": iso(event.done)} if event.done else {})  # fmt: skip


def _events(state: State, asked: Events) -> dict[str, Any]:
    if asked.status is not None and asked.status not in Status.__members__:
        raise refused(400, f"status is one of {', '.join(Status.__members__)}")
    status = None if asked.status is None else Status[asked.status]
    prefix = "" if asked.tenant is None else key_of(asked.tenant, "")
    after = _cursor(asked.cursor)
    matching = (
        (event.at, key)
        for key, event in state.events.items()
        if key.startswith(prefix)
        and (status is None or event.status == status)
        and asked.since <= event.at < asked.until
        and (event.at, key) > after
    )
    page = heapq.nsmallest(_limit(asked.limit), matching)
    found = {"events": [_event(key, state.events[key]) for _, key in page]}
    return found | ({"cursor": f"{page[-1][0]}:{page[-1][1]}"} if len(page) == asked.limit else {})


def _cursor(text: str | None) -> tuple[int, str]:
    if text is None:
        return -1, ""
    at, colon, key = text.partition(":")
    if not (colon and at.isascii() and at.isdigit() and len(at) < 20):
        raise refused(400, "a cursor is what the last answer has as such")
    return int(at), key


def _limit(limit: int) -> int:
    if not 1 <= limit <= MOST_LISTED:
        raise refused(400, f"limit is from 1 to {MOST_LISTED}")
    return limit


def _tenants(state: State, asked: Tenants) -> dict[str, Any]:
    return {"tenants": {name: _tenant(name, tenant) for name, tenant in state.tenants.items()}}


def _tenant(name: str, tenant: Tenant) -> dict[str, Any]:
    kind = "MESSAGING" if tenant.kind == "WINDOW" else tenant.kind
    return {
        "tenant": name, "type": kind, "props": msgspec.json.decode(tenant.props), "paused": tenant.paused,
        "held": tenant.held, "crons": tenant.crons, "calling": tenant.calling,
        "limits": msgspec.to_builtins(tenant.limits),
    }  # fmt: skip


def _crons(state: State, asked: Crons) -> dict[str, Any]:
    prefix = key_of(asked.tenant, "" if asked.id is None else key_of(asked.id, ""))
    matching = (key for key in state.crons if key.startswith(prefix) and key > (asked.cursor or ""))
    page = heapq.nsmallest(_limit(asked.limit), matching)
    found = {"crons": [_cron(state, key) for key in page]}
    return found | ({"cursor": page[-1]} if len(page) == asked.limit else {})


def _cron(state: State, key: str) -> dict[str, Any]:
    entry = state.crons[key]
    try:
        times = evaluator(entry).next_times(state.now, 5) if entry.state == "active" else []
        said = describe(entry.expression, entry.type)
    except CronRefused as e:
        times, said = [], str(e)
    return {"cron": shown(entry), "description": said, "next": [iso(time) for time in times]}


def _log(state: State, asked: Log) -> dict[str, Any]:
    entry = state.crons.get(key_of(asked.tenant, asked.id, asked.type))
    if entry is None:
        raise refused(404, "there is no such cron")
    return {"log": {
        at: [{"time": iso(time), "status": status, "error": error} for time, status, error in logged]
        for at, logged in entry.log.items()
    }}  # fmt: skip


def _backlog(state: State, asked: Backlog) -> dict[str, Any]:
    matching = (
        (each.occurrence, key)
        for key, each in state.deliveries.items()
        if each.tenant == asked.tenant and each.in_error
    )
    page = heapq.nsmallest(_limit(asked.limit), matching)
    return {"backlog": [_in_error(key, state.deliveries[key]) for _, key in page]}


def _in_error(key: str, each: Delivery) -> dict[str, Any]:
    return {
        "delivery": key, "eventTime": iso(each.occurrence), "tries": each.tries, "code": each.code, "error": each.error,
        "next": iso(each.at),
    }  # fmt: skip


def _counts(state: State, asked: Counts) -> dict[str, Any]:
    next = state.next_due()
    return {
        "tenants": len(state.tenants), "events": len(state.events), "done": state.done, "crons": len(state.crons),
        "deliveries": len(state.deliveries), "paused": state.paused, "now": iso(state.now),
        "next": None if next is None else iso(next),
    }  # fmt: skip


_ANSWERS: dict[Any, Any] = {
    Find: _find, Events: _events, Tenants: _tenants, Crons: _crons, Log: _log, Backlog: _backlog, Counts: _counts,
}  # fmt: skip
