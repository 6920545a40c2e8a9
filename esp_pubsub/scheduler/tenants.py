"""Tenants: registered, paused, resumed. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from . import attempts
from .attempts import WINDOW, Ended
from .events import LONGEST_NAME, refused, tenant_named
from .state import Kind, Limits, State, Tenant

KINDS = ("MESSAGING", "HTTP", "CUSTOM_CLASS")
MOST_PAYLOAD, MOST_CONCURRENCY, MOST_PROPS = 1 << 20, 10_000, 16_384


class Register(msgspec.Struct, forbid_unknown_fields=True, tag="tenant", tag_field="do"):
    """A tenant and how it is delivered to. A second one of the same name takes the place of the first."""

    tenant: str
    type: str
    props: dict[str, Any]
    limits: Limits = msgspec.field(default_factory=Limits)


class Pause(msgspec.Struct, forbid_unknown_fields=True, tag="pause", tag_field="do"):
    """Deliver nothing to a tenant, or, without one, to nobody."""

    tenant: str | None = None


class Resume(msgspec.Struct, forbid_unknown_fields=True, tag="resume", tag_field="do"):
    """Go on. What fell due meanwhile is delivered; for crons their misfire policy says what is."""

    tenant: str | None = None


class RetryBacklog(msgspec.Struct, forbid_unknown_fields=True, tag="retry", tag_field="do"):
    """Try a tenant's deliveries in error again now."""

    tenant: str


def register(state: State, asked: Register) -> dict[str, Any]:
    """Take a tenant on. Refused for one that cannot be."""
    if not asked.tenant or len(asked.tenant) > LONGEST_NAME or not asked.tenant.isprintable():
        raise refused(400, f"tenant is a text of 1 to {LONGEST_NAME} characters, none of them a control character")
    if asked.type not in KINDS:
        raise refused(400, f"type {asked.type:.40} is none of {', '.join(KINDS)}")
    _check_limits(asked.limits)
    kind, props = _kind(asked), _as_json(asked.props)
    known = state.tenants.get(asked.tenant)
    if known is None:
        state.tenants[asked.tenant] = Tenant(kind, props, asked.limits)
    else:
        known.kind, known.props, known.limits = kind, props, asked.limits
    return {"tenant": asked.tenant, "type": asked.type}


def _kind(asked: Register) -> str:
    props = asked.props
    if not props:
        raise refused(400, "props must not be empty")
    if asked.type == "HTTP":
        url, headers = props.get("url"), props.get("headers", {})
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise refused(400, "props of an HTTP tenant have a url that begins with http:// or https://")
        if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
            raise refused(400, "headers in props are texts by name")
    if asked.type == "MESSAGING":
        if "window" in props:
            if props != {"window": "Fires"}:
                raise refused(400, "the window of a MESSAGING tenant is Fires, and its props have nothing else")
            return WINDOW
        if not isinstance(props.get("topic"), str):
            raise refused(400, "props of a MESSAGING tenant have a topic, or the window Fires")
    return asked.type


def _as_json(props: dict[str, Any]) -> str:
    try:
        text = msgspec.json.encode(props).decode()
    except (ValueError, OverflowError) as e:
        raise refused(400, f"props have a value that cannot be kept: {e}") from None
    if len(text) > MOST_PROPS:
        raise refused(400, f"props have more than {MOST_PROPS} characters as JSON")
    return text


def _check_limits(limits: Limits) -> None:
    """Refused for limits with which nothing could be delivered, or with which a step could grow without bound."""
    rates = (limits.requests, limits.rate)
    if not all(rate == 0 or 0.001 <= rate <= 1_000_000 for rate in rates):
        raise refused(400, "requests and rate are 0 or from 0.001 to 1000000 a second")
    if not (
        0 <= limits.payload <= MOST_PAYLOAD
        and 1 <= limits.concurrency <= MOST_CONCURRENCY
        and limits.events >= 0 <= limits.crons
    ):
        raise refused(400, f"payload is at most {MOST_PAYLOAD}, concurrency from 1 to {MOST_CONCURRENCY}")
    if not (0 <= limits.retries <= 20 and 0 < limits.delay <= 3_600 and 1 <= limits.multiplier <= 10):
        raise refused(400, "retries are 0 to 20, delay is up to 3600 s, multiplier from 1 to 10")
    if not (0.1 <= limits.deadline <= 3_600 and 1 <= limits.backlog_every <= 86_400):
        raise refused(400, "deadline is 0.1 to 3600 s, backlog_every 1 to 86400 s")
    if not 0 <= limits.backlog_limit <= 400 * 86_400:
        raise refused(400, "backlog_limit is at most 400 days")


def pause(state: State, asked: Pause) -> dict[str, Any]:
    """Deliver nothing for now. Calls that are under way go on."""
    if asked.tenant is None:
        state.paused = True
    else:
        tenant_named(state, asked.tenant).paused = True
    return {"paused": asked.tenant or "all"}


def resume(state: State, asked: Resume) -> tuple[dict[str, Any], list[Ended]]:
    """Deliver again."""
    if asked.tenant is None:
        state.paused = False
    else:
        tenant_named(state, asked.tenant).paused = False
    names = [name for name, tenant in state.tenants.items() if not (state.paused or tenant.paused)]
    ended: list[Ended] = []
    for name in names:
        ended += attempts.dispatch(state, name)
    going = {*names}
    for key, cron in state.crons.items():
        if cron.parked and cron.tenant in going:
            cron.parked = False
            state.plan(cron.fires, Kind.CRON, key)
    return {"resumed": asked.tenant or "all"}, ended


def retry(state: State, asked: RetryBacklog) -> dict[str, Any]:
    """Try again what is in error."""
    tenant_named(state, asked.tenant)
    return {"retried": attempts.retry(state, asked.tenant)}
