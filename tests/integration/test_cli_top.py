"""`esp top`, and what a command shows on a terminal, as a user has it."""

import os
import pty
import re
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.shell import BOUND, SCHEMA, URL, Cli, ended, size, text, until

pytestmark = pytest.mark.timeout(3 * BOUND)


def picture(cli: Cli, *arguments: object) -> dict[str, list[list[str]]]:
    """The tables of `esp top`, by the first word of their heads; a cell has no two blanks in it. And its warnings."""
    tables: dict[str, list[list[str]]] = {"warnings": []}
    for line in cli.run("top", "--once", *arguments)[0].splitlines():
        cells = re.split(r"\s{2,}|(?<=\d) (?=\S)", line.strip())
        if cells[0] in ("topic", "group", "failover (UTC)"):
            rows = tables[cells[0]] = []
        elif ": no standby" in line:
            tables["warnings"].append(line.split())
        else:
            rows.append(line.split())
    return tables


def test_top_shows_topics_members_and_the_last_failover(cli: Cli, tmp_path: Path) -> None:
    feed, out = tmp_path / "feed.csv", tmp_path / "out.csv"
    feed.write_text(text(1, 3))
    group = (URL, SCHEMA, feed, "--follow", "--failover-group", "feed")
    reading = cli.start("sub", URL, out, "--side", "in", "--start", "earliest", "--max-events", 5)
    first = cli.start("pub", *group)
    until(lambda: size(out) == size(feed))
    second = cli.start("pub", *group)
    first.kill()
    with feed.open("a") as more:
        more.write(text(4, 5))
    ended(reading)
    seen, topic, host = picture(cli), URL.removeprefix("dfESP://") + "/I", socket.gethostname()
    (row,) = seen["topic"]
    assert row[:2] == [topic, "5"] and row[5:8] == ["0", "5", "0"]
    members = {row[3]: row for row in seen["group"]}
    assert members[f"{host}:{second.pid}"][:3] == ["feed", "0", "log"]
    assert members[f"{host}:{second.pid}"][4:9] == ["active", "2", "5", "5", "0"]
    assert members[f"{host}:{first.pid}"][4:6] == ["fell", "silent"]
    ((_, *switch, behind, _, _),) = seen["failover (UTC)"]
    assert switch == ["feed", f"{host}:{first.pid}", "fell", "silent", f"{host}:{second.pid}", "2"]
    assert 3 <= int(behind) <= 5, "its first beat may come when it has sent already"
    assert seen["warnings"] == [["feed:", "no", "standby", "could", "take", "over", "now"]]
    assert picture(cli, URL)["group"] and "group" not in picture(cli, URL.replace("Trades", "Others"))
    assert "give it too" in cli.run("top", "--failover-group", "feed", code=2)[1]


def test_top_is_a_live_screen_until_a_signal_comes(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text(text(1, 10))
    cli.run("pub", URL, SCHEMA, feed)
    shown, code = on_a_terminal(cli, lambda shown: b"blocks/s" in shown and b"Trades/I" in shown, "top", out=True)
    assert code == 130
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h"), "the terminal is as it was"


def on_a_terminal(cli: Cli, enough: Callable[[bytes], bool], *command: object, out: bool = False) -> tuple[bytes, int]:
    """What a command shows on a terminal until that is enough, and how it ends by Ctrl-C."""
    mine, theirs = pty.openpty()
    try:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        running = cli.start(*command, **{"stdout" if out else "stderr": theirs}, env=environment)  # type: ignore[arg-type]
        shown, end = b"", time.monotonic() + BOUND
        while not enough(shown):
            assert time.monotonic() < end and select.select([mine], [], [], BOUND)[0], shown
            shown += os.read(mine, 4096)
        running.send_signal(signal.SIGINT)
        code = running.wait(BOUND)
        while select.select([mine], [], [], 0)[0]:
            shown += os.read(mine, 4096)
        return shown, code
    finally:
        os.close(mine)
        os.close(theirs)


def test_a_terminal_sees_how_it_goes(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text(text(1, 100))
    words = (b"100 events, ", b"block 100, acknowledged 100, active")
    publishing = ("pub", URL, SCHEMA, feed, "--follow", "--failover-group", "feed")
    _, code = on_a_terminal(cli, lambda shown: all(word in shown for word in words), *publishing)
    assert code == 130
