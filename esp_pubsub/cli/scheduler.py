"""`esp scheduler`: one process of a scheduler, until a signal comes."""

from __future__ import annotations

import logging
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from .. import ConfigError, init
from .running import say

_PORT = 8080
_TOKEN = "ESP_PUBSUB_HTTP_TOKEN"  # its name


async def schedule(
    place: tuple[str, str, str | None, dict[str, Any]],
    snapshots: Path | None,
    http: str | None,
    hosts: tuple[str, ...],
    private: bool,
    concurrency: int,
) -> None:
    """Until a signal comes, or it fails. `place`: URL, bus, and its configuration."""
    from .. import http as server  # the extras
    from ..scheduler.app import SchedulerOptions, running

    logging.getLogger("esp_pubsub").setLevel(logging.INFO)
    url, bus, config, keys = place
    host, port = server.place(http) if http is not None else ("127.0.0.1", _PORT)

    def options(port: int) -> SchedulerOptions:
        return SchedulerOptions(
            host=host, port=port, token=os.environ.get(_TOKEN), hosts=hosts, private=private, concurrency=concurrency
        )

    async with init(bus, config=config, **keys) as client, AsyncExitStack() as stack:
        try:
            process = await stack.enter_async_context(running(client, url, options(port), snapshots=snapshots))
        except ConfigError:
            if http is not None:
                raise
            process = await stack.enter_async_context(running(client, url, options(0), snapshots=snapshots))
        say(f"scheduling at {url}; the API is at http://{host}:{process.port}")
        await process.ended()
