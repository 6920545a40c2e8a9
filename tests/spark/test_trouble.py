"""What goes wrong in a query is said in words, and what comes again comes as it was."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

import esp_pubsub as esp

from .conftest import Window


class Broken(Exception):
    """What a function of the user's raises."""


def test_a_batch_that_was_logged_and_not_committed_comes_again_with_the_same_rows(window: Window) -> None:
    window.publish(1, 2, 3, 4, rows=2)

    def breaks(batch: Any, batch_id: int) -> None:
        window.gather(batch, batch_id)
        if batch_id == 1:
            raise Broken("in the middle")

    stream = window.stream(maxRowsPerTrigger="4")
    with pytest.raises(StreamingQueryException, match="in the middle"):
        window.finish(stream, breaks)
    window.publish(5, 6)
    window.finish(window.stream(maxRowsPerTrigger="100"))
    (_, first), (_, broken), (again_id, again), (_, rest) = window.batches
    assert [row[0] for row in first] == [100, 101, 200, 201]
    assert (again_id, again) == (1, broken)
    assert [row[0] for row in rest] == [500, 600]


def refusal(window: Window, **more: str) -> str:
    """What a query says that stops at once."""
    with pytest.raises(StreamingQueryException) as caught:
        window.finish(window.stream(**more))
    return str(caught.value)


def test_a_checkpoint_of_another_url_is_refused(window: Window) -> None:
    other = "dfESP://spark:5555/p/q/other"
    window.publish(1)
    window.publish(2, url=other)
    window.finish(window.stream())
    said = refusal(window, url=other)
    assert "the checkpoint is one of spark:5555/p/q/w/O, the query reads spark:5555/p/q/other/O" in said


def test_a_checkpoint_of_the_same_url_on_another_bus_is_refused(window: Window) -> None:
    window.publish(1, 2)
    window.finish(window.stream())
    other = window.settings["dir"] / "other"
    window.settings, window.options["bus.dir"] = {"dir": other}, str(other)
    window.publish(3, 4, 5)
    assert "was purged, or deleted and made anew" in refusal(window)
    assert window.ids == [100, 200]


def test_a_topic_that_was_purged_between_two_runs_is_refused(window: Window) -> None:
    window.publish(1, 2)
    window.finish(window.stream())
    window.purge()
    window.publish(3, 4, 5)
    assert "was purged, or deleted and made anew" in refusal(window)


def test_an_offset_that_expired_is_told_from_a_purge(window: Window) -> None:
    window.settings = {**window.settings, "ring_records": 10}
    window.options["bus.ring_records"] = "10"
    window.publish(1)
    window.finish(window.stream())
    window.publish(*range(2, 50))
    window.publish(50)  # the ring lets go of what was written at once at once
    assert "were removed before they were read" in refusal(window)


def test_a_schema_that_changes_under_a_running_query_stops_it(window: Window) -> None:
    window.publish(1)
    query = window.start(window.stream())
    window.until(lambda: window.ids == [100], query)

    async def published(client: esp.Client) -> None:
        await client.bus.retain("spark:5555/p/q/w/O", "schema", None)
        async with client.publisher(window.url, "other*:string", side="out") as publisher:
            await publisher.inject([("x",)])

    window.run(published)
    with pytest.raises(
        StreamingQueryException, match=r"block 1 at position 1 .* schema is another one than the topic's"
    ):
        window.until(lambda: False, query)


def test_a_schema_that_is_not_the_topics_is_refused(window: Window) -> None:
    window.publish(1)
    with pytest.raises(Exception, match="the schema given is other"):
        window.stream(schema="other*:string")


def test_a_schema_that_nobody_knows_is_an_error_that_names_the_option(window: Window) -> None:
    with pytest.raises(Exception, match="set the option schema"):
        window.stream()


def test_a_secret_among_the_options_is_refused_and_not_shown(window: Window) -> None:
    with pytest.raises(Exception, match="cfg file") as caught:
        window.stream(**{"bus.password": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_stream_has_no_end(window: Window) -> None:
    window.publish(1)
    with pytest.raises(Exception, match="the option end is for"):
        window.finish(window.stream(end="1"))
