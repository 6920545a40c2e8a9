"""The vendor's walk-through "Testing Failover with RabbitMQ", step by step: two engines with one model, which adds up
trades, and two file adapters, all of them set up by a `rabbitmq.cfg` in their current directory.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.rabbit import ROOT
from tests.support.rabbitmq import RabbitMQ

TRADES = "id*:int64,symbol:string,quantity:int32"
ENGINE = """
import asyncio, logging, sys
import esp_pubsub as esp
from esp_pubsub import requests

async def answer(question):
    return {"answer": ["tradesRMQ"]}

async def main(cluster, trades):
    bought = {}
    async with esp.init() as client:
        async with (
            client.subscriber(f"dfESP://{cluster}/tradesRMQ/trades/TradesSource", trades, side="in") as source,
            client.publisher(f"dfESP://{cluster}/tradesRMQ/trades/Aggregate24HR", "id*:int64,symbol:string,sum:int64",
                             side="out", failover=esp.Failover("esp")) as sink,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(requests.serve(client.requests(), f"{cluster}/M", answer))
            async for block in source:
                rows = []
                for id, symbol, quantity in block.rows():
                    bought[symbol] = bought.get(symbol, 0) + quantity
                    rows.append((id, symbol, bought[symbol]))
                await sink.inject(rows)

logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("aiormq").setLevel(logging.CRITICAL)
esp.set_pubsub_lib("rabbitmq")
asyncio.run(main(*sys.argv[1:]))
"""
ADAPTER = ["-m", "esp_pubsub.cli", "adapter"]
LINES, RATE = 900, 600  # a block each
PART = 600  # of them, which are there from the start
PATIENCE = 30.0


def until(condition: Callable[[], object], complaint: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, complaint()
        time.sleep(0.02)


class Stage:
    """Two machines, RH1 and RH2, which are directories here."""

    def __init__(self, rabbitmq: RabbitMQ, place: Path) -> None:
        self.cluster = f"{secrets.token_hex(4)}:5555"
        self.output = f"subpersist@{self.cluster}/tradesRMQ/trades/Aggregate24HR/O"
        self._rabbitmq = rabbitmq
        self._place = place
        self._running: list[subprocess.Popen[str]] = []

    def _start(self, folder: str, more: str, *arguments: object) -> subprocess.Popen[str]:
        home = self._place / folder
        home.mkdir(exist_ok=True)
        (home / "rabbitmq.cfg").write_text(
            f'rabbitmq\n{{\n  host = "127.0.0.1"\n  port = "{self._rabbitmq.nodes[0].port}"\n'
            f'  exchange = "Trades"\n  userid = "guest"\n  password = "guest"\n}}\n'
            f"sas\n{{\n  buspersistence = true\n{more}}}\n"
        )
        with (home / "log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)], cwd=home, env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
            )  # fmt: skip
        self._running.append(process)
        return process

    def engine(self, machine: str) -> subprocess.Popen[str]:
        return self._start(machine, "", "-c", ENGINE, self.cluster, TRADES)

    def adapter(self, *words: object) -> subprocess.Popen[str]:
        return self._start("adapters", '  queuename = "subpersist"\n', *ADAPTER, *words, "-t", "csv", "-l", "rabbitmq")

    def file(self, name: str) -> Path:
        return self._place / "adapters" / name

    def logged(self, machine: str, *lines: str) -> None:
        log = self._place / machine / "log"
        for line in lines:
            until(lambda line=line: line in log.read_text(), lambda line=line: f"no {line!r} in {log.read_text()}")

    def queues(self) -> Counter[str]:
        """Those of this cluster that are bound to something; all without a name of their own together."""
        columns = ("source_name", "destination_name", "routing_key")
        listed = json.loads(self._rabbitmq.ctl("list_bindings", *columns, "--formatter", "json"))
        names = [row["destination_name"] for row in listed if row["routing_key"].startswith(self.cluster)]
        named = [row["destination_name"] for row in listed if not row["source_name"] and "#" not in row["routing_key"]]
        return Counter(
            [name for name in named if self.cluster in name]
            + ["amq.gen" for name in names if name.startswith("amq.gen")]
        )

    def has_queues(self, engines: int, *more: str) -> None:
        """What each engine has for its source window and for its group, and a standby to follow the other one; what all
        of them have for metadata; a subscriber's.
        """
        wanted = Counter({"amq.gen": 3 * engines - 1, f"{self.cluster}/M": 1} | dict.fromkeys(more, 1))
        found: list[Counter[str]] = []
        until(lambda: found.append(self.queues()) or found[-1] == wanted, lambda: f"{found[-1]} are not {wanted}")

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def stage(rabbitmq: RabbitMQ, tmp_path: Path) -> Iterator[Callable[[], Stage]]:
    made: list[Stage] = []

    def make() -> Stage:
        place = tmp_path / str(len(made))
        place.mkdir()
        made.append(Stage(rabbitmq, place))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_vendors_walk_through(stage: Callable[[], Stage]) -> None:
    """The file that the subscriber writes is the same whether or not the active engine is ended by Ctrl-C."""
    dice = random.Random(14)
    trades = [(id, dice.choice(("IBM", "SAS", "SAP")), dice.randint(1, 999)) for id in range(1, LINES + 1)]
    written = [walk(stage(), trades, fails=fails) for fails in (False, True)]
    bought: dict[str, int] = {}
    expected = ""
    for id, symbol, quantity in trades:
        bought[symbol] = bought.get(symbol, 0) + quantity
        expected += f"I,N,{id},{symbol},{bought[symbol]}\n"
    assert written[0] == expected
    assert written[1] == written[0]


def walk(stage: Stage, trades: list[tuple[int, str, int]], *, fails: bool) -> str:
    """What the file holds in the end. The input grows, so that it ends behind the takeover, however long that takes."""
    active = stage.engine("RH1")
    stage.logged("RH1", "Hot failover state switched to active")
    stage.engine("RH2")
    stage.logged("RH2", "Hot failover state switched to standby")
    stage.has_queues(2)
    url = f"dfESP://{stage.cluster}/tradesRMQ/trades"
    subscriber = stage.adapter("-k", "sub", "-h", f"{url}/Aggregate24HR?snapshot=false", "-f", "trades1M_aggr24hr.csv")
    stage.has_queues(2, stage.output)
    os.mkfifo(stage.file("trades1M.csv"))
    lines = [f"i,n,{id},{symbol},{many}\n".encode() for id, symbol, many in trades]
    with stage.file("trades1M.csv").open("r+b", buffering=0) as growing:  # for reading too: so it waits for no reader
        growing.write(b"".join(lines[:PART]))
        more = f'rate={RATE},schema="{TRADES}"'
        publisher = stage.adapter("-k", "pub", "-h", f"{url}/TradesSource", "-f", "trades1M.csv", "-C", more)
        output = stage.file("trades1M_aggr24hr.csv")
        until(lambda: output.read_text().count("\n") > LINES / 3, lambda: "too little is written")
        if fails:
            active.send_signal(signal.SIGINT)
            stage.logged(
                "RH2", "Standby sending buffered messages, last message id = ",
                "Standby synced, current message id = ", "Hot failover state switched to active",
            )  # fmt: skip
            assert publisher.poll() is None
            stage.has_queues(1, stage.output)
        growing.write(b"".join(lines[PART:]))
    assert publisher.wait(PATIENCE) == 0
    until(lambda: output.read_text().count("\n") == LINES, lambda: "the file does not become whole")
    subscriber.send_signal(signal.SIGINT)
    assert subscriber.wait(PATIENCE) == 128 + signal.SIGINT
    return output.read_text()
