"""Tervela: what its files and names say, and what is said to who wants to use it."""

from __future__ import annotations

import pytest

from esp_pubsub import set_pubsub_lib
from esp_pubsub.address import Address
from esp_pubsub.errors import ConfigError, NotOffered
from esp_pubsub.transports.tervela import INSTEAD, metadata_topic, read_config, tervela_topic

WINDOW = Address.parse("dfESP://host:5555/project/query/window")


@pytest.mark.parametrize(("side", "end"), [("in", "IN"), ("out", "OUT")])
def test_topics(side: str, end: str) -> None:
    assert tervela_topic("engine", WINDOW, side) == f"SAS.ENGINES.engine.project.query.window.{end}"  # type: ignore[arg-type]


def test_the_topic_of_metadata() -> None:
    assert metadata_topic(WINDOW) == "SAS.META.host:5555"


def test_a_client_config_is_read_and_a_hash_begins_a_comment_at_the_start_of_a_line_only() -> None:
    text = "# ours\nUSERNAME us\nPASSWORD  top secret#1 # 2\n\n  # more\nPRIMARY_TMX\thost:1\nGD_MAX_OUT 100\n"
    found = read_config(text)
    assert found == {"USERNAME": "us", "PASSWORD": "top secret#1 # 2", "PRIMARY_TMX": "host:1", "GD_MAX_OUT": "100"}
    assert "secret" not in repr(found)
    assert set(found) <= set(INSTEAD)


@pytest.mark.parametrize("text", ["USER us", "USERNAME", "USERNAME a\nUSERNAME b", "username us"])
def test_a_line_that_is_none_is_named_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=r"client\.config:[12]: expected one of USERNAME, ") as told:
        read_config(text)
    assert "us" not in str(told.value).replace("USERNAME", "")


def test_who_wants_to_use_it_is_told_what_to_use_instead() -> None:
    with pytest.raises(NotOffered, match=r"withdrawn it\. Use solace, rabbitmq or kafka"):
        set_pubsub_lib("tervela")
