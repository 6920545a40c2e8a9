"""The simulation: some hundred seeds here, ten thousand by `make simulate SEEDS=10000`."""

import asyncio
import itertools
import random
import re
from collections import Counter

import pytest

from esp_pubsub.testing._virtual import Stuck, VirtualLoop
from tests.simulation import run as simulation
from tests.simulation.forger import FORGED
from tests.simulation.plan import ENGINES, Accident, draw, of_engines, of_forgers
from tests.simulation.run import Wrong, run

SEEDS = 240
PARTS = 6


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_every_subscriber_gets_every_block_once_and_in_order(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        run(seed)


def test_with_every_member_active_all_the_time_the_sequence_is_still_exact() -> None:
    for seed in range(1_000, 1_040):
        run(seed, all_lead=True)


def test_seeds_draw_every_kind_of_bus_and_every_accident() -> None:
    plans = [draw(seed) for seed in range(SEEDS)]
    assert {plan.kind for plan in plans} == {"log", "holes", "queues"}
    drawn = Counter(accident.what for plan in plans for accident in plan.accidents)
    assert len(drawn) == 12
    assert min(drawn.values()) > 10
    assert any(plan.all_lead for plan in plans)
    assert any(plan.late is not None for plan in plans)
    engines = [plan for plan in plans if plan.engine]
    assert 0.25 < len(engines) / SEEDS < 0.45
    assert {(plan.kind, plan.inputs, plan.timers) for plan in engines} == set(
        itertools.product(("log", "holes", "queues"), (1, 2), (False, True))
    )
    assert {plan.input_kind for plan in engines} == {None, "log", "holes", "queues"}
    assert {what.what for plan in engines for what in of_engines(plan)} == {*ENGINES, "switch"}


def test_seeds_draw_everything_that_can_be_forged() -> None:
    forged = Counter(accident.what for seed in range(SEEDS) for accident in of_forgers(draw(seed)))
    assert set(forged) == FORGED.keys()


@pytest.mark.parametrize("kind", ["log", "holes", "queues"])
@pytest.mark.parametrize("what", FORGED)
def test_what_somebody_forges_who_may_write_there_ends_nobody_and_loses_nothing(what: str, kind: str) -> None:
    forged = tuple(Accident(0.1 + at / 7, what, 0, 0.0) for at in range(8))
    for seed in range(4):
        run(seed, kind=kind, accidents=forged, blocks=40, pace=(0.02, 0.03), all_lead=False, grouped=True)


@pytest.mark.parametrize("what", ["all are to stop", "another time", "another version", "a challenge", "a standby"])
def test_what_somebody_forges_who_may_write_there_ends_no_engine(what: str) -> None:
    forged = tuple(Accident(0.3 + at / 3, what, 0, 0.0) for at in range(8))
    for seed in range(6):
        run(seed, engine=True, kind="log", accidents=forged)


def test_a_seed_is_one_history() -> None:
    def history() -> list[str]:
        return [re.sub(r"vm:\d+|at=[\d.]+", "", line) for line in run(3).loop.told]

    assert history() == history() != [re.sub(r"vm:\d+|at=[\d.]+", "", line) for line in run(4).loop.told]


def test_a_failure_names_its_seed_and_is_replayed_with_its_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulation, "PATIENCE", -1.0)
    with pytest.raises(Wrong, match="seed 5: after"):
        run(5)
    assert simulation.main(["--first", "5", "--seeds", "3"]) == 1
    assert "--seed 5" in capsys.readouterr().out
    assert simulation.main(["--seed", "5"]) == 1
    told = capsys.readouterr().out
    assert "A1 starts" in told
    assert "seed 5: after" in told.splitlines()[-1]


def test_main_prints_seeds_per_second_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulation.main(["--seeds", "2"]) == 0
    assert re.match(r"2 seeds, 0 failed, \d+ seeds/s, \d+ virtual seconds", capsys.readouterr().out)


# the loop


def make_loop(seed: int = 1) -> VirtualLoop:
    return VirtualLoop(random.Random(seed))


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> float:
        await asyncio.sleep(500)
        return asyncio.get_running_loop().time()

    assert make_loop().run(main(), 1_000) == 500


def test_a_loop_where_nothing_more_can_happen_is_stuck() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    loop = make_loop()
    with pytest.raises(Stuck):
        loop.run(main(), 1_000)
    loop.end()
    assert not loop.problems


def test_within_a_process_callbacks_keep_their_order_and_between_processes_they_are_drawn() -> None:
    def order(seed: int) -> list[str]:
        found: list[str] = []

        async def steps(name: str) -> None:
            for step in range(5):
                found.append(f"{name}{step}")
                await asyncio.sleep(0)

        async def main() -> None:
            await asyncio.gather(*(loop.spawn(name, steps(name)) for name in "xy"))

        loop = make_loop(seed)
        loop.run(main(), 1_000)
        return found

    orders = {tuple(order(seed)) for seed in range(20)}
    assert len(orders) > 5
    assert order(1) == order(1)
    for one in orders:
        assert [entry for entry in one if entry[0] == "x"] == [f"x{step}" for step in range(5)]


def test_a_frozen_process_does_nothing_until_it_goes_on() -> None:
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(1)
            ticks.append(loop.time())

    async def main() -> None:
        loop.spawn("x", tick())
        await asyncio.sleep(2.5)
        loop.frozen.add("x")
        await asyncio.sleep(3)
        loop.frozen.discard("x")
        await asyncio.sleep(1.2)

    loop = make_loop()
    loop.run(main(), 1_000)
    loop.end()
    assert ticks == [1, 2, 5.5, 6.5]
