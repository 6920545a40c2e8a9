"""The source `esp` in Spark, local[2], beside what Spark's side costs alone and beside Spark's own Kafka source:
`make bench NAME=spark` (about ten minutes).

Ours reads topics of the embedded bus and of one real Kafka broker, into foreachBatch(count); what is timed is every
trigger but the first, with the planner at work: what lies behind its look-ahead is larger than what is measured. Beside
it a Python data source that yields batches which are ready and merged, and does nothing else. The peer reads the same
topics of Kafka by Spark's own source and decodes in mapInArrow, without checking chains, doubles or gaps. Its jars are
those of the newest Spark for which all of them can be had, which is not ours, so it runs in an environment of its own.

Latency is that of single events, a few a second, from `inject` to the function of foreachBatch; beside it a Python data
source whose events cost nothing. Memory is that of a query over 20 M rows; the JVM is driver and executor.

`ONLY=arrow,memory` measures these parts alone.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa

import esp_pubsub as esp
from esp_pubsub.spark_bridge.rows import spark_schema
from esp_pubsub.wire.arrow import arrow_schema, table
from tests.support.install import cached, classpath, java, run
from tests.support.kafka import Kafka
from tests.support.spark_peer import arrow_decoder, rows_decoder

from .kafka import in_kafka, url
from .report import LIMIT, REPETITIONS, STAMP, Crew, Member, Report, fail_on_notice, main, say
from .work import now

SCHEMA = esp.Schema("id*:int64,symbol:string,client:string,price:double,quantity:double,side:int32,at:stamp")
EVENTS = 256  # of a block
BATCH, BATCH_OF_ROWS = 4_000, 2_000  # blocks of a trigger
MEASURED = 6  # triggers, behind the first
MANY, LARGE, SMALL = 80_000, 64_000, 14_000  # blocks of a topic: for memory, behind the look-ahead, of rows
TICKS, WARM, PERIOD = 20, 2, 0.25
TICK = "id*:int64,due:int64"
EMBEDDED = {"ring_size": "4GiB"}

PEER = "4.0.0"  # the newest of which every jar can be had
PEER_SOURCE = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{PEER}"
PEER_JARS = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")  # the others Spark has
CONFIG = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": "-XX:-UsePerfData",
}
PEER_CONFIG = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",  # messages, each of many rows
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager"
    ),
}
ROOT = Path(__file__).resolve().parents[2]

_numbers = itertools.count(1)


def rows(first: int) -> list[tuple[Any, ...]]:
    """A block's events."""
    return [
        (i, f"SYM{i % 997}", f"client-{i % 4_999:06d}", i * 0.25, float(i % 500), 1 + i % 2, STAMP + i)
        for i in range(first, first + EVENTS)
    ]


# What a member does.


async def publish(directory: str, bus: str, settings: dict[str, str], topics: list[str], count: int, body: Any) -> None:
    """So many blocks to each topic."""
    blocks: list[Any] = [rows(EVENTS * i) for i in range(16)]
    if body == "arrow":
        blocks = [table(SCHEMA, block).to_batches()[0] for block in blocks]
    options = esp.PublisherOptions(body=body)
    say(ready=True)
    async with esp.init(bus, on_notice=fail_on_notice, **settings) as client:
        for topic in topics:
            async with client.publisher(url(topic), SCHEMA, options=options) as publisher:
                for number in range(count):
                    await publisher.inject(blocks[number % len(blocks)])
                await publisher.flush(LIMIT)
    say(done=True)


async def spark(directory: str, bootstrap: str, runs: list[str], site: str, jars: str) -> None:
    """A session; each time the parent says so, the next of the runs."""
    with _session(directory, site, jars) as session:
        at = Place(session, directory, bootstrap)
        say(ready=True)
        for name in runs:
            if not await asyncio.to_thread(sys.stdin.readline):
                raise SystemExit("the parent is gone")
            say(found=await asyncio.to_thread(RUNS[name], at))
    say(done=True)


ROLES = {role.__name__: role for role in (publish, spark)}


@contextmanager
def _session(directory: str, site: str, jars: str) -> Iterator[Any]:
    """A SparkSession, with pyspark from `site` if that is not empty."""
    place = tempfile.mkdtemp(prefix="spark-", dir=directory)
    os.environ["JAVA_HOME"] = str(Path(java()).resolve().parents[1])
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, str(ROOT)]))
    os.environ.pop("SPARK_HOME", None)
    if site:
        sys.path.insert(0, site)
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder.master("local[2]").appName("bench")
    config = CONFIG | {"spark.local.dir": place, "spark.sql.warehouse.dir": place}
    if site:
        config |= PEER_CONFIG | {"spark.driver.extraClassPath": jars}
    for key, value in config.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    if not site:
        from esp_pubsub.spark_bridge import register
        from tests.support.spark_sources import Ready, Ticking

        register(session)
        session.dataSource.register(Ready)
        session.dataSource.register(Ticking)
    yield session
    gateway: Any = SparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(20)


class Place:
    """Where runs happen."""

    def __init__(self, session: Any, directory: str, bootstrap: str) -> None:
        self.session = session
        self.directory = directory
        self.buses = {"embedded": {"dir": f"{directory}/bus"}, "kafka": {"hostport": bootstrap}}

    def stream(self, bus: str, *topics: str, blocks: int = BATCH, **more: str) -> Any:
        """Ours."""
        options = {f"bus.{key}": value for key, value in self.buses[bus].items()} | more
        options |= {"url": " ".join(map(url, topics)), "bus": bus, "side": "in"}
        reading = self.session.readStream.format("esp").options(**options)
        return reading.option("maxRowsPerTrigger", blocks * EVENTS).load()

    def ready(self) -> Any:
        """Batches that are as large as ours, and ready."""
        file = Path(self.directory, "ready.arrow")
        made = pa.concat_batches(table(SCHEMA, rows(EVENTS * i)).to_batches()[0] for i in range(65_536 // EVENTS))
        with pa.OSFile(str(file), "wb") as opened, pa.ipc.new_stream(opened, made.schema) as stream:
            stream.write(made)
        batches = BATCH * EVENTS // 65_536
        options = {"file": str(file), "schema": spark_schema(SCHEMA, ()), "batches": str(batches)}
        return self.session.readStream.format("ready").options(**options).load()

    def peer(self, *topics: str, body: str = "arrow", blocks: int = BATCH) -> Any:
        """Spark's own source."""
        options = {
            "kafka.bootstrap.servers": self.buses["kafka"]["hostport"], "startingOffsets": "earliest",
            "subscribe": ",".join(map(in_kafka, topics)), "maxOffsetsPerTrigger": str(blocks),
        }  # fmt: skip
        messages = self.session.readStream.format("kafka").options(**options).load().select("value")
        decode = (arrow_decoder if body == "arrow" else rows_decoder)(arrow_schema(SCHEMA))
        return messages.mapInArrow(decode, spark_schema(SCHEMA, ()))

    def rate(self, stream: Any) -> float:
        """Rows a second into foreachBatch(count)."""
        counts: list[int] = []
        times: list[int] = []

        def count(batch: Any, number: int) -> None:
            counts.append(batch.count())
            times.append(now())

        self.query(stream, count, lambda: len(times) > MEASURED)
        return sum(counts[1 : MEASURED + 1]) / (times[MEASURED] - times[0]) * 1e9

    def query(self, stream: Any, function: Callable[[Any, int], None], enough: Callable[[], bool]) -> None:
        """Run until it is enough."""
        done = threading.Event()

        def called(batch: Any, number: int) -> None:
            if not done.is_set():
                function(batch, number)
                if enough():
                    done.set()

        checkpoint = f"{self.directory}/checkpoint-{os.getpid()}-{next(_numbers)}"
        writer = stream.writeStream.foreachBatch(called).option("checkpointLocation", checkpoint)
        query = writer.start()
        deadline = time.monotonic() + LIMIT
        try:
            while not done.wait(0.2):
                if query.exception() is not None:
                    raise query.exception()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a query was not done after {LIMIT} s")
        finally:
            query.stop()
            shutil.rmtree(checkpoint, ignore_errors=True)

    def latency(self, stream: Any, begun: int = 0) -> float:
        """p50 in ms of what comes behind the first triggers."""
        took: list[float] = []
        triggers = itertools.count()

        def gather(batch: Any, number: int) -> None:
            found = batch.collect()
            seen = now()
            if next(triggers) >= WARM:
                took.extend((seen - row.due) / 1e6 for row in found)

        self.query(stream, gather, lambda: len(took) >= TICKS)
        return median(took)

    def ticking(self) -> float:
        """The latency of events that cost nothing."""
        options = {"begun": str(now()), "period": str(round(PERIOD * 1e9))}
        return self.latency(self.session.readStream.format("ticking").options(**options).load())

    def published(self, bus: str) -> float:
        """The latency of ours; another thread of this process publishes."""
        topic, ended = f"tick{next(_numbers)}", threading.Event()

        async def publish() -> None:
            async with (
                esp.init(bus, on_notice=fail_on_notice, **self.buses[bus]) as client,
                client.publisher(url(topic), TICK) as publisher,
            ):
                for number in itertools.count():
                    if await asyncio.to_thread(ended.wait, PERIOD):
                        return
                    await publisher.inject([(number, now())])

        publishing = threading.Thread(target=asyncio.run, args=[publish()])
        publishing.start()
        try:
            return self.latency(self.stream(bus, topic, schema=TICK))
        finally:
            ended.set()
            publishing.join(LIMIT)

    def memory(self) -> dict[str, list[int]]:
        """The bytes of each kind of process behind each trigger, of the whole topic."""
        found: dict[str, list[int]] = defaultdict(list)
        counts: list[int] = []

        def count(batch: Any, number: int) -> None:
            counts.append(batch.count())
            for name, size in _memory().items():
                found[name].append(size)

        self.query(self.stream("embedded", "many"), count, lambda: sum(counts) >= MANY * EVENTS)
        if sum(counts) != MANY * EVENTS:
            raise RuntimeError(f"{sum(counts)} rows came, {MANY * EVENTS} were published")
        return found


def _memory() -> dict[str, int]:
    """Bytes that are no file's pages: of this process, of the JVM, and of Spark's Python processes together."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            text, rest = each.read_text().split(" (", 1)
        except OSError:  # it has just ended
            continue
        names[int(text)], _, rest = rest.rpartition(") ")
        parents[int(text)] = int(rest.split()[1])
    sizes = {"driver's Python": _own(os.getpid()), "JVM": 0, "Python of planner and workers": 0}
    for pid in parents:
        above = pid
        while above not in (0, os.getpid()):
            above = parents.get(above, 0)
        if above and pid != above:
            sizes["JVM" if names[pid] == "java" else "Python of planner and workers"] += _own(pid)
    return sizes


def _own(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:")), 0)


FOUR = tuple(f"four{number}" for number in range(4))
ARROW, READY = "Arrow blocks, embedded", "Python source of ready batches"
ONE, ONE_PEER = "Arrow blocks, one topic of Kafka", "peer, one topic"
FOURS, FOURS_PEER = "Arrow blocks, four topics of Kafka", "peer, four topics"
OF_ROWS, OF_ROWS_PEER = "blocks of rows, one topic of Kafka", "peer, rows"
TICKED, TICKED_KAFKA, TICKING = "latency p50, embedded", "latency p50, Kafka", "latency p50, empty Python source"
MEMORY = "memory"
RUNS: Mapping[str, Callable[[Place], Any]] = {
    ARROW: lambda at: at.rate(at.stream("embedded", "many")),
    READY: lambda at: at.rate(at.ready()),
    ONE: lambda at: at.rate(at.stream("kafka", "one")),
    ONE_PEER: lambda at: at.rate(at.peer("one")),
    FOURS: lambda at: at.rate(at.stream("kafka", *FOUR)),
    FOURS_PEER: lambda at: at.rate(at.peer(*FOUR)),
    OF_ROWS: lambda at: at.rate(at.stream("kafka", "rows", blocks=BATCH_OF_ROWS)),
    OF_ROWS_PEER: lambda at: at.rate(at.peer("rows", body="rows", blocks=BATCH_OF_ROWS)),
    TICKED: lambda at: at.published("embedded"),
    TICKED_KAFKA: lambda at: at.published("kafka"),
    TICKING: Place.ticking,
    MEMORY: Place.memory,
}
PEERS = (ONE_PEER, FOURS_PEER, OF_ROWS_PEER)


# What the parent measures.


class Stage:
    """The broker, the topics, and a session of ours and one of the peer."""

    def __init__(self, crew: Crew, bootstrap: str) -> None:
        self.crew = crew
        self.bootstrap = bootstrap
        self._sparks: dict[bool, Member] = {}

    async def publish(self, bus: str, topics: Sequence[str], count: int, body: str = "arrow") -> None:
        embedded = {"dir": f"{self.crew.directory}/bus", **EMBEDDED}
        settings = embedded if bus == "embedded" else {"hostport": self.bootstrap}
        given = {"settings": settings, "topics": topics, "count": count, "body": body}
        member = await self.crew.start("publish", bus=bus, **given)
        await member.told()
        await member.end()

    async def begin(self, runs: Sequence[str]) -> None:
        """Sessions for these runs, in this order."""
        for peers in {name in PEERS for name in runs}:
            site, jars = await asyncio.to_thread(_peer) if peers else ("", "")
            its = [name for name in runs if (name in PEERS) == peers]
            common = {"bootstrap": self.bootstrap, "runs": its, "site": site, "jars": jars}
            self._sparks[peers] = await self.crew.start("spark", **common)

    async def run(self, name: str) -> Any:
        member = self._sparks[name in PEERS]
        member.tell()
        return (await member.told())["found"]

    async def end(self) -> None:
        for member in self._sparks.values():
            await member.told()
            await member.end()


def _peer() -> tuple[str, str]:
    """Where the peer's pyspark is, and its jars; both kept in the cache."""

    def fill(place: Path) -> None:
        pip: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place]
        run([*pip, f"pyspark=={PEER}"], hint=f"pip cannot install pyspark {PEER}")

    site = cached(f"pyspark-{PEER}", fill)
    jars = classpath(f"spark-kafka-{PEER}", [PEER_SOURCE]).split(":")
    return str(site), ":".join(jar for jar in jars if Path(jar).name.startswith(PEER_JARS))


Samples = Mapping[str, list[Any]]


def judge_arrow(report: Report, samples: Samples) -> None:
    report.figures({name: samples[name] for name in PARTS["arrow"]}, "rows/s")
    report.ratio(samples, ARROW, READY, 0.7)
    report.ratio(samples, ONE, ONE_PEER, 0.8)
    report.ratio(samples, FOURS, FOURS_PEER, 1.2)


def judge_rows(report: Report, samples: Samples) -> None:
    report.figures({name: samples[name] for name in PARTS["rows"]}, "rows/s")
    report.ratio(samples, OF_ROWS, OF_ROWS_PEER, 0.8)


def judge_latency(report: Report, samples: Samples) -> None:
    report.figures({name: samples[name] for name in PARTS["latency"]}, "ms", "lower")
    report.ratio(samples, TICKED, TICKING, 1.2, "lower")
    report.ratio(samples, TICKED_KAFKA, TICKING, 1.2, "lower")


def judge_memory(report: Report, samples: Samples) -> None:
    for name, sizes in samples[MEMORY][0].items():
        half = len(sizes) // 2
        first, second = max(sizes[:half]), max(sizes[half:])
        report.result(f"memory of {name}, first 10 M rows", first / 2**20, "MiB", better="lower")
        report.result(f"memory of {name}, second 10 M / first", second / first, "ratio", 1.1, "lower")


PARTS: Mapping[str, tuple[str, ...]] = {
    "arrow": (ARROW, READY, ONE, ONE_PEER, FOURS, FOURS_PEER),
    "rows": (OF_ROWS, OF_ROWS_PEER),
    "latency": (TICKED, TICKING, TICKED_KAFKA),
    "memory": (MEMORY,),
}
JUDGES = {"arrow": judge_arrow, "rows": judge_rows, "latency": judge_latency, "memory": judge_memory}


async def measure(report: Report) -> None:
    parts = os.environ.get("ONLY", ",".join(PARTS)).split(",")
    order = [name for part in parts for _ in range(1 if part == "memory" else REPETITIONS) for name in PARTS[part]]
    async with Kafka() as kafka, Crew("spark") as crew:
        stage = Stage(crew, kafka.bootstrap)
        if {ARROW, MEMORY} & {*order}:
            await stage.publish("embedded", ["many"], MANY)
        if ONE in order:
            await stage.publish("kafka", ["one"], LARGE)
            await stage.publish("kafka", FOUR, LARGE // 4)
        if OF_ROWS in order:
            await stage.publish("kafka", ["rows"], SMALL, "rows")
        await stage.begin(order)
        samples: dict[str, list[Any]] = defaultdict(list)
        for name in order:
            samples[name].append(await stage.run(name))
        await stage.end()
    for part in parts:
        JUDGES[part](report, samples)


if __name__ == "__main__":
    main("spark", measure, ROLES)
