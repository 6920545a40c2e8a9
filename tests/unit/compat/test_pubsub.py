import asyncio
import ctypes
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.compat import modelingApi as m
from esp_pubsub.compat import pubsubApi as p
from esp_pubsub.requests import serve

ENGINE = "dfESP://host:5555"
WINDOW = f"{ENGINE}/project/query/window"
READ = f"{WINDOW}?snapshot=false?side=in"
FIELDS = "id*:int64,name:string"


def block(*numbers: int, fields: str = FIELDS) -> Any:
    schema, vector = m.SchemaCreate("window", fields), m.EventVCreate()
    for number in numbers:
        line = f"i,n,{number}" + ",IBM" * (fields == FIELDS)
        assert m.EventVPushback(vector, m.EventCreate2(schema, line, "")) == 1
    return m.EventBlockNew1(vector, m.ebt_NORMAL)


def connected(url: str = WINDOW, failed: Any = None) -> Any:
    publisher = p.PublisherStart(url, p.ERRCBFUNC(failed) if failed else None, None)
    assert p.Connect(publisher) == 1
    return publisher


class Heard:
    """What a callback was called with, for whoever waits for it."""

    def __init__(self, wanted: int) -> None:
        self.calls: list[Any] = []
        self.all = threading.Event()
        self._wanted = wanted

    def add(self, call: Any) -> None:
        self.calls.append(call)
        if len(self.calls) >= self._wanted:
            self.all.set()

    def wait(self) -> list[Any]:
        assert self.all.wait(10)
        return self.calls


def test_blocks_reach_the_callback_one_by_one_with_their_schema_ids_and_context(library: Path) -> None:
    heard, context = Heard(2), {"of": "the script"}

    def received(events: Any, schema: Any, ctx: Any) -> None:
        lines = [m.EventToStringCSV(e, schema, True, False) for e in events.events]
        heard.add((lines, m.SchemaGetString(schema), m.EventBlockGetMsgId(events), ctx, threading.current_thread()))

    subscriber = p.SubscriberStart(READ, p.SUBCBFUNC(received), p.ERRCBFUNC(print), context)
    assert p.Connect(subscriber) == 1
    publisher, first = connected(), block(1)
    assert p.PublisherInject(publisher, first) == 1
    assert p.PublisherInject(publisher, block(2, 3)) == 1
    (one, fields, id, ctx, thread), (two, *_) = heard.wait()
    assert (one, two) == (["I,N:1,IBM"], ["I,N:2,IBM", "I,N:3,IBM"])
    assert (fields, id, m.EventBlockGetMsgId(first)) == (FIELDS, 1, 1)
    assert ctx is context and thread is not threading.current_thread()
    assert (p.Stop(publisher, 1), p.Disconnect(subscriber, 1), p.Shutdown()) == (1, 1, 1)
    assert not thread.is_alive()


def test_opcodes_flags_and_the_kind_of_block_travel(library: Path) -> None:
    heard = Heard(1)
    subscriber = p.SubscriberStart(READ, lambda events, *_: heard.add(events), None, None)
    assert p.Connect(subscriber) == 1
    schema, vector = m.SchemaCreate("w", FIELDS), m.EventVCreate()
    for line in ("p,n,1,a", "u,p,2,", "d,n,3,"):
        m.EventVPushback(vector, m.EventCreate2(schema, line, None))
    assert p.PublisherInject(connected(), m.EventBlockNew1(vector, m.ebt_TRANS)) == 1
    (events,) = heard.wait()
    lines = [m.EventToStringCSV(m.EventBlockGetEvent(events, i), schema) for i in range(m.EventBlockGetSize(events))]
    assert lines == ["P,N:1,a", "U,P:2,", "D,N:3,"]
    assert m.EventBlockGetType(events) == m.ebt_TRANS


def test_a_callback_may_publish_what_it_got_and_stop_its_own_subscriber(library: Path) -> None:
    publisher = connected(f"{ENGINE}/project/query/copy")
    stopped = Heard(1)

    def received(events: Any, schema: Any, ctx: Any) -> None:
        stopped.add((p.PublisherInject(publisher, events), p.Stop(subscriber, 1), p.Stop(subscriber, 1)))

    subscriber = p.SubscriberStart(READ, received, None, None)
    assert p.Connect(subscriber) == 1
    assert p.PublisherInject(connected(), block(1)) == 1
    assert stopped.wait() == [(1, 1, 0)]
    subscriber._thread.join(5)
    assert not subscriber._thread.is_alive()


def test_shutdown_lets_callbacks_publish_what_came_before_publishers_end(library: Path) -> None:
    publishers = [connected(f"{ENGINE}/project/query/copy{n}") for n in range(5)]
    begun, results = Heard(1), []

    def received(events: Any, schema: Any, ctx: Any) -> None:
        begun.add(events)
        while not subscriber.stopped:
            begun.all.wait(0)
        results.extend(p.PublisherInject(each, events) for each in publishers)

    subscriber = p.SubscriberStart(READ, received, None, None)
    assert p.Connect(subscriber) == 1
    assert p.PublisherInject(connected(), block(1)) == 1
    begun.wait()
    assert p.Shutdown() == 1
    assert results == [1] * 5


@pytest.mark.parametrize(
    ("error", "expected"),
    [(esp.BusUnavailable("the link is down"), [1, 2, 3]), (esp.Closed("by a test"), [1])],
    ids=["the link is lost", "it fails for good"],
)
def test_a_confirmation_that_fails_ends_a_subscriber_only_if_it_fails_for_good(
    error: esp.EspError, expected: list[int], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, failures = Heard(len(expected)), Heard(1)
    group = p._library.portal.call(p._library.client)  # type: ignore[union-attr]
    monkeypatch.setattr(group, "_group", "readers")  # as a cfg file says
    subscriber = p.SubscriberStart(
        READ, lambda events, *_: heard.add(m.EventBlockGetMsgId(events)), lambda *why: failures.add(why[:2]), None
    )
    assert p.Connect(subscriber) == 1
    confirm, errors = subscriber._subscriber.confirm, [error]

    async def failing(given: Any) -> None:
        if errors:
            raise errors.pop()
        await confirm(given)

    monkeypatch.setattr(subscriber._subscriber, "confirm", failing)
    publisher = connected()
    assert [p.PublisherInject(publisher, block(n)) for n in (1, 2, 3)] == [1, 1, 1]
    assert heard.wait() == expected
    if len(expected) == 1:
        assert failures.wait() == [(p.pubsubFail_APIFAIL, p.pubsubCode_READEVENTS)]
        subscriber._thread.join(5)
        assert subscriber._subscriber._closed, "or it would keep its group's place"
    assert p.Shutdown() == 1


def test_a_callback_that_raises_is_logged_and_the_next_block_comes(
    library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard(2)

    def received(events: Any, schema: Any, ctx: Any) -> None:
        heard.add(events)
        raise ValueError("of the script")

    assert p.Connect(p.SubscriberStart(READ, received, None, None)) == 1
    publisher = connected()
    assert [p.PublisherInject(publisher, block(n)) for n in (1, 2)] == [1, 1]
    heard.wait()
    assert p.Shutdown() == 1
    assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [ValueError, ValueError]


def test_callbacks_made_by_ctypes_get_numbers_that_modelingApi_knows(library: Path) -> None:
    heard = Heard(1)
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

    def received(events: int, schema: int, ctx: int) -> None:
        text = m.EventToStringCSV(m.EventBlockGetEvent(events, 0), schema, True, False)
        heard.add((text, m.SchemaGetString(schema), ctx))

    callback = prototype(received)
    assert p.Connect(p.SubscriberStart(READ, callback, None, ctypes.c_void_p(77))) == 1
    assert p.PublisherInject(connected(), block(1)) == 1
    assert heard.wait() == [("I,N:1,IBM", FIELDS, 77)]


def test_a_context_in_a_py_object_comes_back_as_the_pointer_that_it_is(library: Path) -> None:
    heard, context = Heard(1), {"of": "the script"}

    def received(events: Any, schema: Any, ctx: Any) -> None:
        heard.add(ctypes.cast(ctx, ctypes.py_object).value)

    assert p.Connect(p.SubscriberStart(READ, received, None, ctypes.py_object(context))) == 1
    assert p.PublisherInject(connected(), block(1)) == 1
    assert heard.wait()[0] is context


@pytest.mark.parametrize(("wait", "expected"), [(1, [1, 2, 3, 4]), (0, [1, 2])])
def test_stop_lets_blocks_that_came_reach_the_callback_only_if_told_to(
    library: Path, wait: int, expected: list[int]
) -> None:
    first, second, rest_is_there, heard = Heard(1), Heard(2), threading.Event(), []

    def received(events: Any, schema: Any, ctx: Any) -> None:
        heard.append(events.id)
        first.add(events.id)
        second.add(events.id)
        if events.id == 1:
            assert rest_is_there.wait(10)
        while events.id == 2 and not subscriber.stopped:
            rest_is_there.wait(0)

    subscriber = p.SubscriberStart(READ, received, None, None)
    assert p.Connect(subscriber) == 1
    publisher = connected()
    assert p.PublisherInject(publisher, block(0)) == 1
    first.wait()  # it was read alone, and keeps the callback
    assert [p.PublisherInject(publisher, block(n)) for n in range(1, 4)] == [1] * 3
    assert p.Stop(publisher, 1) == 1  # the others are on the bus, and are read in one go
    rest_is_there.set()
    second.wait()
    assert p.Stop(subscriber, wait) == 1
    assert heard == expected


def test_an_error_callback_hears_what_the_bus_did_not_do(library: Path) -> None:
    heard = Heard(1)
    publisher = p.PublisherStart(WINDOW, p.ERRCBFUNC(lambda *call: heard.add(call)), "ctx")
    assert p.PublisherInject(publisher, block(1)) == 0
    assert heard.wait() == [(p.pubsubFail_APIFAIL, p.pubsubCode_CLIENTNOTCONNECTED, "ctx")]
    failure, code, _ = heard.calls[0]
    assert (p.DecodeFailure(failure), p.DecodeFailureCode(code)) == (
        "pubsubFail_APIFAIL",
        "pubsubCode_CLIENTNOTCONNECTED",
    )


def test_queries_answer_from_what_was_published_with_windows_as_bare_names(library: Path) -> None:
    publisher = connected()
    assert p.PublisherInject(publisher, block(1)) == 1
    assert p.Stop(publisher, 1) == 1
    answers = {
        f"{ENGINE}?get=projects": ["project"],
        f"{ENGINE}/project?get=windows_sourceonly": ["window"],
        f"{WINDOW}?get=schema": [FIELDS],
    }
    for url, expected in answers.items():
        vector = p.QueryMeta(url)
        assert [m.StringVGet(vector, i) for i in range(m.StringVSize(vector))] == expected
    assert p.QueryMeta(f"{ENGINE}/project/query/other?get=schema") is None


def test_an_engine_that_serves_the_metadata_name_is_asked(library: Path) -> None:
    asked: list[Any] = []

    async def engine(question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question)
        return {"answer": ["window"]} if question.get("get") == "model" else {}

    async def serving() -> None:
        client = await esp.init()
        try:
            await serve(client.requests(), "host:5555/M", engine)
        finally:
            await client.aclose()

    thread = threading.Thread(target=_quietly, args=(p._library.portal.call, serving))  # type: ignore[union-attr]
    thread.start()
    publisher = connected()
    assert p.GetModel(f"{ENGINE}/project") == ["window"]
    assert p.PersistModel(ENGINE, "/shared/path") == 1
    assert p.QuiesceProject(f"{ENGINE}/project", publisher) == 1
    assert asked == [
        {"get": "model", "url": f"{ENGINE}/project"},
        {"do": "persist", "path": "/shared/path", "url": ENGINE},
        {"do": "quiesce", "url": f"{ENGINE}/project"},
    ]
    assert p.Shutdown() == 1
    thread.join(5)


def _quietly(call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except esp.EspError:
        return


RETURNS: dict[str, tuple[Any, Any]] = {
    # after Init, with what is right
    "SetPubsubLib after Init": (lambda: p.SetPubsubLib(p.ESP_PSLIB_NATIVE), 0),
    "Init again": (lambda: p.Init(m.ll_Off, None), 1),
    "PublisherStart": (lambda: p.PublisherStart(WINDOW, None, None) is not None, True),
    "PublisherStart in bytes": (lambda: p.PublisherStart(WINDOW.encode(), None, None) is not None, True),
    "PublisherStart of no window": (lambda: p.PublisherStart(f"{ENGINE}/project", None, None), None),
    "PublisherStart of no URL": (lambda: p.PublisherStart("http://host:1/a/b/c", None, None), None),
    "PublisherStart of nothing": (lambda: p.PublisherStart(None, None, None), None),
    "SubscriberStart": (lambda: p.SubscriberStart(READ, print, None, None) is not None, True),
    "SubscriberStart with a snapshot": (lambda: p.SubscriberStart(f"{WINDOW}?snapshot=true", print, None), None),
    "SubscriberStart without a callback": (lambda: p.SubscriberStart(READ, None, None, None), None),
    "Connect": (lambda: p.Connect(p.PublisherStart(WINDOW, None, None)), 1),
    "Connect of nothing": (lambda: p.Connect(None), 0),
    "Connect twice": (lambda: p.Connect(connected()), 0),
    "PublisherInject": (lambda: p.PublisherInject(connected(), block(1)), 1),
    "PublisherInject into nothing": (lambda: p.PublisherInject(None, block(1)), 0),
    "PublisherInject of nothing": (lambda: p.PublisherInject(connected(), None), 0),
    "PublisherInject before Connect": (lambda: p.PublisherInject(p.PublisherStart(WINDOW, None), block(1)), 0),
    "PublisherInject after EventBlockDestroy": (lambda: p.PublisherInject(connected(), _destroyed()), 0),
    "PublisherInject after Stop": (lambda: p.PublisherInject(_stopped(), block(1)), 0),
    "PublisherInject of another schema": (lambda: _both(connected(), block(1), block(1, fields="id*:int64")), 0),
    "PublisherInject into a subscriber": (lambda: p.PublisherInject(p.SubscriberStart(READ, print, None), block(1)), 0),
    "Stop": (lambda: p.Stop(connected(), 1), 1),
    "Stop at once": (lambda: p.Stop(connected(), 0), 1),
    "Stop twice": (lambda: p.Stop(_stopped(), 1), 0),
    "Stop before Connect": (lambda: p.Stop(p.PublisherStart(WINDOW, None), 1), 1),
    "Disconnect": (lambda: p.Disconnect(connected(), 1), 1),
    "Disconnect after Stop": (lambda: p.Disconnect(_stopped(), 1), 0),
    "Disconnect of nothing": (lambda: p.Disconnect(None, 1), 0),
    "SetBufferSize": (lambda: p.SetBufferSize(p.PublisherStart(WINDOW, None), 16), 1),
    "SetBufferSize of a connected client": (lambda: p.SetBufferSize(connected(), 16), 0),
    "SetBufferSize of no size": (lambda: p.SetBufferSize(p.PublisherStart(WINDOW, None), 0), 0),
    "SubscriberMaxQueueSize": (lambda: p.SubscriberMaxQueueSize(ENGINE, 128, 1), 1),
    "SubscriberMaxQueueSize that drops the slow": (lambda: p.SubscriberMaxQueueSize(ENGINE, 128, 0), 0),
    "SetTokenLocation": (lambda: p.SetTokenLocation("/etc/token"), 0),
    "QueryMeta of a window nobody knows": (lambda: p.QueryMeta(f"{WINDOW}?get=schema"), None),
    "QueryMeta of projects on an empty bus": (lambda: p.QueryMeta(f"{ENGINE}?get=projects"), []),
    "QueryMeta that asks nothing": (lambda: p.QueryMeta(ENGINE), None),
    "QueryMeta that asks for what is not known": (lambda: p.QueryMeta(f"{ENGINE}?get=weather"), None),
    "GetModel without an engine": (lambda: p.GetModel(ENGINE), None),
    "PersistModel without an engine": (lambda: p.PersistModel(ENGINE, "/path"), 0),
    "QuiesceProject without an engine": (lambda: p.QuiesceProject(f"{ENGINE}/project", connected()), 0),
    "GDPublisherStart": (lambda: p.GDPublisherStart(WINDOW, None, None, "gd.cfg", p.GDCBFUNC(print)), None),
    "GDSubscriberStart": (lambda: p.GDSubscriberStart(READ, print, None, None, "gd.cfg"), None),
    "GDSubscriberAck": (lambda: p.GDSubscriberAck(None, None), 0),
    "InitProtobuff": (lambda: p.InitProtobuff("a.proto", "Message", m.SchemaCreate("w", FIELDS)), None),
    "ProtobuffToEb": (lambda: p.ProtobuffToEb(None, b""), None),
    "EbToProtobuff": (lambda: p.EbToProtobuff(None, block(1)), None),
    "InitJson of nothing": (lambda: p.InitJson(None), None),
    "JsonToEb of no JSON": (lambda: p.JsonToEb(p.InitJson(m.SchemaCreate("w", FIELDS)), "{"), None),
    "JsonToEb of two blocks": (lambda: p.JsonToEb(p.InitJson(m.SchemaCreate("w", FIELDS)), _TWO), None),
    "EbToJson of nothing": (lambda: p.EbToJson(p.InitJson(m.SchemaCreate("w", FIELDS)), None), None),
    "DecodeFailure": (lambda: p.DecodeFailure(p.pubsubFail_THREADFAIL), "pubsubFail_THREADFAIL"),
    "DecodeFailure of none": (lambda: p.DecodeFailure(99), "unknown failure 99"),
    "DecodeFailureCode": (lambda: p.DecodeFailureCode(p.pubsubCode_NOERROR), "pubsubCode_NOERROR"),
    "DecodeFailureCode of none": (lambda: p.DecodeFailureCode(99), "unknown failure code 99"),
    "Shutdown": (lambda: p.Shutdown(), 1),
}  # fmt: skip
_TWO = '[[{"id": 1}], [{"id": 2}]]'


def _destroyed() -> Any:
    found = block(1)
    m.EventBlockDestroy(found)
    return found


def _stopped() -> Any:
    publisher = connected()
    assert p.Stop(publisher, 1) == 1
    return publisher


def _both(publisher: Any, first: Any, second: Any) -> Any:
    assert p.PublisherInject(publisher, first) == 1
    return p.PublisherInject(publisher, second)


@pytest.mark.parametrize("case", RETURNS)
def test_what_every_function_returns(case: str, library: Path, caplog: pytest.LogCaptureFixture) -> None:
    call, expected = RETURNS[case]
    with caplog.at_level(logging.ERROR, "esp_pubsub.compat"):
        assert call() == expected
    assert len(caplog.records) == (1 if expected is None or expected == 0 else 0), caplog.messages


BEFORE_INIT: dict[str, tuple[Any, Any]] = {
    "SetPubsubLib": (lambda: p.SetPubsubLib(p.ESP_PSLIB_NATIVE), 1),
    "SetPubsubLib of what has no driver": (lambda: p.SetPubsubLib(p.ESP_PSLIB_TERVELA), 0),
    "SetPubsubLib of nothing": (lambda: p.SetPubsubLib(99), 0),
    "PublisherStart": (lambda: p.PublisherStart(WINDOW, None, None), None),
    "SubscriberStart": (lambda: p.SubscriberStart(READ, print, None, None), None),
    "SubscriberMaxQueueSize": (lambda: p.SubscriberMaxQueueSize(ENGINE, 1, 1), 0),
    "QueryMeta": (lambda: p.QueryMeta(f"{ENGINE}?get=projects"), None),
    "Shutdown": (lambda: p.Shutdown(), 0),
}


@pytest.mark.parametrize("case", BEFORE_INIT)
def test_before_init_nothing_works_but_the_choice_of_the_bus(case: str, compat_bus: Path) -> None:
    call, expected = BEFORE_INIT[case]
    assert call() == expected


def test_a_library_that_was_shut_down_begins_again(library: Path) -> None:
    old = connected()
    assert p.Shutdown() == 1
    assert p.PublisherInject(old, block(1)) == 0
    assert p.Init(m.ll_Info, None) == 1
    assert p.PublisherInject(connected(), block(1)) == 1


def test_a_bus_that_cannot_be_reached_is_a_failure_of_connect_and_may_be_tried_again(
    compat_bus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compat_bus / "file").write_text("no directory")
    monkeypatch.setenv("ESP_PUBSUB_DIR", str(compat_bus / "file"))
    assert p.Init(m.ll_Info, None) == 1
    publisher = p.PublisherStart(WINDOW, None, None)
    assert p.Connect(publisher) == 0
    monkeypatch.setenv("ESP_PUBSUB_DIR", str(compat_bus))
    assert p.Connect(publisher) == 1
    assert p.PublisherInject(publisher, block(1)) == 1


def test_blocks_are_json_and_back(library: Path) -> None:
    converter = p.InitJson(m.SchemaCreate("w", FIELDS))
    found = p.JsonToEb(converter, '[[{"id": 1, "name": "IBM"}, {"id": 2, "@opcode": "delete"}]]')
    assert [m.EventToStringCSV(event) for event in found.events] == ["I,N:1,IBM", "D,N:2,"]
    again = p.JsonToEb(converter, p.EbToJson(converter, found))
    assert [m.EventToStringCSV(event) for event in again.events] == ["I,N:1,IBM", "D,N:2,"]


def test_many_threads_publish_through_one_client(library: Path) -> None:
    publisher, blocks = connected(), [[block(n) for n in range(20)] for _ in range(4)]
    together, results = threading.Barrier(4), []

    def inject(mine: list[Any]) -> None:
        together.wait(5)
        results.extend(p.PublisherInject(publisher, each) for each in mine)

    threads = [threading.Thread(target=inject, args=(mine,)) for mine in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [1] * 80
    assert {m.EventBlockGetMsgId(each) for mine in blocks for each in mine} == set(range(1, 81))


LARGE = 40 << 20
ENDS_AT_ONCE = f"""
from esp_pubsub.compat import modelingApi as m, pubsubApi as p
assert p.Init(m.ll_Warn, None) == 1
publisher = p.PublisherStart({WINDOW!r}, None, None)
assert p.Connect(publisher) == 1
schema, vector = m.SchemaCreate("w", {FIELDS!r}), m.EventVCreate()
m.EventVPushback(vector, m.Event(schema.schema, (1, "x" * {LARGE})))
assert p.PublisherInject(publisher, m.EventBlockNew1(vector, m.ebt_NORMAL)) == 1
"""


async def test_a_script_that_merely_ends_loses_nothing_of_what_it_injected(compat_bus: Path) -> None:
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", ENDS_AT_ONCE], check=True, timeout=15)
    async with esp.init() as client, client.subscriber(READ, start="earliest") as subscriber, asyncio.timeout(60):
        assert len((await anext(subscriber)).rows()[0][1]) == LARGE
