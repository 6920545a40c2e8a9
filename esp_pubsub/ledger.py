"""Exactly once in a database: an effect, and the note of the block that it came from, in one transaction.

    ledger = esp.Ledger(connection)
    async with ledger.once("billing", block) as new:
        if new:
            connection.execute("INSERT INTO bills ...")

The note is the last block of each source that had its effect. Blocks of a source come in order, so whatever is not
after that one has had it: a block that comes again because its reader died before it could confirm it, and one that a
reader is still at which has lost its group to another one. The note is written before the effect, and so locks the row.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from .errors import ConfigError
from .events import Block

MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s"}
"""What stands for a value in a statement, by the database module's `paramstyle`."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS esp_readers (reader VARCHAR(250) NOT NULL, source VARCHAR(16) NOT NULL, "
    "last VARCHAR(41) NOT NULL, PRIMARY KEY (reader, source))"
)
_NOTE = (
    "INSERT INTO esp_readers (reader, source, last) VALUES (?, ?, ?) ON CONFLICT (reader, source) "
    "DO UPDATE SET last = excluded.last WHERE esp_readers.last < excluded.last"
)
_FORGET = "DELETE FROM esp_readers WHERE reader = ?"
_PROBE = ("", "", "")


class Ledger:
    """On an open connection of sqlite3, aiosqlite, psycopg or asyncpg, which nobody else uses meanwhile.

    Its one table, `esp_readers`, is made when it is missing. `once` raises ConfigError for a connection that commits
    each statement by itself, and for one of asyncpg that is in a transaction already.
    """

    def __init__(self, connection: Any, *, paramstyle: str = "qmark") -> None:
        """`paramstyle` is that of the database's module: `format` for psycopg; asyncpg needs none."""
        if paramstyle not in MARKS:
            raise ConfigError(f"paramstyle is one of {', '.join(MARKS)}, as the database's module says it")
        self.connection = connection
        is_asyncpg = hasattr(connection, "is_in_transaction")
        self._does = _Asyncpg(connection) if is_asyncpg else _Dbapi(connection, MARKS[paramstyle])
        self._turn = asyncio.Lock()
        self._ready = False

    @asynccontextmanager
    async def once(self, reader: str, block: Block) -> AsyncIterator[bool]:
        """A transaction in which the effect of this block is done: False if it was done before.

        `reader` tells readers with different effects apart, such as the name of the group. Leave commit and rollback to
        this: what raises within is rolled back, and the block is new again.
        """
        async with self._turn:
            if not self._ready:
                await self._prepare()
            async with self._transaction():
                yield await self._note(reader, f"{block.source:016x}", f"{block.run:020}:{block.id:020}")

    async def _prepare(self) -> None:
        try:
            await self._make_table()
        except Exception:  # noqa: BLE001  # PostgreSQL refuses who makes it at the same moment as another one
            await self._make_table()
        with suppress(_Undone):
            async with self._transaction():
                await self._note(*_PROBE)
                raise _Undone
        with suppress(_Undone):
            async with self._transaction():
                if await self._note(*_PROBE):
                    raise _Undone
                await self._does.do(_FORGET, _PROBE[0])
            raise ConfigError(
                "this connection commits each statement by itself, so nothing on it can be exactly once: open it "
                "without autocommit"
            )
        self._ready = True

    async def _make_table(self) -> None:
        async with self._transaction():
            await self._does.do(_TABLE)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        await self._does.begin()
        try:
            yield
        except BaseException:
            await self._does.rollback()
            raise
        await self._does.commit()

    async def _note(self, *values: str) -> bool:
        """Whether the note is a new one."""
        return await self._does.do(_NOTE, *values) == 1


class _Undone(Exception):
    """What was done is to be rolled back."""


class _Dbapi:
    """A connection whose first statement begins a transaction; its calls are awaited if they can be."""

    def __init__(self, connection: Any, mark: str) -> None:
        self._connection = connection
        self._mark = mark

    async def begin(self) -> None:
        """The first statement does."""

    async def do(self, statement: str, *values: str) -> int:
        """Carry a statement out; returns how many rows it changed."""
        cursor = await _done(self._connection.execute(statement.replace("?", self._mark), values))
        return int(cursor.rowcount)

    async def commit(self) -> None:
        await _done(self._connection.commit())

    async def rollback(self) -> None:
        await _done(self._connection.rollback())


class _Asyncpg:
    """A connection of asyncpg, whose transactions are objects, and whose statements return what PostgreSQL says."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._transaction: Any = None

    async def begin(self) -> None:
        """ConfigError within another transaction, which might be rolled back after the block was confirmed."""
        if self._connection.is_in_transaction():
            raise ConfigError("this connection is in a transaction already: `once` begins and ends its own")
        self._transaction = self._connection.transaction()
        await self._transaction.start()

    async def do(self, statement: str, *values: str) -> int:
        """Carry a statement out; returns how many rows it changed."""
        for number in range(1, len(values) + 1):
            statement = statement.replace("?", f"${number}", 1)
        rows = str(await self._connection.execute(statement, *values)).rpartition(" ")[2]  # of "INSERT 0 1"
        return int(rows) if rows.isdecimal() else 0

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()


async def _done(called: Any) -> Any:
    """What a call gives, of a module that is to be awaited or of one that is not."""
    return await called if inspect.isawaitable(called) else called
