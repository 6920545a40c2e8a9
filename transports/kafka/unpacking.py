"""Bounds on what a compressed batch, and all that are read at once, may become, which the client does not have.

A few kilobytes can unpack to gigabytes, and whoever may write to a topic could so end every reader. So the client's
decoders are replaced by ones that stop at LIMIT, and its loop over batches by one that passes over a batch that cannot
be unpacked, or read (a header's name that is no UTF-8): in its place stands one message that says so, which no reader
takes for a frame. What the client fetched is taken from it only up to `most` bytes at a time: the rest stays packed.
All this changes nothing for other users of the client in this process: it counts only inside `bounded`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from itertools import islice
from typing import Any

import aiokafka.consumer.fetcher
import cramjam
from aiokafka import ConsumerRecord
from aiokafka.errors import CorruptRecordException

LIMIT = 64 << 20
_bounded: ContextVar[int | None] = ContextVar("bounded", default=None)
_RECORDS = ("_crecords.default_records", "_crecords.legacy_records", "default_records", "legacy_records")


class _Unpackable(Exception):
    """A batch that is too much, or broken."""


@contextmanager
def bounded(most: int) -> Iterator[None]:
    """Read within the bounds: batches up to `most` bytes, and at least one."""
    token = _bounded.set(most)
    try:
        yield
    finally:
        _bounded.reset(token)


def _gzip(data: Any) -> bytes:
    parts, size, rest = [], 0, bytes(data)
    while rest:
        stream = zlib.decompressobj(31)
        part = stream.decompress(rest, LIMIT + 1 - size)
        parts.append(part)
        size += len(part)
        if size > LIMIT:
            raise _Unpackable(f"it unpacks to more than {LIMIT} bytes")
        if not stream.eof:
            raise _Unpackable("it is cut off")
        rest = stream.unused_data
    return b"".join(parts)


def _into(decompress: Callable[[bytes, bytearray], int]) -> Callable[[Any], bytes]:
    def decode(data: Any) -> bytes:
        room = bytearray(LIMIT)  # only what is used of it costs anything
        return bytes(memoryview(room)[: decompress(bytes(data), room)])

    return decode


def _snappy(data: Any) -> bytes:
    packed = bytes(data)
    if not packed.startswith(b"\x82SNAPPY\x00"):  # raw; else blocks of Java's, each with its length
        return _snappy_block(packed)
    parts, size, at = [], 0, 16
    while at < len(packed):
        length = int.from_bytes(packed[at : at + 4], "big")
        parts.append(_snappy_block(packed[at + 4 : at + 4 + length]))
        size, at = size + len(parts[-1]), at + 4 + length
        if size > LIMIT:
            raise _Unpackable(f"it unpacks to more than {LIMIT} bytes")
    return b"".join(parts)


def _snappy_block(packed: bytes) -> bytes:
    if cramjam.snappy.decompress_raw_len(packed) > LIMIT:
        raise _Unpackable(f"it unpacks to more than {LIMIT} bytes")
    return bytes(cramjam.snappy.decompress_raw(packed))


def _guarded(original: Callable[[Any], bytes], ours: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def decode(data: Any) -> bytes:
        if _bounded.get() is None:
            return original(data)
        try:
            return ours(data)
        except (cramjam.DecompressionError, zlib.error) as error:
            raise _Unpackable(f"it is broken, or unpacks to more than {LIMIT} bytes ({error})") from None

    return decode


class _Remembering:
    """Batches, and which of them was the last."""

    def __init__(self, records: Any) -> None:
        self._records = records
        self.has_next = records.has_next
        self.last: Any = None

    def next_batch(self) -> Any:
        self.last = None
        self.last = self._records.next_batch()
        return self.last


class _Records(aiokafka.consumer.fetcher.PartitionRecords):
    def __init__(self, tp: Any, records: Any, *more: Any) -> None:
        super().__init__(tp, _Remembering(records), *more)

    def _unpack_records(self) -> Iterator[Any]:
        while True:
            try:
                yield from super()._unpack_records()
            except CorruptRecordException:  # a sum that is wrong: it is fetched again
                raise
            except Exception as error:  # a stranger's records may break the client's decoder in many ways
                if _bounded.get() is None or self._records.last is None:
                    raise
                self.next_fetch_offset = self._records.last.next_offset
                text = f"{self._tp.topic}: a batch that cannot be unpacked: {error}".encode()
                yield ConsumerRecord(*self._tp, self.next_fetch_offset - 1, 0, 0, None, text, None, -1, len(text), ())
            else:
                return


class _Result(aiokafka.consumer.fetcher.FetchResult):
    _partition_records: Any

    def getall(self, max_records: int | None = None) -> list[Any]:
        """As the client's own, with one bound more."""
        most = _bounded.get()
        if most is None:
            return super().getall(max_records)  # type: ignore[no-any-return]
        if not self.check_assignment(self._topic_partition) or not self.has_more():
            return []
        found: list[Any] = []
        for record in self._partition_records if max_records is None else islice(self._partition_records, max_records):
            found.append(record)
            most -= record.serialized_value_size
            if most <= 0:
                break
        self._update_position()
        if most > 0 and len(found) != max_records:
            self._partition_records = None
        return found


def _install() -> None:
    ours = {
        "gzip_decode": _gzip,
        "snappy_decode": _snappy,
        "lz4_decode": _into(cramjam.lz4.decompress_into),
        "zstd_decode": _into(cramjam.zstd.decompress_into),
    }
    for name in _RECORDS:
        try:
            module = import_module(f"aiokafka.record.{name}")
        except ImportError:  # the compiled ones are not everywhere
            continue
        for decoder, decode in ours.items():
            if hasattr(module, decoder):
                setattr(module, decoder, _guarded(getattr(module, decoder), decode))
    aiokafka.consumer.fetcher.PartitionRecords = _Records
    aiokafka.consumer.fetcher.FetchResult = _Result


_install()
