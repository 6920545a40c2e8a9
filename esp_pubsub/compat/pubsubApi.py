"""SAS's `pubsubApi`: its functions, in its order, over a portal thread.

Init -> [QueryMeta] -> PublisherStart | SubscriberStart -> [SetBufferSize] -> Connect -> PublisherInject ...
-> Stop | Disconnect -> Shutdown
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

from .. import lib
from ..address import Address
from ..errors import ConfigError, NotOffered, SchemaError, WrongOrder
from ..events import EventFlag, Opcode
from ..requests import ask
from ..text import JsonReader, JsonWriter
from . import fails_with, log, text
from .clients import PATIENCE, Codes, Failures, Library, PublisherClient, Started, SubscriberClient
from .modelingApi import Event, EventBlock, StringV, WindowSchema, the

T = TypeVar("T")
_ANSWER = 2.0  # seconds that an engine has for an answer


class PubsubLib(IntEnum):
    """What `SetPubsubLib` takes. NATIVE is the embedded bus: there is no engine to talk to."""

    ESP_PSLIB_NATIVE = 0
    ESP_PSLIB_SOLACE = 1
    ESP_PSLIB_TERVELA = 2
    ESP_PSLIB_RABBITMQ = 3
    ESP_PSLIB_KAFKA = 4


ESP_PSLIB_NATIVE, ESP_PSLIB_SOLACE, ESP_PSLIB_TERVELA, ESP_PSLIB_RABBITMQ, ESP_PSLIB_KAFKA = PubsubLib
(
    pubsubFail_NONE,
    pubsubFail_APIFAIL,
    pubsubFail_THREADFAIL,
    pubsubFail_SERVERDISCONNECT,
    pubsubFail_CONNECTORFAIL,
) = Failures
(
    pubsubCode_NOERROR,
    pubsubCode_CLIENTEVENTSQUEUED,
    pubsubCode_CLIENTNOTCONNECTED,
    pubsubCode_READFAILED,
    pubsubCode_WRITEFAILED,
    pubsubCode_READEVENTSIZE,
    pubsubCode_READEVENTS,
    pubsubCode_WRITEEVENTS,
) = Codes
_BUSES = {
    ESP_PSLIB_NATIVE: "embedded",
    ESP_PSLIB_SOLACE: "solace",
    ESP_PSLIB_RABBITMQ: "rabbitmq",
    ESP_PSLIB_KAFKA: "kafka",
}


def _as_is(function: T) -> T:
    """What SAS's module needs to make a C callback of a function. Here the function itself will do."""
    if not callable(function):
        raise TypeError(f"a callback is a function, not {function!r:.80}")
    return function


ERRCBFUNC = SUBCBFUNC = GDCBFUNC = _as_is


_library: Library | None = None


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _library
    _library = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _the_library() -> Library:
    if _library is None:
        raise WrongOrder("Init comes first")
    return _library


@atexit.register
def _stop_at_exit() -> None:
    """A script that ends without Stop or Shutdown loses nothing of what it injected."""
    if _library is not None:
        for error in _library.stop_all(drain=False):
            log.error("at the end of the program: %s", error)
        _library.leave_bus()


@fails_with(0)
def SetPubsubLib(library: int) -> int:
    """Choose the bus, before Init; its cfg file is read as SAS reads it, from the current directory."""
    if _library is not None:
        raise WrongOrder("SetPubsubLib comes before Init")
    if library not in _BUSES:
        raise NotOffered(f"there is no driver for {library!r}", capability="bus")
    lib.set_pubsub_lib(_BUSES[PubsubLib(library)])
    return 1


@fails_with(0)
def Init(level: int, logconfig: str | bytes | None = None) -> int:
    """Begin. The bus is reached for by the first call that needs it. A second time changes nothing but the level."""
    global _library
    logging.getLogger("esp_pubsub").setLevel(int(level))
    if logconfig is not None:
        log.warning("Init: %s is not read: the library logs to Python's logging", text(logconfig, "a path"))
    if _library is None:
        _library = Library()
    return 1


@fails_with(None)
def PublisherStart(url: str | bytes, failed: Any, context: object = None) -> PublisherClient:
    """Keep what Connect needs; None for a URL that names no window."""
    return PublisherClient(_the_library(), url, failed, context)


@fails_with(None)
def SubscriberStart(url: str | bytes, received: Any, failed: Any, context: object = None) -> SubscriberClient:
    """The same for a subscriber. `?snapshot=true` is refused: no bus keeps a window's content."""
    return SubscriberClient(_the_library(), url, received, failed, context)


@fails_with(0)
def SetBufferSize(client: object, megabytes: int) -> int:
    """Between Start and Connect: how much a publisher holds unacknowledged, or a subscriber reads at once."""
    started = the(Started, client)
    if started.connected or megabytes < 1:
        raise WrongOrder("SetBufferSize takes 1 or more megabytes, and comes before Connect")
    started.buffer_bytes = int(megabytes) << 20
    return 1


@fails_with(0)
def SubscriberMaxQueueSize(url: str | bytes, megabytes: int, block: int) -> int:
    """Before SubscriberStart: how much subscribers of this host:port read at once.

    The publisher never waits for them, and a slow one is never dropped: without `block` that is refused.
    """
    if not block:
        raise NotOffered("no bus drops a subscriber for being slow; pass block=1", capability="block")
    if megabytes < 1:
        raise ConfigError(f"a queue has 1 or more megabytes, not {megabytes}")
    _the_library().queue_bytes[Address.parse(text(url, "a URL")).hostport] = int(megabytes) << 20
    return 1


@fails_with(0)
def SetTokenLocation(location: str | bytes) -> int:
    """The file of the OAuth token; no bus takes one from here."""
    raise NotOffered(
        f"{text(location, 'a path')}: tokens belong to the bus's cfg file (tokenfile of kafka.cfg)", capability="token"
    )


@fails_with(0)
def Connect(client: object) -> int:
    """Reach the bus; a subscriber's callback is called from now on."""
    the(Started, client).connect()
    return 1


@fails_with(0)
def PublisherInject(client: object, block: object) -> int:
    """Publish a block: 1 says that it has its ID and will be sent. Waits while the buffer is full, 30 s at most."""
    publisher, events = the(PublisherClient, client), the(EventBlock, block)
    publisher.usable()
    if not publisher.connected:
        publisher.fail(pubsubFail_APIFAIL, pubsubCode_CLIENTNOTCONNECTED)
        raise WrongOrder("Connect comes before PublisherInject")
    if not events.events:
        raise WrongOrder("this block was destroyed")
    publisher.library.portal.call_within(PATIENCE, publisher.inject, events)
    return 1


@fails_with(0)
def Stop(client: object, block: int) -> int:
    """End a client; with `block` what is queued comes first: blocks to the bus, or to the callback."""
    the(Started, client).stop(wait=bool(block))
    return 1


@fails_with(0)
def Disconnect(client: object, block: int) -> int:
    """The same as Stop; one of the two is enough."""
    the(Started, client).stop(wait=bool(block))
    return 1


@fails_with(0)
def Shutdown() -> int:
    """Stop all that is not stopped, and end the library. 0 if a block could not be brought to the bus."""
    global _library
    ended, _library = _the_library(), None
    ended.close()
    return 1


@fails_with(None)
def QueryMeta(url: str | bytes) -> StringV:
    """What the bus knows of schemas, projects and windows, else what an engine answers; None if nobody does.

    Windows come as bare names.
    """
    library = _the_library()
    asked = text(url, "a URL")

    async def query() -> list[str]:
        return await (await library.client()).query_meta(asked, _ANSWER)

    found = library.portal.call_within(PATIENCE, query)
    if (Address.parse(asked).options.get or "").startswith("windows"):
        found = sorted({name.rpartition("/")[2] for name in found})
    return StringV(found)


@fails_with(None)
def GetModel(url: str | bytes) -> StringV:
    """The windows and edges of a model; None without an engine that answers."""
    return StringV(map(str, _engine(url, {"get": "model"}).get("answer") or []))


@fails_with(0)
def PersistModel(url: str | bytes, path: str | bytes) -> int:
    """Have the engine save its model; 0 without one that answers."""
    _engine(url, {"do": "persist", "path": text(path, "a path")})
    return 1


@fails_with(0)
def QuiesceProject(url: str | bytes, client: object) -> int:
    """Bring what was injected to the bus, and wait for the engine to work it off; 0 without one that answers."""
    the(Started, client).flush()
    _engine(url, {"do": "quiesce"})
    return 1


def _engine(url: str | bytes, question: dict[str, str]) -> dict[str, Any]:
    """Ask whoever serves the cluster's metadata name. EspError if nobody does, or not this."""
    library = _the_library()
    address = Address.parse(text(url, "a URL"))

    async def answer() -> dict[str, Any]:
        requests = (await library.client()).requests()
        return await ask(requests, address.metadata, {**question, "url": str(address)}, _ANSWER)

    answered = library.portal.call_within(PATIENCE, answer)
    if "error" in answered:
        raise SchemaError(f"{address}: {answered['error']}")
    return answered


def DecodeFailure(failure: int) -> str:
    """The name of a failure."""
    return Failures(failure).name if failure in tuple(Failures) else f"unknown failure {failure}"


def DecodeFailureCode(code: int) -> str:
    """The name of a failure code."""
    return Codes(code).name if code in tuple(Codes) else f"unknown failure code {code}"


@fails_with(None)
def GDPublisherStart(url: str | bytes, failed: Any, context: object, config: object, acked: object) -> None:
    """Always None: guaranteed delivery is of SAS's native transport."""
    raise _no_guarantee()


@fails_with(None)
def GDSubscriberStart(url: str | bytes, received: Any, failed: Any, context: object, config: object) -> None:
    """Always None, as above."""
    raise _no_guarantee()


@fails_with(0)
def GDSubscriberAck(client: object, block: object) -> int:
    """Always 0, as above."""
    raise _no_guarantee()


def _no_guarantee() -> NotOffered:
    return NotOffered(
        "guaranteed delivery is SAS's native transport; on a bus every block that PublisherInject took is delivered",
        capability="gd",
    )


@fails_with(None)
def InitProtobuff(protofile: str | bytes, message: str | bytes, schema: object) -> None:
    """Always None: blocks travel in one format."""
    raise _no_protobuf()


@fails_with(None)
def ProtobuffToEb(converter: object, data: bytes) -> None:
    """Always None, as above."""
    raise _no_protobuf()


@fails_with(None)
def EbToProtobuff(converter: object, block: object) -> None:
    """Always None, as above."""
    raise _no_protobuf()


def _no_protobuf() -> NotOffered:
    return NotOffered("there is no protobuf converter; InitJson makes one of JSON", capability="protobuf")


class _Json:
    """What InitJson returns."""

    def __init__(self, schema: WindowSchema) -> None:
        self.schema = schema.schema
        self.writer = JsonWriter(self.schema, shape="events")


@fails_with(None)
def InitJson(schema: object) -> _Json:
    """A converter between blocks of this schema and JSON."""
    return _Json(the(WindowSchema, schema))


@fails_with(None)
def JsonToEb(converter: object, data: str | bytes) -> EventBlock:
    """A block from JSON, in either of the shapes that SAS has; None if it is none, or not one."""
    schema = the(_Json, converter).schema
    reader = JsonReader(schema, block=1 << 20)
    batches = [*reader.feed(text(data, "JSON").encode()), *reader.close()]
    if len(batches) != 1:
        raise SchemaError(f"there are {len(batches)} blocks in the JSON, not one")
    rows, opcode, flags = batches[0]
    opcodes: Sequence[int] = [opcode] * len(rows) if isinstance(opcode, int) else opcode
    marks: Sequence[int] = [flags] * len(rows) if isinstance(flags, int) else flags
    events = [Event(schema, row, Opcode(o), EventFlag(m)) for row, o, m in zip(rows, opcodes, marks, strict=True)]
    return EventBlock(schema, events)


@fails_with(None)
def EbToJson(converter: object, block: object) -> str:
    """A block as JSON."""
    events = the(EventBlock, block).events
    opcodes, flags = bytes([e.opcode for e in events]), bytes([e.flags for e in events])
    return the(_Json, converter).writer.write([e.row for e in events], opcodes, flags).decode()
