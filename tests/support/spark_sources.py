"""Python data sources that do as good as nothing: what any such source costs on Spark's side (pyspark >= 4.2)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

TASK_BATCHES = 4


@dataclass
class Piece(InputPartition):
    first: int
    end: int


class Ready(DataSource):
    """Endless copies of the one record batch in `file`, `batches` of them a trigger."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return str(self.options["schema"])

    def streamReader(self, schema: Any) -> _ReadyReader:  # Spark's name
        return _ReadyReader(self.options)


class _Reader(DataSourceStreamReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)

    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}


class _ReadyReader(_Reader):
    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(int(self.options["batches"]))  # counted in batches here

    def latestOffset(self, start: Any, limit: Any) -> dict[str, int]:
        return {"at": start["at"] + limit.max_rows}

    def partitions(self, start: Any, end: Any) -> list[Piece]:
        firsts = range(start["at"], end["at"], TASK_BATCHES)
        return [Piece(first, min(first + TASK_BATCHES, end["at"])) for first in firsts]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        for _ in range(partition.first, partition.end):
            yield _batch(self.options["file"])


@lru_cache
def _batch(file: str) -> pa.RecordBatch:
    with pa.OSFile(file) as opened, pa.ipc.open_stream(opened) as stream:
        return stream.read_next_batch()


class Ticking(DataSource):
    """A row (number, due) whenever one is due: every `period` ns of CLOCK_MONOTONIC from `begun` on."""

    @classmethod
    def name(cls) -> str:
        return "ticking"

    def schema(self) -> str:
        return "id bigint, due bigint"

    def streamReader(self, schema: Any) -> _TickingReader:  # Spark's name
        return _TickingReader(self.options)


class _TickingReader(_Reader):
    def latestOffset(self, start: Any, limit: Any) -> dict[str, int]:
        return {"at": max(0, time.monotonic_ns() - self._begun) // self._period}

    def partitions(self, start: Any, end: Any) -> list[Piece]:
        return [Piece(start["at"], end["at"])]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        numbers = range(partition.first + 1, partition.end + 1)
        due = [self._begun + number * self._period for number in numbers]
        yield pa.RecordBatch.from_pydict({"id": pa.array(numbers, pa.int64()), "due": pa.array(due, pa.int64())})

    @property
    def _begun(self) -> int:
        return int(self.options["begun"])

    @property
    def _period(self) -> int:
        return int(self.options["period"])
