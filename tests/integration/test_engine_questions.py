"""What an engine is asked: by whoever publishes to it, by SAS's clients, and across a takeover."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.requests import demand
from tests.integration.engines import MODEL, URL, Outputs, Totals, engine, feed, feeding, leads, trades, until


@esp.model(**MODEL, version="1")
@dataclass
class Asked(Totals):
    """Totals that can be asked for."""

    totals: dict[str, int] = field(default_factory=dict)

    def ask(self, question: Any) -> Any:
        if question == "raise":
            raise KeyError("nothing of that name")
        return {1, 2} if question == "a set" else self.totals.get(question, 0)

    def counts(self) -> dict[str, tuple[str, int]]:
        return {"Totals": ("aggregate", len(self.totals)), "Trades": ("source", 0)}


async def test_a_question_asked_after_a_block_sees_what_the_block_did(bus_directory: Path) -> None:
    async with engine(bus_directory, Asked()), esp.init(dir=bus_directory) as client:
        source = await client.publisher(f"{URL}/Trades", "id*:int64,symbol:string,quantity:int64")
        for id in range(1, 21):
            delivery = await source.inject([(id, "SAS", 10)])
            assert await client.ask(URL, "SAS", after=delivery) == (10 * id, id)


async def test_the_member_that_leads_answers_and_after_a_takeover_the_other_one(bus_directory: Path) -> None:
    async with engine(bus_directory, Asked()) as a, feeding(bus_directory) as source, esp.init(dir=bus_directory) as us:
        await leads(a)
        async with engine(bus_directory, Asked()) as b:
            await feed(source, range(1, 11))
            before = await us.ask(URL, "SAS", after=(await source.inject(trades(11))))
            await a.aclose()
            await leads(b)
            assert await us.ask(URL, "SAS") == before
            assert before.value


async def test_a_question_that_comes_during_a_takeover_is_answered_after_it(bus_directory: Path) -> None:
    async with engine(bus_directory, Asked()) as a, esp.init(dir=bus_directory) as us:
        await leads(a)
        await a.aclose()
        asking = asyncio.ensure_future(us.ask(URL, "SAS", timeout=30))
        async with engine(bus_directory, Asked()):
            assert (await asking).value == 0


async def test_what_cannot_be_answered_says_why(bus_directory: Path) -> None:
    async with engine(bus_directory, Asked()) as a, esp.init(dir=bus_directory) as us:
        await leads(a)
        with pytest.raises(esp.RequestRefused, match="KeyError: 'nothing of that name'"):
            await us.ask(URL, "raise")
        with pytest.raises(esp.RequestRefused, match="can not serialize 'set'"):
            await us.ask(URL, "a set")
        with pytest.raises(esp.RequestRefused, match="has no snapshots"):
            await us.persist(URL)
        for foreign in ("x", [1], [1, 2, 3, 4], {"source": 1}):
            with pytest.raises(esp.RequestRefused):
                await us._demand(URL, {"ask": "SAS", "after": foreign}, 5)
        with pytest.raises(esp.RequestRefused, match="none of them"):
            await us._demand(URL, {"do": "what nobody knows"}, 5)
        with pytest.raises(esp.RequestRefused):
            await us._demand(URL, {"do": "quiesce", "mark": "foreign"}, 5)
        assert (await us.ask(URL, "SAS")).value == 0


async def test_a_model_without_ask_says_so(bus_directory: Path) -> None:
    async with engine(bus_directory) as a, esp.init(dir=bus_directory) as us:
        await leads(a)
        with pytest.raises(esp.RequestRefused, match=r"give it a method ask\(question\)"):
            await us.ask(URL, "SAS")


async def test_nobody_answers_where_no_engine_runs(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as us:
        with pytest.raises(esp.NoAnswer):
            await us.ask(URL, "SAS", timeout=0.05)


@pytest.mark.parametrize("order", [None, "written"])
async def test_quiesce_returns_when_the_bus_has_what_came_of_the_input(bus_directory: Path, order: Any) -> None:
    async with engine(bus_directory, Asked(), order=order) as a, feeding(bus_directory) as source:
        await leads(a)
        async with esp.init(dir=bus_directory) as us:
            await feed(source, range(1, 201))
            await source.flush()
            await us.quiesce(URL)
            assert a.stats.steps == 200
            assert [(line.given, line.on_bus) for line in a.stats.lines] == [(a.stats.lines[0].given,) * 2, (200, 200)]
            await feed(source, range(201, 301))
            await source.flush()
            await a.quiesce()
            assert a.stats.lines[1].on_bus == 300


async def test_a_member_that_stands_by_says_whom_to_ask_to_quiesce(bus_directory: Path) -> None:
    async with engine(bus_directory, Asked()) as a, feeding(bus_directory) as source:
        await leads(a)
        async with engine(bus_directory, Asked()) as b:
            await feed(source, range(1, 3))
            with pytest.raises(esp.WrongOrder, match=r"client\.quiesce"):
                await b.quiesce()


async def test_persist_returns_when_a_snapshot_counts(bus_directory: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    async with engine(bus_directory, Asked(), snapshots=kept, snapshot_every=0.05) as a, feeding(bus_directory) as fed:
        await leads(a)
        async with esp.init(dir=bus_directory) as us:
            await feed(fed, range(1, 101))
            await fed.flush()
            await until(lambda: a.stats.steps == 100)
            await us.persist(URL)
            assert a.stats.last_snapshot is not None
            assert list(kept.glob("*.snapshot"))


async def test_sas_clients_find_the_engine_under_the_name_of_its_cluster(bus_directory: Path) -> None:
    other = URL.replace("/p/q", "/p2/q2")
    async with engine(bus_directory, Asked()) as a, engine(bus_directory, Asked(), url=other) as b:
        await leads(a)
        await leads(b)
        async with feeding(bus_directory) as source, esp.init(dir=bus_directory) as us:
            await feed(source, range(1, 11))
            await source.flush()
            await us.quiesce(URL)
            for _ in range(4):  # whichever of them is asked
                assert await us.query_meta(f"{URL}/Totals?get=rowcount") == ["3"]
                assert await us.query_meta(f"{other}/Totals?get=rowcount") == ["0"]


async def test_a_project_with_several_engines_is_not_quiesced_as_one(bus_directory: Path) -> None:
    async with engine(bus_directory, Asked()) as a, engine(bus_directory, Asked(), url=URL + "2") as b:
        await leads(a)
        await leads(b)
        async with esp.init(dir=bus_directory) as us:
            project = URL.rpartition("/")[0]
            with pytest.raises(esp.RequestRefused, match="has several engines: name a contquery of"):
                await demand(us.requests(), "local:5555/M", {"do": "quiesce", "url": project}, 5)


async def test_an_engine_that_is_stopped_ends_on_all_members_and_goes_on_where_it_was(
    bus_directory: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    async with feeding(bus_directory) as source, esp.init(dir=bus_directory) as us:
        async with (
            engine(bus_directory, Asked(), snapshots=kept) as a,
            engine(bus_directory, Asked(), snapshots=kept) as b,
        ):
            await until(lambda: "active" in (a.stats.role, b.stats.role))
            await feed(source, range(1, 101))
            await source.flush()
            await us.quiesce(URL)
            assert (await stopped(us)) == {"snapshot": True, "why": ""}
            async with asyncio.timeout(10):
                await a.wait()
                await b.wait()
            assert a.stats.role == b.stats.role == "left"
        await feed(source, range(101, 151))
        async with engine(bus_directory, Asked(), snapshots=kept) as again:
            assert again.stats.steps == 100
            await leads(again)
            await Outputs(bus_directory).to(150)


async def test_a_stop_is_for_those_who_are_there(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as us, feeding(bus_directory) as source:
        for last in (10, 20):
            async with engine(bus_directory, Asked()) as a:
                await leads(a)
                await feed(source, range(last - 9, last + 1))
                assert (await stopped(us))["why"] == "it has no snapshots"
                await a.wait()


async def stopped(client: esp.Client) -> Any:
    return (await demand(client.requests(), "local:5555/M/E/p/q", {"do": "stop"}, 30))["answer"]
