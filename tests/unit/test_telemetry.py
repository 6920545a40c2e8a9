"""What is counted, timed and traced, in OpenTelemetry's own in-memory exporters and as Prometheus text."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import esp_pubsub as esp
from esp_pubsub import notices
from esp_pubsub.telemetry import Telemetry, instrument
from tests.unit.workbench import ROW, SYMBOLS, TOPIC, TRADES, URL, Bench, block, numbers, until


class Observed:
    """An instrumented client, and what OpenTelemetry has of it."""

    def __init__(self, bench: Bench) -> None:
        self._reader = InMemoryMetricReader()
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.telemetry = instrument(bench.client, meter_provider=self._meters, tracer_provider=self.tracers)

    def points(self) -> dict[str, Any]:
        """The data points by the metric's name."""
        data = self._reader.get_metrics_data()
        assert data is not None
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return {metric.name: list(metric.data.data_points) for metric in metrics}

    def numbers(self) -> dict[str, Any]:
        """What has one data point: its number, or how often it was timed."""
        points = {name: found[0] for name, found in self.points().items() if len(found) == 1}
        return {name: getattr(point, "value", getattr(point, "count", None)) for name, point in points.items()}

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith(f"{name} ")]

    async def close(self) -> None:
        await asyncio.to_thread(self._meters.shutdown)
        await asyncio.to_thread(self.tracers.shutdown)


@pytest.fixture
async def observed(bench: Bench) -> AsyncIterator[Observed]:
    found = Observed(bench)
    yield found
    await found.close()


async def test_blocks_are_counted_and_timed_where_they_are_published_and_delivered(
    bench: Bench, observed: Observed
) -> None:
    async with await bench.publisher() as pub:
        for _ in range(3):
            await pub.inject([ROW, ROW])
        await pub.flush()
        stats = pub.stats
    async with await bench.subscriber(start="earliest", group="reader") as sub:
        await numbers(sub, 3)
    size = stats.bytes
    assert observed.numbers() == {
        "esp.publish.blocks": 3,
        "esp.publish.events": 6,
        "esp.publish.bytes": size,
        "esp.publish.acked": 3,
        "esp.publish.waiting": 0,
        "esp.publish.waiting_bytes": 0,
        "esp.publish.ack_time": 3,
        "esp.deliver.blocks": 3,
        "esp.deliver.events": 6,
        "esp.deliver.bytes": size,
        "esp.deliver.delay": 3,
    }
    points = observed.points()
    assert points["esp.publish.blocks"][0].attributes == {"messaging.destination.name": TOPIC}
    assert points["esp.deliver.blocks"][0].attributes == {
        "messaging.destination.name": TOPIC,
        "messaging.consumer.group.name": "reader",
    }
    assert 0 < points["esp.publish.ack_time"][0].sum < 5


async def test_a_block_has_a_span_from_its_id_to_its_acknowledgement_and_one_to_its_delivery(
    bench: Bench, observed: Observed
) -> None:
    tracer = observed.tracers.get_tracer("of the user")
    bench.faults.hang("confirmed")
    async with await bench.publisher() as pub:
        with tracer.start_as_current_span("the user's work") as parent:
            delivery = await pub.inject([ROW, ROW])
        assert observed.spans("publish") == []
        bench.faults.heal()
        await delivery
        [published] = observed.spans("publish")
    async with await bench.subscriber(start="earliest") as sub:
        await numbers(sub, 1)
    [delivered] = observed.spans("deliver")
    assert (published.name, published.kind) == (f"publish {TOPIC}", SpanKind.PRODUCER)
    assert published.parent is not None and published.parent.span_id == parent.get_span_context().span_id
    assert (delivered.name, delivered.kind) == (f"deliver {TOPIC}", SpanKind.CONSUMER)
    same = {
        "messaging.system": "esp_pubsub",
        "messaging.destination.name": TOPIC,
        "messaging.message.id": "1",
        "esp.source": f"{pub.source:016x}",
        "esp.run": "0",
        "esp.events": 2,
    }
    for span in (published, delivered):
        assert span.attributes is not None
        assert same.items() <= dict(span.attributes).items()
        assert span.start_time is not None and span.end_time is not None and span.start_time <= span.end_time


async def test_a_block_that_is_never_acknowledged_is_told_when_its_publisher_ends(
    bench: Bench, observed: Observed
) -> None:
    bench.faults.hang("confirmed")
    pub = await bench.publisher(close_timeout=0.01)
    await pub.inject([ROW])
    assert observed.numbers()["esp.publish.waiting"] == 1
    with pytest.raises(esp.DeliveryUnknown):
        await pub.aclose()
    found = observed.numbers()
    assert (found["esp.publish.waiting"], found["esp.publish.waiting_bytes"]) == (0, 0)
    assert (found["esp.publish.lost_sight_of"], "esp.publish.acked" in found) == (1, False)
    [span] = observed.spans("publish")
    assert span.status.status_code == StatusCode.ERROR


async def test_a_gap_is_counted_and_is_a_span_that_failed(bench: Bench, observed: Observed) -> None:
    await bench.raw(block(1), block(5))
    async with await bench.subscriber(schema=SYMBOLS, start="earliest") as sub:
        assert await numbers(sub, 2) == [1, 5]
    assert observed.numbers()["esp.deliver.missed"] == sub.stats.missed == 3
    [gap] = observed.spans("gap")
    assert gap.status.status_code == StatusCode.ERROR
    assert "first=2, last=4" in (gap.status.description or "")


async def test_a_purge_is_a_gap_too_and_other_notices_are_counted_by_their_kind(
    bench: Bench, observed: Observed
) -> None:
    await bench.raw(b"garbage", block(1))
    async with await bench.subscriber(schema=SYMBOLS, start="earliest") as sub:
        await numbers(sub, 1)
        await bench.client.catalog().purge(TOPIC)
        await bench.raw(block(1))
        await numbers(sub, 1)
    kinds = {point.attributes["esp.kind"]: point.value for point in observed.points()["esp.notices"]}
    assert kinds == {"BadMessage": 1, "Skipped": 1}
    assert [span.attributes["esp.kind"] for span in observed.spans("gap")] == ["Skipped"]  # type: ignore[index]


async def test_role_changes_are_counted_and_who_leads_is_known(bench: Bench, observed: Observed) -> None:
    pub = await bench.client.publisher(URL, TRADES, failover=esp.Failover("feed"))
    await (await pub.inject([ROW]))
    await until(lambda: pub.stats.role == "active")
    assert observed.numbers()["esp.role.active"] == 1
    await pub.aclose()
    assert pub.stats.role == "left"
    assert observed.numbers()["esp.role.active"] == 0
    changes = {
        (point.attributes["esp.role"], point.attributes["esp.event"]): point.value
        for point in observed.points()["esp.role.changes"]
    }
    assert {("candidate", "eligible"), ("active", "won"), ("standby", "handed over"), ("left", "leave")} == set(changes)
    roles = [span.attributes["esp.role"] for span in observed.spans("role")]  # type: ignore[index]
    assert len(roles) == sum(changes.values())
    assert all(before != after for before, after in pairwise(roles))


PAGE = f"""\
# HELP esp_publish_blocks_total Blocks that were given an id.
# TYPE esp_publish_blocks_total counter
esp_publish_blocks_total{{topic="{TOPIC}"}} 2
# HELP esp_publish_events_total Events in them.
# TYPE esp_publish_events_total counter
esp_publish_events_total{{topic="{TOPIC}"}} 2
"""


async def test_prometheus_text_has_every_number_without_any_provider(bench: Bench) -> None:
    telemetry = instrument(bench.client)
    async with await bench.publisher() as pub:
        for _ in range(2):
            await (await pub.inject([ROW]))
    text = telemetry.prometheus()
    assert text.startswith(PAGE)
    lines = text.splitlines()
    assert f'esp_publish_acked_total{{topic="{TOPIC}"}} 2' in lines
    assert f'esp_publish_waiting{{topic="{TOPIC}"}} 0' in lines
    assert f'esp_publish_ack_time_seconds_bucket{{topic="{TOPIC}",le="+Inf"}} 2' in lines
    assert f'esp_publish_ack_time_seconds_count{{topic="{TOPIC}"}} 2' in lines
    assert "# TYPE esp_publish_ack_time_seconds histogram" in lines
    within = [int(line.rpartition(" ")[2]) for line in lines if "_bucket{" in line]
    assert within == sorted(within)


async def test_labels_are_quoted(bench: Bench) -> None:
    telemetry = instrument(bench.client)
    await bench.publish(1)
    async with await bench.subscriber(start="earliest", group='a "b" \\ c') as sub:
        await numbers(sub, 1)
    assert 'group="a \\"b\\" \\\\ c"' in telemetry.prometheus()


def test_numbers_are_read_by_other_threads_while_they_grow() -> None:
    telemetry, done = Telemetry(), threading.Event()

    def growing() -> None:
        for number in range(3_000):
            telemetry.told(f"topic {number}", notices.Joined(source=1, run=0, id=1))
        done.set()

    thread = threading.Thread(target=growing)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while not done.is_set():
            telemetry.prometheus()
        thread.join(5)
    finally:
        sys.setswitchinterval(interval)
    assert telemetry.prometheus().count("Joined") == 3_000


async def test_what_was_open_before_is_not_observed(bench: Bench) -> None:
    async with await bench.publisher() as pub:
        telemetry: Telemetry = instrument(bench.client)
        await (await pub.inject([ROW]))
    assert f'esp_publish_blocks_total{{topic="{TOPIC}"}}' not in telemetry.prometheus()


def _run(code: str, directory: Path) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=15, cwd=directory)


def test_who_does_not_instrument_imports_nothing_of_it(tmp_path: Path) -> None:
    _run("import sys, esp_pubsub\nassert not {'opentelemetry', 'esp_pubsub.telemetry'} & set(sys.modules)", tmp_path)


def test_a_provider_without_the_extra_is_a_named_error_and_prometheus_needs_none(bus_directory: Path) -> None:
    code = f"""
import asyncio, sys
sys.modules["opentelemetry"] = sys.modules["opentelemetry.metrics"] = None
import esp_pubsub as esp
from esp_pubsub import notices
from esp_pubsub.telemetry import instrument

class Provider:
    def get_meter(self, name):
        raise AssertionError("not reached")

async def main():
    async with esp.init(dir={str(bus_directory)!r}) as client:
        try:
            instrument(client, meter_provider=Provider())
        except esp.NotInstalled as error:
            assert error.extra == "otel", error
        else:
            raise AssertionError("no error")
        telemetry = instrument(client)
        async with client.publisher({URL!r}, "id*:int64") as pub:
            await pub.inject([(1,)])
        assert "esp_publish_acked_total" in telemetry.prometheus()

asyncio.run(main())
"""
    _run(code, bus_directory)


async def test_how_far_groups_are_is_shown_once_it_was_asked_for(bench: Bench, observed: Observed) -> None:
    await bench.publish(1, 2, 3)
    async with bench.client.subscriber(f"{URL}?side=in", group="billing") as sub:
        await sub.confirm(await anext(sub))
        observed.telemetry.show_groups(await bench.client.groups(f"{URL}?side=in"))
        shown = observed.numbers()
        assert (shown["esp.group.behind"], shown["esp.group.readers"]) == (2, 1)
        await sub.confirm(await anext(sub))
    observed.telemetry.show_groups(await bench.client.groups(f"{URL}?side=in"))
    shown = observed.numbers()
    assert (shown["esp.group.behind"], shown["esp.group.readers"]) == (1, 0)
    assert f'esp_group_behind{{topic="{TOPIC}",group="billing"}} 1' in observed.telemetry.prometheus().splitlines()
