"""The storage under the embedded bus: broken files, stopped processes, growing maps, places that are not safe."""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

import esp_pubsub as esp
from esp_pubsub.transports.embedded import log, place, processes, store
from esp_pubsub.transports.embedded.place import file_system, topic_directory

URL = "dfESP://host:5555/project/query/window"
TOPIC = "host:5555/project/query/window/I"
SCHEMA = "id*:int64,text:string"


async def _publish(directory: Path, numbers: range) -> None:
    async with esp.init(dir=directory) as client, client.publisher(URL, SCHEMA) as publisher:
        for number in numbers:
            await publisher.inject([(number, "x" * 50)])


async def _read(directory: Path, count: int) -> list[int]:
    async with esp.init(dir=directory) as client, client.subscriber(URL, side="in", start="earliest") as subscriber:
        async with asyncio.timeout(60):
            return [(await anext(subscriber)).rows()[0][0] for _ in range(count)]


@pytest.mark.parametrize("damage", ["garbage", "truncated", "zeros"])
async def test_a_topic_that_does_not_open_is_set_aside_and_begins_anew(bus_directory, damage, caplog) -> None:
    await _publish(bus_directory, range(2_000))
    data = topic_directory(bus_directory, TOPIC) / "data.mdb"
    size = data.stat().st_size
    if damage == "garbage":
        data.write_bytes(os.urandom(size))
    elif damage == "zeros":
        data.write_bytes(bytes(size))
    else:
        os.truncate(data, size // 2 // 4096 * 4096)
    with caplog.at_level(logging.ERROR, "esp_pubsub.embedded"):
        await _publish(bus_directory, range(7, 9))
    assert "set aside" in caplog.text
    assert await _read(bus_directory, 2) == [7, 8]
    assert len(list((bus_directory / "topics").glob("*.broken-*"))) == 1


async def test_a_group_whose_topic_was_set_aside_is_told_and_reads_the_new_one_from_its_start(bus_directory) -> None:
    await _publish(bus_directory, range(100))
    async with esp.init(dir=bus_directory) as client, client.subscriber(URL, side="in", group="g") as subscriber:
        await subscriber.confirm(await anext(subscriber))
    (topic_directory(bus_directory, TOPIC) / "data.mdb").write_bytes(os.urandom(8_192))
    await _publish(bus_directory, range(5, 6))
    told = []
    async with (
        esp.init(dir=bus_directory, on_notice=told.append) as client,
        client.subscriber(URL, side="in", group="g") as subscriber,
    ):
        assert (await anext(subscriber)).rows()[0][0] == 5
    assert any("made anew" in getattr(notice, "reason", "") for notice in told)


def _open(path: Path, map_bytes: int) -> store.Store:
    return store.open_store(path, map_bytes=map_bytes, disk=False, check=log.is_sound)


STOPPED = """
import asyncio, signal, sys, threading
from pathlib import Path
from esp_pubsub.transports.embedded import log, store
from esp_pubsub.transports.embedded.place import topic_directory

def stop(transaction):
    print("holding", flush=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # another thread would take it too late

async def main():
    held = store.open_store(Path(sys.argv[1]), map_bytes=1 << 30, disk=False, check=log.is_sound)
    await held.write(stop, 60)

asyncio.run(main())
"""


class _Stopped:
    """A process that is stopped while it holds the write lock of an environment."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", STOPPED, str(path)], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def test_a_stopped_process_that_holds_the_lock_is_named_and_nothing_is_lost(
    bus_directory,
) -> None:
    await _publish(bus_directory, range(1))
    troubles = []
    options = esp.PublisherOptions(stall=0.2)

    def naming(process):
        """The bus, which waits as long, knows who it is; on a slow machine it may be late once."""
        return [notice.error for notice in troubles if str(process) in str(getattr(notice, "error", ""))]

    async with (
        esp.init(dir=bus_directory, deadline="200ms") as client,
        client.publisher(URL, SCHEMA, on_notice=troubles.append, options=options) as publisher,
    ):
        with _Stopped(topic_directory(bus_directory, TOPIC)) as stopped:
            delivery = await publisher.inject([(1, "waits")])
            with pytest.raises(esp.DeliveryUnknown):
                await publisher.delivered(delivery.id, 0.5)
            async with asyncio.timeout(60):
                while not naming(stopped.pid):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            stopped.send_signal(signal.SIGCONT)
            assert await delivery == "acked"
    errors = [notice.error for notice in troubles if hasattr(notice, "error")]
    assert all(isinstance(error, esp.BusUnavailable) for error in errors)
    assert processes.pid_of(naming(stopped.pid)[0].process) is None  # it has ended meanwhile
    assert await _read(bus_directory, 2) == [0, 1]


async def test_a_group_that_may_fence_ends_the_stopped_process_and_goes_on(bus_directory) -> None:
    await _publish(bus_directory, range(1))
    async with esp.init(dir=bus_directory, deadline="200ms", on_notice=lambda _: None) as client:
        failover = esp.Failover("feed", fence="kill")
        with _Stopped(topic_directory(bus_directory, TOPIC)) as stopped:
            async with client.publisher(URL, SCHEMA, failover=failover) as publisher:
                assert await (await publisher.inject([(1, "")])) == "acked"
            assert await asyncio.to_thread(stopped.wait, 60) == -signal.SIGKILL


def test_no_process_is_ended_whose_name_differs_in_boot_namespace_or_start_time() -> None:
    boot, namespace, pid, started = processes.name().split("/")
    for other in (
        f"{'0' * 36}/{namespace}/{pid}/{started}",
        f"{boot}/1/{pid}/{started}",
        f"{boot}/{namespace}/{pid}/1",
        f"{boot}/{namespace}/{2**22 + 1}/{started}",
        "",
        "nonsense",
    ):
        assert not processes.end(other)
    assert processes.pid_of(processes.name()) == os.getpid()
    assert not processes.is_gone(processes.name())


async def test_a_full_map_grows_and_the_write_succeeds(tmp_path) -> None:
    small = await asyncio.to_thread(_open, tmp_path / "env", 1 << 16)
    try:
        ring = log.Ring(1_000_000, 1 << 30)
        value = log.pack([b"x" * 10_000] * 10, 0)
        for _ in range(20):
            await small.write(lambda t: log.append(t, value, 10, ring), 5)
        found = small.read(log.info)
        assert found is not None
        assert found.next == 200
    finally:
        await asyncio.to_thread(store.close_store, small)


async def test_slots_of_dead_readers_are_freed(tmp_path) -> None:
    script = f"""
import lmdb, os, signal
environment = lmdb.open({str(tmp_path / "env")!r}, max_readers=2048)
transaction = environment.begin()
os.kill(os.getpid(), signal.SIGKILL)
"""
    opened = await asyncio.to_thread(_open, tmp_path / "env", 1 << 20)
    try:
        for _ in range(3):
            subprocess.run([sys.executable, "-c", script], check=False)
        for _ in range(store._REAP_EVERY):
            await opened.write(lambda t: t.put(b"k", b"v"), 5)
        assert opened._env.reader_check() == 0
        assert len([line for line in opened._env.readers().splitlines() if line.strip()[:1].isdigit()]) <= 1
    finally:
        await asyncio.to_thread(store.close_store, opened)


async def test_a_place_that_is_not_ours_alone_is_refused_by_name(tmp_path) -> None:
    link, shared, file = tmp_path / "link", tmp_path / "shared", tmp_path / "file"
    shared.mkdir(mode=0o755)
    link.symlink_to(shared)
    file.write_text("")
    for directory, words in (
        (shared, "chmod 700"),
        (link, "link"),
        (file, "no directory"),
        (tmp_path / ("x" * 300), "name"),
    ):
        with pytest.raises(esp.BusRefused, match=words):
            await esp.init(dir=directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_somebody_elses_directory_is_refused(tmp_path) -> None:
    os.chown(tmp_path, 65534, 65534)
    tmp_path.chmod(0o700)
    with pytest.raises(esp.BusRefused, match="belongs to user 65534"):
        await esp.init(dir=tmp_path)


def test_a_network_file_system_is_recognised_by_the_longest_mount_point() -> None:
    mounts = "dev / ext4 rw 0 0\nhost:/x /mnt/net nfs4 rw 0 0\nhost:/y /mnt/my\\040net cifs rw 0 0\n"
    assert file_system(Path("/mnt/net/bus"), mounts) == "nfs4"
    assert file_system(Path("/mnt/my net/bus"), mounts) == "cifs"
    assert file_system(Path("/mnt/network"), mounts) == "ext4"
    assert file_system(Path("/home"), "") == ""


async def test_two_clients_of_one_process_must_agree_on_durability(bus_directory) -> None:
    async with esp.init(dir=bus_directory):
        with pytest.raises(esp.BusRefused, match="durability"):
            await esp.init(dir=bus_directory, durability="disk")


async def test_a_log_of_another_version_is_refused(bus_directory) -> None:
    await _publish(bus_directory, range(1))
    path = topic_directory(bus_directory, TOPIC)
    environment = lmdb.open(str(path))
    with environment.begin(write=True) as transaction:
        transaction.put(b"\0", b"\x63" + bytes(transaction.get(b"\0"))[1:])
    environment.close()
    async with esp.init(dir=bus_directory) as client:
        with pytest.raises(esp.BusRefused, match="another version"):
            await client.subscriber(URL, side="in")


@contextlib.contextmanager
def _mounted(at: Path, options: str) -> Iterator[None]:
    at.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", at], check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)
        shutil.rmtree(at)


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4_096))


async def test_a_full_disk_is_trouble_that_ends_when_there_is_room_again(tmp_path) -> None:
    disk = tmp_path / "disk"
    with _mounted(disk, "size=2m"):
        told = []
        async with (
            esp.init(dir=disk / "bus", on_notice=told.append) as client,
            client.publisher(URL, SCHEMA) as publisher,
        ):
            await (await publisher.inject([(0, "")]))
            filler = disk / "filler"
            _fill(filler)
            last = [await publisher.inject([(n, "x" * 200_000)]) for n in range(1, 4)][-1]
            with pytest.raises(esp.DeliveryUnknown):
                await publisher.delivered(last.id, 0.5)
            filler.unlink()
            assert await last == "acked"
        assert any("disk full" in str(getattr(notice, "error", "")) for notice in told)
        assert await _read(disk / "bus", 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [2_000, 2_250, 2_500, 2_750])
async def test_a_disk_that_ends_within_a_commit_is_trouble_that_ends_too(tmp_path, size: int) -> None:
    """The system may then say EIO, and not that there is no space left."""
    disk = tmp_path / "disk"
    with _mounted(disk, f"size={size}k"):
        async with (
            esp.init(dir=disk / "bus") as client,
            client.publisher(URL, SCHEMA) as publisher,
        ):
            last = [await publisher.inject([(n, "x" * 100_000)]) for n in range(40)][-1]
            with pytest.raises(esp.DeliveryUnknown):
                await publisher.delivered(last.id, 0.5)
            subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
            assert await last == "acked"
        assert await _read(disk / "bus", 40) == list(range(40))


async def test_locks_of_file_systems_that_number_alike_are_told_apart(tmp_path) -> None:
    with _mounted(tmp_path / "a", "size=10m"), _mounted(tmp_path / "b", "size=10m"):
        stores = [
            await asyncio.to_thread(
                store.open_store, tmp_path / at / "bus", map_bytes=1 << 20, disk=False, check=log.is_sound
            )
            for at in ("a", "b")
        ]
        first, second = (opened._lock for opened in stores)
        assert first.inode == second.inode
        assert first.address != second.address
        for opened in stores:
            await asyncio.to_thread(store.close_store, opened)


OPEN = """
import asyncio, sys
import esp_pubsub as esp

async def main():
    async with esp.init(dir=sys.argv[1]) as client:
        try:
            await client.bus.pipe("t")
        except esp.BusUnavailable as trouble:
            print(trouble)

asyncio.run(main())
"""


def test_a_topic_that_finds_no_place_on_a_full_disk_is_trouble_and_ends_no_process(tmp_path) -> None:
    disk = tmp_path / "disk"
    command = [sys.executable, "-c", OPEN, str(disk / "bus")]
    with _mounted(disk, "size=1m"):
        subprocess.run([sys.executable, "-c", OPEN.replace('"t"', '"another"'), command[-1]], check=True)
        _fill(disk / "filler")
        full = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (full.returncode, full.stderr) == (0, "")
        assert "No space left" in full.stdout
        (disk / "filler").unlink()
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == ""


async def test_a_file_system_that_cannot_reserve_has_a_bus_all_the_same(bus_directory, monkeypatch) -> None:
    def cannot(fd: int, begin: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    await _publish(bus_directory, range(2))
    assert await _read(bus_directory, 2) == [0, 1]


async def test_a_read_only_directory_is_refused(tmp_path) -> None:
    with _mounted(tmp_path / "disk", "ro"), pytest.raises(esp.BusRefused, match="read-only"):
        await esp.init(dir=tmp_path / "disk")


async def test_a_directory_on_a_network_file_system_is_refused(bus_directory, monkeypatch) -> None:
    monkeypatch.setattr(place, "_mounts", lambda: f"host:/x {bus_directory} nfs4 rw 0 0\n")
    with pytest.raises(esp.ConfigError, match=r"network file system \(nfs4\); put it on a local one"):
        await esp.init(dir=bus_directory)


async def test_what_is_acknowledged_with_durability_disk_was_synced_and_is_read(bus_directory) -> None:
    async with esp.init(dir=bus_directory, durability="disk") as client, client.publisher(URL, SCHEMA) as publisher:
        for number in range(3):
            assert await (await publisher.inject([(number, "")])) == "acked"
        for opened in (client.bus.meta, *client.bus._topics.values()):
            assert opened._env.flags()["sync"] and opened._env.flags()["metasync"]
    assert await _read(bus_directory, 3) == [0, 1, 2]


async def test_a_group_that_stored_a_state_only_is_told_that_the_topic_was_emptied(bus_directory) -> None:
    async with esp.init(dir=bus_directory) as client:
        pipe = await client.bus.pipe("t")
        await pipe.write([b"before"])
        feed = await client.bus.feed("t", "earliest", "g")
        await feed.read(1, 1)
        await feed.confirm(None, b"state")
        await feed.aclose()
        await client.bus.purge("t")
        await pipe.write([b"after"])
        feed = await client.bus.feed("t", "latest", "g")
        told, read = (await feed.read(1, 1))[0], (await feed.read(1, 1))[0]
        assert (feed.state, told.incarnation, read.data) == (None, True, b"after")
        await feed.aclose()


async def test_a_close_that_is_cancelled_closes_all_the_same(bus_directory) -> None:
    client = await esp.init(dir=bus_directory)
    await (await client.bus.pipe("t")).write([b"x"])
    feed = await client.bus.feed("t", "earliest", "g")
    await feed.read(1, 1)
    closing = asyncio.create_task(client.bus.aclose())
    await asyncio.sleep(0)  # it waits for the group's record
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not store._open
    await client.aclose()


GROW = """
import lmdb, sys
size = 1 << int(sys.argv[2])
environment = lmdb.open(sys.argv[1], map_size=size)
with environment.begin(write=True) as transaction:
    transaction.put(b"k", bytes(size // 2))
"""


async def test_a_map_that_another_process_grew_is_read_and_written(tmp_path) -> None:
    opened = await asyncio.to_thread(_open, tmp_path / "env", 1 << 16)
    try:
        begun = await opened.write(log.begin, 5)
        command = [sys.executable, "-c", GROW, str(tmp_path / "env")]
        await asyncio.to_thread(subprocess.run, [*command, "24"], check=True)
        assert opened.read(log.info) == begun
        await asyncio.to_thread(subprocess.run, [*command, "26"], check=True)
        assert await opened.write(log.begin, 5) == begun
    finally:
        await asyncio.to_thread(store.close_store, opened)
