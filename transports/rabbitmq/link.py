"""Connections to one broker, by aiormq. Nothing of it leaves this folder.

Every question to the client is a task of its own, because it closes the channel of one that is cancelled; who is
cancelled here leaves it to itself.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Coroutine
from typing import Any, TypeVar

import aiormq.connection
from aiormq.connection import exception_by_code
from aiormq.exceptions import (
    AMQPConnectionError,
    AuthenticationError,
    ChannelInvalidStateError,
    ConnectionClosed,
    ProbableAuthenticationError,
)
from pamqp import commands
from yarl import URL

from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .channel import Channel, is_blocked
from .options import RabbitOptions, plain
from .refusals import trouble

T = TypeVar("T")
Purpose = str
_NO_LOGIN = 403
_LEAVE = 2.0  # seconds that a connection has to close in good order


class _Transport(aiormq.connection.TransportFactory):
    """The connection's socket, which can be aborted."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._transport: asyncio.WriteTransport | None = None

    async def create(self, url: URL, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(url.host, url.port, ssl=self._context)
        self._transport = writer.transport
        return reader, writer

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Heard:
    """What a broker says while a connection is opened. The client drops the words with which it closes one."""

    def __init__(self, frames: Any) -> None:
        self._frames = frames

    async def get_frame(self) -> Any:
        found = await self._frames.get_frame()
        if isinstance(closed := found[2], commands.Connection.Close) and closed.reply_code != _NO_LOGIN:
            raise exception_by_code(closed)
        return found


class _Connection(aiormq.connection.Connection):
    @staticmethod
    async def _rpc(request: Any, writer: Any, frame_receiver: Any, wait_response: bool = True) -> Any:
        heard: Any = _Heard(frame_receiver)
        return await aiormq.connection.Connection._rpc(request, writer, heard, wait_response)  # noqa: SLF001


class Link:
    """Connections to one broker, one for each purpose: one that writes can be blocked, and those that read must not."""

    def __init__(self, options: RabbitOptions, context: ssl.SSLContext | None) -> None:
        self.options = options
        self.timeout = options.timeout
        self.addresses = options.addresses
        self._context = context
        self._connections: dict[Purpose, tuple[aiormq.connection.Connection, _Transport]] = {}
        self._connecting = asyncio.Lock()
        self._asking: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def ask(self, what: str, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call to the client, within `timeout`. Cancelled: the call is carried out all the same."""
        asking = self._begin(call)
        late = asyncio.get_running_loop().call_later(self.timeout, asking.cancel)
        asking.add_done_callback(lambda _: late.cancel())
        await asyncio.wait([asking], timeout=self.timeout + 0.1)  # it may be too stuck to be cancelled
        return self._answer(what, asking)

    async def see_through(self, what: str, call: Coroutine[Any, Any, T]) -> T:
        """The result of what sees to its own end. Cancelled: it is carried out all the same."""
        asking = self._begin(call)
        await asyncio.wait([asking])
        return self._answer(what, asking)

    def _answer(self, what: str, asking: asyncio.Task[T]) -> T:
        if not asking.done() or asking.cancelled():
            raise BusUnavailable(f"{what}: no answer within {self.timeout:g} s, or the link was lost")
        error = asking.exception()
        if error is not None:
            raise trouble(what, error) from error
        return asking.result()

    def _begin(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(call)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also if nobody asks
        return task

    async def channel(self, purpose: Purpose, what: str, *, confirms: bool = False) -> Channel:
        """A new channel on the purpose's connection, which is made if it is not there or dead."""
        connection = await self._connected(purpose)
        if await is_blocked(connection):  # before there is a channel: one that was never opened must not be closed
            await self.ask(f"{what}: the broker is short of memory or disk", connection.ready())
        taken = connection.channels
        number = next(n for n in itertools.count(1) if n not in taken)
        if number > (connection.connection_tune.channel_max or 65_535):
            raise BusUnavailable(f"{what}: all {number - 1} channels of the connection are in use")
        channel = Channel(connection, number, what, confirms=confirms)
        taken[number] = channel
        try:
            await self.ask(what, channel.open())
        except BaseException:
            self.drop(channel)
            raise
        return channel

    def drop(self, channel: Channel) -> asyncio.Task[None]:
        """Close a channel, in a task of its own, within a bound."""
        return self._begin(self._drop(channel))

    async def _drop(self, channel: Channel) -> None:
        closing = self._begin(channel.close(ChannelInvalidStateError("this was closed")))
        await asyncio.wait([closing], timeout=self.timeout)
        closing.cancel()

    async def _connected(self, purpose: Purpose) -> aiormq.connection.Connection:
        async with self._connecting:
            if self._closed:
                raise BusUnavailable("this bus was closed")
            connection, _ = self._connections.get(purpose, (None, None))
            if connection is None or not connection.is_opened:
                if connection is not None:
                    self._begin(self._let_end(*self._connections.pop(purpose)))
                connection, transport = await self._connect(purpose)
                self._connections[purpose] = connection, transport
            return connection

    async def _connect(self, purpose: Purpose) -> tuple[aiormq.connection.Connection, _Transport]:
        """To the first node that lets us in."""
        failed: BusError | None = None
        for host, port in self.addresses:
            options, transport = self.options, _Transport(self._context)
            password = plain(options.password)
            url = URL.build(
                scheme="amqp", user=plain(options.userid), password=password, host=host, port=port,
                query={"heartbeat": str(int(options.heartbeat)), "name": f"esp-pubsub {purpose}"},
            )  # fmt: skip
            connection = _Connection(url, transport_factory=transport)
            connection.vhost = plain(options.vhost)
            try:
                await self.ask(f"RabbitMQ at {host}:{port}", connection.connect())
                return connection, transport
            except BusError as error:
                failed = failed or self._explained(error)
                self._begin(self._leave(connection, transport))
            except BaseException:
                self._begin(self._leave(connection, transport))
                raise
        assert failed is not None
        raise failed

    def _explained(self, error: BusError) -> BusError:
        """Why a node did not let us in, with the way out."""
        options, cause = self.options, error.__cause__
        if isinstance(cause, ProbableAuthenticationError | AuthenticationError):
            return BusRefused(f"{error}; check userid and password")
        if isinstance(cause, ConnectionClosed):
            lasts = isinstance(error, BusRefused)
            return BusRefused(f"{error}; check vhost, and what {options.userid} may do there") if lasts else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            return BusRefused(f"{error}; check sslcacert, and that host is a name of the certificate")
        if isinstance(cause, ssl.SSLError):
            return BusRefused(f"{error}; that port may speak no TLS, or want a certificate: check port, ssl, sslcert")
        if isinstance(cause, AMQPConnectionError):  # it hung up: all that brokers say of the wrong kind of connection
            way = (
                "expects TLS, set ssl = true"
                if self._context is None
                else "wants a certificate, set sslcert and sslkey"
            )
            return BusUnavailable(f"{error}; if that port {way}")
        return error

    async def _let_end(self, connection: aiormq.connection.Connection, transport: _Transport) -> None:
        """A connection that was lost is ending, and whoever waits on it is to hear the reason, not ours."""
        await asyncio.wait([connection.closing], timeout=_LEAVE / 2)
        await self._leave(connection, transport)

    async def _leave(self, connection: aiormq.connection.Connection, transport: _Transport) -> None:
        closing = self._begin(connection.close(AMQPConnectionError("this was closed")))
        await asyncio.wait([closing], timeout=_LEAVE)
        transport.abort()
        await asyncio.wait([closing], timeout=_LEAVE)

    def version(self, purpose: Purpose) -> tuple[int, ...]:
        """Of the broker that the purpose's connection leads to."""
        told: Any = self._connections[purpose][0].server_properties
        return tuple(int(part) for part in str(told["version"]).split(".")[:2])

    async def aclose(self) -> None:
        """Bounded; twice is harmless."""
        self._closed = True
        async with self._connecting:
            for connection, transport in self._connections.values():
                self._begin(self._leave(connection, transport))
            self._connections.clear()
        if self._asking:
            await asyncio.wait(self._asking, timeout=self.timeout + 2 * _LEAVE)


def security(options: RabbitOptions) -> ssl.SSLContext | None:
    """The TLS context; reads files, blocking."""
    if not options.ssl:
        return None
    context = ssl.create_default_context(cafile=options.sslcacert)
    if options.sslcert:
        context.load_cert_chain(options.sslcert, options.sslkey)
    return context
