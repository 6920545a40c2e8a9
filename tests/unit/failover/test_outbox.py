"""The outbox: ids without a hole, let go from the front, bounded in blocks and bytes."""

import random

import pytest

from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.wire.frame import BLOCK, ROWS, SEALED_AT, Sealed, seal


def next_block(outbox: Outbox, size: int = 1) -> Sealed:
    return seal(BLOCK, ROWS, count=1, source=7, id=outbox.last + 1, link=outbox.chain, body=b"x" * size)


def filled(count: int, *, size: int = 1, max_blocks: int = 100, max_bytes: int = 1 << 20) -> Outbox:
    outbox = Outbox(max_blocks, max_bytes)
    for _ in range(count):
        outbox.add(next_block(outbox, size))
    return outbox


def size_of(block: Sealed) -> int:
    return block.size


def ids(blocks: list[Sealed]) -> list[int]:
    return [block.id for block in blocks]


def test_a_new_outbox_is_empty_and_waits_for_block_1() -> None:
    outbox = Outbox(10, 1_000)
    assert (outbox.first, outbox.last, outbox.chain, outbox.bytes, len(outbox)) == (1, 0, 0, 0, 0)
    assert outbox.after(0, 10, 1_000) == []


def test_blocks_go_in_one_behind_the_other() -> None:
    outbox = filled(3)
    assert (outbox.first, outbox.last, len(outbox)) == (1, 3, 3)
    assert outbox.chain == outbox.after(2, 1, 1)[0].chain


@pytest.mark.parametrize("id_", [0, 1, 2, 4, 5])
def test_a_block_with_another_id_than_the_next_is_refused(id_: int) -> None:
    outbox = filled(2)
    wrong = seal(BLOCK, ROWS, count=1, source=7, id=id_, link=outbox.chain, body=b"x")
    with pytest.raises(ValueError, match=f"block {id_} does not follow block 2"):
        outbox.add(wrong)
    assert ids(outbox.after(0, 10, 1 << 20)) == [1, 2]


def test_a_block_with_another_link_than_our_chain_is_refused() -> None:
    outbox = filled(2)
    wrong = seal(BLOCK, ROWS, count=1, source=7, id=3, link=outbox.chain ^ 1, body=b"x")
    with pytest.raises(ValueError, match="does not follow"):
        outbox.add(wrong)
    assert outbox.last == 2


@pytest.mark.parametrize(
    ("past", "left"), [(-1, [1, 2, 3]), (0, [1, 2, 3]), (1, [2, 3]), (2, [3]), (3, []), (4, []), (1 << 63, [])]
)
def test_trim_lets_go_from_the_front_and_never_of_what_is_not_there(past: int, left: list[int]) -> None:
    outbox = filled(3)
    outbox.settle(past)
    assert ids(outbox.after(0, 10, 1 << 20)) == left
    assert (outbox.first, outbox.last) == (4 - len(left), 3)
    assert outbox.bytes == sum(map(size_of, outbox.after(0, 10, 1 << 20)))


def test_an_outbox_that_was_emptied_goes_on_with_the_next_id() -> None:
    outbox = filled(3)
    outbox.settle(3)
    outbox.add(next_block(outbox))
    assert (outbox.first, outbox.last, len(outbox)) == (4, 4, 1)


def test_trimming_twice_changes_nothing() -> None:
    outbox = filled(3)
    outbox.settle(2)
    outbox.settle(2)
    outbox.settle(1)
    assert ids(outbox.after(0, 10, 1 << 20)) == [3]


@pytest.mark.parametrize(
    ("after", "blocks", "size", "found"),
    [
        (0, 10, 1 << 20, [1, 2, 3, 4]),
        (0, 2, 1 << 20, [1, 2]),
        (2, 10, 1 << 20, [3, 4]),
        (3, 10, 1 << 20, [4]),
        (4, 10, 1 << 20, []),
        (9, 10, 1 << 20, []),
        (0, 0, 1 << 20, []),
        (0, -5, 1 << 20, []),
        (0, 10, 0, [1]),  # never none because one is large
        (0, 10, 2 * (SEALED_AT + 50), [1, 2]),
        (0, 10, 3 * (SEALED_AT + 50) - 1, [1, 2]),
    ],
)
def test_what_comes_after_an_id_stays_within_both_bounds(after: int, blocks: int, size: int, found: list[int]) -> None:
    outbox = filled(4, size=50 - next_block(Outbox(1, 1), 0).size + SEALED_AT)
    assert ids(outbox.after(after, blocks, size)) == found


def test_what_was_let_go_is_passed_over() -> None:
    outbox = filled(5)
    outbox.settle(2)
    assert ids(outbox.after(0, 10, 1 << 20)) == [3, 4, 5]


def test_one_block_always_fits_into_an_empty_outbox() -> None:
    outbox = Outbox(1, 1)
    assert outbox.room(1 << 40)
    outbox.add(next_block(outbox, 100))
    assert not outbox.room(0)
    outbox.settle(1)
    assert outbox.room(1 << 40)


def test_room_ends_at_the_bound_of_blocks() -> None:
    outbox = filled(3, max_blocks=3)
    assert not outbox.room(0)
    outbox.settle(1)
    assert outbox.room(0)


def test_room_ends_at_the_bound_of_bytes() -> None:
    outbox = filled(2, max_bytes=1_000)
    left = 1_000 - outbox.bytes
    assert outbox.room(left)
    assert not outbox.room(left + 1)


def test_bytes_are_the_sum_of_what_is_in_it_whatever_went_in_and_out() -> None:
    rng = random.Random(5)
    outbox = Outbox(50, 1 << 20)
    for _ in range(2_000):
        if rng.random() < 0.6 and outbox.room(300):
            outbox.add(next_block(outbox, rng.randrange(200)))
        else:
            outbox.settle(outbox.first + rng.randrange(3) - 1)
        held = outbox.after(outbox.first - 1, 1_000, 1 << 30)
        assert ids(held) == list(range(outbox.first, outbox.last + 1))
        assert len(held) == len(outbox) <= 50
        assert outbox.bytes == sum(map(size_of, held))


class NoRoom(dict[int, Sealed]):
    """Memory ends while a table grows."""

    def __setitem__(self, key: int, value: Sealed) -> None:
        raise MemoryError


def test_a_block_for_which_there_is_no_memory_was_never_added() -> None:
    outbox = Outbox(10, 1 << 20)
    first = seal(BLOCK, id=1, body=b"x")
    outbox.add(first)
    second = seal(BLOCK, id=2, link=first.chain, body=b"y")
    kept, outbox._blocks = outbox._blocks, NoRoom()
    with pytest.raises(MemoryError):
        outbox.add(second)
    outbox._blocks = kept
    assert (outbox.last, outbox.chain, outbox.bytes) == (1, first.chain, first.size)
    outbox.add(second)
    assert outbox.last == 2
