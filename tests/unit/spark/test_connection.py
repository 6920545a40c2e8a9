from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys
from esp_pubsub.spark_bridge.connection import connected
from esp_pubsub.spark_bridge.options import read_options

with connected(read_options({"url": "dfESP://h:1/p/q/w", "bus.dir": sys.argv[1]}, "out")) as connection:
    print(connection.bus.capabilities.replay)
"""


def test_a_program_that_ends_with_a_connection_ends_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "bus")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
