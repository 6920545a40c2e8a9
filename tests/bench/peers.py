"""What the peers of an engine do: run by engine_peers.py with the Python of their own environment, without esp_pubsub.

Each role is a process that says what it has to on a line of JSON, as the members of the other benchmarks do.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = tuple[str, float, float]


def rows(count: int) -> Iterator[Row]:
    """The events: a key, a price and a quantity, as engine_peers.py has them."""
    for number in range(count):
        yield f"key-{number * 7_919 % 1_000:04d}", number % 499 * 0.25, float(number % 7)


def say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def heard() -> None:
    say(ready=True)
    if not sys.stdin.readline():
        raise SystemExit("the parent is gone")


def until_asked() -> None:
    """Wait for SIGUSR1."""
    asked = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    while not asked.wait(0.05):
        pass


# Bytewax: blocks in memory, and a sink that counts


def bytewax(directory: str, events: int, block: int, packed: bool) -> None:
    """Blocks are rows that are ready; or packed ones, as they would come from a bus, and so are those that go out."""
    import bytewax.operators as op
    import msgpack
    from bytewax.dataflow import Dataflow
    from bytewax.inputs import DynamicSource, StatelessSourcePartition
    from bytewax.outputs import DynamicSink, StatelessSinkPartition
    from bytewax.testing import run_main

    every = list(rows(events))
    blocks = [every[at : at + block] for at in range(0, events, block)]
    ready: list[Any] = [[msgpack.packb(each)] for each in blocks] if packed else blocks
    written = [0]

    class Ready(StatelessSourcePartition[Any]):
        def __init__(self) -> None:
            self._blocks = iter(ready)

        def next_batch(self) -> list[Any]:
            return next(self._blocks)  # type: ignore[no-any-return]  # at the end that is what ends it

    class Source(DynamicSource[Any]):
        def build(self, *_: Any) -> Ready:
            return Ready()

    class Counts(StatelessSinkPartition[Any]):
        def write_batch(self, items: list[Any]) -> None:
            written[0] += len(items)
            if packed:
                msgpack.packb(items)

    class Sink(DynamicSink[Any]):
        def build(self, *_: Any) -> Counts:
            return Counts()

    def total(state: tuple[float, float] | None, row: Row) -> tuple[tuple[float, float], float]:
        money, quantity = state or (0.0, 0.0)
        money, quantity = money + row[1] * row[2], quantity + row[2]
        return (money, quantity), money

    flow = Dataflow("totals")
    taken = op.input("in", flow, Source())
    if packed:
        taken = op.flat_map("unpack", taken, msgpack.unpackb)
    keyed = op.key_on("key", taken, lambda row: row[0])
    op.output("out", op.stateful_map("total", keyed, total), Sink())
    heard()
    began = time.perf_counter()
    run_main(flow)
    if written[0] != events:
        raise SystemExit(f"{written[0]} came out of {events}")
    say(rate=events / (time.perf_counter() - began))


# Quix: events as JSON on Kafka, one message each


def _application(bootstrap: str, directory: str, **more: Any) -> tuple[Any, Any, Any]:
    from quixstreams import Application

    app = Application(
        broker_address=bootstrap, auto_offset_reset="earliest", state_dir=directory, loglevel="ERROR", **more
    )
    topic = app.topic("quix-in", value_deserializer="json", key_deserializer="str")
    return app, topic, app.topic("quix-out", value_serializer="json", key_serializer="str")


def quix_fill(directory: str, bootstrap: str, events: int) -> None:
    app, *_ = _application(bootstrap, directory)
    say(ready=True)
    with app.get_producer() as producer:
        for key, price, quantity in rows(events):
            producer.produce("quix-in", json.dumps({"p": price, "q": quantity}), key)
    say(filled=events)


def quix(directory: str, bootstrap: str, events: int = 0, state: str = "state", session: int = 45_000) -> None:
    """Totals by key: of so many events, or until ended; then it says when it gets its first one."""
    extra = {"session.timeout.ms": session, "heartbeat.interval.ms": session // 3}
    app, topic, out = _application(
        bootstrap, str(Path(directory, state)), consumer_group=f"totals-{bool(events)}", consumer_extra_config=extra
    )
    first: list[float] = []

    def total(value: dict[str, float], state: Any) -> dict[str, float]:
        if not first:
            first.append(time.perf_counter())
            if not events:
                say(active=True)
        money, quantity = state.get("money", 0.0), state.get("quantity", 0.0)
        money, quantity = money + value["p"] * value["q"], quantity + value["q"]
        state.set("money", money)
        state.set("quantity", quantity)
        return {"money": money}

    app.dataframe(topic).apply(total, stateful=True).to_topic(out)
    say(ready=True)
    if not events:
        app.run()
        return
    app.run(count=events, timeout=60, collect=False)
    say(rate=events / (time.perf_counter() - first[0]))


def quix_feed(directory: str, bootstrap: str, pace: int) -> None:
    app, *_ = _application(bootstrap, directory)
    say(ready=True)
    with app.get_producer() as producer:
        begun, number = time.monotonic(), 0
        while True:
            for _ in range(number, int((time.monotonic() - begun) * pace)):
                number += 1
                producer.produce("quix-in", json.dumps({"p": 1.0, "q": 1.0}), f"key-{number % 1_000:04d}")
            producer.poll(0)
            time.sleep(1 / pace)


def quix_watch(directory: str, bootstrap: str) -> None:
    """When each result came; all of it at SIGUSR1."""
    app, *_ = _application(bootstrap, directory, consumer_group="watch")
    times: list[float] = []

    def watch() -> None:
        with app.get_consumer() as consumer:
            consumer.subscribe(["quix-out"])
            while True:
                if (message := consumer.poll(0.1)) is not None and not message.error():
                    times.append(time.monotonic())

    threading.Thread(target=watch, daemon=True).start()
    say(ready=True)
    until_asked()
    Path(directory, "times.json").write_text(json.dumps(times))
    say(written=len(times))


# PySyncObj: a counter in three processes, of which one counts


def pysyncobj(directory: str, ports: list[int], pace: int) -> None:
    """Ports: this process's own first. Once it hears that, it counts so often a second; at SIGUSR1 it says when each
    count was applied here.
    """
    from pysyncobj import SyncObj, replicated

    times: list[float] = []

    class Counter(SyncObj):  # type: ignore[misc]
        def __init__(self) -> None:
            here, *others = [f"127.0.0.1:{port}" for port in ports]
            super().__init__(here, others)

        @replicated  # type: ignore[untyped-decorator]
        def count(self) -> None:
            times.append(time.monotonic())

    counter = Counter()

    def feed() -> None:
        if sys.stdin.readline():
            while True:
                with suppress(Exception):  # nobody leads: it is counted later, or never
                    counter.count()
                time.sleep(1 / pace)

    def tell() -> None:
        known = None
        while True:
            leader = counter.getStatus().get("leader")
            if leader is not None and str(leader) != known:
                known = str(leader)
                say(leader=int(known.rpartition(":")[2]))
            time.sleep(0.02)

    for work in (feed, tell):
        threading.Thread(target=work, daemon=True).start()
    say(ready=True)
    until_asked()
    say(times=times)


ROLES = {role.__name__: role for role in (bytewax, quix_fill, quix, quix_feed, quix_watch, pysyncobj)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
