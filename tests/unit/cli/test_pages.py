"""The pages about the command line do what they show: each is a session of a shell, on a bus of its own."""

import doctest
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = (
    "README", "docs/how-to/files-and-sockets", "docs/how-to/operate", "docs/how-to/come-from-sas",
    "docs/tutorial/first-engine", "docs/tutorial/the-experiment",
)  # fmt: skip
END = "@@ end of a command"
KILLED = re.compile(r"^.*: line \d+: +\d+ Killed .*\n", re.M)  # what a shell says of a job that somebody killed
LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def commands(page: str) -> list[tuple[str, str]]:
    """Every command of a page's console blocks, and what it shows."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], ""))
            elif line.startswith("> "):
                found[-1] = f"{found[-1][0]}\n{line[2:]}", ""
            else:
                found[-1] = found[-1][0], f"{found[-1][1]}{line}\n"
    return found


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def played(session: list[tuple[str, str]], folder: Path, bus: Path) -> list[str]:
    """What each command showed, to whichever of the two outputs."""
    script = folder / "session.sh"
    script.write_text("".join(f"{command}\necho '{END}'\n" for command, _ in session))
    shell = subprocess.Popen(
        ["bash", script], cwd=folder, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {
            "ESP_PUBSUB_DIR": str(bus), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        },
    )  # fmt: skip
    try:
        return KILLED.sub("", shell.communicate(timeout=100)[0]).split(f"{END}\n")
    finally:
        with suppress(ProcessLookupError):  # and whatever it left in the background
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_shows_is_what_happens(name: str, bus_directory: Path, tmp_path: Path) -> None:
    page = (ROOT / f"{name}.md").read_text().replace("5556", free_port())
    session = commands(page)
    for file, text in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.M | re.S):
        (tmp_path / file).write_text(text)
    shown = played(session, tmp_path, bus_directory / "bus")
    assert session and len(shown) == len(session) + 1, shown
    like = doctest.OutputChecker().check_output
    for (command, expected), got in zip(session, shown, strict=False):
        assert like(expected, got, LIKE), f"$ {command}\n{got}"
