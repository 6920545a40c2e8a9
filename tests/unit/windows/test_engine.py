"""A project is the model of an engine: two members on the embedded bus give what one process without a bus gives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import esp_pubsub as esp
from esp_pubsub.testing import check_model, run_model
from esp_pubsub.windows import Aggregate, Copy, Count, Max, Project, Retention, Source, StandardDeviation
from tests.integration.engines import leads, until

URL = "dfESP://local:5555/p/q"
TRADE = "id*:int64,symbol:string,price:double,at:stamp"


def made() -> Project:
    return Project(
        {
            "Trades": Source(TRADE, insert_only=True, indexed=False),
            "Held": Copy(retention=Retention("sliding", "time", 20_000_000, "at")),
            "Totals": Aggregate(
                "symbol*:string,n:int64,high:double,deviation:double",
                {"n": Count(), "high": Max("price"), "deviation": StandardDeviation("price")},
            ),
        },
        [("Trades", "Held"), ("Held", "Totals")],
        outputs=["Totals"],
        version="1",
    )


PROJECT = made()
INPUT = [
    ("Trades", [(id * 2 + at, ("IBM", "SAS", "MSFT")[(id + at) % 3], id % 7 / 10, id * 1_000_000) for at in range(2)])
    for id in range(60)
]  # fmt: skip


@contextlib.asynccontextmanager
async def member(directory: Path, **how: Any) -> AsyncIterator[esp.Engine]:
    async with (
        esp.init(dir=directory, on_notice=lambda notice: None) as client,
        client.engine(made(), URL, **how) as engine,
    ):
        yield engine


async def test_two_members_of_a_project_give_one_sequence_and_have_the_same_state(bus_directory: Path) -> None:
    expected = [block.changes() for block in run_model(made(), INPUT)["Totals"]]
    snapshots = bus_directory / "snapshots"
    async with (
        asyncio.timeout(60),
        esp.init(dir=bus_directory, on_notice=lambda notice: None) as client,
        client.publisher(f"{URL}/Trades", TRADE) as publisher,
        member(bus_directory) as a,
    ):
        await leads(a)
        options = esp.EngineOptions(snapshot_every=0.05)
        async with member(bus_directory, snapshots=snapshots, options=options) as b:
            for _, rows in INPUT[:30]:
                await publisher.inject(rows)
            await until(lambda: b.stats.steps == 30 and b.stats.last_snapshot is not None)
            await a.aclose()
            for _, rows in INPUT[30:]:
                await publisher.inject(rows)
            await until(lambda: b.stats.steps == 60)
            assert b.model is not None
            counts = {"Trades": ("source", 120), "Held": ("copy", 40), "Totals": ("aggregate", 3)}
            assert b.model.counts() == counts
            async with client.subscriber(f"{URL}/Totals", start="earliest") as subscriber:
                assert [(await anext(subscriber)).changes() for _ in expected] == expected


def test_two_processes_compute_the_same_though_one_restores_its_state() -> None:
    assert check_model(f"{__file__}:PROJECT", INPUT) == len(INPUT)
