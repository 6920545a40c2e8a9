"""Commands to an engine, and the answers that its model emits for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .errors import BadBody, Closed, ConfigError, EspError, NoAnswer
from .events import Opcode, key_of
from .publisher import Publisher
from .schema import FieldType
from .subscriber import Subscriber

if TYPE_CHECKING:
    from .client import Client

Row = tuple[Any, ...]


class Caller:
    """A window of commands and the window of their answers. Made by `Client.call`, and kept for the next call."""

    def __init__(self, client: Client, commands: str, answers: str) -> None:
        self._client = client
        self._commands = commands
        self._answers = answers
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        self._opening = asyncio.Lock()
        self._waiting: dict[str, asyncio.Future[Row]] = {}

    async def call(self, rows: Any, opcode: Opcode | int, timeout: float, tasks: asyncio.TaskGroup) -> list[Row]:
        """See `Client.call`."""
        loop, keys = asyncio.get_running_loop(), list[str]()
        try:
            async with asyncio.timeout(timeout):
                publisher = await self._open(tasks)
                delivery = await publisher.inject(rows, opcode=opcode)
                keys = [key_of(publisher.source, publisher.run, delivery.id, row) for row in range(len(rows))]
                waiting = [self._waiting.setdefault(key, loop.create_future()) for key in keys]
                return [await each for each in waiting]
        except TimeoutError:
            what = f"no answer on {self._answers} within {timeout:g} s to {keys[0]}" if keys else "nothing was sent"
            raise NoAnswer(
                f"{self._commands}: {what}; what was sent is, or will be, carried out once: does the engine run, and "
                "does its model emit an answer with that key?",
                topic=self._answers,
                timeout=timeout,
            ) from None
        finally:
            for key in keys:
                future = self._waiting.pop(key, None)
                if future is not None and not future.cancel() and not future.cancelled():
                    future.exception()  # it is seen

    async def _open(self, tasks: asyncio.TaskGroup) -> Publisher:
        async with self._opening:
            if self._publisher is None:
                client = self._client
                if self._subscriber is None:
                    await self._check_answers()
                    self._subscriber = await client.subscriber(self._answers, start="latest")  # before what it answers
                schema = await client.window_schema(self._commands, "in")
                self._publisher = await client.publisher(self._commands, schema)
                tasks.create_task(self._read(self._subscriber), name=f"esp answers {self._answers}")
            return self._publisher

    async def _check_answers(self) -> None:
        first = (await self._client.window_schema(self._answers, "out")).fields[0]
        if first.type is not FieldType.STRING:
            raise ConfigError(
                f"the first field of {self._answers} is a text, the key of the command that is answered, not "
                f"{first.name}:{first.type.value}"
            )

    async def _read(self, subscriber: Subscriber) -> None:
        """Hand answers to those who wait for them, until the client is closed."""
        error: Exception = Closed(f"the client was closed while it waited for answers on {self._answers}")
        try:
            async for block in subscriber:
                if not self._waiting:
                    continue
                try:
                    rows = block.rows()
                except BadBody:
                    continue  # it answers nobody
                for row in rows:
                    if (future := self._waiting.get(row[0])) is not None and not future.done():
                        future.set_result(row)
        except EspError as failed:
            error = failed
        finally:
            self._publisher, publisher = None, self._publisher
            self._subscriber = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
            if publisher is not None:
                await publisher.aclose()
