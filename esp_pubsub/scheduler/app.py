"""The whole scheduler in one process: a member of the engine, a delivery worker, the HTTP server. Run it twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import NamedTuple

import esp_pubsub as esp
from esp_pubsub import http

from .api import Api
from .model import Scheduler
from .worker import Deliverer, Targets

WORKERS = "scheduler-workers"
"""The group in which workers read the calls."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What can be set on one process of a scheduler."""

    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    """Needed by requests that change something where `host` is not this machine's own."""
    concurrency: int = 100
    """Calls at the same time, of all tenants."""
    hosts: tuple[str, ...] = field(default=())
    """Which may be called: names, and `.example.org` for all below it; all, if there are none."""
    private: bool = False
    """Whether addresses may be called that are not public."""


class Running(NamedTuple):
    """A process of a scheduler at work."""

    engine: esp.Engine
    port: int
    worker: asyncio.Task[None]

    async def ended(self) -> None:
        """Wait until the engine's member or the worker has ended; raises what ended it."""
        member = asyncio.ensure_future(self.engine.wait())
        try:
            await asyncio.wait([member, self.worker], return_when=asyncio.FIRST_COMPLETED)
            for each in (member, self.worker):
                if each.done():
                    each.result()
        finally:
            member.cancel()


@asynccontextmanager
async def running(
    client: esp.Client,
    url: str,
    options: SchedulerOptions | None = None,
    *,
    snapshots: str | PathLike[str] | None = None,
    engine: esp.EngineOptions | None = None,
) -> AsyncIterator[Running]:
    """Be one process of the scheduler at `url`, a project and a contquery, while the context lasts."""
    options = options or SchedulerOptions()
    members: list[esp.Engine] = []
    api = Api(client, url, lambda: members[0].members if members else [])
    async with (
        http.serve(
            api.routes(), host=options.host, port=options.port, token=options.token, open_here=True
        ) as port,  # first: if the place is taken, nothing has begun
        client.engine(Scheduler(), url, snapshots=snapshots, options=engine) as member,
        Deliverer(Targets(options.hosts, private=options.private)) as deliverer,
    ):
        members.append(member)
        worker = asyncio.create_task(
            esp.effect(
                client, f"{url}/Calls", f"{url}/Outcomes", deliverer, group=WORKERS, concurrency=options.concurrency
            ),
            name=f"esp scheduler {url}",
        )
        try:
            yield Running(member, port, worker)
        finally:
            worker.cancel()
            await asyncio.wait([worker])
