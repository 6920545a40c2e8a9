"""The files of an environment: opening them, and setting them aside when a power cut left them unusable.

Everybody who opens an environment locks the folder it is in, shared. To set one aside takes that lock alone, another
look, and that no process has the environment open: what somebody still writes to never loses its name.

To touch a mapped page that finds no place on the disk, or is not in the file, would end the process (SIGBUS). So the
small files get their place before they are mapped, and data that are not whole are read by nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import platform
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import lmdb

from esp_pubsub.errors import BusRefused, BusUnavailable

from . import processes
from .pages import DAMAGE, is_whole

Check = Callable[[lmdb.Transaction], bool]
"""Is what stands there sound, as far as can be seen at once?"""

_log = logging.getLogger("esp_pubsub.embedded")

_MAX_READERS = 2_048
_SLOT = 64  # bytes of a reader in lock.mdb
_PATIENCE = 5.0  # seconds that an open waits for another process: for who sets aside, and for LMDB's first and last
_TRIES = 5
_FLOCK = struct.Struct("@hhqqi4x")  # Linux's own
_MAGIC = struct.pack("@I", 0xBEEFC0DE)
_WRITE_LOCK = 64  # where LMDB has it in lock.mdb: a mutex whose first word is the thread that holds it, and two flags
_THREAD = 0x3FFF_FFFF
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


class Broken(Exception):
    """An environment that cannot be used any more."""


def environment(path: Path, *, map_bytes: int, disk: bool, check: Check) -> lmdb.Environment:
    """Open LMDB's files. Raises Broken if a power cut left them unusable. Blocks for as long as `_PATIENCE`."""
    reserve(path / "lock.mdb", _MAX_READERS * _SLOT)
    _wait_for_openers(path)
    for _ in range(_TRIES):
        with contextlib.suppress(lmdb.MapResizedError):  # somebody made the map larger in this moment
            return _environment(path, map_bytes, disk, check)
    raise BusUnavailable(f"{path} cannot be opened: others make it larger all the while; try again")


def _wait_for_openers(path: Path) -> None:
    """LMDB waits without end for who opens these files first or closes them last. Here that has a bound."""
    end = time.monotonic() + _PATIENCE
    with _opened(path / "lock.mdb") as fd:
        while who := _who_locks(fd):
            if time.monotonic() > end:
                raise BusUnavailable(f"{who} opens or closes {path} and does not go on; continue or end it")
            time.sleep(0.01)


def _who_locks(fd: int) -> str:
    """Who has LMDB's own lock on a file for itself; empty if nobody has, or where that is not told."""
    if sys.platform != "linux":
        return ""
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    if kind == fcntl.F_UNLCK:
        return ""
    return f"process {pid}" if pid else "a process of another pid namespace"


def _environment(path: Path, map_bytes: int, disk: bool, check: Check) -> lmdb.Environment:
    try:
        opened = lmdb.open(
            str(path), map_size=map_bytes, sync=disk, metasync=disk, meminit=False, mode=0o600,
            max_readers=_MAX_READERS, max_spare_txns=4,
        )  # fmt: skip
    except lmdb.LockError as e:
        raise BusRefused(
            f"{path} is in use by a process of another pid namespace that has our pid, {os.getpid()}: "
            "let the containers of a bus share one pid namespace"
        ) from e
    except DAMAGE as e:
        raise Broken(str(e)) from e
    except lmdb.Error as e:
        if isinstance(e, lmdb.VersionMismatchError) or "data format" in str(e):  # the latter has no class of its own
            raise BusRefused(f"{path} was written by another version of LMDB: {e}") from e
        raise
    try:
        _check(opened, path, check)
        opened.reader_check()
    except BaseException:
        opened.close()
        raise
    return opened


def _check(opened: lmdb.Environment, path: Path, check: Check) -> None:
    """Raise Broken if it is not sound. What a power cut may have left is looked at page by page."""
    data, boot = path / "data.mdb", processes.boot().encode()
    try:
        used = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
        known = False
        with contextlib.suppress(OSError), _opened(path / "boot") as fd:
            known = os.read(fd, len(boot) + 1) == boot
        if (used > data.stat().st_size or not known) and not is_whole(opened, data):
            raise Broken("pages that are in use are not in the file")
        with opened.begin(buffers=True) as transaction:
            if not check(transaction):
                raise Broken("it does not hold what it says")
    except (*DAMAGE, struct.error) as e:
        raise Broken(f"{type(e).__name__}: {e}") from e
    if not known:
        with contextlib.suppress(OSError), _opened(path / "boot") as fd:  # on a full disk it is looked at again
            os.pwrite(fd, boot, 0)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file of ours, made if missing."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | _CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def reserve(path: Path, size: int) -> None:
    """Give a file its place on the disk, made if missing, never made shorter."""
    with _opened(path) as fd:
        if not _allocate(fd, size) and os.fstat(fd).st_size < size:
            os.pwrite(fd, b"\0", size - 1)


def _allocate(fd: int, size: int) -> bool:
    """False where the system, or this file system, cannot."""
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:
        return False
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return False
    return True


def settle(path: Path) -> None:
    """Bring to the disk that an environment is where it is; what is in it LMDB brings there. What is above the bus need
    not be ours to open.
    """
    for folder in (path, path.parent, path.parent.parent):
        with contextlib.suppress(PermissionError):
            fd = os.open(folder, os.O_RDONLY | _CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class Lock(NamedTuple):
    """Where this process has the first page of an environment's `lock.mdb` in memory. It cannot be read from the file:
    to close that once more would take all of this process's locks off it.
    """

    path: Path
    inode: int
    address: int


def lock_of(path: Path) -> Lock | None:
    """LMDB's lock of an environment that is open here; None where the system, or this file system, does not tell."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":  # others' mutexes look otherwise
        return None
    file = path.resolve() / "lock.mdb"
    inode = os.stat(file).st_ino
    address = processes.mapped("self", file, inode)
    return Lock(file, inode, address) if address else None


def holder(lock: Lock) -> str:
    """The name of the process that has LMDB's write lock, by LMDB's own account; empty where that is not known. The
    environment is open for as long as this takes.
    """
    head = ctypes.string_at(lock.address, _WRITE_LOCK + 4)
    thread = int.from_bytes(head[_WRITE_LOCK:], sys.byteorder) & _THREAD
    pid = processes.process_of(thread) if thread and head.startswith(_MAGIC) else 0
    # a number of another pid namespace means a process here that has nothing to do with it
    return processes.name_of(pid) if pid and processes.mapped(pid, lock.path, lock.inode) else ""


def shared_page(path: Path) -> mmap.mmap:
    """A page that all processes see."""
    reserve(path, mmap.PAGESIZE)
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | _CLOEXEC)
    try:
        return mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the lock of a folder. Blocks; BusUnavailable if another process has it and does not go on."""
    fd = os.open(folder, os.O_RDONLY | _CLOEXEC)
    try:
        end = time.monotonic() + _PATIENCE
        while not _tried(fcntl.flock, fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if time.monotonic() > end:
                raise BusUnavailable(
                    f"another process is opening {folder.resolve()} and does not go on; continue or end it"
                )
            time.sleep(0.01)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(fd)


def _tried(lock: Callable[..., object], fd: int, how: int, *length: int) -> bool:
    try:
        lock(fd, how | fcntl.LOCK_NB, *length)
    except (BlockingIOError, PermissionError):  # systems differ in what lockf says
        return False
    return True


def set_aside(path: Path, broken: Broken) -> None:
    """Give an environment another name, if nobody has it open. Only with the folder's lock, and nowhere open here."""
    fd = os.open(path / "lock.mdb", os.O_RDWR | _CLOEXEC)
    try:
        if not _tried(fcntl.lockf, fd, fcntl.LOCK_EX, 1):  # LMDB's own: whoever has the environment open shares it
            raise BusUnavailable(
                f"{path.resolve()} cannot be used ({broken}); it is set aside when the processes that have it open are "
                "ended"
            )
        aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
        path.rename(aside)
    finally:
        os.close(fd)
    shown = path.parent.resolve() / path.name
    _log.error("%s cannot be used (%s); it is set aside as %s and begins anew, empty", shown, broken, aside.name)
