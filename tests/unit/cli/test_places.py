"""Files, peers and names of places, without a bus."""

import asyncio
import socket
from contextlib import aclosing
from pathlib import Path

import pytest

from esp_pubsub import ConfigError, EspError, Schema
from esp_pubsub.cli import places
from esp_pubsub.cli.places import File, Peer, inputs, is_file, target
from esp_pubsub.text import MAX_LINE, BadText, BinaryWriter


async def opened(path: Path, *, format: str = "csv", size: int = 0) -> File:
    file = File(path, period=0.0, size=size, format=format)
    await file.open(append=True)
    return file


@pytest.mark.parametrize("chunk", [1, 3, 1 << 18])
@pytest.mark.parametrize(
    ("there", "kept"),
    [
        (b'1,a\n4,"two\n', b"1,a\n"),
        (b'1,a\n4,"two\n4,"', b"1,a\n"),
        (b'1,"x\ny"\n2,half', b'1,"x\ny"\n'),
        (b'1,"say ""hi"\n""', b'1,"say ""hi"\n'),
        (b'1,a\n2,"b"', b"1,a\n"),
        (b"1,a\n", b"1,a\n"),
        (b"half", b""),
        (b'"half\n', b""),
        (b"", b""),
    ],
)
async def test_a_row_that_was_torn_by_a_kill_is_cut_off(
    there: bytes, kept: bytes, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "CHUNK", chunk)
    path = tmp_path / "out.csv"
    path.write_bytes(there)
    file = await opened(path)
    await file.write(b"5,e\n")
    file.close()
    assert path.read_bytes() == kept + b"5,e\n"


async def test_quotes_say_nothing_in_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b'{"a":"\\""}\n{"b')
    (await opened(path, format="json")).close()
    assert path.read_bytes() == b'{"a":"\\""}\n'


async def test_a_block_in_binary_that_was_torn_by_a_kill_is_cut_off(tmp_path: Path) -> None:
    path, block = tmp_path / "out.bin", BinaryWriter(Schema("id*:int64")).write([(1,)])
    for torn in (block[:-1], block[:2], b""):
        path.write_bytes(block * 2 + torn)
        file = await opened(path, format="binary")
        await file.write(block)
        file.close()
        assert path.read_bytes() == block * 3
    path.write_bytes(b"1,a\n2,b\n")
    file = File(path, period=0.0, size=0, format="binary")
    with pytest.raises(EspError, match="move it away"):
        await file.open(append=True)
    file.close()
    assert path.read_bytes() == b"1,a\n2,b\n"


async def test_a_file_whose_last_row_seems_to_have_no_end_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    there = b'1,5" pipe\n' + b"2,x\n" * (MAX_LINE // 4)
    path.write_bytes(there)
    with pytest.raises(EspError, match="move the file away"):
        async with aclosing(target(str(path), append=True, period=0.0, size=0, format="csv")) as targets:
            await anext(targets)
    assert path.read_bytes() == there


@pytest.mark.parametrize("fails", ["rename", "open"])
async def test_a_new_file_that_cannot_be_begun_leaves_the_old_one_in_order(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.csv"

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with pytest.raises(PermissionError):
        async with aclosing(target(str(path), append=False, period=0.0, size=10, format="csv")) as targets:
            file = await anext(targets)
            await file.write(b"1,a\n")
            if fails == "rename":
                monkeypatch.setattr(Path, "rename", refused)
            else:
                monkeypatch.setattr(File, "_open", refused)
            await file.turn()
    assert b"".join(each.read_bytes() for each in tmp_path.iterdir()) == b"1,a\n"


@pytest.mark.parametrize("place", [":99999", "127.0.0.1:65536"])
async def test_a_port_that_cannot_be_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="a port is 0 to 65535"):
        is_file(place)
    with pytest.raises(ConfigError, match="a port is 0 to 65535"):
        await anext(inputs(place, lines=True, follow=False, repeat=0))


@pytest.mark.parametrize("host", ["..", "a" * 64 + ".example"])
async def test_a_host_that_cannot_be_is_one_that_cannot_be_reached(host: str) -> None:
    with pytest.raises(EspError, match="cannot be reached"):
        await anext(inputs(f"{host}:80", lines=True, follow=False, repeat=0))


async def test_a_peer_that_leaves_is_noticed_at_once_and_one_that_talks_is_not_listened_to() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setblocking(False)
        peer = Peer(mine.fileno())
        theirs.send(b"hello")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), peer.waiting():
                await asyncio.get_running_loop().create_future()
        await peer.write(b"1,a\n")
        assert theirs.recv(10) == b"1,a\n"
        peer.check()
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(BrokenPipeError):
            async with peer.waiting():
                await asyncio.get_running_loop().create_future()
        with pytest.raises(BrokenPipeError):
            peer.check()
        with pytest.raises(BrokenPipeError):
            await peer.write(b"2,b\n")
        with pytest.raises(BlockingIOError):
            theirs.recv(10, socket.MSG_DONTWAIT)


async def test_what_a_peer_sent_before_it_broke_the_connection_is_read() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        texts = inputs(f"127.0.0.1:{server.getsockname()[1]}", lines=True, follow=False, repeat=0)
        async with aclosing(texts):
            chunks = await anext(texts)
            theirs, _ = await loop.sock_accept(server)
            await loop.sock_sendall(theirs, b"1,a\n2,b\n")
            assert await anext(chunks) == b"1,a\n2,b\n"
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # to close is to reset
            theirs.close()
            with pytest.raises(BadText, match="broke the connection") as broken:
                await anext(chunks)
    assert broken.value.line is None, "it is no line that is bad"
