"""The bus directory, and that nobody else can put another one in its place."""

from __future__ import annotations

import os
from pathlib import Path

import esp_pubsub as esp


async def test_a_directory_that_is_put_in_the_place_of_an_open_one_is_not_written_to(tmp_path: Path) -> None:
    """Who owns a folder above can rename the bus directory, whoever owns that."""
    place, old = tmp_path / "bus", tmp_path / "old"
    async with esp.init("embedded", dir=place) as client:
        async with client.publisher("dfESP://h:1/p/q/one", "id*:int64") as publisher:
            await (await publisher.inject([(1,)]))
        place.rename(old)
        (place / "topics").mkdir(parents=True)
        async with (
            client.publisher("dfESP://h:1/p/q/two", "id*:int64") as publisher,
            client.subscriber("dfESP://h:1/p/q/two", side="in", start="earliest") as subscriber,
        ):
            assert await (await publisher.inject([(2,)])) == "acked"
            assert (await anext(subscriber)).rows() == [(2,)]
        assert [*(place / "topics").iterdir()] == []
        assert len([*(old / "topics").iterdir()]) == 2
    async with esp.init("embedded", dir=old) as client:
        assert len(await client.catalog().topics()) == 2


async def test_a_client_that_is_closed_leaves_no_descriptor_of_its_directory(tmp_path: Path) -> None:
    def opened() -> set[str]:
        return {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()}

    for _ in range(2):
        async with (
            esp.init("embedded", dir=tmp_path / "bus") as client,
            client.publisher("dfESP://h:1/p/q/w", "a*:int64"),
        ):
            pass
    assert not {each for each in opened() if str(tmp_path) in each}
