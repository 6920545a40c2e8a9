"""Solace: topics and exclusive queues of a message VPN, over the vendor's client (extra `solace`)."""

from .administration import told
from .bus import SolaceBus
from .options import SolaceOptions as Options
from .session import connect

__all__ = ["Options", "open_bus", "told"]


async def open_bus(options: Options) -> SolaceBus:
    """Connect to a broker. ConfigError, BusUnavailable or BusRefused say why not."""
    bus = SolaceBus(lambda: connect(options), options)
    await bus.open()
    return bus
