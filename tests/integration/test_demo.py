"""The demo itself: what it prints and how it ends, with nothing given and on a broker that has seen it before."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.kafka import Kafka

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "esp_pubsub.cli.demo"]


def outcome(*arguments: str) -> dict[str, str]:
    """What it says at its end, by name; it ended well."""
    ended = subprocess.run([*DEMO, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr + ended.stdout
    assert ended.stdout.count("killed publisher") == 2
    return dict(line.strip().split(": ") for line in ended.stdout.splitlines() if ": " in line)


def assert_whole(said: dict[str, str], bus: str, blocks: int) -> None:
    assert said["bus"] == bus
    assert said["sent"] == f"{blocks} blocks, {blocks * 100} events"
    assert (said["acked"], said["received"]) == (str(blocks), str(blocks))
    assert (said["gaps"], said["duplicates"], said["files"]) == ("0", "0", "identical")


def test_the_demo_needs_nothing() -> None:
    assert_whole(outcome("--events", "50000"), "embedded", 500)


def test_publishers_can_be_killed_when_everything_is_published() -> None:
    assert_whole(outcome("--events", "500"), "embedded", 5)


def test_the_demo_runs_twice_on_one_broker(kafka: "Kafka") -> None:
    for _ in range(2):
        assert_whole(outcome("--events", "50000", "--bus", "kafka", f"hostport={kafka.bootstrap}"), "kafka", 500)


def test_the_demo_of_engines_emits_what_an_undisturbed_run_does() -> None:
    command = [sys.executable, "-m", "esp_pubsub.cli.demo_engine", "--events", "6000"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr + ended.stdout
    assert ended.stdout.count("killed engine") == 2
    said = dict(line.strip().split(": ") for line in ended.stdout.splitlines() if ": " in line)
    assert (said["received"], said["gaps"], said["duplicates"]) == ("300", "0", "0")
    assert said["output"] == "that of an undisturbed run"


def test_the_experiment_gives_the_files_of_an_undisturbed_run_although_the_active_engine_is_killed() -> None:
    command = [*DEMO, "engine", "--full", "--trades", "5000"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr + ended.stdout
    for said in (
        ", the active one, at a random point", "Standby sending buffered messages, last message id = ",
        '<window-copy contquery="trades" count="5000" name="Copy24HRRet" project="tradesRMQ"/>',
        "trades_aggr24hr.csv: esp: 9,982 events written, 5,000 blocks",
        "counts: as they have to be", "files: identical to those of an undisturbed run",
    ):  # fmt: skip
        assert said in ended.stdout, ended.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bus", "kafka", "here:9092"], "key=value"),
        (["engine", "--full", "--bus", "kafka", "here:9092"], "key=value"),
        (["engine", "--full", "--trades", "17"], "--trades is a number from 1,000 to 1,000,000"),
        (["engine", "--full", "--keep", "."], "--keep is a new directory"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], says: str) -> None:
    refused = subprocess.run([*DEMO, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
