"""One member's part in a log election: when it leads, when it claims, and what it gives up."""

from typing import Any

import pytest

from esp_pubsub.failover.ballot import SILENT_BEATS, Contender
from esp_pubsub.failover.line import Position
from esp_pubsub.failover.words import Beat, Claim, Identity, Setup

ME, OTHER, THIRD = (Identity(name, nonce, "", "h", 1) for name, nonce in (("me", 10), ("other", 20), ("third", 30)))
SETUP = Setup(("t",), ("id*:int64",), "rows", "log")
BEAT = 0.1
SILENCE = BEAT * SILENT_BEATS


def contender(draw: float = 0.0) -> Contender:
    return Contender(ME, 0, beat=BEAT, draw=lambda: draw)


def beat(who: Identity, term: int, number: int, *, resigns: bool = False) -> Beat:
    return Beat(SETUP, who, 0, term, number, (Position(0, 0, None),), resigns)


def claim(who: Identity, term: int, saw: tuple[int, int] = (0, 0)) -> Claim:
    return Claim(who, 0, term, *saw)


def hear(one: Contender, *said: Any, now: float = 0.0) -> list[bool]:
    return [one.hear(each, now, from_start=True) for each in said]


def leading(term: int = 1) -> Contender:
    one = contender()
    one.campaign()
    hear(one, claim(ME, term))
    assert one.end_campaign() == term
    return one


def test_where_nobody_has_spoken_it_claims_at_once() -> None:
    one = contender()
    assert one.claim_at(5.0) == 5.0
    assert one.claim() == Claim(ME, 0, 1, 0, 0)


def test_it_leads_when_its_own_claim_is_read_back_and_good() -> None:
    one = contender()
    one.campaign()
    assert one.term is None
    hear(one, claim(ME, 1))
    assert (one.term, one.leader, one.is_judged(1)) == (1, ME.nonce, True)


def test_it_does_not_lead_when_another_claim_came_first() -> None:
    one = contender()
    one.campaign()
    assert hear(one, claim(OTHER, 1), claim(ME, 1)) == [True, True], "the wait for its own claim is over"
    assert (one.term, one.leader) == (None, OTHER.nonce)
    assert one.is_judged(1)


def test_it_claims_after_a_silence_and_names_the_last_beat_it_read() -> None:
    one = contender()
    hear(one, beat(OTHER, 4, 7), now=2.0)
    assert one.claim_at(2.0) == pytest.approx(2.0 + SILENCE)
    assert one.claim() == Claim(ME, 0, 5, OTHER.nonce, 7)


def test_silences_differ_so_that_few_claim_at_once() -> None:
    assert contender(1.0).silence() == pytest.approx(contender(0.0).silence() + 2 * BEAT)


def test_it_claims_at_once_when_the_leader_resigned_or_died() -> None:
    one = contender()
    hear(one, beat(OTHER, 4, 7), now=2.0)
    one.died(OTHER.nonce)
    assert one.claim_at(2.0) == 2.0
    hear(one, beat(OTHER, 4, 8), now=3.0)
    assert one.claim_at(3.0) == 3.0, "it wrote that before it died"
    hear(one, claim(THIRD, 5, (OTHER.nonce, 8)), now=4.0)
    assert one.claim_at(4.0) > 4.0
    hear(one, beat(THIRD, 5, 1, resigns=True), now=5.0)
    assert one.claim_at(5.0) == 5.0


def test_the_death_of_a_member_that_does_not_lead_is_no_reason_to_claim() -> None:
    one = contender()
    hear(one, beat(OTHER, 4, 7), now=2.0)
    one.died(THIRD.nonce)
    assert one.claim_at(2.0) > 2.0


def test_it_steps_down_when_it_reads_a_good_claim_of_another_member() -> None:
    one = leading()
    hear(one, claim(OTHER, 2))
    assert one.term is None


def test_it_leads_on_when_it_reads_a_void_claim() -> None:
    one = leading()
    hear(one, beat(ME, 1, 1), beat(ME, 1, 2), claim(OTHER, 2, (ME.nonce, 0)))
    assert one.term == 1


def test_it_steps_down_when_another_member_beats_in_a_higher_term() -> None:
    one = leading()
    hear(one, beat(OTHER, 2, 1))
    assert one.term == 1, "a single beat says nothing: anybody may have written it"
    hear(one, beat(OTHER, 2, 2))
    assert one.term is None


def test_a_claim_that_comes_true_after_its_campaign_is_not_wanted() -> None:
    one = contender()
    one.campaign()
    one.withdraw()
    hear(one, claim(ME, 1))
    assert (one.term, one.unwanted) == (None, 1)


def test_a_campaign_that_is_given_up_in_the_moment_of_its_success_is_not_wanted() -> None:
    one = contender()
    one.campaign()
    hear(one, claim(ME, 1))
    one.withdraw()
    assert (one.term, one.unwanted) == (None, 1)


def test_after_it_resigned_others_go_first() -> None:
    one = leading()
    hear(one, beat(ME, 1, 1), now=1.0)
    assert one.resign() == 1
    hear(one, beat(ME, 1, 2, resigns=True), now=2.0)
    assert one.claim_at(2.0) == pytest.approx(2.0 + 2 * SILENCE)
    hear(one, claim(OTHER, 2), beat(OTHER, 2, 1, resigns=True), now=3.0)
    assert one.claim_at(3.0) == 3.0, "they had their turn"


def test_to_resign_without_leading_is_nothing() -> None:
    assert contender().resign() is None


def test_a_beat_of_the_highest_term_leaves_it_a_term_to_claim() -> None:
    one = contender()
    hear(one, beat(OTHER, (1 << 32) - 1, 1))
    said = one.claim()
    assert said.term == 1
    assert not one.is_judged(1)
    one.campaign()
    hear(one, said)
    assert (one.term, one.is_judged(1)) == (1, True)


def test_its_beats_are_numbered_anew_in_each_term() -> None:
    one = leading()
    assert [one.number(), one.number()] == [1, 2]
    hear(one, claim(OTHER, 2), beat(OTHER, 2, 1, resigns=True))
    one.campaign()
    hear(one, claim(ME, 3))
    assert (one.term, one.number()) == (3, 1)
