"""The embedded bus: streams between the processes of one machine, durable, with no server. The default."""

from .bus import open_bus
from .options import EmbeddedOptions as Options

__all__ = ["Options", "open_bus"]
