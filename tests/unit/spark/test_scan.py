"""The planner's scan against the accept rule: the same blocks, however they are read and cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_pubsub.bus import Break, Message
from esp_pubsub.failover.accept import Accept
from esp_pubsub.spark_bridge import scan as scanning
from esp_pubsub.spark_bridge.offsets import Mark, OffsetRefused, from_json, to_json
from esp_pubsub.spark_bridge.scan import Scan
from esp_pubsub.wire.frame import Frame

from .topic import Topic, cut, line


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")


def delivered(topic: Topic, first: int = 0, *, from_start: bool = True) -> list[int]:
    """The positions that a subscriber gets."""
    accept = Accept(suffix_only=True, from_start=from_start)
    return [each.position for each in accept.receive_all(topic.messages) if isinstance(each, Frame)]


def positions(topic: Topic, start: Mark, end: Mark) -> list[int]:
    """What workers read between two marks."""
    assert end.begun == start.position
    ranges = list(end.ranges())
    return [m.position for m in topic.messages if any(first <= m.position < last for first, last in ranges)]


def batches(scan: Scan, most_rows: int | None) -> Iterator[Mark]:
    while True:
        before = scan.mark
        if scan.advance(most_rows) == before:
            return
        yield scan.mark


def begin(position: int = 0, *, from_start: bool = True) -> Scan:
    return Scan("t/O", Mark(position, 1, from_start))


def trouble() -> Topic:
    """Two sources, both sent again from the middle, one with a second run, among foreign messages and holes."""
    topic = Topic()
    a, b = line(1, 8, rows=3), line(2, 6, rows=2)
    topic.put(*a[:3], b"foreign", *b[:2], None, *a[1:5], b"", *b[1:4], *a[4:], None, *b[2:], *line(1, 3, run=2), a[7])
    return topic


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 6), max_size=20), st.lists(st.one_of(st.none(), st.integers(1, 12)), max_size=12),
    st.lists(st.booleans(), min_size=40, max_size=40),
)  # fmt: skip
def test_blocks_are_the_subscribers_however_read_cut_or_begun_again(
    sizes: list[int], limits: list[int | None], again: list[bool]
) -> None:
    topic, scan, marks = trouble(), begin(), [Mark(0, 1)]
    left, restarts = [*limits, *[None] * 40], iter(again)
    read_to = -1
    for read in cut(topic.messages, sizes):  # the last one may be empty
        read_to = read[-1].position if read else read_to
        scan.take([m for m in read if m.position >= scan.head])
        if scan.advance(left.pop(0)) != marks[-1]:
            marks.append(scan.mark)
            if next(restarts):  # a new process, which reads again what was ahead
                scan = Scan("t/O", from_json(to_json({"t/O": scan.mark}), ("t/O",))["t/O"])
                scan.take([m for m in topic.messages if scan.head <= m.position <= read_to])
    marks += batches(scan, None)
    assert [p for start, end in pairwise(marks) for p in positions(topic, start, end)] == delivered(topic)
    assert marks[-1].counts == {"blocks": 17, "rows": 39, "doubles": 6, "missed": 0, "bad": 2}


def test_a_block_is_never_split_and_one_larger_than_the_limit_goes_alone() -> None:
    topic, scan = Topic(), begin()
    blocks = line(1, 2, rows=2)
    topic.put(*blocks, *line(1, 1, rows=9, behind=blocks[-1]), *line(2, 2, rows=2))
    scan.take(topic.messages)
    marks = [Mark(0, 1), *batches(scan, 4)]
    assert [positions(topic, start, end) for start, end in pairwise(marks)] == [[0, 1], [2], [3, 4]]


def test_nothing_but_doubles_is_no_batch() -> None:
    topic, scan = Topic(), begin()
    topic.put(*line(1, 2))
    scan.take(topic.messages)
    mark = scan.advance(None)
    topic.put(*line(1, 2), b"foreign")
    scan.take(topic.messages[2:])
    assert scan.advance(None) is mark
    assert scan.head == 5


def test_a_batch_ends_in_front_of_the_end_that_was_set() -> None:
    topic, scan = Topic(), begin()
    topic.put(*line(1, 5))
    scan.take(topic.messages)
    assert scan.advance(None, 3).position == 3
    assert scan.advance(None, 3).position == 3
    assert scan.advance(None).position == 5


def test_what_retention_took_in_front_is_counted_as_missed() -> None:
    topic, scan = Topic(10), begin(10)
    topic.put(*line(1, 6)[3:])
    scan.take(topic.messages)
    assert scan.advance(None).counts["missed"] == 3
    assert positions(topic, Mark(10, 1), scan.mark) == [10, 11, 12]


def test_a_query_that_begins_later_misses_nothing() -> None:
    topic, scan = Topic(10), begin(10, from_start=False)
    topic.put(*line(1, 6)[3:])
    scan.take(topic.messages)
    assert scan.advance(None).counts["missed"] == 0
    assert positions(topic, Mark(10, 1), scan.mark) == delivered(topic, from_start=False)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (Break("ring", 5), "5 messages from position 0 on were removed"),
        (Break("ring", None), "messages from position 0 on were removed"),
        (Break("emptied", None, incarnation=True), "purged, or deleted and made anew"),
    ],
)
def test_a_break_is_refused_with_a_reason(broken: Break, said: str) -> None:
    with pytest.raises(OffsetRefused, match=said):
        begin().take([broken])


def test_what_retention_takes_before_a_query_has_begun_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    topic, scan = Topic(), Scan("t/O", Mark(0, 1), fresh=True)
    topic.put(*line(1, 6))
    scan.take([Break("ring", 3)])
    scan.take(topic.messages[3:])
    mark = scan.advance(None)
    assert (mark.begun, mark.position, mark.counts["missed"], mark.counts["blocks"]) == (3, 6, 3, 3)
    assert "what stood from 0 on was removed before the query began" in caplog.text
    with pytest.raises(OffsetRefused, match="removed"):
        scan.take([Break("ring", 3)])


def test_a_query_that_begins_is_refused_a_topic_made_anew() -> None:
    with pytest.raises(OffsetRefused, match="made anew"):
        Scan("t/O", Mark(0, 1), fresh=True).take([Break("emptied", None, incarnation=True)])


def test_one_offset_holds_so_many_passed_ranges_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "PASSED_MOST", 4)
    topic, scan, blocks = Topic(), begin(), line(1, 20)
    for before, block in pairwise(blocks):
        topic.put(before, block)
    scan.take(topic.messages)
    marks = [Mark(0, 1), *batches(scan, None)]
    assert max(len(mark.passed) for mark in marks) == 4
    assert [p for start, end in pairwise(marks) for p in positions(topic, start, end)] == delivered(topic)


def test_an_offset_holds_so_many_sources_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SOURCES_MOST", 3)
    topic, scan = Topic(), begin()
    for source in (1, 2, 3, 1, 4):
        topic.put(*line(source, 1))
    topic.put(*line(5, 1))
    scan.take(topic.messages)
    assert list(scan.advance(None).sources) == [1, 4, 5]
    assert scan.mark.from_start is False
    again = Scan("t/O", scan.mark)
    assert list(again.accept.sources) == list(scan.accept.sources)
    assert again.accept.from_start is scan.accept.from_start


def test_what_is_ahead_is_bounded_and_the_bound_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "BLOCKS_AHEAD", 3)
    topic, scan = Topic(), begin()
    topic.put(*line(1, 3))
    scan.take(topic.messages[:2])
    assert not scan.full
    scan.take(topic.messages[2:])
    assert scan.full
    scan.advance(1)
    assert not scan.full


def test_topics_of_one_query_share_what_may_be_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "ROWS_AHEAD", 8)
    topic, scan = Topic(), Scan("t/O", Mark(0, 1), topics=4)
    topic.put(*line(1, 2))
    scan.take(topic.messages[:1])
    assert not scan.full
    scan.take(topic.messages[1:])
    assert scan.full


def test_what_was_seen_is_ahead_of_the_mark() -> None:
    topic, scan = Topic(), begin()
    topic.put(*line(1, 3, rows=5))
    scan.take(topic.messages)
    scan.advance(5)
    assert (scan.mark.counts["rows"], scan.seen["rows"], scan.seen["blocks"]) == (5, 15, 3)


def test_a_message_is_taken_for_what_it_is() -> None:
    scan = begin()
    scan.take([Message(0, b"foreign"), *[Message(i, f.data) for i, f in enumerate(_frames(), 1)]])
    assert scan.advance(None).counts == {"blocks": 2, "rows": 2, "doubles": 0, "missed": 0, "bad": 1}


def _frames() -> list[Frame]:
    topic = Topic()
    topic.put(*line(1, 2))
    return [
        each
        for each in Accept(suffix_only=True, from_start=True).receive_all(topic.messages)
        if isinstance(each, Frame)
    ]
