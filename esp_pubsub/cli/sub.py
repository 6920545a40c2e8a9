"""`esp sub`: blocks to text. In a group a block is confirmed when it is written, so a full disk or a peer that left
costs nothing: the next one of the group gets it. A write is never given up but for a signal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Literal, cast

from .. import Block, BusUnavailable, Client, EspError, EventFlag, Opcode, Subscriber, SubscriberOptions
from ..bus import Start
from ..text import BinaryWriter, CsvWriter, JsonWriter
from .look import is_published_to
from .options import AdapterOptions, bus_start, opened, sas_options
from .places import Target, target
from .running import counted, progress, say

Writer = BinaryWriter | CsvWriter | JsonWriter

_READ = 1 << 20  # bytes of blocks between two writes
_FINISH = 5.0  # seconds that a write has left when a signal comes
_ROWS = bytes((Opcode.INSERT, Opcode.UPDATE, Opcode.UPSERT))


class Sub:
    """One run of it."""

    def __init__(self, options: AdapterOptions, keys: Mapping[str, str], start: Start | None) -> None:
        sas = sas_options(options.transport, options.transportconfigfile)
        self._options = options
        self._keys = keys
        self._start = start
        self._dateformat = options.dateformat or sas.dateformat
        self._csv = replace(options.csv(), dateformat=self._dateformat)
        self._plain = options.format == "csv" and options.addcsvopcode
        self._events = self._blocks = 0
        self._last: Block | None = None
        self._shown = 0
        self._writer: Writer | None = None

    async def run(self) -> None:
        """Until there were enough events, or a signal."""
        options = self._options
        try:
            async with opened(options, self._keys) as client:
                opening = client.subscriber(
                    options.url, options.schema, side=options.wanted_side, group=options.group, start=self._start,
                    options=SubscriberOptions(read_bytes=_READ),
                )  # fmt: skip
                async with opening as subscriber, aclosing(self._targets(subscriber)) as targets:
                    with suppress(BusUnavailable):  # reading waits for it
                        await self._say_what_it_waits_for(client, subscriber)
                    async for to in targets:
                        async with progress(self._line):
                            await self._copy(subscriber, to)
        finally:
            self._tell()

    async def _say_what_it_waits_for(self, client: Client, subscriber: Subscriber) -> None:
        """Where nothing comes at once although one may expect it."""
        topic = subscriber.topic
        if not await is_published_to(client.bus, topic):
            side = " (esp pub writes to the side in)" if topic.endswith("/O") else ""
            say(f"nobody has published to {topic} yet: waiting{side}")
        elif (
            self._start is None
            and subscriber.group is None
            and client.bus.capabilities.replay
            and await asyncio.to_thread(bus_start, self._options, self._keys) in (None, "latest")
        ):
            found = await client.bus.bounds(topic)
            if there := found.end - found.first:
                more = f"esp sub --start earliest begins with the {counted(there, 'message')} already there"
                say(f"waiting for what is published from now on; {more}")

    def _targets(self, subscriber: Subscriber) -> AsyncGenerator[Target, None]:
        """What a group has confirmed stays, whether the group is named here or in the cfg file."""
        options = self._options
        return target(
            options.fsname,
            append=subscriber.group is not None,
            period=options.periodicity,
            size=options.maxfilesize,
            format=options.format,
        )

    async def _copy(self, subscriber: Subscriber, to: Target) -> None:
        most = self._options.maxevents
        while not most or self._events < most:
            try:
                async with to.waiting() as scope, aclosing(_batches(subscriber)) as batches:
                    blocks = await anext(batches)
            except TimeoutError:
                if not scope.expired():
                    raise
                await _finished(to.turn())
            else:
                await _finished(self._take(subscriber, to, blocks))

    async def _take(self, subscriber: Subscriber, to: Target, blocks: Sequence[Block]) -> None:
        parts: list[tuple[Block, bytes, int]] = []
        size, events, most = 0, self._events, self._options.maxevents
        for block in blocks:
            decoded = block.decoded()
            data = self._text(to, block, *decoded, fresh=to.empty and not parts)
            if to.turn_due(size + len(data)) and not (to.empty and not parts):
                await self._put(subscriber, to, parts)
                parts, size = [], 0
                await to.turn()
                data = self._text(to, block, *decoded, fresh=True)
            parts.append((block, data, len(decoded[2])))
            size += len(data)
            events += len(decoded[2])
            if most and events >= most:
                break
        await self._put(subscriber, to, parts)

    async def _put(self, subscriber: Subscriber, to: Target, parts: Sequence[tuple[Block, bytes, int]]) -> None:
        """Write blocks, then confirm the last one written."""
        if not parts:
            return
        await to.write(b"".join(data for _, data, _ in parts))
        self._events += sum(events for _, _, events in parts)
        self._blocks += len(parts)
        self._last = parts[-1][0]
        if subscriber.group is not None:
            to.check()
            with suppress(BusUnavailable):  # the next ones confirm this one too; what comes again is dropped
                await subscriber.confirm(self._last)

    def _text(
        self, to: Target, block: Block, opcodes: int | bytes, flags: int | bytes, rows: list[Any], *, fresh: bool
    ) -> bytes:
        if self._plain and opcodes != Opcode.INSERT and _removes(opcodes):
            raise EspError(f"block {block.id} holds more than new rows, which plain lines cannot say: pass --opcodes")
        if self._options.format == "csv" and self._csv.flags is not None and _others(flags, self._csv.flags):
            raise EspError(
                f"block {block.id} holds rows of which only some fields are meant, which lines without flags cannot "
                "say: pass --opcodes"
            )
        if self._writer is None or fresh:
            self._writer = self._begin(block, header=fresh)
        try:
            return self._writer.write(rows, opcodes, flags)
        except ValueError as e:
            raise EspError(f"block {block.id}: {e}") from None

    def _begin(self, block: Block, *, header: bool) -> Writer:
        if self._options.format == "binary":
            return BinaryWriter(block.schema)
        if self._options.format == "json":
            return JsonWriter(block.schema, shape="events", dateformat=self._dateformat)
        include = cast(Literal["never", "once", "pereventblock"], self._options.csvincludeschema)
        if not header:
            include = "never" if include == "once" else include
            return CsvWriter(block.schema, replace(self._csv, header=0), include_schema=include)
        return CsvWriter(block.schema, self._csv, include_schema=include)

    def _line(self, seconds: float) -> str:
        rate, self._shown = (self._events - self._shown) / seconds, self._events
        last = f", block {self._last.id} of run {self._last.run}" if self._last is not None else ""
        return f"{self._events:,} events, {rate:,.0f}/s{last}"

    def _tell(self) -> None:
        last = f", the last one {self._last.id} of run {self._last.run}" if self._last is not None else ""
        say(f"{counted(self._events, 'event')} written, {counted(self._blocks, 'block')}{last}")


def _batches(subscriber: Subscriber) -> AsyncGenerator[list[Block], None]:
    return cast("AsyncGenerator[list[Block], None]", subscriber.batches())


def _removes(opcodes: int | bytes) -> bool:
    return bool((bytes([opcodes]) if isinstance(opcodes, int) else opcodes).translate(None, _ROWS))


def _others(flags: int | bytes, said: EventFlag) -> bool:
    """Whether an event is partial and the lines do not say so, or the other way round."""
    return any((each ^ said) & EventFlag.PARTIAL for each in ([flags] if isinstance(flags, int) else flags))


async def _finished(work: Coroutine[Any, Any, None]) -> None:
    """A signal lets a write and its confirmation end, for a while."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=_FINISH)
        if task.done():
            task.result()  # its error says more than that there was a signal
        task.cancel()
        raise


async def subscribe(options: AdapterOptions, keys: Mapping[str, str], start: Start | None) -> None:
    """A window's blocks to a file, a pipe or a peer."""
    await Sub(options, keys, start).run()
