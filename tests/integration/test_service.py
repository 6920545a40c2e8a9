"""The newcomer's service: whichever process is killed, each order is billed once. The bus is chosen by environment."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.brokers import Kafka, RabbitMQ, settings

ROOT = Path(__file__).parents[2]
ORDERS = int(os.environ.get("ESP_PUBSUB_ORDERS", "300"))
KILLS = 6
LIMIT = 200.0


class Service:
    """Its processes, by name; who is killed is started again."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = os.environ | environment | {"PYTHONPATH": str(ROOT)}
        self._commands: dict[str, list[str]] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: object) -> None:
        self._commands[name] = [sys.executable, "-m", "tests.integration.service", *map(str, arguments)]
        self.running[name] = subprocess.Popen(self._commands[name], cwd=ROOT, env=self._environment)

    def kill(self, name: str) -> None:
        self.running[name].send_signal(random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
        self.running[name].wait(60)
        self.running[name] = subprocess.Popen(self._commands[name], cwd=ROOT, env=self._environment)

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture(params=["embedded", "kafka", "rabbitmq"])
def environment(request: pytest.FixtureRequest, bus_directory: Path) -> dict[str, str]:
    name = request.param
    if name == "embedded":
        return {"ESP_PUBSUB_BUS": name, "ESP_PUBSUB_DIR": str(bus_directory / "bus")}
    broker: Kafka | RabbitMQ = request.getfixturevalue(name)
    found = {"bus": name, "connect_timeout": "60s"} | settings(broker)
    return {f"ESP_PUBSUB_{key.upper()}": value for key, value in found.items()}


@pytest.fixture
def service(environment: dict[str, str]) -> Iterator[Service]:
    service = Service(environment)
    yield service
    service.end()


def billed(path: Path) -> list[int]:
    with closing(sqlite3.connect(path, timeout=30)) as database:
        try:
            return [number for (number,) in database.execute("SELECT number FROM bills")]
        except sqlite3.OperationalError:
            return []


def test_each_order_is_billed_once_whoever_is_killed(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "bills.db"
    for number in (0, 1):
        service.start(f"web {number}", "web", number, ORDERS)
        service.start(f"relay {number}", "relay")
        service.start(f"billing {number}", "billing", path)
    until, kills = time.monotonic() + LIMIT, 0
    while len(done := billed(path)) < ORDERS:
        assert time.monotonic() < until, f"{len(set(done))} of {ORDERS} orders are billed"
        if kills < KILLS and len(done) > kills * ORDERS // (KILLS + 1):
            service.kill(random.choice(("relay", "billing")) + f" {random.choice((0, 1))}")
            kills += 1
        time.sleep(0.05)
    assert sorted(done) == list(range(ORDERS))
