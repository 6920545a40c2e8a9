"""`esp pub`: text to blocks. Blocks are cut by the events alone, so that all members of a group cut the same ones.

Whatever ends it, a bad line, an error of the input or a signal: what was published before is acknowledged first, and
then it says how far it came. A signal leaves out the events that were read and do not fill a block yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from .. import Client, ConfigError, DeliveryUnknown, EspError, Failover, Publisher, Schema
from ..address import Address
from ..client import log_notice
from ..config import SasOptions
from ..notices import Failure, Notice
from ..requests import ask
from ..text import BadText, Batch, BinaryReader, CsvReader, JsonReader
from .options import AdapterOptions, failover, opened, sas_options
from .places import inputs, is_file
from .running import counted, progress, say

Reader = BinaryReader | CsvReader | JsonReader

_BLOCK = 64
_COMPLAINTS = 10
_LATE = 0.1  # seconds that events of a feed with a rate may make up for; after a longer pause it begins anew
_STANDS_BY = 1.0  # seconds in which a member that may lead would lead if nobody else did
_ANSWER = 30.0  # seconds that an engine has to work off what it got


class Pub:
    """One run of it."""

    def __init__(self, options: AdapterOptions, keys: Mapping[str, str]) -> None:
        sas = sas_options(options.transport, options.transportconfigfile)
        self._sas: SasOptions = sas
        self._options = options
        self._keys = keys
        self._dateformat = options.dateformat or sas.dateformat
        self._csv = replace(options.csv(), dateformat=self._dateformat)
        self._block = options.blocksize
        if self._block is None:
            self._block = _BLOCK if is_file(options.fsname) and not options.growinginputfile else 1
        if options.maxevents:
            self._block = min(self._block, options.maxevents)  # the last of them must not wait for more
        self._bad = 0
        self._events = 0
        self._shown = 0
        self._publisher: Publisher | None = None
        self._publishing: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._begun = 0.0
        self._paced = 0

    async def run(self) -> None:
        """From the first line to the last acknowledgement."""
        options = self._options
        try:
            async with opened(options, self._keys) as client:
                address = Address.parse(options.url)
                topic = address.topic(options.wanted_side or address.options.side or "in")
                schema = await self._schema(client, topic)
                run = await self._run(client)
                member = failover(options, self._sas, run)
                if member is not None and options.loglevel is None:
                    logging.getLogger("esp_pubsub.failover").setLevel(logging.INFO)  # roles, in SAS's words
                opening = client.publisher(
                    options.url, schema, side=options.wanted_side, failover=member, on_notice=self._told
                )
                async with opening as publisher, progress(self._line), _standby_said(publisher, member):
                    self._publisher = publisher
                    try:
                        await self._publish_until_over(publisher, schema)
                    finally:
                        if not _cancelled():
                            await _settle(publisher)
                if self._failure is not None:
                    raise self._failure
                if options.quiesce:
                    await self._quiesce(client, address)
        finally:
            self._tell()

    def _told(self, notice: Notice) -> None:
        """What ends the publisher for good ends the command, whose last line it is."""
        if not isinstance(notice, Failure) or notice.failure != "pubsubFail_APIFAIL":
            log_notice(notice)
            return
        self._failure = notice.error
        if self._publishing is not None:
            self._publishing.cancel()

    async def _publish_until_over(self, publisher: Publisher, schema: Schema) -> None:
        """Input that nobody sends any more is not waited for."""
        self._publishing = asyncio.ensure_future(self._publish(publisher, schema))
        try:
            await self._publishing
        except (asyncio.CancelledError, EspError):
            if self._failure is None or _cancelled():
                raise

    async def _schema(self, client: Client, topic: str) -> Schema:
        given = Schema(self._options.schema) if self._options.schema else None
        found = await client.topic_schema(topic, given)
        if found is None:
            raise ConfigError(f"nobody has published to {topic} yet, so it has no schema: give one")
        return found

    async def _quiesce(self, client: Client, address: Address) -> None:
        """Ask the engine behind the bus to work off what it got, and wait for it."""
        project = f"dfESP://{address.hostport}/{address.project}"
        answered = await ask(client.requests(), address.metadata, {"do": "quiesce", "url": project}, _ANSWER)
        if "error" in answered:
            raise EspError(f"{project} cannot be quiesced: {answered['error']}")

    async def _run(self, client: Client) -> int:
        """As said, else the one that the group is in: `esp purge` begins the next one."""
        options = self._options
        group = options.failovergroup or self._sas.failovergroup
        if options.run is not None or group is None:
            return options.run or 0
        return await client.current_run(options.url, group, side=options.wanted_side)

    def _reader(self, schema: Schema) -> Reader:
        skip = self._skip if self._options.ignorecsvparseerrors else None
        assert self._block is not None
        if self._options.format == "json":
            ignore, dates = self._options.ignoreunknownfields, self._dateformat
            return JsonReader(schema, dateformat=dates, block=self._block, ignore_unknown=ignore, on_bad=skip)
        if self._options.format == "binary":
            return BinaryReader(schema, block=self._block)
        return CsvReader(schema, self._csv, block=self._block, on_bad=skip)

    def _skip(self, bad: BadText) -> None:
        self._bad += 1
        if self._bad <= _COMPLAINTS:
            say(f"skipped: {bad}{' (further ones are only counted)' if self._bad == _COMPLAINTS else ''}")

    async def _publish(self, publisher: Publisher, schema: Schema) -> None:
        options = self._options
        self._begun = asyncio.get_running_loop().time()
        texts = inputs(
            options.fsname, lines=options.format == "csv", follow=options.growinginputfile, repeat=options.repeatcount
        )
        async with aclosing(texts):
            async for chunks in texts:
                if not await self._one(publisher, self._reader(schema), chunks):
                    return

    async def _one(self, publisher: Publisher, reader: Reader, chunks: AsyncIterator[bytes]) -> bool:
        """All of one input; False when there were enough events. While the next peer is waited for, only what one
        sends ends it, not how one leaves.
        """
        left: BadText | None = None
        follow = self._options.growinginputfile
        try:
            async for chunk in _all_first(chunks) if self._options.prebuffer else chunks:
                if not await self._inject(publisher, reader.feed(chunk)):
                    return False
        except BadText as e:
            if e.line is not None:  # the reader's own, which gave out what was in front of it
                raise
            left = e
        more = True
        try:
            more = await self._inject(publisher, reader.close())
        except BadText as e:
            if left is None and not follow:
                raise
            left = left or e
        if left is not None and not (follow or self._options.ignorecsvparseerrors):
            raise left
        if left is not None:
            self._skip(left)
        return more

    async def _inject(self, publisher: Publisher, batches: Iterable[Batch]) -> bool:
        most, whole = self._options.maxevents, self._options.transactional
        for rows, opcode, flags in batches:
            if most and self._events + len(rows) >= most:
                end = most - self._events
                opcode = opcode if isinstance(opcode, int) else opcode[:end]
                flags = flags if isinstance(flags, int) else flags[:end]
                await self._give(publisher, rows[:end], opcode, flags, whole)
                return False
            await self._give(publisher, rows, opcode, flags, whole)
        return True

    async def _give(
        self, publisher: Publisher, rows: list[tuple[object, ...]], opcode: int | bytes, flags: int | bytes, whole: bool
    ) -> None:
        if self._options.rate:
            await self._pace(publisher)
        await publisher.inject(rows, opcode=opcode, flags=flags, transactional=whole)
        self._events += len(rows)

    async def _pace(self, publisher: Publisher) -> None:
        """A member that comes late hurries until it is where its group is. A pause of the input is not made up for."""
        stats, now = publisher.stats, asyncio.get_running_loop().time()
        if stats.on_bus > stats.given:
            self._begun, self._paced = now, self._events
            return
        early = self._begun + (self._events - self._paced) / self._options.rate - now
        if early > 0:
            await asyncio.sleep(early)
        elif early < -_LATE:
            self._begun, self._paced = now, self._events

    def _line(self, seconds: float) -> str:
        publisher = self._publisher
        if publisher is None:
            return "opening"
        stats, events = publisher.stats, self._events
        rate, self._shown = (events - self._shown) / seconds, events
        role = f", {stats.role}" if failover(self._options, self._sas, 0) else ""
        return f"{events:,} events, {rate:,.0f}/s, block {stats.given}, acknowledged {stats.acked}{role}"

    def _tell(self) -> None:
        if self._publisher is None:
            return
        stats, events = self._publisher.stats, counted(self._events, "event")
        skipped = f"; {counted(self._bad, 'bad line')} skipped" if self._bad else ""
        if not stats.given:
            say(f"{events} published{skipped}")
        elif stats.acked == stats.given:
            say(f"{events} published, blocks 1 to {stats.given}, all acknowledged{skipped}")
        else:
            acked = f"acknowledged up to block {stats.acked} of {stats.given}" if stats.acked else "none acknowledged"
            say(f"{events} read, {acked}{skipped}")


async def _all_first(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in [chunk async for chunk in chunks]:
        yield chunk


@asynccontextmanager
async def _standby_said(publisher: Publisher, failover: Failover | None) -> AsyncIterator[None]:
    """Say once that a member has come to where its group is and stays there. That it leads is in the log."""
    saying = asyncio.ensure_future(_say_standby(publisher, failover.group if failover else None))
    try:
        yield
    finally:
        saying.cancel()


async def _say_standby(publisher: Publisher, group: str | None) -> None:
    before = ""
    while (stats := publisher.stats).role in ("standby", "candidate"):
        if stats.role == before == "candidate":
            say(f"standing by in group {group}, which is at block {stats.on_bus:,}")
            return
        before = stats.role
        await asyncio.sleep(_STANDS_BY)


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _settle(publisher: Publisher) -> None:
    """Wait for the bus as long as it goes on, as a standby forever: it may yet have to send."""
    while True:
        before = publisher.stats.on_bus
        try:
            await publisher.flush()
            return
        except DeliveryUnknown:
            stats = publisher.stats
            if stats.role == "active" and stats.on_bus == before:
                raise
        except EspError:
            return  # it failed for good, and closing it says so


async def publish(options: AdapterOptions, keys: Mapping[str, str]) -> None:
    """Text of a file, a pipe or a peer to a window."""
    await Pub(options, keys).run()
