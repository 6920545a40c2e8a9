"""Meteor's shape: 4 publishers, 16 subscribers, each gets every 100 B block: `make bench NAME=fanout`.

Both sides run four processes that write and four that read, with four readers in each. The peer is LMDB and nothing
else: its writers put ready-made frames in batches of the same layout and ring the same bell; its readers walk the
batches, unpack each header, and check each chain. Deliveries per second count from the first write to the last read.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import lmdb

import esp_pubsub as esp
from esp_pubsub.transports.embedded.bell import Bells, Ringer
from esp_pubsub.wire.frame import BLOCK, ROWS, frames, seal
from esp_pubsub.wire.rows import codec

from .codec import HEADER
from .report import SCHEMA, SMALL_FROM, Crew, Report, heard, in_turn, main, say, small_row
from .work import now, publish_flat_out, small_blocks, subscribing

PUBLISHERS, PROCESSES, READERS = 4, 4, 4
EACH = int(os.environ.get("EACH", "25000"))  # blocks from every publisher
TOTAL = PUBLISHERS * EACH
DELIVERIES = TOTAL * PROCESSES * READERS
BATCH = 256
_HEAD, _KEY = struct.Struct("<QI"), struct.Struct(">Q")  # a batch: time, n; then n lengths; then n frames


async def publish(directory: str, number: int) -> None:
    """One publisher; blocks of one event, the last one acknowledged at the end."""
    await publish_flat_out(directory, EACH, small_blocks())


async def receive(directory: str, batched: bool = False) -> None:
    """Four subscribers of one client, each taken block by block, or by `batches`."""
    async with subscribing(directory, READERS, start="earliest") as subscribers:
        say(ready=True)
        async with asyncio.TaskGroup() as tasks:
            for subscriber in subscribers:
                tasks.create_task(take_batches(subscriber) if batched else take_all(subscriber))
        say(ended=now(), delivered=sum(subscriber.stats.blocks for subscriber in subscribers))


async def take_all(subscriber: esp.Subscriber) -> None:
    """Until every block has come; that they come in order is the accept rule's, that none is missing the notices'."""
    taken = 0
    async for _ in subscriber:
        taken += 1
        if taken == TOTAL:
            return


async def take_batches(subscriber: esp.Subscriber) -> None:
    taken = 0
    async for blocks in subscriber.batches():
        taken += len(blocks)
        if taken == TOTAL:
            return


def open_bare(directory: str) -> lmdb.Environment:
    Path(directory, "bare").mkdir(exist_ok=True)
    Path(directory, "bell").touch()
    return lmdb.open(f"{directory}/bare", map_size=1 << 32, sync=False, metasync=False, meminit=False, max_spare_txns=8)


def ready_batches(source: int) -> list[bytes]:
    """What one bare writer writes: the same frames as a publisher's, packed."""
    encode, chain, batches = codec(SCHEMA).encode, 0, []
    for first in range(0, EACH, BATCH):
        sealed = []
        for i in range(first, min(first + BATCH, EACH)):
            body = encode([small_row(SMALL_FROM + i % 64)])
            sealed.append(seal(BLOCK, ROWS, 0, 1, source, 0, i + 1, SCHEMA.fingerprint, chain, body))
            chain = sealed[-1].chain
        made = frames(sealed, 0, time.time_ns() // 1000)
        lengths = struct.pack(f"<{len(made)}I", *map(len, made))
        batches.append(b"".join((_HEAD.pack(time.time_ns() // 1000, len(made)), lengths, *made)))
    return batches


async def write_bare(directory: str, number: int) -> None:
    """One commit and one ring a batch."""
    batches = ready_batches(number + 1)
    env, ringer = open_bare(directory), Ringer(Path(directory, "bell"))
    await heard()
    began = now()
    for value in batches:
        with env.begin(write=True, buffers=True) as transaction:
            cursor = transaction.cursor()
            end = _KEY.unpack(cursor.key())[0] + _HEAD.unpack_from(cursor.value())[1] if cursor.last() else 0
            transaction.put(_KEY.pack(end), value, append=True)
        ringer.ring()
    say(began=began, ended=now())


async def read_bare(directory: str) -> None:
    """Four readers on one environment and one loop."""
    env, bells = open_bare(directory), Bells()
    rung = [bells.watch(Path(directory, "bell")) for _ in range(READERS)]
    say(ready=True)
    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(walk(env, bell)) for bell in rung]
    say(ended=now(), delivered=sum(reader.result() for reader in readers))


async def walk(env: lmdb.Environment, bell: asyncio.Event) -> int:
    """Unpack and check everything; a turn for the others after every 1,000 frames or so, as a subscriber reads."""
    position, chains = 0, dict.fromkeys(range(1, PUBLISHERS + 1), 0)
    unpack = HEADER.unpack_from
    while position < TOTAL:
        bell.clear()
        messages = list(new_frames(env, position))
        for data in messages:
            fields = unpack(data)
            link, chain, source = fields[5], fields[6], fields[11]
            if crc32(data[40:], link) != chain or chains[source] != link:
                raise RuntimeError(f"the chain of source {source} is broken at {position}")
            chains[source] = chain
        position += len(messages)
        if messages:
            await asyncio.sleep(0)
        else:
            await bell.wait()
    return position


def new_frames(env: lmdb.Environment, position: int) -> Iterator[bytes]:
    """Up to 1,000 frames or so, in whole batches, from the batch that begins at `position`."""
    with env.begin(buffers=True) as transaction:
        cursor = transaction.cursor()
        if not cursor.set_range(_KEY.pack(position)):
            return
        found = 0
        for value in cursor.iternext(keys=False):
            n = _HEAD.unpack_from(value)[1]
            at = _HEAD.size + 4 * n
            batch = bytes(value)
            for length in struct.unpack_from(f"<{n}I", batch, _HEAD.size):
                yield batch[at : at + length]
                at += length
            found += n
            if found > 1_000 - BATCH:
                return


ROLES = {role.__name__: role for role in (publish, receive, write_bare, read_bare)}


async def deliveries(writer: str, reader: str, **settings: Any) -> float:
    """Deliveries per second."""
    async with Crew("fanout") as crew:
        readers = [await crew.start(reader, **settings) for _ in range(PROCESSES)]
        writers = [await crew.start(writer, number=number) for number in range(PUBLISHERS)]
        for member in writers:
            member.tell()
        written: list[dict[str, Any]] = [await member.told() for member in writers]
        read = [await member.told() for member in readers]
    delivered = sum(said["delivered"] for said in read)
    if delivered != DELIVERIES:
        raise RuntimeError(f"{delivered} blocks were delivered, not {DELIVERIES}")
    return DELIVERIES / (max(said["ended"] for said in read) - min(said["began"] for said in written)) * 1e9


async def measure(report: Report) -> None:
    ours, bare, batched = "4 x 16 deliveries", "bare LMDB 4 x 16", "4 x 16 by batches()"
    samples = await in_turn(
        {
            ours: lambda: deliveries("publish", "receive"),
            bare: lambda: deliveries("write_bare", "read_bare"),
            batched: lambda: deliveries("publish", "receive", batched=True),
        }
    )
    report.figures(samples, "deliveries/s")
    report.ratio(samples, ours, bare, 0.5)
    report.ratio(samples, batched, bare, None)


if __name__ == "__main__":
    main("fanout", measure, ROLES)
