"""The write lock of the embedded bus while a process that holds it does not go on, and what fails around a commit."""

import asyncio
import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

import esp_pubsub as esp
from esp_pubsub.transports.embedded import bus, files, log, processes, store
from esp_pubsub.transports.embedded.options import EmbeddedOptions
from esp_pubsub.transports.embedded.place import topic_directory

HOLD = """
import lmdb, sys
environment = lmdb.open(sys.argv[1], map_size=1 << 30)
with environment.begin(write=True):
    print("holding", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process holds the write lock of an environment."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def _open(path: Path) -> store.Store:
    return store.open_store(path, map_bytes=1 << 20, disk=False, check=log.is_sound)


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[store.Store]:
    it = await asyncio.to_thread(_open, tmp_path / "env")
    yield it
    await asyncio.to_thread(store.close_store, it)


async def test_the_holder_is_named_until_its_commit_is_done(opened: store.Store) -> None:
    environment, named = opened._env, []

    class Watched:
        @contextlib.contextmanager
        def begin(self, **how: Any) -> Iterator[lmdb.Transaction]:
            with environment.begin(**how) as transaction:
                yield transaction
                named.append(opened._holder())

    opened._env = Watched()  # type: ignore[assignment]
    await opened.write(log.begin, 5)
    opened._env = environment
    assert named == [processes.name().encode()]
    assert opened._holder() == b""


async def test_the_name_of_who_took_the_lock_next_is_left_alone(opened: store.Store) -> None:
    await opened.write(lambda t: store._HOLDER.pack_into(opened._page, 0, 5, b"other"), 5)
    assert opened._holder() == b"other"
    await opened.write(log.begin, 5)
    assert opened._holder() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="where LMDB's mutex tells who holds it")
async def test_a_holder_that_was_stopped_before_it_could_say_so_is_named(opened: store.Store) -> None:
    with held(opened.path) as process:
        assert opened._holder() == b"", "it is not one of ours"
        with pytest.raises(esp.BusUnavailable, match=f"process {process.pid} holds it") as caught:
            await opened.write(log.begin, 0.1)
        assert caught.value.process == processes.name_of(process.pid)  # type: ignore[attr-defined]
    await opened.write(log.begin, 5)


async def test_a_commit_of_our_own_that_takes_long_is_not_called_a_stopped_process(opened: store.Store) -> None:
    go_on = threading.Event()
    holding = asyncio.create_task(opened.write(lambda _: go_on.wait(60), 60))
    await asyncio.sleep(0)
    with pytest.raises(esp.BusUnavailable, match="a commit of our own"):
        await opened.write(log.begin, 0.1)
    go_on.set()
    await holding


async def test_a_write_that_was_given_up_holds_no_memory_until_the_lock_is_free(opened: store.Store) -> None:
    async def give_up() -> "weakref.ref[Any]":
        def write(_: lmdb.Transaction) -> None:
            raise AssertionError("it was given up")

        with pytest.raises(esp.BusUnavailable):
            await opened.write(write, 0.1)
        return weakref.ref(write)

    with held(opened.path):
        await asyncio.create_task(give_up())  # the thread has the first one in its hands
        second = await asyncio.create_task(give_up())
        gc.collect()
        assert second() is None
    await opened.write(log.begin, 5)


async def test_a_bus_that_was_closed_while_the_lock_was_held_is_closed_when_it_is_free(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    opened = await asyncio.to_thread(_open, tmp_path / "env")
    with held(opened.path):
        with pytest.raises(esp.BusUnavailable):
            await opened.write(log.begin, 0.1)
        await asyncio.to_thread(store.close_store, opened)
        with pytest.raises(esp.BusUnavailable, match="still waits for the lock"):
            await asyncio.to_thread(_open, opened.path)
    await asyncio.to_thread(opened._thread.join, 10)
    assert len(os.listdir("/proc/self/fd")) == before
    again = await asyncio.to_thread(_open, opened.path)
    await again.write(log.begin, 5)
    await asyncio.to_thread(store.close_store, again)


async def test_a_bell_that_does_not_ring_takes_nothing_back_and_stops_nobody(
    opened: store.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("esp_pubsub.transports.embedded.bell.os.pwrite", no_space)
        begun = await opened.write(log.begin, 5)
    assert "only with the next commit" in caplog.text
    assert await opened.write(log.begin, 5) == begun


async def test_a_topic_that_was_opened_while_the_bus_was_held_is_entered_when_it_is_free(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory, deadline="100ms") as client:
        with held(bus_directory / "meta"):
            for _ in range(2):
                with pytest.raises(esp.BusUnavailable):
                    await client.bus.pipe("t")
        await client.bus.pipe("t")
        assert await client.bus.topics() == ["t"]  # type: ignore[attr-defined]


async def test_a_topic_that_is_held_at_its_first_open_begins_when_it_is_free(bus_directory: Path) -> None:
    path = topic_directory(bus_directory, "t")
    path.mkdir(parents=True)
    async with esp.init(dir=bus_directory, deadline="100ms") as client:
        with held(path), pytest.raises(esp.BusUnavailable):
            await client.bus.pipe("t")
        feed = await client.bus.feed("t", "latest", None)
        await (await client.bus.pipe("t")).write([b"x"])
        assert [message.data for message in await feed.read(1, 1)] == [b"x"]  # type: ignore[union-attr]


async def test_an_open_that_waits_holds_up_no_other_topic(bus_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entering = asyncio.Event()

    async def change_meta(*how: Any) -> Any:
        entering.set()
        return await change(*how)

    async with esp.init(dir=bus_directory, deadline="10s") as client:
        await client.bus.pipe("open")
        change = client.bus.change_meta  # type: ignore[attr-defined]
        monkeypatch.setattr(client.bus, "change_meta", change_meta)
        with held(bus_directory / "meta") as process:
            waiting = asyncio.create_task(client.bus.pipe("new"))
            await entering.wait()
            async with asyncio.timeout(60):
                await client.bus.pipe("open")
                await (await client.bus.feed("open", "latest", None)).aclose()
            assert not waiting.done()
            process.kill()
            await waiting


async def test_a_topic_that_is_known_is_opened_and_read_while_its_lock_is_held(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client:
        pipe = await client.bus.pipe("t")
        await pipe.write([b"x"])
        await pipe.confirmed(0)
    async with esp.init(dir=bus_directory, deadline="100ms") as client:
        with held(bus_directory / "meta"), held(topic_directory(bus_directory, "t")):
            feed = await client.bus.feed("t", "earliest", None)
            assert [message.data for message in await feed.read(1, 1)] == [b"x"]  # type: ignore[union-attr]


FORKED = """
import os, threading
from esp_pubsub.transports.embedded import store

taken, done = threading.Event(), threading.Event()

def take():
    with store._opening:
        taken.set()
        done.wait()

threading.Thread(target=take).start()
taken.wait()
child = os.fork()
if child == 0:
    os._exit(0 if store._opening.acquire(blocking=False) else 1)
done.set()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_in_the_middle_of_an_open_leaves_the_child_able_to_open() -> None:
    assert subprocess.run([sys.executable, "-c", FORKED], check=False).returncode == 0
    assert not store._opening.locked()


SAME_PID = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(lock, fcntl.LOCK_EX, 1, os.getppid())
print(flush=True)
sys.stdin.readline()
"""


async def test_the_same_pid_in_another_namespace_is_refused_with_the_way_out(bus_directory: Path) -> None:
    """LMDB locks the byte of its pid in lock.mdb; here another process locks ours."""
    async with esp.init(dir=bus_directory):
        pass
    command = [sys.executable, "-c", SAME_PID, str(bus_directory / "meta" / "lock.mdb")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(esp.BusRefused, match="share one pid namespace"):
            await esp.init(dir=bus_directory)
        other.kill()
    async with esp.init(dir=bus_directory):
        pass


def test_an_open_that_nobody_waits_for_at_the_loops_end_is_closed_all_the_same(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, open_store = threading.Event(), threading.Event(), bus.open_store

    def slowly(*args: Any, **more: Any) -> Any:
        begun.set()
        go_on.wait(60)
        return open_store(*args, **more)

    async def cancelled() -> None:
        opening = asyncio.ensure_future(bus.open_bus(bus.EmbeddedOptions(dir=bus_directory)))
        await asyncio.to_thread(begun.wait, 60)
        opening.cancel()
        await asyncio.wait([opening])
        go_on.set()

    monkeypatch.setattr(bus, "open_store", slowly)
    asyncio.run(cancelled())
    assert not store._open


FIRST = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
print(flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="where the system tells who has a lock")
async def test_an_open_behind_a_process_that_stopped_in_its_own_names_it(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opens an environment first has LMDB's lock on it alone, and LMDB waits for that without end."""
    async with esp.init(dir=bus_directory):
        pass
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    command = [sys.executable, "-c", FIRST, str(bus_directory / "meta" / "lock.mdb")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with pytest.raises(esp.BusUnavailable, match=f"process {first.pid} opens or closes"):
            await esp.init(dir=bus_directory)
        first.kill()
    async with esp.init(dir=bus_directory):
        pass


async def test_a_topic_that_opens_after_a_close_was_cancelled_is_closed_again(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    open_store = store.open_store

    def slowly(*args: Any, **how: Any) -> store.Store:
        begun.set()
        assert go_on.wait(60)
        return open_store(*args, **how)

    opened = await bus.open_bus(EmbeddedOptions(dir=bus_directory))
    monkeypatch.setattr(bus, "open_store", slowly)
    opening = asyncio.create_task(opened.pipe("t"))
    await asyncio.to_thread(begun.wait, 60)
    closing = asyncio.create_task(opened.aclose())
    await asyncio.wait([closing], timeout=0.01)
    closing.cancel()
    await asyncio.wait([closing])
    go_on.set()
    with pytest.raises(esp.BusUnavailable, match="closed"):
        await opening
    assert not store._open


async def test_what_is_made_for_durability_disk_has_its_place_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: brought.append(os.readlink(f"/proc/self/fd/{fd}")))
    path = tmp_path / "topics" / "t"
    opened = await asyncio.to_thread(store.open_store, path, map_bytes=1 << 20, disk=True, check=log.is_sound)
    await asyncio.to_thread(store.close_store, opened)
    assert brought == [str(path), str(path.parent), str(tmp_path)]
