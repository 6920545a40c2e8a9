"""Makes a member of an engine: finds its windows, claims what it publishes to, and takes the engine's beginning."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..address import Address
from ..bus import Bus, Message, Place
from ..claims import Claims, find_election, find_schema
from ..encode import Encoder
from ..errors import BusRefused, ConfigError, InputLost, NotOffered
from ..failover.line import Line
from ..failover.outbox import Outbox
from ..failover.words import Setup
from ..notices import Notice
from ..publisher import source_number
from ..retained import retain_beginning, retained_beginning, retained_runs
from ..wire.frame import Sealed, frames
from ..writer import BlockWriter
from .beginning import Beginning, Input, Output, check, platform_here, read_beginning
from .engine import Engine, Plan
from .model import Model, Step, declared
from .options import EngineOptions
from .steps import Steps

if TYPE_CHECKING:
    from ..client import Home


class Windows:
    """Where the windows of a model are. ConfigError for those that cannot be used."""

    def __init__(self, model: Model, url: str, elsewhere: Mapping[str, str]) -> None:
        """`elsewhere`: URLs of windows that are not below the engine's."""
        self.address = Address.parse(url)
        if self.address.contquery is None or self.address.window is not None:
            raise ConfigError(f"an engine stands at a contquery, dfESP://host:port/project/contquery, not at {url}")
        if unknown := elsewhere.keys() - model.inputs.keys() - model.outputs.keys():
            raise ConfigError(f"windows= names {min(unknown)!r}, which is no window of model {model.name}")
        self._elsewhere = elsewhere
        self.inputs = {window: self._topic(window, "in") for window in model.inputs}
        self.outputs = {window: self._topic(window, "out") for window in model.outputs}
        topics = [*self.inputs.values(), *self.outputs.values()]
        if twice := [topic for topic in topics if topics.count(topic) > 1]:
            raise ConfigError(f"two windows of model {model.name} are at {twice[0]}: give each its own in windows=")

    def _topic(self, window: str, side: Any) -> str:
        url = self._elsewhere.get(window)
        address = Address.parse(url or f"dfESP://{self._path}/{window}")
        address.require_window()
        return address.topic(address.options.side or side)

    @property
    def _path(self) -> str:
        return f"{self.address.hostport}/{self.address.project}/{self.address.contquery}"


async def open_engine(
    of: Any, url: str, windows: Mapping[str, str] | None, reads: Bus, writes: Bus, claims: Claims, home: Home,
    options: EngineOptions, notify: Callable[[Notice], None],
) -> Engine:  # fmt: skip
    """A member that is ready to start."""
    model, step = declared(of)
    where = Windows(model, url, windows or {})
    _check_offered(model, reads, writes)
    control = where.address.engine_control
    kind, elect = await find_election(writes, options.election, control)
    for window, topic in where.inputs.items():
        await find_schema(reads, topic, model.inputs[window])
    for window, topic in where.outputs.items():
        await claims.schema(topic, model.outputs[window])
        await claims.run(topic, _source(topic, where.address), options.run)
    began, chain = await _begin(writes, control, await _would_begin(model, where, reads, options), options.run)
    (taken,) = began.inputs
    lines = {window: _line(model, window, where, writes, options) for window in model.outputs}
    setup = Setup(
        tuple(where.outputs.values()), tuple(schema.text for schema in model.outputs.values()), "rows",
        kind.partition("://")[0], chain,
    )  # fmt: skip
    plan = Plan(
        where.address, taken, _steps(model, step, lines, options), [line for _, line in lines.values()], setup, control,
        elect,
    )  # fmt: skip
    return Engine(home, reads, writes, plan, options, notify)


def _check_offered(model: Model, reads: Bus, writes: Bus) -> None:
    if len(model.inputs) > 1:
        raise NotOffered(
            f"model {model.name} has {len(model.inputs)} input windows; an engine reads one so far", capability="inputs"
        )
    for bus, what in ((reads, "the input"), (writes, "the output")):
        if not bus.capabilities.replay:
            way_out = f": set {bus.capabilities.replays_with}" if bus.capabilities.replays_with else ""
            raise NotOffered(f"an engine needs a log for {what}, which can be read again{way_out}", capability="replay")
        if not bus.capabilities.retained:
            raise NotOffered(f"an engine needs a bus for {what} that retains values", capability="retained")


def _source(topic: str, address: Address) -> int:
    return source_number(f"{topic}/engine:{address.project}/{address.contquery}")


def _line(model: Model, window: str, where: Windows, writes: Bus, options: EngineOptions) -> tuple[BlockWriter, Line]:
    topic, schema = where.outputs[window], model.outputs[window]
    source = _source(topic, where.address)
    outbox = Outbox(options.buffer, options.buffer_bytes)
    encoder = Encoder(schema, limits=options.limits, rebuild=True)
    writer = BlockWriter(schema, encoder, outbox, source, options.run, writes.capabilities.max_message_bytes)
    suffix_only = writes.capabilities.suffix_only
    return writer, Line(source, options.run, outbox, suffix_only=suffix_only, buffer=options.buffer)


async def _would_begin(model: Model, where: Windows, reads: Bus, options: EngineOptions) -> Beginning:
    """How the engine begins if this member is its first: with all that its inputs still have."""
    inputs = []
    for window, topic in where.inputs.items():
        bounds = await reads.bounds(topic)
        runs = await retained_runs(reads, topic) if bounds.first else {}
        inputs.append(Input(window, topic, model.inputs[window].text, bounds.first, bounds.incarnation, runs))
    outputs = [Output(window, topic, model.outputs[window].text) for window, topic in where.outputs.items()]
    limits = {
        "buffer": options.buffer, "buffer_bytes": options.buffer_bytes, "step_blocks": options.step_blocks,
        "step_bytes": options.step_bytes, "max_sources": options.max_sources, "run": options.run,
        "frame_bytes": options.limits.frame_bytes, "events": options.limits.events,
    }  # fmt: skip
    return Beginning(model.version, tuple(inputs), tuple(outputs), limits, *platform_here())


async def _begin(bus: Bus, control_topic: str, ours: Beginning, run: int) -> tuple[Beginning, int]:
    """The beginning that counts, and its chain: the retained one, else the first on the order topic, else ours.

    Raises BeginningDiffers if this member is not set up like it, and InputLost where there was one and it is gone.
    """
    topic = order_topic(control_topic, run)
    source = source_number(topic)
    while True:
        message = await retained_beginning(bus, topic) or await _first_entry(bus, topic, source, run)
        found = None if message is None else read_beginning(message, source, run)
        if found is not None and message is not None:
            await retain_beginning(bus, topic, message)
            check(ours, found[0])
            return found
        if message is not None:
            raise BusRefused(f"what is retained as the beginning of {topic} cannot be read: was it another program?")
        await _propose(bus, topic, ours.sealed(source, run))


async def _first_entry(bus: Bus, topic: str, source: int, run: int) -> bytes | None:
    """The first message of the topic that is a beginning. InputLost where the first messages are gone already."""
    bounds = await bus.bounds(topic)
    if bounds.first:
        raise InputLost(
            f"{topic} has lost its first messages, and no beginning is retained: begin a new run on all members "
            "(run=...)",
            topic=topic,
            position=0,
        )
    if not bounds.end:
        return None
    feed = await bus.feed(topic, Place(0, bounds.incarnation), None)
    try:
        while feed.place is None or feed.place.position < bounds.end:
            for message in await feed.read(1_000, 4 << 20):
                if isinstance(message, Message) and read_beginning(message.data, source, run) is not None:
                    return message.data
    finally:
        await feed.aclose()
    return None


async def _propose(bus: Bus, topic: str, beginning: Sealed) -> None:
    pipe = await bus.pipe(topic)
    try:
        await pipe.write(frames([beginning], 0, time.time_ns() // 1000))
        await pipe.confirmed(0)
    finally:
        await pipe.aclose()


def order_topic(control_topic: str, run: int) -> str:
    """The topic on which all that is decided stands which does not follow from the input alone; a run has its own."""
    return f"{control_topic}/order-{run}" if run else f"{control_topic}/order"


def _steps(model: Model, step: Step, lines: Mapping[str, tuple[BlockWriter, Line]], options: EngineOptions) -> Steps:
    return Steps(step, model.inputs, lines, step_blocks=options.step_blocks, step_bytes=options.step_bytes)
