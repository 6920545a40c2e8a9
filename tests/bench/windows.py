"""The seed's model of windows: `make bench NAME=windows` (about five minutes; TRADES=40000 for less).

A source, three copies that hold five minutes, an hour and a day, and an aggregate of each; trades come 100 a second by
their stamps, in blocks of 256. An engine on the embedded bus is compared with its model alone, without bus and codec,
and that with what a user would write in plain Python for the same results.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from math import sqrt
from typing import Any

import esp_pubsub as esp
from esp_pubsub.windows import Aggregate, Copy, Max, Min, Project, Retention, Source, StandardDeviation, WeightedAverage

from .report import LIMIT, STAMP, Crew, Report, fail_on_notice, heard, in_turn, main, say
from .work import now

URL = "dfESP://bench:5555/trades/trades"
TRADE = esp.Schema(
    "ID*:int32,symbol:string,currency:int32,udate:int64,msecs:int32,price:double,quantity:int32,venue:int32,"
    "broker:int32,buyer:int32,seller:int32,buysellflg:int32,time:stamp"
)
PRICES = "symbol*:string,vwap:double,minPrice:double,maxPrice:double,std:double"
FUNCTIONS = {
    "vwap": WeightedAverage("price", "quantity"),
    "minPrice": Min("price"),
    "maxPrice": Max("price"),
    "std": StandardDeviation("price"),
}
HELD = {"5Min": 300, "1HR": 3_600, "24HR": 86_400}
SYMBOLS, PER_SECOND, BLOCK = 3_608, 100, 256
TRADES = int(os.environ.get("TRADES", "400000"))
ROWS = int(os.environ.get("ROWS", "1000000"))
Rows = list[tuple[Any, ...]]


def seed() -> Project:
    """The model, which publishes what the aggregate of a day has."""
    windows: dict[str, Any] = {"TradesSource": Source(TRADE, insert_only=True, indexed=False)}
    edges = []
    for name, seconds in HELD.items():
        windows[f"Copy{name}"] = Copy(retention=Retention("sliding", "time", seconds * 1_000_000, "time"))
        windows[f"Aggregate{name}"] = Aggregate(PRICES, FUNCTIONS)
        edges += [("TradesSource", f"Copy{name}"), (f"Copy{name}", f"Aggregate{name}")]
    return Project(windows, edges, outputs=["Aggregate24HR"])


def trades(count: int) -> Iterator[Rows]:
    """Blocks of trades. Some symbols are traded more than others."""
    dice = random.Random(7)
    for first in range(0, count, BLOCK):
        yield [
            (id, f"S{int(SYMBOLS * dice.random() ** 2)}", 1, 20_261_120, id % 1_000, 100 + dice.randrange(1_000) * 0.01,
             dice.randrange(1, 1_000), 1, 2, 3, 4, id & 1, STAMP + id // PER_SECOND * 1_000_000)
            for id in range(first, min(count, first + BLOCK))
        ]  # fmt: skip


class Decoded:
    """A block as a model gets it, once it is decoded."""

    transactional = False

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def decoded(self) -> tuple[int, int, Rows]:
        return 1, 0, self._rows


class Nowhere:
    """An Out of nothing."""

    def emit(self, *_: Any, **__: Any) -> None:
        """Keep nothing."""


# what members do


async def fill(directory: str, count: int) -> None:
    """The input, all of it."""
    async with (
        esp.init(dir=directory, on_notice=fail_on_notice) as client,
        client.publisher(f"{URL}/TradesSource", TRADE) as publisher,
    ):
        for rows in trades(count):
            await publisher.inject(rows)
        await publisher.flush(LIMIT)
    say(filled=count)
    say(filled=count)


async def compute(directory: str, count: int) -> None:
    """An engine, alone. Its clock begins when it leads, with what it has not stepped on by then."""
    async with esp.init(dir=directory, on_notice=fail_on_notice) as client:
        await heard()
        async with client.engine(seed(), URL) as engine:
            while engine.stats.role != "active":  # noqa: ASYNC110  # what it looks at tells nobody
                await asyncio.sleep(0.001)
            blocks = -(-count // BLOCK)
            began, before = now(), engine.stats.steps
            while engine.stats.lines[0].on_bus < blocks:  # noqa: ASYNC110  # the same
                await asyncio.sleep(0.005)
            say(rate=(blocks - before) * BLOCK / (now() - began) * 1e9)


async def alone(directory: str, count: int) -> None:
    """The model without bus and codec."""
    blocks, project, out = [Decoded(rows) for rows in trades(count)], seed(), Nowhere()
    await heard()
    began = now()
    for block in blocks:
        project.step("TradesSource", block, out)  # type: ignore[arg-type]
    say(rate=count / (now() - began) * 1e9)


async def plain(directory: str, count: int) -> None:
    """The same results in plain Python, with no keys, no nulls and no state that could be restored."""
    blocks = list(trades(count))
    windows: list[Any] = [(seconds * 1_000_000, deque(), {}) for seconds in HELD.values()]
    await heard()
    began = now()
    for block in blocks:
        for window in windows:
            _in_plain_python(block, *window)
    say(rate=count / (now() - began) * 1e9)


def _in_plain_python(block: Rows, amount: int, held: deque[Any], groups: dict[str, list[Any]]) -> Rows:
    touched = {}
    for row in block:
        symbol, price, quantity = row[1], row[5], row[6]
        group = groups.get(symbol)
        if group is None:
            group = groups[symbol] = [0, 0.0, 0.0, 0.0, 0.0, [], None]
        group[0] += 1
        group[1] += price * quantity
        group[2] += quantity
        group[3] += price
        group[4] += price * price
        insort(group[5], price)
        touched[symbol] = group
        held.append(row)
        while held[0][12] <= row[12] - amount:
            old = held.popleft()
            symbol, price, quantity = old[1], old[5], old[6]
            touched[symbol] = group = groups[symbol]
            group[0] -= 1
            group[1] -= price * quantity
            group[2] -= quantity
            group[3] -= price
            group[4] -= price * price
            del group[5][bisect_left(group[5], price)]
    rows: Rows = []
    for symbol, group in touched.items():
        count, before = group[0], group[6]
        if count:
            mean = group[3] / count
            deviation = sqrt(max(0.0, group[4] / count - mean * mean))
            group[6] = (symbol, group[1] / group[2], group[5][0], group[5][-1], deviation)
            rows.append(group[6])
        else:
            del groups[symbol]
        if before is not None:
            rows.append(before)
    return rows


async def hold(directory: str, count: int, how: str) -> None:
    """Hold trades in a list, or in a window of a day."""
    held: Rows = []
    window = Copy(retention=Retention("sliding", "time", 86_400_000_000, "time"))
    source = Source(TRADE, insert_only=True, indexed=False)
    project = Project({"TradesSource": source, "Copy24HR": window}, [("TradesSource", "Copy24HR")])
    await heard()
    for rows in trades(count):
        if how == "list":
            held += rows
        else:
            project.step("TradesSource", Decoded(rows), Nowhere())  # type: ignore[arg-type]
    gc.collect()
    say(held=len(held) + project.counts()["Copy24HR"][1])
    await heard()


# what is measured


async def throughput(role: str) -> float:
    async with Crew("windows") as crew:
        if role == "compute":
            filling = await crew.start("fill", count=TRADES)
            await filling.told()
        worker = await crew.start(role, count=TRADES)
        worker.tell()
        return float((await worker.told())["rate"])


async def memory(how: str) -> float:
    """Bytes for each row."""
    async with Crew("windows") as crew:
        holder = await crew.start("hold", count=ROWS, how=how)
        before = holder.memory()["own"]
        holder.tell()
        held = (await holder.told())["held"]
        return (holder.memory()["own"] - before) / float(held)


async def measure(report: Report) -> None:
    """Everything, in turn."""
    roles = {
        "the seed's model as an engine": "compute",
        "the same without bus and codec": "alone",
        "the same in plain Python": "plain",
    }
    contestants: dict[str, Callable[[], Any]] = {name: partial(throughput, role) for name, role in roles.items()}
    engine, model, python = contestants
    samples = await in_turn(contestants)
    report.figures(samples, "trades/s")
    report.ratio(samples, engine, model, 0.6)
    report.ratio(samples, model, python, None)
    ours, theirs = f"{ROWS:,} rows held for a day", "the same rows in a list"
    held = {ours: [await memory("window")], theirs: [await memory("list")]}
    report.figures(held, "bytes/row", "lower")
    report.ratio(held, ours, theirs, 3.0, "lower")


if __name__ == "__main__":
    logging.getLogger("esp_pubsub").setLevel(logging.ERROR)  # roles are no news here
    main("windows", measure, {role.__name__: role for role in (fill, compute, alone, plain, hold)})
