"""`esp pub` within a process: its pace, its peers, and the end of its input."""

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.cli import places
from esp_pubsub.cli import pub as command
from esp_pubsub.cli.options import AdapterOptions
from esp_pubsub.cli.pub import Pub, publish
from esp_pubsub.requests import serve
from esp_pubsub.testing import run_virtual
from esp_pubsub.text import BadText

pytestmark = pytest.mark.usefixtures("own_loop")
URL = "dfESP://h:1/p/c/w"
SCHEMA = "id*:int64,symbol:string"


def options(source: object, **keys: Any) -> AdapterOptions:
    marks = {"addcsvopcode": True, "addcsvflags": "normal"}
    return AdapterOptions(url=URL, fsname=str(source), type="pub", schema=SCHEMA, **{**marks, **keys})


async def come(bus: Path, count: int) -> list[tuple[Any, ...]]:
    async with esp.init(dir=bus) as client, client.subscriber(URL, SCHEMA, side="in", start="earliest") as sub:
        rows: list[tuple[Any, ...]] = []
        while len(rows) < count:
            rows += (await anext(sub)).rows()
        return rows


def test_a_pause_of_the_input_is_not_made_up_for() -> None:
    async def scene(_: Any) -> float:
        loop = asyncio.get_running_loop()
        pub = Pub(options("-", rate=5.0), {})
        publisher: Any = SimpleNamespace(stats=SimpleNamespace(on_bus=0, given=0))
        await asyncio.sleep(5)
        begun = loop.time()
        for _ in range(20):
            await pub._pace(publisher)
            pub._events += 1
        return loop.time() - begun

    assert 3.7 < run_virtual(scene) < 4.0


def test_a_rate_is_kept_although_every_wait_is_a_little_too_long() -> None:
    async def scene(_: Any) -> float:
        loop = asyncio.get_running_loop()
        pub = Pub(options("-", rate=1000.0), {})
        pub._begun = begun = loop.time()
        publisher: Any = SimpleNamespace(stats=SimpleNamespace(on_bus=0, given=0))
        for _ in range(1000):
            await pub._pace(publisher)
            await asyncio.sleep(0.0005)
            pub._events += 1
        return loop.time() - begun

    assert 0.99 < run_virtual(scene) < 1.01


async def test_enough_events_are_published_although_they_do_not_fill_a_block(bus_directory: Path) -> None:
    read, write = os.pipe()
    source = f"/dev/fd/{read}"
    try:
        os.write(write, b"1,a\n2,b\n3,c\n")
        async with asyncio.timeout(60):
            await publish(options(source, blocksize=64, maxevents=2), {"dir": str(bus_directory)})
    finally:
        os.close(read)
        os.close(write)
    assert await come(bus_directory, 2) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("fstype", ["csv", "json"])
async def test_the_next_peer_is_served_however_one_leaves(
    fstype: str, bus_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line, a whole one and a reset, a quote that is not closed; then one that ends in order."""
    loop = asyncio.get_running_loop()
    ports: asyncio.Queue[int] = asyncio.Queue()

    def listens(text: str) -> None:
        if text.startswith("listening"):
            ports.put_nowait(int(text.rpartition(" ")[2]))

    monkeypatch.setattr(places, "say", listens)
    given = {
        "csv": [b"1,a\n2,ha", b"2,b\n", b'3,"x\n', b"3,c\n"],
        "json": [b'[[{"id":1,"symbol":"a"},{"i', b'[[{"id":2,"symbol":"b"}]]', b'[[{"id', b'[[{"id":3,"symbol":"c"}]]'],
    }[fstype]
    keys = {"dir": str(bus_directory)}
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(publish(options(":0", fstype=fstype, growinginputfile=True, maxevents=3), keys))
        port = await ports.get()
        for number, text in enumerate(given):
            with socket.socket() as peer:
                peer.setblocking(False)
                await loop.sock_connect(peer, ("127.0.0.1", port))
                await loop.sock_sendall(peer, text)
                if number == 1:
                    await come(bus_directory, 2)
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # to close is to reset
        await running
    assert await come(bus_directory, 3) == [(1, "a"), (2, "b"), (3, "c")]
    assert "3 events published" in capsys.readouterr().err


async def test_lines_of_a_peer_that_broke_the_connection_are_published(bus_directory: Path) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        place = f"127.0.0.1:{server.getsockname()[1]}"
        running = asyncio.ensure_future(publish(options(place, blocksize=4), {"dir": str(bus_directory)}))
        theirs, _ = await loop.sock_accept(server)
        with theirs:
            await loop.sock_sendall(theirs, b"1,a\n2,b\n")
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        with pytest.raises(BadText, match="broke the connection"):
            await running
    assert await come(bus_directory, 2) == [(1, "a"), (2, "b")]


async def test_an_engine_is_asked_to_quiesce_its_project_when_all_is_published(
    bus_directory: Path, tmp_path: Path
) -> None:
    feed, asked = tmp_path / "feed.csv", []
    feed.write_text("1,a\n2,b\n")

    async def engine(question: Any) -> dict[str, str]:
        asked.append((question, await come(bus_directory, 2)))
        return {}

    async with esp.init(dir=bus_directory) as client:
        serving = asyncio.ensure_future(serve(client.requests(), "h:1/M", engine))
        try:
            await publish(options(feed, quiesce=True), {"dir": str(bus_directory)})
        finally:
            serving.cancel()
            await asyncio.wait([serving])
    assert asked == [({"do": "quiesce", "url": "dfESP://h:1/p"}, [(1, "a"), (2, "b")])]


async def test_without_an_engine_nothing_is_quiesced_and_that_is_said(
    bus_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text("1,a\n")
    monkeypatch.setattr(command, "_ANSWER", 0.1)
    with pytest.raises(esp.NoAnswer):
        await publish(options(feed, quiesce=True), {"dir": str(bus_directory)})
    assert "1 event published, blocks 1 to 1, all acknowledged" in capsys.readouterr().err


async def test_a_prebuffered_input_is_read_to_its_end_before_anything_is_published(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    async def whole(*_: object, **__: object) -> Any:
        async def chunks() -> Any:
            for text in (b"1,a\n", b"2,b\n"):
                given.append(pub._events)
                yield text

        yield chunks()

    monkeypatch.setattr(command, "inputs", whole)
    pub = Pub(options("-", prebuffer=True), {"dir": str(bus_directory)})
    await pub.run()
    assert (given, pub._events) == ([0, 0], 2)


@pytest.mark.parametrize(
    ("events", "bad", "given", "acked", "line"),
    [
        (0, 0, 0, 0, "0 events published"),
        (0, 1, 0, 0, "0 events published; 1 bad line skipped"),
        (1, 2, 1, 1, "1 event published, blocks 1 to 1, all acknowledged; 2 bad lines skipped"),
        (2000, 0, 32, 32, "2,000 events published, blocks 1 to 32, all acknowledged"),
        (2000, 0, 32, 15, "2,000 events read, acknowledged up to block 15 of 32"),
        (2000, 0, 32, 0, "2,000 events read, none acknowledged"),
    ],
)
def test_only_what_is_on_the_bus_was_published(
    events: int, bad: int, given: int, acked: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pub, publisher = Pub(options("-"), {}), SimpleNamespace(stats=SimpleNamespace(given=given, acked=acked))
    pub._events, pub._bad, pub._publisher = events, bad, publisher  # type: ignore[assignment]
    pub._tell()
    assert capsys.readouterr().err == f"esp: {line}\n"


def test_a_standby_says_once_when_it_has_taken_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(command, "say", lines.append)
    feed = esp.Failover("feed")

    async def scene(init: Any) -> None:
        async with init() as one, one.publisher(URL, SCHEMA, failover=feed) as first:
            async with command._standby_said(first, feed):
                await first.inject([(1, "a")])
                await (await first.inject([(2, "b")]))
                await asyncio.sleep(10)
            assert lines == [], "who leads stands by for nobody"
            async with (
                init() as two,
                two.publisher(URL, SCHEMA, failover=feed) as second,
                command._standby_said(second, feed),
            ):
                await asyncio.sleep(10)
                assert lines == [], "it is not where its group is"
                await second.inject([(1, "a")])
                await second.inject([(2, "b")])
                await asyncio.sleep(10)
        assert lines == ["standing by in group feed, which is at block 2"]

    run_virtual(scene)


@pytest.mark.usefixtures("no_silence")
async def test_a_member_with_another_input_ends_with_the_way_out_said_once(
    bus_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it waits for more input: nobody would send it."""
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text("1,a\n")
    theirs.write_text("1,a\n2,x\n")
    keys = {"dir": str(bus_directory)}
    first = asyncio.ensure_future(publish(options(ours, growinginputfile=True, failovergroup="feed"), keys))
    await come(bus_directory, 1)
    lines: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(command, "say", lines.put_nowait)
    second = asyncio.ensure_future(publish(options(theirs, growinginputfile=True, failovergroup="feed"), keys))
    async with asyncio.timeout(60):
        assert "standing by" in await lines.get()
        with ours.open("a") as more:
            more.write("2,b\n")
        with pytest.raises(esp.InputDiffers, match=r"block 2 .* --run\), or use esp purge"):
            await second
    assert "block 2" not in caplog.text, "the command says it"
    assert lines.get_nowait() == "2 events read, acknowledged up to block 1 of 2"
    first.cancel()
    await asyncio.wait([first])
