"""The election by ZooKeeper, against the real one: links, servers and members are harmed, and no node is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from esp_pubsub.transports.zookeeper import election, open_election
from esp_pubsub.transports.zookeeper.election import ZooKeeperElection
from esp_pubsub.transports.zookeeper.session import Session
from tests.integration.members import never, until
from tests.support.contests import Probe, this_process, watched
from tests.support.proxy import Proxy
from tests.support.server import HOST
from tests.support.zookeeper import ZooKeeper, rounds

SESSION = 1.2
GAP = SESSION + 1.5  # a session, its rounding by the server, and what follows; the figure is the bench's
LONG = 30.0  # a session that no stall of the machine ends, and a measure for what must not wait for its end
WAITS = 10  # how often something here waits for its turn, at most, where its time is measured
CALM = f"?session={LONG:g}s"
CLOSE = 4.0
_numbers = itertools.count()
PROCESS = """
import asyncio, sys, time
from esp_pubsub.transports.zookeeper import open_election

def say(*what):
    print(time.monotonic(), *what, flush=True)

async def main(place, group):
    election = open_election(place, group, "a process")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(election.run())
        while True:
            say("leads", await election.campaign())
            say(await election.watch())

asyncio.run(main(*sys.argv[1:]))
"""


class Member:
    """A member of a group, and the task that campaigns or watches for it."""

    def __init__(self, place: str, group: str, name: str) -> None:
        self.election = open_election(place, group, name)
        assert isinstance(self.election, ZooKeeperElection)
        self.terms: list[int] = []
        self.since = 0.0
        self.running: asyncio.Task[None]
        self.campaigning: asyncio.Task[int] = asyncio.get_running_loop().create_future()  # type: ignore[assignment]

    def campaign(self) -> asyncio.Task[int]:
        self.campaigning = asyncio.create_task(self._campaign())
        return self.campaigning

    async def _campaign(self) -> int:
        self.terms.append(await self.election.campaign())
        self.since = time.monotonic()
        return self.terms[-1]

    async def leads(self, seconds: float = 60.0) -> int:
        async with asyncio.timeout(seconds):
            return await self.campaigning

    async def watch(self, seconds: float = 60.0) -> str:
        async with asyncio.timeout(seconds):
            return await self.election.watch()

    async def cancel(self) -> None:
        self.campaigning.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([self.campaigning])

    async def close(self) -> float:
        begun = time.monotonic()
        self.running.cancel()
        await asyncio.wait([self.running])
        return time.monotonic() - begun


@contextlib.asynccontextmanager
async def member(place: str, group: str, name: str = "m", *, campaign: bool = True) -> AsyncIterator[Member]:
    made = Member(place, group, name)
    made.running = asyncio.create_task(made.election.run())
    if campaign:
        made.campaign()
    try:
        yield made
    finally:
        await made.close()
        await made.cancel()


@contextlib.asynccontextmanager
async def process(place: str, group: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """A member in a process of its own. The function waits for the next thing it says: when, and what."""
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, place, group, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )

    async def said() -> tuple[float, str]:
        assert made.stdout is not None
        async with asyncio.timeout(60):
            when, _, what = (await made.stdout.readline()).decode().strip().partition(" ")
        return float(when), what

    try:
        yield made, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.kill()
        await made.wait()


class View:
    """What stands in ZooKeeper."""

    def __init__(self, client: KazooClient) -> None:
        self.client = client

    def nodes(self, group: str, root: str = "/ESP") -> list[str]:
        path = f"{root}/{group}"
        return sorted(self.client.get_children(path)) if self.client.exists(path) else []

    def names(self, group: str) -> list[str]:
        return [self.client.get(f"/ESP/{group}/{node}")[0].decode() for node in self.nodes(group)]


@pytest.fixture
def view(zookeeper: Any) -> Iterator[View]:
    client = KazooClient(zookeeper.hosts, timeout=30)
    client.start()
    yield View(client)
    client.stop()
    client.close()


@pytest.fixture
def group() -> str:
    return f"group-{next(_numbers)}"


@pytest.fixture
async def probe() -> AsyncIterator[Probe]:
    async with watched(this_process) as probe:
        yield probe


@pytest.fixture
def link(zookeeper: Any) -> Proxy:
    return Proxy(HOST, zookeeper.nodes[0].port)


def through(link: Proxy) -> str:
    return f"{HOST}:{link.port}"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "zookeeper" in r.name]


# in good times


async def test_nodes_are_those_of_sas_in_the_order_of_arrival(zookeeper: Any, view: View, group: str) -> None:
    async with member(zookeeper.hosts, group, "first") as first:
        assert await first.leads() == 1
        async with member(zookeeper.hosts, group, "second"):
            await until(lambda: len(view.nodes(group)) == 2)
            async with member(zookeeper.hosts, group, "third"):
                await until(lambda: len(view.nodes(group)) == 3)
                assert view.nodes(group) == [f"server-n_000000000{n}" for n in range(3)]
                assert view.names(group) == ["first", "second", "third"]
    assert view.nodes(group) == []


async def test_the_end_of_a_leader_wakes_one_member_of_five(
    zookeeper: Any, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[str] = []
    on_watch = Session._on_watch

    def noted(session: Session, event: Any) -> None:
        woken.append(event.path)
        on_watch(session, event)

    monkeypatch.setattr(Session, "_on_watch", noted)
    async with process(zookeeper.hosts, group) as (killed, said), contextlib.AsyncExitStack() as stack:
        assert (await said())[1] == "leads 1"
        standbys = []
        for number in range(4):
            standbys.append(await stack.enter_async_context(member(zookeeper.hosts + CALM, group)))
            await until(lambda: watches(zookeeper) == 2 + number)  # noqa: B023  # the leader watches itself
        killed.kill()
        await standbys[0].leads()
        await never(lambda: len(woken) > 1 or any(standby.terms for standby in standbys[1:]), 0.3)
        assert woken == [f"/ESP/{group}/server-n_0000000000"]


def watches(zookeeper: Any) -> int:
    with socket.create_connection((HOST, zookeeper.nodes[0].port), timeout=1) as asking:
        asking.sendall(b"mntr")
        with asking.makefile() as answer:
            return int(re.findall(r"zk_watch_count\s+(\d+)", answer.read())[0])


async def test_who_resigns_hands_over_at_once_and_stands_last(zookeeper: Any, view: View, group: str) -> None:
    async with (
        member(zookeeper.hosts + CALM, group, "a") as a,
        member(zookeeper.hosts + CALM, group, "b", campaign=False) as b,
        member(zookeeper.hosts + CALM, group, "c", campaign=False) as c,
    ):
        await a.leads()
        for number, standby in enumerate((b, c), 2):
            standby.campaign()
            await until(lambda: len(view.nodes(group)) == number)  # noqa: B023
        begun = time.monotonic()
        await a.election.resign()
        assert await b.leads() == 2
        sys.stdout.write(f"hand-over {b.since - begun:.4f} s\n")
        assert b.since - begun < LONG / 2
        a.campaign()
        await until(lambda: len(view.nodes(group)) == 3)
        assert view.names(group) == ["b", "c", "a"]


async def test_two_groups_do_not_disturb_each_other(zookeeper: Any, view: View, group: str) -> None:
    async with member(zookeeper.hosts, group) as one, member(zookeeper.hosts, f"{group}-too") as other:
        assert (await one.leads(), await other.leads()) == (1, 1)
        await one.election.resign()
        await never(other.running.done, 0.1)
        assert view.nodes(f"{group}-too") == ["server-n_0000000000"]


async def test_root_and_group_are_made_where_the_place_says(zookeeper: Any, view: View, group: str) -> None:
    async with member(f"{zookeeper.hosts}/some/root?session=2s", group) as one:
        await one.leads()
        assert view.nodes(group, "/some/root") == ["server-n_0000000000"]


async def test_a_leader_whose_node_is_deleted_by_hand_is_deposed(zookeeper: Any, view: View, group: str) -> None:
    async with member(zookeeper.hosts, group) as one, member(zookeeper.hosts, group, campaign=False) as other:
        await one.leads()
        other.campaign()
        await until(lambda: len(view.nodes(group)) == 2)
        view.client.delete(f"/ESP/{group}/server-n_0000000000")
        assert await one.watch() == "lost"
        await other.leads()


@pytest.mark.parametrize("recursive", [False, True], ids=["its node", "the group"])
async def test_a_standby_whose_node_is_deleted_by_hand_has_another_one(
    zookeeper: Any, view: View, group: str, recursive: bool
) -> None:
    async with member(zookeeper.hosts, group) as one, member(zookeeper.hosts, group, campaign=False) as other:
        await one.leads()
        other.campaign()
        await until(lambda: watches(zookeeper) == 2)
        view.client.delete(f"/ESP/{group}{'' if recursive else '/server-n_0000000001'}", recursive=recursive)
        if not recursive:
            await one.election.resign()
        await other.leads()


async def test_nodes_of_others_do_not_matter(zookeeper: Any, view: View, group: str) -> None:
    for name in ("a", "server-n_", "server-n_x", "server-n_-000000001", "zzz-0000000000"):
        view.client.create(f"/ESP/{group}/{name}", makepath=True)
    async with member(zookeeper.hosts, group) as one:
        await one.leads()


# members that die, or stand still


@pytest.mark.parametrize("round", range(3))
async def test_a_killed_leader_is_replaced_within_a_session(zookeeper: Any, group: str, round: int) -> None:
    async with (
        process(zookeeper.hosts, group) as (killed, said),
        member(zookeeper.hosts + CALM, group, campaign=False) as two,
        watched(rounds(zookeeper.hosts)) as probe,
    ):
        await said()
        two.campaign()
        await asyncio.sleep(random.uniform(0.3, 0.7))  # at any moment between two pings
        at = time.monotonic()
        probe.begin()
        killed.kill()
        await two.leads()
        sys.stdout.write(f"gap {two.since - at:.3f} s\n")
        assert two.since - at < GAP + WAITS * probe.longest


async def test_a_stopped_process_knows_that_it_leads_no_more_when_it_goes_on(zookeeper: Any, group: str) -> None:
    async with (
        process(zookeeper.hosts + "?session=2s", group) as (stopped, said),
        member(zookeeper.hosts + CALM, group, campaign=False) as other,
        watched(rounds(zookeeper.hosts)) as probe,
    ):
        await said()
        other.campaign()
        stopped.send_signal(signal.SIGSTOP)
        at = time.monotonic()
        await other.leads()
        sys.stdout.write(f"gap {other.since - at:.3f} s\n")
        probe.begin()
        stopped.send_signal(signal.SIGCONT)
        at = time.monotonic()
        when, what = await said()
        sys.stdout.write(f"told after {when - at:.4f} s\n")
        assert what in ("suspended", "lost")
        assert when - at < 2.0 + WAITS * probe.longest  # by its own clock, not by what kazoo finds out
        await other.election.resign()
        assert (await said())[1] == "leads 3"


async def test_a_loop_that_stood_still_for_a_session_is_told_at_once(zookeeper: Any, group: str, probe: Probe) -> None:
    async with member(zookeeper.hosts, group) as one:
        await one.leads()
        time.sleep(SESSION + 0.2)
        begun = time.monotonic()
        probe.begin()
        assert await one.watch() == "suspended"  # kazoo noticed nothing, and never will: its threads went on
        assert time.monotonic() - begun < SESSION + WAITS * probe.longest
        await one.campaign()


# links


@pytest.mark.parametrize("way", ["up", "down", None])
async def test_a_leader_whose_link_hangs_is_told_before_its_session_ends(
    zookeeper: Any, view: View, group: str, link: Proxy, way: Any
) -> None:
    session = 4.5  # it is told after 3.0
    async with (
        link,
        member(f"{through(link)}?session={session}s", group) as one,
        member(zookeeper.hosts + CALM, group, campaign=False) as other,
        watched(rounds(zookeeper.hosts)) as probe,
    ):
        await one.leads()
        other.campaign()
        await until(lambda: len(view.nodes(group)) == 2)
        link.swallow(way)
        begun = time.monotonic()
        probe.begin()
        assert await one.watch() == "suspended"
        assert time.monotonic() - begun < session + WAITS * probe.longest
        one.campaign()
        if way != "down":  # else the server hears it, and the session goes on until it is closed
            await other.leads()
            assert other.since - begun < session + GAP - SESSION + WAITS * probe.longest
        link.heal()
        await other.leads()
        await until(lambda: len(view.nodes(group)) == 2)
        assert view.nodes(group) == ["server-n_0000000001", "server-n_0000000002"]


async def test_a_leader_whose_link_breaks_hands_over_as_soon_as_it_is_back(
    zookeeper: Any, view: View, group: str, link: Proxy
) -> None:
    async with (
        link,
        member(through(link) + CALM, group) as one,
        member(zookeeper.hosts + CALM, group, campaign=False) as other,
    ):
        await one.leads()
        other.campaign()
        await until(lambda: len(view.nodes(group)) == 2)
        link.cut()
        begun = time.monotonic()
        assert await one.watch() == "suspended"
        await other.leads()
        assert other.since - begun < LONG / 2  # less than the session, which was ended


async def test_a_standby_whose_link_breaks_keeps_its_place(
    zookeeper: Any, group: str, link: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        member(zookeeper.hosts + "?session=10s", group) as one,
        link,
        member(through(link) + "?session=10s", group, campaign=False) as other,
    ):
        await one.leads()
        other.campaign()
        for number in range(1, 6):
            await until(lambda: caplog.text.count("Watching zookeeper node") == number)  # noqa: B023
            link.cut()
        await until(lambda: caplog.text.count("Watching zookeeper node") == 6)
        await one.election.resign()
        assert await other.leads() == 2
    assert len(warnings(caplog)) == 5


# servers


@pytest.mark.parametrize("known", [True, False], ids=["known", "not yet known"])
async def test_with_a_frozen_server_everything_ends_in_time(
    zookeeper: Any, view: View, group: str, known: bool, probe: Probe
) -> None:
    before = threading.active_count()
    calm = zookeeper.hosts + "?session=4500ms"
    async with member(calm, group) as one, member(calm, group, campaign=False) as other:
        await one.leads()
        other.campaign()
        await until(lambda: len(view.nodes(group)) == 2)
        zookeeper.freeze()
        begun = time.monotonic()
        probe.begin()
        if known:
            assert await one.watch() == "suspended"
            assert time.monotonic() - begun < 4.5 + WAITS * probe.longest
            one.campaign()
            await one.cancel()
        begun = time.monotonic()
        await one.election.resign()
        assert time.monotonic() - begun < CLOSE + WAITS * probe.longest
        await other.cancel()
        assert await one.close() < CLOSE + WAITS * probe.longest
        assert await other.close() < CLOSE + WAITS * probe.longest
        await until(lambda: threading.active_count() <= before)
    zookeeper.thaw()
    await asyncio.to_thread(view.client.stop)  # its session may be over
    await asyncio.to_thread(view.client.start)
    await until(lambda: view.nodes(group) == [])


async def test_a_server_that_restarts_is_waited_for(zookeeper: Any, view: View, group: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    async with member(zookeeper.hosts, group) as one, member(zookeeper.hosts, group) as other:
        await until(lambda: bool(one.terms or other.terms) and len(view.nodes(group)) == 2)
        leader, standby = (one, other) if one.terms else (other, one)
        zookeeper.kill()
        assert await leader.watch() == "suspended"
        leader.campaign()
        await until(lambda: len(warnings(caplog)) == 2)
        await asyncio.to_thread(zookeeper.restart)
        back = time.monotonic()
        await until(lambda: standby.campaigning.done() or leader.campaigning.done())
        sys.stdout.write(f"leads {time.monotonic() - back:.3f} s after the restart\n")
    assert len(warnings(caplog)) == 2  # one for each member
    assert any("goes on" in record.getMessage() for record in caplog.records)


async def test_a_server_that_lost_its_data_stops_nobody(group: str) -> None:
    async with ZooKeeper() as own, member(own.hosts, group) as one, member(own.hosts, group) as other:
        await until(lambda: bool(one.terms or other.terms))
        leader = one if one.terms else other
        own.kill()
        await asyncio.to_thread(shutil.rmtree, own.nodes[0].directory / "version-2")
        await asyncio.to_thread(own.restart)
        assert await leader.watch() == "suspended"
        leader.campaign()
        await until(lambda: len(one.terms + other.terms) == 2)


@pytest.mark.parametrize("how", ["refused", "silent", "no such host", "no server"])
async def test_an_unreachable_server_is_waited_for_with_one_warning(
    how: str, zookeeper: Any, group: str, link: Proxy, caplog: Any, monkeypatch: pytest.MonkeyPatch, probe: Probe
) -> None:
    monkeypatch.setattr(election, "_KEPT", 2 * SESSION)
    async with link:
        if how == "refused":
            link.refuse()
        elif how == "silent":
            link.swallow()
        elif how == "no server":
            zookeeper.kill()
        host = {"no such host": "nowhere.invalid:2181", "no server": zookeeper.hosts}.get(how, through(link))
        async with member(host, group) as one:
            await until(lambda: bool(warnings(caplog)))
            await never(lambda: len(warnings(caplog)) > 1 or one.campaigning.done(), 0.5)
            if how in ("refused", "silent"):
                link.heal()
                await one.leads()
            else:
                await one.cancel()
            assert await one.close() < CLOSE + WAITS * probe.longest


async def test_a_name_that_takes_long_to_resolve_does_not_hold_up_the_end(
    zookeeper: Any, group: str, caplog: Any, monkeypatch: pytest.MonkeyPatch, probe: Probe
) -> None:
    resolved = threading.Event()
    asked = threading.Event()

    def hangs(*_: Any) -> list[Any]:
        asked.set()
        resolved.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    async with member(zookeeper.hosts, group) as one:
        await until(asked.is_set)
        await one.cancel()
        assert await one.close() < CLOSE + WAITS * probe.longest
    assert "is left to itself" in warnings(caplog)[-1]
    resolved.set()


async def test_a_session_that_the_server_does_not_grant_is_told(zookeeper: Any, group: str, caplog: Any) -> None:
    async with member(f"{zookeeper.hosts}?session=2min", group) as one:
        await one.leads()
        await one.election.resign()
        await one.campaign()
    [said] = warnings(caplog)
    assert "makes sessions of 60 s where 120 s were asked for" in said


# nothing is left behind


@pytest.mark.parametrize("led", [False, True], ids=["alone", "behind a leader"])
async def test_a_hundred_campaigns_cancelled_at_any_moment_leave_no_node(
    zookeeper: Any, view: View, group: str, led: bool
) -> None:
    before = threading.active_count()
    async with (
        member(zookeeper.hosts, group, campaign=False) as one,
        member(zookeeper.hosts, group, campaign=led) as two,
    ):
        if led:
            await two.leads()
            before = threading.active_count()
        for _ in range(100):
            one.campaign()
            await asyncio.sleep(random.uniform(0.0, 0.02))
            await one.cancel()
            if not one.campaigning.cancelled():
                await one.election.resign()
        await until(lambda: len(view.nodes(group)) == led)
        await until(lambda: threading.active_count() <= before)
        sys.stdout.write(f"{len(one.terms)} of 100 led\n")


async def test_a_standby_that_campaigns_again_at_once_keeps_its_node(
    zookeeper: Any, view: View, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = zookeeper.hosts + CALM
    async with member(calm, group) as one, member(calm, group, campaign=False) as other:
        await one.leads()
        other.campaign()
        await until(lambda: other.election._behind is not None)  # it knows who stands before it
        monkeypatch.setattr(election, "_LINGER", LONG)
        monkeypatch.setattr(Session, "_ask", None)  # nothing is asked meanwhile
        for _ in range(100):
            await asyncio.sleep(random.uniform(0.0, 0.01))
            await other.cancel()
            other.campaign()
        monkeypatch.undo()
        assert view.nodes(group) == ["server-n_0000000000", "server-n_0000000001"]
        await one.election.resign()
        assert await other.leads() == 2


async def test_a_standby_that_campaigns_no_more_is_in_nobodys_way(zookeeper: Any, view: View, group: str) -> None:
    async with (
        member(zookeeper.hosts + CALM, group) as one,
        member(zookeeper.hosts + CALM, group, campaign=False) as two,
        member(zookeeper.hosts + CALM, group, campaign=False) as three,
    ):
        await one.leads()
        for number, standby in enumerate((two, three), 2):
            standby.campaign()
            await until(lambda: watches(zookeeper) == number)  # noqa: B023
        await two.cancel()
        begun = time.monotonic()
        await one.election.resign()
        assert await three.leads() == 3
        assert three.since - begun < LONG / 2
        assert two.terms == []


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "waiting"])
async def test_a_node_whose_maker_never_heard_of_it_goes_away(
    zookeeper: Any, view: View, group: str, link: Proxy, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Session.create

    async def unheard(session: Session, *what: Any) -> str:
        monkeypatch.setattr(Session, "create", create)
        link.swallow("down")
        return await create(session, *what)

    monkeypatch.setattr(Session, "create", unheard)
    view.client.ensure_path(f"/ESP/{group}")
    async with link, member(through(link), group) as one:
        await until(lambda: view.nodes(group) == ["server-n_0000000000"])
        if cancelled:
            await one.cancel()
            link.heal()
            await until(lambda: view.nodes(group) == [])
        else:
            await never(one.campaigning.done, SESSION)
            link.heal()
            assert await one.leads() == 2
            assert view.nodes(group) == ["server-n_0000000001"]


async def test_run_that_is_cancelled_twice_ends_its_threads_all_the_same(
    zookeeper: Any, group: str, probe: Probe
) -> None:
    before = threading.active_count()
    async with member(f"{zookeeper.hosts}?session=1min", group) as one:
        await one.leads()
        zookeeper.freeze()  # kazoo by itself would notice in half a minute
        for _ in range(2):
            one.running.cancel()
            await asyncio.sleep(0)
        assert await one.close() < CLOSE + WAITS * probe.longest
        assert await one.watch() == "lost"
        await until(lambda: threading.active_count() <= before)
