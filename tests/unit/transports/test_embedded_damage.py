"""What a power cut leaves of the embedded bus: what is sound is kept, what is broken is set aside, once, and told."""

import asyncio
import contextlib
import fcntl
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest

import esp_pubsub as esp
from esp_pubsub.notices import Skipped
from esp_pubsub.transports.embedded import files, log, meta, pages, processes, store
from esp_pubsub.transports.embedded.place import topic_directory

URL = "dfESP://host:5555/project/query/window"
TOPIC = "host:5555/project/query/window/I"
SCHEMA = "id*:int64,text:string"
PAGE = 4_096


async def _publish(directory: Path, numbers: range) -> None:
    async with esp.init(dir=directory) as client, client.publisher(URL, SCHEMA) as publisher:
        for number in numbers:
            await (await publisher.inject([(number, "x" * 50)]))


async def _pipe(directory: Path) -> None:
    async with esp.init(dir=directory) as client:
        await client.bus.pipe(TOPIC)


async def _read(directory: Path, count: int) -> list[int]:
    async with esp.init(dir=directory) as client, client.subscriber(URL, side="in", start="earliest") as subscriber:
        async with asyncio.timeout(60):
            return [(await anext(subscriber)).rows()[0][0] for _ in range(count)]


def _set_aside(directory: Path) -> list[Path]:
    return list(directory.glob("**/*.broken-*"))


async def _opened(path: Path, check: files.Check) -> store.Store:
    return await asyncio.to_thread(store.open_store, path, map_bytes=1 << 30, disk=False, check=check)


async def _closed(opened: store.Store) -> None:
    await asyncio.to_thread(store.close_store, opened)


def _is_short(path: Path) -> bool:
    with lmdb.open(str(path)) as environment:
        return (environment.info()["last_pgno"] + 1) * PAGE > (path / "data.mdb").stat().st_size


async def test_a_topic_whose_ring_turned_over_within_a_commit_is_sound(tmp_path: Path) -> None:
    """Pages that one commit takes and frees at the end of the file are never written: it is short, and all is there."""
    path = tmp_path / "topics" / "t"
    opened = await _opened(path, log.is_sound)

    def turn_over(transaction: lmdb.Transaction, letters: bytes = b"abc") -> None:
        for letter in letters:
            log.append(transaction, log.pack([bytes([letter]) * 60_000], 0), 1, log.Ring(1_000, 1 << 16))

    for letters in (b"a", b"b", b"c", b"def"):
        await opened.write(partial(turn_over, letters=letters), 5)
    await _closed(opened)
    assert _is_short(path)
    opened = await _opened(path, log.is_sound)
    try:
        assert not _set_aside(tmp_path)
        found = opened.read(log.info)
        assert found is not None
        assert found.next == 6
        assert opened.read(lambda t: [message.data for message in log.read(t, 5, 6, 9, 1 << 20)]) == [b"f" * 60_000]
        await opened.write(turn_over, 5)
    finally:
        await _closed(opened)


async def test_what_the_bus_knows_is_kept_though_a_commit_freed_what_it_took(tmp_path: Path) -> None:
    opened = await _opened(tmp_path / "meta", meta.is_sound)

    def come_and_go(transaction: lmdb.Transaction) -> None:
        meta.retain(transaction, "t", "large", bytes(100_000))
        meta.retain(transaction, "t", "large", None)

    await opened.write(lambda t: meta.add_topic(t, "t", empty=True), 5)
    for size in range(30_000, 35_000, 1_000):  # pages to free must be known already
        await opened.write(lambda t, size=size: meta.retain(t, "t", "k", bytes(size)), 5)
    await opened.write(come_and_go, 5)
    await _closed(opened)
    assert _is_short(tmp_path / "meta")
    opened = await _opened(tmp_path / "meta", meta.is_sound)
    try:
        assert not _set_aside(tmp_path)
        assert opened.read(lambda t: meta.retained(t, "t", "k")) == bytes(34_000)
        assert opened.read(meta.topics) == ["t"]
    finally:
        await _closed(opened)


@contextlib.contextmanager
def _log(path: Path, batches: int) -> Iterator[lmdb.Transaction]:
    with lmdb.open(str(path)) as environment, environment.begin(write=True, buffers=True) as transaction:
        for _ in range(batches):
            log.append(transaction, log.pack([b"one", b"two"], 0), 2, log.Ring(1_000, 1 << 30))
        yield transaction


@pytest.mark.parametrize(
    ("damage", "sound"),
    [
        (lambda t: None, True),
        (lambda t: t.delete((0).to_bytes(8, "big")), False),
        (lambda t: t.put((0).to_bytes(8, "big"), bytes(26)), False),
        (lambda t: t.put((0).to_bytes(8, "big"), bytes(3)), False),
        (lambda t: t.put((0).to_bytes(8, "big"), log.pack([b"one"], 0) + b"x"), False),
        (lambda t: t.delete((8).to_bytes(8, "big")), False),
    ],
    ids=["none", "the first is missing", "zeros", "cut off", "another length", "the last is missing"],
)
def test_a_log_is_sound_if_its_ends_fit_together(
    tmp_path: Path, damage: Callable[[lmdb.Transaction], Any], sound: bool
) -> None:
    with _log(tmp_path, 5) as transaction:
        damage(transaction)
        assert log.is_sound(transaction) == sound


@pytest.mark.parametrize("size", [50, 3_000, 60_000])
def test_a_file_is_whole_until_it_lacks_a_page_that_is_in_use(tmp_path: Path, size: int) -> None:
    """Cut at every page from its end on: what is there of all that was written tells how far it is whole."""
    with lmdb.open(str(tmp_path), map_size=1 << 30) as environment:
        for n in range(120):
            with environment.begin(write=True, buffers=True) as transaction:
                for _ in range(1 + n % 3):
                    log.append(transaction, log.pack([b"x" * size], 0), 1, log.Ring(1_000, 1 << 18))
        stat = environment.stat()
        data = tmp_path / "data.mdb"
        whole = data.stat().st_size
        assert pages.is_whole(environment, data)
        cuts = []
        for end in range(whole // PAGE, 2, -1):
            os.truncate(data, end * PAGE)
            cuts.append(pages.is_whole(environment, data))
        os.truncate(data, whole)
    used = 2 + stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    assert cuts == sorted(cuts, reverse=True)
    assert used <= whole // PAGE - cuts.count(True) + 1
    assert not cuts[-1]


async def test_a_topic_with_pages_of_zeros_is_set_aside(bus_directory: Path) -> None:
    await _publish(bus_directory, range(200))
    data = topic_directory(bus_directory, TOPIC) / "data.mdb"
    size = data.stat().st_size
    with data.open("r+b") as file:  # all but what tells where the pages are
        file.seek(2 * PAGE)
        file.write(bytes(size - 2 * PAGE))
    await _publish(bus_directory, range(7, 9))
    assert await _read(bus_directory, 2) == [7, 8]
    assert len(_set_aside(bus_directory)) == 1


def _batches(path: Path, count: int, damaged: int, damage: bytes) -> lmdb.Environment:
    """A log of batches of two, one a second, one of them damaged."""
    environment = lmdb.open(str(path))
    with environment.begin(write=True, buffers=True) as transaction:
        for second in range(count):
            value = log.pack([b"one", b"two"], second * 1_000_000)
            log.append(transaction, value, 2, log.Ring(1_000, 1 << 30))
        transaction.put((2 * damaged).to_bytes(8, "big"), damage)
    return environment


_DAMAGES = (b"", bytes(26), (99).to_bytes(8, "little") + bytes(18), bytes(8) + b"\xff" * 18)


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_place_by_time_leaves_nothing_out_though_a_batch_is_damaged(tmp_path: Path, damage: bytes) -> None:
    with _batches(tmp_path, 9, 4, damage) as environment, environment.begin(buffers=True) as transaction:
        found = log.info(transaction)
        assert found is not None
        for second in range(9):
            assert log.position_at(transaction, found, second * 1_000_000) in (2 * second, 8)
            assert log.position_at(transaction, found, second * 1_000_000) <= 2 * second


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_ring_turns_over_a_batch_that_is_damaged(tmp_path: Path, damage: bytes) -> None:
    with _batches(tmp_path, 5, 2, damage) as environment, environment.begin(write=True, buffers=True) as transaction:
        for _ in range(6):
            log.append(transaction, log.pack([b"one", b"two"], 0), 2, log.Ring(6, 1 << 30))
        found = log.info(transaction)
        assert found is not None
        assert (found.first, found.next) == (16, 22)
        assert log.is_sound(transaction)
        assert len(log.read(transaction, 16, 22, 100, 1 << 20)) == 6


def _zero_a_leaf(data: Path) -> None:
    """One in the middle of the topic."""
    written = data.read_bytes()
    leaves = [
        number
        for number, at in enumerate(range(0, len(written), PAGE))
        if struct.unpack_from("=Q2xH", written, at) == (number, 2)
    ]
    with data.open("r+b") as file:
        file.seek(leaves[len(leaves) // 2] * PAGE)
        file.write(bytes(PAGE))


async def test_a_reader_is_told_of_a_page_of_zeros_in_the_middle_and_goes_on_behind_it(bus_directory: Path) -> None:
    count = 600
    told: list[Any] = []
    async with esp.init(dir=bus_directory) as client, client.publisher(URL, SCHEMA) as publisher:
        for number in range(count):
            await (await publisher.inject([(number, "x" * 500)]))
    _zero_a_leaf(topic_directory(bus_directory, TOPIC) / "data.mdb")
    async with (
        esp.init(dir=bus_directory, on_notice=told.append) as client,
        client.subscriber(URL, side="in", start="earliest") as subscriber,
        asyncio.timeout(60),
    ):
        got = [(await anext(subscriber)).rows()[0][0]]
        while got[-1] != count - 1:
            got.append((await anext(subscriber)).rows()[0][0])
    skipped = sum(notice.messages for notice in told if isinstance(notice, Skipped))
    assert 0 < skipped < 50
    assert len(got) == count - skipped
    assert got == sorted(got)


async def test_a_topic_that_lost_a_page_in_a_power_cut_is_set_aside(bus_directory: Path) -> None:
    """LMDB may end the process that touches such a page, so it is looked for at the first open after each boot."""
    await _publish(bus_directory, range(600))
    topic = topic_directory(bus_directory, TOPIC)
    _zero_a_leaf(topic / "data.mdb")
    await _publish(bus_directory, range(1))
    assert not _set_aside(bus_directory)
    (topic / "boot").write_text("another boot")
    await _publish(bus_directory, range(7, 9))
    assert await _read(bus_directory, 2) == [7, 8]
    assert len(_set_aside(bus_directory)) == 1
    assert (topic / "boot").read_text() == processes.boot()


PUBLISH = """
import asyncio, sys
import esp_pubsub as esp

async def main():
    async with esp.init(dir=sys.argv[1]) as client, client.publisher(sys.argv[2], sys.argv[3]) as publisher:
        for number in range(3):
            assert await (await publisher.inject([(number, "")])) == "acked"

asyncio.run(main())
"""


async def test_who_is_slower_to_set_a_topic_aside_leaves_alone_what_the_faster_one_made(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _publish(bus_directory, range(1))
    (topic_directory(bus_directory, TOPIC) / "data.mdb").write_bytes(os.urandom(2 * PAGE))
    locked = files.locked

    def slower(folder: Path, *, alone: bool) -> Any:
        if alone:
            subprocess.run([sys.executable, "-c", PUBLISH, str(bus_directory), URL, SCHEMA], check=True)
        return locked(folder, alone=alone)

    monkeypatch.setattr(files, "locked", slower)
    assert await _read(bus_directory, 3) == [0, 1, 2]
    assert len(_set_aside(bus_directory)) == 1


HOLD = """
import lmdb, sys
environment = lmdb.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


async def test_a_topic_that_another_process_has_open_is_not_set_aside_under_it(bus_directory: Path) -> None:
    await _publish(bus_directory, range(1))
    path = topic_directory(bus_directory, TOPIC)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (path / "data.mdb").write_bytes(os.urandom(2 * PAGE))
        with pytest.raises(esp.BusUnavailable, match="set aside when the processes that have it open are ended"):
            await _pipe(bus_directory)
        assert not _set_aside(bus_directory)
        other.kill()
    await _publish(bus_directory, range(1))
    assert len(_set_aside(bus_directory)) == 1


async def test_an_open_does_not_wait_for_ever_for_one_that_stands_still(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.05)
    fd = os.open(bus_directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(esp.BusUnavailable, match="does not go on"):
            await esp.init(dir=bus_directory)
    finally:
        os.close(fd)
    async with esp.init(dir=bus_directory):
        pass


async def test_a_group_is_told_when_what_it_had_confirmed_is_lost(bus_directory: Path) -> None:
    await _publish(bus_directory, range(150))

    async def confirm(told: list[Any]) -> None:
        async with (
            esp.init(dir=bus_directory, on_notice=told.append) as client,
            client.publisher(URL, SCHEMA) as publisher,
            client.subscriber(URL, side="in", group="g", start="latest") as subscriber,
        ):
            await publisher.inject([(150, "")])
            async with asyncio.timeout(60):
                await subscriber.confirm(await anext(subscriber))

    before: list[Any] = []
    await confirm(before)
    (bus_directory / "meta" / "data.mdb").write_bytes(os.urandom(2 * PAGE))
    lost: list[Any] = []
    await confirm(lost)
    after: list[Any] = []
    await confirm(after)
    skipped = [[notice for notice in told if isinstance(notice, Skipped)] for told in (before, lost, after)]
    assert [len(notices) for notices in skipped] == [0, 1, 0]
    assert "is lost" in skipped[1][0].reason


async def _confirmed(directory: Path, count: int, told: list[Any]) -> list[tuple[Any, ...]]:
    """What a group is given, and confirms."""
    rows = []
    async with (
        esp.init(dir=directory, on_notice=told.append) as client,
        client.subscriber(URL, side="in", group="g", start="earliest") as subscriber,
    ):
        async with asyncio.timeout(60):
            while len(rows) < count:
                block = await anext(subscriber)
                rows += block.rows()
                await subscriber.confirm(block)
        await subscriber.confirm()
    return rows


@pytest.mark.parametrize("since", [2, 5, 20])
async def test_a_group_misses_nothing_though_the_end_of_its_topic_was_lost(bus_directory: Path, since: int) -> None:
    """A power cut took what it had confirmed last, and others have published since: less, as much, or more."""
    data, told = topic_directory(bus_directory, TOPIC) / "data.mdb", []
    await _publish(bus_directory, range(5))
    assert len(await _confirmed(bus_directory, 5, told)) == 5
    before = data.read_bytes()
    await _publish(bus_directory, range(5, 10))
    assert len(await _confirmed(bus_directory, 5, told)) == 5
    data.write_bytes(before)
    await _publish(bus_directory, range(100, 100 + since))
    assert told == []
    assert [row[0] for row in await _confirmed(bus_directory, since, told)] == list(range(100, 100 + since))
    assert [notice.reason for notice in told if isinstance(notice, Skipped)] == [
        "the end of the topic was lost, as in a power cut, and with it what this group had confirmed"
    ]
    told.clear()
    await _publish(bus_directory, range(200, 203))
    assert [row[0] for row in await _confirmed(bus_directory, 3, told)] == [200, 201, 202]
    assert told == [], "it is told once"


async def test_an_environment_of_another_version_is_refused_and_kept(bus_directory: Path) -> None:
    await _publish(bus_directory, range(1))
    data = topic_directory(bus_directory, TOPIC) / "data.mdb"
    with data.open("r+b") as file:
        for page in (0, 1):
            file.seek(page * PAGE + 16 + 4)  # behind the page's head and a magic number
            file.write((999).to_bytes(4, sys.byteorder))
    with pytest.raises(esp.BusRefused, match="another version of LMDB"):
        await _pipe(bus_directory)
    assert not _set_aside(bus_directory)


async def test_records_of_a_later_version_are_refused(bus_directory: Path) -> None:
    await _publish(bus_directory, range(1))
    with lmdb.open(str(bus_directory / "meta")) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"\0", b"2")
    with pytest.raises(esp.BusRefused, match="another version"):
        await esp.init(dir=bus_directory)


async def test_what_is_set_aside_is_logged_once(bus_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    await _publish(bus_directory, range(1))
    (topic_directory(bus_directory, TOPIC) / "data.mdb").write_bytes(os.urandom(2 * PAGE))
    with caplog.at_level(logging.ERROR, "esp_pubsub.embedded"):
        await _publish(bus_directory, range(1))
    assert caplog.text.count("set aside") == 1
