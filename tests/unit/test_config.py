"""Cfg files, the environment and keywords, and what they become."""

import copy
import logging
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_pubsub.config import DURATION, SIZE, SasOptions, Secret, load_options, looks_secret, parse_cfg, without_user
from esp_pubsub.errors import ConfigError

# The shape of a file that SAS users have.
KAFKA_CFG = """\
kafka\x20
{
hostport = "broker1.example.com:9092,broker2:9092"
globalconfig = "enable.sparse.connections=false"
partition = "0"   # never -1
#groupid = "mygroup"
metatopic="ESPAdapterMetapub"
}
sas\x20
{
hotfailover=false
numbufferedmsgs="1000"
dateformat="%Y-%m-%d %H:%M:%S"
}
"""


@dataclass(frozen=True)
class Options:
    host: str = "localhost"
    port: int = 5672
    ratio: float = 0.5
    durable: bool = True
    folder: Path | None = None
    password: str | None = None
    extra: str | None = None
    token_limit: int | None = None
    cache: int = field(default=1024, metadata=SIZE)
    wait: float | None = field(default=5.0, metadata=DURATION)


@dataclass(frozen=True)
class Needy:
    hostport: str


def load(text: str = "", environ: Mapping[str, str] | None = None, **keywords: object) -> Options:
    Path("bus.cfg").write_text(f"bus\n{{\n{text}\n}}\n", encoding="utf-8")
    return load_options(Options, section="bus", environ=environ or {}, keywords=keywords)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_file_as_sas_users_have_it_is_read() -> None:
    assert parse_cfg(KAFKA_CFG) == {
        "kafka": {
            "hostport": "broker1.example.com:9092,broker2:9092",
            "globalconfig": "enable.sparse.connections=false",
            "partition": "0",
            "metatopic": "ESPAdapterMetapub",
        },
        "sas": {"hotfailover": "false", "numbufferedmsgs": "1000", "dateformat": "%Y-%m-%d %H:%M:%S"},
    }


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("", {}),
        ("\ufeff# only a comment\n\n", {}),
        ("a {\n}\nb\n\n{\n\n}", {"a": {}, "b": {}}),
        ("a { } # nothing\nb{}", {"a": {}, "b": {}}),
        ("a\r\n{\r\nk = v\r\n}\r\n", {"a": {"k": "v"}}),
        ('a{\n  k.x-y="" \n}', {"a": {"k.x-y": ""}}),
        ('a{\nk = "b"#c\n}', {"a": {"k": "b"}}),
        ('a{\nk = " a = {b} # \'c\' " # d "e"\n}', {"a": {"k": " a = {b} # 'c' "}}),
        ('a{\nk = "C:\\new"\nl=h:1,g:2/%x\n}', {"a": {"k": "C:\\new", "l": "h:1,g:2/%x"}}),
        ("a{\nk=1\n}b{\nk=2\n}", {"a": {"k": "1"}, "b": {"k": "2"}}),
    ],
)
def test_sections_keys_and_values_are_found(text: str, sections: dict[str, dict[str, str]]) -> None:
    assert parse_cfg(text) == sections


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("hostport = x", 1, "'{' after the name"),
        ("kafka\nsas\n{\n}", 2, "'{' after the name"),
        ("{\n}", 1, "the name of a section"),
        ("}", 1, "the name of a section"),
        ("kafka\n}", 2, "'{' after the name"),
        ("kafka {\n}\n}", 3, "the name of a section"),
        ("kafka {\n}\nkafka {\n}", 3, "not there yet"),
        ("kafka {\nsas {\n}\n}", 2, "key = value"),
        ("kafka {\nk = 1", 2, "section kafka is not closed"),
        ("kafka", 1, "section kafka is not closed"),
        ("kafka {\nk = 1\nk = 2\n}", 3, "cfg:2 too"),
        ("kafka {\nk\n}", 2, "key = value"),
        ("kafka {\nk =\n}", 2, "after 'k ='"),
        ("kafka {\nk = # c\n}", 2, "after 'k ='"),
        ("kafka {\nk = a b\n}", 2, "one word"),
        ("kafka {\nk = 'a'\n}", 2, "in double quotes"),
        ('kafka {\nk = "a\n}', 2, "in double quotes"),
        ('kafka {\nk = "a"b"\n}', 2, "in double quotes"),
        ("kafka {\nk = a#b\n}", 2, "in double quotes"),
        ("kafka {\nk = a=b\n}", 2, "in double quotes"),
        ("kafka {\nk = false;\n}", 2, "in double quotes"),
        ("kafka {\nk == 1\n}", 2, "in double quotes"),
        ("kafka {\n9k = 1\n}", 2, "key = value"),
        ("kafka: {\n}", 1, "the name of a section"),
    ],
)
def test_a_slip_in_a_file_names_file_line_and_what_was_expected(text: str, line: int, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cfg(text, name="x/kafka.cfg")
    assert str(caught.value).startswith(f"x/kafka.cfg:{line}: expected ")
    assert expected in str(caught.value)
    assert caught.value.source == f"x/kafka.cfg:{line}"


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True), st.text("ab #={}';\\%,é")))
def test_every_quoted_value_comes_back_as_it_was_written(values: dict[str, str]) -> None:
    text = "kafka {\n" + "".join(f'{key} = "{value}" # x\n' for key, value in values.items()) + "}"
    assert parse_cfg(text) == {"kafka": values}


@given(st.text('ab #={}";\n\t\r') | st.text())
def test_any_text_is_sections_or_a_named_error(text: str) -> None:
    try:
        parse_cfg(text)
    except ConfigError as error:
        assert error.source.startswith("kafka.cfg")


def test_a_long_line_is_refused_quickly() -> None:
    with pytest.raises(ConfigError):
        parse_cfg("kafka {\nk = a" + " " * 200_000 + "b\n}")
    with pytest.raises(ConfigError):
        parse_cfg("kafka" + " " * 200_000 + "!")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("host", "h-1", "h-1"),
        ("host", "", ""),
        ("port", "-1", -1),
        ("ratio", "1e-3", 0.001),
        ("ratio", "2", 2.0),
        ("durable", "false", False),
        ("durable", "TRUE", True),
        ("durable", "0", False),
        ("folder", "/tmp/x y", Path("/tmp/x y")),
        ("cache", "0", 0),
        ("cache", "65536", 65536),
        ("cache", "512KiB", 512 << 10),
        ("cache", "64 MiB", 64 << 20),
        ("cache", "1.5GiB", 3 << 29),
        ("cache", "999TiB", 999 << 40),
        ("wait", "500ms", 0.5),
        ("wait", "250 us", 0.00025),
        ("wait", "2s", 2.0),
        ("wait", "1.5min", 90.0),
        ("wait", "1h", 3600.0),
    ],
)
def test_a_text_becomes_the_type_of_its_field(key: str, text: str, value: object) -> None:
    for options in (load(f'{key} = "{text}"'), load(environ={f"ESP_PUBSUB_{key.upper()}": text}), load(**{key: text})):
        assert getattr(options, key) == value
        assert type(getattr(options, key)) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "allowed"),
    [
        ("port", "", "whole number"),
        ("port", "1.0", "whole number"),
        ("port", "0x10", "whole number"),
        ("port", "1_000", "whole number"),
        ("port", "9" * 5000, "whole number"),
        ("ratio", "half", "a number"),
        ("ratio", "nan", "a number"),
        ("ratio", "inf", "a number"),
        ("durable", "yes", "true or false"),
        ("durable", "", "true or false"),
        ("folder", "", "a path"),
        ("cache", "64MB", "64MiB"),
        ("cache", "64mib", "64MiB"),
        ("cache", "-1", "64MiB"),
        ("cache", "0.3B", "64MiB"),
        ("wait", "5", "500ms"),
        ("wait", "-5s", "500ms"),
        ("wait", "5S", "500ms"),
        ("wait", "s", "500ms"),
    ],
)
def test_a_wrong_value_names_key_value_source_and_the_allowed_form(key: str, text: str, allowed: str) -> None:
    sources = [
        ("bus.cfg:3", f'{key} = "{text}"', {}, {}),
        (f"environment ESP_PUBSUB_{key.upper()}", "", {f"ESP_PUBSUB_{key.upper()}": text}, {}),
        (f"keyword {key}", "", {}, {key: text}),
    ]
    for source, file, environ, keywords in sources:
        with pytest.raises(ConfigError) as caught:
            load(file, environ, **keywords)
        error = caught.value
        assert str(error).startswith(f"{source}: {key} = {text!r}"[:60])
        assert allowed in str(error)
        assert (error.key, error.value, error.source) == (key, text, source)
        assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("key", "value", "becomes"),
    [
        ("port", 1, 1),
        ("ratio", 1, 1.0),
        ("durable", False, False),
        ("folder", Path("x"), Path("x")),
        ("cache", 7, 7),
        ("wait", 3, 3.0),
        ("wait", 0.25, 0.25),
        ("wait", None, 5.0),
        ("host", None, "localhost"),
        ("port", True, ConfigError),
        ("port", 1.5, ConfigError),
        ("ratio", True, ConfigError),
        ("ratio", 10**400, ConfigError),
        ("durable", 7, ConfigError),
        ("host", b"h", ConfigError),
        ("host", 7, ConfigError),
        ("folder", 7, ConfigError),
        ("cache", -1, ConfigError),
        ("cache", 0.5, ConfigError),
        ("wait", -0.1, ConfigError),
        ("wait", float("inf"), ConfigError),
        ("wait", float("nan"), ConfigError),
    ],
)
def test_a_keyword_may_have_the_type_itself_but_no_other(key: str, value: object, becomes: object) -> None:
    if becomes is ConfigError:
        with pytest.raises(ConfigError, match=f"^keyword {key}: {key} = "):
            load(**{key: value})
    else:
        assert getattr(load(**{key: value}), key) == becomes


def test_keywords_win_over_the_environment_which_wins_over_the_file() -> None:
    text, environ = "host = file\nport = 1\nratio = 1", {"ESP_PUBSUB_PORT": "2", "ESP_PUBSUB_RATIO": "2"}
    options = load(text, environ, ratio=3)
    assert (options.host, options.port, options.ratio, options.cache) == ("file", 2, 3.0, 1024)


def test_what_a_stronger_place_replaces_need_not_be_right() -> None:
    assert load("port = x", port=3).port == 3


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"^bus.cfg:3: bus has no key 'hsot'; the nearest known one is 'host'$"):
        load("hsot = x")
    with pytest.raises(ConfigError, match=r"nearest known one is 'port'"):
        load("PORT = 1")
    with pytest.raises(ConfigError, match=r"^keyword pasword: .*nearest known one is 'password'") as caught:
        load(pasword="hunter2")
    assert "hunter2" not in repr(vars(caught.value))


def test_variables_of_the_environment_that_are_not_of_this_bus_are_left_alone() -> None:
    assert load(environ={"ESP_PUBSUB_HOSTPORT": "x", "PORT": "y", "ESP_PUBSUB_port": "z"}) == Options()


def test_a_missing_value_that_has_no_default_names_the_ways_to_give_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load_options(Needy, section="kafka", environ={})
    for way in ("section kafka of kafka.cfg", "ESP_PUBSUB_HOSTPORT", "keyword hostport"):
        assert way in str(caught.value)
    assert load_options(Needy, section="kafka", environ={}, keywords={"hostport": "h:1"}) == Needy("h:1")


def write(path: str, host: str, section: str = "bus") -> Path:
    file = Path(path)
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{section} {{\nhost = {host}\n}}\n", encoding="utf-8")
    return file


def host(config: str | Path | None = None, place: str = "") -> str:
    return load_options(Options, section="bus", config=config, environ={"ESP_PUBSUB_CONFIG": place}).host


def test_the_file_named_wins_over_the_current_folder_which_wins_over_the_environment() -> None:
    assert host() == "localhost"
    write("else/bus.cfg", "environment")
    assert host(place="else") == "environment"
    assert host(place="else/bus.cfg") == "environment"
    write("bus.cfg", "here")
    assert host(place="else") == "here"
    named = write("my.cfg", "named")
    write("folder/bus.cfg", "folder")
    assert (host(named), host("my.cfg", "else"), host("folder")) == ("named", "named", "folder")


def test_a_place_without_a_file_for_this_bus_is_nothing_but_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    assert host(place=str(tmp_path)) == "localhost"
    for config, place in [("my.cfg", ""), (None, "my.cfg"), (tmp_path, "")]:
        with pytest.raises(ConfigError, match=r"cfg: No such file or directory; name a cfg file"):
            host(config, place)


def test_a_file_with_a_misspelt_section_is_refused() -> None:
    write("bus.cfg", "x", section="buss")
    with pytest.raises(ConfigError, match=r"bus.cfg: expected a section bus; it has buss"):
        host()


def test_a_named_file_of_another_bus_is_refused_but_one_from_the_environment_is_not() -> None:
    write("kafka.cfg", "x", section="kafka")
    assert host(place="kafka.cfg") == "localhost"
    with pytest.raises(ConfigError, match=r"kafka.cfg: expected a section bus; it has kafka"):
        host("kafka.cfg")


@pytest.mark.parametrize("raw", [b"bus {\nhost = \xff\n}", b"#" * ((1 << 20) + 1)])
def test_a_file_that_is_not_text_or_too_large_is_refused(raw: bytes) -> None:
    Path("bus.cfg").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"bus.cfg: over 1048576 bytes or not UTF-8"):
        host()


def test_the_sas_section_of_any_file_has_its_own_options() -> None:
    Path("kafka.cfg").write_text(KAFKA_CFG, encoding="utf-8")
    sas = load_options(SasOptions, section="sas", bus="kafka", environ={"ESP_PUBSUB_FAILOVERGROUP": "g"})
    assert sas == SasOptions(numbufferedmsgs=1000, dateformat="%Y-%m-%d %H:%M:%S", failovergroup="g")
    assert load_options(SasOptions, section="sas", bus="solace", environ={}) == SasOptions()
    write("only.cfg", "x")
    assert load_options(SasOptions, section="sas", bus="bus", config="only.cfg", environ={}) == SasOptions()


SECRET_LINES = [
    'password = "hunter2"',
    'PASSWD = "hunter2"',
    'client.secret = "hunter2"',
    'token = "hunter2"',
    'pass = "hunter2"',
    'ssl.key.pem = "hunter2"',
    'globalconfig = "sasl.username=me;sasl.password=hunter2"',
    'url = "amqp://me:hunter2@host:5672/"',
]


@pytest.mark.parametrize("line", SECRET_LINES)
def test_a_secret_of_a_file_is_never_shown_but_is_there(line: str) -> None:
    values = parse_cfg(f"bus {{\n{line}\n}}")["bus"]
    (value,) = values.values()
    assert isinstance(value, Secret)
    assert "hunter2" in value.reveal()
    assert value == value.reveal()
    for shown in (repr(values), str(value), f"{value}", f"{value:>9}", "%s" % value, "%r" % value, ascii(value)):  # noqa: UP031
        assert "hunter2" not in shown
        assert "***" in shown


@pytest.mark.parametrize("line", ['host = "secret-service:9092"', 'host = "a.pass:1,b.token:2"', 'passive = "n"'])
def test_a_value_that_only_reads_like_a_secret_is_not_hidden(line: str) -> None:
    (value,) = parse_cfg(f"bus {{\n{line}\n}}")["bus"].values()
    assert type(value) is str


def test_a_secret_from_any_source_is_hidden_in_the_options(caplog: pytest.LogCaptureFixture) -> None:
    variants = [load("password = hunter2"), load(environ={"ESP_PUBSUB_PASSWORD": "hunter2"}), load(password="hunter2")]
    for options in [*variants, copy.deepcopy(variants[0]), pickle.loads(pickle.dumps(variants[0]))]:
        logging.getLogger("test").warning("with %s", options)
        assert isinstance(options.password, Secret)
        assert options.password.reveal() == "hunter2"
    assert "***" in caplog.text
    assert "hunter2" not in caplog.text
    assert isinstance(load(extra="a=1;sasl.password=x").extra, Secret)
    assert load(host="a").host == "a"


@pytest.mark.parametrize(
    ("text", "environ", "keywords"),
    [
        ("token_limit = hunter2", {}, {}),
        ("", {"ESP_PUBSUB_TOKEN_LIMIT": "hunter2"}, {}),
        ("", {}, {"token_limit": "hunter2"}),
        ("", {}, {"password": b"hunter2"}),
        ("", {}, {"extra": {"sasl.password": "hunter2"}}),
        ("", {}, {"port": "sasl.password=hunter2"}),
        ("password = hunter2 hunter2", {}, {}),
        ('password = "hunter2', {}, {}),
        ("password hunter2", {}, {}),
        ("host = x\nhunter2", {}, {}),
        ("password = a\npassword = hunter2", {}, {}),
    ],
)
def test_a_secret_that_is_wrong_is_not_in_the_error(
    text: str, environ: dict[str, str], keywords: dict[str, object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, environ, **keywords)
    error = caught.value
    shown = [str(error), repr(vars(error)), repr(error.__context__)]
    assert not [each for each in shown if "hunter2" in each]
    assert "hunter2" not in "".join(traceback.format_exception_only(error))


def test_a_key_of_the_bus_may_stand_in_the_section_sas(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Bus:
        host: str = "localhost"
        buspersistence: bool = False
        queuename: str | None = None

    (tmp_path / "rabbitmq.cfg").write_text(
        'rabbitmq\n{\nhost = "h"\nqueuename = "own"\n}\nsas\n{\nbuspersistence = true\nqueuename = "q"\n'
        "hotfailover = true\n}\n"
    )
    found = load_options(Bus, section="rabbitmq", config=tmp_path, environ={})
    assert found == Bus("h", buspersistence=True, queuename="own")


@pytest.mark.parametrize("value", ["u:hunter2@h:1", "amqp://u:hunter2@h", "a = 1; my.password = x", "x,token=1"])
def test_a_value_with_a_user_or_a_secret_inside_looks_secret(value: str) -> None:
    assert looks_secret("extra", value)


@pytest.mark.parametrize(
    "value", ["passw" * 50_000, "passw" + "a" * 90_000 + " " * 90_000, "://a:" * 50_000, "a=" * 50_000]
)
def test_whether_a_value_looks_secret_is_found_out_in_one_pass(value: str) -> None:
    assert not looks_secret("extra", value)  # by going back again and again it would take minutes


@pytest.mark.parametrize(
    ("place", "shown"),
    [("h:1", "h:1"), ("u:p@h:1", "***@h:1"), ("amqp://u:p@h", "amqp://***@h"), ("a:b@c:1,d:e@f:2", "***@f:2")],
)
def test_what_stands_in_front_of_an_address_is_not_shown(place: str, shown: str) -> None:
    assert without_user(place) == shown
