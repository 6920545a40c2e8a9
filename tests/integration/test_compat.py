"""Scripts for the vendor's Python API, as people have written them, with nothing changed but the import."""

import logging
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from esp_pubsub.compat import modelingApi, pubsubApi
from tests.support.kafka import Kafka

PUBLISHER = """
import sys
from esp_pubsub.compat import modelingApi, pubsubApi

ENGINE = 'dfESP://localhost:9901'
URL = ENGINE + '/robot/joints/temperature'
FIELDS = 'seq*:int64,at:stamp,joint:string,degrees:double,price:money'

def failed(failure, code, ctx):
    if failure == pubsubApi.pubsubFail_APIFAIL and code == pubsubApi.pubsubCode_CLIENTEVENTSQUEUED:
        return
    print(pubsubApi.DecodeFailure(failure), pubsubApi.DecodeFailureCode(code))

failed_func = pubsubApi.ERRCBFUNC(failed)
if pubsubApi.Init(modelingApi.ll_Error, None) == 0:
    sys.exit('no library')
names = pubsubApi.QueryMeta(ENGINE + '/robot?get=windows_sourceonly')
if names is None:
    sys.exit('no project')
known = [modelingApi.StringVGet(names, i) for i in range(0, modelingApi.StringVSize(names))]
modelingApi.StringVFree(names)
if 'temperature' not in known:
    sys.exit('no window')
answer = pubsubApi.QueryMeta(URL + '?get=schema') if sys.argv[1] != '0' else None
fields = FIELDS if answer is None else modelingApi.StringVGet(answer, 0)
modelingApi.StringVFree(answer)
schema = modelingApi.SchemaCreate('temperature', fields)
client = pubsubApi.PublisherStart(URL, failed_func, None)
if client is None or pubsubApi.Connect(client) != 1:
    sys.exit('no connection')
for number in range(int(sys.argv[1]), int(sys.argv[2])):
    csv = 'i, n, %d, 2026-11-18 20:15:00.%06d, "knee, left", %s, 10.50' % (number, number, number / 4)
    event = modelingApi.EventCreate2(schema, csv, '%Y-%m-%d %H:%M:%S')
    events = modelingApi.EventVCreate()
    modelingApi.EventVPushback(events, event)
    block = modelingApi.EventBlockNew1(events, modelingApi.ebt_NORMAL)
    ret = pubsubApi.PublisherInject(client, block)
    modelingApi.EventBlockDestroy(block)
    if ret != 1:
        sys.exit('not injected')
"""
ENDED = """
pubsubApi.Stop(client, True)
pubsubApi.Shutdown()
"""

SUBSCRIBER = """
import logging
import sys
import threading
from esp_pubsub.compat import modelingApi, pubsubApi

enough = threading.Event()

class Counter:
    seen = 0

def received(block, schema, counter):
    for i in range(modelingApi.EventBlockGetSize(block)):
        event = modelingApi.EventBlockGetEvent(block, i)
        print(modelingApi.EventToStringCSV(event, schema, True, False), flush=True)
        counter.seen += 1
    if counter.seen >= int(sys.argv[1]):
        enough.set()

def failed(failure, code, counter):
    print(pubsubApi.DecodeFailure(failure), pubsubApi.DecodeFailureCode(code))

received_func, failed_func = pubsubApi.SUBCBFUNC(received), pubsubApi.ERRCBFUNC(failed)
if not pubsubApi.Init(modelingApi.ll_Warn, None):
    sys.exit('no library')
logging.getLogger().addHandler(modelingApi.getLoggingHandler())
url = 'dfESP://localhost:9901/robot/joints/temperature?snapshot=false?side=in'
counter = Counter()
client = pubsubApi.SubscriberStart(url, received_func, failed_func, counter)
if client is None or not pubsubApi.Connect(client):
    sys.exit('no connection')
print('ready', flush=True)
enough.wait(30)
"""
STOPPED = """
print(pubsubApi.Stop(client, True), pubsubApi.Shutdown(), flush=True)
"""


class Script:
    """One of them in a process; its lines as they come."""

    def __init__(self, code: str, directory: Path, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
            env=os.environ | {"ESP_PUBSUB_DIR": str(directory)}, cwd=directory, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._pump)
        self._thread.start()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip())

    def line(self) -> str:
        return self._lines.get(timeout=20)

    def ended(self) -> tuple[int, str]:
        """Its exit code, and what it said on the standard error."""
        try:
            self._process.wait(20)
        finally:
            self.kill()
        return self._process.returncode, self._errors

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join(5)
        if not self._process.stderr.closed:  # type: ignore[union-attr]
            with self._process.stdout, self._process.stderr:  # type: ignore[union-attr]
                self._errors = self._process.stderr.read()  # type: ignore[union-attr]


def expected(number: int) -> str:
    return f'I,N:{number},{1795032900000000 + number},"knee, left",{number / 4},10.5'


@pytest.mark.parametrize(
    ("publisher_end", "subscriber_end"), [(ENDED, STOPPED), ("", "")], ids=["stopped", "merely ended"]
)
def test_a_publisher_script_and_a_subscriber_script_work_together(
    publisher_end: str, subscriber_end: str, bus_directory: Path
) -> None:
    subscriber = Script(SUBSCRIBER + subscriber_end, bus_directory, 400)
    try:
        assert subscriber.line() == "ready"
        for first in (0, 200):  # the second one asks for the schema, and gets it
            assert Script(PUBLISHER + publisher_end, bus_directory, first, first + 200).ended() == (0, "")
        assert [subscriber.line() for _ in range(400)] == [expected(number) for number in range(400)]
        assert not subscriber_end or subscriber.line() == "1 1"
        assert subscriber.ended() == (0, "")
    finally:
        subscriber.kill()


def test_a_script_that_chooses_kafka_finds_its_broker_in_kafka_cfg(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kafka.cfg").write_text(f'kafka\n{{\n    hostport = "{kafka.bootstrap}"\n}}\nsas\n{{\n}}\n')
    monkeypatch.chdir(tmp_path)
    level, came, lines = logging.getLogger("esp_pubsub").level, threading.Event(), []
    url = "dfESP://compat:9901/robot/joints/temperature"

    def received(block: Any, schema: Any, ctx: Any) -> None:
        lines.append(modelingApi.EventToStringCSV(modelingApi.EventBlockGetEvent(block, 0), schema, True, False))
        came.set()

    try:
        assert pubsubApi.SetPubsubLib(pubsubApi.ESP_PSLIB_KAFKA) == 1
        assert pubsubApi.Init(modelingApi.ll_Warn, None) == 1
        subscriber = pubsubApi.SubscriberStart(f"{url}?side=in", pubsubApi.SUBCBFUNC(received), None, None)
        publisher = pubsubApi.PublisherStart(url, None, None)
        assert (pubsubApi.Connect(subscriber), pubsubApi.Connect(publisher)) == (1, 1)
        schema, events = modelingApi.SchemaCreate("temperature", "seq*:int64"), modelingApi.EventVCreate()
        modelingApi.EventVPushback(events, modelingApi.EventCreate2(schema, "i,n,7", None))
        assert pubsubApi.PublisherInject(publisher, modelingApi.EventBlockNew1(events, modelingApi.ebt_NORMAL)) == 1
        assert pubsubApi.Stop(publisher, True) == 1
        assert came.wait(20)
        assert pubsubApi.Stop(subscriber, True) == 1
    finally:
        assert pubsubApi.Shutdown() == 1
        logging.getLogger("esp_pubsub").setLevel(level)
    assert lines == ["I,N:7"]
