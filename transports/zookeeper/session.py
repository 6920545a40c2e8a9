"""One ZooKeeper session on kazoo. Nothing of kazoo's, neither object nor exception nor thread, leaves this file.

Threads
    kazoo has three for each client: one that connects, reads and pings, one for answers, one for watches. Its calls
    may block, so we add a fourth that makes them all, one after the other; starting and stopping at the same time is
    what kazoo cannot bear. A request is only begun there: its answer, like every change of state and every watch,
    crosses to the loop by `_cross` alone, and what runs in kazoo's threads does nothing else.

States
    `new` until it is connected for the first time, then `connected` or `suspended` (the link is gone, and the server
    may or may not hold the session still), at last `lost`. `lapses` counts how often it was connected no more, so
    that a link which came back at once does not hide that it was gone.

The end
    Closing ends the session, and with it all that it made, requests without an answer and those still on their way
    included. A server that does not answer gets its link cut, which ends every wait of kazoo's; then the server ends
    the session after its length. A thread that resolves a name cannot be interrupted: it is left to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.states import EventType, KazooState
from kazoo.retry import KazooRetry

State = Literal["new", "connected", "suspended", "lost"]

FAREWELL = 0.5  # seconds for the server to say that the session is closed
END = 2.0  # seconds for the threads to end once the link is cut
_REACH = 1.0  # the most seconds for one TCP connection; less with more servers, to find one that lives in time
_STATES: dict[str, State] = {
    KazooState.CONNECTED: "connected",
    KazooState.SUSPENDED: "suspended",
    KazooState.LOST: "lost",
}
_log = logging.getLogger("esp_pubsub.zookeeper")


class Trouble(Exception):
    """ZooKeeper refused, or did not answer; then nobody knows what it did."""


class NoNode(Trouble):
    """There is no such node."""


class Session:
    """A session of our own, never used again after its end. It belongs to the loop on which it was made."""

    def __init__(self, hosts: str, length: float, told: Callable[[], None]) -> None:
        """`told` is called on the loop after every change of what can be seen here."""
        self.length = length
        """In seconds: what was asked for, then what the server granted."""
        self.state: State = "new"
        self.lapses = 0
        self.stirs = 0
        """How often anything happened that is a reason to look again."""
        self.deleted: set[str] = set()
        """Nodes that were watched and are gone."""
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(1, "esp zookeeper")
        self._link: socket.socket | None = None
        self._abandoned = self._closed = False
        self._each = max(0.2, min(_REACH, length / len(hosts.split(","))))
        handler = SequentialThreadingHandler()
        self._connect = handler.create_connection
        handler.create_connection = self._reach
        self._client = KazooClient(
            hosts,
            timeout=length,
            handler=handler,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, max_delay=0.5, sleep_func=handler.sleep_func),
            logger=_Overheard(lambda seconds: self._cross(self._grant, seconds)),
        )
        self._client.add_listener(lambda state: self._cross(self._become, _STATES[state]))

    # in kazoo's threads

    def _cross(self, function: Callable[..., None], *arguments: Any) -> None:
        """The one bridge. A loop that is closed is told nothing more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _reach(self, *arguments: Any, timeout: float = _REACH, **keywords: Any) -> socket.socket:
        """kazoo's own way to connect, with a bound, and with the link in our hands too."""
        link: socket.socket = self._connect(*arguments, timeout=min(timeout, self._each), **keywords)
        self._link = link
        if self._abandoned:
            link.close()
            raise ConnectionAbortedError("closing")
        return link

    def _on_watch(self, event: Any) -> None:
        self._cross(self._stir, event.path if event.type == EventType.DELETED else None)

    # on the loop

    def _grant(self, seconds: float) -> None:
        self.length = seconds

    def _become(self, state: State) -> None:
        self.state = state
        self.lapses += state != "connected"
        self._stir(None)

    def _stir(self, deleted: str | None) -> None:
        if deleted is not None:
            self.deleted.add(deleted)
        self.stirs += 1
        self._told()

    async def open(self) -> None:
        """Begin to connect, which goes on forever. Returns at once."""
        try:
            await self._loop.run_in_executor(self._worker, self._client.start_async)
        except (OSError, RuntimeError) as error:  # no more files or threads
            raise Trouble(str(error)) from None

    async def create(self, prefix: str, data: str) -> str:
        """Make an ephemeral sequential node, with the path to it; returns its path. After Trouble or cancellation it
        may exist all the same, until the session ends.
        """
        path: str = await self._ask("create_async", prefix, data.encode(), ephemeral=True, sequence=True, makepath=True)
        return path

    async def children(self, path: str) -> list[str]:
        """The names of all nodes there."""
        names: list[str] = await self._ask("get_children_async", path)
        return names

    async def watch(self, path: str) -> bool:
        """Be stirred, once, by what happens to this node; False if it is gone already."""
        try:
            await self._ask("get_async", path, watch=self._on_watch)
        except NoNode:
            return False
        return True

    async def _ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """One request. Trouble without an answer within a session's length."""
        if self._closed:
            raise Trouble("the session was closed")
        answer: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any) -> None:
            if not answer.done():
                answer.set_result(result)

        def begin() -> None:
            result = getattr(self._client, operation)(*arguments, **keywords)
            result.rawlink(lambda result: self._cross(settle, result))

        try:
            async with asyncio.timeout(self.length):
                await self._loop.run_in_executor(self._worker, begin)
                error = (await answer).exception
        except TimeoutError:
            raise Trouble(f"no answer within {self.length:g} s") from None
        if error is not None:
            raise (NoNode if isinstance(error, NoNodeError) else Trouble)(f"{type(error).__name__} {error}".rstrip())
        return answer.result().value

    async def close(self) -> None:
        """End the session and the threads. Takes FAREWELL at most, and a moment more, whatever state ZooKeeper is in.

        Must be called once, and not be cancelled.
        """
        self._closed = True
        ending = self._loop.run_in_executor(self._worker, self._end)
        self._worker.shutdown(wait=False)
        if self.state == "connected":
            await asyncio.wait([ending], timeout=FAREWELL)
        self._abandon()
        await asyncio.wait([ending], timeout=END)
        if not ending.done():
            _log.warning("a thread of kazoo's has not ended after %g s and is left to itself", FAREWELL + END)

    def _end(self) -> None:
        try:
            self._client.stop()
            self._client.close()
        except Exception:  # noqa: BLE001  # nobody could do anything about it
            _log.debug("closing a session", exc_info=True)

    def _abandon(self) -> None:
        self._abandoned = True
        if self._link is not None:
            with contextlib.suppress(OSError):  # closed already
                self._link.shutdown(socket.SHUT_RDWR)


class _Overheard(logging.LoggerAdapter[logging.Logger]):
    """What kazoo says goes to a log of its own, for debugging: it warns at every retry. And the session's length that
    the server granted is in one line of it and nowhere else.
    """

    def __init__(self, granted: Callable[[float], None]) -> None:
        super().__init__(_log.getChild("kazoo"), {})
        self._granted = granted

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if "negotiated session timeout" in str(msg) and len(args) > 2:
            self._granted(args[2] / 1000)
        if level >= logging.DEBUG:
            super().log(logging.DEBUG, msg, *args, **kwargs)
