"""What a query did and how far it is behind, by topic, in the log `esp_pubsub.spark`.

It follows from the offsets, whose counts only grow. Of the newest one the planner counts what it has looked at, so a
lag is that of what is on the bus, up to the bound on how far it looks ahead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from .offsets import COUNTS

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import QueryProgressEvent

_log = logging.getLogger("esp_pubsub.spark")


class Progress(StreamingQueryListener):
    """`spark.streams.addListener(Progress())`. Gaps make it a warning."""

    def onQueryStarted(self, event: Any) -> None:  # Spark's names
        """Nothing to say."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """A line a topic, where something was done."""
        progress = event.progress
        for source in progress.sources:
            for topic, counts in done(source.startOffset, source.endOffset, source.latestOffset):
                level = logging.WARNING if counts["missed"] or counts["bad"] else logging.INFO
                said = ", ".join(f"{count} {name}" for name, count in counts.items())
                _log.log(level, "query %s, batch %d, %s: %s", progress.name, progress.batchId, topic, said)

    def onQueryIdle(self, event: Any) -> None:
        """Nothing to say."""

    def onQueryTerminated(self, event: Any) -> None:
        """Nothing to say."""


def done(start: str | None, end: str | None, latest: str | None) -> Iterator[tuple[str, dict[str, int]]]:
    """What happened between two of our offsets, and `rows behind`, by topic; nothing for what is not ours."""
    begun, ended, newest = _topics(start), _topics(end), _topics(latest)
    for topic, mark in ended.items():
        before = begun.get(topic, {})
        counts = {name: int(mark[name]) - int(before.get(name, 0)) for name in COUNTS}
        if any(counts.values()):
            yield topic, {**counts, "rows behind": max(0, newest.get(topic, mark)["rows"] - mark["rows"])}


def _topics(offset: str | None) -> Mapping[str, Any]:
    try:
        found = json.loads(offset or "null")
        return dict(found["topics"])
    except (ValueError, TypeError, KeyError):
        return {}
