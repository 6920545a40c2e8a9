"""What a client's publishers and subscribers do, as OpenTelemetry metrics and spans and as Prometheus text.

The core calls one object at five places, if there is one: a block was given its id, blocks were acknowledged, a member
changed its role, blocks were delivered, and whatever else is told. So a client that is not instrumented pays a look at
an attribute for each block, and nothing else. Numbers are kept here, by labels, and only grow as long as the process
lives, but for the gauges; exporters read them from their own threads.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import NotInstalled
from .notices import Missed, Notice, Skipped

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from .client import Client
    from .failover.membership import RoleChange
    from .groups import GroupLag
    from .publisher import Publisher
    from .subscriber import Subscriber
    from .wire.frame import Frame

Labels = tuple[tuple[str, str], ...]

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of `Telemetry.prometheus`."""
_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SPELT = {"topic": "messaging.destination.name", "group": "messaging.consumer.group.name"}  # by OpenTelemetry


class _Number(NamedTuple):
    kind: str
    unit: str
    help: str


_NUMBERS = {
    "esp.publish.blocks": _Number("counter", "{block}", "Blocks that were given an id."),
    "esp.publish.events": _Number("counter", "{event}", "Events in them."),
    "esp.publish.bytes": _Number("counter", "By", "Their bytes."),
    "esp.publish.acked": _Number("counter", "{block}", "Blocks that the bus is known to have."),
    "esp.publish.waiting": _Number("gauge", "{block}", "Blocks that have an id and are not acknowledged yet."),
    "esp.publish.waiting_bytes": _Number("gauge", "By", "Their bytes."),
    "esp.publish.lost_sight_of": _Number("counter", "{block}", "Blocks not acknowledged when their publisher ended."),
    "esp.deliver.blocks": _Number("counter", "{block}", "Blocks that were delivered."),
    "esp.deliver.events": _Number("counter", "{event}", "Events in them."),
    "esp.deliver.bytes": _Number("counter", "By", "Their bytes."),
    "esp.deliver.missed": _Number("counter", "{block}", "Blocks that will not be delivered."),
    "esp.deliver.skipped": _Number("counter", "{message}", "Messages that the bus lost before they were read."),
    "esp.group.behind": _Number("gauge", "{message}", "Messages that a group has to read yet."),
    "esp.group.seconds": _Number("gauge", "s", "How long ago the first of them was sent, in whole seconds."),
    "esp.group.readers": _Number("gauge", "{reader}", "Whether somebody reads for the group."),
    "esp.role.changes": _Number("counter", "{change}", "Role changes of failover members."),
    "esp.role.active": _Number("gauge", "{member}", "Failover members of this process that lead."),
    "esp.notices": _Number("counter", "{notice}", "What was told, by its kind."),
}
_TIMES = {
    "esp.publish.ack_time": "Seconds from an id to its acknowledgement.",
    "esp.deliver.delay": "Seconds from the sender's write to the delivery, by the two clocks.",
}


@dataclass(slots=True)
class _Histogram:
    sum: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))


class _Waiting(NamedTuple):
    id: int
    since: float
    size: int
    span: Span | None


@dataclass(slots=True)
class _Publishing:
    """A publisher that was seen to do something."""

    labels: Labels
    waiting: deque[_Waiting] = field(default_factory=deque)
    change: RoleChange | None = None
    active: bool = False


def instrument(
    client: Client, *, meter_provider: MeterProvider | None = None, tracer_provider: TracerProvider | None = None
) -> Telemetry:
    """Observe what this client opens from now on. Metrics and spans go to the providers that are given (extra `otel`);
    without any there is `Telemetry.prometheus`, which needs nothing.
    """
    telemetry = Telemetry()
    try:
        if meter_provider is not None:
            telemetry.measure(meter_provider)
        if tracer_provider is not None:
            telemetry.trace(tracer_provider)
    except ImportError as e:
        raise NotInstalled(f"telemetry needs {e.name}: pip install 'esp-pubsub[otel]'", extra="otel") from e
    client.observe(telemetry)
    return telemetry


class Telemetry:
    """The numbers of one client. Made by `instrument`; what is not said to be for the user is called by the core."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[str, Labels], int] = defaultdict(int)
        self._times: defaultdict[tuple[str, Labels], _Histogram] = defaultdict(_Histogram)
        self._publishing: dict[Publisher, _Publishing] = {}
        self._tracer: Tracer | None = None
        self._record: dict[str, Callable[[float, dict[str, str]], None]] = {}

    # for the user

    def prometheus(self) -> str:
        """All numbers, as Prometheus reads them; serve it under PROMETHEUS."""
        return "".join(f"{line}\n" for line in self._lines())

    def show_groups(self, lags: Iterable[GroupLag]) -> None:
        """Set the numbers of these groups, which `client.groups(url)` returned. To be called again and again."""
        for lag in lags:
            labels: Labels = (("topic", lag.topic), ("group", lag.name))
            self._sums["esp.group.behind", labels] = lag.behind
            self._sums["esp.group.readers", labels] = int(bool(lag.reader))
            if lag.seconds is not None:
                self._sums["esp.group.seconds", labels] = round(lag.seconds)

    # the two exporters

    def measure(self, provider: MeterProvider) -> None:
        """Have a meter provider read the numbers."""
        from opentelemetry.metrics import CallbackOptions, Observation

        meter = provider.get_meter("esp_pubsub")

        def observed(name: str) -> Callable[[CallbackOptions], Iterator[Observation]]:
            return lambda _: (Observation(value, _spelt(labels)) for labels, value in self._of(name))

        for name, number in _NUMBERS.items():
            make = (
                meter.create_observable_counter if number.kind == "counter" else meter.create_observable_up_down_counter
            )
            make(name, [observed(name)], number.unit, number.help)
        for name, help in _TIMES.items():
            histogram = meter.create_histogram(name, "s", help, explicit_bucket_boundaries_advisory=list(_BOUNDS))
            self._record[name] = histogram.record

    def trace(self, provider: TracerProvider) -> None:
        """Have a tracer provider get a span for each block published, block delivered, role change and gap."""
        self._tracer = provider.get_tracer("esp_pubsub")

    def _of(self, name: str) -> list[tuple[Labels, int]]:
        sums = self._sums.copy()  # in one step; a list of its items is not: other threads may run in between
        return [(labels, value) for (each, labels), value in sums.items() if each == name]

    def _lines(self) -> Iterator[str]:
        for name, number in _NUMBERS.items():
            full = name.replace(".", "_") + ("_total" if number.kind == "counter" else "")
            yield f"# HELP {full} {number.help}"
            yield f"# TYPE {full} {number.kind}"
            yield from (f"{full}{_shown(labels)} {value}" for labels, value in sorted(self._of(name)))
        for name, help in _TIMES.items():
            full = name.replace(".", "_") + "_seconds"
            yield f"# HELP {full} {help}"
            yield f"# TYPE {full} histogram"
            for (each, labels), histogram in sorted(self._times.copy().items(), key=lambda item: item[0]):
                if each == name:
                    yield from _bucket_lines(full, labels, histogram)

    # what the core tells

    def given(self, publisher: Publisher, id: int, events: int, size: int) -> None:
        """A block has its id."""
        known = self._known(publisher)
        labels, sums = known.labels, self._sums
        sums["esp.publish.blocks", labels] += 1
        sums["esp.publish.events", labels] += events
        sums["esp.publish.bytes", labels] += size
        sums["esp.publish.waiting", labels] += 1
        sums["esp.publish.waiting_bytes", labels] += size
        span = None
        if self._tracer is not None:
            what = _block(id, publisher.source, publisher.run, events, size)
            span = self._span("publish", "PRODUCER", labels, what)
        known.waiting.append(_Waiting(id, time.perf_counter(), size, span))

    def acked(self, publisher: Publisher, id: int) -> None:
        """The bus is known to have every block up to this one."""
        known = self._known(publisher)
        now = time.perf_counter()
        while known.waiting and known.waiting[0].id <= id:
            waited = known.waiting.popleft()
            self._sums["esp.publish.acked", known.labels] += 1
            self._let_go(known, waited)
            self._time("esp.publish.ack_time", known.labels, now - waited.since)
            if waited.span is not None:
                waited.span.end()

    def ended(self, publisher: Publisher) -> None:
        """It failed or was closed; what is not acknowledged never will be."""
        known = self._publishing.pop(publisher, None)
        if known is None:
            return
        if known.active:
            self._sums["esp.role.active", known.labels] -= 1
        for waited in known.waiting:
            self._sums["esp.publish.lost_sight_of", known.labels] += 1
            self._let_go(known, waited)
            if waited.span is not None:
                _fail(waited.span, "not acknowledged when its publisher ended")
                waited.span.end()

    def role(self, publisher: Publisher, change: RoleChange | None) -> None:
        """The latest role change of a failover member, told more than once."""
        if change is None or (change.role == "left" and publisher not in self._publishing):
            return
        known = self._known(publisher)
        if change is known.change:
            return
        known.change = change
        active = change.role == "active"
        self._sums["esp.role.active", known.labels] += active - known.active
        known.active = active
        what = (*known.labels, ("role", change.role), ("event", change.event))
        self._sums["esp.role.changes", what] += 1
        if self._tracer is not None:
            self._span("role", "INTERNAL", what, {"esp.term": change.term, "esp.on_bus": change.m}).end()

    def delivered(self, subscriber: Subscriber, frames: Sequence[Frame]) -> None:
        """Blocks passed the accept rule and are the user's next ones."""
        labels: Labels = (("topic", subscriber.topic),)
        if subscriber.group is not None:
            labels = (*labels, ("group", subscriber.group))
        sums = self._sums
        sums["esp.deliver.blocks", labels] += len(frames)
        now = time.time_ns() // 1000
        for frame in frames:
            sums["esp.deliver.events", labels] += frame.count
            sums["esp.deliver.bytes", labels] += len(frame.data)
            self._time("esp.deliver.delay", labels, max(now - frame.sent_at, 0) / 1e6)
            if self._tracer is not None:
                what = _block(frame.id, frame.source, frame.run, frame.count, len(frame.data))
                self._span("deliver", "CONSUMER", labels, what, min(frame.sent_at, now) * 1000).end()

    def told(self, topic: str, notice: Notice) -> None:
        """What goes to `on_notice`."""
        labels: Labels = (("topic", topic),)
        kind = type(notice).__name__
        self._sums["esp.notices", (*labels, ("kind", kind))] += 1
        if isinstance(notice, Missed):
            self._sums["esp.deliver.missed", labels] += notice.last - notice.first + 1
        elif isinstance(notice, Skipped):
            self._sums["esp.deliver.skipped", labels] += notice.messages or 0
        else:
            return
        if self._tracer is not None:
            span = self._span("gap", "CONSUMER", (*labels, ("kind", kind)), {})
            _fail(span, str(notice))
            span.end()

    def _known(self, publisher: Publisher) -> _Publishing:
        known = self._publishing.get(publisher)
        if known is None:
            known = self._publishing[publisher] = _Publishing((("topic", publisher.topic),))
        return known

    def _let_go(self, known: _Publishing, waited: _Waiting) -> None:
        self._sums["esp.publish.waiting", known.labels] -= 1
        self._sums["esp.publish.waiting_bytes", known.labels] -= waited.size

    def _time(self, name: str, labels: Labels, seconds: float) -> None:
        histogram = self._times[name, labels]
        histogram.sum += seconds
        histogram.buckets[bisect_left(_BOUNDS, seconds)] += 1
        if name in self._record:
            self._record[name](seconds, _spelt(labels))

    def _span(self, name: str, kind: str, labels: Labels, what: dict[str, Any], start: int | None = None) -> Span:
        from opentelemetry.trace import SpanKind

        assert self._tracer is not None
        attributes = {"messaging.system": "esp_pubsub", "messaging.operation.name": name, **_spelt(labels), **what}
        return self._tracer.start_span(
            f"{name} {dict(labels)['topic']}", kind=SpanKind[kind], attributes=attributes, start_time=start
        )


def _block(id: int, source: int, run: int, events: int, size: int) -> dict[str, Any]:
    """What tells a block from all others, the same where it is published and delivered, and its size."""
    return {
        "messaging.message.id": str(id),
        "messaging.message.body.size": size,
        "esp.source": f"{source:016x}",
        "esp.run": str(run),
        "esp.events": events,
    }


def _fail(span: Span, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, why))


@lru_cache(1_024)
def _spelt(labels: Labels) -> dict[str, str]:
    return {_SPELT.get(name, f"esp.{name}"): value for name, value in labels}


def _shown(labels: Labels) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels) + "}"


def _bucket_lines(name: str, labels: Labels, histogram: _Histogram) -> Iterator[str]:
    count = 0
    for bound, inside in zip((*_BOUNDS, "+Inf"), list(histogram.buckets), strict=True):
        count += inside
        yield f"{name}_bucket{_shown((*labels, ('le', str(bound))))} {count}"
    yield f"{name}_sum{_shown(labels)} {histogram.sum}"
    yield f"{name}_count{_shown(labels)} {count}"
