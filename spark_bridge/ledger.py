"""A ledger: which batches of a stream had their effect, in the database of that effect.

Exactly once means that an effect and the note of it are one transaction. So the ledger is three tables in the user's
own database, over any DB-API connection (sqlite3, psycopg, a JDBC bridge): whoever finds the note does nothing more.

    esp_batches   the last batches that are done: of those of a stream, which come in order, all up to the last one are
    esp_streams   the last id of a stream of blocks, and its chain
    esp_blocks    blocks that have their ids and are not known to be on the bus: a replay sends these very bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from esp_pubsub.errors import ConfigError
from esp_pubsub.ledger import MARKS
from esp_pubsub.wire.frame import BLOCK, Buffer, Frame, frames, parse, seal

TABLES = (
    "CREATE TABLE IF NOT EXISTS esp_batches (stream VARCHAR(250) NOT NULL, batch BIGINT NOT NULL, "
    "PRIMARY KEY (stream, batch))",
    "CREATE TABLE IF NOT EXISTS esp_streams (stream VARCHAR(250) NOT NULL PRIMARY KEY, last_id BIGINT NOT NULL, "
    "chain BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS esp_blocks (stream VARCHAR(250) NOT NULL, id BIGINT NOT NULL, frame {blob} NOT NULL, "
    "PRIMARY KEY (stream, id))",
)
KEPT = 1_000  # notes of a stream: who notes a batch that another driver has noted is refused by the key
_PROBE = ("", -1)

Body = tuple[int, int, int, Buffer]
"""A block before it has its id: kind of the body, flags, events, bytes."""


class Ledger:
    """On an open DB-API connection, which it owns. `blob` is what the database calls bytes (PostgreSQL: BYTEA).

    The tables are made when missing. ConfigError if the connection commits by itself; sqlite3 as it is does not.
    """

    def __init__(self, connection: Any, *, paramstyle: str = "qmark", blob: str = "BLOB") -> None:
        if paramstyle not in MARKS:
            raise ConfigError(f"paramstyle is one of {', '.join(MARKS)}, as the database's module says it")
        self.connection = connection
        self._mark = MARKS[paramstyle]
        with self.transaction():
            for table in TABLES:
                self._do(table.format(blob=blob))
        self._check_transactions()

    def _check_transactions(self) -> None:
        self.note(*_PROBE)
        self.connection.rollback()
        if self.done(*_PROBE):
            self._do("DELETE FROM esp_batches WHERE stream = ? AND batch = ?", *_PROBE)
            raise ConfigError(
                "this connection commits each statement by itself, so nothing on it can be exactly once: open it "
                "without autocommit"
            )
        self.connection.rollback()

    def _do(self, statement: str, *values: Any) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(statement.replace("?", self._mark), values)
        return cursor

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing of what is done within."""
        try:
            yield
        except BaseException:
            self.connection.rollback()
            raise
        self.connection.commit()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def done(self, stream: str, batch: int) -> bool:
        """Whether this batch had its effect."""
        found = self._do("SELECT batch FROM esp_batches WHERE stream = ? AND batch >= ?", stream, batch)
        return found.fetchone() is not None

    def note(self, stream: str, batch: int) -> None:
        """The batch has its effect, when the transaction at hand commits."""
        self._do("DELETE FROM esp_batches WHERE stream = ? AND batch < ?", stream, batch - KEPT)
        self._do("INSERT INTO esp_batches (stream, batch) VALUES (?, ?)", stream, batch)

    # blocks on their way to a bus

    def add(self, stream: str, source: int, fingerprint: int, bodies: Iterable[Body]) -> None:
        """Give blocks their ids, and keep them, when the transaction at hand commits."""
        found = self._do("SELECT last_id, chain FROM esp_streams WHERE stream = ?", stream).fetchone()
        last, chain = (0, 0) if found is None else (int(found[0]), int(found[1]))
        for kind, flags, events, body in bodies:
            block = seal(BLOCK, kind, flags, events, source, 0, last + 1, fingerprint, chain, body)
            self._do(
                "INSERT INTO esp_blocks (stream, id, frame) VALUES (?, ?, ?)",
                stream,
                block.id,
                frames([block], 0, 0)[0],
            )
            last, chain = block.id, block.chain
        if found is None:
            self._do("INSERT INTO esp_streams (stream, last_id, chain) VALUES (?, ?, ?)", stream, last, chain)
        else:
            self._do("UPDATE esp_streams SET last_id = ?, chain = ? WHERE stream = ?", last, chain, stream)

    def waiting(self, stream: str) -> list[Frame]:
        """Blocks that are not known to be on the bus, in order."""
        found = self._do("SELECT frame FROM esp_blocks WHERE stream = ? ORDER BY id", stream)
        return [parse(bytes(frame)) for (frame,) in found.fetchall()]

    def published(self, stream: str, last: int) -> None:
        """Blocks up to this one are on the bus, when the transaction at hand commits."""
        self._do("DELETE FROM esp_blocks WHERE stream = ? AND id <= ?", stream, last)
