"""Deliberate faults in the written order of an engine. Each must be caught in the world that is named.

The real classes, unchanged, pass every world: that is what failover/test_model.py and `make model` show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from esp_pubsub.engine.order import Entry, Order, Proposal
from esp_pubsub.engine.snapshot import SourceState, accept_state
from esp_pubsub.engine.snapshots import Pending, Snapshots
from esp_pubsub.engine.timers import Timers
from esp_pubsub.failover.accept import Accept
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.membership import Membership
from esp_pubsub.wire.frame import Frame, parse
from tests.model import order_judges, order_scene, worlds
from tests.model.explorer import Counterexample
from tests.model.order_judges import LOG, QUEUE, Logs, Member

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[Any] = []


def caught_in(world: str, says: str) -> Callable[[Mutant], Mutant]:
    """Enter a mutant that must be caught in this world, for this reason."""

    def enter(mutant: Mutant) -> Mutant:
        MUTANTS.append(pytest.param(mutant, world, says, id=mutant.__name__.replace("_", " ")))
        return mutant

    return enter


@pytest.mark.parametrize(("mutant", "world", "says"), MUTANTS)
def test_the_model_check_catches(mutant: Mutant, world: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = next(scene for scene in worlds.scenes() if scene.name == world)
    mutant(monkeypatch)
    with pytest.raises(Counterexample, match=says):
        worlds.check(scene)


# which entry counts


@caught_in("order, queue", "its writer knew of another order")
def an_entry_counts_by_its_id_alone(patch: pytest.MonkeyPatch) -> None:
    read = Order.read

    def lenient(self: Order, data: bytes) -> Entry | None:
        frame = parse(data)
        if frame.id == self.last + 1:
            self.chain = frame.link
        return read(self, data)

    patch.setattr(Order, "read", lenient)


@caught_in("order, holes", "its writer knew of another order")
def an_entry_after_a_gap_is_let_through(patch: pytest.MonkeyPatch) -> None:
    read = Order.read

    def lenient(self: Order, data: bytes) -> Entry | None:
        frame = parse(data)
        if frame.id > self.last + 1:
            self.last, self.chain = frame.id - 1, frame.link
        return read(self, data)

    patch.setattr(Order, "read", lenient)


@caught_in("order, queue", "no entry that counts has it")
def what_a_dead_writer_began_is_not_abandoned(patch: pytest.MonkeyPatch) -> None:
    part = Order._part

    def hoarding(self: Order, frame: Frame) -> Entry | None:
        parts = list(self._parts)
        if parts and frame.flags & 1:
            frame = frame._replace(flags=frame.flags & 2)
        return part(self, frame)

    patch.setattr(Order, "_part", hoarding)


@caught_in("order, queue", "no entry that counts has it")
def a_proposal_counts_with_its_first_frame(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Order, proposal: Proposal) -> bool:
        return self._chains.get(proposal.first) == proposal.frames[0].chain

    patch.setattr(Order, "is_decided", hasty)
    patch.setattr(Order, "counts", hasty)


@caught_in("order", "can not be delivered")
def a_void_proposal_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Order, "is_decided", Order.counts)


# steps


@caught_in("order, queue", "its steps are")
def a_step_before_the_entry_is_read_back(patch: pytest.MonkeyPatch) -> None:
    propose = order_judges.propose

    def hasty(core: Member, clock: int, end: int, queue: tuple[bytes, ...], largest: int, log: Logs) -> None:
        propose(core, clock, end, queue, largest, log)
        order_judges.carry_out(core, Entry(clock, (order_judges.Taken(QUEUE, None, queue),)), log)

    patch.setattr(order_judges, "propose", hasty)


@caught_in("order, queue", "its steps are")
def the_accept_rule_runs_on_what_is_read_and_not_on_what_is_taken(patch: pytest.MonkeyPatch) -> None:
    propose, blocks = order_judges.propose, order_judges.blocks

    def reading(core: Any, clock: int, end: int, queue: tuple[bytes, ...], largest: int, log: Logs) -> None:
        found = core.steps.receive(QUEUE, [(None, data) for data in queue])
        core.read = [each for each in found if isinstance(each, Frame)]
        propose(core, clock, end, queue, largest, log)

    def taking(core: Any, input: int, to: int | None, messages: tuple[bytes, ...], log: Logs) -> list[Frame]:
        if input == LOG or core.proposal is None:
            return blocks(core, input, to, messages, log)
        core.carried |= frozenset(messages)
        found: list[Frame] = core.read
        return found

    patch.setattr(order_judges, "propose", reading)
    patch.setattr(order_judges, "blocks", taking)


@caught_in("order, queue, held", "its steps are")
def a_change_of_the_queues_reader_clears_what_is_held(patch: pytest.MonkeyPatch) -> None:
    give_up = order_judges.give_up

    def clearing(core: Member, log: Logs) -> None:
        give_up(core, log)
        core.steps.inputs[QUEUE].accept.redelivery()

    patch.setattr(order_judges, "give_up", clearing)


@caught_in("order, queue", "no entry that counts has it")
def a_queue_is_confirmed_before_the_read_back(patch: pytest.MonkeyPatch) -> None:
    propose = order_judges.propose

    def hasty(core: Member, clock: int, end: int, queue: tuple[bytes, ...], largest: int, log: Logs) -> None:
        propose(core, clock, end, queue, largest, log)
        core.confirms, core.offered = core.confirms + len(queue), 0

    patch.setattr(order_judges, "propose", hasty)


# time and timers


@caught_in("order, timers and blocks", "time went back")
def an_entry_has_the_time_of_its_writers_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(order_judges, "next_entry", lambda now, before, due, takes: Entry(now, tuple(takes)))


@caught_in("order, timers and blocks", "fired where")
def timers_fire_by_key(patch: pytest.MonkeyPatch) -> None:
    due = Timers.due
    patch.setattr(Timers, "due", lambda self, now: sorted(due(self, now)))


@caught_in("order, timers and blocks", "fired where")
def timers_fire_in_the_order_in_which_they_were_set(patch: pytest.MonkeyPatch) -> None:
    due = Timers.due

    def as_set(self: Timers, now: int) -> list[str]:
        order = list(self._at)
        return sorted(due(self, now), key=order.index)

    patch.setattr(Timers, "due", as_set)


@caught_in("order, timers and blocks", "fired where")
def a_timer_that_was_set_anew_fires_in_its_old_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Timers, "take", lambda self, key: True)


@caught_in("order, timers and blocks", "was due and did not fire")
def timers_fire_after_the_blocks_of_their_entry(patch: pytest.MonkeyPatch) -> None:
    def carry_out(core: Member, entry: Entry, log: Logs) -> None:
        core.steps.now = entry.now
        core.model.tick(entry.now)
        due = core.steps.timers.due(entry.now)
        core.pending.extend(("taken", take.input, take.to, take.messages) for take in entry.takes)
        core.pending.extend(("fires", key) for key in due)
        order_judges.go_on(core, log)

    patch.setattr(order_judges, "carry_out", carry_out)


# lines


@caught_in("order, lines, deaths", "can not be delivered")
def a_full_line_waits_for_room_while_another_is_behind(patch: pytest.MonkeyPatch) -> None:
    def room(self: Membership, line: Line, size: int) -> bool:
        return line.outbox.room(size)

    patch.setattr(Membership, "room", room)


@caught_in("order, lines, deaths", "more than the buffer beyond the bus")
def a_step_begins_whatever_the_lines_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "room", lambda self, line, size: True)


# snapshots


@caught_in("order, snapshots, one block", "the bus does not hold it")
def a_snapshot_counts_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Snapshots, "_counts", lambda self, pending: True)


@caught_in("order, snapshots, a flaw", "is not what the order yields")
def a_snapshot_counts_by_how_far_the_bus_is_without_the_chain(patch: pytest.MonkeyPatch) -> None:
    counts = Snapshots._counts

    def by_m(self: Snapshots, pending: Pending) -> bool:
        for line in self._lines:
            line.agreed = max(line.agreed, min(line.m, line.outbox.last))
        return counts(self, pending)

    patch.setattr(Snapshots, "_counts", by_m)


@caught_in("order, snapshots, a flaw", "is not what the order yields")
def a_snapshot_counts_without_a_later_block(patch: pytest.MonkeyPatch) -> None:
    def unproven(self: Snapshots, pending: Pending) -> bool:
        lines = zip(self._lines, pending.lines, strict=True)
        return all(min(line.agreed, line.m) >= last for line, last in lines)

    patch.setattr(Snapshots, "_counts", unproven)


@caught_in("order, snapshots, a flaw that is found", "is not what the order yields")
def marks_are_not_withdrawn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(order_scene.OrderScene, "withdraw", lambda self, state, at, seat: state)


@caught_in("order, snapshots, queue", "its steps are")
def a_snapshot_forgets_what_is_held(patch: pytest.MonkeyPatch) -> None:
    def forgetful(accept: Accept) -> list[SourceState]:
        return [msgspec.structs.replace(state, held=[]) for state in accept_state(accept)]

    patch.setattr(order_judges, "accept_state", forgetful)


@caught_in("order, snapshots, timers", "its steps are|was due and did not fire|fired where|can not be delivered")
def a_snapshot_forgets_timers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Timers, "items", lambda self: [])
