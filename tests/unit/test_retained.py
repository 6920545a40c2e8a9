"""What another program retained as a topic's schema or runs: one error, whoever reads it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import esp_pubsub as esp
from esp_pubsub.cli import look
from esp_pubsub.retained import RUNS_KEY, SCHEMA_KEY, retain_runs, retained_runs
from esp_pubsub.spark_bridge.options import read_options
from esp_pubsub.spark_bridge.planner import Planner
from tests.unit.spark.bus import TOPIC as SPARK_TOPIC
from tests.unit.spark.bus import URL as SPARK_URL
from tests.unit.spark.bus import close
from tests.unit.spark.bus import publish as publish_blocks
from tests.unit.workbench import SYMBOLS, TOPIC, URL, Bench

Reader = Callable[[Bench], Awaitable[object]]


async def publish(bench: Bench) -> object:
    return await bench.client.publisher(URL, SYMBOLS)


async def subscribe(bench: Bench) -> object:
    return await bench.subscriber()


async def read_what_came_before_the_schema(bench: Bench) -> object:
    await bench.inner.retain(TOPIC, SCHEMA_KEY, None)
    subscriber = await bench.subscriber(start="earliest")
    await bench.raw(b"foreign")
    await bench.inner.retain(TOPIC, SCHEMA_KEY, b"\xff")
    return await anext(subscriber)


async def ask(bench: Bench) -> object:
    return await bench.client.query_meta(f"{URL}?get=schema?side=in")


@pytest.mark.parametrize("reader", [publish, subscribe, read_what_came_before_the_schema, ask])
@pytest.mark.parametrize("foreign", [b"\xff", b"no schema"])
async def test_a_schema_of_another_program_is_one_error_for_all(bench: Bench, reader: Reader, foreign: bytes) -> None:
    await bench.inner.retain(TOPIC, SCHEMA_KEY, foreign)
    with pytest.raises(esp.SchemaError, match=f"retained as the schema of {TOPIC} cannot be read"):
        await reader(bench)


async def test_a_schema_of_another_program_does_not_end_the_list_of_topics(
    bench: Bench, bus_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await bench.publish(1)
    await bench.inner.retain(TOPIC, SCHEMA_KEY, b"\xff")
    await look.topics("embedded", None, {"dir": bus_directory})
    assert f"{TOPIC}  (what is retained as the schema of {TOPIC} cannot be read" in capsys.readouterr().out


async def join_a_group(bench: Bench) -> object:
    return await bench.client.publisher(URL, SYMBOLS, failover=esp.Failover("g"))


async def ask_for_the_run(bench: Bench) -> object:
    return await bench.client.current_run(URL, "g")


async def purge(bench: Bench) -> object:
    return await bench.client.purge(URL)


@pytest.mark.parametrize("reader", [join_a_group, ask_for_the_run, purge, subscribe])
@pytest.mark.parametrize("foreign", [b"\xff", b"\xc1", b"\x81\xa1x\x01", b"\x01"])
async def test_runs_of_another_program_are_one_error_for_all(bench: Bench, reader: Reader, foreign: bytes) -> None:
    await bench.publish(1)
    await bench.inner.retain(TOPIC, RUNS_KEY, foreign)
    with pytest.raises(esp.BusRefused, match=f"retained as the runs of {TOPIC} cannot be read"):
        await reader(bench)


async def test_the_runs_are_read_as_they_were_retained(bench: Bench) -> None:
    assert await retained_runs(bench.inner, TOPIC) == {}
    await retain_runs(bench.inner, TOPIC, {1 << 63: 20261118, 2: 0})
    assert await retained_runs(bench.inner, TOPIC) == {1 << 63: 20261118, 2: 0}


@pytest.mark.parametrize("foreign", [b"\xff", b"\x81\xa1x\x01"])
def test_runs_of_another_program_are_that_error_for_spark_too(bus_directory: Path, foreign: bytes) -> None:
    async def retain() -> None:
        async with esp.init(dir=bus_directory) as client:
            await client.bus.retain(SPARK_TOPIC, RUNS_KEY, foreign)

    publish_blocks(bus_directory, range(2))
    asyncio.run(retain())
    planner = Planner(read_options({"url": SPARK_URL, "bus.dir": str(bus_directory), "start": "1"}, "out"))
    try:
        with pytest.raises(esp.BusRefused, match=f"retained as the runs of {SPARK_TOPIC} cannot be read"):
            planner.next(planner.first(), None)
    finally:
        planner.close()
        close()
