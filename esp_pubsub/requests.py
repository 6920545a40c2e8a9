"""What can be asked about projects, queries and windows: from what the bus retains, else from who serves the metadata
topic.

A request and its answer are frames of kind request and reply whose body is one msgpack map. A server answers one at a
time, so one that cannot answer yet says so with a mark, and is asked again with it. A request is written again where
its answer does not come soon, because its server may have died: it is such that it may be handled twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .address import Address
from .backoff import Backoff
from .bus import Requests
from .errors import BadFrame, EspError, NoAnswer, NotOffered, RequestRefused, SchemaError
from .retained import retained_schema
from .wire.frame import REPLY, REQUEST, frames, parse
from .wire.maps import read_map, seal_map

if TYPE_CHECKING:
    from .client import Client

_DEPTH = {"projects": 0, "queries": 1, "windows": 2, "windows_sourceonly": 2}
_TRY = 2.0  # seconds after which a request is written again
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25  # before one is asked again that was not done yet


class Answer(NamedTuple):
    """What the model of an engine answered, after so many steps."""

    value: Any
    step: int


async def query(client: Client, address: Address, timeout: float) -> list[str]:
    """Answer `address`'s `?get=`."""
    what = address.options.get
    if what is None:
        raise NotOffered(f"{address} asks nothing: add ?get=schema, ?get=projects, ?get=windows ...", capability="get")
    if what == "schema":
        address.require_window()
        for side in (address.options.side,) if address.options.side else ("out", "in"):
            schema = await retained_schema(client.bus, address.topic(side))
            if schema is not None:
                return [schema.text]
    elif what in _DEPTH and client.bus.capabilities.catalog:
        return names_below(await client.catalog().topics(), address)
    answer = await ask(client.requests(), address.metadata, {"get": what, "url": str(address)}, timeout)
    found = answer.get("answer")
    if not isinstance(found, list):
        raise SchemaError(f"{address}: {answer.get('error', 'the answer is not a list')}")
    return [str(item) for item in found]


def names_below(topics: Iterable[str], address: Address) -> list[str]:
    """What `address`'s `?get=` asks for of these topics: names one level below it, each once, sorted. NotOffered for
    what no names answer.
    """
    what = str(address.options.get)
    if what not in _DEPTH:
        raise NotOffered(f"nothing here answers ?get={what}", capability="get")
    depth, source_only = _DEPTH[what], what.endswith("sourceonly")
    above = [part for part in (address.project, address.contquery)[:depth] if part is not None]
    found = set()
    for topic in topics:
        hostport, *parts = topic.split("/")
        if hostport != address.hostport or len(parts) != 4 or parts[: len(above)] != above:
            continue
        if not source_only or parts[3] == "I":
            found.add("/".join(parts[len(above) : depth + 1]))
    return sorted(found)


async def ask(bus: Requests, topic: str, question: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Ask whoever serves a topic, until it is done. NoAnswer after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    ends, asked, backoff = loop.time() + timeout, dict(question), Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
    while True:
        left = ends - loop.time()
        try:
            reply = await ask_once(bus, topic, asked, min(max(left, 0.001), _TRY))
        except NoAnswer:
            if left > _TRY:
                continue
            raise NoAnswer(f"nobody answered on {topic} within {timeout:g} s", topic=topic, timeout=timeout) from None
        if "later" not in reply:
            return reply
        if (pause := backoff.next()) >= ends - loop.time():
            raise NoAnswer(f"what was asked on {topic} is not done after {timeout:g} s", topic=topic, timeout=timeout)
        asked["mark"] = reply["later"]
        await asyncio.sleep(pause)


async def ask_once(bus: Requests, topic: str, question: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Ask whoever serves a topic; the answer may be that it has to be asked again. NoAnswer after `timeout` seconds."""
    return _unpacked(REPLY, await bus.request(topic, _packed(REQUEST, question), timeout))


async def demand(bus: Requests, topic: str, question: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """What `ask` returns; RequestRefused where that is an error."""
    reply = await ask(bus, topic, question, timeout)
    if "error" in reply:
        raise RequestRefused(f"{topic}: {reply['error']}", topic=topic)
    return reply


async def serve(bus: Requests, topic: str, handler: Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]) -> None:
    """Answer requests on a topic until cancelled. A handler that raises answers with the error's text."""

    async def answer(data: bytes) -> bytes:
        try:
            return _packed(REPLY, await handler(_unpacked(REQUEST, data)))
        except Exception as e:  # noqa: BLE001  # the asker must hear of it, and the next one be served
            return _packed(REPLY, {"error": f"{type(e).__name__}: {e}" if not isinstance(e, EspError) else str(e)})

    await bus.serve(topic, answer)


def _packed(kind: int, values: Mapping[str, Any]) -> bytes:
    return frames([seal_map(kind, values)], 0, 0)[0]


def _unpacked(kind: int, data: bytes) -> dict[str, Any]:
    frame = parse(data)
    if frame.kind != kind:
        raise BadFrame(f"a frame of kind {frame.kind} where {kind} was expected", reason="wrong kind")
    return read_map(frame)
