"""Election by a token: one message in a queue of which one consumer at a time is the active one.

Who has the token leads, and never acknowledges it; the rest stands in election.py.

What is held for half an hour the broker takes back, and closes the channel; so it is given back and comes again every
ten minutes. A queue without a token would elect nobody: whoever campaigns puts one in, the queue takes one at most, and
one too many does no harm, because whoever leads takes one only.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from esp_pubsub.errors import BusError, BusRefused

from .channel import LONGEST_NAME, Channel, Delivery, quoted, unused
from .election import ChannelElection
from .pipe import RabbitPipe

if TYPE_CHECKING:
    from .bus import RabbitBus

RENEW = 600.0
_ARGUMENTS: dict[str, Any] = {"x-single-active-consumer": True, "x-max-length": 1, "x-overflow": "reject-publish"}
_PROPERTIES = {"delivery_mode": 2}


class TokenElection(ChannelElection):
    """An `Election`."""

    def __init__(self, bus: RabbitBus, line: str) -> None:
        self._queue = quoted(f"token of {line}")
        super().__init__(bus, line, f"waiting for the {self._queue}")
        if len(self._queue) > LONGEST_NAME:
            raise BusRefused(
                f"a queue's name has at most {LONGEST_NAME} characters, {self._queue} has more: use shorter names"
            )
        self._tag: int | None = None

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

    async def _stand_in_line(self, channel: Channel) -> None:
        ask, what = self._link.ask, self._what
        self._tag = None
        channel.on_message = lambda token: self._take(channel, token)
        await ask(what, channel.queue_declare(self._queue, durable=True, arguments=_ARGUMENTS))
        with contextlib.suppress(BusError):  # refused where there is one already
            await RabbitPipe(self._link, channel, "", self._queue, _PROPERTIES).write([b"token"])
        await ask(what, channel.basic_qos(prefetch_count=1))
        await ask(what, channel.basic_consume(self._queue, unused))
        await self._until(lambda: self._tag is not None)

    def _take(self, channel: Channel, token: Delivery) -> None:
        if channel is self._channel:
            self._tag = token.tag
            self._news.tell()
