"""The command line as a user has it: real processes on a private embedded bus, and ways to see what they do."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ESP = [sys.executable, "-m", "esp_pubsub.cli"]
URL = "dfESP://cli:5555/market/cq/Trades"
SCHEMA = "id*:int64,symbol:string,price:double"
LINES = int(os.environ.get("ESP_PUBSUB_LINES", "20000"))
BOUND = max(100.0, LINES / 5_000)


class Cli:
    """Commands on one private bus. What still runs at the end is ended."""

    def __init__(self, bus: Path) -> None:
        self.bus = bus
        self.running: list[subprocess.Popen[str]] = []

    def start(self, command: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
        place = [] if command == "adapter" else ["--set", f"dir={self.bus}"]
        process = subprocess.Popen(
            [*ESP, command, *map(str, arguments), *place],
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            | options,  # type: ignore[call-overload]
        )
        self.running.append(process)
        return process

    def run(self, command: str, *arguments: object, code: int = 0, **options: object) -> tuple[str, str]:
        return ended(self.start(command, *arguments, **options), code)

    def read(self, *arguments: object) -> str:
        """All lines that are there, and no more."""
        return self.run("sub", URL, "-", "--side", "in", "--start", "earliest", *arguments)[0]

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=BOUND)
    assert process.returncode == code, f"{process.args} ended with {process.returncode}: {err}"
    assert "Traceback" not in (err or ""), err
    return out, err


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


def text(first: int, last: int) -> str:
    return "".join(f"{i},SYM{i % 7},{i / 4}\n" for i in range(first, last + 1))


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def listening(process: subprocess.Popen[str]) -> socket.socket:
    assert process.stderr is not None
    found = re.search(r"listening on port (\d+)", process.stderr.readline())
    assert found
    return socket.create_connection(("127.0.0.1", int(found[1])), BOUND)
