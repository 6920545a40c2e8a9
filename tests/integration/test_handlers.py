"""A handler in a process that is killed, again and again: what its policy promises holds all the same."""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import esp_pubsub as esp

ROOT = Path(__file__).parents[2]
URL = "dfESP://test:5555/project/query/window?side=in"
DEAD = "dfESP://test:5555/project/query/dead?side=in"
BLOCKS, POISONED, KILLS, LIMIT = 200, 7, 8, 100.0
PROGRAM = """
import asyncio, sys
import esp_pubsub as esp

async def work(block):
    [(number,)] = block.rows()
    await asyncio.sleep(0.002)
    if number % 7 == 0:
        raise ValueError(f"{number} is poisoned")
    print(number, flush=True)

async def main():
    end = "skip" if sys.argv[3] == "skip" else esp.dead_letter(sys.argv[3])
    async with esp.init() as client:
        await esp.handle(client, sys.argv[1], work, group="g", on_error=esp.retry(1, delay=0.001).then(end))

esp.run(main)
"""


async def publish() -> None:
    async with esp.init() as client, client.publisher(URL, "id*:int64") as pub:
        for number in range(BLOCKS):
            await pub.inject([(number,)])


async def letters() -> list[int]:
    """The numbers of the dead letters, in order."""
    async with esp.init() as client:
        if "test:5555/project/query/dead/I" not in await client.catalog().topics():
            return []
        end = (await client.bus.bounds("test:5555/project/query/dead/I")).end
        async with client.subscriber(DEAD, start="earliest") as sub:
            return [(await anext(sub)).rows()[0][0] for _ in range(end)]


async def lag() -> int:
    async with esp.init() as client:
        found = await client.groups(URL)
        return found[0].behind if found else BLOCKS


@pytest.mark.parametrize("policy", ["dead letter", "skip"])
def test_a_poisoned_block_is_dealt_with_and_no_other_is_left_out(
    policy: str, bus_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESP_PUBSUB_DIR", str(bus_directory / "bus"))
    asyncio.run(publish())
    command = [sys.executable, "-c", PROGRAM, URL, "", DEAD if policy == "dead letter" else "skip"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    until, kills, handled = time.monotonic() + LIMIT, 0, tmp_path / "handled"
    while asyncio.run(lag()):
        assert time.monotonic() < until, "it does not come to the end"
        with handled.open("a") as output, subprocess.Popen(command, stdout=output, env=environment) as process:
            try:
                before = asyncio.run(lag())
                while (left := asyncio.run(lag())) and (kills >= KILLS or before - left < BLOCKS // (2 * KILLS)):
                    assert time.monotonic() < until, f"{left} blocks are not handled"
                time.sleep(random.random() / 100)
            finally:
                process.kill()
        kills += 1
    done = Counter(int(number) for number in handled.read_text().split())
    poisoned = [number for number in range(BLOCKS) if number % POISONED == 0]
    assert sorted(done) == [number for number in range(BLOCKS) if number % POISONED]
    assert asyncio.run(letters()) == (poisoned if policy == "dead letter" else [])
    assert kills >= KILLS // 2
