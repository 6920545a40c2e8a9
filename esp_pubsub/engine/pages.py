"""What a member of an engine shows over HTTP, whatever its role is: health, figures, and the rows of its windows.

GET /health     JSON; status 503 where this member is of no use: it has ended, or cannot read an input
GET /engine     JSON: role, steps, positions, lines
GET /windows    the rows of each window, as SAS's engines show them in XML; as JSON where that is accepted
GET /metrics    for Prometheus
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from aiohttp import web

from ..errors import NotOffered

if TYPE_CHECKING:
    from .engine import Engine

_PROMETHEUS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


def routes(engine: Engine) -> list[web.RouteDef]:
    """The pages of one member."""

    async def health(_: web.Request) -> web.Response:
        stats = engine.stats
        good = stats.role != "left" and not stats.hindered
        text = "ok" if good else "ended" if stats.role == "left" else "an input, or the order, cannot be read"
        return web.json_response({"status": text, "role": stats.role}, status=200 if good else 503)

    async def figures(_: web.Request) -> web.Response:
        return web.json_response(_figures(engine))

    async def windows(request: web.Request) -> web.Response:
        counts = _counts(engine)
        if counts is None:
            raise NotOffered("this engine's model counts no rows: give it a method counts()")
        if "application/json" in request.headers.get("Accept", ""):
            return web.json_response({name: {"kind": kind, "count": count} for name, (kind, count) in counts.items()})
        return web.Response(text="".join(_xml(engine, counts)), content_type="text/xml")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="".join(f"{line}\n" for line in _metrics(engine)), headers=_PROMETHEUS)

    return [
        web.get("/health", health),
        web.get("/engine", figures),
        web.get("/windows", windows),
        web.get("/metrics", metrics),
    ]


def _counts(engine: Engine) -> dict[str, tuple[str, int]] | None:
    counts = getattr(engine.model, "counts", None)
    return None if counts is None else counts()


def _figures(engine: Engine) -> dict[str, Any]:
    stats = engine.stats
    figures = asdict(stats)
    switch = stats.last_switch
    figures["last_switch"] = None if switch is None else {"role": switch.role, "event": switch.event, "at": switch.at}
    return {"url": str(engine.address), **figures, "members": engine.members}


def _xml(engine: Engine, counts: dict[str, tuple[str, int]]) -> Iterator[str]:
    """As figure 8 of SAS's paper has it: ordered by kind and name."""
    project, contquery = quoteattr(str(engine.address.project)), quoteattr(str(engine.address.contquery))
    yield "<windows>\n"
    for name, (kind, count) in sorted(counts.items(), key=lambda each: (each[1][0], each[0])):
        yield (
            f'  <window-{kind} contquery={contquery} count="{count}" name={quoteattr(name)} project={project}/>\n'
        )  # fmt: skip
    yield "</windows>\n"


def _metrics(engine: Engine) -> Iterator[str]:
    stats, at = engine.stats, f'url="{engine.address}"'

    def number(name: str, kind: str, help: str, *values: tuple[str, float]) -> Iterator[str]:
        yield f"# HELP esp_engine_{name} {help}"
        yield f"# TYPE esp_engine_{name} {kind}"
        yield from (f"esp_engine_{name}{{{at}{labels}}} {value:.17g}" for labels, value in values)

    yield from number("steps_total", "counter", "Blocks and timers stepped on.", ("", stats.steps))
    yield from number("active", "gauge", "Whether this member leads.", ("", stats.role == "active"))
    yield from number("hindered", "gauge", "Whether it cannot read an input, or the order.", ("", stats.hindered))
    named = [(f',window="{line.window}"', line) for line in stats.lines]
    yield from number("given", "gauge", "The last block computed.", *[(to, line.given) for to, line in named])
    yield from number("on_bus", "gauge", "The last block on the bus.", *[(to, line.on_bus) for to, line in named])
    waiting = [(to, line.waiting_bytes) for to, line in named]
    yield from number("waiting_bytes", "gauge", "Bytes of blocks that are not on the bus.", *waiting)
    if stats.last_snapshot is not None:
        yield from number("last_snapshot_seconds", "gauge", "When one counted last.", ("", stats.last_snapshot))
    counts = _counts(engine) or {}
    rows = [(f',window="{name}",kind="{kind}"', float(count)) for name, (kind, count) in counts.items()]
    yield from number("rows", "gauge", "The rows that a window holds.", *rows)
