"""`python -m tests.fuzz [COUNT] [SEED]`: bytes through parse, accept and decode; nothing but typed errors may come out,
and of rows the same by msgspec as by msgpack.

A kept corpus (tests/corpus/*.bin) is mutated, and half of the mutants get the second copy of settled and the chain put
right again, so that what is forged gets past the frame. Each one must be done with in a bounded time; a sample is
watched for memory; every refusal must be of the class that the reader of a block is promised.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

from esp_pubsub.errors import BadBody, BadFrame
from esp_pubsub.events import Block, View
from esp_pubsub.failover.accept import Accept, Dropped
from esp_pubsub.schema import Schema
from esp_pubsub.wire.frame import BEAT, BLOCK, BODY_AT, ROWS, SEALED_AT, Frame, frames, parse, seal
from esp_pubsub.wire.rows import codec
from tests.support import rows_by_msgpack

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 1.0  # for one item; they take some microseconds
WATCHED = 50  # one of so many is watched for memory
MEMORY = 1 << 20, 1_300  # bytes allowed at all, and for each byte that came
RESTARTED = 100  # the accept rule begins anew after so many, or a forged run makes all others stale for good
RESIDENT = 256 << 20  # bytes that the process may grow by
WINDOW = 16
SCHEMAS = {
    schema.fingerprint: schema
    for schema in map(
        Schema,
        (
            "id*:int64,s:string",
            "k*:int32,a:array(i64),d:double",
            "k*:int64,m:money,t:date,u:stamp",
            "i*:int32,l:int64,d:double,s:string,r:rstring,t:date,u:stamp,m:money,b:blob,"
            "ai:array(i32),al:array(i64),ad:array(dbl)",
        ),
    )
}
ANY = next(iter(SCHEMAS.values()))
READERS: tuple[Callable[[Block], Any], ...] = (Block.rows, Block.mappings, Block.events, Block.table)
VIEWS = (View(), View(collapse=True), View(rmretdel=True), View(True, True))
NASTY = (
    b"", b"\0", b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7, b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdc\x10\x00",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xc7\x00\x05",
    b"\xd6\xff\0\0\0\0", b"\x80", b"\x90", b"\xc0", b"\xc1", b"\x91" * 200,
    b"\xdc\xff\xff" * 200, b"\xcb\x7f\xf8\0\0\0\0\0\0",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xa3NaN", b"\xa8Infinity", b"\xaa1E+9999999", b"\xa2\xff\xfe",
    b"\xc4\x02\x06\x06", b"\xcd\x01\x2c", b"\xff\xff\xff\xff\0\0\0\0",
)  # fmt: skip


def put_right(data: bytes) -> bytes:
    """These bytes with settled told twice the same way as in any frame, and a chain that fits them."""
    settled, link = struct.unpack_from("<Q", data, 8)[0], struct.unpack_from("<I", data, 32)[0]
    head = frames([seal(BEAT)], settled, 0)[0][:24]
    head = data[:16] + head[16:]
    return head + data[24:36] + struct.pack("<I", crc32(data[SEALED_AT:], link)) + data[SEALED_AT:]


class Fuzz:
    """An endless, seeded supply of messages."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.corpus = [path.read_bytes() for path in sorted(CORPUS.glob("*.bin"))]
        if not self.corpus:
            raise SystemExit(f"no corpus in {CORPUS}")

    def __iter__(self) -> Iterator[bytes]:
        rng = self.rng
        while True:
            kind = rng.random()
            if kind < 0.04:
                yield rng.randbytes(rng.randrange(200))
            elif kind < 0.08:
                yield self.honest()
            else:
                data = bytearray(rng.choice(self.corpus))
                for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
                    self.mutate(data)
                if len(data) >= BODY_AT and rng.random() < 0.8:
                    data[:4] = b"\xe5PB\x01"
                    if rng.random() < 0.8:
                        self.renumber(data)
                    yield put_right(bytes(data))
                else:
                    yield bytes(data)

    def honest(self) -> bytes:
        """Any body in a frame that is whole."""
        rng = self.rng
        body = (
            rng.choice((b"\x93\x01\x00", b"\x93\x01\x00\x91", b""))
            + rng.choice(NASTY)
            + rng.randbytes(rng.randrange(30))
        )
        one = seal(
            rng.choice((BLOCK, BLOCK, BEAT, rng.randrange(256))), rng.randrange(5), rng.randrange(4), rng.randrange(4),
            rng.randrange(4), rng.randrange(2), rng.randrange(40), rng.choice(list(SCHEMAS)), rng.randrange(3), body,
        )  # fmt: skip
        return frames([one], rng.randrange(30), 0)[0]

    def renumber(self, data: bytearray) -> None:
        """Small numbers, so that mutants meet each other in the accept rule."""
        rng = self.rng
        settled = rng.randrange(20)
        struct.pack_into("<Q", data, 8, settled)
        struct.pack_into("<QQQ", data, 48, rng.randrange(3), rng.choice((0, 0, 0, 1)), settled + rng.randrange(20))

    def mutate(self, data: bytearray) -> None:
        rng = self.rng
        at = (
            rng.randrange(len(data) + 1)
            if rng.random() < 0.4
            else rng.randrange(min(BODY_AT, len(data)), len(data) + 1)
        )
        kind = rng.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at:at] = rng.choice(NASTY)
        elif kind == 3:
            nasty = rng.choice(NASTY)
            data[at : at + len(nasty)] = nasty
        elif kind == 4:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 5:
            del data[at:]
        elif kind == 6:
            data[at:at] = data[at : at + rng.randrange(1, 40)] * rng.randrange(1, 4)
        else:
            other = rng.choice(self.corpus)
            data[at:] = other[min(at, len(other)) :]


@dataclass
class Tally:
    """What came out."""

    seed: int
    items: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    hungriest: float = 0.0
    grown: int = 0
    wrong: list[str] = field(default_factory=list)


def follow(data: bytes, accepts: list[Accept], rng: random.Random, tally: Tally) -> None:
    """One message, all the way."""
    try:
        frame = parse(data, tally.items)
    except BadFrame as e:
        assert e.reason
        tally.outcomes["bad frame"] += 1
        return
    tally.outcomes["frame"] += 1
    for accept in accepts:
        for told in accept.receive(frame):
            tally.outcomes[told.why if isinstance(told, Dropped) else type(told).__name__] += 1
            if isinstance(told, Frame):
                assert told.kind == BLOCK
        assert sum(len(source.hold) for source in accept.sources.values()) <= len(accept.sources) * WINDOW
        assert len(accept.sources) <= accept.max_sources
    schema = SCHEMAS.get(frame.schema, ANY)
    if frame.body_kind == ROWS:
        compare(schema, frame)
    block = Block(frame, schema, rng.choice(VIEWS))
    read = rng.choice(READERS)
    try:
        got = read(block)
    except BadBody as e:
        assert e.id == frame.id
        tally.outcomes["bad body"] += 1
        return
    tally.outcomes[f"read as {read.__name__}"] += 1
    if not block.view:
        assert len(got) == frame.count
    if read is Block.rows:
        assert all(type(row) is tuple and len(row) == len(schema.fields) for row in got)


def compare(schema: Schema, frame: Frame) -> None:
    """msgspec and msgpack read the same in a body, or refuse it both."""
    found = []
    for decode in (codec(schema).decode, partial(rows_by_msgpack.read, schema)):
        try:
            found.append(repr(decode(frame.body, frame.count)))
        except ValueError:
            found.append("refused")
    assert found[0] == found[1], f"{found[0][:200]} by msgspec, {found[1][:200]} by msgpack"


def run(count: int, seed: int) -> Tally:
    """That many messages from this seed."""
    tally = Tally(seed)
    fuzz = Fuzz(seed)
    for data in fuzz.corpus:  # what is imported at first use is not to be charged to the item that needs it
        for read in READERS:
            with suppress(Exception):
                read(Block(parse(data), ANY, VIEWS[0]))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepts = [Accept(suffix_only=s, from_start=f, window=WINDOW, max_sources=50) for s, f in ((1, 1), (0, 1), (0, 0))]
    for data in islice(fuzz, count):
        tally.items += 1
        if tally.items % RESTARTED == 0:
            for accept in accepts:
                accept.restart(from_start=accept is not accepts[2])
        one(data, accepts, fuzz.rng, tally)
    tally.grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) << 10
    if tally.grown > RESIDENT:
        tally.wrong.append(f"the process grew by {tally.grown} bytes")
    return tally


def one(data: bytes, accepts: list[Accept], rng: random.Random, tally: Tally) -> None:
    """One message, on time and within its memory."""
    watched = tally.items % WATCHED == 0
    if watched:
        tracemalloc.start()
    began = time.process_time()
    try:
        follow(data, accepts, rng, tally)
    except Exception as e:  # noqa: BLE001  # whatever comes out is what is looked for
        tally.wrong.append(f"{type(e).__name__}: {e} (item {tally.items}): {data[:2_000].hex()}")
    took = time.process_time() - began
    tally.slowest = max(tally.slowest, took)
    if took > SECONDS:
        tally.wrong.append(f"{took:.2f} s for item {tally.items}: {data[:2_000].hex()}")
    if watched:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        tally.hungriest = max(tally.hungriest, peak / (len(data) + 1))
        if peak > MEMORY[0] + MEMORY[1] * len(data):
            tally.wrong.append(f"{peak} bytes of memory for item {tally.items}: {data[:2_000].hex()}")


def main() -> int:
    """Run, print, and say by the exit code whether anything was wrong."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(1 << 32)
    warnings.simplefilter("error")
    print(f"fuzz: {count} messages, seed {seed} (again: python -m tests.fuzz {count} {seed})", flush=True)
    began = time.process_time()
    tally = run(count, seed)
    for name, number in sorted(tally.outcomes.items()):
        print(f"{number:>10}  {name}")
    print(f"slowest {tally.slowest * 1e3:.1f} ms, hungriest {tally.hungriest:.0f} bytes a byte (of 1 in {WATCHED})")
    print(f"grown by {tally.grown >> 20} MiB")
    kinds = Counter(wrong.split(" (item")[0][:100] for wrong in tally.wrong)
    for kind, number in kinds.most_common(20):
        print(f"WRONG {number} times: {kind}")
        print("   ", next(wrong for wrong in tally.wrong if wrong.startswith(kind))[-3_000:])
    print(f"{tally.items} messages, {len(tally.wrong)} wrong, {time.process_time() - began:.0f} s, seed {seed}")
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
