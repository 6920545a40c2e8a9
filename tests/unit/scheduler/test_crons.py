"""Crons of tenants: set, described, fired, paused, late, overlapping, logged. In virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from esp_pubsub.scheduler import crons
from tests.unit.scheduler.virtual_scheduler import SECOND, START, Virtual


@pytest.fixture
def v() -> Virtual:
    made = Virtual()
    made.window_tenant()
    return made


def put(v: Virtual, expression: str = "*/5 * * * * ? *", **fields: Any) -> dict[str, Any]:
    answer = v.command("cron", **{"tenant": "t", "id": "c", "expression": expression} | fields)
    assert answer["code"] == 200, answer
    body: dict[str, Any] = answer["body"]
    return body


def times(v: Virtual, id: str = "c") -> list[float]:
    return [seconds for seconds, fired in v.fired() if fired == id]


def occurrences(v: Virtual, window: str = "Fires") -> list[str]:
    return [row.values["eventId"][-9:-1] for row in v.rows[window]]


def test_a_cron_is_described_and_its_next_five_times_are_told(v: Virtual) -> None:
    body = put(v)
    assert body["description"] == "every 5 seconds"
    assert [at[-9:-1] for at in body["next"]] == ["12:00:05", "12:00:10", "12:00:15", "12:00:20", "12:00:25"]
    assert (body["cron"]["id"], body["cron"]["type"], body["cron"]["state"]) == ("c", "QUARTZ", "active")


def test_a_cron_fires_at_each_of_its_times_and_delivers_its_expression_or_payload(v: Virtual) -> None:
    put(v)
    put(v, "0 0/1 * * * ?", id="d", payload="mine")
    v.until(60)
    assert times(v) == [5.0 * n for n in range(1, 13)]
    (found,) = [row.values["body"] for row in v.rows["Fires"] if row.values["id"] == "d"]
    assert '"payload":"mine"' in found
    assert '"payload":"*/5 * * * * ? *"' in v.rows["Fires"][0].values["body"]
    assert v.rows["Fires"][0].values["eventId"] == "QUARTZ/2026-11-20T12:00:05Z"


@pytest.mark.parametrize(
    ("type", "expression"), [("UNIX", "* * * * *"), ("SPRING", "0 * * * * *"), ("CRON4J", "*/1 * * * *")]
)
def test_each_dialect_fires(v: Virtual, type: str, expression: str) -> None:
    put(v, expression, type=type)
    v.until(180)
    assert times(v) == [60, 120, 180]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tenant": "nobody"}, "is not known"),
        ({"id": ""}, "id is a text"),
        ({"type": "AT"}, "no cron dialect 'AT'"),
        ({"expression": "every day"}, "6 or 7 fields"),
        ({"expression": "0 0 0 30 2 ?"}, "never due"),
        ({"expression": "0 0 0 1 1 ? 2020"}, "due no more"),
        ({"zone": "Mars/Olympus"}, "no time zone"),
        ({"gap": "maybe"}, "Invalid enum value 'maybe'"),
        ({"misfire": "never"}, "Invalid enum value"),
        ({"overlap": "two"}, "Invalid enum value"),
        ({"most": 0}, "most from 1"),
        ({"window": -1}, "window is up to"),
        ({"jitter": -1}, "jitter up to"),
        ({"logGranularity": "EONS"}, "logGranularity is one of"),
        ({"retention": 0}, "retention is from 1"),
        ({"payload": "p" * 70_000}, "at most 65536"),
        ({"color": "red"}, "unknown field `color`"),
        ({"version": 7}, "the version is 0, not 7"),
    ],
)
def test_a_cron_that_cannot_be_is_refused_with_its_reason(v: Virtual, fields: dict[str, Any], says: str) -> None:
    asked = {"tenant": "t", "id": "c", "expression": "0 * * * * ?"} | fields
    answer = v.command("cron", **asked)
    assert answer["status"] == "REJECTED"
    assert answer["code"] == (412 if "version" in fields else 400)
    assert says in answer["message"]
    assert v.ask("counts")["crons"] == 0


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "7", "null", '{"do": "dance"}', '{"do": 7}', "[" * 100_000, '{"do": "cron"}']
)
def test_what_is_no_command_is_refused(v: Virtual, body: str) -> None:
    answer = v.raw(body)
    assert (answer["code"], answer["status"]) == (400, "REJECTED")


def test_a_cron_is_paused_resumed_and_removed(v: Virtual) -> None:
    put(v, misfire="skip")
    v.until(11)
    named = {"tenant": "t", "id": "c", "type": "QUARTZ"}
    assert v.command("pause cron", **named)["body"]["cron"]["state"] == "paused"
    v.until(33)
    v.command("resume cron", **named)
    v.until(41)
    assert times(v) == [5, 10, 35, 40]
    assert v.command("remove cron", **named)["body"] == {"removed": ["QUARTZ"]}
    assert v.command("remove cron", **named)["body"] == {"removed": []}
    v.until(61)
    assert times(v) == [5, 10, 35, 40]
    assert v.command("pause cron", **named)["code"] == 404


def test_crons_of_a_tenant_that_is_paused_follow_their_misfire_policy_when_it_is_resumed(v: Virtual) -> None:
    put(v, "0/10 * * * * ?", id="skip", misfire="skip")
    put(v, "0/10 * * * * ?", id="latest", misfire="latest")
    put(v, "0/10 * * * * ?", id="all", misfire="all", most=2)
    v.command("pause", tenant="t")
    v.until(45)
    assert v.fired() == []
    v.command("resume", tenant="t")
    v.until(50)
    assert (times(v, "skip"), times(v, "latest"), times(v, "all")) == ([50], [45, 50], [45, 45, 50])


@pytest.mark.parametrize(
    ("misfire", "expected"),
    [("skip", ["12:01:00", "12:12:00"]), ("latest", ["12:01:00", "12:11:00", "12:12:00"]),
     ("all", ["12:01:00", "12:09:00", "12:10:00", "12:11:00", "12:12:00"])],
)  # fmt: skip
def test_ten_minutes_in_which_nothing_ran(v: Virtual, misfire: str, expected: list[str]) -> None:
    put(v, "0 * * * * ?", misfire=misfire, window=180, most=10)
    v.until(60)
    v.restart()
    v.jump(11 * 60 + 30)
    v.until(12 * 60)
    assert occurrences(v) == expected
    (cron,) = v.ask("crons", tenant="t")["crons"]
    assert cron["cron"]["missed"] == 12 - len(expected)


def test_a_takeover_of_half_a_second_loses_no_time_of_a_cron_of_each_second(v: Virtual) -> None:
    put(v, "* * * * * ?", misfire="skip")
    v.until(2.9)
    v.restart()
    v.jump(3.5)
    v.until(5)
    assert times(v) == [1, 2, 3.5, 4, 5]


@pytest.mark.parametrize(
    ("overlap", "called"),
    [
        ("skip", {10: "12:00:10", 40: "12:00:40"}),
        ("one", {10: "12:00:10", 35: "12:00:20"}),
        ("all", {10: "12:00:10", 20: "12:00:20", 30: "12:00:30", 40: "12:00:40"}),
    ],
)
def test_a_time_that_comes_while_the_last_one_is_delivered(overlap: str, called: dict[float, str]) -> None:
    v = Virtual()
    v.http_tenant("t", deadline=1_000)
    put(v, "0/10 * * * * ?", overlap=overlap)
    v.until(35)
    v.outcome(v.rows["Calls"][0].values, 200)
    v.until(40)
    assert {row.seconds: row.values["eventId"][-9:-1] for row in v.rows["Calls"]} == called


def test_a_cron_in_error_does_not_keep_its_later_times_from_firing() -> None:
    v = Virtual(lambda call: (500, "down", 0))
    v.http_tenant("t", retries=0, backlog_every=3_600)
    put(v, "0/10 * * * * ?", overlap="skip")
    v.until(30)
    assert [row.seconds for row in v.rows["Calls"]] == [10, 20, 30]


def test_jitter_makes_a_cron_late_and_never_early_and_keeps_each_time(v: Virtual) -> None:
    for n in range(20):
        put(v, "0/10 * * * * ?", id=f"c{n}", jitter=30, misfire="skip")
    v.until(130)
    late: dict[str, set[float]] = {}
    for row in v.rows["Fires"]:
        due = (row.values["eventTime"] - START) / SECOND
        late.setdefault(row.values["id"], set()).add(round(row.seconds - due, 6))
    assert all(len(each) == 1 for each in late.values())
    shifts = [seconds for each in late.values() for seconds in each]
    assert len(set(shifts)) == 20
    assert all(0 <= seconds < 30 for seconds in shifts)
    for id, (shift,) in late.items():
        assert times(v, id) == [pytest.approx(10 * n + shift) for n in range(1, int((130 - shift) // 10) + 1)]


def test_clocks_that_change_go_through_the_model() -> None:
    v = Virtual()
    v.window_tenant()
    body = put(v, "0 30 2 29 3 ?", zone="Europe/Berlin")
    assert body["next"][0] == "2027-03-29T00:30:00Z"
    assert put(v, "0 30 2 28 3 ?", zone="Europe/Berlin", id="d")["next"][0] == "2027-03-28T01:00:00Z"
    assert put(v, "0 30 2 28 3 ?", zone="Europe/Berlin", id="e", gap="skip")["next"][0] == "2028-03-28T00:30:00Z"


def test_a_cron_that_cannot_be_computed_stops_itself_and_no_other(v: Virtual, monkeypatch: pytest.MonkeyPatch) -> None:
    put(v)
    put(v, id="ill")
    real = crons.evaluator

    def ill(entry: Any) -> Any:
        if entry.id == "ill":
            raise ZeroDivisionError("a fault of ours")
        return real(entry)

    monkeypatch.setattr(crons, "evaluator", ill)
    v.until(10)
    assert (times(v), times(v, "ill")) == ([5, 10], [])
    states = {each["cron"]["id"]: each["cron"] for each in v.ask("crons", tenant="t", id="c")["crons"]}
    assert states["c"]["state"] == "active"
    assert v.model.crons["t\x1fill\x1fQUARTZ"].state == "stopped"
    assert v.model.crons["t\x1fill\x1fQUARTZ"].error == "ZeroDivisionError: a fault of ours"
    monkeypatch.undo()
    v.command("resume cron", tenant="t", id="ill", type="QUARTZ")
    v.until(15)
    assert times(v, "ill") == [15]


def test_a_cron_whose_years_are_over_ends(v: Virtual) -> None:
    put(v, "0 0 0 1 1 ? 2027")
    v.until(60 * 86_400)
    assert len(times(v)) == 1
    (cron,) = v.ask("crons", tenant="t")["crons"]
    assert (cron["cron"]["state"], cron["next"]) == ("ended", [])


def test_a_cron_is_triggered_by_hand_once_more(v: Virtual) -> None:
    put(v)
    v.command("trigger cron", tenant="t", id="c", type="QUARTZ")
    v.command("trigger cron", tenant="t", id="c", type="QUARTZ")
    v.until(5)
    assert times(v) == [0, 0, 5]
    assert len({row.values["delivery"] for row in v.rows["Fires"]}) == 3


def test_the_event_log_has_each_time_by_its_granularity_as_long_as_its_retention() -> None:
    v = Virtual(lambda call: (500, "down", 0) if call["eventId"].endswith("12:02:10Z") else (200, "", 0))
    v.http_tenant("t", retries=0, backlog_limit=0)
    put(v, "0/10 * * * * ?", logGranularity="MINUTES", retention=2, retentionUnits="MINUTES")
    v.until(200)
    log = v.ask("log", tenant="t", id="c", type="QUARTZ")["log"]
    assert list(log) == ["2026-11-20T12:01", "2026-11-20T12:02", "2026-11-20T12:03"]
    assert log["2026-11-20T12:02"][1] == {"time": "2026-11-20T12:02:10Z", "status": "ERROR", "error": "down"}
    assert len(log["2026-11-20T12:01"]) == 3
    assert {each["status"] for each in log["2026-11-20T12:03"]} == {"PROCESSED"}


def test_a_time_that_is_tried_in_vain_again_and_again_is_logged_once() -> None:
    v = Virtual(lambda call: (500, "down", 0))
    v.http_tenant("t", retries=0, backlog_every=5, backlog_limit=30)
    put(v, "0 * * * * ?", logGranularity="DAYS", overlap="skip")
    v.until(170)
    assert [each["time"][-9:-1] for each in v.ask("log", tenant="t", id="c", type="QUARTZ")["log"]["2026-11-20"]] == [
        "12:01:00", "12:02:00",
    ]  # fmt: skip
    assert len(v.rows["Dead"]) == 2


def test_without_a_granularity_nothing_is_logged(v: Virtual) -> None:
    put(v)
    v.until(60)
    assert v.ask("log", tenant="t", id="c", type="QUARTZ") == {"log": {}}
    assert v.ask("log", tenant="t", id="d", type="QUARTZ")["code"] == 404


def test_crons_of_one_id_have_several_types_and_are_listed_and_removed_together(v: Virtual) -> None:
    put(v)
    put(v, "* * * * *", type="UNIX")
    put(v, "* * * * *", type="UNIX", id="d")
    found = v.ask("crons", tenant="t", id="c")["crons"]
    assert [each["cron"]["type"] for each in found] == ["QUARTZ", "UNIX"]
    page = v.ask("crons", tenant="t", limit=2)
    assert len(page["crons"]) == 2
    assert len(v.ask("crons", tenant="t", limit=2, cursor=page["cursor"])["crons"]) == 1
    assert v.command("remove cron", tenant="t", id="c", type="*")["body"] == {"removed": ["QUARTZ", "UNIX"]}
    assert len(v.ask("crons", tenant="t")["crons"]) == 1


def test_a_cron_that_is_set_again_knows_what_of_the_old_one_is_still_being_delivered() -> None:
    v = Virtual()
    v.http_tenant("t", deadline=1_000)
    put(v, "0/10 * * * * ?", overlap="skip")
    v.until(10)
    put(v, "0/5 * * * * ?", overlap="skip")
    v.until(20)
    v.outcome(v.rows["Calls"][0].values, 200)
    v.until(25)
    assert [row.seconds for row in v.rows["Calls"]] == [10, 25]


def test_a_tenant_has_so_many_crons_and_no_more(v: Virtual) -> None:
    v.window_tenant("few", crons=1)
    put(v, tenant="few")
    assert v.command("cron", tenant="few", id="d", expression="* * * * * ?")["code"] == 429
    put(v, tenant="few")
    v.command("remove cron", tenant="few", id="c", type="*")
    put(v, tenant="few", id="d")


def test_a_cron_that_is_set_again_takes_the_place_of_the_old_one(v: Virtual) -> None:
    first = put(v)
    v.until(7)
    put(v, "0/30 * * * * ?", version=first["cron"]["version"])
    v.until(60)
    assert times(v) == [5, 30, 60]
