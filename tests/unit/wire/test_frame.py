"""The frame against a table of vectors, in both directions, whole and broken in every way."""

import struct
from typing import Any
from zlib import crc32

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from esp_pubsub.errors import BadFrame
from esp_pubsub.wire.frame import (
    ARROW,
    BEAT,
    BLOCK,
    BODY_AT,
    CLAIM,
    MAGIC,
    MAP,
    MARKED,
    NO_BODY,
    REPLY,
    REQUEST,
    ROWS,
    SEALED_AT,
    TRANSACTIONAL,
    Frame,
    Limits,
    Sealed,
    frames,
    parse,
    seal,
)

ALL = (1 << 64) - 1
FOR_PEOPLE = {*range(4, 8), *range(24, 32)}  # term and sent-at decide nothing, and nothing protects them

# name, what is sealed, (settled, sent-at, term), the bytes
VECTORS: list[tuple[str, dict[str, Any], tuple[int, int, int], str]] = [
    (
        "the first block",
        {
            "kind": 1,
            "body_kind": 1,
            "count": 1,
            "source": 0x123456789ABCDEF,
            "run": 0,
            "id": 1,
            "schema": 0xA7138E67E44CF482,
            "link": 0,
            "body": b"\x93\x01\x00\x91\x92\x01\xa1a",
        },
        (0, 1765432100123456, 0),
        "e5504201000000000000000000000000000000000000000040f333b1a645060000000000907ca7ae0101000001000000"
        "efcdab89674523010000000000000000010000000000000082f44ce4678e13a7930100919201a161",
    ),
    (
        "a transactional block behind it",
        {
            "kind": 1,
            "body_kind": 1,
            "flags": 1,
            "count": 2,
            "source": 0x123456789ABCDEF,
            "run": 0,
            "id": 2,
            "schema": 0xA7138E67E44CF482,
            "link": 0xAEA77C90,
            "body": b"\x93\xc4\x02\x06\x06\x02\x92\x92\x02\xa1b\x92\x03\xc0",
        },
        (1, 1765432100123457, 5),
        "e5504201050000000100000000000000010000000000000041f333b1a6450600907ca7ae269bc4b20101010002000000"
        "efcdab89674523010000000000000000020000000000000082f44ce4678e13a793c402060602929202a1629203c0",
    ),
    (
        "a marked arrow block of a run",
        {
            "kind": 1,
            "body_kind": 2,
            "flags": 2,
            "count": 3,
            "source": 7,
            "run": 20261118,
            "id": 1,
            "schema": 0xA7138E67E44CF482,
            "link": 0,
            "body": b"not really arrow",
        },
        (0, 0, 0),
        "e550420100000000000000000000000000000000000000000000000000000000000000005ea2aa990102020003000000"
        "0700000000000000fe28350100000000010000000000000082f44ce4678e13a76e6f74207265616c6c79206172726f77",
    ),
    (
        "a beat without a body",
        {"kind": 2, "source": 0x123456789ABCDEF, "run": 20261118},
        (512, 1, 2),
        "e550420102000000000200000000000000020000000000000100000000000000000000008ca0f2180200000000000000"
        "efcdab8967452301fe2835010000000000000000000000000000000000000000",
    ),
    (
        "a beat of the control topic",
        {"kind": 2, "body_kind": 3, "source": 1, "body": b"\x82\xa6member\xa1a\xa6number\x07"},
        (3, 4, 5),
        "e55042010500000003000000000000000300000000000000040000000000000000000000253f85b80203000000000000"
        "010000000000000000000000000000000000000000000000000000000000000082a66d656d626572a161a66e756d6265"
        "7207",
    ),
    (
        "a claim",
        {"kind": 3, "body_kind": 3, "source": 1, "body": b"\x81\xa4term\x03"},
        (0, 0, 3),
        "e55042010300000000000000000000000000000000000000000000000000000000000000281ae8220303000000000000"
        "010000000000000000000000000000000000000000000000000000000000000081a47465726d03",
    ),
    (
        "a request",
        {"kind": 4, "body_kind": 3, "body": b"\x81\xa3ask\xa4meta"},
        (0, 0, 0),
        "e550420100000000000000000000000000000000000000000000000000000000000000000edd442c0403000000000000"
        "000000000000000000000000000000000000000000000000000000000000000081a361736ba46d657461",
    ),
    (
        "a reply",
        {"kind": 5, "body_kind": 3, "body": b"\x81\xa4meta\x90"},
        (0, 0, 0),
        "e550420100000000000000000000000000000000000000000000000000000000000000002d28c86c0503000000000000"
        "000000000000000000000000000000000000000000000000000000000000000081a46d65746190",
    ),
    (
        "every field at its end",
        {
            "kind": 255,
            "body_kind": 255,
            "flags": 65535,
            "count": 0,
            "source": 0xFFFFFFFFFFFFFFFF,
            "run": 18446744073709551615,
            "id": 18446744073709551615,
            "schema": 0xFFFFFFFFFFFFFFFF,
            "link": 0xFFFFFFFF,
            "body": b"",
        },
        (18446744073709551615, 18446744073709551615, 4294967295),
        "e5504201ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff17c38a0fffffffff00000000"
        "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    ),
    (
        "one event in one byte",
        {"kind": 1, "body_kind": 1, "count": 1, "id": 1, "body": b"\x00"},
        (0, 0, 0),
        "e55042010000000000000000000000000000000000000000000000000000000000000000105e882e0101000001000000"
        "000000000000000000000000000000000100000000000000000000000000000000",
    ),
]
TABLE = pytest.mark.parametrize(("sealed", "volatile", "text"), [v[1:] for v in VECTORS], ids=[v[0] for v in VECTORS])
BYTES = pytest.mark.parametrize("data", [bytes.fromhex(v[3]) for v in VECTORS], ids=[v[0] for v in VECTORS])


def refusal(data: bytes, limits: Limits | None = None) -> str:
    """Why these bytes are no frame; fails if they are one."""
    with pytest.raises(BadFrame) as e:
        if limits is None:
            parse(data)
        else:
            parse(data, None, limits)
    assert e.value.reason == str(e.value)
    return e.value.reason


def resealed(data: bytes) -> bytes:
    """These bytes with a chain that fits them."""
    (link,) = struct.unpack_from("<I", data, 32)
    return data[:36] + struct.pack("<I", crc32(data[SEALED_AT:], link)) + data[SEALED_AT:]


@TABLE
def test_what_is_sealed_is_written_as_the_vector(
    sealed: dict[str, Any], volatile: tuple[int, int, int], text: str
) -> None:
    made = seal(**sealed)
    assert frames([made], *volatile) == [bytes.fromhex(text)]
    assert (made.id, made.link) == (sealed.get("id", 0), sealed.get("link", 0))
    assert made.head + made.body == bytes.fromhex(text)[SEALED_AT:]


@TABLE
def test_the_vector_is_read_as_what_was_sealed(
    sealed: dict[str, Any], volatile: tuple[int, int, int], text: str
) -> None:
    data = bytes.fromhex(text)
    frame = parse(data, "here")
    wanted = {"kind": 0, "body_kind": NO_BODY, "flags": 0, "count": 0, "source": 0, "run": 0, "id": 0, "schema": 0}
    wanted |= {"link": 0, "body": b""} | sealed
    assert {name: getattr(frame, name) for name in wanted} == wanted
    assert (frame.settled, frame.sent_at, frame.term) == volatile
    assert (frame.data, frame.position, frame.magic) == (data, "here", MAGIC)
    assert frame.chain == crc32(data[SEALED_AT:], wanted["link"]) == seal(**sealed).chain
    assert isinstance(frame, Frame)


def test_the_vectors_are_laid_out_as_the_head_of_the_module_says() -> None:
    data = bytes.fromhex(VECTORS[1][3])
    magic, term, settled, again, sent_at, link, chain = struct.unpack_from("<4sIQQQII", data)
    kind, body, flags, count, source, run, id_, _ = struct.unpack_from("<BBHIQQQQ", data, 40)
    assert (magic, term, settled, again, sent_at) == (b"\xe5PB\x01", 5, 1, 1, 1_765_432_100_123_457)
    assert (kind, body, flags, count, source, run, id_) == (1, 1, 1, 2, 0x0123456789ABCDEF, 0, 2)
    assert link == parse(bytes.fromhex(VECTORS[0][3])).chain
    assert chain == crc32(data[40:], link)
    assert (BODY_AT, SEALED_AT) == (80, 40)


def test_the_numbers_of_kinds_bodies_and_flags_are_those_of_the_protocol() -> None:
    assert (BLOCK, BEAT, CLAIM, REQUEST, REPLY) == (1, 2, 3, 4, 5)
    assert (NO_BODY, ROWS, ARROW, MAP) == (0, 1, 2, 3)
    assert (TRANSACTIONAL, MARKED) == (1, 2)


@BYTES
def test_a_frame_truncated_at_any_byte_is_refused(data: bytes) -> None:
    for size in range(len(data)):
        reason = refusal(data[:size])
        if 4 <= size < BODY_AT:
            assert reason == f"truncated: {size} bytes, a header alone has {BODY_AT}"


@BYTES
@pytest.mark.parametrize("more", [b"\0", b"\xff", b"\n", b"\0" * 1_000])
def test_a_frame_with_trailing_bytes_is_refused(data: bytes, more: bytes) -> None:
    assert refusal(data + more) == "the chain does not match the bytes"


@BYTES
def test_two_frames_in_one_message_are_refused(data: bytes) -> None:
    assert refusal(data + data) == "the chain does not match the bytes"
    refusal(b"\0" + data)


@BYTES
def test_every_single_bit_flipped_is_noticed_or_is_for_people_only(data: bytes) -> None:
    whole = parse(data)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        if bit // 8 in FOR_PEOPLE:
            frame = parse(bytes(flipped))
            assert frame._replace(data=b"") == whole._replace(data=b"")
            assert (frame.term, frame.sent_at) != (whole.term, whole.sent_at)
        else:
            refusal(bytes(flipped))


@BYTES
@pytest.mark.parametrize("version", [0, 2, 3, 255])
def test_another_version_is_named_with_ours(data: bytes, version: int) -> None:
    reason = refusal(data[:3] + bytes([version]) + data[4:])
    assert reason.startswith(f"protocol version {version:02x}, this is version 01")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xe5", b"\xe5P", b"{}", b"\0" * 80, b"\0" * 200, b"\xff" * 100_000, b"GET / HTTP/1.1\r\n" * 10],
    ids=lambda d: repr(d[:12]),
)
def test_garbage_is_no_frame(data: bytes) -> None:
    assert refusal(data) == "no frame: it does not begin with E5 50 42"


@pytest.mark.parametrize("settled", [0, 1, 511, 1 << 63, ALL])
def test_settled_stands_there_twice_and_both_must_agree(settled: int) -> None:
    (data,) = frames([seal(BLOCK, ROWS, count=1, id=1, body=b"\0")], settled, 0)
    assert parse(data).settled == settled
    other = struct.pack("<Q", settled ^ 4)
    assert refusal(data[:8] + other + data[16:]) == "the two copies of settled differ"
    assert refusal(data[:16] + other + data[24:]) == "the two copies of settled differ"


@pytest.mark.parametrize("count", [33, 100, 1 << 16, 1_000_000, (1 << 32) - 1])
def test_more_events_than_bytes_are_a_forgery_even_with_the_right_chain(count: int) -> None:
    (data,) = frames([seal(BLOCK, ROWS, count=count, id=1, body=b"\0")], 0, 0)
    assert refusal(data) == f"{count} events cannot be in 1 bytes"


@pytest.mark.parametrize(
    ("limits", "body", "count", "reason"),
    [
        (Limits(frame_bytes=100_000), 100_000, 1, ""),
        (Limits(frame_bytes=100_000), 100_001, 1, "a body of 100001 bytes, the limit is 100000"),
        (Limits(events=70_000), 80_000, 70_000, ""),
        (Limits(events=70_000), 80_000, 70_001, "70001 events, the limit is 70000"),
        (Limits(events=100), 200, 100, ""),
        (Limits(events=100), 200, 101, "101 events, the limit is 100"),
        (Limits(frame_bytes=1 << 16), 1 << 16, 1, ""),
        (Limits(frame_bytes=1 << 16), (1 << 16) + 1, 1, "a body of 65537 bytes, the limit is 65536"),
    ],
)
def test_a_frame_over_a_limit_is_refused(limits: Limits, body: int, count: int, reason: str) -> None:
    (data,) = frames([seal(BLOCK, ROWS, count=count, id=1, body=bytes(body))], 0, 0)
    if reason:
        assert refusal(data, limits) == reason
    else:
        assert parse(data, None, limits).count == count


def test_the_limits_by_default_are_those_of_the_protocol() -> None:
    assert Limits() == Limits(frame_bytes=64 << 20, events=1_000_000)
    (data,) = frames([seal(BLOCK, ROWS, count=1_000_001, id=1, body=bytes(1_000_001))], 0, 0)
    assert refusal(data) == "1000001 events, the limit is 1000000"
    (data,) = frames([seal(BLOCK, ROWS, count=1, id=1, body=bytes((64 << 20) + 1))], 0, 0)
    assert refusal(data) == f"a body of {(64 << 20) + 1} bytes, the limit is {64 << 20}"


def test_a_batch_carries_one_settled_one_time_and_one_term() -> None:
    link, batch = 0, []
    for id_ in range(1, 6):
        batch.append(seal(BLOCK, ROWS, count=1, source=9, id=id_, link=link, body=b"x" * id_))
        link = batch[-1].chain
    written = frames(iter(batch), 3, 1_000_000, 2)
    assert written == [frames([one], 3, 1_000_000, 2)[0] for one in batch]
    read = [parse(data) for data in written]
    assert [f.id for f in read] == [1, 2, 3, 4, 5]
    assert {(f.settled, f.sent_at, f.term) for f in read} == {(3, 1_000_000, 2)}
    assert [f.link for f in read] == [0, *[f.chain for f in read[:-1]]]
    assert frames([], 0, 0) == []


def test_written_again_only_the_volatile_fields_change() -> None:
    one = seal(BLOCK, ROWS, count=1, source=9, run=1, id=4, schema=5, link=77, body=b"body")
    (first,), (again,) = frames([one], 0, 1), frames([one], ALL, 2, 3)
    assert first[32:] == again[32:]
    assert isinstance(one, Sealed)


CHANGES: list[dict[str, Any]] = [
    *({name: 8} for name in ("link", "id", "run", "source", "schema", "flags", "count", "kind", "body_kind")),
    {"body": b"bodz"},
    {"body": b"body\0"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_chain_stands_for_every_sealed_field(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"kind": BLOCK, "body_kind": ROWS, "count": 1, "id": 4, "link": 77, "body": b"body"}
    assert seal(**fields).chain != seal(**(fields | change)).chain


@given(st.binary(max_size=200))
def test_any_bytes_are_a_bad_frame(data: bytes) -> None:
    refusal(data)


@given(st.binary(max_size=120), st.binary(min_size=40, max_size=40))
@example(b"x", struct.pack("<BBHI", 1, 1, 0, 2) + bytes(32))
def test_any_sealed_bytes_under_a_right_chain_are_read_as_they_are(body: bytes, header: bytes) -> None:
    data = resealed(frames([seal(BLOCK)], 1, 2, 3)[0][:40] + header + body)
    (count,) = struct.unpack_from("<I", header, 4)
    if count > max(len(body), 1):  # one event in no byte is found where the body is read
        assert refusal(data) == f"{count} events cannot be in {len(body)} bytes"
    else:
        frame = parse(data)
        assert (frame.count, frame.body) == (count, body)
        assert struct.pack(
            "<BBHIQQQQ",
            frame.kind, frame.body_kind, frame.flags, count, frame.source, frame.run, frame.id, frame.schema,
        ) == header  # fmt: skip
