"""An effect in a database happens once, wherever its reader dies."""

import asyncio
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster

import esp_pubsub as esp
from tests.unit.workbench import SYMBOLS, URL, Bench, until

IN = f"{URL}?side=in"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "bills.db")
    connection.execute("CREATE TABLE bills (number INTEGER)")
    connection.commit()
    yield connection
    connection.close()


class Awaited:
    """The connection as aiosqlite and psycopg have it: everything is awaited."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        await asyncio.sleep(0)
        return self._connection.execute(statement.replace("%s", "?"), values)

    async def commit(self) -> None:
        self._connection.commit()

    async def rollback(self) -> None:
        self._connection.rollback()


class Dollars:
    """The connection as asyncpg has it: transactions are objects, and statements have numbered values."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def execute(self, statement: str, *values: Any) -> str:
        await asyncio.sleep(0)
        cursor = self._connection.execute(re.sub(r"\$(\d)", r"?\1", statement), values)
        return f"INSERT 0 {cursor.rowcount}" if statement.startswith("INSERT") else "CREATE TABLE"

    def is_in_transaction(self) -> bool:
        return self._connection.in_transaction

    def transaction(self) -> "Dollars":
        return self

    async def start(self) -> None:
        self._connection.execute("BEGIN")

    async def commit(self) -> None:
        self._connection.commit()

    async def rollback(self) -> None:
        self._connection.rollback()


def bills(database: sqlite3.Connection) -> list[int]:
    return [number for (number,) in database.execute("SELECT number FROM bills ORDER BY rowid")]


class Killed(BaseException):
    """What a process does not survive."""


async def read(bench: Bench, database: sqlite3.Connection, count: int, dies: str = "", at: int = 0) -> None:
    """A reader of the group that bills, and dies at a point of a block."""
    ledger = esp.Ledger(database)
    async with bench.client.subscriber(IN, group="billing") as sub:
        for _ in range(count):
            block = await anext(sub)
            number = block.rows()[0][0]
            async with ledger.once("billing", block) as new:
                if new:
                    database.execute("INSERT INTO bills VALUES (?)", (number,))
                if (dies, at) == ("before the commit", number):
                    raise Killed
            if (dies, at) == ("after the commit", number):
                raise Killed
            await sub.confirm(block)


@pytest.mark.parametrize("dies", ["before the commit", "after the commit"])
async def test_a_reader_that_dies_neither_repeats_nor_skips(
    bench: Bench, database: sqlite3.Connection, dies: str
) -> None:
    await bench.publish(1, 2, 3, 4)
    for at in (1, 3):
        with pytest.raises(Killed):
            await read(bench, database, 4, dies, at)
    await read(bench, database, 2)
    assert bills(database) == [1, 2, 3, 4]


@pytest.mark.parametrize("as_module", [lambda it: (Awaited(it), "format"), lambda it: (Dollars(it), "qmark")])
async def test_a_connection_that_is_awaited_does_as_well(
    bench: Bench, database: sqlite3.Connection, as_module: Callable[[sqlite3.Connection], tuple[Any, str]]
) -> None:
    await bench.publish(1)
    [block] = await bench.blocks(1)
    connection, paramstyle = as_module(database)
    ledger = esp.Ledger(connection, paramstyle=paramstyle)
    with pytest.raises(Killed):
        async with ledger.once("billing", block) as new:
            assert new
            raise Killed
    told = []
    for _ in range(2):
        async with ledger.once("billing", block) as new:
            told.append(new)
    assert told == [True, False]


async def test_a_table_that_another_one_makes_at_the_same_moment_is_there(
    bench: Bench, database: sqlite3.Connection
) -> None:
    class Late(Awaited):
        refused = False

        async def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
            if not self.refused:
                self.refused = True
                raise sqlite3.IntegrityError("duplicate key value violates unique constraint")  # as PostgreSQL says
            return await super().execute(statement, values)

    await bench.publish(1)
    [block] = await bench.blocks(1)
    async with esp.Ledger(Late(database)).once("billing", block) as new:
        assert new


async def test_a_transaction_that_others_began_is_refused(bench: Bench, database: sqlite3.Connection) -> None:
    await bench.publish(1)
    [block] = await bench.blocks(1)
    database.execute("BEGIN")
    with pytest.raises(esp.ConfigError, match="in a transaction already"):
        async with esp.Ledger(Dollars(database)).once("billing", block):
            raise AssertionError("it began")


async def test_readers_sources_and_runs_are_told_apart(bench: Bench, database: sqlite3.Connection) -> None:
    async def told(block: esp.Block, reader: str = "billing") -> bool:
        async with ledger.once(reader, block) as new:
            return new

    ledger = esp.Ledger(database)
    for run in (0, 2**64 - 1):
        async with bench.client.publisher(URL, SYMBOLS, failover=esp.Failover("feed", run=run)) as pub:
            await (await pub.inject([(1, "a")]))
    await bench.publish(1)
    first, later, other = await bench.blocks(3)
    assert await told(first) and await told(first, "other") and await told(other)
    assert await told(later) and not await told(later) and not await told(first)


async def test_a_block_that_is_at_work_elsewhere_is_not_done_again(
    bench: Bench, database: sqlite3.Connection, tmp_path: Path
) -> None:
    await bench.publish(1)
    [block] = await bench.blocks(1)
    late = sqlite3.connect(tmp_path / "bills.db", timeout=0)
    try:
        slow, quick = esp.Ledger(database), esp.Ledger(late)
        async with slow.once("billing", block) as new:
            assert new
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                async with quick.once("billing", block):
                    raise AssertionError("it began")
        async with quick.once("billing", block) as new:
            assert not new
    finally:
        late.close()


async def test_a_connection_that_commits_by_itself_is_refused(bench: Bench, tmp_path: Path) -> None:
    await bench.publish(1)
    [block] = await bench.blocks(1)
    connection = sqlite3.connect(tmp_path / "own.db", isolation_level=None)
    try:
        with pytest.raises(esp.ConfigError, match="commits each statement by itself"):
            async with esp.Ledger(connection).once("billing", block):
                raise AssertionError("it began")
    finally:
        connection.close()
    with pytest.raises(esp.ConfigError, match="paramstyle is one of qmark"):
        esp.Ledger(connection, paramstyle="numeric")


@pytest.fixture
def may_block(blockbuster: BlockBuster) -> Iterator[None]:
    """Who handles blocks with sqlite3 blocks the loop for a moment, and may."""
    blockbuster.deactivate()
    yield
    blockbuster.activate()


@pytest.mark.usefixtures("may_block")
async def test_a_handler_with_a_ledger_has_its_effect_once(bench: Bench, database: sqlite3.Connection) -> None:
    await bench.publish(1, 2, 3)
    ledger, seen = esp.Ledger(database), list[int]()

    async def bill(block: esp.Block) -> None:
        async with ledger.once("billing", block) as new:
            number = block.rows()[0][0]
            seen.append(number)
            if new:
                database.execute("INSERT INTO bills VALUES (?)", (number,))

    for _ in range(2):
        bench.faults.hang("confirm")
        seen.clear()
        task = asyncio.ensure_future(esp.handle(bench.client, IN, bill, group="billing"))
        await until(lambda: 3 in seen)
        bench.faults.lose_link()
        task.cancel()
        await asyncio.wait([task])
        bench.faults.restore()
        bench.faults.heal()
    assert seen == bills(database) == [1, 2, 3]
