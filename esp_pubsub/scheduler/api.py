"""The scheduler's HTTP API: BigBen's paths, payloads and answers as they are, and ours besides.

A request that changes something is a command to the engine (`client.call`), one that looks is a question
(`client.ask`): so every member serves it, whichever leads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

import esp_pubsub as esp

from .client import SchedulerClient
from .cron import cron
from .describe import describe
from .dialects import CronRefused
from .events import Refused, refused

_MOST = 10_000  # events of one request
_FIELDS = ("tenant", "id", "eventTime", "payload", "mode", "deliveryOption")
_ROLES = {"active": "Master"}
Handler = Callable[[web.Request], Awaitable[web.Response]]


class Api:
    """The routes of one scheduler."""

    def __init__(self, client: esp.Client, url: str, members: Callable[[], Sequence[tuple[str, str]]]) -> None:
        """`members`: of the engine, their names and roles."""
        self._scheduler = SchedulerClient(client, url)
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
        answers = await self._scheduler.schedule(items)
        rejected = sum(answer["eventStatus"] == "REJECTED" for answer in answers)
        status = 200 if not rejected else 206 if rejected < len(items) else 400
        return web.json_response(
            [_said(item) | answer for item, answer in zip(items, answers, strict=True)], status=status
        )

    async def _find(self, request: web.Request) -> web.Response:
        return await self._asked("find", tenant=_given(request, "tenant"), id=_given(request, "id"))

    async def _dry_run(self, request: web.Request) -> web.Response:
        tenant, id = _given(request, "tenant"), _given(request, "id")
        (found,) = await self._scheduler.schedule([{"tenant": tenant, "id": id, "mode": "DRYRUN"}])
        if "error" in found:
            return _refusal(found["error"]["code"], found["error"]["message"])
        return await self._asked("find", tenant=tenant, id=id)

    # what is asked

    def _ask_for(self, what: str, key: str | None = None) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            asked = {name: int(text) if _is_number(name, text) else text for name, text in request.query.items()}
            return await self._asked(what, key, **asked)

        return answer

    async def _asked(self, question: str, key: str | None = None, /, **of: Any) -> web.Response:
        try:
            answer = await self._scheduler.ask(question, **of)
        except Refused as refusal:
            return _refusal(refusal.code, str(refusal))
        return web.json_response(answer if key is None else answer[key])

    # tenants and crons

    async def _register(self, request: web.Request) -> web.Response:
        body = await _body(request, dict)
        await self._scheduler.command("tenant", **body)
        return await self._asked("tenants", "tenants")

    async def _tenant(self, request: web.Request) -> web.Response:
        tenant = request.query.get("tenant")
        of = {} if tenant is None else {"tenant": tenant}
        return web.json_response(await self._scheduler.command(request.match_info["do"], **of))

    async def _set_cron(self, request: web.Request) -> web.Response:
        return web.json_response(await self._scheduler.command("cron", **await _body(request, dict)))

    async def _describe(self, request: web.Request) -> web.Response:
        expression, kind = _given(request, "expression"), request.query.get("type", "QUARTZ")
        try:
            cron(expression, kind, "UTC", "after")
            return web.json_response({"description": describe(expression, kind)})
        except CronRefused as refused:
            return web.json_response({"message": str(refused)}, status=400)

    async def _crons_of(self, request: web.Request) -> web.Response:
        at = request.match_info
        return await self._asked("crons", "crons", tenant=at["tenant"], id=at["id"])

    async def _remove_cron(self, request: web.Request) -> web.Response:
        return web.json_response(await self._scheduler.command("remove cron", **request.match_info))

    async def _log(self, request: web.Request) -> web.Response:
        return await self._asked("log", **request.match_info)

    async def _cron(self, request: web.Request) -> web.Response:
        at = dict(request.match_info)
        return web.json_response(await self._scheduler.command(f"{at.pop('do')} cron", **at))


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


def _said(item: Any) -> dict[str, Any]:
    """What an answer repeats of its request."""
    return {name: item.get(name) for name in _FIELDS} if isinstance(item, dict) else {}


def _refusal(code: int, why: str) -> web.Response:
    return web.json_response({"status": "not found"} if code == 404 else {"message": why}, status=code)
