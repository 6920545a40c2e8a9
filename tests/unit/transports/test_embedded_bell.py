"""The bells of the embedded bus: lost events, no more of them, and what comes after the close."""

import asyncio
import errno
import struct
import sys
from pathlib import Path

import pytest

import esp_pubsub as esp
from esp_pubsub.transports.embedded import bell, store
from esp_pubsub.transports.embedded.bell import Bells, Ringer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of inotify")

Q_OVERFLOW = struct.pack("iIII", -1, 0x4000, 0, 0)


async def test_when_the_system_lost_rings_every_reader_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bells = Bells()
    ringers = [Ringer(tmp_path / name) for name in ("one", "two")]
    events = [bells.watch(tmp_path / name) for name in ("one", "two")]
    monkeypatch.setattr(bell.os, "read", lambda fd, size: Q_OVERFLOW)
    bells._source._read()  # type: ignore[union-attr]
    assert all(event.is_set() for event in events)
    bells.close()
    for ringer in ringers:
        ringer.close()


@pytest.mark.parametrize("call", ["inotify_init1", "inotify_add_watch"])
async def test_a_system_that_has_no_more_bells_is_trouble_that_says_what_to_raise(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = bell._Inotify._call

    def refused(self: bell._Inotify, name: str, *args: object) -> int:
        if name == call:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(self, name, *args)

    monkeypatch.setattr(bell._Inotify, "_call", refused)
    with pytest.raises(esp.BusUnavailable, match=r"max_user_instances"):
        async with esp.init(dir=bus_directory) as client:
            await client.bus.feed("t", "latest", None)
    assert not store._open


async def test_after_the_close_the_bus_says_so_and_touches_no_bell_of_another(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client:
        bus = client.bus
        serving = asyncio.create_task(bus.serve("t", answer=_answer))  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    async with esp.init(dir=bus_directory) as client:  # its descriptors have the numbers of the first one's
        feed = await client.bus.feed("t", "latest", None)
        with pytest.raises(esp.BusUnavailable, match="closed"):
            await serving
        for use in (bus.retained("t", "k"), bus.topics(), bus.request("t", b"", 5.0), bus.retain("t", "k", b"")):  # type: ignore[attr-defined]
            with pytest.raises(esp.BusUnavailable, match="closed"):
                await use
        await (await client.bus.pipe("t")).write([b"rings"])
        async with asyncio.timeout(60):
            assert len(await feed.read(1, 1)) == 1


async def _answer(data: bytes) -> bytes:
    return data


async def test_a_feed_that_finds_no_place_leaves_no_watch(bus_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with esp.init(dir=bus_directory) as client:
        await client.bus.pipe("t")
        monkeypatch.setattr("esp_pubsub.transports.embedded.log.info", lambda transaction: None)
        with pytest.raises(esp.BusUnavailable, match="is gone"):
            await client.bus.feed("t", "latest", None)
        assert not client.bus.bells._watchers  # type: ignore[attr-defined]
