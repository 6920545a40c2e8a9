"""A program that is run by `esp.run` ends in order when a signal comes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, logging, os, signal, sys
import esp_pubsub as esp
from esp_pubsub.testing import Faults
logging.basicConfig(format="%(message)s", stream=sys.stdout)
URL = "dfESP://test:5555/project/query/window"

async def forever():
    print("ready", flush=True)
    await asyncio.Event().wait()
"""


@contextmanager
def program(directory: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + text], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={"PYTHONPATH": str(ROOT), "ESP_PUBSUB_DIR": str(directory)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, errors = process.communicate(timeout=60)
    return process.returncode, out + errors


OPEN = """
async def main():
    client = await esp.init()  # nobody closes it
    pub = await client.publisher(URL, "id*:int64")
    await pub.inject([(1,)])
    await forever()

esp.run(main)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_closes_what_is_open_and_is_the_exit_code(bus_directory: Path, number: int, code: int) -> None:
    with program(bus_directory, OPEN) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert ended(process) == (code, "")


def test_a_program_that_returns_ends_with_0_and_what_it_left_open_was_sent(bus_directory: Path) -> None:
    with program(bus_directory, OPEN.replace("    await forever()\n", "") + "print('over')\n") as process:
        assert ended(process) == (0, "over\n")
    read = """
async def main():
    async with esp.init() as client, client.subscriber(URL, side="in", start="earliest") as sub:
        print((await anext(sub)).rows())

esp.run(main)
"""
    with program(bus_directory, read) as process:
        assert ended(process) == (0, "[(1,)]\n")


def test_what_main_raises_comes_out_and_is_exit_code_1(bus_directory: Path) -> None:
    with program(bus_directory, OPEN.replace("forever()", "client.ask('x', 1)")) as process:
        code, said = ended(process)
        assert code == 1 and "AddressError" in said.splitlines()[-1]


def test_blocks_that_could_not_be_sent_are_named(bus_directory: Path) -> None:
    text = OPEN.replace('"id*:int64")', '"id*:int64", options=esp.PublisherOptions(close_timeout=0.1))')
    text = text.replace("pub = await", 'Faults.into(client).hang("confirmed"); pub = await')
    with program(bus_directory, text) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        code, said = ended(process)
        assert code == 143 and "blocks 1 to 1 on test:5555/project/query/window/I are not acknowledged" in said


def test_a_second_signal_ends_it_at_once(bus_directory: Path) -> None:
    text = """
async def main():
    try:
        await forever()
    finally:
        print("closing", flush=True)
        await asyncio.Event().wait()

esp.run(main)
"""
    with program(bus_directory, text) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "closing\n"
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == -signal.SIGTERM


def test_a_handler_ends_its_block_when_a_signal_comes(bus_directory: Path) -> None:
    text = """
async def slowly(block):
    print("ready", flush=True)
    await asyncio.sleep(0.05)
    print("handled", block.rows(), flush=True)

async def main():
    async with esp.init() as client, client.publisher(URL, "id*:int64") as pub:
        await pub.inject([(1,)])
        await pub.inject([(2,)])
        await esp.handle(client, URL, slowly, group="g", side="in")

esp.run(main)
"""
    with program(bus_directory, text) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (143, "handled [(1,)]\n")


def test_a_coroutine_in_the_place_of_the_function_is_refused() -> None:
    async def main() -> None:
        pass

    wrong: Any = main()
    with pytest.raises(esp.ConfigError, match=r"pass the function itself: esp\.run\(main\), not esp\.run\(main\(\)\)"):
        esp.run(wrong)
