"""The embedded bus: a log per topic in a directory, shared by the processes of one machine, with no server.

Every topic has one order for all readers; a commit is all or nothing and acknowledged after it, so what is missing of a
pipe is always its end (`suffix_only`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

import lmdb

from esp_pubsub.bus import Bounds, Break, Capabilities, GroupState, Message, Place, Run, Start
from esp_pubsub.errors import BusRefused, BusUnavailable, NoAnswer

from . import log, meta, processes
from .bell import Bells
from .files import Check
from .options import EmbeddedOptions
from .pipe import LARGEST, LAST_WORDS, EmbeddedPipe
from .place import Held, prepare, topic_directory
from .store import Store, close_store, open_store

T = TypeVar("T")

_log = logging.getLogger("esp_pubsub.embedded")
_META_MAP = 1 << 30
_JUST = 0.1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CAPABILITIES = Capabilities(
    suffix_only=True, replay=True, retained=True, groups=True, incarnation=True, requests=True, catalog=True,
    max_message_bytes=LARGEST, deaths=True, shows_groups=True,
)  # fmt: skip


async def open_bus(options: EmbeddedOptions) -> EmbeddedBus:
    """Open the directory of the options, making it if needed."""
    root = await asyncio.to_thread(prepare, options.dir)
    try:
        store = await _opened(root, root.path / "meta", _META_MAP, options, meta.is_sound)
        try:
            return EmbeddedBus(root, options, store)
        except BusUnavailable:
            await asyncio.to_thread(close_store, store)
            raise
    except BaseException:
        root.let_go()
        raise


async def _opened(root: Held, path: Path, map_bytes: int, options: EmbeddedOptions, check: Check) -> Store:
    """Open a store in a thread; if the caller goes away meanwhile, it is closed again."""
    loop = asyncio.get_running_loop()
    opening = _Opening(
        root, partial(open_store, path, root=root, map_bytes=map_bytes, disk=options.durability == "disk", check=check)
    )
    try:
        return await loop.run_in_executor(None, opening.carry_out)
    except asyncio.CancelledError:
        if (store := opening.abandon()) is not None:
            loop.run_in_executor(None, close_store, store)
        raise
    except (lmdb.Error, OSError) as e:
        raise BusUnavailable(f"{path} cannot be opened: {e}") from e


class _Opening:
    """A store being opened in a thread, which closes it again by itself if nobody waits any more: the loop may be at
    its end by then.
    """

    def __init__(self, root: Held, open_it: Callable[[], Store]) -> None:
        root.hold()
        self._root = root
        self._open_it = open_it
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._abandoned = False

    def carry_out(self) -> Store:
        try:
            store = self._open_it()
        finally:
            self._root.let_go()
        with self._lock:
            self._store = store
            if not self._abandoned:
                return store
        close_store(store)
        return store

    def abandon(self) -> Store | None:
        """Nobody waits any more; returns what is open already, to be closed by whoever calls."""
        with self._lock:
            self._abandoned = True
            return self._store


def _close_all(stores: Sequence[Store], root: Held) -> None:
    for store in stores:
        close_store(store)
    root.let_go()


class EmbeddedBus:
    """A `Bus`, `Requests`, `Catalog` and `Deaths` over one directory."""

    capabilities = _CAPABILITIES

    def __init__(self, root: Held, options: EmbeddedOptions, store: Store) -> None:
        self.options = options
        self.meta = store
        self.bells = Bells()
        self._root = root
        self._topics: dict[str, Store] = {}
        self._entered: set[str] = set()
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._open: WeakSet[EmbeddedPipe | EmbeddedFeed] = WeakSet()
        self._reading: defaultdict[str, _Reading] = defaultdict(_Reading)
        self.in_groups: set[EmbeddedFeed] = set()  # one that its user forgot is to let go of its group at our end
        self._closed = False

    async def topic(self, name: str) -> Store:
        """The environment of a topic, opened or made and entered in the catalog."""
        self._check_open()
        if name in self._entered:
            return self._topics[name]
        async with self._opening[name]:
            self._check_open()
            if name not in self._topics:
                path, map_bytes = topic_directory(self._root.path, name), max(4 * self.options.ring_size, 1 << 30)
                store = await _opened(self._root, path, map_bytes, self.options, log.is_sound)
                if self._closed:  # by a close that was cancelled before this came
                    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, close_store, store))
                    self._check_open()
                self._topics[name] = store
            if name not in self._entered:  # it can be open and not entered, if a lock was not free before
                await self._enter(name, self._topics[name])
                self._entered.add(name)
        return self._topics[name]

    async def _enter(self, name: str, store: Store) -> None:
        """Begin a topic and its place in the catalog; where both are there, no lock is needed."""
        found = store.read(log.info)
        begun = await store.write(log.begin, self.options.deadline) if found is None else found
        if not self.meta.read(lambda t: meta.has_topic(t, name)):
            await self.change_meta(lambda t: meta.add_topic(t, name, empty=begun.next == 0))

    def _check_open(self) -> None:
        if self._closed:
            raise BusUnavailable("the embedded bus was closed")

    async def change_meta(self, function: Callable[[lmdb.Transaction], T]) -> T:
        """A write to the meta environment."""
        return await self.meta.write(function, self.options.deadline)

    async def group_states(self, topic: str) -> Sequence[GroupState]:
        """See `Groups.group_states`."""
        store = await self.topic(topic)
        now = store.read(log.info)
        states = []
        for record in self.meta.read(lambda t: meta.groups(t, topic)):
            reader = reader_of(record)
            position = record.position if now is not None and record.incarnation == now.incarnation else None
            states.append(GroupState(record.name, position, reader, record.since if reader else None))
        return states

    async def pipe(self, topic: str) -> EmbeddedPipe:
        """See `Bus.pipe`."""
        pipe = EmbeddedPipe(await self.topic(topic), self.options)
        self._open.add(pipe)
        return pipe

    async def feed(self, topic: str, start: Start, group: str | None) -> EmbeddedFeed:
        """See `Bus.feed`."""
        store = await self.topic(topic)
        feed = EmbeddedFeed(self, store, self._reading[topic], topic, start, group)
        self._open.add(feed)
        if group is not None:
            self.in_groups.add(feed)
        return feed

    async def bounds(self, topic: str) -> Bounds:
        """See `Bus.bounds`."""
        found = (await self.topic(topic)).read(partial(_info, topic))
        return Bounds(found.first, found.next, found.incarnation)

    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        """See `Bus.retain`."""
        await self.change_meta(lambda transaction: meta.retain(transaction, topic, key, value))

    async def retained(self, topic: str, key: str) -> bytes | None:
        """See `Bus.retained`."""
        return self.meta.read(lambda t: meta.retained(t, topic, key))

    async def topics(self) -> Sequence[str]:
        """See `Catalog.topics`."""
        return self.meta.read(meta.topics)

    async def purge(self, topic: str) -> None:
        """See `Catalog.purge`."""
        store = await self.topic(topic)
        await store.write(log.empty, self.options.deadline)
        self._reading[topic].forget()

    @property
    def process(self) -> str:
        """See `Deaths.process`."""
        return processes.name()

    async def gone(self, process: str) -> None:
        """See `Deaths.gone`."""
        await processes.gone(process)

    async def end(self, process: str) -> bool:
        """See `Deaths.end`."""
        return await asyncio.to_thread(processes.end, process)

    async def request(self, topic: str, data: bytes, timeout: float) -> bytes:
        """See `Requests.request`."""
        number = secrets.token_bytes(16)
        deadline = meta.boot_time() + timeout
        bell = self.bells.watch(self.meta.bell)
        try:
            async with asyncio.timeout(timeout):
                await self.change_meta(lambda t: meta.ask(t, topic, number, deadline, data))
                while True:
                    self._check_open()
                    bell.clear()
                    reply = self.meta.read(lambda t: meta.answered(t, number))
                    if reply is not None:
                        return reply
                    await bell.wait()
        except TimeoutError:
            raise NoAnswer(f"nobody answered on {topic} within {timeout:g} s", topic=topic, timeout=timeout) from None
        finally:
            self.bells.unwatch(self.meta.bell, bell)
            await self.last_words(lambda t: meta.forget_question(t, topic, number))

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """See `Requests.serve`."""
        bell = self.bells.watch(self.meta.bell)
        try:
            while True:
                self._check_open()
                bell.clear()
                asked = self.meta.read(lambda t: meta.has_question(t, topic))
                question = await self.change_meta(lambda t: meta.take_question(t, topic)) if asked else None
                if question is None:
                    await bell.wait()
                    continue
                await self._answer(question, await answer(question.data))
        finally:
            self.bells.unwatch(self.meta.bell, bell)

    async def _answer(self, question: meta.Question, data: bytes) -> None:
        await self.change_meta(lambda t: meta.answer(t, question, data))

    async def last_words(self, function: Callable[[lmdb.Transaction], None]) -> None:
        """A write on the way out: carried out even if the caller is cancelled, and waited for only a little."""
        with contextlib.suppress(BusUnavailable, BusRefused):
            await asyncio.shield(asyncio.ensure_future(self.meta.write(function, LAST_WORDS)))

    async def aclose(self) -> None:
        """See `Bus.aclose`."""
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.TaskGroup() as tasks:  # each within its bound, and so all of them
                for opened in list(self._open):
                    tasks.create_task(opened.aclose())
            for opening in list(self._opening.values()):
                async with opening:
                    pass  # what was being opened is in our hands, or given back
        finally:
            self.bells.close()
            stores, self._topics = [*self._topics.values(), self.meta], {}
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, _close_all, stores, self._root))


class _Reading:
    """What the feeds of a topic read. The next one who stands where one has just read gets the very same."""

    def __init__(self) -> None:
        self.feeds: WeakSet[EmbeddedFeed] = WeakSet()
        self._place: tuple[int, ...] = ()
        self._run: Run | None = None
        self._until = 0.0

    def lately(self, *place: int) -> Run | None:
        """What another feed has just read at this place: incarnation, position and bounds."""
        return self._run if place == self._place and time.monotonic() < self._until else None

    def keep(self, run: Run, *place: int) -> None:
        """What was read, for others if there are any."""
        if len(self.feeds) > 1:
            self._place, self._run, self._until = place, run, time.monotonic() + _JUST

    def forget(self) -> None:
        """What was read is not there any more, or nobody else is."""
        self._place, self._run = (), None


class EmbeddedFeed:
    """A `Feed`. Without a group it is in place at once; with one, when the group is ours."""

    state: bytes | None = None
    unconfirmed: int | None = None

    def __init__(
        self, bus: EmbeddedBus, store: Store, reading: _Reading, topic: str, start: Start, group: str | None
    ) -> None:
        self._bus = bus
        self._store = store
        self._reading = reading
        self._topic = topic
        self._group = group
        self._holder = secrets.token_hex(8)
        self._generation = 0
        self._renew_at = 0.0
        self._broken: Break | None = None  # what is to be told first
        self._begins_anew = False
        self._comes_back = isinstance(start, Place)
        self._position, self._incarnation = self._place(start)
        self._bell = self._group_bell = bus.bells.watch(store.bell)
        self._closed = False
        reading.feeds.add(self)

    def _info(self, transaction: lmdb.Transaction) -> log.Info:
        return _info(self._topic, transaction)

    def _place(self, start: Start) -> tuple[int, int]:
        """The position to begin with, and its incarnation; a number beyond the end waits there."""

        if isinstance(start, Place) and start.incarnation is not None:
            return start.position, start.incarnation

        def find(transaction: lmdb.Transaction) -> tuple[int, int]:
            found = self._info(transaction)
            if isinstance(start, Place):
                return start.position, found.incarnation
            if isinstance(start, datetime):
                micros = (start.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)
                position = log.position_at(transaction, found, micros)
            else:
                position = found.first if start == "earliest" else found.next if start == "latest" else start
            return position, found.incarnation

        return self._store.read(find)

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """See `Feed.read`."""
        if self._group is not None:
            await self._hold_group()
        while True:
            self._check_open()
            self._bell.clear()
            found = self._read(max_messages, max_bytes)
            if found:
                return found
            await self._wait()

    def _check_open(self) -> None:
        if self._closed:
            raise BusUnavailable("this feed was closed")

    def _read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        if self._broken is not None:
            broken, self._broken = self._broken, None
            return [broken]
        if run := self._reading.lately(self._incarnation, self._position, max_messages, max_bytes):
            self._position += len(run)
            return run
        found = self._store.read(lambda transaction: self._look(transaction, max_messages, max_bytes))
        return self._pass_damage() if found is None else found

    def _look(
        self, transaction: lmdb.Transaction, max_messages: int, max_bytes: int
    ) -> Sequence[Message | Break] | None:
        """What stands at our position; None if that cannot be read."""
        found = self._info(transaction)
        if found.incarnation != self._incarnation:
            self._incarnation, self._position, self.state = found.incarnation, found.first, None
            return [_made_anew()]
        if self._position < found.first:
            passed, self._position = found.first - self._position, found.first
            return [Break("the ring turned over before this was read", passed)]
        if self._position >= found.next:
            return ()
        run = log.read(transaction, self._position, found.next, max_messages, max_bytes)
        if not run:
            return None
        self._reading.keep(run, self._incarnation, self._position, max_messages, max_bytes)
        self._position += len(run)
        return run

    def _pass_damage(self) -> Sequence[Break]:
        """Go on at the next batch that can be found: what would tell where it begins may be damaged too."""
        began, end, step = self._position, self._store.read(self._info).next, 1
        self._position = end
        while began + step < end:
            try:
                self._position = self._store.read(partial(log.following, position=began + step, end=end))
                break
            except BusRefused:
                step *= 2
        return [Break("what stands here is damaged", self._position - began)]

    async def _wait(self) -> None:
        """Until the bell rings; with a group, also until its lease wants to be extended."""
        if self._group is None:
            await self._bell.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._renew_at - meta.boot_time())):
                await self._bell.wait()
        await self._hold_group()

    async def _hold_group(self) -> None:
        """Be the group's reader: take it, waiting for it if need be, or extend its lease when that is due."""
        if self._generation and meta.boot_time() < self._renew_at:
            return
        lease = self._bus.options.lease
        if self._generation:
            await self._bus.change_meta(
                lambda t: meta.extend(t, self._topic, str(self._group), self._generation, lease)
            )
        else:
            await self._take_group(str(self._group), lease)
        self._renew_at = meta.boot_time() + lease / 3

    async def _take_group(self, group: str, lease: float) -> None:
        bell = self._group_bell = self._bus.bells.watch(self._bus.meta.bell)
        told = False
        try:
            while True:
                self._check_open()
                bell.clear()
                record = self._bus.meta.read(lambda t: meta.group(t, self._topic, group))
                if meta.is_free(record):
                    record = await self._bus.change_meta(
                        lambda t: meta.acquire(t, self._topic, group, self._holder, lease)
                    )
                if record.holder == self._holder:
                    return self._resume(record)
                if not told:
                    told = True
                    _log.info(
                        "a reader of group %s on %s waits: %s reads for it", group, self._topic, reader_of(record),
                        extra={"esp_topic": self._topic, "esp_group": group},
                    )  # fmt: skip
                await _until_free(record, bell)
        finally:
            self._bus.bells.unwatch(self._bus.meta.bell, bell)

    def _resume(self, record: meta.Group) -> None:
        self._generation = record.generation
        if record.state is None:
            if self._bus.meta.read(lambda t: meta.is_forgotten(t, self._topic)):
                self._broken = Break("how far this group was is lost, as the bus's own records were damaged", None)
            return
        now = self._store.read(self._info)
        heard = self._comes_back and self._incarnation == now.incarnation
        if record.incarnation != now.incarnation:
            if heard:
                self._position = now.first
            else:
                self._incarnation = record.incarnation  # that it is another one now is told by the first read
            return
        if self._comes_back and not heard:
            self._broken, self._position = _made_anew(), now.first
        self.state, self._incarnation = record.state, record.incarnation
        if record.position is not None:
            self._position = self._store.read(partial(self._where_it_was, record))

    def _where_it_was(self, record: meta.Group, transaction: lmdb.Transaction) -> int:
        """Where the group goes on. A power cut may take the end of a topic and leave what was stored of its groups,
        and others have appended since: then what the group had confirmed is not there, or something else is. It reads
        from the front again, and drops by the ids what it has had.
        """
        found, position = self._info(transaction), record.position
        assert position is not None
        if found.incarnation != record.incarnation or position <= found.first:
            return position
        if position <= found.next:
            mark = log.mark(transaction, position - 1)
            if None in (mark, record.mark) or mark == record.mark:
                return position
        self._begins_anew = True
        self._broken = self._broken or Break(
            "the end of the topic was lost, as in a power cut, and with it what this group had confirmed", None
        )
        return found.first

    @property
    def place(self) -> Place:
        """See `Feed.place`."""
        return Place(self._position, self._incarnation)

    async def release(self, positions: Sequence[int]) -> None:
        """See `Feed.release`: a log keeps everything."""

    async def confirm(self, position: int | None, state: bytes) -> None:
        """See `Feed.confirm`."""
        group, generation, incarnation = str(self._group), self._generation, self._incarnation
        following = mark = None
        if position is not None:
            following, mark = position + 1, self._store.read(lambda t: log.mark(t, position))
        anew = self._begins_anew and position is not None
        await self._bus.change_meta(
            lambda t: meta.store(t, self._topic, group, generation, incarnation, following, mark, state, anew=anew)
        )
        self._begins_anew = self._begins_anew and not anew

    async def aclose(self) -> None:
        """See `Feed.aclose`."""
        if self._closed:
            return
        self._closed = True
        self._bell.set()
        self._group_bell.set()
        self._reading.feeds.discard(self)
        if len(self._reading.feeds) < 2:
            self._reading.forget()
        self._bus.bells.unwatch(self._store.bell, self._bell)
        if self._group is not None:
            group = self._group
            self._bus.in_groups.discard(self)
            await self._bus.last_words(lambda t: meta.let_go(t, self._topic, group, self._holder))


def _info(topic: str, transaction: lmdb.Transaction) -> log.Info:
    found = log.info(transaction)
    if found is None:
        raise BusUnavailable(f"the topic {topic} is gone from the bus directory")
    return found


def _made_anew() -> Break:
    return Break("the topic was emptied or made anew", None, incarnation=True)


def reader_of(record: meta.Group) -> str:
    """Who reads for a group, for people; empty if nobody does."""
    if meta.is_free(record):
        return ""
    pid = processes.number(record.process)
    return "a process of another machine or container" if pid is None else f"process {pid}"


async def _until_free(record: meta.Group, bell: asyncio.Event) -> None:
    """Until the meta bell rings, the lease runs out, or the holder's process is gone."""
    with contextlib.suppress(TimeoutError), processes.watched(record.process, bell.set):
        async with asyncio.timeout(max(0.01, record.deadline - meta.boot_time())):
            await bell.wait()
