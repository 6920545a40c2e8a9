from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from esp_pubsub.spark_bridge import connection
from esp_pubsub.spark_bridge.connection import connected
from esp_pubsub.spark_bridge.options import Options, read_options

from .bus import close

_PROGRAM = """
import sys
from esp_pubsub.spark_bridge.connection import connected
from esp_pubsub.spark_bridge.options import read_options

with connected(read_options({"url": "dfESP://h:1/p/q/w", "bus.dir": sys.argv[1]}, "out")) as connection:
    print(connection.bus.capabilities.replay)
"""


def test_a_program_that_ends_with_a_connection_ends_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "bus")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.fixture
def options(bus_directory: Path) -> Options:
    return read_options({"url": "dfESP://h:1/p/q/w", "bus.dir": str(bus_directory)}, "out")


def idle() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "esp spark idle"]


def test_a_connection_is_kept_for_the_next_and_closed_when_nobody_uses_it(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_IDLE", 0.05)
    with connected(options) as one, connected(options) as two:
        assert one is two
        [closing] = idle()
        closing.join(0.2)  # several times what it waits
        assert closing.is_alive()
    closing.join(15)
    assert not closing.is_alive()
    assert not one.portal._thread.is_alive()
    with connected(options) as three:
        assert three is not one
    close()


def test_a_process_does_not_use_the_connection_that_it_had_before_a_fork(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(options) as parents:
        pass
    with monkeypatch.context() as forked:
        forked.setattr(connection, "os", SimpleNamespace(getpid=lambda: -1))
        with connected(options) as childs:
            assert childs is not parents
    with connected(options) as again:
        assert again is parents
    close()
