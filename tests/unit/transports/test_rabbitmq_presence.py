"""The list of who stands in line, from what the presence exchange was seen to say."""

from __future__ import annotations

import pytest

from esp_pubsub.transports.rabbitmq.presence import Line

A, B, C = "1 a:1 00 f", "2 b:2 00 f", "3 c:3 00 f"


@pytest.mark.parametrize(
    ("heard", "keys"),
    [
        ([], []),
        (["+", A, B], [A, B]),
        (["+", B, C, A], [A, B, C]),  # a summary has no order
        (["+", A, B, "-", A], [B]),
        (["+", A, A, "-", A], []),  # after a restart of the broker a binding is told twice
        (["+", A, B, "-", B, B, "-", C], [A]),  # a queue that was bound twice hears all twice
        (["-", A, "+", A, B], [B]),  # the news of its coming was overtaken
        (["+", B, A.replace(" f", " g"), "amq.gen-1", "", "1 f", "1  f", "x a:1 00 f", "1 a:1 00 f g"], [B]),
        (["+", "10 a:1 00 f", "9 b:2 00 f"], ["9 b:2 00 f", "10 a:1 00 f"]),
        (["+", "1 b:2 00 f", "1 a:1 00 f"], ["1 a:1 00 f", "1 b:2 00 f"]),  # they came at once
        (["x", A, "+", B], [B]),
    ],
)
def test_everybody_has_the_same_list_whatever_order_the_news_comes_in(heard: list[str], keys: list[str]) -> None:
    """After a `+` come keys that are bound, after a `-` those that are unbound."""
    line, action = Line("f"), ""
    for word in heard:
        if word in ("+", "-", "x"):
            action = {"+": "bind", "-": "unbind"}.get(word, word)
        else:
            line.hear(action, word)
    assert line.keys == keys


def test_what_has_no_text_for_a_key_is_passed_over() -> None:
    line = Line("f")
    for key in (None, b"1 a:1 00 f", 1):
        line.hear("bind", key)
    assert line.keys == []


def test_a_new_key_stands_behind_all_others_and_never_comes_again() -> None:
    line = Line("f of g")
    first, other = line.key_behind("a b"), line.key_behind("a b")
    assert first.startswith("1 a_b ") and first.endswith(" f of g") and first != other
    line.hear("bind", first)
    assert line.keys == [first]
    behind = line.key_behind("c")
    line.hear("bind", behind)
    assert line.keys == [first, behind]
    line.hear("unbind", first)
    assert line.keys == [behind]
    assert line.left(first) and not line.left(behind)
    line.hear("bind", first)
    assert line.keys == [behind]
