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
from contextlib import asynccontextmanager
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
    """On an open connection of sqlite3, aiosqlite or psycopg, which nobody else uses meanwhile.

    Its one table, `esp_readers`, is made when it is missing. ConfigError, when it is used first, for a connection that
    commits each statement by itself.
    """

    def __init__(self, connection: Any, *, paramstyle: str = "qmark") -> None:
        """`paramstyle` is that of the database's module: `format` for psycopg."""
        if paramstyle not in MARKS:
            raise ConfigError(f"paramstyle is one of {', '.join(MARKS)}, as the database's module says it")
        self.connection = connection
        self._mark = MARKS[paramstyle]
        self._turn = asyncio.Lock()
        self._ready = False

    @asynccontextmanager
    async def once(self, reader: str, block: Block) -> AsyncIterator[bool]:
        """A transaction in which the effect of this block is done: False if it was done before.

        `reader` tells readers with different effects apart, such as the name of the group. Leave commit and rollback to
        this: what raises within is rolled back, and the block is new again.
        """
        async with self._turn:
            try:
                if not self._ready:
                    await self._prepare()
                new = await self._note(reader, f"{block.source:016x}", f"{block.run:020}:{block.id:020}")
                yield new
            except BaseException:
                await _done(self.connection.rollback())
                raise
            await _done(self.connection.commit())

    async def _prepare(self) -> None:
        await self._do(_TABLE)
        await _done(self.connection.commit())
        await self._note(*_PROBE)
        await _done(self.connection.rollback())
        if not await self._note(*_PROBE):
            await self._do(_FORGET, _PROBE[0])
            raise ConfigError(
                "this connection commits each statement by itself, so nothing on it can be exactly once: open it "
                "without autocommit"
            )
        await _done(self.connection.rollback())
        self._ready = True

    async def _note(self, *values: str) -> bool:
        """Whether the note is a new one."""
        cursor = await self._do(_NOTE, *values)
        return bool(cursor.rowcount == 1)

    async def _do(self, statement: str, *values: str) -> Any:
        return await _done(self.connection.execute(statement.replace("?", self._mark), values))


async def _done(called: Any) -> Any:
    """What a call gives, of a module that is to be awaited or of one that is not."""
    return await called if inspect.isawaitable(called) else called
