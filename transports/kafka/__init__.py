"""Kafka: topics of one partition on a broker's cluster, over aiokafka (extra `kafka`)."""

from .bus import open_bus
from .options import KafkaOptions as Options

__all__ = ["Options", "open_bus"]
