"""What a user does in mode stream of a real RabbitMQ broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aio_pika
import pytest

import esp_pubsub as esp
from esp_pubsub.errors import NotOffered
from esp_pubsub.notices import BadMessage, Failure, Joined, Missed, Notice, Reconnected, Skipped
from tests.integration.members import SCHEMA, Reader, inject, until
from tests.integration.rabbit import ROOT, has_role, member, new_url, stranger, topic_of
from tests.support.rabbitmq import RabbitMQ
from tests.support.server import HOST


@pytest.fixture
def url() -> str:
    return new_url()


def settings(rabbitmq: RabbitMQ) -> dict[str, Any]:
    return {"host": HOST, "port": rabbitmq.nodes[0].port, "streamport": rabbitmq.stream_port, "mode": "stream"}


@contextlib.asynccontextmanager
async def client(rabbitmq: RabbitMQ) -> AsyncIterator[tuple[esp.Client, list[Notice]]]:
    told: list[Notice] = []
    async with esp.init("rabbitmq", on_notice=told.append, **settings(rabbitmq)) as opened:
        yield opened, told


# the first ten minutes


def run(folder: Path, name: str, code: str) -> subprocess.Popen[str]:
    (folder / name).write_text(code)
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", name], cwd=folder, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def test_the_ten_lines_of_the_readme_work_with_one_line_more_and_a_cfg_file(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    project = secrets.token_hex(4)
    keys = "".join(f'    {key} = "{value}"\n' for key, value in settings(rabbitmq).items())
    (tmp_path / "rabbitmq.cfg").write_text(f"rabbitmq\n{{\n{keys}}}\n")
    switch = 'import esp_pubsub as esp\nesp.set_pubsub_lib("rabbitmq")\n'
    codes = {
        found[1]: code.replace("import esp_pubsub as esp\n", switch).replace("/market/", f"/{project}/")
        for code in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
        if (found := re.match(r"# (publish|subscribe)\.py\n", code))
    }
    publisher = run(tmp_path, "publish.py", codes["publish"])
    assert await asyncio.to_thread(publisher.communicate, timeout=20) == ("", "")
    assert publisher.returncode == 0
    with run(tmp_path, "subscribe.py", codes["subscribe"]) as subscriber:
        try:
            async with asyncio.timeout(60):
                line = await asyncio.to_thread(subscriber.stdout.readline)  # type: ignore[union-attr]
            assert line == "1 [(1, 'IBM', 101.5), (2, 'SAS', 99.0)]\n"
        finally:
            subscriber.kill()


# where reading begins


async def test_a_group_that_is_restarted_goes_on_without_a_hole_or_a_double(rabbitmq: RabbitMQ, url: str) -> None:
    async with client(rabbitmq) as (ours, _), ours.publisher(url, SCHEMA) as publisher:
        await (await inject(publisher, 1, 20))
        for first, last in ((1, 12), (13, 13), (14, 30)):  # each with a client of its own, and so with links of its own
            if last == 30:
                await (await inject(publisher, 21, 30))
            async with client(rabbitmq) as (theirs, told), theirs.subscriber(url, side="in", group="g") as subscriber:
                reader = Reader(subscriber, first)
                await reader.to(last, confirm_every=1)
            assert told == []
        async with client(rabbitmq) as (theirs, told), theirs.subscriber(url, side="in", group="g") as subscriber:
            await Reader(subscriber).nothing_more()


async def test_a_group_that_did_not_confirm_gets_it_again(rabbitmq: RabbitMQ, url: str) -> None:
    async with client(rabbitmq) as (ours, told), ours.publisher(url, SCHEMA) as publisher:
        await (await inject(publisher, 1, 20))
        async with ours.subscriber(url, side="in", group="g") as subscriber:
            await Reader(subscriber).to(17, confirm_every=5)
        async with ours.subscriber(url, side="in", group="g") as subscriber:
            await Reader(subscriber, 16).to(20)
        assert told == []


async def test_seek_goes_back_to_the_beginning_and_forward_to_the_end(rabbitmq: RabbitMQ, url: str) -> None:
    async with client(rabbitmq) as (ours, told), ours.publisher(url, SCHEMA) as publisher:
        await (await inject(publisher, 1, 20))
        async with ours.subscriber(url, side="in", start="earliest") as subscriber:
            await Reader(subscriber).to(20)
            await subscriber.seek("earliest")
            await Reader(subscriber).to(15)
            await subscriber.seek("latest")
            await (await inject(publisher, 21, 25))
            await Reader(subscriber, 21).to(25)
        assert told == [Joined(publisher.source, 0, 21)]


async def test_a_subscriber_begins_with_what_was_published_from_a_time_on(rabbitmq: RabbitMQ, url: str) -> None:
    async with client(rabbitmq) as (ours, told), ours.publisher(url, SCHEMA) as publisher:
        await (await inject(publisher, 1, 10))
        time = datetime.now(UTC) + timedelta(milliseconds=2)
        await until(lambda: datetime.now(UTC) > time + timedelta(milliseconds=2))
        await (await inject(publisher, 11, 20))
        async with ours.subscriber(url, side="in", start=time) as subscriber:
            await Reader(subscriber, 11).to(20)
        assert told == [Joined(publisher.source, 0, 11)]


# trouble


async def test_a_stream_that_an_administrator_deletes_is_told_and_publishing_and_reading_go_on(
    rabbitmq: RabbitMQ, url: str
) -> None:
    async with client(rabbitmq) as (ours, told), client(rabbitmq) as (theirs, theirs_told):
        with pytest.raises(NotOffered):
            ours.catalog()
        publisher = await ours.publisher(url, SCHEMA)
        alone = await theirs.subscriber(url, side="in", start="earliest")
        grouped = await theirs.subscriber(url, side="in", group="g")
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(inject(publisher, 1, 300, pause=0.002))
            readings = [tasks.create_task(ids_to(300, subscriber)) for subscriber in (alone, grouped)]
            await until(lambda: publisher.stats.acked >= 50)
            connection = await aio_pika.connect(rabbitmq.url)
            async with connection:
                await (await connection.channel()).queue_delete(topic_of(url))
            assert not publishing.done()
        for reading in readings:
            seen = reading.result()
            [begin] = [at for at in range(1, len(seen)) if seen[at] != seen[at - 1] + 1] or [0]
            assert {*seen} | {*range(1, seen[begin])} == {*range(1, 301)}  # what stood in the stream went with it
        assert {type(notice) for notice in told} == {Failure, Reconnected}
        skipped = [notice for notice in theirs_told if isinstance(notice, Skipped)]
        assert skipped == [Skipped(None, "the stream was deleted and made anew")] * 2
        unseen = [{*range(1, 301)} - {*reading.result()} for reading in readings]
        missed = [(notice.first, notice.last) for notice in theirs_told if isinstance(notice, Missed)]
        assert sorted(missed) == sorted((min(ids), max(ids)) for ids in unseen if ids)
        await publisher.aclose()


async def ids_to(last: int, subscriber: esp.Subscriber) -> list[int]:
    """What it reads up to a block, each confirmed if there is a group."""
    seen = [0]
    async with asyncio.timeout(60):
        while seen[-1] != last:
            block = await anext(subscriber)
            seen.append(block.id)
            if subscriber.group is not None:
                await subscriber.confirm(block)
    return seen[1:]


async def test_foreign_messages_in_a_stream_are_told_and_passed(rabbitmq: RabbitMQ, url: str) -> None:
    async with (
        client(rabbitmq) as (ours, told),
        ours.publisher(url, SCHEMA) as publisher,
        stranger(rabbitmq) as channel,
    ):
        await (await inject(publisher, 1, 2))
        for body in (b"", b"not ours", bytes(100)):
            await channel.default_exchange.publish(aio_pika.Message(body), topic_of(url))
        await (await inject(publisher, 3, 4))
        async with ours.subscriber(url, side="in", group="g") as subscriber:
            await Reader(subscriber).to(4, confirm_every=1)
        assert [type(notice) for notice in told] == [BadMessage] * 3


# failover


async def test_two_members_are_killed_and_the_subscriber_sees_the_whole_sequence(rabbitmq: RabbitMQ, url: str) -> None:
    job = (settings(rabbitmq), url, 2_000)
    async with client(rabbitmq) as (ours, told), ours.subscriber(url, SCHEMA, side="in", start="earliest") as whole:
        reader = Reader(whole)
        async with member(*job) as first:
            await has_role(first, "active")
            async with member(*job) as second:
                await has_role(second, "candidate")
                await reader.to(300)
                first.kill()
                await has_role(second, "active")
                async with member(*job) as third:
                    await has_role(third, "candidate")
                    await reader.to(1_200)
                    second.kill()
                    await has_role(third, "active")
                    await reader.to(2_000)
        await reader.nothing_more()
        assert told == []
