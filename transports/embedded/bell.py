"""Waking the readers of a file in other processes, without polling where the system can.

Whoever commits rings: one write to the file `bell` beside the data. Readers watch that file: inotify on Linux, kqueue
on the BSDs and macOS, a slow look at its time elsewhere. Rings that come together wake a reader once, which is what a
bell wants. The order that loses no ring: watch, then read until there is nothing, then wait.

Who is killed between its commit and its ring has told nobody. On Linux the end of its process rings then: the system
closes the file it had open for writing, and that is watched for too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import struct
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from esp_pubsub.errors import BusUnavailable

from .files import reserve

_LOST = -1  # the number of an event that tells of events that were lost
_IN_MODIFY, _IN_CLOSE_WRITE = 0x2, 0x8
_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
_EVENT = struct.Struct("iIII")
_POLL = 0.05


class Ringer:
    """The writer's end of one bell."""

    def __init__(self, path: Path) -> None:
        reserve(path, 1)  # it must ring on a full disk too
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | _IN_CLOEXEC)

    def ring(self) -> None:
        """Wake whoever watches. Any thread."""
        os.pwrite(self._fd, b"!", 0)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


class Bells:
    """The readers' end: one per loop, for any number of bells. BusUnavailable where the system has no more of them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watchers: dict[int, set[asyncio.Event]] = {}
        self._paths: dict[Path, int] = {}
        self._closed = False
        with _told("opened"):
            self._source = _source(self._heard)
        self._source.start(self._loop)

    def watch(self, path: Path) -> asyncio.Event:
        """An event that is set at every ring of the bell at `path`, until `unwatch`."""
        if self._closed:
            raise BusUnavailable("the embedded bus was closed")
        if path not in self._paths:
            with _told("watched"):
                self._paths[path] = self._source.add(path)
        event = asyncio.Event()
        self._watchers.setdefault(self._paths[path], set()).add(event)
        return event

    def unwatch(self, path: Path, event: asyncio.Event) -> None:
        """Undo `watch`; twice is harmless."""
        number = self._paths.get(path)
        events = self._watchers.get(number, set()) if number is not None else set()
        events.discard(event)
        if number is not None and not events:
            del self._paths[path]
            self._watchers.pop(number, None)
            self._source.remove(number)

    def _heard(self, number: int) -> None:
        lost = number == _LOST  # it may have been any bell
        for event in chain(*self._watchers.values()) if lost else self._watchers.get(number, ()):
            event.set()

    def close(self) -> None:
        """Stop watching everything; who waits looks again. An `unwatch` that comes later touches nothing any more."""
        self._closed = True
        self._heard(_LOST)
        for number in self._paths.values():
            self._source.remove(number)
        self._paths.clear()
        self._watchers.clear()
        self._source.stop()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise BusUnavailable(
            f"no more bells can be {what}: {e}; see ulimit -n, fs.inotify.max_user_instances and max_user_watches"
        ) from e


class _Inotify:
    def __init__(self, heard: Callable[[int], None]) -> None:
        self._heard = heard
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._call("inotify_init1", _IN_NONBLOCK | _IN_CLOEXEC)

    def _call(self, name: str, *args: object) -> int:
        result = int(getattr(self._libc, name)(*args))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{name}: {os.strerror(code)}")
        return result

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._fd, self._read)

    def add(self, path: Path) -> int:
        return self._call("inotify_add_watch", self._fd, os.fsencode(path), _IN_MODIFY | _IN_CLOSE_WRITE)

    def remove(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._call("inotify_rm_watch", self._fd, number)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65_536)
        except BlockingIOError:
            return
        at, numbers = 0, set()
        while at < len(data):
            number, _, _, length = _EVENT.unpack_from(data, at)
            numbers.add(number)
            at += _EVENT.size + length
        for number in numbers:
            self._heard(number)

    def stop(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class _Kqueue:
    def __init__(self, heard: Callable[[int], None]) -> None:
        self._heard = heard
        self._queue = select.kqueue()  # type: ignore[attr-defined, unused-ignore]  # absent on Linux

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._queue.fileno(), self._read)

    def add(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | _IN_CLOEXEC)
        event = select.kevent(  # type: ignore[attr-defined, unused-ignore]
            fd,
            select.KQ_FILTER_VNODE,  # type: ignore[attr-defined, unused-ignore]
            select.KQ_EV_ADD | select.KQ_EV_CLEAR,  # type: ignore[attr-defined, unused-ignore]
            select.KQ_NOTE_WRITE,  # type: ignore[attr-defined, unused-ignore]
        )
        self._queue.control([event], 0, 0)
        return fd

    def remove(self, number: int) -> None:
        os.close(number)

    def _read(self) -> None:
        for event in self._queue.control(None, 64, 0):
            self._heard(event.ident)

    def stop(self) -> None:
        self._loop.remove_reader(self._queue.fileno())
        self._queue.close()


class _Polling:
    def __init__(self, heard: Callable[[int], None]) -> None:
        self._heard = heard
        self._files: dict[int, tuple[Path, int]] = {}
        self._next = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer = loop.call_later(_POLL, self._look)

    def add(self, path: Path) -> int:
        self._next += 1
        self._files[self._next] = (path, path.stat().st_mtime_ns)
        return self._next

    def remove(self, number: int) -> None:
        self._files.pop(number, None)

    def _look(self) -> None:
        for number, (path, before) in self._files.items():
            now = path.stat().st_mtime_ns
            if now != before:
                self._files[number] = (path, now)
                self._heard(number)
        self._timer = self._loop.call_later(_POLL, self._look)

    def stop(self) -> None:
        self._timer.cancel()


def _source(heard: Callable[[int], None]) -> _Inotify | _Kqueue | _Polling:
    if sys.platform == "linux":
        return _Inotify(heard)
    if hasattr(select, "kqueue"):
        return _Kqueue(heard)
    return _Polling(heard)
