"""The conformance suite over Solace: a double of the broker, see tests/support/solace.py; and, where SOLACE_CFG names a
solace.cfg, a real one, which keeps the queues that were made.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from esp_pubsub.bus import Bus
from esp_pubsub.config import load_options
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.registry import driver
from esp_pubsub.testing import conformance
from tests.support.proxy import Proxy
from tests.support.server import HOST
from tests.support.solace import Solace, plain_place
from tests.support.solace import open_bus as open_double

MODES: dict[str, dict[str, Any]] = {"direct": {}, "persistent": {"buspersistence": True}}
CASES = [(mode, name) for mode in MODES for name in conformance.CHECKS]
ACKNOWLEDGED = 1.5  # seconds after which the client has sent its acknowledgements, of which it hears nothing more
REAL = os.environ.get("SOLACE_CFG")

pytest_plugins = ["tests.support.solace_client"]


def context(solace: Solace, settings: dict[str, Any]) -> conformance.Context:
    found = driver("solace")
    options = found.Options(host=f"{HOST}:{solace.port}", username="us", timeout=8.0, keepalive=8.0, **settings)

    @asynccontextmanager
    async def fail_in_the_middle(bus: Any, topic: str) -> AsyncIterator[bytes]:
        """One of the queues takes no large message; so the broker refuses that one, and takes what follows."""
        solace.add_queue("small", topic, largest=10_000)
        yield bytes(20_000)
        del solace.queues["small"]

    async def cut(bus: Any) -> None:
        """The link is gone, and nobody is there to connect to."""

        async def nobody() -> Any:
            raise BusUnavailable("nobody is there")

        bus._connect = nobody
        bus._link.lose(BusUnavailable("cut"))

    return conformance.Context(
        open_bus=lambda: open_double(options),
        fail_in_the_middle=fail_in_the_middle if options.buspersistence else None,
        cut=cut,
        patience=20.0,
        quiet=0.03,
    )


@pytest.mark.parametrize(("mode", "name"), CASES)
async def test_the_driver_over_the_double(mode: str, name: str) -> None:
    async with Solace() as solace:
        try:
            await conformance.CHECKS[name](context(solace, MODES[mode]))
        except conformance.NotClaimed as why:
            pytest.skip(str(why))


@pytest.mark.usefixtures("solace_client", "what_is_left_is_told")
@pytest.mark.skipif(REAL is None, reason="SOLACE_CFG names no broker: make test-solace SOLACE_CFG=path")
@pytest.mark.parametrize(("mode", "name"), CASES)
async def test_the_driver_over_a_broker(mode: str, name: str) -> None:
    found = driver("solace")
    options = await asyncio.to_thread(load_options, found.Options, section="solace", config=REAL, keywords=MODES[mode])

    place = plain_place(options.host)
    links: dict[Any, Proxy] = {}
    async with AsyncExitStack() as stack:

        async def open_bus() -> Bus:
            if place is None:
                return await found.open_bus(options)
            link = await stack.enter_async_context(await asyncio.to_thread(Proxy, *place))  # it reads a file
            bus = await found.open_bus(replace(options, host=f"{HOST}:{link.port}"))
            links[bus] = link
            return bus

        async def cut(bus: Any) -> None:
            await asyncio.sleep(ACKNOWLEDGED)
            links[bus].refuse()
            links[bus].cut()

        context = conformance.Context(open_bus=open_bus, cut=cut if place else None, patience=20.0, quiet=0.3)
        try:
            await conformance.CHECKS[name](context)
        except conformance.NotClaimed as why:
            pytest.skip(str(why))
