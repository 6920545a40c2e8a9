"""A client says whether it is well."""

import json
from typing import Any

import aiohttp
import pytest

import esp_pubsub as esp
from esp_pubsub.http import probes, serve
from tests.unit.workbench import ROW, TOPIC, TRADES, Bench, outcome


async def test_a_client_at_work_is_well_and_says_what_it_has_open(bench: Bench) -> None:
    async with await bench.publisher() as pub, await bench.subscriber(group="g", schema=TRADES) as sub:
        await (await pub.inject([ROW]))
        assert (await bench.client.health()).readers[0].age is None
        await anext(sub)
        health = await bench.client.health()
    assert health and health.flushed
    [publisher], [reader] = health.publishers, health.readers
    assert (publisher.topic, publisher.role, publisher.waiting, publisher.failure) == (TOPIC, "active", 0, "")
    assert (reader.topic, reader.group) == (TOPIC, "g") and reader.age is not None and 0 <= reader.age < 300
    assert json.loads(json.dumps(health.as_dict()))["ok"] is True


async def test_blocks_that_wait_are_counted_and_are_no_illness(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        bench.faults.hang("confirmed")
        await pub.inject([ROW])
        await pub.inject([ROW])
        health = await bench.client.health()
        assert health and not health.flushed and health.publishers[0].waiting == 2
        bench.faults.heal()


async def test_a_publisher_that_failed_for_good_is_named(bench: Bench) -> None:
    pub = await bench.publisher()
    bench.faults.refuse(1, error=esp.BusRefused("go away"))
    await outcome(await pub.inject([ROW]))
    health = await bench.client.health()
    assert not health and health.publishers[0].failure == "BusRefused: go away"
    with pytest.raises(esp.BusRefused):
        await pub.aclose()


@pytest.mark.parametrize("how", ["lost", "silent"])
async def test_a_bus_that_does_not_answer_is_named_in_time(bench: Bench, how: str) -> None:
    if how == "lost":
        bench.faults.lose_link()
    else:
        bench.faults.hang("retained")
    health = await bench.client.health(timeout=0.01)
    assert not health and health.bus == ("the link is lost (injected)" if how == "lost" else "no answer within 0.01 s")
    bench.faults.restore()
    bench.faults.heal()
    assert await bench.client.health()


@esp.model(inputs={"In": "id*:int64"}, outputs={"Out": "id*:int64"})
def fails_on_zero(window: str, block: esp.Block, out: esp.Out) -> None:
    out.emit("Out", [(1 // block.rows()[0][0],)])


async def test_an_engine_that_failed_for_good_is_named(bench: Bench) -> None:
    url = "dfESP://test:5555/model/query"
    engine = await bench.client.engine(fails_on_zero, url)
    health = await bench.client.health()
    assert health and [(each.url, each.hindered, each.failure) for each in health.engines] == [(url, False, "")]
    async with bench.client.publisher(f"{url}/In", "id*:int64") as pub:
        await pub.inject([(0,)])
        with pytest.raises(esp.StepFailed):
            await engine.wait()
    health = await bench.client.health()
    assert not health.alive and health.engines[0].failure.startswith("StepFailed: ")


async def probed(bench: Bench) -> dict[str, tuple[int, Any]]:
    """What the probes of a client answer."""
    found = {}
    async with serve(probes(bench.client)) as port, aiohttp.ClientSession(f"http://localhost:{port}") as session:
        for path in ("/alive", "/ready"):
            async with session.get(path) as answer:
                found[path] = answer.status, await answer.json()
    return found


async def test_any_client_can_be_probed_over_http(bench: Bench) -> None:
    async with await bench.publisher():
        shown = await probed(bench)
        health = json.loads(json.dumps((await bench.client.health()).as_dict()))
    assert shown["/alive"] == shown["/ready"] == (200, health)
    assert health["publishers"][0]["topic"] == TOPIC


async def test_a_client_without_its_bus_is_alive_and_not_ready(bench: Bench) -> None:
    bench.faults.lose_link()
    shown = await probed(bench)
    assert [shown[path][0] for path in ("/alive", "/ready")] == [200, 503]
    assert shown["/ready"][1]["bus"] == "the link is lost (injected)"
    bench.faults.restore()


async def test_a_client_with_a_publisher_that_failed_for_good_is_to_be_started_again(bench: Bench) -> None:
    pub = await bench.publisher()
    bench.faults.refuse(1, error=esp.BusRefused("go away"))
    await outcome(await pub.inject([ROW]))
    assert [status for status, _ in (await probed(bench)).values()] == [503, 503]
    with pytest.raises(esp.BusRefused):
        await pub.aclose()
