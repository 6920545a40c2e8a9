"""A demo on a broker that is there for it alone: `make demo BUS=kafka`, `make demo-engine BUS=kafka`."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

from .brokers import BROKERS
from .server import Broker


def rabbitmq(url: str, streams: str) -> list[str]:
    """In mode stream, because who comes late is to see everything."""
    place = urlsplit(url)
    return [f"host={place.hostname}", f"port={place.port}", f"streamport={streams.rpartition(':')[2]}", "mode=stream"]


SETTINGS: dict[str, Callable[[Broker], list[str]]] = {
    "kafka": lambda broker: [f"hostport={broker.settings['bootstrap_servers']}"],
    "rabbitmq": lambda broker: rabbitmq(**broker.settings),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.demo", description=__doc__)
    parser.add_argument("bus", choices=SETTINGS)
    parser.add_argument("--demo", choices=("demo", "demo_engine"), default="demo")
    given = parser.parse_args()
    bus = given.bus
    sys.stderr.write(f"starting {bus}\n")
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what it meets before the broker is up is no news
    with BROKERS[bus]() as broker:
        command = [sys.executable, "-m", f"esp_pubsub.cli.{given.demo}", "--bus", bus]
        return subprocess.run([*command, *SETTINGS[bus](broker)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
