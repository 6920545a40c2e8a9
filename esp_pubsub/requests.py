"""What can be asked about projects, queries and windows: from what the bus retains, else from who serves the metadata
topic.

A request and its answer are frames of kind request and reply whose body is one msgpack map.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from .address import Address
from .errors import BadFrame, EspError, NotOffered, SchemaError
from .retained import retained_schema
from .wire.frame import REPLY, REQUEST, frames, parse
from .wire.maps import read_map, seal_map

if TYPE_CHECKING:
    from .client import Client

_DEPTH = {"projects": 0, "queries": 1, "windows": 2, "windows_sourceonly": 2}


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
        return _names(await client.catalog().topics(), address, _DEPTH[what], source_only=what.endswith("sourceonly"))
    answer = await ask(client, address.metadata, {"get": what, "url": str(address)}, timeout)
    found = answer.get("answer")
    if not isinstance(found, list):
        raise SchemaError(f"{address}: {answer.get('error', 'the answer is not a list')}")
    return [str(item) for item in found]


def _names(topics: Any, address: Address, depth: int, *, source_only: bool) -> list[str]:
    """Names one level below the address, without doubles, sorted."""
    above = [part for part in (address.project, address.contquery)[:depth] if part is not None]
    found = set()
    for topic in topics:
        hostport, *parts = topic.split("/")
        if hostport != address.hostport or len(parts) != 4 or parts[: len(above)] != above:
            continue
        if not source_only or parts[3] == "I":
            found.add("/".join(parts[len(above) : depth + 1]))
    return sorted(found)


async def ask(client: Client, topic: str, question: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Ask whoever serves a topic; exactly one server answers. NoAnswer after `timeout` seconds."""
    reply = await client.requests().request(topic, _packed(REQUEST, question), timeout)
    return _unpacked(REPLY, reply)


async def serve(client: Client, topic: str, handler: Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]) -> None:
    """Answer requests on a topic until cancelled. A handler that raises answers with the error's text."""

    async def answer(data: bytes) -> bytes:
        try:
            return _packed(REPLY, await handler(_unpacked(REQUEST, data)))
        except Exception as e:  # noqa: BLE001  # the asker must hear of it, and the next one be served
            return _packed(REPLY, {"error": f"{type(e).__name__}: {e}" if not isinstance(e, EspError) else str(e)})

    await client.requests().serve(topic, answer)


def _packed(kind: int, values: Mapping[str, Any]) -> bytes:
    return frames([seal_map(kind, values)], 0, 0)[0]


def _unpacked(kind: int, data: bytes) -> dict[str, Any]:
    frame = parse(data)
    if frame.kind != kind:
        raise BadFrame(f"a frame of kind {frame.kind} where {kind} was expected", reason="wrong kind")
    return read_map(frame)
