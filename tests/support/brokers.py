"""Real brokers, for tests and for trying things: `python -m tests.support.brokers kafka` runs one until Ctrl-C, and
prints the line that has a shell's programs use it.

    async with Kafka() as kafka:      # or, in plain code: with Kafka() as kafka
        kafka.bootstrap               # where clients connect
        kafka.kill()                  # also stop, freeze, thaw; of one of several: cluster.nodes[1].kill()
        await asyncio.to_thread(kafka.restart)

Processes of this machine, on loopback only; whatever is missing is installed. What holds for all of them stands in
server.py.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from .kafka import Kafka, KafkaCluster
from .rabbitmq import RabbitMQ
from .server import Broker, ServerFailed
from .zookeeper import ZooKeeper

__all__ = ["BROKERS", "Broker", "Kafka", "KafkaCluster", "RabbitMQ", "ServerFailed", "ZooKeeper"]

BROKERS: dict[str, Callable[[], Broker]] = {
    "kafka": Kafka,
    "kafka-secure": partial(Kafka, secure=True),
    "kafka3": KafkaCluster,
    "zookeeper": ZooKeeper,
    "rabbitmq": RabbitMQ,
    "rabbitmq2": partial(RabbitMQ, count=2),
}


def settings(broker: Broker) -> dict[str, str]:
    """What `init` has to be told; RabbitMQ in mode stream, because who comes late is to see everything. None where a
    broker is no bus.
    """
    if isinstance(broker, RabbitMQ):
        places = [urlsplit(url) for url in broker.settings["url"].split(",")]
        streams = broker.settings["streams"].split(",")[0].rpartition(":")[2]
        return {
            "host": ",".join(f"{place.hostname}:{place.port}" for place in places), "streamport": streams,
            "mode": "stream",
        }  # fmt: skip
    return {"hostport": broker.settings["bootstrap_servers"]} if "bootstrap_servers" in broker.settings else {}


def exports(name: str, broker: Broker) -> str:
    """A line for a shell that chooses this bus."""
    found = {"bus": name.rstrip("0123456789").partition("-")[0]} | settings(broker)
    return "export " + " ".join(f"ESP_PUBSUB_{key.upper()}={value}" for key, value in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.brokers", description=__doc__)
    parser.add_argument("broker", choices=BROKERS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), BROKERS[given.broker]() as broker, suppress(KeyboardInterrupt):
        sys.stdout.write(" ".join(f"{name}={value}" for name, value in broker.settings.items()) + "\n")
        if settings(broker):
            sys.stdout.write(exports(given.broker, broker) + "\n")
        sys.stdout.flush()
        while True:  # a signal that comes just before a pause would not end it
            time.sleep(0.5)


if __name__ == "__main__":
    main()
