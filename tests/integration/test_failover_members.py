"""Failover groups on the embedded bus: runs, members that are not alike, settings."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import esp_pubsub as esp
from esp_pubsub.failover.control import Control
from esp_pubsub.failover.line import Position
from esp_pubsub.failover.words import Beat, Identity, Setup
from esp_pubsub.notices import Failure, Notice
from tests.integration.members import (
    CLOSING,
    GROUP,
    SCHEMA,
    TOPIC,
    URL,
    AlwaysLeads,
    inject,
    inject_until_refused,
    is_active,
    member,
    messages_on_topic,
    never,
    pair,
    reading,
    rows,
    until,
)

pa.array(["x"])  # the first array imports pandas, which reads files: not in a test, under a loop

# runs


async def test_a_higher_run_replaces_a_lower_one_and_the_zombie_gets_stale(bus_directory: Path) -> None:
    async with (
        reading(bus_directory) as reader,
        pair(bus_directory, run=20261118) as (old, old_standby),
    ):
        await (await inject(old, 1, 20))
        await inject(old_standby, 1, 20)
        await reader.to(20, run=20261118)
        async with member(bus_directory, run=20261119) as new:
            reader.following = 1
            await (await inject(new, 1, 5))
            await reader.to(5, run=20261119)
            for zombie in (old, old_standby):
                with pytest.raises(esp.Stale, match="20261119") as caught:
                    await inject_until_refused(zombie, 21)
                assert (caught.value.run, caught.value.current) == (20261118, 20261119)
                assert "20261118" in str(caught.value)
                assert zombie.stats.role == "left"
            await (await new.inject(rows(6)))
            await reader.to(6, run=20261119)
            await reader.nothing_more()


async def test_a_lower_run_is_refused_at_open(bus_directory: Path) -> None:
    async with member(bus_directory, run=7) as new:
        await (await inject(new, 1, 3))
    before = await messages_on_topic(bus_directory)
    with pytest.raises(esp.Stale, match=r"run 6 .* 7") as caught:
        async with member(bus_directory, run=6):
            pass
    assert (caught.value.run, caught.value.current) == (6, 7)
    assert await messages_on_topic(bus_directory) == before
    async with member(bus_directory, run=7) as again:
        assert await (await inject(again, 1, 3)) == "covered"
    assert await messages_on_topic(bus_directory) == before


async def test_two_groups_that_open_at_once_do_not_forget_each_others_run(bus_directory: Path) -> None:
    async def opened(group: str) -> None:
        async with member(bus_directory, group=group, run=9):
            pass

    names = [f"g{number}" for number in range(8)]
    await asyncio.gather(*map(opened, names))
    for name in names:
        with pytest.raises(esp.Stale):
            async with member(bus_directory, group=name, run=8):
                pass


# members that are not alike


async def test_another_schema_is_refused_at_open_with_both_shown(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await (await inject(a, 1, 3))
        with pytest.raises(esp.SchemaDiffers) as caught:
            async with member(bus_directory, schema="id*:int64,b:double"):
                pass
        assert "b:double" in str(caught.value) and "a:string" in str(caught.value)
        assert await messages_on_topic(bus_directory) == 3


@pytest.mark.parametrize("how", ["content", "block size"])
async def test_another_input_is_found_by_its_chain_and_harms_nobody(bus_directory: Path, how: str) -> None:
    async with reading(bus_directory) as reader, member(bus_directory) as a:
        await is_active(a)
        await (await inject(a, 1, 10))
        async with member(bus_directory) as b:
            with pytest.raises(esp.InputDiffers) as caught:
                for id in range(1, 11):
                    await b.inject(rows(id, "other") if how == "content" else [*rows(id), *rows(id + 1)])
                    await asyncio.sleep(0)
                await b.flush(5)
            error = caught.value
            assert 1 <= error.id <= 10 and error.ours != error.theirs
            assert f"{error.ours:08x}" in str(error) and f"{error.theirs:08x}" in str(error)
            with pytest.raises(esp.InputDiffers):
                await b.inject(rows(11))
            assert b.stats.role == "left" and b.stats.sent == 0
        assert a.stats.role == "active"
        await (await inject(a, 11, 20))
        await reader.to(20)
        await reader.nothing_more()
        assert reader.subscriber.stats.diverged == 0


async def test_another_input_that_was_there_first_is_found_too(bus_directory: Path) -> None:
    """The one with the other input waits ahead of the active: it is the bus that shows what it should have been."""
    async with reading(bus_directory) as reader, member(bus_directory) as a:
        await is_active(a)
        async with member(bus_directory) as b:
            await inject(b, 1, 10, text="other")
            await (await inject(a, 1, 10))
            await until(lambda: b.stats.role == "left")
            with pytest.raises(esp.InputDiffers):
                await b.inject(rows(11))
            with pytest.raises(esp.InputDiffers):
                await b.flush(5)
        await reader.to(10)
        assert a.stats.role == "active"


async def test_a_restarted_group_with_another_input_under_the_same_run_is_refused(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await (await inject(a, 1, 30))
    async with member(bus_directory) as b:
        with pytest.raises(esp.InputDiffers):
            await inject(b, 1, 40, pause=0.005, text="other")
            await b.flush(5)
    async with reading(bus_directory) as reader:
        await reader.to(30)
        await reader.nothing_more()


async def test_what_differs_is_never_called_covered_while_it_can_be_compared(bus_directory: Path) -> None:
    """The beats tell a newcomer of the group before it has read the topic."""
    async with member(bus_directory) as a:
        await is_active(a)
        await (await inject(a, 1, 500))
        for _ in range(4):
            async with member(bus_directory, options=CLOSING) as b:
                with pytest.raises(esp.InputDiffers):
                    await (await b.inject(rows(1, "other")))


async def test_a_shorter_input_harms_nobody(bus_directory: Path) -> None:
    """Its member cannot be told from one that is slow: it never becomes eligible, or hands over at its end."""
    async with reading(bus_directory) as reader, member(bus_directory) as short:
        await is_active(short)
        async with member(bus_directory) as long:
            await inject(long, 1, 60)
            await (await inject(short, 1, 40))
            await short.aclose()
            await is_active(long)
            await long.flush(5)
            async with member(bus_directory, options=CLOSING) as shorter:
                await inject(shorter, 1, 20)
                assert await shorter.delivered(20, 2.0) == "covered"
                await never(lambda: shorter.stats.role != "standby", 0.1)
                await shorter.aclose()
        await reader.to(60)
        await reader.nothing_more()


async def test_one_group_name_on_two_topics_is_refused_with_both_shown(bus_directory: Path) -> None:
    other = "dfESP://local:5555/p/q/other"
    async with member(bus_directory) as a, reading(bus_directory) as reader:
        await is_active(a)
        await (await inject(a, 1, 3))
        async with member(bus_directory, url=other) as b:
            with pytest.raises(esp.ConfigError) as caught:
                await inject_until_refused(b, 1)
            assert "p/q/other/I" in str(caught.value) and "p/q/w/I" in str(caught.value)
            assert b.stats.sent == 0 and b.stats.role == "left"
        await (await a.inject(rows(4)))
        await reader.to(4)


async def test_a_group_name_may_be_used_elsewhere_once_the_other_group_has_ended(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await (await inject(a, 1, 3))
    async with member(bus_directory, url="dfESP://local:5555/p/q/other") as b:
        assert await (await b.inject(rows(1))) == "acked"


async def test_another_body_is_refused_with_both_shown(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await is_active(a)
        options = esp.PublisherOptions(body="arrow", close_timeout=0.3)
        async with member(bus_directory, options=options) as b:
            with pytest.raises(esp.ConfigError, match=r"body: ours 'arrow of pyarrow [0-9]+', theirs 'rows'"):
                await b.flush(5)
                await until(lambda: b.stats.role == "left")
                await b.inject(rows(1))


async def test_members_that_send_arrow_send_the_same_bytes_whatever_their_tables_are_made_of(
    bus_directory: Path,
) -> None:
    whole = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "a": ["a", None, "c"]})
    pieces = pa.concat_tables([whole.slice(0, 1), pa.table({"id": [0, 2, 3], "a": ["x", None, "c"]}).slice(1)])
    arrow = esp.PublisherOptions(body="arrow")
    async with pair(bus_directory, options=arrow) as (a, b):
        assert await (await a.inject(whole)) == "acked"
        assert await (await b.inject(pieces)) == "covered"


async def test_two_groups_on_one_topic_are_two_sources(bus_directory: Path) -> None:
    async with (
        member(bus_directory, group="one") as one,
        member(bus_directory, group="two") as two,
        esp.init(dir=bus_directory) as client,
        client.subscriber(URL, SCHEMA, side="in", start="earliest") as subscriber,
    ):
        await asyncio.gather(inject(one, 1, 50, pause=0.001), inject(two, 1, 50, pause=0.001))
        seen: dict[int, list[int]] = {}
        async with asyncio.timeout(60):
            for _ in range(100):
                block = await anext(subscriber)
                seen.setdefault(block.source, []).append(block.id)
        assert list(seen.values()) == [list(range(1, 51))] * 2


# settings


async def test_an_election_that_has_no_place_is_named_without_one(bus_directory: Path) -> None:
    with pytest.raises(esp.ConfigError, match="'log' has no place"):
        async with member(bus_directory, election="log://x"):
            pass


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"buffer": 0}, "not 0"),
        ({"buffer": -1}, "not -1"),
        ({"group": ""}, "name"),
        ({"run": -1}, "not -1"),
        ({"run": 1 << 64}, "not 18446744073709551616"),
        ({"overflow": "drop"}, "'drop'"),
        ({"fence": "shoot"}, "'shoot'"),
        ({"run": "today"}, "not 'today'"),
        ({"buffer": "many"}, "not 'many'"),
        ({"buffer": True}, "not True"),
        ({"run": True}, "not True"),
        ({"election": ""}, "not ''"),
        ({"election": 5}, "not 5"),
        ({"group": 5}, "not 5"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_once(wrong: dict[str, Any], shown: str) -> None:
    with pytest.raises(esp.ConfigError, match=shown):
        esp.Failover(**{"group": GROUP} | wrong)


async def test_an_input_that_cannot_wait_leaves_with_overrun(bus_directory: Path) -> None:
    async with member(bus_directory) as a, reading(bus_directory) as reader:
        await is_active(a)
        async with member(bus_directory, buffer=10, overflow="leave") as b:
            await until(lambda: b.stats.role == "candidate" and b._group.others_lead())  # type: ignore[union-attr]
            await never(lambda: b.stats.role != "candidate", 0.05)
            await inject(b, 1, 10)
            with pytest.raises(esp.Overrun, match="10 blocks"):
                await b.inject(rows(11))
            await until(lambda: b.stats.role == "left")
            for use in (b.inject(rows(11)), b.flush(1), b.hand_over()):
                with pytest.raises(esp.Overrun):
                    await use
        await (await inject(a, 1, 20))
        await reader.to(20)


async def test_the_first_member_of_a_group_that_cannot_wait_does_not_leave_before_it_leads(bus_directory: Path) -> None:
    async with member(bus_directory, buffer=10, overflow="leave") as a:
        await (await inject(a, 1, 100))


async def test_a_member_that_was_closed_is_closed(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await (await inject(a, 1, 3))
        await a.aclose()
        with pytest.raises(esp.Closed):
            await a.inject(rows(4))
        assert a.stats.role == "left"


async def test_everybody_who_waits_for_a_delivery_hears_that_the_member_left(bus_directory: Path) -> None:
    notices: list[Notice] = []
    async with member(bus_directory) as a:
        await is_active(a)
        await (await inject(a, 1, 10))
        async with esp.init(dir=bus_directory, on_notice=notices.append) as client:
            b = await client.publisher(URL, SCHEMA, failover=esp.Failover(GROUP))
            await until(lambda: b.stats.on_bus >= 10)
            deliveries = [await b.inject(rows(id, "other" if id > 12 else "x")) for id in range(1, 21)]
            waiting = asyncio.gather(
                *(delivery.__await__.__self__ for delivery in deliveries[15:]), return_exceptions=True
            )
            await until(lambda: len(b._for_ack) == 5)
            await (await inject(a, 11, 20))
            assert {type(outcome) for outcome in await waiting} == {esp.InputDiffers}
            with contextlib.suppress(esp.EspError):
                await b.aclose()
    assert [notice for notice in notices if isinstance(notice, Failure) and isinstance(notice.error, esp.InputDiffers)]


# what others say


def control_of(publisher: esp.Publisher, client: esp.Client) -> Control:
    group = publisher._group
    assert group is not None
    return Control(client.bus, group._control.topic, publisher.source, publisher.run, trouble=lambda error: None)


async def test_the_last_beat_of_a_run_that_is_over_ends_no_member_of_the_next(bus_directory: Path) -> None:
    """However it was set up: a leader that was frozen before the new run began beats once when it thaws."""
    async with pair(bus_directory, run=1) as (a, b), esp.init(dir=bus_directory) as client:
        zombie = Identity("zombie", 7, "", "h", 1)
        control = control_of(a, client)
        control.run_number = 0
        await control.write(
            Beat(
                Setup((TOPIC,), (SCHEMA,), "arrow of pyarrow 1", "token"),
                zombie,
                0,
                5,
                1,
                (Position(9, 9, None),),
                False,
            )
        )
        await control._drop_pipe()
        await (await inject(a, 1, 3))
        assert await (await inject(b, 1, 3)) == "covered"


async def test_a_higher_run_replaces_ours_however_it_is_set_up(bus_directory: Path) -> None:
    arrow = esp.PublisherOptions(body="arrow")
    async with pair(bus_directory) as (a, b), member(bus_directory, run=1, options=arrow) as c:
        await (await c.inject(rows(1)))
        for old in (a, b):
            with pytest.raises(esp.Stale):
                await inject_until_refused(old, 1)


async def test_it_is_the_newcomer_who_leaves_a_group_of_another_topic_whatever_its_run(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await is_active(a)
        await (await inject(a, 1, 3))
        async with member(bus_directory, url="dfESP://local:5555/p/q/other", run=1, options=CLOSING) as b:
            with pytest.raises(esp.ConfigError, match="p/q/other/I"):
                await inject_until_refused(b, 1)
            assert b.stats.sent == 0
        await (await a.inject(rows(4)))
        assert a.stats.role == "active"


@pytest.fixture
def appointed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def elects(bus: Any, named: str | None, control: str) -> Any:
        return ("log", None) if named is None else (named, lambda line, member: AlwaysLeads())

    monkeypatch.setattr("esp_pubsub.client.find_election", elects)


@pytest.mark.usefixtures("appointed")
async def test_of_two_that_elect_differently_and_come_at_once_one_goes_on(bus_directory: Path) -> None:
    async with (
        member(bus_directory, election="appointed", options=CLOSING) as a,
        member(bus_directory, options=CLOSING) as b,
        reading(bus_directory) as reader,
    ):
        both = [asyncio.create_task(inject(each, 1, 50, pause=0.005)) for each in (a, b)]
        await until(lambda: "left" in (a.stats.role, b.stats.role))
        await asyncio.gather(*both, return_exceptions=True)
        gone, stays = (a, b) if a.stats.role == "left" else (b, a)
        with pytest.raises(esp.ConfigError, match=r"election: ours '.*', theirs '"):
            await gone.inject(rows(51))
        assert await (await stays.inject(rows(51))) == "acked"
        await reader.to(51)


@pytest.mark.usefixtures("appointed")
async def test_it_is_the_newcomer_who_leaves_a_group_that_elects_differently(bus_directory: Path) -> None:
    async with member(bus_directory, election="appointed", options=CLOSING) as a:
        await is_active(a)
        await (await inject(a, 1, 3))
        async with member(bus_directory, options=CLOSING) as b:
            await until(lambda: b.stats.role == "left")
            with pytest.raises(esp.ConfigError, match="election: ours 'log', theirs 'appointed'"):
                await b.inject(rows(1))
            assert b.stats.sent == 0
        await (await a.inject(rows(4)))


async def test_the_role_changes_of_a_member_end_with_its_last(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        seen: list[str] = []

        async def look() -> None:
            async for change in a.roles():
                seen.append(change.role)  # noqa: PERF401  # what was seen so far counts

        looking = asyncio.create_task(look())
        await is_active(a)
        await a.aclose()
        async with asyncio.timeout(60):
            await looking
        assert seen[-1] == "left"
