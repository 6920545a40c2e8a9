"""The same source on brokers: what it reads, what it outlives, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from esp_pubsub.address import kafka_topic
from esp_pubsub.spark_bridge import register
from tests.support.kafka import Kafka
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST

from .conftest import PATIENCE, ROOT, Window
from .test_trouble import refusal

PAGE = (ROOT / "docs" / "how-to" / "spark.md").read_text()


def window_of(spark: Any, place: Path, bus: str, **settings: str) -> Window:
    options = {"bus": bus, **{f"bus.{key}": value for key, value in settings.items()}}
    return Window(spark, place, options, {"bus": bus, **settings}, cluster=f"spark-{secrets.token_hex(4)}")


@pytest.fixture
def on_kafka(spark: Any, kafka: Kafka, tmp_path: Path) -> Iterator[Window]:
    window = window_of(spark, tmp_path, "kafka", hostport=kafka.bootstrap)
    yield window
    window.close()


@pytest.fixture
def on_rabbitmq(spark: Any, own_rabbitmq: RabbitMQ, tmp_path: Path) -> Iterator[Window]:
    node = own_rabbitmq.nodes[0]
    ports = {"port": str(node.port), "streamport": str(node.stream_port)}
    window = window_of(spark, tmp_path, "rabbitmq", host=HOST, mode="stream", **ports)
    yield window
    window.close()


@pytest.mark.usefixtures("spark")  # whose threads are there before the test begins
@pytest.mark.parametrize("bus", ["on_kafka", "on_rabbitmq"])
def test_a_broker_is_read_by_streams_and_by_tables(bus: str, request: pytest.FixtureRequest) -> None:
    window: Window = request.getfixturevalue(bus)
    window.publish(1, 2, 3)
    window.finish(window.stream(maxRowsPerTrigger="2"))
    window.publish(4)
    window.finish(window.stream(maxRowsPerTrigger="2"))
    assert window.ids == [100, 200, 300, 400]
    assert [len(rows) for _, rows in window.batches] == [2, 1, 1]
    assert window.read().count() == 4


def test_the_page_on_spark_does_what_it_says(on_kafka: Window, tmp_path: Path) -> None:
    reading, exactly_once = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    url, results = "dfESP://trades:5555/market/cq/TradesSource", "dfESP://trades:5555/market/cq/Totals"
    (config := tmp_path / "kafka.cfg").write_text(f'kafka\n{{\n  hostport = "{on_kafka.settings["hostport"]}"\n}}\n')
    with closing(sqlite3.connect(tmp_path / "totals.db")) as table:
        table.execute("CREATE TABLE totals (symbol TEXT, count INTEGER)")
    on_kafka.publish(1, 2, rows=2, url=url)
    seen: list[int] = []
    names: dict[str, Any] = {"spark": on_kafka.spark, "work": lambda batch, _: seen.append(batch.count())}
    names |= {"sqlite3": sqlite3, "RESULTS": results}

    def play(text: str) -> None:
        """As on the page, in places of the test's, until everything was read once."""
        text = text.replace("/etc/esp/kafka.cfg", str(config)).replace("/data/", f"{tmp_path}/")
        exec(text.replace(".start()", ".trigger(availableNow=True).start().awaitTermination()"), names)

    play(reading)
    assert seen == [4]
    play(exactly_once.replace('"symbol', '"name').replace("symbol*", "name*"))
    with closing(sqlite3.connect(tmp_path / "totals.db")) as table:
        assert sorted(table.execute("SELECT * FROM totals")) == [("n1", 2), ("n2", 2)]
    totals = on_kafka.read(url=results, side="in").collect()
    assert sorted(tuple(row) for row in totals) == [("n1", 2), ("n2", 2)]


def test_a_query_goes_on_when_its_rabbitmq_was_killed_and_came_back(
    on_rabbitmq: Window, own_rabbitmq: RabbitMQ
) -> None:
    window = on_rabbitmq
    window.publish(1, 2)
    query = window.start(window.stream())
    window.until(lambda: window.ids == [100, 200], query)
    own_rabbitmq.kill()
    own_rabbitmq.restart()
    window.publish(3)
    window.until(lambda: window.ids == [100, 200, 300], query)


@pytest.mark.usefixtures("spark")  # whose threads are there before the test begins
@pytest.mark.parametrize("bus", ["on_kafka", "on_rabbitmq"])
def test_a_topic_that_was_deleted_and_made_anew_is_refused(bus: str, request: pytest.FixtureRequest) -> None:
    window: Window = request.getfixturevalue(bus)
    window.publish(1, 2)
    window.finish(window.stream())
    if bus == "on_kafka":
        administer(window, lambda admin: deleted(admin, kafka_topic(window.topic)))
    else:
        request.getfixturevalue("own_rabbitmq").ctl("delete_queue", window.topic)
    window.publish(3, 4, 5)
    assert "was purged, or deleted and made anew" in refusal(window)
    assert window.ids == [100, 200]


async def deleted(admin: AIOKafkaAdminClient, topic: str) -> None:
    """Kafka says yes at once, and the topic is there a moment longer: whoever publishes then writes to the old one."""
    await admin.delete_topics([topic])
    async with asyncio.timeout(PATIENCE):
        while topic in await admin.list_topics():  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.05)


def administer(window: Window, ask: Callable[[AIOKafkaAdminClient], Awaitable[Any]]) -> None:
    async def asked() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=window.settings["hostport"])
        await admin.start()
        try:
            await ask(admin)
        finally:
            await admin.close()

    asyncio.run(asked())


def test_what_retention_took_on_kafka_is_told_from_a_topic_made_anew(on_kafka: Window) -> None:
    window = on_kafka
    window.publish(1, 2)
    window.finish(window.stream())
    window.publish(3, 4, 5)
    records = {TopicPartition(kafka_topic(window.topic), 0): RecordsToDelete(4)}
    administer(window, lambda admin: admin.delete_records(records))
    assert "2 messages from position 2 on were removed before they were read" in refusal(window)


@pytest.mark.parametrize("mode", ["direct", "persistent"])
def test_a_bus_that_keeps_nothing_is_refused_with_a_mode_that_does(on_rabbitmq: Window, mode: str) -> None:
    on_rabbitmq.options["bus.mode"] = mode
    with pytest.raises(Exception, match=r"keeps nothing to read again: set mode=stream"):
        on_rabbitmq.read(schema=on_rabbitmq.schema).collect()
    assert "keeps nothing to read again" in refusal(on_rabbitmq, schema=on_rabbitmq.schema)


def test_an_executor_without_the_extra_says_which(
    on_kafka: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plans where the extra is installed, and reads where it is not."""
    on_kafka.publish(1)
    lacking = "import sys\nif 'pyspark.worker' in sys.orig_argv: sys.modules['aiokafka'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(lacking)
    spark = on_kafka.spark
    with monkeypatch.context() as patched:
        path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
        patched.setitem(spark.sparkContext.environment, "PYTHONPATH", path)
        register(spark)
        frame = on_kafka.read()
        with pytest.raises(
            Exception, match=r"needs aiokafka, which is not installed: pip install 'esp-pubsub\[kafka\]'"
        ):
            frame.collect()
    register(spark)
    assert on_kafka.read().count() == 1


@pytest.mark.parametrize("where", ["cfg", "environment"])
def test_a_secret_of_the_bus_is_in_no_checkpoint_and_no_plan(
    where: str, on_rabbitmq: Window, own_rabbitmq: RabbitMQ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    window, password = on_rabbitmq, f"hunter2-{secrets.token_hex(8)}"
    own_rabbitmq.ctl("add_user", where, password)
    own_rabbitmq.ctl("set_permissions", "-p", "/", where, ".*", ".*", ".*")
    window.publish(1, 2)
    window.options["bus.userid"] = where
    if where == "cfg":
        window.options["config"] = str(tmp_path / "rabbitmq.cfg")
        Path(window.options["config"]).write_text(f'rabbitmq {{\n password = "{password}"\n}}\n')
    else:
        monkeypatch.setitem(window.spark.sparkContext.environment, "ESP_PUBSUB_PASSWORD", password)
        register(window.spark)
    stream = window.stream()
    window.finish(stream)
    assert window.ids == [100, 200]
    writer = stream.writeStream.format("esp").options(
        **{**window.options, "url": f"{window.url}2"}, schema=window.schema
    )
    query = window.start(writer, checkpoint="written", availableNow=True)
    assert query.awaitTermination(PATIENCE)
    query.explain(extended=True)
    window.read(url=f"{window.url}2", side="in").explain(extended=True)
    shown = capsys.readouterr().out
    files = [each for name in ("checkpoint", "written") for each in (tmp_path / name).rglob("*") if each.is_file()]
    assert "esp" in shown.lower()
    assert len(files) > 5
    assert password not in shown
    assert not [each for each in files if password.encode() in each.read_bytes()]
    monkeypatch.undo()
    register(window.spark)
