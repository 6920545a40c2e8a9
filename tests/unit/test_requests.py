"""Requests: one server answers each, whatever it does, and whoever asks gets an answer or a named error."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub import requests
from esp_pubsub.errors import BadFrame
from tests.unit.workbench import outcome, ticks

META = "test:5555/M"


@pytest.fixture
async def client(bus_directory: Path) -> AsyncIterator[esp.Client]:
    async with esp.init(dir=bus_directory) as client:
        yield client


@contextlib.asynccontextmanager
async def serving(client: esp.Client, handler: Callable[[dict[str, Any]], Awaitable[Any]]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(requests.serve(client.requests(), META, handler))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_a_question_is_answered_by_one_server(client: esp.Client) -> None:
    asked: list[Any] = []

    async def handler(question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question)
        return {"twice": question["n"] * 2}

    async with serving(client, handler), serving(client, handler):
        found = await asyncio.gather(*(requests.ask(client.requests(), META, {"n": n}, 5) for n in range(10)))
    assert found == [{"twice": n * 2} for n in range(10)]
    assert sorted(question["n"] for question in asked) == list(range(10))


async def test_query_meta_asks_who_serves_the_metadata(client: esp.Client) -> None:
    async def engine(question: dict[str, Any]) -> dict[str, Any]:
        return {"answer": [question["get"], question["url"]]}

    async with serving(client, engine):
        url = "dfESP://test:5555/p?get=edges"
        assert await client.query_meta(url) == ["edges", url]


async def test_a_handler_that_raises_answers_with_the_error_and_goes_on(client: esp.Client) -> None:
    async def handler(question: dict[str, Any]) -> Any:
        match question["n"]:
            case 0:
                raise ZeroDivisionError("a bug")
            case 1:
                raise esp.ConfigError("that cannot be")
            case 2:
                return None
            case 3:
                return {"x": object()}
        return {"ok": 1}

    async with serving(client, handler):
        found = [await requests.ask(client.requests(), META, {"n": n}, 5) for n in range(5)]
        with pytest.raises(esp.EspError, match="KeyError"):
            await client.query_meta("dfESP://test:5555?get=edges")
    assert [sorted(each) for each in found] == [["error"]] * 4 + [["ok"]]
    assert "ZeroDivisionError: a bug" in found[0]["error"]
    assert found[1] == {"error": "that cannot be"}


async def test_a_request_that_is_garbage_does_not_end_the_server(client: esp.Client) -> None:
    async def handler(question: dict[str, Any]) -> dict[str, Any]:
        return question

    async with serving(client, handler):
        for garbage in (b"", b"hello", requests._packed(5, {"a": 1})):
            answer = requests._unpacked(5, await client.requests().request(META, garbage, 5))
            assert "error" in answer
        assert await requests.ask(client.requests(), META, {"n": 1}, 5) == {"n": 1}


async def test_an_answer_that_is_garbage_is_a_named_error(client: esp.Client) -> None:
    async def answer(_: bytes) -> bytes:
        return b"garbage"

    task = asyncio.ensure_future(client.requests().serve(META, answer))
    with pytest.raises(BadFrame):
        await requests.ask(client.requests(), META, {"n": 1}, 5)
    task.cancel()
    await asyncio.wait([task])


async def test_a_long_answer_arrives_or_its_length_is_named(client: esp.Client) -> None:
    names = [f"window{number}" for number in range(20_000)]

    async def engine(_: dict[str, Any]) -> dict[str, Any]:
        return {"answer": names}

    async with serving(client, engine):
        found = await outcome(client.query_meta("dfESP://test:5555?get=edges"))
    assert found == names or (isinstance(found, esp.EspError) and "20000" in str(found))


async def test_a_question_that_was_given_up_reaches_nobody(client: esp.Client) -> None:
    asked: list[Any] = []

    async def handler(question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question)
        return {}

    with pytest.raises(esp.NoAnswer):
        await requests.ask(client.requests(), META, {"n": 0}, 0.01)
    task = asyncio.ensure_future(requests.ask(client.requests(), META, {"n": 1}, 5))
    await ticks()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with serving(client, handler):
        await requests.ask(client.requests(), META, {"n": 2}, 5)
    assert asked == [{"n": 2}]
