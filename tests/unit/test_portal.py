import asyncio
import os
import subprocess
import sys
import threading

import pytest

import esp_pubsub as esp
from esp_pubsub._portal import Portal

URL = "dfESP://host:5555/project/query/window"


def test_a_program_without_a_loop_publishes_and_reads_through_a_portal(bus_directory) -> None:
    async def opened() -> esp.Client:
        return await esp.init(dir=bus_directory)

    async def one_block(client: esp.Client) -> esp.Block:
        async with client.publisher(URL, "id*:int64") as publisher:
            await (await publisher.inject([(7,)]))
        async with client.subscriber(URL, side="in", start="earliest") as subscriber:
            return await anext(subscriber)

    with Portal() as portal:
        client = portal.call(opened)
        assert portal.call_within(60, one_block, client).rows() == [(7,)]
        portal.call(client.aclose)


def test_a_call_past_its_deadline_is_cancelled_and_says_so() -> None:
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with Portal() as portal:
        with pytest.raises(TimeoutError):
            portal.call_within(0.01, forever)
        assert ended.wait(60)


def test_an_error_of_the_coroutine_reaches_the_caller() -> None:
    async def wrong() -> None:
        raise ValueError("no")

    with Portal() as portal, pytest.raises(ValueError, match="no"):
        portal.call(wrong)


def test_closing_ends_a_call_that_another_thread_waits_for() -> None:
    begun, outcome = threading.Event(), []

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            portal.call(forever)
        except esp.Closed as closed:
            outcome.append(closed)

    portal = Portal()
    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(60)
    portal.close()
    thread.join(60)
    assert len(outcome) == 1


def test_a_closed_portal_and_a_call_from_its_own_loop_are_named_errors() -> None:
    async def again(portal: Portal) -> None:
        portal.call(asyncio.sleep, 0)

    with Portal() as portal, pytest.raises(esp.WrongOrder):
        portal.call(again, portal)
    with pytest.raises(esp.Closed):
        portal.call(asyncio.sleep, 0)


def test_a_forked_child_is_told_to_make_its_own() -> None:
    script = """
import asyncio, os, sys
from esp_pubsub import WrongOrder
from esp_pubsub._portal import Portal
portal = Portal()
child = os.fork()
if child == 0:
    try:
        portal.call(asyncio.sleep, 0)
    except WrongOrder:
        os._exit(7)
    os._exit(1)
status = os.waitpid(child, 0)[1]
portal.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    assert subprocess.run([sys.executable, "-c", script], timeout=60, env=environment).returncode == 7


def test_a_portal_whose_loop_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(main):
        main.close()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "run", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Portal()


def test_a_call_that_is_being_handed_over_holds_up_the_end_of_the_portal() -> None:
    portal = Portal()
    closing = threading.Thread(target=portal.close)
    with portal._handing:  # as a call does between its look and its place on the loop
        closing.start()
        closing.join(0.05)
        assert closing.is_alive() and not portal._closed
    closing.join(60)
    with pytest.raises(esp.Closed):
        portal.call(asyncio.sleep, 0)
