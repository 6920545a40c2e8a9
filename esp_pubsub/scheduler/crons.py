"""Crons of tenants: set, paused, fired at their times, logged. Pure; cron.py says when one is due.

A cron that cannot be computed stops itself and says why; the others go on.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from . import attempts
from .attempts import Ended, iso
from .cron import Cron, cron
from .describe import describe
from .dialects import CronRefused, dialect_of
from .events import LONGEST_NAME, check_quota, check_version, refused, tenant_named
from .policies import Misfire, Overlap, due, jitter, overlaps
from .state import CronEntry, Kind, State, Status, key_of, us

MOST_RUNNING, MOST_LOGGED, MOST_CAUGHT_UP = 100, 1_000, 100
_GRANULARITIES = {"SECONDS": 19, "MINUTES": 16, "HOURS": 13, "DAYS": 10, "MONTHS": 7, "YEARS": 4}
_UNITS = {
    "SECONDS": 1,
    "MINUTES": 60,
    "HOURS": 3_600,
    "DAYS": 86_400,
    "WEEKS": 604_800,
    "MONTHS": 2_592_000,
    "YEARS": 31_557_600,
}
_LONGEST = 400 * 86_400  # seconds of a window or a jitter


class SetCron(msgspec.Struct, forbid_unknown_fields=True, tag="cron", tag_field="do"):
    """A cron of a tenant. A second one of the same tenant, id and type takes its place. Times are in seconds."""

    tenant: str
    id: str
    expression: str
    type: str = "QUARTZ"
    payload: str | None = None
    """What is delivered; without one, the expression."""
    zone: str = "UTC"
    gap: Literal["after", "skip"] = "after"
    misfire: Misfire = "latest"
    window: float = 3_600
    most: int = 10
    overlap: Overlap = "all"
    jitter: float = 0
    logGranularity: str | None = None
    retention: int = 1
    retentionUnits: str = "DAYS"
    version: int | None = None


class _OfCron(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    id: str
    type: str


class RemoveCron(_OfCron, forbid_unknown_fields=True, tag="remove cron", tag_field="do"):
    """Have no such cron any more; type `*` is all types."""

    version: int | None = None


class PauseCron(_OfCron, forbid_unknown_fields=True, tag="pause cron", tag_field="do"):
    """Have it fire no more."""


class ResumeCron(_OfCron, forbid_unknown_fields=True, tag="resume cron", tag_field="do"):
    """Have it fire again; its misfire policy says what becomes of the times in between. A stopped one begins anew."""


class TriggerCron(_OfCron, forbid_unknown_fields=True, tag="trigger cron", tag_field="do"):
    """Have it fire once now, whatever its times are."""


def evaluator(entry: CronEntry) -> Cron:
    """When it is due."""
    return cron(entry.expression, entry.type, entry.zone, entry.gap)


def shown(entry: CronEntry) -> dict[str, Any]:
    """A cron as its tenant sees it."""
    found: dict[str, Any] = {
        "id": entry.id, "expression": entry.expression, "type": entry.type, "tenant": entry.tenant,
        "zone": entry.zone, "state": entry.state, "version": entry.version, "fired": entry.fired,
        "missed": entry.missed,
    }  # fmt: skip
    if entry.granularity is not None:
        found |= {"logGranularity": entry.granularity}
    if entry.state == "active":
        found |= {"next": iso(entry.fires)}
    return found | ({"error": entry.error} if entry.error else {})


def put(state: State, asked: SetCron) -> dict[str, Any]:
    """Set up a cron. Refused for what cannot be."""
    tenant = tenant_named(state, asked.tenant)
    _check(asked)
    key = key_of(asked.tenant, asked.id, asked.type)
    known = state.crons.get(key)
    check_version(asked.version, known.version if known else 0)
    entry = CronEntry(
        asked.tenant, asked.id, asked.type, asked.expression, asked.payload, asked.zone, asked.gap, asked.misfire,
        us(asked.window), asked.most, asked.overlap, jitter(key, us(asked.jitter)), asked.logGranularity,
        us(asked.retention * _UNITS[asked.retentionUnits]), state.version(), "active",
    )  # fmt: skip
    try:
        next = evaluator(entry).next_after(state.now)
        times = evaluator(entry).next_times(state.now, 5)
    except CronRefused as e:
        raise refused(400, str(e)) from None
    if next is None:
        raise refused(400, f"the cron expression {asked.expression:.100} is due no more")
    if known is None:
        if tenant.crons >= tenant.limits.crons:
            raise refused(429, f"this tenant has {tenant.crons} crons, and may have no more")
        tenant.crons += 1
    else:
        entry.running, entry.fired, entry.missed, entry.log = known.running, known.fired, known.missed, known.log
    state.crons[key] = entry
    _plan(state, key, entry, next)
    said = describe(asked.expression, asked.type)
    return {"cron": shown(entry), "description": said, "next": [iso(time) for time in times]}


def _check(asked: SetCron) -> None:
    if not asked.id or len(asked.id) > LONGEST_NAME:
        raise refused(400, f"id is a text of 1 to {LONGEST_NAME} characters")
    try:
        dialect_of(asked.type)
    except CronRefused as e:
        raise refused(400, str(e)) from None
    if asked.logGranularity is not None and asked.logGranularity not in _GRANULARITIES:
        raise refused(400, f"logGranularity is one of {', '.join(_GRANULARITIES)}")
    if asked.retentionUnits not in _UNITS or not 0 < asked.retention <= 1_000:
        raise refused(400, f"retention is from 1 to 1000, and retentionUnits one of {', '.join(_UNITS)}")
    if not 0 <= asked.window <= _LONGEST or not 0 <= asked.jitter <= 86_400 or not 1 <= asked.most <= MOST_CAUGHT_UP:
        raise refused(400, f"window is up to {_LONGEST} s, jitter up to 86400 s, and most from 1 to {MOST_CAUGHT_UP}")
    if asked.payload is not None and len(asked.payload) > 65_536:
        raise refused(400, "the payload of a cron has at most 65536 characters")


def _plan(state: State, key: str, entry: CronEntry, next: int | None) -> None:
    if next is None:
        entry.state = "ended"
        return
    entry.due = next
    state.plan(entry.fires, Kind.CRON, key)


def fire(state: State, key: str) -> list[Ended]:
    """A cron is due."""
    entry = state.crons[key]
    tenant = state.tenants[entry.tenant]
    if state.paused or tenant.paused:
        entry.parked = True
        return []
    until = state.now - entry.jitter
    try:
        times = evaluator(entry)
        now_due = due(times, entry.due, until, entry.misfire, entry.window, entry.most)  # type: ignore[arg-type]
        next = times.next_after(until)
    except Exception as e:  # noqa: BLE001  # whatever it is, the other crons go on
        entry.state, entry.error = "stopped", f"{type(e).__name__}: {e}"[:200]
        return []
    entry.missed += now_due.missed
    _plan(state, key, entry, next)
    ended: list[Ended] = []
    for occurrence in now_due.fire:
        does = overlaps(entry.overlap, entry.running, entry.waiting)  # type: ignore[arg-type]
        if does == "wait":
            entry.waiting = occurrence
        elif does == "skip" or entry.running >= MOST_RUNNING or tenant.held >= tenant.limits.events:
            entry.missed += 1
        else:
            ended += _begin(state, key, entry, occurrence, f"{entry.type}/{iso(occurrence)}")
    return ended


def _begin(state: State, key: str, entry: CronEntry, occurrence: int, event_id: str) -> list[Ended]:
    entry.running += 1
    entry.fired += 1
    return attempts.deliver(
        state, entry.tenant, entry.id, entry.expression if entry.payload is None else entry.payload,
        payload_only=False, of=key, event_id=event_id, occurrence=occurrence,
    )  # fmt: skip


def over(state: State, ended: Ended) -> list[Ended]:
    """A delivery ended: if it was a cron's, the next one that waits may begin."""
    entry = state.crons.get(ended.of)
    if entry is None:
        return []
    entry.running = max(entry.running - 1, 0)  # a cron that was removed and set anew has none of the old ones
    _note(state, entry, ended)
    if not entry.waiting or entry.running:
        return []
    occurrence, entry.waiting = entry.waiting, 0
    return _begin(state, ended.of, entry, occurrence, f"{entry.type}/{iso(occurrence)}")


def _note(state: State, entry: CronEntry, ended: Ended) -> None:
    """The event log: by granularity, as long as its retention, and bounded."""
    if entry.granularity is None:
        return
    at = iso(ended.occurrence)[: _GRANULARITIES[entry.granularity]]
    entry.log.setdefault(at, []).append((ended.occurrence, Status(ended.status).name, ended.error))
    while entry.log:
        first = next(iter(entry.log))
        logged = entry.log[first]
        if logged[0][0] + entry.retention > state.now and sum(map(len, entry.log.values())) <= MOST_LOGGED:
            return
        del logged[0]
        if not logged:
            del entry.log[first]


def remove(state: State, asked: RemoveCron) -> dict[str, Any]:
    """Have no such cron; it is no error where there was none."""
    tenant = tenant_named(state, asked.tenant)
    types = ["QUARTZ", "UNIX", "SPRING", "CRON4J"] if asked.type == "*" else [asked.type]
    removed = []
    for type in types:
        key = key_of(asked.tenant, asked.id, type)
        if (entry := state.crons.get(key)) is not None:
            check_version(asked.version, entry.version)
            del state.crons[key]
            tenant.crons -= 1
            removed.append(type)
    return {"removed": removed}


def _found(state: State, asked: _OfCron) -> tuple[str, CronEntry]:
    key = key_of(asked.tenant, asked.id, asked.type)
    entry = state.crons.get(key)
    if entry is None:
        raise refused(404, "there is no such cron")
    return key, entry


def pause(state: State, asked: PauseCron) -> dict[str, Any]:
    """Have it fire no more until it is resumed."""
    _, entry = _found(state, asked)
    if entry.state == "active":
        entry.state, entry.version, entry.parked = "paused", state.version(), False
    return {"cron": shown(entry)}


def resume(state: State, asked: ResumeCron) -> dict[str, Any]:
    """Have it fire again."""
    key, entry = _found(state, asked)
    if entry.state == "paused":
        entry.state, entry.version = "active", state.version()
        state.plan(entry.fires, Kind.CRON, key)
    elif entry.state == "stopped":
        try:
            next = evaluator(entry).next_after(state.now)
        except CronRefused as e:
            raise refused(400, str(e)) from None
        entry.state, entry.version, entry.error = "active", state.version(), ""
        _plan(state, key, entry, next)
    return {"cron": shown(entry)}


def trigger(state: State, asked: TriggerCron) -> tuple[dict[str, Any], list[Ended]]:
    """Have it fire once now."""
    key, entry = _found(state, asked)
    check_quota(state.tenants[entry.tenant])
    ended = _begin(state, key, entry, state.now, f"{entry.type}/{iso(state.now)}/{state.version()}")
    return {"cron": shown(entry)}, ended
