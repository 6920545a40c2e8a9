"""RabbitMQ: queues behind a topic exchange, over aiormq, which is aio-pika's own base (extra `rabbitmq`)."""

from .bus import open_bus
from .options import RabbitOptions as Options

__all__ = ["Options", "open_bus"]
