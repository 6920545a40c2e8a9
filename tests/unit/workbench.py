"""What the tests of publishers and subscribers share: a client whose bus can be made to fail, and ways around it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import esp_pubsub as esp
from esp_pubsub.bus import Message
from esp_pubsub.testing.faults import Faults
from esp_pubsub.wire.frame import BLOCK, ROWS, Frame, parse, seal
from esp_pubsub.wire.frame import frames as with_headers
from esp_pubsub.wire.rows import codec

URL = "dfESP://test:5555/project/query/window"
TOPIC = "test:5555/project/query/window/I"
TRADES = esp.Schema("id*:int64,symbol:string,price:double")
ROW = (1, "IBM", 101.5)
SYMBOLS = esp.Schema("id*:int64,symbol:string")
pa.array(["x"])  # the first array imports pandas, which reads files: not in a test, under a loop


class Bench:
    """A client whose bus can be made to fail, ways past it to the topic, and what was told."""

    def __init__(self, client: esp.Client, directory: Path) -> None:
        self.client = client
        self.directory = directory
        self.told: list[Any] = []
        self.inner = client.bus
        self.faults = Faults(client.bus)
        client.bus = self.faults

    async def publisher(self, schema: esp.Schema | str = TRADES, url: str = URL, **options: Any) -> esp.Publisher:
        options = {"ack_timeout": 5.0, "close_timeout": 5.0} | options
        return await self.client.publisher(
            url, schema, options=esp.PublisherOptions(**options), on_notice=self.told.append
        )

    async def subscriber(self, url: str = URL, **options: Any) -> esp.Subscriber:
        return await self.client.subscriber(url, **{"side": "in", "on_notice": self.told.append} | options)

    async def publish(self, *numbers: int) -> None:
        """A block of SYMBOLS a number, over the good bus, from a publisher of its own."""
        good, self.client.bus = self.client.bus, self.inner
        async with self.client.publisher(URL, SYMBOLS) as pub:
            for number in numbers:
                await pub.inject([(number, str(number))])
        self.client.bus = good

    async def raw(self, *messages: bytes) -> None:
        """Messages as they are, past everything."""
        pipe = await self.inner.pipe(TOPIC)
        await pipe.write(messages)
        await pipe.aclose()

    async def frames(self, topic: str = TOPIC) -> list[Frame]:
        """What stands on the bus now."""
        end = (await self.inner.bounds(topic)).end
        feed = await self.inner.feed(topic, "earliest", None)
        try:
            found: list[Frame] = []
            while len(found) < end:
                found += [parse(m.data, m.position) for m in await feed.read(100, 1 << 20) if isinstance(m, Message)]
            return found
        finally:
            await feed.aclose()

    async def blocks(self, count: int) -> list[esp.Block]:
        """The first blocks as a subscriber has them."""
        async with asyncio.timeout(60), self.client.subscriber(URL, side="in", start="earliest") as sub:
            return [await anext(sub) for _ in range(count)]

    def of(self, kind: type) -> list[Any]:
        """What was told of one kind."""
        return [told for told in self.told if isinstance(told, kind)]


def block(
    id: int, *, source: int = 7, run: int = 0, link: int = 0, schema: esp.Schema = SYMBOLS, body: bytes | None = None,
    count: int = 1, kind: int = BLOCK, settled: int = 0,
) -> bytes:  # fmt: skip
    """A whole frame, as somebody else might write it."""
    body = codec(schema).encode([(id, "x")] if len(schema.fields) == 2 else [(id,)]) if body is None else body
    sealed = seal(kind, ROWS, 0, count, source, run, id, schema.fingerprint, link, body)
    return with_headers([sealed], settled, 0)[0]


async def numbers(sub: esp.Subscriber, count: int) -> list[int]:
    """The first value of the next blocks."""
    async with asyncio.timeout(60):
        return [(await anext(sub)).rows()[0][0] for _ in range(count)]


async def nothing_more(sub: esp.Subscriber) -> bool:
    """Whether everything was read. A marker from another topic's time is not needed: the log's end is known."""
    end = (await sub._bus.bounds(sub.topic)).end
    read_to = sub._inbox._read_to
    return not sub._ready and (read_to is None or read_to == end - 1)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds that nobody tells; five seconds and no more."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def ticks(count: int = 10) -> None:
    """Turns of the loop for everybody else."""
    for _ in range(count):
        await asyncio.sleep(0)


async def outcome(awaited: Awaitable[Any]) -> Any:
    """What came back, or the error; five seconds and no more."""
    try:
        async with asyncio.timeout(60):
            return await awaited
    except Exception as error:  # noqa: BLE001
        return error
