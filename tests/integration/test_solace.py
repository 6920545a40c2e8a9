"""Solace: what can be seen of the vendor's client without a broker, on loopback listeners that are none."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from solace.messaging.config.solace_properties import authentication_properties as authentication
from solace.messaging.config.solace_properties import transport_layer_properties as transport
from solace.messaging.errors.pubsubplus_client_error import PubSubPlusClientError
from solace.messaging.messaging_service import MessagingService
from solace.messaging.resources.queue import Queue
from typer.testing import CliRunner

import esp_pubsub as esp
from esp_pubsub.cli.app import app
from esp_pubsub.config import load_options
from esp_pubsub.errors import BusRefused, BusUnavailable, ConfigError, NotInstalled
from esp_pubsub.transports.solace import Options, open_bus, session
from esp_pubsub.transports.solace.link import NotFirst, NotSubscribed, UnknownQueue
from tests.support.server import HOST, free_ports

pytest_plugins = ["tests.support.solace_client"]
pytestmark = pytest.mark.usefixtures("solace_client")

TIMEOUT = 0.5
LONG = 30.0  # nobody waits for so long: what is tested comes first, however loaded the machine
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


# the vendor's client, without a broker


@pytest.fixture
def the_client_s_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our deadline behind the client's own never comes first."""
    monkeypatch.setattr(session, "_SLACK", LONG)


async def refused(host: str, timeout: float = LONG, **settings: Any) -> None:
    await open_bus(Options(host=host, username="us", password="secret", timeout=timeout, **settings))


@contextlib.asynccontextmanager
async def listener(talk: Talk, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Somebody who takes connections and is no broker; his port."""
    talking: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talking.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            await talk(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    if context is not None:  # a handshake that fails is what is wanted
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: None)
    server = await asyncio.start_server(answer, HOST, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        await server.wait_closed()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.get_running_loop().create_future()


async def cutting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


async def babbling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await silent(reader, writer)


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No thread and no descriptor more than before, once the client's own have ended."""
    gc.collect()
    before, descriptors = threads(), len(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + LONG
    while threads() - before or len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < deadline, (threads() - before, os.listdir("/proc/self/fd"))
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("talk", "timeout", "says"),
    [
        (silent, TIMEOUT, r"timeout \(TIMEOUT\); check that it runs"),
        (cutting, LONG, r"closed socket.*\(COMMUNICATION_ERROR\); check"),
        (babbling, LONG, r"Bad SMF version.*\(PROTOCOL_ERROR\); that is no Solace broker"),
    ],
)
@pytest.mark.usefixtures("the_client_s_own_word")
async def test_who_is_no_broker_is_told_in_one_line_and_leaves_nothing(talk: Talk, timeout: float, says: str) -> None:
    with nothing_left():
        async with listener(talk) as port:
            began = time.monotonic()
            with pytest.raises(BusUnavailable, match=says) as raised:
                await refused(f"tcp://{HOST}:{port}", timeout=timeout)
            assert time.monotonic() - began < 0.9 * LONG, "the client's own deadline is 30 s"
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        (f"tcp://{HOST}:1", r"Connection refused.*; check that it runs, and host"),
        ("tcp://no..where:55555", r"nobody knows that name: check host"),  # no resolver has to be asked
    ],
)
async def test_where_nobody_is_is_told_in_one_line_and_leaves_nothing(host: str, says: str) -> None:
    with nothing_left(), pytest.raises(BusUnavailable, match=says):
        await refused(host)


async def test_the_hosts_of_a_list_are_tried_in_turn() -> None:
    asked = asyncio.Event()

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()

    with nothing_left():
        async with listener(note) as port:
            with pytest.raises(BusUnavailable):
                await refused(f"tcp://{HOST}:1,tcp://{HOST}:{port}")
            assert asked.is_set()


async def test_a_connect_that_is_cancelled_leaves_nothing() -> None:
    reached = asyncio.Event()

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reached.set()
        await silent(reader, writer)

    with nothing_left():
        async with listener(note) as port:
            connecting = asyncio.create_task(refused(f"tcp://{HOST}:{port}", timeout=TIMEOUT))
            await reached.wait()
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting


async def test_a_connect_that_is_cancelled_before_the_client_has_made_anything_leaves_nothing() -> None:
    with nothing_left():
        for _ in range(5):
            connecting = asyncio.create_task(refused(f"tcp://{HOST}:1"))
            await asyncio.sleep(0)
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting


def test_a_connect_that_ends_with_its_loop_leaves_nothing() -> None:
    async def begin() -> None:
        connecting = asyncio.ensure_future(refused(f"tcp://{HOST}:1"))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    with nothing_left():
        for _ in range(3):
            asyncio.run(begin())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1, alone in a folder, and its key beside it."""
    folder = tmp_path_factory.mktemp("tls")
    (folder / "trusted").mkdir()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=solace.test",
         "-addext", "subjectAltName=DNS:solace.test", "-keyout", folder / "key.pem",
         "-out", folder / "trusted" / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "trusted" / "cert.pem", certificate / "key.pem")
    return context


async def test_a_certificate_that_nobody_signed_is_refused(certificate: Path, tmp_path: Path) -> None:
    with nothing_left():
        async with listener(silent, server_context(certificate)) as port:
            with pytest.raises(BusRefused, match=r"not trusted.*; check sslcacert"):
                await refused(f"tcps://{HOST}:{port}", sslcacert=tmp_path)


async def test_a_certificate_of_another_name_is_refused(certificate: Path) -> None:
    says = "mismatch.*check sslcacert, and that host is a name of the certificate"
    with nothing_left():
        async with listener(silent, server_context(certificate)) as port:
            with pytest.raises(BusRefused, match=says):
                await refused(f"tcps://{HOST}:{port}", sslcacert=certificate / "trusted")


async def test_a_folder_of_signers_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with nothing_left(), pytest.raises(BusRefused, match="check sslcacert, a folder"):
        await refused(f"tcps://{HOST}:1", sslcacert=tmp_path / "nowhere")


@pytest.mark.usefixtures("the_client_s_own_word")
async def test_a_port_that_speaks_no_tls_is_told(certificate: Path) -> None:
    with nothing_left():
        async with listener(silent) as port:
            with pytest.raises(BusUnavailable, match="the port is one for what host says"):
                await refused(f"tcps://{HOST}:{port}", timeout=TIMEOUT, sslcacert=certificate / "trusted")


CALLS: dict[str, Callable[[session.SolaceLink], Awaitable[Any]]] = {
    "a publisher": lambda link: link.publisher(nothing, guaranteed=False),
    "one of guaranteed messages": lambda link: link.publisher(nothing, guaranteed=True),
    "a subscription": lambda link: link.subscribe("a/b", nothing),
    "a shared one": lambda link: link.subscribe("a/b", nothing, "share"),
    "a queue": lambda link: link.bind("q", nothing, nothing),
    "one that is made": lambda link: link.bind("q", nothing, nothing, topic="a/b", make=True, active=nothing),
    "one of our own": lambda link: link.bind(None, nothing, nothing, topic="a/b"),
    "all of a replay log": lambda link: link.bind("q", nothing, nothing, topic="a/b", make=True, replay="earliest"),
    "some of it": lambda link: link.bind("q", nothing, nothing, topic="a/b", make=True, replay=datetime.now(UTC)),
    "a browser": lambda link: link.browse("q", nothing),
}


def nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("what", CALLS)
async def test_the_client_takes_what_we_ask_for_as_far_as_that_goes_without_a_broker(what: str) -> None:
    options = Options(host=f"tcp://{HOST}:1", username="us")
    with nothing_left():
        link = session.SolaceLink(options)
        link._service = MessagingService.builder().from_properties(session.properties(options)).build()
        with pytest.raises(BusUnavailable, match=r"be started,? before.*connected"):
            await CALLS[what](link)
        await link.aclose()


@pytest.fixture
async def link() -> AsyncIterator[session.SolaceLink]:
    """A session that was built and never connected."""
    options = Options(host=f"tcp://{HOST}:1", username="us")
    link = session.SolaceLink(options)
    link._service = MessagingService.builder().from_properties(session.properties(options)).build()
    yield link
    await link.aclose()


def receiver(link: session.SolaceLink, queue: Queue) -> Any:
    return link._service.create_persistent_message_receiver_builder().build(queue)


async def test_a_queue_is_made_as_we_want_it_whatever_others_in_the_process_make(
    link: session.SolaceLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = session.of_its_own(receiver(link, Queue.durable_exclusive_queue("ours")))
    theirs = receiver(link, Queue.durable_non_exclusive_queue("theirs"))
    for name, value in (("ENDPOINT_NAME", "theirs"), ("ENDPOINT_ACCESSTYPE", "0")):  # as its start does
        monkeypatch.setitem(theirs._end_point_props, name, value)
    later = session.of_its_own(receiver(link, Queue.durable_exclusive_queue("ours")))
    for each in (ours, later):
        assert each._end_point_props["ENDPOINT_ACCESSTYPE"] == "1"
        assert each._end_point_props is not theirs._end_point_props
    assert "ENDPOINT_NAME" not in ours._end_point_props


async def test_no_flow_is_bound_anew_by_the_client(link: session.SolaceLink, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    start = session.ReceiverFlow.start

    def note(flow: session.ReceiverFlow) -> None:
        try:
            start(flow)
        finally:
            made.append(flow._receiver)

    monkeypatch.setattr(session.ReceiverFlow, "start", note)
    with pytest.raises(BusUnavailable):
        await link.bind("q", nothing, nothing)
    (bound,) = made
    words = [bound._flow_arr[at] for at in range(len(bound._flow_arr))]
    assert words[words.index(b"FLOW_MAX_RECONNECT_TRIES") + 1] == b"0"
    browser = session.BrowserFlow(link, "q", nothing)
    with contextlib.suppress(Exception):
        browser.start()
    assert browser._browser._reconnection_attempts == 0


async def test_a_call_that_fails_half_way_is_undone(link: session.SolaceLink) -> None:
    undone = asyncio.Event()

    def fail() -> None:
        raise PubSubPlusClientError("half-way")

    with pytest.raises(BusUnavailable, match="half-way"):
        await link.ask("it", fail, lambda: link.cross(undone.set))
    await undone.wait()


async def test_calls_that_hang_do_not_hold_up_the_others(link: session.SolaceLink) -> None:
    end = threading.Event()
    hung = [asyncio.create_task(link.ask("it", end.wait)) for _ in range(8)]
    await asyncio.sleep(0)
    assert await link.ask("another", lambda: "at once") == "at once"
    end.set()
    await asyncio.gather(*hung)


# the words of the client in ours


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (19, BusRefused, "check username and password"),
        (45, BusRefused, "check vpn_name"),
        (61, UnknownQueue, "UNKNOWN_QUEUE_NAME"),
        (76, BusRefused, "let it"),
        (71, BusUnavailable, "SPOOL_OVER_QUOTA"),
        (11, BusUnavailable, "KEEP_ALIVE_FAILURE"),
        (68, NotSubscribed, "let it subscribe"),
        (136, NotFirst, "another reader stands first"),
        (152, BusRefused, "allow shared subscriptions"),
        (17, BusRefused, "neither empty levels nor wildcards"),
        (72, BusUnavailable, "ingress and egress enabled"),
        (162, BusUnavailable, "PubSubPlusClientError"),
    ],
)
def test_what_the_client_raises_is_said_in_our_words(code: int, kind: type[Exception], says: str) -> None:
    error = session.trouble("doing it", PubSubPlusClientError("it failed", code))
    assert type(error) is kind
    assert str(error).startswith("doing it: it failed") and says in str(error)


def test_a_refusal_that_the_client_puts_in_its_text_only_is_found() -> None:
    text = "qcreation failed with the following sub code SOLCLIENT_SUBCODE_PERMISSION_NOT_ALLOWED(76) "
    assert type(session.trouble("making it", PubSubPlusClientError(text))) is BusRefused


# settings


def test_without_the_extra_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("solace", "esp_pubsub.transports.solace"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "solace", None)
    with pytest.raises(NotInstalled, match=r"pip install 'esp-pubsub\[solace\]'"):
        esp.set_pubsub_lib("solace")


def test_a_cfg_that_lacks_a_key_says_which_and_where(tmp_path: Path) -> None:
    (tmp_path / "solace.cfg").write_text('solace\n{\n  host = "tcp://broker:55555"\n}\n')
    with pytest.raises(ConfigError, match=r"solace needs 'username': give username = \.\.\. in section solace") as told:
        load_options(Options, section="solace", config=tmp_path, environ={})
    assert "\n" not in str(told.value)


async def test_a_broker_that_is_not_there_is_told_in_one_line() -> None:
    (port,) = free_ports(1)
    with pytest.raises(BusUnavailable, match="check that it runs, and host") as told:
        await esp.init("solace", host=f"tcp://{HOST}:{port}", username="us", timeout=TIMEOUT)
    assert "\n" not in str(told.value)


def test_the_doctor_says_what_an_administrator_has_to_make(tmp_path: Path) -> None:
    solace = (
        'host = "tcp://broker"\n username = "us"\n buspersistence = true\n queuename = "billing"\n vpn_name = "SAS"'
    )
    (tmp_path / "solace.cfg").write_text(f'solace\n{{\n {solace}\n}}\nsas\n{{\n failovergroup = "feed"\n}}\n')
    url = "dfESP://host:5555/project/query/window"
    found = CliRunner().invoke(app, ["doctor", "--solace", url, "--config", str(tmp_path)])
    assert found.exit_code == 0, found.output
    for name in ("billing@host:5555/project/query/window/O", "flow@host:5555/M/F/feed#feed"):
        assert f'"queueName": "{name}"' in found.output
    assert "/msgVpns/SAS/queues" in found.output


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host": "amqp://broker"}, "host is tcp://"),
        ({"compression": 10}, "0 to 9"),
        ({"sslcert": Path("c")}, "together"),
        ({"sslcacert": Path("c")}, "no host begins with tcps"),
        ({"host": "tcps://broker"}, "TLS needs sslcacert"),
    ],
)
def test_settings_that_cannot_be_are_told(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Options(**{"host": "tcp://broker", "username": "us"} | settings)


def test_the_file_of_sas_becomes_the_words_of_the_client(tmp_path: Path) -> None:
    lines = (
        'host = "tcp://a:55555,tcp://b"\n username = "us"\n password = "secret"\n vpn_name = "SAS"\n keepalive = "2s"'
    )
    (tmp_path / "solace.cfg").write_text(f"solace\n{{\n {lines}\n}}\nsas\n{{\n buspersistence = true\n}}\n")
    options = load_options(Options, section="solace", config=tmp_path, environ={})
    assert options.buspersistence
    assert "secret" not in repr(options)
    said = session.properties(options)
    assert said[transport.HOST] == "tcp://a:55555,tcp://b"
    assert said[transport.KEEP_ALIVE_INTERVAL] == 2000
    assert said[transport.RECONNECTION_ATTEMPTS] == 0
    assert type(said[authentication.SCHEME_BASIC_PASSWORD]) is str
    assert said[authentication.SCHEME_BASIC_PASSWORD] == "secret"
