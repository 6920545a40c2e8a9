"""What `esp top` makes of what members say, without a bus."""

import time
from collections import deque
from typing import Any

from esp_pubsub.cli.top import Control, Switch, Topic
from esp_pubsub.wire.frame import BEAT, BLOCK, CLAIM, STANDBY, Frame, frames, parse, seal
from esp_pubsub.wire.maps import seal_map

SETUP = {"topics": ["h:1/p/c/w/I"], "schemas": ["id*:int64"], "body": "rows", "election": "log"}
SECOND = 1_000_000


def who(nonce: int, name: str = "") -> dict[str, Any]:
    return {"name": name or f"member-{nonce}", "nonce": nonce, "process": "", "host": "h", "pid": nonce}


def beat(nonce: int, term: int, number: int, *, at: int = 0, run: int = 0, resigns: bool = False, given: int = 9,
         settled: int = 7, name: str = "") -> Frame:  # fmt: skip
    values = {"setup": SETUP, "identity": who(nonce, name), "number": number,
              "positions": [[given, settled, None]], "resigns": resigns}  # fmt: skip
    return parse(frames([seal_map(BEAT, values, run=run)], 0, at, term)[0])


def claim(nonce: int, term: int, saw: tuple[int, int], at: int = 0) -> Frame:
    values = {"identity": who(nonce), "saw_nonce": saw[0], "saw_number": saw[1]}
    return parse(frames([seal_map(CLAIM, values)], 0, at, term)[0])


def stands_by(nonce: int, *, at: int = 1 << 60, eligible: bool = True, pulse: Any = None) -> Frame:
    values = {"identity": who(nonce), "eligible": eligible, "positions": [[9, 7, None]], "pulse": pulse}
    return parse(frames([seal_map(STANDBY, values)], 0, at, 1)[0])


def heard(*said: Frame) -> tuple[Control, deque[Switch]]:
    switches: deque[Switch] = deque()
    control = Control("feed", switches)
    for frame in said:
        control.hear(frame, fresh=True)
    return control, switches


def roles(control: Control) -> list[tuple[str, str]]:
    return [(row[3], row[4]) for row in control.rows()]


def test_a_member_that_takes_over_from_a_silent_one_is_a_failover() -> None:
    control, switches = heard(
        beat(1, 1, 1, at=SECOND), beat(1, 1, 2, at=2 * SECOND), claim(2, 2, (1, 2)),
        beat(2, 2, 1, at=3 * SECOND, settled=8),
    )  # fmt: skip
    (switch,) = switches
    assert (switch.before.name, switch.before.role, switch.before.at) == ("member-1", "fell silent", 2 * SECOND)
    assert (switch.after.name, switch.after.term, switch.after.positions[0].settled) == ("member-2", 2, 8)
    assert control.topic == SETUP["topics"][0]
    assert [name for name, _ in roles(control)] == ["member-2", "member-1"]


def test_a_member_that_resigned_handed_over() -> None:
    _, switches = heard(beat(1, 1, 1), beat(1, 1, 2, resigns=True), claim(1, 2, (1, 2)), beat(2, 3, 1), beat(2, 3, 2))
    assert [(switch.before.name, switch.before.role) for switch in switches] == [("member-1", "handed over")]


def test_a_claim_that_is_void_is_a_standbys() -> None:
    control, switches = heard(beat(1, 1, 1), beat(1, 1, 4), claim(2, 2, (1, 1), at=1 << 60))
    assert not switches and roles(control)[0] == ("member-2", "standby")


def test_the_one_who_leads_and_was_not_heard_for_long_is_silent() -> None:
    assert roles(heard(beat(1, 1, 1, at=SECOND))[0]) == [("member-1", "silent")]
    assert roles(heard(beat(1, 1, 1, at=1 << 60))[0]) == [("member-1", "active")]


def test_a_member_that_stands_by_is_shown_and_takes_nothing_from_the_leader() -> None:
    now = round(time.time() * SECOND)
    control, switches = heard(beat(1, 1, 1, at=now), stands_by(2, at=now), stands_by(3, at=now, eligible=False))
    assert roles(control) == [("member-3", "catching up"), ("member-2", "standby"), ("member-1", "active")]
    assert not switches and control.warning is None


def test_it_is_a_warning_that_nobody_could_take_over() -> None:
    now = round(time.time() * SECOND)
    alone = "feed: no standby could take over now"
    assert heard(beat(1, 1, 1, at=now))[0].warning == alone
    assert heard(beat(1, 1, 1, at=now), stands_by(2, at=now, eligible=False))[0].warning == alone
    assert heard(beat(1, 1, 1, at=now), stands_by(2, at=now - 60 * SECOND))[0].warning == alone
    assert heard(stands_by(2, at=now))[0].warning is None  # nobody leads: others show that


def test_members_of_an_engine_show_their_steps_windows_and_last_snapshot() -> None:
    now = round(time.time() * SECOND)
    control, _ = heard(beat(1, 1, 1, at=now), stands_by(2, at=now, pulse=[0, 0, 0, 1_234, now - 90 * SECOND, False]))
    (row,) = control.engine_rows()
    assert row == ["feed", "member-2", "standby", "1,234", "w 9 (2 wait)", "2 min"]


def test_how_far_the_active_is_ahead_of_the_bus_is_what_waits() -> None:
    (row,) = heard(beat(1, 1, 1, given=1_234, settled=234))[0].rows()
    assert row[6:9] == ["1,234", "234", "1,000"]


def test_a_higher_run_begins_anew_and_a_lower_one_is_past() -> None:
    control, switches = heard(beat(1, 5, 1), beat(2, 1, 1, run=3), beat(1, 6, 2))
    assert not switches and [row[1:4] for row in control.rows()] == [["3", "log", "member-2"]]


def test_what_is_no_beat_changes_nothing() -> None:
    control, _ = heard(beat(1, 1, 1))
    before = control.rows()
    maps = ({}, {"identity": 7}, {"identity": who(2), "saw_nonce": "x", "saw_number": 1})
    for foreign in (*(seal_map(CLAIM, values) for values in maps), seal(CLAIM, body=b"\xc1")):
        control.hear(parse(frames([foreign], 0, 0, 2)[0]), fresh=True)
    assert control.rows() == before


def test_names_move_no_cursor_and_members_are_bounded() -> None:
    control, switches = heard(*(beat(n, n, number, name=f"\x1b[2J{n}") for n in range(1, 50) for number in (1, 2)))
    assert len(control.rows()) == 4 and len(switches) == 48
    assert roles(control)[0] == ("?[2J49", "silent")


def test_rates_count_what_came_since_the_last_picture() -> None:
    topic = Topic()
    blocks = [seal(BLOCK, count=3, source=n % 2, id=n, body=bytes(920)) for n in range(1, 5)]
    for number, message in enumerate(frames(blocks, 0, 0)):
        topic.hear(parse(message), fresh=number > 0)
    assert topic.row("t", "4", 0.5)[:8] == ["t", "4", "6", "18", "0.0", "2", "4", "0"]
    assert topic.row("t", "4", 0.5)[:8] == ["t", "4", "0", "0", "0.0", "2", "4", "0"]
