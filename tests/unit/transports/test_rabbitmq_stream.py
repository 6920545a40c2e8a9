"""What a stream's chunks hold, whoever wrote them, and a broker that answers nothing or nonsense."""

from __future__ import annotations

import asyncio
import gzip
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_pubsub.bus import Break, Message
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.transports.rabbitmq import stream_link
from esp_pubsub.transports.rabbitmq.stream import StreamFeed, Streams
from esp_pubsub.transports.rabbitmq.stream_link import OK, Address, Key, Link, chunk, connect
from esp_pubsub.transports.rabbitmq.stream_messages import messages_of, publication

BASE = 1 << 60


def delivered(*entries: bytes, records: int = 0, first: int = 7) -> memoryview:
    data = b"".join(entries)
    sizes = len(entries), records or len(entries), 0, 1, first, zlib.crc32(data), len(data)
    return memoryview(struct.pack(">BBBHIqQQIIII", 0, 0x50, 0, *sizes, 0, 0) + data)


def read(content: memoryview) -> list[Message]:
    return [message for found in messages_of(chunk(content), content, BASE) for message in found]


def entry_of(messages: list[bytes]) -> bytes:
    """An entry as it stands in a chunk: what is published, without its number."""
    return b"".join(publication(1, messages))[13:]


def plain(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def sub_batch(way: int, count: int, data: bytes, whole: int) -> bytes:
    return struct.pack(">BHII", 0x80 | way << 4, count, whole, len(data)) + data


@given(st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=5), min_size=1, max_size=5))
def test_what_was_published_is_read_at_positions_without_a_gap(entries: list[list[bytes]]) -> None:
    sent = [data for entry in entries for data in entry]
    found = read(delivered(*map(entry_of, entries), records=len(sent)))
    assert [message.data for message in found] == sent
    assert [message.position for message in found] == list(range(BASE + 7, BASE + 7 + len(sent)))
    assert all(type(message.data) is bytes for message in found)


@pytest.mark.parametrize(
    "foreign",
    [
        b"", b"x", b"plain text of others", b"\0", b"\0\x53", b"\0\x53\x75", b"\0\x53\x75\xb0\0\0\0\x09short",
        b"\0\x53\x77\xa1\x02ok",
    ],
)  # fmt: skip
def test_what_is_no_message_with_data_is_handed_on_as_it_is(foreign: bytes) -> None:
    first, last = read(delivered(plain(foreign), entry_of([b"next"])))
    assert (first.data, last) == (foreign, Message(BASE + 8, b"next"))


def test_other_sections_are_passed_over() -> None:
    header, small_data, large_data = (
        b"\0\x53\x70\xc0\x02\x01\x41",
        b"\0\x53\x75\xa0\x02ab",
        b"\0\x53\x75\xb0\0\0\0\x01c",
    )
    wide = b"\0\x80\0\0\0\0\0\0\0\x74\xd1\0\0\0\x04\0\0\0\0"
    (found,) = read(delivered(plain(header + wide + small_data + large_data)))
    assert found.data == b"abc"


@given(st.binary(max_size=60))
def test_nothing_is_refused_whatever_a_message_of_others_holds(data: bytes) -> None:
    assert len(read(delivered(plain(data), plain(b"\0\x53" + data), plain(b"\0\x53\x75" + data)))) == 3


def test_gzip_is_undone_and_other_compression_is_handed_on() -> None:
    inner = entry_of([b"a"]) + entry_of([b"b"])
    found = read(
        delivered(
            sub_batch(1, 2, gzip.compress(inner), len(inner)), sub_batch(3, 5, b"lz4", 99), entry_of([b"c"]), records=8
        )
    )
    assert found == [(BASE + 7, b"a"), (BASE + 8, b"b"), (BASE + 9, b"lz4"), (BASE + 14, b"c")]


def test_what_unpacks_to_more_than_it_says_is_handed_on_packed() -> None:
    bomb = gzip.compress(bytes(1 << 20))
    assert read(delivered(sub_batch(1, 1, bomb, 100))) == [(BASE + 7, bomb)]
    assert read(delivered(sub_batch(1, 1, b"no gzip", 100))) == [(BASE + 7, b"no gzip")]


@given(st.lists(st.integers(0, 400_000), min_size=1, max_size=4))
def test_what_is_packed_is_unpacked_piece_by_piece(sizes: list[int]) -> None:
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    inner = b"".join(entry_of([data]) for data in sent)
    content = delivered(sub_batch(1, len(sent), gzip.compress(inner, 1), len(inner)), records=len(sent))
    assert read(content) == list(zip(range(BASE + 7, BASE + 11), sent, strict=False))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("way", [0, 1])
def test_a_sub_batch_that_is_not_what_it_says_is_handed_on_and_what_follows_is_read(way: int, count: int) -> None:
    inner = b"\0\0\0\x09short" if count == 2 else entry_of([b"a"]) + entry_of([b"b"])
    forged = gzip.compress(inner) if way else inner
    found = read(delivered(sub_batch(way, count, forged, len(inner)), entry_of([b"c"]), records=count + 1))
    assert found == [(BASE + 7, forged), (BASE + 7 + count, b"c")]


@pytest.mark.parametrize("at", range(52, 80))
def test_a_damaged_chunk_is_noticed(at: int) -> None:
    content = bytearray(delivered(entry_of([b"one", b"two"]), records=2))
    content[at] ^= 0x10
    with pytest.raises(ValueError, match="checksum"):
        read(memoryview(content))


@pytest.mark.parametrize("entry", [b"\0\0\0\x09short", b"\0\0", b"\x80\0"])
def test_a_chunk_whose_sizes_are_forged_is_noticed(entry: bytes) -> None:
    with pytest.raises(ValueError, match="chunk"):
        read(delivered(entry))


Served = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _connect_to(serve: Served) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        hosts = (server.sockets[0].getsockname()[:2],)
        await connect(Address(hosts, "guest", "guest", "/", context=None, timeout=0.3))


class Noted:
    """A broker that keeps what is stored as the base of a stream."""

    def __init__(self, base: int) -> None:
        self.base = base

    async def ask(self, key: Key, content: bytes) -> tuple[int, bytes]:
        return OK, self.base.to_bytes(8, "big")

    def send(self, key: Key, *content: bytes) -> None:
        self.base = int.from_bytes(content[-1], "big")


@pytest.mark.parametrize("forged", [(1 << 64) - 1, (1 << 63) + 1])
async def test_a_base_that_leaves_no_room_for_positions_is_replaced(forged: int) -> None:
    broker: Any = Noted(forged)
    streams = Streams(Address((), "guest", "guest", "/", context=None, timeout=1.0), {})
    base = await streams.base(broker, "s", make=False)
    assert base == broker.base < 1 << 63
    assert await streams.base(broker, "s", make=False) == base


async def test_a_broker_that_does_not_answer_is_unavailable() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    with pytest.raises(BusUnavailable, match="did not answer"):
        await _connect_to(silent)


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 100, b"\0\0\0\x01x", b"\0\0\0\x05\0\x14\0\1x"]
)
async def test_what_speaks_another_language_is_unavailable(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await reader.read()
        writer.close()

    with pytest.raises(BusUnavailable):
        await _connect_to(nonsense)


# what is not waited for


@asynccontextmanager
async def linked(serve: Served) -> AsyncIterator[Link]:
    """A link to a broker that knows who we are."""
    link = Link(10.0)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        await asyncio.get_running_loop().create_connection(lambda: link, host, port)
        try:
            yield link
        finally:
            await link.aclose()


async def frame_from(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


async def test_both_ends_of_a_stream_are_asked_for_at_once() -> None:
    """A round trip to a busy broker takes long, and a takeover waits for this one."""

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = [await frame_from(reader) for _ in range(4)]
        chunks = {
            ask[8]: delivered(entry_of([b"x"]), first=first) for ask, first in zip(asked[::2], (3, 9), strict=True)
        }
        for ask in asked:
            said = struct.pack(">HH", int.from_bytes(ask[:2], "big") | 0x8000, 1) + ask[4:8] + b"\0\1"
            if ask[:2] == b"\0\7":
                said += (4 + len(chunks[ask[8]])).to_bytes(4, "big") + b"\0\x08\0\1" + ask[8:9] + chunks[ask[8]][1:]
            writer.write(struct.pack(">I", 10) + said)
        await reader.read()
        writer.close()

    async with linked(broker) as link, asyncio.timeout(5):
        found = await link.peek("s", b"first", b"last")
        assert [each and each.first for each in found] == [3, 9]


async def test_closing_does_not_wait_for_a_broker_that_says_no_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_link, "_MANNERS", 60.0)
    said: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.set_result(await frame_from(reader))
        await reader.read()
        writer.close()

    async with linked(broker) as link, asyncio.timeout(5):
        await link.aclose()
        assert (await said)[:2] == Key.CLOSE.to_bytes(2, "big")


# a chunk that cannot be read


def too_large(first: int) -> tuple[bytes, int]:
    """The begin of what delivers a message of 100 MiB to subscription 1, and the size of the rest."""
    size = 100 << 20
    header = struct.pack(">BBBHIqQQIIII", 1, 0x50, 0, 1, 1, 0, 1, first, 0, size, 0, 0)
    return struct.pack(">IHH", 4 + len(header) + size, Key.DELIVER, 1) + header, size


async def test_of_a_chunk_that_is_too_large_the_header_is_handed_on_and_the_rest_is_not_kept() -> None:
    link, found = Link(1.0), list[bytes]()
    link._readers[1] = lambda content: found.append(bytes(content))
    following = delivered(entry_of([b"next"]), first=8)
    frame = struct.pack(">IHH", 4 + len(following), Key.DELIVER, 1) + b"\1" + following[1:]
    begin, size = too_large(7)
    arrive(link, frame + begin[:20])
    arrive(link, begin[20:])
    while size:
        room = len(link.get_buffer(0))
        assert 0 < room <= 1 << 16
        link.buffer_updated(min(room, size))
        size -= min(room, size)
    arrive(link, frame)
    assert [len(each) for each in found] == [len(following), len(begin) - 8, len(following)]
    assert link.error is None


def arrive(link: Link, data: bytes) -> None:
    while data:
        room = link.get_buffer(0)
        step = min(len(room), len(data))
        room[:step] = data[:step]
        link.buffer_updated(step)
        data = data[step:]


async def test_a_read_hands_out_what_many_chunks_held() -> None:
    """Who reads a stream now and then only keeps up all the same."""
    feed = StreamFeed(Streams(Address((), "guest", "guest", "/", context=None, timeout=1.0), {}), "s")
    feed._link, feed._base, feed._next = Link(1.0), BASE, BASE
    feed._chunks.extend(delivered(entry_of([b"%d" % n]), first=n) for n in range(10))
    assert await feed.read(4, 1_000) == [(BASE + n, b"%d" % n) for n in range(4)]
    assert len(feed._chunks) == 6
    assert await feed.read(100, 1_000) == [(BASE + n, b"%d" % n) for n in range(4, 10)]


async def test_what_a_read_has_no_room_for_stays_in_its_chunks() -> None:
    feed = StreamFeed(Streams(Address((), "guest", "guest", "/", context=None, timeout=1.0), {}), "s")
    feed._link, feed._base, feed._next = Link(1.0), BASE, BASE
    feed._chunks.extend(delivered(entry_of([bytes(600)]), first=n) for n in range(10))
    for left in range(8, -1, -1):
        assert len(await feed.read(100, 1_000)) == 1
        assert (len(feed._chunks), feed._ahead_bytes) == (left, 600)


async def test_what_came_in_front_of_what_cannot_be_read_is_handed_out_first() -> None:
    feed = StreamFeed(Streams(Address((), "guest", "guest", "/", context=None, timeout=1.0), {}), "s")
    feed._link, feed._base, feed._next = Link(1.0), BASE, BASE
    feed._link.listen(feed._hear, feed.end)
    begin, _ = too_large(1)
    feed._chunks.extend([delivered(entry_of([b"whole"]), first=0), memoryview(begin)[8:]])
    assert await feed.read(100, 1_000) == [(BASE, b"whole")]
    with pytest.raises(BusUnavailable, match="checksum"):
        await feed.read(100, 1_000)


async def test_a_chunk_that_cannot_be_read_is_asked_for_once_more_and_then_passed_and_told() -> None:
    streams = Streams(Address((), "guest", "guest", "/", context=None, timeout=1.0), {})
    begin, _ = too_large(7)
    cut_off = memoryview(begin)[8:]
    for last in (False, True):
        feed = StreamFeed(streams, "s")
        feed._link, feed._base, feed._next = Link(1.0), BASE, BASE + 7
        feed._chunks.extend([cut_off, delivered(entry_of([b"next"]), first=8)])
        if not last:
            with pytest.raises(BusUnavailable, match="checksum"):
                await feed.read(10, 1_000)
            continue
        told, following = await feed.read(10, 1_000)
        assert isinstance(told, Break) and told.messages == 1 and not told.incarnation
        assert following == (BASE + 8, b"next")
