"""Makes a member of an engine: finds its windows, claims what it publishes to, and takes the engine's beginning."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .._news import News
from ..address import Address, order_topic
from ..bus import Bus, Logs, Place
from ..claims import Claims, find_election
from ..encode import Encoder
from ..errors import ConfigError, NotOffered
from ..failover.accept import Accept
from ..failover.group import Group
from ..failover.line import Line
from ..failover.outbox import Outbox
from ..failover.words import Setup
from ..notices import Notice
from ..publisher import source_number
from ..retained import retained_beginning
from ..writer import BlockWriter
from .beginning import Beginning, Input, Output, platform_here
from .clock import Clock
from .derived import DerivedOrder
from .engine import Engine, Ordered, Plan
from .inputs import LogInput, LogReader, QueueInput
from .model import Model, declared
from .options import EngineOptions
from .order import Order, Poisoned, Version
from .order_topic import begin, read_ahead
from .repeating import repeats
from .restoring import Restoring, Start
from .snapshots import Named, Snapshots
from .state import State
from .stepping import Stepping
from .steps import Reading, Steps
from .written import WrittenOrder

if TYPE_CHECKING:
    from ..client import Home

_log = logging.getLogger("esp_pubsub.engine")


class Windows:
    """Where the windows of a model are. ConfigError for those that cannot be used."""

    def __init__(self, model: Model, url: str, elsewhere: Mapping[str, str]) -> None:
        """`elsewhere`: URLs of windows that are not below the engine's."""
        self.address = Address.parse(url)
        if self.address.contquery is None or self.address.window is not None:
            raise ConfigError(f"an engine stands at a contquery, dfESP://host:port/project/contquery, not at {url}")
        if unknown := elsewhere.keys() - model.inputs.keys() - model.outputs.keys():
            known = ", ".join([*model.inputs, *model.outputs])
            raise ConfigError(f"{min(unknown)!r} is no window of model {model.name}, which has {known}")
        self._elsewhere = elsewhere
        self.inputs = {window: self._topic(window, "in") for window in model.inputs}
        self.outputs = {window: self._topic(window, "out") for window in model.outputs}
        topics = [*self.inputs.values(), *self.outputs.values()]
        if twice := [topic for topic in topics if topics.count(topic) > 1]:
            raise ConfigError(f"two windows of model {model.name} are at {twice[0]}: give each its own in windows=")

    @property
    def path(self) -> str:
        """Project and contquery."""
        return f"{self.address.project}/{self.address.contquery}"

    def _topic(self, window: str, side: Any) -> str:
        url = self._elsewhere.get(window)
        address = Address.parse(url or f"dfESP://{self.address.hostport}/{self.path}/{window}")
        address.require_window()
        return address.topic(address.options.side or side)


@dataclass(frozen=True, slots=True)
class Buses:
    """Where an engine reads, publishes, and writes its order; often one and the same."""

    reads: Bus
    writes: Bus
    orders: Bus


async def log_of(bus: Bus) -> Bus:
    """The bus itself, or the logs that it has beside its queues."""
    if bus.capabilities.replay or not bus.capabilities.logs:
        return bus
    return await cast(Logs, bus).log()


async def open_engine(
    of: Any, url: str, windows: Mapping[str, str] | None, buses: Buses, claims: Claims, home: Home,
    options: EngineOptions, snapshots: Path | None, notify: Callable[[Notice], None],
) -> Engine:  # fmt: skip
    """A member that is ready to start."""
    model, calls = declared(of)
    if options.repeat and snapshots is None:
        raise ConfigError("repeat is given, and no snapshots to begin with: pass snapshots= with their directory")
    state = None if snapshots is None else State(of)
    where = Windows(model, url, windows or {})
    kind = _kind_of_order(model, buses, options)
    control = where.address.engine_control
    elected, elect = await find_election(buses.writes, options.election, control)
    order_on, engine = order_topic(control, options.run), source_number(control)
    ours = await _would_begin(model, kind, where, buses.reads, options)
    if snapshots is not None and await retained_beginning(buses.orders, order_on) is None:
        ours = await repeats(ours, snapshots, engine, options.run, repeat=options.repeat)
    await _claim(model, where, buses, claims, options)
    begun, began, chain = await begin(buses.orders, order_on, ours, options.run, switches=snapshots is not None)
    lines = {window: _line(model, window, where, buses.writes, options) for window in model.outputs}
    steps = Steps(
        calls, [_reading(model, each, buses.reads, options) for each in began.inputs], lines,
        step_blocks=options.step_blocks, step_bytes=options.step_bytes, limits=options.limits,
    )  # fmt: skip
    topics, places = tuple(where.outputs.values()), tuple(each.place for each in began.inputs)
    order = Order(source_number(order_on), options.run, 1, chain, Version(began.version))
    numbered = list(zip(topics, [line for _, line in lines.values()], strict=True))
    beginning = Start(order, begun.following, places)
    named = Named(engine, options.run, order.source, chain, model.version)
    restoring = Restoring(model, of, state, steps, numbered, began, beginning, buses.orders, order_on)
    basis, start = await restoring.begin(kind, snapshots, named)
    kept = None
    if snapshots is not None and state is not None:
        kept = Snapshots(snapshots, named, model, basis, state, steps, numbered, options.snapshot_every, notify)
    setup = Setup(
        topics, tuple(schema.text for schema in model.outputs.values()), "rows", elected.partition("://")[0], chain,
        start.span.since,
    )  # fmt: skip
    ordered = partial(_order, kind, where, began.inputs, start, buses, order_on, notify)
    plan = Plan(
        where.address, [*where.inputs.values(), *topics], steps, ordered, [line for _, line in lines.values()], setup,
        control, elect, kept,
    )  # fmt: skip
    return Engine(home, buses.writes, plan, options, notify)


async def _claim(model: Model, where: Windows, buses: Buses, claims: Claims, options: EngineOptions) -> None:
    for window, topic in where.inputs.items():  # whoever publishes there need not name a schema, nor can name another
        await claims.schema(buses.reads, topic, model.inputs[window])
    for window, topic in where.outputs.items():
        await claims.schema(buses.writes, topic, model.outputs[window])
        await claims.run(buses.writes, topic, _source(topic, where), options.run)


def _order(
    kind: str, where: Windows, inputs: tuple[Input, ...], start: Start, buses: Buses, order_on: str,
    notify: Callable[[Notice], None], stepping: Stepping, group: Group, changed: News,
) -> Ordered:  # fmt: skip
    """What says which step comes next."""
    if kind == "derived":
        place = start.inputs[0] or Place(0, None)
        reader = LogReader(buses.reads, inputs[0].topic, place, notify)
        return DerivedOrder(inputs[0].window, reader, stepping, partial(_is_passed_over, buses.orders, order_on, start))
    readers = f"engine.{where.path.replace('/', '.')}"
    read: list[LogInput | QueueInput] = [
        QueueInput(buses.reads, each.topic, readers, changed, notify)
        if place is None
        else LogInput(each.window, LogReader(buses.reads, each.topic, place, notify), changed)
        for each, place in zip(inputs, start.inputs, strict=True)
    ]
    membership, reader = group.membership, LogReader(buses.orders, order_on, start.order_place, notify)
    return WrittenOrder(
        buses.orders, start.order, reader, read, stepping, Clock(start.now, asyncio.get_running_loop().time()), changed,
        span=start.span, leads=lambda: membership.state == "active", notify=notify,
    )  # fmt: skip


async def _is_passed_over(orders: Bus, order_on: str, start: Start, block: Poisoned) -> bool:
    """Whether an entry of an order that nobody else writes to passes this block over."""
    order = start.order.copy()
    await read_ahead(orders, order_on, order, start.order_place)
    return block in order.passed


def _kind_of_order(model: Model, buses: Buses, options: EngineOptions) -> str:
    """The kind of order that this model needs, or is asked to have. NotOffered where the buses have no log for it."""
    reads, orders = buses.reads.capabilities, buses.orders.capabilities
    if not (reads.replay or reads.groups or reads.brief_groups):
        raise NotOffered(
            "an engine reads a log, or a queue that keeps what nobody has read; this bus has neither: set "
            f"{reads.replays_with or 'a mode that has one'}",
            capability="groups",
        )
    if not orders.replay:
        raise NotOffered(
            "an engine needs a log, and the bus of its output has none: pass order= with a client of a bus that has one"
            + (f", or set {orders.replays_with}" if orders.replays_with else ""),
            capability="replay",
        )
    if not orders.retained or not buses.writes.capabilities.retained:
        raise NotOffered("an engine needs a bus that retains values", capability="retained")
    written = options.order == "written" or model.timers or len(model.inputs) > 1 or not reads.replay
    return "written" if written else "derived"


def _source(topic: str, where: Windows) -> int:
    return source_number(f"{topic}/engine:{where.path}")


def _reading(model: Model, input: Input, reads: Bus, options: EngineOptions) -> Reading:
    suffix_only = reads.capabilities.suffix_only
    accept = Accept(suffix_only=suffix_only, from_start=True, max_sources=options.max_sources)
    return Reading(input.window, model.inputs[input.window], accept)


def _line(model: Model, window: str, where: Windows, writes: Bus, options: EngineOptions) -> tuple[BlockWriter, Line]:
    topic, schema = where.outputs[window], model.outputs[window]
    source = _source(topic, where)
    outbox = Outbox(options.buffer, options.buffer_bytes)
    encoder = Encoder(schema, limits=options.limits, rebuild=True)
    writer = BlockWriter(schema, encoder, outbox, source, options.run, writes.capabilities.max_message_bytes)
    of_bus = writes.capabilities
    return writer, Line(
        source, options.run, outbox, suffix_only=of_bus.suffix_only, buffer=options.buffer, shows_last=of_bus.shows_last
    )


async def _would_begin(model: Model, kind: str, where: Windows, reads: Bus, options: EngineOptions) -> Beginning:
    """How the engine begins if this member is its first: with all that its inputs still have."""
    inputs = []
    for window, topic in where.inputs.items():
        schema = model.inputs[window].text
        if reads.capabilities.replay:
            bounds = await reads.bounds(topic)
            inputs.append(Input(window, topic, schema, bounds.first, bounds.incarnation))
        else:
            inputs.append(Input(window, topic, schema, None, None))
    outputs = [Output(window, topic, model.outputs[window].text) for window, topic in where.outputs.items()]
    limits = {
        "step_blocks": options.step_blocks, "step_bytes": options.step_bytes, "max_sources": options.max_sources,
        "run": options.run, "frame_bytes": options.limits.frame_bytes,
        "events": options.limits.events,
    }  # fmt: skip
    return Beginning(model.version, kind, tuple(inputs), tuple(outputs), limits, *platform_here())
