"""Client: opens a bus, owns its tasks, and hands out publishers and subscribers."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, cast
from weakref import WeakSet

from .address import Address, Side
from .bus import Bus, Catalog, Requests, Start
from .calls import Caller
from .claims import Claims, find_election, find_schema
from .config import check_type, connect_timeout, load_options
from .connecting import open_bus
from .encode import Encoder, arrow_body
from .engine.engine import Engine
from .engine.opening import Buses, log_of, open_engine
from .engine.options import EngineOptions
from .errors import Closed, ConfigError, EspError, NotOffered, WrongOrder
from .events import Block, Opcode
from .failover.join import Elect
from .failover.line import Line
from .failover.options import Failover
from .failover.outbox import Outbox
from .failover.words import Setup
from .groups import GroupLag, group_lags
from .health import Health, health
from .notices import Failure, Joined, NewRun, Notice, Reconnected
from .publisher import Delivery, Publisher, PublisherOptions, Resume, Window, sequence_name, source_number
from .registry import driver
from .requests import Answer, demand, query
from .retained import retain_runs, retained_runs
from .schema import Schema, SchemaLike, as_schema
from .subscriber import Subscriber
from .subscriber_options import Begin, SubscriberOptions, check_group, check_start
from .writer import BlockWriter

if TYPE_CHECKING:
    from .scheduler.client import SchedulerClient
    from .telemetry import Telemetry

_log = logging.getLogger("esp_pubsub")
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Home:
    """The loop and the process that something belongs to, and who observes it there."""

    __slots__ = ("_forks", "_loop", "observer")

    def __init__(self) -> None:
        self.observer: Telemetry | None = None
        self._loop = asyncio.get_running_loop()
        self._forks = _forks

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that it belongs to."""
        return self._forks != _forks

    def check(self) -> None:
        """WrongOrder anywhere else."""
        if self._forks != _forks:
            raise WrongOrder("this client was opened before a fork; open one in the child, or start it by spawn")
        if getattr(self._loop, "_thread_id", None) == get_ident():
            return  # asyncio's own loops know where they run; to ask for the one that runs here costs a system call
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongOrder("call this inside a coroutine, on the loop on which the client was opened") from None
        if running is not self._loop:
            raise WrongOrder("this client was opened on another event loop; open one on this loop (init is cheap)")


class _Closable(Protocol):
    async def aclose(self) -> None: ...


T = TypeVar("T", bound=_Closable)


def _not_open(wanted: str) -> WrongOrder:
    return WrongOrder(f"this is not open yet: await it, or use async with, and then {wanted} on what that gives")


class Opening(Generic[T]):
    """What `init`, `publisher` and `subscriber` return: await it, or enter it with `async with`, which also closes."""

    def __init__(self, opened: Callable[[], Awaitable[T]]) -> None:
        self._open = opened
        self._begun = False
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._once().__await__()

    async def _once(self) -> T:
        if self._begun:
            raise WrongOrder("this was opened already; call init, publisher or subscriber again for another one")
        self._begun = True
        try:
            self._opened = await self._open()
        except BaseException:
            self._begun = False
            raise
        return self._opened

    if not TYPE_CHECKING:  # a type checker finds these by itself

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # Python and its tools look for these, and may not find them
                raise AttributeError(name)
            raise _not_open(f".{name}")

        def __aiter__(self) -> NoReturn:
            raise _not_open("async for")

    async def __aenter__(self) -> T:
        return await self._once()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        opened = self._opened
        leave = getattr(opened, "__aexit__", None)
        if leave is not None:
            await leave(kind, error, trace)
        elif opened is not None:
            await opened.aclose()


class Client:
    """One connection to one bus, on one event loop. Made by `esp_pubsub.init`; close it, or use `async with`."""

    _left_open = False  # it was started, and neither closed nor told of as left open

    def __init__(
        self,
        bus: Bus,
        on_notice: Callable[[Notice], None] | None,
        *,
        start: Start | None = None,
        group: str | None = None,
    ) -> None:
        """`start` and `group` are those of subscribers that say nothing else."""
        self.bus = bus
        self._start = start
        self._group = group
        self._home = Home()
        self._on_notice = on_notice
        self._open: WeakSet[_Closable] = WeakSet()
        self._claims = Claims()
        self._callers: dict[tuple[str, str], Caller] = {}
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._keeper: asyncio.Task[None]
        self._tasks: asyncio.TaskGroup

    async def start(self) -> None:
        """Begin to own tasks. `init` calls this."""
        started = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep_tasks(started), name="esp client")
        await started.wait()
        self._left_open = True
        _started.add(self)

    async def _keep_tasks(self, started: asyncio.Event) -> None:
        """The owner of every task of this client. It is a task of its own because a TaskGroup belongs to one."""
        async with asyncio.TaskGroup() as self._tasks:
            started.set()
            await self._stop.wait()

    def publisher(
        self,
        url: str,
        schema: SchemaLike,
        *,
        side: Side | None = None,
        failover: Failover | None = None,
        resume: Resume | None = None,
        options: PublisherOptions | None = None,
        on_notice: Callable[[Notice], None] | None = None,
    ) -> Opening[Publisher]:
        """A publisher to the window that `url` names. `side` is `in` unless the URL or this argument says otherwise.

        `schema` is a Schema, its text, or a class that `Schema.of` takes, whose instances `inject` takes then.
        With `failover` it is one member of a group of publishers of the same blocks; with `resume` it goes on with a
        sequence of which its user keeps count. Awaiting it raises BusUnavailable, BusRefused, SchemaDiffers if the
        topic carries another schema, Stale if its group has a higher run, or InputDiffers if the bus has another block
        where it resumes.
        """
        address, topic = self._window(url, side, "in")
        given = as_schema(schema)
        check_type("failover", failover, Failover, "esp.Failover('feed')")
        check_type("resume", resume, Resume, "esp.Resume('trades', last, chain)")
        check_type("options", options, PublisherOptions, "esp.PublisherOptions(buffer_blocks=1000)")
        if failover is not None and resume is not None:
            raise ConfigError("a failover group keeps count by itself: pass failover or resume, not both")

        async def opened() -> Publisher:
            self._check()
            kind, elect = None, None
            if failover is not None:
                kind, elect = await find_election(self.bus, failover.election, address.control(failover.group))
            await self._claims.schema(self.bus, topic, given)
            publisher = self._publisher(
                Window(address, topic), given, options or PublisherOptions(), self._notifier(on_notice, topic),
                replace(failover, election=kind) if failover is not None else None, elect, resume,
            )  # fmt: skip
            if failover is not None:
                await self._claims.run(self.bus, topic, publisher.source, failover.run)
            if resume is not None:
                await publisher.look_back(resume)
            self._check()
            if resume is not None and any(_resumes(opened, publisher.source) for opened in self._open):
                raise WrongOrder(
                    f"a publisher of this client resumes {resume.name!r} on {topic} already: close it first, or take "
                    "another name"
                )
            publisher.start(self._tasks)
            self._open.add(publisher)
            _started.add(publisher)
            return publisher

        return Opening(opened)

    def _publisher(
        self, window: Window, schema: Schema, options: PublisherOptions, notify: Callable[[Notice], None],
        failover: Failover | None, elect: Elect | None, resume: Resume | None,
    ) -> Publisher:  # fmt: skip
        source = source_number(f"{window.topic}/{sequence_name(failover, resume)}")
        run = failover.run if failover else 0
        offered = self.bus.capabilities
        outbox = Outbox(failover.buffer if failover else options.buffer_blocks, options.buffer_bytes)
        if resume is not None:
            outbox.begin_after(resume.last, resume.chain)
        encoder = Encoder(schema, options.body, options.limits, rebuild=failover is not None)
        writer = BlockWriter(schema, encoder, outbox, source, run, offered.max_message_bytes)
        publisher = Publisher(self._home, window, self.bus, writer, options, notify)
        if failover is not None:
            line = Line(source, run, outbox, suffix_only=offered.suffix_only, buffer=failover.buffer,
                        shows_last=offered.shows_last)  # fmt: skip
            body = "rows" if options.body == "rows" else arrow_body()
            setup = Setup((window.topic,), (schema.text,), body, (failover.election or "log").partition("://")[0])
            publisher.join(failover, window.address.control(failover.group), setup, line, elect)
        return publisher

    async def current_run(self, url: str, group: str, *, side: Side | None = None) -> int:
        """The run that a failover group is in, for `Failover(run=...)`; 0 where nobody has said so."""
        _, topic = self._window(url, side, "in")
        return (await retained_runs(self.bus, topic)).get(source_number(f"{topic}/{group}"), 0)

    async def purge(self, url: str, *, side: Side | None = None) -> int:
        """Empty a window's topic. Failover groups that published there have to begin a new run: how many they are."""
        _, topic = self._window(url, side, "in")
        catalog = self.catalog()
        runs = await retained_runs(self.bus, topic)
        if runs:  # first: then nobody goes on with the old run on an empty topic
            await retain_runs(self.bus, topic, {source: run + 1 for source, run in runs.items()})
        await catalog.purge(topic)
        return len(runs)

    def subscriber(
        self, url: str, schema: SchemaLike | None = None, *, side: Side | None = None,
        start: Begin | None = None, group: str | None = None, options: SubscriberOptions | None = None,
        on_notice: Callable[[Notice], None] | None = None,
    ) -> Opening[Subscriber]:  # fmt: skip
        """A subscriber to the window that `url` names. `side` is `out` unless the URL or this argument says otherwise.

        `start`: earliest, latest, a position or an aware datetime; none: where the group left off, and if it has
        confirmed nothing yet, reading raises NothingStored; None: where the group left off, else what the bus's
        configuration says, else earliest with a group and latest without. `group` may stand in the configuration too.
        Without `schema` it is the one that the topic's publisher retained.
        """
        address, topic = self._window(url, side, "out")
        given = None if schema is None else as_schema(schema)
        group = self._group if group is None else group
        begin = start if start is not None else self._start
        if begin is None:
            begin = "earliest" if group is not None else "latest"
        check_start(begin, group)
        check_group(group)
        check_type("options", options, SubscriberOptions, "esp.SubscriberOptions(read_blocks=100)")

        async def opened() -> Subscriber:
            self._check_offered(begin, group)
            found = await self.topic_schema(topic, given)
            subscriber = Subscriber(
                self._home, self.bus, address, topic, schema=found, start=begin, group=group,
                options=options or SubscriberOptions(), notify=self._notifier(on_notice, topic),
            )  # fmt: skip
            self._open.add(subscriber)
            await subscriber.open()
            return subscriber

        return Opening(opened)

    def engine(
        self, model: Any, url: str, *, windows: Mapping[str, str] | None = None, output: Client | None = None,
        order: Client | None = None, snapshots: str | os.PathLike[str] | None = None,
        options: EngineOptions | None = None, on_notice: Callable[[Notice], None] | None = None,
    ) -> Opening[Engine]:  # fmt: skip
        """One member of the engine that runs this model at `url`, which names a project and a contquery.

        Start it in two processes or more: one publishes what the model emits, and when it dies another one goes on. The
        model's windows are below `url`, inputs on their `in` side and outputs on their `out` side, unless `windows` has
        a URL for them. `output` is a client of the bus of the output windows, if that is another one. `order` is one of
        a bus with a log, if the bus of the output has none and cannot open one in its own system, as RabbitMQ can.
        `snapshots` is a directory, which members may share: a member that is started again goes on from the newest
        snapshot in it, and reads its input from there on.

        Awaiting it raises what `publisher` does, NotOffered on a bus without a log, and BeginningDiffers if the engine
        began otherwise. A member of another version of the model, with `snapshots`, waits until the engine switches to
        it (`esp engine switch`). Switched: its version is over.
        """
        self._check()
        check_type("options", options, EngineOptions, "esp.EngineOptions(buffer=1000)")
        writes = output or self
        orders = order or writes
        for other in (writes, orders):
            other._check()  # noqa: SLF001  # a client too
        options = options or EngineOptions()

        async def opened() -> Engine:
            self._check()
            made = await open_engine(
                model, url, windows, Buses(self.bus, writes.bus, await log_of(orders.bus)), writes._claims, self._home,  # noqa: SLF001
                options, None if snapshots is None else Path(snapshots), self._notifier(on_notice, url),
            )  # fmt: skip
            self._check()
            made.start(self._tasks)
            for client in (self, writes, orders):
                client._open.add(made)  # noqa: SLF001  # it is closed before its buses
            return made

        return Opening(opened)

    def _window(self, url: str, side: Side | None, default: Side) -> tuple[Address, str]:
        self._check()
        address = Address.parse(url)
        address.require_window()
        return address, address.topic(side or address.options.side or default)

    def _check(self) -> None:
        self._home.check()
        if self._closed:
            raise Closed("this client is closed; call init for another one")

    def _check_offered(self, start: Begin, group: str | None) -> None:
        offered = self.bus.capabilities
        if group is not None and not offered.groups:
            raise NotOffered("this bus has no groups: read without one", capability="groups")
        if start != "latest" and group is None and not offered.replay:
            way_out = f", or set {offered.replays_with}" if offered.replays_with else ""
            raise NotOffered(f"this bus keeps nothing to read again: start is latest{way_out}", capability="replay")

    async def window_schema(self, url: str, side: Side) -> Schema:
        """The schema of an engine's window, on this side unless the URL says otherwise. ConfigError if it has none."""
        schema = await self.topic_schema(self._window(url, None, side)[1], None)
        if schema is None:
            raise ConfigError(f"nobody has said the schema of {url} yet: start the engine first")
        return schema

    async def topic_schema(self, topic: str, given: Schema | None) -> Schema | None:
        """The schema of a topic: as given, if the topic does not differ, else as retained; None while it has none."""
        self._check()
        return await find_schema(self.bus, topic, given)

    async def query_meta(self, url: str, timeout: float = 2.0) -> list[str]:
        """What SAS's QueryMeta answers: `?get=schema` of a window, `?get=projects`, `queries`, `windows` and the like.

        From what the bus retains; questions it cannot answer go to whoever serves the metadata topic: NoAnswer if
        nobody.
        """
        self._check()
        return await query(self, Address.parse(url), timeout)

    async def ask(
        self, url: str, question: Any, *, after: Delivery | Block | None = None, timeout: float = 5.0
    ) -> Answer:
        """Ask the model of the engine at `url`, a project and a contquery: what its method `ask(question)` returns.

        The member that leads answers. With `after`, what `inject` returned or a block that was read, it does once the
        engine has stepped on that block: so you see what you wrote. Question and answer are made of numbers, texts,
        bytes, lists and dicts; tuples come as lists. NoAnswer after `timeout` seconds, RequestRefused if the engine
        cannot answer, NotOffered on a bus without requests.
        """
        asked: dict[str, Any] = {"ask": question}
        if after is not None:
            asked["after"] = (after.source, after.run, after.id)
        found = await self._demand(url, asked, timeout)
        return Answer(found.get("answer"), int(found.get("step", 0)))

    async def call(
        self, url: str, rows: Any, *, answers: str, opcode: Opcode | int = Opcode.INSERT, timeout: float = 5.0
    ) -> list[tuple[Any, ...]]:
        """Publish a block of commands to the window at `url`, and wait for the rows that the engine's model emits to
        the window `answers` for them: one for each row of the block, in the same order.

        An answer begins with the key of its command, which a model has from `block.key(row)`. NoAnswer after `timeout`
        seconds: the commands may still be carried out, once. Cancelled: they are, unless they were not sent yet.
        """
        self._check()
        caller = self._callers.setdefault((url, answers), Caller(self, url, answers))
        return await caller.call(rows, opcode, timeout, self._tasks)

    def scheduler(self, url: str) -> SchedulerClient:
        """The scheduler at `url`, a project and a contquery, to schedule with (extra `scheduler`)."""
        from .scheduler.client import SchedulerClient

        self._check()
        return SchedulerClient(self, url)

    async def quiesce(self, url: str, timeout: float = 30.0) -> None:
        """Have the engine at `url` work off what its inputs hold now, and wait until the bus has what came of it."""
        await self._demand(url, {"do": "quiesce"}, timeout)

    async def persist(self, url: str, timeout: float = 120.0) -> None:
        """Have the engine at `url` take a snapshot, and wait until it counts; see `Engine.persist`."""
        await self._demand(url, {"do": "persist"}, timeout)

    async def _demand(self, url: str, asked: dict[str, Any], timeout: float) -> dict[str, Any]:
        return await demand(self.requests(), Address.parse(url).engine_requests, asked, timeout)

    async def groups(self, url: str, *, side: Side | None = None) -> list[GroupLag]:
        """The groups that read a window: how far each is, how far behind the end, and who reads for it. `side` is `out`
        unless the URL or this argument says otherwise. NotOffered on a bus that cannot say.
        """
        return await group_lags(self.bus, self._window(url, side, "out")[1])

    async def health(self, timeout: float = 2.0) -> Health:
        """Whether the bus answers within `timeout` seconds, and how publishers and readers are. True if all is well; it
        raises nothing that the bus does.
        """
        self._check()
        return await health(self.bus, self._open, timeout)

    def requests(self) -> Requests:
        """The bus's questions and answers. NotOffered where it has none."""
        self._check()
        if not self.bus.capabilities.requests:
            raise NotOffered("this bus has no requests", capability="requests")
        return cast(Requests, self.bus)

    def catalog(self) -> Catalog:
        """The bus's list of topics. NotOffered where it has none."""
        self._check()
        if not self.bus.capabilities.catalog:
            raise NotOffered("this bus cannot list its topics", capability="catalog")
        return cast(Catalog, self.bus)

    def observe(self, observer: Telemetry) -> None:
        """Have it told of what is opened from now on; `telemetry.instrument` calls this."""
        self._home.observer = observer

    def _notifier(self, own: Callable[[Notice], None] | None, topic: str) -> Callable[[Notice], None]:
        handler, observer = own or self._on_notice, self._home.observer

        def notify(notice: Notice) -> None:
            if observer is not None:
                observer.told(topic, notice)
            if handler is None:
                log_notice(notice, topic)
                return
            try:
                handler(notice)
            except Exception:  # noqa: BLE001, RUF100  # the user's code; a fault there must not end a subscription
                _log.exception("on_notice failed for %s", notice)

        return notify

    def is_here(self) -> bool:
        """Whether it is open and belongs to the running loop."""
        try:
            self._check()
        except (WrongOrder, Closed):
            return False
        return True

    async def aclose(self) -> None:
        """Close publishers and subscribers, then the bus. Bounded; twice is harmless.

        The first publisher that could not be flushed raises, after everything is closed.
        """
        self._home.check()
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="esp client close")
        await asyncio.shield(self._closing)  # who is cancelled here stops waiting; the rest still goes on

    async def _close(self) -> None:
        failures: list[BaseException] = []
        try:
            closings = [opened.aclose() for opened in self._open]
            failures = [e for e in await asyncio.gather(*closings, return_exceptions=True) if e is not None]
        finally:
            self._stop.set()
            self._keeper.cancel()
            try:
                await asyncio.wait([self._keeper])
            finally:
                self._left_open = False
                await self.bus.aclose()
        if failures:
            raise failures[0]

    def tell_left_open(self) -> None:
        """A ResourceWarning if nobody closed it, once; its publishers' first, which may lose something."""
        if not self._left_open or self._home.forked:
            return
        self._left_open = False
        for opened in list(self._open):
            if isinstance(opened, Publisher):
                opened.tell_left_open()
        warnings.warn(f"unclosed client of {type(self.bus).__name__}", ResourceWarning, source=self, stacklevel=2)

    def leave_open(self) -> None:
        """Its bus is left to the end of the process on purpose: no warning of it, but of its publishers."""
        self._left_open = False

    def __del__(self) -> None:
        self.tell_left_open()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self.aclose()
        except EspError as unflushed:
            if error is None:
                raise
            _log.warning("closing after an error: %s", unflushed)


_started: WeakSet[Client | Publisher] = WeakSet()  # the client of a publisher may be gone before it


@atexit.register  # at import, so that it comes after what those who use us registered: they may close theirs
def _tell_left_open() -> None:
    """What is open when the program ends is told before the interpreter takes the log apart."""
    for left in sorted(_started, key=lambda each: isinstance(each, Client)):
        try:
            left.tell_left_open()
        except Exception:  # noqa: BLE001  # a ResourceWarning where warnings are errors: the others are told too
            sys.excepthook(*sys.exc_info())


def _resumes(opened: _Closable, source: int) -> bool:
    """Whether it sends the sequence of this source."""
    return isinstance(opened, Publisher) and opened.source == source and opened.at_work


def log_notice(notice: Notice, topic: str | None = None) -> None:
    """What happens to a notice that nobody asked for: a gap is never silent. The record has its fields, too."""
    given = {f"esp_{field.name}": getattr(notice, field.name) for field in fields(notice)}
    extra = {"esp_notice": type(notice).__name__, "esp_topic": topic, **given}
    if isinstance(notice, Failure):
        _log.warning("%s %s: %s", notice.failure, notice.code, notice.error, extra=extra)
        return
    level = logging.INFO if isinstance(notice, Joined | NewRun | Reconnected) else logging.WARNING
    _log.log(level, "%s", notice, extra=extra)


async def open_client(
    bus: str,
    config: str | os.PathLike[str] | None,
    on_notice: Callable[[Notice], None] | None,
    settings: dict[str, Any],
) -> Client:
    """Find the driver, read its options, open the bus."""
    found = await asyncio.to_thread(driver, bus)
    patience = connect_timeout(settings.get("connect_timeout"))
    options = await asyncio.to_thread(load_options, found.Options, section=bus, config=config, keywords=settings)
    start, group = getattr(options, "start", None), getattr(options, "groupid", None)
    client = Client(await open_bus(found, bus, options, patience), on_notice, start=start, group=group)
    try:
        await client.start()
    except BaseException:
        await client.aclose()
        raise
    return client
