"""The one HTTP server of the package (extra `http`): health of clients, counts of engines, an API of applications.

It listens on the loopback interface unless told otherwise, and then answers only requests that name this machine, so
that no page in a browser can reach it under a name of its own, nor from another site. It only reads unless it was given
a token: everything but GET and HEAD needs `Authorization: Bearer <token>`. An application may open it to this machine.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING

from .errors import BusRefused, BusUnavailable, Closed, ConfigError, EspError, NoAnswer, NotInstalled

try:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware
    from yarl import URL
except ImportError as e:
    raise NotInstalled("the HTTP server needs aiohttp: pip install 'esp-pubsub[http]'", extra="http") from e

if TYPE_CHECKING:
    from .client import Client

_log = logging.getLogger("esp_pubsub.http")
_LARGEST = 1 << 20  # bytes of a request's body
_ENDING = 2.0  # seconds that requests under way have when the server ends
_READS = ("GET", "HEAD")
_ANSWERS = 0.5  # seconds that the bus has when a probe asks: Kubernetes waits for one second
_STATUS = ((ConfigError, 400), (NoAnswer, 504), (BusUnavailable, 503), (BusRefused, 502), (Closed, 503))


@asynccontextmanager
async def serve(
    routes: Iterable[web.RouteDef],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    open_here: bool = False,
) -> AsyncIterator[int]:
    """Serve these routes while the context lasts; gives the port, which the system chooses where `port` is 0.

    `open_here`: on the loopback interface, what changes something needs no token.

    An EspError in a handler is an answer with its text, and with its `code` as status if it has one; any other
    exception is one of status 500, and is logged.
    ConfigError where this place cannot be listened on.
    """
    app = web.Application(
        middlewares=[_guard(host, token, open_here=open_here), _answer_errors], client_max_size=_LARGEST
    )
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_ENDING)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{host}:{port} cannot be listened on: {error}") from None
        bound = int(runner.addresses[0][1])
        _log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, bound)
        yield bound
    finally:
        await runner.cleanup()


def probes(client: Client) -> list[web.RouteDef]:
    """What `client.health()` says, as JSON, where Kubernetes and the like look for it.

    GET /alive: status 503 once a publisher or an engine has failed for good; restart the process. GET /ready: status
    503 also while the bus does not answer, or an engine cannot read its input.
    """

    async def alive(_: web.Request) -> web.Response:
        health = await client.health(_ANSWERS)
        return web.json_response(health.as_dict(), status=200 if health.alive else 503)

    async def ready(_: web.Request) -> web.Response:
        health = await client.health(_ANSWERS)
        return web.json_response(health.as_dict(), status=200 if health else 503)

    return [web.get("/alive", alive), web.get("/ready", ready)]


def place(text: str) -> tuple[str, int]:
    """Host and port of `PORT`, `HOST:PORT` or `[HOST]:PORT`. ConfigError for anything else."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"a place to listen on is PORT or HOST:PORT, such as 8080, not {text!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_ours(origin: str | None) -> bool:
    return origin is None or _is_loopback((URL(origin).host or "").strip("[]"))


def _guard(host: str, token: str | None, *, open_here: bool) -> Middleware:
    at_home = _is_loopback(host)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if at_home and not _is_loopback((request.url.host or "").strip("[]")):
            return _error(403, "this server answers requests to this machine only: ask localhost")
        if at_home and not _is_ours(request.headers.get("Origin")):
            return _error(403, "this server answers no page of another site")
        if request.method not in _READS and not (open_here and at_home):
            if token is None:
                return _error(403, "this server only reads: start it with a token")
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return _error(401, "this needs the header Authorization: Bearer <token>")
        return await handler(request)

    return guard


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as answer:
        return _error(answer.status, answer.reason) if answer.status >= 400 else answer
    except EspError as error:
        known = getattr(error, "code", None)
        status = known if isinstance(known, int) else next((s for kind, s in _STATUS if isinstance(error, kind)), 500)
        return _error(status, str(error))
    except Exception:  # noqa: BLE001  # a fault in a handler ends no server
        _log.exception("%s %s failed", request.method, request.path)
        return _error(500, "this request failed; the server's log says why")


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"message": text}, status=status)
