import json
from dataclasses import replace

import pytest

from esp_pubsub.spark_bridge.offsets import COUNTS, Mark, OffsetRefused, from_json, to_json

MARK = Mark(
    17, (1 << 64) - 1, False, {(1 << 64) - 1: (1 << 60, 9, 4_000_000_000), 3: (0, 2, None)}, 2, ((3, 5), (9, 10)),
    dict(zip(COUNTS, (4, 1_000, 2, 1, 1), strict=True)),
)  # fmt: skip


def test_an_offset_comes_back_from_json_as_it_was() -> None:
    through = json.loads(json.dumps(to_json({"a/O": MARK, "b/O": Mark(0, None)})))
    assert from_json(through, ("b/O", "a/O")) == {"a/O": MARK, "b/O": Mark(0, None)}
    assert list(from_json(through, ("b/O", "a/O"))["a/O"].sources) == list(MARK.sources)


def test_no_number_is_larger_than_what_every_reader_of_json_has() -> None:
    def numbers(value: object) -> list[int]:
        if isinstance(value, dict | list):
            return [n for each in (value.values() if isinstance(value, dict) else value) for n in numbers(each)]
        return [value] if isinstance(value, int) else []

    assert max(numbers(to_json({"a/O": MARK}))) < 1 << 53


def test_ranges_leave_out_what_was_passed() -> None:
    assert list(MARK.ranges()) == [(2, 3), (5, 9), (10, 17)]
    assert list(replace(MARK, begun=3).ranges()) == [(5, 9), (10, 17)]
    assert list(Mark(5, 1, begun=3, passed=((3, 5),)).ranges()) == []


def test_a_topic_that_has_nothing_in_a_batch_delivers_nothing_again() -> None:
    assert list(Mark(5, 1).ranges()) == []
    assert list(MARK.still().ranges()) == []
    assert MARK.still() == replace(MARK, begun=None, passed=())


@pytest.mark.parametrize(
    "found", [None, [], {}, {"version": 2, "topics": {}}, {"version": 1}, {"version": 1, "topics": {"a/O": {}}}]
)
def test_what_is_no_offset_of_ours_is_refused(found: object) -> None:
    with pytest.raises(OffsetRefused, match="no offset of ours"):
        from_json(found, ("a/O",))  # type: ignore[arg-type]


def test_a_checkpoint_of_another_topic_is_refused_with_both_named() -> None:
    with pytest.raises(OffsetRefused, match=r"one of a/O, the query reads b/O"):
        from_json(to_json({"a/O": MARK}), ("b/O",))
    with pytest.raises(OffsetRefused, match=r"one of a/O, the query reads a/O, b/O"):
        from_json(to_json({"a/O": MARK}), ("a/O", "b/O"))
