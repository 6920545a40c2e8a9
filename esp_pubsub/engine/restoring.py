"""Where a member begins: at a snapshot, at the engine's beginning, or at the switch to its version of the model.

The order says which version of the model runs (order.py: Version). A member reads it up to its present end before it
begins. One of the version that runs begins with a snapshot of that version, or with the one that the version before
left at the switch; `migrate` makes its state of that. One of the version before may be needed still: it steps up to the
switch, and leaves a snapshot there. Any other waits for a switch to its version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..bus import Bus, Message, Place
from ..errors import BusUnavailable, InputLost, StateRefused
from ..failover.line import Line
from ..publisher import source_number
from .beginning import Beginning
from .inputs import NEW_RUN
from .model import Model, calls_of
from .order import Order, Span, Version
from .order_topic import From, begun_on, read_ahead
from .repeating import earlier
from .snapshot import NotASnapshot, Snapshot, sources_of
from .snapshots import Basis, Named, newest
from .state import Part, State
from .steps import Steps

_log = logging.getLogger("esp_pubsub.engine")
_LOOK_EVERY = 0.1  # seconds between two looks for a switch, and for a snapshot
_SAY_EVERY = 60.0  # seconds between two lines of a member that waits


@dataclass(frozen=True, slots=True)
class Start:
    """Where a member begins: at the engine's beginning, or at a snapshot."""

    order: Order
    order_place: Place
    inputs: tuple[Place | None, ...]
    """None for a queue."""
    now: int = 0
    span: Span = Span("")  # noqa: RUF009  # it is a tuple


Begins = tuple[Basis, Start]


@dataclass(slots=True)
class Restoring:
    """Brings the steps and lines of a new member to where it begins."""

    model: Model
    fresh: Any
    state: State | None
    """None for a member without a directory for snapshots."""
    steps: Steps
    lines: Sequence[tuple[str, Line]]
    """Each with its topic."""
    began: Beginning
    beginning: Start
    orders: Bus
    order_on: str
    _ahead: Order | None = field(default=None, init=False)  # at the end of the order, as far as it was read
    _ahead_place: Place = field(default=Place(0, None), init=False)

    async def begin(self, kind: str, directory: Path | None, named: Named) -> Begins:
        """Where a member begins that has this directory for snapshots; in a written order it may have to wait for that.

        Raises Switched for one of a version that is over, StateRefused where it can do nothing with the state of the
        version before, and InputLost where the order has lost what it needs.
        """
        use = self._use_derived if kind == "derived" else self._use
        found = None if directory is None else await newest(directory, named, use)
        if found is not None:
            return found
        if kind == "derived":
            return await self._from_the_beginning(directory, named, self.beginning.span)
        if self._ahead is None:
            await self._read_ahead(self.beginning.order, self.beginning.order_place)
        part = self._part
        if part is not None and part.place == 1 and (directory is not None or part is self._runs):
            return await self._from_the_beginning(directory, named, self._span)
        if directory is None:
            raise self._span.over(self._runs.name, self._runs.place)
        return await self._wait(directory, named)

    async def _from_the_beginning(self, directory: Path | None, named: Named, span: Span) -> Begins:
        """That may be with a snapshot of an earlier run."""
        start = replace(self.beginning, span=span)
        if not self.began.basis:
            return Basis(self.fresh), start
        snapshot, parts = await earlier(directory, named.engine, named.run, self.began.basis)
        try:
            restored = self._restored(snapshot, parts)
            known = {each.window: (each.incarnation, each.from_start, sources_of(each)) for each in snapshot.inputs}
        except NotASnapshot as e:
            raise StateRefused(f"the snapshot with which this run began is of no use: {e}", path="") from None
        for reading, input in zip(self.steps.inputs, self.began.inputs, strict=True):
            incarnation, from_start, sources = known.get(input.window, (None, True, {}))
            if incarnation == input.incarnation:  # else it is another topic, and its sources begin anew
                reading.accept.from_start, reading.accept.sources = from_start, sources
        self.steps.go_on(calls_of(restored, self.model), 0, 0, {})
        self._take_up(snapshot, start.order)
        _log.info("the run begins with a snapshot of an earlier one, at its step %d", snapshot.steps)
        return Basis(restored), replace(start, now=snapshot.now or 0)

    def _take_up(self, snapshot: Snapshot, order: Order) -> None:
        order.passed.update(snapshot.passed)
        self.steps.now = snapshot.now
        for key, when in snapshot.timers:
            self.steps.timers.set(key, when)

    async def _wait(self, directory: Path, named: Named) -> Begins:
        """Until the order switches to this version, and the version before has left a snapshot there."""
        loop, said, said_at, tried = asyncio.get_running_loop(), "", 0.0, set[Path]()
        while True:
            if (part := self._part) is None:
                waits_for = f"the engine runs version {self._runs.name!r}: esp engine switch URL --to VERSION"
            else:
                waits_for = f"the snapshot that the version before leaves at entry {part.place} is not in {directory}"
                files = await asyncio.to_thread(named.files, directory, "snapshot")
                left = {file for file in files if named.place(file) >= part.place} - tried
                if left and (found := await newest(directory, named, self._use)) is not None:
                    return found
                tried |= left
            if waits_for != said or loop.time() >= said_at + _SAY_EVERY:
                said, said_at = waits_for, loop.time()
                _log.warning("a member of version %r waits: %s", self.model.version, waits_for)
            await asyncio.sleep(_LOOK_EVERY)
            with suppress(BusUnavailable):  # it has time
                await self._read_ahead()

    # which version runs

    @property
    def _runs(self) -> Version:
        """As far as the order was read."""
        assert self._ahead is not None
        return self._ahead.runs

    @property
    def _part(self) -> Version | None:
        """What a member of this version is needed for."""
        return self._runs.part(self.model.version)

    @property
    def _span(self) -> Span:
        assert self._ahead is not None
        part, runs = self._part, self._runs
        since = 0 if part is None else part.since
        return Span(self.model.version, since, self._ahead.last, None if part is runs else runs.place)

    async def _read_ahead(self, order: Order | None = None, place: Place | None = None) -> None:
        """Read the order on to its present end; from a place that is known, the first time."""
        if order is not None and place is not None:
            self._ahead, self._ahead_place = order.copy(), place
        assert self._ahead is not None
        bounds, place = await self.orders.bounds(self.order_on), self._ahead_place
        if bounds.incarnation != place.incarnation or place.position < bounds.first:
            raise InputLost(
                f"{self.order_on} has lost entries that this member needs: {NEW_RUN}",
                topic=self.order_on,
                position=place.position,
            )
        await read_ahead(self.orders, self.order_on, self._ahead, place)
        self._ahead_place = Place(bounds.end, bounds.incarnation)

    # with a snapshot

    async def _use_derived(self, file: Path, snapshot: Snapshot, parts: Sequence[Part]) -> Begins:
        if snapshot.version != self.model.version:
            raise self._of_another_version(snapshot)
        return self._stand(snapshot, parts, file, self.beginning)

    async def _use(self, file: Path, snapshot: Snapshot, parts: Sequence[Part]) -> Begins:
        start = self.beginning
        if snapshot.place > 1:
            place, began = Place(snapshot.position, snapshot.incarnation), start.order
            order = Order(began.source, began.run, snapshot.place, snapshot.chain, snapshot.runs or began.runs)
            if not await _stands(self.orders, self.order_on, place, order):
                raise NotASnapshot(f"the entry at its place, {snapshot.place}, is no longer on {self.order_on}")
            start = replace(start, order=order, order_place=Place(place.position + 1, place.incarnation))
        if self._ahead is None:
            await self._read_ahead(start.order, start.order_place)
        part, span = self._part, self._span
        if part is None or not span.includes(snapshot.place) or not part.takes(snapshot.version, snapshot.place):
            raise self._of_another_version(snapshot)
        if snapshot.place == span.end:
            raise span.over(self._runs.name, snapshot.place)
        return self._stand(snapshot, parts, file, replace(start, span=span))

    def _of_another_version(self, snapshot: Snapshot) -> NotASnapshot:
        version = self.model.version
        return NotASnapshot(
            f"version {snapshot.version!r} of the model took it at place {snapshot.place}, and this is {version!r}"
        )

    def _stand(self, snapshot: Snapshot, parts: Sequence[Part], file: Path, start: Start) -> Begins:
        """Have the member stand where a snapshot was taken. NotASnapshot, and nothing is done, for one that does not
        fit.
        """
        is_ours = snapshot.version == self.model.version
        lines, topics = {each.topic: each for each in snapshot.lines}, [topic for topic, _ in self.lines]
        other_inputs = [each.window for each in snapshot.inputs] != [*self.model.inputs]
        if other_inputs or (is_ours and [*lines][: len(topics)] != topics):
            raise NotASnapshot("it is of other windows")
        sources = [sources_of(each) for each in snapshot.inputs]
        restored = self._restored(snapshot, parts)
        steps = self.steps
        for reading, its, known in zip(steps.inputs, snapshot.inputs, sources, strict=True):
            reading.accept.from_start, reading.accept.sources = its.from_start, known
        for topic, line in self.lines:
            if (at := lines.get(topic)) is not None:
                line.begin_after(at.last, at.chain)
        steps.go_on(calls_of(restored, self.model), snapshot.steps, snapshot.step_chain, dict(snapshot.marks))
        self._take_up(snapshot, start.order)
        _log.info("restored from a snapshot at step %d, place %d", snapshot.steps, snapshot.place)
        inputs = tuple(
            None if each.position is None else Place(each.position, each.incarnation) for each in snapshot.inputs
        )
        others = [each for each in snapshot.lines if each.topic not in topics]
        begins = replace(start, inputs=inputs, now=snapshot.now or 0)
        return Basis(restored, others, file if is_ours else None), begins

    def _restored(self, snapshot: Snapshot, parts: Sequence[Part]) -> Any:
        assert self.state is not None  # there is a directory
        if snapshot.version != self.model.version:
            return self.state.migrated(snapshot.version, snapshot.kinds, parts)
        try:
            return self.state.restored(parts)
        except Exception as e:  # noqa: BLE001  # a model's own restore() may raise anything
            raise NotASnapshot(f"its state cannot be restored: {e!r}") from None


async def newest_place(orders: Bus, order_on: str, engine: int, run: int, directory: Path) -> From | None:
    """Where the newest snapshot of a directory stands in a written order, if any does."""
    begun, _, chain = await begun_on(orders, order_on, run)

    async def use(_file: Path, snapshot: Snapshot, _parts: Sequence[Part]) -> From:
        if snapshot.runs is None or snapshot.place == 1:
            raise NotASnapshot("it does not say where it stands in a written order")
        order = Order(source_number(order_on), run, snapshot.place, snapshot.chain, snapshot.runs)
        order.passed.update(snapshot.passed)
        if not await _stands(orders, order_on, Place(snapshot.position, snapshot.incarnation), order):
            raise NotASnapshot(f"the entry at its place, {snapshot.place}, is no longer on {order_on}")
        return From(order, Place(snapshot.position + 1, begun.place.incarnation), snapshot.now or 0)

    return await newest(directory, Named(engine, run, source_number(order_on), chain, ""), use)


async def _stands(bus: Bus, topic: str, place: Place, order: Order) -> bool:
    """Whether the last frame that counts stands where it was read."""
    bounds = await bus.bounds(topic)
    if bounds.incarnation != place.incarnation or not bounds.first <= place.position < bounds.end:
        return False
    feed = await bus.feed(topic, place, None)
    try:
        first = (await feed.read(1, 1))[0]
        return isinstance(first, Message) and order.is_last(first.data)
    finally:
        await feed.aclose()
