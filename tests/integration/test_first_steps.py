"""The first ten minutes of a user: the two files as they are shown, loops that come and go, web servers."""

import asyncio
import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import pytest
from fastapi import FastAPI

import esp_pubsub as esp
from esp_pubsub.transports.embedded import meta

ROOT = Path(__file__).parents[2]
URL = "dfESP://test:5555/project/query/window"
ONE_RUN = "1 [(1, 'IBM', 101.5), (2, 'SAS', 99.0)]"
TOPIC = "trades:5555/market/cq/TradesSource/I"


@pytest.fixture(scope="module", params=["README.md", "docs/explanation/design.md"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with publish.py and subscribe.py, word for word as a page shows them."""
    page = ROOT / request.param
    if not page.exists():
        pytest.skip(f"no {request.param}")
    folder = tmp_path_factory.mktemp("files")
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
        if name := re.match(r"# (publish|subscribe)\.py\n", code):
            (folder / f"{name[1]}.py").write_text(code)
    assert {path.name for path in folder.iterdir()} == {"publish.py", "subscribe.py"}
    return folder


class Reader:
    """subscribe.py in a process; its lines as they come."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", "subscribe.py"], cwd=folder, text=True,
            env=environment | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._pump)
        self._thread.start()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip())

    def line(self) -> str:
        try:
            return self._lines.get(timeout=60)
        except queue.Empty:
            self.end()
            raise AssertionError("nothing came") from None

    def lines(self, seconds: float = 0.0) -> list[str]:
        """What has come, and what comes within a time."""
        end, found = time.monotonic() + seconds, []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._lines.get(timeout=max(0.0, end - time.monotonic())))
        return found

    def end(self, number: int = signal.SIGINT) -> str:
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._thread.join(60)
            with self._process.stdout, self._process.stderr:  # type: ignore[union-attr]
                errors = self._process.stderr.read()  # type: ignore[union-attr]
        return errors


@pytest.fixture
def environment(bus_directory: Path) -> dict[str, str]:
    return os.environ | {"ESP_PUBSUB_DIR": str(bus_directory)}


@contextlib.contextmanager
def reader(folder: Path, environment: dict[str, str]) -> Iterator[Reader]:
    found = Reader(folder, environment)
    try:
        yield found
    finally:
        found.end()


def publish(folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "publish.py"], cwd=folder, env=environment, text=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if not line.startswith("Executing <Task")]  # a slow machine
    assert (done.returncode, done.stdout, said) == (0, "", [])


def wait_for_topic(directory: str) -> None:
    """Until the subscriber is in place."""

    async def look() -> None:
        async with esp.init(dir=directory) as client, asyncio.timeout(60):
            while TOPIC not in await client.catalog().topics():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(look())


def wait_for_confirmed(directory: str, count: int) -> None:
    """Until the subscriber, which confirms what it has printed, has stored that for so many blocks."""

    async def look() -> None:
        async with esp.init(dir=directory) as client, asyncio.timeout(60):
            store = client.bus.meta  # type: ignore[attr-defined]
            while store.read(lambda t: meta.group(t, TOPIC, "reader")).position != count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(look())


def test_the_subscriber_first_and_then_both_again(files: Path, environment: dict[str, str]) -> None:
    with reader(files, environment) as first:
        wait_for_topic(environment["ESP_PUBSUB_DIR"])
        publish(files, environment)
        assert first.line() == ONE_RUN
        publish(files, environment)
        assert first.line() == ONE_RUN
        wait_for_confirmed(environment["ESP_PUBSUB_DIR"], 2)
    with reader(files, environment) as again:
        publish(files, environment)
        assert again.line() == ONE_RUN
        assert again.lines() == []


def test_the_publisher_first_and_then_both_again(files: Path, environment: dict[str, str]) -> None:
    for count in (1, 2):
        publish(files, environment)
        with reader(files, environment) as found:
            assert found.line() == ONE_RUN
            wait_for_confirmed(environment["ESP_PUBSUB_DIR"], count)
            assert found.lines() == []


def test_a_subscriber_that_was_killed_goes_on_behind_what_it_confirmed(
    files: Path, environment: dict[str, str]
) -> None:
    environment |= {"ESP_PUBSUB_LEASE": "1h"}  # the group's holder will be dead: nobody waits until its lease is over
    publish(files, environment)
    found = Reader(files, environment)
    try:
        assert found.line() == ONE_RUN
        publish(files, environment)
        assert found.line() == ONE_RUN
    finally:
        found.end(signal.SIGKILL)
    publish(files, environment)
    with reader(files, environment) as again:
        assert again.line() == ONE_RUN
        assert len(again.lines(0.1)) <= 1  # the last one may not have been confirmed when it was killed


def test_control_c_ends_a_subscriber_without_noise_of_ours(files: Path, environment: dict[str, str]) -> None:
    publish(files, environment)
    found = Reader(files, environment)
    found.line()
    errors = found.end()
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert "never retrieved" not in errors and "destroyed" not in errors and "Resource" not in errors, errors


# loops that come and go


async def _there_and_back(directory: Path, number: int) -> Any:
    async with (
        esp.init(dir=directory) as client,
        client.subscriber(URL, "id*:int64", side="in") as sub,
        client.publisher(URL, "id*:int64") as pub,
    ):
        await (await pub.inject([(number,)]))
        async with asyncio.timeout(60):
            return (await anext(sub)).rows()


def test_asyncio_run_twice_in_one_process(bus_directory: Path) -> None:
    assert [asyncio.run(_there_and_back(bus_directory, n)) for n in range(3)] == [[(0,)], [(1,)], [(2,)]]


def test_a_loop_that_ended_without_a_close_does_not_spoil_the_next(bus_directory: Path) -> None:
    code = """
        import asyncio, sys, esp_pubsub as esp
        URL = "dfESP://test:5555/project/query/window"
        kept = []
        async def careless(n):
            client = await esp.init(dir=sys.argv[1])
            pub = await client.publisher(URL, "id*:int64")
            await (await pub.inject([(n,)]))
            kept.append((client, pub, await client.subscriber(URL, side="in")))
        async def careful():
            async with esp.init(dir=sys.argv[1]) as client:
                async with client.subscriber(URL, side="in", start="earliest") as sub, asyncio.timeout(60):
                    print([(await anext(sub)).rows()[0][0] for _ in range(2)])
        asyncio.run(careless(1))
        asyncio.run(careless(2))
        asyncio.run(careful())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), bus_directory], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("[1, 2]\n", 0), done.stderr


@pytest.mark.parametrize("number", range(3))
async def test_a_loop_per_test(bus_directory: Path, number: int) -> None:
    assert await _there_and_back(bus_directory, number) == [(number,)]


def test_two_loops_in_two_threads_share_a_directory(bus_directory: Path) -> None:
    found: list[Any] = []

    def read() -> None:
        async def reading() -> None:
            async with (
                esp.init(dir=bus_directory) as client,
                client.subscriber(URL, "id*:int64", side="in", start="earliest") as sub,
                asyncio.timeout(60),
            ):
                found.extend([(await anext(sub)).rows()[0][0] for _ in range(100)])

        asyncio.run(reading())

    async def write() -> None:
        async with esp.init(dir=bus_directory) as client, client.publisher(URL, "id*:int64") as pub:
            for number in range(100):
                await pub.inject([(number,)])

    thread = threading.Thread(target=read)
    thread.start()
    asyncio.run(write())
    thread.join(60)
    assert found == list(range(100))


# web servers


async def test_a_fastapi_app_with_two_clients_in_its_lifespan(bus_directory: Path) -> None:
    for name in "ab":
        (bus_directory / name).mkdir(mode=0o700)
    closed = []

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            esp.init(dir=bus_directory / "a") as one,
            esp.init(dir=bus_directory / "b") as two,
            one.publisher(URL, "id*:int64,text:string") as pub,
            two.publisher(URL, "id*:int64") as log,
            one.subscriber(URL, side="in", start="earliest") as sub,
        ):
            app.state.pub, app.state.log, app.state.sub = pub, log, sub
            yield
        closed.append((one.is_here(), two.is_here()))

    app = FastAPI(lifespan=lifespan)

    @app.post("/events/{id}")
    async def post(id: int, text: str) -> dict[str, Any]:
        delivery = await app.state.pub.inject([(id, text)])
        await app.state.log.inject([(id,)])
        return {"id": delivery.id, "outcome": await delivery}

    @app.get("/events/next")
    async def following() -> Any:
        return (await anext(app.state.sub)).mappings()

    transport = httpx.ASGITransport(app=app)
    for run in range(2):
        async with app.router.lifespan_context(app), httpx.AsyncClient(
            transport=transport, base_url="http://test"
        ) as web:  # fmt: skip
            answers = await asyncio.gather(*(web.post(f"/events/{n}", params={"text": str(n)}) for n in range(10)))
            assert [answer.json()["outcome"] for answer in answers] == ["acked"] * 10
            assert sorted(answer.json()["id"] for answer in answers) == list(range(1, 11))
            found = [(await web.get("/events/next")).json()[0]["id"] for _ in range(10 * (run + 1))]
            assert sorted(found) == sorted(list(range(10)) * (run + 1))
    assert closed == [(False, False)] * 2


APP = """
import contextlib, os
import esp_pubsub as esp
from fastapi import FastAPI

URL = "dfESP://test:5555/project/query/window"

@contextlib.asynccontextmanager
async def lifespan(app):
    async with esp.init() as client, client.publisher(URL, "id*:int64,worker:int64") as pub:
        app.state.pub = pub
        yield

app = FastAPI(lifespan=lifespan)

@app.get("/{id}")
async def publish(id: int):
    delivery = await app.state.pub.inject([(id, os.getpid())])
    return {"worker": os.getpid(), "outcome": await delivery}
"""


def _get(port: int, number: int) -> dict[str, Any]:
    with urlopen(f"http://127.0.0.1:{port}/{number}", timeout=10) as answer:
        found: dict[str, Any] = httpx.Response(200, content=answer.read()).json()
        return found


def test_uvicorn_with_two_workers(bus_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "app:app", "--workers", "2", "--port", str(port), "--log-level", "warning"],
        cwd=tmp_path, env=os.environ | {"ESP_PUBSUB_DIR": str(bus_directory)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    workers: set[int] = set()
    asked = 0
    try:
        deadline = time.monotonic() + 60
        while asked < 20 or len(workers) < 2:
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.01 * (asked >= 20))  # the second worker may be up much later than the first one
            try:
                answer = _get(port, asked)
            except OSError:  # not up yet
                time.sleep(0.05)
                continue
            assert answer["outcome"] == "acked"
            workers.add(answer["worker"])
            asked += 1
    finally:
        server.terminate()
        output = server.communicate(timeout=60)[0]
    assert len(workers) == 2, output
    assert "Traceback" not in output, output

    async def read() -> list[int]:
        async with (
            esp.init(dir=bus_directory) as client,
            client.subscriber(URL, side="in", start="earliest") as sub,
            asyncio.timeout(60),
        ):
            return [(await anext(sub)).rows()[0][0] for _ in range(asked)]

    assert sorted(asyncio.run(read())) == list(range(asked))
