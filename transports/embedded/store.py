"""One LMDB environment, shared by everybody in the process, with one thread that writes.

Reads run on the loop: they are short, take no lock and see a snapshot. Writes run in the environment's own thread,
because waiting for the write lock has no bound: everything that is pending when the thread comes round goes into one
transaction, and the bell is rung once per commit. A write is a function of the transaction; it may run again after
the map had to grow, so it touches nothing but the transaction and returns its result. If it refuses, it does so
before it writes.

The lock belongs to whoever holds it even when that process is stopped. So the holder leaves its name in a small shared
page, and a write that does not get through within its deadline is BusUnavailable and names it. Such a write is
abandoned: when the lock comes free at last, it is not carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import lmdb

from esp_pubsub.errors import BusRefused, BusUnavailable, WrongOrder

from . import files, processes
from .bell import Ringer
from .files import Broken, Check
from .place import Held, by_descriptor

T = TypeVar("T")
_log = logging.getLogger("esp_pubsub.embedded")

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_REAP_EVERY = 256  # commits after which the slots of dead readers are freed
_HOLDER = struct.Struct("<H200s")


@dataclass(slots=True, eq=False)
class Write(Generic[T]):
    """A write that the thread was given. Without a function nobody wants it any more, and it is not carried out."""

    function: Callable[[lmdb.Transaction], T] | None
    done: Callable[[T | None, Exception | None], None]

    def withdraw(self) -> None:
        """If it is not begun, it will not be; nobody is told. It may stand in the queue for as long as the lock is
        held, so it lets go of what it holds.
        """
        self.function = None
        self.done = _nobody


def _nobody(_result: object, _error: Exception | None) -> None:
    """Hears of a write that was withdrawn."""


class Store:
    """An open environment. Made by `open_store`, given back by `close_store`."""

    def __init__(self, path: Path, at: Path, *, map_bytes: int, disk: bool, check: Check) -> None:
        """`path` is its name, `at` leads there by the descriptor of the bus directory."""
        self.path = path
        self.pid = os.getpid()
        self.disk = disk
        self.users = 0
        self._name = processes.name().encode()
        at.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as opened:
            folder = os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | _CLOEXEC)
            opened.callback(os.close, folder)
            at = by_descriptor(folder, path)
            self.bell = at / "bell"
            self._ringer = Ringer(self.bell)
            opened.callback(self._ringer.close)
            self._page = opened.enter_context(files.shared_page(at / "holder"))
            try:
                env = files.environment(at, map_bytes=map_bytes, disk=disk, check=check)
            except (BusRefused, BusUnavailable) as error:
                raise type(error)(str(error).replace(str(at), str(path))) from error
            self._env = opened.enter_context(env)
            if disk:
                files.settle(path)
            self._lock = files.lock_of(at)
            self._files = opened.pop_all()
        self._guard = threading.Lock()  # a read transaction excludes a change of the map's size, and the end
        self._writes: queue.SimpleQueue[Write[Any] | None] = queue.SimpleQueue()
        self._commits = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"esp-write-{path.name}", daemon=True)
        self._thread.start()

    def read(self, function: Callable[[lmdb.Transaction], T]) -> T:
        """What a function of a few microseconds finds in a snapshot, of which it keeps nothing."""
        with self._guard:
            try:
                try:
                    transaction = self._env.begin(buffers=True)
                except lmdb.MapResizedError:
                    self._env.set_mapsize(0)
                    transaction = self._env.begin(buffers=True)
                with transaction:
                    return function(transaction)
            except lmdb.Error as e:
                if self._closed:
                    raise BusUnavailable(f"{self.path} was closed") from e
                raise _translated(e, f"reading {self.path}") from e

    def submit(
        self, function: Callable[[lmdb.Transaction], T], done: Callable[[T | None, Exception | None], None]
    ) -> Write[T]:
        """Give a write to the thread, behind those it has. `done` is called there, before the next one is begun, with
        what the function returned once that is committed, or with what went wrong; it must not raise.
        """
        self._check_process()
        if self._closed:
            raise BusUnavailable(f"{self.path} was closed")
        write = Write(function, done)
        self._writes.put(write)
        return write

    async def write(self, function: Callable[[lmdb.Transaction], T], deadline: float) -> T:
        """Carry out a write; returns when it is committed. BusUnavailable past `deadline` seconds.

        Cancelled: if the thread has not begun it, it is not carried out; else it is, and nobody hears of it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        write = self.submit(function, partial(_tell, loop, future))
        try:
            async with asyncio.timeout(deadline):
                return await future
        except TimeoutError:
            raise self.locked(deadline) from None
        finally:
            write.withdraw()

    def locked(self, seconds: float) -> BusUnavailable:
        """What to say of a write that did not get through in that time."""
        process = self._known_holder()
        holder = processes.number(process)
        who = f"process {holder} holds it" if holder else "nobody is known to hold it"
        way_out = "if it is stopped, continue or end it"
        if holder == os.getpid():
            who, way_out = "a commit of our own takes longer", "see what is slow about the disk"
        return BusUnavailable(
            f"no write lock on {self.path} within {seconds:g} s: {who}; {way_out}", process=process or None
        )

    def _known_holder(self) -> str:
        with self._guard:  # until then nothing of it is closed
            if self._closed:
                return ""
            named = self._holder().decode(errors="replace")  # it may be half written
            if named or self._lock is None:
                return named
            with contextlib.suppress(OSError):
                return files.holder(self._lock)  # who was stopped with the lock, before it could say so
            return ""

    def _holder(self) -> bytes:
        """The name of the process that holds the lock, or what stands in its place."""
        length, name = _HOLDER.unpack_from(self._page)
        return bytes(name[:length])

    def _run(self) -> None:
        while batch := self._pending():
            self._commit(batch)
            del batch  # it holds what was written, and the next may be long in coming
        with self._guard:
            self._files.close()

    def _pending(self) -> list[Write[Any]]:
        """Wait for a write, and take all that have come; none at the end."""
        batch: list[Write[Any]] = []
        while not batch or not self._writes.empty():  # nobody else takes from it
            if (write := self._writes.get()) is None:
                if batch:
                    self._writes.put(None)  # the closing mark: leave it for the next round
                break
            batch.append(write)
        return batch

    def _commit(self, batch: list[Write[Any]]) -> None:
        try:
            outcomes = self._transact(batch)
        except Exception as e:  # noqa: BLE001  # whoever waits must hear of it; the thread lives on
            error = _translated(e, f"writing to {self.path}")
            outcomes = [(write, None, error) for write in batch]
        else:
            self._committed()
        if self._holder() == self._name:  # else the next one has the lock already
            _HOLDER.pack_into(self._page, 0, 0, b"")
        for write, result, error_of_it in outcomes:
            write.done(result, error_of_it)

    def _committed(self) -> None:
        """Tell the readers, and clear up now and then. If that fails, the commit stands, and the thread lives on."""
        self._commits += 1
        try:
            self._ringer.ring()
            if self._commits % _REAP_EVERY == 0:
                self._env.reader_check()
        except (OSError, lmdb.Error):
            _log.exception("%s: committed, but readers may hear of it only with the next commit", self.path)

    def _transact(self, batch: list[Write[Any]]) -> list[tuple[Write[Any], Any, Exception | None]]:
        while True:
            try:
                with self._env.begin(write=True, buffers=True) as transaction:
                    _HOLDER.pack_into(self._page, 0, len(self._name), self._name)
                    return [
                        _carried_out(transaction, write, function)
                        for write in batch
                        if (function := write.function) is not None
                    ]
            except lmdb.MapFullError:
                with self._guard:
                    if not self._env.reader_check():  # a dead reader may keep pages that are free
                        self._env.set_mapsize(self._env.info()["map_size"] * 2)
            except lmdb.MapResizedError:
                with self._guard:
                    self._env.set_mapsize(0)

    def _check_process(self) -> None:
        if self.pid != os.getpid():
            raise WrongOrder("this client was opened before a fork; open a new one in the child, or start it by spawn")

    def close(self) -> bool:
        """End the thread, which closes the files. False: it waits for a stopped process's lock, and ends after that."""
        if not self._closed:
            self._closed = True
            self._writes.put(None)
            self._thread.join(timeout=2.0)
        return not self._thread.is_alive()


def _carried_out(
    transaction: lmdb.Transaction, write: Write[Any], function: Callable[[lmdb.Transaction], Any]
) -> tuple[Write[Any], Any, Exception | None]:
    try:
        return write, function(transaction), None
    except (BusUnavailable, BusRefused) as refusal:
        return write, None, refusal


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants it any more
        loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _translated(error: Exception, what: str) -> Exception:
    if isinstance(error, lmdb.DiskError | OSError) or type(error) is lmdb.Error:  # which is one of the system's own
        return BusUnavailable(f"{what} failed: {error}; is the disk full?")
    return BusRefused(f"{what} failed: {type(error).__name__}: {error}")


_open: dict[Path, Store] = {}
_opening = threading.Lock()


def _after_fork() -> None:
    """A thread that held the lock at the fork is not here to let go of it."""
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def open_store(path: Path, *, map_bytes: int, disk: bool, check: Check, root: Held | None = None) -> Store:
    """The process's one handle of an environment (LMDB allows no second), counted. Blocks for a millisecond or so.

    One that is broken is set aside under another name and a new, empty one takes its place.
    """
    with _opening:
        store = _open.get(path)
        if store is not None and store.pid != os.getpid():
            raise WrongOrder(
                f"{path} was open in the parent when this process was forked, and can be used in one of them only: "
                "start children by spawn, or fork before the bus is opened"
            )
        if store is not None and store.users == 0:
            if not store.close():
                raise BusUnavailable(f"{path} was closed, but still waits for the lock that a stopped process holds")
            store = None
        if store is None:
            at = path if root is None else root.at / path.relative_to(root.path)
            store = _open[path] = _made(at, partial(Store, path, at, map_bytes=map_bytes, disk=disk, check=check))
        if store.disk != disk:
            raise BusRefused(f"{path} is open in this process with another durability; all clients must set the same")
        store.users += 1
        return store


def _made(path: Path, make: Callable[[], Store]) -> Store:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(Broken), files.locked(path.parent, alone=False):
        return make()
    with files.locked(path.parent, alone=True):
        try:
            return make()  # somebody else may have been faster
        except Broken as broken:
            files.set_aside(path, broken)
        return make()


def close_store(store: Store) -> None:
    """Give a handle back; the last one closes it. Blocks for up to two seconds."""
    with _opening:
        store.users -= 1
        if store.users == 0 and _open.get(store.path) is store and store.close():
            del _open[store.path]
