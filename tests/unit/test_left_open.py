"""What nobody closed: a ResourceWarning, and a line in the log if blocks are lost by that."""

import asyncio
import gc
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import esp_pubsub as esp
from esp_pubsub.testing.virtual import Init, run_virtual
from tests.unit.workbench import SYMBOLS, URL

ROOT = Path(__file__).parents[2]
OPEN = """
import asyncio, sys
import esp_pubsub as esp

kept = []

async def left_open(blocks, keep=True):
    client = await esp.init(dir=sys.argv[1])
    publisher = await client.publisher("dfESP://h:5555/p/q/w", "id*:int64")
    if keep:
        kept.extend([client, publisher])
    for id in range(blocks):  # the sender has no turn before this ends
        delivery = await publisher.inject([(id,)])
"""
LOST = "the publisher on h:5555/p/q/w/I was never closed: 5 blocks (from id 1) are not acknowledged and may be lost"
PUBLISHER, CLIENT = (
    "ResourceWarning: unclosed publisher on h:5555/p/q/w/I",
    "ResourceWarning: unclosed client of EmbeddedBus",
)


def said_by(directory: Path, code: str, *flags: str) -> str:
    """What a program says to stderr that ends by itself, and with success."""
    command = [sys.executable, *(flags or ("-W", "always::ResourceWarning")), "-c", OPEN + code, str(directory)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "ending",
    [
        "asyncio.run(left_open(5))",
        "asyncio.run(left_open(5, keep=False))",
        "loop = asyncio.new_event_loop(); loop.run_until_complete(left_open(5))",
        "loop = asyncio.new_event_loop(); loop.run_until_complete(left_open(5)); loop.close()",
        "loop = asyncio.new_event_loop(); loop.run_until_complete(left_open(5)); loop.close(); kept.pop(0)",
    ],
    ids=["run", "run and forgotten", "loop left open", "loop closed", "client forgotten"],
)
def test_at_the_end_of_a_program_what_is_lost_is_counted_and_said_once(bus_directory: Path, ending: str) -> None:
    said = said_by(bus_directory, ending)
    assert [said.count(line) for line in (LOST, PUBLISHER, CLIENT)] == [1, 1, 1], said


def test_a_client_that_is_dropped_while_its_loop_goes_on_is_warned_of(bus_directory: Path) -> None:
    said = said_by(
        bus_directory,
        """
import gc
from esp_pubsub.client import _started
async def drops():
    await asyncio.create_task(left_open(0, keep=False))
    async with asyncio.timeout(30):
        while len(_started):  # until what its publisher waits for is nobody's but its own
            await asyncio.sleep(0.01)
            gc.collect()
    print("still here", file=sys.stderr)
asyncio.run(drops())
""",
    )
    assert [said.partition("still here")[0].count(line) for line in (PUBLISHER, CLIENT)] == [1, 1], said


def test_who_loses_nothing_is_warned_without_a_line_in_the_log(bus_directory: Path) -> None:
    said = said_by(bus_directory, "asyncio.run(left_open(0))")
    assert [said.count(line) for line in ("never closed", PUBLISHER, CLIENT)] == [0, 1, 1], said
    assert said_by(bus_directory, "asyncio.run(left_open(0))", "-W", "default::DeprecationWarning") == ""


def test_where_warnings_are_errors_the_program_ends_as_it_would_and_all_is_said(bus_directory: Path) -> None:
    said = said_by(bus_directory, "asyncio.run(left_open(5))", "-W", "error")
    assert [said.count(line) for line in (LOST, PUBLISHER)] == [1, 1], said


def test_what_a_thread_with_a_loop_of_its_own_left_open_is_said(bus_directory: Path) -> None:
    portal = "from esp_pubsub._portal import Portal\nportal = Portal()\nportal.call(left_open, 0)"
    said = said_by(bus_directory, portal)
    assert [said.count(line) for line in (PUBLISHER, CLIENT)] == [1, 1], said


def test_a_script_of_the_vendors_api_without_shutdown_loses_nothing_and_is_not_warned_of(
    bus_directory: Path,
) -> None:
    script = """
import os
os.environ["ESP_PUBSUB_DIR"] = sys.argv[1]
from esp_pubsub.compat import modelingApi as m, pubsubApi as p
p.Init(m.ll_Off, None)
publisher = p.PublisherStart("dfESP://h:5555/p/q/w", None, None)
p.Connect(publisher)
schema, vector = m.SchemaCreate("w", "id*:int64"), m.EventVCreate()
m.EventVPushback(vector, m.EventCreate2(schema, "i,n,1", ""))
p.PublisherInject(publisher, m.EventBlockNew1(vector, m.ebt_NORMAL))
"""
    said = said_by(bus_directory, script)  # which stops its publishers by itself
    assert said == ""


def test_what_is_closed_when_the_program_ends_is_not_said(bus_directory: Path) -> None:
    said = said_by(
        bus_directory,
        """
import atexit
from contextlib import suppress
from esp_pubsub._portal import Portal
portal = Portal()
portal.call(left_open, 0)

def close():
    with suppress(RuntimeError):  # a program that ends has no more threads for the bus
        portal.call(kept[0].aclose)
    portal.close()

atexit.register(close)
""",
        "-W",
        "error",
    )
    assert said == ""


def test_a_child_that_was_forked_says_nothing_of_what_its_parent_has_open(bus_directory: Path) -> None:
    said = said_by(
        bus_directory,
        """
import atexit, os
async def forks():
    await left_open(0)
    if not os.fork():
        atexit._run_exitfuncs()
        os._exit(0)
    os.wait()
    await kept[0].aclose()
asyncio.run(forks())
""",
    )
    assert "unclosed publisher" not in said
    assert "unclosed client" not in said


# collected


def warned(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if each.category is ResourceWarning]


def test_a_client_that_is_collected_after_its_loop_has_ended_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def left_open(init: Init) -> None:
        client = await init()
        publisher = await client.publisher(URL, SYMBOLS)
        await (await publisher.inject([(1, "a")]))
        for id in (2, 3):
            await publisher.inject([(id, "a")])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_virtual(left_open)
        gc.collect()
    assert sorted(warned(caught)) == [
        "unclosed client of SimBus",
        "unclosed publisher on test:5555/project/query/window/I",
    ]
    lost = [each for each in caplog.records if each.name == "esp_pubsub.publisher" and each.levelno == logging.WARNING]
    assert [each.args[1:] for each in lost if each.args] == [(2, 2)]


async def test_a_publisher_that_is_dropped_while_its_client_goes_on_goes_on_too(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            publisher = await client.publisher(URL, SYMBOLS)
            await publisher.inject([(1, "a")])
            del publisher
            gc.collect()
        assert warned(caught) == []
        async with asyncio.timeout(60), client.subscriber(URL, side="in", start="earliest") as sub:
            assert (await anext(sub)).rows() == [(1, "a")]


async def test_what_was_closed_or_never_opened_is_not_warned_of(bus_directory: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        esp.init(dir=bus_directory)
        async with esp.init(dir=bus_directory) as client:
            client.publisher(URL, SYMBOLS)
            async with client.publisher(URL, SYMBOLS) as publisher:
                await (await publisher.inject([(1, "a")]))
            with pytest.raises(esp.SchemaDiffers):
                await client.publisher(URL, "other*:int64")
        second = await esp.init(dir=bus_directory)
        await second.publisher(URL, SYMBOLS)
        await second.aclose()
        del client, publisher, second
        gc.collect()
    assert warned(caught) == []
