"""What a batch holds: the offsets before and after it, as Spark has written them down before the batch begins.

Spark hands a function a number and rows. The offsets stand in the checkpoint, which the running query knows; there is
no public way to it, so where this way is closed, batches go by their numbers alone, and a warning says so, once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from .ledger import Held

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("esp_pubsub.spark")
_LONGEST = 1_000  # characters


def held_by(batch: DataFrame, query: str, batch_id: int) -> Held | None:
    """What this batch of the query holds. None where that cannot be seen."""
    try:
        log = _offset_log(batch, query)
        before, after = _offsets(log, batch_id - 1), _offsets(log, batch_id)
    except Exception as why:  # noqa: BLE001  # py4j's errors, and Spark's, of any version
        _warn(f"{type(why).__name__}: {why}"[:200])
        return None
    return held(before, after)


def held(before: list[str], after: list[str]) -> Held:
    """Of the offsets of each source, as texts."""
    digest = hashlib.blake2b(json.dumps([before, after]).encode(), digest_size=16).hexdigest()
    return Held(digest, ", ".join(map(_place, after))[:_LONGEST])


def _offset_log(batch: DataFrame, query: str) -> Any:
    spark: Any = batch.sparkSession
    active = spark._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
    return active.get(spark._jvm.java.util.UUID.fromString(query)).offsetLog()  # noqa: SLF001


def _offsets(log: Any, batch_id: int) -> list[str]:
    """Those at the end of a batch; none in front of the first one."""
    if batch_id < 0:
        return []
    found = log.get(batch_id).get().offsets()
    each = [found.apply(at) for at in range(found.size())]
    return [one.get().json() if one.isDefined() else "" for one in each]


def _place(offset: str) -> str:
    """Topics and positions of one of ours; of others what stands there."""
    try:
        return ", ".join(f"{topic}={mark['position']}" for topic, mark in json.loads(offset)["topics"].items())
    except (ValueError, TypeError, KeyError, AttributeError):
        return offset


@cache
def _warn(why: str) -> None:
    _log.warning(
        "this Spark does not show the offsets of a batch (%s): a checkpoint that is older than the ledger's database "
        "will not be noticed", why,
    )  # fmt: skip
