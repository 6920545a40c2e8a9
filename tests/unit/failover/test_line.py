"""One line of a failover member: what moves m, what is compared, and when it is eligible."""

from functools import cache

import pytest

from esp_pubsub.errors import InputDiffers, Stale
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.wire.frame import BEAT, BLOCK, ROWS, Frame, Sealed, frames, parse, seal

ANY_BUS = pytest.mark.parametrize("suffix_only", [True, False], ids=["suffix-only", "any bus"])


@cache
def sealed(id_: int, line: str = "A", run: int = 0, source: int = 7) -> Sealed:
    link = sealed(id_ - 1, line, run, source).chain if id_ > 1 else 0
    body = f"{line}{id_}".encode()
    return seal(BLOCK, ROWS, count=1, source=source, run=run, id=id_, link=link, body=body)


def block(id_: int, settled: int = 0, line: str = "A", *, run: int = 0, source: int = 7) -> Frame:
    return parse(frames([sealed(id_, line, run, source)], settled, 0)[0])


def beat(settled: int, *, run: int = 0, source: int = 7) -> Frame:
    return parse(frames([seal(BEAT, source=source, run=run)], settled, 0)[0])


def chain(id_: int, line: str = "A") -> int:
    return sealed(id_, line).chain


def member(given: int = 0, *, suffix_only: bool = True, run: int = 0, buffer: int = 100, line: str = "A") -> Line:
    found = Line(7, run, Outbox(buffer, 1 << 20), suffix_only=suffix_only, buffer=buffer)
    for id_ in range(1, given + 1):
        found.give(sealed(id_, line, run))
    found.reached_end()
    return found


# what is believed of a beat on the control topic


@pytest.mark.parametrize("settled", [3, 10**12, (1 << 64) - 1])
def test_nothing_is_believed_to_be_settled_beyond_what_was_read_or_sent(settled: int) -> None:
    reader, sender = member(), member(2)
    for id_ in (1, 2):
        reader.follow(block(id_))
    sender.acked(2)
    for one in (reader, sender):
        assert not one.heard(0, settled, None)
        assert not one.heard(0, settled, 12_345)
        assert one.m == 2


def test_settled_is_believed_with_the_chain_of_a_block_that_this_member_has_too() -> None:
    one = member(5)
    one.follow(block(1))
    assert not one.heard(0, 4, None)
    assert not one.heard(0, 4, chain(4) ^ 1)
    assert one.m == 1
    assert one.heard(0, 4, chain(4))
    assert (one.m, one.covered) == (4, 4)


def test_a_chain_that_is_not_the_bus_s_moves_nothing_and_ends_nobody() -> None:
    """Also of a block that this member is given only later: it may be forged, and the topic says what is so."""
    reader, sender, behind = member(5), member(5), member(1)
    for id_ in (1, 2, 3):
        reader.follow(block(id_))
        behind.follow(block(id_))
    sender.acked(3)
    for one in (reader, sender, behind):
        for settled in (1, 2, 3, 4):
            assert not one.heard(0, settled, chain(settled) ^ 1)
        assert one.m == 3
    for id_ in (2, 3, 4):
        behind.give(sealed(id_))


def test_who_knows_nothing_of_a_line_believes_a_member_that_beats_on_and_not_a_single_beat() -> None:
    one = member()
    assert not one.heard(0, 7, None, beats_on=False)
    assert one.m == 0
    assert one.heard(0, 7, None, beats_on=True)
    assert one.m == 7


@pytest.mark.parametrize(("beats_on", "m"), [(True, 9), (False, 2)])
def test_who_leads_and_so_reads_nothing_believes_another_leader_that_beats_on(beats_on: bool, m: int) -> None:
    one = member(2)
    one.lead(leads=True)
    one.acked(2)
    one.heard(0, 9, chain(9), beats_on=beats_on)
    assert one.m == m


def test_what_beats_said_before_a_topic_was_read_is_judged_by_what_stands_there() -> None:
    one = member()
    one.rejoin()
    one.heard(0, 10**12, None)
    for id_ in (1, 2):
        one.follow(block(id_))
    one.reached_end()
    assert one.m == 2


@pytest.mark.parametrize(("beats_on", "m"), [(True, 9), (False, 1)])
def test_where_single_messages_are_lost_a_member_that_beats_on_is_believed_further(beats_on: bool, m: int) -> None:
    one = member(suffix_only=False)
    one.follow(block(1))
    one.heard(0, 1, chain(1))
    one.heard(0, 9, chain(9), beats_on=beats_on)
    assert one.m == m


# what moves m


@pytest.mark.parametrize(
    ("suffix_only", "settled", "m"),
    [(True, 0, 3), (True, 2, 3), (False, 0, 0), (False, 2, 2), (False, 3, 3), (False, 9, 3)],
)
def test_blocks_that_its_accept_rule_accepted_move_m(suffix_only: bool, settled: int, m: int) -> None:
    one = member(suffix_only=suffix_only)
    for id_ in (1, 2):
        one.follow(block(id_))
    one.follow(block(3, settled))
    assert one.m == m


@ANY_BUS
def test_a_beat_on_the_topic_moves_m_by_what_is_settled_of_the_blocks_that_came(suffix_only: bool) -> None:
    one = member(suffix_only=suffix_only)
    one.follow(beat(5))
    assert one.m == 0
    for id_ in (1, 2):
        one.follow(block(id_))
    one.follow(beat(1 << 63))
    assert one.m == 2


@ANY_BUS
def test_a_beat_on_the_control_topic_moves_m(suffix_only: bool) -> None:
    one = member(suffix_only=suffix_only)
    one.heard(0, 4, None)
    assert one.m == 4


@ANY_BUS
def test_acknowledgements_move_m_and_empty_the_outbox(suffix_only: bool) -> None:
    one = member(5, suffix_only=suffix_only)
    one.acked(3)
    assert (one.m, one.outbox.first, one.outbox.last) == (3, 4, 5)


@ANY_BUS
def test_m_never_goes_back(suffix_only: bool) -> None:
    one = member(5, suffix_only=suffix_only)
    one.heard(0, 4, None)
    one.heard(0, 2, None)
    one.acked(3)
    one.follow(block(1))
    one.follow(beat(2))
    assert one.m == 4


def test_a_held_block_does_not_move_m() -> None:
    one = member(suffix_only=False)
    one.follow(block(1))
    one.follow(block(3, 1))
    assert one.m == 1 - 1
    one.follow(block(2, 1))  # and with it 3, which says that 1 is settled
    assert one.m == 1


def test_a_newcomer_joins_where_the_first_frame_proves_that_it_may() -> None:
    suffix, any_bus = member(), member(suffix_only=False)
    for one in (suffix, any_bus):
        one.follow(block(8, 5))
    assert (suffix.m, any_bus.m) == (8, 0)
    for id_ in (9, 10):
        any_bus.follow(block(id_, id_ - 2))
    assert any_bus.m == 8


@ANY_BUS
def test_blocks_beyond_the_window_are_not_believed(suffix_only: bool) -> None:
    one = member(suffix_only=suffix_only)
    one.follow(block(1, 0))
    far = seal(BLOCK, ROWS, count=1, source=7, id=600, link=1, body=b"far")
    one.follow(parse(frames([far], 0, 0)[0]))
    assert one.m == (600 if suffix_only else 0)


def test_what_diverged_does_not_move_m() -> None:
    one = member()
    one.follow(block(1))
    one.follow(block(2, 0, "B"))
    one.follow(block(3, 0, "B"))
    assert one.m == 1


@pytest.mark.parametrize("frame", [block(2, source=8), beat(9, source=8)], ids=["block", "beat"])
def test_another_source_is_none_of_its_business(frame: Frame) -> None:
    one = member()
    one.follow(frame)
    assert one.m == 0


@ANY_BUS
def test_a_lower_run_does_not_count(suffix_only: bool) -> None:
    one = member(run=5, suffix_only=suffix_only)
    one.follow(block(2, 2, run=4))
    one.follow(beat(9, run=4))
    one.heard(4, 9, chain(9))
    assert (one.m, one.agreed) == (0, 0)


@pytest.mark.parametrize("how", ["block", "beat", "control"])
def test_a_higher_run_ends_the_membership_and_says_which(how: str) -> None:
    one = member(3, run=5)
    with pytest.raises(Stale, match="run 6 of this group replaced ours, 5") as caught:
        if how == "control":
            one.heard(6, 1, None)
        else:
            one.follow(block(1, run=6) if how == "block" else beat(1, run=6))
    assert (caught.value.run, caught.value.current) == (5, 6)


def test_a_topic_read_anew_begins_where_its_first_frame_says() -> None:
    one = member(9)
    one.follow(block(1))
    one.follow(block(2))
    one.rejoin()
    one.follow(block(6))
    assert one.m == 6


# outbox and eligibility


@ANY_BUS
def test_a_standby_keeps_what_lies_behind_m(suffix_only: bool) -> None:
    one = member(5, suffix_only=suffix_only)
    one.heard(0, 2, chain(2))
    assert [b.id for b in one.outbox.after(0, 10, 1 << 20)] == [3, 4, 5]


def test_blocks_given_behind_the_bus_are_let_go_at_once() -> None:
    one = member()
    one.heard(0, 3, None)
    for id_ in range(1, 6):
        one.give(sealed(id_))
        assert len(one.outbox) == max(0, id_ - 3)
    assert (one.outbox.first, one.outbox.last) == (4, 5)


@pytest.mark.parametrize(
    ("given", "m", "eligible"), [(0, 0, True), (2, 0, True), (2, 2, True), (2, 3, False), (0, 1, False)]
)
def test_eligible_is_who_has_given_ids_up_to_m(given: int, m: int, eligible: bool) -> None:
    one = member(given)
    one.heard(0, m, None)
    assert one.eligible is eligible


def test_whoever_catches_up_becomes_eligible_with_the_block_that_is_m() -> None:
    one = member()
    one.heard(0, 3, None)
    seen = []
    for id_ in range(1, 5):
        one.give(sealed(id_))
        seen.append(one.eligible)
    assert seen == [False, False, True, True]


# chains


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
@pytest.mark.parametrize("how", ["block", "control"])
def test_another_chain_at_one_id_ends_the_membership_with_both_named(order: str, how: str) -> None:
    one = member()

    def ours() -> None:
        for id_ in (1, 2):
            one.give(sealed(id_))

    def theirs() -> None:
        if how == "control":
            one.heard(0, 2, chain(2, "B"))
        else:
            one.follow(block(2, 0, "B"))

    first, second = (ours, theirs) if order == "ours first" else (theirs, ours)
    first()
    with pytest.raises(InputDiffers, match="do not build the same blocks") as caught:
        second()
    assert (caught.value.id, caught.value.ours, caught.value.theirs) == (2, chain(2), chain(2, "B"))
    assert one.agreed == 0


def test_what_differs_moves_m_no_further() -> None:
    one = member(2)
    with pytest.raises(InputDiffers):
        one.heard(0, 2, chain(2, "B"))
    assert one.m == 0


@pytest.mark.parametrize("how", ["block", "control"])
def test_equal_chains_are_remembered_at_the_highest_id(how: str) -> None:
    one = member(3)
    for id_ in (1, 2):
        if how == "control":
            one.heard(0, id_, chain(id_))
        else:
            one.follow(block(id_))
    assert one.agreed == 2


def test_chains_seen_before_ours_are_compared_when_ours_comes() -> None:
    one = member()
    for id_ in (1, 2, 3):
        one.follow(block(id_))
    one.give(sealed(1))
    assert one.agreed == 1
    one.give(sealed(2))
    assert one.agreed == 2


def test_a_block_is_covered_once_its_chain_was_seen_to_be_the_bus_s() -> None:
    one = member(3)
    one.rejoin()
    one.heard(0, 3, None)
    assert (one.m, one.covered) == (0, 0), "it may yet be read"
    one.reached_end()
    assert (one.m, one.covered) == (3, 3), "nobody knows a chain of it"
    one.rejoin()
    assert (one.m, one.covered) == (3, 0)
    two = member(3)
    two.follow(block(2))
    assert not two.heard(0, 3, None)
    assert (two.m, two.covered) == (2, 2), "the topic was followed to 2"


@pytest.mark.parametrize("how", ["forgotten", "before it joined", "by a beat alone"])
def test_what_is_further_back_than_chains_are_known_is_covered_block_by_block(how: str) -> None:
    one = member(buffer=10)
    if how == "by a beat alone":
        one.reached_end()
        one.heard(0, 50, chain(50))
    else:
        for id_ in range(1 if how == "forgotten" else 40, 51):
            one.follow(block(id_))
    for id_ in range(1, 20):
        one.give(sealed(id_, "B"))
        assert one.covered == id_
    with pytest.raises(InputDiffers):  # at the first that can be compared
        for id_ in range(20, 51):
            one.give(sealed(id_, "B"))


def test_what_can_still_be_compared_is_not_covered_before() -> None:
    one = member(40)
    for id_ in range(35, 38):
        one.follow(block(id_))
    assert not one.heard(0, 50, chain(50))
    assert (one.m, one.covered) == (37, 37)
    for id_ in range(38, 51):
        one.follow(block(id_))
    assert one.covered == 40


@pytest.mark.parametrize("buffer", [1, 100])
@ANY_BUS
def test_a_member_that_waits_for_each_block_catches_up_behind_a_sender_that_went_back_and_died(
    suffix_only: bool, buffer: int
) -> None:
    """It had followed the topic to 28, lost its link, and all that came since is the double 26."""
    one = member(20, suffix_only=suffix_only, buffer=buffer) if buffer > 20 else member(buffer=buffer)
    for id_ in range(1, 29):
        one.follow(block(id_, 0 if suffix_only else 28))
    for id_ in range(one.outbox.last + 1, 26):
        one.give(sealed(id_))
    one.rejoin()
    one.follow(block(26, 25))
    for id_ in (26, 27, 28):
        one.give(sealed(id_))
        assert one.covered == id_
    assert one.eligible


@pytest.mark.parametrize("since", [range(1_990, 2_002), range(2_100, 2_110)], ids=["again", "behind a gap"])
def test_what_was_followed_before_the_link_was_lost_is_compared_still(since: range) -> None:
    one = member(buffer=3_000)
    for id_ in range(1, 2_001):
        one.follow(block(id_))
    one.rejoin()
    for id_ in since:
        one.follow(block(id_))
    one.reached_end()
    with pytest.raises(InputDiffers, match="block 1 of this member"):
        one.give(sealed(1, "B"))


def test_nothing_settled_has_no_chain_to_compare() -> None:
    one = member(2)
    one.heard(0, 0, 0)
    one.heard(0, 1, None)
    assert (one.m, one.agreed) == (1, 0)


@pytest.mark.parametrize(("given", "seen", "id_", "found"), [
    (3, 0, 2, "ours"), (0, 3, 2, "theirs"), (3, 3, 2, "ours"), (1, 3, 2, "theirs"), (1, 1, 2, None), (0, 0, 0, None),
])  # fmt: skip
def test_the_chain_of_a_block_is_known_if_it_was_given_or_seen(
    given: int, seen: int, id_: int, found: str | None
) -> None:
    one = member(given)
    for number in range(1, seen + 1):
        one.follow(block(number))
    assert one.chain_at(id_) == (chain(id_) if found else None)


def test_chains_are_kept_of_a_full_buffer_and_of_the_block_in_front_of_it() -> None:
    """That block is the last on the bus, and beats say its chain."""
    one = member(buffer=3)
    for id_ in range(1, 8):
        one.give(sealed(id_))
        one.acked(id_ - 3)
    assert one.m == 4
    assert [id_ for id_ in range(1, 8) if one.chain_at(id_) is not None] == [4, 5, 6, 7]


@pytest.mark.parametrize("given", [0, 4], ids=["behind", "ahead"])
@pytest.mark.parametrize("at_once", [True, False], ids=["in one read", "in two reads"])
def test_a_last_block_that_is_not_whole_moves_nothing_though_its_header_is_right(given: int, at_once: bool) -> None:
    follower = member(given)
    first, second = (frames([sealed(id)], 0, 0)[0] for id in (1, 2))
    for messages in [[first, second[:-1]]] if at_once else [[first], [second[:-1]]]:
        follower.follow_all(list(enumerate(messages)))
    assert (follower.m, len(follower.outbox)) == (1, max(given - 1, 0))
    follower.follow_all([(2, second)])
    assert follower.m == 2
