"""The service of docs/tutorial/service.md, word for word: whoever is killed, each order is billed once, on any bus."""

import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.brokers import Kafka, RabbitMQ, settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial" / "service.md"
ORDERS = int(os.environ.get("ESP_PUBSUB_ORDERS", "300"))
KILLS = 6
LIMIT = 200.0


class Service:
    """Its processes, by name, in a folder with the files of the page; who is killed is started again."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.bills = folder / "bills.db"
        self._folder = folder
        self._environment = os.environ | environment | {"PYTHONPATH": str(ROOT)}
        self._commands: dict[str, list[str]] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for text in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M):
            (folder / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)  # type: ignore[index]

    def start(self, name: str, *command: str) -> None:
        self._commands[name] = [sys.executable, *command]
        self._run(name)

    def kill(self, name: str) -> None:
        self.running[name].send_signal(random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
        self.running[name].wait(60)
        self._run(name)

    def _run(self, name: str) -> None:
        self.running[name] = subprocess.Popen(self._commands[name], cwd=self._folder, env=self._environment)

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
def service(environment: dict[str, str], tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path, environment)
    yield service
    service.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def order(ports: list[int]) -> None:
    """Give the orders, to one server after the other."""
    for number in range(ORDERS):
        with httpx.Client(base_url=f"http://127.0.0.1:{ports[number % len(ports)]}", timeout=60) as web:
            answer = web.post("/orders", json={"id": number, "amount": number / 4})
        assert answer.status_code in (200, 503), answer.text  # 503: it is still tried


def wait_until_open(ports: list[int]) -> None:
    until = time.monotonic() + LIMIT
    for port in ports:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert time.monotonic() < until, "the web servers do not answer"
            time.sleep(0.05)


def billed(path: Path) -> list[int]:
    with closing(sqlite3.connect(path, timeout=30)) as database:
        try:
            return [number for (number,) in database.execute("SELECT number FROM bills")]
        except sqlite3.OperationalError:
            return []


def test_each_order_is_billed_once_whoever_is_killed(service: Service) -> None:
    ports = [free_port(), free_port()]
    for number, port in enumerate(ports):
        service.start(f"web {number}", "-m", "uvicorn", "web:app", "--port", str(port), "--log-level", "warning")
        service.start(f"relay {number}", "relay.py")
        service.start(f"billing {number}", "billing.py")
    wait_until_open(ports)
    until, kills = time.monotonic() + LIMIT, 0
    with ThreadPoolExecutor(1) as pool:
        ordering = pool.submit(order, ports)
        while len(done := billed(service.bills)) < ORDERS:
            assert time.monotonic() < until, f"{len(set(done))} of {ORDERS} orders are billed"
            if ordering.done():
                ordering.result()
            if kills < KILLS and len(done) > kills * ORDERS // (KILLS + 1):
                service.kill(random.choice(("relay", "billing")) + f" {random.choice((0, 1))}")
                kills += 1
            time.sleep(0.05)
        ordering.result()
    assert sorted(done) == list(range(ORDERS))
    assert kills, "nobody was killed, so it was no test"
