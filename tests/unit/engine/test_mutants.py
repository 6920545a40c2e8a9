"""Deliberate faults in what an engine does. Each must be caught by the simulation, or it proves nothing of engines.

A mutant breaks a class by monkeypatching, and is caught within so many seeds of engines, with these changes to what
they draw. The real classes, unchanged, pass: that is what test_simulation.py shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from esp_pubsub.bus import Message
from esp_pubsub.engine import order_topic, snapshots, written
from esp_pubsub.engine.beginning import Begun
from esp_pubsub.engine.inputs import LogInput, Offer, QueueInput
from esp_pubsub.engine.order import FIRST, LAST, Entry, Order, Proposal, Span, _decode
from esp_pubsub.engine.snapshots import Named, Snapshots, Standing
from esp_pubsub.engine.stepping import Stepping
from esp_pubsub.engine.timers import Timers
from esp_pubsub.engine.written import WrittenOrder
from esp_pubsub.errors import BadFrame, InputLost
from esp_pubsub.wire.frame import Frame, frames, parse
from tests.simulation.run import Wrong, run

Mutant = Callable[[pytest.MonkeyPatch], None]
CAUGHT: list[Any] = []
SEEDS = 200


def caught(**changes: Any) -> Callable[[Mutant], Mutant]:
    """Enter a mutant that the simulation must catch, with these changes to what its seeds draw."""

    def enter(mutant: Mutant) -> Mutant:
        CAUGHT.append(pytest.param(mutant, changes, id=mutant.__name__.replace("_", " ")))
        return mutant

    return enter


@caught(written=True, all_lead=True)
def a_step_before_the_entry_is_read_back(patch: pytest.MonkeyPatch) -> None:
    put = WrittenOrder._put

    async def hasty(self: WrittenOrder, proposal: Proposal) -> None:
        for message in frames(proposal.frames, 0, 0):
            if (entry := self._order.read(message)) is not None:
                await self._carry_out(entry)
        self._carried_out = self._order.last
        await put(self, proposal)

    patch.setattr(WrittenOrder, "_put", hasty)


@caught(kind="queues", grouped=True, all_lead=True, entry_bytes=256, blocks=40, pace=(0.001, 0.001))
def an_entry_that_counts_by_its_id_alone(patch: pytest.MonkeyPatch) -> None:
    read = Order.read

    def lenient(self: Order, data: bytes) -> Entry | None:
        try:
            frame = parse(data)
        except BadFrame:
            return None
        if frame.id == self.last + 1:
            self.chain = frame.link
        return read(self, data)

    patch.setattr(Order, "read", lenient)


@caught(timers=True, all_lead=True)
def a_void_entry_that_is_let_through(patch: pytest.MonkeyPatch) -> None:
    read = Order.read

    def lenient(self: Order, data: bytes) -> Entry | None:
        void = self.void
        found = read(self, data)
        if self.void > void:
            frame = parse(data)
            return _decode(frame.body) if frame.flags & FIRST and frame.flags & LAST else None
        return found

    patch.setattr(Order, "read", lenient)


@caught(kind="queues", grouped=True, entry_bytes=256, blocks=40, pace=(0.001, 0.001), faults=0.1)
def an_unfinished_entry_that_is_not_abandoned(patch: pytest.MonkeyPatch) -> None:
    part = Order._part

    def keeps(self: Order, frame: Frame) -> Entry | None:
        return part(self, frame._replace(flags=frame.flags & ~FIRST) if self._parts else frame)

    patch.setattr(Order, "_part", keeps)


@caught(kind="queues", grouped=True)
def a_queue_that_is_confirmed_before_the_entry_is_read_back(patch: pytest.MonkeyPatch) -> None:
    offer = QueueInput.offer

    def hasty(self: QueueInput, max_bytes: int) -> Offer | None:
        found = offer(self, max_bytes)
        if found is not None:
            self._counted = found.messages[-1]
            self._news.tell()
        return found

    patch.setattr(QueueInput, "offer", hasty)


@caught(kind="queues", grouped=True, all_lead=True, faults=0.1)
def a_queue_that_is_confirmed_whatever_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Order, "counts", lambda self, proposal: True)


@caught(written=True)
def a_member_that_takes_what_it_has_read_and_not_what_the_entry_says(patch: pytest.MonkeyPatch) -> None:
    take = LogInput.take

    async def greedy(self: LogInput, to: int) -> Sequence[Message]:
        return await take(self, max(to, self.end))

    patch.setattr(LogInput, "take", greedy)


@caught(written=True, ahead=2)
def a_bound_that_keeps_a_member_from_what_an_entry_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogInput, "_wanted", property(lambda self: 0, lambda self, to: None), raising=False)


@caught(timers=True)
def time_that_is_the_writers_own(patch: pytest.MonkeyPatch) -> None:
    propose = Order.propose

    def by_its_own(self: Order, entry: Entry, largest: int) -> Proposal:
        return propose(self, Entry(written.wall_clock(), entry.takes), largest)

    patch.setattr(Order, "propose", by_its_own)


@caught(timers=True)
def timers_that_fire_by_the_members_own_clock(patch: pytest.MonkeyPatch) -> None:
    carry_out = WrittenOrder._carry_out

    async def by_its_own(self: WrittenOrder, entry: Entry) -> None:
        await carry_out(self, Entry(max(entry.now, self.now()), entry.takes))

    patch.setattr(WrittenOrder, "_carry_out", by_its_own)


@caught(timers=True)
def timers_that_come_after_the_blocks_of_their_entry(patch: pytest.MonkeyPatch) -> None:
    carry_out, tick = WrittenOrder._carry_out, Stepping.tick

    async def nothing(self: Stepping, now: int) -> None:
        self.steps.now = now

    async def late(self: WrittenOrder, entry: Entry) -> None:
        await carry_out(self, entry)
        await tick(self._stepping, entry.now)

    patch.setattr(Stepping, "tick", nothing)
    patch.setattr(WrittenOrder, "_carry_out", late)


@caught(timers=True)
def a_timer_that_was_cancelled_a_moment_ago_and_fires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Timers, "take", lambda self, key: True)


# switches and snapshots


@caught(snapshots=0.05, written=True, retention=False, blocks=40)
def a_member_that_steps_on_beyond_a_switch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Span, "check", lambda self, order: None)


RESTARTS: dict[str, Any] = {"snapshots": 0.05, "blocks": 40, "retention": False}


@caught(**RESTARTS, buffer=100, faults=0.1)
def a_snapshot_that_counts_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Snapshots, "_counts", lambda self, pending: True)


@caught(**RESTARTS)
def a_snapshot_that_is_restored_though_it_does_not_count(patch: pytest.MonkeyPatch) -> None:
    files = Named.files

    def all_of_them(self: Named, directory: Path, kind: str) -> list[Path]:
        found = files(self, directory, kind)
        return sorted(found + files(self, directory, "new"), reverse=True) if kind == "snapshot" else found

    patch.setattr(Named, "files", all_of_them)


@caught(**RESTARTS, written=True, ahead=10_000)
def a_snapshot_with_the_inputs_as_they_were_read_and_not_as_they_were_taken(patch: pytest.MonkeyPatch) -> None:
    standing = WrittenOrder.standing.fget  # type: ignore[attr-defined]

    def as_read(self: WrittenOrder) -> Standing:
        ends = tuple((each.end, None) if isinstance(each, LogInput) else (None, None) for each in self._inputs)
        found: Standing = standing(self)
        return found._replace(inputs=ends)

    patch.setattr(WrittenOrder, "standing", property(as_read))


@caught(**RESTARTS)
def a_snapshot_without_the_state_of_the_accept_rule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshots, "accept_state", lambda accept: [])


@caught(**RESTARTS, timers=True)
def a_snapshot_without_timers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Timers, "items", lambda self: [])


@caught(**RESTARTS, timers=True)
def timers_that_are_restored_for_another_time(patch: pytest.MonkeyPatch) -> None:
    items = Timers.items
    patch.setattr(Timers, "items", lambda self: [(key, at + 1_000) for key, at in items(self)])


@caught(**RESTARTS)
def a_snapshot_in_the_middle_of_what_belongs_together(patch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def in_parts(self: Stepping) -> AsyncIterator[None]:
        yield

    patch.setattr(Stepping, "whole", in_parts)


@caught(snapshots=0.05, retention=True, blocks=40)
def a_beginning_that_is_written_on_an_order_that_lost_its_own(patch: pytest.MonkeyPatch) -> None:
    async def forgotten(*_: Any) -> None:
        return None

    first_entry = order_topic._first_entry

    async def or_none(*arguments: Any) -> Begun | None:
        with contextlib.suppress(InputLost):
            return await first_entry(*arguments)
        return None

    patch.setattr(order_topic, "retained_beginning", forgotten)
    patch.setattr(order_topic, "_first_entry", or_none)


@pytest.mark.parametrize(("mutant", "changes"), CAUGHT)
def test_the_simulation_catches(mutant: Mutant, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Wrong):
        for seed in range(SEEDS):
            run(seed, engine=True, **{"input_kind": None, **changes})
