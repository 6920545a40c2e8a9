"""What a member of an engine shows over HTTP, and what the server refuses."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

import esp_pubsub as esp
from esp_pubsub.engine.pages import routes
from esp_pubsub.http import place, serve
from tests.integration.engines import engine, feed, feeding, leads, until
from tests.integration.test_engine_questions import Asked


@pytest.fixture
async def web_client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_a_member_shows_its_health_its_figures_and_the_rows_of_its_windows(
    bus_directory: Path, web_client: aiohttp.ClientSession
) -> None:
    async with engine(bus_directory, Asked()) as a, feeding(bus_directory) as source, serve(routes(a)) as port:
        await leads(a)
        await feed(source, range(1, 11))
        await until(lambda: a.stats.lines[1].on_bus == 10)
        at = f"http://127.0.0.1:{port}"
        async with web_client.get(f"{at}/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok", "role": "active"})
        async with web_client.get(f"{at}/windows") as answer:
            assert answer.content_type == "text/xml"
            assert await answer.text() == (
                "<windows>\n"
                '  <window-aggregate contquery="q" count="3" name="Totals" project="p"/>\n'
                '  <window-source contquery="q" count="0" name="Trades" project="p"/>\n'
                "</windows>\n"
            )
        async with web_client.get(f"{at}/windows", headers={"Accept": "application/json"}) as answer:
            assert (await answer.json())["Totals"] == {"kind": "aggregate", "count": 3}
        async with web_client.get(f"{at}/engine") as answer:
            shown = await answer.json()
            assert (shown["role"], shown["steps"], shown["lines"][1]["on_bus"]) == ("active", 10, 10)
        async with web_client.get(f"{at}/metrics") as answer:
            lines = (await answer.text()).splitlines()
            assert 'esp_engine_steps_total{url="dfESP://local:5555/p/q"} 10' in lines
            assert 'esp_engine_rows{url="dfESP://local:5555/p/q",window="Totals",kind="aggregate"} 3' in lines


async def test_a_member_that_has_ended_is_not_healthy(bus_directory: Path, web_client: aiohttp.ClientSession) -> None:
    async with engine(bus_directory) as a, serve(routes(a)) as port:
        await leads(a)
        await a.aclose()
        async with web_client.get(f"http://localhost:{port}/health") as answer:
            assert (answer.status, (await answer.json())["status"]) == (503, "ended")
        async with web_client.get(f"http://localhost:{port}/windows") as answer:
            assert answer.status == 400
            assert "give it a method counts()" in (await answer.json())["message"]


async def hello(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(text="hello")


async def raises(request: web.Request) -> web.Response:
    raise KeyError("a fault")


ROUTES = [web.get("/", hello), web.post("/", hello), web.get("/raises", raises)]


async def test_nothing_is_changed_without_the_token(web_client: aiohttp.ClientSession) -> None:
    async with serve(ROUTES) as port, web_client.post(f"http://localhost:{port}/") as answer:
        assert (answer.status, await answer.json()) == (
            403,
            {"message": "this server only reads: start it with a token"},
        )
    async with serve(ROUTES, token="secret") as port:
        for given, status in ((None, 401), ("Bearer wrong", 401), ("Bearer secrét", 401), ("Bearer secret", 200)):
            headers = {} if given is None else {"Authorization": given}
            async with web_client.post(f"http://localhost:{port}/", headers=headers) as answer:
                assert answer.status == status


async def test_a_page_that_reaches_this_machine_under_another_name_is_refused(
    web_client: aiohttp.ClientSession,
) -> None:
    async with serve(ROUTES) as port:
        async with web_client.get(f"http://127.0.0.1:{port}/", headers={"Host": "attacker.example"}) as answer:
            assert answer.status == 403
        async with web_client.get(f"http://127.0.0.1:{port}/", headers={"Host": "localhost:1"}) as answer:
            assert answer.status == 200


async def test_a_page_of_another_site_is_refused_though_the_server_is_open_here(
    web_client: aiohttp.ClientSession,
) -> None:
    async with serve(ROUTES, open_here=True) as port:
        for origin, status in (("http://attacker.example", 403), ("null", 403), (f"http://localhost:{port}", 200)):
            async with web_client.post(f"http://localhost:{port}/", headers={"Origin": origin}) as answer:
                assert answer.status == status
        async with web_client.post(f"http://localhost:{port}/") as answer:
            assert answer.status == 200


async def test_a_fault_in_a_handler_is_an_answer(web_client: aiohttp.ClientSession) -> None:
    async with serve(ROUTES, token="t") as port:
        async with web_client.get(f"http://localhost:{port}/raises") as answer:
            assert (answer.status, "log says why" in (await answer.json())["message"]) == (500, True)
        async with web_client.get(f"http://localhost:{port}/nothing") as answer:
            assert answer.status == 404
        large = io.BytesIO(b"x" * (2 << 20))
        async with web_client.post(
            f"http://localhost:{port}/", data=large, headers={"Authorization": "Bearer t"}
        ) as answer:
            assert answer.status == 413


async def test_a_place_that_is_taken_is_named() -> None:
    async with serve(ROUTES) as port:
        with pytest.raises(esp.ConfigError, match=f"127.0.0.1:{port} cannot be listened on"):
            async with serve(ROUTES, port=port):
                raise AssertionError("it listens twice")


def test_a_place_is_a_port_or_a_host_and_a_port() -> None:
    assert [place("8080"), place("[::1]:1"), place("a:2")] == [
        ("127.0.0.1", 8080), ("::1", 1), ("a", 2)
    ]  # fmt: skip
    for wrong in ("", "x", "a:", "a:b", "70000", "a:-1"):
        with pytest.raises(esp.ConfigError, match="a place to listen on"):
            place(wrong)
