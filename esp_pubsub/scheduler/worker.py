"""The delivery worker: calls that the scheduler emits are made, and what came of each is told. It is an effect.

A tenant's URL is somebody's input. So a call goes to no private or local address unless that is allowed, neither named
nor by a name that leads there; it follows no redirect; what is read of an answer is bounded, in bytes and in time.
"""

from __future__ import annotations

import asyncio
import email.utils
import importlib.metadata
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

import esp_pubsub as esp

PROCESSORS = "esp_pubsub.processors"
"""The group of entry points that name what delivers to tenants of type CUSTOM_CLASS."""
_MOST_READ = 4_096  # bytes of an answer: its beginning is the error's text
_LEAST = 0.05  # seconds that are worth a try
_SHOWN = 500


class Told(NamedTuple):
    """What came of a call: an HTTP status, or 0 where there was no answer."""

    code: int
    text: str = ""
    retry_after: float = 0.0


Processor = Callable[[Mapping[str, Any], str], Awaitable[Told | None]]
"""Delivers a body to a tenant with these props. None is a success; what it raises is an error that is tried again."""


class Refused(esp.EspError):
    """A target that no call may go to."""


class Targets:
    """Where calls may go."""

    def __init__(self, allowed: Sequence[str] = (), *, private: bool = False) -> None:
        """`allowed`: hosts, and everything below `.example.org`; all, if there are none. `private`: also to addresses
        that are not public.
        """
        self._allowed = [each.lower() for each in allowed]
        self._private = private

    def check(self, url: str) -> None:
        """Refused for a URL that no call may go to."""
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        if parts.scheme not in ("http", "https") or not host:
            raise Refused(f"{url:.100} is no http or https URL")
        if self._allowed and not any(
            host == each or (each.startswith(".") and host.endswith(each)) for each in self._allowed
        ):
            raise Refused(f"{host} is not among the hosts that may be called")
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return  # a name: the resolver looks at what it leads to
        self.check_address(str(address))

    def check_address(self, address: str) -> None:
        """Refused for an address that no call may go to."""
        found = ipaddress.ip_address(address.partition("%")[0])
        found = getattr(found, "ipv4_mapped", None) or found
        if not self._private and (not found.is_global or found.is_multicast):
            raise Refused(f"{address} is no public address, and only those may be called")


class _Resolver(AbstractResolver):
    """Names lead to addresses that may be called."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        for each in found:
            self._targets.check_address(each["host"])
        return found

    async def close(self) -> None:
        await self._inner.close()


class Deliverer:
    """Makes calls; the handler of an effect."""

    def __init__(self, targets: Targets, processors: Mapping[str, Processor] | None = None) -> None:
        """`processors`: for tenants of type CUSTOM_CLASS, by their names, besides the entry points of PROCESSORS."""
        self._targets = targets
        self._processors = dict(processors or {})
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, resolver=_Resolver(self._targets))
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def __call__(self, call: esp.Call) -> tuple[str, int, int, str, float]:
        """Make one call; returns the row of its outcome. It never raises for what a target or a tenant does."""
        row = call.values
        left = row["deadline"] / 1e6 - time.time()
        if left < _LEAST:
            told = Told(0, "its deadline had passed before it could be made")
        else:
            try:
                async with asyncio.timeout(left):
                    told = await self._deliver(row)
            except TimeoutError:
                told = Told(0, "no answer within the deadline")
            except Refused as refused:
                told = Told(403, str(refused))
            except Exception as error:  # noqa: BLE001  # whatever a target, or a tenant's own class, does
                told = Told(0, f"{type(error).__name__}: {error}")
        return row["delivery"], row["attempt"], told.code, told.text[:_SHOWN], told.retry_after

    async def _deliver(self, row: Mapping[str, Any]) -> Told:
        props = msgspec.json.decode(row["props"])
        match row["type"]:
            case "HTTP":
                return await self._post(props, row)
            case "CUSTOM_CLASS":
                return await self._processor(str(props.get("class")))(props, row["body"]) or Told(200)
        return Told(501, f"this scheduler delivers to no tenant of type {row['type']}: its window is Fires")

    async def _post(self, props: Mapping[str, Any], row: Mapping[str, Any]) -> Told:
        self._targets.check(props["url"])
        headers = {"Content-Type": "application/json", **props.get("headers", {}), "Idempotency-Key": row["delivery"]}
        session = cast(aiohttp.ClientSession, self._session)
        async with session.post(
            props["url"], data=row["body"].encode(), headers=_sound(headers), allow_redirects=False
        ) as answer:
            text = await answer.content.read(_MOST_READ) if answer.status >= 300 else b""
            return Told(answer.status, text.decode("utf-8", "replace"), _seconds(answer.headers.get("Retry-After")))

    def _processor(self, name: str) -> Processor:
        if name not in self._processors:
            for found in importlib.metadata.entry_points(group=PROCESSORS, name=name):
                self._processors[name] = found.load()
        if name not in self._processors:
            raise Refused(f"there is no processor {name}: install one as an entry point of {PROCESSORS}")
        return self._processors[name]


def _sound(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers in one line each."""
    return {name: value.replace("\r", " ").replace("\n", " ") for name, value in headers.items()}


def _seconds(retry_after: str | None) -> float:
    """What `Retry-After` asks for, as seconds or as a date; 0 where it asks nothing that can be read."""
    if not retry_after:
        return 0.0
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
