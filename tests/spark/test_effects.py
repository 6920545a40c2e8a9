from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

import esp_pubsub as esp
from esp_pubsub.spark_bridge import Ledger, Progress, foreach_batch, publish_batch
from esp_pubsub.spark_bridge import effects as at

from .conftest import PATIENCE, Window

OUT = "dfESP://spark:5555/p/q/results"


class Killed(Exception):
    """Stands for the end of the driver."""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "effects.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE effect (id)")
        connection.commit()
    return path


class Dying(Ledger):
    """Dies behind its n-th commit, counted over all of its kind."""

    left = 0

    def close(self) -> None:
        super().close()
        Dying.left -= 1
        if Dying.left == 0:
            raise Killed


def test_with_a_ledger_a_function_has_its_effect_once(window: Window, database: Path) -> None:
    window.publish(1, 2, 3, 4)

    def keep(batch: Any, batch_id: int, connection: Any) -> None:
        connection.executemany("INSERT INTO effect VALUES (?)", [(row.id,) for row in batch.collect()])
        if raising.pop(batch_id, None):
            raise Killed("between effect and note")

    raising = {1: True}
    Dying.left = 3  # of the calls: batch 0, batch 1 that raises, batch 1 whose commit Spark never hears of

    def start() -> None:
        stream = window.stream(maxRowsPerTrigger="1")
        query = window.start(
            foreach_batch(stream, keep, ledger=lambda: Dying(sqlite3.connect(database))), availableNow=True
        )
        assert query.awaitTermination(PATIENCE)

    for _ in "ab":
        with pytest.raises(StreamingQueryException, match="Killed"):
            start()
    start()
    assert effect_of(database) == [100, 200, 300, 400]


def received(window: Window, count: int) -> list[Any]:
    """The rows that a subscriber gets, up to so many blocks, in order."""

    async def read(client: esp.Client) -> list[Any]:
        async with client.subscriber(OUT, side="in", start="earliest") as subscriber:
            blocks = [await anext(subscriber) for _ in range(count)]
            assert [block.id for block in blocks] == list(range(1, count + 1))
            doubles.append(subscriber.stats.doubles)
            return [row for block in blocks for row in block.rows()]

    doubles: list[int] = []
    return [*window.run(read), doubles[0]]


def test_a_batch_is_published_once_whenever_the_driver_dies(
    window: Window, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window.publish(1, 2, 3, rows=5)
    publish, forget, die = at._publish, Ledger.published, ["before the publish", "behind the publish"]

    async def dying_publish(*arguments: Any) -> None:
        if die and die[0].startswith("before"):
            raise Killed(die.pop(0))
        await publish(*arguments)

    def dying_forget(book: Ledger, stream: str, last: int) -> None:
        if die and die[0].startswith("behind"):
            raise Killed(die.pop(0))
        forget(book, stream, last)

    monkeypatch.setattr(at, "_publish", dying_publish)
    monkeypatch.setattr(Ledger, "published", dying_forget)

    def republish(batch: Any, batch_id: int) -> None:
        publish_batch(
            batch.selectExpr("id", "upper(name) AS name"), OUT, batch_id, order_by=["id"], schema=window.schema,
            ledger=lambda: Ledger(sqlite3.connect(database)), block_size=2, **options,
        )  # fmt: skip

    options = {"bus.dir": window.options["bus.dir"]}
    for said in tuple(die):
        with pytest.raises(StreamingQueryException, match=said):
            window.finish(window.stream(maxRowsPerTrigger="5"), republish)
    window.finish(window.stream(maxRowsPerTrigger="5"), republish)
    *rows, doubles = received(window, 9)
    assert rows == [(id * 100 + i, f"N{id}") for id in (1, 2, 3) for i in range(5)]
    assert doubles == 3  # the first batch's blocks, which stood there already


def test_a_function_publishes_and_writes_and_each_happens_once(window: Window, database: Path) -> None:
    window.publish(1, 2, rows=3)

    def ledger() -> Ledger:
        return Ledger(sqlite3.connect(database))

    def both(batch: Any, batch_id: int, connection: Any) -> None:
        publish_batch(
            batch, OUT, batch_id, order_by=["id"], schema=window.schema, ledger=ledger,
            **{"bus.dir": window.options["bus.dir"]},
        )  # fmt: skip
        connection.executemany("INSERT INTO effect VALUES (?)", [(row.id,) for row in batch.collect()])
        if raising.pop(batch_id, None):
            raise Killed("blocks are out, rows are not committed")

    raising = {1: True}
    with pytest.raises(StreamingQueryException, match="blocks are out"):
        window.finish(foreach_batch(window.stream(maxRowsPerTrigger="3"), both, ledger=ledger))
    window.finish(foreach_batch(window.stream(maxRowsPerTrigger="3"), both, ledger=ledger))
    ids = [100, 101, 102, 200, 201, 202]
    assert effect_of(database) == ids
    *rows, doubles = received(window, 2)
    assert ([row[0] for row in rows], doubles) == (ids, 0)


def effect_of(database: Path) -> list[int]:
    with closing(sqlite3.connect(database)) as connection:
        return [id for (id,) in connection.execute("SELECT id FROM effect")]


@pytest.mark.parametrize("way", ["a table", "a topic"])
def test_a_checkpoint_that_is_older_than_the_ledger_is_refused_and_loses_nothing(
    way: str, window: Window, database: Path
) -> None:
    def ledger() -> Ledger:
        return Ledger(sqlite3.connect(database))

    def keep(batch: Any, batch_id: int, connection: Any) -> None:
        connection.executemany("INSERT INTO effect VALUES (?)", [(row.id,) for row in batch.collect()])

    def republish(batch: Any, batch_id: int) -> None:
        bus = {"bus.dir": window.options["bus.dir"]}
        publish_batch(batch, OUT, batch_id, order_by=["id"], schema=window.schema, ledger=ledger, **bus)

    def run(rows: int, checkpoint: str = "checkpoint", **more: str) -> None:
        stream = window.stream(maxRowsPerTrigger=str(rows), **more)
        if way == "a table":
            window.finish(foreach_batch(stream, keep, ledger=ledger), checkpoint=checkpoint)
        else:
            window.finish(stream, republish, checkpoint)

    window.publish(1, 2)
    run(1)
    shutil.copytree(window.place / "checkpoint", window.place / "copy")
    window.publish(3)
    run(1)
    run(1, "copy")  # the same batch once more, as after any failure
    window.publish(4, 5)
    run(1)
    with pytest.raises(StreamingQueryException) as caught:
        run(2, "copy")  # batch 3 held one row
    topic = f"{window.topic}="
    assert f"batch 3 of this query is to end at {topic}5, and was done up to {topic}4: the checkpoint" in str(
        caught.value
    )
    assert f"the last batch that is done, 4, has ended: with the option start, at {topic}5" in str(caught.value)
    window.publish(6)
    if way == "a table":
        run(2, "anew", start="5")  # as the message says
        assert effect_of(database) == [100, 200, 300, 400, 500, 600]
    else:
        run(2)  # the checkpoint that belongs to the database
        assert [row[0] for row in received(window, 6)[:-1]] == [100, 200, 300, 400, 500, 600]


def test_a_batch_that_does_not_fit_leaves_nothing_behind(window: Window, database: Path) -> None:
    window.publish(1)

    def republish(batch: Any, batch_id: int) -> None:
        publish_batch(
            batch, OUT, batch_id, order_by=["id"], schema="id*:int64,name:double",
            ledger=lambda: Ledger(sqlite3.connect(database)), **{"bus.dir": window.options["bus.dir"]},
        )  # fmt: skip

    with pytest.raises(StreamingQueryException, match="column 'name': Failed to parse"):
        window.finish(window.stream(), republish)
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT * FROM esp_batches").fetchall() == []


def test_a_stream_and_a_table_are_written_by_format(window: Window) -> None:
    window.publish(1, 2, rows=300)
    options = {**window.options, "url": OUT, "schema": window.schema}
    writer = window.stream().writeStream.format("esp").options(**options)
    assert window.start(writer, availableNow=True).awaitTermination(PATIENCE)
    window.read().limit(3).coalesce(1).write.format("esp").options(**options).mode("append").save()
    window.options["url"] = OUT
    ids = [row.id for row in window.read(side="in").collect()]
    assert sorted(ids[:600]) == sorted(id * 100 + i for id in (1, 2) for i in range(300))
    assert sorted(ids[600:]) == [100, 101, 102]


def test_a_writer_says_what_it_cannot_do(window: Window) -> None:
    window.publish(1)
    options = {**window.options, "url": OUT}
    with pytest.raises(Exception, match="set the option schema"):
        window.read().write.format("esp").options(**options).mode("append").save()
    with pytest.raises(Exception, match="mode append"):
        window.read().write.format("esp").options(**options).mode("overwrite").save()


def test_the_listener_logs_what_a_query_did(window: Window, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "esp_pubsub.spark")
    listener = Progress()
    window.spark.streams.addListener(listener)
    try:
        window.publish(1, 2, rows=3)
        window.write(b"foreign")
        window.publish(3)
        query = window.start(window.stream(maxRowsPerTrigger="6"), availableNow=True)
        window.until(lambda: len(lines(caplog)) == 2, query)
    finally:
        window.spark.streams.removeListener(listener)
    first, second = lines(caplog)
    assert "2 blocks, 6 rows, 0 doubles, 0 missed, 0 bad, 1 rows behind" in first
    assert "1 blocks, 1 rows, 0 doubles, 0 missed, 1 bad, 0 rows behind" in second


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "rows behind" in each.getMessage()]
