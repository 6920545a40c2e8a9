"""A demo on a broker that is there for it alone: `make demo BUS=kafka`, `make demo-engine BUS=kafka`.

SAS's experiment too: `python -m tests.support.demo kafka --demo experiment --trades 100000`.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys

from .brokers import BROKERS, settings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.demo", description=__doc__)
    parser.add_argument("bus", choices=("kafka", "rabbitmq"))
    parser.add_argument("--demo", choices=("demo", "demo_engine", "experiment"), default="demo")
    given, more = parser.parse_known_args()
    bus = given.bus
    sys.stderr.write(f"starting {bus}\n")
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what it meets before the broker is up is no news
    with BROKERS[bus]() as broker:
        command = [sys.executable, "-m", f"esp_pubsub.cli.{given.demo}", *more, "--bus", bus]
        keys = [f"{key}={value}" for key, value in settings(broker).items()]
        return subprocess.run([*command, *keys], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
