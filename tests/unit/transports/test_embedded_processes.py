"""Processes by name: who is gone, who may be ended, and what an earlier boot left in the bus's records."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

import esp_pubsub as esp
from esp_pubsub.bus import Message
from esp_pubsub.transports.embedded import meta, processes

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system tells of no process")


def _earlier_boot() -> str:
    return "/".join(("0" * 36, *processes.name().split("/")[1:]))


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as it:
        yield it
        it.kill()


def test_a_process_that_runs_is_not_ended_and_one_that_is_stopped_is(process: subprocess.Popen[bytes]) -> None:
    name = processes.name_of(process.pid)
    assert not processes.end(name)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert processes.end(name)
    assert process.wait() == -signal.SIGKILL


async def test_a_process_that_nobody_has_reaped_yet_is_gone(process: subprocess.Popen[bytes]) -> None:
    name = processes.name_of(process.pid)
    assert not processes.is_gone(name)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert processes.is_gone(name)
    async with asyncio.timeout(60):
        await processes.gone(name)


def test_to_a_process_that_can_open_no_file_nobody_is_gone(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(_: Path, errors: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    theirs, ours = processes.name_of(process.pid), processes.name()
    monkeypatch.setattr(Path, "read_text", read_text)
    assert not processes.is_gone(theirs)
    assert processes.pid_of(theirs) is None
    assert not processes.end(theirs)
    assert processes.name() == ours


NAMED = r"""
import ctypes
ctypes.CDLL(None).prctl(15, b"name \xe2\x82", 0, 0, 0)  # PR_SET_NAME, cut within a character as the system does
print(flush=True)
input()
"""


def test_a_process_whose_name_is_no_text_is_one_like_others() -> None:
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        name = processes.name_of(processes.process_of(process.pid))
        assert processes.pid_of(name) == process.pid
        process.kill()


def test_a_process_of_an_earlier_boot_is_gone_and_one_of_another_namespace_is_not_known_to_be() -> None:
    boot, _, pid, started = processes.name().split("/")
    assert processes.is_gone(_earlier_boot())
    assert not processes.is_gone(f"{boot}/1/{pid}/{started}")
    assert not processes.is_gone("nonsense")


def test_where_the_system_does_not_tell_of_processes_the_pid_is_named_and_nobody_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_place", lambda: ("unknown", "unknown"))
    monkeypatch.setattr(processes, "_started", lambda pid: "")
    assert processes.number(processes.name()) == os.getpid()
    assert processes.pid_of(processes.name()) is None
    assert not processes.is_gone(processes.name())
    assert not processes.is_gone(_earlier_boot())


@pytest.fixture
def records(tmp_path: Path) -> Iterator[lmdb.Transaction]:
    with lmdb.open(str(tmp_path)) as environment, environment.begin(write=True, buffers=True) as transaction:
        yield transaction


def test_a_group_of_an_earlier_boot_is_free(records: lmdb.Transaction, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(meta, "name_of_process", _earlier_boot)
        held = meta.acquire(records, "t", "g", "before", 10.0)
    assert meta.is_free(held)
    assert meta.acquire(records, "t", "g", "now", 10.0).holder == "now"


def test_a_deadline_further_off_than_its_lease_is_void(
    records: lmdb.Transaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    uptime = float(round(meta.boot_time()))  # whole seconds add up exactly
    with monkeypatch.context() as patch:
        patch.setattr(meta, "boot_time", lambda: uptime + 1_000.0)
        held = meta.acquire(records, "t", "g", "before", 10.0)
        assert not meta.is_free(held)
    assert meta.is_free(held)


def test_a_question_of_who_is_gone_is_not_answered(records: lmdb.Transaction, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(meta, "name_of_process", _earlier_boot)
        meta.ask(records, "t", b"1" * 16, meta.boot_time() + 1_000.0, b"before")
    meta.ask(records, "t", b"2" * 16, meta.boot_time() + 1_000.0, b"now")
    question = meta.take_question(records, "t")
    assert question is not None
    assert question.data == b"now"
    assert not meta.has_question(records, "t")


READER = """
import asyncio, sys

import esp_pubsub as esp

async def main():
    async with (
        esp.init(dir=sys.argv[1], lease=60.0) as client,
        client.subscriber("dfESP://host:5555/p/q/w", side="in", group="g", start="earliest") as subscriber,
    ):
        await anext(subscriber)
        print("reads", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_reader_that_waits_for_a_group_goes_on_when_the_one_before_dies_though_nobody_reaps_it(
    bus_directory: Path,
) -> None:
    url, schema = "dfESP://host:5555/p/q/w", "id*:int64"
    async with esp.init(dir=bus_directory, lease=60.0) as client, client.publisher(url, schema) as publisher:
        await (await publisher.inject([(1,)]))
        with subprocess.Popen([sys.executable, "-c", READER, str(bus_directory)], stdout=subprocess.PIPE) as first:
            assert first.stdout is not None
            await asyncio.to_thread(first.stdout.readline)
            feed = await client.bus.feed("host:5555/p/q/w/I", "earliest", "g")
            waiting = asyncio.create_task(feed.read(1, 1))
            await asyncio.sleep(0)  # nothing is awaited before it waits for the other one
            assert not waiting.done()
            first.kill()
            async with asyncio.timeout(60):
                assert len(await waiting) == 1
            await feed.aclose()


WRITER = """
import asyncio, os, signal, sys

import esp_pubsub as esp
from esp_pubsub.transports.embedded.bell import Ringer

async def main():
    async with esp.init(dir=sys.argv[1]) as client:
        pipe = await client.bus.pipe("topic")
        Ringer.ring = lambda ringer: os.kill(os.getpid(), signal.SIGKILL)
        await pipe.write([b"committed"])
        await pipe.confirmed(0)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the next ring tells of it")
async def test_what_a_process_committed_that_died_before_it_rang_wakes_its_readers(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client:
        feed = await client.bus.feed("topic", "earliest", None)
        waiting = asyncio.create_task(feed.read(1, 1))
        died = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", WRITER, str(bus_directory)], check=False)
        assert died.returncode == -signal.SIGKILL
        async with asyncio.timeout(20):
            (found,) = await waiting
        assert isinstance(found, Message)
        assert found.data == b"committed"
        await feed.aclose()
