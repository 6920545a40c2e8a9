"""A pipe of the embedded bus, while what it has written is on its way: nothing ever stands behind what is missing."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

import esp_pubsub as esp
from esp_pubsub.bus import Message
from esp_pubsub.transports.embedded import bus, log
from esp_pubsub.transports.embedded.options import EmbeddedOptions
from esp_pubsub.transports.embedded.pipe import EmbeddedPipe

from .test_embedded_lock import HOLD

TOPIC = "t"


@pytest.fixture
async def opened(bus_directory: Path) -> AsyncIterator[bus.EmbeddedBus]:
    it = await bus.open_bus(EmbeddedOptions(dir=bus_directory, deadline=0.5))
    yield it
    await it.aclose()


async def stands(opened: bus.EmbeddedBus) -> list[bytes]:
    """What the log holds once all that was begun is done."""
    store = await opened.topic(TOPIC)
    await store.write(lambda _: None, 60)

    def all_of_it(transaction: lmdb.Transaction) -> list[Message]:
        found = log.info(transaction)
        assert found is not None
        return log.read(transaction, found.first, found.next, 1_000, 1 << 20)

    return [message.data for message in store.read(all_of_it)]


class Gate:
    """Holds up the first append of the store's thread."""

    def __init__(self, append: Callable[..., None]) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._append = append

    def __call__(self, *args: Any) -> None:
        first = not self.begun.is_set()
        self.begun.set()
        assert self.go_on.wait(60)
        if first and self.error is not None:
            raise self.error
        self._append(*args)

    async def reached(self) -> None:
        await asyncio.to_thread(self.begun.wait, 60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    it = Gate(log.append)
    monkeypatch.setattr(log, "append", it)
    return it


async def test_few_messages_are_written_behind_others_that_are_not_confirmed_yet(
    opened: bus.EmbeddedBus, gate: Gate
) -> None:
    pipe = await opened.pipe(TOPIC)
    await pipe.write([b"1", b"2"])
    await gate.reached()
    await pipe.write([b"3"])
    gate.go_on.set()
    assert await pipe.confirmed(2) == 3
    assert await stands(opened) == [b"1", b"2", b"3"]


async def test_a_write_of_many_returns_when_they_are_confirmed(opened: bus.EmbeddedBus) -> None:
    pipe = await opened.pipe(TOPIC)
    many = [b"%d" % number * 100 for number in range(100)]
    await pipe.write(many)
    async with asyncio.timeout(0):
        assert await pipe.confirmed(99) == 100
    assert await stands(opened) == many


@pytest.mark.parametrize("error", [lmdb.DiskError("no space"), esp.BusRefused("no")], ids=["failed", "refused"])
async def test_nothing_stands_behind_a_write_that_failed(opened: bus.EmbeddedBus, gate: Gate, error: Exception) -> None:
    gate.error = error
    pipe = await opened.pipe(TOPIC)
    await pipe.write([b"lost"])
    await gate.reached()
    await pipe.write([b"behind it"])
    gate.go_on.set()
    with pytest.raises(esp.BusError, match="no"):
        await pipe.confirmed(0)
    with pytest.raises(esp.BusError, match="no"):
        await pipe.write([b"later"])
    assert await stands(opened) == []


@pytest.mark.parametrize("how", ["confirm", "write", "cancelled"])
async def test_what_was_given_up_is_not_written_when_the_lock_is_free_at_last(
    opened: bus.EmbeddedBus, how: str
) -> None:
    pipe = await opened.pipe(TOPIC)
    store = await opened.topic(TOPIC)
    command = [sys.executable, "-c", HOLD, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        await pipe.write([b"1"])
        await pipe.write([b"2"])
        if how == "cancelled":
            writing = asyncio.create_task(pipe.write([b"many" * 100] * 100))
            await asyncio.wait([writing], timeout=0.01)
            writing.cancel()
            await asyncio.wait([writing])
        else:
            with pytest.raises(esp.BusUnavailable, match="no write lock on"):
                await (pipe.confirmed(0) if how == "confirm" else pipe.write([b"many" * 100] * 100))
        process.kill()
    assert await stands(opened) == []


async def test_what_was_written_is_there_when_its_pipe_is_closed(opened: bus.EmbeddedBus) -> None:
    pipe = await opened.pipe(TOPIC)
    await pipe.write([b"1"])
    await pipe.aclose()
    assert opened._topics[TOPIC].read(log.info).next == 1  # type: ignore[union-attr]


async def test_of_a_pipe_that_is_closed_while_the_lock_is_held_only_what_was_begun_is_written(
    opened: bus.EmbeddedBus, gate: Gate
) -> None:
    pipe = await opened.pipe(TOPIC)
    await pipe.write([b"begun"])
    await gate.reached()
    await pipe.write([b"not begun"])
    await pipe.aclose()
    gate.go_on.set()
    assert await stands(opened) == [b"begun"]


async def test_nothing_stands_behind_what_was_refused_in_the_same_transaction(
    opened: bus.EmbeddedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, other = await opened.pipe(TOPIC), await opened.pipe(TOPIC)
    store = await opened.topic(TOPIC)
    go_on, append = threading.Event(), log.append

    def refuse(transaction: lmdb.Transaction, value: bytes, *how: Any) -> None:
        if b"refused" in value:
            raise esp.BusRefused("no")
        append(transaction, value, *how)

    monkeypatch.setattr(log, "append", refuse)
    held = asyncio.create_task(store.write(lambda _: go_on.wait(60), 60))
    await asyncio.sleep(0)
    for each in (b"refused", b"behind it"):
        await pipe.write([each])
    await other.write([b"another's"])
    go_on.set()
    await held
    with pytest.raises(esp.BusRefused):
        await pipe.confirmed(0)
    assert await other.confirmed(0) == 1
    assert await stands(opened) == [b"another's"]


async def test_a_pipe_that_failed_holds_no_memory_until_the_lock_is_free(opened: bus.EmbeddedBus) -> None:
    store = await opened.topic(TOPIC)
    go_on = threading.Event()
    held = asyncio.create_task(store.write(lambda _: go_on.wait(60), 60))
    await asyncio.sleep(0)

    async def fail() -> "weakref.ref[EmbeddedPipe]":
        pipe = await opened.pipe(TOPIC)
        with pytest.raises(esp.BusUnavailable):
            await pipe.write([bytes(1 << 20)])
        return weakref.ref(pipe)

    failed = await asyncio.create_task(fail())
    gc.collect()
    assert failed() is None
    go_on.set()
    await held


async def test_an_idle_thread_holds_nothing_of_what_it_wrote(opened: bus.EmbeddedBus) -> None:
    pipe = await opened.pipe(TOPIC)
    await pipe.write([bytes(1 << 20)])
    await pipe.confirmed(0)
    written = weakref.ref(pipe)
    del pipe
    store = await opened.topic(TOPIC)
    async with asyncio.timeout(60):
        while written() is not None:  # it lets go a moment after it told
            await asyncio.sleep(0)
            gc.collect()
    assert store.read(log.info) is not None
