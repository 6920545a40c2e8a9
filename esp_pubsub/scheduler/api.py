"""The scheduler's HTTP API: BigBen's paths, payloads and answers as they are, and ours besides.

A request that changes something is a command to the engine (`client.call`), one that looks is a question
(`client.ask`): so every member serves it, whichever leads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

import esp_pubsub as esp

from .cron import cron
from .describe import describe
from .dialects import CronRefused
from .events import refused

_MOST = 10_000  # events of one request
_ANSWERS = 20.0  # seconds to wait for the engine
_FIELDS = ("tenant", "id", "eventTime", "payload", "mode", "deliveryOption", "version")
_TEXTS = _FIELDS[:-1]
_ROLES = {"active": "Master"}
Handler = Callable[[web.Request], Awaitable[web.Response]]


class Api:
    """The routes of one scheduler."""

    def __init__(self, client: esp.Client, url: str, members: Callable[[], Sequence[tuple[str, str]]]) -> None:
        """`members`: of the engine, their names and roles."""
        self._client = client
        self._url = url
        self._members = members

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            web.get("/ping", self._ping),
            web.get("/events/cluster", self._cluster),
            web.post("/events/tenant/register", self._register),
            web.get("/events/tenants", self._ask_for("tenants", key="tenants")),
            web.post("/events/schedule", self._schedule),
            web.get("/events/find", self._find),
            web.post("/events/dryrun", self._dry_run),
            web.get("/events", self._ask_for("events")),
            web.get("/events/backlog", self._ask_for("backlog")),
            web.get("/events/counts", self._ask_for("counts")),
            web.post("/events/tenant/{do:pause|resume|retry}", self._tenant),
            web.post("/cron", self._set_cron),
            web.get("/cron/describe", self._describe),
            web.get("/crons", self._ask_for("crons")),
            web.get("/cron/{tenant}/{id}", self._crons_of),
            web.delete("/cron/{tenant}/{id}/{type}", self._remove_cron),
            web.get("/cron/{tenant}/{id}/{type}/log", self._log),
            web.post("/cron/{tenant}/{id}/{type}/{do:pause|resume|trigger}", self._cron),
        ]

    async def _ping(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "OK"})

    async def _cluster(self, _: web.Request) -> web.Response:
        found: dict[str, str] = {}
        for name, role in self._members():
            alike = sum(each.partition("#")[0] == name for each in found)
            found[f"{name}#{alike + 1}" if alike else name] = _ROLES.get(role, "Slave")
        return web.json_response(found)

    # events

    async def _schedule(self, request: web.Request) -> web.Response:
        items = await _body(request, list)
        if not items or len(items) > _MOST:
            return web.json_response([], status=400)
        answers = await self._events([_row(item) for item in items])
        rejected = sum(answer["eventStatus"] == "REJECTED" for answer in answers)
        status = 200 if not rejected else 206 if rejected < len(items) else 400
        return web.json_response(
            [_said(item) | answer for item, answer in zip(items, answers, strict=True)], status=status
        )

    async def _events(self, rows: list[tuple[Any, ...] | str]) -> list[dict[str, Any]]:
        """The answer to each row; a text in its place says why it is none."""
        sound = [row for row in rows if not isinstance(row, str)]
        found = iter(
            await self._client.call(f"{self._url}/Events", sound, answers=f"{self._url}/Answers", timeout=_ANSWERS)
            if sound
            else []
        )
        return [_rejected(400, row) if isinstance(row, str) else _answer(next(found)) for row in rows]

    async def _find(self, request: web.Request) -> web.Response:
        return await self._asked({"ask": "find", "tenant": _given(request, "tenant"), "id": _given(request, "id")})

    async def _dry_run(self, request: web.Request) -> web.Response:
        tenant, id = _given(request, "tenant"), _given(request, "id")
        found = (await self._events([(tenant, id, None, None, "DRYRUN", None, None)]))[0]
        if "error" in found:
            return web.json_response(_refusal(found["error"]), status=found["error"]["code"])
        return await self._asked({"ask": "find", "tenant": tenant, "id": id})

    # what is asked

    def _ask_for(self, what: str, key: str | None = None) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            asked = {name: int(text) if _is_number(name, text) else text for name, text in request.query.items()}
            return await self._asked({"ask": what, **asked}, key)

        return answer

    async def _asked(self, question: dict[str, Any], key: str | None = None) -> web.Response:
        answer = (await self._client.ask(self._url, question, timeout=_ANSWERS)).value
        if "error" in answer:
            status = answer["code"]
            return web.json_response(_not_found() if status == 404 else {"message": answer["error"]}, status=status)
        return web.json_response(answer if key is None else answer[key])

    # tenants and crons

    async def _command(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the engine answers to a command. Raises the HTTP error that it says."""
        row = ("", msgspec.json.encode(body).decode())
        found = await self._client.call(
            f"{self._url}/Commands", [row], answers=f"{self._url}/Answers", timeout=_ANSWERS
        )
        _, code, _, _, _, _, _, message, answer = found[0]
        if code != 200:
            raise refused(code, message or "the scheduler refused this")
        return dict(msgspec.json.decode(answer))

    async def _register(self, request: web.Request) -> web.Response:
        body = await _body(request, dict)
        await self._command({"do": "tenant", **body})
        return await self._asked({"ask": "tenants"}, "tenants")

    async def _tenant(self, request: web.Request) -> web.Response:
        tenant = request.query.get("tenant")
        body = {"do": request.match_info["do"]} | ({} if tenant is None else {"tenant": tenant})
        return web.json_response(await self._command(body))

    async def _set_cron(self, request: web.Request) -> web.Response:
        return web.json_response(await self._command({"do": "cron", **await _body(request, dict)}))

    async def _describe(self, request: web.Request) -> web.Response:
        expression, kind = _given(request, "expression"), request.query.get("type", "QUARTZ")
        try:
            cron(expression, kind, "UTC", "after")
            return web.json_response({"description": describe(expression, kind)})
        except CronRefused as refused:
            return web.json_response({"message": str(refused)}, status=400)

    async def _crons_of(self, request: web.Request) -> web.Response:
        at = request.match_info
        return await self._asked({"ask": "crons", "tenant": at["tenant"], "id": at["id"]}, "crons")

    async def _remove_cron(self, request: web.Request) -> web.Response:
        return web.json_response(await self._command({"do": "remove cron", **request.match_info}))

    async def _log(self, request: web.Request) -> web.Response:
        return await self._asked({"ask": "log", **request.match_info})

    async def _cron(self, request: web.Request) -> web.Response:
        at = dict(request.match_info)
        return web.json_response(await self._command({**at, "do": f"{at['do']} cron"}))


def _is_number(name: str, text: str) -> bool:
    return name in ("limit", "since", "until") and text.isascii() and text.isdigit() and len(text) < 18


async def _body(request: web.Request, kind: type) -> Any:
    try:
        body = msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, kind):
        raise refused(400, f"the body is a JSON {'list' if kind is list else 'object'}")
    return body


def _given(request: web.Request, name: str) -> str:
    text = request.query.get(name, "")
    if not text.strip():
        raise refused(400, f"{name} is missing")
    return text


def _row(item: Any) -> tuple[Any, ...] | str:
    """A row of the window Events, or why there is none."""
    if not isinstance(item, dict):
        return "an event is a JSON object"
    if unknown := item.keys() - {*_FIELDS}:
        return f"{min(unknown)!r:.60} is no field of an event: {', '.join(_FIELDS)}"
    if wrong := [name for name in _TEXTS if not isinstance(item.get(name), str | None)]:
        return f"{wrong[0]} is a text"
    version = item.get("version")
    if isinstance(version, bool) or not isinstance(version, int | None) or not -(1 << 63) <= (version or 0) < 1 << 63:
        return "version is a number"
    return tuple(item.get(name) for name in _FIELDS)


def _said(item: Any) -> dict[str, Any]:
    """What an answer repeats of its request."""
    return {name: item.get(name) for name in _FIELDS[:-1]} if isinstance(item, dict) else {}


def _answer(row: tuple[Any, ...]) -> dict[str, Any]:
    _, code, status, _, _, version, event_id, message, _ = row
    answer: dict[str, Any] = {"eventStatus": status, "eventId": event_id, "version": version}
    return answer if code == 200 else answer | {"error": {"code": code, "message": message}}


def _rejected(code: int, why: str) -> dict[str, Any]:
    return {"eventStatus": "REJECTED", "error": {"code": code, "message": why}}


def _refusal(error: Mapping[str, Any]) -> dict[str, Any]:
    return _not_found() if error["code"] == 404 else {"message": error["message"]}


def _not_found() -> dict[str, Any]:
    return {"status": "not found"}
