"""`esp engine`: be a member of an engine until a signal comes, or see whether a model can be one's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import Client, ConfigError, Engine, EngineOptions, init
from ..address import Address, order_topic
from ..bus import Bus
from ..claims import find_schema
from ..engine.loading import load_model
from ..engine.model import declared
from ..engine.opening import Windows, log_of
from ..engine.order import Poisoned
from ..engine.order_topic import From, find_block, pass_over, switch
from ..engine.restoring import newest_place
from ..events import PLAIN, Block
from ..failover.accept import Accept
from ..follower import read_to_end
from ..publisher import source_number
from ..requests import demand
from ..testing import check_model
from ..wire.frame import Frame
from .running import counted, progress, say

_A_DAY = 86_400_000_000  # microseconds
_MOST = 10_000  # blocks of each input that a check looks at
_ANSWERS, _STOPS = 10.0, 60.0  # seconds to wait for an engine's answer


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine is, and on which bus."""

    url: str
    windows: Mapping[str, str]
    bus: str
    config: str | None
    keys: Mapping[str, Any]


async def run_engine(
    named: str, place: Place, snapshots: Path | None, options: EngineOptions, http: str | None
) -> None:
    """One member, until a signal comes or it fails. `http`: where it shows its pages."""
    logging.getLogger("esp_pubsub").setLevel(logging.INFO)  # roles, in SAS's words
    model = load_model(named)
    async with (
        init(place.bus, config=place.config, **place.keys) as client,
        client.engine(model, place.url, windows=place.windows, snapshots=snapshots, options=options) as engine,
    ):
        try:
            async with progress(_Line(engine)), _shown_at(http, engine):
                await engine.wait()
        finally:
            say(_shown(engine))


@asynccontextmanager
async def _shown_at(place: str | None, engine: Engine) -> AsyncIterator[None]:
    if place is None:
        yield
        return
    from .. import http  # the extra
    from ..engine import pages

    host, port = http.place(place)
    async with http.serve(pages.routes(engine), host=host, port=port) as bound:
        say(f"health, figures and windows: http://{host}:{bound}/health /engine /windows /metrics")
        yield


class _Line:
    """The line of progress."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = engine.stats.steps

    def __call__(self, seconds: float) -> str:
        steps = self._engine.stats.steps
        rate, self._steps = (steps - self._steps) / seconds, steps
        return f"{_shown(self._engine)}, {rate:,.0f} steps/s"


def _shown(engine: Engine) -> str:
    stats = engine.stats
    lines = ", ".join(f"{line.window.split('/')[-2]} {line.given:,} (on bus {line.on_bus:,})" for line in stats.lines)
    trouble = ", cannot read all of its input" if stats.hindered else ""
    return f"{stats.role}{trouble}, {counted(stats.steps, 'step')}; {lines}"


async def check(named: str, place: Place) -> None:
    """Run the model in two processes over what its inputs hold, and compare."""
    model, _ = declared(load_model(named))
    async with init(place.bus, config=place.config, **place.keys) as client:
        if not client.bus.capabilities.replay:
            raise ConfigError("a check reads what the input holds, and this bus keeps nothing to read again")
        found = []
        for window, topic in Windows(model, place.url, place.windows).inputs.items():
            await find_schema(client.bus, topic, model.inputs[window])  # SchemaDiffers, as in an engine
            blocks = await _held(client, topic)
            found += [(window, Block(frame, model.inputs[window], PLAIN)) for frame in blocks]
    if not found:
        raise ConfigError("the model's input windows hold nothing: publish to them first")
    found.sort(key=lambda each: each[1].sent_at)  # as they came, about
    emitted = await asyncio.to_thread(check_model, named, _timed(found))
    say(
        f"{counted(len(found), 'block')} of input gave {counted(emitted, 'block')} of output, the same in two processes"
    )


def _timed(found: Sequence[tuple[str, Block]]) -> Iterator[tuple[str, Block] | int]:
    """Each block at the time at which it was sent, and then a day, for the timers that are left."""
    now = 0
    for window, block in found:
        now = max(now, block.frame.sent_at)
        yield now
        yield window, block
    yield now + _A_DAY


async def _start(orders: Bus, place: Place, run: int, snapshots: Path | None) -> From | None:
    """From where the order is read on, if not from its beginning."""
    if snapshots is None:
        return None
    control = Address.parse(place.url).engine_control
    return await newest_place(orders, order_topic(control, run), source_number(control), run, snapshots)


async def pass_step_over(place: Place, named: str, run: int, snapshots: Path | None) -> None:
    """Write into the engine's order that this step is to be passed over."""
    try:
        step = Poisoned.parse(named)
    except ValueError:
        raise ConfigError(
            f"a block is SOURCE:RUN:ID, such as 0a1b2c3d4e5f6071:0:17, a timer is timer:TIME:KEY, not {named!r}"
        ) from None
    topic = order_topic(Address.parse(place.url).engine_control, run)
    async with init(place.bus, config=place.config, **place.keys) as client:
        orders, window = await log_of(client.bus), None
        if step.timer is None:
            window = await find_block(client.bus, orders, topic, run, step)
        await pass_over(orders, topic, run, step, await _start(orders, place, run, snapshots))
    seen = f"{step}, in {window}," if window else f"{step} (whether there is one cannot be seen from here)"
    say(f"written: {seen} is passed over by every member that fails on it. Start the members again")


async def stop(place: Place) -> None:
    """Have all members stop, with a last snapshot of all that was sent."""
    topic = Address.parse(place.url).engine_requests
    async with init(place.bus, config=place.config, **place.keys) as client:
        outcome = (await demand(client.requests(), topic, {"do": "stop"}, _STOPS))["answer"]
    if outcome["snapshot"]:
        say("stopped: the bus has all that was computed, and the last snapshot begins after it")
    else:
        say(f"stopped: the bus has all that was computed. There is no last snapshot: {outcome['why']}")


async def show_status(place: Place) -> None:
    """How far the member is that leads, and what its snapshots still need of the inputs and of the order."""
    topic = Address.parse(place.url).engine_requests
    async with init(place.bus, config=place.config, **place.keys) as client:
        status = (await demand(client.requests(), topic, {"do": "status"}, _ANSWERS))["answer"]
    trouble = ", cannot read all of its input" if status["hindered"] else ""
    print(f"{status['role']}{trouble}, term {status['term']}, {counted(status['steps'], 'step')}")
    for at, (taken, end) in enumerate(status["inputs"], 1):
        print(f"input {at}: a queue" if end is None else f"input {at}: at {taken:,} of {end:,}, {end - taken:,} behind")
    for window, given, on_bus, waiting in status["lines"]:
        print(f"output {window}: {given:,} computed, {on_bus:,} on the bus, {waiting:,} wait")
    if status["needed"] is None:
        print("no snapshot counts: a restart reads everything from the beginning")
        return
    if status["last_snapshot"] is not None:
        print(f"this member's last snapshot counted {time.time() - status['last_snapshot']:,.0f} s ago")
    order, *inputs = status["needed"]
    needed = ", ".join("a queue" if at is None else f"{at:,}" for at in inputs)
    print(f"the snapshots that are kept need the inputs from {needed} on, and the order from {order:,} on")


async def switch_version(place: Place, to: str, run: int, snapshots: Path | None) -> None:
    """Write into the engine's order that this version of the model is to run."""
    topic = order_topic(Address.parse(place.url).engine_control, run)
    async with init(place.bus, config=place.config, **place.keys) as client:
        orders = await log_of(client.bus)
        before = await switch(orders, topic, run, to, await _start(orders, place, run, snapshots))
    if before == to:
        say(f"version {to!r} runs already")
        return
    say(
        f"written: members of version {before!r} leave what they have computed, and those of version {to!r} go on. If "
        f"there are none yet, start them with the same snapshots; to take it back, switch to {before!r}"
    )


async def _held(client: Client, topic: str) -> list[Frame]:
    accept = Accept(suffix_only=client.bus.capabilities.suffix_only, from_start=True)
    frames: list[Frame] = []
    async with aclosing(read_to_end(client.bus, topic)) as reads:
        async for messages in reads:
            frames += [each for each in accept.receive_all(messages) if isinstance(each, Frame)]
            if len(frames) >= _MOST:
                break
    return frames[:_MOST]
