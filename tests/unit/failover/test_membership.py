"""The machine of a failover member: which events are due, which transitions there are, and what a member does in each
state.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from esp_pubsub.errors import Closed, ConfigError, InputDiffers, Stale
from esp_pubsub.failover.course import Reach
from esp_pubsub.failover.line import Line, Position
from esp_pubsub.failover.membership import (
    ACTIVITIES,
    BEHIND,
    CATCH_UP,
    HEARD,
    LEADS_ON,
    RESIGNS,
    TABLE,
    Event,
    Membership,
    State,
    diagram,
)
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.failover.words import Beat, Challenge, Identity, Pulse, Setup
from esp_pubsub.wire.frame import BLOCK, ROWS, seal

ROOT = Path(__file__).parents[3]
STATES: list[State] = ["standby", "candidate", "elected", "active", "left"]
EVENTS: list[Event] = sorted({event for _, event in TABLE})
PATIENCE = 5.0
SETUP = Setup(("t1", "t2"), ("id*:int64", "id*:int64"), "rows", "log")
ME, OTHER = Identity("me", 10, "", "h", 1), Identity("other", 20, "", "h", 2)


def give(line: Line, count: int = 1, text: bytes = b"x") -> None:
    for _ in range(count):
        id, link = line.outbox.last + 1, line.outbox.chain
        line.give(seal(BLOCK, ROWS, count=1, source=line.source, run=line.run, id=id, link=link, body=text))


def member(given: tuple[int, int] = (0, 0), *, buffer: int = 100, run: int = 0) -> Membership:
    """A standby with two lines, which hears and follows everything."""
    lines = [Line(source, run, Outbox(buffer, 1 << 20), suffix_only=True, buffer=buffer) for source in (1, 2)]
    one = Membership(lines, SETUP, ME, run, patience=PATIENCE)
    for line, count in zip(lines, given, strict=True):
        give(line, count)
    one.hears(all_of_it=True)
    for at in (0, 1):
        one.follows(at, follows=True)
        lines[at].reached_end()
    one.hear(beat(0, 0, resigns=True), 0.0)  # a single one is not believed
    return one


def beat(*settled: int, who: Identity = OTHER, setup: Setup = SETUP, run: int = 0, resigns: bool = False,
         chain: int | None = None) -> Beat:  # fmt: skip
    return Beat(setup, who, run, 1, 1, tuple(Position(each, each, chain) for each in settled), resigns)


def step(one: Membership, *events: Event, now: float = 0.0) -> None:
    for event in events:
        one.step(event, now, 0.0)


def active(given: tuple[int, int] = (0, 0), now: float = 0.0) -> Membership:
    one = member(given)
    one.elected(3)
    step(one, "eligible", "elected", "won", now=now)
    return one


# the table


@pytest.mark.parametrize(("state", "event"), list(product(STATES, EVENTS)))
def test_there_is_no_transition_but_those_of_the_table(state: State, event: Event) -> None:
    one = member()
    one.state = state
    if (state, event) in TABLE:
        step(one, event)
        assert one.state == TABLE[state, event]
    else:
        with pytest.raises(KeyError):
            step(one, event)


def test_a_member_that_left_never_comes_back_and_does_nothing() -> None:
    assert not [event for state, event in TABLE if state == "left"]
    assert ACTIVITIES["left"] == ()


def test_a_member_sends_in_no_state_but_active() -> None:
    assert [state for state, does in ACTIVITIES.items() if "send" in does] == ["active"]
    assert [before for before, after in TABLE.items() if after == "active"] == [
        ("elected", "won"),
        ("active", "synced"),
    ]


def test_a_member_follows_its_lines_whenever_it_neither_sends_nor_has_left() -> None:
    assert {state for state, does in ACTIVITIES.items() if "follow" in does} == {"standby", "candidate", "elected"}


def test_leadership_is_resigned_wherever_it_is_given_up_and_not_taken_away() -> None:
    ends = {(a, event) for (a, event), b in TABLE.items() if a in ("elected", "active") and b == "standby"}
    assert ends - RESIGNS == {(a, event) for a in ("elected", "active") for event in ("lost", "suspended")}


def test_every_state_can_be_reached_and_left() -> None:
    reached: set[State] = {"standby"}
    for _ in STATES:
        reached |= {after for (before, _), after in TABLE.items() if before in reached}
    assert reached == set(STATES)
    assert {state for state, event in TABLE if event == "leave"} == set(STATES) - {"left"}


def test_the_diagram_shows_the_table_and_nothing_else() -> None:
    first, start, *steps, end = diagram().splitlines()
    assert (first, start.strip(), end.strip()) == ("stateDiagram-v2", "[*] --> standby", "left --> [*]")
    assert [line.strip() for line in steps] == [f"{a} --> {b}: {event}" for (a, event), b in TABLE.items()]


def test_the_docs_contain_the_generated_diagram() -> None:
    pages = [page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))]
    shown = [page for page in pages if "stateDiagram-v2" in page]
    assert shown, "no page of the docs shows membership.diagram()"
    for page in shown:
        assert diagram() in page


# standby to candidate


def test_a_new_member_that_hears_and_follows_everything_is_eligible() -> None:
    assert member().due(0.0) == "eligible"


@pytest.mark.parametrize(
    "lacks",
    [
        pytest.param(lambda one: one.hears(all_of_it=False), id="the control topic is not read to its end"),
        pytest.param(lambda one: one.follows(1, follows=False), id="one line is not followed"),
        pytest.param(lambda one: one.hear(beat(0, 3), 0.0), id="one line lacks what the bus holds"),
    ],
)
def test_a_standby_does_not_campaign_before_it_could_go_on_in_every_line(lacks: Callable[[Membership], Any]) -> None:
    one = member()
    lacks(one)
    assert one.due(0.0) is None


def test_a_standby_campaigns_once_it_has_what_the_bus_holds_in_every_line() -> None:
    one = member()
    one.hear(beat(2, 1), 0.0)
    give(one.lines[0], 2)
    assert one.due(9.0) is None
    give(one.lines[1])
    assert one.due(9.0) == "eligible"


# candidate


def test_a_candidate_that_is_elected_is_elected_to_that_term() -> None:
    one = member()
    step(one, "eligible")
    assert one.due(0.0) is None
    one.elected(7)
    assert one.due(0.0) == "elected"
    step(one, "elected")
    assert (one.state, one.role, one.term) == ("elected", "candidate", 7)


def test_a_candidate_may_be_behind_for_a_moment_but_not_for_longer() -> None:
    one = member()
    step(one, "eligible")
    one.hear(beat(1, 0), 1.0)
    assert one.due(1.0) is None
    assert one.look_at(1.0) == 1.0 + BEHIND
    give(one.lines[0])
    assert one.due(1.2) is None
    one.hear(beat(2, 0), 1.3)
    assert one.due(1.3) is None
    assert one.due(1.0 + BEHIND) is None, "it was not behind all the time"
    assert one.due(1.3 + BEHIND) == "ineligible"


def test_a_campaign_that_is_won_in_the_moment_in_which_it_is_given_up_is_declined() -> None:
    one = member()
    step(one, "eligible")
    one.hear(beat(1, 0), 1.0)
    assert [one.due(now) for now in (1.0, 1.0 + BEHIND)] == [None, "ineligible"]
    step(one, "ineligible")
    assert not one.declines()
    one.elected(7)  # while the campaign is being cancelled
    assert one.declines()
    give(one.lines[0])
    step(one, "eligible")
    assert one.due(9.0) is None, "that term is over"


# elected


def elected(now: float = 0.0) -> Membership:
    one = member()
    one.elected(1)
    step(one, "eligible", "elected", now=now)
    return one


def test_an_elected_member_sends_once_it_has_caught_up() -> None:
    one = elected()
    assert one.due(0.0) is None
    one.caught_up()
    assert one.due(0.0) == "won"


def test_an_elected_member_does_not_wait_for_ever_to_catch_up() -> None:
    one = elected(now=5.0)
    assert one.look_at(5.0) == 5.0 + CATCH_UP
    assert one.due(5.0 + CATCH_UP) == "won"


def test_an_elected_member_that_finds_more_on_the_bus_than_it_has_lets_others_lead() -> None:
    one = elected()
    one.lines[0].heard(0, 9, None)
    one.caught_up()
    assert one.due(0.0) is None
    assert one.due(BEHIND) == "ineligible"
    assert ("elected", "ineligible") in RESIGNS


@pytest.mark.parametrize("how", ["lost", "suspended"])
def test_leadership_that_ends_before_it_began_ends(how: Any) -> None:
    one = elected()
    one.ended(how)
    one.caught_up()
    assert one.due(0.0) == how


def test_an_end_of_an_earlier_leadership_does_not_end_the_next() -> None:
    one = active()
    one.ended("lost")
    assert one.due(0.0) == "lost"
    step(one, "lost", "eligible")
    one.elected(4)
    step(one, "elected")
    one.caught_up()
    assert one.due(0.0) == "won"


# active


def test_an_active_member_is_synced_once_every_line_is_on_the_bus() -> None:
    one = active((2, 1))
    one.lines[0].acked(2)
    assert one.due(0.0) is None
    one.lines[1].acked(1)
    assert one.due(0.0) == "synced"
    step(one, "synced")
    assert one.due(0.0) is None


def test_one_line_that_stalls_resigns_the_whole_group() -> None:
    one = active((1, 1))
    one.lines[0].acked(1)
    assert one.due(0.0) is None
    for now in (1.0, 2.0, 3.0, 4.0):
        give(one.lines[0])
        one.lines[0].acked(one.lines[0].outbox.last)
        assert one.due(now) is None
    assert one.due(PATIENCE) == "stalled"
    assert ("active", "stalled") in RESIGNS


def test_a_line_with_nothing_to_send_does_not_stall_and_its_time_begins_with_a_block() -> None:
    one = active()
    step(one, "synced")
    assert one.due(100.0) is None
    give(one.lines[0])
    assert one.due(100.1) is None
    assert one.due(100.0 + PATIENCE) == "stalled"


def test_an_active_member_that_cannot_read_its_input_lets_others_go_first_and_then_leads_on() -> None:
    one = active()
    step(one, "synced")
    one.hindered_since = lambda: 10.0
    assert one.due(10.0) is None
    assert one.due(10.0 + PATIENCE) == "hindered"
    assert ("active", "hindered") in RESIGNS
    now = 10.0 + PATIENCE
    one.step("hindered", now, 0.0)
    assert one.role == "standby"
    for event in ("eligible", "elected", "won", "synced"):
        one.elected(9)
        one.step(event, now, 0.0)  # nobody was better off
    assert one.due(now + LEADS_ON - 1) is None
    assert one.due(now + LEADS_ON) == "hindered"
    one.hindered_since = lambda: None
    assert one.due(now + LEADS_ON) is None


def challenge(*read: int, term: int = 3, run: int = 0) -> Challenge:
    return Challenge(OTHER, run, term, read)


def test_a_leader_that_is_challenged_and_has_not_moved_lets_others_go_first_and_then_leads_on() -> None:
    one = active()
    step(one, "synced")
    one.reach = lambda: Reach((7, 0), (7, 0))
    for now in (0.0, PATIENCE):
        assert one.due(now) is None
    one.hear_challenge(challenge(8, 0, term=2), PATIENCE)  # it was another leader's
    one.hear_challenge(challenge(8, 0, run=1), PATIENCE)
    one.hear_challenge(challenge(7, 0), PATIENCE)
    assert one.due(PATIENCE) is None
    one.hear_challenge(challenge(8, 0), PATIENCE)
    assert one.due(PATIENCE) == "challenged"
    assert ("active", "challenged") in RESIGNS
    one.step("challenged", PATIENCE, 0.0)
    for event in ("eligible", "elected", "won", "synced"):
        one.elected(9)
        one.step(event, PATIENCE, 0.0)
    for now, due in ((PATIENCE + LEADS_ON - 1, None), (PATIENCE + LEADS_ON, "challenged")):
        one.due(now - PATIENCE)
        one.hear_challenge(challenge(8, 0, term=9), now)
        assert one.due(now) == due


def test_only_a_candidate_that_hears_a_leader_challenges_it() -> None:
    one = member()
    one.reach = lambda: Reach((8, 0), (8, 0))
    one.hear(replace(beat(0, 0), pulse=Pulse(0, 0, 0, places=(7,))), 0.0)
    assert one.challenge(PATIENCE) is None
    step(one, "eligible")
    assert one.challenge(PATIENCE) is None  # it is long since the leader was heard
    one.hear(replace(beat(0, 0), pulse=Pulse(0, 0, 0, places=(7,))), PATIENCE)
    assert one.challenge(PATIENCE) == Challenge(ME, 0, 1, (8, 0))
    one.hear(replace(beat(1, 0), pulse=Pulse(0, 0, 0, places=(7,))), 2 * PATIENCE)
    assert one.challenge(2 * PATIENCE) is None  # it could not go on where the bus is


def test_an_active_member_asks_again_often_enough_to_see_a_stall() -> None:
    one = active()
    assert one.look_at(7.0) <= 7.0 + PATIENCE / 10


def test_an_active_member_that_was_overtaken_and_whose_input_does_not_go_on_is_ineligible() -> None:
    one = active()
    step(one, "synced")
    one.hear(beat(0, 5), 1.0)
    assert one.due(1.0) is None
    give(one.lines[1])
    assert one.due(1.0 + BEHIND) is None, "its input goes on"
    assert one.due(1.0 + 2 * BEHIND) == "ineligible"


def test_a_hand_over_waits_for_every_line() -> None:
    one = active((3, 2))
    one.ask_hand_over()
    one.lines[0].acked(3)
    assert one.due(0.0) is None
    give(one.lines[0], 5)
    one.lines[1].acked(2)
    assert one.due(0.0) == "handed over", "what was given after it was asked is not waited for"


def test_a_hand_over_that_nobody_wants_any_more_does_not_happen() -> None:
    one = active()
    step(one, "synced")
    one.ask_hand_over()
    one.keep_leading()
    assert one.due(0.0) is None


# what others say


def test_positions_in_beats_move_m_of_each_line() -> None:
    one = member((3, 3))
    one.hear(beat(2, 1), 0.0)
    assert [line.m for line in one.lines] == [2, 1]


def test_a_beat_of_its_own_says_nothing_new() -> None:
    one = member((3, 3))
    one.hear(beat(2, 1, who=ME), 0.0)
    assert [line.m for line in one.lines] == [0, 0]
    assert not one.others_lead(0.0)


def test_another_member_counts_as_leading_for_a_while_after_its_beat() -> None:
    one = member()
    one.hear(beat(0, 0), 1.0)
    assert one.others_lead(1.0 + HEARD - 0.1) and not one.others_lead(1.0 + HEARD)
    one.hear(beat(0, 0, resigns=True), 5.0)
    assert not one.others_lead(5.0)


def takes_over(one: Membership) -> str:
    one.elected(3)
    step(one, "eligible", "elected", "won")
    return one.fell_silent


def test_whoever_led_before_and_did_not_resign_fell_silent() -> None:
    one = member()
    one.hear(beat(0, 0), 0.0)
    assert takes_over(one) == "other"
    step(one, "suspended")
    assert takes_over(one) == "", "nobody led in between"


def test_whoever_resigned_did_not_fall_silent() -> None:
    one = member()
    one.hear(beat(0, 0), 0.0)
    one.hear(beat(0, 0, resigns=True), 0.0)
    assert takes_over(one) == ""


def test_what_was_said_before_a_member_came_makes_nobody_silent() -> None:
    one = member()
    one.hears(all_of_it=False)
    one.hear(beat(0, 0), 0.0)
    one.hears(all_of_it=True)
    assert takes_over(one) == ""


def test_a_member_of_a_higher_run_ends_this_one() -> None:
    with pytest.raises(Stale):
        member().hear(beat(1, 1, run=1), 0.0)


def test_a_beat_of_a_lower_run_changes_nothing() -> None:
    one = member((3, 3), run=5)
    one.hear(beat(2, 2, run=4), 0.0)
    assert [line.m for line in one.lines] == [0, 0]


def test_another_chain_in_any_line_ends_the_membership() -> None:
    with pytest.raises(InputDiffers):
        member((0, 1)).hear(beat(0, 1, chain=1), 0.0)


UNLIKE = Setup(("t1", "t2"), ("id*:int64", "id*:int64"), "arrow of pyarrow 25", "log")


def test_a_member_that_is_set_up_differently_and_speaks_now_ends_a_newcomer() -> None:
    with pytest.raises(ConfigError, match="body: ours 'rows', theirs 'arrow of pyarrow 25'"):
        member().hear(beat(0, 0, setup=UNLIKE), 0.0)


def test_what_a_group_said_that_is_long_gone_only_makes_a_newcomer_wait() -> None:
    one = member()
    one.hears(all_of_it=False)
    one.hear(beat(0, 0, setup=UNLIKE), 1.0)
    one.hears(all_of_it=True)
    assert one.due(1.0 + HEARD) is None
    assert one.due(1.0 + HEARD + 0.1) == "eligible"


@pytest.mark.parametrize(("nonce", "leaves"), [(ME.nonce - 1, True), (ME.nonce + 1, False)])
def test_of_two_that_came_to_lead_at_once_and_are_not_alike_one_leaves(nonce: int, leaves: bool) -> None:
    one = active()
    one.beat(1, 1, False)
    other = beat(0, 0, setup=UNLIKE, who=Identity("other", nonce, "", "h", 2))
    assert one.hear(other, 0.0) == leaves, "a single beat may be anybody's"
    if leaves:
        with pytest.raises(ConfigError):
            one.hear(other, 0.1)
    else:
        assert not one.hear(other, 0.1)


def test_a_standby_stays_whatever_another_group_says_while_it_hears_its_leader() -> None:
    other = beat(0, 0, setup=UNLIKE, who=Identity("other", ME.nonce - 1, "", "h", 2))
    standby, alone = member(), member()
    standby.hear(beat(0, 0), 0.0)
    for now in (0.1, HEARD - 0.1):
        assert not standby.hear(other, now)
    with pytest.raises(ConfigError):
        standby.hear(other, HEARD + 0.1)
    assert alone.hear(other, 0.0), "a single beat may be anybody's"
    assert alone.due(HEARD) is None
    with pytest.raises(ConfigError):
        alone.hear(other, 0.1)


def test_a_leader_that_beats_before_it_knows_that_it_was_elected_is_the_one_that_stays() -> None:
    """The election's first beat may come before the runner's turn; the other one has heard it, and leaves."""
    one = member()
    step(one, "eligible")
    one.beat(3, 1, False)
    one.elected(3)
    step(one, "elected")
    other = Identity("other", ME.nonce + 1, "", "h", 2)
    one.hear(beat(0, 0, who=other, setup=replace(SETUP, election="token")), 0.0)
    step(one, "lost")
    with pytest.raises(ConfigError, match="set up differently"):
        one.hear(beat(0, 0, who=other, setup=replace(SETUP, election="token")), 0.0)


def test_a_member_that_left_says_nothing_more() -> None:
    one = active()
    step(one, "leave")
    with pytest.raises(Closed):
        one.beat(1, 1, False)


# lines


def test_what_was_sent_by_this_member_and_what_by_another_is_known_by_line() -> None:
    one = active((2, 2))
    one.lines[0].acked(2)
    one.lines[1].heard(0, 2, None)
    assert [line.has_sent(1) for line in one.lines] == [True, False]
    assert [line.delivered for line in one.lines] == [2, 2]


def test_what_was_delivered_stays_delivered_when_leadership_ends() -> None:
    one = active((2, 2))
    one.lines[0].acked(2)
    step(one, "lost")
    assert one.lines[0].delivered == 2
    assert one.lines[1].delivered == 0


def test_a_full_line_takes_no_more_unless_another_one_is_behind() -> None:
    one = member((2, 0))
    one.lines[0].outbox.max_blocks = 2
    assert not one.room(one.lines[0], 1)
    assert one.room(one.lines[1], 1)
    one.hear(beat(0, 4), 0.0)
    assert one.room(one.lines[0], 1), "the input has to go on, or line 2 never gets its blocks"


def test_a_change_of_role_names_the_position_of_each_line() -> None:
    one = member((3, 2))
    one.elected(5)
    assert one.step("eligible", 0.0, 0.0) is not None
    assert one.step("elected", 0.0, 0.0) is None, "others see no difference"
    change = one.step("won", 0.0, 123.0)
    assert change is not None
    assert (change.role, change.event, change.term, change.at) == ("active", "won", 5, 123.0)
    assert [(each.given, each.settled) for each in change.positions] == [(3, 0), (2, 0)]
    assert (change.last, change.m) == (3, 0)


def test_nothing_is_due_for_a_member_that_left() -> None:
    one = member()
    step(one, "leave")
    assert one.due(1e9) is None
    assert one.look_at(0.0) == math.inf
