"""A scheduler, used from Python over the bus: `client.scheduler(url)`. The HTTP API is written with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

import esp_pubsub as esp

from .events import refused
from .windows import INPUTS

_FIELDS = INPUTS["Events"].names
_TEXTS = _FIELDS[:-1]


class SchedulerClient:
    """Schedules, cancels and asks. Every call waits for the engine: NoAnswer after `timeout` seconds, and what was sent
    is then carried out once, if it is.
    """

    def __init__(self, client: esp.Client, url: str, timeout: float = 20.0) -> None:
        """`url`: the project and the contquery of the scheduler."""
        self._client = client
        self._url = url
        self._timeout = timeout

    async def schedule(self, events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Schedule, update or, with `mode` REMOVE, remove events. Each is a mapping of `tenant`, `id`, `eventTime` (ISO
        8601, or an aware datetime), and perhaps `payload`, `mode`, `deliveryOption`, `version`.

        Returns an answer for each: `eventStatus` (ACCEPTED, UPDATED, TRIGGERED, DELETED, REJECTED), `eventId`,
        `version`, and, if it was rejected, `error` with `code` and `message`.
        """
        rows = [_row(event) for event in events]
        sound = [row for row in rows if not isinstance(row, str)]
        found = iter(await self._call("Events", sound)) if sound else iter(())
        return [_rejected(400, row) if isinstance(row, str) else _answer(next(found)) for row in rows]

    async def cancel(self, tenant: str, id: str) -> bool:
        """Remove an event; False if there was none."""
        (answer,) = await self.schedule([{"tenant": tenant, "id": id, "mode": "REMOVE"}])
        if "error" in answer:
            raise refused(answer["error"]["code"], answer["error"]["message"])
        return bool(answer["eventStatus"] == "DELETED")

    async def command(self, do: str, /, **asked: Any) -> dict[str, Any]:
        """What a command answers; model.py names them. Refused if it cannot be carried out."""
        row = ("", msgspec.json.encode({**asked, "do": do}).decode())
        (found,) = await self._call("Commands", [row])
        _, code, _, _, _, _, _, message, body = found
        if code != 200:
            raise refused(code, message or "the scheduler refused this")
        return dict(msgspec.json.decode(body))

    async def register(
        self, tenant: str, type: str, props: Mapping[str, Any], limits: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Take a tenant on, or change it."""
        return await self.command("tenant", tenant=tenant, type=type, props=props, limits=limits or {})

    async def cron(self, tenant: str, id: str, expression: str, **more: Any) -> dict[str, Any]:
        """Set up a cron; `more` are the fields of crons.SetCron, such as `type`, `zone` and `payload`."""
        return await self.command("cron", tenant=tenant, id=id, expression=expression, **more)

    async def ask(self, question: str, /, **of: Any) -> dict[str, Any]:
        """What the scheduler answers to `find`, `events`, `tenants`, `crons`, `log`, `backlog` or `counts`; see
        questions.py. Refused for what there is not, or what cannot be asked.
        """
        answer = (await self._client.ask(self._url, {**of, "ask": question}, timeout=self._timeout)).value
        if "error" in answer:
            raise refused(answer["code"], answer["error"])
        return dict(answer)

    async def _call(self, window: str, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        answers = f"{self._url}/Answers"
        return await self._client.call(f"{self._url}/{window}", rows, answers=answers, timeout=self._timeout)


def _row(event: Any) -> tuple[Any, ...] | str:
    """A row of the window Events, or why there is none."""
    if not isinstance(event, Mapping):
        return "an event is an object"
    if unknown := event.keys() - {*_FIELDS}:
        return f"{min(unknown)!r:.60} is no field of an event: {', '.join(_FIELDS)}"
    given = dict(event)
    if isinstance(at := given.get("eventTime"), datetime):
        given["eventTime"] = at.isoformat()
    if wrong := [name for name in _TEXTS if not isinstance(given.get(name), str | None)]:
        return f"{wrong[0]} is a text"
    version = given.get("version")
    if isinstance(version, bool) or not isinstance(version, int | None) or not -(1 << 63) <= (version or 0) < 1 << 63:
        return "version is a number"
    return tuple(given.get(name) for name in _FIELDS)


def _answer(row: tuple[Any, ...]) -> dict[str, Any]:
    _, code, status, _, _, version, event_id, message, _ = row
    answer: dict[str, Any] = {"eventStatus": status, "eventId": event_id, "version": version}
    return answer if code == 200 else answer | {"error": {"code": code, "message": message}}


def _rejected(code: int, why: str) -> dict[str, Any]:
    return {"eventStatus": "REJECTED", "error": {"code": code, "message": why}}
