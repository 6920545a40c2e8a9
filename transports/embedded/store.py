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
import mmap
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from esp_pubsub.errors import BusRefused, BusUnavailable, WrongOrder

from . import processes
from .bell import Ringer

T = TypeVar("T")
_log = logging.getLogger("esp_pubsub.embedded")

MAX_READERS = 2_048
_REAP_EVERY = 256  # commits after which the slots of dead readers are freed
_HOLDER = struct.Struct("<H200s")
_Write = tuple[Callable[[lmdb.Transaction], Any], "Future[Any]"]


class Store:
    """An open environment. Made by `open_store`, given back by `close_store`."""

    def __init__(self, path: Path, *, map_bytes: int, disk: bool) -> None:
        self.path = path
        self.bell = path / "bell"
        self.pid = os.getpid()
        self.disk = disk
        self.users = 0
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ringer = Ringer(self.bell)
        try:
            self._page = _shared_page(path / "holder")
            self._env = _environment(path, map_bytes=map_bytes, disk=disk)
        except BaseException:
            self._ringer.close()
            raise
        self._guard = threading.Lock()  # a read transaction and a change of the map's size exclude each other
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._name = processes.name().encode()
        self._commits = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"esp-write-{path.name}", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def reading(self) -> Iterator[lmdb.Transaction]:
        """A snapshot for a few microseconds; nothing of it may be kept, and nothing awaited while it is open."""
        with self._guard:
            try:
                transaction = self._env.begin(buffers=True)
            except lmdb.MapResizedError:
                self._env.set_mapsize(0)
                transaction = self._env.begin(buffers=True)
            with transaction:
                yield transaction

    async def write(self, function: Callable[[lmdb.Transaction], T], deadline: float) -> T:
        """Carry out a write; returns when it is committed. BusUnavailable past `deadline` seconds.

        Cancelled: if the thread has not begun it, it is not carried out; else it is, and nobody hears of it.
        """
        self._check_process()
        if self._closed:
            raise BusUnavailable(f"{self.path} was closed")
        future: Future[T] = Future()
        self._writes.put((function, future))
        wrapped = asyncio.wrap_future(future)
        try:
            async with asyncio.timeout(deadline):
                return await wrapped
        except TimeoutError:
            length, name = _HOLDER.unpack_from(self._page)
            process = name[:length].decode(errors="replace")  # it may be half written
            holder = processes.number(process)
            who = f"process {holder} holds it" if holder else "nobody is known to hold it"
            raise BusUnavailable(
                f"no write lock on {self.path} within {deadline:g} s: {who}; if it is stopped, continue or end it",
                process=process or None,
            ) from None

    def _run(self) -> None:
        while (first := self._writes.get()) is not None:
            batch = [first]
            with contextlib.suppress(queue.Empty):
                while (more := self._writes.get_nowait()) is not None:
                    batch.append(more)
                self._writes.put(None)  # reached only by the closing mark: leave it for the next round
            self._commit(batch)

    def _commit(self, batch: list[_Write]) -> None:
        try:
            done = self._transact(batch)
        except Exception as e:  # noqa: BLE001  # whoever waits must hear of it; the thread lives on
            error = _translated(e, self.path)
            done = [(future, None, error) for _, future in batch if not future.cancelled()]
        else:
            self._ringer.ring()
            self._commits += 1
            if self._commits % _REAP_EVERY == 0:
                self._env.reader_check()
        for future, result, refusal in done:
            with contextlib.suppress(Exception):  # cancelled in between: nobody wants it any more
                if refusal is None:
                    future.set_result(result)
                else:
                    future.set_exception(refusal)

    def _transact(self, batch: list[_Write]) -> list[tuple[Future[Any], Any, Exception | None]]:
        while True:
            try:
                with self._env.begin(write=True, buffers=True) as transaction:
                    _HOLDER.pack_into(self._page, 0, len(self._name), self._name)
                    try:
                        return [_carried_out(transaction, *write) for write in batch if not write[1].cancelled()]
                    finally:
                        _HOLDER.pack_into(self._page, 0, 0, b"")
            except lmdb.MapFullError:
                with self._guard:
                    self._env.set_mapsize(self._env.info()["map_size"] * 2)
            except lmdb.MapResizedError:
                with self._guard:
                    self._env.set_mapsize(0)

    def _check_process(self) -> None:
        if self.pid != os.getpid():
            raise WrongOrder("this client was opened before a fork; open a new one in the child, or start it by spawn")

    def close(self) -> None:
        """End the thread and close the files. A thread that waits for a stopped process's lock is left behind."""
        self._closed = True
        self._writes.put(None)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._env.close()
            self._page.close()
            self._ringer.close()


def _carried_out(
    transaction: lmdb.Transaction, function: Callable[[lmdb.Transaction], Any], future: Future[Any]
) -> tuple[Future[Any], Any, Exception | None]:
    try:
        return future, function(transaction), None
    except (BusUnavailable, BusRefused) as refusal:
        return future, None, refusal


def _translated(error: Exception, path: Path) -> Exception:
    if isinstance(error, lmdb.DiskError | OSError):
        return BusUnavailable(f"writing to {path} failed: {error}; is the disk full?")
    return BusRefused(f"writing to {path} failed: {type(error).__name__}: {error}")


def _environment(path: Path, *, map_bytes: int, disk: bool) -> lmdb.Environment:
    """Open LMDB's files. Raises Broken if a power cut left them unusable."""
    try:
        environment = lmdb.open(
            str(path), map_size=map_bytes, sync=disk, metasync=disk, meminit=False, mode=0o600,
            max_readers=MAX_READERS, max_spare_txns=4,
        )  # fmt: skip
    except lmdb.VersionMismatchError as e:
        raise BusRefused(f"{path} was written by another version of LMDB: {e}") from e
    except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PanicError) as e:
        raise Broken(str(e)) from e
    used = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if used > (path / "data.mdb").stat().st_size:  # to touch a page that is not there would end the process
        environment.close()
        raise Broken("the file is shorter than it says")
    environment.reader_check()
    return environment


class Broken(Exception):
    """An environment that cannot be used any more."""


def _shared_page(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        return mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)


_open: dict[Path, Store] = {}
_opening = threading.Lock()


def open_store(path: Path, *, map_bytes: int, disk: bool) -> Store:
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
        if store is None:
            store = _open[path] = _made(path, map_bytes=map_bytes, disk=disk)
        if store.disk != disk:
            raise BusRefused(f"{path} is open in this process with another durability; all clients must set the same")
        store.users += 1
        return store


def _made(path: Path, *, map_bytes: int, disk: bool) -> Store:
    try:
        return Store(path, map_bytes=map_bytes, disk=disk)
    except Broken as broken:
        aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
        path.rename(aside)
        _log.error("%s cannot be used (%s); it is set aside as %s and begins anew, empty", path, broken, aside.name)
        return Store(path, map_bytes=map_bytes, disk=disk)


def close_store(store: Store) -> None:
    """Give a handle back; the last one closes it. Blocks for up to two seconds."""
    with _opening:
        store.users -= 1
        if store.users == 0 and _open.get(store.path) is store:
            del _open[store.path]
            store.close()
