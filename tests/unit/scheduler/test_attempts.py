"""Deliveries to tenants that are called: tries, deadlines, backlog, dead letters, limits. In virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scheduler.virtual_scheduler import Virtual


def answering(code: int, text: str = "", retry_after: float = 0) -> Any:
    return lambda call: (code, text, retry_after)


def calls(v: Virtual, tenant: str = "h") -> list[float]:
    return [row.seconds for row in v.rows["Calls"] if row.values["tenant"] == tenant]


def a_call(worker: Any = None, **limits: Any) -> Virtual:
    """An event of an HTTP tenant is due after a minute."""
    v = Virtual(worker)
    v.http_tenant(**limits)
    v.event("h", "1", 60, "p")
    v.until(60)
    return v


def test_a_call_that_succeeds_is_made_once_and_the_event_is_processed() -> None:
    v = a_call(answering(200))
    v.until(1_000)
    assert calls(v) == [60]
    assert v.status("h", "1") is None or v.status("h", "1") == "PROCESSED"
    (row,) = v.rows["Calls"]
    assert (row.values["type"], row.values["attempt"], row.values["props"]) == (
        "HTTP", 1, '{"url":"http://example.org/","headers":{"a":"b"}}',
    )  # fmt: skip


def test_500_is_tried_four_times_at_0_1_3_and_7_seconds_and_is_an_error_then() -> None:
    v = a_call(answering(500, "down"))
    v.until(68)
    assert calls(v) == [60, 61, 63, 67]
    assert v.status("h", "1") == "ERROR"
    (backlog,) = v.ask("backlog", tenant="h")["backlog"]
    assert (backlog["tries"], backlog["code"], backlog["error"]) == (4, 500, "down")


def test_the_backlog_is_tried_again_until_its_limit_and_is_a_dead_letter_then() -> None:
    v = a_call(answering(500, "down"), backlog_limit=200)
    v.until(1_000)
    assert calls(v) == [60, 61, 63, 67, 127, 187, 247]
    (dead,) = v.rows["Dead"]
    assert (dead.seconds, dead.values["attempt"], dead.values["code"], dead.values["error"]) == (247, 7, 500, "down")
    assert v.ask("backlog", tenant="h")["backlog"] == []
    assert v.status("h", "1") is None or v.status("h", "1") == "ERROR"


def test_a_backlog_that_succeeds_later_is_processed() -> None:
    v = a_call(answering(503))
    v.until(100)
    v.worker = answering(204)
    v.until(130)
    assert calls(v)[4:] == [127]
    assert v.status("h", "1") == "PROCESSED"


def test_the_backlog_is_tried_at_once_on_command() -> None:
    v = a_call(answering(503))
    v.until(100)
    v.worker = answering(204)
    assert v.command("retry", tenant="h")["body"] == {"retried": 1}
    assert v.status("h", "1") == "PROCESSED"


def test_400_is_an_error_at_once() -> None:
    v = a_call(answering(400, "no such order"))
    assert calls(v) == [60]
    assert v.status("h", "1") == "ERROR"
    assert [row.values["error"] for row in v.rows["Dead"]] == ["no such order"]
    v.until(1_000)
    assert calls(v) == [60]


@pytest.mark.parametrize("code", [408, 425, 429])
def test_some_of_4xx_ask_to_come_again(code: int) -> None:
    v = a_call(answering(code))
    v.until(68)
    assert calls(v) == [60, 61, 63, 67]


def test_the_other_side_may_ask_to_come_later() -> None:
    v = a_call(answering(503, "", 30))
    v.until(160)
    assert calls(v) == [60, 90, 120, 150]


@pytest.mark.parametrize("after", [float("inf"), float("nan"), -5.0, 1e300])
def test_a_time_to_come_later_that_cannot_be_does_no_harm(after: float) -> None:
    v = a_call(answering(503, "", after))
    v.until(60 + 3_601)
    assert 60 + 3_600 in calls(v) or 61 in calls(v)


def test_tries_delay_and_multiplier_can_be_set() -> None:
    v = a_call(answering(500), retries=2, delay=0.5, multiplier=3)
    v.until(70)
    assert calls(v) == [60, 60.5, 62]


def test_a_call_without_an_outcome_is_made_again_with_the_same_key() -> None:
    v = a_call(None, deadline=5)
    v.until(67)
    one, other = (row.values for row in v.rows["Calls"])
    assert calls(v) == [60, 66]
    assert one["delivery"] == other["delivery"]
    assert (one["attempt"], other["attempt"]) == (1, 2)
    v.outcome(one, 500)  # too late: it changes nothing
    v.until(70)
    assert calls(v) == [60, 66]
    v.outcome(other, 200)
    v.outcome(other, 200)
    v.outcome(other, 500)
    v.until(1_000)
    assert calls(v) == [60, 66]
    assert v.rows["Dead"] == []


def test_a_success_counts_whenever_it_comes() -> None:
    v = a_call(None, deadline=5)
    v.until(65.5)  # the first call has no outcome, the second one is not made yet
    v.outcome(v.rows["Calls"][0].values, 200)
    v.until(300)
    assert calls(v) == [60]


def test_outcomes_of_calls_that_nobody_made_change_nothing() -> None:
    v = a_call(None)
    for attempt in (0, 2, -1):
        v.outcome(v.rows["Calls"][0].values | {"attempt": attempt}, 200)
    v.outcome({"delivery": "nobody/knows/it", "attempt": 1}, 200)
    assert v.status("h", "1") == "PROCESSING"


def test_an_event_that_is_removed_while_it_is_tried_is_tried_no_more() -> None:
    v = a_call(answering(500))
    v.until(62)
    assert v.event("h", "1", None, None, "REMOVE")["status"] == "DELETED"
    v.until(300)
    assert calls(v) == [60, 61]
    assert v.ask("counts")["deliveries"] == 0


def test_an_update_while_it_is_tried_is_a_new_event_and_the_old_one_is_tried_no_more() -> None:
    v = a_call(None)
    assert v.event("h", "1", 100, "new")["status"] == "UPDATED"
    v.outcome(v.rows["Calls"][0].values, 500)
    assert v.status("h", "1") == "UN_PROCESSED"
    v.worker = answering(200)
    v.until(200)
    assert calls(v) == [60, 100]
    assert v.ask("tenants")["tenants"]["h"]["calling"] == 0


def test_a_slow_tenant_waits_for_itself_and_harms_no_other() -> None:
    v = Virtual(lambda call: None if call["tenant"] == "slow" else (200, "", 0))
    v.http_tenant("slow", concurrency=2, deadline=10, retries=0, backlog_limit=0)
    v.http_tenant("quick", concurrency=2)
    v.schedule(*[(name, str(n), 60) for n in range(20) for name in ("slow", "quick")])
    v.until(60)
    assert calls(v, "quick") == [60] * 20
    assert calls(v, "slow") == [60, 60]
    v.until(81)
    assert calls(v, "slow") == [60, 60, 70, 70, 80, 80]
    assert v.ask("tenants")["tenants"]["slow"]["calling"] == 2


def test_a_tenant_that_never_answers_does_not_fill_the_memory() -> None:
    v = Virtual(answering(500))
    v.http_tenant(events=5)
    assert v.command("cron", tenant="h", id="c", expression="* * * * * ?")["code"] == 200
    v.schedule(("h", "1", 10), ("h", "2", -1))
    v.until(100)
    assert v.ask("tenants")["tenants"]["h"]["held"] == v.ask("counts")["deliveries"] == 5
    assert (v.event("h", "3", -1)["code"], v.event("h", "4", 200)["code"]) == (429, 429)
    assert (v.event("h", "1", -1)["code"], v.event("h", "1", 110)["code"]) == (429, 200)
    v.worker = answering(200)
    v.until(170)
    assert v.event("h", "3", 300)["code"] == 200
    assert v.ask("tenants")["tenants"]["h"]["held"] == 1


def test_many_large_dead_letters_at_once_are_emitted_some_at_a_time() -> None:
    v = Virtual()
    v.http_tenant(payload=1 << 20, concurrency=300)
    for _ in range(60):
        v.schedule(*[("h", "1", -1, "\x01" * (1 << 18)) for n in range(5)])
    v.until(1)
    made = [(row.values["delivery"], 1, 400, "", 0.0) for row in v.rows["Calls"]]
    assert len(made) == 300
    v.outcomes(made)  # 460 MB of dead letters
    assert 0 < len(v.rows["Dead"]) < 10
    v.until(2)
    assert len(v.rows["Dead"]) == 300


def test_calls_come_at_the_rate_of_their_tenant() -> None:
    v = Virtual(answering(200))
    v.http_tenant("h", rate=2)
    v.schedule(*[("h", str(n), 60) for n in range(5)])
    v.until(100)
    assert calls(v) == [60, 60.5, 61, 61.5, 62]


@pytest.mark.parametrize("whole", [False, True])
def test_a_tenant_that_is_paused_gets_what_fell_due_when_it_is_resumed(whole: bool) -> None:
    which = {} if whole else {"tenant": "h"}
    v = Virtual(answering(200))
    v.http_tenant()
    v.window_tenant()
    v.command("pause", **which)
    v.schedule(("h", "1", 60), ("t", "2", 60), ("h", "3", -1))
    v.until(100)
    assert calls(v) == []
    assert v.fired() == ([] if whole else [(60, "2")])
    v.command("resume", **which)
    v.until(101)
    assert sorted(v.fired("Calls")) == [(100, "1"), (100, "3")]
    assert v.status("h", "1") == "PROCESSED"


def test_a_kafka_topic_and_an_entry_point_are_called_by_a_worker_too() -> None:
    v = Virtual(answering(200))
    v.command("tenant", tenant="k", type="MESSAGING", props={"topic": "orders", "bootstrap.servers": "a:9092"})
    v.command("tenant", tenant="c", type="CUSTOM_CLASS", props={"class": "shop.orders:Handler"})
    v.schedule(("k", "1", 60, "p"), ("c", "2", 60, "p", None, "PAYLOAD_ONLY"))
    v.until(60)
    assert [(row.values["type"], row.values["deliveryOption"]) for row in v.rows["Calls"]] == [
        ("CUSTOM_CLASS", "PAYLOAD_ONLY"), ("MESSAGING", "FULL_EVENT"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tenant": ""}, "tenant is a text"),
        ({"tenant": "a\nb"}, "control character"),
        ({"type": "SMOKE"}, "type SMOKE is none of"),
        ({"props": {}}, "props must not be empty"),
        ({"props": {"url": "ftp://x"}}, "begins with http"),
        ({"props": {"url": "http://x", "headers": {"a": 1}}}, "headers in props are texts"),
        ({"props": {"url": "http://x", "more": "x" * 20_000}}, "more than 16384"),
        ({"type": "MESSAGING", "props": {"window": "Other"}}, "is Fires"),
        ({"type": "MESSAGING", "props": {"servers": "x"}}, "have a topic"),
        ({"limits": {"delay": 0}}, "delay is up to"),
        ({"limits": {"multiplier": 1e300}}, "multiplier from 1 to 10"),
        ({"limits": {"concurrency": 0}}, "concurrency from 1"),
        ({"limits": {"requests": 1e-300}}, "requests and rate"),
        ({"limits": {"deadline": 0}}, "deadline is 0.1"),
        ({"limits": {"backlog_limit": -1}}, "backlog_limit is at most"),
        ({"limits": {"speed": 7}}, "unknown field `speed`"),
        ({"unknown": 7}, "unknown field `unknown`"),
    ],
)
def test_a_tenant_that_cannot_be_is_refused_with_its_reason(fields: dict[str, Any], says: str) -> None:
    v = Virtual()
    answer = v.command("tenant", **{"tenant": "h", "type": "HTTP", "props": {"url": "http://x"}} | fields)
    assert (answer["code"], answer["status"]) == (400, "REJECTED")
    assert says in answer["message"]
    assert v.ask("tenants")["tenants"] == {}
    v.restart()


def test_registering_a_tenant_again_replaces_it_and_keeps_its_events() -> None:
    v = Virtual(answering(200))
    v.http_tenant("x")
    v.event("x", "1", 60)
    v.window_tenant("x")
    v.until(60)
    assert v.fired() == [(60, "1")]
    assert v.rows["Calls"] == []


def test_whatever_props_hold_survives_a_restart() -> None:
    v = Virtual()
    props = {"topic": "t", "large": 10**30, "deep": [[{"a": None}]], "half": 0.5}
    assert v.command("tenant", tenant="k", type="MESSAGING", props=props)["code"] == 200
    v.restart()
    assert v.ask("tenants")["tenants"]["k"]["props"] == props
