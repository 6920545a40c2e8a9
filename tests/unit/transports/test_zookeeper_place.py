"""Where an election by ZooKeeper takes place: what a place may say."""

from __future__ import annotations

import re

import pytest

from esp_pubsub.errors import ConfigError
from esp_pubsub.transports.zookeeper import open_election
from esp_pubsub.transports.zookeeper.place import SESSION, Place, read_place


def test_places_that_can_be_used() -> None:
    assert read_place("a:1") == Place("a:1", "/ESP", 1.2)
    assert read_place("a:1,[::1]:2181/x/y?session=2s") == Place("a:1,[::1]:2181", "/x/y", 2.0)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("", "'' is no host:port"),
        ("a", "'a' is no host:port"),
        ("a:1,", "'' is no host:port"),
        ("a:0", "'a:0' is no host:port"),
        ("a:65536", "'a:65536' is no host:port"),
        ("a b:1", "'a b:1' is no host:port"),
        ("a:1/", "the root / cannot be a path: '' is no name"),
        ("a:1/x/", "the root /x/ cannot be a path: '' is no name"),
        ("a:1/x/../y", "'..' is no name"),
        ("a:1/x\x00", "has '\\x00' in it"),
        ("a:1/zookeeper/x", "the root /zookeeper is ZooKeeper's own"),
        ("a:1?", None),
        ("a:1?session", "'session' is no session=<duration>"),
        ("a:1?session=", "'session=' is no session=<duration>"),
        ("a:1?timeout=2s", "'timeout=2s' is no session=<duration>"),
        ("a:1?session=2s&x=1", "is no session=<duration>"),
        ("a:1?session=300ms", "a session is 1s to 3600s long"),
        ("a:1?session=2h", "a session is 1s to 3600s long"),
    ],
)
def test_a_place_that_cannot_be_used_shows_the_right_form(place: str, problem: str | None) -> None:
    if problem is None:
        assert read_place(place).session == SESSION
        return
    with pytest.raises(ConfigError) as refused:
        open_election(place, "group", "m")
    assert problem in str(refused.value)
    assert "expected zookeeper://host:port,host:port/ESP?session=1200ms" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("", "'' is no name"), ("..", "'..' is no name"), ("a/b\n", "'a/b\\n' has '\\n', '/' in it")],
)
def test_a_group_that_is_no_part_of_a_path_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        open_election("a:1", name, "m")


@pytest.mark.parametrize("place", ["u:hunter2@127.0.0.1:1", "a:1,u:hunter2@b:2", "a:1/x?session=u:hunter2@"])
def test_a_user_in_a_place_is_refused_and_not_shown(place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_place(place)
    assert "hunter2" not in f"{caught.value} {vars(caught.value)}"
