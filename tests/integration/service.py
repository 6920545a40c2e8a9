"""A service as a newcomer builds it: two that take orders, an inbox, a pair that relays, and a pair that bills.

    python -m tests.integration.service web 0 300     # takes every other of 300 orders
    python -m tests.integration.service relay
    python -m tests.integration.service billing bills.db

The bus is that of the environment.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from dataclasses import dataclass
from typing import Annotated

import esp_pubsub as esp

INBOX = "dfESP://shop:5555/shop/web/Inbox?side=in"
ORDERS = "dfESP://shop:5555/shop/web/Orders?side=in"
PAUSE = 0.005


@dataclass
class Order:
    """What a customer wants."""

    id: Annotated[int, esp.Key]
    amount: float


async def take_orders(first: int, count: int) -> None:
    """Half of the orders, as they come by HTTP."""
    async with esp.init() as client, client.publisher(INBOX, Order) as inbox:
        for number in range(first, count, 2):
            await (await inbox.inject([Order(number, number / 4)]))
            await asyncio.sleep(PAUSE)


async def relay() -> None:
    """One of a pair: the inbox as one sequence."""
    async with (
        esp.init() as client,
        client.subscriber(INBOX, Order, start="earliest") as inbox,
        client.publisher(ORDERS, Order, failover=esp.Failover("relay")) as orders,
    ):
        async for block in inbox:
            await orders.inject(block)


async def bill(path: str) -> None:
    """One of a pair: a row for each order, once."""
    database = sqlite3.connect(path, timeout=30)
    database.execute("CREATE TABLE IF NOT EXISTS bills (number INTEGER, amount REAL)")
    ledger = esp.Ledger(database)

    async def write(block: esp.Block) -> None:
        async with ledger.once("billing", block) as new:
            if new:
                orders = [(order.id, order.amount) for order in block.as_(Order)]
                database.executemany("INSERT INTO bills VALUES (?, ?)", orders)

    async with esp.init() as client:
        await esp.handle(client, ORDERS, write, group="billing")


async def main() -> None:
    """The part that is named."""
    match sys.argv[1:]:
        case ["web", first, count]:
            await take_orders(int(first), int(count))
        case ["relay"]:
            await relay()
        case ["billing", path]:
            await bill(path)


if __name__ == "__main__":
    esp.run(main)
