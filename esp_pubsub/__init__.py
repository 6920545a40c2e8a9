"""Publish and subscribe to SAS-ESP-style event streams over swappable buses. See README.md for the ten lines."""

from .address import Address
from .client import Client
from .effect import Call, effect
from .engine.engine import Engine
from .engine.model import model
from .engine.options import EngineOptions, EngineStats, LineStats
from .engine.out import Out
from .engine.outcomes import Outcomes
from .errors import (
    AddressError,
    BadBody,
    BadFrame,
    BeginningDiffers,
    BusError,
    BusRefused,
    BusUnavailable,
    Closed,
    ConfigError,
    DeliveryUnknown,
    EffectFailed,
    EspError,
    ExpressionError,
    HandlerFailed,
    InputDiffers,
    InputLost,
    ModelError,
    ModelFileError,
    NoAnswer,
    NoGroup,
    NothingStored,
    NotInstalled,
    NotOffered,
    Overrun,
    RequestRefused,
    SchemaDiffers,
    SchemaError,
    Stale,
    StateRefused,
    StepFailed,
    StepsDiffer,
    Switched,
    TooLarge,
    Unconfirmed,
    ValueRefused,
    WrongOrder,
)
from .events import Block, Event, EventFlag, Opcode
from .failover.membership import RoleChange
from .failover.options import Failover
from .groups import GroupLag
from .handling import OnError, dead_letter, handle, retry
from .health import Health
from .ledger import Ledger
from .lib import init, set_pubsub_lib, shutdown
from .publisher import Delivery, Publisher, PublisherOptions, PublisherStats, Resume
from .requests import Answer
from .runner import run
from .schema import Field, FieldType, Key, Schema
from .subscriber import Subscriber
from .subscriber_options import SubscriberOptions, SubscriberStats
from .wire.frame import Limits

__version__ = "0.1.0"

__all__ = [
    "Address",
    "AddressError",
    "Answer",
    "BadBody",
    "BadFrame",
    "BeginningDiffers",
    "Block",
    "BusError",
    "BusRefused",
    "BusUnavailable",
    "Call",
    "Client",
    "Closed",
    "ConfigError",
    "Delivery",
    "DeliveryUnknown",
    "EffectFailed",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "EspError",
    "Event",
    "EventFlag",
    "ExpressionError",
    "Failover",
    "Field",
    "FieldType",
    "GroupLag",
    "HandlerFailed",
    "Health",
    "InputDiffers",
    "InputLost",
    "Key",
    "Ledger",
    "Limits",
    "LineStats",
    "ModelError",
    "ModelFileError",
    "NoAnswer",
    "NoGroup",
    "NotInstalled",
    "NotOffered",
    "NothingStored",
    "OnError",
    "Opcode",
    "Out",
    "Outcomes",
    "Overrun",
    "Publisher",
    "PublisherOptions",
    "PublisherStats",
    "RequestRefused",
    "Resume",
    "RoleChange",
    "Schema",
    "SchemaDiffers",
    "SchemaError",
    "Stale",
    "StateRefused",
    "StepFailed",
    "StepsDiffer",
    "Subscriber",
    "SubscriberOptions",
    "SubscriberStats",
    "Switched",
    "TooLarge",
    "Unconfirmed",
    "ValueRefused",
    "WrongOrder",
    "dead_letter",
    "effect",
    "handle",
    "init",
    "model",
    "retry",
    "run",
    "set_pubsub_lib",
    "shutdown",
]
