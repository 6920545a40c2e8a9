"""The scheduler as it runs: engine members, delivery workers and HTTP servers on the embedded bus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import esp_pubsub as esp
from esp_pubsub.http import serve
from esp_pubsub.scheduler.app import Running, SchedulerOptions, running
from esp_pubsub.scheduler.worker import Refused, Targets
from tests.integration.engines import leads, until

URL = "dfESP://local:5555/scheduler/main"
HERE = SchedulerOptions(port=0, private=True)


class Target:
    """An HTTP server that is called. It answers what it is told to, else 200."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []  # path, key, body
        self.answers: list[web.Response] = []
        self.release = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/{path:.*}", self.take)]

    async def take(self, request: web.Request) -> web.StreamResponse:
        key = request.headers["Idempotency-Key"]
        self.calls.append((request.path, key, await request.text()))
        if request.path == "/hangs":
            await self.release.wait()
        return self.answers.pop(0) if self.answers else web.Response()


@contextlib.asynccontextmanager
async def scheduler(directory: Path, **options: Any) -> AsyncIterator[tuple[Running, esp.Client]]:
    async with (
        esp.init(dir=directory, on_notice=lambda notice: None) as client,
        running(client, URL, HERE, **options) as process,
    ):
        yield process, client


class Web:
    """A client of the API."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self.at = f"http://127.0.0.1:{port}"

    async def get(self, path: str, **query: str) -> tuple[int, Any]:
        async with self._session.get(f"{self.at}{path}", params=query) as answer:
            return answer.status, await answer.json()

    async def post(self, path: str, body: Any = None, **query: str) -> tuple[int, Any]:
        async with self._session.post(f"{self.at}{path}", json=body, params=query) as answer:
            return answer.status, await answer.json()

    async def delete(self, path: str) -> tuple[int, Any]:
        async with self._session.delete(f"{self.at}{path}") as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def target() -> AsyncIterator[tuple[Target, str]]:
    made = Target()
    async with serve(made.routes(), open_here=True) as port:
        yield made, f"http://127.0.0.1:{port}"
        made.release.set()


@pytest.fixture
async def api(bus_directory: Path) -> AsyncIterator[Web]:
    async with scheduler(bus_directory) as (process, _), aiohttp.ClientSession() as session:
        await leads(process.engine)
        yield Web(session, process.port)


async def eventually(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await is_so():  # noqa: ASYNC110  # what is asked is another server
            await asyncio.sleep(0.01)


def soon(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


async def register(api: Web, url: str, tenant: str = "TenantB/ProgramB/EnvC", **limits: Any) -> None:
    status, tenants = await api.post(
        "/events/tenant/register", {"tenant": tenant, "type": "HTTP", "props": {"url": url}, "limits": limits}
    )
    assert (status, tenants[tenant]["type"]) == (200, "HTTP")


async def test_an_event_is_delivered_at_its_time_with_its_key(api: Web, target: tuple[Target, str]) -> None:
    called, url = target
    await register(api, f"{url}/hook", "t")
    at = soon(0.3)
    status, answers = await api.post("/events/schedule", [{"id": "1", "tenant": "t", "eventTime": at, "payload": "x"}])
    assert (status, answers[0]["eventStatus"]) == (200, "ACCEPTED")
    status, found = await api.get("/events/find", id="1", tenant="t")
    assert (status, found["payload"]) == (200, "x")
    await until(lambda: len(called.calls) == 1)
    assert datetime.now(UTC) >= datetime.fromisoformat(at)
    path, key, body = called.calls[0]
    assert path == "/hook" and key.startswith("t/1/") and '"eventStatus":"TRIGGERED"' in body

    async def processed() -> bool:
        return bool((await api.get("/events/find", id="1", tenant="t"))[1]["eventStatus"] == "PROCESSED")

    await eventually(processed)


async def test_a_list_is_answered_item_by_item(api: Web, target: tuple[Target, str]) -> None:
    await register(api, target[1], "t")
    good = {"id": "1", "tenant": "t", "eventTime": soon(60)}
    wrong: list[Any] = [
        {**good, "tenant": "nobody"}, {"id": "1", "eventTime": soon(60)}, {"id": "1", "tenant": "t"},
        {**good, "eventTime": "31.1.2018 4:00"}, {**good, "deliveryOption": "PAYLOAD_ONLY"},
        {**good, "unknown": 1}, {**good, "payload": 7}, {**good, "version": True}, 7,
    ]  # fmt: skip
    status, answers = await api.post("/events/schedule", [good, *wrong])
    assert status == 206
    assert [answer["eventStatus"] for answer in answers] == ["ACCEPTED", *["REJECTED"] * len(wrong)]
    assert {answer["error"]["code"] for answer in answers[1:]} == {400}
    assert (await api.post("/events/schedule", wrong))[0] == 400
    assert await api.post("/events/schedule", []) == (400, [])
    assert (await api.post("/events/schedule", {"id": "1"}))[0] == 400


async def test_an_event_in_the_past_is_delivered_at_once(api: Web, target: tuple[Target, str]) -> None:
    called, url = target
    await register(api, url, "t")
    event = {"id": "1", "tenant": "t", "eventTime": soon(-60), "payload": "raw", "deliveryOption": "PAYLOAD_ONLY"}
    status, answers = await api.post("/events/schedule", [event])
    assert (status, answers[0]["eventStatus"]) == (200, "TRIGGERED")
    await until(lambda: len(called.calls) == 1)
    assert called.calls[0][2] == "raw"
    assert await api.get("/events/find", id="1", tenant="t") == (404, {"status": "not found"})


async def test_a_call_that_fails_is_tried_again_and_a_refusal_is_not(
    bus_directory: Path, api: Web, target: tuple[Target, str]
) -> None:
    called, url = target
    await register(api, url, "t", delay=0.05)
    called.answers = [web.Response(status=500), web.Response(status=503, headers={"Retry-After": "0"}), web.Response()]
    await api.post("/events/schedule", [{"id": "1", "tenant": "t", "eventTime": soon(0)}])
    await until(lambda: len(called.calls) == 3)
    assert len({key for _, key, _ in called.calls}) == 1
    called.answers = [web.Response(status=400, text="no such thing")]
    await api.post("/events/schedule", [{"id": "2", "tenant": "t", "eventTime": soon(0)}])
    await until(lambda: len(called.calls) == 4)
    async with esp.init(dir=bus_directory) as client:
        dead = await client.subscriber(f"{URL}/Dead", start="earliest")
        async with asyncio.timeout(20):
            row = (await anext(dead)).mappings()[0]
    assert (row["id"], row["code"], row["error"]) == ("2", 400, "no such thing")
    assert len(called.calls) == 4


async def test_a_target_that_hangs_ends_with_its_deadline_and_harms_no_other_tenant(
    api: Web, target: tuple[Target, str]
) -> None:
    called, url = target
    await register(api, f"{url}/hangs", "slow", deadline=0.3, retries=0, concurrency=2)
    await register(api, f"{url}/quick", "quick")
    events = [{"id": str(n), "tenant": "slow", "eventTime": soon(0)} for n in range(6)]
    await api.post("/events/schedule", events)
    await api.post("/events/schedule", [{"id": "1", "tenant": "quick", "eventTime": soon(0)}])
    await until(lambda: any(path == "/quick" for path, _, _ in called.calls))
    assert sum(path == "/hangs" for path, _, _ in called.calls) <= 2

    async def backlog() -> bool:
        found = (await api.get("/events/backlog", tenant="slow"))[1]["backlog"]
        return len(found) >= 2 and {each["code"] for each in found} == {0}

    await eventually(backlog)


async def test_crons_are_set_described_listed_and_removed(api: Web, target: tuple[Target, str]) -> None:
    called, url = target
    await register(api, url, "a/b")
    status, cron = await api.post("/cron", {"tenant": "a/b", "id": "c", "expression": "* * * * * ?", "payload": "tick"})
    assert (status, cron["cron"]["type"]) == (200, "QUARTZ")
    await until(lambda: len(called.calls) >= 2)
    assert {body for _, _, body in called.calls if "tick" in body}
    assert len((await api.get("/cron/a%2Fb/c"))[1]) == 1
    assert (await api.get("/cron/describe", expression="0 0 12 * * ?"))[0] == 200
    assert (await api.get("/cron/describe", expression="what"))[0] == 400
    assert (await api.post("/cron", {"tenant": "a/b", "id": "c", "expression": "0 0 0 30 2 ?"}))[0] == 400
    assert (await api.post("/cron", {"tenant": "nobody", "id": "c", "expression": "* * * * * ?"}))[0] == 400
    assert (await api.delete("/cron/a%2Fb/c/*"))[0] == 200
    assert (await api.get("/cron/a%2Fb/c"))[1] == []


async def test_it_is_used_from_python_over_the_bus(bus_directory: Path) -> None:
    async with scheduler(bus_directory) as (process, _), esp.init(dir=bus_directory) as us:
        await leads(process.engine)
        ours = us.scheduler(URL)
        await ours.register("t", "MESSAGING", {"window": "Fires"})
        at = datetime.now(UTC) + timedelta(seconds=60)
        answers = await ours.schedule([{"tenant": "t", "id": "1", "eventTime": at}, {"tenant": "nobody", "id": "1"}])
        assert [answer["eventStatus"] for answer in answers] == ["ACCEPTED", "REJECTED"]
        assert (await ours.ask("find", tenant="t", id="1"))["eventStatus"] == "UN_PROCESSED"
        assert await ours.cancel("t", "1") and not await ours.cancel("t", "1")
        with pytest.raises(esp.EspError, match="not found"):
            await ours.ask("find", tenant="t", id="1")
        with pytest.raises(esp.EspError, match="no command"):
            await ours.command("what nobody knows", do="tenant", self="x")
        cron = await ours.cron("t", "c", "0 0 12 * * ?", zone="Europe/Berlin")
        assert cron["cron"]["zone"] == "Europe/Berlin"


async def test_two_processes_fire_each_event_once_though_one_of_them_ends(
    bus_directory: Path, target: tuple[Target, str]
) -> None:
    async with (
        scheduler(bus_directory) as (a, _), aiohttp.ClientSession() as session, esp.init(dir=bus_directory) as us,
    ):  # fmt: skip
        await leads(a.engine)
        async with scheduler(bus_directory) as (b, _):
            api = Web(session, b.port)
            assert (await api.post("/events/tenant/register", {
                "tenant": "t", "type": "MESSAGING", "props": {"window": "Fires"}}))[0] == 200  # fmt: skip
            events = [{"id": str(n), "tenant": "t", "eventTime": soon(0.2 + n / 500)} for n in range(300)]
            assert (await api.post("/events/schedule", events))[0] == 200

            async def both() -> bool:
                return sorted((await api.get("/events/cluster"))[1].values()) == ["Master", "Slave"]

            await eventually(both)
            await a.engine.hand_over()
            await leads(b.engine)
            fires = await us.subscriber(f"{URL}/Fires", start="earliest")
            fired: list[str] = []
            async with asyncio.timeout(20):
                while len(fired) < 300:
                    fired += [row["id"] for row in (await anext(fires)).mappings()]
            assert sorted(fired, key=int) == [str(n) for n in range(300)]


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://[::1]:80/", "http://10.0.0.1/", "http://169.254.169.254/latest", "http://0.0.0.0/",
     "http://[::ffff:127.0.0.1]/", "ftp://example.org/", "http:///x", "http://192.168.1.1/", "http://224.0.0.1/"],
)  # fmt: skip
def test_no_call_goes_to_an_address_that_is_not_public(url: str) -> None:
    with pytest.raises(Refused):
        Targets().check(url)


def test_calls_go_to_the_hosts_that_are_listed() -> None:
    targets = Targets(["hooks.example.org", ".example.com"])
    for good in ("https://hooks.example.org/x", "https://a.b.EXAMPLE.com/"):
        targets.check(good)
    for wrong in ("https://example.org/", "https://badexample.com/", "https://example.com/"):
        with pytest.raises(Refused, match="not among the hosts"):
            targets.check(wrong)


async def test_a_name_that_leads_to_this_machine_is_called_by_nobody(
    bus_directory: Path, target: tuple[Target, str]
) -> None:
    called, url = target
    async with (
        esp.init(dir=bus_directory) as client,
        running(client, URL, SchedulerOptions(port=0)) as process,
        aiohttp.ClientSession() as session,
    ):
        await leads(process.engine)
        api = Web(session, process.port)
        await register(api, url.replace("127.0.0.1", "localhost"), "t", retries=0)
        await api.post("/events/schedule", [{"id": "1", "tenant": "t", "eventTime": soon(0)}])
        dead = await client.subscriber(f"{URL}/Dead", start="earliest")
        async with asyncio.timeout(20):
            row = (await anext(dead)).mappings()[0]
        assert (row["code"], "no public address" in row["error"], called.calls) == (403, True, [])
