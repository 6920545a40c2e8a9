"""An engine as the tests of engines run it: trades in, large trades and totals out. Also a process of one member:
`python -m tests.integration.engines DIRECTORY`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import esp_pubsub as esp

URL = "dfESP://local:5555/p/q"
TRADE, TOTAL = "id*:int64,symbol:string,quantity:int64", "symbol*:string,quantity:int64"
SYMBOLS = ("IBM", "SAS", "MSFT")
MODEL = {"inputs": {"Trades": TRADE}, "outputs": {"Large": TRADE, "Totals": TOTAL}}
Row = tuple[Any, ...]


@esp.model(inputs={"Trades": TRADE}, outputs={"Large": TRADE, "Totals": TOTAL}, version="1")
@dataclass
class Totals:
    """The sum of each symbol so far, and the trades of 500 and more."""

    totals: dict[str, int] = field(default_factory=dict)

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        changed: dict[str, int] = {}
        for _, symbol, quantity in block.rows():
            changed[symbol] = self.totals[symbol] = self.totals.get(symbol, 0) + quantity
        out.emit("Large", [row for row in block.rows() if row[2] >= 500])
        out.emit("Totals", list(changed.items()), opcode=esp.Opcode.UPSERT)


def trades(id: int) -> list[Row]:
    """The block of the input with this id."""
    return [(2 * id + at, SYMBOLS[(id + at) % 3], (id * 37 + at) % 1_000) for at in range(2)]


def outputs(blocks: int) -> dict[str, list[list[Row]]]:
    """What an undisturbed engine emits for so many blocks of the input."""
    totals: dict[str, int] = {}
    found: dict[str, list[list[Row]]] = {"Large": [], "Totals": []}
    for id in range(1, blocks + 1):
        changed = {}
        for _, symbol, quantity in trades(id):
            changed[symbol] = totals[symbol] = totals.get(symbol, 0) + quantity
        found["Totals"].append(list(changed.items()))
        if large := [row for row in trades(id) if row[2] >= 500]:
            found["Large"].append(large)
    return found


@contextlib.asynccontextmanager
async def engine(
    directory: Path, model: Any = None, *, url: str = URL, snapshots: Path | None = None, **options: Any
) -> AsyncIterator[esp.Engine]:
    """A member with a client of its own; how it closes is up to the test that cares."""
    async with esp.init(dir=directory, on_notice=lambda notice: None) as client:
        opened = await client.engine(model or Totals(), url, snapshots=snapshots, options=esp.EngineOptions(**options))
        try:
            yield opened
        finally:
            with contextlib.suppress(esp.EspError):
                await opened.aclose()


class Outputs:
    """A subscriber of each output window, each of which must get what an undisturbed engine emits."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, int] = {"Large": 0, "Totals": 0}

    async def to(self, blocks: int, *, run: int = 0) -> None:
        """Read from where we are to what the engine emits for so many blocks of its input."""
        for window, expected in outputs(blocks).items():
            await self._read_to(window, expected, run)

    async def _read_to(self, window: str, expected: list[list[Row]], run: int) -> None:
        notices: list[Any] = []
        async with (
            asyncio.timeout(60),
            esp.init(dir=self._directory, on_notice=notices.append) as client,
            client.subscriber(f"{URL}/{window}", start="earliest") as subscriber,
        ):
            following = 1
            while following <= len(expected):
                block = await anext(subscriber)
                if block.run != run:
                    continue
                assert (block.id, block.rows()) == (following, expected[following - 1]), (window, block)
                following += 1
        assert not [notice for notice in notices if type(notice).__name__ in ("Missed", "InputDiffers", "Skipped")]


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what it looks at tells nobody
            await asyncio.sleep(0.005)


async def leads(engine: esp.Engine) -> None:
    await until(lambda: engine.stats.role == "active")


@contextlib.asynccontextmanager
async def feeding(directory: Path, window: str = "Trades") -> AsyncIterator[esp.Publisher]:
    """A publisher of the input."""
    async with (
        esp.init(dir=directory, on_notice=lambda notice: None) as client,
        client.publisher(f"{URL}/{window}", TRADE) as publisher,
    ):
        yield publisher


async def feed(publisher: esp.Publisher, ids: Iterator[int] | range, pause: float = 0.0) -> None:
    for id in ids:
        await publisher.inject(trades(id))
        if pause:
            await asyncio.sleep(pause)


async def member(directory: str) -> None:
    """Be a member until killed, and say each role on a line of its own."""
    async with esp.init(dir=directory) as client, client.engine(Totals(), URL) as engine:
        print(json.dumps("standby"), flush=True)  # noqa: T201  # for the process that watches
        async for change in engine.roles():
            print(json.dumps(change.role), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(member(sys.argv[1]))
