"""What needs no bus: help, the extra, keys, history files."""

import ast
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import esp_pubsub
from esp_pubsub import ConfigError, EventFlag, Opcode, Schema
from esp_pubsub.cli.app import app
from esp_pubsub.cli.look import _header
from esp_pubsub.cli.options import adapter_options, failover, pairs, settings
from esp_pubsub.config import SasOptions, load_options
from esp_pubsub.schema import Field, FieldType
from esp_pubsub.testing.history import Delivered, Published, line
from esp_pubsub.transports.rabbitmq.options import RabbitOptions
from esp_pubsub.wire.frame import BLOCK, frames, parse, seal

ROOT = Path(__file__).parents[3]
COMMANDS = [
    "pub",
    "sub",
    "engine",
    "scheduler",
    "pass-over",
    "adapter",
    "topics",
    "tail",
    "top",
    "groups",
    "replay",
    "purge",
    "doctor",
    "check-history",
    "demo",
]
PLACE = {"url": "dfESP://h:1/p/c/w", "fsname": "x.csv"}


def helped(command: str) -> str:
    return " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())


@pytest.mark.parametrize("command", COMMANDS[:-1])
def test_every_command_explains_itself_and_its_exit_codes(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert "130 ended by Ctrl-C" in " ".join(shown.output.split())


def test_the_version_is_said_and_is_that_of_the_package() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"esp-pubsub {esp_pubsub.__version__}\n")
    assert version("esp-pubsub") == esp_pubsub.__version__


def test_every_command_is_listed() -> None:
    assert [
        command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands
    ] == COMMANDS


def test_the_types_of_fields_are_in_the_help_and_in_the_readme() -> None:
    for text in (helped("pub"), " ".join((ROOT / "README.md").read_text().split())):
        (types,) = re.findall(r"types: ([a-z0-9, ()]+)\.", text, re.I)
        assert {field.type for field in Schema([*fields(types)]).fields} == set(FieldType)


def fields(types: str) -> Iterator[Field]:
    for number, type in enumerate(types.split(", ")):
        yield from Schema(f"k*:int32,f{number}:{type}").fields[number > 0 :]


@pytest.mark.parametrize("command", ["pub", "sub"])
def test_that_csv_is_not_as_rfc_4180_has_it_is_in_the_help(command: str) -> None:
    assert "not RFC 4180" in helped(command)


def test_a_schema_without_a_source_is_refused_as_such() -> None:
    refused = CliRunner().invoke(app, ["pub", PLACE["url"], "id*:int64,price:double"])
    assert refused.exit_code == 2 and "the source is missing behind id*:int64,price:double" in refused.output


def test_the_demo_installs_what_it_needs_and_says_so(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    shown = {
        goal: subprocess.run(
            ["make", "-n", "--no-print-directory", goal], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for goal in ("demo", "check")
    }
    assert "--editable '.'" in shown["demo"] and "--editable '.[dev]'" in shown["check"]
    assert "echo 'installing into .venv'" in shown["demo"] and "a minute or two" in shown["check"]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/ready").touch()
    again = subprocess.run(
        ["make", "-n", "--no-print-directory", "demo"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert again == ".venv/bin/python -m esp_pubsub.cli.demo\n"


def test_without_the_extra_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None\nfrom esp_pubsub.cli.__main__ import main; main()"
    refused = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr == (
        "esp: the command line needs typer, which is not installed: pip install 'esp-pubsub[cli]'\n"
    )


def test_nothing_but_the_command_line_imports_typer_or_rich() -> None:
    for path in (ROOT / "esp_pubsub").rglob("*.py"):
        if "cli" in path.parts or "transports" in path.parts or "spark_bridge" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"typer", "rich"} & {name.partition(".")[0] for name in names}, path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1,b=x y", {"a": "1", "b": "x y"}),
        ('schema="id*:int64,x:double",b=2', {"schema": "id*:int64,x:double", "b": "2"}),
        ("a=", {"a": ""}),
        (None, {}),
    ],
)
def test_keys_behind_c(text: str | None, expected: dict[str, str]) -> None:
    assert pairs(text) == expected


@pytest.mark.parametrize("text", ["a", "a=1,,b=2", "a=1,a=2", 'a="1', "=1"])
def test_what_is_no_key_and_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="-C is key=value"):
        pairs(text)


@pytest.mark.parametrize("text", ["a", "=1", "config=x", "on_notice=x"])
def test_settings_are_keys_of_the_bus(text: str) -> None:
    assert settings(["a=b=c"]) == {"a": "b=c"}
    with pytest.raises(ConfigError, match="--set is key=value"):
        settings([text])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("blocksize", "0"), ("blocksize", "many"), ("fstype", "xml"), ("side", "up"), ("header", "-1"), ("rate", "-1"),
        ("addcsvflags", "some"), ("csvincludeschema", "always"), ("periodicity", "soon"),
        ("nosuchkey", "1"), ("type", "both"), ("loglevel", "loud"), ("schema", "id:int64"), ("schema", "id"),
    ],
)  # fmt: skip
def test_a_key_that_cannot_be_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError):
        adapter_options(PLACE, {key: value})


@pytest.mark.parametrize(
    ("type", "key", "value"),
    [
        *(("sub", key, "true") for key in (
            "quiesce", "growinginputfile", "prebuffer", "transactional", "publishwithupsert", "ignorecsvparseerrors",
            "hotfailover",
        )),
        *(("sub", key, "3") for key in (
            "blocksize", "rate", "repeatcount", "failovergroup", "numbufferedmsgs", "zookeeperhostport", "election",
            "run", "header",
        )),
        ("pub", "group", "g"), ("pub", "csvincludeschema", "once"), ("pub", "periodicity", "1"),
        ("pub", "maxfilesize", "1"),
    ],
)  # fmt: skip
def test_a_key_of_the_other_direction_is_refused_by_name(type: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} "):
        adapter_options({**PLACE, "type": type}, {key: value})
    other = "sub" if type == "pub" else "pub"
    assert adapter_options({**PLACE, "type": other}, {key: value}).type == other


def test_a_prebuffered_input_has_an_end() -> None:
    with pytest.raises(ConfigError, match="prebuffer"):
        adapter_options({**PLACE, "type": "pub"}, {"prebuffer": "true", "growinginputfile": "true"})


def test_loglevel_says_how_much_is_said() -> None:
    log = logging.getLogger("esp_pubsub")
    before = log.level
    try:
        adapter_options(PLACE, {}).log()
        assert log.level == before
        for level, number in (("trace", 10), ("warn", 30), ("off", 51)):
            adapter_options(PLACE, {"loglevel": level}).log()
            assert log.level == number
    finally:
        log.setLevel(before)


@pytest.mark.parametrize("given", ["sasl.password=hunter2", "password:hunter2", "hunter2"])
def test_a_value_that_may_be_a_secret_is_not_shown(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings([given])
    assert "hunter2" not in str(refused.value)
    for text in (f"a=1,{given},", f'{given}="', f"a=1,,{given}"):
        with pytest.raises(ConfigError) as refused:
            pairs(text)
        assert "hunter2" not in repr(refused.value) + str(vars(refused.value))


def test_flags_win_over_keys() -> None:
    assert adapter_options({**PLACE, "blocksize": "3", "rate": "5"}, {"blocksize": 4, "rate": None}).blocksize == 4


def test_the_columns_of_opcode_and_flags_are_there_unless_they_are_added() -> None:
    assert adapter_options({}, PLACE).csv().opcode is None
    given = adapter_options(
        {"addcsvopcode": "true", "addcsvflags": "partialupdate", "publishwithupsert": "true"}, PLACE
    )
    assert (given.csv().opcode, given.csv().flags) == (Opcode.UPSERT, EventFlag.PARTIAL)


def test_failover_by_file_and_by_flag() -> None:
    plain = adapter_options({}, PLACE)
    cfg = SasOptions(hotfailover=True, failovergroup="feed", numbufferedmsgs=7, zookeeperhostport="z:2181")
    assert failover(plain, SasOptions(), 0) is None
    assert failover(plain, SasOptions(failovergroup="feed"), 0) is None
    found = failover(plain, cfg, 3)
    assert found is not None
    assert (found.group, found.run, found.buffer, found.election) == ("feed", 3, 7, "zookeeper://z:2181")
    found = failover(adapter_options({}, {**PLACE, "failovergroup": "mine"}), SasOptions(), 0)
    assert found is not None and found.election is None, "the bus knows best"
    found = failover(adapter_options({}, {**PLACE, "failovergroup": "mine", "election": "log"}), cfg, 0)
    assert found is not None and (found.group, found.election) == ("mine", "log")
    with pytest.raises(ConfigError, match="failovergroup"):
        failover(plain, SasOptions(hotfailover=True), 0)


def test_histories_are_judged(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    given = line(Published("p", 1, 0, 1, "d", "acked", 1.0))
    come = line(Delivered("s", 1, 0, 1, "d", 2.0))
    good.write_text(given + come)
    bad.write_text(given + come + come)
    judge = [sys.executable, "-m", "esp_pubsub.cli", "check-history"]
    assert subprocess.run([*judge, good], cwd=ROOT, capture_output=True, check=False).returncode == 0
    judged = subprocess.run([*judge, good, bad], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (judged.returncode, judged.stderr) == (1, "esp: 2 faults\n")
    assert "doubled" in judged.stdout


def test_a_history_that_is_no_text_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "history").write_bytes(b"\xff\xfe")
    judge = [sys.executable, "-m", "esp_pubsub.cli", "check-history", tmp_path / "history"]
    refused = subprocess.run(judge, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "utf-8" in refused.stderr


def test_a_moment_that_no_calendar_has_does_not_end_tail() -> None:
    (message,) = frames([seal(BLOCK, id=1)], settled=0, sent_at=1 << 63)
    assert "after the year 9999" in _header("block", parse(message, 0))


@pytest.mark.parametrize(
    "given", ["password=hunter2", "globalconfig=sasl.username=u;sasl.password=hunter2", "host=u:hunter2@h"]
)
def test_a_secret_on_the_command_line_is_refused_with_the_ways_out(given: str) -> None:
    with pytest.raises(ConfigError, match=r"cfg file, the environment \(ESP_PUBSUB_\w+\), or a descriptor") as caught:
        settings([given])
    assert "hunter2" not in f"{caught.value} {vars(caught.value)}"


def test_a_descriptor_may_hold_the_settings_of_a_bus() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'rabbitmq {\nmode = "stream"\npassword = "hunter2"\n}\n')
    os.close(writing)
    try:
        options = load_options(RabbitOptions, section="rabbitmq", config=f"/dev/fd/{reading}", environ={})
        assert options.password.reveal() == "hunter2"  # type: ignore[attr-defined]
    finally:
        os.close(reading)
