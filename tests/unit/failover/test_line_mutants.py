"""Deliberate faults in what a member does over two lines. Each must be caught, as those in test_mutants.py are.

Those of the first table are caught by the model check, in the world that is named, those of the second by the
simulation, within so many seeds and with these changes to what they draw.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from esp_pubsub.failover.group import Group
from esp_pubsub.failover.line import Line, Position
from esp_pubsub.failover.membership import Activity, Membership
from esp_pubsub.failover.words import Beat
from tests.model import worlds
from tests.model.explorer import Counterexample
from tests.simulation.plan import Accident
from tests.simulation.run import Wrong, run

Mutant = Callable[[pytest.MonkeyPatch], None]
SEEDS = 200


def room_in_a_full_line_is_waited_for_also_behind_the_bus(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "room", lambda self, line, size: line.outbox.room(size))


def eligible_in_one_line_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "eligible", property(lambda self: any(line.eligible for line in self.lines)))


def a_leader_that_cannot_read_its_input_leads_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_is_hindered", lambda self, now: False)


def a_hand_over_waits_for_the_first_line(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_is_on_bus", lambda self, ids: ids is not None and self.lines[0].m >= ids[0])


def a_hand_over_by_another_member_waits_for_the_first_line(patch: pytest.MonkeyPatch) -> None:
    def was_handed_over(self: Membership) -> bool:
        ids = self._hand_over_at
        return ids is not None and self.state != "active" and self.lines[0].delivered >= ids[0]

    patch.setattr(Membership, "was_handed_over", property(was_handed_over))


def beats_carry(patch: pytest.MonkeyPatch, change: Callable[[tuple[Position, ...]], tuple[Position, ...]]) -> None:
    beat = Membership.beat

    def changed(self: Membership, *arguments: Any) -> Beat:
        said = beat(self, *arguments)
        return replace(said, positions=change(said.positions))

    patch.setattr(Membership, "beat", changed)


def beats_carry_the_first_position_for_each_line(patch: pytest.MonkeyPatch) -> None:
    beats_carry(patch, lambda positions: (positions[0],) * len(positions))


def beats_carry_the_positions_swapped(patch: pytest.MonkeyPatch) -> None:
    beats_carry(patch, lambda positions: positions[::-1])


def beats_carry_the_first_position_only(patch: pytest.MonkeyPatch) -> None:
    beats_carry(patch, lambda positions: positions[:1])


def a_second_line_that_stalls_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    stalls = Membership._stalls

    def of_the_first(self: Membership, now: float) -> bool:
        lines: list[Line] = list(self.lines)
        self.lines = lines[:1]
        try:
            return stalls(self, now)
        finally:
            self.lines = lines

    patch.setattr(Membership, "_stalls", of_the_first)


def a_standby_follows_the_first_line_only(patch: pytest.MonkeyPatch) -> None:
    activity = Group._activity

    async def follow_one(self: Group, what: Activity) -> None:
        if what == "follow":
            await self._followings[0].run()
        await activity(self, what)

    patch.setattr(Group, "_activity", follow_one)


def acknowledgements_count_for_the_first_line(patch: pytest.MonkeyPatch) -> None:
    acked = Group.acked
    patch.setattr(Group, "acked", lambda self, line, id: acked(self, self.membership.lines[0], id))


IN_MODEL: list[tuple[Mutant, str]] = [
    (room_in_a_full_line_is_waited_for_also_behind_the_bus, "two lines, queues, deaths"),
    (eligible_in_one_line_is_enough, "two lines, queues, a short input"),
    (a_hand_over_waits_for_the_first_line, "two lines, queues, a hand-over"),
    (a_hand_over_by_another_member_waits_for_the_first_line, "two lines, queues, a hand-over"),
    (beats_carry_the_first_position_for_each_line, "two lines, queues, deaths"),
    (beats_carry_the_positions_swapped, "two lines, queues, deaths"),
    (a_second_line_that_stalls_is_not_seen, "two lines, a line is cut"),
    (a_leader_that_cannot_read_its_input_leads_on, "two lines, a leader that hears no more"),
]  # fmt: skip


@pytest.mark.parametrize(("mutant", "world"), IN_MODEL)
def test_the_model_check_catches(mutant: Mutant, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = next(scene for scene in worlds.scenes() if scene.name == world)
    mutant(monkeypatch)
    with pytest.raises(Counterexample):
        worlds.check(scene)


QUIET: dict[str, Any] = {
    "input_kind": None, "snapshots": 0.0, "random_model": False, "all_lead": False, "faults": 0.0, "haste": 0.0
}  # fmt: skip
PLAIN: dict[str, Any] = {**QUIET, "blocks": 40, "kind": "log"}
HAND_OVERS = tuple(
    Accident(0.3 + at * 0.05, what, who, 0.7)
    for at, (what, who) in enumerate([("stall", 0), ("hand over", 0), ("hand over", 1), ("hand over", 2)])
)
IN_SIMULATION: list[tuple[Mutant, dict[str, Any]]] = [
    (beats_carry_the_first_position_only, {}),
    (beats_carry_the_positions_swapped, {}),
    (a_standby_follows_the_first_line_only, {}),
    (acknowledgements_count_for_the_first_line, {}),
    (a_hand_over_waits_for_the_first_line, {**PLAIN, "accidents": HAND_OVERS}),
    (a_hand_over_by_another_member_waits_for_the_first_line, {**QUIET, "blocks": 40, "accidents": HAND_OVERS}),
    (a_second_line_that_stalls_is_not_seen, {**QUIET, "accidents": (Accident(0.3, "cut a line", 2, 1_000.0),)}),
]


@pytest.mark.parametrize(("mutant", "changes"), IN_SIMULATION)
def test_the_simulation_catches(mutant: Mutant, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Wrong):
        for seed in range(SEEDS):
            run(seed, engine=True, **changes)


@pytest.mark.parametrize("changes", [QUIET | changes for _, changes in IN_SIMULATION[-2:]])
def test_the_real_machine_passes_what_is_put_in_the_way_of_mutants(changes: dict[str, Any]) -> None:
    for seed in range(20):
        run(seed, engine=True, **changes)
