"""`esp sub` within a process, so that its files and its confirmations can be made to fail."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.cli import sub as command
from esp_pubsub.cli.options import AdapterOptions
from esp_pubsub.cli.places import File
from esp_pubsub.cli.sub import subscribe

pytestmark = pytest.mark.usefixtures("own_loop")
URL = "dfESP://h:1/p/c/w"
SCHEMA = "id*:int64,symbol:string"
PLAIN = {"addcsvopcode": True, "addcsvflags": "normal"}


def options(out: Path, **keys: Any) -> AdapterOptions:
    return AdapterOptions(url=URL, fsname=str(out), type="sub", **{**PLAIN, "side": "in", **keys})


async def published(bus: Path, *blocks: list[tuple[Any, ...]], **settings: Any) -> None:
    async with esp.init(dir=bus) as client, client.publisher(URL, SCHEMA) as pub:
        for rows in blocks:
            await pub.inject(rows, **settings)


async def test_a_group_of_the_cfg_file_adds_to_its_file(
    bus_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def of_a_group(*_: object) -> AsyncIterator[esp.Client]:
        async with esp.init(dir=bus_directory) as client:
            monkeypatch.setattr(client, "_group", "archive")  # as the groupid of kafka.cfg does
            yield client

    monkeypatch.setattr(command, "opened", of_a_group)
    out = tmp_path / "out.csv"
    await published(bus_directory, [(1, "a")], [(2, "b")])
    for _ in range(2):
        await subscribe(options(out, maxevents=1), {}, None)
    assert out.read_text() == "1,a\n2,b\n"


def failing(number: int, stall: Callable[[File], bool] = lambda _: False) -> Any:
    """File._write, of which this call fails, when it no longer stalls."""
    write, calls = File._write, []

    def _write(self: File, data: bytes) -> None:
        calls.append(data)
        if len(calls) == number:
            while stall(self):
                time.sleep(0.001)
            raise esp.EspError("the disk is full")
        write(self, data)

    return _write


async def test_a_write_is_waited_for_although_it_is_time_for_a_new_file(
    bus_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, again = tmp_path / "out.csv", tmp_path / "again.csv"
    keys = {"dir": str(bus_directory)}
    monkeypatch.setattr(command, "_FINISH", 0.0)
    monkeypatch.setattr(command, "_READ", 1)  # a block at a time
    monkeypatch.setattr(File, "_write", failing(2, lambda file: time.monotonic() < file._due + 0.1))
    await published(bus_directory, *([(i, "x")] for i in range(1, 4)))
    with pytest.raises(esp.EspError, match="full"):
        await subscribe(options(out, group="g", periodicity=0.1, maxevents=3), keys, None)
    files = tmp_path.glob("out*.csv")  # two, if the second block was read so late that it was time before
    assert "".join(each.read_text() for each in files) == "1,x\n"
    monkeypatch.undo()
    await subscribe(options(again, group="g", maxevents=2), keys, None)
    assert again.read_text() == "2,x\n3,x\n"


async def test_what_was_written_is_confirmed_before_the_next_file_is_begun(
    bus_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, again = tmp_path / "out.csv", tmp_path / "again.csv"
    keys = {"dir": str(bus_directory)}
    monkeypatch.setattr(File, "_write", failing(2))
    await published(bus_directory, *([(i, "x")] for i in range(1, 4)))
    with pytest.raises(esp.EspError, match="full"):
        await subscribe(options(out, group="g", maxfilesize=8, maxevents=3), keys, None)
    assert (tmp_path / "out.1.csv").read_text() == "1,x\n2,x\n"
    monkeypatch.undo()
    await subscribe(options(again, group="g", maxevents=1), keys, None)
    assert again.read_text() == "3,x\n"


@pytest.mark.parametrize(
    ("sent", "said", "fits"),
    [(0, "normal", True), (1, "normal", False), (1, "partialupdate", True), (2, "normal", True)],
)
async def test_lines_without_flags_do_not_hide_a_partial_update(
    sent: int, said: str, fits: bool, bus_directory: Path, tmp_path: Path
) -> None:
    out, keys = tmp_path / "out.csv", {"dir": str(bus_directory)}
    await published(bus_directory, [(1, None)], opcode=esp.Opcode.UPDATE, flags=sent)
    given = options(out, maxevents=1, addcsvflags=said)
    if fits:
        await subscribe(given, keys, "earliest")
        assert out.read_text() == "1,\n"
    else:
        with pytest.raises(esp.EspError, match="pass --opcodes"):
            await subscribe(given, keys, "earliest")
    await subscribe(options(out, maxevents=1, addcsvflags=None), keys, "earliest")
    assert out.read_text() == f"{('N', 'P', 'R')[sent]},1,\n"


@pytest.mark.parametrize(("side", "hint"), [("in", ""), ("out", " (esp pub writes to the side in)")])
async def test_who_reads_what_nobody_has_published_to_is_told_so(
    side: str, hint: str, bus_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(command, "say", lines.put_nowait)
    given = options(tmp_path / "out.csv", side=side, schema=SCHEMA, maxevents=1)
    reading = asyncio.ensure_future(subscribe(given, {"dir": str(bus_directory)}, None))
    topic = f"h:1/p/c/w/{'I' if side == 'in' else 'O'}"
    async with asyncio.timeout(60):
        assert await lines.get() == f"nobody has published to {topic} yet: waiting{hint}"
        async with esp.init(dir=bus_directory) as client, client.publisher(URL, SCHEMA, side=side) as pub:
            await pub.inject([(1, "a")])
        await reading
        assert await lines.get() == "1 event written, 1 block, the last one 1 of run 0"


async def test_who_begins_behind_what_is_there_is_told_so(
    bus_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(command, "say", lines.put_nowait)
    await published(bus_directory, [(1, "a")])
    given, keys = options(tmp_path / "out.csv", maxevents=1), {"dir": str(bus_directory)}
    reading = asyncio.ensure_future(subscribe(given, keys, None))
    async with asyncio.timeout(60):
        line = await lines.get()
        assert line.startswith("waiting for what is published from now on; esp sub --start earliest begins with the 1 ")
        await published(bus_directory, [(2, "b")])
        await reading
    assert (tmp_path / "out.csv").read_text() == "2,b\n"


@pytest.mark.parametrize(("start", "group"), [("earliest", None), ("latest", None), (None, "g")])
async def test_who_says_where_to_begin_is_told_nothing(
    start: Any, group: str | None, bus_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(command, "say", lines.put_nowait)
    await published(bus_directory, [(1, "a")])
    out = tmp_path / "out.csv"
    reading = asyncio.ensure_future(subscribe(options(out, group=group), {"dir": str(bus_directory)}, start))
    async with asyncio.timeout(60):
        while not out.exists():  # noqa: ASYNC110  # it would have been told before
            await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])
    assert lines.qsize() == 1 and "written" in lines.get_nowait()
