"""What elections on this bus have in common: who leads does so as long as a channel is open.

The channel stands on the connection that publishes: who is cut off from it is cut off from publishing by the same act.
When it is gone, by whatever death, the broker lets the next one lead. A frozen leader is found by the broker's
heartbeat, after up to three of them.

What the broker hands over has no number, so the term is a retained value, which the next one counts up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from esp_pubsub._news import News
from esp_pubsub.backoff import Backoff
from esp_pubsub.errors import BusUnavailable

from .channel import Channel

if TYPE_CHECKING:
    from .bus import RabbitBus

_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_OTHERS_FIRST = 0.5  # seconds that who resigned leaves to those who are on their way into the line
_TERM = "term"


class ChannelElection:
    """An `Election`, but for `run` and how to come to lead."""

    def __init__(self, bus: RabbitBus, line: str, what: str) -> None:
        """`what`: what is waited for, for people."""
        self._bus = bus
        self._link = bus.link
        self._line = line
        self._what = what
        self._channel: Channel | None = None
        self._over: Literal["suspended", "lost"] | None = "lost"
        self._resigned = False
        self._news = News()

    async def campaign(self) -> int:
        """See `Election.campaign`."""
        self._drop()
        if self._resigned:
            await asyncio.sleep(_OTHERS_FIRST)
            self._resigned = False
        backoff = Backoff(_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                await self._stand_in_line(await self._open_channel())
                return await self._next_term()
            except BusUnavailable:
                self._drop()
            except BaseException:
                self._drop()
                raise
            await asyncio.sleep(backoff.next())

    async def _open_channel(self) -> Channel:
        channel = await self._link.channel("writing", self._what, confirms=True)
        self._channel, self._over = channel, None
        channel.on_cancel = lambda: self._end(channel, "lost")
        channel.on_end.append(lambda _: self._end(channel, "suspended"))
        return channel

    async def _stand_in_line(self, channel: Channel) -> None:
        """Returns when we lead."""
        raise NotImplementedError

    async def _next_term(self) -> int:
        known = await self._bus.retained(self._line, _TERM)
        term = int(known or b"0") + 1
        await self._bus.retain(self._line, _TERM, b"%d" % term)
        self._check()
        return term

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the broker says; BusUnavailable when it is over."""
        while not condition():
            self._check()
            await self._news.wait()

    def _check(self) -> None:
        if self._over is not None:
            raise BusUnavailable(f"{self._what}: it is {self._over}")

    def _end(self, channel: Channel, how: Literal["suspended", "lost"]) -> None:
        if channel is self._channel and self._over is None:
            self._over = how
            self._news.tell()

    async def watch(self) -> Literal["suspended", "lost"]:
        """See `Election.watch`."""
        while self._over is None:
            await self._news.wait()
        over = self._over
        self._drop()
        return over

    async def resign(self) -> None:
        """See `Election.resign`. Whoever comes back stands behind the others."""
        dropping = self._drop()
        if dropping is not None:
            self._resigned = True
            await asyncio.shield(dropping)

    def _drop(self) -> asyncio.Task[None] | None:
        channel, self._channel = self._channel, None
        self._over = self._over or "lost"
        self._news.tell()
        return None if channel is None else self._link.drop(channel)
