"""Failover groups on the embedded bus: who leads, and what a subscriber sees of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.bus import Bus, Pipe
from esp_pubsub.failover.group import Group
from esp_pubsub.testing.faults import Faults
from esp_pubsub.wire.frame import frames
from tests.integration.members import (
    CLOSING,
    GROUP,
    SCHEMA,
    TOPIC,
    URL,
    AlwaysLeads,
    inject,
    is_active,
    member,
    messages_on_topic,
    never,
    pair,
    reading,
    rows,
    until,
)


@pytest.fixture
def everybody_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Group.__init__

    def init(self: Group, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self._election = AlwaysLeads()  # type: ignore[assignment]

    monkeypatch.setattr(Group, "__init__", init)


@pytest.mark.usefixtures("everybody_leads")
async def test_with_every_member_active_all_the_time_the_sequence_is_still_exact(bus_directory: Path) -> None:
    end = 600
    async with (
        reading(bus_directory) as reader,
        reading(bus_directory, "g") as grouped,
        member(bus_directory) as a,
        member(bus_directory) as b,
        member(bus_directory) as gone,
    ):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader.to(end))
            tasks.create_task(grouped.to(end, confirm_every=7))
            tasks.create_task(inject(a, 1, end, pause=0.001))
            tasks.create_task(inject(b, 1, end, pause=0.002))
            await inject(gone, 1, 100)
            await gone.aclose()
            async with member(bus_directory) as late:  # knows nothing of the others: begins at 1
                await inject(late, 1, end)
                await is_active(late)
        assert {a.stats.role, b.stats.role} == {"active"}
        await reader.nothing_more()
        assert reader.subscriber.stats.doubles > 100, "it was no test: nobody else sent"
        assert reader.subscriber.stats.diverged == 0


@pytest.mark.usefixtures("everybody_leads")
async def test_a_member_that_another_one_overtook_hands_over(bus_directory: Path) -> None:
    async with member(bus_directory) as a, member(bus_directory) as b:
        await is_active(a)
        await is_active(b)
        await (await inject(a, 1, 100))
        await until(lambda: b.stats.on_bus == 100)  # by a's beat on the control topic
        assert await (await inject(b, 1, 100)) == "covered"
        async with asyncio.timeout(60):
            await b.hand_over()


async def test_a_member_that_was_overtaken_and_whose_input_does_not_go_on_lets_another_one_lead(
    bus_directory: Path,
) -> None:
    """By late blocks of the one that led before, as on a bus where they come in their own time."""
    async with reading(bus_directory) as reader, member(bus_directory) as a, member(bus_directory) as b:
        await is_active(a)
        await (await inject(a, 1, 3))
        await inject(b, 1, 10)
        await until(lambda: b.stats.role == "candidate")
        late = [b._outbox.get(id_) for id_ in range(4, 10)]
        async with esp.init(dir=bus_directory) as client:
            pipe = await client.bus.pipe(TOPIC)
            await pipe.write(frames(filter(None, late), 3, 0))
            await pipe.confirmed(5)
            await pipe.aclose()
        assert a._group_line is not None
        a._group_line.heard(0, 9, None)  # by a beat of its
        await is_active(b)
        assert await b.delivered(10) == "acked"
        await reader.to(10)
        assert await (await inject(a, 4, 10)) == "covered"


async def test_a_member_that_leaves_in_the_turn_in_which_it_campaigns_leaves_no_task(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await is_active(a)
        async with member(bus_directory) as b:
            assert b._group is not None
            begun = b._group._election.campaign

            async def campaign() -> int:  # the same, with somebody who fails before its first step
                asyncio.get_running_loop().call_soon(b._fail, esp.Overrun("full"))
                return await begun()

            b._group._election.campaign = campaign  # type: ignore[method-assign]
            await until(lambda: b.stats.role == "left")


async def test_one_leads_the_others_stand_by_and_roles_and_stats_tell(bus_directory: Path) -> None:
    async with pair(bus_directory) as (a, b), reading(bus_directory) as reader:
        changes: list[esp.RoleChange] = []

        async def listen() -> None:
            async for change in b.roles():
                changes.append(change)  # noqa: PERF401  # it never ends

        listening = asyncio.create_task(listen())
        sent, covered = await inject(a, 1, 50), await inject(b, 1, 50)
        assert (await sent, await covered) == ("acked", "covered")
        await reader.to(50)
        assert (a.stats.role, a.stats.term, a.stats.sent, a.stats.acked, a.stats.on_bus) == ("active", 1, 50, 50, 50)
        assert b.stats.role in ("standby", "candidate")
        assert (b.stats.given, b.stats.sent, b.stats.acked, b.stats.on_bus, b.stats.waiting_blocks) == (
            50,
            0,
            50,
            50,
            0,
        )
        assert reader.subscriber.stats.doubles == 0
        await a.hand_over()
        await is_active(b)
        assert a.stats.role != "active" and a.stats.last_switch is not None
        assert await (await b.inject(rows(51))) == "acked"
        assert await (await a.inject(rows(51))) == "covered"
        await reader.to(51)
        listening.cancel()
        won = next(change for change in changes if change.event == "won")
        assert (won.role, won.term, won.m, won.last) == ("active", b.stats.term, 50, 50)
        assert b.stats.last_switch == won


async def test_hand_over_under_load_loses_and_doubles_nothing(bus_directory: Path) -> None:
    end = 900
    async with pair(bus_directory) as (a, b), reading(bus_directory) as reader, asyncio.TaskGroup() as tasks:
        tasks.create_task(reader.to(end))
        for publisher in (a, b):
            tasks.create_task(inject(publisher, 1, end, pause=0.003))
        await until(lambda: a.stats.acked >= 200)
        await a.hand_over()
        await is_active(b)


@pytest.mark.usefixtures("no_silence")
async def test_leadership_goes_to_and_fro_at_once(bus_directory: Path) -> None:
    """Whoever waited for a silence would wait for longer than the test."""
    async with pair(bus_directory) as (a, b):
        for before, after in ((a, b), (b, a), (a, b), (b, a)):
            await before.hand_over()
            await is_active(after)
            await never(lambda: after.stats.role != "active", 0.2)  # noqa: B023


async def test_hand_over_of_a_standby_is_nothing_and_alone_one_leads_again(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await is_active(a)
        async with member(bus_directory) as b:
            await b.hand_over()
            assert a.stats.role == "active"
        await inject(a, 1, 5)
        await a.hand_over()
        await is_active(a)
        assert await (await a.inject(rows(6))) == "acked"


async def test_what_a_member_sent_stays_acked_whatever_it_is_later(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await is_active(a)
        mine = await inject(a, 1, 5)
        assert await mine == "acked"
        async with member(bus_directory) as b:
            theirs = await inject(b, 1, 5)
            await until(lambda: b.stats.role == "candidate")
            await a.hand_over()
            await is_active(b)
            assert await (await b.inject(rows(6))) == "acked"
            assert (await mine, await theirs) == ("acked", "covered")
            last = await a.inject(rows(6))
            assert await last == "covered"
        await is_active(a)
        assert await (await a.inject(rows(7))) == "acked"
    assert (await mine, await last) == ("acked", "covered")


@pytest.mark.usefixtures("everybody_leads")
async def test_blocks_that_another_member_sent_meanwhile_are_not_ours(bus_directory: Path) -> None:
    async with member(bus_directory) as a, member(bus_directory) as b:
        await is_active(a)
        await is_active(b)
        await (await inject(a, 1, 3))
        await (await inject(b, 1, 10))
        await until(lambda: a.stats.on_bus == 10)
        await (await inject(a, 4, 11))
        assert [await a.delivered(id) for id in range(1, 12)] == ["acked"] * 3 + ["covered"] * 7 + ["acked"]


@contextlib.asynccontextmanager
async def held_up(publisher: esp.Publisher) -> AsyncIterator[None]:
    """Nothing is written to the topic meanwhile."""
    go_on = threading.Event()
    store = await publisher._bus.topic(TOPIC)  # type: ignore[attr-defined]
    blocked = asyncio.create_task(store.write(lambda transaction: go_on.wait(60), 60))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        go_on.set()
        await blocked


async def test_a_hand_over_that_was_given_up_does_not_happen_later(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await is_active(a)
        async with held_up(a):
            await a.inject(rows(1))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await a.hand_over()
        await a.flush()
        await never(lambda: a.stats.role != "active", 0.2)


async def test_a_hand_over_goes_on_while_one_of_two_waits_for_it(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await is_active(a)
        async with held_up(a):
            await a.inject(rows(1))
            staying = asyncio.create_task(a.hand_over())
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await a.hand_over()
        await staying
        assert a.stats.role != "active"


async def test_whoever_asks_for_a_hand_over_waits_until_the_resignation_stands(
    bus_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resigning, go_on = asyncio.Event(), asyncio.Event()
    async with member(bus_directory) as a:
        await is_active(a)
        resign = a._group._election.resign  # type: ignore[union-attr]

        async def slowly() -> None:
            resigning.set()
            await go_on.wait()
            await resign()

        monkeypatch.setattr(a._group._election, "resign", slowly)  # type: ignore[union-attr]
        first = asyncio.create_task(a.hand_over())
        await resigning.wait()
        second = asyncio.create_task(a.hand_over())
        await never(second.done, 0.05)
        go_on.set()
        await first
        await second


async def test_a_publisher_without_a_group_has_nothing_to_hand_over(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client, client.publisher(URL, SCHEMA) as alone:
        with pytest.raises(esp.WrongOrder, match="failover"):
            await alone.hand_over()
        with pytest.raises(esp.WrongOrder, match="failover"):
            await anext(alone.roles())


async def test_hand_over_ends_when_the_member_leaves_meanwhile(bus_directory: Path) -> None:
    async with member(bus_directory, options=CLOSING) as a:
        await is_active(a)
        async with held_up(a):
            await a.inject(rows(1))
            handing = asyncio.create_task(a.hand_over())
            await until(lambda: a._group._hand_over is not None)  # type: ignore[union-attr]
            with pytest.raises(esp.DeliveryUnknown):
                await a.aclose()
            with pytest.raises(esp.EspError):
                async with asyncio.timeout(1):
                    await handing


async def test_a_grouped_subscriber_restarted_in_the_middle_of_a_failover_goes_on_exactly(bus_directory: Path) -> None:
    end, begin = 900, 1
    async with pair(bus_directory) as (a, b), asyncio.TaskGroup() as tasks:
        for publisher in (a, b):
            tasks.create_task(inject(publisher, 1, end, pause=0.002))
        for stop in (250, 260, 500):
            async with reading(bus_directory, "g") as reader:
                reader.following = begin
                await reader.to(stop, confirm_every=10)
                handing = asyncio.create_task((a if a.stats.role == "active" else b).hand_over())
                await reader.to(stop + 5)  # these five are not confirmed: they come again, and nothing else does
                begin = stop + 1
            await handing
        async with reading(bus_directory, "g") as reader:
            reader.following = begin
            await reader.to(end)
            await reader.nothing_more()
            assert reader.subscriber.stats.missed == 0


async def test_a_whole_group_restarted_goes_on_behind_the_tail(bus_directory: Path) -> None:
    half, end = 300, 600
    for last in (half, end):
        async with member(bus_directory) as a, member(bus_directory) as b:
            async with asyncio.TaskGroup() as tasks:
                for publisher in (a, b):
                    tasks.create_task(inject(publisher, 1, last))
            await a.flush(5)
            await b.flush(5)
        # a tail, not everything: what the first ones acknowledged was not sent again
        assert last <= await messages_on_topic(bus_directory) < last + half / 2
    async with reading(bus_directory) as reader:
        await reader.to(end)
        await reader.nothing_more()


async def test_a_reader_that_stays_sees_nothing_of_the_restart_of_the_whole_group(bus_directory: Path) -> None:
    async with reading(bus_directory) as reader:
        for last in (100, 200, 300):
            async with member(bus_directory) as a:
                await inject(a, 1, last)
            await reader.to(last)
            await reader.nothing_more(0.05)


async def test_a_restarted_member_reads_its_input_again_catches_up_and_takes_over(bus_directory: Path) -> None:
    async with reading(bus_directory) as reader, member(bus_directory) as a:
        await is_active(a)
        await (await inject(a, 1, 400))
        async with member(bus_directory) as b:
            await until(lambda: b.stats.on_bus >= 400)
            assert b.stats.role == "standby", "not eligible: it knows of 400 blocks and has none"
            await inject(b, 1, 399)
            await never(lambda: b.stats.role != "standby", 0.1)
            assert await (await b.inject(rows(400))) == "covered"
            await until(lambda: b.stats.role == "candidate")
            assert b.stats.waiting_blocks == 0
            await a.aclose()
            await is_active(b)
            assert await (await b.inject(rows(401))) == "acked"
            await reader.to(401)
            assert b.stats.sent == 401 and reader.subscriber.stats.doubles == 0


async def test_a_restarted_member_that_closes_while_it_is_behind_is_covered(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await (await inject(a, 1, 50))
    async with member(bus_directory) as b:  # nobody leads, and it is not eligible: there are no beats to wake it
        await until(lambda: b.stats.on_bus == 50)
        await never(lambda: b.stats.role != "standby", 0.2)
        assert await inject(b, 1, 20) is not None
        assert await b.delivered(20, 1.0) == "covered"


async def test_a_member_that_waits_for_each_block_catches_up_from_any_distance(bus_directory: Path) -> None:
    """Further back than chains are kept, and than the log is read: nobody could compare these blocks any more."""
    end = 1_200
    async with reading(bus_directory) as reader, member(bus_directory) as a:
        await is_active(a)
        await (await inject(a, 1, end))
        async with member(bus_directory, buffer=10) as b:
            await until(lambda: b.stats.on_bus == end)
            for id_ in range(1, end + 1):
                assert await (await b.inject(rows(id_))) == "covered"
            await a.aclose()
            assert await (await b.inject(rows(end + 1))) == "acked"
        await reader.to(end + 1)


async def test_a_standby_is_never_further_ahead_than_its_buffer(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await is_active(a)
        async with member(bus_directory, buffer=10) as b:
            ahead = asyncio.create_task(inject(b, 1, 30))
            await until(lambda: b.stats.given == 10)
            await never(lambda: b.stats.given > 10, 0.1)
            await (await inject(a, 1, 30))
            assert await (await ahead) == "covered"


# what is told


async def test_the_log_says_what_sas_says_of_a_takeover(bus_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "esp_pubsub.failover")
    async with pair(bus_directory) as (a, b):
        await (await inject(a, 1, 10))
        await inject(b, 1, 15)
        caplog.clear()
        await a.hand_over()
        await is_active(b)
        await b.flush(30)
        await until(lambda: "switched to active" in caplog.text)
    said = [record.getMessage() for record in caplog.records]
    for line in (
        "Standby sending buffered messages, last message id = 10, current message id = 15",
        "Standby synced, current message id = 15",
        "Hot failover state switched to active: ",
        "Hot failover state switched to standby (handed over): ",
    ):
        assert any(each.startswith(line) for each in said), said


async def test_a_member_says_how_far_it_lags_and_that_it_left_before_it_was_there(
    bus_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(bus_directory) as (a, b):
        await (await inject(a, 1, 10))
        await inject(b, 1, 4)
        await until(lambda: b.stats.lag == 6)
        await b.aclose()
        assert "leaves with 4 of the 10 blocks that the bus holds" in caplog.text
        await a.aclose()
        assert caplog.text.count("leaves with") == 1


async def test_an_active_member_that_cannot_send_lets_another_one_lead(bus_directory: Path) -> None:
    class Mute:
        """A bus on which this topic takes nothing; all others work."""

        def __init__(self, inner: Bus) -> None:
            self.inner = inner
            self.faults = Faults(inner)

        async def pipe(self, topic: str) -> Pipe:
            return await (self.faults if topic == TOPIC else self.inner).pipe(topic)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    async with reading(bus_directory) as reader, esp.init(dir=bus_directory, on_notice=lambda notice: None) as client:
        client.bus = mute = Mute(client.bus)  # type: ignore[assignment]
        options = esp.PublisherOptions(stall=0.3, close_timeout=0.3)
        a = await client.publisher(URL, SCHEMA, failover=esp.Failover(GROUP), options=options)
        await is_active(a)
        changes: list[esp.RoleChange] = []

        async def look() -> None:
            async for change in a.roles():
                changes.append(change)  # noqa: PERF401  # what was seen so far counts

        looking = asyncio.create_task(look())
        async with member(bus_directory) as b:
            mute.faults.hang("write")
            await inject(a, 1, 5)
            await inject(b, 1, 5)
            await is_active(b)
            await b.flush(30)
            await reader.to(5)
            assert "stalled" in [change.event for change in changes]
            mute.faults.heal()
            await a.flush(30)
            looking.cancel()
            await asyncio.wait([looking])
        await a.aclose()
