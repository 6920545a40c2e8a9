"""Client: opening, choosing a bus, closing, metadata."""

import asyncio
import contextlib
import gc
import importlib
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub import registry
from esp_pubsub.testing.faults import Faults
from tests.unit.workbench import outcome, ticks

URL = "dfESP://test:5555/project/query/window"
TOPIC = "test:5555/project/query/window/I"
SCHEMA = esp.Schema("id*:int64")
META = "test:5555/M"


@pytest.fixture(autouse=True)
def _a_world_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cfg file, no environment, and the choice of set_pubsub_lib is forgotten."""
    monkeypatch.chdir(tmp_path)
    for name in ("DIR", "CONFIG", "DURABILITY", "RING_SIZE", "RING_RECORDS"):
        monkeypatch.delenv(f"ESP_PUBSUB_{name}", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    asyncio.run(esp.shutdown())


@pytest.fixture
async def client(bus_directory: Path) -> AsyncIterator[esp.Client]:
    async with esp.init(dir=bus_directory) as client:
        yield client


def options(client: esp.Client) -> Any:
    return client.bus.options  # type: ignore[attr-defined]


async def publish(client: esp.Client, *numbers: int, url: str = URL, **how: Any) -> None:
    async with client.publisher(url, SCHEMA, **how) as pub:
        for number in numbers:
            await pub.inject([(number,)])


async def test_a_purge_empties_the_topic_and_its_groups_have_to_begin_a_new_run(client: esp.Client) -> None:
    assert await client.current_run(URL, "feed") == 0
    await publish(client, 1, 2, failover=esp.Failover("feed", run=3))
    await publish(client, 1)
    assert (await client.current_run(URL, "feed"), await client.current_run(URL, "other")) == (3, 0)
    assert await client.purge(URL) == 1
    assert await client.current_run(URL, "feed") == 4
    assert isinstance(await outcome(publish(client, 1, failover=esp.Failover("feed", run=3))), esp.Stale)
    await publish(client, 7, failover=esp.Failover("feed", run=await client.current_run(URL, "feed")))
    async with client.subscriber(URL, side="in", start="earliest") as sub:
        assert (await outcome(anext(aiter(sub)))).rows() == [(7,)]


# opening


async def test_a_client_may_be_awaited_or_entered(bus_directory: Path) -> None:
    client = await esp.init(dir=bus_directory)
    assert client.is_here()
    await client.aclose()
    assert not client.is_here()
    async with esp.init(dir=bus_directory) as client:
        assert client.is_here()
    assert not client.is_here()


async def test_the_same_opening_cannot_be_used_twice(bus_directory: Path) -> None:
    opening = esp.init(dir=bus_directory)
    async with opening:
        with pytest.raises(esp.WrongOrder, match="opened already"):
            await opening


async def test_an_opening_that_failed_may_be_tried_again(bus_directory: Path) -> None:
    bus_directory.chmod(0o755)
    opening = esp.init(dir=bus_directory)
    with pytest.raises(esp.BusRefused, match="chmod 700"):
        await opening
    bus_directory.chmod(0o700)
    async with opening as client:
        assert client.is_here()


async def test_an_opening_that_is_never_awaited_leaves_nothing(bus_directory: Path) -> None:
    esp.init(dir=bus_directory / "never")
    assert not (bus_directory / "never").exists()


async def test_the_directory_comes_from_the_keyword_the_environment_or_a_cfg_file(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("keyword", "environment", "file", "local"):
        (bus_directory / name).mkdir(mode=0o700)
    text = 'embedded {{\n dir = "{}"\n ring_records = 77\n}}\n'
    named = tmp_path / "named.cfg"
    named.write_text(text.format(bus_directory / "file"))
    async with esp.init(config=named) as client:
        assert (options(client).dir, options(client).ring_records) == (bus_directory / "file", 77)
    Path("embedded.cfg").write_text(text.format(bus_directory / "local"))
    async with esp.init() as client:
        assert options(client).dir == bus_directory / "local"
    monkeypatch.setenv("ESP_PUBSUB_DIR", str(bus_directory / "environment"))
    async with esp.init(config=named) as client:
        assert (options(client).dir, options(client).ring_records) == (bus_directory / "environment", 77)
    async with esp.init(config=named, dir=bus_directory / "keyword", ring_records=88) as client:
        assert (options(client).dir, options(client).ring_records) == (bus_directory / "keyword", 88)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dri": "/tmp"}, "'dir'"),
        ({"durability": "tape"}, "tape"),
        ({"ring_size": "10"}, "64KiB"),
        ({"ring_records": 0}, "ring_records"),
        ({"lease": "1us"}, "lease"),
        ({"config": "no/such.cfg"}, "no/such.cfg"),
    ],
    ids=str,
)
async def test_a_setting_that_cannot_be_used_is_named(bus_directory: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(esp.ConfigError, match=text):
        await esp.init(**{"dir": bus_directory} | settings)


async def test_an_unknown_bus_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(esp.ConfigError, match="did you mean 'embedded'"):
        await esp.init("embeded")
    with pytest.raises(esp.ConfigError, match=r"known are.*embedded"):
        esp.set_pubsub_lib("pigeon")


async def test_a_bus_whose_extra_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_a_vendor.py").write_text("import a_vendor_client\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._BUSES, "vendor", "needs_a_vendor")
    with pytest.raises(esp.NotInstalled, match=r"needs a_vendor_client.*pip install 'esp-pubsub\[vendor\]'") as caught:
        esp.set_pubsub_lib("vendor")
    assert caught.value.extra == "vendor"


async def test_set_pubsub_lib_chooses_for_every_init_that_names_no_bus(bus_directory: Path) -> None:
    (bus_directory / "other").mkdir(mode=0o700)
    esp.set_pubsub_lib("embedded", dir=bus_directory, ring_records=99)
    async with esp.init() as one, esp.init(ring_records=5) as two, esp.init("embedded") as three:
        assert options(one).dir == options(two).dir == options(three).dir == bus_directory
        assert (options(one).ring_records, options(two).ring_records) == (99, 5)
    async with esp.init(dir=bus_directory / "other") as four:
        assert options(four).dir == bus_directory / "other"


async def test_the_environment_chooses_the_bus_where_nothing_else_does(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESP_PUBSUB_BUS", "pigeon")
    with pytest.raises(esp.ConfigError, match="no bus is called 'pigeon'"):
        await esp.init()
    async with esp.init("embedded", dir=bus_directory):
        pass
    esp.set_pubsub_lib("embedded", dir=bus_directory)
    async with esp.init():
        pass


LATE = """
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.transports.embedded import Options, open_bus as open_embedded
tries = []

async def open_bus(options):
    tries.append(options)
    if len(tries) < 3:
        raise BusUnavailable("nobody listens")
    return await open_embedded(options)
"""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """A bus that comes up with the third try: the tries."""
    (tmp_path / "late_bus.py").write_text(LATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._BUSES, "late", "late_bus")
    monkeypatch.delitem(sys.modules, "late_bus", raising=False)
    return importlib.import_module("late_bus").tries  # type: ignore[no-any-return]


async def test_a_bus_that_is_not_there_yet_is_tried_again_for_a_while_and_each_try_is_logged(
    bus_directory: Path, late: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with esp.init("late", dir=bus_directory, connect_timeout="60s") as client:
        assert client.is_here() and len(late) == 3
    assert [record.getMessage()[:54] for record in caplog.records] == [
        "the bus late is not there yet: nobody listens; it is tr"[:54]
    ] * 2
    assert caplog.records[0].esp_bus == "late"  # type: ignore[attr-defined]


async def test_a_bus_is_tried_once_unless_somebody_says_more(
    bus_directory: Path, late: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(esp.BusUnavailable, match="nobody listens"):
        await esp.init("late", dir=bus_directory)
    monkeypatch.setenv("ESP_PUBSUB_CONNECT_TIMEOUT", "60s")
    async with esp.init("late", dir=bus_directory):
        assert len(late) == 3
    monkeypatch.setenv("ESP_PUBSUB_CONNECT_TIMEOUT", "soon")
    with pytest.raises(esp.ConfigError, match="ESP_PUBSUB_CONNECT_TIMEOUT: connect_timeout = 'soon' is not a duration"):
        await esp.init("late", dir=bus_directory)


async def test_shutdown_closes_every_client_and_forgets_the_choice(bus_directory: Path) -> None:
    esp.set_pubsub_lib("embedded", dir=bus_directory, ring_records=99)
    clients = [await esp.init() for _ in range(3)]
    await esp.shutdown()
    assert not any(client.is_here() for client in clients)
    async with esp.init(dir=bus_directory) as client:
        assert options(client).ring_records != 99
    await esp.shutdown()


async def test_shutdown_closes_all_of_them_even_if_one_cannot_be_flushed(bus_directory: Path) -> None:
    clients = [await esp.init(dir=bus_directory) for _ in range(3)]
    for client in clients:
        client.bus = faults = Faults(client.bus)
        faults.hang("confirmed")
        pub = await client.publisher(URL, SCHEMA, options=esp.PublisherOptions(close_timeout=0.01))
        await pub.inject([(1,)])
    try:
        with pytest.raises((esp.DeliveryUnknown, ExceptionGroup)):
            await esp.shutdown()
        assert not any(client.is_here() for client in clients)
    finally:
        for client in clients:
            with contextlib.suppress(esp.DeliveryUnknown):
                await client.aclose()


async def test_shutdown_leaves_clients_of_other_loops_alone(bus_directory: Path) -> None:
    client = await esp.init(dir=bus_directory)
    await asyncio.to_thread(lambda: asyncio.run(esp.shutdown()))
    assert client.is_here()
    await client.aclose()


async def test_two_clients_of_one_directory_share_a_bus_and_of_two_do_not(bus_directory: Path) -> None:
    for name in "ab":
        (bus_directory / name).mkdir(mode=0o700)
    async with (
        esp.init(dir=bus_directory / "a") as one,
        esp.init(dir=bus_directory / "a") as same,
        esp.init(dir=bus_directory / "b") as other,
    ):
        await publish(one, 1)
        async with same.subscriber(URL, side="in", start="earliest") as sub, asyncio.timeout(60):
            assert (await anext(sub)).rows() == [(1,)]
        assert await other.catalog().topics() == []


async def test_one_client_closed_leaves_the_other_of_the_same_directory_working(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as other, other.subscriber(URL, side="in", start="earliest") as sub:
        async with esp.init(dir=bus_directory) as one:
            await publish(one, 1)
        await publish(other, 2)
        async with asyncio.timeout(60):
            assert [(await anext(sub)).rows()[0][0] for _ in range(2)] == [1, 2]


# urls and sides


async def test_sides_default_as_in_sas_and_may_be_given(client: esp.Client) -> None:
    out = TOPIC[:-1] + "O"
    cases: list[tuple[str, str | None, str, str]] = [
        ("", None, TOPIC, out),
        ("", "in", TOPIC, TOPIC),
        ("", "out", out, out),
        ("?side=out", None, out, out),
        ("?side=out", "in", TOPIC, TOPIC),
    ]
    for query, side, published, subscribed in cases:
        async with client.publisher(URL + query, SCHEMA, side=side) as pub:  # type: ignore[arg-type]
            assert pub.topic == published
        async with client.subscriber(URL + query, SCHEMA, side=side) as sub:  # type: ignore[arg-type]
            assert sub.topic == subscribed


@pytest.mark.parametrize(
    "url", ["http://test:1/p/q/w", "dfESP://test:1/p/q", "dfESP://test/p/q/w", URL + "?snapshot=true", URL + "?x=1", ""]
)
async def test_a_url_that_names_no_window_is_refused_at_once(client: esp.Client, url: str) -> None:
    with pytest.raises(esp.ConfigError):
        client.publisher(url, SCHEMA)
    with pytest.raises(esp.ConfigError):
        client.subscriber(url, SCHEMA)


async def test_a_side_or_schema_that_is_none_is_refused_at_once(client: esp.Client) -> None:
    with pytest.raises(esp.AddressError, match="side"):
        client.publisher(URL, SCHEMA, side="sideways")  # type: ignore[arg-type]
    with pytest.raises(esp.SchemaError):
        client.publisher(URL, "id:int64")
    with pytest.raises(esp.SchemaError):
        client.subscriber(URL, "")


async def test_of_two_publishers_with_different_schemas_at_once_one_is_refused(client: esp.Client) -> None:
    for number in range(20):
        url = f"dfESP://test:5555/project/query/window{number}"
        found = await asyncio.gather(
            outcome(client.publisher(url, "id*:int64")), outcome(client.publisher(url, "id*:int32"))
        )
        assert sorted(type(each).__name__ for each in found) == ["Publisher", "SchemaDiffers"]


# closing


async def test_closing_a_client_closes_what_it_opened_and_flushes(bus_directory: Path) -> None:
    client = await esp.init(dir=bus_directory)
    pub = await client.publisher(URL, SCHEMA)
    sub = await client.subscriber(URL, side="in", start="earliest")
    await pub.inject([(1,)])
    await client.aclose()
    await client.aclose()
    assert pub.stats.acked == 1
    for call in (lambda: pub.inject([(2,)]), lambda: anext(sub)):
        with pytest.raises(esp.Closed):
            await call()
    for use in (
        lambda: client.publisher(URL, SCHEMA),
        lambda: client.subscriber(URL),
        client.requests,
        client.catalog,
    ):
        with pytest.raises(esp.Closed, match="call init"):
            use()
    with pytest.raises(esp.Closed):
        await client.query_meta(URL + "?get=schema")


async def test_publishers_and_subscribers_may_be_closed_before_or_after_their_client(bus_directory: Path) -> None:
    for client_first in (True, False):
        client = await esp.init(dir=bus_directory)
        opened: list[Any] = [await client.publisher(URL, SCHEMA), await client.subscriber(URL, side="in")]
        order = [client, *opened] if client_first else [*opened, client]
        for each in order:
            await each.aclose()


async def test_everything_is_closed_even_if_a_publisher_cannot_be_flushed(bus_directory: Path) -> None:
    client = await esp.init(dir=bus_directory)
    client.bus = faults = Faults(client.bus)
    faults.hang("confirmed")
    pubs = [await client.publisher(URL, SCHEMA, options=esp.PublisherOptions(close_timeout=0.01)) for _ in range(3)]
    for pub in pubs:
        await pub.inject([(1,)])
    with pytest.raises(esp.DeliveryUnknown):
        await client.aclose()
    for pub in pubs:
        assert isinstance(await outcome(pub.inject([(1,)])), esp.Closed)
    assert faults.inner._closed  # type: ignore[attr-defined]


async def test_a_client_that_closes_while_something_opens_says_so_there(bus_directory: Path) -> None:
    for turns in range(8):
        client = await esp.init(dir=bus_directory)
        url = f"dfESP://test:5555/project/query/window{turns}"
        opening = [
            asyncio.ensure_future(outcome(client.publisher(url, SCHEMA))),
            asyncio.ensure_future(outcome(client.subscriber(url, SCHEMA))),
        ]
        await ticks(turns)
        await client.aclose()
        for found in await asyncio.gather(*opening):
            if isinstance(found, esp.Publisher | esp.Subscriber):  # it was quicker; then it was closed as well
                with pytest.raises(esp.Closed):
                    await (found.inject([(1,)]) if isinstance(found, esp.Publisher) else anext(found))
            else:
                assert isinstance(found, esp.EspError), repr(found)


async def test_what_was_closed_is_forgotten(client: esp.Client) -> None:
    pub, sub = await client.publisher(URL, SCHEMA), await client.subscriber(URL, SCHEMA)
    await (await pub.inject([(1,)]))
    gone = [weakref.ref(pub), weakref.ref(sub)]
    await pub.aclose()
    await sub.aclose()
    del pub, sub
    await ticks()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


async def test_a_client_of_another_loop_is_refused(client: esp.Client) -> None:
    def elsewhere() -> list[Any]:
        async def all_of_them() -> list[Any]:
            found = []
            calls: list[Callable[[], Any]] = [
                lambda: client.publisher(URL, SCHEMA), lambda: client.subscriber(URL), client.requests,
                lambda: client.query_meta(URL + "?get=schema"), client.aclose,
            ]  # fmt: skip
            for call in calls:
                try:
                    given = call()
                    found.append(await given if asyncio.iscoroutine(given) else given)
                except Exception as error:  # noqa: BLE001
                    found.append(error)
            return found

        return asyncio.run(all_of_them())

    found = await asyncio.to_thread(elsewhere)
    assert [type(error) for error in found] == [esp.WrongOrder] * 5
    assert client.is_here()


async def test_a_client_without_a_running_loop_is_a_named_error(client: esp.Client) -> None:
    def elsewhere() -> Any:
        try:
            return client.publisher(URL, SCHEMA)
        except Exception as error:  # noqa: BLE001
            return error

    assert isinstance(await asyncio.to_thread(elsewhere), esp.WrongOrder)


# metadata


@pytest.fixture
async def cluster(client: esp.Client) -> esp.Client:
    for path, side in (
        ("alpha/q1/source", "in"),
        ("alpha/q1/filter", "out"),
        ("alpha/q2/source", "in"),
        ("beta/q1/w", "out"),
        ("beta/q1/w", "in"),
    ):
        await publish(client, 1, url=f"dfESP://test:5555/{path}", side=side)
    await publish(client, 1, url="dfESP://elsewhere:1/gamma/q/w")
    await client.bus.pipe("test:5555/M/F/group")  # a control topic is no window
    return client


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?get=projects", ["alpha", "beta"]),
        ("/alpha?get=queries", ["q1", "q2"]),
        ("?get=queries", ["alpha/q1", "alpha/q2", "beta/q1"]),
        ("/alpha/q1?get=windows", ["filter", "source"]),
        ("/alpha?get=windows", ["q1/filter", "q1/source", "q2/source"]),
        ("?get=windows", ["alpha/q1/filter", "alpha/q1/source", "alpha/q2/source", "beta/q1/w"]),
        ("/alpha/q1?get=windows_sourceonly", ["source"]),
        ("/beta?get=windows_sourceonly", ["q1/w"]),
        ("/alpha/q1/source?get=schema", ["id*:int64"]),
        ("/alpha/q1/filter?get=schema", ["id*:int64"]),
        ("/nobody?get=queries", []),
    ],
)
async def test_query_meta_answers_from_what_the_bus_knows(cluster: esp.Client, query: str, expected: list[str]) -> None:
    assert await cluster.query_meta("dfESP://test:5555" + query, timeout=0.01) == expected


@pytest.mark.parametrize("query", ["/alpha?get=projects", "/alpha/q1?get=queries", "/alpha/q1/source?get=windows"])
async def test_a_question_asked_too_deep_gives_no_empty_names(cluster: esp.Client, query: str) -> None:
    found = await outcome(cluster.query_meta("dfESP://test:5555" + query, timeout=0.01))
    assert isinstance(found, esp.EspError) or all(found)


async def test_the_schema_of_one_side_may_be_asked_for(client: esp.Client) -> None:
    async with client.publisher(URL, "id*:int32", side="in"), client.publisher(URL, "id*:int64", side="out"):
        for side, schema in (("in", "id*:int32"), ("out", "id*:int64")):
            assert await client.query_meta(f"{URL}?get=schema&side={side}") == [schema]


@pytest.mark.parametrize("query", ["/a/b/c?get=schema", "?get=edges", "?get=rowcount", "?get=projects_pubsubonly"])
async def test_what_nobody_can_answer_ends_in_time(cluster: esp.Client, query: str) -> None:
    with pytest.raises(esp.NoAnswer, match="nobody") as caught:
        await cluster.query_meta("dfESP://test:5555" + query, timeout=0.02)
    assert (caught.value.topic, caught.value.timeout) == (META, 0.02)


@pytest.mark.parametrize("query", ["", "/a?get=schema", "?get=nothing"])
async def test_a_question_that_cannot_be_asked_is_refused(client: esp.Client, query: str) -> None:
    with pytest.raises(esp.ConfigError):
        await client.query_meta("dfESP://test:5555" + query)
