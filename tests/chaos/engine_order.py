"""What an engine must have emitted, found without an engine: by the model alone, over the order that was decided.

In derived order that is the order of the input. A written order is read from its topic once all is over, from the
beginning that is retained, with the pure classes that say which entries count, and the model steps through it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import esp_pubsub as esp
from esp_pubsub.address import Address, order_topic
from esp_pubsub.bus import Bus, Message, Place
from esp_pubsub.encode import Encoder
from esp_pubsub.engine.beginning import Begun, Input, read_beginning
from esp_pubsub.engine.model import declared
from esp_pubsub.engine.opening import log_of
from esp_pubsub.engine.order import Entry, Order, Taken
from esp_pubsub.engine.steps import Reading, Steps
from esp_pubsub.events import PLAIN, Block
from esp_pubsub.failover.accept import Accept, Dropped
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.publisher import source_number
from esp_pubsub.retained import retained_beginning
from esp_pubsub.testing import run_model
from esp_pubsub.wire.frame import Frame, frames, parse
from esp_pubsub.writer import BlockWriter

from .engine_model import END, INPUTS, LAST, OUTPUTS, Model, model_of
from .engine_process import EngineJob, fed

Times = Mapping[tuple[str, int], float]
"""When each block of input was on the bus, by window and id."""


@dataclass
class Emitted:
    """What an undisturbed engine emits to each window: for each block its rows, and when it could be there."""

    blocks: dict[str, list[tuple[list[Any], float]]] = field(default_factory=lambda: {window: [] for window in OUTPUTS})
    stepped: list[tuple[str, int]] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    entries: int = 0
    void: int = 0

    def took(self, model: Model) -> None:
        """All that the model stepped on."""
        self.stepped, self.state = model.stepped, model.state

    def judge(self, job: EngineJob) -> list[str]:
        """What is wrong: each block of each input is stepped on once, and in its order."""
        wrong = list(self.wrong)
        for window in INPUTS[job.shape]:
            ids = [id for each, id in self.stepped if each == window]
            if ids != list(range(1, job.blocks + 1)):
                at = next((at for at, id in enumerate(ids, 1) if at != id), len(ids) + 1)
                wrong.append(f"{window}: {len(ids)} steps of {job.blocks}, wrong from {at} on: {ids[at - 3 : at + 5]}")
        return wrong


def source_of(job: EngineJob, window: str) -> int:
    """The source of an output window's blocks."""
    address = Address.parse(job.url)
    topic = Address.parse(f"{job.url}/{window}").topic("out")
    return source_number(f"{topic}/engine:{address.project}/{address.contquery}")


def derived(job: EngineJob, times: Times) -> Emitted:
    """In derived order."""
    emitted, model = Emitted(), model_of(job.shape, job.seed, job.blocks)
    (window,) = INPUTS[job.shape]
    fed_all = [(window, fed(job, window, id)) for id in range(1, job.blocks + 1)]
    for output, blocks in run_model(model, fed_all).items():
        for block in blocks:
            rows = block.rows()
            id = job.blocks if rows[-1][1] == END else int(rows[-1][1].split()[1])  # the model names what it saw
            emitted.blocks[output].append((rows, times.get((window, id), 0.0)))
    emitted.took(model)
    return emitted


async def written(job: EngineJob, client: esp.Client, run: int, times: Times) -> Emitted:
    """In the order that stands on the order topic of this run."""
    orders = await log_of(client.bus)
    topic = order_topic(Address.parse(job.url).engine_control, run)
    value = await retained_beginning(orders, topic)
    begun = None if value is None else Begun.decoded(value)
    found = None if begun is None else read_beginning(begun.message, source_number(topic), run)
    assert begun is not None, f"no beginning is retained for {topic}"
    assert found is not None, f"what is retained for {topic} is no beginning"
    began, chain = found
    inputs = [_Recorded(client.bus, each) for each in began.inputs]
    walk = _Walk(job, inputs, times, suffix_only=client.bus.capabilities.suffix_only)
    order = Order(source_number(topic), run, 1, chain)
    async for message in _all(orders, topic, begun.following):
        if (entry := order.read(message.data)) is not None:
            await walk.carry_out(entry)
    walk.emitted.void = order.void
    walk.emitted.took(walk.model)
    return walk.emitted


async def _all(bus: Bus, topic: str, place: Place) -> AsyncIterator[Message]:
    """What stands on a log from there to its end, whole."""
    end = (await bus.bounds(topic)).end
    if place.position >= end:
        return
    feed = await bus.feed(topic, place, None)
    try:
        while feed.place is None or feed.place.position < end:
            for item in await feed.read(1_000, 4 << 20):
                assert isinstance(item, Message), f"{topic} is not whole: {item}"
                yield item
    finally:
        await feed.aclose()


class _Recorded:
    """An input as it stands on its topic; nothing of a queue."""

    def __init__(self, bus: Bus, input: Input) -> None:
        self.input = input
        self._bus = bus
        self._messages: list[Message] | None = None
        self._taken = input.position or 0

    async def take(self, taken: Taken) -> list[tuple[object, bytes]]:
        """What an entry takes."""
        if self.input.position is None:
            return [Message(None, data) for data in taken.messages]
        if self._messages is None:
            self._messages = [message async for message in _all(self._bus, self.input.topic, self.input.place)]
        assert taken.to is not None
        since, self._taken = self._taken, max(self._taken, taken.to)
        return [message for message in self._messages if since <= message.position < taken.to]


class _Walk:
    """The model, on its way through an order."""

    def __init__(self, job: EngineJob, inputs: list[_Recorded], times: Times, *, suffix_only: bool) -> None:
        self.model = model_of(job.shape, job.seed, job.blocks)
        self.emitted = Emitted()
        self._inputs = inputs
        self._times = times
        self._at = 0.0
        found, calls = declared(self.model)
        options = esp.EngineOptions()
        self._outputs = {}
        for window, schema in found.outputs.items():
            outbox = Outbox(options.step_blocks, options.step_bytes)
            writer = BlockWriter(
                schema, Encoder(schema, rebuild=True), outbox, source_of(job, window), 0, options.limits.frame_bytes
            )
            self._outputs[window] = writer, Line(writer.source, 0, outbox, suffix_only=True, buffer=1)
        readings = [
            Reading(
                each.input.window, found.inputs[each.input.window],
                Accept(suffix_only=suffix_only, from_start=True, max_sources=options.max_sources),
            )
            for each in inputs
        ]  # fmt: skip
        self._steps = Steps(
            calls, readings, self._outputs, step_blocks=options.step_blocks, step_bytes=options.step_bytes
        )

    async def carry_out(self, entry: Entry) -> None:
        steps, emitted = self._steps, self.emitted
        if steps.now is not None and entry.now < steps.now:
            emitted.wrong.append(f"time went back from {steps.now} to {entry.now}")
        emitted.entries += 1
        steps.now = entry.now
        for key in steps.timers.due(entry.now):
            if not steps.timers.take(key):
                continue
            steps.fire(key)
            self._take(self._at + LAST / 1e6)
        for taken in entry.takes:
            source = self._inputs[taken.input]
            for outcome in steps.receive(taken.input, await source.take(taken)):
                if isinstance(outcome, Frame):
                    self._at = max(self._at, self._times.get((source.input.window, outcome.id), 0.0))
                    steps.take(taken.input, outcome)
                    self._take(self._at)
                elif not isinstance(outcome, Dropped):
                    emitted.wrong.append(f"{source.input.window}: {outcome}")

    def _take(self, at: float) -> None:
        for window, (writer, _) in self._outputs.items():
            outbox, schema = writer.outbox, writer.schema
            for message in frames(outbox.settle(outbox.last), 0, 0):
                self.emitted.blocks[window].append((Block(parse(message), schema, PLAIN).rows(), at))
