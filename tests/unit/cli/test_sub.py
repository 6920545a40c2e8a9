"""`esp sub` within a process, so that its files and its confirmations can be made to fail."""

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
    return AdapterOptions(url=URL, fsname=str(out), type="sub", side="in", **{**PLAIN, **keys})


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
    assert out.read_text() == "1,x\n"
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
