"""Effects of a stream, exactly once: a function's in a database, or blocks on a bus.

A batch may come again after a failure, with the same number and the same rows. What makes its effect happen once is the
ledger: for a database, effect and note commit together. For a bus there is no such transaction, so blocks get their
ids, and are kept, in the transaction that notes the batch; then they are sent, and sent again after a failure: the same
ids, the same bytes, of which a subscriber sees each once.

Batches are counted per checkpoint, and Spark's id of the query is bound to that: with a new checkpoint the ledger
begins anew by itself. A copy of a checkpoint counts on from where it was made, so the ledger compares what a batch
holds, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from esp_pubsub.client import Client
from esp_pubsub.encode import Encoder
from esp_pubsub.errors import ConfigError, TooLarge
from esp_pubsub.events import PLAIN, Block
from esp_pubsub.publisher import Publisher, PublisherOptions, Resume, source_of_resumed
from esp_pubsub.schema import Schema
from esp_pubsub.wire.arrow import arrow_schema
from esp_pubsub.wire.frame import BODY_AT, Frame

from .connection import Connection, connected
from .held import held_by
from .ledger import Body, Ledger
from .options import Options, read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_PIECE = 100  # blocks that are published, and noted, at once
_published: dict[str, tuple[int, object]] = {}
"""Of each stream of this process: its last batch, and the bus that had it."""


def foreach_batch(
    stream: DataFrame, function: Callable[..., None], *, ledger: Callable[[], Ledger] | None = None
) -> DataStreamWriter:
    """`stream.writeStream.foreachBatch`, with a ledger: `function(batch, batch_id, connection)` is called in a
    transaction of the ledger's database, which also notes the batch. Exactly once for what the function does with that
    connection, if it leaves commit and rollback alone. Without a ledger it is `function(batch, batch_id)`: at least
    once, and exactly once only if its effect is the same however often a batch id comes.

    `ledger` is called for each batch, in the driver, and what it returns is closed behind the batch.
    """
    if ledger is None:
        return stream.writeStream.foreachBatch(function)

    def once(batch: DataFrame, batch_id: int) -> None:
        name = _query(batch)
        held = held_by(batch, name, batch_id)
        with closing(ledger()) as book, book.transaction():
            if not book.done(name, batch_id, held):
                function(batch, batch_id, book.connection)
                book.note(name, batch_id, held)

    return stream.writeStream.foreachBatch(once)


def publish_batch(
    batch: DataFrame, url: str, batch_id: int, *, order_by: Sequence[str], ledger: Callable[[], Ledger],
    schema: str | Schema, name: str = "", block_size: int = 256, timeout: int = 60, **options: str,
) -> None:  # fmt: skip
    """Publish a batch as blocks, exactly once on the bus, whatever fails; call it in a function of `foreachBatch`.

    `name` tells several sequences of one query and window apart, as on two buses: each counts its blocks for itself.
    `order_by`: columns that put the rows into one order. Columns `_opcode` and `_flags` count if both are there.
    `options` are those of the source: side (in unless said otherwise), bus, config, and `**{"bus.<key>": ...}`.
    The batch is gathered in the driver: bound it by maxRowsPerTrigger.
    """
    if not order_by:
        raise ConfigError("rows of a batch come in any order: order_by names the columns that give them one")
    if block_size < 1:
        raise ConfigError(f"block_size is at least 1, not {block_size}")
    found = read_options({"url": url, "timeout": str(timeout), **options}, "in")
    if len(found.topics) > 1:
        raise ConfigError("a batch is published to one window", key="url")
    wanted, topic = schema if isinstance(schema, Schema) else Schema(schema), found.topics[0]
    held = held_by(batch, _query(batch), batch_id)
    query = f"{_query(batch)} {name}".rstrip()
    stream = f"{query} {topic}"
    _require_one_bus(stream, batch_id, found)
    with closing(ledger()) as book, connected(found) as connection:
        with book.transaction():
            if not book.done(stream, batch_id, held) and book.note(stream, batch_id, held):
                largest = connection.bus.capabilities.max_message_bytes
                bodies = _bodies(batch, wanted, order_by, block_size, largest)
                book.add(stream, source_of_resumed(topic, query), wanted.fingerprint, bodies)
        with book.transaction():
            waiting = book.waiting(stream)
        if waiting:
            _publish_all(book, stream, connection, found, wanted, query, waiting)


def _require_one_bus(stream: str, batch_id: int, options: Options) -> None:
    """The ledger knows nothing of buses: what is noted for one would not be published on another one."""
    batch, bus = _published.get(stream, (batch_id, options.connection))
    if batch == batch_id and bus != options.connection:
        raise ConfigError("a batch goes to the same window on two buses: give each call of publish_batch a name=")
    _published[stream] = batch_id, options.connection


def _publish_all(
    book: Ledger, stream: str, connection: Connection, options: Options, schema: Schema, name: str,
    waiting: Sequence[Frame],
) -> None:  # fmt: skip
    """What is on the bus is noted piece by piece, so that whoever has too little time for all of it gets on."""
    if waiting[0].schema != schema.fingerprint:
        raise ConfigError(
            "the ledger holds blocks that are not known to be on the bus, and they are of another schema than the one "
            "given: run the query with the schema it had until this batch is done, and change it then",
            key="schema",
        )
    resume = Resume(name, waiting[0].id - 1, waiting[0].link)
    publisher = connection.ask(options.timeout, _opened, connection.client, options, schema, resume)
    try:
        for at in range(0, len(waiting), _PIECE):
            piece = waiting[at : at + _PIECE]
            connection.ask(options.timeout, _publish, publisher, schema, piece)
            with book.transaction():
                book.published(stream, piece[-1].id)
    finally:
        connection.ask(options.timeout, publisher.aclose)


async def _opened(client: Client, options: Options, schema: Schema, resume: Resume) -> Publisher:
    chosen = PublisherOptions(ack_timeout=options.timeout, close_timeout=1.0)
    return await client.publisher(options.urls[0], schema, side=options.side, resume=resume, options=chosen)


async def _publish(publisher: Publisher, schema: Schema, piece: Sequence[Frame]) -> None:
    for frame in piece:
        block = Block(frame, schema, PLAIN)
        await publisher.inject(block, transactional=block.transactional)
    await publisher.flush()


def _query(batch: DataFrame) -> str:
    """The query's id, which stands in its checkpoint."""
    found: str | None = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    if found is None:
        raise ConfigError("this is no batch of a stream: call it in the function of foreachBatch, and in its thread")
    return found


def _bodies(batch: DataFrame, schema: Schema, order_by: Sequence[str], rows: int, largest: int) -> Iterator[Body]:
    """The batch as blocks. What the bus would not take is found before anything is noted."""
    marked = "_opcode" in batch.columns and "_flags" in batch.columns
    columns = arrow_schema(schema, marked=marked).names
    table = batch.orderBy(*order_by).select(*(f"`{name}`" for name in columns)).toArrow().combine_chunks()
    encode = Encoder(schema, "arrow").encode
    for piece in table.to_batches(max_chunksize=rows):
        body = encode(piece)
        if (size := BODY_AT + len(body[3])) > largest:
            raise TooLarge(
                f"a block of {body[2]} rows and {size} bytes; this bus takes {largest}: a smaller block_size",
                size=size,
                limit=largest,
            )
        yield body
