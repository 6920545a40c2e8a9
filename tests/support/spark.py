"""A SparkSession on this machine alone: Java is found or installed, and nothing is left when the session ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from esp_pubsub.spark_bridge import register

from .install import java

ROOT = Path(__file__).parents[2]
_SMALL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData",
}


@contextmanager
def session(place: Path, master: str = "local[2]", settings: dict[str, str] | None = None) -> Iterator[Any]:
    """A session that knows `format("esp")` and keeps its files in `place`. Its JVM ends with it."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    environment = {
        "JAVA_HOME": str(Path(java()).resolve().parents[1]),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    if master.startswith("local-cluster"):
        environment["SPARK_HOME"] = str(_home(place))
    with patch.dict(os.environ, environment):
        builder: Any = SparkSession.builder
        builder = builder.master(master).appName("esp").config("spark.local.dir", place)
        for key, value in (_SMALL | {"spark.sql.warehouse.dir": str(place)} | (settings or {})).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        try:
            register(spark)
            yield spark
        finally:
            gateway = SparkContext._gateway
            spark.stop()
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(20)
            if gateway.proc.stdout:
                gateway.proc.stdout.close()
            SparkContext._gateway = SparkContext._jvm = None


def _home(place: Path) -> Path:
    """Spark's folder in another place: a cluster on this machine leaves files of its executors in it."""
    import pyspark

    home = place / "home"
    if not home.exists():
        home.mkdir()
        for each in Path(pyspark.__file__).parent.iterdir():
            (home / each.name).symlink_to(each)
    return home
