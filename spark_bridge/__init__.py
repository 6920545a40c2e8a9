"""Spark in front, the SDK behind."""

if __name__ != "esp_pubsub.spark_bridge":
    raise ImportError(f"{__name__} is not a package of its own: import esp_pubsub.spark_bridge", name=__name__)
