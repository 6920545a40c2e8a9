"""Dead letters: blocks that could not be handled, in a window of their own, until somebody has them handled again.

A dead letter is the block, with four columns more: which block it was, of which window, what went wrong, and when. So
`esp tail --rows` shows it, and any subscriber reads it. One dead-letter window takes the blocks of one schema.

Each block gets there once: a process that was killed between writing the letter and confirming the block finds the
letter when the block comes again. A bus that keeps nothing to read again, such as RabbitMQ in mode persistent, does not
show it, and may get a second one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from .address import Address
from .errors import BadBody, BadFrame, ConfigError, DeliveryUnknown
from .events import PLAIN, Block
from .follower import read_to_end
from .publisher import Publisher
from .schema import Field, FieldType, Schema
from .subscriber import Subscriber
from .wire.frame import BLOCK, parse

if TYPE_CHECKING:
    from .client import Client

_log = logging.getLogger("esp_pubsub.handle")
COLUMNS = (
    Field("_block", FieldType.STRING),
    Field("_window", FieldType.STRING),
    Field("_error", FieldType.STRING),
    Field("_at", FieldType.STAMP),
)
_MOST_REASON = 1_000  # characters


def letter_schema(schema: Schema) -> Schema:
    """That of the dead letters of blocks of this schema."""
    return Schema([*schema.fields, *COLUMNS])


class DeadLetters:
    """The way of one window's blocks to a window of dead letters."""

    def __init__(self, client: Client, url: str, topic: str) -> None:
        """`topic`: of the window that is handled. AddressError where `url` is no window."""
        Address.parse(url).require_window()
        self.url = url
        self._client = client
        self._window = f"dfESP://{topic.rpartition('/')[0]}?side={'in' if topic.endswith('/I') else 'out'}"
        self._publisher: Publisher | None = None
        self._there: dict[tuple[int, int], int] = {}
        """By source and run: the last block that is a letter already. Blocks of one come in order."""

    async def put(self, block: Block, error: BaseException) -> bool:
        """Have the bus hold the block as a dead letter; False for one that cannot be read, and so cannot be one."""
        try:
            opcodes, flags, rows = Block(block.frame, block.schema, PLAIN).decoded()
        except BadBody:
            return False
        if self._publisher is None:
            self._publisher = await self._client.publisher(self.url, letter_schema(block.schema), side="in")
            await self._find_letters(self._publisher)
        if block.id <= self._there.get((block.source, block.run), 0):
            return True
        reason = f"{type(error).__name__}: {error}"[:_MOST_REASON].encode(errors="replace").decode()
        more = (block.name, self._window, reason, _now())
        delivery = await self._publisher.inject(
            [(*row, *more) for row in rows], opcode=opcodes, flags=flags, transactional=block.transactional
        )
        while True:
            try:
                await delivery
                break
            except DeliveryUnknown as late:
                _log.warning("a dead letter waits for the bus: %s", late)
        self._there[block.source, block.run] = block.id
        return True

    async def _find_letters(self, publisher: Publisher) -> None:
        """Which blocks are letters already."""
        bus = self._client.bus
        if not bus.capabilities.replay:
            return
        async with aclosing(read_to_end(bus, publisher.topic)) as reads:
            async for messages in reads:
                for message in messages:
                    try:
                        frame = parse(message.data, message.position)
                        rows = Block(frame, publisher.schema, PLAIN).rows() if frame.kind == BLOCK else []
                    except (BadFrame, BadBody):
                        continue
                    if rows and rows[0][-3] == self._window:
                        source, run, id = rows[0][-4].split(":")
                        at = int(source, 16), int(run)
                        self._there[at] = max(self._there.get(at, 0), int(id))

    async def aclose(self) -> None:
        """Close the publisher, if there was a letter."""
        if self._publisher is not None:
            await self._publisher.aclose()


async def replay(client: Client, url: str, to: str | None = None, *, group: str = "replay", wait: float = 5.0) -> int:
    """Publish the dead letters at `url` again, as the blocks that they were: to the windows that they came from, or to
    the one at `to`. Returns how many blocks.

    It takes the letters that are there when it begins and that its group has not confirmed, and ends when none has come
    for `wait` seconds. Each is confirmed once the bus has its block.
    """
    side, began = Address.parse(url).options.side or "in", _now()
    publishers: dict[str, Publisher] = {}
    count = 0
    async with client.subscriber(url, side=side, group=group, start="earliest") as letters:
        while (letter := await _next(letters, wait)) is not None:
            opcodes, flags, rows = letter.decoded()
            if tuple(letter.schema.fields[-len(COLUMNS) :]) != COLUMNS:
                raise ConfigError(f"{url} is no window of dead letters: its schema is {letter.schema}")
            _, window, _, at = rows[0][-len(COLUMNS) :]
            if at > began:  # one that came of what was published here
                break
            window = to or window
            if window not in publishers:
                schema = Schema(letter.schema.fields[: -len(COLUMNS)])
                publishers[window] = await client.publisher(window, schema)
            plain = [row[: -len(COLUMNS)] for row in rows]
            await publishers[window].inject(plain, opcode=opcodes, flags=flags, transactional=letter.transactional)
            await publishers[window].flush()
            await letters.confirm(letter)
            count += 1
    for publisher in publishers.values():
        await publisher.aclose()
    return count


async def _next(letters: Subscriber, wait: float) -> Block | None:
    try:
        async with asyncio.timeout(wait):
            return await anext(letters)
    except TimeoutError:
        return None


def _now() -> int:
    return time.time_ns() // 1_000
