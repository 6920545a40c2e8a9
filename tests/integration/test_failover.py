"""Failover groups on the embedded bus, as a user sees them: every member has its own client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from esp_pubsub.failover.group import Group
from esp_pubsub.notices import Failure, Missed, Notice

URL, SCHEMA, GROUP = "dfESP://local:5555/p/q/w", "id*:int64,a:string", "feed"
TOPIC = "local:5555/p/q/w/I"
CLOSING = esp.PublisherOptions(close_timeout=0.3)  # for members that have something nobody will ever send


def rows(id: int, text: str = "x") -> list[tuple[int, str]]:
    """The block that every member builds for an id."""
    return [(id, text * 20), (-id, text)]


class Reader:
    """A subscriber that keeps what it gets and checks it at once."""

    def __init__(self, subscriber: esp.Subscriber, begin: int = 1) -> None:
        self.subscriber = subscriber
        self.following = begin

    async def to(self, last: int, *, run: int = 0, confirm_every: int = 0, seconds: float = 10.0) -> None:
        """Read up to a block; every one must be the next."""
        async with asyncio.timeout(seconds):
            while self.following <= last:
                block = await anext(self.subscriber)
                assert (block.run, block.id, block.rows()) == (run, self.following, rows(block.id)), block
                self.following += 1
                if confirm_every and block.id % confirm_every == 0:
                    await self.subscriber.confirm(block)

    async def nothing_more(self, seconds: float = 0.2) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await anext(self.subscriber)


@contextlib.asynccontextmanager
async def reading(directory: Path, group: str | None = None) -> AsyncIterator[Reader]:
    notices: list[Notice] = []
    async with (
        esp.init(dir=directory, on_notice=notices.append) as client,
        client.subscriber(URL, SCHEMA, side="in", start="earliest", group=group) as subscriber,
    ):
        yield Reader(subscriber)
    assert not [notice for notice in notices if isinstance(notice, Missed)]


@contextlib.asynccontextmanager
async def member(
    directory: Path,
    *,
    url: str = URL,
    schema: str = SCHEMA,
    options: esp.PublisherOptions | None = None,
    **failover: Any,
) -> AsyncIterator[esp.Publisher]:
    """A member of the group with a client of its own; how it closes is up to the test that cares."""
    async with esp.init(dir=directory, on_notice=lambda notice: None) as client:
        publisher = await client.publisher(
            url, schema, failover=esp.Failover(**{"group": GROUP} | failover), options=options
        )
        try:
            yield publisher
        finally:
            with contextlib.suppress(esp.EspError):
                await publisher.aclose()


async def inject(publisher: esp.Publisher, first: int, last: int, *, pause: float = 0.0, text: str = "x") -> Any:
    """A part of the input."""
    delivery = None
    for id in range(first, last + 1):
        delivery = await publisher.inject(rows(id, text))
        assert delivery.id == id
        if pause:
            await asyncio.sleep(pause)
    return delivery


async def until(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what it looks at tells nobody
            await asyncio.sleep(0.005)


async def is_active(publisher: esp.Publisher) -> None:
    await until(lambda: publisher.stats.role == "active")


@contextlib.asynccontextmanager
async def pair(directory: Path, **failover: Any) -> AsyncIterator[tuple[esp.Publisher, esp.Publisher]]:
    """Two members; the first one leads."""
    async with member(directory, **failover) as a:
        await is_active(a)
        async with member(directory, **failover) as b:
            yield a, b


async def messages_on_topic(directory: Path) -> int:
    async with esp.init(dir=directory) as client:
        feed = await client.bus.feed(TOPIC, "earliest", None)
        bounds = await feed.bounds()
        await feed.aclose()
    return bounds.end - bounds.first


class AlwaysLeads:
    """An election that everybody wins at once and nobody ever loses."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def campaign(self) -> int:
        return 1

    async def watch(self) -> str:
        await asyncio.Event().wait()
        return "lost"

    async def resign(self) -> None:
        return


@pytest.fixture
def everybody_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Group.__init__

    def init(self: Group, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self._election = AlwaysLeads()  # type: ignore[assignment]
        self._hear_election = lambda said: None

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
        tasks.create_task(reader.to(end, seconds=15))
        for publisher in (a, b):
            tasks.create_task(inject(publisher, 1, end, pause=0.003))
        await asyncio.sleep(0.8)
        await a.hand_over()
        await is_active(b)


async def test_leadership_goes_to_and_fro_at_once(bus_directory: Path) -> None:
    async with pair(bus_directory) as (a, b):
        loop = asyncio.get_running_loop()
        for before, after in ((a, b), (b, a), (a, b), (b, a)):
            begun = loop.time()
            await before.hand_over()
            await is_active(after)
            assert loop.time() - begun < 0.4, "less than a silence"
            await asyncio.sleep(0.2)


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


async def test_a_publisher_without_a_group_has_nothing_to_hand_over(bus_directory: Path) -> None:
    async with esp.init(dir=bus_directory) as client, client.publisher(URL, SCHEMA) as alone:
        with pytest.raises(esp.WrongOrder, match="failover"):
            await alone.hand_over()
        with pytest.raises(esp.WrongOrder, match="failover"):
            await anext(alone.roles())


async def test_hand_over_ends_when_the_member_leaves_meanwhile(bus_directory: Path) -> None:
    async with member(bus_directory, options=CLOSING) as a:
        await is_active(a)
        go_on = threading.Event()
        store = await a._group._bus.topic(TOPIC)  # type: ignore[union-attr, attr-defined]
        blocked = asyncio.create_task(store.write(lambda transaction: go_on.wait(5), 8))
        try:
            await a.inject(rows(1))
            handing = asyncio.create_task(a.hand_over())
            await asyncio.sleep(0.05)
            with pytest.raises(esp.DeliveryUnknown):
                await a.aclose()
            with pytest.raises(esp.EspError):
                async with asyncio.timeout(1):
                    await handing
        finally:
            go_on.set()
            await blocked


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
            await asyncio.sleep(0.1)
            assert b.stats.role == "standby"
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
        await asyncio.sleep(0.2)
        assert await inject(b, 1, 20) is not None
        assert await b.delivered(20, 1.0) == "covered"


async def test_a_standby_is_never_further_ahead_than_its_buffer(bus_directory: Path) -> None:
    async with member(bus_directory) as a:
        await is_active(a)
        async with member(bus_directory, buffer=10) as b:
            ahead = asyncio.create_task(inject(b, 1, 30))
            await asyncio.sleep(0.1)
            assert b.stats.given == 10
            await (await inject(a, 1, 30))
            assert await (await ahead) == "covered"


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
                    async with asyncio.timeout(5):
                        while True:
                            await zombie.inject(rows(21))
                            await asyncio.sleep(0.01)
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
                await asyncio.sleep(0.1)
                assert shorter.stats.role == "standby"
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
                async with asyncio.timeout(5):
                    while True:
                        await b.inject(rows(1))
                        await asyncio.sleep(0.01)
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
            with pytest.raises(esp.ConfigError, match=r"body: ours 'arrow', theirs 'rows'"):
                await b.flush(5)
                await until(lambda: b.stats.role == "left")
                await b.inject(rows(1))


async def test_two_groups_on_one_topic_are_two_sources(bus_directory: Path) -> None:
    async with (
        member(bus_directory, group="one") as one,
        member(bus_directory, group="two") as two,
        esp.init(dir=bus_directory) as client,
        client.subscriber(URL, SCHEMA, side="in", start="earliest") as subscriber,
    ):
        await asyncio.gather(inject(one, 1, 50, pause=0.001), inject(two, 1, 50, pause=0.001))
        seen: dict[int, list[int]] = {}
        async with asyncio.timeout(5):
            for _ in range(100):
                block = await anext(subscriber)
                seen.setdefault(block.source, []).append(block.id)
        assert list(seen.values()) == [list(range(1, 51))] * 2


# settings


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
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_once(wrong: dict[str, Any], shown: str) -> None:
    with pytest.raises(esp.ConfigError, match=shown):
        esp.Failover(**{"group": GROUP} | wrong)


async def test_an_input_that_cannot_wait_leaves_with_overrun(bus_directory: Path) -> None:
    async with member(bus_directory) as a, reading(bus_directory) as reader:
        await is_active(a)
        async with member(bus_directory, buffer=10, overflow="leave") as b:
            await asyncio.sleep(0.05)
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
            await asyncio.sleep(0.05)
            await (await inject(a, 11, 20))
            assert {type(outcome) for outcome in await waiting} == {esp.InputDiffers}
            with contextlib.suppress(esp.EspError):
                await b.aclose()
    assert [notice for notice in notices if isinstance(notice, Failure) and isinstance(notice.error, esp.InputDiffers)]
