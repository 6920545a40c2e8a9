import pickle
from datetime import UTC, datetime

import pytest

from esp_pubsub.errors import ConfigError
from esp_pubsub.events import View
from esp_pubsub.schema import Schema
from esp_pubsub.spark_bridge.options import Options, read_options

URL = "dfESP://h:5555/p/q/w"


def read(**found: str) -> Options:
    return read_options({"url": URL, **found}, "out")


def test_a_url_is_enough() -> None:
    options = read()
    assert options.topics == ("h:5555/p/q/w/O",)
    assert (options.bus, options.side, options.start, options.end) == ("embedded", "out", "earliest", "latest")
    assert (options.schema, options.columns, options.most_rows, options.confirm_as) == (None, (), None, None)


def test_everything_is_read_whatever_its_case_and_goes_to_other_processes() -> None:
    options = read_options(
        {
            "URL": f"{URL}?collapse=true, dfESP://h:5555/p/q/v", "Side": "in", "bus": "kafka", "config": "a.cfg",
            "schema": "id*:int64", "start": "2026-01-31T09:30:00+00:00", "end": "12", "columns": "opcode, id",
            "maxRowsPerTrigger": "100", "confirmAs": "job", "timeout": "7", "bus.hostport": "h:1", "BUS.Dir": "/d",
        },
        "out",
    )  # fmt: skip
    assert options.topics == ("h:5555/p/q/w/I", "h:5555/p/q/v/I")
    assert options.views == (View(collapse=True), View())
    assert options.settings == (("dir", "/d"), ("hostport", "h:1"))
    assert (options.start, options.end) == (datetime(2026, 1, 31, 9, 30, tzinfo=UTC), 12)
    assert (options.columns, options.most_rows, options.timeout) == (("opcode", "id"), 100, 7.0)
    assert options.schema == Schema("id*:int64")
    assert pickle.loads(pickle.dumps(options)) == options


def test_the_side_of_the_option_wins_over_that_of_the_url_and_both_over_the_default() -> None:
    assert read_options({"url": f"{URL}?side=in"}, "out").topics == ("h:5555/p/q/w/I",)
    options = read_options({"url": f"{URL}?side=in", "side": "out"}, "in")
    assert (options.topics, options.side) == (("h:5555/p/q/w/O",), "out")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": ""}, "url names one window"),
        ({"url": f"{URL} {URL}"}, "several different ones"),
        ({"url": "dfESP://h:5555/p"}, "window"),
        ({"side": "left"}, "side is in or out"),
        ({"maxRowsPerTriger": "1"}, "nearest is 'maxrowspertrigger'"),
        ({"maxRowsPerTrigger": "0"}, "maxRowsPerTrigger is a whole number"),
        ({"timeout": "1.5"}, "timeout is a whole number"),
        ({"start": "yesterday"}, "start is earliest"),
        ({"end": "2026-01-31T09:30:00"}, "end is earliest"),
        ({"columns": "colour"}, "columns are some of"),
        ({"schema": "id:int64"}, "key"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(Exception, match=said):
        read(**wrong)


def test_no_url_is_an_error_that_names_the_option() -> None:
    with pytest.raises(ConfigError, match="needs the option url"):
        read_options({}, "out")


@pytest.mark.parametrize(
    "option", [{"bus.password": "hunter2"}, {"password": "hunter2"}, {"bus.sasl_jaas": "password=hunter2"}]
)
def test_a_secret_is_refused_and_not_shown(option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="cfg file") as caught:
        read(**option)
    assert "hunter2" not in str(caught.value)
