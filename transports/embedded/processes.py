"""Processes of this machine by a name that nobody else ever has: boot, pid namespace, pid and start time.

A pid alone is worth little: it comes again, and in another container it means another process. What another boot or
namespace wrote is neither alive nor dead to us; whoever needs to know waits for a lease instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path


@cache
def _place() -> str:
    """This boot and this pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"


def _started(pid: int) -> str:
    """When a process began, empty if there is none or the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def name() -> str:
    """The name of this process."""
    pid = os.getpid()
    return f"{_place()}/{pid}/{_started(pid)}"


def number(process: str) -> int | None:
    """The pid in a name, whether or not it still means that process."""
    parts = process.split("/")
    return int(parts[2]) if len(parts) == 4 and parts[2].isdigit() else None


def pid_of(process: str) -> int | None:
    """The pid of a named process, if it is one of ours to see: same boot, same namespace, still the same process."""
    pid = number(process)
    place, started = process.rpartition("/")[0].rpartition("/")[0], process.rpartition("/")[2]
    return pid if pid is not None and place == _place() and started and _started(pid) == started else None


def is_gone(process: str) -> bool:
    """Known to be gone; False also where that cannot be known."""
    place = process.rpartition("/")[0].rpartition("/")[0]
    return place == _place() != "unknown" and pid_of(process) is None


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
    """Kill a process through a descriptor taken before its name is checked, so that no other one can be hit."""
    pid = number(process)
    if pid is None:
        return False
    try:
        fd = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return False
    try:
        if pid_of(process) is None:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


async def gone(process: str) -> None:
    """Wait until a process is gone; for ever, where that cannot be known."""
    ended = asyncio.Event()
    with watched(process, ended.set):
        await ended.wait()
