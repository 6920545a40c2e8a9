"""The judgement of the log election: every rule by itself, then every small log there can be.

Every log up to a length is made: members that read at their own pace write beats and claims, each from what it has
read, and after every message what must hold is checked against a judgement that knows the full log.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from esp_pubsub.failover.ballot import LATER_BEATS, Ballot
from esp_pubsub.failover.belief import TERM_MAX

X, Y, Z = 11, 12, 13


def led_by(nonce: int = X, term: int = 1, beats: int = 0) -> Ballot:
    """A ballot in which a member leads and has beaten so often."""
    ballot = Ballot()
    ballot.term = term - 1
    assert ballot.claim(term, nonce, 0, 0)
    for number in range(1, beats + 1):
        assert ballot.beat(term, nonce, number)
    return ballot


def verdict(ballot: Ballot) -> tuple[bool, int, int | None, int]:
    return ballot.known, ballot.term, ballot.leader, ballot.number


def test_at_the_start_of_a_log_nobody_leads() -> None:
    assert verdict(Ballot()) == (True, 0, None, 0)


def test_the_first_claim_of_the_first_term_leads() -> None:
    ballot = Ballot()
    assert ballot.claim(1, X, 0, 0)
    assert verdict(ballot) == (True, 1, X, 0)


@pytest.mark.parametrize("term", [0, 1, 2, 4, 5, 1 << 31])
def test_a_claim_of_another_term_than_the_next_is_void(term: int) -> None:
    ballot = led_by(X, 2, beats=1)
    before = verdict(ballot)
    assert not ballot.claim(term, Y, X, 1)
    assert verdict(ballot) == before


def test_of_two_claims_of_one_term_the_first_leads() -> None:
    ballot = led_by(X, 1, beats=3)
    assert ballot.claim(2, Y, X, 3)
    assert not ballot.claim(2, Z, X, 3)
    assert ballot.leader == Y


@pytest.mark.parametrize("saw", [0, 1, 2, 3, 4, 5])
def test_a_claim_is_void_if_two_later_beats_of_the_leader_stand_before_it(saw: int) -> None:
    ballot = led_by(X, 1, beats=5)
    assert ballot.claim(2, Y, X, saw) is (5 - saw < LATER_BEATS)


@pytest.mark.parametrize("beats", [0, 1, 2, 3])
def test_a_claim_that_names_a_former_leader_counts_all_beats_of_the_present_one(beats: int) -> None:
    ballot = led_by(X, 2, beats=beats)
    assert ballot.claim(3, Y, Z, 999) is (beats < LATER_BEATS)


def test_nobody_has_to_have_been_read_where_nobody_leads() -> None:
    ballot = led_by(X, 1, beats=9)
    assert ballot.beat(1, X, 10, resigns=True)
    assert verdict(ballot) == (True, 1, None, 10)
    assert ballot.claim(2, Y, 0, 0)


def test_a_leader_that_resigned_leads_no_more_by_a_late_beat() -> None:
    ballot = led_by(X, 1, beats=1)
    ballot.beat(1, X, 2, resigns=True)
    assert not ballot.beat(1, X, 3)
    assert ballot.leader is None


def test_only_the_leader_can_resign() -> None:
    ballot = led_by(X, 1, beats=1)
    assert not ballot.beat(1, Y, 2, resigns=True)
    assert ballot.leader == X


def test_a_leader_may_lead_the_next_term_too() -> None:
    ballot = led_by(X, 1, beats=1)
    assert ballot.claim(2, X, X, 1)
    assert verdict(ballot) == (True, 2, X, 0)


@pytest.mark.parametrize(("term", "nonce"), [(1, X), (2, Y), (0, Z)])
def test_a_beat_of_a_lower_term_or_of_another_member_is_not_the_leaders(term: int, nonce: int) -> None:
    ballot = led_by(X, 2, beats=1)
    before = verdict(ballot)
    assert not ballot.beat(term, nonce, 7)
    assert verdict(ballot) == before


def test_a_member_that_beats_on_in_a_higher_term_leads() -> None:
    """Its claim stood where this reader did not read. A single beat may be anybody's."""
    ballot = led_by(X, 2, beats=1)
    assert not ballot.beat(3, Y, 1)
    assert not ballot.beat(3, Y, 1)
    assert not ballot.beat(3, Z, 2)
    assert not ballot.beat(3, Y, 2)
    assert ballot.beat(2, X, 2)
    assert ballot.beat(3, Y, 3)
    assert verdict(ballot) == (True, 3, Y, 3)


def test_the_first_beat_that_is_read_at_all_leads() -> None:
    """The topic was made again, and its leader lives."""
    ballot = Ballot()
    assert ballot.beat(7, Y, 12)
    assert verdict(ballot) == (True, 7, Y, 12)


def test_after_the_highest_term_comes_the_first() -> None:
    ballot = led_by(X, TERM_MAX, beats=1)
    assert not ballot.claim(TERM_MAX + 1, Y, X, 1)
    assert ballot.claim(1, Y, X, 1)
    assert verdict(ballot) == (True, 1, Y, 0)


def test_a_newcomer_knows_nothing() -> None:
    assert verdict(Ballot(from_start=False)) == (False, 0, None, 0)


@pytest.mark.parametrize("beats", [0, 5])
def test_a_newcomer_takes_any_claim_of_a_higher_term_for_good(beats: int) -> None:
    ballot = Ballot(from_start=False)
    assert ballot.claim(7, Y, X, 3)
    assert verdict(ballot) == (False, 7, Y, 0)
    assert not ballot.claim(7, Z, X, 3)
    assert not ballot.claim(6, Z, X, 3)
    assert ballot.claim(9, Z, X, 3)


def test_the_first_beat_puts_a_newcomer_right() -> None:
    ballot = Ballot(from_start=False)
    ballot.claim(7, Y, X, 3)  # void for the others: X beats on in term 6
    assert ballot.beat(6, X, 9)
    assert verdict(ballot) == (True, 6, X, 9)
    assert not ballot.claim(8, Z, X, 9)
    assert ballot.claim(7, Z, X, 9)


def test_nobody_can_resign_from_a_term_that_was_resigned() -> None:
    ballot = led_by(X, 1, beats=1)
    assert ballot.beat(1, X, 2, resigns=True)
    assert not ballot.beat(1, Y, 9, resigns=True)
    assert verdict(ballot) == (True, 1, None, 2)


def test_a_beat_of_no_term_is_nobodys() -> None:
    assert not Ballot().beat(0, X, 1)


# every small log


@dataclass(frozen=True)
class Said:
    """A message; `read` is how much of the log its writer had read."""

    who: int
    read: int
    term: int
    beat: int = 0
    resigns: bool = False
    saw: tuple[int, int] = (0, 0)


def hear(ballot: Ballot, said: Said) -> bool:
    if said.beat:
        return ballot.beat(said.term, said.who, said.beat, resigns=said.resigns)
    return ballot.claim(said.term, said.who, *said.saw)


Log = tuple[Said, ...]


def read(log: Log, start: int = 0) -> tuple[Ballot, tuple[int, int]]:
    """What a reader of the log thinks, and the last good beat of the term in it."""
    ballot, saw = Ballot(from_start=start == 0), (0, 0)
    for said in log[start:]:
        if hear(ballot, said):
            saw = (said.who, said.beat) if said.beat else (0, 0)
    return ballot, saw


def leads(log: Log, who: int) -> int | None:
    """The term that a member thinks it leads: as LogElection keeps it."""
    ballot, term = Ballot(), None
    for said in log:
        if hear(ballot, said):
            term = said.term if said.who == who and not said.resigns else None
    return term


def following(log: Log, who: int) -> Iterator[Log]:
    """Whatever a member may write next, having read as far as it likes, but never back."""
    before = [said for said in log if said.who == who]
    number = sum(1 for said in before if said.beat) + 1
    for to in range(before[-1].read if before else 0, len(log) + 1):
        term = leads(log[:to], who)
        if term is not None:
            yield (*log, Said(who, to, term, number))
            yield (*log, Said(who, to, term, number, resigns=True))
        else:
            ballot, saw = read(log[:to])
            yield (*log, Said(who, to, ballot.term + 1, saw=saw))


def every_log(members: int, length: int) -> Iterator[Log]:
    logs: list[Log] = [()]
    for _ in range(length):
        logs = [longer for log in logs for who in range(1, members + 1) for longer in following(log, who)]
        yield from logs


@pytest.fixture(scope="module", params=[(2, 6), (3, 4)], ids=["two members", "three members"])
def logs(request: pytest.FixtureRequest) -> list[Log]:
    every = list(every_log(*request.param))
    assert len(every) == len(set(every)) > 3_000
    return every


def test_no_term_ever_has_two_leaders(logs: list[Log]) -> None:
    for log in logs:
        leaders: dict[int, int] = {}
        ballot = Ballot()
        for said in log:
            if hear(ballot, said):
                assert leaders.setdefault(said.term, said.who) == said.who, log
        assert sorted(leaders) == list(range(1, len(leaders) + 1))


def test_readers_from_the_start_that_have_read_the_same_think_the_same(logs: list[Log]) -> None:
    for log in logs:
        readers = [Ballot() for _ in range(3)]
        for said in log:
            assert len({hear(reader, said) for reader in readers}) == 1
            assert len(set(map(verdict, readers))) == 1


def test_a_slow_reader_deposes_nobody(logs: list[Log]) -> None:
    """A claim leads only if its writer had read all of the leader's beats that stand before it, but one at most."""
    for log in logs:
        ballot = Ballot()
        for at, said in enumerate(log):
            leader, term = ballot.leader, ballot.term
            if hear(ballot, said) and not said.beat and leader is not None:
                unread = [s for s in log[said.read : at] if s.beat and s.who == leader and s.term == term]
                assert len(unread) < LATER_BEATS, log


def test_a_newcomer_agrees_with_everybody_from_the_first_beat_of_the_leader_on(logs: list[Log]) -> None:
    for log in logs:
        for start in range(1, len(log)):
            whole = read(log[:start])[0]
            part, agrees = Ballot(from_start=False), False
            for said in log[start:]:
                good, new = hear(whole, said), not part.known
                hear(part, said)
                agrees = agrees or (good and said.beat > 0 and new)
                if agrees:
                    assert verdict(part) == verdict(whole), (log, start)


def test_somebody_can_always_be_elected(logs: list[Log]) -> None:
    """Whoever has read everything can lead the next term."""
    for log in logs:
        ballot, saw = read(log)
        assert ballot.claim(ballot.term + 1, 1, *saw), log
