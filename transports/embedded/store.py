"""One LMDB environment, shared by everybody in the process, with one thread that writes.

Reads run on the loop: they are short, take no lock and see a snapshot. Writes run in the environment's own thread,
because waiting for the write lock has no bound: everything that is pending when the thread comes round goes into one
transaction, and the bell is rung once per commit. A write is a function of the transaction; it may run again after
the map had to grow, so it touches nothing but the transaction and returns its result. If it refuses, it does so
before it writes.

The lock belongs to whoever holds it even when that process is stopped. So the holder leaves its pid in a small shared
page, and a write that does not get through within its deadline is BusUnavailable and names it. Such a write is
abandoned: when the lock comes free at last, it is not carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from esp_pubsub.errors import BusRefused, BusUnavailable, WrongOrder

from .bell import Ringer

T = TypeVar("T")

MAX_READERS = 2_048
_HOLDER = struct.Struct("<Q")
_Write = tuple[Callable[[lmdb.Transaction], Any], "Future[Any]"]


class Store:
    """An open environment. Made by `open_store`, given back by `close_store`."""

    def __init__(self, path: Path, *, map_bytes: int, disk: bool) -> None:
        self.path = path
        self.bell = path / "bell"
        self.pid = os.getpid()
        self.users = 0
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ringer = Ringer(self.bell)
        try:
            self._page = _shared_page(path / "holder")
            self._env = lmdb.open(
                str(path), map_size=map_bytes, sync=disk, metasync=disk, meminit=False, mode=0o600,
                max_readers=MAX_READERS, max_spare_txns=4,
            )  # fmt: skip
            self._env.reader_check()
        except BaseException:
            self._ringer.close()
            raise
        self._guard = threading.Lock()  # a read transaction and a change of the map's size exclude each other
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
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
        future: Future[T] = Future()
        self._writes.put((function, future))
        wrapped = asyncio.wrap_future(future)
        try:
            async with asyncio.timeout(deadline):
                return await wrapped
        except TimeoutError:
            holder = _HOLDER.unpack_from(self._page)[0]
            who = f"process {holder} holds it" if holder else "nobody is known to hold it"
            raise BusUnavailable(
                f"no write lock on {self.path} within {deadline:g} s: {who}; if it is stopped, continue or end it",
                pid=holder or None,
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
                    _HOLDER.pack_into(self._page, 0, self.pid)
                    try:
                        return [_carried_out(transaction, *write) for write in batch if not write[1].cancelled()]
                    finally:
                        _HOLDER.pack_into(self._page, 0, 0)
            except lmdb.MapFullError:
                with self._guard:
                    self._env.set_mapsize(self._env.info()["map_size"] * 2)
            except lmdb.MapResizedError:
                with self._guard:
                    self._env.set_mapsize(0)

    def _check_process(self) -> None:
        if self.pid != os.getpid():
            raise WrongOrder("this client was opened before a fork; open a new one in the child, or start it by spawn")

    def disown(self) -> None:
        """In a forked child: close the inherited handle, which leaves the parent's alone."""
        self._env.close()

    def close(self) -> None:
        """End the thread and close the files. A thread that waits for a stopped process's lock is left behind."""
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
    """The process's one handle of an environment (LMDB allows no second), counted. Blocks for a millisecond or so."""
    with _opening:
        store = _open.get(path)
        if store is not None and store.pid != os.getpid():
            store.disown()
            store = None
        if store is None:
            store = _open[path] = Store(path, map_bytes=map_bytes, disk=disk)
        store.users += 1
        return store


def close_store(store: Store) -> None:
    """Give a handle back; the last one closes it. Blocks for up to two seconds."""
    with _opening:
        store.users -= 1
        if store.users == 0 and _open.get(store.path) is store:
            del _open[store.path]
            store.close()
