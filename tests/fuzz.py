"""`python -m tests.fuzz [COUNT] [SEED]`: bytes through parse, accept and decode, and as words of a group and entries of
an engine's order; nothing but typed errors may come out, and of rows the same by msgspec as by msgpack.

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

from esp_pubsub.engine.beginning import read_beginning
from esp_pubsub.engine.order import Order
from esp_pubsub.errors import BadBody, BadFrame, Closed, ConfigError, InputDiffers, Stale
from esp_pubsub.events import Block, View
from esp_pubsub.failover.accept import Accept, Dropped
from esp_pubsub.failover.ballot import Contender
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.membership import Membership
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.failover.words import Beat, Challenge, Identity, Setup, Word, read_word
from esp_pubsub.schema import Schema
from esp_pubsub.wire.frame import BEAT, BLOCK, BODY_AT, ENTRY, ROWS, SEALED_AT, Frame, frames, glance, parse, seal
from esp_pubsub.wire.maps import read_map, seal_map
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
SETUP = Setup(
    ("h:1/p/q/w/O", "h:1/p/q/v/O"), ("id*:int64",) * 2, "rows", "log", 12_345, 40
)  # of the words in the corpus
ANY = next(iter(SCHEMAS.values()))
READERS: tuple[Callable[[Block], Any], ...] = (Block.rows, Block.mappings, Block.events, Block.table)
VIEWS = (View(), View(collapse=True), View(rmretdel=True), View(True, True))
FORGED = (0, 1, 7, 20, -1, (1 << 32) - 1, (1 << 64) - 1, -(1 << 63), None, True, "x", [])
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
        self.words = [data for data in self.corpus if read_word(data) is not None]
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
            elif kind < 0.18:
                yield self.word()
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

    def word(self) -> bytes:
        """A word of a group in which one value is another one."""
        rng = self.rng
        frame = parse(rng.choice(self.words))
        said = read_map(frame)
        values: Any = said
        while isinstance(values, dict | list) and values:
            key = rng.choice(list(values)) if isinstance(values, dict) else rng.randrange(len(values))
            if not isinstance(values[key], dict | list) or rng.random() < 0.2:
                values[key] = rng.choice(FORGED)
                break
            values = values[key]
        sealed = seal_map(frame.kind, said, source=frame.source, run=rng.choice((0, 0, 0, 1, (1 << 64) - 1)))
        return frames([sealed], 0, 0, rng.choice((0, 1, 3, 4, (1 << 32) - 1)))[0]

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


class Listeners:
    """An election and two members, on a log and on queues, that read whatever stands on their group's control topic."""

    def __init__(self) -> None:
        who = Identity("host:2", 8, "", "host", 2)
        self.contender = Contender(who, 0, beat=0.1, draw=lambda: 0.5)
        self.members = []
        for suffix_only in (True, False):
            lines = [Line(7, 0, Outbox(9, 1 << 20), suffix_only=suffix_only, buffer=9) for _ in SETUP.topics]
            member = Membership(lines, SETUP, who, 0, patience=1.0)
            member.hears(all_of_it=True)
            for line in lines:
                line.reached_end()
            self.members.append(member)

    def hear(self, word: Word, now: float) -> None:
        """Read a word, and write what follows."""
        self.contender.hear(word, now, from_start=False)
        claim = self.contender.claim()
        frames([claim.sealed(0)], 0, 0, claim.term)
        if isinstance(word, Beat):
            for member in self.members:
                with suppress(ConfigError, Stale, InputDiffers, Closed):
                    member.hear(word, now)
                    frames([member.beat(1, 1, resigns=False).sealed(0)], 0, 0, 1)
                    frames([member.standing_by().sealed(0)], 0, 0, 1)
        elif isinstance(word, Challenge):
            for member in self.members:
                member.hear_challenge(word, now)


def hear(data: bytes, listeners: Listeners, tally: Tally) -> None:
    """As a word on a group's control topic, and as an entry on an engine's order topic."""
    if (word := read_word(data)) is not None:
        tally.outcomes[type(word).__name__] += 1
        listeners.hear(word, tally.items)
    _, link, _, kind, source, run, id = glance(data)
    if kind != ENTRY or not id:
        return
    order = Order(source, run, id - 1, link)
    if (entry := order.read(data)) is not None:
        tally.outcomes["entry"] += 1
        order.last = 1
        order.propose(entry, 1 << 20)
    tally.outcomes["beginning"] += read_beginning(data, source, run) is not None


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
    listeners = Listeners()
    for data in islice(fuzz, count):
        tally.items += 1
        if tally.items % RESTARTED == 0:
            for accept in accepts:
                accept.restart(from_start=accept is not accepts[2])
        if tally.items % 10 == 0:
            listeners = Listeners()
        one(data, accepts, listeners, fuzz.rng, tally)
    tally.grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) << 10
    if tally.grown > RESIDENT:
        tally.wrong.append(f"the process grew by {tally.grown} bytes")
    return tally


def one(data: bytes, accepts: list[Accept], listeners: Listeners, rng: random.Random, tally: Tally) -> None:
    """One message, on time and within its memory."""
    watched = tally.items % WATCHED == 0
    if watched:
        tracemalloc.start()
    began = time.process_time()
    try:
        hear(data, listeners, tally)
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
