"""A ledger: which batches of a stream had their effect, in the database of that effect.

Exactly once means that an effect and the note of it are one transaction. So the ledger is three tables in the user's
own database, over any DB-API connection (sqlite3, psycopg, a JDBC bridge): whoever finds the note does nothing more.

    esp_batches   the last batches that are done, and what each held: of those of a stream, which come in order, all up
                  to the last one are done
    esp_streams   the last id of a stream of blocks, and its chain
    esp_blocks    blocks that have their ids and are not known to be on the bus: a replay sends these very bytes

Numbers of batches begin again where a checkpoint is put back that is older than the database, or goes on as a copy in
another driver. So a number alone says nothing: a batch that comes with another content than the one that is noted is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from esp_pubsub.errors import ConfigError, EspError
from esp_pubsub.ledger import MARKS
from esp_pubsub.wire.frame import BLOCK, Buffer, Frame, frames, parse, seal

TABLES = (
    "CREATE TABLE IF NOT EXISTS esp_batches (stream VARCHAR(250) NOT NULL, batch BIGINT NOT NULL, "
    "digest VARCHAR(32), ends VARCHAR(1000), PRIMARY KEY (stream, batch))",
    "CREATE TABLE IF NOT EXISTS esp_streams (stream VARCHAR(250) NOT NULL PRIMARY KEY, last_id BIGINT NOT NULL, "
    "chain BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS esp_blocks (stream VARCHAR(250) NOT NULL, id BIGINT NOT NULL, frame {blob} NOT NULL, "
    "PRIMARY KEY (stream, id))",
)
_MORE = (
    "ALTER TABLE esp_batches ADD COLUMN digest VARCHAR(32)",
    "ALTER TABLE esp_batches ADD COLUMN ends VARCHAR(1000)",
)
KEPT = 1_000  # notes of a stream
_PROBE = ("", -1)

Body = tuple[int, int, int, Buffer]
"""A block before it has its id: kind of the body, flags, events, bytes."""


class Held(NamedTuple):
    """What a batch holds."""

    digest: str
    """Of the offsets before and after it."""
    ends: str
    """Where it ends, for people: topics and positions."""


class BatchDiffers(EspError):
    """A batch has the number of one that is done, and holds something else (.batch, .last)."""


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
        self._add_columns()
        self._check_transactions()

    def _add_columns(self) -> None:
        """To a table that was made before the ledger kept what a batch held."""
        try:
            self._do("SELECT digest FROM esp_batches WHERE stream = ?", _PROBE[0])
            self.connection.rollback()
        except Exception:  # noqa: BLE001  # each database names it in its own way
            self.connection.rollback()
            with self.transaction():
                for statement in _MORE:
                    self._do(statement)

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

    def done(self, stream: str, batch: int, held: Held | None = None) -> bool:
        """Whether this batch had its effect. BatchDiffers if one of this number had, and held something else. `held` is
        None where that is not known: then the number decides.
        """
        found = self._do(
            "SELECT batch, digest FROM esp_batches WHERE stream = ? AND batch >= ?", stream, batch
        ).fetchall()
        if not found:
            return False
        digest = {int(number): digest for number, digest in found}.get(batch, "")
        if held is None or digest is None or digest == held.digest:  # one that was noted before digests were has none
            return True
        raise self._differs(stream, batch, held)

    def _differs(self, stream: str, batch: int, held: Held) -> BatchDiffers:
        noted = "SELECT batch, ends FROM esp_batches WHERE stream = ? AND batch >= ? ORDER BY batch"
        found = self._do(noted, stream, batch).fetchall()
        (first, ends), (last, last_ends) = found[0], found[-1]
        was = f"was done up to {ends}" if int(first) == batch else f"is not noted, though batch {last} is done"
        return BatchDiffers(
            f"batch {batch} of this query is to end at {held.ends}, and {was}: the checkpoint is older than the "
            "ledger's database, or another driver goes on with a copy of it. If this batch were done, rows would come "
            "twice; if it were passed over, rows would be lost. End the other driver. Put back the checkpoint that "
            "belongs to the database, or a backup of the database that is as old as the checkpoint. If there is none, "
            f"begin a new checkpoint where the last batch that is done, {last}, has ended: with the option start, at "
            f"{last_ends or 'its offset'}",
            batch=batch,
            last=int(last),
        )

    def note(self, stream: str, batch: int, held: Held | None = None) -> bool:
        """The batch has its effect, when the transaction at hand commits. False if another driver has noted it by now:
        then this transaction is rolled back. BatchDiffers if it held something else there.
        """
        digest, ends = (None, None) if held is None else held
        self._do("DELETE FROM esp_batches WHERE stream = ? AND batch < ?", stream, batch - KEPT)
        try:
            values = stream, batch, digest, ends
            self._do("INSERT INTO esp_batches (stream, batch, digest, ends) VALUES (?, ?, ?, ?)", *values)
        except Exception:
            self.connection.rollback()
            if not self.done(stream, batch, held):
                raise
            return False
        return True

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
