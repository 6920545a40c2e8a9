"""Processes of this machine by a name that nobody else ever has: boot, pid namespace, pid and start time.

A pid alone is worth little: it comes again, and in another container it means another process. What another boot wrote
is gone. What another namespace wrote, or where the system does not tell the boot, is neither alive nor dead to us;
whoever needs to know waits for a lease instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

_UNKNOWN = "unknown"


class _Name(NamedTuple):
    boot: str
    namespace: str
    pid: int
    started: str


@cache
def _place() -> tuple[str, str]:
    """This boot and this pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return _UNKNOWN, _UNKNOWN


def boot() -> str:
    """What names this boot of the machine; empty where the system does not tell."""
    named = _place()[0]
    return "" if named == _UNKNOWN else named


def _stat(pid: int) -> list[str]:
    """What the system tells of a process, its state first; empty if there is none. OSError where it does not tell, as
    to a process that is out of descriptors: that says nothing of the other one.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _started(pid: int) -> str:
    """When a process began, empty if it has ended (nobody need have taken notice yet)."""
    stat = _stat(pid)
    return stat[19] if stat and stat[0] not in ("Z", "X") else ""


def name() -> str:
    """The name of this process. OSError if the system does not tell it, at the first time."""
    return _our_name(os.getpid())


@cache
def _our_name(pid: int) -> str:
    return name_of(pid)


def name_of(pid: int) -> str:
    """The name of a process. OSError if the system does not tell it."""
    return "/".join((*_place(), str(pid), _started(pid)))


def process_of(thread: int) -> int:
    """The pid of the process that a thread belongs to; 0 if there is none. OSError if the system does not tell."""
    try:
        status = Path(f"/proc/{thread}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status.partition("\nTgid:")[2].split(maxsplit=1)[0])


def mapped(process: int | Literal["self"], path: Path, inode: int) -> int:
    """Where a process has the beginning of a file in its memory, 0 if nowhere. OSError if the system does not tell."""
    for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
        place, _, offset, _, number, *name = line.split(maxsplit=5)
        if int(number) == inode and int(offset, 16) == 0 and name == [str(path)]:
            return int(place.partition("-")[0], 16)
    return 0


def _parsed(process: str) -> _Name | None:
    parts = process.split("/")
    if len(parts) != 4 or not parts[2].isdecimal():
        return None
    return _Name(parts[0], parts[1], int(parts[2]), parts[3])


def number(process: str) -> int | None:
    """The pid in a name, whether or not it still means that process."""
    parsed = _parsed(process)
    return parsed.pid if parsed else None


def pid_of(process: str) -> int | None:
    """The pid of a named process, if it is one of ours to see: same boot, same namespace, still the same process."""
    it = _parsed(process)
    if it is None or (it.boot, it.namespace) != _place() or not it.started:
        return None
    try:
        return it.pid if _started(it.pid) == it.started else None
    except OSError:
        return None


def is_gone(process: str) -> bool:
    """Known to be gone; False also where that cannot be known."""
    it = _parsed(process)
    boot, namespace = _place()
    if it is None or _UNKNOWN in (it.boot, boot):
        return False
    if it.boot != boot or it.namespace != namespace:
        return it.boot != boot
    try:
        return not it.started or _started(it.pid) != it.started
    except OSError:
        return False


@contextlib.contextmanager
def watched(process: str, tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` on this loop when the process ends, or at once if it has; never where that cannot be known."""
    loop = asyncio.get_running_loop()
    pid = pid_of(process)
    fd = -1
    if pid is not None:
        with contextlib.suppress(OSError, AttributeError):
            fd = os.pidfd_open(pid)
            loop.add_reader(fd, tell)
    if is_gone(process):
        tell()
    try:
        yield
    finally:
        if fd >= 0:
            loop.remove_reader(fd)
            os.close(fd)


def end(process: str) -> bool:
    """Kill a process that is stopped, and only then: one that runs is slow, and goes on by itself.

    It is done through a descriptor taken before its name is checked, so that no other one can be hit.
    """
    pid = number(process)
    if pid is None:
        return False
    try:
        fd = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return False
    try:
        if pid_of(process) is None or _stat(pid)[:1] not in (["T"], ["t"]):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


async def gone(process: str) -> None:
    """Wait until a process is gone; forever, where that cannot be known."""
    ended = asyncio.Event()
    with watched(process, ended.set):
        await ended.wait()
