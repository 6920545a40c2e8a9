"""Chains by id: the newest of one sequence, and no others."""

import random
from array import array

import pytest

from esp_pubsub.failover import chains
from esp_pubsub.failover.chains import Chains, chains_of


def known(kept: Chains, until: int) -> dict[int, int | None]:
    return {id: kept.get(id) for id in range(-5, until + 5) if kept.get(id) is not None}


def numbers(*chains: int) -> "array[int]":
    return chains_of(chains)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_of_blocks_in_order_the_newest_are_kept_however_many_came(most: int) -> None:
    kept = Chains(most)
    for id in range(1, 40):
        kept.add(id, 1_000 + id)
        assert known(kept, id) == {at: 1_000 + at for at in range(max(1, id - most + 1), id + 1)}


@pytest.mark.parametrize("size", [1, 3, 5, 12])
def test_many_at_once_are_what_each_of_them_is(size: int) -> None:
    kept, each = Chains(5), Chains(5)
    for first in range(1, 40, size):
        kept.extend(first, numbers(*range(first, first + size)))
        for id in range(first, first + size):
            each.add(id, id)
        assert known(kept, first + size) == known(each, first + size)
        assert kept.last == each.last


def test_blocks_that_come_again_from_further_back_take_nothing_away() -> None:
    kept = Chains(10)
    kept.extend(1, numbers(*range(1, 9)))
    kept.add(6, 66)
    kept.extend(3, numbers(33, 44))
    assert known(kept, 20) == {1: 1, 2: 2, 3: 33, 4: 44, 5: 5, 6: 66, 7: 7, 8: 8}
    assert kept.last == 8


def test_what_is_in_front_of_a_gap_is_known_still() -> None:
    kept = Chains(10)
    for id in (1, 2, 3, 9, 10):
        kept.add(id, id)
    assert known(kept, 20) == {1: 1, 2: 2, 3: 3, 9: 9, 10: 10}


@pytest.mark.parametrize("seed", range(50))
def test_in_any_order_the_newest_are_known_and_memory_is_bounded(seed: int) -> None:
    chance, kept, all, most = random.Random(seed), Chains(6), {}, 6
    id = 0
    for chain in range(400):
        id = max(1, chance.choice((id + 1, id + 1, id + 1, id + 4, id - 3)))
        if chance.random() < 0.3:
            kept.extend(id, numbers(chain, chain))
            all |= {id: chain, id + 1: chain}
            id += 1
        else:
            kept.add(id, chain)
            all[id] = chain
        assert kept.last == max(all)
        for known_id in all:
            if known_id > kept.last - most:
                assert kept.get(known_id) == all[known_id]
            assert kept.get(known_id) in (None, all[known_id])
        assert len(kept._line) <= 2 * most + 1
        assert len(kept._aside) <= 2 * most


def of_the_other_order(kind: str, content: bytes = b"") -> "array[int]":
    """An array as a machine of the other byte order reads it."""
    made = array(kind, content)
    made.byteswap()
    return made


def test_frames_are_little_endian_whatever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "array", of_the_other_order)
    monkeypatch.setattr(chains.sys, "byteorder", "big")  # type: ignore[attr-defined]
    assert list(chains_of(bytes([1, 0, 0, 0, 0, 0, 0, 0x80]))) == [1, 1 << 31]
