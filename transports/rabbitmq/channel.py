"""A channel that tells us what the broker says, and the bytes of a message for the wire.

What aio-pika adds to aiormq, its own base, is in the way here: a task and a future for each message, recovery that
declares for us and says nothing, confirmations out of order, and a CancelledError that nobody caused. So a `Channel` is
aiormq's with its entry points overridden: it calls us with what the broker said, in its order.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiormq.channel
import aiormq.connection
from aiormq.abc import ChannelFrame
from pamqp import commands, frame
from pamqp.header import ContentHeader

from esp_pubsub.errors import BusError

from .refusals import trouble

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9\-_.:@#,/ ]")  # those that the client knows, without '+'
LONGEST_NAME = 255
_FRAME_OVERHEAD = 8
_BODY = 3


def quoted(name: str) -> str:
    """As the name of a queue: what it cannot have is written in hexadecimal behind a '+'."""
    return _NOT_IN_NAMES.sub(lambda found: "+" + found[0].encode().hex() + "+", name)


async def unused(_: object) -> None:
    """What aiormq wants called with each message; a `Channel` calls `on_message` in its place."""


class Delivery(NamedTuple):
    """One message as the broker handed it over."""

    tag: int
    data: bytes
    redelivered: bool
    properties: Any


def _nothing(*_: Any) -> None:
    return


class Channel(aiormq.channel.Channel):
    """Calls us with what the broker says on it. The callbacks must not raise, and there is one of each."""

    def __init__(self, connection: aiormq.connection.Connection, number: int, what: str, *, confirms: bool) -> None:
        super().__init__(connection, number, publisher_confirms=confirms, frame_buffer=1_000)
        self.what = what
        self.on_message: Callable[[Delivery], None] = _nothing
        self.on_confirm: Callable[[int, bool, bool], None] = _nothing
        self.on_return: Callable[[], None] = _nothing
        self.on_cancel: Callable[[], None] = _nothing
        self.on_end: list[Callable[[BusError], None]] = []
        self.on_consumer_cancel_callbacks.add(self._consumer_cancelled)
        self.closing.add_done_callback(self._ended)

    async def _content(self) -> tuple[Any, bytes]:
        header: Any = await self._get_frame()
        left, parts = header.body_size, []
        while left > 0:
            part: Any = await self._get_frame()
            parts.append(part.value)
            left -= len(part.value)
        return header.properties, parts[0] if len(parts) == 1 else b"".join(parts)

    async def _on_deliver_frame(self, frame: commands.Basic.Deliver) -> None:
        properties, data = await self._content()
        self.on_message(Delivery(frame.delivery_tag or 0, data, bool(frame.redelivered), properties))

    async def _on_return_frame(self, frame: commands.Basic.Return) -> None:
        await self._content()
        self.on_return()

    async def _on_confirm_frame(self, frame: Any) -> None:
        self.on_confirm(frame.delivery_tag, frame.multiple, isinstance(frame, commands.Basic.Ack))

    async def _on_close(self, exc: Any = None) -> None:
        """Say once that it is over. aiormq says it again where the answer takes longer than a heartbeat, and a broker
        that reads the second one late ends the connection. (The event is aiormq's own: its class has the same name.)
        """
        if not self.connection.is_opened or self.__close_event.is_set():
            return
        async with self.lock:  # so that nobody asks anything behind it
            if self.__close_event.is_set():
                return
            close = commands.Channel.Close(reply_code=200, reply_text="", class_id=0, method_id=0)
            try:
                await self.write_queue.put(ChannelFrame.marshall(self.number, [close]))
                await self.__close_event.wait()
            finally:
                self.__close_event.set()

    def _consumer_cancelled(self, frame: Any) -> None:
        self.on_cancel()

    def _ended(self, closing: asyncio.Future[Any]) -> None:
        ended = None if closing.cancelled() else closing.exception()
        error = trouble(self.what, self._close_exception or ended)
        for tell in self.on_end:
            tell(error)

    async def put(self, payload: bytes) -> None:
        """Bytes for the wire, as an `Envelope` makes them; returns when they are on their way."""
        sent = asyncio.get_running_loop().create_future()
        await self.write_queue.put(ChannelFrame(payload=payload, should_close=False, drain_future=sent))
        await sent

    def let_go(self, tag: int) -> bool:
        """Acknowledge everything up to here, without waiting. False if there is no room for it now."""
        return self._send(commands.Basic.Ack(delivery_tag=tag, multiple=True))

    def make_topic_exchange(self, name: str) -> bool:
        """Make a durable one unless it is there; in the manner of `let_go`, and so is what follows."""
        return self._send(commands.Exchange.Declare(exchange=name, exchange_type="topic", durable=True, nowait=True))

    def bind(self, queue: str, exchange: str, key: str) -> bool:
        """Bind a queue. Where that cannot be done the broker closes the channel."""
        return self._send(commands.Queue.Bind(queue=queue, exchange=exchange, routing_key=key, nowait=True))

    def _send(self, command: Any) -> bool:
        try:
            self.write_queue.put_nowait(ChannelFrame.marshall(self.number, [command]))
        except asyncio.QueueFull:
            return False
        return True

    async def until_unblocked(self) -> None:
        """Wait as long as the broker, short of memory or disk, takes no messages. Not for the link's end."""
        await self.connection.ready()

    async def is_blocked(self) -> bool:
        """Whether the broker takes no messages now."""
        return await is_blocked(self.connection)


async def is_blocked(connection: Any) -> bool:
    """Whether the broker, short of memory or disk, reads nothing from a connection now."""
    try:
        async with asyncio.timeout(0):
            await connection.ready()
    except TimeoutError:
        return True
    return False


class Envelope:
    """What goes around the bodies of messages to one address. All but the size is made once."""

    def __init__(self, channel: Channel, exchange: str, key: str, properties: Mapping[str, Any]) -> None:
        publish = commands.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
        header = ContentHeader(body_size=0, properties=commands.Basic.Properties(**properties))
        begin = frame.marshal(publish, channel.number) + frame.marshal(header, channel.number)
        at = len(frame.marshal(publish, channel.number)) + 11  # frame type 1, channel 2, size 4, class 2, weight 2
        self._begin, self._end = begin[:at], begin[at + 8 :]
        self._number = channel.number
        self._most = channel.connection.connection_tune.frame_max - _FRAME_OVERHEAD

    def add(self, parts: list[bytes], body: bytes) -> None:
        """Append the message's bytes."""
        size = len(body)
        parts += (self._begin, size.to_bytes(8, "big"), self._end)
        for at in range(0, size, self._most):
            piece = body if size <= self._most else body[at : at + self._most]
            parts += (struct.pack(">BHI", _BODY, self._number, len(piece)), piece, b"\xce")
