"""Spark in front, the SDK behind."""

if __name__ != "esp_pubsub.spark_bridge":
    raise ImportError(f"{__name__} is not a package of its own: import esp_pubsub.spark_bridge", name=__name__)

from typing import Any

__all__ = ["BatchDiffers", "Ledger", "Progress", "foreach_batch", "publish_batch", "register"]

_PLACES = {
    "BatchDiffers": "ledger", "Ledger": "ledger", "Progress": "progress",
    "foreach_batch": "effects", "publish_batch": "effects",
}  # fmt: skip
_MISSING = "Spark needs {name}, which is not installed: pip install 'esp-pubsub[spark]'"


def register(spark: Any) -> None:
    """Make `format("esp")` known to a SparkSession. NotInstalled without the extra `spark`."""
    spark.dataSource.register(_load("source").EspSource)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(_load(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load(module: str) -> Any:
    """A part of the bridge. They are imported when asked for: each of Spark's processes pays for what it imports."""
    from importlib import import_module

    from esp_pubsub.errors import NotInstalled

    try:
        return import_module(f"{__name__}.{module}")
    except ImportError as e:
        raise NotInstalled(_MISSING.format(name=e.name), extra="spark") from e
