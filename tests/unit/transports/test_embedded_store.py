"""The storage under the embedded bus: broken files, stopped processes, growing maps, places that are not safe."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import pytest

import esp_pubsub as esp
from esp_pubsub.transports.embedded import log, processes, store
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
        async with asyncio.timeout(10):
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


STOPPED = """
import asyncio, os, signal, sys, time
from pathlib import Path
from esp_pubsub.transports.embedded import log, store
from esp_pubsub.transports.embedded.place import topic_directory

def stop(transaction):
    print("holding", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)  # another thread takes the signal; this one must not commit meanwhile

async def main():
    held = store.open_store(Path(sys.argv[1]), map_bytes=1 << 30, disk=False)
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
    async with (
        esp.init(dir=bus_directory, deadline="200ms") as client,
        client.publisher(URL, SCHEMA, on_notice=troubles.append) as publisher,
    ):
        with _Stopped(topic_directory(bus_directory, TOPIC)) as stopped:
            delivery = await publisher.inject([(1, "waits")])
            with pytest.raises(esp.DeliveryUnknown):
                await publisher.delivered(delivery.id, 0.5)
            stopped.send_signal(signal.SIGCONT)
            assert await delivery == "acked"
    errors = [notice.error for notice in troubles if hasattr(notice, "error")]
    assert errors and all(isinstance(error, esp.BusUnavailable) for error in errors)
    assert str(stopped.pid) in str(errors[0])
    assert processes.pid_of(errors[0].process) is None  # it has ended meanwhile
    assert await _read(bus_directory, 2) == [0, 1]


async def test_a_group_that_may_fence_ends_the_stopped_process_and_goes_on(bus_directory) -> None:
    await _publish(bus_directory, range(1))
    async with esp.init(dir=bus_directory, deadline="200ms", on_notice=lambda _: None) as client:
        failover = esp.Failover("feed", fence="kill")
        with _Stopped(topic_directory(bus_directory, TOPIC)) as stopped:
            async with client.publisher(URL, SCHEMA, failover=failover) as publisher:
                assert await (await publisher.inject([(1, "")])) == "acked"
            assert await asyncio.to_thread(stopped.wait, 5) == -signal.SIGKILL


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
    small = await asyncio.to_thread(store.open_store, tmp_path / "env", map_bytes=1 << 16, disk=False)
    try:
        ring = log.Ring(1_000_000, 1 << 30)
        value = log.pack([b"x" * 10_000] * 10, 0)
        for _ in range(20):
            await small.write(lambda t: log.append(t, value, 10, ring), 5)
        with small.reading() as transaction:
            found = log.info(transaction)
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
    opened = await asyncio.to_thread(store.open_store, tmp_path / "env", map_bytes=1 << 20, disk=False)
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


async def test_a_full_disk_is_trouble_that_ends_when_there_is_room_again(tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", disk], check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        told = []
        async with (
            esp.init(dir=disk / "bus", on_notice=told.append) as client,
            client.publisher(URL, SCHEMA) as publisher,
        ):
            await (await publisher.inject([(0, "")]))
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4_096))
            last = [await publisher.inject([(n, "x" * 200_000)]) for n in range(1, 4)][-1]
            with pytest.raises(esp.DeliveryUnknown):
                await publisher.delivered(last.id, 0.5)
            filler.unlink()
            assert await last == "acked"
        assert any("disk full" in str(getattr(notice, "error", "")) for notice in told)
        assert await _read(disk / "bus", 4) == [0, 1, 2, 3]
    finally:
        subprocess.run(["umount", disk], check=True)
        shutil.rmtree(disk)
