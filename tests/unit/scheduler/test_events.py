"""Events: what is accepted, updated, rejected and removed, and that each fires once at its time. In virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.scheduler.virtual_scheduler import START, Virtual, moment


@pytest.fixture
def v() -> Virtual:
    made = Virtual()
    made.window_tenant()
    return made


def test_two_thousand_events_at_two_times_are_all_processed_at_their_times(v: Virtual) -> None:
    answers = v.schedule(*[("t", str(n), 60 + 30 * (n % 2), "p") for n in range(2_000)])
    assert {(answer["code"], answer["status"]) for answer in answers} == {(200, "ACCEPTED")}
    v.until(120)
    assert sorted(v.fired()) == sorted((60.0 + 30 * (n % 2), str(n)) for n in range(2_000))
    assert {v.status("t", str(n)) for n in range(2_000)} == {"PROCESSED"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (("nobody", "1", 60), "tenant nobody is not known"),
        (("", "1", 60), "tenant is missing"),
        (("t", "1", None), "eventTime is missing"),
        (("t", "1", ""), "eventTime is missing"),
        (("t", "", 60), "id is missing"),
        (("t", "1", "tomorrow"), "is no ISO 8601 time"),
        (("t", "1", "2026-11-20T12:00:00"), "no offset"),
        (("t", "1", "0001-01-01T00:00:00+14:00"), "between 1970 and 9999"),
        (("t", "1", "9999-12-31T23:59:59-14:00"), "between 1970 and 9999"),
        (("t", "1", 60, None, None, "PAYLOAD_ONLY"), "payload must not be null"),
        (("t", "1", -60, None, None, "PAYLOAD_ONLY"), "payload must not be null"),
        (("t", "1", 60, None, "UPSET"), "mode UPSET is none of"),
        (("t", "1", 60, None, None, "HALF_EVENT"), "deliveryOption HALF_EVENT is none of"),
        (("t", "1", 60, "p" * 70_000), "the payload has 70000 characters"),
        (("t", "i" * 300, 60), "id is a text of at most 256"),
        (("t" * 300, "1", 60), "tenant is a text of at most 256"),
        (("a\x1fb", "1", 60), "without control characters"),
    ],
)
def test_what_cannot_be_is_rejected_with_400_and_its_reason(v: Virtual, row: tuple[Any, ...], says: str) -> None:
    answer = v.event(*row)
    assert (answer["code"], answer["status"]) == (400, "REJECTED")
    assert says in answer["message"]
    v.until(120)
    assert v.fired() == []


def test_the_reasons_are_looked_at_in_bigbens_order(v: Virtual) -> None:
    said = [
        v.event(*row)["message"]
        for row in [
            ("", "", None),
            ("nobody", "", None),
            ("nobody", "", "x", None, None, "PAYLOAD_ONLY"),
            ("t", "", "x", None, None, "PAYLOAD_ONLY"),
        ]
    ]
    assert [text.partition(" is ")[0].partition(" must")[0] for text in said] == [
        "tenant", "eventTime", "tenant nobody", "with deliveryOption PAYLOAD_ONLY the payload",
    ]  # fmt: skip


def test_each_item_of_a_list_has_its_own_answer_in_order(v: Virtual) -> None:
    answers = v.schedule(("t", "1", 60), ("nobody", "2", 60), ("t", "3", -0.5), ("t", "4", 0))
    assert [(each["id"], each["code"], each["status"]) for each in answers] == [
        ("1", 200, "ACCEPTED"), ("2", 400, "REJECTED"), ("3", 200, "TRIGGERED"), ("4", 200, "TRIGGERED"),
    ]  # fmt: skip
    assert [each["request"].rpartition(":")[2] for each in answers] == ["0", "1", "2", "3"]


def test_an_event_in_the_past_fires_at_once_and_is_not_kept(v: Virtual) -> None:
    answer = v.event("t", "1", -3_600, "late")
    assert (answer["code"], answer["status"]) == (200, "TRIGGERED")
    assert v.fired() == [(0.0, "1")]
    body = json.loads(v.rows["Fires"][0].values["body"])
    assert (body["payload"], body["tenant"], body["eventStatus"]) == ("late", "t", "TRIGGERED")
    assert body["eventTime"] == moment(-3_600).replace("+00:00", "Z")
    assert v.ask("find", tenant="t", id="1") == {"code": 404, "error": "not found"}


def test_payload_only_delivers_the_payload_and_nothing_else(v: Virtual) -> None:
    v.event("t", "1", -1, "just this", None, "PAYLOAD_ONLY")
    v.event("t", "2", 60, "and this", None, "PAYLOAD_ONLY")
    v.until(60)
    assert [row.values["body"] for row in v.rows["Fires"]] == ["just this", "and this"]
    assert [row.values["eventId"][:2] for row in v.rows["Fires"]] == ["a-", "a-"]


@pytest.mark.parametrize("ahead", [0.000001, 0.001, 1.0])
def test_an_event_in_the_near_future_fires_at_its_time(v: Virtual, ahead: float) -> None:
    v.until(59.9)
    v.event("t", "1", 59.9 + ahead)
    v.until(120)
    assert v.fired() == [(pytest.approx(59.9 + ahead, abs=1e-7), "1")]


def test_an_event_is_added_found_updated_and_removed(v: Virtual) -> None:
    added = v.event("t", "1", 60, "first")
    found = v.ask("find", tenant="t", id="1")
    assert (added["status"], found["eventStatus"], found["payload"]) == ("ACCEPTED", "UN_PROCESSED", "first")
    assert found["eventId"] == added["eventId"]
    assert v.event("t", "1", 60, "second")["status"] == "UPDATED"
    assert v.event("t", "1", 60)["status"] == "UPDATED"  # a null leaves the payload
    assert v.ask("find", tenant="t", id="1")["payload"] == "second"
    assert v.event("t", "1", 90, "third")["status"] == "UPDATED"
    assert v.ask("find", tenant="t", id="1")["eventTime"] == moment(90).replace("+00:00", "Z")
    assert v.event("t", "1", None, None, "REMOVE")["status"] == "DELETED"
    assert v.ask("find", tenant="t", id="1")["code"] == 404
    v.until(200)
    assert v.fired() == []


def test_removing_what_is_not_there_is_no_error(v: Virtual) -> None:
    answer = v.event("t", "1", None, None, "REMOVE")
    assert (answer["code"], answer["status"]) == (200, None)


def test_an_update_is_delivered_with_the_last_payload_and_once(v: Virtual) -> None:
    v.event("t", "1", 60, "old")
    v.event("t", "1", 30, "older")
    v.event("t", "1", 60, "new")
    v.until(120)
    assert v.fired() == [(60.0, "1")]
    assert json.loads(v.rows["Fires"][0].values["body"])["payload"] == "new"


def test_an_event_that_was_removed_and_scheduled_again_for_the_same_time_fires_once(v: Virtual) -> None:
    v.event("t", "1", 60)
    v.event("t", "1", None, None, "REMOVE")
    v.event("t", "1", 60)
    v.event("t", "1", 90)
    v.event("t", "1", 60)
    v.until(120)
    assert v.fired() == [(60.0, "1")]


def test_an_update_to_the_past_fires_at_once_and_not_again(v: Virtual) -> None:
    v.event("t", "1", 60)
    assert v.event("t", "1", -60)["status"] == "TRIGGERED"
    v.until(120)
    assert v.fired() == [(0.0, "1")]


def test_a_version_that_is_given_has_to_be_the_one_at_hand(v: Virtual) -> None:
    first = v.event("t", "1", 60, None, None, None, 0)
    assert first["status"] == "ACCEPTED"
    assert v.event("t", "1", 90, None, None, None, 0)["code"] == 412
    second = v.event("t", "1", 90, None, None, None, first["version"])
    assert second["status"] == "UPDATED"
    assert v.event("t", "1", None, None, "REMOVE", None, first["version"])["code"] == 412
    assert v.event("t", "1", None, None, "REMOVE", None, second["version"])["status"] == "DELETED"


@pytest.mark.parametrize("option", ["FULL_EVENT", "PAYLOAD_ONLY"])
def test_a_dry_run_delivers_once_more_and_leaves_the_event_as_it_is(v: Virtual, option: str) -> None:
    v.event("t", "1", 60, "p", None, option)
    before = v.ask("find", tenant="t", id="1")
    assert v.event("t", "1", None, None, "DRYRUN")["status"] == "UN_PROCESSED"
    assert v.ask("find", tenant="t", id="1") == before
    v.until(120)
    assert v.fired() == [(0.0, "1"), (60.0, "1")]
    assert len({row.values["delivery"] for row in v.rows["Fires"]}) == 2
    assert v.event("t", "2", None, None, "DRYRUN")["code"] == 404


def test_events_are_listed_by_tenant_status_and_time_a_page_at_a_time(v: Virtual) -> None:
    v.window_tenant("other")
    v.schedule(*[("t", f"{n:03}", 60 + n // 2) for n in range(10)], ("other", "x", 60))
    v.until(61)
    waiting, cursor = [], None
    while True:
        page = v.ask("events", tenant="t", status="UN_PROCESSED", limit=4, cursor=cursor)
        waiting += [event["id"] for event in page["events"]]
        if (cursor := page.get("cursor")) is None:
            break
    assert waiting == [f"{n:03}" for n in range(4, 10)]
    found = v.ask("events", tenant="t", since=START + 61_000_000, until=START + 63_000_000)["events"]
    assert [event["id"] for event in found] == ["002", "003", "004", "005"]
    assert len(v.ask("events", limit=1_000)["events"]) == 11


@pytest.mark.parametrize(
    "question",
    [
        {"status": "LOST"}, {"limit": 0}, {"limit": 10_000}, {"cursor": "x"}, {"cursor": "٣:x"}, {"since": "noon"},
        {"unknown": 1},
    ],
)  # fmt: skip
def test_a_question_that_cannot_be_asked_is_answered_with_400(v: Virtual, question: dict[str, Any]) -> None:
    assert v.ask("events", **question)["code"] == 400


def test_a_tenant_has_a_quota_and_a_rate_and_others_do_not_notice(v: Virtual) -> None:
    v.window_tenant("few", events=3)
    v.window_tenant("slow", requests=10)
    codes = [answer["code"] for answer in v.schedule(*[("few", str(n), 60) for n in range(5)])]
    assert codes == [200, 200, 200, 429, 429]
    codes = [answer["code"] for answer in v.schedule(*[("slow", str(n), 60) for n in range(20)])]
    assert codes == [200] * 10 + [429] * 10
    assert v.event("few", "0", 90)["code"] == 200  # an update is no further event
    v.until(1)
    codes = [answer["code"] for answer in v.schedule(*[("slow", str(n), 60) for n in range(20)])]
    assert codes == [200] * 10 + [429] * 10
    v.until(120)
    assert v.event("few", "3", 180)["code"] == 200


def test_an_event_that_is_done_and_comes_again_counts_for_the_quota(v: Virtual) -> None:
    v.window_tenant("few", events=1)
    v.event("few", "1", 60)
    v.until(60)
    v.event("few", "2", 90)
    assert (v.event("few", "1", 90)["code"], v.event("few", "1", -1)["code"]) == (429, 429)
    assert (v.event("few", "2", 120)["code"], v.event("few", "2", -1)["code"]) == (200, 200)


def test_events_that_are_done_are_forgotten_after_a_while(v: Virtual) -> None:
    v.event("t", "1", 60)
    v.until(60)
    v.event("t", "2", 10_000)
    assert v.ask("counts")["next"] == moment(10_000).replace("+00:00", "Z")
    v.until(9_000)
    v.event("t", "3", 9_100)
    assert (v.status("t", "1"), v.status("t", "2")) == (None, "UN_PROCESSED")
    assert v.ask("counts")["done"] == 0


def test_an_event_that_was_processed_can_be_scheduled_again(v: Virtual) -> None:
    v.event("t", "1", 60)
    v.until(60)
    assert v.event("t", "1", 90)["status"] == "UPDATED"
    v.until(5_000)
    v.event("t", "2", 6_000)
    assert v.fired() == [(60.0, "1"), (90.0, "1")]
    assert v.ask("counts")["done"] == 0


def test_ten_thousand_events_at_one_moment_are_emitted_some_at_a_time(v: Virtual) -> None:
    for n in range(100):
        v.schedule(*[("t", f"{100 * n + m}", 60, "p") for m in range(100)])
    v.until(60)
    assert len(v.fired()) == len({id for _, id in v.fired()}) == 10_000
    assert v.largest <= 1_000
    assert {at for at, _ in v.fired()} == {60.0}


def test_large_payloads_in_the_past_are_emitted_some_at_a_time(v: Virtual) -> None:
    v.schedule(*[("t", str(n), -1, "\x01" * 65_536) for n in range(200)])
    v.until(1)
    assert len(v.fired()) == 200
    assert v.largest == 1


def test_a_block_with_too_many_rows_is_refused_as_a_whole(v: Virtual) -> None:
    (answer,) = v.schedule(*[("t", str(n), 60) for n in range(10_001)])
    assert (answer["code"], answer["status"]) == (400, "REJECTED")
    assert v.ask("counts")["events"] == 0


def test_tenants_with_slashes_do_not_share_names_of_deliveries(v: Virtual) -> None:
    v.window_tenant("a/b")
    v.window_tenant("a")
    v.schedule(("a/b", "c", 60), ("a", "b/c", 60))
    v.until(60)
    assert [row.values["delivery"].rpartition("/")[0] for row in v.rows["Fires"]] == ["a/b%2Fc", "a%2Fb/c"]
