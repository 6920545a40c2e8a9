"""A short run of the fuzzer; `make fuzz` is the long one."""

from collections import Counter

from esp_pubsub.errors import BadBody
from esp_pubsub.events import Block
from esp_pubsub.wire.frame import parse
from tests import fuzz

_REACHED = (
    "bad frame", "bad body", "Frame", "Missed", "double", "stale", "diverged", "read as rows", "Beat", "Claim",
    "StandBy", "Challenge", "entry",
)  # fmt: skip


def test_some_thousand_fuzzed_messages_end_in_typed_errors_or_rows() -> None:
    tally = fuzz.run(6_000, 20_261_118)
    assert tally.wrong == []
    assert tally.items == 6_000
    reached = Counter(tally.outcomes)
    for name in _REACHED:
        assert reached[name] > 10, f"the fuzzer no longer reaches {name}"


def test_every_message_of_the_corpus_is_a_frame_and_its_body_is_read_or_refused() -> None:
    corpus = fuzz.Fuzz(0).corpus
    assert len(corpus) > 20
    for data in corpus:
        assert len(data) < 8_192
        frame = parse(data)
        for read in fuzz.READERS:
            try:
                read(Block(frame, fuzz.SCHEMAS.get(frame.schema, fuzz.ANY), fuzz.VIEWS[3]))
            except BadBody:
                continue


def test_what_is_put_right_is_a_frame_whatever_it_was() -> None:
    for data in fuzz.Fuzz(1).corpus:
        forged = data[:8] + b"\x05" + data[9:70] + b"\xaa" * 8 + data[78:]
        assert parse(fuzz.put_right(forged)).settled & 0xFF == 5
