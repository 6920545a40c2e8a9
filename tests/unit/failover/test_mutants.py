"""Deliberate faults in accept rule, outbox, member, ledger and sender. Each must be caught, or nothing here is proved.

A mutant is a name and a function that breaks a class by monkeypatching. Those of the first table are caught by the
model check, in the world that is named, those of the second by the simulation of the whole, within so many seeds. The
real classes, unchanged, pass both: that is what test_model.py and test_simulation.py show.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from esp_pubsub import inbox
from esp_pubsub.bus import Feed, Pipe
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.failover import belief, line
from esp_pubsub.failover.accept import Accept, Dropped, Outcome, Source
from esp_pubsub.failover.ballot import Contender
from esp_pubsub.failover.chains import chains_of
from esp_pubsub.failover.group import Group
from esp_pubsub.failover.ledger import Known, Ledger
from esp_pubsub.failover.line import Line, Position
from esp_pubsub.failover.membership import Event, Membership
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.failover.words import Beat, Word, differences
from esp_pubsub.notices import Missed
from esp_pubsub.publisher import Publisher
from esp_pubsub.sender import Sender
from esp_pubsub.subscriber import Subscriber
from esp_pubsub.wire.frame import BLOCK, CHAIN_AT, SEALED_AT, Frame, Sealed, parse
from tests.model import judges, worlds
from tests.model.explorer import Counterexample
from tests.model.group_scene import GroupScene
from tests.simulation import run as simulation
from tests.simulation.plan import Accident
from tests.unit.failover import test_covered, test_line_reads

Mutant = Callable[[pytest.MonkeyPatch], None]
IN_MODEL: list[Any] = []
IN_SIMULATION: list[Any] = []
SEEDS = 150


def in_model(world: str) -> Callable[[Mutant], Mutant]:
    """Enter a mutant that the model check must catch in this world."""

    def enter(mutant: Mutant) -> Mutant:
        IN_MODEL.append(pytest.param(mutant, world, id=mutant.__name__.replace("_", " ")))
        return mutant

    return enter


def in_simulation(**changes: Any) -> Callable[[Mutant], Mutant]:
    """Enter a mutant that the simulation must catch, with these changes to what its seeds draw."""

    def enter(mutant: Mutant) -> Mutant:
        IN_SIMULATION.append(pytest.param(mutant, changes, id=mutant.__name__.replace("_", " ")))
        return mutant

    return enter


@pytest.mark.parametrize(("mutant", "world"), IN_MODEL)
def test_the_model_check_catches(mutant: Mutant, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = next(scene for scene in worlds.scenes() if scene.name == world)
    mutant(monkeypatch)
    with pytest.raises(Counterexample):
        worlds.check(scene)


# accept rule


@in_model("log, another input, retention")
def no_link_check(patch: pytest.MonkeyPatch) -> None:
    def deliver_held(self: Accept, source: Source) -> Iterator[Outcome]:
        while (frame := source.hold.pop(source.last + 1, None)) is not None:
            source.last, source.chain = frame.id, frame.chain
            yield frame

    patch.setattr(Accept, "_deliver_held", deliver_held)


@in_model("log, strays of the last run")
def lower_run_accepted(patch: pytest.MonkeyPatch) -> None:
    receive = Accept._receive

    def lenient(self: Accept, frame: Frame, source: Source | None) -> Iterator[Outcome]:
        if source is not None and frame.run < source.run:
            frame = frame._replace(run=source.run)
        return receive(self, frame, source)

    patch.setattr(Accept, "_receive", lenient)


@in_model("log, both lead")
def doubles_delivered(patch: pytest.MonkeyPatch) -> None:
    block = Accept._block

    def twice(self: Accept, frame: Frame, source: Source) -> Iterator[Outcome]:
        return iter([frame]) if frame.id == source.last else block(self, frame, source)

    patch.setattr(Accept, "_block", twice)


@in_model("queues, both lead")
def hold_skipped_by_a_clock(patch: pytest.MonkeyPatch) -> None:
    block = Accept._block

    def impatient(self: Accept, frame: Frame, source: Source) -> Iterator[Outcome]:
        yield from block(self, frame, source)
        if len(source.hold) > 1:  # here the clock strikes
            yield from self._prove(source, min(source.hold) - 1)

    patch.setattr(Accept, "_block", impatient)


@in_model("queues, both lead")
def ids_prove_where_single_messages_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accept, "proven", lambda self, frame: frame.id - 1 if frame.kind == BLOCK else frame.settled)


@in_model("log, retention")
def missed_in_silence(patch: pytest.MonkeyPatch) -> None:
    prove = Accept._prove

    def silent(self: Accept, source: Source, proven: int) -> Iterator[Outcome]:
        return (outcome for outcome in prove(self, source, proven) if not isinstance(outcome, Missed))

    patch.setattr(Accept, "_prove", silent)


@in_model("queues, strays of the last run")
def old_hold_kept_in_a_new_run(patch: pytest.MonkeyPatch) -> None:
    begin = Accept._begin

    def hoarding(self: Accept, frame: Frame) -> Source:
        before = self.sources.get(frame.source)
        source = begin(self, frame)
        source.hold.update(before.hold if before is not None else {})
        return source

    patch.setattr(Accept, "_begin", hoarding)


@in_model("queues, late binding")
def newcomers_begin_at_the_first_frame(patch: pytest.MonkeyPatch) -> None:
    begin = Accept._begin

    def hasty(self: Accept, frame: Frame) -> Source:
        source = begin(self, frame)
        if source.joining and frame.kind == BLOCK:
            source.last, source.chain = frame.id - 1, None
        return source

    patch.setattr(Accept, "_begin", hasty)


# member and outbox


@in_model("queues")
def m_from_ids_where_single_messages_are_lost(patch: pytest.MonkeyPatch) -> None:
    follow = Line.follow

    def credulous(self: Line, frame: Frame) -> None:
        follow(self, frame)
        if frame.kind == BLOCK:
            self._advance(frame.id)

    patch.setattr(Line, "follow", credulous)


@in_model("queues, deaths")
def outbox_trimmed_by_ids_that_are_not_settled(patch: pytest.MonkeyPatch) -> None:
    follow = Line.follow

    def wasteful(self: Line, frame: Frame) -> None:
        follow(self, frame)
        self.outbox.settle(frame.id)

    patch.setattr(Line, "follow", wasteful)


@in_model("log, both lead")
def outbox_trimmed_by_one_too_many(patch: pytest.MonkeyPatch) -> None:
    settle = Outbox.settle
    patch.setattr(Outbox, "settle", lambda self, id: settle(self, id + 1))


@in_model("log, a member of the last run")
def beats_of_a_lower_run_count(patch: pytest.MonkeyPatch) -> None:
    heard = Line.heard
    patch.setattr(Line, "heard", lambda self, run, settled, *_, **__: heard(self, max(run, self.run), settled, None))


@in_model("queues")
def what_a_held_block_says_counts(patch: pytest.MonkeyPatch) -> None:
    follow = Line.follow

    def hasty(self: Line, frame: Frame) -> None:
        follow(self, frame)
        if any(source.hold for source in self._accept.sources.values()):
            self._advance(frame.id - 1)

    patch.setattr(Line, "follow", hasty)


@in_model("log, a newcomer in the middle")
def what_stands_between_two_ends_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(line, "_linked", lambda messages: chains_of([parse(data).chain for _, data in messages]))


# what is believed

FORGERIES: dict[str, Any] = {
    "kind": "log", "all_lead": False, "blocks": 40, "pace": (0.02, 0.03), "faults": 0.0,
    "accidents": tuple(
        Accident(0.1 + at / 30, what, 0, 0.0)
        for at, what in enumerate((
            "settled far ahead", "settled a little ahead", "another chain", "another setup", "a beat on a line",
        ) * 8)
    ),
}  # fmt: skip


@in_simulation(**FORGERIES)
def every_position_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(belief, "position", lambda *_, **__: True)


@in_simulation(**FORGERIES)
def every_setup_is_believed(patch: pytest.MonkeyPatch) -> None:
    compare = Membership._compare

    def credulous(self: Membership, said: Beat, now: float) -> bool:
        if self._hears and (differ := differences(self.setup, said.setup)) is not None:
            raise differ
        return compare(self, said, now)

    patch.setattr(Membership, "_compare", credulous)


@in_simulation(**FORGERIES)
def beats_prove_what_did_not_come(patch: pytest.MonkeyPatch) -> None:
    def credulous(self: Accept, frame: Frame, source: Source | None) -> Iterator[Outcome]:
        if source is not None:
            yield from self._prove(source, frame.settled)
        yield Dropped(frame, "beat")

    patch.setattr(Accept, "_beat", credulous)


# ledger


@in_model("group")
def state_newer_than_what_is_confirmed(patch: pytest.MonkeyPatch) -> None:
    delivered = Ledger.delivered

    def hasty(self: Ledger, frame: Frame) -> int:
        self.known[frame.source] = (frame.run, frame.id, frame.chain)
        return delivered(self, frame)

    patch.setattr(Ledger, "delivered", hasty)


@in_model("group")
def position_behind_what_is_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    confirm = Ledger.confirm

    def hasty(self: Ledger, serial: int) -> bool:
        last = self._arrived[-1] if self._arrived else self.done
        moved = confirm(self, serial)
        self.done = last
        return moved

    patch.setattr(Ledger, "confirm", hasty)


@in_model("group, log with holes")
def position_behind_a_held_frame(patch: pytest.MonkeyPatch) -> None:
    delivered = Ledger.delivered

    def late(self: Ledger, frame: Frame) -> int:
        self._undone.add(frame.position)  # only now, so that one that is held stops nothing
        return delivered(self, frame)

    patch.setattr(Ledger, "arrived", lambda self, position: self._arrived.append(position))
    patch.setattr(Ledger, "delivered", late)


@in_model("group, queue")
def acknowledged_before_the_state_is_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupScene, "state_first", False)


@in_model("group, queue")
def what_comes_again_is_let_go_at_once(patch: pytest.MonkeyPatch) -> None:
    dropped = Ledger.dropped
    patch.setattr(Ledger, "dropped", lambda self, position, *_: dropped(self, position))


@in_model("group, queue, beat")
def what_admits_a_block_is_let_go_at_once(patch: pytest.MonkeyPatch) -> None:
    dropped = Ledger.dropped
    patch.setattr(Ledger, "dropped", lambda self, position, frame=None, admits=0: dropped(self, position, frame))


@in_model("group, queue, beat")
def what_admits_a_block_is_let_go_before_that_is_stored(patch: pytest.MonkeyPatch) -> None:
    def unconfirmed(self: Ledger, source: int, run: int, id: int) -> bool:
        return any((block.source, block.run, block.id) == (source, run, id) for block in self._delivered)

    patch.setattr(Ledger, "_comes_again", unconfirmed)


RESTLESS_READERS: dict[str, Any] = {
    "kind": "log", "grouped": True, "subscribers": 1, "readers": 2, "restless": True, "accidents": (), "haste": 0.0,
    "blocks": 40, "pace": (0.05, 0.05), "calm_after": 2.5,
}  # fmt: skip


@in_simulation(**RESTLESS_READERS)
@in_model("group")
def what_was_read_before_is_taken_again(patch: pytest.MonkeyPatch) -> None:
    for module in (inbox, judges):
        patch.setattr(module, "not_read", lambda messages, read_to: messages)


@in_model("group, queue, three lives")
def what_is_held_survives_the_feed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accept, "redelivery", lambda self: None)


@in_model("group, queue, late")
def who_goes_on_from_a_state_joins_no_more(patch: pytest.MonkeyPatch) -> None:
    resume = Accept.resume

    def hasty(self: Accept, positions: Known) -> Any:
        for source in self.sources.values():
            source.joining = False
        return resume(self, positions)

    patch.setattr(Accept, "resume", hasty)


# sender, group, election, subscriber: in the simulation


@in_simulation(faults=0.1)
def a_pipe_goes_on_behind_what_a_dropped_one_was_sent(patch: pytest.MonkeyPatch) -> None:
    write = Sender._write
    sent: dict[int, int] = {}

    async def on(self: Sender, pipe: Pipe) -> None:
        self.sent = max(self.sent, sent.get(id(self), 0))
        try:
            await write(self, pipe)
        finally:
            sent[id(self)] = self.sent

    patch.setattr(Sender, "_write", on)


@in_simulation(faults=0.1)
def one_acknowledgement_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    count = Sender._count

    def all_of_it(self: Sender, confirmed: int) -> None:
        count(self, confirmed)
        self._acked(self.sent)

    patch.setattr(Sender, "_count", all_of_it)


@in_simulation(faults=0.1)
def acknowledgements_of_a_dropped_pipe_counted(patch: pytest.MonkeyPatch) -> None:
    one_pipe = Sender._one_pipe

    async def late(self: Sender) -> None:
        try:
            await one_pipe(self)
        except BusUnavailable:
            self._acked(max(self._outbox.settled, self.sent))
            raise

    patch.setattr(Sender, "_one_pipe", late)


@in_simulation(
    kind="queues", grouped=True, all_lead=False, deaths=True, faults=0.0, buffer=10, blocks=20, pace=(0.05, 0.001),
    accidents=(Accident(0.3, "kill", 0, 0.3),), late=0.31,
)  # fmt: skip
def no_beat_after_a_takeover(patch: pytest.MonkeyPatch) -> None:
    next_batch = Sender._next_batch

    def silent(self: Sender) -> list[Sealed]:
        self._carried = self._outbox.settled
        return next_batch(self)

    patch.setattr(Sender, "_next_batch", silent)


@in_simulation(kind="log")
def m_from_a_beats_last_id(patch: pytest.MonkeyPatch) -> None:
    beat = Membership.beat

    def boastful(self: Membership, *arguments: Any) -> Beat:
        said = beat(self, *arguments)
        return replace(said, positions=tuple(Position(each.given, each.given, None) for each in said.positions))

    patch.setattr(Membership, "beat", boastful)


@in_simulation(kind="log", all_lead=False)
def an_ineligible_member_campaigns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Line, "eligible", property(lambda self: True))


@in_simulation(kind="log", grouped=True)
def a_reader_goes_on_without_its_state(patch: pytest.MonkeyPatch) -> None:
    def without(self: Subscriber, feed: Feed) -> None:
        self._resumed = True

    patch.setattr(Subscriber, "_resume", without)


@in_simulation(**RESTLESS_READERS)
def a_reader_forgets_what_another_one_confirmed(patch: pytest.MonkeyPatch) -> None:
    resume = Subscriber._resume

    def without(self: Subscriber, feed: Feed) -> None:
        known = self._ledger.known if self._ledger is not None else {}
        resume(self, feed)
        if self._ledger is not None:
            self._ledger.known = known

    patch.setattr(Subscriber, "_resume", without)


@in_simulation(all_lead=False)
def a_standbys_block_is_covered_before_all_have_it(patch: pytest.MonkeyPatch) -> None:
    covered: Any = Line.covered
    patch.setattr(Line, "covered", property(lambda self: max(covered.fget(self), self.agreed)))


@in_simulation(
    all_lead=False, blocks=40, haste=0.0,
    accidents=tuple(
        Accident(0.3 + at * 0.05, what, who, 0.7)
        for at, (what, who) in enumerate([("stall", 0), ("hand over", 0), ("hand over", 1), ("hand over", 2)])
    ),
)  # fmt: skip
def a_hand_over_returns_when_leadership_ends(patch: pytest.MonkeyPatch) -> None:
    step = Group._step

    def hasty(self: Group, event: Event) -> None:
        led = self.role == "active"
        step(self, event)
        if led:
            self._hand_over.done()

    patch.setattr(Group, "_step", hasty)


@in_simulation(haste=0.3, buffer=3)
def an_inject_that_was_given_up_stays_in_the_line(patch: pytest.MonkeyPatch) -> None:
    async def wait_for_room(self: Publisher, size: int) -> None:
        turn = asyncio.Event()
        self._queue.append(turn)
        while self._queue[0] is not turn or not self._outbox.room(size):
            turn.clear()
            await turn.wait()
        self._queue.remove(turn)
        self._tell_room()

    patch.setattr(Publisher, "_wait_for_room", wait_for_room)


@in_simulation(**{**RESTLESS_READERS, "readers": 1, "haste": 0.5})
def a_confirm_that_was_given_up_counts_as_stored(patch: pytest.MonkeyPatch) -> None:
    store = Subscriber._store

    async def hopeful(self: Subscriber, ledger: Ledger) -> None:
        try:
            await store(self, ledger)
        except asyncio.CancelledError:
            self._unstored = False
            raise

    patch.setattr(Subscriber, "_store", hopeful)


@in_simulation(kind="log", all_lead=False, deaths=False, faults=0.0, accidents=(Accident(0.3, "freeze", 0, 0.8),))
def a_leader_does_not_step_down(patch: pytest.MonkeyPatch) -> None:
    hear = Contender.hear

    def stubborn(self: Contender, said: Word, *rest: Any, **more: Any) -> bool:
        before = self.term
        changed = hear(self, said, *rest, **more)
        self.term = self.term or before
        return changed

    patch.setattr(Contender, "hear", stubborn)


@in_simulation(kind="log", all_lead=False, deaths=False)
def nobody_claims_after_a_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Contender, "silence", lambda self: 1e6)


@pytest.mark.parametrize(("mutant", "changes"), IN_SIMULATION)
def test_the_simulation_catches(mutant: Mutant, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(simulation.Wrong):
        for seed in range(SEEDS):
            simulation.run(seed, **changes)


def test_there_are_more_than_twelve_mutants() -> None:
    assert len(IN_MODEL) + len(IN_SIMULATION) > 20


# a member alone: in the lives that other tests give it

IN_LIVES: list[Any] = []


def in_lives(live: Callable[..., None], **how: bool) -> Callable[[Mutant], Mutant]:
    """Enter a mutant that some of these lives must catch."""

    def enter(mutant: Mutant) -> Mutant:
        IN_LIVES.append(pytest.param(mutant, live, how, id=mutant.__name__.replace("_", " ")))
        return mutant

    return enter


@in_lives(test_covered.live, differs=True, suffix_only=False)
def covered_without_a_comparison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Line, "covered", property(lambda self: min(self.outbox.last, self.m)))


@in_lives(test_line_reads.live, damages=False)
def a_line_is_taken_by_its_ends(patch: pytest.MonkeyPatch) -> None:
    def unlinked(messages: Sequence[tuple[Any, bytes]]) -> "array[int] | None":
        chains = b"".join([data[CHAIN_AT:SEALED_AT] for _, data in messages])
        return chains_of(chains) if len(chains) == 4 * len(messages) else None

    patch.setattr(line, "_linked", unlinked)


@pytest.mark.parametrize(("mutant", "live", "how"), IN_LIVES)
def test_a_life_of_a_member_catches(
    mutant: Mutant, live: Callable[..., None], how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            live(seed, **how)
