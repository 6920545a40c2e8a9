"""One SparkSession for all tests, over brokers that are real. It ends with the session, and so does its JVM."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

import esp_pubsub as esp
from esp_pubsub.spark_bridge.connection import close_all
from tests.support.install import Missing, java
from tests.support.spark import session

PATIENCE = 120.0  # the first batch of a query takes 5 s, on a machine that does nothing else
TIMEOUT = 6 * PATIENCE  # as often as one test may wait, with the start of a JVM
ROOT = Path(__file__).parents[2]
_FAST = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    )
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT))


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any(
        Path(__file__).parent in item.path.parents for item in session.items
    ):
        with suppress(Missing):  # which the test that wants it will say
            java()  # may have to be installed, which is no test's time


@pytest.hookimpl(wrapper=True, trylast=True)  # inside of the guard's
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    # Spark's threads that call functions of foreachBatch stay as long as the JVM likes.
    try:
        return (yield)
    finally:
        guard: Any = item.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
        known = item.stash.get(guard._threads, set())
        known.update(thread for thread in threading.enumerate() if _of_spark(thread))


def _of_spark(thread: threading.Thread) -> bool:
    owner = getattr(getattr(thread, "_target", None), "__self__", None)
    return type(owner).__module__.startswith("py4j.")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with session(tmp_path_factory.mktemp("spark"), settings=_FAST) as made:
        yield made


@pytest.fixture
def window(spark: Any, bus_directory: Path, tmp_path: Path) -> Iterator[Window]:
    made = Window(spark, tmp_path, {"bus.dir": str(bus_directory)}, {"dir": bus_directory})
    yield made
    made.close()


class Window:
    """A window on a bus, as publishers, Spark and a test see it."""

    schema = "id*:int64,name:string"

    def __init__(
        self, spark: Any, place: Path, options: dict[str, str], settings: dict[str, Any], cluster: str = "spark"
    ) -> None:
        self.url = f"dfESP://{cluster}:5555/p/q/w"
        self.topic = f"{cluster}:5555/p/q/w/O"
        self.spark = spark
        self.place = place
        self.options = {"url": self.url, **options}
        self.settings = settings
        self.rows: list[Any] = []
        self.batches: list[tuple[int, list[Any]]] = []
        self._queries: list[Any] = []

    def run(self, function: Callable[[esp.Client], Any]) -> Any:
        """A coroutine function of a client, on a loop of its own."""

        async def ran() -> Any:
            async with asyncio.timeout(PATIENCE), esp.init(**self.settings) as client:
                return await function(client)

        return asyncio.run(ran())

    def publish(self, *ids: int, rows: int = 1, url: str = "", schema: str = "", **more: Any) -> None:
        """A block for each number, with as many rows as said, from a new publisher."""

        async def published(client: esp.Client) -> None:
            async with client.publisher(url or self.url, schema or self.schema, side="out", **more) as publisher:
                for id in ids:
                    await publisher.inject([(id * 100 + i, f"n{id}") for i in range(rows)])

        self.run(published)

    def write(self, *messages: bytes) -> None:
        """Messages as they are."""

        async def written(client: esp.Client) -> None:
            pipe = await client.bus.pipe(self.topic)
            await pipe.write(messages)
            await pipe.confirmed(len(messages) - 1)
            await pipe.aclose()

        self.run(written)

    def purge(self) -> None:
        self.run(lambda client: client.catalog().purge(self.topic))

    def read(self, **more: str) -> Any:
        return self.spark.read.format("esp").options(**{**self.options, **more}).load()

    def stream(self, **more: str) -> Any:
        return self.spark.readStream.format("esp").options(**{**self.options, **more}).load()

    def gather(self, batch: Any, batch_id: int) -> None:
        """A function for foreachBatch: keeps what came."""
        self.batches.append((batch_id, [tuple(row) for row in batch.collect()]))

    def start(self, stream: Any, function: Any = None, checkpoint: str = "checkpoint", **trigger: Any) -> Any:
        writer = stream if hasattr(stream, "start") else stream.writeStream.foreachBatch(function or self.gather)
        query = writer.option("checkpointLocation", str(self.place / checkpoint)).trigger(**trigger or POLL).start()
        self._queries.append(query)
        return query

    def finish(self, stream: Any, function: Any = None, checkpoint: str = "checkpoint") -> None:
        """Run until everything that is there now was read. What stops the query is raised, but that a worker of Spark's
        took longer to start than Spark waits for it, as on a slow machine: then it is started again, twice at most.
        """
        for starts_left in reversed(range(3)):
            query = self.start(stream, function, checkpoint, availableNow=True)
            try:
                assert query.awaitTermination(PATIENCE)
            except StreamingQueryException as error:
                if not starts_left or "failed to connect back" not in str(error):
                    raise
            else:
                return

    def until(self, seen: Callable[[], bool], query: Any) -> None:
        """Wait for evidence."""
        deadline = time.monotonic() + PATIENCE
        while not seen():
            if query.exception() is not None:
                raise query.exception()
            assert time.monotonic() < deadline, "not seen in time"
            time.sleep(0.02)

    @property
    def ids(self) -> list[int]:
        """The first column of everything that came, in order."""
        return [row[0] for _, rows in self.batches for row in rows]

    def close(self) -> None:
        for query in self._queries:
            query.stop()
        close_all()


POLL = {"processingTime": "50 milliseconds"}
