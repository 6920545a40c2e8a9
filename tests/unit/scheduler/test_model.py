"""Whatever is asked, whoever restarts when: each occurrence once, and all members alike."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.scheduler.model import Scheduler
from esp_pubsub.scheduler.state import slot
from esp_pubsub.scheduler.windows import INPUTS, OUTPUTS
from esp_pubsub.testing import check_model
from tests.unit.scheduler.virtual_scheduler import SECOND, START, Virtual, moment

IDS = [f"e{n}" for n in range(12)]


class Expected:
    """What is to fire, by a few lines that know nothing of the scheduler."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[str, str], tuple[float, str]] = {}
        self.fired: Counter[tuple[float, str, str, str]] = Counter()

    def until(self, time: float) -> None:
        for (tenant, id), (at, payload) in list(self.waiting.items()):
            if at <= time:
                self.fired[at, tenant, id, payload] += 1
                del self.waiting[tenant, id]

    def upsert(self, now: float, tenant: str, id: str, at: float, payload: str) -> None:
        if at <= now:
            self.waiting.pop((tenant, id), None)
            self.fired[now, tenant, id, payload] += 1
        else:
            self.waiting[tenant, id] = at, payload


def run(seed: int, restarts: random.Random | None) -> tuple[Virtual, Expected]:
    """An hour of requests as they come, to a tenant of a window and one that is called by an unreliable worker."""
    dice, luck = random.Random(seed), random.Random(-seed)
    v = Virtual(lambda call: luck.choice([(200, "", 0.0), (500, "x", 0.0), (503, "", 2.0), None]), restarts)
    v.window_tenant("t")
    v.http_tenant("h", concurrency=3, rate=2, deadline=4, backlog_every=5, backlog_limit=100_000)
    v.command("cron", tenant="t", id="c", expression="0/7 * * * * ?")
    for overlap in ("skip", "one", "all"):
        v.command("cron", tenant="h", id=overlap, expression="0 * * * * ?", jitter=20, misfire="all", overlap=overlap)
    expected, time = Expected(), 0.0
    for n in range(250):
        time = round(time + dice.choice([0, 0, 0.001, 0.5, 3, 20]), 6)
        v.until(time)
        expected.until(time)
        tenant, id = dice.choice("th"), dice.choice(IDS)
        if dice.random() < 0.7:
            at = round(time + dice.choice([-5, 0, 0.000001, 0.001, 1, 10, 60]), 6)
            v.event(tenant, id, at, f"p{n}")
            expected.upsert(time, tenant, id, at, f"p{n}")
        elif tenant == "t":
            v.event(tenant, id, None, None, "REMOVE")
            expected.waiting.pop((tenant, id), None)
        else:
            v.command(dice.choice(["pause", "resume", "resume", "retry"]), tenant="h")
    v.worker = lambda call: (200, "", 0)
    v.command("resume", tenant="h")
    for overlap in ("skip", "one", "all"):
        v.command("remove cron", tenant="h", id=overlap, type="QUARTZ")
    v.until(time + 3_000)
    expected.until(time + 3_000)
    return v, expected


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_and_restarts_give_each_occurrence_exactly_once(seed: int) -> None:
    v, expected = run(seed, random.Random(seed))
    found = Counter(
        (row.seconds, row.values["tenant"], row.values["id"], json.loads(row.values["body"])["payload"])
        for row in v.rows["Fires"]
        if row.values["id"] != "c"
    )
    assert found == Counter({key: count for key, count in expected.fired.items() if key[1] == "t"})
    deliveries = Counter(row.values["delivery"] for row in v.rows["Fires"])
    assert set(deliveries.values()) == {1}
    crons = [row.values["eventTime"] for row in v.rows["Fires"] if row.values["id"] == "c"]
    assert crons == [
        at for at in range(START + SECOND, START + round(v.time * SECOND) + 1, SECOND) if at // SECOND % 60 % 7 == 0
    ]


@pytest.mark.parametrize("seed", range(6))
def test_each_try_of_a_call_is_emitted_once_and_each_delivery_ends_once(seed: int) -> None:
    v, _ = run(seed, random.Random(seed))
    tries = Counter((row.values["delivery"], row.values["attempt"]) for row in v.rows["Calls"])
    assert set(tries.values()) == {1}
    for delivery, last in Counter(delivery for delivery, _ in tries).items():
        assert {attempt for other, attempt in tries if other == delivery} == set(range(1, last + 1))
    assert v.ask("counts")["deliveries"] == 0
    counts = [(each["calling"], each["held"]) for each in v.ask("tenants")["tenants"].values()]
    assert counts == [(0, 0), (0, 0)]
    assert v.rows["Dead"] == []


@pytest.mark.parametrize("seed", range(6))
def test_a_member_that_restarts_emits_the_same_rows_at_the_same_steps(seed: int) -> None:
    whole, _ = run(seed, None)
    broken, _ = run(seed, random.Random(seed + 100))
    assert whole.rows == broken.rows
    assert whole._trial.steps.chain == broken._trial.steps.chain
    assert {name: getattr(whole.model, name) for name in ("events", "crons", "deliveries", "tenants", "serial")} == {
        name: getattr(broken.model, name) for name in ("events", "crons", "deliveries", "tenants", "serial")
    }


def test_two_processes_compute_the_same() -> None:
    dice = random.Random(1)
    commands = [
        {"do": "tenant", "tenant": "t", "type": "MESSAGING", "props": {"window": "Fires"}},
        {"do": "tenant", "tenant": "h", "type": "HTTP", "props": {"url": "http://x"}},
        {"do": "cron", "tenant": "h", "id": "c", "expression": "0/3 * * * * ?", "jitter": 2},
    ]
    given: list[Any] = [START, *(("Commands", [("c", json.dumps(command))]) for command in commands)]
    for n in range(100):
        given.append(START + n * SECOND)
        drawn = [
            (dice.choice("th"), dice.choice(IDS), dice.randint(-1, 5), dice.choice([None, "REMOVE"])) for _ in range(4)
        ]
        given.append(
            ("Events", [(tenant, id, moment(n + at), "p", mode, None, None) for tenant, id, at, mode in drawn])
        )
        given.append(("Outcomes", [("h/c/x", 1, 200, "", 0.0)]))
    assert check_model("esp_pubsub.scheduler.model:Scheduler", given) > 150


def test_the_active_member_dies_just_before_an_event_is_due() -> None:
    v = Virtual()
    v.window_tenant()
    v.event("t", "1", 60)
    v.until(59.95)
    v.restart()
    v.jump(60.4)
    v.until(100)
    assert v.fired() == [(60.4, "1")]


def test_a_clock_that_jumps_an_hour_fires_nothing_twice() -> None:
    v = Virtual()
    v.window_tenant()
    v.schedule(*[("t", str(n), 60 * n) for n in range(1, 120)])
    v.until(300)
    v.jump(3_900)
    v.until(8_000)
    assert sorted(int(id) for _, id in v.fired()) == list(range(1, 120))


def test_whatever_comes_in_is_answered_and_stops_nothing() -> None:
    dice = random.Random(5)
    v = Virtual(None, random.Random(6), share=0.01)
    v.window_tenant()
    v.http_tenant()
    texts = ["t", "h", "1", "\x00", "\x1f", "é" * 300, moment(5), moment(-5), "9" * 40, "T", "2026-11-20", ""]
    texts += ["UPSERT", "REMOVE", "DRYRUN", "PAYLOAD_ONLY"]
    for n in range(400):
        rows = [
            (dice.choice(texts), dice.choice(texts), *(dice.choice([*texts, None]) for _ in range(4)), number)
            for number in (None, 0, dice.choice([-1, 1 << 62]))
        ]
        assert len(v.schedule(*rows)) == 3
        call = {"delivery": dice.choice(texts), "attempt": dice.randint(-3, 3)}
        v.outcome(call, dice.randint(-1, 999), "x" * 5_000, dice.choice([0, -1, 1e308]))
        command = dice.choice(["cron", "tenant", "pause", "retry", "remove cron"])
        assert v.raw(json.dumps({"do": command, dice.choice(["tenant", "id"]): dice.choice([None, 1, "t", []])}))[
            "code"
        ]
        if n % 20 == 0:
            v.until(v.time + 1)


def test_a_body_that_cannot_be_read_is_answered_and_stops_nothing() -> None:
    class Unreadable:
        source, run, id = 7, 0, 9

        def rows(self) -> Any:
            raise esp.BadBody("it is no body", id=9, position=None)

    v = Virtual()
    emitted: list[Any] = []

    class Out:
        now = START

        def emit(self, window: str, rows: Any) -> None:
            emitted.extend((window, *row) for row in rows)

        def cancel(self, key: str) -> None: ...

    v.model.step("Events", Unreadable(), Out())  # type: ignore[arg-type]
    assert emitted[0][:4] == ("Answers", "0000000000000007:0:9:0", 400, "REJECTED")


def test_slots_never_change() -> None:
    assert [slot("t", "1"), slot("TenantA/ProgramB/EnvC", "order-1"), slot("", "")] == [745, 978, 246]
    assert len({slot("t", str(n)) for n in range(20_000)}) == 1_024


def test_the_versions_of_model_and_time_zones_are_compared_between_members() -> None:
    from esp_pubsub.engine.model import declared

    found, _ = declared(Scheduler())
    assert found.version.startswith("scheduler/1 tzdata/20")
    assert (list(found.inputs), list(found.outputs)) == (list(INPUTS), list(OUTPUTS))
