"""`esp engine` as a user of a shell has it; the tutorial's session is played by tests/unit/cli/test_pages.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ESP = [sys.executable, "-m", "esp_pubsub.cli"]
ROOT = Path(__file__).parents[2]
TRADES = ROOT / "tests/unit/windows/trades.xml"
MODEL = """
import esp_pubsub as esp

@esp.model(inputs={"In": "id*:int64"}, outputs={"Out": "id*:int64"})
def passes(window, block, out):
    out.emit("Out", block)

@esp.model(inputs={"In": "id*:int64"}, outputs={"Out": "id*:int64"})
def fails(window, block, out):
    raise ValueError(f"no such row {block.rows()}")

@esp.model(inputs={"In": "id*:int64"}, outputs={"Out": "id*:int64"}, timers=True)
class FailsLate:
    def step(self, window, block, out):
        out.wake("a", out.now + 5_000_000)

    def timer(self, key, out):
        raise ValueError("late")

@esp.model(inputs={"In": "id*:int64"}, outputs={"Out": "id*:int64"}, timers=True)
def timed(window, block, out):
    out.emit("Out", block)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "models.py"
    file.write_text(MODEL)
    return file


def esp(bus: Path, *arguments: object, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ESP, *map(str, arguments), "--set", f"dir={bus}"], cwd=ROOT, input=said, capture_output=True, text=True,
        timeout=60, env=os.environ | {"COLUMNS": "200"}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("named", "url", "more", "says"),
    [
        ("nowhere.py:passes", "dfESP://a:1/p/q", [], "cannot be imported"),
        ("{model}:nothing", "dfESP://a:1/p/q", [], "there is no nothing"),
        ("{model}:passes", "dfESP://a:1/p", [], "contquery"),
        ("{model}:passes", "dfESP://a:1/p/q", ["--window", "Nowhere=dfESP://a:1/p/q/w"], "'Nowhere'"),
        ("{model}:passes", "dfESP://a:1/p/q", ["--window", "In"], "NAME=URL"),
        ("{model}:passes", "dfESP://a:1/p/q", ["--snapshot-every", "0"], "snapshot_every"),
        ("{model}:passes", "dfESP://a:1/p/q", ["--check"], "hold nothing"),
        ("{model}:passes", "dfESP://a:1/p/q", ["--without", "W"], "model.xml"),
        ("nowhere.xml", "dfESP://a:1/p/q", [], "nowhere.xml cannot be read"),
        (str(TRADES), "dfESP://a:1/p/q", [], "line 44, <initializer>: Today() reads the wall clock"),
        (str(TRADES), "dfESP://a:1/p/q", ["--without", "aggWret"], "'aggWret' cannot be left out"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong_and_exits_with_two(
    model: Path, bus_directory: Path, named: str, url: str, more: list[str], says: str
) -> None:
    ended = esp(bus_directory, "engine", named.format(model=model), url, *more)
    assert (ended.returncode, says in ended.stderr) == (2, True), ended.stderr


def test_a_check_of_input_that_has_another_schema_names_both(model: Path, bus_directory: Path) -> None:
    url = "dfESP://a:1/p/q"
    assert esp(bus_directory, "pub", f"{url}/In", "id*:int64,text:string", "-", said="7,a\n").returncode == 0
    ended = esp(bus_directory, "engine", f"{model}:passes", url, "--check")
    assert ended.returncode == 1
    assert "the schema given is id*:int64, the topic a:1/p/q/In/I has id*:int64,text:string" in ended.stderr


def test_a_check_fires_timers_too(model: Path, bus_directory: Path) -> None:
    url = "dfESP://a:1/p/q"
    assert esp(bus_directory, "pub", f"{url}/In", "id*:int64", "-", said="7\n").returncode == 0
    ended = esp(bus_directory, "engine", f"{model}:timed", url, "--check")
    assert (ended.returncode, "1 block of input gave 1 block of output" in ended.stderr) == (0, True), ended.stderr
    fails = esp(bus_directory, "engine", f"{model}:FailsLate", url, "--check")
    assert (fails.returncode, "at its timer 'a'" in fails.stderr) == (1, True), fails.stderr


def test_a_model_of_sas_is_checked_without_the_windows_that_are_left_out(bus_directory: Path) -> None:
    url = "dfESP://a:1/project/contQuery"
    schema = "ID*:int32,symbol:string," + ",".join(
        f"{name}:{kind}" for name, kind in [("currency", "int32"), ("udate", "int64"), ("msecs", "int32"),
        ("price", "double"), *((each, "int32") for each in ("quantity", "venue", "broker", "buyer", "seller")),
        ("buysellflg", "int32"), ("time", "stamp")]
    )  # fmt: skip
    trades = "".join(f"{id},IBM,1,1,1,{id}.5,{id},1,1,1,1,1,{id}000000\n" for id in range(6))
    published = esp(bus_directory, "pub", f"{url}/source_win", schema, "-", "--block-size", "1", said=trades)
    assert published.returncode == 0, published.stderr
    ended = esp(bus_directory, "engine", TRADES, url, "--without", "comp_win", "--check")
    assert "6 blocks of input gave 18 blocks of output" in ended.stderr, ended.stderr


def test_a_model_that_fails_ends_the_command_with_the_block_named(model: Path, bus_directory: Path) -> None:
    url = "dfESP://a:1/p/q"
    assert esp(bus_directory, "pub", f"{url}/In", "id*:int64", "-", said="7\n").returncode == 0
    ended = esp(bus_directory, "engine", f"{model}:fails", url)
    assert ended.returncode == 1
    assert "ValueError in the step on block 1 " in ended.stderr
    assert "no such row [(7,)]" in ended.stderr
    block = re.findall(r"esp pass-over URL (\S+)", ended.stderr)[0]
    assert esp(bus_directory, "pass-over", url, "17").returncode == 2
    assert esp(bus_directory, "pass-over", f"{url}2", block).returncode == 1
    nowhere = esp(bus_directory, "pass-over", url, f"{block}0")
    assert (nowhere.returncode, "in In: copy its name from the error; nothing was written" in nowhere.stderr) == (
        1,
        True,
    )
    passed = esp(bus_directory, "pass-over", url, block)
    assert (passed.returncode, "in In, is passed over" in passed.stderr) == (0, True), passed.stderr


def test_a_member_shows_itself_where_it_is_told_to(model: Path, bus_directory: Path) -> None:
    command = [*ESP, "engine", f"{model}:passes", "dfESP://a:1/p/q", "--http", "0", "--set", f"dir={bus_directory}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as member:
        try:
            assert member.stderr is not None
            place = next(found for line in member.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))[0]
            with urllib.request.urlopen(f"{place}/health", timeout=30) as answer:
                assert json.load(answer)["status"] == "ok"
        finally:
            member.terminate()
            member.communicate(timeout=30)


def test_a_switch_says_what_it_wrote_and_what_is_to_be_done(model: Path, bus_directory: Path) -> None:
    url = "dfESP://a:1/p/q"
    assert esp(bus_directory, "engine", "switch", url).returncode == 2
    assert esp(bus_directory, "engine", "switch", url, "--to", "2").returncode == 1  # there is no engine
    assert esp(bus_directory, "pub", f"{url}/In", "id*:int64", "-", said="7\n").returncode == 0
    assert esp(bus_directory, "engine", f"{model}:fails", url, "--written-order").returncode == 1
    for says in ("members of version '' leave", "version '2' runs already"):
        switched = esp(bus_directory, "engine", "switch", url, "--to", "2")
        assert (switched.returncode, says in switched.stderr) == (0, True), switched.stderr


def test_an_engine_says_how_far_it_is_and_stops(model: Path, bus_directory: Path, tmp_path: Path) -> None:
    url, command = "dfESP://a:1/p/q", [*ESP, "engine"]
    assert esp(bus_directory, "pub", f"{url}/In", "id*:int64", "-", said="7\n8\n").returncode == 0
    kept = ["--snapshots", str(tmp_path / "kept"), "--set", f"dir={bus_directory}"]
    with subprocess.Popen([*command, f"{model}:passes", url, *kept], cwd=ROOT, stderr=subprocess.PIPE) as member:
        try:
            status = esp(bus_directory, "engine", "status", url)
            assert status.returncode == 0, status.stderr
            assert re.search(r"^active, term 1, \d steps?\n", status.stdout), status.stdout
            stopped = esp(bus_directory, "engine", "stop", url)
            assert (stopped.returncode, "the last snapshot begins after it" in stopped.stderr) == (0, True), (
                stopped.stderr
            )
            assert member.wait(30) == 0
        finally:
            member.kill()
