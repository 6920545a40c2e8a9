"""Failover groups on the embedded bus, as a user sees them: every member has its own client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.notices import Missed, Notice

URL, SCHEMA, GROUP = "dfESP://local:5555/p/q/w", "id*:int64,a:string", "feed"
TOPIC = "local:5555/p/q/w/I"
CLOSING = esp.PublisherOptions(close_timeout=0.3)  # for members that have something nobody will ever send


def rows(id: int, text: str = "x") -> list[tuple[int, str]]:
    """The block that every member builds for an id."""
    return [(id, text * 20), (-id, text)]


class AlwaysLeads:
    """An election that everybody wins at once and nobody ever loses."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def campaign(self) -> int:
        return 1

    async def watch(self) -> str:
        await asyncio.Event().wait()
        return "lost"

    async def resign(self) -> None:
        return


class Reader:
    """A subscriber that keeps what it gets and checks it at once."""

    def __init__(self, subscriber: esp.Subscriber, begin: int = 1) -> None:
        self.subscriber = subscriber
        self.following = begin

    async def to(self, last: int, *, run: int = 0, confirm_every: int = 0) -> None:
        """Read up to a block; every one must be the next."""
        async with asyncio.timeout(60):
            while self.following <= last:
                block = await anext(self.subscriber)
                assert (block.run, block.id, block.rows()) == (run, self.following, rows(block.id)), block
                self.following += 1
                if confirm_every and block.id % confirm_every == 0:
                    await self.subscriber.confirm(block)

    async def nothing_more(self, seconds: float = 0.2) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await anext(self.subscriber)


@contextlib.asynccontextmanager
async def reading(directory: Path, group: str | None = None) -> AsyncIterator[Reader]:
    notices: list[Notice] = []
    async with (
        esp.init(dir=directory, on_notice=notices.append) as client,
        client.subscriber(URL, SCHEMA, side="in", start="earliest", group=group) as subscriber,
    ):
        yield Reader(subscriber)
    assert not [notice for notice in notices if isinstance(notice, Missed)]


@contextlib.asynccontextmanager
async def member(
    directory: Path,
    *,
    url: str = URL,
    schema: str = SCHEMA,
    options: esp.PublisherOptions | None = None,
    **failover: Any,
) -> AsyncIterator[esp.Publisher]:
    """A member of the group with a client of its own; how it closes is up to the test that cares."""
    async with esp.init(dir=directory, on_notice=lambda notice: None) as client:
        publisher = await client.publisher(
            url, schema, failover=esp.Failover(**{"group": GROUP} | failover), options=options
        )
        try:
            yield publisher
        finally:
            with contextlib.suppress(esp.EspError):
                await publisher.aclose()


async def inject(publisher: esp.Publisher, first: int, last: int, *, pause: float = 0.0, text: str = "x") -> Any:
    """A part of the input."""
    delivery = None
    for id in range(first, last + 1):
        delivery = await publisher.inject(rows(id, text))
        assert delivery.id == id
        if pause:
            await asyncio.sleep(pause)
    return delivery


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what it looks at tells nobody
            await asyncio.sleep(0.005)


async def never(condition: Callable[[], bool], seconds: float) -> None:
    """What must not happen is watched for, for a while."""
    with pytest.raises(TimeoutError):
        await until(condition, seconds)


async def inject_until_refused(publisher: esp.Publisher, id: int) -> None:
    """Inject the same rows over and over, until that raises."""
    async with asyncio.timeout(60):
        while True:
            await publisher.inject(rows(id))
            await asyncio.sleep(0.01)


async def is_active(publisher: esp.Publisher) -> None:
    await until(lambda: publisher.stats.role == "active")


@contextlib.asynccontextmanager
async def pair(directory: Path, **failover: Any) -> AsyncIterator[tuple[esp.Publisher, esp.Publisher]]:
    """Two members; the first one leads."""
    async with member(directory, **failover) as a:
        await is_active(a)
        async with member(directory, **failover) as b:
            yield a, b


async def messages_on_topic(directory: Path) -> int:
    async with esp.init(dir=directory) as client:
        bounds = await client.bus.bounds(TOPIC)
    return bounds.end - bounds.first
