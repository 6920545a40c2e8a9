"""The processes of a broker under test, and what all brokers have in common: they come up or say why, and nothing is
left of them.

All of it blocks and needs no event loop: `with Kafka() as kafka:` in plain code and in fixtures of a session, `async
with` in a coroutine, where the same code runs in a thread. There `kill`, `freeze` and `thaw` take milliseconds and are
called as they are; `stop` and `restart` take seconds: `await asyncio.to_thread(kafka.restart)`.

A client of a broker that is down tries again and again. On a port that the system itself gives to clients it would one
day be given that very port, be connected to itself, and keep the broker from coming back. So ports come from below
those.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")

HOST = "127.0.0.1"
PATIENCE = 180.0  # seconds that any one wait for a server may take
MANNERS = 10.0  # seconds that a server has to end by itself
# Ends a server, and removes its directory, when the process that started it is gone without having done so.
_GUARD = 'read _; case "$(readlink "/proc/$1/cwd")" in "$2"*) kill -9 "$1";; esac; sleep 1; rm -rf "$2"'


class ServerFailed(Exception):
    """A server did not come up. `clash`: because a port is taken."""

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(f"{why}\n{log[-3000:]}" if log else why)
        self.clash = re.search("already[ _](in[ _])?use|eaddrinuse", log) is not None


class _Ports:
    """The ports that this process gives its servers, each only after all the others: one that was given may be free
    until its server begins. Of pytest's workers each has a part of its own.
    """

    def __init__(self) -> None:
        self._all, self._next = range(0), 0
        self._giving = threading.Lock()

    def give(self, count: int) -> range:
        with self._giving:
            if not self._all:
                self._all = self._part()
                self._next = random.SystemRandom().choice(self._all)
            if self._next + count > self._all.stop:
                self._next = self._all.start
            self._next += count
            return range(self._next - count, self._next)

    def _part(self) -> range:
        clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        end = clients if clients > 12_000 else 60_000
        size = (end - 10_000) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        first = 10_000 + size * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        return range(first, first + size)


_ports = _Ports()


def free_ports(count: int) -> range:
    """Adjacent ports that nobody has on this host now."""
    for _ in range(100):
        ports = _ports.give(count)
        if all(map(_free, ports)):
            return ports
    raise ServerFailed(f"there are no {count} free ports")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def answers(port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def on_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from plain code. The thread's own event loop, if it has one, stays what it is."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


class Server:
    """One process in a session of its own, which can be harmed and started again; what it says goes to `log`.

    It serves when all its ports take connections and, if there is a `sign`, it has said that.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        root: Path,
        ports: Sequence[int],
        environment: Mapping[str, str],
        sign: str = "",
    ) -> None:
        self.name = name
        self.directory = root / name
        self.directory.mkdir()
        self.log = root / f"{name}.log"
        self._command = command
        self._environment = environment
        self._root = root
        self._ports = ports
        self._sign = sign
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._said_before = 0
        self._closed = threading.Event()

    @property
    def pid(self) -> int:
        """The process that takes part in everything: signals hit it, its memory is the broker's."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there, frozen or not."""
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        """What it has said since it was started last."""
        with self.log.open("rb") as log:
            log.seek(self._said_before)
            return log.read().decode(errors="replace")

    def serves(self) -> bool:
        """Whether there is evidence, cheap to get, that it is up."""
        return self._sign in self.said() and all(map(answers, self._ports))

    def check(self) -> None:
        """Raise ServerFailed if it has ended."""
        if self._process is not None and not self.running:
            raise ServerFailed(f"{self.name} ended with code {self._process.returncode}:", self.said())

    def launch(self) -> None:
        """Start it without waiting for anything."""
        with self._lock:
            if self._closed.is_set():
                raise ServerFailed(f"{self.name} is closed")
            with self.log.open("ab") as log:
                self._said_before = log.tell()
                self._process = subprocess.Popen(
                    self._command, cwd=self.directory, env=self._environment, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
            self._guard = subprocess.Popen(
                ["sh", "-c", _GUARD, "sh", str(self.pid), str(self._root)], start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def wait(self) -> None:
        """Until it serves. Raises ServerFailed if it ends before, or time is up."""
        deadline = time.monotonic() + PATIENCE
        while not self.serves():
            self.check()
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.name} is not up after {PATIENCE:.0f} s:", self.said())
            if self._closed.wait(0.02):
                raise ServerFailed(f"{self.name} is closed")

    def restart(self) -> None:
        """Start it again on the same data and ports, and wait until it serves; one that runs is stopped before."""
        self.stop()
        self.launch()
        self.wait()

    def terminate(self) -> None:
        """Ask it to end."""
        self.thaw()
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Let it end in good order; kill it if that takes too long."""
        self.terminate()
        self._end()

    def kill(self) -> None:
        """End it at once; returns when it is gone."""
        self._signal(signal.SIGKILL)
        self._end()

    def freeze(self) -> None:
        """Stop it where it stands: connections stay, nothing moves."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + 1
        while self._state() not in "TZ" and time.monotonic() < deadline:
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let it go on; nothing happens to one that is not frozen."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it for good. Whoever waits for it in another thread gets ServerFailed."""
        self._closed.set()
        with self._lock:  # a launch that was under way is over
            self.kill()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # to a process that is still ours only

    def _state(self) -> str:
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "Z"

    def _end(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(MANNERS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(MANNERS)
        if self._guard is not None:
            with self._guard:
                self._guard.kill()


class Broker(ABC):
    """One or several servers (`nodes`), what they need beside them (`helpers`), and the directory that they live in."""

    nodes: Sequence[Server] = ()
    helpers: Sequence[Server] = ()
    directory: Path
    troubles: tuple[type[Exception], ...] = (OSError, ServerFailed)  # what a client may meet before all is well

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._directories: list[Path] = []

    @property
    @abstractmethod
    def settings(self) -> dict[str, str]:
        """What a client needs to connect."""

    @abstractmethod
    def _install(self) -> None:
        """See to it that everything it is made of is on this machine."""

    @abstractmethod
    def _lay_out(self) -> None:
        """Choose ports, write the configuration into `directory`, make `nodes`."""

    @abstractmethod
    def _use(self) -> None:
        """Be served as a client is, on all nodes, or raise one of `troubles`."""

    def start(self) -> None:
        """Come up, on other ports if somebody took one at the last moment; returns when a client was served."""
        with self._lock:
            self._install()
            for attempts_left in (2, 1, 0):
                self.directory = Path(tempfile.mkdtemp(prefix="esp-broker-"))
                self._directories.append(self.directory)
                self._lay_out()
                try:
                    if self._closed:
                        raise ServerFailed("closed")
                    self._come_up()
                    return
                except ServerFailed as failed:
                    if not failed.clash or not attempts_left:
                        raise
                    self._close_all()

    def _come_up(self) -> None:
        """Start what does not run."""
        self._launch(self.helpers)
        self._launch(self.nodes)
        self._prove()

    def _prove(self) -> None:
        """Return when a client was served."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._use()
            except self.troubles as error:
                for node in self.nodes:
                    node.check()
                if self._closed or time.monotonic() > deadline:
                    raise ServerFailed(
                        f"{type(self).__name__} serves nobody: {error!r}", self.nodes[0].said()
                    ) from error
                time.sleep(0.05)

    def _launch(self, servers: Sequence[Server]) -> None:
        missing = [server for server in servers if not server.running]
        for server in missing:
            server.launch()
        for server in missing:
            server.wait()

    def restart(self) -> None:
        """All nodes again, on the same data and ports; those that run are stopped before."""
        self.stop()
        with self._lock:
            self._come_up()

    def mend(self) -> None:
        """Thaw what is frozen, and start again what has ended."""
        self.thaw()
        if not all(server.running for server in self.nodes):
            with self._lock:
                self._come_up()

    def stop(self) -> None:
        """Let all nodes end in good order."""
        for server in self.nodes:
            server.terminate()
        for server in self.nodes:
            server.stop()

    def kill(self) -> None:
        """End all nodes at once."""
        for server in self.nodes:
            server.kill()

    def freeze(self) -> None:
        """Stop all nodes where they stand."""
        for server in self.nodes:
            server.freeze()

    def thaw(self) -> None:
        """Let all nodes go on."""
        for server in self.nodes:
            server.thaw()

    def close(self, *, keep_logs: bool = False) -> None:
        """End everything and remove the data. The logs can be kept; where, goes to stderr."""
        self._closed = True
        self._close_all()  # a start or a restart in another thread fails by this, and lets go of the lock
        with self._lock:
            self._close_all()
            for directory in self._directories:
                if keep_logs:
                    kept = tempfile.mkdtemp(prefix="esp-logs-")
                    for log in directory.glob("*.log"):
                        shutil.copy(log, kept)
                    sys.stderr.write(f"logs of {type(self).__name__} are kept in {kept}\n")
                shutil.rmtree(directory)
            self._directories.clear()

    def _close_all(self) -> None:
        for server in (*self.nodes, *self.helpers):
            server.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close(keep_logs=not self._closed)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(keep_logs=error is not None)

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(self.__enter__)
        except asyncio.CancelledError:  # the thread goes on alone until it sees that this is closed
            await asyncio.to_thread(self.close)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await asyncio.to_thread(self.close, keep_logs=error is not None)


def clean_environment(**more: str) -> dict[str, str]:
    """What a server gets of our environment, and more: nothing that could change how it behaves."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TZ") if name in os.environ} | more
