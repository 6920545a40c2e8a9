"""The snapshots of an engine in a directory: taken, proven, kept few, and found again.

A snapshot is taken between two entries (in derived order: between two reads). It counts when

    1. in every line the bus was seen to have its last block, or a later one, with the same chain, and
    2. the copy was proven: a later block that was built from the copy agreed with the bus, or `every` seconds went by
       without output. A member that stands by goes on as the copy. One that leads has the copy take the same steps, up
       to the first that does anything.

One that is taken at a stop, or a switch to another version of the model, counts once the first is so: nothing comes
after it. Then it is marked, by a second rename. A standby may be ahead of the bus, a diverged one may be anywhere, and
a model's own `restore` may forget something: restored from such a state after all members died, nobody would have the
blocks in between, or a wrong state would become the truth. So only marked files are restored, and only marked files
push out older ones. A member that is found to differ withdraws what it marked.

    <engine and run>-<place>-<member>.new         taken, and perhaps never to count
    <engine and run>-<place>-<member>.snapshot    counts
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .._news import News
from ..errors import Closed, EspError, StateRefused
from ..failover.line import Line
from ..notices import Failure, Notice
from .model import Model, calls_of
from .order import Poisoned, Version
from .snapshot import InputState, LineState, NotASnapshot, Snapshot, Writer, accept_state, read, read_head
from .state import Part, State
from .steps import Copy, Steps

if TYPE_CHECKING:
    from .stepping import Stepping

_log = logging.getLogger("esp_pubsub.engine")
_KEPT = 3
_LOOK_EVERY = 0.1
_BUFFER = 1 << 20
_TRIED = 4096  # bytes that a usable directory takes
_DISK_WAITS = 5.0  # seconds for which a member that ends waits for what it has begun to write
_COMPARED_WITHIN = 10.0  # seconds in which it is known of the last blocks on the bus whether they are ours
T = TypeVar("T")


class Standing(NamedTuple):
    """Where a member is in the order; see `Snapshot`."""

    place: int
    chain: int
    position: int
    incarnation: int | None
    inputs: tuple[tuple[int | None, int | None], ...]
    """Of each input, the position and the incarnation up to which it was taken."""
    passed: tuple[Poisoned, ...] = ()
    runs: Version | None = None


class Named(NamedTuple):
    """What names an engine's snapshots: the engine, its run, the source of its order, the chain of its beginning. And
    the version of the model.
    """

    engine: int
    run: int
    order: int
    beginning: int
    version: str

    def file(self, place: int, member: int) -> str:
        """The stem of a file."""
        return f"{self._engine}-{place:020d}-{member:016x}"

    @staticmethod
    def place(file: Path) -> int:
        """The place in a file's name."""
        return int(file.name.split("-")[1])

    def of(self, member: int) -> str:
        """What matches all files of a member."""
        return f"{self._engine}-*-{member:016x}.*"

    def files(self, directory: Path, kind: str) -> list[Path]:
        """All files of this engine, the newest place first."""
        return sorted(directory.glob(f"{self._engine}-*.{kind}"), reverse=True)

    @property
    def _engine(self) -> str:
        """One that began anew on another bus, or after a purge, is another one: its places say nothing here."""
        return f"{self.engine:016x}{self.beginning:08x}r{self.run}"


class Basis(NamedTuple):
    """What a member began with."""

    model: Any
    """The function or instance that steps."""
    others: Sequence[LineState] = ()
    """Lines that another version of the model had, and this one has not."""
    file: Path | None = None
    """The snapshot from which it was restored, if that was of its own version."""


class Pending(NamedTuple):
    """A snapshot that does not count yet."""

    file: Path
    lines: tuple[int, ...]
    step: int
    taken_at: float
    last: bool
    """It was taken at a switch or a stop: no later block of this member proves it."""
    copy: asyncio.Future[bool] | None = None
    """What the copy shows beside a member that does not go on as the copy."""


class Snapshots:
    """One member's snapshots."""

    def __init__(
        self,
        directory: Path,
        named: Named,
        model: Model,
        basis: Basis,
        state: State,
        steps: Steps,
        lines: Sequence[tuple[str, Line]],
        every: float,
        notify: Callable[[Notice], None],
    ) -> None:
        """`lines`: each with its topic."""
        self.last: float | None = None
        """When one of this member's counted last, in seconds since the epoch."""
        self._directory = directory
        self._restored_from = basis.file
        self._named = named
        self._model = model
        self._at_work = basis.model
        self._state = state
        self._steps = steps
        self._topics, self._lines = zip(*lines, strict=True)
        self._others = basis.others
        self._every = every
        self._notify = notify
        self._member = secrets.randbits(63)
        self._pending: Pending | None = None
        self._under_way: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._next_at = self._loop.time() + every
        self._taken_at_step = self._counted_step = steps.taken or -1
        self._error: EspError | None = None  # why the last one was not taken
        self._failures = 0
        self._unfinished: Path | None = None  # is being written
        self._news = News()
        self._ended = False
        self._wanted = -1  # a snapshot of this step or a later one
        self._asked: list[int] = []  # steps up to which somebody waits for one that counts
        self._is_last = False  # the next one is taken at a switch or a stop

    async def run(self, stepping: Stepping, standing: Callable[[], Standing], leads: Callable[[], bool]) -> None:
        """Take one every so often, and mark it once it counts, until cancelled.

        `leads`: whether this member leads, and so leaves snapshots to the others.
        """
        try:
            await self._try()
            while not stepping.is_torn or stepping.between.locked():
                await asyncio.sleep(min(_LOOK_EVERY, self._every / 2))
                if (pending := self._pending) is not None:
                    if pending.copy is not None and pending.copy.done() and not pending.copy.result():
                        self._refuse(pending)
                    elif self._counts(pending):
                        await self._mark(pending)
                    elif pending.last and self._loop.time() >= pending.taken_at + _COMPARED_WITHIN:
                        self._cannot_mark(pending, "whether the bus has the same blocks is no longer known")
                elif self._is_asked or (
                    self._loop.time() >= self._next_at and self._steps.taken > max(0, self._taken_at_step)
                ):
                    await self._take_if_wanted(stepping, standing, leads)
        finally:
            self.end()
            if self._under_way is not None:
                await asyncio.wait([self._under_way], timeout=_DISK_WAITS)
            if self._unfinished is not None:
                with suppress(OSError):
                    await asyncio.to_thread(self._unfinished.unlink, missing_ok=True)

    async def _try(self) -> None:
        """Report a directory that cannot be used, now: the first snapshot may be a while off."""
        try:
            await self._in_thread(_try, self._directory / f"try-{self._member:016x}.tmp")
        except OSError as error:
            self._report(error)

    def end(self) -> None:
        """No more are taken: whoever waits for one is told. `run` may have been cancelled before it began."""
        self._ended = True
        self._news.tell()

    async def persist(self) -> None:
        """Take one now, and wait until it counts. Raises what kept it from that; Closed if this member ends before."""
        step, failed = self._steps.taken, self._failures
        self._asked.append(step)
        try:
            while self._counted_step < step:
                if self._ended:
                    raise Closed("this member of the engine takes no more snapshots: it has ended, or a step failed")
                await self._news.wait()
                if self._counted_step < step and self._failures > failed and self._error is not None:
                    raise self._error
        finally:
            self._asked.remove(step)

    def want(self, step: int, *, again: bool) -> bool:
        """Whether one counts that was taken at this step or later; else one is taken. Raises what kept it from that,
        where this was asked before.
        """
        if self._counted_step >= step:
            return True
        if again and self._error is not None:
            raise self._error
        self._wanted = max(self._wanted, step)
        return False

    async def needed(self) -> list[int | None] | None:
        """From where on the order, and then each input, is read again by the oldest snapshot that is kept; None for a
        queue. None if there is no snapshot that counts.
        """
        files = await asyncio.to_thread(self._named.files, self._directory, "snapshot")
        for file in reversed(files[:_KEPT]):
            with suppress(OSError, NotASnapshot):
                head = await asyncio.to_thread(_head, file)
                return [head.position, *(each.position for each in head.inputs)]
        return None

    def _refuse(self, pending: Pending) -> None:
        """A model that leaves something out of its own snapshot() is found here."""
        self._pending = None
        self._failures += 1
        self._taken_at_step = self._counted_step
        name = self._model.name
        self._report(StateRefused(f"a copy of {name} that its snapshot made does something else than {name}", path=""))
        self._news.tell()

    async def take_last(self) -> None:
        """This member takes no further step, and the bus has all its blocks: take one here, whatever was taken before,
        and wait until it counts. Raises as `persist` does.
        """
        self._is_last, self._pending = True, None
        self._taken_at_step = self._counted_step = -1
        await self.persist()

    @property
    def _is_asked(self) -> bool:
        return self._taken_at_step < max([self._wanted, *self._asked])

    async def _take_if_wanted(
        self, stepping: Stepping, standing: Callable[[], Standing], leads: Callable[[], bool]
    ) -> None:
        self._next_at = self._loop.time() + self._every
        if not self._is_asked and leads() and await asyncio.to_thread(self._age) < 2 * self._every:
            return
        try:
            async with stepping.between:
                if stepping.is_torn:  # it is somewhere in between, and will not go on
                    return
                self._pending = await self._take(standing(), leads())
            self._error = None
        except Exception as error:  # noqa: BLE001  # a model's own snapshot() and restore() may raise anything
            self._report(error)
            self._failures += 1
            self._wanted = -1
            self._news.tell()

    def _report(self, error: Exception) -> None:
        """Once, until one is taken."""
        first = self._error is None
        self._error = error if isinstance(error, StateRefused) else EspError(f"no snapshot was taken: {error!r}")
        if first:
            _log.error("no snapshot was taken in %s, the engine goes on without: %s", self._directory, error)
            self._notify(Failure("pubsubFail_APIFAIL", "pubsubCode_SNAPSHOT", self._error))

    def _age(self) -> float:
        """Seconds since the newest that counts was marked, by anybody who uses this directory."""
        newest = self._named.files(self._directory, "snapshot")[:1]
        with suppress(OSError):
            return time.time() - newest[0].stat().st_mtime if newest else float("inf")
        return float("inf")

    async def _take(self, standing: Standing, leads: bool) -> Pending:
        """Write one. A member that stands by goes on as the copy, and what it computes then proves the copy. One that
        leads does not: what it sends is the truth, and nobody would find a copy wrong.
        """
        file = self._directory / f"{self._named.file(standing.place, self._member)}.new"
        self._unfinished = temporary = file.with_suffix(".tmp")
        try:
            copy = await self._write(temporary, standing)
            await self._in_thread(_finish, temporary, file)
        except Exception:
            await asyncio.to_thread(temporary.unlink, missing_ok=True)
            self._unfinished = None
            raise
        self._unfinished = None
        shows: asyncio.Future[bool] | None = None
        if not leads:
            self._at_work = copy
            self._steps.calls = calls_of(copy, self._model)
        elif not self._is_last:
            shows = self._loop.create_future()
            self._steps.prove(Copy(calls_of(copy, self._model), shows.set_result))
        self._taken_at_step = self._steps.taken
        lines = tuple(line.outbox.last for line in self._lines)
        return Pending(file, lines, self._steps.taken, self._loop.time(), self._is_last, shows)

    async def _write(self, file: Path, standing: Standing) -> Any:
        """Write all of it, a buffer at a time, while the loop has its turns; returns the copy."""
        writer = Writer()
        pieces, size = [writer.head(self._snapshot(standing))], 0
        await self._in_thread(_create, file)
        copying = self._state.copy(self._at_work)
        while True:
            try:
                part = next(copying)
            except StopIteration as done:
                await self._in_thread(_append, file, [*pieces, writer.end()])
                return done.value
            pieces.append(writer.part(part))
            size += len(part.body)
            if size < _BUFFER:
                await asyncio.sleep(0)
            else:
                await self._in_thread(_append, file, pieces)
                pieces, size = [], 0

    def _snapshot(self, standing: Standing) -> Snapshot:
        steps = self._steps
        return Snapshot(
            order=self._named.order, beginning=self._named.beginning, version=self._named.version,
            place=standing.place, chain=standing.chain, position=standing.position, incarnation=standing.incarnation,
            inputs=[
                InputState(each.window, position, incarnation, each.accept.from_start, accept_state(each.accept))
                for each, (position, incarnation) in zip(steps.inputs, standing.inputs, strict=True)
            ],
            lines=[
                LineState(topic, line.outbox.last, line.outbox.chain)
                for topic, line in zip(self._topics, self._lines, strict=True)
            ] + list(self._others),
            steps=steps.taken, step_chain=steps.chain, marks=list(steps.marks.items()), now=steps.now,
            timers=steps.timers.items(), passed=list(standing.passed), runs=standing.runs, kinds=self._state.kinds,
        )  # fmt: skip

    def _counts(self, pending: Pending) -> bool:
        pairs = list(zip(self._lines, pending.lines, strict=True))
        if any(min(line.agreed, line.m) < last for line, last in pairs):
            return False
        proven = pending.copy is None or pending.copy.done()
        if pending.last or (proven and any(min(line.agreed, line.m) > last for line, last in pairs)):
            return True
        quiet = all(line.outbox.last == last for line, last in pairs)
        return quiet and self._loop.time() >= pending.taken_at + self._every

    async def _mark(self, pending: Pending) -> None:
        self._pending = None
        self._steps.prove(None)
        try:
            await self._in_thread(_rename, pending.file, pending.file.with_suffix(".snapshot"))
            if pending.last == self._is_last:
                self._counted_step = pending.step
            self.last = time.time()
            await self._in_thread(self._rotate)
        except OSError as error:
            self._cannot_mark(pending, str(error))
        self._news.tell()

    def _cannot_mark(self, pending: Pending, why: str) -> None:
        _log.error("the snapshot %s cannot be marked: %s", pending.file.name, why)
        self._error = EspError(f"the snapshot {pending.file.name} cannot be marked: {why}")
        self._failures += 1  # whoever waits for it is told, unless it counts and only older ones cannot go
        self._pending, self._taken_at_step = None, self._counted_step  # and may ask for another one
        self._news.tell()

    async def _in_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        """What is begun is ended, though whoever waits for it is cancelled; `withdraw` waits for that."""
        self._under_way = begun = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
        begun.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody waits any more
        await asyncio.wait([begun])
        begun.result()

    def _rotate(self) -> None:
        """Keep the newest that count. What is older than those, by its place, goes, though it never counted; what is
        not may be another member's that is about to count.
        """
        marked = self._named.files(self._directory, "snapshot")
        if len(marked) < _KEPT:
            return
        uncounted = [file for kind in ("new", "tmp") for file in self._named.files(self._directory, kind)]
        oldest = _place(marked[_KEPT - 1])
        for old in [*marked[_KEPT:], *[file for file in uncounted if _place(file) < oldest]]:
            old.unlink(missing_ok=True)

    async def withdraw(self) -> None:
        """This member differs from the others: nothing that it took, or was restored from, may be restored again. To be
        called after `run`.
        """
        if self._under_way is not None:
            await asyncio.wait([self._under_way])
        with suppress(OSError):
            await asyncio.to_thread(self._remove_ours)

    def _remove_ours(self) -> None:
        for file in self._directory.glob(self._named.of(self._member)):
            file.unlink(missing_ok=True)
        if self._restored_from is not None:  # it may be what made this member differ
            self._restored_from.unlink(missing_ok=True)


def of_earlier_runs(directory: Path, engine: int, run: int) -> list[Path]:
    """All files that count of an engine's runs before this one: the last run first, of that what was marked last."""
    found = []
    for file in directory.glob(f"{engine:016x}*-*.snapshot"):
        its = file.name.partition("-")[0].partition("r")[2]
        if its.isdecimal() and int(its) < run:
            with suppress(OSError):  # another member removed it
                found.append(((int(its), file.stat().st_mtime), file))
    return [file for _, file in sorted(found, reverse=True)]


async def newest(directory: Path, named: Named, use: Callable[[Path, Snapshot, list[Part]], Awaitable[T]]) -> T | None:
    """What `use` makes of the newest snapshot that counts. It raises NotASnapshot for one that is of no use."""
    for file in await asyncio.to_thread(named.files, directory, "snapshot"):
        try:
            snapshot, parts = read(await asyncio.to_thread(file.read_bytes))
            if (snapshot.order, snapshot.beginning) != (named.order, named.beginning):
                raise NotASnapshot("it is of an engine that began otherwise")
            return await use(file, snapshot, parts)
        except (NotASnapshot, OSError) as error:
            _log.warning("the snapshot %s is passed over: %s", file.name, error)
    return None


def _head(file: Path) -> Snapshot:
    with file.open("rb") as handle:
        return read_head(handle)


def _try(file: Path) -> None:
    """Write something to it, and remove it. OSError where that cannot be done."""
    try:
        _create(file)
        _append(file, [bytes(_TRIED)])
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    finally:
        with suppress(OSError):
            file.unlink()


def _place(file: Path) -> str:
    """The place in its name; see `Named.file`."""
    return file.name.split("-")[1]


def _create(file: Path) -> None:
    """Empty, whatever an attempt that failed may have left there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")


def _append(file: Path, pieces: Sequence[bytes]) -> None:
    """In one go, so that nothing is left open where nobody waits for this any more. What another member removed
    meanwhile does not begin in its middle.
    """
    with file.open("r+b") as handle:
        handle.seek(0, os.SEEK_END)
        handle.writelines(pieces)


def _finish(file: Path, to: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    _rename(file, to)


def _rename(file: Path, to: Path) -> None:
    """In one step, and durably."""
    file.replace(to)
    directory = os.open(to.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
