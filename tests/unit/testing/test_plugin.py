"""What pytest gets from the package, and the bus in memory."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import esp_pubsub as esp
from esp_pubsub.testing import Faults

URL = "dfESP://test:5555/project/query/window"
TESTS = """
import asyncio
import esp_pubsub as esp

URL = "dfESP://test:5555/project/query/window"

async def publish(number):
    async with esp.init() as client, client.publisher(URL, "id*:int64") as pub:
        await pub.inject([(number,)])

async def test_one(esp_client):
    await publish(1)
    async with esp_client.subscriber(URL, side="in", start="earliest") as sub:
        assert (await anext(sub)).rows() == [(1,)]

async def test_the_next_one_has_a_bus_of_its_own(esp_client):
    assert await esp_client.catalog().topics() == []

def test_faults_reach_a_client_that_others_open(esp_bus, esp_faults):
    esp_faults.refuse(1, error=esp.BusRefused("no"))
    try:
        asyncio.run(publish(1))
    except esp.BusRefused:
        return
    raise AssertionError("nothing was refused")
"""


def test_a_test_has_a_bus_of_its_own_and_faults_for_whoever_opens_a_client(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly",
               "-p", "esp_pubsub.testing.plugin", "-o", "asyncio_mode=auto", "test_it.py"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout


async def test_clients_of_one_name_are_on_the_same_bus_in_memory() -> None:
    async with (
        esp.init("memory", name="one") as one,
        esp.init("memory", name="one") as two,
        esp.init("memory", name="other") as other,
        one.publisher(URL, "id*:int64") as pub,
    ):
        await (await pub.inject([(1,)]))
        assert len(await two.catalog().topics()) == 1
        assert await other.catalog().topics() == []
    with pytest.raises(esp.ConfigError, match="name has 1 to 32 letters"):
        await esp.init("memory", name="../one")


def test_nothing_is_left_of_a_bus_in_memory() -> None:
    program = """
import asyncio
import esp_pubsub as esp

async def main():
    async with esp.init("memory") as client:
        print(client.bus.options.dir)

asyncio.run(main())
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("/") and not Path(said.strip()).parent.exists()


def test_what_goes_wrong_reaches_a_loop_in_another_thread() -> None:
    opened, done = threading.Event(), list[str]()

    async def app() -> None:
        async with esp.init("memory", name="app") as client, client.publisher(URL, "id*:int64") as pub:
            delivery = await pub.inject([(1,)])
            opened.set()
            async with asyncio.timeout(60):
                done.append(await delivery)

    with Faults.everywhere() as faults:
        faults.hang("confirmed")
        thread = threading.Thread(target=asyncio.run, args=(app(),))
        thread.start()
        assert opened.wait(60) and not done
        faults.heal()
        thread.join(60)
    assert done == ["acked"]
