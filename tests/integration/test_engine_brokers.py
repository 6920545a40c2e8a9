"""Engines on real brokers: derived and written order on Kafka and RabbitMQ, and a queue as an input."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import esp_pubsub as esp
from tests.integration.engines import TRADE, Totals, outputs, trades, until
from tests.integration.rabbit import HOST
from tests.integration.shops import Shop
from tests.support.kafka import Kafka
from tests.support.rabbitmq import RabbitMQ

Opens = Callable[[], Any]


def on_kafka(kafka: Kafka, mode: str = "") -> Opens:
    return lambda: esp.init("kafka", hostport=kafka.bootstrap, on_notice=lambda notice: None)


def on_rabbitmq(rabbitmq: RabbitMQ, mode: str = "stream") -> Opens:
    node = rabbitmq.nodes[0]
    settings: dict[str, Any] = {"host": HOST, "port": node.port, "streamport": node.stream_port, "mode": mode}
    return lambda: esp.init("rabbitmq", on_notice=lambda notice: None, **settings)


@pytest.fixture(params=["kafka", "stream", "persistent", "direct"])
def opens(request: pytest.FixtureRequest) -> Opens:
    """What opens a client of a bus."""
    if request.param == "kafka":
        return on_kafka(request.getfixturevalue("kafka"))
    return on_rabbitmq(request.getfixturevalue("rabbitmq"), request.param)


@pytest.fixture
def url() -> str:
    return f"dfESP://engines:5555/p/q{secrets.token_hex(4)}"


@contextlib.asynccontextmanager
async def engine(opens: Opens, url: str, **options: Any) -> AsyncIterator[esp.Engine]:
    async with opens() as client:
        opened = await client.engine(Totals(), url, options=esp.EngineOptions(**options))
        try:
            yield opened
        finally:
            with contextlib.suppress(esp.EspError):
                await opened.aclose()


async def leads(engine: esp.Engine) -> None:
    await until(lambda: engine.stats.role == "active")


class Outputs:
    """A subscriber of each output window, that is there from the beginning and reads on."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {}
        self.notices: list[Any] = []
        self._stack = contextlib.AsyncExitStack()

    async def open(self, opens: Opens, url: str) -> None:
        client = await self._stack.enter_async_context(opens())
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        for window in ("Large", "Totals"):
            offered = client.bus.capabilities
            group = f"g{secrets.token_hex(4)}" if offered.groups and not offered.replay else None
            subscriber = await client.subscriber(
                f"{url}/{window}", Totals.__esp_model__.outputs[window],  # type: ignore[attr-defined]
                start="earliest" if group or offered.replay else "latest", group=group, on_notice=self.notices.append,
            )  # fmt: skip
            task = tasks.create_task(self._read(window, subscriber))
            self._stack.callback(task.cancel)

    async def _read(self, window: str, subscriber: esp.Subscriber) -> None:
        rows = self.rows[window] = []
        async for block in subscriber:
            assert block.id == len(rows) + 1
            rows.append(block.rows())

    async def have(self, blocks: int) -> None:
        expected = outputs(blocks)
        await until(lambda: all(len(self.rows.get(window, ())) >= len(all_) for window, all_ in expected.items()))
        assert self.rows == expected
        bad = ("Missed", "InputDiffers", "Skipped", "BadMessage")
        assert not [notice for notice in self.notices if type(notice).__name__ in bad]

    async def aclose(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def received(opens: Opens, url: str) -> AsyncIterator[Outputs]:
    found = Outputs()
    await found.open(opens, url)
    yield found
    await found.aclose()


async def feed(publisher: esp.Publisher, ids: range) -> None:
    for id in ids:
        await publisher.inject(trades(id))
    await publisher.flush()


@pytest.mark.parametrize("order", [None, "written"])
async def test_output_is_one_sequence_across_a_hand_over_and_a_death(
    opens: Opens, url: str, received: Outputs, order: Any
) -> None:
    async with engine(opens, url, order=order) as a:
        await leads(a)
        async with (
            opens() as client,
            client.publisher(f"{url}/Trades", TRADE) as source,
            engine(opens, url, order=order) as b,
        ):
            await feed(source, range(1, 41))
            await received.have(40)
            await a.hand_over()
            await leads(b)
            await feed(source, range(41, 81))
            await received.have(80)
            b._task.cancel()  # type: ignore[union-attr]  # as if it were killed: it says nothing to anybody
            await feed(source, range(81, 121))
            await leads(a)
            await received.have(120)


async def test_an_engine_that_is_started_again_takes_up_its_windows(opens: Opens, url: str, received: Outputs) -> None:
    async with opens() as client:
        for last in (20, 40):
            async with engine(opens, url) as only:
                if last == 20:
                    await leads(only)  # its queue is there
                async with client.publisher(f"{url}/Trades", TRADE) as source:
                    await feed(source, range(last - 19, last + 1))
                await received.have(last)


async def test_what_a_model_wants_done_is_done_and_its_commands_are_answered(opens: Opens, url: str) -> None:
    async def pay(call: esp.Call) -> tuple[str, int]:
        return (call.key, 1)

    async with opens() as client, opens() as us, opens() as worker:
        if not client.bus.capabilities.groups:
            pytest.skip("effects read their calls as a group")
        engine = await client.engine(Shop(), url)
        await leads(engine)
        working = asyncio.ensure_future(esp.effect(worker, f"{url}/Calls", f"{url}/Outcomes", pay, group="payments"))
        try:
            for n in range(1, 21):
                answers = await us.call(f"{url}/Orders", [(n, n)], answers=f"{url}/Answers", timeout=20)
                assert answers[0][1] == n
            await until(lambda: engine.stats.lines[2].on_bus == 20)
            if us.bus.capabilities.requests:
                assert await us.ask(url, 7) == (1, 40)
                await us.quiesce(url)
        finally:
            working.cancel()
            await asyncio.wait([working])
