"""Election by a token: one message in a queue of which one consumer at a time is the active one.

Who has the token leads, and never acknowledges it. When that one's channel is gone, by whatever death, the broker hands
the token to the next in line. The channel stands on the connection that publishes: who is cut off from the token is cut
off from publishing by the same act. A frozen leader is found by the broker's heartbeat, after up to three of them.

What is held for half an hour the broker takes back, and closes the channel; so it is given back and comes again every
ten minutes. A queue without a token would elect nobody: whoever campaigns puts one in, the queue takes one at most, and
one too many does no harm, because whoever leads takes one only.

The token has no number, so the term is a retained value, which the next one counts up.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Literal

from esp_pubsub._news import News
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .channel import LONGEST_NAME, Channel, Delivery, quoted, unused
from .pipe import RabbitPipe

if TYPE_CHECKING:
    from .bus import RabbitBus

RENEW = 600.0
_ARGUMENTS: dict[str, Any] = {"x-single-active-consumer": True, "x-max-length": 1, "x-overflow": "reject-publish"}
_PROPERTIES = {"delivery_mode": 2}
_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_TERM = "term"


class TokenElection:
    """An `Election`."""

    def __init__(self, bus: RabbitBus, line: str) -> None:
        self._bus = bus
        self._link = bus.link
        self._line = line
        self._queue = quoted(f"token of {line}")
        if len(self._queue) > LONGEST_NAME:
            raise BusRefused(
                f"a queue's name has at most {LONGEST_NAME} characters, {self._queue} has more: use shorter names"
            )
        self._channel: Channel | None = None
        self._tag: int | None = None
        self._over: Literal["suspended", "lost"] | None = "lost"
        self._news = News()

    async def run(self) -> None:
        """See `Election.run`."""
        try:
            while True:
                await asyncio.sleep(RENEW)
                await self._renew()
        finally:
            self._drop()

    async def _renew(self) -> None:
        channel, tag = self._channel, self._tag
        if channel is None or tag is None:
            return
        try:
            await self._link.ask(f"renewing the {self._queue}", channel.basic_reject(tag, requeue=True))
            async with asyncio.timeout(self._link.timeout):
                while self._channel is channel and self._tag == tag:
                    await self._news.wait()
        except (BusError, TimeoutError):
            self._end(channel, "lost")

    async def campaign(self) -> int:
        """See `Election.campaign`."""
        pause = _PAUSE
        while True:
            self._drop()
            try:
                await self._stand_in_line()
                return await self._next_term()
            except BusUnavailable:
                self._drop()
            except BaseException:
                self._drop()
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _stand_in_line(self) -> None:
        """Returns when the token is ours."""
        what = f"waiting for the {self._queue}"
        channel = await self._link.channel("writing", what, confirms=True)
        self._channel, self._tag, self._over = channel, None, None
        channel.on_message = lambda token: self._take(channel, token)
        channel.on_cancel = lambda: self._end(channel, "lost")
        channel.on_end.append(lambda _: self._end(channel, "suspended"))
        await self._link.ask(what, channel.queue_declare(self._queue, durable=True, arguments=_ARGUMENTS))
        with contextlib.suppress(BusError):  # refused where there is one already
            await RabbitPipe(self._link, channel, "", self._queue, _PROPERTIES).write([b"token"])
        await self._link.ask(what, channel.basic_qos(prefetch_count=1))
        await self._link.ask(what, channel.basic_consume(self._queue, unused))
        while self._tag is None:
            self._check()
            await self._news.wait()

    async def _next_term(self) -> int:
        known = await self._bus.retained(self._line, _TERM)
        term = int(known or b"0") + 1
        await self._bus.retain(self._line, _TERM, b"%d" % term)
        self._check()
        return term

    def _check(self) -> None:
        if self._over is not None:
            raise BusUnavailable(f"the {self._queue} is out of reach")

    def _take(self, channel: Channel, token: Delivery) -> None:
        if channel is self._channel:
            self._tag = token.tag
            self._news.tell()

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
        """See `Election.resign`: whoever comes back stands behind the others."""
        dropping = self._drop()
        if dropping is not None:
            await asyncio.shield(dropping)

    def _drop(self) -> asyncio.Task[None] | None:
        channel, self._channel, self._tag = self._channel, None, None
        self._over = self._over or "lost"
        self._news.tell()
        return None if channel is None else self._link.drop(channel)
