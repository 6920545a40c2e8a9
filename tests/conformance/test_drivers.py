"""The conformance suite over the embedded bus, the sample driver, and both with `Faults` around them."""

import dataclasses
import os
import re
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sample_bus

from esp_pubsub.bus import Bus, Capabilities
from esp_pubsub.registry import driver
from esp_pubsub.testing import conformance
from esp_pubsub.testing.faults import Faults

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests" / "support" / "sample_driver"
Opener = Callable[[], Awaitable[Bus]]
every_check = pytest.mark.parametrize("name", conformance.CHECKS)


async def carry_out(name: str, context: conformance.Context) -> None:
    try:
        await conformance.CHECKS[name](context)
    except conformance.NotClaimed as why:
        pytest.skip(str(why))


def embedded(directory: Path, **settings: Any) -> Opener:
    found = driver("embedded")
    return lambda: found.open_bus(found.Options(dir=directory, **settings))


def embedded_context(directory: Path, opener: Opener, **hooks: Any) -> conformance.Context:
    async def trim(topic: str) -> None:
        """A writer with a small ring trims what others left."""
        bus = await embedded(directory, ring_records=10)()
        pipe = await bus.pipe(topic)
        for n in range(3):
            await pipe.write([b"trim %d" % n])
        await pipe.confirmed(2)
        await bus.aclose()

    return conformance.Context(
        open_bus=opener, trim=trim, open_hasty_bus=embedded(directory, lease=1.0), patience=20.0, limit=90.0, **hooks
    )


@every_check
async def test_embedded(name: str, bus_directory: Path) -> None:
    await carry_out(name, embedded_context(bus_directory, embedded(bus_directory)))


@every_check
async def test_embedded_with_faults(name: str, bus_directory: Path) -> None:
    inner = embedded(bus_directory)
    hooks = {"cut": cut, "fail_in_the_middle": refuse(hole=False)}
    await carry_out(name, embedded_context(bus_directory, around(inner), **hooks))


@every_check
async def test_sample(name: str) -> None:
    await carry_out(name, sample_context(sample(), fail_in_the_middle=overflow))


@every_check
async def test_sample_with_faults(name: str) -> None:
    await carry_out(name, sample_context(around(sample()), cut=cut, fail_in_the_middle=refuse(hole=True)))


def sample(**settings: Any) -> Opener:
    options = sample_bus.Options(hub=secrets.token_hex(4), **settings)
    return lambda: sample_bus.open_bus(options)


def sample_context(opener: Opener, **hooks: Any) -> conformance.Context:
    return conformance.Context(open_bus=opener, patience=20.0, limit=90.0, **hooks)


@asynccontextmanager
async def overflow(bus: Bus, topic: str) -> AsyncIterator[bytes]:
    """A message that no queue has room for while it holds another one; what is small still fits."""
    yield b"x" * bus.capabilities.max_message_bytes


def around(inner: Opener) -> Opener:
    async def open_bus() -> Bus:
        return Faults(await inner())

    return open_bus


async def cut(bus: Bus) -> None:
    assert isinstance(bus, Faults)
    bus.lose_link()


def refuse(*, hole: bool) -> Any:
    @asynccontextmanager
    async def fail_in_the_middle(bus: Bus, topic: str) -> AsyncIterator[bytes]:
        assert isinstance(bus, Faults)
        bus.refuse(hole=hole)
        yield b"unlucky"

    return fail_in_the_middle


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample driver, built and installed as any package is, into a directory of its own."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--target", target, SAMPLE], check=True, timeout=60)
    return target


def run_installed(target: Path, script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(target), str(ROOT)))}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )


BY_NAME = """
import asyncio, esp_pubsub as esp

async def main():
    url = "dfESP://trades:5555/market/cq/TradesSource"
    async with esp.init(bus="sample", hub="h", queue_size="1MiB") as client:
        async with client.subscriber(url, "id*:int64", side="in") as sub, client.publisher(url, "id*:int64") as pub:
            await (await pub.inject([(1,), (2,)]))
            async for block in sub:
                print(type(client.bus).__module__, block.id, block.rows())
                break

asyncio.run(main())
"""

TEN_LINES = """
import asyncio
from esp_pubsub.testing import conformance
import sample_bus

async def open_bus():
    return await sample_bus.open_bus(sample_bus.Options())

report = asyncio.run(conformance.run(open_bus))
print(report)
raise SystemExit(not report.ok)
"""


def test_installed_driver_is_reached_by_its_name(installed: Path) -> None:
    done = run_installed(installed, BY_NAME)
    assert (done.stdout, done.stderr) == ("sample_bus 1 [(1,), (2,)]\n", "")


def test_installed_driver_passes_in_ten_lines(installed: Path) -> None:
    done = run_installed(installed, TEN_LINES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout


def test_guide_shows_the_sample_driver_as_it_is() -> None:
    """What the guide quotes is the driver's text; what it says to run is what the tests here run."""
    guide = (ROOT / "docs" / "how-to" / "write-a-driver.md").read_text()
    real = (SAMPLE / "sample_bus.py").read_text() + (SAMPLE / "pyproject.toml").read_text() + TEN_LINES
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", guide, re.DOTALL)
    others = [block.split()[0] for block in blocks if block not in real]
    assert others == ['@pytest.mark.parametrize("name",', "bus"], "more than the pytest case and the faults"
    assert all(f"`{field.name}`" in guide for field in dataclasses.fields(Capabilities))
