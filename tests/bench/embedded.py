"""The embedded bus between two processes, the whole SDK path: `make bench NAME=embedded` (about three minutes).

Peers get what an application without the SDK would: bytes that are framed already, no acknowledgements, no disk. All
clocks are CLOCK_MONOTONIC, which the processes of a machine share. `IDLE=10` shortens the idle minute; its figure is
scaled to a minute. Idle time is measured once, not five times.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Awaitable, Callable
from statistics import median, quantiles
from typing import Any

import zmq
import zmq.asyncio

from .codec import from_frames, to_frames
from .report import LIMIT, REPETITIONS, SMALL_FROM, Crew, Report, heard, in_turn, main, rows, say, small_row
from .work import now, publish_flat_out, publishing, small_blocks, subscribing

SINGLES = 200_000
BLOCKS, EVENTS = 12_000, 256
PACE, SECONDS, WARM = 1_000, 5, 500
IDLE = float(os.environ.get("IDLE", "60"))
_LENGTH = struct.Struct("<I")
_STAMP = struct.Struct("<Q")


def blocks_of(shape: str) -> list[list[tuple[Any, ...]]]:
    """A few different blocks, published in turn."""
    if shape == "small":
        return small_blocks()
    return [rows(EVENTS, EVENTS * i) for i in range(16)]


# What a member does. Every one says that it is ready, and then when it was done.


async def publish(directory: str, count: int, shape: str) -> None:
    """Inject so many blocks and wait until the last is acknowledged."""
    await publish_flat_out(directory, count, blocks_of(shape))


async def receive(directory: str, count: int, decode: bool) -> None:
    """Take so many blocks, to rows or as they are."""
    async with subscribing(directory, start="earliest") as (subscriber,):
        say(ready=True)
        following = 1
        async for block in subscriber:
            if block.id != following:
                raise RuntimeError(f"block {block.id} came, not {following}")
            if decode:
                block.rows()
            if following == count:
                break
            following += 1
        say(ended=now(), received=following)


async def push(directory: str, count: int) -> None:
    """The same frames by pyzmq."""
    frames = to_frames(blocks_of("small"))
    with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{directory}/zmq")
        await heard()
        began = now()
        for number in range(count):
            await socket.send(frames[number % len(frames)])
        say(began=began, ended=now(), acked=count)
        await heard()


async def pull(directory: str, count: int) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(f"ipc://{directory}/zmq")
        say(ready=True)
        for _ in range(count):
            await socket.recv()
        say(ended=now(), received=count)


async def paced(send: Callable[[int], Awaitable[None]]) -> None:
    """Call `send` with the time, PACE times a second."""
    began = now()
    for number in range(PACE * SECONDS + WARM):
        early = began + number * 1_000_000_000 // PACE - now()
        if early > 0:
            await asyncio.sleep(early / 1e9)
        await send(now())


async def publish_paced(directory: str) -> None:
    """Stamps in the key field."""
    _, *rest = small_row(SMALL_FROM)
    async with publishing(directory) as publisher:

        async def send(stamp: int) -> None:
            await publisher.inject([(stamp, *rest)])

        await heard()
        await paced(send)
        await publisher.flush(LIMIT)
        say(done=True)


async def receive_paced(directory: str) -> None:
    async with subscribing(directory, start="earliest") as (subscriber,):
        say(ready=True)
        took: list[int] = []
        async for block in subscriber:
            took.append(now() - block.rows()[0][0])
            if len(took) == PACE * SECONDS + WARM:
                break
        say(took=took[WARM:])


async def stream_paced(directory: str) -> None:
    """As many bytes as a frame has, over a Unix stream, with the length in front."""
    filling = bytes(len(to_frames(blocks_of("small"))[0]) - _STAMP.size)
    _, writer = await asyncio.open_unix_connection(f"{directory}/stream")

    async def send(stamp: int) -> None:
        data = _STAMP.pack(stamp) + filling
        writer.write(_LENGTH.pack(len(data)) + data)
        await writer.drain()

    await heard()
    await paced(send)
    say(done=True)
    writer.close()
    await writer.wait_closed()


async def stream_receive_paced(directory: str) -> None:
    took: list[int] = []
    done = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(PACE * SECONDS + WARM):
            (length,) = _LENGTH.unpack(await reader.readexactly(4))
            data = await reader.readexactly(length)
            took.append(now() - _STAMP.unpack_from(data)[0])
        writer.close()
        done.set()

    async with await asyncio.start_unix_server(connected, f"{directory}/stream"):
        say(ready=True)
        await done.wait()
        say(took=took[WARM:])


async def idle(directory: str, group: str | None) -> None:
    """Wait for a block that does not come; processor seconds a minute."""
    async with subscribing(directory, group=group) as (subscriber,):
        say(ready=True)
        began = time.process_time()
        try:
            async with asyncio.timeout(IDLE):
                await anext(subscriber)
            raise RuntimeError("a block came from nowhere")
        except TimeoutError:
            say(cpu=(time.process_time() - began) * 60 / IDLE)


_PACED = publish_paced, receive_paced, stream_paced, stream_receive_paced
ROLES = {role.__name__: role for role in (publish, receive, push, pull, idle, *_PACED)}


# What the parent measures.


async def through(sender: str, receiver: str, count: int, out: dict[str, Any], into: dict[str, Any]) -> float:
    """Messages per second, until all are sent, acknowledged where that exists, and received."""
    async with Crew("embedded") as crew:
        reader = await crew.start(receiver, count=count, **into)
        writer = await crew.start(sender, count=count, **out)
        writer.tell()
        sent, received = await writer.told(), await reader.told()
        if sent["acked"] != count or received["received"] != count:
            raise RuntimeError(f"of {count} messages {sent['acked']} were acked and {received['received']} received")
    return count / (max(sent["ended"], received["ended"]) - sent["began"]) * 1e9


async def latencies(sender: str, receiver: str) -> tuple[float, float]:
    """p50 and p99 in microseconds."""
    async with Crew("embedded") as crew:
        reader = await crew.start(receiver)
        writer = await crew.start(sender)
        writer.tell()
        await writer.told()
        took = (await reader.told())["took"]
    return median(took) / 1e3, quantiles(took, n=100)[98] / 1e3


async def measure_singles(report: Report) -> None:
    ours, peer = "single events, acked", "pyzmq.asyncio PUSH/PULL ipc"
    samples = await in_turn(
        {
            ours: lambda: through("publish", "receive", SINGLES, {"shape": "small"}, {"decode": False}),
            peer: lambda: through("push", "pull", SINGLES, {}, {}),
        }
    )
    report.figures(samples, "blocks/s")
    report.ratio(samples, ours, peer, target=2.0)


def timed(work: Callable[[], object], count: int, seconds: float = 1.0) -> float:
    """Events per second of wall time."""
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work()
        rounds += 1
    return rounds * count / (time.perf_counter() - began)


async def measure_blocks(report: Report) -> None:
    names = "256-event blocks, rows to rows", "codec: rows to frame", "codec: frame to rows", "slower of the two"
    samples: dict[str, list[float]] = {name: [] for name in names}
    blocks = blocks_of("large")
    frames = to_frames(blocks)
    for _ in range(REPETITIONS):
        ours = await through("publish", "receive", BLOCKS, {"shape": "large"}, {"decode": True})
        encode = timed(lambda: to_frames(blocks), EVENTS * len(blocks))
        decode = timed(lambda: from_frames(frames), EVENTS * len(blocks))
        for name, value in zip(names, (ours * EVENTS, encode, decode, min(encode, decode)), strict=True):
            samples[name].append(value)
    slower = samples.pop(names[3])
    report.figures(samples, "events/s")
    report.ratio({**samples, names[3]: slower}, names[0], names[3], 0.6)


async def measure_latency(report: Report) -> None:
    ours: list[tuple[float, float]] = []
    peer: list[tuple[float, float]] = []
    for _ in range(REPETITIONS):
        ours.append(await latencies("publish_paced", "receive_paced"))
        peer.append(await latencies("stream_paced", "stream_receive_paced"))
    for at, part in enumerate(("p50", "p99")):
        names = f"one way {part} at {PACE}/s", f"asyncio Unix stream {part}"
        samples = {names[0]: [pair[at] for pair in ours], names[1]: [pair[at] for pair in peer]}
        report.figures(samples, "us", better="lower")
        report.ratio(samples, *names, target=4.0, better="lower")


async def measure_idle(report: Report) -> None:
    async with Crew("embedded") as crew:
        kinds = {"idle subscriber": None, "idle subscriber of a group": "group"}
        members = {name: await crew.start("idle", group=group) for name, group in kinds.items()}
        for name, member in members.items():
            report.result(f"{name}, CPU a minute", (await member.told())["cpu"], "s", 0.3, "lower")


async def measure(report: Report) -> None:
    await measure_singles(report)
    await measure_blocks(report)
    await measure_latency(report)
    await measure_idle(report)


if __name__ == "__main__":
    main("embedded", measure, ROLES)
